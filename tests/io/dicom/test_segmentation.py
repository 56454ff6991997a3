"""SEG files: identity, codes, colours, frames; sources with poor headers; validity by dciodvfy."""

from __future__ import annotations

import copy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import highdicom
import numpy as np
import pytest
from dicom_sources import KINDS, ORIENTATIONS, make_series
from pydicom import dcmread

from medseg.errors import UserError
from medseg.io.dicom.labels import open_label_file, read_label_file
from medseg.io.dicom.read import open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure

LUNG, VESSEL = (
    Structure("left_lung", 1, "#38bdf8", ("39607008", "Lung", "left")),
    Structure("Gefäß", 2),
)


def small_labels(shape: tuple[int, int, int]) -> np.ndarray:
    labels = np.zeros(shape, np.uint8)
    labels[2:5, 2:6, 3:9] = 1
    labels[3, 3:5, 5:7] = 2
    return labels


def test_identity_codes_and_colours(tmp_path: Path) -> None:
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3)))
    write_segmentation(tmp_path / "a.dcm", small_labels(slices.grid.shape), slices, [LUNG, VESSEL])
    dataset = dcmread(tmp_path / "a.dcm")
    source = dcmread(slices.frames[0].path)
    for keyword in (
        "StudyInstanceUID",
        "FrameOfReferenceUID",
        "PatientID",
        "PatientName",
        "StudyDate",
    ):
        assert dataset[keyword].value == source[keyword].value
    assert str(dataset.PatientName) == "Müller^Änne"
    assert dataset.SeriesInstanceUID != source.SeriesInstanceUID
    (series,) = dataset.ReferencedSeriesSequence
    assert series.SeriesInstanceUID == source.SeriesInstanceUID
    assert len(series.ReferencedInstanceSequence) == len(slices.frames)
    first, second = dataset.SegmentSequence
    assert (first.SegmentLabel, second.SegmentLabel) == ("left_lung", "Gefäß")
    kind = first.SegmentedPropertyTypeCodeSequence[0]
    assert (kind.CodeValue, kind.CodingSchemeDesignator, kind.CodeMeaning) == (
        "39607008",
        "SCT",
        "Lung",
    )
    assert kind.SegmentedPropertyTypeModifierCodeSequence[0].CodeMeaning == "Left"
    assert second.SegmentedPropertyTypeCodeSequence[0].CodingSchemeDesignator == "99MEDSEG"
    assert highdicom.color.CIELabColor.from_dicom_value(first.RecommendedDisplayCIELabValue).to_rgb(
        clip=True
    ) == (56, 189, 248)
    assert "RecommendedDisplayCIELabValue" not in second
    assert {first.SegmentAlgorithmType, second.SegmentAlgorithmType} == {"AUTOMATIC"}


def test_private_codes_of_names_that_begin_alike_differ(tmp_path: Path) -> None:
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3)))
    names = ("lung_lower_lobe_left", "lung_lower_lobe_right")
    lobes = [Structure(name, value) for value, name in enumerate(names, start=1)]
    write_segmentation(tmp_path / "a.dcm", small_labels(slices.grid.shape), slices, lobes)
    items = [
        segment.SegmentedPropertyTypeCodeSequence[0]
        for segment in dcmread(tmp_path / "a.dcm").SegmentSequence
    ]
    assert [item.LongCodeValue for item in items] == list(names)
    assert not any("CodeValue" in item for item in items), "for codes of 16 characters at most"


@pytest.mark.parametrize(("kind", "num_all", "num_filled"), [("binary", 16, 4), ("labelmap", 8, 3)])
def test_empty_frames_are_kept_on_request(
    tmp_path: Path, kind: str, num_all: int, num_filled: int
) -> None:
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3)))
    labels = small_labels(slices.grid.shape)
    for keep_empty_frames, num_frames in ((True, num_all), (False, num_filled)):
        write_segmentation(
            tmp_path / "a.dcm",
            labels,
            slices,
            [LUNG, VESSEL],
            kind=kind,
            keep_empty_frames=keep_empty_frames,
        )
        dataset = dcmread(tmp_path / "a.dcm")
        assert dataset.NumberOfFrames == num_frames
        assert dataset.file_meta.TransferSyntaxUID.is_encapsulated == (kind == "labelmap")
        assert np.array_equal(
            read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1, 2: 2}).array, labels
        )


