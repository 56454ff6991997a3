"""Real chest CT: the whole way of a case keeps the scanner's grid, within time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from medseg.io.read import read_labels


@pytest.mark.slow
def test_a_whole_chest_fits_into_time_and_memory(shared_ct: Path, tmp_path: Path) -> None:
    scan = shared_ct / "lidc_0001" / "ct.nii.gz"
    command = [
        sys.executable,
        "-m",
        "medseg.commands.cli",
        "predict",
        f"input={scan}",
        "output=o.nii.gz",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["durations_s"]["total"] < 60
    assert report["peak_resident_bytes"] < 3e9
    assert read_labels(tmp_path / "o.nii.gz").grid.is_close(
        read_labels(shared_ct / "lidc_0001" / "lungs.nii.gz").grid
    )
