"""Cases of the included weights: the table fits the masks; downloads are found by voxels."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image
from medseg.metrics.scores import dice

LUNGS = Path(__file__).resolve().parents[2] / "data" / "lungs"
ROWS = list(csv.DictReader((LUNGS / "cases.csv").open(newline="", encoding="utf-8")))
COMPLETED = list(csv.DictReader((LUNGS / "completed.csv").open(newline="", encoding="utf-8")))
VALUES = {"trust_left_lung": 1, "trust_right_lung": 2}


@pytest.fixture
def restore() -> ModuleType:
    spec = importlib.util.spec_from_file_location("restore", LUNGS / "restore.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_lists_the_masks_with_their_checksums() -> None:
    assert {path.name for path in (LUNGS / "masks").iterdir()} == {
        Path(row["labels"]).name for row in ROWS
    }
    for row in ROWS:
        content = (LUNGS / row["labels"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["mask_sha256"], row["case"]


@pytest.mark.parametrize("name", ["cip_ct64", "elastix_right_lung", "acrin_001_tp2"])
def test_a_side_is_in_the_mask_unless_it_is_absent(name: str) -> None:
    row = next(row for row in ROWS if row["case"] == name)
    present = set(np.unique(read_labels(LUNGS / row["labels"]).array).tolist())
    expected = {value for column, value in VALUES.items() if row[column] != "absent"}
    assert present == {0, *expected}


@pytest.mark.parametrize("row", COMPLETED, ids=lambda row: row["case"])
def test_completed_masks_have_their_checksums_and_change_little(row: dict[str, str]) -> None:
    (case,) = (case for case in ROWS if case["case"] == row["case"])
    mask = read_labels(LUNGS / case["labels"])
    for column, checksum in (("labels", "mask_sha256"), ("labels_2", "mask_2_sha256")):
        path = LUNGS / row[column]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == row[checksum], column
        completed = read_labels(path)
        assert completed.grid == mask.grid
        for trust, value in VALUES.items():
            was = mask.array == value
            now = completed.array == value
            if row[trust] == "completed":
                # At most 6 % of a side had been left out.
                assert dice(was, now) > 0.96, (column, trust)
            else:
                assert np.array_equal(was, now), (column, trust)


def test_every_licence_is_stated() -> None:
    assert all(row["licence"] and row["licence_seen"] for row in ROWS)
    assert {row["final_weights"] for row in ROWS} == {"yes"}


def test_a_scan_is_found_by_its_voxels_and_cut(
    restore: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image_hu = np.random.default_rng(1).integers(-1000, 500, (6, 4, 5)).astype(np.int16)
    grid = VoxelGrid((6, 4, 5), (2.0, 1.0, 1.0), (0.0, 0.0, 10.0))
    write_image(tmp_path / "downloads" / "a.nrrd", image_hu, grid)
    write_image(tmp_path / "downloads" / "b.nii.gz", image_hu + np.int16(1), grid)
    (tmp_path / "downloads" / "damaged.nii.gz").write_bytes(b"nothing")
    used = image_hu[1:4]
    home = tmp_path / "lungs"
    home.mkdir()
    columns = {
        "case": "x",
        "image": "scans/x.nii.gz",
        "first_slice": "1",
        "last_slice": "3",
        "voxels_sha256": hashlib.sha256(used.astype("<i2").tobytes()).hexdigest(),
        "collection": "C",
        "source": "s",
        "path": "p",
        "dicom_series": "",
    }
    lines = [",".join(columns), ",".join(columns.values())]
    (home / "cases.csv").write_text("\n".join(lines), encoding="utf-8")

    assert restore.main([home], home) == 1
    assert "x: missing (C, s, p)" in capsys.readouterr().out
    assert restore.main([tmp_path / "downloads"], home) == 0
    assert capsys.readouterr().out == f"x: from {tmp_path / 'downloads' / 'a.nrrd'}\n"
    restored = read_image(home / "scans" / "x.nii.gz")
    assert np.array_equal(restored.array, used)
    assert restored.grid.is_close(VoxelGrid((3, 4, 5), (2.0, 1.0, 1.0), (0.0, 0.0, 12.0)))
    assert restore.main([], home) == 0, "it is there"
