"""Files whose values are not HU: each command applies the same scale, and warns without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from oracle import CoarseOracle, FineOracle, scan, stage

from medseg.commands import evaluate as evaluate_app
from medseg.commands import predict as predict_app
from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.config.schema import EvaluateConfig
from medseg.data.audit.image import check_channels
from medseg.data.case_table import read_case_table, write_case_table
from medseg.io.read import read_labels
from medseg.io.tables import read_csv
from medseg.io.write import write_image, write_labels
from medseg.prediction.options import PredictConfig
from medseg.preprocess.scale import HuScale


def compose(name: str, *overrides: str) -> Any:
    schema = {"predict": PredictConfig, "evaluate": EvaluateConfig}[name]
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
def folder(tmp_path: Path) -> Path:
    """Write a scan in HU, a copy with values 1024 higher, and a table with the offset."""
    volume, labels = scan()
    write_image(tmp_path / "hu.nii.gz", volume.array, volume.grid)
    write_image(tmp_path / "high.nii.gz", volume.array + 1024, volume.grid)
    write_labels(tmp_path / "labels.nii.gz", labels, volume.grid)
    rows = [
        "case,image,labels,hu_offset",
        "hu,hu.nii.gz,labels.nii.gz,",
        "high,high.nii.gz,labels.nii.gz,-1024",
    ]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def predict(folder: Path, name: str, *overrides: str) -> tuple[np.ndarray, dict[str, Any]]:
    output = folder / f"{name}_out.nii.gz"
    assert (
        predict_app.predict(
            compose("predict", f"input='{folder / name}.nii.gz'", f"output='{output}'", *overrides)
        )
        == 0
    )
    return read_labels(output).array, json.loads((folder / f"{name}_out.json").read_text())


def test_predict_says_that_values_are_no_hu_and_takes_an_offset(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, report = predict(folder, "hu")
    wrong, warned = predict(folder, "high")
    advice = (
        "this is no CT in HU; give a CT in HU, or correct its scale with data.hu_slope and "
        "data.hu_offset "
        "(for predict: hu_slope and hu_offset)"
    )
    assert any(warning.endswith(advice) for warning in warned["warnings"])
    findings = {finding["sentence"]: finding for finding in warned["findings"]}
    assert [
        sentence for sentence, finding in findings.items() if finding["severity"] != "information"
    ] == warned["warnings"]
    assert all(
        finding.keys() == {"code", "severity", "sentence"} and finding["code"]
        for finding in findings.values()
    )
    assert f"{advice}\n" in capsys.readouterr().err
    assert (warned["status"], report["status"] in ("ok", "warnings")) == ("not_hu", True)
    assert not np.array_equal(wrong, labels)
    right, corrected = predict(folder, "high", "hu_offset=-1024")
    assert np.array_equal(right, labels)
    assert corrected["warnings"] == report["warnings"]
    assert (report["hu"], corrected["hu"]) == (
        {"slope": 1.0, "offset": 0.0},
        {"slope": 1.0, "offset": -1024.0},
    )


def test_the_advice_on_the_scale_knows_the_scale_that_was_applied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = []

    def check(*arguments: Any, scale: HuScale, **options: Any) -> Any:
        scales.append(scale)
        return check_channels(*arguments, scale=scale, **options)

    monkeypatch.setattr("medseg.prediction.case.check_channels", check)
    predict(folder, "high", "hu_offset=-1024")
    assert scales == [HuScale(1.0, -1024.0)]


def test_a_case_table_says_it_for_each_case(folder: Path) -> None:
    table, out = folder / "table.csv", folder / "out"
    assert predict_app.predict(compose("predict", f"input='{table}'", f"output='{out}'")) == 0
    assert np.array_equal(
        read_labels(out / "high.nii.gz").array, read_labels(out / "hu.nii.gz").array
    )
    assert (
        evaluate_app.evaluate(
            compose("evaluate", f"pred='{out}'", f"ref='{table}'", f"output='{folder / 'scores'}'")
        )
        == 0
    )
    pictures = {
        name: (folder / "scores" / "overlays" / f"{name}.png").stat().st_size
        for name in ("hu", "high")
    }
    assert pictures["high"] == pytest.approx(pictures["hu"], rel=0.02), "only the title differs"

    copied = read_case_table(
        write_case_table(folder / "other" / "copy.csv", read_case_table(table)), None
    )
    assert [case.hu.offset for case in copied] == [0.0, -1024.0]


def test_a_batch_script_can_tell_a_scan_without_hu_from_its_summary(folder: Path) -> None:
    (folder / "scans").mkdir()
    for name in ("hu", "high"):
        (folder / f"{name}.nii.gz").rename(folder / "scans" / f"{name}.nii.gz")
    volume, _ = scan()
    windowed = np.clip((volume.array + 1000) / 1400 * 255, 0, 255).astype(np.int16)
    write_image(folder / "scans" / "windowed.nii.gz", windowed, volume.grid)
    (folder / "scans" / "bad.nii").write_bytes(b"no scan")
    source, out = folder / "scans", folder / "out"
    for _ in range(2):  # the second prediction skips the case, with the same message
        assert predict_app.predict(compose("predict", f"input='{source}'", f"output='{out}'")) == 1
        rows = read_csv(out / "summary.csv")
        assert [row["case"] for row in rows] == ["bad", "high", "hu", "windowed"]
        status = {row["case"]: row["status"] for row in rows}
        assert status == {
            "bad": "failed",
            "high": "not_hu",
            "hu": status["hu"],
            "windowed": "not_hu",
        }
        assert status["hu"] in ("ok", "warnings")
        assert "this is no CT in HU" in rows[1]["warnings"]
        assert float(rows[2]["left_lung_ml"]) > 10
    (source / "high.nii.gz").rename(folder / "high.nii.gz")
    assert predict_app.predict(compose("predict", f"input='{source}'", f"output='{out}'")) == 1
    assert sorted({row["case"] for row in read_csv(out / "summary.csv")}) == [
        "bad",
        "high",
        "hu",
        "windowed",
    ], "rows of other predictions stay"
