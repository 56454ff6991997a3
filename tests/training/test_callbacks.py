"""What goes wrong beside the training does not end it."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.io.tables import read_csv
from medseg.training import callbacks
from medseg.training.callbacks import (
    Distortions,
    MemorySnapshot,
    ValidationPictures,
    ValidationScores,
    View,
)


def test_a_picture_that_cannot_be_drawn_is_told_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = SimpleNamespace(
        sanity_checking=False, is_global_zero=True, global_step=7, loggers=[]
    )
    labels = torch.zeros(6, 7, 8, dtype=torch.uint8)
    labels[2:4, 2:5, 3:6] = 1
    batch = {
        "image": torch.zeros(1, 1, 6, 7, 8),
        "target": labels[None],
        "region": torch.tensor([0]),
        "case": ["Doe, John"],
    }
    batch["spacing_mm"] = [(2.0, 1.0, 1.5)]
    pictures = ValidationPictures(tmp_path, [View({1: "left_lung"}, False)])
    pictures.on_validation_batch_end(trainer, None, labels, [batch], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007_0.png"]

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("Invalid affine transformation matrix")

    monkeypatch.setattr(callbacks, "overlay_montage", fail)
    pictures.on_validation_batch_end(trainer, None, labels, [batch], 1)
    message = "medseg: no picture of Doe, John (ValueError: Invalid affine transformation matrix)\n"
    assert capsys.readouterr().err == message


def test_a_picture_leaves_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a figure form cycles; the collector would free 7 MiB a picture much later."""
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
    trainer: Any = SimpleNamespace(
        sanity_checking=False, is_global_zero=True, global_step=7, loggers=[]
    )
    labels = torch.zeros(2, 2, 2, dtype=torch.uint8)
    batch = {
        "image": labels[None, None],
        "target": labels[None],
        "region": torch.tensor([0]),
        "case": ["a"],
    }
    batch["spacing_mm"] = [(1.0, 1.0, 1.0)]
    pictures = ValidationPictures(tmp_path, [View({1: "left_lung"}, False)])
    for number in range(2):
        pictures.on_validation_batch_end(trainer, None, labels, [batch], number)
    assert [figure() for figure in alive] == [None, None]


def test_scores_of_cases_are_kept_of_the_best_and_the_last_validation(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"

    def validate(
        scores: ValidationScores, step: int, left: float, right: float
    ) -> list[tuple[str, ...]]:
        trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=step)
        dices = {
            ("Doe, John", 0, 1): left,
            ("Doe, John", 1, 1): right,
            ("Doe, John", 0, "hd95"): 3.0,
            ("b", 0, 2): 0.1,
        }
        module: Any = SimpleNamespace(case_scores=dices)
        scores.on_validation_end(trainer, module)
        return [
            (row["step"], row["case"], row["label"], row["dice"], row["picture"])
            for row in read_csv(path)
        ]

    def started(step: int) -> ValidationScores:
        pictures = ValidationPictures(
            tmp_path, [View({1: "left_lung"}, False), View({1: "right_lung"}, True)]
        )
        pictures.drawn["Doe, John", 0] = "step_000020_0.png"
        scores = ValidationScores(path, pictures)
        trainer: Any = SimpleNamespace(is_global_zero=True, global_step=step)
        scores.on_train_start(trainer, None)
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


def test_the_best_validation_is_that_of_the_best_checkpoint(tmp_path: Path) -> None:
    """A helper label (class 2) has no row, and counts in the mean Dice that chooses the weights."""
    path = tmp_path / "validation.csv"

    def steps_after(scores: ValidationScores, step: int, organ: float, helper: float) -> list[str]:
        trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=step)
        module: Any = SimpleNamespace(case_scores={("a", 0, 1): organ, ("a", 0, 2): helper})
        scores.on_validation_end(trainer, module)
        return [row["step"] for row in read_csv(path)]

    scores = ValidationScores(path, ValidationPictures(tmp_path, [View({1: "organ"}, False)]))
    assert steps_after(scores, 20, 0.9, 0.1) == ["20"]
    assert steps_after(scores, 40, 0.8, 0.8) == ["20", "40"]
    assert steps_after(scores, 60, 0.7, 0.1) == ["40", "60"]
    resumed = ValidationScores(path, scores.pictures)
    resumed.load_state_dict(scores.state_dict())
    resumed.on_train_start(SimpleNamespace(is_global_zero=True, global_step=60), None)  # type: ignore[arg-type]
    assert steps_after(resumed, 80, 0.9, 0.2) == ["40", "80"]


