"""From the bytes of a file to an array of HU or labels, slab by slab: no second copy of a volume is ever made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.payload import Opener, read_up_to, skip
from medseg.io.volume import AIR_HU, FileHeader

SLAB_BYTES = 8 * 2**20
"""Bytes that are decoded at once: large enough for speed, small beside a volume."""

MAX_DEFLATE_RATIO = 1032
"""A deflate stream grows by this factor at most, so a header that promises more is damaged."""

SURE_BYTES, SURE_RATIO = 2**28, 16
"""A header may promise so many bytes, or so many times the packed ones, before they are counted by unpacking once."""

MAX_EXTENT_MM, MAX_FIELD_MM3 = 4e3, 8e9
"""A scan is not longer than a scanner's table: beyond that the spacing is in another unit, or damaged."""

LABEL_DTYPES = (np.uint8, np.int16, np.uint16, np.int32, np.int64)


@dataclass(frozen=True)
class Stored:
    """A volume as it lies in a file: header read, voxels not yet.

    Attributes:
        path: The file, for messages.
        grid: Shape and place.
        header: Geometry fields as stored; None where a result cannot keep them.
        dtype: Type of the stored values, with byte order.
        open_payload: Opens the stream of voxel bytes.
        slope: Factor from stored value to HU or label.
        intercept: Added after the slope.
        remarks: What the user should know of the reading; see `Volume.remarks`.
        packed_bytes: Bytes of the file that hold packed voxels; None where the number of voxel bytes is known.
    """

    path: Path
    grid: VoxelGrid
    header: FileHeader | None
    dtype: np.dtype[Any]
    open_payload: Opener
    slope: float = 1.0
    intercept: float = 0.0
    remarks: tuple[str, ...] = ()
    packed_bytes: int | None = None


def grid_from_columns(path: Path, shape: Sequence[int], columns: np.ndarray, origin: Sequence[float]) -> VoxelGrid:
    """Make the grid of a file from its world steps.

    Small deviations from right angles (rounded decimals) are kept as they are, so that no corner moves.

    Args:
        path: The file, for messages.
        shape: Voxels (D, H, W).
        columns: 3×3; column j is the LPS step in mm along index axis (x, y, z)[j].
        origin: LPS point of the first voxel's centre, in mm.

    Raises:
        UserError: If the axes are sheared, an axis has no length, or no scanner is so large.
    """
    spacing = np.linalg.norm(columns, axis=0)
    numbers = [*np.ravel(columns).tolist(), *spacing.tolist(), *origin]
    if not (all(math.isfinite(value) for value in numbers) and spacing.min() > 0):
        raise UserError(
            f"{path}: expected three axes of positive length and a finite origin, but the header gives steps of "
            f"{columns.T.tolist()} mm from {list(origin)}; repair the header or export the scan again."
        )
    extents = [float(step) * size for step, size in zip(spacing, shape[::-1], strict=True)]
    if max(extents) > MAX_EXTENT_MM or math.prod(extents) > MAX_FIELD_MM3:
        raise UserError(
            f"{path}: expected a scan of at most {MAX_EXTENT_MM / 1e3:g} m along each axis and {MAX_FIELD_MM3 / 1e9:g} m³ in "
            f"all, but the header makes it {' x '.join(f'{extent / 1e3:.4g}' for extent in extents)} m; check its sizes, "
            "and whether its spacing is in mm."
        )
    try:
        return VoxelGrid(
            (int(shape[0]), int(shape[1]), int(shape[2])),
            (float(spacing[2]), float(spacing[1]), float(spacing[0])),
            (float(origin[0]), float(origin[1]), float(origin[2])),
            (columns / spacing).tolist(),
        )
    except ValueError as error:
        raise UserError(
            f"{path}: expected axes at right angles, but {error}; resample the scan to a regular grid first."
        ) from None


def check_shape(path: Path, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Turn stored sizes (x, y, z, then frames) into (D, H, W).

    Raises:
        UserError: If it is not one 3D volume.
    """
    if len(sizes) < 3 or any(size != 1 for size in sizes[3:]) or min(sizes) < 1:
        raise UserError(f"{path}: expected one 3D volume, but the file holds {_product(sizes)} values; give one volume per file.")
    return int(sizes[2]), int(sizes[1]), int(sizes[0])


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(str(size) for size in sizes)


def num_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Bytes of all voxels; exact however large a damaged header makes them."""
    return math.prod(int(size) for size in shape) * dtype.itemsize


def check_length(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any], held_bytes: int, max_ratio: int = 1) -> None:
    """Refuse a header that promises other voxels than the file can hold, before memory is asked for.

    Args:
        path: The file, for messages.
        shape: Voxels that the header promises, (D, H, W).
        dtype: Their type.
        held_bytes: Bytes of the file that hold voxels.
        max_ratio: By which factor they may grow when they are unpacked; 1 for plain voxels, which must fit exactly.

    Raises:
        UserError: If so.
    """
    promised = num_bytes(shape, dtype)
    if promised > max_ratio * held_bytes:
        what = "holds" if max_ratio == 1 else "can hold at most"
        raise UserError(
            f"{path}: expected {promised} bytes of voxels ({_product(shape[::-1])} of {dtype.itemsize} bytes), but the file "
            f"{what} {max(0, max_ratio * held_bytes)}; it is truncated or damaged: copy or export it again."
        )
    if max_ratio == 1 and promised < held_bytes:
        raise _surplus(path, shape, dtype)


