"""Lazy volumes: header read, voxels decoded slab by slab, so that no second copy of a volume is ever in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid
from medseg.io.checks import describe, shown
from medseg.io.streams import expected_bytes, num_bytes, open_stream, read_slabs, skip, surplus
from medseg.io.volume import AIR_HU, Volume

MAX_RATIOS = {"raw": 1, "text": 8, "deflate": 1032, "bzip2": 10**7}
"""Largest factor by which bytes of an encoding grow when they are decoded; a header that promises more is damaged."""

SURE_BYTES, SURE_RATIO = 2**28, 16
"""Above this size and this ratio to the compressed bytes, decode once to verify the promised length."""

IMAGE_DTYPES = (np.int16, np.float32)
LABEL_DTYPES = (np.uint8, np.int16, np.uint16, np.int32, np.int64)


@dataclass(frozen=True)
class LazyVolume:
    """A volume in a file whose header has been read and whose voxels have not.

    Attributes:
        path: The file, for messages.
        grid: Shape and position.
        dtype: Type of the stored values, with byte order.
        slabs: Opens the file and yields stored values (n, H, W) along z, each slice once.
        slope: Factor from stored value to HU or label.
        intercept: Added after the slope.
        remarks: Sentences for the user; see `Volume.remarks`.
        header: nibabel header of a NIfTI file; None for other formats.
        packed_bytes: Bytes of the file that hold compressed voxels; None where the number of voxel bytes is known.
    """

    path: Path
    grid: VoxelGrid
    dtype: np.dtype[Any]
    slabs: Callable[[], Iterator[np.ndarray]]
    slope: float = 1.0
    intercept: float = 0.0
    remarks: tuple[str, ...] = ()
    header: Any = None
    packed_bytes: int | None = None


def lazy_volume(
    path: Path,
    grid: VoxelGrid,
    dtype: np.dtype[Any],
    files: Sequence[Path],
    encoding: str,
    *,
    offset: int = 0,
    num_lines: int = 0,
    num_skipped: int = 0,
    **others: Any,
) -> LazyVolume:
    """Describe voxels in files, after a check that the files can hold them: a damaged header asks for no memory.

    Args:
        path: File of the header, for messages.
        grid: Shape and position.
        dtype: Type of the stored values, with byte order.
        files: Files with equal shares of the slices, in their order.
        encoding: As for `open_stream`.
        offset: First byte after the header.
        num_lines: Lines to pass over then.
        num_skipped: Bytes to pass over then, decoded; -1: plain voxels are the last bytes of their file.
        **others: Further attributes of the lazy volume.

    Raises:
        UserError: If a file is missing, too short or too long, or the header asks for what no program writes.
    """
    depth, height, width = grid.shape
    require(
        depth % len(files) == 0 and (num_skipped >= 0 or encoding == "raw"),
        f"{path}: expected its voxels in files of equally many slices, of which only plain ones may be counted from the end, but the "
        f"header gives {len(files)} {encoding} file(s) for {depth} slices and skips {num_skipped} bytes; save it as one file.",
    )
    share = (depth // len(files), height, width)
    share_bytes = num_bytes(share, dtype)

    def enter(file: BinaryIO) -> int:
        """Move to the voxels, or to their encoded stream; gives the bytes from there to the end."""
        size = file.seek(0, os.SEEK_END)
        file.seek(offset)
        for _ in range(num_lines):
            file.readline()
        skipped = max(0, size - file.tell() - share_bytes) if num_skipped < 0 else num_skipped
        return size - (file.seek(skipped, os.SEEK_CUR) if encoding == "raw" else file.tell())

    def slabs() -> Iterator[np.ndarray]:
        for name in files:
            with name.open("rb") as file:
                enter(file)
                stream = open_stream(path, file, encoding, dtype)
                skip(stream, 0 if encoding == "raw" else num_skipped)
                yield from read_slabs(path, stream, share, dtype)

    packed_bytes = 0
    for name in files:
        require(name.is_file(), f"{path}: its voxels should be in {shown(name.name)}, which does not exist; copy both files.")
        with name.open("rb") as file:
            held = max(0, enter(file))
        packed_bytes += held
        ratio = MAX_RATIOS[encoding]
        require(
            share_bytes <= ratio * held,
            f"{expected_bytes(path, share, dtype)}, but the file {'holds' if ratio == 1 else 'can hold at most'} {ratio * held}; it is "
            "truncated or damaged: copy or export it again.",
        )
        require(ratio > 1 or share_bytes == held, surplus(path, share, dtype))
    return LazyVolume(path, grid, dtype, slabs, packed_bytes=None if encoding == "raw" else packed_bytes, **others)


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _allocate(volume: LazyVolume, dtype: type[np.integer[Any]]) -> np.ndarray:
    """Make the array of a volume, after a check that the file fills it and that the machine can hold it.

    Raises:
        UserError: If not.
    """
    shape = volume.grid.shape
    needed_gib, memory_gib = num_bytes(shape, np.dtype(dtype)) / 2**30, memory_bytes() / 2**30
    require(
        needed_gib <= memory_gib,
        f"{volume.path}: its {describe(shape[::-1])} voxels need {needed_gib:.1f} GiB, but this machine has {memory_gib:.1f} GiB of "
        "memory; crop or resample the scan first.",
    )
    promised = num_bytes(shape, volume.dtype)
    if volume.packed_bytes is not None and promised > max(SURE_BYTES, SURE_RATIO * volume.packed_bytes):
        deque(volume.slabs(), maxlen=0)
    return np.empty(shape, dtype)


def _is_exact(values: np.ndarray, dtype: type[np.number[Any]]) -> bool:
    """Whether a type holds all values exactly; float32 is taken for every image."""
    if dtype is np.float32 or (values.dtype.kind in "iu" and np.can_cast(values.dtype, dtype)):
        return True
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    if not (values.min() >= limits.min and values.max() <= limits.max):
        return False
    return values.dtype.kind in "iu" or bool((values == np.rint(values)).all())


def _load(volume: LazyVolume, dtypes: Sequence[type[Any]]) -> tuple[np.ndarray, int]:
    """Read all voxels in the first of some types that holds them.

    Returns:
        Values (D, H, W), and how many voxels of an image held no number, or none that float32 can hold; these become air.

    Raises:
        UserError: If no type holds a value, or the file is too short or too long.
    """
    array, first, num_gaps = _allocate(volume, dtypes[0]), 0, 0
    for slab in volume.slabs():
        values = slab
        if (volume.slope, volume.intercept) != (1.0, 0.0):
            values = slab.astype(np.float64) * volume.slope + volume.intercept
        if np.float32 in dtypes and values.dtype.kind == "f":
            values = values.astype(np.float32, copy=False)
            gaps = ~np.isfinite(values)
            if gaps.any():
                values, num_gaps = np.where(gaps, np.float32(AIR_HU), values), num_gaps + int(gaps.sum())
        fitting = [dtype for dtype in dtypes if _is_exact(values, dtype)]
        if not fitting:
            strange = [*values[values != np.rint(values)][:1], values.flat[int(np.argmax(np.abs(values)))]]
            raise UserError(
                f"{volume.path}: expected a label map of whole numbers, but the file holds values such as {float(strange[0]):g}; is it "
                "an image or a probability map?"
            )
        if array.dtype not in fitting:
            array = array.astype(np.promote_types(array.dtype, fitting[0]))
        array[first : first + len(values)] = values
        first += len(values)
    return array, num_gaps


def load_image(volume: LazyVolume) -> Volume:
    """Read HU (D, H, W): int16 where that is exact, else float32. NaN and infinity become air, with a remark.

    Raises:
        UserError: If the file is too short or too long.
    """
    image_hu, num_gaps = _load(volume, IMAGE_DTYPES)
    remarks = []
    if num_gaps:
        remarks.append(
            f"{num_gaps} of {image_hu.size} voxels ({100 * num_gaps / image_hu.size:.2g} %) hold no number (NaN or infinity) and "
            f"count as air, {AIR_HU} HU"
        )
    if min(image_hu.shape) == 1:
        remarks.append(f"the scan of {describe(image_hu.shape[::-1])} voxels is a single slice: expect a poor result")
    return Volume(image_hu, volume.grid, volume.header, (*volume.remarks, *remarks))


def load_labels(volume: LazyVolume) -> Volume:
    """Read a label map (D, H, W) in the smallest of the usual integer types, uint8 first.

    Raises:
        UserError: If a value is not a whole number, or the file is too short or too long.
    """
    return Volume(_load(volume, LABEL_DTYPES)[0], volume.grid, volume.header, volume.remarks)
