"""SEG and RTSTRUCT of other programs: grids, overlaps, fractions, holes, and refused files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dicom_sources import STEP_MM, make_series
from highdicom import AlgorithmIdentificationSequence, Volume
from highdicom.seg import Segmentation, SegmentDescription
from pydicom import Dataset, dcmread
from pydicom.sr.codedict import codes

from medseg.errors import UserError
from medseg.io.dicom.labels import (
    _lost_warnings,
    empty_structures,
    open_label_file,
    read_label_file,
)
from medseg.io.dicom.read import SourceSlices, open_slices
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure, labels_on_slices, points_of
from tests.io.io_volumes import finding_texts


@pytest.fixture
def slices(tmp_path: Path) -> SourceSlices:
    return open_slices(make_series(tmp_path / "source", "plain", np.eye(3)))


def save_seg(
    path: Path, slices: SourceSlices, pixels: Any, kind: str = "BINARY", num_segments: int = 1
) -> Path:
    """Write what highdicom alone makes of an array or a volume."""
    algorithm = AlgorithmIdentificationSequence("other", codes.DCM.ArtificialIntelligence, "1")
    names = [f"part {number}" for number in range(1, num_segments + 1)]
    described = [
        SegmentDescription(number, name, codes.SCT.Tissue, codes.SCT.Tissue, "AUTOMATIC", algorithm)
        for number, name in enumerate(names, start=1)
    ]
    headers = [dcmread(frame.path) for frame in slices.frames]
    for header in headers:
        header.SliceThickness = STEP_MM
        for keyword in (
            "PatientBirthDate",
            "PatientSex",
            "AccessionNumber",
            "StudyID",
            "StudyTime",
        ):
            setattr(header, keyword, "")
    Segmentation(
        headers, pixels, kind, described, "1.2.3.7", 1, "1.2.3.8", 1, "other", "other", "1", "1"
    ).save_as(path)
    return path


def add_contours(
    path: Path,
    slices: SourceSlices,
    polygons: Sequence[tuple[int, Any]],
    kind: str = "CLOSED_PLANAR",
) -> Path:
    """Replace the contours of a file by polygons in (row, column) of a slice."""
    empty = np.zeros(slices.grid.shape, np.uint8)
    write_structure_set(path, empty, slices, [Structure("part", 1)])
    dataset = dcmread(path)
    contours = []
    for index, polygon in polygons:
        points = points_of(slices.frames[0], np.array(polygon, float)) + np.array(
            [0, 0, STEP_MM * index]
        )
        item = Dataset()
        item.ContourGeometricType, item.NumberOfContourPoints = kind, len(points)
        item.ContourData = [f"{value:.3f}" for value in points.ravel()]
        contours.append(item)
    dataset.ROIContourSequence[0].ContourSequence = contours
    dataset.save_as(path)
    return path


SQUARE = [(1.5, 2.5), (1.5, 9.5), (7.5, 9.5), (7.5, 2.5)]
HOLE = [(3.5, 4.5), (3.5, 6.5), (5.5, 6.5), (5.5, 4.5)]
RING = np.zeros((9, 13), bool)
RING[2:8, 3:10] = True
RING[4:6, 5:7] = False


def test_without_structures_no_pixel_is_labelled(slices: SourceSlices) -> None:
    labels = np.ones(slices.grid.shape, np.uint8)
    numbers = labels_on_slices(labels, slices, [])
    assert numbers.shape == (len(slices.frames), *slices.frames[0].pixels.shape)
    assert not numbers.any()


def test_a_fraction_counts_from_a_half(tmp_path: Path, slices: SourceSlices) -> None:
    shares = np.random.default_rng(0).random(slices.grid.shape).astype(np.float32)
    file = open_label_file(save_seg(tmp_path / "a.dcm", slices, shares, "FRACTIONAL"))
    labels_read = read_label_file(file, slices, {1: 1}).array
    assert np.array_equal(labels_read, np.rint(shares * 255) >= 0.5 * 255)


def test_of_segments_that_overlap_the_last_one_is_kept(
    tmp_path: Path, slices: SourceSlices
) -> None:
    pixels = np.zeros((*slices.grid.shape, 2), np.uint8)
    pixels[1:5, ..., 0] = pixels[4:7, 2:4, ..., 1] = 1
    file = open_label_file(save_seg(tmp_path / "a.dcm", slices, pixels, num_segments=2))
    assert file.names == {1: "part 1", 2: "part 2"}
    for order in ((1, 2), (2, 1)):
        volume = read_label_file(file, slices, {number: 3 * number for number in order})
        expected = np.zeros(slices.grid.shape, np.uint8)
        for number in order:
            expected[pixels[..., number - 1] == 1] = 3 * number
        assert np.array_equal(volume.array, expected)
        assert finding_texts(volume) == (
            "26 pixels of a.dcm are in several segments; the last one is kept",
        )
    assert finding_texts(read_label_file(file, slices, {1: 1, 2: 1})) == ()


@pytest.mark.parametrize("name", ["sagittal", "flipped", "finer", "coarser"])
def test_a_seg_on_another_grid(name: str, tmp_path: Path, slices: SourceSlices) -> None:
    """A pixel gets the nearest SEG voxel's label, whatever the frames' orientation and spacing."""
    grid = slices.grid
    affine = np.eye(4)
    affine[:3, :3] = np.array(grid.direction)[:, ::-1] * grid.spacing_mm
    affine[:3, 3] = grid.origin_xyz_mm
    scale = {"finer": 0.5, "coarser": 1.5}.get(name, 1.0)
    shape = tuple(int(size / scale) for size in grid.shape)
    affine[:3, :3] *= scale
    array = (np.random.default_rng(1).random(shape) < 0.4).astype(np.uint8)
    volume = Volume(array, affine, coordinate_system="PATIENT", frame_of_reference_uid="1.2.3.9")
    changed = {
        "sagittal": lambda one: one.permute_spatial_axes([2, 0, 1]),
        "flipped": lambda one: one.flip_spatial([0, 2]),
    }
    path = save_seg(tmp_path / "a.dcm", slices, changed.get(name, lambda one: one)(volume))
    labels_read = read_label_file(open_label_file(path), slices, {1: 1}).array
    index = np.floor(np.indices(grid.shape) / scale + 0.5).astype(int)
    inside = np.all([one < size for one, size in zip(index, shape, strict=True)], axis=0)
    expected = np.where(
        inside,
        array[tuple(one.clip(max=size - 1) for one, size in zip(index, shape, strict=True))],
        0,
    )
    assert np.array_equal(labels_read, expected)


def test_a_pixel_in_three_segments_counts_once(tmp_path: Path, slices: SourceSlices) -> None:
    pixels = np.zeros((*slices.grid.shape, 3), np.uint8)
    pixels[2, 3:5, 4:8] = 1
    path = save_seg(tmp_path / "a.dcm", slices, pixels, num_segments=3)
    volume = read_label_file(open_label_file(path), slices, {1: 1, 2: 2, 3: 3})
    assert finding_texts(volume) == (
        "8 pixels of a.dcm are in several segments; the last one is kept",
    )


def seg_volume(
    slices: SourceSlices, array: np.ndarray, step_mm: float = STEP_MM, first_mm: float = 0.0
) -> Volume:
    """Place an array (planes, rows, columns) on planes parallel to the slices.

    Args:
        slices: The slices, whose rows and columns it has.
        array: Labels.
        step_mm: Distance of the planes.
        first_mm: Distance of the first plane from the first slice.
    """
    grid = slices.grid
    affine = np.eye(4)
    affine[:3, :3] = np.array(grid.direction)[:, ::-1] * [step_mm, *grid.spacing_mm[1:]]
    affine[:3, 3] = grid.origin_xyz_mm + first_mm * affine[:3, 0] / step_mm
    return Volume(array, affine, coordinate_system="PATIENT", frame_of_reference_uid="1.2.3.9")


def test_planes_that_are_not_stored_are_background(tmp_path: Path, slices: SourceSlices) -> None:
    """The planes are twice as near as the slices; those beside the structure have no frame."""
    array = np.zeros((2 * len(slices.frames), *slices.grid.shape[1:]), np.uint8)
    array[3:10] = 1
    path = save_seg(tmp_path / "a.dcm", slices, seg_volume(slices, array, STEP_MM / 2))
    dataset = dcmread(path)
    assert dataset.NumberOfFrames == 7
    (measures,) = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    for spacing_mm in (STEP_MM / 2, 0, None):
        measures.SpacingBetweenSlices = spacing_mm
        dataset.save_as(path)
        volume = read_label_file(open_label_file(path), slices, {1: 1})
        assert np.array_equal(volume.array, array[::2])
        assert finding_texts(volume) == ()


def test_planes_across_the_slices_label_only_what_is_near_them(
    tmp_path: Path, slices: SourceSlices
) -> None:
    """The slices are three times as far apart as the columns, between which the planes lie."""
    array = np.zeros(slices.grid.shape, np.uint8)
    array[2:5, 3:7, 5:8] = 1
    sagittal = seg_volume(slices, array).permute_spatial_axes([2, 0, 1])
    file = open_label_file(save_seg(tmp_path / "a.dcm", slices, sagittal))
    volume = read_label_file(file, slices, {1: 1})
    assert np.array_equal(volume.array, array)
    assert finding_texts(volume) == ()


@pytest.mark.parametrize("declared_mm", [3 * STEP_MM, 10 * STEP_MM, 1.0, None])
def test_planes_farther_apart_than_the_slices(
    declared_mm: float | None, tmp_path: Path, slices: SourceSlices
) -> None:
    array = np.ones((3, *slices.grid.shape[1:]), np.uint8)
    path = save_seg(tmp_path / "a.dcm", slices, seg_volume(slices, array, 3 * STEP_MM))
    dataset = dcmread(path)
    (measures,) = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    assert measures.SpacingBetweenSlices == 3 * STEP_MM
    measures.SpacingBetweenSlices = declared_mm
    dataset.save_as(path)
    volume = read_label_file(open_label_file(path), slices, {1: 1})
    if declared_mm in (3 * STEP_MM, 10 * STEP_MM):
        assert volume.array.all()
        assert finding_texts(volume) == ()
        return
    assert np.flatnonzero(volume.array.any(axis=(1, 2))).tolist() == [0, 3, 6]
    assert finding_texts(volume) == (
        "the planes of a.dcm are at least 7.5 mm apart; what is farther than "
        f"{0.5 * (declared_mm or STEP_MM):.3g} mm from them has no label",
    )


def shifted_seg(path: Path, slices: SourceSlices, planes_mm: list[float]) -> Path:
    """Write a full SEG with the given heights of its planes, from the first slice on."""
    array = np.ones((len(planes_mm), *slices.grid.shape[1:]), np.uint8)
    save_seg(path, slices, seg_volume(slices, array))
    dataset = dcmread(path)
    for group, height_mm in zip(dataset.PerFrameFunctionalGroupsSequence, planes_mm, strict=True):
        position = group.PlanePositionSequence[0].ImagePositionPatient
        position[2] = slices.frames[0].position_xyz_mm[2] + height_mm
    dataset.save_as(path)
    return path


@pytest.mark.parametrize(
    "planes_mm", [[0.0, 0.02, 2.5, 5.0, 7.5], [0.0, 0.2, 2.5, 5.0, 7.5], [0.0, 2.5, 5.0, 7.5]]
)
def test_two_planes_at_one_place_do_not_shrink_the_others(
    planes_mm: list[float], tmp_path: Path, slices: SourceSlices
) -> None:
    heights_mm = [height_mm + 1.0 for height_mm in planes_mm]
    file = open_label_file(shifted_seg(tmp_path / "a.dcm", slices, heights_mm))
    volume = read_label_file(file, slices, {1: 1})
    assert np.flatnonzero(volume.array.any(axis=(1, 2))).tolist() == [0, 1, 2, 3]
    assert finding_texts(volume) == ()


def test_segments_whose_planes_differ_by_rounding_are_both_kept(
    tmp_path: Path, slices: SourceSlices
) -> None:
    pixels = np.zeros((*slices.grid.shape, 2), np.uint8)
    pixels[2, :4, :, 0] = pixels[2, 5:, :, 1] = 1
    path = save_seg(tmp_path / "a.dcm", slices, pixels, num_segments=2)
    dataset = dcmread(path)
    group = dataset.PerFrameFunctionalGroupsSequence[1]
    group.PlanePositionSequence[0].ImagePositionPatient[2] += 0.02
    dataset.save_as(path)
    volume = read_label_file(open_label_file(path), slices, {1: 1, 2: 2})
    assert np.array_equal(volume.array, pixels[..., 0] + 2 * pixels[..., 1])


def test_frames_of_one_plane_of_a_label_map_are_joined(
    tmp_path: Path, slices: SourceSlices
) -> None:
    array = np.zeros(slices.grid.shape, np.uint8)
    array[2, :4] = array[3, 5:] = 1
    path = save_seg(tmp_path / "a.dcm", slices, array, "LABELMAP")
    dataset = dcmread(path)
    first, second = (
        group.PlanePositionSequence[0] for group in dataset.PerFrameFunctionalGroupsSequence
    )
    second.ImagePositionPatient = first.ImagePositionPatient
    dataset.save_as(path)
    labels_read = read_label_file(open_label_file(path), slices, {1: 1}).array
    assert np.array_equal(labels_read[[2, 3]].sum(axis=0), array[2] + array[3])
    assert labels_read.any(axis=(1, 2)).sum() == 1


MICRO_MM = 0.05


@pytest.fixture
def micro_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceSlices:
    """Slices of micro-CT."""
    monkeypatch.setattr("dicom_sources.STEP_MM", MICRO_MM)
    folder = make_series(tmp_path / "micro", "plain", np.eye(3), (12, 9, 13))
    return open_slices(folder)


def test_planes_of_micro_ct_label_their_own_slices(
    tmp_path: Path, micro_slices: SourceSlices
) -> None:
    slices = micro_slices
    array = np.zeros(slices.grid.shape, np.uint8)
    array[3:8] = 1
    path = save_seg(tmp_path / "a.dcm", slices, seg_volume(slices, array, MICRO_MM))
    labels_read = read_label_file(open_label_file(path), slices, {1: 1}).array
    assert np.array_equal(labels_read, array)


def test_contours_of_micro_ct_label_their_own_slices(
    tmp_path: Path, micro_slices: SourceSlices
) -> None:
    slices = micro_slices
    polygons = [(index * MICRO_MM / STEP_MM, SQUARE) for index in range(3, 8)]
    file = open_label_file(add_contours(tmp_path / "a.dcm", slices, polygons))
    expected = np.zeros(slices.grid.shape, np.uint8)
    expected[3:8, 2:8, 3:10] = 1
    assert np.array_equal(read_label_file(file, slices, {1: 1}).array, expected)


def test_a_segment_beyond_the_slices_is_said(tmp_path: Path, slices: SourceSlices) -> None:
    array = np.ones(slices.grid.shape, np.uint8)
    file = open_label_file(
        save_seg(tmp_path / "a.dcm", slices, seg_volume(slices, array, first_mm=500.0))
    )
    volume = read_label_file(file, slices, {1: 1})
    assert not volume.array.any()
    assert finding_texts(volume) == ("'part 1': none of its pixels is on the slices",)


def test_lost_segments_are_found_without_sorting_the_pixels(
    tmp_path: Path, slices: SourceSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorting takes seconds for hundreds of planes."""
    array = np.ones((*slices.grid.shape, 3), np.uint8)
    file = open_label_file(save_seg(tmp_path / "a.dcm", slices, array, num_segments=3))
    in_planes, on_slices = np.zeros((2, 3, 4, 5), np.uint16)
    in_planes[0, 1, 1], in_planes[2, 1, 1], on_slices[1, 2, 2] = 300, 7, 7
    monkeypatch.delattr(np, "unique")
    assert _lost_warnings(file, {1: 7, 2: 300, 3: 4}, in_planes, on_slices) == [
        "'part 2': none of its pixels is on the slices"
    ]


