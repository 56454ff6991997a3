"""Real chest CT: the whole way of a case keeps the scanner's grid and stays within time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medseg import LungSegmenter
from medseg.build import make_network
from medseg.data.task import Region, Task
from medseg.io.read import read_labels
from medseg.weights.files import CARD_FORMAT

TASK = Task(
    "lungs",
    {"left_lung": 1, "right_lung": 2},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (-1000.0, 400.0),
)
MODEL = {"width": 16, "blocks_per_level": [1, 1, 2, 4]}


def untrained(folder: Path, stage: str, spacing_mm: float) -> Path:
    """A checkpoint of the default network with random weights: time and memory do not depend on them."""
    torch.manual_seed(0)
    mode = "whole" if stage == "coarse" else "mirrored"
    network = make_network({**MODEL, "blocks_per_level": tuple(MODEL["blocks_per_level"])}, TASK, mode)  # type: ignore[arg-type]
    card = {
        "format": CARD_FORMAT, "stage": stage, "task": TASK.to_dict(), "num_classes": 3, "spacing_mm": [spacing_mm] * 3,
        "patch_size": None, "tile_size": None, "region_margin_mm": 10.0, "region_mode": mode, "precision": "bf16",
        "model": MODEL, "config": {}, "versions": {},
    }  # fmt: skip
    path = folder / f"{stage}.ckpt"
    torch.save({"state_dict": {f"network.{k}": v for k, v in network.state_dict().items()}, "medseg": card}, path)
    return path


@pytest.mark.slow
def test_a_whole_chest_fits_into_time_and_memory(shared_ct: Path, tmp_path: Path) -> None:
    scan = shared_ct / "lidc_0001" / "ct.nii.gz"
    coarse, fine = untrained(tmp_path, "coarse", 2.0), untrained(tmp_path, "fine", 1.0)
    command = [
        sys.executable, "-m", "medseg.apps.cli", "predict", f"input={scan}", "output=o.nii.gz", f"coarse={coarse}", f"fine={fine}",
    ]  # fmt: skip
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["durations_s"]["total"] < 60
    assert report["peak_resident_bytes"] < 3e9
    assert read_labels(tmp_path / "o.nii.gz").grid.is_close(read_labels(shared_ct / "lidc_0001" / "lungs.nii.gz").grid)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lidc_0001", "rider_0117"])
def test_half_precision_costs_no_dice(case: str, shared_ct: Path) -> None:
    """The command's way beside fp32, both with the weights in the box; of two thousandths that are allowed it takes four ten-thousandths."""
    reference = read_labels(shared_ct / case / "lungs.nii.gz").array
    fast, exact = (
        LungSegmenter(accelerator="cpu", precision=precision).segment(shared_ct / case / "ct.nii.gz").labels.array
        for precision in ("bf16", "fp32")
    )
    assert not np.array_equal(fast, exact), "two ways"
    for value in (1, 2):
        masks = [labels == value for labels in (fast, exact, reference)]
        fast_dice, exact_dice, both_dice = (
            2 * (one & other).sum() / (one.sum() + other.sum()) for one, other in (masks[::2], masks[1:], masks[:2])
        )
        assert abs(fast_dice - exact_dice) < 0.002
        assert both_dice > 0.998
