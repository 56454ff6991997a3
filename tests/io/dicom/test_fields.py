"""Fields of written SEG and RTSTRUCT files: every fixed value, each reference to its slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dicom_sources import make_series
from pydicom import Dataset, dcmread

from medseg import __version__
from medseg.io.dicom.read import open_slices
from medseg.io.dicom.segmentation import write_segmentation
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure

LONG_NAME = "Gefäß\\" + 80 * "n"
STORED_NAME = "Gefäß_" + 58 * "n"
STRUCTURES = [
    Structure("right_lung", 4, "#38bdf8", ("39607008", "Lung", "right")),
    Structure(LONG_NAME, 2),
]


def values(dataset: Dataset, *keywords: str) -> dict[str, Any]:
    """Values of fields, as they are stored."""
    return {keyword: dataset[keyword].value for keyword in keywords}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset, list[Dataset]]:
    """SEG and RTSTRUCT of a series with poor headers, and the headers of its slices from below."""
    folder = tmp_path_factory.mktemp("fields")
    poor = {
        "PatientSex": "Q",
        "PositionReferenceIndicator": "XY",
        "SliceThickness": None,
        "AccessionNumber": "A1",
    }
    slices = open_slices(make_series(folder / "series", "plain", np.eye(3), **poor))
    labels = np.zeros(slices.grid.shape, np.uint8)
    labels[2:5, 2:6, 3:9] = 4
    labels[3, 3:5, 5:7] = 2
    write_segmentation(folder / "seg.dcm", labels, slices, STRUCTURES)
    write_structure_set(folder / "rtstruct.dcm", labels, slices, STRUCTURES)
    headers = [dcmread(frame.path, stop_before_pixels=True) for frame in slices.frames]
    return dcmread(folder / "seg.dcm"), dcmread(folder / "rtstruct.dcm"), headers


EQUIPMENT = {
    "Manufacturer": "medseg",
    "ManufacturerModelName": "medseg",
    "SoftwareVersions": __version__,
    "SpecificCharacterSet": "ISO_IR 192",
    "InstanceNumber": 1,
    "PositionReferenceIndicator": "XY",
    "AccessionNumber": "A1",
    "StudyInstanceUID": "1.2.3",
    "FrameOfReferenceUID": "1.2.3.9",
    "PatientID": "P 1",
    "PatientSex": "",
    "StudyID": "",
}


def test_fixed_fields_of_a_segmentation(written: tuple[Dataset, Dataset, list[Dataset]]) -> None:
    segmentation, structure_set, headers = written
    expected = EQUIPMENT | {
        "Modality": "SEG",
        "SeriesNumber": 90041,
        "SeriesDescription": "medseg segmentation",
        "DeviceSerialNumber": __version__,
        "SegmentationType": "BINARY",
        "NumberOfFrames": 4,
    }
    assert values(segmentation, *expected) == expected
    uids = [
        segmentation.SeriesInstanceUID,
        segmentation.SOPInstanceUID,
        structure_set.SeriesInstanceUID,
        structure_set.SOPInstanceUID,
    ]
    assert len(
        {*uids, headers[0].SeriesInstanceUID, *(header.SOPInstanceUID for header in headers)}
    ) == 5 + len(headers)
    (measures,) = segmentation.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
    assert (
        measures.SliceThickness == 2.5
    )  # the distance of the slices, where the source does not say
    for segment, name in zip(
        segmentation.SegmentSequence, ("right_lung", STORED_NAME), strict=True
    ):
        assert segment.SegmentLabel == name
        assert segment.SegmentAlgorithmName == "medseg"
        (algorithm,) = segment.SegmentationAlgorithmIdentificationSequence
        assert values(algorithm, "AlgorithmName", "AlgorithmVersion") == {
            "AlgorithmName": "medseg",
            "AlgorithmVersion": __version__,
        }
        assert algorithm.AlgorithmFamilyCodeSequence[0].CodeMeaning == "Artificial Intelligence"
    coded, private = segmentation.SegmentSequence
    assert coded.SegmentedPropertyCategoryCodeSequence[0].CodeMeaning == "Anatomical Structure"
    assert private.SegmentedPropertyCategoryCodeSequence[0].CodeMeaning == "Tissue"
    (kind,) = coded.SegmentedPropertyTypeCodeSequence
    assert kind.SegmentedPropertyTypeModifierCodeSequence[0].CodeMeaning == "Right"
    (kind,) = private.SegmentedPropertyTypeCodeSequence
    assert (kind.LongCodeValue, kind.CodeMeaning) == (STORED_NAME, STORED_NAME)
    assert "SegmentedPropertyTypeModifierCodeSequence" not in kind


def test_each_frame_of_a_segmentation_refers_to_its_slice(
    written: tuple[Dataset, Dataset, list[Dataset]],
) -> None:
    segmentation, _, headers = written
    frames = []
    for group in segmentation.PerFrameFunctionalGroupsSequence:
        (image,) = group.DerivationImageSequence[0].SourceImageSequence
        index = [header.SOPInstanceUID for header in headers].index(image.ReferencedSOPInstanceUID)
        assert (
            group.PlanePositionSequence[0].ImagePositionPatient
            == headers[index].ImagePositionPatient
        )
        frames.append((group.SegmentIdentificationSequence[0].ReferencedSegmentNumber, index))
    assert sorted(frames) == [(1, 2), (1, 3), (1, 4), (2, 3)]


def test_fixed_fields_of_a_structure_set(written: tuple[Dataset, Dataset, list[Dataset]]) -> None:
    structure_set, headers = written[1:]
    expected = EQUIPMENT | {
        "Modality": "RTSTRUCT",
        "SeriesNumber": 90042,
        "SeriesDescription": "medseg structure set",
        "OperatorsName": "",
        "StructureSetLabel": "medseg",
        "StructureSetDate": structure_set.InstanceCreationDate,
        "StructureSetTime": structure_set.InstanceCreationTime,
        "ApprovalStatus": "UNAPPROVED",
    }
    assert values(structure_set, *expected) == expected
    (space,) = structure_set.ReferencedFrameOfReferenceSequence
    (study,) = space.RTReferencedStudySequence
    assert study.ReferencedSOPClassUID == "1.2.840.10008.3.1.2.3.1"
    (series,) = study.RTReferencedSeriesSequence
    assert series.SeriesInstanceUID == headers[0].SeriesInstanceUID
    named = [
        (image.ReferencedSOPClassUID, image.ReferencedSOPInstanceUID)
        for image in series.ContourImageSequence
    ]
    assert named == [(header.SOPClassUID, header.SOPInstanceUID) for header in headers]
    rois = [
        values(roi, "ROINumber", "ROIName", "ReferencedFrameOfReferenceUID")
        for roi in structure_set.StructureSetROISequence
    ]
    assert rois == [
        {"ROINumber": number, "ROIName": name, "ReferencedFrameOfReferenceUID": "1.2.3.9"}
        for number, name in enumerate(("right_lung", STORED_NAME), start=1)
    ]
    assert {roi.ROIGenerationAlgorithm for roi in structure_set.StructureSetROISequence} == {
        "AUTOMATIC"
    }
    coded, private = structure_set.RTROIObservationsSequence
    keywords = (
        "ObservationNumber",
        "ReferencedROINumber",
        "RTROIInterpretedType",
        "ROIInterpreter",
    )
    assert list(values(coded, *keywords).values()) == [1, 1, "ORGAN", ""]
    assert list(values(private, *keywords).values()) == [2, 2, "", ""]
    assert coded.RTROIIdentificationCodeSequence[0].CodingSchemeDesignator == "SCT"
    assert "RTROIIdentificationCodeSequence" not in private
    assert "ROIDisplayColor" not in structure_set.ROIContourSequence[1]


def test_each_contour_lies_in_the_slice_that_it_refers_to(
    written: tuple[Dataset, Dataset, list[Dataset]],
) -> None:
    structure_set, headers = written[1:]
    indices: dict[int, list[int]] = {}
    for roi in structure_set.ROIContourSequence:
        for contour in roi.ContourSequence:
            (image,) = contour.ContourImageSequence
            index = [header.SOPInstanceUID for header in headers].index(
                image.ReferencedSOPInstanceUID
            )
            points = np.reshape(contour.ContourData, (-1, 3)).astype(float)
            assert set(points[:, 2]) == {float(headers[index].ImagePositionPatient[2])}
            assert all(len(text) <= 16 for text in map(str, contour.ContourData))
            indices.setdefault(int(roi.ReferencedROINumber), []).append(index)
    assert indices == {1: [2, 3, 4], 2: [3]}
