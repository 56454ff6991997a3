"""Which spacing suits a set of scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# How the spacings of the scans are brought to one, axis by axis.
AVERAGES: dict[str, Callable[..., np.ndarray]] = {"median": np.median, "mean": np.mean}
# An axis that is coarser than the finest by more than this gets the tail of its own spacings.
MAX_RATIO = 3.0
COARSE_PERCENTILE = 10.0


def typical_spacing_mm(spacings_mm: Sequence[tuple[float, float, float]], average: str = "median") -> tuple[float, float, float]:
    """Average each axis; a coarse axis gets its 10th percentile, but none finer than the next coarsest axis.

    With the average of thick slices half of the scans would lose what they hold between them (Isensee et al. 2021,
    supplement: "target spacing").

    Args:
        spacings_mm: Spacing of each oriented scan, (z, y, x); one at least.
        average: Key of `AVERAGES`.

    Returns:
        Spacing (z, y, x), in whole micrometres.

    Example:
        >>> typical_spacing_mm([(1.0, 0.7, 0.7), (5.0, 0.8, 0.8), (5.0, 0.9, 0.9)])
        (1.8, 0.8, 0.8)
        >>> typical_spacing_mm([(1.0, 0.7, 0.7), (2.0, 0.8, 0.8), (2.4, 0.9, 0.9)], "mean")
        (1.8, 0.8, 0.8)
    """
    values = np.asarray(spacings_mm, dtype=np.float64)
    target = AVERAGES[average](values, axis=0)
    coarsest = int(target.argmax())
    if target[coarsest] > MAX_RATIO * target.min():
        others = np.delete(target, coarsest)
        target[coarsest] = max(np.percentile(values[:, coarsest], COARSE_PERCENTILE), others.max())
    z, y, x = (round(float(mm), 3) for mm in target)
    return z, y, x
