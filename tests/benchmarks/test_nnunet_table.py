"""Table of nnU-Net's models: what its cells are computed from."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import nnunet_table as app
from benchmarks.nnunet_reference import PassClock, measured_apart
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.io.write import write_image, write_labels


def busy(seconds: float) -> dict[str, Any]:
    start_s = time.process_time()
    while time.process_time() - start_s < seconds:
        pass
    return {"found": 3}


def test_a_prediction_is_measured_in_a_process_of_its_own() -> None:
    measured = measured_apart(busy, 0.05)
    assert measured["found"] == 3
    assert 0.05 <= measured["cpu_s"] < 1
    assert measured["peak_gb"] > 0.01
    assert measured_apart(os._exit, 9) == {"error": "ended with code 9"}


def test_sums_between_the_slabs_of_a_pass_are_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def in_slabs(network: Any, image: Any, budget: float, take: Any) -> None:
        busy(0.02)
        take("planes")

    monkeypatch.setattr(app.medseg.nnunet.model, "call_network", lambda *_: busy(0.02))
    monkeypatch.setattr(app.medseg.nnunet.model, "logits_in_slabs", in_slabs)
    clock = PassClock()
    app.watch_passes(clock)
    app.medseg.nnunet.model.call_network(None, None, None)
    app.medseg.nnunet.model.logits_in_slabs(None, None, 1.0, lambda _: busy(0.5))
    assert 0.04 <= clock.seconds < 0.5


def test_the_smallest_dice_counts_labels_that_one_program_alone_has() -> None:
    labels = np.array([0, 1, 1, 2, 2, 2])
    assert app.least_dice(labels, labels) == 1.0
    assert app.least_dice(labels, np.array([0, 1, 1, 2, 2, 1])) == pytest.approx(0.8)
    assert app.least_dice(labels, np.array([3, 1, 1, 2, 2, 2])) == 0.0
    assert app.least_dice(np.zeros(3), np.zeros(3)) == 1.0


def test_a_model_is_a_toy_a_folder_or_an_ensemble_and_has_a_scan_for_each_channel(
    tmp_path: Path,
) -> None:
    scan = tmp_path / "ct.nii.gz"
    image = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    write_image(scan, image, VoxelGrid((2, 3, 4), (1.0, 1.0, 1.0)))
    for parent, names in ((tmp_path / "models" / "toy", "ab"), (tmp_path / "mine", "a")):
        for name in ("t__p__3d_cascade_fullres", "t__p__3d_lowres"):
            (parent / name).mkdir(parents=True)
            dataset = {"channel_names": dict(enumerate(names)), "labels": {"background": 0}}
            (parent / name / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")
    mine = tmp_path / "mine"
    own, other, both = app.list_jobs(["toy", str(mine), f"toy+{mine}"], [scan], tmp_path, None)
    toy_folder = str(tmp_path / "models" / "toy" / "t__p__3d_cascade_fullres")
    assert own["models"] == [toy_folder]
    assert own["scans"] == [str(scan), str(tmp_path / "ct_second.nii.gz")]
    assert np.array_equal(read_image(Path(own["scans"][1])).array, -image)
    assert (other["name"], other["scans"], other["classes"]) == ("mine", [str(scan)], 1)
    assert both["models"] == [toy_folder, str(mine / "t__p__3d_cascade_fullres")]
    assert both["name"] == "toy+mine"


def test_the_phantom_is_a_part_with_both_lungs(tmp_path: Path) -> None:
    volume = read_image(Path(app.write_phantom(tmp_path)["path"]))
    assert volume.array.shape == (8, 20, 44)
    air = volume.array < -500
    assert 0.2 < air.mean() < 0.8
    assert air[:, :, :15].any()
    assert air[:, :, -15:].any()


def test_a_row_has_the_ratios_and_a_forecast_by_the_first_scan(tmp_path: Path) -> None:
    grid = VoxelGrid((2, 3, 4), (1.0, 1.0, 1.0))
    job = {"name": "toy", "classes": 2, "scans": ["ct.nii.gz"], "labels": "", "own_labels": ""}
    for key, value in (("labels", 0), ("own_labels", 1)):
        array = np.zeros(grid.shape, dtype=np.uint8)
        array[0, 0, 0] = value
        job[key] = str(tmp_path / f"{key}.nii.gz")
        write_labels(tmp_path / f"{key}.nii.gz", array, grid)
    own = {
        "cpu_s": 3.0,
        "network_cpu_s": 1.25,
        "case_cpu_s": 2.0,
        "case_network_cpu_s": 1.0,
        "peak_gb": 0.5,
        "expected_gb": 0.4,
        "expected_voxels": 100,
        "expected_operations": 1000.0,
    }
    theirs = {"cpu_s": 6.0, "network_cpu_s": 2.5, "peak_gb": 2.0}
    first = app.row_of(job, theirs, own, None)
    assert (first["voxels"], first["voxels_that_differ"], first["least_dice"]) == (24, 1, 0.0)
    assert (first["ratio_outside"], first["ratio"]) == (0.5, 0.5)
    assert first["expected_case_cpu_s"] is None
    larger = {**own, "expected_voxels": 150, "expected_operations": 3000.0}
    second = app.row_of(job, {"error": "killed"}, larger, first)
    # Half a second outside of networks as long as three inside.
    assert second["expected_case_cpu_s"] == 1.5 + 3.0
    assert second["nnunet_error"] == "killed"
    assert "ratio" not in second
