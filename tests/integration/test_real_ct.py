"""Real chest CT: the whole way of a case keeps the scanner's grid and stays within time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from medseg import LungSegmenter
from medseg.io.read import read_labels


@pytest.mark.slow
def test_a_whole_chest_fits_into_time_and_memory(shared_ct: Path, tmp_path: Path) -> None:
    scan = shared_ct / "lidc_0001" / "ct.nii.gz"
    command = [sys.executable, "-m", "medseg.commands.cli", "predict", f"input={scan}", "output=o.nii.gz"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["durations_s"]["total"] < 60
    assert report["peak_resident_bytes"] < 3e9
    assert read_labels(tmp_path / "o.nii.gz").grid.is_close(read_labels(shared_ct / "lidc_0001" / "lungs.nii.gz").grid)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lidc_0001", "rider_0117"])
def test_half_precision_costs_no_dice(case: str, shared_ct: Path) -> None:
    """The command's way beside fp32, both with the included weights; of two thousandths that are allowed it takes four ten-thousandths."""
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
