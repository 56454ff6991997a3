"""At which spacing a training sample is made, where that is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medseg.geometry.grid_rule import brought_into


@dataclass(frozen=True)
class ScanSpacings:
    """Spacings of the scans that are trained on, and how often each scan is.

    Attributes:
        spacings_mm: Spacing of each scan as it was made, (z, y, x).
        shares: How often it is drawn, > 0, sum 1.
    """

    spacings_mm: Sequence[tuple[float, float, float]]
    shares: Sequence[float]


def draw_spacing_mm(
    rng: np.random.Generator, range_mm: tuple[float, float], scans: ScanSpacings | None = None
) -> tuple[float, float, float]:
    """Draw the spacing of a sample.

    Evenly: the logarithm of the spacing along z and that in plane, one for y and x, are uniform over the range, so that 1 to 2 mm are met
    as often as 2 to 4 mm. By scans: the spacing of one of them, each axis brought into the range, so that rare coarse scans are met as
    often as they come, and thick slices together with the pixels that they come with.

    Args:
        rng: Generator of the sample.
        range_mm: Least and largest spacing of an axis.
        scans: What to draw from; None draws evenly.

    Returns:
        Spacing (z, y, x).
    """
    if scans is not None:
        return brought_into(range_mm, scans.spacings_mm[int(rng.choice(len(scans.shares), p=scans.shares))])
    low, high = (math.log(mm) for mm in range_mm)
    z, in_plane = (math.exp(place) for place in rng.uniform(low, high, size=2))
    return z, in_plane, in_plane
