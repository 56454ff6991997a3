"""Shapes of the anatomy: signed distances in mm (negative inside), the lattice that they are drawn on, and painting.

Coordinates broadcast: z (D, 1, 1), y (1, H, 1), x (1, 1, W), float32, canonical mm. Radial
distances are exact along the ray from the centre, and larger than the true distance where a body is
flat. The error is small, because the layers drawn with these distances are only a few mm thick.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

Field = NDArray[np.floating[Any]]
"""Distances or HU; float32 wherever it is large."""

Fields = dict[str, Field]
"""Fields of one lattice, or of one slab of it, by name."""


def profile(z_mm: Field, knots_z_mm: Sequence[float], values_mm: Sequence[float]) -> Field:
    """Interpolate a curve over the levels monotonically between knots; constant beyond the ends.

    Args:
        z_mm: Levels in mm, any shape.
        knots_z_mm: Levels of the knots, strictly falling: from head to feet.
        values_mm: One value per knot.

    Returns:
        Values of the shape of `z_mm`.
    """
    curve = PchipInterpolator(
        np.array(knots_z_mm[::-1], dtype=np.float64), np.array(values_mm[::-1], dtype=np.float64)
    )
    return curve(np.clip(z_mm, float(knots_z_mm[-1]), float(knots_z_mm[0]))).astype(np.float32)


def radial_distance(u: Field, v: Field, level: Field) -> Field:
    """Distance along the ray from the centre, in mm, of a point (u, v) at a level (0 in the centre, 1 on the outline, > 0)."""
    return (np.sqrt(u * u + v * v) + np.float32(1e-2)) * (1 - 1 / level)


def superellipse(
    u: Field, v: Field, half_u: Field | float, half_v: Field | float, power: float
) -> Field:
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
        Approximate signed distance in mm: level / |gradient|, correct to second order at the
        surface.
    """
    centre, radii = (
        np.asarray(centre_xyz_mm, dtype=np.float32),
        np.asarray(radii_xyz_mm, dtype=np.float32),
    )
    dx, dy, dz = x - centre[0], y - centre[1], z - centre[2]
    if axes is not None:
        dx, dy, dz = (dx * a + dy * b + dz * c for a, b, c in axes.astype(np.float32))
    u, v, w = dx / radii[0], dy / radii[1], dz / radii[2]
    level = np.sqrt(u * u + v * v + w * w)
    u, v, w = u / radii[0], v / radii[1], w / radii[2]
    return np.asarray(
        level * (level - 1) / np.sqrt(np.float32(1e-6) + u * u + v * v + w * w), dtype=np.float32
    )


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


