"""Voxel spacings: the typical one of a data set, and the one of a training sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from medseg.geometry.grid_rule import clamp_spacing

AVERAGES: dict[str, Callable[..., np.ndarray]] = {"median": np.median, "mean": np.mean}
"""Averages over the spacings of the scans, axis by axis."""

# An axis that is coarser than the finest by more than this ratio takes a low percentile of its own spacings.
MAX_RATIO = 3.0
COARSE_PERCENTILE = 10.0


class ScanSpacings(NamedTuple):
    """Spacings of the training scans.

    Attributes:
        spacings_mm: Spacing of each scan as it was made, (z, y, x).
        shares: How often each scan is drawn, > 0, sum 1.
    """

    spacings_mm: Sequence[tuple[float, float, float]]
    shares: Sequence[float]


def typical_spacing_mm(spacings_mm: Sequence[tuple[float, float, float]], average: str = "median") -> tuple[float, float, float]:
    """Average each axis; a coarse axis gets its 10th percentile, but none finer than the next coarsest axis.

    At the average of thick slices, half of the scans would lose what they show between them (Isensee et al. 2021,
    supplement: "target spacing").

    Args:
        spacings_mm: Spacing of each oriented scan, (z, y, x); at least one.
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


def draw_spacing_mm(
    rng: np.random.Generator, range_mm: tuple[float, float], scans: ScanSpacings | None = None
) -> tuple[float, float, float]:
    """Draw the spacing of a training sample.

    Without scans, the logarithms of the spacing along z and of that in plane (one for y and x) are uniform over the range: 1 to 2 mm
    is as frequent as 2 to 4 mm. With scans, the spacing of one of them is drawn and each axis clipped to the range: rare coarse scans
    keep their frequency, and thick slices keep the pixels that they come with.

    Args:
        rng: Generator of the sample.
        range_mm: Least and largest spacing of an axis.
        scans: Scans to draw from, or None.

    Returns:
        Spacing (z, y, x).
    """
    if scans is not None:
        return clamp_spacing(range_mm, scans.spacings_mm[int(rng.choice(len(scans.shares), p=scans.shares))])
    low, high = (math.log(mm) for mm in range_mm)
    z, in_plane = (math.exp(place) for place in rng.uniform(low, high, size=2))
    return z, in_plane, in_plane
