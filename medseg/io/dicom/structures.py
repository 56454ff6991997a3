"""Headers and series of SEG and RTSTRUCT results, and label maps on the slices of a series.

The writers of both kinds of results use this module, and so does their reader.
"""

import hashlib
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread
from pydicom.uid import generate_uid
from pydicom.valuerep import DA, TM

from medseg.errors import UserError
from medseg.io.dicom.frames import Frame
from medseg.io.dicom.read import SourceSlices
from medseg.io.label_table import Structure

# Fields by which an object refers to its source series.
IDENTITY = (
    "SOPClassUID",
    "SOPInstanceUID",
    "SeriesInstanceUID",
    "StudyInstanceUID",
    "FrameOfReferenceUID",
)

# Field of a file that holds several slices, its frames.
MULTI_FRAME = "PerFrameFunctionalGroupsSequence"

# Name of UTF-8 in DICOM.
UTF_8 = "ISO_IR 192"

# Each side in `Structure.code` to its SNOMED CT code and the meaning of the code.
SIDES = {"left": ("7771000", "Left"), "right": ("24028007", "Right")}

# Most characters of a segment's label, of the name of a region of interest, and of a code's
# meaning.
MAX_NAME = 64

# Fields of patient, study and frame of reference that must be present and may be empty (type 2 of
# the standard). Public series lack some.
TYPE_2 = (
    "PatientName",
    "PatientID",
    "PatientBirthDate",
    "PatientSex",
    "AccessionNumber",
    "StudyID",
    "StudyDate",
    "StudyTime",
    "ReferringPhysicianName",
    "PositionReferenceIndicator",
)

# The fields of `TYPE_2` that must be a date or a time, and pydicom's types for their values.
DATES_AND_TIMES = {"PatientBirthDate": DA, "StudyDate": DA, "StudyTime": TM}

# Names of the kinds of results in the description of their series.
KIND_NAMES = {"SEG": "segmentation", "RTSTRUCT": "structure set"}

# Last digit of the series number of a result.
KIND_NUMBERS = {"SEG": 1, "RTSTRUCT": 2}

# Series numbers of results begin here: scanners give smaller ones.
FIRST_NUMBER = 90_000
# Largest series number of a source that is used for the number of a result. The latter is ten times
# as large, and integers of DICOM (IS) have 32 bits.
MAX_SOURCE_NUMBER = 10**8


class DerivedSeries(NamedTuple):
    """Series of a result, which is the same whenever the result is made again.

    Attributes:
        uid: Series Instance UID, derived from the source series, the kind of object and the names
            of labels.
        instance_uid: SOP Instance UID, derived from the same, the slices, the labels of all pixels,
            colours and codes, and a version: an archive keeps one copy of an unchanged result, and
            adds a changed one.
        number: Series Number.
        description: Series Description.
    """

    uid: str
    instance_uid: str
    number: int
    description: str


def derived_series(
    header: Dataset,
    slices: SourceSlices,
    kind: str,
    numbers: np.ndarray,
    structures: Sequence[Structure],
    version: str,
) -> DerivedSeries:
    """Describe the series of a result.

    Args:
        header: Header of a source slice.
        slices: The source, which may be one of several volumes of its series, such as phases.
        kind: Modality of the result: `SEG` or `RTSTRUCT`.
        numbers: Number of the structure at each pixel of each source slice.
        structures: The labels.
        version: Text that changes the SOP Instance UID alone: a new version of the program makes a
            new instance of the same series.
    """
    identity = [header.SeriesInstanceUID, kind, *(structure.name for structure in structures)]
    places = [(frame.position_xyz_mm, frame.volume_keys) for frame in slices.frames]
    content = hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()
    # A user may add codes or colours to the task, and predict again.
    colours_and_codes = [(structure.colour, structure.code) for structure in structures]
    source_description = str(header.get("SeriesDescription") or "")
    description = f"medseg {KIND_NAMES[kind]} {source_description}".strip()
    # UIDs that are generated from equal texts are equal.
    return DerivedSeries(
        uid=generate_uid(entropy_srcs=identity),
        instance_uid=generate_uid(
            entropy_srcs=[*identity, str(places), content, str(colours_and_codes), version]
        ),
        number=_derived_number(header, KIND_NUMBERS[kind]),
        description=description[:MAX_NAME],
    )


