"""Shapes as signed distances in mm (negative inside), smooth noise, and painting.

Distances, noise and images are arrays over the points of a lattice.
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

Field = NDArray[np.floating[Any]]
"""Values at the points of a lattice: distances in mm, HU, or shares from 0 to 1. Large arrays are
float32."""
Fields = dict[str, Field]
"""Fields on one lattice by name, (D, H, W) or broadcast to it."""

# Box of the coarse lattices of `SmoothNoise`, in mm around the carina, (z, y, x). Far outside the
# box the noise is 0.
_NOISE_LOW_MM = np.array([-480.0, -300.0, -340.0])
_NOISE_HIGH_MM = np.array([360.0, 300.0, 340.0])


class Points(NamedTuple):
    """Points of a lattice: their LPS coordinates in mm, which broadcast to (D, H, W).

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

        Lattices of overlapping boxes and equal spacing thus share their points.
        """
        axes = []
        lows_mm = np.asarray(low_zyx_mm)
        highs_mm = np.asarray(high_zyx_mm)
        for low, high, step in zip(lows_mm, highs_mm, spacing_mm, strict=True):
            multiples = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
            axes.append((multiples * step).astype(np.float32))
        z, y, x = axes
        return cls(x[None, None, :], y[None, :, None], z[:, None, None])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Points per axis, (D, H, W)."""
        return self.z.size, self.y.size, self.x.size


def ellipse(u: Field, v: Field, half_u: Field | float, half_v: Field | float) -> Field:
    """Measure an elliptic cylinder: the distance to its surface along the ray from its axis.

    Args:
        u: First coordinate across the cylinder, from its axis, mm.
        v: Second coordinate, mm.
        half_u: Half axis along u, mm.
        half_v: Half axis along v, mm.
    """
    # `level` is 1 on the surface. A point at distance r from the axis meets the surface at r /
    # level, so its distance is r - r / level. On the axis itself, r and level would be 0; the two
    # small numbers make it 0.01 * (1 - 1000), about -10 mm.
    level = np.maximum(np.hypot(u / half_u, v / half_v), 0.001)
    return np.asarray((np.hypot(u, v) + 0.01) * (1 - 1 / level))


def ellipsoid(points: Points, centre_xyz_mm: ArrayLike, radii_xyz_mm: ArrayLike) -> Field:
    """Measure an ellipsoid: its approximate distance, close near the surface.

    With level = sqrt(Σ ((x - centre) / radius)²), which is 1 on the surface, the
    distance is (level - 1) / |gradient of level|.
    """
    centre = np.asarray(centre_xyz_mm, np.float32)
    radii = np.asarray(radii_xyz_mm, np.float32)
    # The gradient of level is sqrt(slope) / level, where slope = Σ (x - centre)² / radius⁴. The
    # sum begins with a small number, because the centre has no slope to divide by.
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
    """Measure a tube: a chain of tapered capsules, one between each node and the next.

    Args:
        points: Points at which the distance is measured, (D, H, W).
        path_xyz_mm: Nodes of the chain, (n, 3).
        radii_mm: Radius at the first and at the last node; it changes by the same step from node to
            node.
        reach_mm: Largest distance that is measured; points farther away get this value.

    Returns:
        Signed distance, at most `reach_mm`, (D, H, W).
    """
    path = np.asarray(path_xyz_mm, np.float32)
    radii = np.linspace(radii_mm[0], radii_mm[1], len(path), dtype=np.float32)
    distance = np.full(points.shape, reach_mm, np.float32)
    for a, b, radius_a, radius_b in zip(path[:-1], path[1:], radii[:-1], radii[1:], strict=True):
        # Only the points in a box around this capsule and its reach are visited.
        margin = max(radius_a, radius_b) + reach_mm
        lows = np.minimum(a, b) - margin
        highs = np.maximum(a, b) + margin
        ranges = []
        for coordinates, low, high in zip(points, lows, highs, strict=True):
            first, stop = np.searchsorted(coordinates.ravel(), [low, high])
            ranges.append(slice(first, stop))
        columns, rows, planes = ranges
        # A view: `np.minimum` below writes to `distance`.
        window = distance[planes, rows, columns]
        if window.size == 0:
            continue
        offsets = [
            points.x[:, :, columns] - a[0],
            points.y[:, rows] - a[1],
            points.z[planes] - a[2],
        ]
        a_to_b = b - a
        # Nearest point of the axis by projection: 0 is a, 1 is b.
        position = np.clip(sum(map(mul, offsets, a_to_b)) / (a_to_b @ a_to_b), 0, 1)
        square: Any = 0
        for offset, step in zip(offsets, a_to_b, strict=True):
            square = square + (offset - position * step) ** 2
        radius = radius_a + position * (radius_b - radius_a)
        np.minimum(window, np.sqrt(square) - radius, out=window)
    return distance


