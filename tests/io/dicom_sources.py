"""Source series of any orientation and kind, and SEG and RTSTRUCT readers without medseg."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from dicom_files import enhanced, save, save_slice
from io_volumes import make_hu
from matplotlib.path import Path as Polygon
from pydicom import Dataset, dcmread

SHAPE = (8, 9, 13)
STEP_MM = 2.5
KINDS = ("plain", "tilted", "gapped", "multi-frame")
SOURCE_FIELDS: dict[str, Any] = {
    "FrameOfReferenceUID": "1.2.3.9",
    "PatientName": "Müller^Änne",
    "PatientID": "P 1",
    "SpecificCharacterSet": "ISO_IR 100",
    "StudyDate": "20260102",
    "SeriesNumber": 4,
}
ORIENTATIONS = [
    np.eye(3)[:, list(order)] * signs
    for order in itertools.permutations(range(3))
    for signs in itertools.product((1.0, -1.0), repeat=3)
]
"""Columns: LPS directions along a row, along a column, and from slice to slice."""


def make_series(
    folder: Path,
    kind: str,
    direction: np.ndarray,
    shape: tuple[int, int, int] = SHAPE,
    **fields: Any,
) -> Path:
    """Write a series; the gapped one lacks its fourth slice."""
    row, column, along = np.asarray(direction).T
    drift_mm = 0.213 * STEP_MM * column if kind == "tilted" else 0.0
    positions = [
        np.array([-120.25, 33.5, -434.5]) + index * (STEP_MM * along + drift_mm)
        for index in range(shape[0])
    ]
    image_hu, fields = make_hu(shape), {**SOURCE_FIELDS, **fields}
    if kind == "multi-frame":
        stored = (image_hu + 1024).astype(np.uint16)
        save(
            enhanced(stored, positions, [(1, -1024)] * len(stored), (row, column), **fields),
            folder / "one.dcm",
        )
        return folder
    for index, position in enumerate(positions):
        if kind != "gapped" or index != 3:
            path = folder / f"{(index * 5) % shape[0]}.dcm"
            save_slice(
                path, image_hu[index], position, (row, column), InstanceNumber=index, **fields
            )
    return folder


def plane_points(dataset: Dataset, rows: int, columns: int) -> np.ndarray:
    """World points (rows, columns, 3) of the pixels of a slice with its fields at one level."""
    row, column = np.reshape(dataset.ImageOrientationPatient, (2, 3)).astype(float)
    y, x = np.indices((rows, columns))[..., None].astype(float)
    between_rows, between_columns = map(float, dataset.PixelSpacing)
    return np.asarray(
        np.array(dataset.ImagePositionPatient, float)
        + x * between_columns * row
        + y * between_rows * column
    )


def raw_segments(path: Path) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Number, mask and world points of each frame: BINARY from bytes, LABELMAP by pydicom."""
    dataset = dcmread(path)
    shape = int(dataset.NumberOfFrames), dataset.Rows, dataset.Columns
    is_binary = dataset.SegmentationType == "BINARY"
    values = (
        np.unpackbits(np.frombuffer(dataset.PixelData, np.uint8), bitorder="little")
        if is_binary
        else dataset.pixel_array.ravel()
    )
    shared = dataset.SharedFunctionalGroupsSequence[0]
    for values_of_frame, group in zip(
        values[: np.prod(shape)].reshape(shape),
        dataset.PerFrameFunctionalGroupsSequence,
        strict=True,
    ):
        plane = Dataset()
        plane.ImagePositionPatient = group.PlanePositionSequence[0].ImagePositionPatient
        plane.ImageOrientationPatient = shared.PlaneOrientationSequence[0].ImageOrientationPatient
        plane.PixelSpacing = shared.PixelMeasuresSequence[0].PixelSpacing
        points = plane_points(plane, *shape[1:])
        if dataset.SegmentationType == "LABELMAP":
            for number in range(1, len(dataset.SegmentSequence)):
                yield number, values_of_frame == number, points
        else:
            group = shared if "SegmentIdentificationSequence" in shared else group
            yield (
                group.SegmentIdentificationSequence[0].ReferencedSegmentNumber,
                values_of_frame == 1,
                points,
            )


def source_planes(folder: Path) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """World points and pixel steps (row, column) of slices by UID and frame (0: single frame)."""
    planes = {}
    for path in sorted(folder.iterdir()):
        dataset = dcmread(path)
        groups = dataset.get("PerFrameFunctionalGroupsSequence") or [dataset]
        for number, group in enumerate(groups):
            plane = dataset
            if group is not dataset:
                shared = dataset.SharedFunctionalGroupsSequence[0]
                plane = Dataset()
                plane.ImagePositionPatient = group.PlanePositionSequence[0].ImagePositionPatient
                plane.ImageOrientationPatient = shared.PlaneOrientationSequence[
                    0
                ].ImageOrientationPatient
                plane.PixelSpacing = shared.PixelMeasuresSequence[0].PixelSpacing
            key = dataset.SOPInstanceUID, 0 if group is dataset else number + 1
            planes[key] = plane_points(plane, dataset.Rows, dataset.Columns)
    return planes


def raw_contours(
    path: Path, planes: dict[tuple[str, int], np.ndarray]
) -> dict[tuple[str, int], dict[int, np.ndarray]]:
    """Masks of each region of interest on its slices, by matplotlib's point-in-polygon test."""
    masks: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    for item in dcmread(path).ROIContourSequence:
        for contour in item.get("ContourSequence", []):
            reference = contour.ContourImageSequence[0]
            key = reference.ReferencedSOPInstanceUID, int(reference.get("ReferencedFrameNumber", 0))
            points = planes[key]
            steps = np.stack([points[1, 0] - points[0, 0], points[0, 1] - points[0, 0]], axis=1)
            corners = np.array(contour.ContourData, float).reshape(-1, 3) - points[0, 0]
            position = np.linalg.lstsq(steps, corners.T, rcond=None)[0]
            assert np.abs(steps @ position - corners.T).max() < 1e-3  # in the plane of the slice
            inside = Polygon(position.T, closed=False).contains_points(
                np.indices(points.shape[:2]).reshape(2, -1).T
            )
            number = int(item.ReferencedROINumber)
            rois = masks.setdefault(key, {})
            rois[number] = rois.get(number, False) ^ inside.reshape(points.shape[:2])
    return masks