def _derived_number(header: Dataset, kind_number: int) -> int:
    """Make the series number of a result: source 7 gives 90071 for a SEG, 90072 for an RTSTRUCT."""
    try:
        source_number = int(header.get("SeriesNumber") or 0)
    except (TypeError, ValueError):
        source_number = 0
    if source_number < 0 or source_number > MAX_SOURCE_NUMBER:
        source_number = 0
    return FIRST_NUMBER + 10 * source_number + kind_number


def stored_name(name: str) -> str:
    r"""Name of a label in DICOM: without `\`, which separates values, and cut to `MAX_NAME`."""
    return name.replace("\\", "_")[:MAX_NAME]


def state_encoding(item: Dataset, name: str) -> None:
    """Add the encoding of a name to the item that holds it, in place.

    The standard lets an item inherit it from the file, but dcmjs, the reader of OHIF, does not.
    """
    if not name.isascii():
        item.SpecificCharacterSet = UTF_8


def labels_on_slices(
    labels: np.ndarray, slices: SourceSlices, structures: Sequence[Structure]
) -> np.ndarray:
    """Move a label map from the grid of a series onto its slices.

    Each pixel takes the nearest voxel of the plane at its slice.

    Args:
        labels: Label values (D, H, W) on `slices.grid`.
        slices: The series.
        structures: Labels that are kept.

    Returns:
        For each slice and pixel the number of its structure, counted from 1, or 0: (slices, rows,
        columns).

    Raises:
        ValueError: If the label map has another shape than the grid.
    """
    if labels.shape != slices.grid.shape:
        raise ValueError(
            f"the label map {labels.shape} is not on the grid of the series {slices.grid.shape}"
        )
    # Number of the structure by label value; 0 for labels that are left out.
    values = [structure.value for structure in structures]
    num_values = max([int(labels.max()), *values]) + 1
    number_of_value = np.zeros(num_values, np.min_scalar_type(len(structures)))
    number_of_value[values] = np.arange(1, len(structures) + 1)
    positions_xyz_mm = [frame.position_xyz_mm for frame in slices.frames]
    # Plane of the grid at each slice.
    planes = nearest(slices.grid.world_to_index_zyx(positions_xyz_mm)[:, 0])
    num_rows, num_columns = slices.frames[0].pixels.shape
    numbers = np.empty((len(slices.frames), num_rows, num_columns), number_of_value.dtype)
    for index, plane in enumerate(planes):
        # Row y and column x of the grid at each pixel; shifts are measured from its first voxel.
        # The grid covers every slice, so all indices exist.
        y_shift_px, x_shift_px = slices.shifts_px[index]
        y = nearest(np.arange(num_rows) + y_shift_px)
        x = nearest(np.arange(num_columns) + x_shift_px)
        numbers[index] = number_of_value[labels[plane][np.ix_(y, x)]]
    return numbers


def labels_on_grid(slice_labels: np.ndarray, slices: SourceSlices) -> np.ndarray:
    """Move labels from the slices of a series onto its grid.

    A plane between two slices takes the labels of the nearer one; halfway, of the lower one.

    Args:
        slice_labels: Label values (slices, rows, columns).
        slices: The series.

    Returns:
        Label values (D, H, W) on `slices.grid`, 0 beside the slices.
    """
    labels = np.zeros(slices.grid.shape, slice_labels.dtype)
    num_rows, num_columns = slice_labels.shape[1:]
    for plane, (lower_index, upper_weight) in enumerate(slices.planes):
        index = lower_index
        if upper_weight > 0.5:
            index = lower_index + 1
        # Row y and column x of the slice at each voxel of the plane.
        y_shift_px, x_shift_px = slices.shifts_px[index]
        y = nearest(np.arange(labels.shape[1]) - y_shift_px)
        x = nearest(np.arange(labels.shape[2]) - x_shift_px)
        # A shifted slice covers a part of the plane.
        has_y = (y >= 0) & (y < num_rows)
        has_x = (x >= 0) & (x < num_columns)
        covered = slice_labels[index][np.ix_(y[has_y], x[has_x])]
        labels[plane][np.ix_(has_y, has_x)] = covered
    return labels


