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
from medseg.errors import UserError
from medseg.io.atomic import replace_path
from medseg.io.dicom.read import SourceSlices
from medseg.io.dicom.structures import (
    UTF_8,
    derived_series,
    labels_on_slices,
    source_headers,
    state_encoding,
    stored_name,
)
from medseg.io.label_table import Structure

SIDES = {"left": codes.SCT.Left, "right": codes.SCT.Right}


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
        path: Target.
        labels: Label values (D, H, W) on `slices.grid`.
        slices: The source series.
        structures: Labels to write, in the order of the segments; voxels of other values are left
            out.
        kind: `binary`: one frame for each segment and slice; `labelmap`: one frame of segment
            numbers for each slice, which RLE makes a tenth as large; defined in 2024 and unknown to
            older viewers.
        keep_empty_frames: Whether slices without the segment get a frame too.

    Raises:
        UserError: If the source lacks an identity, or the file cannot be written.
        ValueError: If the label map is not on the grid.
    """
    headers = source_headers(slices)
    numbers = labels_on_slices(labels, slices, structures)
    is_multi_frame = "PerFrameFunctionalGroupsSequence" in headers[0]
    if is_multi_frame and len(headers) > 1:
        raise UserError(
            f"{slices.path}: expected a series in one multi-frame file or in files of one slice "
            f"each, but it has {len(headers)} multi-frame files, which a DICOM SEG cannot refer to "
            "as one; save the labels in another format."
        )
    positions = None
    step_mm = slices.grid.spacing_mm[0]
    if is_multi_frame:
        _share_geometry(headers[0], step_mm)
        positions = [
            PlanePositionSequence("PATIENT", frame.position_xyz_mm) for frame in slices.frames
        ]
    else:
        _make_parallel(headers, step_mm)
    series = derived_series(
        headers[0], "SEG", numbers, structures, f"{kind} {keep_empty_frames} {__version__}"
    )
    with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
        segmentation = Segmentation(
            headers,
            numbers,
            kind.upper(),
            [_describe(number, structure) for number, structure in enumerate(structures, start=1)],
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
            plane_positions=positions,
            omit_empty_frames=not keep_empty_frames,
        )
        segmentation.PositionReferenceIndicator = headers[0].PositionReferenceIndicator
        if is_multi_frame:
            _drop_other_frames(segmentation, slices)
        if kind == "labelmap":
            # Not by highdicom: it would take the encoder of GDCM where that is installed, which
            # ends the process on odd widths.
            segmentation.compress(
                RLELossless, encoding_plugin="pydicom", generate_instance_uid=False
            )
        with replace_path(path) as part:
            segmentation.save_as(part)


def _drop_other_frames(segmentation: Segmentation, slices: SourceSlices) -> None:
    """Keep only references to frames of the series: highdicom refers to other phases too."""
    frame_numbers = {frame.index + 1 for frame in slices.frames}
    for group in segmentation.PerFrameFunctionalGroupsSequence:
        for derivation in group.DerivationImageSequence:
            derivation.SourceImageSequence = [
                image
                for image in derivation.SourceImageSequence
                if image.ReferencedFrameNumber in frame_numbers
            ]


def _make_parallel(headers: Sequence[Dataset], step_mm: float) -> None:
    """Give slices one orientation, and a thickness where they have none."""
    for header in headers:
        # Rounded decimals may differ between slices that are parallel.
        header.ImageOrientationPatient = headers[0].ImageOrientationPatient
        header.SliceThickness = header.get("SliceThickness") or step_mm


def _share_geometry(header: Dataset, step_mm: float) -> None:
    """Copy orientation and spacing of the first frame to the group of all frames.

    highdicom looks for them there.
    """
    first = header.PerFrameFunctionalGroupsSequence[0]
    if not header.get("SharedFunctionalGroupsSequence"):
        header.SharedFunctionalGroupsSequence = [Dataset()]
    for keyword in ("PlaneOrientationSequence", "PixelMeasuresSequence"):
        if keyword in first:
            setattr(header.SharedFunctionalGroupsSequence[0], keyword, first[keyword].value)
    measures = header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SliceThickness = measures.get("SliceThickness") or step_mm


def _describe(number: int, structure: Structure) -> SegmentDescription:
    """Describe a segment.

    A label without a SNOMED code gets a private one, which consists of its name.
    """
    name = stored_name(structure.name)
    if structure.code:
        category = codes.SCT.AnatomicalStructure
        kind = CodedConcept(structure.code[0], "SCT", structure.code[1])
    else:
        category = codes.SCT.Tissue
        kind = CodedConcept(name[:16], "99MEDSEG", name)  # a code has 16 characters at most
    for side in structure.code[2:]:
        kind.SegmentedPropertyTypeModifierCodeSequence = [CodedConcept.from_code(SIDES[side])]
    colour = CIELabColor.from_string(structure.colour) if structure.colour else None
    segment = SegmentDescription(
        number,
        name,
        category,
        kind,
        "AUTOMATIC",
        AlgorithmIdentificationSequence("medseg", codes.DCM.ArtificialIntelligence, __version__),
        display_color=colour,
    )
    state_encoding(segment, name)
    return segment
