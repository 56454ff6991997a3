"""What goes wrong beside the training does not end it."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.report.tables import read_csv
from medseg.training import callbacks
from medseg.training.callbacks import Distortions, MemorySnapshot, ValidationPictures, ValidationScores, View


def test_a_picture_that_cannot_be_drawn_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=7, loggers=[])
    labels = torch.zeros(6, 7, 8, dtype=torch.uint8)
    labels[2:4, 2:5, 3:6] = 1
    batch = {"image": torch.zeros(1, 1, 6, 7, 8), "target": labels[None], "region": torch.tensor([0]), "case": ["Doe, John"]}
    batch["spacing_mm"] = [(2.0, 1.0, 1.5)]
    pictures = ValidationPictures(tmp_path, [View({1: "left_lung"}, False)])
    pictures.on_validation_batch_end(trainer, None, labels, [batch], 0)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007_0.png"]

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Invalid affine transformation matrix")

    monkeypatch.setattr(callbacks, "overlay_montage", fail)
    pictures.on_validation_batch_end(trainer, None, labels, [batch], 1)  # type: ignore[arg-type]
    said = "medseg: no picture of Doe, John (ValueError: Invalid affine transformation matrix)\n"
    assert capsys.readouterr().err == said


def test_a_picture_leaves_nothing_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a figure refer to each other; the collector would find 7 MiB a picture only some validations later."""
    alive = []

    class Figure:
        def __init__(self) -> None:
            self.axes = self
            alive.append(weakref.ref(self))

    def draw(*_: Any, **__: Any) -> None:
        Figure()
        if len(alive) == 2:
            raise OSError("disk full")

    monkeypatch.setattr(callbacks, "overlay_montage", draw)
    trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=7, loggers=[])
    labels = torch.zeros(2, 2, 2, dtype=torch.uint8)
    batch = {"image": labels[None, None], "target": labels[None], "region": torch.tensor([0]), "case": ["a"]}
    batch["spacing_mm"] = [(1.0, 1.0, 1.0)]
    pictures = ValidationPictures(tmp_path, [View({1: "left_lung"}, False)])
    for number in range(2):
        pictures.on_validation_batch_end(trainer, None, labels, [batch], number)  # type: ignore[arg-type]
    assert [figure() for figure in alive] == [None, None]


def test_scores_of_cases_are_kept_of_the_best_and_the_last_validation(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"

    def validate(scores: ValidationScores, step: int, left: float, right: float) -> list[tuple[str, ...]]:
        trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=step)
        dices = {("Doe, John", 0, 1): left, ("Doe, John", 1, 1): right, ("Doe, John", 0, "hd95"): 3.0, ("b", 0, 2): 0.1}
        module: Any = SimpleNamespace(case_scores=dices)
        scores.on_validation_end(trainer, module)
        return [(row["step"], row["case"], row["label"], row["dice"], row["picture"]) for row in read_csv(path)]

    def started(step: int) -> ValidationScores:
        pictures = ValidationPictures(tmp_path, [View({1: "left_lung"}, False), View({1: "right_lung"}, True)])
        pictures.drawn["Doe, John", 0] = "step_000020_0.png"
        scores = ValidationScores(path, pictures)
        trainer: Any = SimpleNamespace(is_global_zero=True, global_step=step)
        scores.on_train_start(trainer, None)  # type: ignore[arg-type]
        return scores

    scores = started(0)
    assert validate(scores, 20, 0.5, 0.7) == [
        ("20", "Doe, John", "left_lung", "0.5", "step_000020_0.png"),
        ("20", "Doe, John", "right_lung", "0.7", ""),
    ]
    assert [row[0] for row in validate(scores, 40, 0.9, 0.8)] == ["20", "20", "40", "40"]
    assert [row[0] for row in validate(scores, 60, 0.6, 0.6)] == ["40", "40", "60", "60"]
    uninterrupted = validate(scores, 80, 0.7, 0.7)
    assert [row[0] for row in uninterrupted] == ["40", "40", "80", "80"]
    # A run that resumes from step 60 validates step 80 again.
    assert validate(started(60), 80, 0.7, 0.7) == uninterrupted
    path.write_text("step,case\ndamaged")
    assert len(validate(started(60), 80, 0.7, 0.7)) == 2


def test_scores_name_the_patient_and_rows_of_older_versions_stay(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    path.write_text("step,case,label,dice,picture\n20,a_1,lung,0.9,\n")
    scores = ValidationScores(path, ValidationPictures(tmp_path, [View({1: "lung"}, False)]))
    scores.patients = {"a_1": "a"}
    trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=40)
    scores.on_train_start(trainer, None)  # type: ignore[arg-type]
    module: Any = SimpleNamespace(case_scores={("a_1", 0, 1): 0.8})
    scores.on_validation_end(trainer, module)
    assert [(row["step"], row["patient"]) for row in read_csv(path)] == [("20", ""), ("40", "a")]
    resumed = ValidationScores(path, scores.pictures)
    resumed.on_train_start(trainer, None)  # type: ignore[arg-type]
    assert [row["patient"] for row in resumed.rows] == ["", "a"]


def test_the_distortion_of_each_case_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = Distortions(["left_lung", "right_lung"])
    batch = {"case": ["a", "b"], "region": torch.tensor([0, 1]), "spacing_mm": [(3.0, 1.5, 2.0), (1.0, 1.0, 1.0)]}
    said.on_train_batch_end(None, None, None, [batch], 0)  # type: ignore[arg-type]
    said.on_validation_batch_end(None, None, None, [batch], 0)  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "a, left_lung: distortion 2.00, voxels of 3×1.5×2 mm",
        "b, right_lung: distortion 1.00, voxels of 1×1×1 mm",
    ]
    said.on_train_batch_end(None, None, None, [batch | {"region": torch.tensor([1, 0])}], 0)  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("distortion") == 2
    known: Any = [batch | {"region": None}]  # reading this would fail: printed regions are not read again
    said.on_train_batch_end(None, None, None, known, 0)  # type: ignore[arg-type]


def test_the_snapshot_of_a_rank_is_written_also_where_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda: called.append("record"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", called.append)
    snapshot, trainer = MemorySnapshot(tmp_path / "memory_snapshot.pickle"), SimpleNamespace(global_rank=2)
    snapshot.on_train_start(trainer, None)  # type: ignore[arg-type]
    snapshot.on_exception(trainer, None, MemoryError())  # type: ignore[arg-type]
    assert called == ["record", str(tmp_path / "memory_snapshot_2.pickle")]
