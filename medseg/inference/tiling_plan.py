"""Tiling plan: whether a crop goes through a network whole or in tiles, by the memory budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from medseg.inference.tiles import Shape, round_up

# Smaller tiles show too little of an organ, voxels per axis.
MIN_TILE = 64


@dataclass(frozen=True)
class TilingPlan:
    """How one crop goes through a network.

    Attributes:
        tile_size: Tile in voxels (z, y, x), a multiple of the divisor; None runs the crop as a whole.
        batch_size: Number of tiles that go through the network together.
        num_bytes: Predicted memory of the network, without its weights, the crop and the result.
    """

    tile_size: Shape | None
    batch_size: int
    num_bytes: int

    def __str__(self) -> str:
        if self.tile_size is None:
            return "whole"
        return f"tiles of {'×'.join(map(str, self.tile_size))}" + (f", {self.batch_size} at a time" * (self.batch_size > 1))


def plan_tiling(
    shape: Shape,
    divisor: Shape,
    bytes_per_voxel: float,
    budget_bytes: float,
    tile_size: Shape | None = None,
    max_batch: int = 1,
) -> TilingPlan:
    """Find the largest network input within the budget.

    Args:
        shape: Size of the crop, (z, y, x).
        divisor: Required multiple of the input size, (z, y, x).
        bytes_per_voxel: Memory of the network per voxel of its input.
        budget_bytes: Memory that the network may use.
        tile_size: Wanted tile, reduced where the budget is too small for it. None: the whole crop, and where it does not fit the
            largest tile that does, as close to a cube as the crop allows.
        max_batch: Largest number of tiles at a time.

    Raises:
        ValueError: If the smallest tile exceeds the budget; the message names its memory.
    """
    wanted = round_up(shape if tile_size is None else tile_size, divisor)
    tile = list(wanted)
    least = [min(size, low) for size, low in zip(wanted, round_up((MIN_TILE, MIN_TILE, MIN_TILE), divisor), strict=True)]
    while math.prod(tile) * bytes_per_voxel > budget_bytes:
        # The longest axis that can still shrink; the first one of several, z, is where scans are longest.
        axis = max((axis for axis in range(3) if tile[axis] > least[axis]), key=lambda axis: tile[axis], default=None)
        if axis is None:
            raise ValueError(
                f"the smallest tile, {'×'.join(map(str, tile))}, needs {math.prod(tile) * bytes_per_voxel / 2**30:.2f} GiB"
            )
        tile[axis] -= divisor[axis]
    depth, height, width = tile
    num_bytes = round(math.prod(tile) * bytes_per_voxel)
    if tile_size is None and (depth, height, width) == wanted:
        return TilingPlan(None, 1, num_bytes)
    batch_size = max(1, min(max_batch, int(budget_bytes // max(1, num_bytes))))
    return TilingPlan((depth, height, width), batch_size, batch_size * num_bytes)
