"""Reader of labels in DICOM: segments of a SEG and contours of an RTSTRUCT, moved onto the grid of a series by their positions."""

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset, FileDataset, config, dcmread
from pydicom.uid import RTStructureSetStorage, SegmentationStorage

from medseg.errors import UserError, first_line, require
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

CLOSED = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")
"""Contours that enclose an area; points and open lines do not."""


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
        require(
            bool(kind),
            f"{path}: expected labels in a DICOM SEG or RTSTRUCT, got {plain(str(dataset.get('Modality') or 'another object'))}; give "
            "another file.",
        )
        if kind == "SEG":
            # Segment 0 is the background of a label map.
            pairs = [
                (one.SegmentNumber, one.get("SegmentLabel"))
                for one in dataset.SegmentSequence
                if one.SegmentNumber
            ]
            series = [
                one.SeriesInstanceUID for one in dataset.get("ReferencedSeriesSequence") or []
            ]
        else:
            pairs = [
                (one.ROINumber, one.get("ROIName"))
                for one in dataset.get("StructureSetROISequence") or []
            ]
            series = [
                one.SeriesInstanceUID
                for space in dataset.get("ReferencedFrameOfReferenceSequence") or []
                for study in space.get("RTReferencedStudySequence") or []
                for one in study.get("RTReferencedSeriesSequence") or []
            ]
        names = _names(path, kind, pairs, _filled_numbers(dataset, kind))
        return LabelFile(path, kind, names, tuple(dict.fromkeys(map(str, series))), dataset)


