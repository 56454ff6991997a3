"""Shapes as signed distances in mm (negative inside), smooth noise, and painting.

All are arrays over the points of a lattice.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Field = NDArray[np.floating[Any]]
"""Distances in mm or values in HU; float32 wherever it is large."""
Fields = dict[str, Field]
"""Fields on one lattice by name, (D, H, W) or broadcast to it."""

# Box in which the noise of a patient is fixed, mm (z, y, x); it fades out beyond.
_NOISE_LOW_MM = np.array([-480.0, -300.0, -340.0])
_NOISE_HIGH_MM = np.array([360.0, 300.0, 340.0])


class Points(NamedTuple):
    """Points of a lattice by their coordinates in mm, LPS, which broadcast to (D, H, W).

    Attributes:
        x: (1, 1, W), float32.
        y: (1, H, 1), float32.
        z: (D, 1, 1), float32.
    """

    x: Field
    y: Field
    z: Field

    @classmethod
    def covering(
        cls, low_zyx_mm: ArrayLike, high_zyx_mm: ArrayLike, spacing_mm: Sequence[float]
    ) -> Self:
        """Cover a box with points on whole multiples of the spacing.

        Two lattices thus share their points.
        """
        axes = []
        for low, high, step in zip(
            np.asarray(low_zyx_mm), np.asarray(high_zyx_mm), spacing_mm, strict=True
        ):
            numbers = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
            axes.append((numbers * step).astype(np.float32))
        z, y, x = axes
        return cls(x[None, None, :], y[None, :, None], z[:, None, None])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Points per axis, (D, H, W)."""
        return self.z.size, self.y.size, self.x.size


def ellipse(u: Field, v: Field, half_u: Field | float, half_v: Field | float) -> Field:
    """Measure an elliptic cylinder along the ray from its axis; u and v begin there, mm."""
    # On its ray, a point at distance r has the surface at r / level. The axis has no ray: the two
    # small numbers make it -10 mm there.
    level = np.maximum(np.hypot(u / half_u, v / half_v), 0.001)
    return np.asarray((np.hypot(u, v) + 0.01) * (1 - 1 / level))


def ellipsoid(points: Points, centre_xyz_mm: ArrayLike, radii_xyz_mm: ArrayLike) -> Field:
    """Measure an ellipsoid by (level - 1) / |gradient of level|; level is 1 at its surface.

    Near the surface this is correct to second order.
    """
    centre = np.asarray(centre_xyz_mm, np.float32)
    radii = np.asarray(radii_xyz_mm, np.float32)
    square: Any = 0
    slope: Any = 1e-6
    for coordinates, middle, radius in zip(points, centre, radii, strict=True):
        term = ((coordinates - middle) / radius) ** 2
        square = square + term
        slope = slope + term / radius**2
    level = np.sqrt(square)
    return np.asarray(level * (level - 1) / np.sqrt(slope))


def tube(
    points: Points, path_xyz_mm: ArrayLike, radii_mm: tuple[float, float], reach_mm: float = 20.0
) -> Field:
    """Measure a chain of tapered capsules.

    Args:
        points: The lattice.
        path_xyz_mm: Nodes of the chain, (n, 3).
        radii_mm: Radius at the first and at the last node; it changes evenly from node to node.
        reach_mm: Largest distance that is measured; points farther away get it.

    Returns:
        Signed distance, at most `reach_mm`, (D, H, W).
    """
    path = np.asarray(path_xyz_mm, np.float32)
    radii = np.linspace(radii_mm[0], radii_mm[1], len(path), dtype=np.float32)
    distance = np.full(points.shape, reach_mm, np.float32)
    for a, b, radius_a, radius_b in zip(path[:-1], path[1:], radii[:-1], radii[1:], strict=True):
        margin = max(radius_a, radius_b) + reach_mm
        lows = np.minimum(a, b) - margin
        highs = np.maximum(a, b) + margin
        # Only the points within reach of this capsule are visited.
        ranges = []
        for axis, low, high in zip(points, lows, highs, strict=True):
            first, stop = np.searchsorted(axis.ravel(), [low, high])
            ranges.append(slice(first, stop))
        columns, rows, planes = ranges
        part = distance[planes, rows, columns]
        if part.size == 0:
            continue
        offsets = [
            points.x[:, :, columns] - a[0],
            points.y[:, rows] - a[1],
            points.z[planes] - a[2],
        ]
        along = b - a
        # Place of the nearest point of the axis, 0 at a, 1 at b.
        place = np.clip(sum(map(mul, offsets, along)) / (along @ along), 0, 1)
        square: Any = 0
        for offset, step in zip(offsets, along, strict=True):
            square = square + (offset - place * step) ** 2
        radius = radius_a + place * (radius_b - radius_a)
        np.minimum(part, np.sqrt(square) - radius, out=part)
    return distance


