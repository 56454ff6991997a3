"""Reader of labels in DICOM: segments of a SEG and contours of an RTSTRUCT.

They are moved onto the grid of a series by their positions.
"""

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
from medseg.io.dicom.frames import Frame, PixelFormat, field_of, plain, read_numbers
from medseg.io.dicom.pixels import decode
from medseg.io.dicom.read import JITTER_TOLERANCE_MM, SourceSlices
from medseg.io.dicom.stacks import SAME_POSITION_MM, heights_of, normal_of
from medseg.io.dicom.structures import labels_on_grid, nearest, pixels_of
from medseg.io.volume import Volume, shown

LABEL_MAP_STORAGE = "1.2.840.10008.5.1.4.1.1.66.7"
KINDS = {SegmentationStorage: "SEG", LABEL_MAP_STORAGE: "SEG", RTStructureSetStorage: "RTSTRUCT"}
# Least share or probability of a pixel of a FRACTIONAL segment that belongs to it.
LEAST_SHARE = 0.5

# Contours that enclose an area; points and open lines do not.
CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


@dataclass(frozen=True, eq=False)
class LabelFile:
    """A SEG or RTSTRUCT file whose pixels or contours have not been decoded.

    Attributes:
        path: The file.
        kind: `SEG` or `RTSTRUCT`.
        names: Number of each segment or region of interest (ROI) to its name, in the order of the
            file; names may repeat. One without a name is called after its number, as `ROI 3`.
        series_uids: Series Instance UIDs of the images that it refers to; empty where it names
            none.
        dataset: Its content.
    """

    path: Path
    kind: str
    names: dict[int, str]
    series_uids: tuple[str, ...]
    dataset: FileDataset


def open_label_file(path: Path) -> LabelFile:
    """Read which structures a SEG or RTSTRUCT file labels, and of which series.

    Raises:
        UserError: If it is neither, or cannot be read.
    """
    with _explained(path):
        dataset = dcmread(path, force=True)
        kind = KINDS.get(dataset.get("SOPClassUID"), "")
        if not kind:
            modality = plain(str(dataset.get("Modality") or "another object"))
            raise UserError(
                f"{path}: expected labels in a DICOM SEG or RTSTRUCT, got {modality}; "
                "give another file."
            )
        pairs = []
        if kind == "SEG":
            for segment in dataset.SegmentSequence:
                # Segment 0 is the background of a label map.
                if segment.SegmentNumber:
                    pairs.append((segment.SegmentNumber, segment.get("SegmentLabel")))
        else:
            for region in dataset.get("StructureSetROISequence") or []:
                pairs.append((region.ROINumber, region.get("ROIName")))
        names = _names(path, kind, pairs, _filled_numbers(dataset, kind))
        return LabelFile(path, kind, names, _series_uids(dataset), dataset)


def _series_uids(dataset: Dataset) -> tuple[str, ...]:
    """List the Series Instance UIDs of the images that a file refers to, each once."""
    # A SEG names the series itself, an RTSTRUCT below frame of reference and study.
    series = list(dataset.get("ReferencedSeriesSequence") or [])
    for space in dataset.get("ReferencedFrameOfReferenceSequence") or []:
        for study in space.get("RTReferencedStudySequence") or []:
            series += study.get("RTReferencedSeriesSequence") or []
    return tuple(dict.fromkeys(str(item.SeriesInstanceUID) for item in series))


def _names(
    path: Path, kind: str, pairs: Sequence[tuple[Any, Any]], filled: Collection[int]
) -> dict[int, str]:
    """Name the structures of a file by their numbers.

    One without a name, or that the file does not list, is called after its number.

    Args:
        path: File, for messages.
        kind: `SEG` or `RTSTRUCT`.
        pairs: Number and name of each structure that the file lists.
        filled: Numbers of the structures with frames or contours.

    Raises:
        UserError: If two structures have one number.
    """
    unnamed = "segment" if kind == "SEG" else "ROI"
    names: dict[int, str] = {}
    for stored_number, stored_name in pairs:
        number = int(stored_number)
        name = str(stored_name or "") or f"{unnamed} {stored_number}"
        if number in names:
            raise UserError(
                f"{path}: the structures {shown(names[number])} and {shown(name)} of the {kind} "
                f"have the number {number}; export it again."
            )
        names[number] = name
    for number in sorted(set(filled) - set(names)):
        names[number] = f"{unnamed} {number}"
    return names


