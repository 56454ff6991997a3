"""Partial scans contain the slices that their names say, on the grid of the scan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from medseg.data.case_table import Case
from medseg.geometry.grid import VoxelGrid
from medseg.io.read import read_image, read_labels
from medseg.io.write import write_image, write_labels
from medseg.studies.partial_scans import cut_partial_scans, slice_ranges

# Stored from head to feet: slice 0 is the highest.
GRID = VoxelGrid((60, 4, 5), (5.0, 2.0, 1.0), (10.0, -5.0, 30.0), ((1, 0, 0), (0, 1, 0), (0, 0, -1)))


@pytest.mark.parametrize(
    ("below", "organ", "above", "expected"),
    [
        (0, 40, 0, {"middle": (13, 27)}),
        (1, 40, 1, {"bases": (0, 11), "middle": (14, 28), "apices": (31, 42)}),
        (9, 40, 5, {"below": (0, 8), "bases": (0, 19), "middle": (22, 36), "apices": (39, 54), "above": (50, 54)}),
        (9, 10, 0, {"below": (0, 8)}),
        (9, 0, 9, {}),
    ],
)
def test_the_slices_of_each_part(below: int, organ: int, above: int, expected: dict[str, tuple[int, int]]) -> None:
    assert dict(slice_ranges(np.repeat([False, True, False], [below, organ, above]), 5.0)) == expected


def test_parts_lie_where_they_were_and_keep_what_the_table_says(tmp_path: Path) -> None:
    image = np.arange(np.prod(GRID.shape), dtype=np.int16).reshape(GRID.shape)
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[10:50, 1:3, 1:3] = 7
    write_image(tmp_path / "i.nii.gz", image, GRID)
    write_labels(tmp_path / "l.nii.gz", labels, GRID)
    case = Case("c", tmp_path / "i.nii.gz", tmp_path / "l.nii.gz", "p", trust={"lung": "reference"})
    parts = {part.name: part for part in cut_partial_scans(case, [7], tmp_path / "pieces")}
    assert set(parts) == {"c_below", "c_bases", "c_middle", "c_apices", "c_above"}
    for name, part in parts.items():
        assert (part.patient, part.trust) == ("p", {"lung": "reference"})
        assert part.labels is not None
        cut, cut_labels = read_image(part.image), read_labels(part.labels)
        assert cut.grid.is_close(cut_labels.grid)
        assert bool((cut_labels.array == 7).any()) == (name not in {"c_below", "c_above"})
        # Each voxel at its own world point.
        place = np.round(GRID.world_to_index_zyx(cut.grid.index_to_world_xyz_mm([1, 2, 3]))).astype(int)
        assert cut.array[1, 2, 3] == image[tuple(place)]
    assert read_image(parts["c_apices"].image).grid.world_to_index_zyx([0, 0, 30.0])[0] == pytest.approx(19)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "pieces").iterdir()}
    assert [part.name for part in cut_partial_scans(case, [7], tmp_path / "pieces")] == list(parts)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "pieces").iterdir()} == before