def union(first: Field, second: Field, blend_mm: float) -> Field:
    """Unite two bodies with a fillet of about `blend_mm` (polynomial smooth minimum)."""
    gap = np.maximum(blend_mm - np.abs(first - second), 0)
    return np.minimum(first, second) - gap * gap * (0.25 / blend_mm)


def intersection(first: Field, second: Field, blend_mm: float) -> Field:
    """Intersect two bodies with a rounding of about `blend_mm` at the edge."""
    return -union(-first, -second, blend_mm)


def within(*distances_mm: Field) -> Field:
    """Intersect bodies with sharp edges: the largest distance at each point."""
    result = distances_mm[0]
    for distance_mm in distances_mm[1:]:
        result = np.maximum(result, distance_mm)
    return result


def either(*distances_mm: Field) -> Field:
    """Unite bodies with sharp edges: the smallest distance at each point."""
    return -within(*(-distance_mm for distance_mm in distances_mm))


def cover(distance_mm: Field, width_mm: float) -> Field:
    """Turn a signed distance into the covered share of a voxel, 0 to 1.

    The edge is `width_mm` wide.
    """
    return np.clip(0.5 - distance_mm / width_mm, 0, 1)


def paint(image: Field, value: Field | float, share: Field) -> None:
    """Mix a tissue of some value into an image in place, by its share of each voxel."""
    image += (value - image) * share


class SmoothNoise:
    """Smooth noise of unit standard deviation.

    It is fixed in the patient, whatever part of it is in view.
    """

    def __init__(self, rng: np.random.Generator, grain_mm: float) -> None:
        """Draw the noise: white noise on a coarse lattice, which a Gaussian kernel smooths.

        Args:
            rng: Source of the numbers.
            grain_mm: Spacing of the coarse lattice.
        """
        self.centres_mm = [
            np.arange(low, high, grain_mm)
            for low, high in zip(_NOISE_LOW_MM, _NOISE_HIGH_MM, strict=True)
        ]
        self.values = rng.standard_normal([centres.size for centres in self.centres_mm], np.float32)
        self.grain_mm = grain_mm

    def at(self, points: Points) -> Field:
        """Evaluate the noise, float32 (D, H, W)."""
        values = self.values
        # The kernel is a product over the axes. Each step moves the axis that it has smoothed to
        # the end.
        for coordinates, centres_mm in zip(
            (points.z, points.y, points.x), self.centres_mm, strict=True
        ):
            offsets = (coordinates.reshape(-1, 1) - centres_mm) / self.grain_mm
            weights = np.exp(-(offsets**2))
            size = np.sqrt((weights**2).sum(axis=1, keepdims=True))
            # Far beyond the lattice all weights are zero, and so is the noise.
            weights /= np.maximum(size, 1e-150)
            values = np.tensordot(values, weights.astype(np.float32), (0, 1))
        return values


class Slab(NamedTuple):
    """Part of an image that is painted, tissue after tissue, each by the distance to its surface.

    Attributes:
        points: The lattice.
        wave: Smooth unit noise that roughens surfaces, (D, H, W).
        tissue: Noise that varies tissue.
        grain: Finer noise that varies tissue.
        hu: The image.
        edge_mm: Width of edges.
    """

    points: Points
    wave: Field
    tissue: Field
    grain: Field
    hu: Field
    edge_mm: float

    def paint(self, value_hu: Field | float, distance_mm: Field) -> None:
        """Paint a tissue where the distance is negative."""
        paint(self.hu, value_hu, cover(distance_mm, self.edge_mm))
