"""Writer of DICOM RTSTRUCT: the outlines of a label map in the planes of its source slices."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from highdicom.base import SOPClass
from pydicom import Dataset, config
from pydicom.uid import ImplicitVRLittleEndian, RTStructureSetStorage

from medseg import __version__
from medseg.io.atomic import replace_path
from medseg.io.dicom.contours import outlines
from medseg.io.dicom.frames import Frame
from medseg.io.dicom.read import SourceSlices
from medseg.io.dicom.structures import (
    SIDES,
    UTF_8,
    derived_series,
    labels_on_slices,
    points_of,
    source_headers,
    state_encoding,
    stored_name,
)
from medseg.io.label_table import Structure

# SOP class by which structure sets refer to a study: Detached Study Management, which is retired
# and still expected.
DETACHED_STUDY = "1.2.840.10008.3.1.2.3.1"


def write_structure_set(
    path: Path, labels: np.ndarray, slices: SourceSlices, structures: Sequence[Structure]
) -> None:
    """Write a label map as DICOM RTSTRUCT, whole or not at all.

    Each part of a label on a slice is one closed contour in the plane of that slice; its holes are
    joined to it by keyholes. A label without voxels is listed without contours.

    Args:
        path: The file to write.
        labels: Label values (D, H, W) on `slices.grid`.
        slices: The source series.
        structures: Labels to write, in the order of the regions of interest; voxels of other values
            are left out.

    Raises:
        UserError: If the source lacks a field of `IDENTITY` (`medseg.io.dicom.structures`), or the
            file cannot be written.
        ValueError: If the label map is not on the grid.
    """
    headers = source_headers(slices)
    numbers = labels_on_slices(labels, slices, structures)
    # There is one header per file, which may hold several slices.
    paths = dict.fromkeys(frame.path for frame in slices.frames)
    header_of_path = dict(zip(paths, headers, strict=True))
    references = [_reference(header_of_path[frame.path], frame) for frame in slices.frames]
    first = headers[0]
    series = derived_series(first, slices, "RTSTRUCT", numbers, structures, __version__)
    with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
        dataset = SOPClass(
            study_instance_uid=first.StudyInstanceUID,
            series_instance_uid=series.uid,
            series_number=series.number,
            sop_instance_uid=series.instance_uid,
            sop_class_uid=RTStructureSetStorage,
            instance_number=1,
            modality="RTSTRUCT",
            manufacturer="medseg",
            manufacturer_model_name="medseg",
            software_versions=__version__,
            series_description=series.description,
            specific_character_set=UTF_8,
            # The explicit encoding gives the length of a contour 16 bits; some are longer.
            transfer_syntax_uid=ImplicitVRLittleEndian,
        )
        dataset.copy_patient_and_study_information(first)
        dataset.OperatorsName = ""
        dataset.StructureSetLabel = "medseg"
        dataset.StructureSetDate = dataset.InstanceCreationDate
        dataset.StructureSetTime = dataset.InstanceCreationTime
        dataset.ApprovalStatus = "UNAPPROVED"
        dataset.FrameOfReferenceUID = first.FrameOfReferenceUID
        dataset.PositionReferenceIndicator = first.PositionReferenceIndicator
        dataset.ReferencedFrameOfReferenceSequence = [_source(first, references)]
        regions = []
        contours = []
        observations = []
        # The three sequences refer to each other by these numbers.
        for number, structure in enumerate(structures, start=1):
            mask = numbers == number
            regions.append(_region(number, structure, first.FrameOfReferenceUID))
            contours.append(_contours(number, structure, mask, slices.frames, references))
            observations.append(_observation(number, structure))
        dataset.StructureSetROISequence = regions
        dataset.ROIContourSequence = contours
        dataset.RTROIObservationsSequence = observations
        with replace_path(path) as part:
            dataset.save_as(part)


def _item(**fields: Any) -> Dataset:
    """Make an item of a sequence with some fields."""
    item = Dataset()
    for keyword, value in fields.items():
        setattr(item, keyword, value)
    return item


def _source(header: Dataset, references: Sequence[Dataset]) -> Dataset:
    """Make a reference to the source: its frame of reference with study, series and slices."""
    series = _item(SeriesInstanceUID=header.SeriesInstanceUID, ContourImageSequence=references)
    study = _item(
        ReferencedSOPClassUID=DETACHED_STUDY,
        ReferencedSOPInstanceUID=header.StudyInstanceUID,
        RTReferencedSeriesSequence=[series],
    )
    return _item(FrameOfReferenceUID=header.FrameOfReferenceUID, RTReferencedStudySequence=[study])


def _region(number: int, structure: Structure, frame_of_reference_uid: str) -> Dataset:
    """Make the item that names a region of interest."""
    name = stored_name(structure.name)
    item = _item(
        ROINumber=number,
        ReferencedFrameOfReferenceUID=frame_of_reference_uid,
        ROIName=name,
        ROIGenerationAlgorithm="AUTOMATIC",
    )
    state_encoding(item, name)
    return item


def _reference(header: Dataset, frame: Frame) -> Dataset:
    """Make a reference to a slice by its file and, in a multi-frame file, its number."""
    reference = _item(
        ReferencedSOPClassUID=header.SOPClassUID, ReferencedSOPInstanceUID=header.SOPInstanceUID
    )
    if "PerFrameFunctionalGroupsSequence" in header:
        reference.ReferencedFrameNumber = frame.index + 1
    return reference


def _contours(
    number: int,
    structure: Structure,
    mask: np.ndarray,
    frames: Sequence[Frame],
    references: Sequence[Dataset],
) -> Dataset:
    """Make the item with the contours of one region of interest on all slices.

    Args:
        number: Its number.
        structure: Its label.
        mask: Its pixels (slices, rows, columns).
        frames: The slices.
        references: Reference to each slice.
    """
    item = _item(ReferencedROINumber=number)
    if structure.colour:
        item.ROIDisplayColor = list(structure.rgb)
    contours = []
    has_pixels = mask.any(axis=(1, 2))
    for index in np.flatnonzero(has_pixels).tolist():
        for outline in outlines(mask[index]):
            # Steps of 0.1 µm fit into the 16 characters that a decimal of DICOM has.
            points_xyz_mm = points_of(frames[index], outline).round(4)
            decimals = [f"{value:.10g}" for value in points_xyz_mm.ravel()]
            contour = _item(
                ContourImageSequence=[references[index]],
                ContourGeometricType="CLOSED_PLANAR",
                NumberOfContourPoints=len(outline),
                ContourData=decimals,
            )
            contours.append(contour)
    if contours:
        item.ContourSequence = contours
    return item


def _observation(number: int, structure: Structure) -> Dataset:
    """Make the item that describes a region of interest; one with a SNOMED code is an organ."""
    item = _item(
        ObservationNumber=number,
        ReferencedROINumber=number,
        RTROIInterpretedType="ORGAN" if structure.code else "",
        ROIInterpreter="",
    )
    if structure.code:
        code, meaning, *sides = structure.code
        identification = _item(CodeValue=code, CodingSchemeDesignator="SCT", CodeMeaning=meaning)
        for side in sides:
            side_code, side_meaning = SIDES[side]
            modifier = _item(
                CodeValue=side_code, CodingSchemeDesignator="SCT", CodeMeaning=side_meaning
            )
            identification.SegmentedPropertyTypeModifierCodeSequence = [modifier]
        item.RTROIIdentificationCodeSequence = [identification]
    return item