def test_frames_of_one_plane_that_begin_at_two_points_are_refused(
    tmp_path: Path, slices: SourceSlices
) -> None:
    path = save_seg(
        tmp_path / "a.dcm", slices, np.ones((*slices.grid.shape, 2), np.uint8), num_segments=2
    )
    dataset = dcmread(path)
    (position,) = dataset.PerFrameFunctionalGroupsSequence[-1].PlanePositionSequence
    position.ImagePositionPatient[0] += 2
    dataset.save_as(path)
    assert refusal(path, slices) == (
        "a.dcm: expected the frames of each plane of the SEG to begin at one point, but they begin "
        "at several; export it again."
    )


@pytest.mark.parametrize(
    "polygons",
    [
        [(2, SQUARE), (2, HOLE)],
        [(2, SQUARE), (2, HOLE[::-1])],
        [(2, SQUARE), (2, HOLE), (2, SQUARE)],
        [(2, [*SQUARE, SQUARE[0], HOLE[0], *HOLE[:0:-1], HOLE[0], SQUARE[0]])],
        [(2.3, SQUARE), (2.3, HOLE)],
    ],
    ids=["two contours", "the other way round", "one stored twice", "keyhole", "off the slice"],
)
def test_holes(polygons: list[tuple[float, Any]], tmp_path: Path, slices: SourceSlices) -> None:
    file = open_label_file(add_contours(tmp_path / "a.dcm", slices, polygons))
    volume = read_label_file(file, slices, {1: 1})
    assert np.array_equal(volume.array[2], RING)
    assert volume.array.sum() == RING.sum()
    assert finding_texts(volume) == ()