def test_values_without_a_structure_are_left_out_and_no_label_is_no_error(tmp_path: Path) -> None:
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3)))
    labels = small_labels(slices.grid.shape)
    write_segmentation(tmp_path / "a.dcm", labels, slices, [VESSEL])
    assert np.array_equal(
        read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 7}).array,
        7 * (labels == 2),
    )
    write_segmentation(tmp_path / "a.dcm", np.zeros_like(labels), slices, [LUNG])
    assert not read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1}).array.any()
    with pytest.raises(ValueError, match="not on the grid"):
        write_segmentation(tmp_path / "a.dcm", labels[1:], slices, [LUNG])


@pytest.mark.filterwarnings("ignore:Invalid value for VR")
def test_sources_with_poor_headers(tmp_path: Path) -> None:
    """Names and dates removed or malformed, directions that differ by rounding."""
    poor = {
        "PatientName": None,
        "PatientID": None,
        "StudyDate": "2019-1-1",
        "PatientSex": "Female",
        "SliceThickness": "",
    }
    source = make_series(tmp_path / "s", "plain", ORIENTATIONS[5], **poor)
    path = next(source.iterdir())
    dataset = dcmread(path)
    dataset.ImageOrientationPatient = [value + 1e-5 for value in dataset.ImageOrientationPatient]
    dataset.save_as(path)
    slices = open_slices(source)
    labels = small_labels(slices.grid.shape)
    for write in (write_segmentation, write_structure_set):
        write(tmp_path / "a.dcm", labels, slices, [LUNG, VESSEL])
        assert np.array_equal(
            read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1, 2: 2}).array, labels
        )


def test_a_phase_of_a_multi_frame_file_whose_frames_have_their_own_geometry(tmp_path: Path) -> None:
    dataset = dcmread(make_series(tmp_path / "s", "multi-frame", ORIENTATIONS[7]) / "one.dcm")
    shared = dataset.SharedFunctionalGroupsSequence[0]
    groups = [
        copy.deepcopy(group) for _ in range(2) for group in dataset.PerFrameFunctionalGroupsSequence
    ]
    for number, group in enumerate(groups):
        group.FrameContentSequence[0].FrameAcquisitionNumber = 1 + number // 8
        group.PlaneOrientationSequence, group.PixelMeasuresSequence = (
            shared.PlaneOrientationSequence,
            shared.PixelMeasuresSequence,
        )
    del dataset.SharedFunctionalGroupsSequence
    dataset.PerFrameFunctionalGroupsSequence, dataset.NumberOfFrames, dataset.PixelData = (
        groups,
        16,
        2 * dataset.PixelData,
    )
    dataset.save_as(tmp_path / "s" / "one.dcm")
    slices = open_slices(tmp_path / "s", "4/2")
    labels = small_labels(slices.grid.shape)
    for write in (write_segmentation, write_structure_set):
        write(tmp_path / "a.dcm", labels, slices, [LUNG, VESSEL])
        assert np.array_equal(
            read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1, 2: 2}).array, labels
        )
    write_segmentation(tmp_path / "a.dcm", labels, slices, [LUNG])
    for group in dcmread(tmp_path / "a.dcm").PerFrameFunctionalGroupsSequence:
        (image,) = group.DerivationImageSequence[0].SourceImageSequence
        position = (
            groups[image.ReferencedFrameNumber - 1].PlanePositionSequence[0].ImagePositionPatient
        )
        assert image.ReferencedFrameNumber > 8
        assert position == group.PlanePositionSequence[0].ImagePositionPatient


def test_sources_that_cannot_be_referred_to_are_refused(tmp_path: Path) -> None:
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3), FrameOfReferenceUID=None))
    sentence = (
        "expected a series that a DICOM SEG or RTSTRUCT can refer to, but its files have no "
        "FrameOfReferenceUID; export"
    )
    for write in (write_segmentation, write_structure_set):
        with pytest.raises(UserError, match=sentence):
            write(tmp_path / "a.dcm", small_labels(slices.grid.shape), slices, [LUNG])
    source = make_series(tmp_path / "t", "multi-frame", np.eye(3))
    dataset = dcmread(source / "one.dcm")
    dataset.SOPInstanceUID = "1.2.3.4.99"
    for group in dataset.PerFrameFunctionalGroupsSequence:
        group.PlanePositionSequence[0].ImagePositionPatient[2] += 20
    dataset.save_as(source / "two.dcm")
    slices = open_slices(source)
    labels = small_labels(slices.grid.shape)
    with pytest.raises(
        UserError, match="but it has 2 multi-frame files, which a DICOM SEG cannot refer to as one"
    ):
        write_segmentation(tmp_path / "a.dcm", labels, slices, [LUNG])
    write_structure_set(tmp_path / "a.dcm", labels, slices, [LUNG, VESSEL])
    assert np.array_equal(
        read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1, 2: 2}).array, labels
    )


