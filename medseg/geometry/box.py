"""Boxes of voxels: half-open bounds per axis, (z, y, x)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def _triple(values: Iterable[Any], name: str) -> tuple[int, int, int]:
    """Copy three whole numbers into a tuple of plain integers."""
    result = tuple(int(value) for value in values)
    if len(result) != 3:
        raise ValueError(f"{name} needs three values (z, y, x), got {len(result)}")
    return result


@dataclass(frozen=True)
class VoxelBox:
    """A box of voxels on some grid; it may reach outside that grid.

    Growth is symmetric about the centre. Where the growth of an axis is odd, the spare voxel goes to the high end (`stop`).

    Attributes:
        start: First voxel per axis, (z, y, x).
        stop: One past the last voxel per axis, (z, y, x), never below `start`.
    """

    start: tuple[int, int, int]
    stop: tuple[int, int, int]

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            object.__setattr__(self, name, _triple(getattr(self, name), name))
        if any(stop < start for start, stop in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"a box must not end before it starts: start {self.start}, stop {self.stop}")

    @classmethod
    def of(cls, starts: Iterable[int], stops: Iterable[int]) -> VoxelBox:
        """Make a box of two iterables of three numbers."""
        return cls(_triple(starts, "start"), _triple(stops, "stop"))

    @classmethod
    def full(cls, shape: Sequence[int]) -> VoxelBox:
        """Make the box of a whole array of this shape (D, H, W)."""
        return cls.of((0, 0, 0), shape)

    @classmethod
    def from_mask(cls, mask: np.ndarray) -> VoxelBox | None:
        """Find the smallest box around all true voxels of a mask (D, H, W); None where there are none."""
        if mask.ndim != 3:
            raise ValueError(f"a mask needs three axes (D, H, W), got {mask.ndim}")
        bounds: list[tuple[int, int]] = []
        for axis in range(3):
            # Outside the bounds found so far the mask is empty: each further axis reads less.
            inside = mask[tuple(itertools.starmap(slice, bounds))]
            hits = np.flatnonzero(inside.any(axis=tuple(other for other in range(3) if other != axis)))
            if hits.size == 0:
                return None
            bounds.append((int(hits[0]), int(hits[-1]) + 1))
        return cls.of(*zip(*bounds, strict=True))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels per axis, (D, H, W)."""
        return _triple((stop - start for start, stop in zip(self.start, self.stop, strict=True)), "shape")

    @property
    def is_empty(self) -> bool:
        """Whether the box contains no voxel."""
        return 0 in self.shape

    def slices(self) -> tuple[slice, slice, slice]:
        """Index an array (D, H, W) with the box.

        Raises:
            ValueError: If the box starts below zero, where numpy would count from the end.
        """
        if min(self.start) < 0:
            raise ValueError(f"a box that starts below zero cannot index an array: start {self.start}")
        z, y, x = map(slice, self.start, self.stop)
        return z, y, x

    def contains(self, other: VoxelBox) -> bool:
        """Whether all voxels of the other box are in this one; every box contains an empty one."""
        return other.is_empty or self.intersect(other) == other

    def intersect(self, other: VoxelBox) -> VoxelBox:
        """Keep the voxels that both boxes contain; an empty box where they do not meet."""
        starts = list(map(max, self.start, other.start))
        return VoxelBox.of(starts, map(max, starts, map(min, self.stop, other.stop)))

    def shifted(self, offset: Sequence[int]) -> VoxelBox:
        """Move the box by an offset in voxels, (z, y, x)."""
        return VoxelBox.of(*([a + b for a, b in zip(ends, offset, strict=True)] for ends in (self.start, self.stop)))

    def expanded(self, voxels: Sequence[int]) -> VoxelBox:
        """Add this many voxels on both sides of each axis, (z, y, x); negative numbers shrink."""
        return VoxelBox.of(
            (start - step for start, step in zip(self.start, voxels, strict=True)),
            (stop + step for stop, step in zip(self.stop, voxels, strict=True)),
        )

    def clipped(self, shape: Sequence[int]) -> VoxelBox:
        """Keep the part inside an array of this shape (D, H, W)."""
        return self.intersect(VoxelBox.full(shape))

    def at_least(self, min_shape: Sequence[int]) -> VoxelBox:
        """Grow about the centre to at least this shape (D, H, W); axes that are long enough stay as they are.

        Example:
            >>> VoxelBox((0, 10, 0), (4, 13, 9)).at_least((6, 6, 6))
            VoxelBox(start=(-1, 9, 0), stop=(5, 15, 9))
        """
        growth = [max(0, want - have) for want, have in zip(min_shape, self.shape, strict=True)]
        starts = [start - step // 2 for start, step in zip(self.start, growth, strict=True)]
        return VoxelBox.of(starts, map(sum, zip(starts, self.shape, growth, strict=True)))

    def to_multiple(self, divisor: Sequence[int]) -> VoxelBox:
        """Grow about the centre until each axis is a multiple of its divisor (z, y, x).

        Raises:
            ValueError: If a divisor is below one.
        """
        if min(divisor) < 1:
            raise ValueError(f"divisors must be 1 or more, got {tuple(divisor)}")
        return self.at_least([-(-have // step) * step for have, step in zip(self.shape, divisor, strict=True)])

    def to_dict(self) -> dict[str, list[int]]:
        """Convert to plain types for a JSON file."""
        return {"start": list(self.start), "stop": list(self.stop)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> VoxelBox:
        """Read what `to_dict` wrote."""
        return cls.of(data["start"], data["stop"])