def test_planes_nearer_than_slices_are_not_mixed(tmp_path: Path, slices: SourceSlices) -> None:
    polygons = [(index, np.array(SQUARE) + index) for index in (1.6, 2.0, 2.4)]
    labels_read = read_label_file(
        open_label_file(add_contours(tmp_path / "a.dcm", slices, polygons)), slices, {1: 1}
    ).array
    assert np.array_equal(np.argwhere(labels_read[2])[0], [4, 5])
    assert not labels_read[[1, 3]].any()


def test_a_slice_halfway_between_two_planes_takes_the_upper_one(
    tmp_path: Path, slices: SourceSlices
) -> None:
    squares = {index: np.array(SQUARE) + index for index in (0, 1, 2)}
    polygons = [(index + 0.5, square) for index, square in squares.items()]
    path = add_contours(tmp_path / "a.dcm", slices, polygons)
    volume = read_label_file(open_label_file(path), slices, {1: 1})
    for index, plane in ((0, 0), (1, 1), (2, 2), (3, 2)):
        expected = np.zeros(slices.grid.shape[1:], bool)
        expected[2 + plane : 8 + plane, 3 + plane : 10 + plane] = True
        assert np.array_equal(volume.array[index], expected)
    assert finding_texts(volume) == ()


def test_slices_beyond_the_last_of_nearer_planes_are_background(
    tmp_path: Path, slices: SourceSlices
) -> None:
    """The contours lie on slices half as far apart, of which the first and the last are outside."""
    polygons = [(index / 2, SQUARE) for index in range(3, 10)]
    file = open_label_file(add_contours(tmp_path / "a.dcm", slices, polygons))
    volume = read_label_file(file, slices, {1: 1})
    assert np.flatnonzero(volume.array.any(axis=(1, 2))).tolist() == [2, 3, 4]


