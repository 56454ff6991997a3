"""Reports of predictions: a prediction of another task is not scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medseg.errors import UserError
from medseg.evaluation.reports import check_labels
from medseg.task import Channel, Task

TASK = Task("thorax", {"heart": 1, "left_lung": 2, "right_lung": 3}, (), (Channel(window_hu=(-1000.0, 400.0)),))


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
def test_a_label_at_another_value_is_refused(tmp_path: Path, names: list[str], is_refused: bool) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"volume_ml": dict.fromkeys(names, 1.0)}), encoding="utf-8")
    if not is_refused:
        check_labels(tmp_path / "a.nii.gz", TASK)
        return
    with pytest.raises(
        UserError, match=rf"has the labels {', '.join(names)}, but the task thorax has heart, left_lung, right_lung; give"
    ):
        check_labels(tmp_path / "a.nii.gz", TASK)


@pytest.mark.parametrize("text", ["", "[]", '{"volume_ml": 5}', '{"volume_ml": null}', "{}"])
def test_a_report_of_another_program_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    check_labels(tmp_path / "a.nii.gz", TASK)
    check_labels(tmp_path / "no report.nii.gz", TASK)
