"""Profile of a CT: the areas of its tissues along the body.

Profiles recognise a cropped, shortened or resampled copy of a scan. Air around the patient does not
count, so a crop beside the body changes nothing; a copy that lacks slices is found by moving the
profiles along each other.
"""

import math
from typing import NamedTuple

import numpy as np

STEP_MM = 5.0  # distance between the steps of a profile, from feet to head
# Fat, soft tissue with blood and contrast agent, bone; low ≤ value < high. 3072 lies above the
# largest value of a 12-bit CT.
BANDS_HU = ((-200, -20), (-20, 150), (150, 3072))
MIN_STEPS = 20  # shorter scans of different patients often look alike
# Share of the longer profile over which two profiles must overlap.
OVERLAP = 0.8
# Largest `profile_distance` of copies. Measured on 13 scans: at most 0.04 between a scan and its
# copy (cropped by two voxels a side, without a tenth of the slices, resampled, or with noise of 8
# HU), at least 0.18 between scans of different patients.
NEAR_PROFILE = 0.06
# Largest relative difference of the medians of a band in copies; comparing medians first saves most
# of the time.
NEAR_MEDIAN = 0.15

# For each step along the body, the area of each band in mm².
Profile = tuple[tuple[int, ...], ...]


class Areas(NamedTuple):
    """A profile prepared for comparisons, once for each scan.

    Attributes:
        steps_mm2: Area of each band at each step, (steps, bands).
        medians_mm2: Median of each band over the steps.
    """

    steps_mm2: np.ndarray
    medians_mm2: np.ndarray


def make_profile(image_hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> Profile:
    """Measure the areas of the tissues in steps along the body.

    Args:
        image_hu: Oriented CT (D, H, W) in HU.
        spacing_mm: Its spacing, (z, y, x).

    Returns:
        For each step the area of each band in mm²; empty for a scan of less than `MIN_STEPS` steps.
    """
    spacing_z_mm, spacing_y_mm, spacing_x_mm = spacing_mm
    num_slices = len(image_hu)
    num_steps = int(num_slices * spacing_z_mm / STEP_MM)
    if num_steps < MIN_STEPS:
        return ()
    counts = np.empty((num_slices, len(BANDS_HU)))
    for index, plane in enumerate(image_hu):
        for band, (low, high) in enumerate(BANDS_HU):
            counts[index, band] = np.count_nonzero((plane >= low) & (plane < high))
    # Middle of each slice and of each step, from the lower end of the scan.
    slices_mm = (np.arange(num_slices) + 0.5) * spacing_z_mm
    steps_mm = (np.arange(num_steps) + 0.5) * STEP_MM
    pixel_mm2 = spacing_y_mm * spacing_x_mm
    areas_mm2 = [
        np.interp(steps_mm, slices_mm, counts_of_band) * pixel_mm2 for counts_of_band in counts.T
    ]
    whole_mm2 = np.rint(np.transpose(areas_mm2)).astype(int)  # (steps, bands)
    return tuple(map(tuple, whole_mm2.tolist()))


def areas_of(profile: Profile) -> Areas | None:
    """Prepare a profile for comparisons; None for an empty one."""
    if not profile:
        return None
    steps_mm2 = np.array(profile, dtype=np.float64)
    return Areas(steps_mm2, np.median(steps_mm2, axis=0))


def profile_distance(first_areas: Areas, second_areas: Areas) -> float:
    """Measure how far two profiles are apart where they fit best.

    Returns:
        Root mean square difference of the band that differs most, relative to the root mean square
        of its areas; infinite where the profiles overlap too little or are clearly different.
    """
    first = first_areas.steps_mm2
    second = second_areas.steps_mm2
    longer_length = max(len(first), len(second))
    min_overlap = max(MIN_STEPS, math.ceil(OVERLAP * longer_length))
    if min(len(first), len(second)) < min_overlap:
        return math.inf
    differences_mm2 = np.abs(first_areas.medians_mm2 - second_areas.medians_mm2)
    larger_medians_mm2 = np.maximum(first_areas.medians_mm2, second_areas.medians_mm2)
    if (differences_mm2 > NEAR_MEDIAN * larger_medians_mm2).any():
        return math.inf
    distances = []
    # All shifts with enough overlap. The second profile begins `shift` steps after the first, or
    # before it where the shift is negative.
    for shift in range(min_overlap - len(second), len(first) - min_overlap + 1):
        first_part = first[max(0, shift) :]
        second_part = second[max(0, -shift) :]
        num_steps = min(len(first_part), len(second_part))
        distances.append(_difference(first_part[:num_steps], second_part[:num_steps]))
    # `distances` is not empty: neither profile is shorter than the minimum overlap.
    return min(distances)


def _difference(first_mm2: np.ndarray, second_mm2: np.ndarray) -> float:
    """Compute the relative difference of the band that differs most, see `profile_distance`.

    Args:
        first_mm2: Areas, (steps, bands).
        second_mm2: Areas of the same shape.
    """
    # Root mean squares over the steps, one for each band.
    differences_mm2 = np.sqrt(((first_mm2 - second_mm2) ** 2).mean(axis=0))
    first_areas_mm2 = np.sqrt((first_mm2**2).mean(axis=0))
    second_areas_mm2 = np.sqrt((second_mm2**2).mean(axis=0))
    mean_areas_mm2 = (first_areas_mm2 + second_areas_mm2) / 2
    # At least 1 mm²: a band may be empty.
    return float((differences_mm2 / np.maximum(1.0, mean_areas_mm2)).max())
