"""Voxel grids and voxel boxes.

A grid places the voxels of an array in the patient; a box is a range of voxels. Only this module
converts between array indices (z, y, x) and world points (x, y, z) in LPS millimetres.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A direction matrix D counts as orthonormal if no entry of |DᵀD − I| is larger than this, and two
# directions count as equal if no entry differs by more: headers store rounded decimals.
DIRECTION_TOLERANCE = 1e-3

# Differences of indices below this, in voxels, are rounding noise.
INDEX_TOLERANCE = 1e-6

Row = tuple[float, float, float]
Matrix = tuple[Row, Row, Row]
IDENTITY: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def _triple(values: Iterable[Any], name: str, kind: type = float) -> tuple[Any, Any, Any]:
    """Convert three numbers, such as those of NumPy, to a tuple of Python numbers of one type.

    Args:
        values: The numbers.
        name: What they are, for the message.
        kind: `float` or `int`.

    Raises:
        ValueError: If there are not three numbers, or one is not finite.
    """
    triple = tuple(kind(value) for value in values)
    if len(triple) != 3 or not all(map(math.isfinite, triple)):
        raise ValueError(f"{name} needs three finite numbers, got {triple}")
    return triple


@dataclass(frozen=True)
class VoxelBox:
    """A box of voxels on some grid; it may reach outside that grid.

    Attributes:
        start: First voxel per axis, (z, y, x).
        stop: One past the last voxel per axis, (z, y, x), never below `start`.
    """

    start: tuple[int, int, int]
    stop: tuple[int, int, int]

    def __post_init__(self) -> None:
        # A frozen dataclass has no other way to replace a field.
        for name in ("start", "stop"):
            object.__setattr__(self, name, _triple(getattr(self, name), name, int))
        if any(map(operator.lt, self.stop, self.start)):
            raise ValueError(
                f"a box must not end before it starts: start {self.start}, stop {self.stop}"
            )

    @classmethod
    def of(cls, starts: Iterable[int], stops: Iterable[int]) -> VoxelBox:
        """Make a box of any two iterables of three whole numbers, arrays of floats too."""
        return cls(tuple(starts), tuple(stops))  # type: ignore[arg-type]

    @classmethod
    def full(cls, shape: Sequence[int]) -> VoxelBox:
        """Make the box of a whole array of this shape (D, H, W)."""
        return cls.of((0, 0, 0), shape)

    @classmethod
    def from_mask(cls, mask: np.ndarray) -> VoxelBox | None:
        """Find the smallest box around all true voxels of a mask (D, H, W).

        Returns:
            The box; None for a mask without true voxels.

        Raises:
            ValueError: If the mask has another number of axes.
        """
        if mask.ndim != 3:
            raise ValueError(f"a mask needs three axes (D, H, W), got {mask.ndim}")
        starts: list[int] = []
        stops: list[int] = []
        # The bounds along z, then y, then x: each is searched over the two other axes.
        for other_axes in ((1, 2), (0, 2), (0, 1)):
            # To save time, only the part within the bounds found so far is searched.
            inside = mask[tuple(map(slice, starts, stops))]
            hits = np.flatnonzero(inside.any(axis=other_axes))
            if hits.size == 0:
                return None
            starts.append(int(hits[0]))
            stops.append(int(hits[-1]) + 1)
        return cls.of(starts, stops)

    @classmethod
    def around(cls, planes: Iterable[np.ndarray]) -> VoxelBox | None:
        """Find the smallest box around the true voxels of planes (H, W), which are read one by one.

        Unlike `from_mask`, this needs no mask of the whole volume in memory.

        Returns:
            The box; None without true voxels.
        """
        # Union of the planes so far, (H, W).
        footprint: np.ndarray | None = None
        filled_planes: list[int] = []
        for z, plane in enumerate(planes):
            if not plane.any():
                continue
            filled_planes.append(z)
            footprint = plane if footprint is None else footprint | plane
        if footprint is None:
            return None
        in_plane = cls.from_mask(footprint[None])
        assert in_plane is not None, "a plane has true voxels"
        _, y_start, x_start = in_plane.start
        _, y_stop, x_stop = in_plane.stop
        z_start = filled_planes[0]
        z_stop = filled_planes[-1] + 1
        return cls((z_start, y_start, x_start), (z_stop, y_stop, x_stop))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels per axis, (D, H, W)."""
        return _triple(map(operator.sub, self.stop, self.start), "shape", int)

    @property
    def is_empty(self) -> bool:
        """Whether the box contains no voxel."""
        return 0 in self.shape

    def slices(self) -> tuple[slice, slice, slice]:
        """Make the slices that index an array (D, H, W) with the box.

        Raises:
            ValueError: If the box starts below zero, where numpy would count from the end.
        """
        if min(self.start) < 0:
            raise ValueError(
                f"a box that starts below zero cannot index an array: start {self.start}"
            )
        z, y, x = map(slice, self.start, self.stop)
        return z, y, x

    def contains(self, other: VoxelBox) -> bool:
        """Whether all voxels of the other box are in this one; every box contains an empty one."""
        return other.is_empty or self.intersect(other) == other

    def intersect(self, other: VoxelBox) -> VoxelBox:
        """Keep the voxels that both boxes contain; an empty box where they do not meet."""
        starts = list(map(max, self.start, other.start))
        stops = map(min, self.stop, other.stop)
        # Where the boxes do not meet, the stop would be below the start, which no box may have.
        return VoxelBox.of(starts, map(max, starts, stops))

    def shifted(self, offset: Sequence[int]) -> VoxelBox:
        """Move the box by an offset in voxels, (z, y, x)."""
        starts = [start + step for start, step in zip(self.start, offset, strict=True)]
        stops = [stop + step for stop, step in zip(self.stop, offset, strict=True)]
        return VoxelBox.of(starts, stops)

    def expanded(self, voxels: Sequence[int]) -> VoxelBox:
        """Add this many voxels on both sides of each axis, (z, y, x); negative numbers shrink."""
        starts = [start - margin for start, margin in zip(self.start, voxels, strict=True)]
        stops = [stop + margin for stop, margin in zip(self.stop, voxels, strict=True)]
        return VoxelBox.of(starts, stops)

    def clipped(self, shape: Sequence[int]) -> VoxelBox:
        """Keep the part inside an array of this shape (D, H, W)."""
        return self.intersect(VoxelBox.full(shape))

    def at_least(self, min_shape: Sequence[int]) -> VoxelBox:
        """Grow about the centre to at least this shape (D, H, W); longer axes stay.

        If an axis grows by an odd number of voxels, the odd voxel goes to the high end (`stop`).

        Example:
            >>> VoxelBox((0, 10, 0), (4, 13, 9)).at_least((6, 6, 6))
            VoxelBox(start=(-1, 9, 0), stop=(5, 15, 9))
        """
        starts: list[int] = []
        for start, length, min_length in zip(self.start, self.shape, min_shape, strict=True):
            num_missing = max(0, min_length - length)
            starts.append(start - num_missing // 2)
        grown_shape = map(max, self.shape, min_shape)
        return VoxelBox.of(starts, map(operator.add, starts, grown_shape))


def resampled_shape(
    shape: tuple[int, int, int],
    spacing_mm: tuple[float, float, float],
    target_spacing_mm: tuple[float, float, float],
) -> tuple[int, int, int]:
    """Count the voxels per axis that keep the field of view at a new spacing.

    The extent of each axis is rounded to whole target voxels, at least one.

    Args:
        shape: Volume size in voxels, (D, H, W).
        spacing_mm: Current voxel spacing in mm, (z, y, x).
        target_spacing_mm: New voxel spacing in mm, (z, y, x), each > 0.

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
    # Length of each axis in target voxels.
    lengths = np.array(shape) * spacing_mm / np.array(target_spacing_mm)
    # Rounded to the nearest whole number. Halves are rounded up, even if rounding noise puts them
    # just below a half.
    rounded = np.floor(lengths + 0.5 + INDEX_TOLERANCE)
    return _triple(np.maximum(1, rounded), "shape", int)


@dataclass(frozen=True)
class VoxelGrid:
    """Size, spacing, origin and direction of a volume; immutable.

    `dataclasses.asdict(grid)` gives plain values for a JSON file, of which `VoxelGrid(**values)`
    restores the grid exactly.

    Attributes:
        shape: Voxels per axis, (D, H, W), each at least 1.
        spacing_mm: Distance of neighbouring voxel centres in mm, (z, y, x).
        origin_xyz_mm: World point of the centre of voxel (0, 0, 0), LPS.
        direction: 3×3; column j is the world unit vector (x, y, z) along index axis j, where j
            counts (x, y, z) as ITK does. Orthonormal within `DIRECTION_TOLERANCE`; left-handed
            (flipped) axes are allowed.
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    origin_xyz_mm: tuple[float, float, float] = (0.0, 0.0, 0.0)
    direction: Matrix = IDENTITY

    def __post_init__(self) -> None:
        # A frozen dataclass has no other way to replace a field.
        for name, kind in (("shape", int), ("spacing_mm", float), ("origin_xyz_mm", float)):
            object.__setattr__(self, name, _triple(getattr(self, name), name, kind))
        rows = tuple(_triple(row, "a row of direction") for row in self.direction)
        object.__setattr__(self, "direction", rows)
        if min(self.shape) < 1 or min(self.spacing_mm) <= 0:
            raise ValueError(
                "shape must be at least 1 and spacing_mm positive, got "
                f"{self.shape} and {self.spacing_mm}"
            )
        if len(self.direction) != 3:
            raise ValueError(f"direction needs three rows, got {len(self.direction)}")
        # For orthonormal columns, DᵀD is the identity.
        matrix = np.array(self.direction)
        error = float(np.abs(matrix.T @ matrix - np.eye(3)).max())
        if error > DIRECTION_TOLERANCE:
            raise ValueError(
                f"direction is not orthonormal: off by {error:.2g}, allowed {DIRECTION_TOLERANCE:g}"
            )

    @property
    def is_axial(self) -> bool:
        """Whether the planes (y, x) are nearer to axial ones than to sagittal or coronal ones."""
        # The last column is the world direction from one plane to the next.
        along_x, along_y, along_z = (abs(row[2]) for row in self.direction)
        return along_z >= max(along_x, along_y)

    def _steps_mm(self) -> np.ndarray:
        """Matrix (3, 3) of world steps in mm: column j is the step (x, y, z) along array axis j."""
        # The columns of `direction` have the order (x, y, z), array axes have the order (z, y, x).
        columns_zyx = np.array(self.direction)[:, ::-1]
        return columns_zyx * np.array(self.spacing_mm)

    def index_to_world_xyz_mm(self, index_zyx: np.ndarray | Sequence[Any]) -> np.ndarray:
        """Find the world points of (continuous) indices.

        Args:
            index_zyx: Indices, (..., 3) in (z, y, x); whole numbers are voxel centres.

        Returns:
            LPS points in mm, (..., 3) in (x, y, z), float64.
        """
        # Points are rows here: transposed, the matrix is applied from the right.
        offset_mm = np.asarray(index_zyx, dtype=np.float64) @ self._steps_mm().T
        return offset_mm + np.array(self.origin_xyz_mm)

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
        """World points (8, 3) of the centres of the corner voxels, voxel (0, 0, 0) first."""
        depth, height, width = self.shape
        corners = itertools.product((0, depth - 1), (0, height - 1), (0, width - 1))
        return self.index_to_world_xyz_mm(list(corners))

    def crop(self, box: VoxelBox) -> VoxelGrid:
        """Make the grid of a box, which may reach outside; voxels keep their world points.

        Raises:
            ValueError: If the box is empty.
        """
        origin_xyz_mm = self.index_to_world_xyz_mm(box.start)
        return _make_grid(box.shape, self.spacing_mm, origin_xyz_mm, self.direction)

    def resampled(self, target_spacing_mm: tuple[float, float, float] | None) -> VoxelGrid:
        """Make the grid of another spacing (z, y, x) over the same field of view.

        Direction and centre stay. The extent of each axis is rounded to whole voxels, see
        `resampled_shape`. Without a target spacing, the grid itself is returned.
        """
        if target_spacing_mm is None:
            return self
        shape = resampled_shape(self.shape, self.spacing_mm, target_spacing_mm)
        # The centre of each grid, in indices of its own.
        centre = (np.array(self.shape) - 1) / 2
        new_centre = (np.array(shape) - 1) / 2
        # Old voxels per new voxel.
        ratio = np.array(target_spacing_mm, dtype=np.float64) / np.array(self.spacing_mm)
        # Both grids have the same centre. The new first voxel lies `new_centre` new voxels before
        # the centre, which is `new_centre * ratio` in old indices.
        first_index = centre - new_centre * ratio
        origin_xyz_mm = self.index_to_world_xyz_mm(first_index)
        return _make_grid(shape, target_spacing_mm, origin_xyz_mm, self.direction)

    def resized(self, shape: tuple[int, int, int]) -> VoxelGrid:
        """Make the grid of another shape (D, H, W) over exactly the same field of view.

        The spacing of each axis becomes its extent divided by its new number of voxels.
        """
        # Old voxels per new voxel.
        ratio = np.array(self.shape) / np.array(shape)
        spacing_mm = ratio * np.array(self.spacing_mm)
        # The outer face of the first voxel stays at the old index -0.5; the centre of the new first
        # voxel lies half a new voxel further inside.
        origin_xyz_mm = self.index_to_world_xyz_mm(ratio / 2 - 0.5)
        return _make_grid(shape, spacing_mm.tolist(), origin_xyz_mm, self.direction)

    def reoriented(self, order: tuple[int, int, int], flips: tuple[bool, bool, bool]) -> VoxelGrid:
        """Make the grid of an array after `array.transpose(order)` and a flip of some axes.

        Args:
            order: Old axis of each new axis, a permutation of (0, 1, 2).
            flips: Whether each new axis is reversed, after the transposition.

        Raises:
            ValueError: If `order` is no permutation: the new axes would not be orthonormal.
        """
        # Index of the new first voxel on the old grid: at the far end of each flipped axis.
        first_index = [0, 0, 0]
        for old_axis, is_flipped in zip(order, flips, strict=True):
            if is_flipped:
                first_index[old_axis] = self.shape[old_axis] - 1
        # The columns of `direction` are stored in the order (x, y, z): they are reversed to that of
        # array axes, permuted, and reversed back. A flip of an axis negates its column.
        old_columns_zyx = np.array(self.direction)[:, ::-1]
        signs = np.where(flips, -1.0, 1.0)
        columns_zyx = old_columns_zyx[:, list(order)] * signs
        return _make_grid(
            [self.shape[axis] for axis in order],
            [self.spacing_mm[axis] for axis in order],
            self.index_to_world_xyz_mm(first_index),
            columns_zyx[:, ::-1].tolist(),
        )

    def is_close(self, other: VoxelGrid, tolerance_mm: float = 1e-3) -> bool:
        """Whether both grids have the same shape, and all corners agree within a tolerance."""
        if self.shape != other.shape:
            return False
        # World points are linear in the indices: between the corners, the grids do not differ more.
        corners = self.corners_xyz_mm()
        return np.allclose(corners, other.corners_xyz_mm(), rtol=0, atol=tolerance_mm)

    def axis_map_to(self, other: VoxelGrid) -> tuple[tuple[float, float], ...]:
        """Find the map from this grid's indices to those of another grid with the same axes.

        Returns:
            Per axis (z, y, x) a pair (scale, offset) with `other_index = scale * self_index +
            offset`.

        Raises:
            ValueError: If the directions differ by more than `DIRECTION_TOLERANCE`.
        """
        # `==` comes first to save time: grids made from each other have exactly the same direction,
        # and `allclose` takes 0.1 ms.
        has_same_axes = self.direction == other.direction or np.allclose(
            self.direction, other.direction, rtol=0, atol=DIRECTION_TOLERANCE
        )
        if not has_same_axes:
            raise ValueError("the two grids do not have the same axes")
        # Index of this grid's voxel (0, 0, 0) in the other grid.
        offsets = other.world_to_index_zyx(self.origin_xyz_mm)
        scales = np.array(self.spacing_mm) / np.array(other.spacing_mm)
        return tuple(zip(scales.tolist(), offsets.tolist(), strict=True))

    def box_from(self, other: VoxelGrid, box: VoxelBox) -> VoxelBox:
        """Cover a box of another grid with the smallest box of this grid's voxels.

        The voxels of `box` are covered whole, from face to face. Rounding noise below
        `INDEX_TOLERANCE` adds no voxel. An empty box stays empty.

        Args:
            other: Grid with the same axes.
            box: Box in voxels of `other`.

        Returns:
            Box in voxels of this grid; it may reach outside.
        """
        scale, offset = np.transpose(other.axis_map_to(self))
        # The low face of voxel i is at index i - 0.5. Adding 0.5 at the end makes the faces of this
        # grid whole numbers: there, the low face of voxel i is at i.
        low_faces = scale * (np.array(box.start) - 0.5) + offset + 0.5
        high_faces = scale * (np.array(box.stop) - 0.5) + offset + 0.5
        starts = np.floor(low_faces + INDEX_TOLERANCE)
        stops = np.ceil(high_faces - INDEX_TOLERANCE)
        # A box thinner than the tolerance still covers one voxel per axis; an empty axis covers
        # none.
        stops = np.maximum(stops, starts + 1)
        is_empty_axis = np.equal(box.start, box.stop)
        return VoxelBox.of(starts, np.where(is_empty_axis, starts, stops))

    def centres_within(self, other: VoxelGrid) -> VoxelBox:
        """Find the voxels whose centres are in another grid's field of view.

        This grid is assumed to continue beyond its ends.

        Args:
            other: Grid with the same axes.

        Returns:
            Box in voxels of this grid; it may reach outside, and is empty if there are none.
        """
        scale, offset = np.transpose(other.axis_map_to(self))
        # The field of view reaches from -0.5 to shape - 0.5 in indices of the other grid. These
        # faces are converted to indices of this grid, where the centres are whole numbers.
        low_faces = offset - 0.5 * scale
        high_faces = offset + (np.array(other.shape) - 0.5) * scale
        starts = np.ceil(low_faces - INDEX_TOLERANCE)
        stops = np.floor(high_faces + INDEX_TOLERANCE) + 1
        return VoxelBox.of(starts, np.maximum(starts, stops))


def voxel_ml(grid: VoxelGrid) -> float:
    """Volume of a voxel in ml."""
    return math.prod(grid.spacing_mm) / 1000.0


def rounded_ml(volume_ml: float) -> float:
    """Round a volume for a report: to two decimals or, below 1 ml, to three digits.

    So the volume of a small lesion, or of an organ in a micro-CT, does not become 0.

    Example:
        >>> [rounded_ml(volume_ml) for volume_ml in (0.0, 1762.2534, 0.31249, 0.003)]
        [0.0, 1762.25, 0.312, 0.003]
    """
    num_decimals = 2
    if 0 < volume_ml < 1:
        # Decimals up to the first digit that is not 0, and two more.
        num_decimals += math.ceil(-math.log10(volume_ml))
    return round(volume_ml, num_decimals)


def _make_grid(
    shape: Sequence[int], spacing_mm: Sequence[float], origin_xyz_mm: np.ndarray, direction: Any
) -> VoxelGrid:
    """Make a grid from lists and arrays where the dataclass declares tuples."""
    depth, height, width = shape
    z_mm, y_mm, x_mm = spacing_mm
    return VoxelGrid((depth, height, width), (z_mm, y_mm, x_mm), origin_xyz_mm.tolist(), direction)