def test_a_validation_that_a_resumed_run_repeats_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    module: Any = SimpleNamespace(case_scores={("a", 0, 1): 0.5, ("b", 0, 1): 0.25})
    trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=80)
    for _ in range(2):
        scores = ValidationScores(path, ValidationPictures(tmp_path, [View({1: "lung"}, False)]))
        scores.on_train_start(trainer, module)  # from the checkpoint of the same step
        scores.on_validation_end(trainer, module)
        assert [(row["step"], row["case"]) for row in read_csv(path)] == [("80", "a"), ("80", "b")]


def test_scores_name_the_patient_and_rows_of_older_versions_stay(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    path.write_text("step,case,label,dice,picture\n20,a_1,lung,0.9,\n")
    scores = ValidationScores(path, ValidationPictures(tmp_path, [View({1: "lung"}, False)]))
    scores.patients = {"a_1": "a"}
    trainer: Any = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=40)
    scores.on_train_start(trainer, None)
    module: Any = SimpleNamespace(case_scores={("a_1", 0, 1): 0.8})
    scores.on_validation_end(trainer, module)
    assert [(row["step"], row["patient"]) for row in read_csv(path)] == [("20", ""), ("40", "a")]
    resumed = ValidationScores(path, scores.pictures)
    resumed.on_train_start(trainer, None)
    assert [row["patient"] for row in resumed.rows] == ["", "a"]


def test_the_distortion_of_each_case_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    distortions = Distortions(["left_lung", "right_lung"])
    batch = {
        "case": ["a", "b"],
        "region": torch.tensor([0, 1]),
        "spacing_mm": [(3.0, 1.5, 2.0), (1.0, 1.0, 1.0)],
    }
    distortions.on_train_batch_end(None, None, None, [batch], 0)
    distortions.on_validation_batch_end(None, None, None, [batch], 0)
    assert capsys.readouterr().out.splitlines() == [
        "a, left_lung: distortion 2.00, voxels of 3×1.5×2 mm",
        "b, right_lung: distortion 1.00, voxels of 1×1×1 mm",
    ]
    distortions.on_train_batch_end(None, None, None, [batch | {"region": torch.tensor([1, 0])}], 0)
    assert capsys.readouterr().out.count("distortion") == 2
    # Reading `None` would fail, but regions that are printed are not read again.
    printed_batch: Any = [batch | {"region": None}]
    distortions.on_train_batch_end(None, None, None, printed_batch, 0)


def test_the_snapshot_of_a_rank_is_written_also_where_the_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda: called.append("record")
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", called.append)
    snapshot = MemorySnapshot(tmp_path / "memory_snapshot.pickle")
    trainer: Any = SimpleNamespace(global_rank=2)
    snapshot.on_train_start(trainer, None)
    snapshot.on_exception(trainer, None, MemoryError())
    assert called == ["record", str(tmp_path / "memory_snapshot_2.pickle")]


def case_batch(name: str, region: int = 0) -> list[dict[str, Any]]:
    """A validation batch of one case with different values along each axis."""
    image = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(1, 1, 2, 3, 4)
    target = (torch.arange(24).reshape(1, 2, 3, 4) % 3).to(torch.uint8)
    spacing_mm = [(2.0, 1.0, 1.5)]
    return [
        {
            "image": image,
            "target": target,
            "region": torch.tensor([region]),
            "case": [name],
            "spacing_mm": spacing_mm,
        }
    ]


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_picture_gets_the_arrays_of_the_case_and_its_names(
    is_mirrored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        callbacks, "overlay_montage", lambda *arrays, **options: drawn.append((arrays, options))
    )
    views = [View({1: "left_lung"}, False), View({2: "right_lung"}, is_mirrored)]
    pictures = ValidationPictures(tmp_path / "pictures", views)
    labels = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    trainer: Any = SimpleNamespace(
        sanity_checking=False, is_global_zero=True, global_step=70, loggers=[]
    )
    batch = case_batch("b", region=1)
    pictures.on_validation_batch_end(trainer, None, labels, batch, 1)
    ((image, pred, target, spacing_mm, path), options) = drawn[0]
    way = -1 if is_mirrored else 1  # step of the slices along x
    assert (image == batch[0]["image"][0, 0].numpy()[..., ::way]).all()
    assert (pred == labels.numpy()[..., ::way]).all()
    assert (target == batch[0]["target"][0].numpy()[..., ::way]).all()
    assert spacing_mm == (2.0, 1.0, 1.5)
    assert path == tmp_path / "pictures" / "step_000070_1.png"
    assert options == {
        "title": "b, step 70",
        "label_names": {2: "right_lung"},
        "window_hu": (-1.0, 1.0),
    }
    assert pictures.drawn == {("b", 1): "step_000070_1.png"}


