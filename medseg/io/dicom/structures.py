"""Labels of a DICOM series.

Headers that a SEG or RTSTRUCT refers to, and label maps moved between the grid and the slices.
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

# Fields by which an object refers to its source.
IDENTITY = (
    "SOPClassUID",
    "SOPInstanceUID",
    "SeriesInstanceUID",
    "StudyInstanceUID",
    "FrameOfReferenceUID",
)

# Name of this encoding in DICOM.
UTF_8 = "ISO_IR 192"

# Characters of a segment's label, of the name of a region of interest, and of a code's meaning.
MAX_NAME = 64

# Fields of patient, study and frame of reference that must be present and may be empty. Public
# series lack some.
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

# What the description of a result calls it.
KIND_NAMES = {"SEG": "segmentation", "RTSTRUCT": "structure set"}

# Last digit of the series number of a result.
KIND_NUMBERS = {"SEG": 1, "RTSTRUCT": 2}

FIRST_NUMBER = 90_000
# Numbers of DICOM have 32 bits.
MAX_SOURCE_NUMBER = 10**8


# Those of them that must be a date or a time, and their types.
DATES_AND_TIMES = {"PatientBirthDate": DA, "StudyDate": DA, "StudyTime": TM}


class DerivedSeries(NamedTuple):
    """Series of a result, which is the same whenever the result is made again.

    Attributes:
        uid: Series Instance UID, of the source series, the kind of object and the names of labels.
        instance_uid: SOP Instance UID, also of the labels themselves: an archive keeps one copy of
            a result that did not change, and takes another one as new.
        number: Series Number.
        description: Series Description.
    """

    uid: str
    instance_uid: str
    number: int
    description: str


def derived_series(
    header: Dataset, kind: str, numbers: np.ndarray, structures: Sequence[Structure], version: str
) -> DerivedSeries:
    """Describe the series of a result.

    Args:
        header: Header of a source slice.
        kind: Modality of the result: `SEG` or `RTSTRUCT`.
        numbers: Number of the structure at each pixel of each source slice.
        structures: The labels.
        version: What else makes another instance, such as the version of the program.
    """
    identity = [header.SeriesInstanceUID, kind, *(structure.name for structure in structures)]
    content = hashlib.sha256(np.ascontiguousarray(numbers).data).hexdigest()
    description = str(header.get("SeriesDescription") or "")
    return DerivedSeries(
        generate_uid(entropy_srcs=identity),
        generate_uid(entropy_srcs=[*identity, content, version]),
        _derived_number(header, KIND_NUMBERS[kind]),
        f"medseg {KIND_NAMES[kind]} {description}".strip()[:MAX_NAME],
    )


def _derived_number(header: Dataset, kind_number: int) -> int:
    """Number a result after its source: 7 gives 90071 or 90072, beyond those of scanners."""
    try:
        number = int(header.get("SeriesNumber") or 0)
    except (TypeError, ValueError):
        number = 0
    is_usual = 0 <= number <= MAX_SOURCE_NUMBER
    return FIRST_NUMBER + 10 * (number if is_usual else 0) + kind_number


def stored_name(name: str) -> str:
    """Name of a label in DICOM: cut to the field, without the sign that separates values."""
    return name.replace("\\", "_")[:MAX_NAME]


def state_encoding(item: Dataset, name: str) -> None:
    """State the encoding of a name in the item that holds it.

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
    # Number of a structure by label value; 0 of labels that are left out.
    values = [structure.value for structure in structures]
    num_values = max(int(labels.max()), *values) + 1
    numbers = np.zeros(num_values, np.min_scalar_type(len(structures)))
    numbers[values] = np.arange(1, len(structures) + 1)
    positions_xyz_mm = [frame.position_xyz_mm for frame in slices.frames]
    heights = slices.grid.world_to_index_zyx(positions_xyz_mm)[:, 0]
    rows, columns = slices.frames[0].pixels.shape
    result = np.empty((len(slices.frames), rows, columns), numbers.dtype)
    for index, plane in enumerate(nearest(heights)):
        y_shift_px, x_shift_px = slices.shifts_px[index]
        y = nearest(np.arange(rows) + y_shift_px)
        x = nearest(np.arange(columns) + x_shift_px)
        result[index] = numbers[labels[plane][np.ix_(y, x)]]
    return result


def labels_on_grid(on_slices: np.ndarray, slices: SourceSlices) -> np.ndarray:
    """Move labels from the slices of a series onto its grid.

    A plane between two slices takes the labels of the nearer one.

    Args:
        on_slices: Label values (slices, rows, columns).
        slices: The series.

    Returns:
        Label values (D, H, W) on `slices.grid`, 0 beside the slices.
    """
    labels = np.zeros(slices.grid.shape, on_slices.dtype)
    for plane, (below, weight) in enumerate(slices.planes):
        index = below + round(weight)
        # Pixel (y, x) at each voxel of the plane; a tilted slice covers a part of it.
        y_shift_px, x_shift_px = slices.shifts_px[index]
        y = nearest(np.arange(labels.shape[1]) - y_shift_px)
        x = nearest(np.arange(labels.shape[2]) - x_shift_px)
        height, width = on_slices.shape[1:]
        has_y = (y >= 0) & (y < height)
        has_x = (x >= 0) & (x < width)
        covered = on_slices[index][np.ix_(y[has_y], x[has_x])]
        labels[plane][np.ix_(has_y, has_x)] = covered
    return labels


def nearest(positions: np.ndarray) -> np.ndarray:
    """Round to whole numbers: a half up, also where rounding noise lies just below it."""
    return np.floor(positions + 0.5 + 1e-6).astype(int)


def source_headers(slices: SourceSlices) -> list[FileDataset]:
    """Read the headers that an object about a series refers to.

    There is one of each file, in the order of the slices.

    Fields of patient and study that are missing, or that the standard forbids, become empty.

    Raises:
        UserError: If a field by which the object would refer to its source is missing.
    """
    headers = []
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
                    value_type(header[keyword].value)
                except ValueError:
                    header[keyword].value = ""
            if header.PatientSex not in ("M", "F", "O"):
                header.PatientSex = ""
        headers.append(header)
    return headers


def points_of(frame: Frame, row_column: np.ndarray) -> np.ndarray:
    """Find the LPS points (N, 3) in mm of positions (N, 2) on a slice, (row, column) in pixels."""
    steps_mm = frame.axes[::-1] * np.array(frame.spacing_mm)[:, None]
    return np.asarray(frame.position_xyz_mm + row_column @ steps_mm)


def pixels_of(frame: Frame, points_xyz_mm: np.ndarray) -> np.ndarray:
    """Find the positions (N, 2) on a slice, (row, column) in pixels, of LPS points (N, 3) in mm.

    It is the inverse of `points_of`.
    """
    offsets_mm = (points_xyz_mm - frame.position_xyz_mm) @ frame.axes[::-1].T
    return np.asarray(offsets_mm / frame.spacing_mm)