@pytest.mark.parametrize("apart_mm", [0.05, 0.12, 0.4])
def test_contours_of_one_plane_do_not_shrink_the_reach(
    apart_mm: float, tmp_path: Path, slices: SourceSlices
) -> None:
    """Each plane has two contours at heights that differ; the planes lie beside the slices."""
    polygons = []
    for index in range(5):
        polygons += [(index + 0.4, SQUARE), (index + 0.4 + apart_mm / STEP_MM, HOLE)]
    file = open_label_file(add_contours(tmp_path / "a.dcm", slices, polygons))
    labels_read = read_label_file(file, slices, {1: 1}).array
    assert np.flatnonzero(labels_read.any(axis=(1, 2))).tolist()[:5] == [0, 1, 2, 3, 4]


def test_oblique_contours_do_not_shrink_the_reach(tmp_path: Path, slices: SourceSlices) -> None:
    """The four parts of each oblique plane lie at four heights."""
    polygons = []
    for index in range(6):
        for column in range(4):
            left = 3 * column + 0.5
            part = [(1.5, left), (1.5, left + 2), (7.5, left + 2)]
            polygons.append((index + 0.17 + 0.22 * column, part))
    path = add_contours(tmp_path / "a.dcm", slices, polygons)
    dataset = dcmread(path)
    for contour in dataset.ROIContourSequence[0].ContourSequence:
        contour.ContourData[2] += 0.2
    dataset.save_as(path)
    volume = read_label_file(open_label_file(path), slices, {1: 1})
    assert not [text for text in finding_texts(volume) if "no contour" in text]
    assert np.flatnonzero(volume.array.any(axis=(1, 2))).tolist()[:6] == [0, 1, 2, 3, 4, 5]


