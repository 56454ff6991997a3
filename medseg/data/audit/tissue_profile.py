"""Profile of a CT: the areas of its tissues along the body.

It recognises a cropped, shortened or resampled copy.
Air around the patient does not count, so a crop beside the body changes nothing; a copy that lacks
slices is found by moving the profiles along each other.
"""

import math
from typing import NamedTuple

import numpy as np

STEP_MM = 5.0
# Fat, soft tissue with blood and contrast agent, bone.
BANDS_HU = ((-200, -20), (-20, 150), (150, 3072))
MIN_STEPS = 20
# Part of the longer profile that both must have.
OVERLAP = 0.8
# Measured on 13 scans: cropped by two voxels a side, short of a tenth of the slices, resampled or
# noisy (8 HU) 0.04 at most, scans of different patients 0.18 and more.
NEAR_PROFILE = 0.06
# Copies agree in the median of a band within this; comparing medians first saves most of the time.
NEAR_MEDIAN = 0.15

Profile = tuple[tuple[int, ...], ...]


class Areas(NamedTuple):
    """A profile as it is compared, made once for each scan.

    Attributes:
        steps_mm2: Areas, (steps, bands).
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
    step_z_mm, step_y_mm, step_x_mm = spacing_mm
    num_steps = int(len(image_hu) * step_z_mm / STEP_MM)
    if num_steps < MIN_STEPS:
        return ()
    counts = np.empty((len(image_hu), len(BANDS_HU)))
    for index, plane in enumerate(image_hu):
        counts[index] = [
            np.count_nonzero((plane >= low) & (plane < high)) for low, high in BANDS_HU
        ]
    places_mm = (np.arange(len(image_hu)) + 0.5) * step_z_mm
    steps_mm = (np.arange(num_steps) + 0.5) * STEP_MM
    areas_mm2 = [
        np.interp(steps_mm, places_mm, band) * (step_y_mm * step_x_mm) for band in counts.T
    ]
    return tuple(map(tuple, np.rint(np.transpose(areas_mm2)).astype(int).tolist()))


def areas_of(profile: Profile) -> Areas | None:
    """Prepare a profile for comparisons; None for an empty one."""
    if not profile:
        return None
    steps_mm2 = np.array(profile, dtype=np.float64)
    return Areas(steps_mm2, np.median(steps_mm2, axis=0))


def profile_distance(first_areas: Areas, second_areas: Areas) -> float:
    """Measure how far two profiles are apart where they fit best.

    Returns:
        Root mean square difference of the band that differs most, relative to its areas; infinite
        where they overlap too little or are clearly different.
    """
    first = first_areas.steps_mm2
    second = second_areas.steps_mm2
    longer = max(len(first), len(second))
    least = max(MIN_STEPS, math.ceil(OVERLAP * longer))
    if min(len(first), len(second)) < least:
        return math.inf
    medians = first_areas.medians_mm2, second_areas.medians_mm2
    if (np.abs(medians[0] - medians[1]) > NEAR_MEDIAN * np.maximum(*medians)).any():
        return math.inf
    distances = []
    for shift in range(least - len(second), len(first) - least + 1):
        # The second profile begins `shift` steps after the first, or before it.
        part_of_first = first[max(0, shift) :]
        part_of_second = second[max(0, -shift) :]
        num_steps = min(len(part_of_first), len(part_of_second))
        if num_steps >= least:
            distances.append(_difference(part_of_first[:num_steps], part_of_second[:num_steps]))
    return min(distances)


def _difference(first: np.ndarray, second: np.ndarray) -> float:
    """Largest relative difference of a band; areas (steps, bands)."""
    sizes = (np.sqrt((first**2).mean(axis=0)) + np.sqrt((second**2).mean(axis=0))) / 2
    differences = np.sqrt(((first - second) ** 2).mean(axis=0))
    return float((differences / np.maximum(1.0, sizes)).max())
