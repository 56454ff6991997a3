"""Signed distances in mm (negative inside) of the simple bodies that anatomy is built of.

Coordinates broadcast: z (D, 1, 1), y (1, H, 1), x (1, 1, W), float32, canonical mm. Radial distances are exact along the ray
from the centre and grow past the true distance where a body is flat; the layers drawn with them are a few mm thick.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

Field = NDArray[np.floating[Any]]
"""Distances or HU; float32 wherever it is large."""


def profile(z_mm: Field, knots_z_mm: Sequence[float], values_mm: Sequence[float]) -> Field:
    """Interpolate a level curve monotonically between knots; constant beyond the ends.

    Args:
        z_mm: Levels in mm, any shape.
        knots_z_mm: Levels of the knots, strictly falling (as anatomy is listed: head to feet).
        values_mm: One value per knot.

    Returns:
        Values of the shape of `z_mm`.
    """
    knots = np.asarray(knots_z_mm, dtype=np.float64)[::-1]
    curve = PchipInterpolator(knots, np.asarray(values_mm, dtype=np.float64)[::-1])
    return curve(np.clip(z_mm, knots[0], knots[-1])).astype(np.float32)


def superellipse(u: Field, v: Field, half_u: Field | float, half_v: Field | float, power: float) -> tuple[Field, Field]:
    """Measure a superellipse |u/a|^n + |v/b|^n = 1.

    Args:
        u: First coordinate relative to the centre, mm.
        v: Second coordinate relative to the centre, mm.
        half_u: Half axis along u, mm, > 0.
        half_v: Half axis along v, mm, > 0.
        power: Exponent n: 2 is an ellipse, 3 or more tends to a box.

    Returns:
        Radial signed distance in mm, and the level (0 in the centre, 1 on the outline).
    """
    a = np.abs(u) / half_u
    b = np.abs(v) / half_v
    if power == 2:
        level = np.sqrt(a * a + b * b)
    elif power == 3:
        level = np.cbrt(a * a * a + b * b * b)
    else:
        level = (a**power + b**power) ** np.float32(1 / power)
    level = np.maximum(level, np.float32(1e-3))
    reach = np.sqrt(u * u + v * v) + np.float32(1e-2)
    return reach * (1 - 1 / level), level


def ellipsoid(
    x: Field,
    y: Field,
    z: Field,
    centre_xyz_mm: ArrayLike,
    radii_xyz_mm: ArrayLike,
    axes: NDArray[np.float64] | None = None,
) -> Field:
    """Measure an ellipsoid.

    Args:
        x: World x in mm.
        y: World y in mm.
        z: World z in mm.
        centre_xyz_mm: Centre.
        radii_xyz_mm: Half axes.
        axes: Rows are the unit vectors of the half axes; None for the coordinate axes.

    Returns:
        Approximate signed distance in mm: level / |gradient|, right to second order at the surface.
    """
    centre, radii = np.asarray(centre_xyz_mm, dtype=np.float32), np.asarray(radii_xyz_mm, dtype=np.float32)
    dx, dy, dz = x - centre[0], y - centre[1], z - centre[2]
    level2: Any = np.float32(0)
    slope2: Any = np.float32(1e-6)
    for i in range(3):
        if axes is None:
            along = (dx, dy, dz)[i]
        else:
            along = dx * np.float32(axes[i, 0]) + dy * np.float32(axes[i, 1]) + dz * np.float32(axes[i, 2])
        scaled = along / radii[i]
        level2 = level2 + scaled * scaled
        scaled = scaled / radii[i]
        slope2 = slope2 + scaled * scaled
    level = np.sqrt(level2)
    return np.asarray(level * (level - 1) / np.sqrt(slope2), dtype=np.float32)


def union(first: Field, second: Field, blend_mm: float) -> Field:
    """Unite two bodies with a fillet of about `blend_mm` (polynomial smooth minimum)."""
    gap = np.maximum(np.float32(blend_mm) - np.abs(first - second), 0)
    return np.minimum(first, second) - gap * gap * np.float32(0.25 / blend_mm)


def intersection(first: Field, second: Field, blend_mm: float) -> Field:
    """Intersect two bodies with a rounding of about `blend_mm` at the edge."""
    return -union(-first, -second, blend_mm)


def cover(distance_mm: Field, width_mm: float) -> Field:
    """Turn a signed distance into the covered share of a voxel, 0 to 1, over an edge `width_mm` wide."""
    return np.clip(np.float32(0.5) - distance_mm * np.float32(1 / width_mm), 0, 1)


def paint(image_hu: Field, value_hu: Field | np.floating[Any] | float, share: Field) -> None:
    """Mix a tissue into an image in place: `share` of it, the rest as it was."""
    image_hu += (value_hu - image_hu) * share
