from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medseg.data.case_table import Case
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.preprocess.scale import HuScale
from medseg.studies.pieces import cut_partial_scans, halves, paint_scan, slice_ranges

# Stored from head to feet: slice 0 is the highest.
HEAD_FIRST_GRID = VoxelGrid(
    (60, 4, 5), (5.0, 2.0, 1.0), (10.0, -5.0, 30.0), ((1, 0, 0), (0, 1, 0), (0, 0, -1))
)


@pytest.mark.parametrize(
    ("below", "organ", "above", "expected"),
    [
        (0, 40, 0, {"middle": (13, 27)}),
        (1, 40, 1, {"bases": (0, 11), "middle": (14, 28), "apices": (31, 42)}),
        (
            9,
            40,
            5,
            {
                "below": (0, 8),
                "bases": (0, 19),
                "middle": (22, 36),
                "apices": (39, 54),
                "above": (50, 54),
            },
        ),
        (9, 10, 0, {"below": (0, 8)}),
        (9, 0, 9, {}),
    ],
)
def test_the_slices_of_each_part(
    below: int, organ: int, above: int, expected: dict[str, tuple[int, int]]
) -> None:
    assert (
        dict(slice_ranges(np.repeat([False, True, False], [below, organ, above]), 5.0)) == expected
    )


def test_parts_lie_where_they_were_and_keep_what_the_table_says(tmp_path: Path) -> None:
    image = np.arange(np.prod(HEAD_FIRST_GRID.shape), dtype=np.int16).reshape(HEAD_FIRST_GRID.shape)
    labels = np.zeros(HEAD_FIRST_GRID.shape, dtype=np.uint8)
    labels[10:50, 1:3, 1:3] = 7
    write_image(tmp_path / "i.nii.gz", image, HEAD_FIRST_GRID)
    write_labels(tmp_path / "l.nii.gz", labels, HEAD_FIRST_GRID)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p", trust={"lung": "reference"})
    parts = {
        part.name: part for part in cut_partial_scans(case, {"lung": [7]}, tmp_path / "pieces")
    }
    assert set(parts) == {"c_below", "c_bases", "c_middle", "c_apices", "c_above"}
    for name, part in parts.items():
        assert (part.patient, part.trust) == ("p", {"lung": "reference"})
        assert part.labels is not None
        cut, cut_labels = read_image(part.image), read_labels(part.labels)
        assert cut.grid.is_close(cut_labels.grid)
        assert bool((cut_labels.array == 7).any()) == (name not in {"c_below", "c_above"})
        # Each voxel has kept its point in the world.
        place = np.round(
            HEAD_FIRST_GRID.world_to_index_zyx(cut.grid.index_to_world_xyz_mm([1, 2, 3]))
        ).astype(int)
        assert cut.array[1, 2, 3] == image[tuple(place)]
    assert read_image(parts["c_apices"].image).grid.world_to_index_zyx([0, 0, 30.0])[
        0
    ] == pytest.approx(19)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "pieces").iterdir()}
    assert [
        part.name for part in cut_partial_scans(case, {"lung": [7]}, tmp_path / "pieces")
    ] == list(parts)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "pieces").iterdir()} == before
    # Corrected labels, with the same slices, are cut again.
    labels[10:50, 1, 1] = 0
    write_labels(tmp_path / "l.nii.gz", labels, HEAD_FIRST_GRID)
    later_s = 1 + max(path.stat().st_mtime for path in before)
    os.utime(tmp_path / "l.nii.gz", (later_s, later_s))
    middle = cut_partial_scans(case, {"lung": [7]}, tmp_path / "pieces")[2]
    assert middle.labels is not None
    assert not (read_labels(middle.labels).array[:, 1, 1] == 7).any()


def test_parts_of_an_mr_have_its_background(tmp_path: Path) -> None:
    image = np.full(HEAD_FIRST_GRID.shape, 300.0, np.float32)
    image[0] = np.nan
    labels = np.zeros(HEAD_FIRST_GRID.shape, dtype=np.uint8)
    labels[10:50, 1:3, 1:3] = 7
    write_image(tmp_path / "i.nii.gz", image, HEAD_FIRST_GRID)
    write_labels(tmp_path / "l.nii.gz", labels, HEAD_FIRST_GRID)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p")
    parts = cut_partial_scans(case, {"organ": [7]}, tmp_path / "pieces", "mr")
    values = [np.unique(read_image(part.image).array).tolist() for part in parts]
    assert [0, 300] in values
    assert all(set(part) <= {0, 300} for part in values)


