"""Crops of a stage: jittered boxes in training, boxes of the coarse stage where there are some."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np

from medseg.data.cache import CachedCase
from medseg.data.crops import StageCrops, jittered
from medseg.data.sampler import sample_rng
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import PLAIN, GridRule, region_crop
from medseg.task import Task


def test_faces_move_by_the_jitter_and_a_voxel_is_left() -> None:
    box, spacing_mm = VoxelBox((40, 50, 60), (80, 90, 100)), (2.0, 1.0, 0.5)
    moved = [jittered(box, 4.0, spacing_mm, sample_rng(0, n)) for n in range(2000)]
    starts_mm = (np.array([moved_box.start for moved_box in moved]) - box.start) * spacing_mm
    assert np.allclose(starts_mm.std(axis=0), 4.0, rtol=0.06)
    assert np.allclose(starts_mm.mean(axis=0), 0.0, atol=0.4)
    small = [
        jittered(VoxelBox((5, 5, 5), (6, 6, 6)), 9.0, spacing_mm, sample_rng(0, n))
        for n in range(200)
    ]
    assert min(min(small_box.shape) for small_box in small) == 1


def test_prediction_cuts_the_box_of_the_coarse_stage_and_training_a_jittered_one(
    cached_cases: list[CachedCase], task: Task
) -> None:
    case, region = cached_cases[0], task.regions[0]
    found = VoxelBox((2, 3, 4), (12, 15, 20))
    crops = StageCrops(
        region_margin_mm=5.0,
        tile_size=(8, 8, 8),
        patch_size=(24, 24, 24),
        coarse_boxes={case.name: {region.name: found}},
    )
    crops = pickle.loads(pickle.dumps(crops))
    plain = crops.crop(case, region, None)
    assert plain == region_crop(found, case.grid, case.grid, 5.0, (8, 8, 8), (1, 1, 1))
    assert crops.crop(case, region, sample_rng(0, 0)) == region_crop(
        found, case.grid, case.grid, 5.0, (24, 24, 24), (1, 1, 1)
    )
    whole = replace(crops, tile_size=None, divisor=(8, 8, 8))
    assert whole.crop(case, region, None) == region_crop(
        found, case.grid, case.grid, 5.0, None, (8, 8, 8), PLAIN, (24, 24, 24)
    )
    other = cached_cases[1]
    assert crops.crop(other, region, None) == StageCrops(
        region_margin_mm=5.0, tile_size=(8, 8, 8)
    ).crop(other, region, None)


def test_a_spacing_is_drawn_with_a_generator_alone(cached_cases: list[CachedCase]) -> None:
    crops = StageCrops(GridRule(range_mm=(1.8, 2.2)))
    assert StageCrops().spacing_mm(cached_cases[0], sample_rng(0, 0)) is None
    assert crops.spacing_mm(cached_cases[0]) == (2.2, 1.8, 2.0)
    assert len({crops.spacing_mm(cached_cases[0], sample_rng(0, n)) for n in range(5)}) == 5
