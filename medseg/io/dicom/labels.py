"""Reader of labels in DICOM: segments of a SEG and contours of an RTSTRUCT.

Frames and contours are matched with the slices of a series by position. They label the pixels of
the slices, and these labels are then moved onto the grid of the series.
"""

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread
from pydicom.uid import RTStructureSetStorage, SegmentationStorage

from medseg.errors import UserError, first_line
from medseg.findings import warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.dicom.contours import fill
from medseg.io.dicom.frames import Frame, PixelFormat, Places, field_of, printable, read_numbers
from medseg.io.dicom.pixels import decode
from medseg.io.dicom.read import JITTER_TOLERANCE_MM, SourceSlices
from medseg.io.dicom.stacks import SAME_POSITION_MM, heights_of, normal_of
from medseg.io.dicom.structures import labels_on_grid, nearest, pixels_of
from medseg.io.volume import Volume, shown

# SOP classes of label files. The class of label maps is newer than pydicom's list.
LABEL_MAP_STORAGE = "1.2.840.10008.5.1.4.1.1.66.7"
KINDS = {SegmentationStorage: "SEG", LABEL_MAP_STORAGE: "SEG", RTStructureSetStorage: "RTSTRUCT"}

# A pixel belongs to a segment of a FRACTIONAL SEG if the segment takes at least this share of the
# pixel, or has at least this probability there.
LEAST_SHARE = 0.5

# Steps below this share of the distance of slices or planes are none between planes: positions of
# one plane differ by rounding, or because its parts were drawn one by one.
SAME_PLANE = 0.1

# Contours that enclose an area; points and open lines do not.
CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


@dataclass(frozen=True, eq=False)
class LabelFile:
    """A SEG or RTSTRUCT file whose pixels or contours have not been decoded.

    Attributes:
        path: The file.
        kind: `SEG` or `RTSTRUCT`.
        names: Names of the segments or regions of interest (ROI) by their numbers, in the order of
            the file; names may repeat. A structure without a name is named by its number: `ROI 3`.
        series_uids: Series Instance UIDs of the images that the file refers to; may be empty.
        dataset: Content of the file.
    """

    path: Path
    kind: str
    names: dict[int, str]
    series_uids: tuple[str, ...]
    dataset: FileDataset


def open_label_file(path: Path) -> LabelFile:
    """Read which structures a SEG or RTSTRUCT file labels, and of which series.

    Raises:
        UserError: If the file is neither, or cannot be read.
    """
    with _explained(path):
        dataset = dcmread(path, force=True)
        kind = KINDS.get(dataset.get("SOPClassUID"), "")
        if not kind:
            modality = printable(str(dataset.get("Modality") or "another object"))
            raise UserError(
                f"{path}: expected labels in a DICOM SEG or RTSTRUCT, got {modality}; "
                "give another file."
            )
        numbers_and_names = []
        if kind == "SEG":
            for segment in dataset.SegmentSequence:
                # Segment 0 is the background of a label map.
                if segment.SegmentNumber:
                    numbers_and_names.append((segment.SegmentNumber, segment.get("SegmentLabel")))
        else:
            for region in dataset.get("StructureSetROISequence") or []:
                numbers_and_names.append((region.ROINumber, region.get("ROIName")))
        names = _names(path, kind, numbers_and_names, _filled_numbers(dataset, kind))
        return LabelFile(path, kind, names, _series_uids(dataset), dataset)


def _series_uids(dataset: Dataset) -> tuple[str, ...]:
    """List the Series Instance UIDs of the images that a file refers to, each once."""
    # A SEG names the series itself, an RTSTRUCT below frame of reference and study.
    series_items = list(dataset.get("ReferencedSeriesSequence") or [])
    for frame_of_reference in dataset.get("ReferencedFrameOfReferenceSequence") or []:
        for study in frame_of_reference.get("RTReferencedStudySequence") or []:
            series_items += study.get("RTReferencedSeriesSequence") or []
    return tuple(dict.fromkeys(str(item.SeriesInstanceUID) for item in series_items))