def test_halves_lie_between_two_organs_and_only_there() -> None:
    labels = np.zeros((3, 4, 20), dtype=np.uint8)
    labels[:, 1:3, 3:8] = 2
    assert not list(halves(labels, [[1], [2]]))
    labels[:, 1:3, 11:17] = 1
    assert dict(halves(labels, [[1], [2]])) == {"right_half": (0, 10), "left_half": (10, 20)}
    assert dict(halves(labels, [[1, 5], [2, 4]])) == {"right_half": (0, 10), "left_half": (10, 20)}
    labels[0, 0, 0] = 3
    assert not list(halves(labels, [[1, 3]])), "two lobes of one organ"
    assert not list(halves(labels, [[1], [2], [3]]))


@pytest.mark.parametrize(("across", "trust"), [(0, "reference"), (1, "sliver"), (3, "reference")])
def test_what_a_half_shows_of_the_other_organ_has_no_trust_unless_it_is_much(
    across: int, trust: str, tmp_path: Path
) -> None:
    grid = VoxelGrid(
        (3, 4, 24), (5.0, 2.0, 1.0), (0.0, 0.0, 0.0), ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    )
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[:, :, 12 - across : 22], labels[:, :2, 2:11] = 1, 2
    write_image(tmp_path / "i.nii.gz", labels.astype(np.int16), grid)
    write_labels(tmp_path / "l.nii.gz", labels, grid)
    case_trust = {"left": "reference", "right": "reference"}
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p", trust=case_trust)
    parts = {
        part.name: part.trust
        for part in cut_partial_scans(case, {"left": [1], "right": [2]}, tmp_path / "pieces")
    }
    assert parts == {"c_right_half": case_trust | {"left": trust}, "c_left_half": case_trust}


def test_painted_scans_keep_their_place_and_are_the_same_in_every_study(tmp_path: Path) -> None:
    image = np.full(HEAD_FIRST_GRID.shape, -800, dtype=np.int16)
    labels = np.zeros(HEAD_FIRST_GRID.shape, dtype=np.uint8)
    labels[10:50, 1:3, 1:3] = 7
    write_image(tmp_path / "i.nii.gz", image, HEAD_FIRST_GRID)
    write_labels(tmp_path / "l.nii.gz", labels, HEAD_FIRST_GRID)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p", trust={"lung": "reference"})
    (ill,), (again,) = (paint_scan(case, [[7], [8]], tmp_path / name) for name in ("a", "b"))
    assert (ill.name, ill.patient, ill.trust) == ("c_diseased", "p", {"lung": "reference"})
    assert ill.labels is not None
    painted = read_image(ill.image)
    assert np.array_equal(painted.array, read_image(again.image).array)
    assert painted.grid.is_close(read_labels(ill.labels).grid)
    assert (painted.array > -800).any()
    # The first slice of the scan is the highest one; that of the written files is the lowest.
    assert not (painted.array > -800)[52:].any()
    assert not (painted.array > -800)[:8].any()
    assert paint_scan(case, [[9]], tmp_path / "none") == []


def test_a_scan_that_was_painted_with_another_scale_is_painted_again(tmp_path: Path) -> None:
    image = np.full(HEAD_FIRST_GRID.shape, 224, dtype=np.int16)
    labels = np.zeros(HEAD_FIRST_GRID.shape, dtype=np.uint8)
    labels[10:50, 1:3, 1:3] = 7
    write_image(tmp_path / "i.nii.gz", image, HEAD_FIRST_GRID)
    write_labels(tmp_path / "l.nii.gz", labels, HEAD_FIRST_GRID)
    as_stored = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p")
    for offset in (0.0, -1024.0, -1000.0):
        case = replace(as_stored, hu=HuScale(1.0, offset))
        (painted,) = paint_scan(case, [[7]], tmp_path)
        assert (painted.name, painted.hu) == ("c_diseased", HuScale())
        # A corner outside of the organ keeps its value.
        assert read_image(painted.image).array[0, 0, 0] == 224 + offset
