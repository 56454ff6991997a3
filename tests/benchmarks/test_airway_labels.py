"""Airway labels: a table whose labels have the airway as a class of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import airway_labels
from medseg.data.case_table import read_case_table
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_labels
from medseg.io.write import write_image, write_labels

GRID = VoxelGrid((10, 12, 14), (10.0, 10.0, 10.0))
LEFT, RIGHT = np.s_[2:8, 2:10, 9:13], np.s_[2:8, 2:10, 1:5]
TRACHEA, BODY = np.s_[3:10, 5:7, 6:8], np.s_[:, 1:11, :]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three cases with the same lungs and trachea; its mask reaches into the right lung."""
    labels, airway = np.zeros((2, *GRID.shape), dtype=np.uint8)
    labels[LEFT], labels[RIGHT] = 1, 2
    image = np.full(GRID.shape, -1000, dtype=np.int16)
    image[BODY] = 40
    image[labels > 0] = -850
    image[TRACHEA] = -990
    airway[TRACHEA] = airway[5, 5, 4] = 1
    (tmp_path / "out" / "airways").mkdir(parents=True)
    rows = ["case,image,labels,patient,trust_left_lung"]
    for name in ("sure", "unsure", "none"):
        write_image(tmp_path / f"{name}.nii.gz", image, GRID)
        write_labels(tmp_path / f"{name}_lungs.nii.gz", labels, GRID)
        write_labels(tmp_path / "out" / "airways" / f"{name}.nii.gz", airway, GRID)
        rows.append(f"{name},{name}.nii.gz,{name}_lungs.nii.gz,p_{name},reference")
    path = tmp_path / "cases.csv"
    path.write_text("\n".join(rows))
    return path


def test_the_airway_becomes_a_class_or_its_air_is_ignored(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = table.parent / "out"
    arguments = [f"output={output}", f"cases={table}", "unsure=unsure", "absent=none"]
    monkeypatch.setattr(sys, "argv", ["airway_labels.py", *arguments])
    airway_labels.main()
    before = {case.name: case for case in read_case_table(table)}
    after = {case.name: case for case in read_case_table(output / "cases.csv")}
    assert [(case.patient, case.trust) for case in after.values()] == [
        (case.patient, case.trust) for case in before.values()
    ]
    labels = {}
    for name, case in after.items():
        assert case.labels is not None
        labels[name] = read_labels(case.labels).array
    reference = labels["none"]
    assert set(np.unique(reference)) == {0, 1, 2}
    assert np.all(labels["sure"][TRACHEA] == 3)
    assert np.array_equal(np.where(labels["sure"] == 3, 0, labels["sure"]), reference)
    assert np.all(labels["unsure"][TRACHEA] == 255)
    assert np.array_equal(np.where(labels["unsure"] == 255, 0, labels["unsure"]), reference)
    # Tissue between the lungs, and the air in front of the body, stay background.
    assert labels["unsure"][4, 3, 6] == labels["unsure"][4, 0, 6] == 0


def test_a_scan_without_a_trachea_is_told_by_the_name_of_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = np.full(GRID.shape, 40, dtype=np.int16)
    airway = airway_labels.read_airway(image, GRID, tmp_path / "a.b.nii.gz")
    assert not airway.any()
    assert capsys.readouterr().out.startswith("a.b: no airway is measured: ")
