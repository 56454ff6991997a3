from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import painted
from benchmarks.painted import AIRWAY, COPIES, make_missing, paint_copy
from medseg.data.case_table import Case, read_case_table, split_cases, write_case_table
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels

GRID = VoxelGrid((40, 60, 50), (2.5, 1.5, 2.0))


def chest(folder: Path) -> Case:
    """Two lungs of -850 HU in soft tissue; the left one (1) at larger x."""
    z, y, x = np.ogrid[:40, :60, :50]
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    for value, middle_x in ((1, 37), (2, 12)):
        squares = ((z - 20) / 17) ** 2 + ((y - 30) / 25) ** 2 + ((x - middle_x) / 10) ** 2
        labels[squares < 1] = value
    image = np.where(labels > 0, -850, 40).astype(np.int16)
    write_image(folder / "a.nii.gz", image, GRID)
    write_labels(folder / "a_labels.nii.gz", labels, GRID)
    return Case("a", folder / "a.nii.gz", folder / "a_labels.nii.gz", "a")


def test_copies_keep_the_place_and_change_labels_by_fluid_alone(tmp_path: Path) -> None:
    case = chest(tmp_path)
    assert case.labels is not None
    before = read_labels(case.labels)
    num_changed = 0
    for number in COPIES:
        (copy,) = paint_copy(case, number, tmp_path)
        assert copy.patient == case.patient
        assert copy.labels is not None
        after, image = read_labels(copy.labels), read_image(copy.image)
        assert after.grid.is_close(before.grid)
        is_changed = after.array != before.array
        assert not after.array[is_changed].any()
        num_changed += bool(is_changed.any())
        # Fluid is where the label went; next to nothing of it is as light as lung.
        assert (image.array[is_changed] < -100).sum() <= 0.05 * is_changed.sum()
        (again,) = paint_copy(case, number, tmp_path)
        assert again == copy
    assert num_changed > 0


@pytest.mark.parametrize(("index", "missing"), [(0, 1), (1, 2)])
def test_a_phantom_lacks_one_lung_and_shows_its_airway(
    index: int, missing: int, tmp_path: Path
) -> None:
    case = make_missing(index, tmp_path)
    assert case.labels is not None
    shown = set(np.unique(read_labels(case.labels).array).tolist())
    assert shown == {0, 1, 2, AIRWAY} - {missing}
    region = {1: "left_lung", 2: "right_lung"}[missing]
    assert [name for name, trust in case.trust.items() if trust == "absent"] == [region]
    # Files that exist are kept.
    before = case.image.stat().st_mtime_ns
    assert make_missing(index, tmp_path) == case
    assert case.image.stat().st_mtime_ns == before


def test_a_scan_without_lung_has_no_copy(tmp_path: Path) -> None:
    case = chest(tmp_path)
    assert case.labels is not None
    write_labels(case.labels, np.zeros(GRID.shape, dtype=np.uint8), GRID)
    assert paint_copy(case, 1, tmp_path) == []


@pytest.mark.parametrize("has_column", [True, False])
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_the_training_cases_of_the_fold_are_painted(
    fold: int, has_column: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = []
    for number in range(6):
        own_fold = number % 3 if has_column else None
        names = {"name": f"c{number}", "patient": f"p{number}"}
        cases.append(replace(chest(tmp_path), **names, fold=own_fold))
    write_case_table(tmp_path / "table.csv", cases)
    painted_names: list[str] = []

    def paint_nothing(case: Case, number: int, folder: Path) -> list[Case]:
        painted_names.append(case.name)
        return []

    monkeypatch.setattr(painted, "paint_copy", paint_nothing)
    arguments = [f"cases={tmp_path / 'table.csv'}", f"output={tmp_path}", "copies=1"]
    monkeypatch.setattr("sys.argv", ["painted", *arguments, f"fold={fold}", "num_folds=3"])
    painted.main()
    split = split_cases(cases, fold=fold, num_folds=3)
    assert painted_names == [case.name for case in split.train]
    monkeypatch.setattr("sys.argv", ["painted", *arguments, "fold=first"])
    with pytest.raises(UserError, match="fold=first: expected the number of a fold or all"):
        painted.main()


@pytest.mark.slow
def test_the_table_has_the_cases_then_copies_then_phantoms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_case_table(tmp_path / "table.csv", [chest(tmp_path)])
    shared = ["painted", f"cases={tmp_path / 'table.csv'}", "fold=all", "phantoms=1"]
    for copies, names in (("2", ["a_ill1", "a_ill2"]), ("0", [])):
        output = tmp_path / copies
        monkeypatch.setattr("sys.argv", [*shared, f"output={output}", f"copies={copies}"])
        painted.main()
        cases = read_case_table(output / "cases.csv")
        assert [case.name for case in cases] == ["a", *names, "missing_000"]