def _names(
    path: Path,
    kind: str,
    numbers_and_names: Sequence[tuple[Any, Any]],
    filled_numbers: Collection[int],
) -> dict[int, str]:
    """Name the structures of a file by their numbers.

    Structures without a name, and those that the file does not list, are named by their numbers.

    Args:
        path: File, for messages.
        kind: `SEG` or `RTSTRUCT`.
        numbers_and_names: Number and name of each structure that the file lists, as stored.
        filled_numbers: Numbers of the structures with frames or contours.

    Raises:
        UserError: If two structures have the same number.
    """
    unnamed = "segment" if kind == "SEG" else "ROI"
    names: dict[int, str] = {}
    for stored_number, stored_name in numbers_and_names:
        number = int(stored_number)
        name = str(stored_name or "") or f"{unnamed} {stored_number}"
        if number in names:
            raise UserError(
                f"{path}: the structures {shown(names[number])} and {shown(name)} of the {kind} "
                f"have the number {number}; export it again."
            )
        names[number] = name
    for number in sorted(set(filled_numbers) - set(names)):
        names[number] = f"{unnamed} {number}"
    return names


def _filled_numbers(dataset: Dataset, kind: str) -> set[int]:
    """Find the numbers of the structures that have a frame (SEG) or a contour (RTSTRUCT).

    The result is empty for a SEG of label maps, whose segments are known only once the pixels are
    decoded.
    """
    if kind == "RTSTRUCT":
        items = dataset.get("ROIContourSequence") or []
        return {int(item.ReferencedROINumber) for item in items if item.get("ContourSequence")}
    if dataset.get("SegmentationType") == "LABELMAP":
        return set()
    numbers = [field_of(places, "ReferencedSegmentNumber") for places in _frame_places(dataset)]
    return {int(number) for number in numbers if number}


def _frame_places(dataset: Dataset) -> list[Places]:
    """List the `Places` of the fields of each frame of a SEG."""
    # The standard allows one item in this sequence: further items are not read.
    shared_groups = list(dataset.get("SharedFunctionalGroupsSequence") or [])[:1]
    frame_groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    return [(group, *shared_groups, dataset) for group in frame_groups]


def empty_structures(file: LabelFile) -> list[str]:
    """List the structures of a file that have no frame (SEG) or no closed contour (RTSTRUCT).

    The result is empty for a SEG of label maps: which of its segments have no pixel is known only
    once the pixels are decoded.
    """
    if file.dataset.get("SegmentationType") == "LABELMAP":
        return []
    with _explained(file.path):
        if file.kind == "RTSTRUCT":
            filled_numbers = _enclosing_numbers(file.dataset)
        else:
            filled_numbers = _filled_numbers(file.dataset, file.kind)
    return [name for number, name in file.names.items() if number not in filled_numbers]


def _enclosing_numbers(dataset: Dataset) -> set[int]:
    """Find the numbers of the regions of an RTSTRUCT that enclose an area: not points and lines."""
    numbers = set()
    for item in dataset.get("ROIContourSequence") or []:
        for contour in item.get("ContourSequence") or []:
            if _closed_points(contour) is not None:
                numbers.add(int(item.ReferencedROINumber))
                break
    return numbers


def read_label_file(file: LabelFile, slices: SourceSlices, values: dict[int, int]) -> Volume:
    """Read segments or regions of interest onto the grid of a series.

    Args:
        file: SEG or RTSTRUCT of the series, or of another series in the same frame of reference.
        slices: The series onto whose grid they are read.
        values: Label value, > 0, by the number of a segment or region of interest; several numbers
            may have the same value. Where structures overlap, the last one in this order is kept.

    Returns:
        Label values (D, H, W) on `slices.grid`, with warnings of contours that were left out and of
        overlaps.

    Raises:
        UserError: If the file is of another series and frame of reference, or the frames or
            contours have no position among the slices.
        ValueError: If a number is not in the file.
    """
    unknown_numbers = set(values) - set(file.names)
    if unknown_numbers:
        raise ValueError(f"{file.path} has no structures {sorted(unknown_numbers)}")
    with _explained(file.path):
        _check_frame_of_reference(file, slices)
        shape = (len(slices.frames), *slices.frames[0].pixels.shape)
        slice_labels = np.zeros(shape, _label_dtype(values))
        if file.kind == "SEG":
            sentences = _read_segments(file, slices, values, slice_labels)
        else:
            sentences = _read_contours(file, slices, values, slice_labels)
    labels = labels_on_grid(slice_labels, slices)
    return Volume(labels, slices.grid, findings=tuple(warnings_of("reading", sentences)))