@pytest.mark.parametrize("keyword", ["StudyInstanceUID", "FrameOfReferenceUID"])
def test_a_series_of_two_studies_or_frames_of_reference_is_refused(
    keyword: str, tmp_path: Path
) -> None:
    source = make_series(tmp_path / "s", "plain", np.eye(3))
    path = next(source.iterdir())
    dataset = dcmread(path)
    setattr(dataset, keyword, "1.2.3.77")
    dataset.save_as(path)
    slices = open_slices(source)
    sentence = f"{source}: expected slices with one {keyword}, but they have 2, which a DICOM SEG"
    with pytest.raises(UserError, match=sentence):
        write_segmentation(tmp_path / "a.dcm", small_labels(slices.grid.shape), slices, [LUNG])


@pytest.mark.skipif(
    shutil.which("dciodvfy") is None, reason="dciodvfy (Debian: dicom3tools) is not installed"
)
@pytest.mark.parametrize("kind", KINDS)
def test_dciodvfy_finds_no_error_that_the_source_does_not_have(kind: str, tmp_path: Path) -> None:
    def errors(path: Path) -> set[str]:
        done = subprocess.run(["dciodvfy", "-new", path], capture_output=True, text=True)
        return {
            line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error")
        }

    slices = open_slices(make_series(tmp_path / "s", kind, np.eye(3)))
    for write in (write_segmentation, write_structure_set):
        write(tmp_path / "a.dcm", small_labels(slices.grid.shape), slices, [LUNG, VESSEL])
        assert errors(tmp_path / "a.dcm") <= errors(slices.frames[0].path)


def test_a_result_that_is_made_again_is_the_same_series_and_instance(tmp_path: Path) -> None:
    """Other labels or codes are another instance of it; other names are another series."""
    slices = open_slices(
        make_series(tmp_path / "s", "plain", np.eye(3), SeriesDescription="Lung 1.0")
    )
    labels = small_labels(slices.grid.shape)
    edited = labels.copy()
    edited[0, 0, 0] = 1
    words = {write_segmentation: "segmentation", write_structure_set: "structure set"}
    all_series = set()
    for write, word in words.items():
        files = []
        for number, (array, structures) in enumerate(
            (
                (labels, [LUNG, VESSEL]),
                (labels, [LUNG, VESSEL]),
                (edited, [LUNG, VESSEL]),
                (labels, [LUNG]),
                (labels, [replace(LUNG, code=("3341006", "Right lung")), VESSEL]),
                (labels, [replace(LUNG, colour="#ff0000"), VESSEL]),
            )
        ):
            write(tmp_path / f"{number}.dcm", array, slices, structures)
            files.append(dcmread(tmp_path / f"{number}.dcm"))
        series = [file.SeriesInstanceUID for file in files]
        instances = [file.SOPInstanceUID for file in files]
        assert len({*series[:3], *series[4:]}) == 1
        assert series[3] != series[0]
        assert instances[0] == instances[1]
        assert len(set(instances)) == 5
        assert files[0].SeriesDescription == f"medseg {word} Lung 1.0"
        for keyword in ("PatientSex", "ReferringPhysicianName", "PositionReferenceIndicator"):
            assert keyword in files[0], "the standard asks for it, also where it is empty"
        all_series.update(series)
    assert len(all_series) == 4


def test_equal_results_of_two_phases_are_two_instances(tmp_path: Path) -> None:
    """Such as empty ones, of which an archive would otherwise keep the first alone."""
    for number in (1, 2):
        make_series(tmp_path / "s" / f"{number}", "plain", np.eye(3), AcquisitionNumber=number)
    for write in (write_segmentation, write_structure_set):
        files = []
        for series in ("4/1", "4/2"):
            slices = open_slices(tmp_path / "s", series)
            write(tmp_path / "a.dcm", np.zeros(slices.grid.shape, np.uint8), slices, [LUNG])
            files.append(dcmread(tmp_path / "a.dcm"))
        first, second = files
        assert first.SeriesInstanceUID == second.SeriesInstanceUID
        assert first.SOPInstanceUID != second.SOPInstanceUID
