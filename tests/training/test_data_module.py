"""Data module: what it refuses before a step is taken, and loader workers that start by spawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medseg.data.case_table import Case, CaseSource, Split, read_case_table
from medseg.data.task import Channel, Region, Task
from medseg.errors import UserError
from medseg.geometry.grid_rule import PLAIN
from medseg.training.data_module import CasesDataModule, StageInput

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)
INPUT = StageInput(
    is_coarse=True, spacing_mm=(6.0, 6.0, 6.0), rule=PLAIN, follows_scans=False, resampling="antialiased",
    divisor=(8, 8, 8), max_voxels=None, slab_share=0.0, patch_size=None, boundary_share=0.0, elsewhere_share=0.0, region_margin_mm=0.0, box_jitter_mm=0.0,
    is_mirrored=False, tile_size=None,
)  # fmt: skip


def set_up(train: Case, val: Case, cache_dir: Path, stage_input: StageInput = INPUT) -> CasesDataModule:
    source = CaseSource(Split((train,), (val,), ()), {1: "left_lung", 2: "right_lung"}, 1.0)
    data = CasesDataModule(
        [source], TASK, stage_input, cache_dir=cache_dir, augmentation=None, seed=0, steps=1, batch_size=1, accumulate=1,
        num_workers=0, overfit=False,
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    return data


def test_one_scan_is_not_trained_on_and_validated_under_two_names(tiny_table: Path, tmp_path: Path) -> None:
    first, second, *_ = read_case_table(tiny_table)
    twin = replace(first, name="twin", patient="somebody else")
    said = r"The validation case 'twin' has the same voxels as the training case 'case 0'; remove one of them"
    with pytest.raises(UserError, match=said):
        set_up(first, twin, tmp_path)
    assert len(set_up(first, replace(twin, ignore_findings=frozenset({"duplicate_image"})), tmp_path).val_cases) == 1
    assert len(set_up(first, second, tmp_path).val_cases) == 1
    assert len(set_up(first, first, tmp_path).val_cases) == 1, "a case may be watched while it is learnt"


@pytest.mark.parametrize("is_coarse", [True, False])
def test_loader_workers_that_start_by_spawn_make_the_same_batches(is_coarse: bool, tiny_table: Path, tmp_path: Path) -> None:
    first, second, *_ = read_case_table(tiny_table)
    data = set_up(first, second, tmp_path, replace(INPUT, is_coarse=is_coarse, box_jitter_mm=5.0))
    (expected,) = data.train_batches()
    data.num_workers = 1
    loader = data.train_batches()
    loader.multiprocessing_context = "spawn"
    (batch,) = loader
    assert torch.equal(batch["image"], expected["image"])
    assert batch["case"] == expected["case"]