def test_contours_that_label_nothing_are_said(tmp_path: Path, slices: SourceSlices) -> None:
    path = add_contours(tmp_path / "a.dcm", slices, [(2, np.array(SQUARE) + 100)])
    volume = read_label_file(open_label_file(path), slices, {1: 1})
    assert finding_texts(volume) == ("'part': its contours enclose no pixel of the slices",)
    path = add_contours(tmp_path / "a.dcm", slices, [(2, SQUARE[:2]), (3, SQUARE)])
    dataset = dcmread(path)
    del dataset.ROIContourSequence[0].ContourSequence[1].ContourData
    dataset.save_as(path)
    file = open_label_file(path)
    assert empty_structures(file) == ["part"]
    assert finding_texts(read_label_file(file, slices, {1: 1})) == (
        "'part': 2 points and open lines were left out",
        "'part': it has no closed contours",
    )


def test_what_is_left_out_is_said(tmp_path: Path, slices: SourceSlices) -> None:
    path = add_contours(tmp_path / "a.dcm", slices, [(1, SQUARE), (4, SQUARE), (20, SQUARE)])
    assert finding_texts(read_label_file(open_label_file(path), slices, {1: 1})) == (
        "'part': 1 of 3 contours are beyond the slices or between them",
        "'part': 2 slices between its contours have no contour",
    )
    path = add_contours(tmp_path / "a.dcm", slices, [(1, SQUARE)], "OPEN_PLANAR")
    said = ("'part': 1 points and open lines were left out", "'part': it has no closed contours")
    assert finding_texts(read_label_file(open_label_file(path), slices, {1: 1})) == said


