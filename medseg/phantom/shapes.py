"""Signed distances in mm (negative inside) of the simple bodies that anatomy is built of, and painting with them.

Coordinates broadcast: z (D, 1, 1), y (1, H, 1), x (1, 1, W), float32, canonical mm. Radial distances are exact along the ray
from the centre, and larger than the true distance where a body is flat; the layers drawn with them are a few mm thick.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

Field = NDArray[np.floating[Any]]
"""Distances or HU; float32 wherever it is large."""


def profile(z_mm: Field, knots_z_mm: Sequence[float], values_mm: Sequence[float]) -> Field:
    """Interpolate a curve over the levels monotonically between knots; constant beyond the ends.

    Args:
        z_mm: Levels in mm, any shape.
        knots_z_mm: Levels of the knots, strictly falling: from head to feet.
        values_mm: One value per knot.

    Returns:
        Values of the shape of `z_mm`.
    """
    curve = PchipInterpolator(np.array(knots_z_mm[::-1], dtype=np.float64), np.array(values_mm[::-1], dtype=np.float64))
    return curve(np.clip(z_mm, float(knots_z_mm[-1]), float(knots_z_mm[0]))).astype(np.float32)


def radial_distance(u: Field, v: Field, level: Field) -> Field:
    """Distance along the ray from the centre, in mm, of a point (u, v) at a level (0 in the centre, 1 on the outline, > 0)."""
    return (np.sqrt(u * u + v * v) + np.float32(1e-2)) * (1 - 1 / level)


def superellipse(u: Field, v: Field, half_u: Field | float, half_v: Field | float, power: float) -> Field:
    """Measure a superellipse |u/a|^n + |v/b|^n = 1.

    Args:
        u: First coordinate relative to the centre, mm.
        v: Second coordinate relative to the centre, mm.
        half_u: Half axis along u, mm, > 0.
        half_v: Half axis along v, mm, > 0.
        power: Exponent n: 2 is an ellipse, a large one tends to a box.

    Returns:
        Radial signed distance in mm.
    """
    a, b = np.abs(u) / half_u, np.abs(v) / half_v
    level = np.sqrt(a * a + b * b) if power == 2 else (a**power + b**power) ** np.float32(1 / power)
    return radial_distance(u, v, np.maximum(level, np.float32(1e-3)))


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
        Approximate signed distance in mm: level / |gradient|, correct to second order at the surface.
    """
    centre, radii = np.asarray(centre_xyz_mm, dtype=np.float32), np.asarray(radii_xyz_mm, dtype=np.float32)
    along = [x - centre[0], y - centre[1], z - centre[2]]
    if axes is not None:
        dx, dy, dz = along
        along = [dx * a + dy * b + dz * c for a, b, c in axes.astype(np.float32)]
    scaled = [one / radius for one, radius in zip(along, radii, strict=True)]
    slopes = [one / radius for one, radius in zip(scaled, radii, strict=True)]
    level = np.sqrt(scaled[0] * scaled[0] + scaled[1] * scaled[1] + scaled[2] * scaled[2])
    slope2 = np.float32(1e-6) + slopes[0] * slopes[0] + slopes[1] * slopes[1] + slopes[2] * slopes[2]
    return np.asarray(level * (level - 1) / np.sqrt(slope2), dtype=np.float32)


def union(first: Field, second: Field, blend_mm: float) -> Field:
    """Unite two bodies with a fillet of about `blend_mm` (polynomial smooth minimum)."""
    gap = np.maximum(np.float32(blend_mm) - np.abs(first - second), 0)
    return np.minimum(first, second) - gap * gap * np.float32(0.25 / blend_mm)


def intersection(first: Field, second: Field, blend_mm: float) -> Field:
    """Intersect two bodies with a rounding of about `blend_mm` at the edge."""
    return -union(-first, -second, blend_mm)


def maximum(*fields: Field) -> Field:
    """Intersect bodies with sharp edges: the largest distance at each point."""
    return functools.reduce(np.maximum, fields)


def cover(distance_mm: Field, width_mm: float) -> Field:
    """Turn a signed distance into the covered share of a voxel, 0 to 1, over an edge `width_mm` wide."""
    return np.clip(np.float32(0.5) - distance_mm * np.float32(1 / width_mm), 0, 1)


def paint(image_hu: Field, *layers: tuple[Field | float, Field]) -> None:
    """Mix tissues into an image in place, one after the other.

    Args:
        image_hu: Image in HU.
        layers: Value of each tissue in HU, and its share of each voxel.
    """
    for value_hu, share in layers:
        image_hu += (value_hu - image_hu) * share
