"""Writer of DICOM SEG: a label map on the slices of its source series, by highdicom."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from highdicom import AlgorithmIdentificationSequence, PlanePositionSequence
from highdicom.color import CIELabColor
from highdicom.seg import Segmentation, SegmentDescription
from highdicom.sr import CodedConcept
from pydicom import Dataset, config
from pydicom.sr.codedict import codes
from pydicom.uid import RLELossless

from medseg import __version__
from medseg.io.atomic import replace_path
from medseg.io.dicom.read import SourceSlices
from medseg.io.dicom.structures import (
    MULTI_FRAME,
    SIDES,
    UTF_8,
    derived_series,
    labels_on_slices,
    segmentation_headers,
    state_encoding,
    stored_name,
)
from medseg.io.label_table import Structure


def write_segmentation(
    path: Path,
    labels: np.ndarray,
    slices: SourceSlices,
    structures: Sequence[Structure],
    *,
    kind: str = "binary",
    keep_empty_frames: bool = False,
) -> None:
    """Write a label map as DICOM SEG on the slices of its source series, whole or not at all.

    Args:
        path: The file to write.
        labels: Label values (D, H, W) on `slices.grid`.
        slices: The source series.
        structures: Labels to write, in the order of the segments; voxels of other values are left
            out.
        kind: `binary`: one frame for each segment and slice. `labelmap`: one frame of segment
            numbers for each slice, compressed by RLE and a tenth as large as `binary`; it was
            defined in 2024 and is unknown to older viewers.
        keep_empty_frames: Whether slices on which a segment has no pixel get a frame too.

    Raises:
        UserError: If the source lacks a field of `IDENTITY` (`medseg.io.dicom.structures`), has
            several multi-frame files, studies or frames of reference, or the file cannot be
            written.
        ValueError: If the label map is not on the grid.
    """
    headers = segmentation_headers(slices)
    numbers = labels_on_slices(labels, slices, structures)
    is_multi_frame = MULTI_FRAME in headers[0]
    # If each file has one slice, highdicom reads the positions itself. Of a multi-frame file it
    # would take all frames, but `slices` may hold only some of them.
    plane_positions = None
    step_mm = slices.grid.spacing_mm[0]
    if is_multi_frame:
        _share_geometry(headers[0], step_mm)
        plane_positions = [
            PlanePositionSequence("PATIENT", frame.position_xyz_mm) for frame in slices.frames
        ]
    else:
        _make_parallel(headers, step_mm)
    descriptions = []
    for number, structure in enumerate(structures, start=1):
        descriptions.append(_describe(number, structure))
    # The options are a part of the version: an object with other options needs another UID.
    version = f"{kind} {keep_empty_frames} {__version__}"
    series = derived_series(headers[0], slices, "SEG", numbers, structures, version)
    with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
        segmentation = Segmentation(
            source_images=headers,
            pixel_array=numbers,
            segmentation_type=kind.upper(),
            segment_descriptions=descriptions,
            series_instance_uid=series.uid,
            series_number=series.number,
            sop_instance_uid=series.instance_uid,
            instance_number=1,
            manufacturer="medseg",
            manufacturer_model_name="medseg",
            software_versions=__version__,
            device_serial_number=__version__,
            series_description=series.description,
            specific_character_set=UTF_8,
            plane_positions=plane_positions,
            omit_empty_frames=not keep_empty_frames,
        )
        segmentation.PositionReferenceIndicator = headers[0].PositionReferenceIndicator
        if is_multi_frame:
            _drop_other_frames(segmentation, slices)
        if kind == "labelmap":
            # Compressed here, since highdicom would use the encoder of GDCM where that is
            # installed, which ends the process on odd widths.
            segmentation.compress(
                RLELossless, encoding_plugin="pydicom", generate_instance_uid=False
            )
        with replace_path(path) as part:
            segmentation.save_as(part)


def _drop_other_frames(segmentation: Segmentation, slices: SourceSlices) -> None:
    """Drop references to frames of other volumes, such as phases, which highdicom adds.

    The segmentation is changed in place.
    """
    frame_numbers = {frame.index + 1 for frame in slices.frames}
    for group in segmentation.PerFrameFunctionalGroupsSequence:
        for derivation in group.DerivationImageSequence:
            derivation.SourceImageSequence = [
                image
                for image in derivation.SourceImageSequence
                if image.ReferencedFrameNumber in frame_numbers
            ]


def _make_parallel(headers: Sequence[Dataset], step_mm: float) -> None:
    """Set one orientation in all headers, and a slice thickness where it is missing, in place."""
    for header in headers:
        # Rounded decimals may differ between slices that are parallel.
        header.ImageOrientationPatient = headers[0].ImageOrientationPatient
        header.SliceThickness = header.get("SliceThickness") or step_mm


def _share_geometry(header: Dataset, step_mm: float) -> None:
    """Copy orientation and spacing of the first frame to the group of all frames, in place.

    highdicom looks for them there.
    """
    first_group = header.PerFrameFunctionalGroupsSequence[0]
    if not header.get("SharedFunctionalGroupsSequence"):
        header.SharedFunctionalGroupsSequence = [Dataset()]
    shared_group = header.SharedFunctionalGroupsSequence[0]
    for keyword in ("PlaneOrientationSequence", "PixelMeasuresSequence"):
        if keyword in first_group:
            setattr(shared_group, keyword, first_group[keyword].value)
    measures = shared_group.PixelMeasuresSequence[0]
    measures.SliceThickness = measures.get("SliceThickness") or step_mm


def _describe(number: int, structure: Structure) -> SegmentDescription:
    """Describe a segment.

    A label without a SNOMED code gets a private code that is its whole name: a part of it, such as
    `gluteus_maximus_`, may be that of several labels. Where it is longer than the 16 characters of
    a code value, highdicom writes it as a long code value.
    """
    name = stored_name(structure.name)
    category = codes.SCT.Tissue
    kind = CodedConcept(name, "99MEDSEG", name)
    if structure.code:
        code, meaning, *sides = structure.code
        category = codes.SCT.AnatomicalStructure
        kind = CodedConcept(code, "SCT", meaning)
        for side in sides:
            side_code, side_meaning = SIDES[side]
            modifier = CodedConcept(side_code, "SCT", side_meaning)
            kind.SegmentedPropertyTypeModifierCodeSequence = [modifier]
    colour = None
    if structure.colour:
        colour = CIELabColor.from_string(structure.colour)
    algorithm = AlgorithmIdentificationSequence(
        "medseg", codes.DCM.ArtificialIntelligence, __version__
    )
    segment = SegmentDescription(
        segment_number=number,
        segment_label=name,
        segmented_property_category=category,
        segmented_property_type=kind,
        algorithm_type="AUTOMATIC",
        algorithm_identification=algorithm,
        display_color=colour,
    )
    state_encoding(segment, name)
    return segment