def _label_dtype(values: dict[int, int]) -> np.dtype[Any]:
    """Choose the smallest type that holds some label values and 0."""
    return np.min_scalar_type(max(values.values(), default=0))


def _check_frame_of_reference(file: LabelFile, slices: SourceSlices) -> None:
    """Check that labels and a series have the same frame of reference.

    The check passes if the labels or the series name none.

    Raises:
        UserError: If they name different frames of reference, and the labels do not name the
            series.
    """
    # Some programs that remove identities give images and labels different frames of reference.
    if slices.frames[0].series.uid in file.series_uids:
        return
    source = dcmread(
        slices.frames[0].path,
        force=True,
        stop_before_pixels=True,
        specific_tags=["FrameOfReferenceUID"],
    )
    source_uid = source.get("FrameOfReferenceUID")
    # A SEG names its frame of reference itself, an RTSTRUCT in items of a sequence.
    references = [file.dataset, *(file.dataset.get("ReferencedFrameOfReferenceSequence") or [])]
    label_uids = {item.get("FrameOfReferenceUID") for item in references} - {None, ""}
    if source_uid and label_uids and source_uid not in label_uids:
        raise UserError(
            f"{file.path}: expected labels in the frame of reference of {slices.path}, but they "
            "are in another one; give the series that they were drawn on."
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the exceptions of a missing or damaged file in the block into a `UserError`."""
    try:
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            yield
    except (UserError, MemoryError):
        raise
    except OSError as error:
        # The block may read a slice of the series too.
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror or error}); "
            "check the path and its permissions."
        ) from error
    except Exception as error:  # pydicom and its decoders raise any type
        raise UserError(
            f"{path}: the DICOM file cannot be read ({printable(first_line(error))}); "
            "it is damaged, copy or export it again."
        ) from error


def _read_segments(
    file: LabelFile,
    slices: SourceSlices,
    values: dict[int, int],
    slice_labels: np.ndarray,
) -> list[str]:
    """Label the pixels of slices by the frames of a SEG.

    The frames may have another orientation, size and spacing. A plane of frames serves the pixels
    within half the distance of planes: a plane without any segment may not be stored, and its
    pixels are background.

    Args:
        file: The SEG.
        slices: The series whose slices are labelled.
        values: As for `read_label_file`.
        slice_labels: Label values (slices, rows, columns), changed in place.

    Returns:
        Warnings.

    Raises:
        UserError: If the frames have no position, those of one plane begin at different points, or
            they are compressed single bits.
    """
    dataset = file.dataset
    syntax = dataset.file_meta.TransferSyntaxUID
    if dataset.BitsAllocated == 1 and syntax.is_encapsulated:
        raise UserError(
            f"{file.path}: expected a BINARY SEG without compression, but it is encoded as "
            f"{printable(syntax.name)}; export it without."
        )
    frame_places = _frame_places(dataset)
    positions, axes, spacing_mm = _frame_geometry(file.path, frame_places)
    slice_step_mm = slices.grid.spacing_mm[0]
    declared_mm = _declared_distance(frame_places[0]) or slice_step_mm
    tolerance_mm = _tolerance(min(declared_mm, slice_step_mm))
    normal = np.cross(axes[0], axes[1])
    heights_mm = positions @ normal
    # Number the planes upwards from 0; frames of several segments may lie in one plane. Along the
    # sorted frames a plane begins at each step in height, and at the first frame (infinite step).
    order = np.argsort(heights_mm, kind="stable")
    begins_plane = np.diff(heights_mm[order], prepend=-np.inf) > tolerance_mm
    planes = np.empty(len(order), int)  # number of the plane of each frame
    planes[order] = np.cumsum(begins_plane) - 1
    first_frames = order[begins_plane]  # one frame of each plane
    corners = positions[first_frames]
    if np.abs(positions - corners[planes]).max() > JITTER_TOLERANCE_MM:
        raise UserError(
            f"{file.path}: expected the frames of each plane of the SEG to begin at one point, but "
            "they begin at several; export it again."
        )
    plane_labels, num_overlaps = _label_planes(dataset, frame_places, planes, values)
    distance_mm, sentences = _plane_distance(
        file, declared_mm, heights_mm[first_frames], slice_step_mm
    )
    reach_mm = distance_mm / 2 + tolerance_mm
    for index, frame in enumerate(slices.frames):
        slice_labels[index] = _at_slice(frame, plane_labels, corners, axes, spacing_mm, reach_mm)
    sentences += _lost_warnings(file, values, plane_labels, slice_labels)
    return [*sentences, *_overlap_warnings(file, num_overlaps, "segments")]


def _tolerance(step_mm: float) -> float:
    """Find the largest distance in mm that counts as rounding among slices or planes.

    Args:
        step_mm: Distance of the slices or planes; that of micro-CT is below 0.1 mm.
    """
    return min(JITTER_TOLERANCE_MM, SAME_PLANE * step_mm)


def _declared_distance(places: Places) -> float | None:
    """Read the distance in mm that a SEG declares for its planes; None if it declares none.

    Args:
        places: Where the fields of its first frame may be.
    """
    declared_mm = read_numbers(places, "SpacingBetweenSlices", 1)
    if declared_mm is None or declared_mm[0] == 0:
        return None
    return abs(declared_mm[0])


def _plane_distance(
    file: LabelFile, declared_mm: float, plane_heights_mm: np.ndarray, slice_step_mm: float
) -> tuple[float, list[str]]:
    """Find the distance of the planes of a SEG.

    Args:
        file: The SEG.
        declared_mm: Distance that it declares or, if it declares none, that of the slices.
        plane_heights_mm: Positions of the stored planes along their normal, ascending.
        slice_step_mm: Distance of the slices.

    Returns:
        The distance in mm; then a warning if no two planes follow each other at the declared
        distance.
    """
    nearer_mm = min(declared_mm, slice_step_mm)
    steps_mm = np.diff(plane_heights_mm)
    steps_mm = steps_mm[steps_mm > SAME_PLANE * nearer_mm]
    # Each step may span planes that are not stored, but two neighbours nearly always are.
    smallest_mm = min(steps_mm.tolist(), default=declared_mm)
    if smallest_mm <= declared_mm + _tolerance(nearer_mm):
        return smallest_mm, []
    sentence = (
        f"the planes of {file.path.name} are at least {smallest_mm:.3g} mm apart; what is farther "
        f"than {declared_mm / 2:.3g} mm from them has no label"
    )
    return declared_mm, [sentence]


def _lost_warnings(
    file: LabelFile, values: dict[int, int], plane_labels: np.ndarray, slice_labels: np.ndarray
) -> list[str]:
    """Warn of segments with pixels in their planes and none in the slices.

    Args:
        file: The SEG.
        values: As for `read_label_file`.
        plane_labels: Label values (planes, rows, columns).
        slice_labels: Label values (slices, rows, columns).
    """
    sentences = []
    for number, value in values.items():
        if _has_value(plane_labels, value) and not _has_value(slice_labels, value):
            sentences.append(f"{shown(file.names[number])}: none of its pixels is on the slices")
    return sentences


def _has_value(labels: np.ndarray, value: int) -> bool:
    """Whether a value is among labels (planes, rows, columns)."""
    # Up to the first plane with the value, and without a mask of all planes.
    return any((plane == value).any() for plane in labels)


def _overlap_warnings(file: LabelFile, num_overlaps: int, structures: str) -> list[str]:
    """Warn of pixels that are in several structures, if there are any.

    Args:
        file: The SEG or RTSTRUCT, whose name the warning holds.
        num_overlaps: Number of these pixels.
        structures: Word for the structures: `segments` or `regions`.
    """
    if num_overlaps == 0:
        return []
    return [
        f"{num_overlaps} pixels of {file.path.name} are in several {structures}; "
        "the last one is kept"
    ]


def _frame_geometry(
    path: Path, frame_places: list[Places]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read where the frames of a SEG lie.

    Args:
        path: File, for messages.
        frame_places: Where the fields of each frame may be.

    Returns:
        LPS points (frames, 3) of the first pixels; LPS unit vectors (2, 3) along a row and along a
        column; distance of rows, then of columns, in mm.

    Raises:
        UserError: If a frame lacks these, or the frames are not parallel with one spacing.
    """
    positions = [read_numbers(places, "ImagePositionPatient", 3) for places in frame_places]
    orientations = [read_numbers(places, "ImageOrientationPatient", 6) for places in frame_places]
    spacings_mm = [read_numbers(places, "PixelSpacing", 2) for places in frame_places]
    if not frame_places or None in (*positions, *orientations, *spacings_mm):
        raise UserError(
            f"{path}: expected a position, an orientation and a spacing for each frame of the SEG; "
            "export it again."
        )
    orientation_range = np.ptp(np.array(orientations), axis=0).max()
    spacing_range_mm = np.ptp(np.array(spacings_mm), axis=0).max()
    if orientation_range > DIRECTION_TOLERANCE or spacing_range_mm > SAME_POSITION_MM:
        raise UserError(
            f"{path}: expected a SEG of parallel frames with one spacing; export it again."
        )
    axes = np.reshape(np.array(orientations[0]), (2, 3))
    return np.array(positions), axes, np.array(spacings_mm[0])


def _label_planes(
    dataset: Dataset,
    frame_places: list[Places],
    planes: np.ndarray,
    values: dict[int, int],
) -> tuple[np.ndarray, int]:
    """Decode the frames of a SEG, and join the frames of each plane.

    Args:
        dataset: The SEG.
        frame_places: Where the fields of each frame may be.
        planes: Number of the plane of each frame, from 0.
        values: As for `read_label_file`.

    Returns:
        Label values (planes, rows, columns), and how many pixels are in several segments.
    """
    shape = (planes.max() + 1, dataset.Rows, dataset.Columns)
    plane_labels = np.zeros(shape, _label_dtype(values))
    if dataset.SegmentationType == "LABELMAP":
        _copy_label_map(dataset, planes, values, plane_labels)
        return plane_labels, 0
    numbers = np.array([field_of(places, "ReferencedSegmentNumber") for places in frame_places])
    # Comparisons with None are False: the frame would be left out in silence.
    if None in numbers:
        raise ValueError("a frame names no segment")
    # Lowest stored value of a pixel that belongs to the segment.
    threshold = 1
    if dataset.SegmentationType == "FRACTIONAL":
        threshold = LEAST_SHARE * dataset.MaximumFractionalValue
    is_overlap = np.zeros(shape, bool)
    # In the order of `values`: a later structure replaces an earlier one.
    for number, value in values.items():
        for index in np.flatnonzero(numbers == number).tolist():
            mask = _frame_pixels(dataset, index) >= threshold
            _paint(plane_labels[planes[index]], is_overlap[planes[index]], mask, value)
    return plane_labels, int(np.count_nonzero(is_overlap))


def _paint(labels: np.ndarray, is_overlap: np.ndarray, mask: np.ndarray, value: int) -> None:
    """Set the pixels of a mask to a label value, in place.

    Args:
        labels: Label values (rows, columns).
        is_overlap: Pixels (rows, columns) that several labels claim; pixels of the mask that had
            another label before, not counting the background, are added in place.
        mask: Pixels (rows, columns) of the structure.
        value: Label value of the structure.
    """
    has_other_label = mask & (labels != 0) & (labels != value)
    # The memory of pixels that are never set is not taken.
    is_overlap[has_other_label] = True
    labels[mask] = value


def _copy_label_map(
    dataset: Dataset, planes: np.ndarray, values: dict[int, int], plane_labels: np.ndarray
) -> None:
    """Copy the frames of a SEG whose pixels hold segment numbers.

    Args:
        dataset: The SEG.
        planes: Number of the plane of each frame, from 0.
        values: As for `read_label_file`.
        plane_labels: Label values (planes, rows, columns), changed in place.

    Raises:
        UserError: If the pixels hold a segment that the file does not describe: it cannot be
            chosen, and its pixels would be lost.
    """
    described_numbers = {int(segment.SegmentNumber) for segment in dataset.SegmentSequence}
    # Background and padding need no description.
    described_numbers |= {0, dataset.get("PixelPaddingValue", 0)}
    # Label value by segment number, for all numbers that a pixel can hold; segments that are not
    # asked for stay 0.
    table = np.zeros(2**dataset.BitsAllocated, plane_labels.dtype)
    table[list(values)] = list(values.values())
    for index, plane in enumerate(planes.tolist()):
        numbers = _frame_pixels(dataset, index)
        unknown_numbers = set(np.unique(numbers).tolist()) - described_numbers
        if unknown_numbers:
            raise UserError(
                f"{dataset.filename}: the pixels of the SEG hold the segment "
                f"{min(unknown_numbers)}, which it does not describe; export it again."
            )
        frame_labels = table[numbers]
        # Another frame may have labelled the plane.
        np.copyto(plane_labels[plane], frame_labels, where=frame_labels != 0)


def _frame_pixels(dataset: Dataset, index: int) -> np.ndarray:
    """Decode the stored values (rows, columns) of one frame."""
    shape = (dataset.Rows, dataset.Columns)
    bits = dataset.BitsAllocated
    if bits != 1:
        syntax = dataset.file_meta.TransferSyntaxUID
        pixels = PixelFormat(
            shape,
            syntax,
            offset=None,
            dtype=np.dtype(f"<u{bits // 8}"),
            bits_stored=bits,
            padding=(),
        )
        return decode(dataset, pixels, index)
    # Frames of single bits follow each other without a gap, so that one may begin within a byte.
    # pydicom 3.0 assumes whole bytes.
    num_pixels = shape[0] * shape[1]
    first_bit = index * num_pixels
    stop_bit = first_bit + num_pixels
    first_byte = first_bit // 8
    stop_byte = math.ceil(stop_bit / 8)
    packed = np.frombuffer(dataset.PixelData, np.uint8)[first_byte:stop_byte]
    num_bits_before = first_bit - 8 * first_byte  # bits of the previous frame in the first byte
    values = np.unpackbits(packed, bitorder="little")
    return values[num_bits_before : num_bits_before + num_pixels].reshape(shape)


def _at_slice(
    frame: Frame,
    plane_labels: np.ndarray,
    corners: np.ndarray,
    axes: np.ndarray,
    spacing_mm: np.ndarray,
    reach_mm: float,
) -> np.ndarray:
    """Look up the labels of the planes of a SEG at the pixels of a slice.

    Args:
        frame: The slice.
        plane_labels: Label values (planes, rows, columns).
        corners: LPS points (planes, 3) of the first pixel of each plane, sorted along the normal.
        axes: LPS unit vectors (2, 3) along a row and along a column of the planes.
        spacing_mm: Distance of rows, then of columns of the planes.
        reach_mm: Largest distance of a pixel from its plane.

    Returns:
        Label values (rows, columns) of the slice; 0 beside the planes, and farther from them than
        `reach_mm`.
    """

    def project(direction: np.ndarray) -> np.ndarray:
        """Project the pixels of the slice on a direction, in mm: (rows or 1, columns or 1).

        Along an axis of the slice that is at a right angle to the direction, the result has size 1:
        all pixels have the same projection. Most slices are parallel to the planes, so that the
        arrays stay small.
        """
        rows, columns = (np.arange(size) for size in frame.pixels.shape)
        # The axis along a row leads to the next column, and the one along a column to the next row.
        to_next_column, to_next_row = frame.axes
        between_rows_mm, between_columns_mm = frame.spacing_mm
        column_step_mm = np.dot(to_next_column, direction) * between_columns_mm
        row_step_mm = np.dot(to_next_row, direction) * between_rows_mm
        projected_mm = np.full((1, 1), np.dot(frame.position_xyz_mm, direction))
        if abs(row_step_mm) * rows.size > SAME_POSITION_MM:
            projected_mm = projected_mm + row_step_mm * rows[:, None]
        if abs(column_step_mm) * columns.size > SAME_POSITION_MM:
            projected_mm = projected_mm + column_step_mm * columns[None]
        return projected_mm

    normal = np.cross(axes[0], axes[1])
    heights_mm = project(normal)
    plane_heights_mm = corners @ normal
    # The nearest plane of each pixel. Of two planes at the same distance the upper one counts: 1e-6
    # mm is more than rounding noise, which could make the lower one nearer.
    middles_mm = (plane_heights_mm[1:] + plane_heights_mm[:-1]) / 2
    planes = np.searchsorted(middles_mm - 1e-6, heights_mm)
    # Row y and column x of each pixel of the slice in its nearest plane.
    along_row, along_column = axes
    row_distance_mm, column_distance_mm = spacing_mm
    y_mm = project(along_column) - (corners @ along_column)[planes]
    x_mm = project(along_row) - (corners @ along_row)[planes]
    y = nearest(y_mm / row_distance_mm)
    x = nearest(x_mm / column_distance_mm)
    height, width = plane_labels.shape[1:]
    is_near = np.abs(plane_heights_mm[planes] - heights_mm) <= reach_mm
    has_y = (y >= 0) & (y < height)
    has_x = (x >= 0) & (x < width)
    # `planes`, y and x have one entry along axes of the slice on which they do not depend; together
    # they broadcast to (rows, columns) of the slice. Clipped, so that all positions can be looked
    # up; those outside are dropped below.
    nearest_labels = plane_labels[planes, y.clip(0, height - 1), x.clip(0, width - 1)]
    return np.where(is_near & has_y & has_x, nearest_labels, 0)


def _read_contours(
    file: LabelFile, slices: SourceSlices, values: dict[int, int], slice_labels: np.ndarray
) -> list[str]:
    """Label the pixels of slices inside the contours of an RTSTRUCT.

    A slice takes the contours of the nearest plane, at most half the distance of planes or slices
    away, whichever is smaller. Contours of a region of interest within each other are holes.

    Args:
        file: The RTSTRUCT.
        slices: The series whose slices are labelled.
        values: As for `read_label_file`.
        slice_labels: Label values (slices, rows, columns), changed in place.

    Returns:
        Warnings.

    Raises:
        UserError: If contours do not lie in planes parallel to the slices.
    """
    frames = slices.frames
    normal = normal_of(frames[0])
    slice_step_mm = slices.grid.spacing_mm[0]
    tolerance_mm = _tolerance(slice_step_mm)
    slice_heights_mm = heights_of(frames, normal)
    sentences: list[str] = []
    is_overlap = np.zeros(slice_labels.shape, bool)
    region_contours = _contours_of_regions(file.dataset)
    # In the order of `values`: a later structure replaces an earlier one.
    for number, value in values.items():
        name = shown(file.names[number])
        contours, num_open = _closed_contours(region_contours.get(number, []))
        if num_open:
            sentences.append(f"{name}: {num_open} points and open lines were left out")
        if not contours:
            sentences.append(f"{name}: it has no closed contours")
            continue
        ranges_mm = _height_ranges(contours, normal)
        extents_mm = np.ptp(ranges_mm, axis=1)  # along the normal
        # A contour in the plane of a slice has the extent 0. An oblique one is accepted if it
        # extends no farther than the distance of slices. The comparison is negated, so that NaN is
        # refused.
        if not extents_mm.max() <= slice_step_mm + tolerance_mm:
            raise UserError(
                f"{file.path}: expected contours in the planes of the slices of {slices.path}, but "
                f"those of {name} lie across them; export them again on this series."
            )
        contour_heights_mm = ranges_mm.mean(axis=1)
        distance_mm = slice_step_mm
        # Oblique contours of one plane are at several heights, which do not tell the distance.
        if extents_mm.max() <= SAME_POSITION_MM:
            distance_mm = _usual_distance(contour_heights_mm, slice_step_mm)
        reach_mm = distance_mm / 2 + tolerance_mm
        # (slices, contours)
        is_on_slice = _nearest_contours(
            contour_heights_mm, slice_heights_mm, reach_mm, tolerance_mm
        )
        num_lost = np.count_nonzero(~is_on_slice.any(axis=0))
        if num_lost:
            sentences.append(
                f"{name}: {num_lost} of {len(contours)} contours are beyond the slices or between "
                "them"
            )
        slices_with_contours = np.flatnonzero(is_on_slice.any(axis=1))
        num_pixels = 0
        for index in slices_with_contours:
            frame = frames[index]
            polygons = []
            for contour_index in np.flatnonzero(is_on_slice[index]):
                polygons.append(pixels_of(frame, contours[contour_index]))
            mask = fill(polygons, frame.pixels.shape)
            num_pixels += int(np.count_nonzero(mask))
            _paint(slice_labels[index], is_overlap[index], mask, value)
        if slices_with_contours.size:
            sentences += _region_warnings(name, slices_with_contours, num_pixels)
    num_overlaps = int(np.count_nonzero(is_overlap))
    return [*sentences, *_overlap_warnings(file, num_overlaps, "regions")]


def _region_warnings(name: str, slices_with_contours: np.ndarray, num_pixels: int) -> Iterator[str]:
    """Warn of a region of interest without pixels, or without contours on slices in between.

    Args:
        name: Its name.
        slices_with_contours: Indices of the slices with a contour, ascending, not empty.
        num_pixels: Number of pixels within the contours.
    """
    if num_pixels == 0:
        yield f"{name}: its contours enclose no pixel of the slices"
    num_spanned = int(np.ptp(slices_with_contours)) + 1  # from the first to the last
    num_gaps = num_spanned - slices_with_contours.size
    if num_gaps:
        yield f"{name}: {num_gaps} slices between its contours have no contour"


def _contours_of_regions(dataset: Dataset) -> dict[int, list[Dataset]]:
    """Collect the contours of an RTSTRUCT by the number of their region of interest."""
    contours: dict[int, list[Dataset]] = {}
    # Some programs store the contours of one region of interest in several items.
    for item in dataset.get("ROIContourSequence") or []:
        number = int(item.ReferencedROINumber)
        contours.setdefault(number, []).extend(item.get("ContourSequence") or [])
    return contours


def _closed_contours(contours: list[Dataset]) -> tuple[list[np.ndarray], int]:
    """Read the closed contours of a region of interest.

    Returns:
        LPS points (N, 3) in mm of each closed contour, and the number of other contours: points and
        lines, such as a closed contour of two points.
    """
    # Each contour once: by the even-odd rule, a contour that is stored twice would enclose nothing.
    unique_points: dict[bytes, np.ndarray] = {}
    num_open = 0
    for contour in contours:
        points = _closed_points(contour)
        if points is None:
            num_open += 1
        else:
            unique_points[points.tobytes()] = points
    return list(unique_points.values()), num_open


def _closed_points(contour: Dataset) -> np.ndarray | None:
    """Read the LPS points (N, 3) in mm of a closed contour; None for points and lines."""
    if contour.get("ContourGeometricType") not in CLOSED:
        return None
    points = _points(contour)
    if len(points) < 3:
        return None
    return points


def _height_ranges(contours: list[np.ndarray], normal: np.ndarray) -> np.ndarray:
    """Find the lowest and the highest position (N, 2) in mm of N contours along a normal."""
    ranges_mm = []
    for points in contours:
        heights_mm = points @ normal
        ranges_mm.append((heights_mm.min(), heights_mm.max()))
    return np.array(ranges_mm)


def _usual_distance(contour_heights_mm: np.ndarray, slice_step_mm: float) -> float:
    """Find the usual distance of the planes of contours in mm, at most that of the slices.

    Args:
        contour_heights_mm: Positions of the contours along the normal.
        slice_step_mm: Distance of the slices, which is the result for a single plane.
    """
    steps_mm = np.diff(np.sort(contour_heights_mm))
    steps_mm = steps_mm[steps_mm > SAME_PLANE * slice_step_mm]
    if steps_mm.size == 0:
        return slice_step_mm
    # The upper quartile: up to three contours of a plane may differ, and a few steps are gaps.
    usual_mm = float(np.quantile(steps_mm, 0.75, method="lower"))
    return min(slice_step_mm, usual_mm)


def _nearest_contours(
    contour_heights_mm: np.ndarray,
    slice_heights_mm: np.ndarray,
    reach_mm: float,
    tolerance_mm: float,
) -> np.ndarray:
    """Find the contours in the plane nearest to each slice.

    Args:
        contour_heights_mm: Positions of the contours along the normal.
        slice_heights_mm: Positions of the slices.
        reach_mm: Largest distance of a contour from its slice.
        tolerance_mm: Contours of one plane may differ by this much: rounding of their decimals.

    Returns:
        Boolean (slices, contours).
    """
    distances_mm = np.abs(contour_heights_mm - slice_heights_mm[:, None])
    limits_mm = distances_mm.min(axis=1, keepdims=True) + tolerance_mm
    is_near = distances_mm <= np.minimum(reach_mm, limits_mm)
    # Of two planes at the same distance the upper one counts: by the even-odd rule, the contours of
    # both would cancel each other.
    highest_mm = np.where(is_near, contour_heights_mm, -np.inf).max(axis=1, keepdims=True)
    return is_near & (contour_heights_mm >= highest_mm - 2 * tolerance_mm)


def _points(contour: Dataset) -> np.ndarray:
    """Read the LPS points (N, 3) of a contour in mm; some programs store contours without any."""
    element = contour.get_item("ContourData")
    if element is None or not element.value:
        return np.empty((0, 3))
    value = element.value
    # `get_item` gives the bytes as they are stored: pydicom would make an object of each number.
    if isinstance(value, bytes):
        value = value.split(b"\\")
    return np.array(value, dtype=float).reshape(-1, 3)