def _surplus(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> UserError:
    return UserError(
        f"{path}: expected {num_bytes(shape, dtype)} bytes of voxels ({_product(shape[::-1])} of {dtype.itemsize} bytes), but "
        "the file holds more; its header belongs to other voxels: export it again."
    )


def _cut(stored: Stored, num_slices: int) -> UserError:
    return UserError(
        f"{stored.path}: expected {stored.grid.shape[0]} slices, but the file ends in slice {num_slices + 1}; it is truncated "
        "or damaged: copy or export it again."
    )


def _allocate(stored: Stored, dtype: type[np.integer[Any]]) -> np.ndarray:
    """Make the array of a volume, once it is sure that the file fills it and that the machine can hold it.

    Raises:
        UserError: If not.
    """
    shape = stored.grid.shape
    needed = num_bytes(shape, np.dtype(dtype))
    if needed > memory_bytes():
        raise UserError(
            f"{stored.path}: its {_product(shape[::-1])} voxels need {needed / 2**30:.1f} GiB, but this machine has "
            f"{memory_bytes() / 2**30:.1f} GiB of memory; crop or resample the scan first."
        )
    promised = num_bytes(shape, stored.dtype)
    if stored.packed_bytes is not None and promised > max(SURE_BYTES, SURE_RATIO * stored.packed_bytes):
        with stored.open_payload() as payload:
            held = skip(payload, promised)
        if held < promised:
            raise _cut(stored, held // (promised // shape[0]))
    return np.empty(shape, dtype)


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slabs(stored: Stored) -> Iterator[tuple[slice, np.ndarray]]:
    """Give the stored values slab by slab along z, flat file order kept."""
    depth, height, width = stored.grid.shape
    slice_bytes = height * width * stored.dtype.itemsize
    per_slab = max(1, SLAB_BYTES // slice_bytes)
    with stored.open_payload() as payload:
        for first in range(0, depth, per_slab):
            count = min(per_slab, depth - first)
            wanted = count * slice_bytes
            data = read_up_to(payload, wanted)
            if len(data) < wanted:
                raise _cut(stored, first + len(data) // slice_bytes)
            yield slice(first, first + count), np.frombuffer(data, stored.dtype).reshape(count, height, width)
        if payload.read(1):  # also lets a packed stream compare its checksum
            raise _surplus(stored.path, stored.grid.shape, stored.dtype)


def _values(stored: Stored, slab: np.ndarray) -> np.ndarray:
    """Apply slope and intercept to one slab."""
    if stored.slope == 1.0 and stored.intercept == 0.0:
        return slab
    return slab.astype(np.float64) * stored.slope + stored.intercept


def _is_exact(values: np.ndarray, dtype: type[np.integer[Any]]) -> bool:
    """Whether an integer type holds all values exactly."""
    limits = np.iinfo(dtype)
    if np.issubdtype(values.dtype, np.integer) and np.can_cast(values.dtype, dtype):
        return True
    low, high = values.min(), values.max()
    if not (low >= limits.min and high <= limits.max):
        return False
    return bool(np.issubdtype(values.dtype, np.integer) or (values == np.rint(values)).all())


def _without_gaps(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Put air where there is no number, or none that float32 can hold; gives how often."""
    if values.dtype.kind != "f":
        return values, 0
    values = values.astype(np.float32, copy=False)
    gaps = ~np.isfinite(values)
    num_gaps = int(np.count_nonzero(gaps))
    return (np.where(gaps, np.float32(AIR_HU), values) if num_gaps else values), num_gaps


def load_image(stored: Stored) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read HU (D, H, W): int16 where that is exact, else float32. NaN and infinity become air.

    Returns:
        The voxels, and what the user should know of them.

    Raises:
        UserError: If the file is too short or too long.
    """
    image_hu = _allocate(stored, np.int16)
    num_gaps = 0
    for part, slab in _slabs(stored):
        values, gaps = _without_gaps(_values(stored, slab))
        num_gaps += gaps
        if image_hu.dtype == np.int16 and not _is_exact(values, np.int16):
            image_hu = image_hu.astype(np.float32)
        image_hu[part] = values
    remarks = []
    if num_gaps:
        remarks.append(
            f"{num_gaps} of {image_hu.size} voxels ({100 * num_gaps / image_hu.size:.2g} %) hold no number (NaN or infinity) and "
            f"count as air, {AIR_HU} HU"
        )
    if min(image_hu.shape) == 1:
        remarks.append(f"the scan of {_product(image_hu.shape[::-1])} voxels is a single slice: expect a poor result")
    return image_hu, tuple(remarks)


def _strangest(values: np.ndarray) -> float:
    """A value that is no label: a fraction, or else the largest."""
    is_fraction = values != np.rint(values)
    return float(values[is_fraction].flat[0] if is_fraction.any() else values.flat[int(np.argmax(np.abs(values)))])


def load_labels(stored: Stored) -> tuple[np.ndarray, tuple[str, ...]]:
    """Read a label map (D, H, W) in the smallest of the usual integer types, uint8 first.

    Returns:
        The voxels, and what the user should know of them: nothing.

    Raises:
        UserError: If a value is not a whole number, or the file is too short or too long.
    """
    labels = _allocate(stored, LABEL_DTYPES[0])
    for part, slab in _slabs(stored):
        values = _values(stored, slab)
        fitting = [dtype for dtype in LABEL_DTYPES if _is_exact(values, dtype)]
        if not fitting:
            raise UserError(
                f"{stored.path}: expected a label map of whole numbers, but the file holds values such as "
                f"{_strangest(values):g}; is it an image or a probability map?"
            )
        if not any(dtype == labels.dtype for dtype in fitting):
            labels = labels.astype(np.promote_types(labels.dtype, fitting[0]))
        labels[part] = values
    return labels, ()
