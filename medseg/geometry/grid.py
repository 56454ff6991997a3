"""Voxel grid: position, spacing and direction of the voxels of an array in the patient.

Only this module converts between array indices (z, y, x) and world points (x, y, z) in LPS millimetres.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medseg.geometry.box import VoxelBox

DIRECTION_TOLERANCE = 1e-3
"""Largest entry of |DᵀD − I| of a direction that still counts as orthonormal (headers store rounded decimals)."""

INDEX_TOLERANCE = 1e-6
"""Differences below this part of a voxel are rounding noise."""

Matrix = tuple[tuple[float, float, float], tuple[float, float, float], tuple[float, float, float]]
IDENTITY: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _triple(values: Iterable[Any], name: str) -> tuple[float, float, float]:
    """Copy three finite numbers into a tuple of plain floats."""
    result = tuple(float(value) for value in values)
    if len(result) != 3 or not all(math.isfinite(value) for value in result):
        raise ValueError(f"{name} needs three finite numbers, got {result}")
    return result


def resampled_shape(
    shape: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    target_spacing_mm: tuple[float, float, float],
) -> tuple[int, int, int]:
    """Count the voxels per axis that keep the field of view at a new spacing.

    The extent changes by at most half a target voxel per axis; an axis never shrinks below one voxel.

    Args:
        shape: Volume size in voxels, (D, H, W).
        spacing_mm: Current voxel spacing in mm, (z, y, x).
        target_spacing_mm: Wanted voxel spacing in mm, (z, y, x), each > 0.

    Returns:
        New size in voxels, (D, H, W).

    Raises:
        ValueError: If a spacing is not positive.

    Example:
        >>> resampled_shape((120, 512, 512), (2.5, 0.7, 0.7), (2.0, 2.0, 2.0))
        (150, 179, 179)
    """
    if min(*spacing_mm, *target_spacing_mm) <= 0:
        raise ValueError(f"spacings must be positive, got {spacing_mm} and {target_spacing_mm}")
    depth, height, width = (
        # A half is rounded up, also where rounding noise lies just below it.
        max(1, math.floor(size * old / new + 0.5 + INDEX_TOLERANCE))
        for size, old, new in zip(shape, spacing_mm, target_spacing_mm, strict=True)
    )
    return depth, height, width


@dataclass(frozen=True)
class VoxelGrid:
    """Size, spacing, origin and direction of a volume; copies what it is given and never changes.

    Attributes:
        shape: Voxels per axis, (D, H, W), each at least 1.
        spacing_mm: Distance of neighbouring voxel centres in mm, (z, y, x).
        origin_xyz_mm: World point of the centre of voxel (0, 0, 0), LPS.
        direction: 3×3; column j is the world unit vector (x, y, z) along index axis j, where j counts (x, y, z) as
            ITK does. Orthonormal within `DIRECTION_TOLERANCE`; left-handed (flipped) axes are allowed.
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    origin_xyz_mm: tuple[float, float, float] = (0.0, 0.0, 0.0)
    direction: Matrix = IDENTITY

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"shape needs three sizes of at least 1, got {shape}")
        if len(self.direction) != 3:
            raise ValueError(f"direction needs three rows, got {len(self.direction)}")
        copies = {
            "shape": shape,
            "spacing_mm": _triple(self.spacing_mm, "spacing_mm"),
            "origin_xyz_mm": _triple(self.origin_xyz_mm, "origin_xyz_mm"),
            "direction": tuple(_triple(row, "a row of direction") for row in self.direction),
        }
        for name, value in copies.items():
            object.__setattr__(self, name, value)
        if min(self.spacing_mm) <= 0:
            raise ValueError(f"spacing_mm must be positive, got {self.spacing_mm}")
        matrix = np.array(self.direction)
        error = float(np.abs(matrix.T @ matrix - np.eye(3)).max())
        if error > DIRECTION_TOLERANCE:
            raise ValueError(f"direction is not orthonormal: off by {error:.2g}, allowed {DIRECTION_TOLERANCE:g}")

    def _steps_mm(self) -> np.ndarray:
        """World step per index step: 3×3, columns in the order (z, y, x) of array indices."""
        return np.array(self.direction)[:, ::-1] * np.array(self.spacing_mm)

    def index_to_world_xyz_mm(self, index_zyx: np.ndarray | Sequence[Any]) -> np.ndarray:
        """Find the world points of (continuous) indices.

        Args:
            index_zyx: Indices, (..., 3) in (z, y, x); whole numbers are voxel centres.

        Returns:
            LPS points in mm, (..., 3) in (x, y, z), float64.
        """
        return np.asarray(index_zyx, dtype=np.float64) @ self._steps_mm().T + np.array(self.origin_xyz_mm)

    def world_to_index_zyx(self, points_xyz_mm: np.ndarray | Sequence[Any]) -> np.ndarray:
        """Find the continuous indices of world points; the inverse of `index_to_world_xyz_mm`.

        Args:
            points_xyz_mm: LPS points in mm, (..., 3) in (x, y, z).

        Returns:
            Continuous indices, (..., 3) in (z, y, x), float64.
        """
        offset_mm = np.asarray(points_xyz_mm, dtype=np.float64) - np.array(self.origin_xyz_mm)
        return offset_mm @ np.linalg.inv(self._steps_mm()).T

    def corners_xyz_mm(self) -> np.ndarray:
        """World points (8, 3) of the centres of the eight corner voxels, the first being voxel (0, 0, 0)."""
        return self.index_to_world_xyz_mm(list(itertools.product(*((0, size - 1) for size in self.shape))))

    def _moved(self, shape: Sequence[int], spacing_mm: Sequence[float], origin_xyz_mm: np.ndarray, direction: Any) -> VoxelGrid:
        return VoxelGrid(tuple(shape), tuple(spacing_mm), tuple(origin_xyz_mm), direction)  # type: ignore[arg-type]

    def crop(self, box: VoxelBox) -> VoxelGrid:
        """Cut to a box, which may reach outside; every voxel keeps its world point.

        Raises:
            ValueError: If the box is empty.
        """
        if box.is_empty:
            raise ValueError(f"cannot crop a grid to an empty box: {box}")
        return self._moved(box.shape, self.spacing_mm, self.index_to_world_xyz_mm(box.start), self.direction)

    def resampled(self, target_spacing_mm: tuple[float, float, float] | None) -> VoxelGrid:
        """Make the grid of another spacing (z, y, x) over the same field of view: same direction, same centre.

        The size follows `resampled_shape`, so the extent may change by half a target voxel per axis. None: the grid itself.
        """
        if target_spacing_mm is None:
            return self
        shape = resampled_shape(self.shape, self.spacing_mm, target_spacing_mm)
        centre = (np.array(self.shape) - 1) / 2
        ratio = np.array(target_spacing_mm, dtype=np.float64) / np.array(self.spacing_mm)
        first = centre - (np.array(shape) - 1) / 2 * ratio
        return self._moved(shape, target_spacing_mm, self.index_to_world_xyz_mm(first), self.direction)

    def resized(self, shape: tuple[int, int, int]) -> VoxelGrid:
        """Make the grid of another shape (D, H, W) over exactly the same field of view; its spacing follows."""
        ratio = np.array(self.shape) / np.array(shape)
        # The outer face of the first voxel stays where it is.
        first = ratio / 2 - 0.5
        return self._moved(shape, ratio * np.array(self.spacing_mm), self.index_to_world_xyz_mm(first), self.direction)

    def reoriented(self, order: tuple[int, int, int], flips: tuple[bool, bool, bool]) -> VoxelGrid:
        """Follow an array through `array.transpose(order)` and then a flip of each new axis where `flips` says so.

        Args:
            order: Old axis of each new axis, a permutation of (0, 1, 2).
            flips: Whether each new axis is reversed.

        Raises:
            ValueError: If `order` is no permutation.
        """
        if sorted(order) != [0, 1, 2]:
            raise ValueError(f"order must be a permutation of (0, 1, 2), got {order}")
        first = [(self.shape[old] - 1) * flip for old, flip in sorted(zip(order, flips, strict=True))]
        # Columns of the direction in the order (z, y, x) of the new axes; a flip reverses its column.
        columns_zyx = np.array(self.direction)[:, ::-1][:, list(order)] * np.where(flips, -1.0, 1.0)
        return self._moved(
            [self.shape[old] for old in order],
            [self.spacing_mm[old] for old in order],
            self.index_to_world_xyz_mm(first),
            columns_zyx[:, ::-1].tolist(),
        )

    def has_same_axes(self, other: VoxelGrid, tolerance: float = DIRECTION_TOLERANCE) -> bool:
        """Whether the directions agree, entry by entry."""
        return bool(np.abs(np.array(self.direction) - np.array(other.direction)).max() <= tolerance)

    def is_close(self, other: VoxelGrid, tolerance_mm: float = 1e-3) -> bool:
        """Whether both grids have the same shape and all corners agree."""
        if self.shape != other.shape:
            return False
        return bool(np.abs(self.corners_xyz_mm() - other.corners_xyz_mm()).max() <= tolerance_mm)

    def axis_map_to(self, other: VoxelGrid) -> tuple[tuple[float, float], ...]:
        """Express this grid's indices as indices of another grid with the same axes.

        Returns:
            Per axis (z, y, x) a pair (scale, offset) with `other_index = scale * self_index + offset`.

        Raises:
            ValueError: If the axes differ.
        """
        if not self.has_same_axes(other):
            raise ValueError("the two grids do not have the same axes")
        offsets = other.world_to_index_zyx(self.origin_xyz_mm)
        scales = np.array(self.spacing_mm) / np.array(other.spacing_mm)
        return tuple((float(scale), float(offset)) for scale, offset in zip(scales, offsets, strict=True))

    def box_from(self, other: VoxelGrid, box: VoxelBox) -> VoxelBox:
        """Cover a box of another grid with the smallest box of this grid's voxels.

        Outer faces of voxels are compared; noise below `INDEX_TOLERANCE` grows nothing. An empty box stays empty.

        Args:
            other: Grid with the same axes.
            box: Box in voxels of `other`.

        Returns:
            Box in voxels of this grid; it may reach outside.
        """
        starts, stops = [], []
        for (scale, offset), low, high in zip(other.axis_map_to(self), box.start, box.stop, strict=True):
            # The outer face of voxel i is at i - 0.5; this grid's faces are whole numbers after adding 0.5.
            starts.append(math.floor(scale * (low - 0.5) + offset + 0.5 + INDEX_TOLERANCE))
            stop = math.ceil(scale * (high - 0.5) + offset + 0.5 - INDEX_TOLERANCE)
            stops.append(starts[-1] if high == low else max(stop, starts[-1] + 1))
        return VoxelBox.of(starts, stops)

    def centres_within(self, other: VoxelGrid) -> VoxelBox:
        """Find the voxels of this grid's lattice whose centres are in the field of view of another grid.

        Args:
            other: Grid with the same axes.

        Returns:
            Box in voxels of this grid, which may reach outside it; empty where there is none.
        """
        axes = list(zip(other.axis_map_to(self), other.shape, strict=True))
        starts = [math.ceil(offset - 0.5 * scale - INDEX_TOLERANCE) for (scale, offset), _ in axes]
        stops = [math.floor(offset + (size - 0.5) * scale + INDEX_TOLERANCE) + 1 for (scale, offset), size in axes]
        return VoxelBox.of(starts, map(max, starts, stops))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types for a JSON file; floats survive exactly."""
        return {
            "shape": list(self.shape),
            "spacing_mm": list(self.spacing_mm),
            "origin_xyz_mm": list(self.origin_xyz_mm),
            "direction": [list(row) for row in self.direction],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VoxelGrid:
        """Read what `to_dict` wrote."""
        return cls(data["shape"], data["spacing_mm"], data["origin_xyz_mm"], data["direction"])