def _filled_numbers(dataset: Dataset, kind: str) -> set[int]:
    """Find the numbers of the structures that have a frame (SEG) or a contour (RTSTRUCT).

    There are none where only the pixels tell.
    """
    if kind == "RTSTRUCT":
        items = dataset.get("ROIContourSequence") or []
        return {int(item.ReferencedROINumber) for item in items if item.get("ContourSequence")}
    if dataset.get("SegmentationType") == "LABELMAP":
        return set()
    places = _frame_places(dataset)
    numbers = (field_of(place, "ReferencedSegmentNumber") for place in places)
    return {int(number) for number in numbers if number}


def _frame_places(dataset: Dataset) -> list[tuple[Dataset, ...]]:
    """List for each frame of a SEG where its fields may be, as `field_of` takes it."""
    # At most one item, which holds for all frames.
    shared = list(dataset.get("SharedFunctionalGroupsSequence") or [])[:1]
    groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    return [(group, *shared, dataset) for group in groups]


def empty_structures(file: LabelFile) -> list[str]:
    """List the structures of a file that have no frame (SEG) or no closed contour (RTSTRUCT)."""
    if file.dataset.get("SegmentationType") == "LABELMAP":
        return []  # only the pixels tell
    with _explained(file.path):
        if file.kind == "RTSTRUCT":
            filled = _enclosing_numbers(file.dataset)
        else:
            filled = _filled_numbers(file.dataset, file.kind)
    return [name for number, name in file.names.items() if number not in filled]


def _enclosing_numbers(dataset: Dataset) -> set[int]:
    """Find the regions of an RTSTRUCT that enclose an area; points and lines do not."""
    numbers = set()
    for item in dataset.get("ROIContourSequence") or []:
        for contour in item.get("ContourSequence") or []:
            is_closed = contour.get("ContourGeometricType") in CLOSED
            if is_closed and len(_points(contour)) > 2:
                numbers.add(int(item.ReferencedROINumber))
                break
    return numbers


def read_label_file(file: LabelFile, slices: SourceSlices, values: dict[int, int]) -> Volume:
    """Read segments or regions of interest onto the grid of a series.

    Args:
        file: SEG or RTSTRUCT of the series, or of another series in the same frame of reference.
        slices: The series.
        values: Number of a segment or region of interest to its label value, each > 0; several may
            share a value. Where they overlap, the last one is kept.

    Returns:
        Label values (D, H, W) on `slices.grid`, with warnings of what was left out.

    Raises:
        UserError: If the file is of another series and frame of reference, or the frames or
            contours have no position among the slices.
        ValueError: If a number is not in the file.
    """
    unknown = set(values) - set(file.names)
    if unknown:
        raise ValueError(f"{file.path} has no structures {sorted(unknown)}")
    with _explained(file.path):
        _check_frame_of_reference(file, slices)
        shape = (len(slices.frames), *slices.frames[0].pixels.shape)
        on_slices = np.zeros(shape, _label_dtype(values))
        if file.kind == "SEG":
            sentences = _read_segments(file, slices, values, on_slices)
        else:
            sentences = _read_contours(file, slices, values, on_slices)
    labels = labels_on_grid(on_slices, slices)
    return Volume(labels, slices.grid, findings=tuple(warnings_of("reading", sentences)))


def _label_dtype(values: dict[int, int]) -> np.dtype[Any]:
    """Choose the smallest type that holds some label values and 0."""
    return np.min_scalar_type(max(values.values(), default=0))


def _check_frame_of_reference(file: LabelFile, slices: SourceSlices) -> None:
    """Refuse labels whose positions have another origin than those of a series.

    Raises:
        UserError: If both name their frame of reference, and the labels do not name the series.
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
    references = [file.dataset, *(file.dataset.get("ReferencedFrameOfReferenceSequence") or [])]
    label_uids = {item.get("FrameOfReferenceUID") for item in references} - {None, ""}
    if source_uid and label_uids and source_uid not in label_uids:
        raise UserError(
            f"{file.path}: expected labels in the frame of reference of {slices.path}, but they "
            "are in another one; give the series that they were drawn on."
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the exceptions that a damaged file causes into one sentence."""
    try:
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"{path}: the DICOM file cannot be read ({plain(first_line(error))}); "
            "it is damaged, copy or export it again."
        ) from error