def read_all(path: Path, slices: SourceSlices) -> None:
    file = open_label_file(path)
    read_label_file(file, slices, dict.fromkeys(file.names, 1))


def refusal(path: Path, slices: SourceSlices) -> str:
    with pytest.raises(UserError) as caught:
        read_all(path, slices)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_files_that_are_refused(tmp_path: Path, slices: SourceSlices) -> None:
    image = slices.frames[0].path
    assert (
        refusal(image, slices)
        == f"{image.name}: expected labels in a DICOM SEG or RTSTRUCT, got CT; give another file."
    )
    (tmp_path / "a.dcm").write_text("no DICOM" * 100, encoding="utf-8")
    assert "expected labels in a DICOM SEG or RTSTRUCT, got another object" in refusal(
        tmp_path / "a.dcm", slices
    )
    assert refusal(tmp_path / "missing.dcm", slices) == (
        "missing.dcm: cannot be read (No such file or directory); "
        "check the path and its permissions."
    )
    across = points_of(slices.frames[0], np.array(SQUARE))
    path = add_contours(tmp_path / "a.dcm", slices, [(2, SQUARE)])
    dataset = dcmread(path)
    dataset.ROIContourSequence[0].ContourSequence[0].ContourData = [
        f"{value:.3f}" for value in across[:, [2, 0, 1]].ravel()
    ]
    dataset.save_as(path)
    assert (
        "expected contours in the planes of the slices of source, but those of 'part' lie "
        "across them"
    ) in refusal(path, slices)
    dataset.ReferencedFrameOfReferenceSequence[0].FrameOfReferenceUID = (
        dataset.FrameOfReferenceUID
    ) = "1.2.3.10"
    dataset.save_as(path)
    assert "lie across them" in refusal(path, slices)  # the series is the same
    study = dataset.ReferencedFrameOfReferenceSequence[0].RTReferencedStudySequence[0]
    study.RTReferencedSeriesSequence[0].SeriesInstanceUID = "1.2.3.11"
    dataset.save_as(path)
    assert refusal(path, slices).startswith(
        "a.dcm: expected labels in the frame of reference of source, but they are in another one"
    )
    with pytest.raises(ValueError, match=r"has no structures \[7\]"):
        read_label_file(open_label_file(path), slices, {7: 1})