def test_pictures_are_drawn_of_the_first_cases_by_one_rank_and_not_in_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(callbacks, "overlay_montage", lambda *_, title, **__: titles.append(title))
    pictures = ValidationPictures(tmp_path, [View({1: "lung"}, False)])
    labels = torch.zeros(2, 3, 4, dtype=torch.uint8)
    for is_trial, is_first_rank in ((True, True), (False, False), (False, True)):
        trainer: Any = SimpleNamespace(
            sanity_checking=is_trial, is_global_zero=is_first_rank, global_step=5, loggers=[]
        )
        for index, name in enumerate("abc"):
            pictures.on_validation_batch_end(trainer, None, labels, case_batch(name), index)
    assert titles == ["a, step 5", "b, step 5"]


def test_a_case_whose_picture_failed_keeps_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "overlay_montage", lambda *_, **__: None)
    pictures = ValidationPictures(tmp_path, [View({1: "lung"}, False)])
    labels = torch.zeros(2, 3, 4, dtype=torch.uint8)
    trainer: Any = SimpleNamespace(
        sanity_checking=False, is_global_zero=True, global_step=5, loggers=[]
    )
    for name, index in (("a", 0), ("b", 1)):
        pictures.on_validation_batch_end(trainer, None, labels, case_batch(name), index)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(callbacks, "overlay_montage", fail)
    pictures.on_validation_batch_end(trainer, None, labels, case_batch("a"), 0)
    assert pictures.drawn == {("b", 0): "step_000005_1.png"}


def test_a_picture_goes_to_tensorboard_in_colour(tmp_path: Path) -> None:
    added: list[tuple[Any, ...]] = []

    class Board(callbacks.TensorBoardLogger):
        def __init__(self) -> None:
            """Without a folder of its own."""

        @property
        def experiment(self) -> Any:
            return SimpleNamespace(
                add_image=lambda *args, **options: added.append((*args, options))
            )

    pictures = ValidationPictures(tmp_path, [View({1: "lung"}, False)])
    labels = torch.zeros(6, 7, 8, dtype=torch.uint8)
    batch = [
        {
            "image": torch.zeros(1, 1, 6, 7, 8),
            "target": labels[None],
            "region": torch.tensor([0]),
            "case": ["a"],
        }
    ]
    batch[0]["spacing_mm"] = [(2.0, 1.0, 1.5)]
    trainer: Any = SimpleNamespace(
        sanity_checking=False, is_global_zero=True, global_step=5, loggers=[Board(), object()]
    )
    pictures.on_validation_batch_end(trainer, None, labels, batch, 0)
    ((name, pixels, step, options),) = added
    assert (name, step, options) == ("validation/0", 5, {"dataformats": "HWC"})
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3


def test_scores_are_written_by_one_rank_and_not_in_a_trial(tmp_path: Path) -> None:
    path = tmp_path / "validation.csv"
    scores = ValidationScores(path, ValidationPictures(tmp_path, [View({1: "lung"}, False)]))
    module: Any = SimpleNamespace(case_scores={("a", 0, 1): 0.12345678})
    for is_trial, is_first_rank in ((True, True), (False, False)):
        trainer: Any = SimpleNamespace(
            sanity_checking=is_trial, is_global_zero=is_first_rank, global_step=5
        )
        scores.on_validation_end(trainer, module)
        assert not path.exists()
    trainer = SimpleNamespace(sanity_checking=False, is_global_zero=True, global_step=5)
    scores.on_validation_end(trainer, module)
    assert list(read_csv(path)[0]) == list(callbacks.SCORE_COLUMNS)
    assert [row["dice"] for row in read_csv(path)] == ["0.123457"]
    resumed = ValidationScores(path, scores.pictures)
    for is_first_rank, step, num_rows in ((False, 5, 0), (True, 4, 0), (True, 5, 1)):
        trainer = SimpleNamespace(is_global_zero=is_first_rank, global_step=step)
        resumed.on_train_start(trainer, None)
        assert len(resumed.rows) == num_rows
