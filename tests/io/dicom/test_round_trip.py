"""Label maps written as SEG and RTSTRUCT from any series, read by independent readers."""

from __future__ import annotations

from pathlib import Path

import highdicom
import numpy as np
import pytest
from dicom_sources import (
    KINDS,
    ORIENTATIONS,
    make_series,
    raw_contours,
    raw_segments,
    source_planes,
)

from medseg.io.dicom.labels import open_label_file, read_label_file
from medseg.io.dicom.read import SourceSlices, open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.label_table import Structure
from medseg.io.write import write_labels

STRUCTURES = (
    Structure("left_lung", 1, "#38bdf8", ("39607008", "Lung", "left")),
    Structure("Gefäß", 4, "#fb923c"),
)


def labels_of(slices: SourceSlices) -> np.ndarray:
    """Labels 0, 1, 4 without any symmetry: noise, and a block with holes."""
    rng = np.random.default_rng(3)
    labels = rng.choice(np.array([0, 1, 4], np.uint8), slices.grid.shape, p=[0.6, 0.2, 0.2])
    labels[1:6, 2:7, 3:9] = 1
    labels[2:4, 3:5, 5:7] = 0
    return labels


def expected(labels: np.ndarray, slices: SourceSlices, points: np.ndarray) -> np.ndarray:
    """The label of the nearest voxel of each point."""
    index = np.rint(slices.grid.world_to_index_zyx(points)).astype(int)
    return labels[tuple(np.moveaxis(index, -1, 0))]


def check(folder: Path, kind: str, direction: np.ndarray, form: str = "binary") -> None:
    source = make_series(folder / "source", kind, direction)
    slices = open_slices(source)
    labels = labels_of(slices)
    planes = source_planes(source)
    seg, rtstruct = folder / "a.seg.dcm", folder / "a.rtstruct.dcm"
    write_segmentation(seg, labels, slices, STRUCTURES, kind=form)
    write_structure_set(rtstruct, labels, slices, STRUCTURES)

    # From the bytes: each frame lies on a slice and has the labels of the nearest voxels.
    num_found = 0
    for number, mask, points in raw_segments(seg):
        assert np.array_equal(
            mask, expected(labels, slices, points) == STRUCTURES[number - 1].value
        )
        assert min(np.abs(points - own).max() for own in planes.values()) < 1e-4
        num_found += np.count_nonzero(mask)
    on_slices = {key: expected(labels, slices, points) for key, points in planes.items()}
    assert num_found == sum(np.count_nonzero(plane_labels) for plane_labels in on_slices.values())

    # By highdicom, slice by slice.
    by_highdicom = highdicom.seg.segread(seg)
    options = {"combine_segments": True, "assert_missing_frames_are_empty": True}
    if kind == "multi-frame":
        read = by_highdicom.get_pixels_by_source_frame(
            next(iter(planes))[0], [number for _, number in planes], **options
        )
    else:
        read = by_highdicom.get_pixels_by_source_instance([uid for uid, _ in planes], **options)
    values = np.array([0, *(structure.value for structure in STRUCTURES)])
    assert np.array_equal(values[read], np.stack(list(on_slices.values())))

    # The contours, filled by matplotlib.
    filled = raw_contours(rtstruct, planes)
    for key, plane_labels in on_slices.items():
        for number, structure in enumerate(STRUCTURES, start=1):
            assert np.array_equal(
                filled.get(key, {}).get(number, np.zeros_like(plane_labels, bool)),
                plane_labels == structure.value,
            )

    # Onto the grid again.
    for path in (seg, rtstruct):
        file = open_label_file(path)
        assert list(file.names.values()) == [structure.name for structure in STRUCTURES]
        assert file.series_uids == ("1.2.3.4",)
        back = read_label_file(
            file,
            slices,
            {number: structure.value for number, structure in enumerate(STRUCTURES, start=1)},
        )
        assert back.grid == slices.grid
        covered = back.array != labels
        if kind == "gapped":
            # The plane that was interpolated has the labels of a neighbour.
            covered[3 if direction[:, 2] @ np.cross(*direction.T[:2]) > 0 else 4] = False
        if kind == "tilted":
            # Beside the slices there are no labels.
            covered &= back.array > 0
        assert not covered.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 13, 26, 39])
def test_some_orientations(kind: str, number: int, tmp_path: Path) -> None:
    check(tmp_path, kind, ORIENTATIONS[number], "labelmap" if number == 13 else "binary")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("form", ["binary", "labelmap"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_orientations(kind: str, form: str, tmp_path: Path) -> None:
    for number, direction in enumerate(ORIENTATIONS):
        check(tmp_path / str(number), kind, direction, form)


def test_names_of_labels_come_back_as_they_are(tmp_path: Path) -> None:
    """Of every format that keeps names; a sign that separates values in DICOM becomes `_`."""
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3)))
    names = ["left_lung", "Gefäß links", "lobe/upper", "a" * 64]
    structures = [Structure(name, value) for value, name in enumerate(names, start=1)]
    labels = np.ones(slices.grid.shape, np.uint8)
    for write in (write_segmentation, write_structure_set):
        write(tmp_path / "a.dcm", labels, slices, [*structures, Structure("a\\b", 9)])
        assert list(open_label_file(tmp_path / "a.dcm").names.values()) == [*names, "a_b"]
    write_labels(tmp_path / "a.seg.nrrd", labels, slices.grid, structures=structures)
    header = (tmp_path / "a.seg.nrrd").read_bytes().partition(b"\n\n")[0].decode("utf-8")
    stored = dict(line.split(":=", 1) for line in header.splitlines() if ":=" in line)
    assert [stored[f"Segment{number}_Name"] for number in range(len(names))] == names
