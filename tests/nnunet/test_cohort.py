"""A cohort of DICOM series with models of nnU-Net: labels and SEG, here and on a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import numpy as np
import pydicom
import pytest
from dicom_files import save_grid

from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image
from medseg.io.tables import read_csv
from medseg.prediction.options import PredictConfig

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"


def predict(*overrides: str) -> int:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return app.predict(to_config(hydra.compose("predict", [*overrides]), PredictConfig))


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of a prediction of three DICOM series by two models."""
    pytest.importorskip("dynamic_network_architectures")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    grid = VoxelGrid((13, 27, 25), (4.5, 1.0, 1.2))
    for number in range(3):
        image = np.random.default_rng(number).normal(-300, 300, grid.shape).astype(np.int16)
        uids = {"uid": f"1.2.3.{number}", "FrameOfReferenceUID": f"1.2.4.{number}"}
        save_grid(tmp_path / "scans" / f"patient{number}", image, grid, **uids)
    return [
        f"input={tmp_path / 'scans'}",
        f"weights=[{RECORDED / 'anisotropic.zip'},{RECORDED / 'torch.zip'}]",
        "label_values={organ_1: 9}",
        "save=[labels,dicom_seg,rtstruct]",
        "accelerator=cpu",
    ]


@pytest.mark.slow
def test_segs_of_a_batch_have_the_names_of_all_models(arguments: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert predict(*arguments, f"output={output}") == 0
    rows = read_csv(output / "summary.csv")
    assert [row["case"] for row in rows] == [f"patient{number}" for number in range(3)]
    assert "organ_1_ml" in rows[0]
    for number in range(3):
        labels = read_image(output / f"patient{number}.nii.gz").array
        assert set(np.unique(labels)) <= {0, 1, 2, 3, 4, 9}
        report = json.loads((output / f"patient{number}.json").read_text(encoding="utf-8"))
        assert list(report["checkpoints"]) == ["3d_fullres_1", "3d_fullres_2"]
        assert report["expected"]["peak_resident_bytes"] > 0
        present = {name for name, volume_ml in report["volume_ml"].items() if volume_ml > 0}
        segments = pydicom.dcmread(output / f"patient{number}.seg.dcm").SegmentSequence
        assert {segment.SegmentLabel for segment in segments} >= present


@pytest.mark.slow
def test_ray_gives_the_labels_of_a_local_run(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    local, cohort = tmp_path / "local", tmp_path / "ray"
    assert predict(*arguments, f"output={local}") == 0
    assert predict(*arguments, f"output={cohort}", "engine=ray", "ray.num_actors=1") == 0
    for number in range(3):
        name = f"patient{number}.nii.gz"
        assert np.array_equal(read_image(local / name).array, read_image(cohort / name).array)
