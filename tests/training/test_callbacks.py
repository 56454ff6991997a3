"""What goes wrong beside the training does not end it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.training import callbacks
from medseg.training.callbacks import Distortions, ValidationPictures, View


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


def test_the_distortion_of_each_case_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = Distortions(["left_lung", "right_lung"])
    batch = {"case": ["a", "b"], "region": torch.tensor([0, 1]), "spacing_mm": [(3.0, 1.5, 2.0), (1.0, 1.0, 1.0)]}
    said.on_train_batch_end(None, None, None, [batch], 0)  # type: ignore[arg-type]
    said.on_validation_batch_end(None, None, None, [batch], 0)  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "a, left_lung: distortion 2.00, voxels of 3×1.5×2 mm",
        "b, right_lung: distortion 1.00, voxels of 1×1×1 mm",
    ]
