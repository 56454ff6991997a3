"""Lattice of points on which anatomy is drawn, and tubes, threads and smooth noise on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.shapes import Field


@dataclass(frozen=True)
class Lattice:
    """Points of the canonical patient frame (mm, LPS, z = 0 at the carina).

    Points lie on whole multiples of the spacing, so that two lattices of one spacing share their points.

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
        cls, low_zyx_mm: Sequence[float], high_zyx_mm: Sequence[float], spacing_mm: tuple[float, float, float]
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
        return ((np.arange(self.shape[axis]) + self.first[axis]) * self.spacing_mm[axis]).astype(np.float32)

    def points(self, slab: slice = slice(None)) -> tuple[Field, Field, Field]:
        """Broadcastable coordinates x (1, 1, W), y (1, H, 1), z (d, 1, 1) of a slab of planes."""
        return self.axis_mm(2)[None, None, :], self.axis_mm(1)[None, :, None], self.axis_mm(0)[slab, None, None]

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
    nodes = np.asarray(points_xyz_mm, dtype=np.float64)
    radii = np.broadcast_to(np.asarray(radii_mm, dtype=np.float64), (len(nodes),))
    spacing, origin, squash = np.array(lattice.spacing_mm), lattice.origin_zyx_mm, np.float32(1 / stretch_z)
    for a, b, ra, rb in zip(nodes[:-1], nodes[1:], radii[:-1], radii[1:], strict=True):
        pad = (max(ra, rb) + margin_mm) * np.array([stretch_z, 1, 1])
        start = np.maximum(np.ceil((np.minimum(a, b)[::-1] - pad - origin) / spacing).astype(int), 0)
        stop = np.minimum(np.floor((np.maximum(a, b)[::-1] + pad - origin) / spacing).astype(int) + 1, lattice.shape)
        if np.any(stop <= start):
            continue
        z, y, x = ((np.arange(start[i], stop[i]) * spacing[i] + origin[i]).astype(np.float32) for i in range(3))
        dz = ((z - np.float32(a[2])) * squash)[:, None, None]
        dy, dx = (y - np.float32(a[1]))[None, :, None], (x - np.float32(a[0]))[None, None, :]
        sx, sy, sz = np.float32(b[0] - a[0]), np.float32(b[1] - a[1]), np.float32(b[2] - a[2]) * squash
        length2 = np.float32(float(sx * sx + sy * sy + sz * sz) + 1e-9)
        # Place along the capsule, 0 to 1, of the nearest point of its axis.
        t = np.clip((dx * (sx / length2) + dy * (sy / length2)) + dz * (sz / length2), 0, 1)
        ex, ey, ez = dx - t * sx, dy - t * sy, dz - t * sz
        part = distance_mm[start[0] : stop[0], start[1] : stop[1], start[2] : stop[2]]
        np.minimum(part, np.sqrt(ex * ex + ey * ey + ez * ez) - (np.float32(ra) + t * np.float32(rb - ra)), out=part)


def splat_threads(
    share: Field,
    lattice: Lattice,
    starts_xyz_mm: NDArray[np.float64],
    ends_xyz_mm: NDArray[np.float64],
    radii_mm: NDArray[np.float64],
) -> None:
    """Add threads thinner than a voxel to a field of volume shares, keeping their volume.

    Args:
        share: Field (D, H, W) of covered shares, added to in place (may exceed 1 where threads meet).
        lattice: Its lattice.
        starts_xyz_mm: First ends, (n, 3).
        ends_xyz_mm: Second ends, (n, 3).
        radii_mm: One radius per thread, (n,).
    """
    spacing = np.array(lattice.spacing_mm)
    lengths = np.linalg.norm(ends_xyz_mm - starts_xyz_mm, axis=1)
    counts = np.maximum(np.ceil(lengths / (0.6 * spacing.min())).astype(int), 1)
    # Each thread is cut into equal pieces, and the volume of a piece is shared by the eight points around its middle.
    thread = np.repeat(np.arange(len(counts)), counts)
    piece = np.arange(len(thread)) - np.repeat(np.cumsum(counts) - counts, counts)
    t = ((piece + 0.5) / counts[thread])[:, None]
    points = starts_xyz_mm[thread] * (1 - t) + ends_xyz_mm[thread] * t
    volume = np.pi * radii_mm[thread] ** 2 * lengths[thread] / counts[thread] / float(spacing.prod())
    where = (points[:, ::-1] - lattice.origin_zyx_mm) / spacing
    base = np.floor(where).astype(np.int64)
    inside = np.all((base >= 0) & (base < np.array(lattice.shape) - 1), axis=1)
    base, rest, volume = base[inside], (where - np.floor(where))[inside], volume[inside]
    for bits in np.ndindex(2, 2, 2):
        weight = np.prod(np.where(bits, rest, 1 - rest), axis=1) * volume
        np.add.at(share.reshape(-1), np.ravel_multi_index(tuple((base + bits).T), share.shape), weight.astype(np.float32))


def noise_field(rng: np.random.Generator, lattice: Lattice, grain_mm: float) -> Field:
    """Draw smooth unit noise that is fixed in the patient, (D, H, W).

    The numbers belong to a coarse lattice over a fixed box of the canonical frame, so the field does not depend on the view.
    """
    low, high = np.array([-480.0, -280.0, -330.0]), np.array([360.0, 280.0, 330.0])
    counts = np.ceil((high - low) / grain_mm).astype(int) + 1
    values = rng.standard_normal(tuple(int(n) for n in counts), dtype=np.float32)
    for axis in range(3):
        at = np.clip((lattice.axis_mm(axis) - low[axis]) / grain_mm, 0, counts[axis] - 1.001)
        base = at.astype(int)
        rest = np.expand_dims((at - base).astype(np.float32), [other for other in range(3) if other != axis])
        rest = rest * rest * (3 - 2 * rest)
        values = np.take(values, base, axis=axis) * (1 - rest) + np.take(values, base + 1, axis=axis) * rest
    return np.asarray(values * np.float32(1.5), dtype=np.float32)
