"""Reports of predictions: a prediction of another task is not scored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medseg.data.case_table import Case
from medseg.data.source_files import fingerprint
from medseg.errors import UserError
from medseg.evaluation.matching import Reference
from medseg.evaluation.reports import check_labels, information_in_report, scan_of
from medseg.preprocess.scale import HuScale
from medseg.task import Channel, Task

TASK = Task(
    "thorax",
    {"heart": 1, "left_lung": 2, "right_lung": 3},
    (),
    (Channel(window_hu=(-1000.0, 400.0)),),
)


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (["left_lung", "right_lung"], True),
        (["heart", "right_lung", "left_lung"], True),
        (["heart", "left_lung", "right_lung"], False),
        (["heart"], False),
        (["spleen"], True),
        (["cor", "pulmo_sinister", "pulmo_dexter"], False),
    ],
)
def test_a_label_at_another_value_is_refused(
    tmp_path: Path, names: list[str], is_refused: bool
) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps({"volume_ml": dict.fromkeys(names, 1.0)}), encoding="utf-8"
    )
    if not is_refused:
        check_labels(tmp_path / "a.nii.gz", TASK)
        return
    with pytest.raises(
        UserError,
        match=(
            f"has the labels {', '.join(names)}, but the task thorax has heart, left_lung, "
            "right_lung; give"
        ),
    ):
        check_labels(tmp_path / "a.nii.gz", TASK)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"heart": 1, "right_lung": 3}, None),
        ({"right_lung": 3}, None),
        ({"heart": 2}, "heart = 2, but the task thorax has heart, left_lung, right_lung"),
    ],
)
def test_values_that_a_report_states_are_compared(
    tmp_path: Path, labels: dict[str, int], words: str | None
) -> None:
    """`label_values` of `predict` may have given the labels any values."""
    report = {"volume_ml": dict.fromkeys(labels, 1.0), "settings": {"labels": labels}}
    (tmp_path / "a.json").write_text(json.dumps(report), encoding="utf-8")
    if words is None:
        check_labels(tmp_path / "a.nii.gz", TASK)
        return
    with pytest.raises(UserError, match=f"has the labels {words}; give"):
        check_labels(tmp_path / "a.nii.gz", TASK)


@pytest.mark.parametrize("text", ["", "[]", '{"volume_ml": 5}', '{"volume_ml": null}', "{}"])
def test_a_report_of_another_program_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    check_labels(tmp_path / "a.nii.gz", TASK)
    check_labels(tmp_path / "no report.nii.gz", TASK)


def test_the_scan_of_a_case_is_in_its_report_unless_a_table_or_several_channels_say_it(
    tmp_path: Path,
) -> None:
    scan = tmp_path / "scan.nii.gz"
    scan.touch()
    report = {"input": str(scan), "series": "1.2", "hu": {"slope": 2.0, "offset": -1.0}}
    (tmp_path / "a.json").write_text(json.dumps(report), encoding="utf-8")
    prediction = tmp_path / "a.nii.gz"
    alone = Reference("a", tmp_path / "ref.nii.gz")
    case = scan_of(alone, prediction, TASK)
    assert case is not None
    assert (case.name, case.image, case.series, case.hu) == (
        "a",
        scan,
        "1.2",
        HuScale(2.0, -1.0),
    )
    two = replace(TASK, channels=TASK.channels * 2)
    assert scan_of(alone, prediction, two) is None, "the report names one file"
    row = Case("a", tmp_path / "other.nii.gz", None, "p")
    assert scan_of(Reference("a", None, row), prediction, TASK) is row
    scan.unlink()
    assert scan_of(alone, prediction, TASK) is None


def test_the_scan_does_not_depend_on_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scan.nii.gz").write_text(f"the scan of {name}", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "one")
    scan = Path("scan.nii.gz")
    report = {
        "input": str(scan),
        "series": None,
        "hu": {"slope": 1.0, "offset": 0.0},
        "source": fingerprint(scan),
    }
    (tmp_path / "a.json").write_text(json.dumps(report), encoding="utf-8")
    prediction = tmp_path / "a.nii.gz"
    alone = Reference("a", tmp_path / "ref.nii.gz")
    # A file of the same name lies here too.
    monkeypatch.chdir(tmp_path / "two")
    case = scan_of(alone, prediction, TASK)
    assert case is not None
    assert case.image == tmp_path / "one" / "scan.nii.gz"
    (tmp_path / "one" / "scan.nii.gz").rename(tmp_path / "scan.nii.gz")
    assert scan_of(alone, prediction, TASK) is None
    monkeypatch.chdir(tmp_path)
    case = scan_of(alone, prediction, TASK)
    assert case is not None, "the scan and the prediction were moved together"
    assert case.image == scan


def test_the_information_of_a_report_is_what_asks_for_nothing() -> None:
    findings = [
        {"severity": "warning", "sentence": "the scan is cut"},
        {"severity": "information", "sentence": "a topogram was left out"},
        {"severity": "error", "sentence": "the scan is upside down"},
        {"severity": "information", "sentence": "the lungs hold air"},
    ]
    sentences = ["a topogram was left out", "the lungs hold air"]
    assert information_in_report({"findings": findings}) == sentences
    assert information_in_report({}) == []
