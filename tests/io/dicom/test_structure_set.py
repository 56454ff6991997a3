"""RTSTRUCT files: references, regions of interest, contours of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dicom_sources import make_series
from pydicom import dcmread
from pydicom.uid import ImplicitVRLittleEndian

from medseg.io.dicom.labels import open_label_file, read_label_file
from medseg.io.dicom.read import open_slices
from medseg.io.dicom.structure_set import write_structure_set
from medseg.io.dicom.structures import Structure

STRUCTURES = [
    Structure("left_lung", 1, "#38bdf8", ("39607008", "Lung", "left")),
    Structure("Gefäß", 2),
    Structure("absent", 3),
]


@pytest.mark.parametrize("kind", ["plain", "multi-frame"])
def test_references_and_regions_of_interest(kind: str, tmp_path: Path) -> None:
    slices = open_slices(make_series(tmp_path / "s", kind, np.eye(3)))
    labels = np.zeros(slices.grid.shape, np.uint8)
    labels[2:5, 2:7, 3:9] = 1
    labels[3, 4, 5:7] = 2  # a hole in the lung
    labels[4, 7:9, 11:] = 1  # a second part
    write_structure_set(tmp_path / "a.dcm", labels, slices, STRUCTURES)
    dataset, source = dcmread(tmp_path / "a.dcm"), dcmread(slices.frames[0].path)
    assert (dataset.Modality, dataset.ApprovalStatus, str(dataset.PatientName)) == (
        "RTSTRUCT",
        "UNAPPROVED",
        "Müller^Änne",
    )
    (space,) = dataset.ReferencedFrameOfReferenceSequence
    (study,) = space.RTReferencedStudySequence
    (series,) = study.RTReferencedSeriesSequence
    assert space.FrameOfReferenceUID == source.FrameOfReferenceUID
    assert study.ReferencedSOPInstanceUID == source.StudyInstanceUID
    assert series.SeriesInstanceUID == source.SeriesInstanceUID
    assert len(series.ContourImageSequence) == len(slices.frames)
    assert [item.ROIName for item in dataset.StructureSetROISequence] == [
        "left_lung",
        "Gefäß",
        "absent",
    ]
    contours = [item.get("ContourSequence", []) for item in dataset.ROIContourSequence]
    assert list(map(len, contours)) == [4, 1, 0]
    assert list(dataset.ROIContourSequence[0].ROIDisplayColor) == [56, 189, 248]
    assert [item.ReferencedROINumber for item in dataset.RTROIObservationsSequence] == [1, 2, 3]
    code = dataset.RTROIObservationsSequence[0].RTROIIdentificationCodeSequence[0]
    assert (code.CodeValue, code.CodeMeaning) == ("39607008", "Lung")
    (side,) = code.SegmentedPropertyTypeModifierCodeSequence
    assert (side.CodeValue, side.CodingSchemeDesignator, side.CodeMeaning) == (
        "7771000",
        "SCT",
        "Left",
    )
    for contour in dataset.ROIContourSequence[0].ContourSequence:
        assert contour.ContourGeometricType == "CLOSED_PLANAR"
        assert 3 * contour.NumberOfContourPoints == len(contour.ContourData)


def test_contours_of_more_than_64_kib(tmp_path: Path) -> None:
    """One part with many teeth: in the explicit encoding such a contour would have no length."""
    slices = open_slices(make_series(tmp_path / "s", "plain", np.eye(3), (3, 100, 200)))
    labels = np.zeros(slices.grid.shape, np.uint8)
    labels[2, ::4] = labels[2, 1::4, ::2] = labels[2, :, 0] = 1
    write_structure_set(tmp_path / "a.dcm", labels, slices, STRUCTURES[:1])
    dataset = dcmread(tmp_path / "a.dcm")
    assert dataset.file_meta.TransferSyntaxUID == ImplicitVRLittleEndian
    contours = dataset.ROIContourSequence[0].ContourSequence
    assert np.array_equal(
        read_label_file(open_label_file(tmp_path / "a.dcm"), slices, {1: 1}).array, labels
    )
    assert len(contours) == 1
    assert len("\\".join(map(str, contours[0].ContourData))) > 2**16
