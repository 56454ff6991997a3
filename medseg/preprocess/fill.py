"""Replacement of a constant fill value outside the field of view of a CT, such as 0 HU, by air.

Resampling programs often fill in 0 HU. A network sees this as water around the patient, and then
misses air-filled organs. Fills below air are not handled here: they are clipped wherever an image
is resampled (`HU_LIMITS`). With a scanner's noise no measured area has a single value. An area of a
single value at the border of a slice is therefore a fill, whatever its outline: outside a circle,
outside a rotated volume, or beyond the last slice.
"""

from collections import Counter

import numpy as np

from medseg.preprocess.intensity import AIR_HU, BODY_HU

# Air may be constant too, where a scanner or a program clips it. Only values above this, denser
# than any air, count as fill.
DENSEST_AIR_HU = -950
# Values up to this many HU above the lowest value of an image may be its air, clipped to a narrower
# range.
CLIP_REACH_HU = 25
# Minimum share of the pairs of neighbours along the border of a slice that have the value of the
# fill. For measured tissue the share is below 0.03; for a fill along one of four equal sides it is
# 0.25.
MIN_BORDER_SHARE = 0.2
# The same share of a single side, for a fill along a short side of a slice that is not square.
MIN_SIDE_SHARE = 0.8
# An image is searched for a fill only if at most this share of neighbouring tissue voxels are
# equal. Scans have 0.02 to 0.3, an image without noise nearly 1. Without noise, tissue at the
# border may be constant too.
MAX_EQUAL_SHARE = 0.5
# Noise is judged in at least this many slices, evenly spread; in all if the image has fewer.
NOISE_SLICES = 16
# Minimum number of pairs of neighbours in tissue to judge the noise.
MIN_PAIRS = 1000
# Pixels of the smallest connected piece that is replaced. Smaller ones may be tissue that has the
# value by chance. For the same reason a side needs as many equal neighbours as one of this length.
MIN_PIECE = 20


def find_fill(image_hu: np.ndarray) -> float | None:
    """Find the value that was filled in outside the field of view.

    Args:
        image_hu: CT (D, H, W) in HU, in any order of its axes, without NaN.

    Returns:
        The value in HU; None if there is no fill, or if the image has too little noise to
        distinguish a fill from tissue.
    """
    border_values = [_border_value(plane) for plane in image_hu]
    slice_counts = Counter(value for value in border_values if value is not None)
    if not slice_counts:
        return None
    [(fill, _)] = slice_counts.most_common(1)
    # Start of the running minimum of the image, which does not count padding below air.
    lowest = fill
    for plane in image_hu:
        is_measured = plane > AIR_HU - CLIP_REACH_HU
        lowest = float(np.min(plane, where=is_measured, initial=lowest))
    may_be_air = fill <= lowest + CLIP_REACH_HU
    if may_be_air or not _is_noisy(image_hu, fill):
        return None
    return fill


def replace_fill(image_hu: np.ndarray, fill: float) -> float:
    """Replace the pieces of a fill that touch the border of their slice by air, in place.

    Args:
        image_hu: CT (D, H, W) in HU.
        fill: Value of its fill in HU, from `find_fill`.

    Returns:
        Share of the voxels that were replaced.
    """
    from scipy import ndimage  # only here: opening the cache need not import SciPy

    num_replaced = 0
    for plane in image_hu:
        pieces, num_pieces = ndimage.label(plane == fill)  # piece number of each pixel; 0: none
        if not num_pieces:
            continue
        # The next two arrays are indexed by piece number; number 0 is everything that is not fill.
        is_large = np.bincount(pieces.ravel(), minlength=num_pieces + 1) >= MIN_PIECE
        is_at_border = np.zeros(num_pieces + 1, dtype=bool)
        is_at_border[np.concatenate(_sides(pieces))] = True
        is_at_border[0] = False
        is_replaced = (is_large & is_at_border)[pieces]  # (H, W)
        plane[is_replaced] = AIR_HU
        num_replaced += int(np.count_nonzero(is_replaced))
    return num_replaced / image_hu.size


def _sides(plane: np.ndarray) -> tuple[np.ndarray, ...]:
    """Cut the four sides out of a plane (H, W): first and last row, first and last column."""
    return plane[0], plane[-1], plane[:, 0], plane[:, -1]


def _border_value(plane: np.ndarray) -> float | None:
    """Find the most frequent value of equal neighbours along the border of a plane or one side.

    Returns:
        The value in HU; None if no value denser than air has `MIN_BORDER_SHARE` of the pairs of
        neighbours along the border, or `MIN_SIDE_SHARE` of those along a side.
    """
    sides = _sides(plane)
    value = _repeated_value(np.concatenate(sides), MIN_BORDER_SHARE)
    for side in sides:
        if value is None:
            value = _repeated_value(side, MIN_SIDE_SHARE)
    return value


def _repeated_value(values_hu: np.ndarray, min_share: float) -> float | None:
    """Find the most frequent value of equal neighbours; None if it has too few of the pairs.

    Args:
        values_hu: Values along a part of the border, (n,).
        min_share: Minimum share of the pairs; of less than `MIN_PIECE` pairs, of this number.
    """
    repeated = values_hu[1:][values_hu[1:] == values_hu[:-1]]
    repeated = repeated[repeated > DENSEST_AIR_HU]
    min_count = min_share * max(len(values_hu), MIN_PIECE)
    # Most slices end here, before the sort of `unique`.
    if len(repeated) < min_count:
        return None
    unique_values, counts = np.unique(repeated, return_counts=True)
    largest = int(counts.argmax())
    if counts[largest] < min_count:
        return None
    return float(unique_values[largest])


def _is_noisy(image_hu: np.ndarray, fill: float) -> bool:
    """Whether most neighbours in the tissue of an image differ, in a sample of its slices.

    False also if the sample has fewer than `MIN_PAIRS` pairs of neighbours.
    """
    num_equal = 0
    num_pairs = 0
    step = max(1, len(image_hu) // NOISE_SLICES)
    for plane in image_hu[::step]:
        is_tissue = (plane > BODY_HU) & (plane != fill)
        # Neighbours along x.
        is_pair = is_tissue[:, 1:] & is_tissue[:, :-1]
        is_equal = plane[:, 1:] == plane[:, :-1]
        num_pairs += int(np.count_nonzero(is_pair))
        num_equal += int(np.count_nonzero(is_equal & is_pair))
    return num_pairs >= MIN_PAIRS and num_equal <= MAX_EQUAL_SHARE * num_pairs