@pytest.mark.parametrize(
    ("sequence", "sentence"),
    [
        (
            "SegmentIdentificationSequence",
            "the DICOM file cannot be read (a frame names no segment); it is damaged",
        ),
        (
            "PlanePositionSequence",
            (
                "expected a position, an orientation and a spacing for each frame of the SEG; "
                "export it again."
            ),
        ),
    ],
)
def test_frames_without_segment_or_position_are_refused(
    sequence: str, sentence: str, tmp_path: Path, slices: SourceSlices
) -> None:
    path = save_seg(
        tmp_path / "a.dcm", slices, np.ones((*slices.grid.shape, 2), np.uint8), num_segments=2
    )
    dataset = dcmread(path)
    del dataset.PerFrameFunctionalGroupsSequence[3][sequence]
    dataset.save_as(path)
    assert sentence in refusal(path, slices)


@pytest.mark.parametrize("kind", ["seg", "rtstruct"])
def test_damaged_files_end_in_a_sentence(kind: str, tmp_path: Path, slices: SourceSlices) -> None:
    path = tmp_path / "a.dcm"
    if kind == "seg":
        save_seg(path, slices, (np.indices(slices.grid.shape).sum(axis=0) % 2).astype(np.uint8))
    else:
        add_contours(path, slices, [(2, SQUARE), (3, HOLE)])
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    num_refused = 0
    for trial in range(60):
        data = bytearray(whole[: rng.integers(400, len(whole))] if trial % 3 == 0 else whole)
        for place in rng.integers(300, len(data), 4):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            read_all(path, slices)
        except UserError:
            num_refused += 1
    assert num_refused > 10
