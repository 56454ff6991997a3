"""Which spacing suits a set of scans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# An axis that is coarser than the finest by more than this gets the tail of its own spacings.
MAX_RATIO = 3.0
COARSE_PERCENTILE = 10.0


def median_spacing_mm(spacings_mm: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Take the median of each axis; a coarse axis gets its 10th percentile, but none finer than the next coarsest axis.

    With the median of thick slices half of the scans would lose what they hold between them (Isensee et al. 2021,
    supplement: "target spacing").

    Args:
        spacings_mm: Spacing of each oriented scan, (z, y, x); one at least.

    Returns:
        Spacing (z, y, x), in whole micrometres.

    Example:
        >>> median_spacing_mm([(1.0, 0.7, 0.7), (5.0, 0.8, 0.8), (5.0, 0.9, 0.9)])
        (1.8, 0.8, 0.8)
    """
    values = np.asarray(spacings_mm, dtype=np.float64)
    target = np.median(values, axis=0)
    coarsest = int(target.argmax())
    if target[coarsest] > MAX_RATIO * target.min():
        others = np.delete(target, coarsest)
        target[coarsest] = max(np.percentile(values[:, coarsest], COARSE_PERCENTILE), others.max())
    z, y, x = (round(float(mm), 3) for mm in target)
    return z, y, x
