"""What DICOM files say, read a second time by pydicom alone, without any of medseg.

It is lenient: it takes whatever can be understood. medseg may refuse more, but must never
understand anything else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
from pydicom import config, dcmread
from pydicom.dataset import Dataset, FileDataset
from pydicom.uid import UID, ExplicitVRLittleEndian
from scipy.ndimage import map_coordinates

AIR = -1024.0


@dataclass(frozen=True)
class Slice:
    """One slice of a file.

    Attributes:
        path: File.
        origin: LPS point of the first pixel.
        steps: LPS steps of an index (row, column), (3, 2).
        hu: What each pixel may mean, (readings, H, W): as it is, without unused bits, with another
            sign, or as padding.
    """

    path: Path
    origin: np.ndarray
    steps: np.ndarray
    hu: np.ndarray


def _of(places: list[Dataset], keyword: str) -> Any:
    """A field of the frame, of all frames, or of the file."""
    for place in places:
        if place.get(keyword) is not None:
            return place[keyword].value
    return None


def _groups(dataset: Dataset, index: int) -> list[Dataset]:
    """The macros of a frame that can be understood, its own ones first, then the file itself."""
    macros = []
    for sequence, item in (
        ("PerFrameFunctionalGroupsSequence", index),
        ("SharedFunctionalGroupsSequence", 0),
    ):
        if sequence in dataset and len(dataset[sequence].value) > item:
            group = dataset[sequence].value[item]
            for tag in group.keys():  # noqa: SIM118 - values would be converted, all or none
                with contextlib.suppress(Exception):
                    macros += group[tag].value[:1] if group[tag].VR == "SQ" else []
    return [*macros, dataset]


def _stored(path: Path, dataset: FileDataset) -> np.ndarray:
    """Stored values (frames, H, W)."""
    shape = int(dataset.get("NumberOfFrames") or 1), int(dataset.Rows), int(dataset.Columns)
    is_signed = bool(dataset.get("PixelRepresentation"))
    syntax = UID(dataset.file_meta.get("TransferSyntaxUID") or ExplicitVRLittleEndian)
    data = path.read_bytes()
    start = data.index(b"\xe0\x7f\x10\x00") + 12  # tag, VR, length
    if syntax.is_compressed:
        # Codes of the JPEG family have this start nowhere else, however the items around them are
        # damaged.
        starts = [
            match.start() for match in re.finditer(b"\xff\xd8\xff", data) if match.start() >= start
        ]
        decode = imagecodecs.jpegls_decode if "JPEG-LS" in syntax.name else imagecodecs.jpeg_decode
        values = np.stack(
            [
                decode(data[first:stop])
                for first, stop in zip(starts, [*starts[1:], len(data)], strict=True)
            ]
        )
        assert values.shape == shape
        return values.astype(f"i{values.itemsize}" if is_signed else values.dtype).astype(np.int64)
    assert data[start - 4 : start] != b"\xff\xff\xff\xff"  # compressed
    dtype = f"<{'i' if is_signed else 'u'}{int(dataset.get('BitsAllocated') or 16) // 8}"
    return np.frombuffer(data, dtype, int(np.prod(shape)), start).reshape(shape).astype(np.int64)


def _readings(stored: np.ndarray, dataset: Dataset, slope: float, intercept: float) -> np.ndarray:
    """All that a slice may mean in HU, (readings, H, W)."""
    allocated = int(dataset.get("BitsAllocated") or 16)
    bits = int(dataset.get("BitsStored") or allocated)
    low = stored & ((1 << bits) - 1)
    signed = [
        np.where(values >> (size - 1) == 1, values - (1 << size), values)
        for values, size in ((low, bits), (stored, allocated))
    ]
    readings = [values * slope + intercept for values in (stored, low, *signed)]
    if dataset.get_item("PixelPaddingValue") is not None:
        readings.append(np.full(stored.shape, AIR))
    return np.stack(readings)


def slices_of(path: Path) -> Iterator[Slice]:
    """All slices of a file that have a place."""
    with config.disable_value_validation():
        dataset = dcmread(path, force=True)
        stored = _stored(path, dataset)
        for index, values in enumerate(stored):
            places = _groups(dataset, index)
            axes = np.array(_of(places, "ImageOrientationPatient") or 6 * [np.nan], float).reshape(
                2, 3
            )
            axes = axes / np.linalg.norm(axes, axis=1, keepdims=True)
            spacing = np.array(_of(places, "PixelSpacing"), float)
            origin = np.array(_of(places, "ImagePositionPatient"), float)
            if not all(np.isfinite(numbers).all() for numbers in (origin, axes, spacing)):
                continue
            slope, intercept = _of(places, "RescaleSlope"), _of(places, "RescaleIntercept")
            yield Slice(
                path,
                origin,
                np.stack([axes[1] * spacing[0], axes[0] * spacing[1]], axis=1),
                _readings(
                    values,
                    dataset,
                    1.0 if slope is None else float(slope),
                    0.0 if intercept is None else float(intercept),
                ),
            )


def on_plane(one: Slice, points_xyz_mm: np.ndarray, is_resampled: bool) -> np.ndarray:
    """The readings of a slice at points (H, W, 3), air beside it.

    They are the nearest pixel, where positions and spacings are rounded decimals, or interpolated
    linearly where slices were resampled, from pixels that end at air.
    """
    least, snap_px = (AIR, 1e-3) if is_resampled else (-np.inf, 0.2)
    index = np.linalg.lstsq(one.steps, (points_xyz_mm - one.origin).reshape(-1, 3).T, rcond=None)[0]
    index = np.where(np.abs(index - np.rint(index)) < snap_px, np.rint(index), index).reshape(
        2, *points_xyz_mm.shape[:2]
    )
    return np.stack(
        [
            map_coordinates(np.maximum(hu, least), index, order=1, mode="grid-constant", cval=AIR)
            for hu in one.hu
        ]
    )
