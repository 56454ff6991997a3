"""Decide how a crop goes through a network: whole where the memory allows it, else in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from medseg.inference.tiles import Shape, multiple

# Smaller tiles see too little of an organ to be worth having, voxels per axis.
MIN_TILE = 64


@dataclass(frozen=True)
class Pass:
    """How one crop goes through a network.

    Attributes:
        tile_shape: Tile size in voxels (z, y, x), a multiple of the divisor; None runs the crop as a whole.
        batch_size: Tiles that go through the network together.
        num_bytes: What the network is predicted to need at a time, beside its weights, the crop and the result.
    """

    tile_shape: Shape | None
    batch_size: int
    num_bytes: int

    def __str__(self) -> str:
        if self.tile_shape is None:
            return "whole"
        return f"tiles of {'×'.join(map(str, self.tile_shape))}" + (f", {self.batch_size} at a time" * (self.batch_size > 1))


def plan_pass(
    shape: Shape,
    divisor: Shape,
    bytes_per_voxel: float,
    budget_bytes: float,
    tile_shape: Shape | None = None,
    max_batch: int = 1,
) -> Pass:
    """Find the largest input that the budget allows.

    Args:
        shape: Size of the crop (z, y, x).
        divisor: Numbers per axis that the network's input must be a multiple of.
        bytes_per_voxel: What the network needs per voxel of its input.
        budget_bytes: What it may need.
        tile_shape: Tile that is wanted; cut down where the budget is too small for it. None: the whole crop, and
            where it does not fit the largest tile that does, as near to a cube as the crop allows.
        max_batch: Most tiles at a time.

    Raises:
        ValueError: If the budget does not even hold the smallest tile; says what it needs.
    """
    wanted = multiple(shape if tile_shape is None else tile_shape, divisor)
    tile = list(wanted)
    least = [min(size, low) for size, low in zip(wanted, multiple((MIN_TILE, MIN_TILE, MIN_TILE), divisor), strict=True)]
    while math.prod(tile) * bytes_per_voxel > budget_bytes:
        # The longest axis that can still be cut; the first of equals, where a scan has the most to cut.
        axis = max((axis for axis in range(3) if tile[axis] > least[axis]), key=lambda axis: tile[axis], default=None)
        if axis is None:
            raise ValueError(
                f"the smallest tile, {'×'.join(map(str, tile))}, needs {math.prod(tile) * bytes_per_voxel / 2**30:.2f} GiB"
            )
        tile[axis] -= divisor[axis]
    depth, height, width = tile
    num_bytes = round(math.prod(tile) * bytes_per_voxel)
    if tile_shape is None and (depth, height, width) == wanted:
        return Pass(None, 1, num_bytes)
    batch_size = max(1, min(max_batch, int(budget_bytes // max(1, num_bytes))))
    return Pass((depth, height, width), batch_size, batch_size * num_bytes)
