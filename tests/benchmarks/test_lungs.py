"""Lung benchmark: rows of a drawn scan whose every number is known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import lungs
from medseg.geometry.grid import VoxelGrid
from medseg.io.tables import read_csv
from medseg.io.write import write_image, write_labels

# Stored from head to feet; a voxel has 1 ml.
HEAD_FIRST = ((1, 0, 0), (0, 1, 0), (0, 0, -1))
GRID = VoxelGrid((10, 12, 14), (10.0, 10.0, 10.0), (0.0, 0.0, 0.0), HEAD_FIRST)
LEFT, RIGHT = np.s_[2:8, 2:10, 9:13], np.s_[2:8, 2:10, 1:5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table of two cases, the second without labels; their predictions, airways and effusion."""
    reference = np.zeros(GRID.shape, dtype=np.uint8)
    reference[LEFT], reference[RIGHT] = 1, 2
    image = np.where(reference > 0, -850, 40).astype(np.int16)
    image[2:4, 2:10, 9:13] = 30  # a third of the left lung is dense
    pred = reference.copy()
    pred[RIGHT][:3] = 0
    airway, effusion = np.zeros((2, *GRID.shape), dtype=np.uint8)
    airway[4, 4, 4:10] = 1  # one voxel in the right lung, one in the left
    effusion[3, 2:4, 10:12] = 1
    for name in ("p1", "p2"):
        (tmp_path / name).mkdir()
        write_image(tmp_path / name / "ct.nii.gz", image, GRID)
    write_labels(tmp_path / "p1" / "lungs.nii.gz", reference, GRID)
    write_labels(tmp_path / "p1" / lungs.EFFUSION, effusion, GRID)
    for kind, labels in (("pred", pred), ("airways", airway)):
        (tmp_path / kind).mkdir()
        for name in ("p1", "p2"):
            write_labels(tmp_path / kind / f"{name}.nii.gz", labels, GRID)
    table = [
        "case,image,labels,trust_left_lung,trust_right_lung",
        "p1,p1/ct.nii.gz,p1/lungs.nii.gz,reference,approximate",
        "p2,p2/ct.nii.gz,,,",
    ]
    (tmp_path / "table.csv").write_text("\n".join(table))
    return tmp_path


def measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], dict[str, str]]:
    given = {
        "output": folder / "out",
        "pred": folder / "pred",
        "cases": folder / "table.csv",
        "airways": folder / "airways",
    }
    arguments = [f"{key}={value}" for key, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["lungs.py", *arguments])
    lungs.main()
    return {(row["case"], row["region"]): row for row in read_csv(folder / "out" / "lungs.csv")}


def test_each_side_has_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measure(folder, monkeypatch)
    assert len(rows) == 4
    left, right = rows["p1", "left_lung"], rows["p1", "right_lung"]
    assert (float(left["dice"]), left["trust"], left["is_diseased"]) == (1.0, "reference", "True")
    assert float(left["dense_share"]) == pytest.approx(1 / 3)
    assert float(right["volume_error"]) == pytest.approx(-0.5)
    assert float(right["dice"]) == pytest.approx(2 / 3)
    assert (right["trust"], right["is_diseased"]) == ("approximate", "False")


def test_what_is_called_lung_but_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measure(folder, monkeypatch)
    left, right = rows["p1", "left_lung"], rows["p1", "right_lung"]
    assert (float(left["airway_ml"]), float(left["airway_called_ml"])) == (6.0, 1.0)
    assert float(left["airway_share"]) == pytest.approx(1 / 6)
    # The three highest slices of the right lung are missing from the prediction, and with them its
    # airway voxel.
    assert float(right["airway_called_ml"]) == 0.0
    assert (float(left["effusion_called_ml"]), float(left["effusion_share"])) == (4.0, 1.0)
    assert float(right["effusion_called_ml"]) == 0.0


def test_without_reference_airways_are_measured(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = measure(folder, monkeypatch)["p2", "left_lung"]
    assert row["dice"] == row["effusion_ml"] == ""
    assert float(row["airway_called_ml"]) == 1.0


def test_healthy_and_diseased_sides_are_summarised_apart(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure(folder, monkeypatch)
    text = (folder / "out" / "lungs.md").read_text()
    assert "reference, diseased" in text
    assert "approximate, healthy" in text
