"""One DICOM series among several: same choice in all commands, messages in the reports."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from dicom_files import save_grid, save_slice
from oracle import CoarseOracle, FineOracle, dice, scan, stage

from medseg.commands import evaluate as evaluate_app
from medseg.commands import predict as predict_app
from medseg.commands import prepare as prepare_app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig, PrepareConfig
from medseg.data.case_table import read_case_table, write_case_table
from medseg.errors import UserError
from medseg.io.read import read_labels
from medseg.io.write import write_labels
from medseg.prediction.options import PredictConfig

TOPOGRAM = "left out, because they are not slices of the scan: 1 x localiser (series 1)"


def compose(name: str, *overrides: str) -> Any:
    schema = {"predict": PredictConfig, "prepare": PrepareConfig, "evaluate": EvaluateConfig}[name]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        model_arguments = ["coarse=c", "fine=f", "accelerator=cpu"] if name == "predict" else []
        return to_config(hydra.compose(name, [*model_arguments, *overrides]), schema)


@pytest.fixture(autouse=True)
def oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace checkpoints by oracles."""
    networks = {"coarse": CoarseOracle(), "fine": FineOracle()}
    monkeypatch.setattr(
        "medseg.cascade.load.load_stage", lambda path, name, *_: stage(networks[name], name)
    )


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Write a scan, a copy with inverted HU, a topogram, labels, and a table of the two scans."""
    volume, labels = scan()
    folder = tmp_path / "study 1"
    save_grid(folder / "a", volume.array, volume.grid, uid="1.2.3.4", SeriesNumber=3)
    save_grid(
        folder / "b", -volume.array.clip(-1000, 1000), volume.grid, uid="1.2.3.5", SeriesNumber=4
    )
    localiser = "ORIGINAL\\PRIMARY\\LOCALIZER"
    for number, uid in enumerate(("1.2.3.4", "1.2.3.5", "1.2.3.1")):
        save_slice(
            folder / f"t{number}",
            np.zeros((9, 5), np.int16),
            (0, 0, 0),
            uid=uid,
            SeriesNumber=1,
            ImageType=localiser,
        )
    write_labels(tmp_path / "labels.nii.gz", labels, volume.grid)
    rows = "case,image,series,labels\ngood,study 1,3,labels.nii.gz\nbad,study 1,,labels.nii.gz\n"
    (tmp_path / "table.csv").write_text(rows)
    return folder


# The lungs of this phantom are smaller than those of a newborn.
SMALL_LUNGS = "data.ignore_findings=[implausible_volume]"


def is_right(path: Path) -> bool:
    labels, reference = read_labels(path).array, scan()[1]
    return min(dice(labels == value, reference == value) for value in (1, 2)) > 0.95


@pytest.mark.parametrize("series", ["3", "1.2.3.4"])
def test_predict_one_series_of_a_folder(
    study: Path, tmp_path: Path, series: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its report lists the series that were left out as information, not as a warning."""
    overrides = [f"input='{study}'", f"output='{tmp_path / 'o.nii.gz'}'", f"series={series}"]
    assert predict_app.predict(compose("predict", *overrides)) == 0
    assert is_right(tmp_path / "o.nii.gz")
    report = json.loads((tmp_path / "o.json").read_text())
    assert report["series"] == series
    assert {"code": "left_out", "severity": "information", "sentence": TOPOGRAM} in report[
        "findings"
    ]
    assert TOPOGRAM not in report["warnings"]
    assert TOPOGRAM not in capsys.readouterr().err


def test_predict_says_what_there_is_to_choose(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"input='{study}'", f"output='{tmp_path / 'o.nii.gz'}'"]
    assert predict_app.predict(compose("predict", *overrides)) == 2
    messages = capsys.readouterr().err
    assert f"medseg: {study}: expected one CT series, but it holds 2: series=3 (" in messages
    assert "choose one with series=, or in the column series of a case table." in messages


def test_a_case_table_has_a_column_for_it(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "table.csv", tmp_path / "out"
    assert predict_app.predict(compose("predict", f"input='{table}'", f"output='{out}'")) == 1
    assert is_right(out / "good.nii.gz")
    assert not (out / "bad.nii.gz").exists()
    with pytest.raises(UserError, match="series=3: a case table has a column series for that"):
        predict_app.predict(compose("predict", f"input='{table}'", f"output='{out}'", "series=3"))
    capsys.readouterr()

    spacings = ["spacing@spacings.coarse=isotropic_4mm", "spacing@spacings.fine=isotropic_4mm"]
    config = compose(
        "prepare",
        f"data.cases='{table}'",
        f"data.cache='{tmp_path / 'cache'}'",
        SMALL_LUNGS,
        *spacings,
    )
    assert prepare_app.prepare(config) == 1
    messages = capsys.readouterr().err
    assert TOPOGRAM not in messages, "it is no warning"
    assert "medseg: bad: " in messages
    (sidecar,) = (tmp_path / "cache").rglob("case.json")
    record = json.loads(sidecar.read_text())
    assert record["case"] == "good"
    assert TOPOGRAM in [finding["message"] for finding in record["audit"]["findings"]]

    config = compose(
        "evaluate", f"pred='{out}'", f"ref='{table}'", f"output='{tmp_path / 'scores'}'"
    )
    assert evaluate_app.evaluate(config) == 0
    with (tmp_path / "scores" / "metrics.csv").open() as file:
        assert {row["case"] for row in csv.DictReader(file)} == {"good"}
    assert (tmp_path / "scores" / "overlays" / "good.png").is_file()
    assert (
        f"good: {TOPOGRAM}"
        not in json.loads((tmp_path / "scores" / "summary.json").read_text())["warnings"]
    )
    with (out / "summary.csv").open() as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    assert rows["good"]["information"].startswith(f"{TOPOGRAM} | ")
    assert TOPOGRAM not in rows["good"]["warnings"]

    cases = read_case_table(table)
    assert [
        case.series
        for case in read_case_table(write_case_table(tmp_path / "other.csv", cases), None)
    ] == ["3", None]


def test_another_series_is_another_entry_of_the_cache(study: Path, tmp_path: Path) -> None:
    rows = "case,image,series,labels\ngood,study 1,{},labels.nii.gz\nx,study 1,3,labels.nii.gz\n"
    spacings = ["spacing@spacings.coarse=isotropic_4mm", "spacing@spacings.fine=isotropic_4mm"]
    means = {}
    for series in ("3", "4"):
        (tmp_path / "table.csv").write_text(rows.format(series))
        overrides = [
            f"data.cases='{tmp_path / 'table.csv'}'",
            f"data.cache='{tmp_path / 'cache'}'",
            "data.ignore_findings=[duplicate_image,hu_offset,implausible_volume]",
        ]
        assert prepare_app.prepare(compose("prepare", *overrides, *spacings)) == 0
        images = {
            path.parent.name: float(np.load(path).mean())
            for path in (tmp_path / "cache").rglob("good-*/image.npy")
        }
        means.update(images)
    assert len(means) == 2
    assert max(means.values()) - min(means.values()) > 100
