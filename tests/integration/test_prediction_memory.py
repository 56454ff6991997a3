"""Memory of a prediction from file to file, measured by the system on a separate process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_labels
from medseg.io.write import write_image
from medseg.phantom.scan import make_phantom
from medseg.phantom.spec import PhantomSpec

COMMAND = [sys.executable, "-m", "medseg.commands.cli"]
# The coarse stage finds both sides everywhere, and the fine weights are noise: about every second
# voxel is lung, in very many parts.
ABSURD = """
import dataclasses, sys, torch
from medseg.commands.entry import run_command
from medseg.cascade import cascade as cascade_module
from medseg.prediction import batch
from medseg.geometry.grid import VoxelBox

def everywhere(image_hu, grid, stage, *others, localise=cascade_module.localise, **options):
    localised = localise(image_hu, grid, stage, *others, **options)
    full = VoxelBox.full(localised.grid.shape)
    boxes = {region.name: full for region in stage.task.regions}
    return dataclasses.replace(localised, boxes=boxes)

def with_noise(*arguments, load=batch.load_cascade, **options):
    cascade = load(*arguments, **options)
    torch.manual_seed(0)
    for weights in cascade.fine.network.parameters():
        weights.data = 0.2 * torch.randn_like(weights)
    return cascade

cascade_module.localise, batch.load_cascade = everywhere, with_noise
run_command("predict")
"""


# A process counts the memory of the one that started it, so a small one starts it.
STARTER = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print("", usage.ru_maxrss, sep="\\n")
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_bytes(command: Sequence[str], folder: Path) -> int:
    """Run a command to its end; the most memory that it held resident."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    starter = [sys.executable, "-c", STARTER, *command]
    result = subprocess.run(
        starter, cwd=folder, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    return int(result.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


def make_scan(path: Path, view: str, num_slices: int, slice_mm: float, repeats: int) -> None:
    """A phantom of 512 × 512 voxels of 0.8 mm, padded outside the field; copies of large voxels."""
    spec = PhantomSpec(
        seed=5,
        index=0,
        view=view,
        spacing_mm=(slice_mm * repeats, 3.2, 3.2),
        num_slices=num_slices // repeats,
        model_spacing_mm=(4.0, 4.0, 4.0),
        padding_hu=-2048,
    )
    made = make_phantom(spec)
    image_hu = made.image_hu.repeat(repeats, 0).repeat(4, 1).repeat(4, 2)
    grid = VoxelGrid(
        (image_hu.shape[0], 512, 512),
        (slice_mm, 0.8, 0.8),
        made.grid.origin_xyz_mm,
        np.asarray(made.grid.direction).tolist(),
    )
    write_image(path, image_hu, grid)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_trunk_of_1200_slices_stays_below_three_gigabytes(tmp_path: Path) -> None:
    make_scan(tmp_path / "trunk.nii.gz", "trunk", 1200, 1.0, 4)
    peak = peak_bytes(
        [*COMMAND, "predict", "input=trunk.nii.gz", "output=lungs.nii.gz", "accelerator=cpu"],
        tmp_path,
    )
    assert peak < 3.0e9
    labels = read_labels(tmp_path / "lungs.nii.gz").array
    assert labels.shape == (1200, 512, 512)
    assert json.loads((tmp_path / "lungs.json").read_text())["volume_ml"].keys() == {
        "left_lung",
        "right_lung",
    }
    assert all(np.count_nonzero(labels[::4] == value) * 4 * 0.64e-3 > 1000 for value in (1, 2)), (
        "a litre a side at least"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_slices", "slice_mm", "repeats"),
    [
        (1, 5.0, 1),
        pytest.param(132, 2.5, 2, marks=pytest.mark.thorough),
        pytest.param(520, 0.6, 4, marks=pytest.mark.thorough),
    ],
)
def test_the_expected_peak_is_within_a_tenth_of_the_measured_one(
    num_slices: int, slice_mm: float, repeats: int, tmp_path: Path
) -> None:
    make_scan(tmp_path / "thorax.nii.gz", "whole", num_slices, slice_mm, repeats)
    peak = peak_bytes(
        [*COMMAND, "predict", "input=thorax.nii.gz", "output=lungs.nii.gz", "accelerator=cpu"],
        tmp_path,
    )
    expected = json.loads((tmp_path / "lungs.json").read_text())["expected"]["peak_resident_bytes"]
    assert 0.9 < expected / peak < 1.1


@pytest.mark.slow
def test_a_memory_contract_is_kept_and_changes_no_label(tmp_path: Path) -> None:
    """Under 1 GiB the scan of 630 MB waits in files; under 0.9 GiB the fine stage runs in slabs."""
    make_scan(tmp_path / "trunk.nii.gz", "trunk", 1200, 1.0, 8)
    command = [*COMMAND, "predict", "input=trunk.nii.gz", "accelerator=cpu"]
    peak = peak_bytes([*command, "output=small.nii.gz", "inference.max_ram_gib=1"], tmp_path)
    assert peak < 2**30
    assert peak_bytes([*command, "output=large.nii.gz"], tmp_path) > 1.1 * 2**30
    assert (
        peak_bytes([*command, "output=slabs.nii.gz", "inference.max_ram_gib=0.9"], tmp_path) < 2**30
    )
    large = read_labels(tmp_path / "large.nii.gz").array
    for name, value in itertools.product(("small", "slabs"), (1, 2)):
        other = read_labels(tmp_path / f"{name}.nii.gz").array
        dice = (
            2
            * np.count_nonzero((other == value) & (large == value))
            / np.count_nonzero([other == value, large == value])
        )
        assert dice >= 0.9995
    passes = json.loads((tmp_path / "slabs.json").read_text())["passes"]
    assert all("in slabs" in passes[f"refine_{side}_lung"] for side in ("left", "right"))


@pytest.mark.thorough
@pytest.mark.slow
def test_boxes_that_hold_everything_stay_below_three_gigabytes(tmp_path: Path) -> None:
    """Both sides are refined on the whole scan; overlap is left out: it costs time, not memory."""
    make_scan(tmp_path / "thorax.nii.gz", "whole", 132, 2.5, 2)
    command = [
        sys.executable,
        "-c",
        ABSURD,
        "input=thorax.nii.gz",
        "output=lungs.nii.gz",
        "accelerator=cpu",
        "inference.overlap=0",
    ]
    assert peak_bytes(command, tmp_path) < 3.0e9
    report = json.loads((tmp_path / "lungs.json").read_text())
    assert all(
        np.prod(np.subtract(box["voxels"]["stop"], box["voxels"]["start"])) > 50e6
        for box in report["boxes"].values()
    )
