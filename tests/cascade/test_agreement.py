"""The Dice coefficient between the stages, against a count on a grid that both can be brought to exactly."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import TASK

from medseg.cascade.agreement import agreement
from medseg.cascade.localise import Localisation
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid


def found(labels: np.ndarray, grid: VoxelGrid) -> Localisation:
    masks = {region.name: np.isin(labels, TASK.region_values(region)) for region in TASK.regions}
    boxes = {name: VoxelBox.from_mask(mask) for name, mask in masks.items() if mask.any()}
    return Localisation(labels, grid, {name: box for name, box in boxes.items() if box is not None}, [])


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def test_equal_labels_agree_and_other_ones_as_they_overlap() -> None:
    rng = np.random.default_rng(0)
    grid = VoxelGrid((6, 8, 10), (4.0, 2.0, 2.0), (3.0, -7.0, 1.0))
    coarse, final = (rng.integers(0, 3, grid.shape).astype(np.uint8) for _ in range(2))
    assert agreement(found(coarse, grid), coarse, grid, TASK) == {"left_lung": 1.0, "right_lung": 1.0}
    expected = {name: dice(coarse == value, final == value) for name, value in TASK.labels.items()}
    assert agreement(found(coarse, grid), final, grid, TASK) == pytest.approx(expected, abs=1e-12)


def test_a_finer_grid_is_asked_at_the_centres_of_the_coarse_voxels() -> None:
    """Three fine voxels to a coarse one: the middle one decides, and what lies beyond the coarse grid is not asked."""
    rng = np.random.default_rng(1)
    coarse_grid = VoxelGrid((4, 5, 6), (6.0, 3.0, 4.5), (10.0, 20.0, 30.0))
    fine_grid = VoxelGrid((16, 15, 18), (2.0, 1.0, 1.5), (10.0 - 1.5, 20.0 - 1.0, 30.0 - 2.0))
    coarse, final = rng.integers(0, 3, coarse_grid.shape).astype(np.uint8), rng.integers(0, 3, fine_grid.shape).astype(np.uint8)
    middle = final[1:12:3, 1::3, 1::3]
    expected = {name: dice(coarse == value, middle == value) for name, value in TASK.labels.items()}
    assert agreement(found(coarse, coarse_grid), final, fine_grid, TASK) == pytest.approx(expected, abs=1e-12)


def test_a_region_that_the_coarse_stage_has_not_found_has_none() -> None:
    grid = VoxelGrid((4, 4, 4), (2.0, 2.0, 2.0))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[1:3] = 2
    assert agreement(found(labels, grid), 0 * labels, grid, TASK) == {"right_lung": 0.0}