def _read_segments(
    file: LabelFile,
    slices: SourceSlices,
    values: dict[int, int],
    on_slices: np.ndarray,
) -> list[str]:
    """Label the pixels of slices by the frames of a SEG; return warnings.

    The frames may have another orientation, size and spacing. A plane of frames serves the slices
    within half the distance of planes or of slices, whichever is larger.
    """
    dataset = file.dataset
    syntax = dataset.file_meta.TransferSyntaxUID
    if dataset.BitsAllocated == 1 and syntax.is_encapsulated:
        raise UserError(
            f"{file.path}: expected a BINARY SEG without compression, but it is encoded as "
            f"{plain(syntax.name)}; export it without."
        )
    places = _frame_places(dataset)
    positions, axes, spacing_mm = _frame_geometry(file.path, places)
    heights_mm = positions @ np.cross(*axes)
    # Frames of several segments share a plane.
    order = np.argsort(heights_mm, kind="stable")
    starts = np.diff(heights_mm[order], prepend=-np.inf) > SAME_POSITION_MM
    planes = np.empty(len(order), int)
    planes[order] = np.cumsum(starts) - 1
    firsts = order[starts]
    labels, num_overlaps = _label_planes(dataset, places, planes, values)
    step_mm = slices.grid.spacing_mm[0]
    declared_mm = read_numbers(places[0], "SpacingBetweenSlices", 1) or (step_mm,)
    # Where segments leave out planes, the declared distance is smaller than those between them.
    plane_step_mm = min([abs(declared_mm[0]), *np.diff(heights_mm[firsts])])
    reach_mm = max(step_mm, plane_step_mm) / 2 + SAME_POSITION_MM
    for index, frame in enumerate(slices.frames):
        on_slices[index] = _at_slice(frame, labels, positions[firsts], axes, spacing_mm, reach_mm)
    return _overlap_warnings(file, num_overlaps, "segments")


def _overlap_warnings(file: LabelFile, num_overlaps: int, structures: str) -> list[str]:
    """Warn of pixels in several structures."""
    if num_overlaps == 0:
        return []
    return [
        f"{num_overlaps} pixels of {file.path.name} are in several {structures}; "
        "the last one is kept"
    ]