@dataclass(frozen=True)
class Lattice:
    """Points of the canonical patient frame (mm, LPS, z = 0 at the carina).

    Points lie on whole multiples of the spacing, so that two lattices of one spacing share their
    points.

    Attributes:
        first: Index of the first point over the multiples of the spacing, (z, y, x).
        shape: Points per axis, (D, H, W).
        spacing_mm: Distance of the points, (z, y, x).
    """

    first: tuple[int, int, int]
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]

    @classmethod
    def covering(
        cls,
        low_zyx_mm: Sequence[float],
        high_zyx_mm: Sequence[float],
        spacing_mm: tuple[float, float, float],
    ) -> Lattice:
        """Cover a box given by two corners."""
        first = [math.floor(low / step) for low, step in zip(low_zyx_mm, spacing_mm, strict=True)]
        last = [math.ceil(high / step) for high, step in zip(high_zyx_mm, spacing_mm, strict=True)]
        depth, height, width = (stop - start + 1 for start, stop in zip(first, last, strict=True))
        return cls((first[0], first[1], first[2]), (depth, height, width), spacing_mm)

    @property
    def origin_zyx_mm(self) -> NDArray[np.float64]:
        """Position of the first point."""
        return np.array(self.first) * np.array(self.spacing_mm)

    @property
    def edge_mm(self) -> float:
        """Width of a drawn edge: the mean spacing."""
        return float(np.mean(self.spacing_mm))

    def axis_mm(self, axis: int) -> Field:
        """Coordinates along one axis, (n,)."""
        return ((np.arange(self.shape[axis]) + self.first[axis]) * self.spacing_mm[axis]).astype(
            np.float32
        )

    def points(
        self, planes: slice = slice(None), rows: slice = slice(None), columns: slice = slice(None)
    ) -> tuple[Field, Field, Field]:
        """Broadcastable coordinates x (1, 1, w), y (1, h, 1), z (d, 1, 1) of a part of the lattice."""
        return (
            self.axis_mm(2)[None, None, columns],
            self.axis_mm(1)[None, rows, None],
            self.axis_mm(0)[planes, None, None],
        )

    def full(self, value: float) -> Field:
        """Make a constant field, (D, H, W)."""
        return np.full(self.shape, value, dtype=np.float32)

    def slabs(self, max_points: int = 150_000) -> Iterator[slice]:
        """Split the planes into slabs that stay in the processor's cache."""
        step = max(1, max_points // (self.shape[1] * self.shape[2]))
        for start in range(0, self.shape[0], step):
            yield slice(start, min(start + step, self.shape[0]))


def draw_tube(
    distance_mm: Field,
    lattice: Lattice,
    points_xyz_mm: NDArray[np.float64],
    radii_mm: NDArray[np.float64] | float,
    margin_mm: float = 4.0,
    stretch_z: float = 1.0,
) -> None:
    """Lower a distance field in place by a chain of tapered capsules.

    Args:
        distance_mm: Field (D, H, W) on the lattice, to be lowered.
        lattice: Its lattice.
        points_xyz_mm: Nodes of the chain, (n, 3).
        radii_mm: Radius at each node, (n,), or one for all.
        margin_mm: How far outside the tube the field is written.
        stretch_z: Cross-section is this much taller along z than across (ribs).
    """
    radii = np.broadcast_to(np.asarray(radii_mm, dtype=np.float64), (len(points_xyz_mm),))
    spacing, origin, squash = (
        np.array(lattice.spacing_mm),
        lattice.origin_zyx_mm,
        np.float32(1 / stretch_z),
    )
    for a, b, ra, rb in zip(
        points_xyz_mm[:-1], points_xyz_mm[1:], radii[:-1], radii[1:], strict=True
    ):
        pad = (max(ra, rb) + margin_mm) * np.array([stretch_z, 1, 1])
        start = np.ceil((np.minimum(a, b)[::-1] - pad - origin) / spacing).astype(int)
        stop = np.floor((np.maximum(a, b)[::-1] + pad - origin) / spacing).astype(int) + 1
        box = tuple(map(slice, *np.clip([start, stop], 0, lattice.shape).tolist()))
        x, y, z = lattice.points(*box)
        dx, dy, dz = x - np.float32(a[0]), y - np.float32(a[1]), (z - np.float32(a[2])) * squash
        sx, sy, sz = (
            np.float32(b[0] - a[0]),
            np.float32(b[1] - a[1]),
            np.float32(b[2] - a[2]) * squash,
        )
        length2 = np.float32(float(sx * sx + sy * sy + sz * sz) + 1e-9)
        # Place along the capsule, 0 to 1, of the nearest point of its axis.
        t = np.clip((dx * (sx / length2) + dy * (sy / length2)) + dz * (sz / length2), 0, 1)
        ex, ey, ez = dx - t * sx, dy - t * sy, dz - t * sz
        part = distance_mm[box]
        np.minimum(
            part,
            np.sqrt(ex * ex + ey * ey + ez * ez) - (np.float32(ra) + t * np.float32(rb - ra)),
            out=part,
        )


def splat_threads(
    share: Field,
    lattice: Lattice,
    starts_xyz_mm: NDArray[np.float64],
    ends_xyz_mm: NDArray[np.float64],
    radii_mm: NDArray[np.float64],
) -> None:
    """Add threads thinner than a voxel to a field of volume shares, keeping their volume.

    Args:
        share: Field (D, H, W) of covered shares, added to in place (may exceed 1 where threads
            meet).
        lattice: Its lattice.
        starts_xyz_mm: First ends, (n, 3).
        ends_xyz_mm: Second ends, (n, 3).
        radii_mm: One radius per thread, (n,).
    """
    spacing = np.array(lattice.spacing_mm)
    lengths = np.linalg.norm(ends_xyz_mm - starts_xyz_mm, axis=1)
    counts = np.maximum(np.ceil(lengths / (0.6 * spacing.min())).astype(int), 1)
    # Each thread is cut into equal pieces, and the volume of a piece is shared by the eight points
    # around its middle.
    thread = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(thread)) - np.repeat(np.cumsum(counts) - counts, counts)
    t = ((piece + 0.5) / counts[thread])[:, None]
    points = starts_xyz_mm[thread] * (1 - t) + ends_xyz_mm[thread] * t
    volume = (
        np.pi * radii_mm[thread] ** 2 * lengths[thread] / counts[thread] / float(spacing.prod())
    )
    where = (points[:, ::-1] - lattice.origin_zyx_mm) / spacing
    base = np.floor(where).astype(np.int64)
    inside = np.all((base >= 0) & (base < np.array(lattice.shape) - 1), axis=1)
    base, rest, volume = base[inside], (where - np.floor(where))[inside], volume[inside]
    for bits in np.ndindex(2, 2, 2):
        weight = np.prod(np.where(bits, rest, 1 - rest), axis=1) * volume
        np.add.at(
            share.reshape(-1),
            np.ravel_multi_index(tuple((base + bits).T), share.shape),
            weight.astype(np.float32),
        )


def noise_field(rng: np.random.Generator, lattice: Lattice, grain_mm: float) -> Field:
    """Draw smooth unit noise that is fixed in the patient, (D, H, W).

    The numbers belong to a coarse lattice over a fixed box of the canonical frame, so the field
    does not depend on the view.
    """
    low, high = np.array([-480.0, -280.0, -330.0]), np.array([360.0, 280.0, 330.0])
    values = rng.standard_normal(np.ceil((high - low) / grain_mm).astype(int) + 1, dtype=np.float32)
    for axis, count in enumerate(values.shape):
        places = np.clip((lattice.axis_mm(axis) - low[axis]) / grain_mm, 0, count - 1.001)
        values = interpolate(values, places, axis, is_smooth=True)
    return np.asarray(values * np.float32(1.5), dtype=np.float32)


def interpolate(
    values: NDArray[Any], places: NDArray[np.float64], axis: int, *, is_smooth: bool = False
) -> Field:
    """Interpolate between neighbours along one axis.

    Args:
        values: Array of at least two elements along the axis.
        places: Positions along the axis in elements, (n,); beyond the ends the result is not
            meaningful.
        axis: The axis, which gets the size n.
        is_smooth: Whether the weights follow a cubic with zero slope at both neighbours, not a
            line.
    """
    base = np.clip(np.floor(places).astype(np.int64), 0, values.shape[axis] - 2)
    rest = np.expand_dims(
        (places - base).astype(np.float32), [other for other in range(values.ndim) if other != axis]
    )
    if is_smooth:
        rest = rest * rest * (3 - 2 * rest)
    return np.asarray(
        np.take(values, base, axis) * (1 - rest) + np.take(values, base + 1, axis) * rest
    )
