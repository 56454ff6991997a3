"""Writers of volumes."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from isal import igzip, isal_zlib

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import SUFFIXES, WRITTEN_SUFFIXES, volume_suffix
from medseg.io.replacing import replacing
from medseg.io.stored import LABEL_DTYPES
from medseg.io.volume import FileHeader

COMPRESSION_LEVEL = 2
"""Of ISA-L, whose levels end at 3: label maps become smaller than with zlib's level 1, in an eighth of its time."""

SLAB_BYTES = 8 * 2**20


def _slabs(array: np.ndarray, dtype: np.dtype) -> Iterator[memoryview]:
    """Give an array's bytes in file order, x fastest, without a copy of the whole."""
    per_slab = max(1, SLAB_BYTES // max(1, array[0].size * dtype.itemsize))
    for first in range(0, len(array), per_slab):
        yield np.ascontiguousarray(array[first : first + per_slab], dtype).reshape(-1).view(np.uint8).data


def _write_gzip(file: BinaryIO, array: np.ndarray, dtype: np.dtype) -> None:
    # No name and no time in the stream: equal labels give equal files.
    with igzip.IGzipFile("", "wb", COMPRESSION_LEVEL, file, mtime=0) as packed:
        for slab in _slabs(array, dtype):
            packed.write(slab)


def _write_nifti(path: Path, array: np.ndarray, grid: VoxelGrid, like: FileHeader | None) -> None:
    from medseg.io.nifti import byte_order_of, encode_header

    header = encode_header(path, array.dtype, grid, like)
    dtype = array.dtype.newbyteorder(byte_order_of(path, like))
    with replacing(path) as file, ExitStack() as stack:
        target: BinaryIO | igzip.IGzipFile = file
        if path.name.lower().endswith(".gz"):
            packed = igzip.IGzipFile("", "wb", COMPRESSION_LEVEL, file, mtime=0)
            target = stack.enter_context(packed)
        target.write(header)
        for slab in _slabs(array, dtype):
            target.write(slab)


def _write_nrrd(path: Path, array: np.ndarray, grid: VoxelGrid, like: FileHeader | None) -> None:
    from medseg.io.nrrd import encode_header

    with replacing(path) as file:
        file.write(encode_header(array.dtype, grid, like))
        _write_gzip(file, array, array.dtype.newbyteorder("<"))


def _data_paths(path: Path) -> tuple[Path, Path | None]:
    """Where the voxels of a .mhd go, and those of the header that is there now, which go when it goes.

    A name that is taken is never written to: until the new header stands, the old pair is whole.
    """
    from medseg.io.metaimage import data_name_of

    # MetaImage takes `%` and a leading LIST or LOCAL for more than a name.
    stem = path.name[:-4]
    if "%" in stem or stem.upper().startswith(("LIST", "LOCAL")):
        stem = f"voxels-{zlib.crc32(os.fsencode(stem)):08x}"
    names = itertools.chain([f"{stem}.zraw"], (f"{stem}-{count}.zraw" for count in itertools.count(2)))
    old = path.parent / data_name_of(path)
    is_ours = old.parent == path.parent and re.fullmatch(re.escape(stem) + r"(-\d+)?\.zraw", old.name)
    return next(new for name in names if not os.path.lexists(new := path.with_name(name))), old if is_ours else None


def _write_metaimage(path: Path, array: np.ndarray, grid: VoxelGrid, like: FileHeader | None) -> None:
    from medseg.io.metaimage import encode_header

    def write(header_file: BinaryIO, data_file: BinaryIO, data_name: str) -> None:
        # The header counts the packed bytes and comes first.
        packer = isal_zlib.compressobj(COMPRESSION_LEVEL)
        parts = [packer.compress(slab) for slab in _slabs(array, array.dtype.newbyteorder("<"))]
        parts.append(packer.flush())
        header_file.write(encode_header(array.dtype, grid, like, sum(map(len, parts)), data_name))
        data_file.writelines(parts)

    if path.name.lower().endswith(".mha"):
        with replacing(path) as file:
            write(file, file, "LOCAL")
        return
    path = Path(os.path.realpath(path))
    data_path, old_data_path = _data_paths(path)
    try:
        # Left in reverse order: the voxels have their name before the header that points to them.
        with replacing(path) as file, replacing(data_path) as data_file:
            write(file, data_file, data_path.name)
    except BaseException:
        with suppress(OSError):
            data_path.unlink()
        raise
    if old_data_path is not None:
        old_data_path.unlink(missing_ok=True)


def _header_grid(path: Path, like: FileHeader) -> VoxelGrid:
    """Find the grid that a kept header describes."""
    if like.format == "nifti":
        from medseg.io.nifti import grid_of_header
    elif like.format == "nrrd":
        from medseg.io.nrrd import grid_of_header
    else:
        from medseg.io.metaimage import grid_of_header
    return grid_of_header(path, like.raw)


def _write(path: Path, array: np.ndarray, grid: VoxelGrid, like: FileHeader | None) -> None:
    """Write voxels whose type is settled."""
    path = Path(path)
    suffix = volume_suffix(path)
    if suffix not in WRITTEN_SUFFIXES:
        raise UserError(f"{path}: expected an output name that ends in {', '.join(WRITTEN_SUFFIXES)}; choose one of them.")
    if array.shape != grid.shape:
        raise ValueError(f"array {array.shape} and grid {grid.shape} differ in shape")
    if like is not None and like.format != SUFFIXES[suffix]:
        like = None
    if like is not None and not _header_grid(path, like).is_close(grid):
        raise ValueError(f"{path}: the header to keep does not belong to the grid of the array")
    writers: dict[str, Callable[[Path, np.ndarray, VoxelGrid, FileHeader | None], None]] = {
        "nifti": _write_nifti,
        "nrrd": _write_nrrd,
        "metaimage": _write_metaimage,
    }
    writers[SUFFIXES[suffix]](path, array, grid, like)


def write_labels(path: Path, labels: np.ndarray, grid: VoxelGrid, like: FileHeader | None = None) -> None:
    """Write a label map whole or not at all; missing folders are made.

    Args:
        path: Target; the suffix chooses the format: .nii.gz, .nii, .nrrd, .mha or .mhd (with .zraw beside it).
        labels: Whole numbers (D, H, W) in the storage order of `grid`; boolean and 64-bit types are narrowed.
        grid: Where the voxels lie.
        like: Header of the input. Where its format is that of `path`, its geometry fields are written byte for byte;
            else the corners agree within 0.001 mm.

    Raises:
        UserError: If the suffix is unknown or the folder cannot be written.
        ValueError: If labels are not integers, or the arguments contradict each other.
    """
    if labels.dtype.kind not in "biu":
        raise ValueError(f"labels must be whole numbers, got {labels.dtype}")
    if labels.dtype.kind == "b" or labels.dtype.itemsize > 4 or labels.dtype == np.uint32:
        low, high = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
        fitting = [d for d in LABEL_DTYPES[:4] if np.iinfo(d).min <= low and high <= np.iinfo(d).max]
        if not fitting:
            raise ValueError(f"labels must fit into 32 bits, got {low} to {high}")
        labels = labels.astype(fitting[0])
    _write(path, labels, grid, like)


def write_image(path: Path, image_hu: np.ndarray, grid: VoxelGrid, like: FileHeader | None = None) -> None:
    """Write a scan whole or not at all; missing folders are made.

    Args:
        path: As for `write_labels`.
        image_hu: HU (D, H, W), int16 or float32.
        grid: Where the voxels lie.
        like: As for `write_labels`.

    Raises:
        UserError: If the suffix is unknown or the folder cannot be written.
        ValueError: If the type is another, or the arguments contradict each other.
    """
    if image_hu.dtype not in (np.int16, np.float32):
        raise ValueError(f"an image must be int16 or float32, got {image_hu.dtype}")
    _write(path, image_hu, grid, like)
