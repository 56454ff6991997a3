"""Choice of a cascade by the spacing of a scan: its message, and scans that no range covers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from oracle import TASK, CoarseOracle, FineOracle, dice, stage

from medseg.cascade.cascade import Cascade
from medseg.commands import predict as app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_labels
from medseg.io.write import write_image
from medseg.prediction.load_models import RangeModel, check_one_task, pick_model
from medseg.prediction.options import PredictConfig
from medseg.prediction.scans import Scan
from medseg.task import Channel

THIN_AND_THICK = (
    "{thin: {range_mm: [0,2.5], fine: thin}, thick: {range_mm: [2.5,8.0], fine: [thick]}}"
)


def configured(source: Path, output: Path, by_spacing: str) -> PredictConfig:
    arguments = [
        f"input='{source}'",
        f"output='{output}'",
        "coarse=c",
        "accelerator=cpu",
        f"by_spacing={by_spacing}",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return to_config(hydra.compose("predict", arguments), PredictConfig)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace checkpoints by oracles: `thin` works at 1 mm, `thick` on the grid of the scan."""

    def load_stage(path: Path, name: str, *_: Any) -> Any:
        spacing_mm: Any = None if path.name == "thick" else (1.0, 1.0, 1.0)
        made = (
            stage(CoarseOracle(), name)
            if name == "coarse"
            else stage(FineOracle(), name, spacing_mm=spacing_mm)
        )
        made.checkpoints = {str(path): path.name}
        return made

    monkeypatch.setattr("medseg.cascade.load.load_stage", load_stage)


def write_scan(path: Path, depth: int, slice_mm: float) -> np.ndarray:
    """Write a scan of 120 mm with two bright blocks, with slices along the last array axis."""
    labels = np.zeros((64, 80, depth), dtype=np.uint8)
    inner = slice(depth // 6, depth - depth // 6)
    labels[16:48, 50:70, inner], labels[16:48, 10:30, inner] = 1, 2
    image_hu = np.where(labels > 0, 0, -1000).astype(np.int16)
    image_hu[:, [0, -1]] = -500
    # Array axes are posterior, left, superior.
    grid = VoxelGrid(
        labels.shape,
        (2.0, 2.0, slice_mm),
        (-80.0, -60.0, 0.0),
        ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)),
    )
    write_image(path, image_hu, grid)
    return labels


def test_each_scan_gets_the_cascade_of_its_spacing(
    loaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scans = tmp_path / "scans"
    scans.mkdir()
    references = {
        name: write_scan(scans / f"{name}.nrrd", round(120 / mm), mm)
        for name, mm in (("a", 2.0), ("b", 2.5), ("c", 8.0))
    }
    config = configured(scans, tmp_path / "out", THIN_AND_THICK)
    assert app.predict(config) == 1
    messages = capsys.readouterr().err
    assert (
        "a: uses by_spacing.thin, since its coarsest spacing of 2 mm lies in 0 … 2.5 mm" in messages
    )
    assert (
        "b: uses by_spacing.thick, since its coarsest spacing of 2.5 mm lies in 2.5 … 8 mm"
        in messages
    )
    assert (
        "c: its coarsest spacing of 8 mm lies in no range of by_spacing (thin 0 … 2.5 mm, "
        "thick 2.5 … 8 mm); give checkpoints"
    ) in messages
    assert sorted(path.name for path in (tmp_path / "out").glob("*.nii.gz")) == [
        "a.nii.gz",
        "b.nii.gz",
    ]
    for name, cascade in (("a", "thin"), ("b", "thick")):
        report = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert report["by_spacing"]["name"] == cascade
        assert report["checkpoints"] == {"coarse": {"c": "c"}, "fine": {cascade: cascade}}
        labels = read_labels(tmp_path / "out" / f"{name}.nii.gz").array
        for value in (1, 2):
            assert dice(labels == value, references[name] == value) > 0.95
    assert app.predict(config) == 1
    assert capsys.readouterr().out.count("finished before, skipped") == 2


@pytest.mark.parametrize(
    ("by_spacing", "sentence"),
    [
        (
            "{a: {range_mm: [2,2], fine: x}}",
            "by_spacing.a.range_mm: expected two increasing numbers, the first at least 0",
        ),
        (
            "{a: {range_mm: [-1,2], fine: x}}",
            "by_spacing.a.range_mm: expected two increasing numbers, the first at least 0",
        ),
        (
            "{b: {range_mm: [2,9]}, a: {range_mm: [0,2.1]}}",
            "by_spacing.b.range_mm=[2.0, 9.0] overlaps that of a",
        ),
        ("{a: {fine: x}}", "by_spacing.a.range_mm: a value is missing"),
        (
            "{a: {range_mm: [0,1], fine: 3}}",
            "by_spacing.a.fine: expected a checkpoint, a list of checkpoints or null",
        ),
        ("{a: {range_mm: [0,1], fines: x}}", "by_spacing.a.fines: there is no such key"),
    ],
)
def test_ranges_that_leave_a_doubt_are_refused(
    by_spacing: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        configured(tmp_path, tmp_path / "out", by_spacing)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("change", ["labels", "channels"])
def test_ranges_of_different_tasks_are_refused(change: str) -> None:
    """Value 1 would be one organ in thin scans, and another in thick ones."""
    values: dict[str, Any] = {
        "labels": {"right_lung": 1, "left_lung": 2},
        "channels": (Channel("mr", None, "zscore"),),
    }
    whole = replace(TASK, regions=())
    models = []
    for name, task in (("thin", whole), ("thick", replace(whole, **{change: values[change]}))):
        models.append(RangeModel(Cascade(stage(CoarseOracle(), "single", task)), {}, name))
    check_one_task([models[0], models[0]])
    with pytest.raises(UserError, match="by_spacing: the checkpoints of thin are of the task"):
        check_one_task(models)


def test_processes_that_share_a_cascade_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("medseg.prediction.predict.has_other_ranks", lambda: True)
    with pytest.raises(UserError, match="by_spacing: the processes of torchrun share one cascade"):
        app.predict(configured(tmp_path, tmp_path / "out", THIN_AND_THICK))


def test_without_ranges_nothing_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "medseg.prediction.scans.read_grid",
        lambda *_: pytest.fail("the header was read for nothing"),
    )
    only = RangeModel(Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine")), {})
    assert pick_model(Scan("a", Path("nowhere")), [only]) == (only, [])
