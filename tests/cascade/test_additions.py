"""Parts that only the coarse stage finds: thick ones are added whole, thin ones are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medseg.cascade.additions import add_parts, find_additions
from medseg.data.task import Channel, Region, Task
from medseg.geometry.grid import VoxelBox, VoxelGrid

GRID = VoxelGrid((20, 24, 28), (4.0, 4.0, 4.0), (0.0, 0.0, 0.0))
TASK = Task("organs", {"shell": 1, "core": 2}, (Region("organ", ("shell", "core")),), (Channel("mr", None, "zscore"),))


def coarse_labels(part: tuple[slice, slice, slice]) -> np.ndarray:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[part] = 1
    return labels


def probs_of(mask: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mask.astype(np.float16))[None]


@pytest.mark.parametrize(("slices", "is_thick"), [(1, False), (2, False), (3, True), (5, True)])
def test_a_part_is_added_if_a_ball_fits_into_it(slices: int, is_thick: bool) -> None:
    labels = coarse_labels((slice(4, 16), slice(6, 18), slice(6, 20)))
    fine = labels.copy()
    fine[16 - slices :] = 0
    additions = find_additions(labels, GRID, probs_of(fine == 1), GRID, (1,), 8.0)
    missing = (labels == 1) & (fine == 0)
    assert not additions[~missing].any()
    assert additions.sum() > 0.9 * missing.sum() if is_thick else not additions.any()


def test_the_outline_is_left_to_the_fine_stage() -> None:
    labels = coarse_labels((slice(4, 16), slice(6, 18), slice(6, 20)))
    inner = coarse_labels((slice(5, 15), slice(7, 17), slice(7, 19)))
    assert not find_additions(labels, GRID, probs_of(inner == 1), GRID, (1,), 8.0).any()


def test_the_border_of_the_scan_makes_no_part_thin() -> None:
    labels = coarse_labels((slice(0, 1), slice(6, 18), slice(6, 20)))
    nothing = probs_of(np.zeros(GRID.shape))
    assert find_additions(labels, GRID, nothing, GRID, (1,), 8.0).sum() > 0.9 * (labels == 1).sum()
    assert not find_additions(np.roll(labels, 5, axis=0), GRID, nothing, GRID, (1,), 8.0).any()


def test_added_voxels_get_the_label_of_the_coarse_stage_on_a_finer_crop() -> None:
    labels = coarse_labels((slice(4, 16), slice(6, 18), slice(6, 20)))
    labels[10:16][labels[10:16] == 1] = 2
    crop_grid = GRID.crop(VoxelBox((2, 4, 4), (18, 20, 22))).resampled((1.0, 1.0, 1.0))
    probs = torch.zeros((2, *crop_grid.shape), dtype=torch.float16)
    additions = find_additions(labels, GRID, probs, crop_grid, (1, 2), 8.0)
    add_parts(labels, GRID, additions, probs, crop_grid, TASK.regions[0], TASK)
    volumes_ml = [float((one > 0.5).sum()) / 1000 for one in probs]
    for volume_ml, value in zip(volumes_ml, (1, 2), strict=True):
        assert volume_ml == pytest.approx(float((additions & (labels == value)).sum()) * 64 / 1000, rel=0.03)
    assert float(probs.sum(0).max()) <= 1.01