def _frame_geometry(
    path: Path, places: list[tuple[Dataset, ...]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read where the frames of a SEG lie.

    Args:
        path: File, for messages.
        places: The groups of each frame, see `field_of`.

    Returns:
        LPS points (frames, 3) of the first pixels; LPS unit vectors (2, 3) along a row and along a
        column; distance of rows, then of columns, in mm.

    Raises:
        UserError: If a frame lacks these, or the frames are not parallel with one spacing.
    """
    positions = [read_numbers(place, "ImagePositionPatient", 3) for place in places]
    orientations = [read_numbers(place, "ImageOrientationPatient", 6) for place in places]
    spacings_mm = [read_numbers(place, "PixelSpacing", 2) for place in places]
    if not places or None in (*positions, *orientations, *spacings_mm):
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
    places: list[tuple[Dataset, ...]],
    planes: np.ndarray,
    values: dict[int, int],
) -> tuple[np.ndarray, int]:
    """Decode the frames of a SEG.

    Args:
        dataset: The SEG.
        places: Groups of each frame.
        planes: Plane of each frame.
        values: As for `read_label_file`.

    Returns:
        Label values (planes, rows, columns), and how many pixels lay in several segments.
    """
    labels = np.zeros((planes.max() + 1, dataset.Rows, dataset.Columns), _label_dtype(values))
    if dataset.SegmentationType == "LABELMAP":
        _copy_label_map(dataset, planes, values, labels)
        return labels, 0
    numbers = np.array([field_of(place, "ReferencedSegmentNumber") for place in places])
    # Comparisons with None are False: the frame would be left out without a word.
    if None in numbers:
        raise ValueError("a frame names no segment")
    least = 1
    if dataset.SegmentationType == "FRACTIONAL":
        least = LEAST_SHARE * dataset.MaximumFractionalValue
    num_overlaps = 0
    for number, value in values.items():
        for index in np.flatnonzero(numbers == number).tolist():
            mask = _frame_pixels(dataset, index) >= least
            num_overlaps += _paint(labels[planes[index]], mask, value)
    return labels, num_overlaps


def _paint(labels: np.ndarray, mask: np.ndarray, value: int) -> int:
    """Give the pixels of a mask a label value; count those that had that of another structure."""
    num_overlaps = np.count_nonzero(mask & (labels != 0) & (labels != value))
    labels[mask] = value
    return int(num_overlaps)


def _copy_label_map(
    dataset: Dataset, planes: np.ndarray, values: dict[int, int], labels: np.ndarray
) -> None:
    """Copy the frames of a SEG whose pixels hold segment numbers.

    Args:
        dataset: The SEG.
        planes: Plane of each frame.
        values: As for `read_label_file`.
        labels: Label values (planes, rows, columns), which are set.

    Raises:
        UserError: If the pixels hold a segment that the file does not describe: it cannot be
            chosen, and its pixels would be lost.
    """
    described = {int(segment.SegmentNumber) for segment in dataset.SegmentSequence}
    described |= {0, dataset.get("PixelPaddingValue", 0)}
    # One entry for each number that a pixel can hold; segments that are not asked for stay 0.
    table = np.zeros(2**dataset.BitsAllocated, labels.dtype)
    table[list(values)] = list(values.values())
    for index, plane in enumerate(planes.tolist()):
        numbers = _frame_pixels(dataset, index)
        unknown = set(np.unique(numbers).tolist()) - described
        if unknown:
            raise UserError(
                f"{dataset.filename}: the pixels of the SEG hold the segment {min(unknown)}, "
                "which it does not describe; export it again."
            )
        labels[plane] = table[numbers]


def _frame_pixels(dataset: Dataset, index: int) -> np.ndarray:
    """Decode the stored values (rows, columns) of one frame."""
    shape = (dataset.Rows, dataset.Columns)
    bits = dataset.BitsAllocated
    if bits != 1:
        syntax = dataset.file_meta.TransferSyntaxUID
        pixels = PixelFormat(shape, syntax, None, np.dtype(f"<u{bits // 8}"), bits, ())
        return decode(dataset, pixels, index)
    # Not by pydicom 3.0: it takes frames to begin at a whole byte.
    num_pixels = shape[0] * shape[1]
    first_bit = index * num_pixels
    stop_bit = first_bit + num_pixels
    first_byte = first_bit // 8
    stop_byte = -(-stop_bit // 8)  # rounded up
    packed = np.frombuffer(dataset.PixelData, np.uint8)[first_byte:stop_byte]
    # Bits of the frame before may come first.
    num_before = first_bit - 8 * first_byte
    values = np.unpackbits(packed, bitorder="little")
    return values[num_before : num_before + num_pixels].reshape(shape)


def _at_slice(
    frame: Frame,
    labels: np.ndarray,
    corners: np.ndarray,
    axes: np.ndarray,
    spacing_mm: np.ndarray,
    reach_mm: float,
) -> np.ndarray:
    """Look up the labels at the pixels of a slice.

    Args:
        frame: The slice.
        labels: Label values (planes, rows, columns).
        corners: LPS points (planes, 3) of the first pixel of each plane, sorted along the normal.
        axes: LPS unit vectors (2, 3) along a row and along a column of the planes.
        spacing_mm: Distance of rows, then of columns of the planes.
        reach_mm: Largest distance of a pixel from its plane.
    """
    rows, columns = (np.arange(size) for size in frame.pixels.shape)

    def along(direction: np.ndarray) -> np.ndarray:
        """Project the pixels on a direction, in mm: (rows or 1, columns or 1).

        An axis of the slice across the direction has one number for all its pixels.
        """
        by_column, by_row = frame.axes @ direction * frame.spacing_mm[::-1]
        result = np.full((1, 1), np.dot(frame.position_xyz_mm, direction))
        for step_mm, places in ((by_row, rows[:, None]), (by_column, columns[None])):
            if abs(step_mm) * places.size > SAME_POSITION_MM:
                result = result + step_mm * places
        return result

    normal = np.cross(*axes)
    heights_mm = along(normal)
    plane_heights_mm = corners @ normal
    # Of two planes at the same distance the upper one, also where rounding noise makes the lower
    # one nearer.
    middles_mm = (plane_heights_mm[1:] + plane_heights_mm[:-1]) / 2
    planes = np.searchsorted(middles_mm - 1e-6, heights_mm)
    along_row, along_column = axes
    row_mm, column_mm = spacing_mm
    y = nearest((along(along_column) - (corners @ along_column)[planes]) / row_mm)
    x = nearest((along(along_row) - (corners @ along_row)[planes]) / column_mm)
    height, width = labels.shape[1:]
    is_near = np.abs(plane_heights_mm[planes] - heights_mm) <= reach_mm
    has_y = (y >= 0) & (y < height)
    has_x = (x >= 0) & (x < width)
    # Clipped, so that all positions can be looked up; those outside are dropped below.
    nearest_labels = labels[planes, y.clip(0, height - 1), x.clip(0, width - 1)]
    return np.where(is_near & has_y & has_x, nearest_labels, 0)


def _read_contours(
    file: LabelFile, slices: SourceSlices, values: dict[int, int], on_slices: np.ndarray
) -> list[str]:
    """Label the pixels of slices inside the contours of an RTSTRUCT; return warnings.

    A slice takes the contours of the nearest plane, at most half the distance of slices away.
    Contours of a region of interest within each other are holes.
    """
    frames = slices.frames
    normal = normal_of(frames[0])
    reach_mm = slices.grid.spacing_mm[0] / 2 + SAME_POSITION_MM
    slice_heights_mm = heights_of(frames, normal)
    sentences: list[str] = []
    num_overlaps = 0
    items = _contours_of_regions(file.dataset)
    for number, value in values.items():
        name = shown(file.names[number])
        contours, num_open = _closed_contours(items.get(number, []))
        if num_open:
            sentences.append(f"{name}: {num_open} points and open lines were left out")
        if not contours:
            sentences.append(f"{name}: it has no closed contours")
            continue
        heights_mm = [points @ normal for points in contours]
        spans_mm = np.array([(heights.min(), heights.max()) for heights in heights_mm])
        if not np.ptp(spans_mm, axis=1).max() <= 2 * reach_mm:  # NaN lies nowhere
            raise UserError(
                f"{file.path}: expected contours in the planes of the slices of {slices.path}, but "
                f"those of {name} lie across them; export them again on this series."
            )
        is_on_slice = _nearest_contours(spans_mm.mean(axis=1), slice_heights_mm, reach_mm)
        num_lost = np.count_nonzero(~is_on_slice.any(axis=0))
        if num_lost:
            sentences.append(
                f"{name}: {num_lost} of {len(contours)} contours are beyond the slices or between "
                "them"
            )
        filled = np.flatnonzero(is_on_slice.any(axis=1))
        for index in filled:
            frame = frames[index]
            polygons = []
            for contour in np.flatnonzero(is_on_slice[index]):
                polygons.append(pixels_of(frame, contours[contour]))
            mask = fill(polygons, frame.pixels.shape)
            num_overlaps += _paint(on_slices[index], mask, value)
        num_gaps = 0
        if filled.size:
            num_gaps = int(np.ptp(filled)) + 1 - filled.size
        if num_gaps:
            sentences.append(f"{name}: {num_gaps} slices between its contours have no contour")
    return [*sentences, *_overlap_warnings(file, num_overlaps, "regions")]


def _contours_of_regions(dataset: Dataset) -> dict[int, list[Dataset]]:
    """Collect the contours of an RTSTRUCT by the number of their region of interest."""
    contours: dict[int, list[Dataset]] = {}
    # Some programs store the contours of one region of interest in several items.
    for item in dataset.get("ROIContourSequence") or []:
        of_region = contours.setdefault(int(item.ReferencedROINumber), [])
        of_region.extend(item.get("ContourSequence") or [])
    return contours


def _closed_contours(contours: list[Dataset]) -> tuple[list[np.ndarray], int]:
    """Read the closed contours among those of a region of interest.

    Returns:
        Points (N, 3) in LPS of each, in mm; and how many are points or open lines.
    """
    closed = [contour for contour in contours if contour.get("ContourGeometricType") in CLOSED]
    # A contour that is stored twice would cut itself out.
    different: dict[bytes, np.ndarray] = {}
    for points in map(_points, closed):
        if len(points) > 2:
            different[points.tobytes()] = points
    return list(different.values()), len(contours) - len(closed)


def _nearest_contours(
    contour_heights_mm: np.ndarray, slice_heights_mm: np.ndarray, reach_mm: float
) -> np.ndarray:
    """Find the contours of the nearest plane to each slice.

    Args:
        contour_heights_mm: Positions of the contours along the normal.
        slice_heights_mm: Positions of the slices.
        reach_mm: Largest distance of a contour from its slice.

    Returns:
        Boolean (slices, contours).
    """
    distances_mm = np.abs(contour_heights_mm - slice_heights_mm[:, None])
    # The heights of one plane are rounded decimals.
    nearest_mm = distances_mm.min(axis=1, keepdims=True) + JITTER_TOLERANCE_MM
    return distances_mm <= np.minimum(reach_mm, nearest_mm)


def _points(contour: Dataset) -> np.ndarray:
    """Read the LPS points (N, 3) of a contour in mm."""
    value = contour.get_item("ContourData").value
    # The bytes as they are stored: pydicom would make an object of each number.
    if isinstance(value, bytes):
        value = value.split(b"\\")
    return np.array(value, dtype=float).reshape(-1, 3)
