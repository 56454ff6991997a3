"""Constant fill of a CT outside the field of view, such as the 0 of a resampler.

Air takes its place.

A network takes 0 HU around a patient for water, and finds no organ full of air. Values below air
are clipped wherever an image is resampled (`HU_LIMITS`); here are the others. The noise of a
scanner never makes an area of one value, so such an area at the border of a slice was not measured,
whatever its outline: outside a circle, outside a turned volume, or beyond the last slice.
"""

from collections import Counter

import numpy as np

from medseg.preprocess.intensity import AIR_HU, BODY_HU

# Air may be constant, where a scanner or a program clips it; what is filled in is denser than any
# air.
DENSEST_AIR_HU = -950
# The lowest values of an image may be its air, clipped to a narrower range.
CLIP_REACH_HU = 25
# Share of the pairs of neighbours along the border of a slice that hold one value: measured tissue
# stays below 0.03, and a gap at one of four sides has 0.25.
BORDER_SHARE = 0.2
# Share of neighbours in tissue that are equal: in scans 0.02 to 0.3, in an image without noise
# nearly 1. Such an image may show tissue of one value at its border.
MAX_EQUAL_SHARE = 0.5
NOISE_SLICES = 16
MIN_PAIRS = 1000
# Smaller pieces at the border may be voxels of tissue that have the value by chance.
MIN_PIECE = 20


def find_fill(image_hu: np.ndarray) -> float | None:
    """Find the value that was filled in outside the field of view.

    Args:
        image_hu: CT (D, H, W) in HU, in any order of its axes, without NaN.

    Returns:
        The value; None where there is none, or where the image lacks the noise that tells it from
        tissue.
    """
    border_values = [_border_value(plane) for plane in image_hu]
    values = Counter(value for value in border_values if value is not None)
    if not values:
        return None
    fill = values.most_common(1)[0][0]
    # Of the values that are not padding below air.
    lowest = min(
        float(np.min(plane, where=plane > AIR_HU - CLIP_REACH_HU, initial=fill))
        for plane in image_hu
    )
    if fill <= lowest + CLIP_REACH_HU or not _is_noisy(image_hu, fill):
        return None
    return fill


def replace_fill(image_hu: np.ndarray, fill: float) -> float:
    """Replace a fill by air, in place, where it reaches the border of its slice.

    Args:
        image_hu: CT (D, H, W) in HU.
        fill: Its fill, see `find_fill`.

    Returns:
        Share of the voxels that were replaced.
    """
    from scipy import ndimage  # here, so that opening the cache does not load it

    num_voxels = 0
    for plane in image_hu:
        pieces, num_pieces = ndimage.label(plane == fill)
        if not num_pieces:
            continue
        is_outside = np.bincount(pieces.ravel(), minlength=num_pieces + 1) >= MIN_PIECE
        at_border = np.zeros(num_pieces + 1, dtype=bool)
        at_border[_border(pieces)] = True
        at_border[0] = False
        outside = (is_outside & at_border)[pieces]
        plane[outside] = AIR_HU
        num_voxels += int(np.count_nonzero(outside))
    return num_voxels / image_hu.size


def _border(plane: np.ndarray) -> np.ndarray:
    """List the values of a plane along its four sides, one after the other."""
    return np.concatenate([plane[0], plane[:, -1], plane[-1], plane[:, 0]])


def _border_value(plane: np.ndarray) -> float | None:
    """Find the value denser than air that runs along a part of the border of a plane.

    Returns:
        The value; None where there is none.
    """
    border = _border(plane)
    runs = border[1:][border[1:] == border[:-1]]
    runs = runs[runs > DENSEST_AIR_HU]
    if len(runs) < BORDER_SHARE * len(border):
        return None
    values, counts = np.unique(runs, return_counts=True)
    most = int(counts.argmax())
    if counts[most] < BORDER_SHARE * len(border):
        return None
    return float(values[most])


def _is_noisy(image_hu: np.ndarray, fill: float) -> bool:
    """Whether neighbours in the tissue of an image differ, in a sample of its slices."""
    num_equal = num_pairs = 0
    for plane in image_hu[:: max(1, len(image_hu) // NOISE_SLICES)]:
        is_tissue = (plane > BODY_HU) & (plane != fill)
        is_pair = is_tissue[:, 1:] & is_tissue[:, :-1]
        is_equal = plane[:, 1:] == plane[:, :-1]
        num_pairs += int(np.count_nonzero(is_pair))
        num_equal += int(np.count_nonzero(is_equal & is_pair))
    return num_pairs >= MIN_PAIRS and num_equal <= MAX_EQUAL_SHARE * num_pairs
