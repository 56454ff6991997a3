"""Reference lungs of real scans pass boxes, crops and joining as a perfect fine stage's would."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import TASK, dice

from medseg import LungSegmenter
from medseg.cascade.join import join
from medseg.cascade.localise import locate_regions
from medseg.geometry.grid_rule import region_crop
from medseg.inference.options import InferenceOptions
from medseg.io.read import read_labels
from medseg.preprocess.orient import orient
from medseg.preprocess.resample import resample_labels


@pytest.mark.slow
def test_lungs_do_not_depend_on_the_memory(shared_ct: Path) -> None:
    with (shared_ct / "table.csv").open(encoding="utf-8") as table:
        images = {row["case"]: row["image"] for row in csv.DictReader(table)}
    for name in ("acrin_001_tp1", "cip_ct64"):
        results = {
            gib: LungSegmenter(accelerator="cpu", options=InferenceOptions(budget_gib=gib)).segment(
                shared_ct / images[name]
            )
            for gib in (4.0, 1.0, 0.25, 0.015)
        }
        assert not any("slabs" in plan for plan in results[4.0].tiling_plans.values())
        assert all("slabs" in plan for plan in results[0.015].tiling_plans.values())
        for gib, value in itertools.product(results, (1, 2)):
            assert (
                dice(results[gib].labels.array == value, results[4.0].labels.array == value)
                >= 0.9995
            ), (name, gib)


@pytest.mark.slow
def test_reference_lungs_come_back_on_the_scanners_grid(shared_ct: Path) -> None:
    with (shared_ct / "table.csv").open() as table:
        cases = [row for row in csv.DictReader(table) if row["view"] == "whole"][:4]
    for case in cases:
        volume = read_labels(shared_ct / case["labels"])
        labels, grid, orientation = orient(volume.array, volume.grid)
        coarse, fine = grid.resampled((2.0, 2.0, 2.0)), grid.resampled((1.0, 1.0, 1.0))
        found = locate_regions(resample_labels(labels, grid, coarse, 3).numpy(), coarse, TASK)
        assert set(found.boxes) == {"left_lung", "right_lung"}
        assert not any("wrong sides" in warning for warning in found.warnings)
        results = []
        for region in TASK.regions:
            box = region_crop(found.boxes[region.name], coarse, fine, 10.0, None, (16, 16, 16)).box
            (value,) = TASK.region_values(region)
            mask = resample_labels(labels == value, grid, fine.crop(box), 2)
            results.append((region, mask[None].to(torch.float16), fine.crop(box)))
        joined = orientation.from_lps(join(results, grid, TASK))
        for value in (1, 2):
            assert dice(joined == value, np.asarray(volume.array) == value) >= 0.98, case["case"]
