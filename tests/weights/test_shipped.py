"""Included weights: small, complete, and good on an unseen scan by the one-line command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from medseg.cascade.cascade import Cascade
from medseg.cascade.load import load_stage
from medseg.io.read import read_image, read_labels
from medseg.io.volume import Volume
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec
from medseg.weights.files import SHIPPED_FOLDER, read_weights, shipped_weights


def dices(labels: np.ndarray, reference: np.ndarray) -> list[float]:
    pairs = [(labels == value, reference == value) for value in (1, 2)]
    return [2 * (pred & target).sum() / (pred.sum() + target.sum()) for pred, target in pairs]


def test_they_are_small_and_name_no_folder() -> None:
    paths = [shipped_weights("lungs", stage) for stage in ("coarse", "fine")]
    assert sum(path.stat().st_size for path in paths) <= 8e6
    assert {path.name for path in paths} == {
        path.name for path in SHIPPED_FOLDER.glob("*.safetensors")
    }
    for path, stage, spacing_mm in zip(paths, ("coarse", "fine"), (4.0, 1.0), strict=True):
        metadata, _ = read_weights(path, stage, stage)
        assert metadata["spacing_mm"] == [spacing_mm] * 3
        assert metadata["config"]["data"]["fold"] == "all"
        assert not re.search(r'"(/|[A-Za-z]:\\)', json.dumps(metadata["config"])), (
            "an absolute path"
        )


@pytest.mark.slow
def test_they_segment_a_phantom_that_they_never_saw() -> None:
    phantom = make_phantom(PhantomSpec(seed=4711, index=1))
    stages = [
        load_stage(shipped_weights("lungs", stage), stage, torch.device("cpu"))
        for stage in ("coarse", "fine")
    ]
    result = Cascade(*stages).segment(Volume(phantom.image_hu, phantom.grid))
    assert min(dices(result.labels, phantom.labels)) > 0.96
    assert result.warnings == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "source", "least"),
    [
        ("lidc_0001", "ct.nii.gz", [0.95, 0.95]),
        (
            "lungdx_a0002_b40f",
            "dicom",
            [0.95, 0.92],
        ),  # right: a tenth of the reference is a guess around a tumour
    ],
)
def test_the_one_line_command_segments_a_scan(
    case: str, source: str, least: list[float], shared_ct: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "medseg.commands.cli",
        "predict",
        f"input={shared_ct / case / source}",
        "output=lungs.nii.gz",
    ]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300
    )
    assert result.returncode == 0, result.stderr
    labels, reference = (
        read_labels(tmp_path / "lungs.nii.gz"),
        read_labels(shared_ct / case / "lungs.nii.gz"),
    )
    assert labels.grid.is_close(read_image(shared_ct / case / source).grid)
    # Scans that the weights have seen: this proves the command, the folds
    # (medseg/weights/README.md) judge the weights.
    assert (np.array(dices(labels.array, reference.array)) > least).all()