def union(first: Field, second: Field, blend_mm: float) -> Field:
    """Unite two bodies with a fillet of about `blend_mm` where they meet."""
    # Polynomial smooth minimum: where the two distances differ by less than `blend_mm`, the result
    # is below both, by at most a quarter of `blend_mm`.
    closeness = np.maximum(blend_mm - np.abs(first - second), 0)
    return np.minimum(first, second) - closeness * closeness * (0.25 / blend_mm)


def intersection(first: Field, second: Field, blend_mm: float) -> Field:
    """Intersect two bodies with a rounding of about `blend_mm` at the edge."""
    # What is outside an intersection is the union of what is outside its bodies; a changed sign
    # swaps inside and outside.
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
    """Turn a signed distance into the share of each voxel that the body covers, 0 to 1.

    The share falls linearly over `width_mm`, from 1 inside to 0 outside, and is 0.5 on the surface.
    """
    return np.clip(0.5 - distance_mm / width_mm, 0, 1)


def paint(image: Field, value: Field | float, share: Field) -> None:
    """Mix a tissue of this value into an image, in place, by its share of each voxel."""
    image += (value - image) * share


class SmoothNoise:
    """Smooth noise of unit standard deviation.

    It is a function of the position in the patient: any lattice samples the same noise.
    """

    def __init__(self, rng: np.random.Generator, grain_mm: float) -> None:
        """Draw the noise: white noise on a coarse lattice, which a Gaussian kernel smooths.

        Args:
            rng: Source of the numbers.
            grain_mm: Spacing of the coarse lattice.
        """
        # Coordinates of the coarse lattice along z, y and x.
        self.centres_mm = [
            np.arange(low, high, grain_mm)
            for low, high in zip(_NOISE_LOW_MM, _NOISE_HIGH_MM, strict=True)
        ]
        shape = [centres.size for centres in self.centres_mm]
        self.values = rng.standard_normal(shape, np.float32)
        self.grain_mm = grain_mm

    def at(self, points: Points) -> Field:
        """Evaluate the noise, float32 (D, H, W)."""
        values = self.values
        axes = (points.z, points.y, points.x)
        # The Gaussian kernel is a product over the axes, which are smoothed one by one. Each
        # `tensordot` replaces the first axis, of the coarse lattice, by a last one, of the points:
        # after three of them the axes are again in the order (z, y, x).
        for coordinates, centres_mm in zip(axes, self.centres_mm, strict=True):
            # (points, coarse lattice)
            offsets = (coordinates.reshape(-1, 1) - centres_mm) / self.grain_mm
            weights = np.exp(-(offsets**2))
            # A sum of white noise has unit variance if the squares of its weights add up to 1.
            size = np.sqrt((weights**2).sum(axis=1, keepdims=True))
            # Far beyond the lattice all weights are zero, and so is the noise.
            weights /= np.maximum(size, 1e-150)
            values = np.tensordot(values, weights.astype(np.float32), axes=(0, 1))
        return values


class Slab(NamedTuple):
    """Some planes of an image, painted tissue after tissue by the distance to its surface.

    Attributes:
        points: The lattice, of (D, H, W) points.
        wave: Smooth noise of unit standard deviation that roughens surfaces, (D, H, W).
        tissue: Another such noise, which varies the density of tissue, (D, H, W).
        grain: A third one, finer than `tissue`, (D, H, W).
        hu: The image, changed in place by `paint`, (D, H, W).
        edge_mm: Width of the edge of a tissue, see `cover`.
    """

    points: Points
    wave: Field
    tissue: Field
    grain: Field
    hu: Field
    edge_mm: float

    def paint(self, value_hu: Field | float, distance_mm: Field) -> None:
        """Paint a tissue where the distance is negative, over what was painted before."""
        paint(self.hu, value_hu, cover(distance_mm, self.edge_mm))
