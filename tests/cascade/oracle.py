"""Networks that know the answer, and scans with two bright blocks: a cascade without training."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as functional
from scipy import ndimage
from torch import Tensor, nn

from medseg.cascade.stage import TrainedStage
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import GridRule
from medseg.io.volume import Volume
from medseg.preprocess.orient import Orientation
from medseg.task import Channel, Region, Task

OBLIQUE = ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0))
GRID = VoxelGrid((26, 90, 130), (3.1, 0.9, 0.8), (-11.0, 20.0, 300.0), OBLIQUE)
LEFT = (slice(7, 19), slice(28, 68), slice(78, 118))
RIGHT = (slice(6, 17), slice(31, 66), slice(12, 50))
AS_ORIENTED = Orientation((0, 1, 2), (False, False, False))
TASK = Task(
    "blocks",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 0.0)),),
)

# Lattices and rules of a stage. The blocks are about 37 x 36 x 32 mm, the scan 81 x 81 x 104 mm.
RULES: dict[str, tuple[tuple[float, float, float] | None, GridRule]] = {
    "fixed size, from the scan's own grid": (None, GridRule(size=(56, 64, 48))),
    "fixed size, from a lattice": ((1.0, 0.8, 0.9), GridRule(size=(56, 48, 64))),
    "multi-scale, from the scan's own grid": (None, GridRule(range_mm=(1.0, 2.5))),
    "multi-scale, from a lattice": ((1.0, 0.8, 0.9), GridRule(range_mm=(1.1, 1.3))),
    "fixed resolution": ((1.2, 1.2, 1.2), GridRule(is_cube=True)),
    "fixed resolution, padded": ((1.2, 1.2, 1.2), GridRule(is_cube=True, is_padded=True)),
}


class CoarseOracle(nn.Module):
    """Bright voxels are label 1 in the half of larger x (the patient's left), otherwise label 2."""

    divisor = (8, 8, 8)

    def forward(self, image: Tensor) -> Tensor:
        assert all(size % 8 == 0 for size in image.shape[2:])
        bright = 10.0 * (image - 0.01)
        is_left = torch.arange(image.shape[-1]) >= image.shape[-1] / 2
        nothing = torch.full_like(bright, -30.0)
        return torch.cat(
            [
                torch.zeros_like(bright),
                torch.where(is_left, bright, nothing),
                torch.where(is_left, nothing, bright),
            ],
            1,
        )


class FineOracle(nn.Module):
    """Bright voxels (above half way from air to water) are foreground."""

    divisor = (8, 8, 8)

    def forward(self, image: Tensor) -> Tensor:
        assert all(size % 8 == 0 for size in image.shape[2:])
        return torch.cat([torch.zeros_like(image), 10.0 * (image - 0.01)], 1)


class Alternating(FineOracle):
    """Knows the region by the number of the call: left, right, left, …"""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def is_left(self) -> bool:
        """Whether this call is for the left region; counts it."""
        self.num_calls += 1
        return self.num_calls % 2 == 1


class MiddleOracle(FineOracle):
    """Foreground is the bright part in the middle alone, without the other region in a crop."""

    def forward(self, image: Tensor) -> Tensor:
        parts, _ = ndimage.label(image[0, 0].numpy() > 0)
        middle = torch.from_numpy(parts == parts[tuple(size // 2 for size in parts.shape)])
        around = functional.max_pool3d(middle.float()[None, None], 3, 1, 1) > 0  # its slopes too
        return super().forward(torch.where(around, image, -1.0))


def stage(network: nn.Module, name: str, task: Task = TASK, **changes: object) -> TrainedStage:
    """A stage with the spacing of its name."""
    values: dict[str, object] = {
        "spacing_mm": (2.0, 2.0, 2.0) if name == "coarse" else (1.0, 1.0, 1.0),
        "tile_size": None,
        "region_margin_mm": 6.0,
        "precision": "fp32",
        "device": torch.device("cpu"),
    }
    return TrainedStage(network, name, task, **(values | changes))


def scan(
    stored: Orientation = AS_ORIENTED,
    blocks: tuple[tuple[tuple[slice, slice, slice], int], ...] = ((LEFT, 1), (RIGHT, 2)),
) -> tuple[Volume, np.ndarray]:
    """Make a scan in any storage order, and its labels in the same order."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    for block, value in blocks:
        labels[block] = value
    image_hu = np.where(labels > 0, 0, -1000).astype(np.int16)
    ends = np.zeros(GRID.shape, dtype=bool)
    ends[:, :, :8] = ends[:, :, -8:] = True
    image_hu[
        ends & (labels == 0)
    ] = -500  # not bright, but denser than air: the body reaches from side to side
    # Storing undoes `to_lps`: the grid whose orientation is `stored`.
    order = tuple(int(axis) for axis in np.argsort(stored.order))
    flips = tuple(stored.flips[axis] for axis in order)
    grid = GRID.reoriented((order[0], order[1], order[2]), (flips[0], flips[1], flips[2]))
    return Volume(stored.from_lps(image_hu), grid), stored.from_lps(labels)


def dice(pred: np.ndarray, target: np.ndarray) -> float:
    """Overlap of two masks, 1 where both are empty."""
    total = int(pred.sum()) + int(target.sum())
    return 2.0 * int((pred & target).sum()) / total if total else 1.0