def nearest(positions: np.ndarray) -> np.ndarray:
    """Round to whole numbers, halves upwards; 1e-6 absorbs rounding noise just below a half."""
    return np.floor(positions + 0.5 + 1e-6).astype(int)


def source_headers(slices: SourceSlices) -> list[FileDataset]:
    """Read the headers that an object about a series refers to.

    There is one header for each file, in the order of the slices. Fields of patient and study that
    are missing, or whose value the standard forbids, become empty.

    Raises:
        UserError: If a field of `IDENTITY` is missing.
    """
    headers = []
    # Each path once: a file may hold several slices.
    for path in dict.fromkeys(frame.path for frame in slices.frames):
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            header = dcmread(path, stop_before_pixels=True, force=True)
            missing = [keyword for keyword in IDENTITY if not header.get(keyword)]
            if missing:
                raise UserError(
                    f"{path}: expected a series that a DICOM SEG or RTSTRUCT can refer to, but its "
                    f"files have no {' and no '.join(missing)}; "
                    "export the series again, or save the labels in another format."
                )
            for keyword in TYPE_2:
                header.setdefault(keyword, "")
            for keyword, value_type in DATES_AND_TIMES.items():
                try:
                    value_type(header[keyword].value)  # only to learn whether it is valid
                except ValueError:
                    header[keyword].value = ""
            if header.PatientSex not in ("M", "F", "O"):
                header.PatientSex = ""
        headers.append(header)
    return headers


def segmentation_headers(slices: SourceSlices) -> list[FileDataset]:
    """Read the headers of a series as `source_headers` does, for a DICOM SEG.

    Raises:
        UserError: If a field of `IDENTITY` is missing, or the series has several multi-frame files,
            studies or frames of reference: highdicom needs one of each.
    """
    headers = source_headers(slices)
    if MULTI_FRAME in headers[0] and len(headers) > 1:
        raise UserError(
            f"{slices.path}: expected a series in one multi-frame file or in files of one slice "
            f"each, but it has {len(headers)} multi-frame files, which a DICOM SEG cannot refer to "
            "as one; save the labels in another format."
        )
    for keyword in ("StudyInstanceUID", "FrameOfReferenceUID"):
        num_uids = len({str(header[keyword].value) for header in headers})
        if num_uids > 1:
            raise UserError(
                f"{slices.path}: expected slices with one {keyword}, but they have {num_uids}, "
                "which a DICOM SEG cannot refer to as one; export the series again, or save the "
                "labels in another format."
            )
    return headers


def points_of(frame: Frame, row_column: np.ndarray) -> np.ndarray:
    """Find the LPS points (N, 3) in mm of positions (N, 2) on a slice, (row, column) in pixels."""
    # The LPS steps (2, 3) to the next row, which is along a column, and to the next column.
    steps_mm = frame.axes[::-1] * np.array(frame.spacing_mm)[:, None]
    return np.asarray(frame.position_xyz_mm + row_column @ steps_mm)


def pixels_of(frame: Frame, points_xyz_mm: np.ndarray) -> np.ndarray:
    """Find the positions (N, 2) on a slice, (row, column) in pixels, of LPS points (N, 3) in mm.

    This is the inverse of `points_of`.
    """
    offsets_mm = (points_xyz_mm - frame.position_xyz_mm) @ frame.axes[::-1].T
    return np.asarray(offsets_mm / frame.spacing_mm)