def _names(
    path: Path, kind: str, pairs: Sequence[tuple[Any, Any]], filled: Collection[int]
) -> dict[int, str]:
    """Name the structures of a file by their numbers; one without a name, or that the file does not list, by its number.

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
    for stored_number, stored in pairs:
        number, name = int(stored_number), str(stored or "") or f"{unnamed} {stored_number}"
        if number in names:
            raise UserError(
                f"{path}: the structures {shown(names[number])} and {shown(name)} of the {kind} have the number {number}; export it again."
            )
        names[number] = name
    for number in sorted(set(filled) - set(names)):
        names[number] = f"{unnamed} {number}"
    return names


def _filled_numbers(dataset: Dataset, kind: str) -> set[int]:
    """Find the numbers of the structures that have a frame (SEG) or a contour (RTSTRUCT); none where only the pixels tell."""
    if kind == "RTSTRUCT":
        items = dataset.get("ROIContourSequence") or []
        return {int(item.ReferencedROINumber) for item in items if item.get("ContourSequence")}
    if dataset.get("SegmentationType") == "LABELMAP":
        return set()
    shared = list(dataset.get("SharedFunctionalGroupsSequence") or [])[:1]
    places = [
        (group, *shared, dataset) for group in dataset.get("PerFrameFunctionalGroupsSequence") or []
    ]
    numbers = (field_of(place, "ReferencedSegmentNumber") for place in places)
    return {int(number) for number in numbers if number}


def empty_structures(file: LabelFile) -> list[str]:
    """List the structures of a file that have no frame (SEG) or no closed contour (RTSTRUCT)."""
    if file.dataset.get("SegmentationType") == "LABELMAP":
        return []  # only the pixels tell
    with _explained(file.path):
        is_contoured = file.kind == "RTSTRUCT"
        filled = (
            _enclosing_numbers(file.dataset)
            if is_contoured
            else _filled_numbers(file.dataset, file.kind)
        )
    return [name for number, name in file.names.items() if number not in filled]


def _enclosing_numbers(dataset: Dataset) -> set[int]:
    """Find the regions of interest of an RTSTRUCT that enclose an area; points and open lines do not."""
    numbers = set()
    for item in dataset.get("ROIContourSequence") or []:
        for contour in item.get("ContourSequence") or []:
            is_closed = contour.get("ContourGeometricType") in CLOSED
            if is_closed and len(_points(contour)) > 2:
                numbers.add(int(item.ReferencedROINumber))
                break
    return numbers


def read_label_file(
    file: LabelFile, slices: SourceSlices, values: dict[int, int], threshold: float = 0.5
) -> Volume:
    """Read segments or regions of interest onto the grid of a series.

    Args:
        file: SEG or RTSTRUCT of the series, or of another series in the same frame of reference.
        slices: The series.
        values: Number of a segment or region of interest to its label value, each > 0; several may
            share a value. Where they overlap, the last one is kept.
        threshold: Least share or probability, (0, 1], of a pixel of a FRACTIONAL segment.

    Returns:
        Label values (D, H, W) on `slices.grid`, with warnings of what was left out.

    Raises:
        UserError: If the file is of another series and frame of reference, or the frames or
            contours have no position among the slices.
        ValueError: If a number is not in the file.
    """
    if unknown := set(values) - set(file.names):
        raise ValueError(f"{file.path} has no structures {sorted(unknown)}")
    with _explained(file.path):
        source = dcmread(
            slices.frames[0].path,
            force=True,
            stop_before_pixels=True,
            specific_tags=["FrameOfReferenceUID"],
        )
        references = [file.dataset, *(file.dataset.get("ReferencedFrameOfReferenceSequence") or [])]
        own, others = (
            source.get("FrameOfReferenceUID"),
            {one.get("FrameOfReferenceUID") for one in references} - {None, ""},
        )
        require(
            # Some programs that remove identities give images and labels different frames of
            # reference.
            not own
            or not others
            or own in others
            or slices.frames[0].series.uid in file.series_uids,
            f"{file.path}: expected labels in the frame of reference of {slices.path}, but they are in another one; give the series that "
            "they were drawn on.",
        )
        on_slices = np.zeros(
            (len(slices.frames), *slices.frames[0].pixels.shape),
            np.min_scalar_type(max(values.values(), default=0)),
        )
        if file.kind == "SEG":
            sentences = _read_segments(file, slices, values, threshold, on_slices)
        else:
            sentences = _read_contours(file, slices, values, on_slices)
    return Volume(
        labels_on_grid(on_slices, slices),
        slices.grid,
        findings=tuple(warnings_of("reading", sentences)),
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
            f"{path}: the DICOM file cannot be read ({plain(first_line(error))}); it is damaged, copy or export it again."
        ) from error


def _read_segments(
    file: LabelFile,
    slices: SourceSlices,
    values: dict[int, int],
    threshold: float,
    on_slices: np.ndarray,
) -> list[str]:
    """Label the pixels of slices by the frames of a SEG, which may have another orientation, size and spacing; return warnings.

    A plane of frames serves the slices within half the distance of planes or of slices, whichever
    is larger.
    """
    dataset, step_mm = file.dataset, slices.grid.spacing_mm[0]
    syntax = dataset.file_meta.TransferSyntaxUID
    require(
        dataset.BitsAllocated != 1 or not syntax.is_encapsulated,
        f"{file.path}: expected a BINARY SEG without compression, but it is encoded as {plain(syntax.name)}; export it without.",
    )
    shared = list(dataset.get("SharedFunctionalGroupsSequence") or [])[:1]
    places = [
        (group, *shared, dataset) for group in dataset.get("PerFrameFunctionalGroupsSequence") or []
    ]
    fields = {"ImagePositionPatient": 3, "ImageOrientationPatient": 6, "PixelSpacing": 2}
    found = [
        [read_numbers(one, keyword, count) for one in places] for keyword, count in fields.items()
    ]
    require(
        bool(places) and all(None not in numbers for numbers in found),
        f"{file.path}: expected a position, an orientation and a spacing for each frame of the SEG; export it again.",
    )
    positions, orientations, spacings_mm = map(np.array, found)
    axes = orientations[0].reshape(2, 3)
    require(
        bool(
            np.ptp(orientations, axis=0).max() <= DIRECTION_TOLERANCE
            and np.ptp(spacings_mm, axis=0).max() <= SAME_POSITION_MM
        ),
        f"{file.path}: expected a SEG of parallel frames with one spacing; export it again.",
    )
    heights_mm = positions @ np.cross(*axes)
    # Frames of several segments share a plane.
    order = np.argsort(heights_mm, kind="stable")
    starts = np.diff(heights_mm[order], prepend=-np.inf) > SAME_POSITION_MM
    planes = np.empty(len(order), int)
    planes[order] = np.cumsum(starts) - 1
    firsts = order[starts]
    labels, num_overlaps = _label_planes(dataset, places, planes, values, threshold)
    declared_mm = (read_numbers(places[0], "SpacingBetweenSlices", 1) or (step_mm,))[0]
    reach_mm = (
        max(step_mm, min([abs(declared_mm), *np.diff(heights_mm[firsts])])) / 2 + SAME_POSITION_MM
    )
    for index, frame in enumerate(slices.frames):
        on_slices[index] = _at_slice(
            frame, labels, positions[firsts], axes, spacings_mm[0], reach_mm
        )
    return (
        [f"{num_overlaps} pixels of {file.path.name} are in several segments; the last one is kept"]
        if num_overlaps
        else []
    )


def _label_planes(
    dataset: Dataset,
    places: list[tuple[Dataset, ...]],
    planes: np.ndarray,
    values: dict[int, int],
    threshold: float,
) -> tuple[np.ndarray, int]:
    """Decode the frames of a SEG.

    Args:
        dataset: The SEG.
        places: Groups of each frame.
        planes: Plane of each frame.
        values: As for `read_label_file`.
        threshold: As for `read_label_file`.

    Returns:
        Label values (planes, rows, columns), and how many pixels lay in several segments.
    """
    labels = np.zeros(
        (planes.max() + 1, dataset.Rows, dataset.Columns),
        np.min_scalar_type(max(values.values(), default=0)),
    )
    if dataset.SegmentationType == "LABELMAP":
        # An undescribed segment cannot be chosen, and its pixels would be lost.
        described = {int(one.SegmentNumber) for one in dataset.SegmentSequence} | {
            0,
            dataset.get("PixelPaddingValue", 0),
        }
        table = np.zeros(2**dataset.BitsAllocated, labels.dtype)
        table[list(values)] = list(values.values())
        for index, plane in enumerate(planes.tolist()):
            numbers_there = _frame_pixels(dataset, index)
            if unknown := set(np.unique(numbers_there).tolist()) - described:
                raise UserError(
                    f"{dataset.filename}: the pixels of the SEG hold the segment {min(unknown)}, which it does not describe; export it again."
                )
            labels[plane] = table[numbers_there]
        return labels, 0
    numbers = np.array([field_of(one, "ReferencedSegmentNumber") for one in places])
    if None in numbers:
        raise ValueError("a frame names no segment")
    least = (
        threshold * dataset.MaximumFractionalValue
        if dataset.SegmentationType == "FRACTIONAL"
        else 1
    )
    num_overlaps = 0
    for number, value in values.items():
        for index in np.flatnonzero(numbers == number).tolist():
            plane, mask = labels[planes[index]], _frame_pixels(dataset, index) >= least
            num_overlaps += int(np.count_nonzero(mask & (plane != 0) & (plane != value)))
            plane[mask] = value
    return labels, num_overlaps


def _frame_pixels(dataset: Dataset, index: int) -> np.ndarray:
    """Decode the stored values (rows, columns) of one frame."""
    syntax, bits, shape = (
        dataset.file_meta.TransferSyntaxUID,
        dataset.BitsAllocated,
        (dataset.Rows, dataset.Columns),
    )
    if bits != 1:
        return decode(
            dataset, PixelFormat(shape, syntax, None, np.dtype(f"<u{bits // 8}"), bits, ()), index
        )
    # Not by pydicom 3.0: it takes frames to begin at a whole byte.
    start = index * shape[0] * shape[1]
    stop = start + shape[0] * shape[1]
    packed = np.frombuffer(dataset.PixelData, np.uint8)[start // 8 : -(-stop // 8)]
    return np.unpackbits(packed, bitorder="little")[start % 8 :][: stop - start].reshape(shape)


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
        """Project the pixels on a direction, in mm: (rows or 1, columns or 1), which is one number where the slice is across it."""
        by_column, by_row = frame.axes @ direction * frame.spacing_mm[::-1]
        result = np.full((1, 1), np.dot(frame.position_xyz_mm, direction))
        for step_mm, places in ((by_row, rows[:, None]), (by_column, columns[None])):
            if abs(step_mm) * places.size > SAME_POSITION_MM:
                result = result + step_mm * places
        return result

    normal = np.cross(*axes)
    heights_mm, plane_heights_mm = along(normal), corners @ normal
    # Of two planes at the same distance the upper one, also where rounding noise makes the lower
    # one nearer.
    planes = np.searchsorted((plane_heights_mm[1:] + plane_heights_mm[:-1]) / 2 - 1e-6, heights_mm)
    y, x = (
        nearest((along(axis) - (corners @ axis)[planes]) / step_mm)
        for axis, step_mm in zip(axes[::-1], spacing_mm, strict=True)
    )
    height, width = labels.shape[1:]
    inside = (
        (np.abs(plane_heights_mm[planes] - heights_mm) <= reach_mm)
        & (y >= 0)
        & (y < height)
        & (x >= 0)
        & (x < width)
    )
    return np.where(inside, labels[planes, y.clip(0, height - 1), x.clip(0, width - 1)], 0)


def _read_contours(
    file: LabelFile, slices: SourceSlices, values: dict[int, int], on_slices: np.ndarray
) -> list[str]:
    """Label the pixels of slices inside the contours of an RTSTRUCT; return warnings.

    A slice takes the contours of the nearest plane, at most half the distance of slices away.
    Contours of a region of interest within each other are holes.
    """
    frames = slices.frames
    normal, reach_mm = normal_of(frames[0]), slices.grid.spacing_mm[0] / 2 + SAME_POSITION_MM
    slice_heights_mm = heights_of(frames, normal)
    # Some programs store the contours of one region of interest in several items.
    items: dict[int, list[Dataset]] = {}
    for item in file.dataset.get("ROIContourSequence") or []:
        items.setdefault(int(item.ReferencedROINumber), []).extend(
            item.get("ContourSequence") or []
        )
    sentences, num_overlaps = [], 0
    for number, value in values.items():
        name = shown(file.names[number])
        found = items.get(number, [])
        closed = [one for one in found if one.get("ContourGeometricType") in CLOSED]
        if len(closed) < len(found):
            sentences.append(
                f"{name}: {len(found) - len(closed)} points and open lines were left out"
            )
        # A contour that is stored twice would cut itself out.
        contours = list(
            {
                points.tobytes(): points for points in map(_points, closed) if len(points) > 2
            }.values()
        )
        if not contours:
            sentences.append(f"{name}: it has no closed contours")
            continue
        spans_mm = np.array(
            [(heights.min(), heights.max()) for heights in (points @ normal for points in contours)]
        )
        require(
            bool(np.ptp(spans_mm, axis=1).max() <= 2 * reach_mm),
            f"{file.path}: expected contours in the planes of the slices of {slices.path}, but those of {name} lie across them; export "
            "them again on this series.",
        )
        distances_mm = np.abs(spans_mm.mean(axis=1) - slice_heights_mm[:, None])
        near = distances_mm <= np.minimum(
            reach_mm, distances_mm.min(axis=1, keepdims=True) + JITTER_TOLERANCE_MM
        )
        if lost := np.count_nonzero(~near.any(axis=0)):
            sentences.append(
                f"{name}: {lost} of {len(contours)} contours are beyond the slices or between them"
            )
        for index in np.flatnonzero(near.any(axis=1)):
            polygons = [
                pixels_of(frames[index], contours[one]) for one in np.flatnonzero(near[index])
            ]
            mask, labels = fill(polygons, frames[index].pixels.shape), on_slices[index]
            num_overlaps += int(np.count_nonzero(mask & (labels != 0) & (labels != value)))
            labels[mask] = value
        filled = np.flatnonzero(near.any(axis=1))
        if filled.size and (num_gaps := int(np.ptp(filled)) + 1 - filled.size):
            sentences.append(f"{name}: {num_gaps} slices between its contours have no contour")
    return [
        *sentences,
        *(
            [
                f"{num_overlaps} pixels of {file.path.name} are in several regions; the last one is kept"
            ]
            if num_overlaps
            else []
        ),
    ]


def _points(contour: Dataset) -> np.ndarray:
    """Read the LPS points (N, 3) of a contour in mm."""
    value = contour.get_item("ContourData").value
    # pydicom would make an object of each number.
    numbers = np.array(value.split(b"\\") if isinstance(value, bytes) else value, dtype=float)
    return numbers.reshape(-1, 3)
