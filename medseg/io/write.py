"""Writers of scans and label maps: NIfTI by nibabel, NRRD and MetaImage by SimpleITK; a file is written whole or not at all."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import igzip

from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_bytes, replace_path
from medseg.io.inputs import WRITTEN_SUFFIXES, volume_suffix
from medseg.io.lazy import LABEL_DTYPES
from medseg.io.simpleitk import save
from medseg.io.textheader import read_header

GZIP_LEVEL = 2
"""Of ISA-L, whose levels end at 3: label maps become smaller than with zlib's level 1, in an eighth of its time."""


def _write_nifti(path: Path, array: np.ndarray, grid: VoxelGrid, like: Any) -> None:
    from medseg.io.nifti import grid_of_header, new_header

    if like is not None and not grid_of_header(path, like)[0].is_close(grid):
        raise ValueError(f"{path}: the header to keep does not belong to the grid of the array")
    header = new_header(array.dtype, grid, like)
    with replace_path(path) as part, part.open("xb") as file, ExitStack() as stack:
        target: BinaryIO = file
        if path.name.lower().endswith(".gz"):
            # Without a name and a time in the stream, equal labels give equal files.
            target = stack.enter_context(igzip.IGzipFile("", "wb", GZIP_LEVEL, file, mtime=0))  # type: ignore[assignment]
        target.write(header.binaryblock.ljust(int(header["vox_offset"]), b"\0"))
        for plane in array:
            target.write(np.ascontiguousarray(plane, header.get_data_dtype()).tobytes())


def _voxel_paths(path: Path) -> tuple[Path, list[Path]]:
    """Find a free name for the voxels of a .mhd, and the voxel files of the header that it replaces.

    Until the new header is in place, the old pair of files is whole.
    """
    # MetaImage gives `%` and a leading LIST or LOCAL a meaning of their own.
    stem = path.name[:-4]
    if "%" in stem or stem.upper().startswith(("LIST", "LOCAL")):
        stem = f"voxels-{zlib.crc32(os.fsencode(stem)):08x}"
    names = itertools.chain([f"{stem}.zraw"], (f"{stem}-{count}.zraw" for count in itertools.count(2)))
    old: list[Path] = []
    with suppress(OSError, UserError):
        is_ours = re.compile(re.escape(str(path.with_name(stem))) + r"(-\d+)?\.zraw").fullmatch
        old = [file for file in read_header(path).files if is_ours(str(file))]
    return next(new for name in names if not os.path.lexists(new := path.with_name(name))), old


def _write_pair(path: Path, array: np.ndarray, grid: VoxelGrid) -> None:
    """Write a .mhd and its voxels beside it, replacing an old pair as one."""
    path = Path(os.path.realpath(path))
    voxels, old_voxels = _voxel_paths(path)
    try:
        with replace_path(voxels) as part:
            # SimpleITK cannot write pairs where a folder has `%` in its name, so it writes one file, which is divided here.
            whole = part.with_suffix(".mha")
            try:
                save(path, whole, array, grid)
                with whole.open("rb") as source, part.open("xb") as target:
                    lines = list(iter(source.readline, b"ElementDataFile = LOCAL\n"))
                    shutil.copyfileobj(source, target)
            finally:
                whole.unlink(missing_ok=True)
        # The voxels have their name before the header that points to them.
        replace_bytes(path, b"".join(lines) + f"ElementDataFile = {voxels.name}\n".encode())
    except BaseException:
        with suppress(OSError):
            voxels.unlink()
        raise
    for file in old_voxels:
        file.unlink(missing_ok=True)


def _write(path: Path, array: np.ndarray, grid: VoxelGrid, like: Any) -> None:
    """Write voxels of a type that the formats have."""
    path = Path(path)
    suffix = volume_suffix(path)
    require(
        suffix in WRITTEN_SUFFIXES,
        f"{path}: expected an output name that ends in {', '.join(WRITTEN_SUFFIXES)}; choose one of them.",
    )
    if array.shape != grid.shape:
        raise ValueError(f"array {array.shape} and grid {grid.shape} differ in shape")
    if suffix in (".nii", ".nii.gz"):
        _write_nifti(path, array, grid, like)
    elif suffix == ".mhd":
        _write_pair(path, array, grid)
    else:
        with replace_path(path) as part:
            save(path, part, array, grid)


def write_labels(path: Path, labels: np.ndarray, grid: VoxelGrid, like: Any = None) -> None:
    """Write a label map whole or not at all; missing folders are made.

    The corners of the written grid agree with `grid` within 0.001 mm.

    Args:
        path: Target; the suffix chooses the format: .nii.gz, .nii, .nrrd, .mha or .mhd (with .zraw beside it).
        labels: Whole numbers (D, H, W) in the storage order of `grid`; boolean and 64-bit types are narrowed.
        grid: Position of the voxels.
        like: `Volume.header` of the input; if that is NIfTI, a NIfTI result keeps its version, byte order, sform, qform and unit.

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


def write_image(path: Path, image_hu: np.ndarray, grid: VoxelGrid, like: Any = None) -> None:
    """Write a scan whole or not at all; missing folders are made.

    Args:
        path: As for `write_labels`.
        image_hu: HU (D, H, W), int16 or float32.
        grid: Position of the voxels.
        like: As for `write_labels`.

    Raises:
        UserError: If the suffix is unknown or the folder cannot be written.
        ValueError: If the type is another, or the arguments contradict each other.
    """
    if image_hu.dtype not in (np.int16, np.float32):
        raise ValueError(f"an image must be int16 or float32, got {image_hu.dtype}")
    _write(path, image_hu, grid, like)
