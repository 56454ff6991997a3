"""The lattice on which anatomy is drawn, and tubes drawn on it."""

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
        first = tuple(math.floor(low / step) for low, step in zip(low_zyx_mm, spacing_mm, strict=True))
        last = tuple(math.ceil(high / step) for high, step in zip(high_zyx_mm, spacing_mm, strict=True))
        shape = tuple(stop - start + 1 for start, stop in zip(first, last, strict=True))
        return cls((first[0], first[1], first[2]), (shape[0], shape[1], shape[2]), spacing_mm)

    @property
    def origin_zyx_mm(self) -> NDArray[np.float64]:
        """Place of the first point."""
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
        lattice: Where the field lives.
        points_xyz_mm: Nodes of the chain, (n, 3).
        radii_mm: Radius at each node, (n,), or one for all.
        margin_mm: How far outside the tube the field is written.
        stretch_z: Cross-section is this much taller along z than across (ribs).
    """
    nodes = np.asarray(points_xyz_mm, dtype=np.float64)
    radii = np.broadcast_to(np.asarray(radii_mm, dtype=np.float64), (len(nodes),))
    spacing = np.array(lattice.spacing_mm)
    origin = lattice.origin_zyx_mm
    for a, b, ra, rb in zip(nodes[:-1], nodes[1:], radii[:-1], radii[1:], strict=True):
        reach = max(ra, rb) + margin_mm
        pad = np.array([reach * stretch_z, reach, reach])
        low = np.minimum(a, b)[::-1] - pad
        high = np.maximum(a, b)[::-1] + pad
        start = np.maximum(np.ceil((low - origin) / spacing).astype(int), 0)
        stop = np.minimum(np.floor((high - origin) / spacing).astype(int) + 1, lattice.shape)
        if np.any(stop <= start):
            continue
        axes = [(np.arange(start[i], stop[i]) * spacing[i] + origin[i]).astype(np.float32) for i in range(3)]
        squash = np.float32(1 / stretch_z)
        dz = ((axes[0] - np.float32(a[2])) * squash)[:, None, None]
        dy = (axes[1] - np.float32(a[1]))[None, :, None]
        dx = (axes[2] - np.float32(a[0]))[None, None, :]
        sx, sy, sz = np.float32(b[0] - a[0]), np.float32(b[1] - a[1]), np.float32(b[2] - a[2]) * squash
        length2 = float(sx * sx + sy * sy + sz * sz) + 1e-9
        t = np.clip((dx * (sx / np.float32(length2)) + dy * (sy / np.float32(length2))) + dz * (sz / np.float32(length2)), 0, 1)
        ex, ey, ez = dx - t * sx, dy - t * sy, dz - t * sz
        near = np.sqrt(ex * ex + ey * ey + ez * ez) - (np.float32(ra) + t * np.float32(rb - ra))
        part = distance_mm[start[0] : stop[0], start[1] : stop[1], start[2] : stop[2]]
        np.minimum(part, near, out=part)


def splat_threads(
    share: Field,
    lattice: Lattice,
    starts_xyz_mm: NDArray[np.float64],
    ends_xyz_mm: NDArray[np.float64],
    radii_mm: NDArray[np.float64],
) -> None:
    """Add threads thinner than a voxel to a field of volume shares, keeping their volume.

    Args:
        share: Field (D, H, W) of covered shares, added to in place (may pass 1 where threads meet).
        lattice: Where the field lives.
        starts_xyz_mm: First ends, (n, 3).
        ends_xyz_mm: Second ends, (n, 3).
        radii_mm: One radius per thread, (n,).
    """
    if len(starts_xyz_mm) == 0:
        return
    spacing = np.array(lattice.spacing_mm)
    lengths = np.linalg.norm(ends_xyz_mm - starts_xyz_mm, axis=1)
    counts = np.maximum(np.ceil(lengths / (0.6 * spacing.min())).astype(int), 1)
    thread = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(thread)) - np.repeat(np.cumsum(counts) - counts, counts)
    t = ((place + 0.5) / counts[thread])[:, None]
    points = starts_xyz_mm[thread] * (1 - t) + ends_xyz_mm[thread] * t
    volume = np.pi * radii_mm[thread] ** 2 * lengths[thread] / counts[thread] / float(spacing.prod())
    where = (points[:, ::-1] - lattice.origin_zyx_mm) / spacing
    base = np.floor(where).astype(np.int64)
    inside = np.all((base >= 0) & (base < np.array(lattice.shape) - 1), axis=1)
    base, rest, volume = base[inside], (where - np.floor(where))[inside], volume[inside]
    _, height, width = lattice.shape
    flat = share.reshape(-1)
    for corner in range(8):
        bits = np.array([corner >> 2, (corner >> 1) & 1, corner & 1])
        weight = np.prod(np.where(bits, rest, 1 - rest), axis=1) * volume
        index = ((base[:, 0] + bits[0]) * height + base[:, 1] + bits[1]) * width + base[:, 2] + bits[2]
        np.add.at(flat, index, weight.astype(np.float32))
