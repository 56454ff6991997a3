"""Table of nnU-Net's models on a GPU: its jobs on a CPU, and what its cells are computed from."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from benchmarks import nnunet_card as app
from benchmarks import nnunet_card_jobs as jobs
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.io.write import write_labels

RECORDED = Path(__file__).parents[1] / "nnunet" / "recorded"
GIB = 2**30


def test_the_job_of_medseg_gives_the_recorded_labels_of_nnunet(tmp_path: Path) -> None:
    pytest.importorskip("dynamic_network_architectures")
    with np.load(RECORDED / "torch.npz") as recorded:
        (scan,), spacing_mm, labels = (recorded[key] for key in ("scan", "spacing_mm", "labels"))
    affine = np.diag([*spacing_mm[::-1], 1.0])
    nibabel.save(nibabel.Nifti1Image(scan.transpose(2, 1, 0), affine), tmp_path / "scan.nii.gz")
    job = {
        "program": "medseg",
        "precision": "fp32",
        "device": "cpu",
        "model": str(RECORDED / "torch.zip"),
        "scan": str(tmp_path / "scan.nii.gz"),
        "labels": str(tmp_path / "labels.nii.gz"),
        "max_ram_gib": None,
    }
    measured = jobs.predict(job)
    found = read_image(tmp_path / "labels.nii.gz").array
    assert np.array_equal(found, labels)
    assert measured["computed"] == "torch.float32"
    assert measured["card_gb"] == 0
    assert measured["expected_gb"] > measured["loaded_gb"] > 0


def test_fp32_means_no_autocast_for_nnunet() -> None:
    usual = torch.autocast
    image = torch.ones(1, 1, 2, 2)
    convolution = torch.nn.Conv2d(1, 1, 1)
    for precision, expected in (("fp16", torch.bfloat16), ("fp32", torch.float32)):
        with jobs.nnunet_precision(precision), torch.autocast("cpu", torch.bfloat16):
            assert convolution(image).dtype == expected
    assert torch.autocast is usual


@pytest.mark.parametrize("kind", ["card", "rehearsal"])
def test_the_models_are_of_both_families_and_their_patches_fit(kind: str) -> None:
    families = []
    for description in jobs.models_of(kind).values():
        configuration = description["plans"]["configurations"]["3d_fullres"]
        arguments = configuration["architecture"]["arch_kwargs"]
        divisor = np.prod(arguments["strides"], axis=0)
        assert not np.any(np.array(configuration["patch_size"]) % divisor)
        assert len(arguments["kernel_sizes"]) == arguments["n_stages"]
        families.append(configuration["architecture"]["network_class_name"].rpartition(".")[2])
    assert families == ["PlainConvUNet", "ResidualEncoderUNet"]


def test_the_bound_is_half_of_what_the_arrays_took_but_leaves_what_every_scan_needs() -> None:
    cost = {"loaded_gb": GIB / 1e9, "expected_gb": 5 * GIB / 1e9}
    assert app.limit_gib(cost) == pytest.approx(3, abs=0.011)
    least_gib = (app.OVERHEAD_BYTES + 2 * app.LEAST_BYTES) / GIB
    cost["expected_gb"] = cost["loaded_gb"]
    assert app.limit_gib(cost) == pytest.approx(1 + least_gib, abs=0.011)


def test_the_page_has_a_row_for_each_run_and_each_comparison(tmp_path: Path) -> None:
    array = np.array([0, 1, 1, 1], dtype=np.uint8).reshape(1, 2, 2)
    grid = VoxelGrid(array.shape, (1.0, 1.0, 1.0))
    write_labels(app.label_file(tmp_path, "plain", "nnU-Net"), array, grid)
    write_labels(app.label_file(tmp_path, "plain", "medseg"), array * 0 + 1, grid)
    row = app.label_row(tmp_path, "plain", "nnU-Net", "medseg")
    assert row["voxels that differ"] == 1
    assert row["least Dice"] == pytest.approx(6 / 7)
    cost = {"computed": "torch.float16", "s": 2.0, "peak_gb": 1.5, "card_gb": 0.25}
    of_run = app.cost_row("plain", app.RUNS[0], {"max_ram_gib": None}, cost)
    text = app.page(False, [of_run], [row])
    assert text.startswith("# REHEARSAL on a CPU")
    assert "| plain | nnU-Net | float16 | 2.0 | 1.50 |  |  |  | 0.25 |" in text
    assert "| plain | nnU-Net | medseg | 2 | 4 | 1 | 0.857143 |" in text
