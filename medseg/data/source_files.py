"""Source files of a case and their fingerprints, which detect a change; checksums of files."""

import functools
import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medseg.data.case_table import CHANNEL_PREFIX, Case
from medseg.io.inputs import (
    dicom_files,
    input_format,
    is_dicom_file,
    is_dicomdir,
    volume_files,
    volume_suffix,
)
from medseg.task import Task


def sources_of(case: Case, task: Task) -> dict[str, Path]:
    """List the image files and the label file of a case by their role.

    The roles are `image`, `image_1`, … for each channel of the task and, if there is one, `labels`.
    """
    sources = {}
    for number, path in enumerate(case.images(len(task.channels))):
        role = f"{CHANNEL_PREFIX}{number}" if number else "image"
        sources[role] = path
    if case.labels is not None:
        sources["labels"] = case.labels
    return sources


def files_of(path: Path) -> list[Path]:
    """List all files that an image or label map consists of.

    For a folder, these are its masks or DICOM files; for a header, the header and the files with
    its voxels; for a DICOMDIR, all DICOM files below its folder; for a DICOM slice, all slices in
    its folder; else the file alone.

    Raises:
        UserError: If the path is no image, such as a device (reading it might never end).
    """
    masks = volume_files(path) if path.is_dir() else []
    # A folder with DICOM slices is read as a series, even if it holds volume files, too.
    if masks and next(dicom_files(path), None) is None:
        return masks
    if path.exists():
        # Called for its check alone: it raises an error for a path that is no image.
        input_format(path)
    if path.is_dir() or is_dicomdir(path):
        # A DICOMDIR is the index of all files in and below its folder.
        folder = path if path.is_dir() else path.parent
        return list(dicom_files(folder))
    if path.suffix.lower() in (".mhd", ".nhdr"):
        from medseg.io.simpleitk import read_header  # SimpleITK takes 50 MiB

        data_files = read_header(path).files
        # A header that also holds the voxels names itself. Missing files are left out here: the
        # reader reports them.
        return [path, *(file for file in data_files if file.is_file() and file != path)]
    # A single slice stands for the series in its folder.
    if volume_suffix(path) is None and is_dicom_file(path):
        return list(dicom_files(path.parent, is_deep=False))
    return [path]


def files_in_role(role: str, path: Path) -> list[Path]:
    """List all files that are read of a source of a case.

    Args:
        role: Role of the source, as in `sources_of`.
        path: The source. Labels in a folder with masks are these masks, whatever DICOM files lie
            beside or below them; other sources are as in `files_of`.
    """
    masks = volume_files(path) if role == "labels" and path.is_dir() else []
    return masks or files_of(path)


def is_here(path: Path | str) -> bool:
    """Whether a source exists, as far as this user may see.

    `Path.exists` would raise an error where this user may not enter a folder, such as the raw data
    behind a shared cache.
    """
    return os.path.exists(path)


def _stamp(files: Sequence[Path]) -> list[list[int]]:
    """List the size in bytes and the modification time in ns of each file of a source.

    A source whose stamp has not changed need not be hashed again.
    """
    stats = [file.stat() for file in files]
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats]


def _mask_names(path: Path, files: Sequence[Path]) -> list[str]:
    """List the file names of a folder of masks, which name its structures.

    Empty for other sources: their file names do not matter.
    """
    if not path.is_dir() or any(volume_suffix(file) is None for file in files):
        return []
    return [file.name for file in files]


def _content_hash(files: Sequence[Path]) -> str:
    """Compute the SHA-256 of the SHA-256 digests of all files, in their order."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def fingerprint(path: Path, files: Sequence[Path] = ()) -> dict[str, Any]:
    """Describe a source so that a later change is detected; plain types for a JSON file.

    Args:
        path: File or folder of the source.
        files: Its files, such as the DICOM files of one study; empty for those of `files_of`.
    """
    files = files or files_of(path)
    description = {
        "path": os.path.realpath(path),
        "stamp": _stamp(files),
        "sha256": _content_hash(files),
    }
    names = _mask_names(path, files)
    if names:
        description["names"] = names
    return description


def is_same_source(path: Path, recorded: dict[str, Any], files: Sequence[Path] = ()) -> bool:
    """Whether a source still has the content that it had when its fingerprint was taken.

    Args:
        path: The source; it may have moved since.
        recorded: Result of `fingerprint`.
        files: Its files, such as the DICOM files of one study; empty for those of `files_of`.
    """
    files = files or files_of(path)
    # The stamp does not show that a mask was renamed: size and time stay.
    if _mask_names(path, files) != recorded.get("names", []):
        return False
    stamp = _stamp(files)
    if stamp == recorded["stamp"]:
        return True
    sizes = [size for size, _ in stamp]
    recorded_sizes = [size for size, _ in recorded["stamp"]]
    if sizes != recorded_sizes:
        return False
    # A copied or touched file has another time and may have the same content.
    return _content_hash(files) == recorded["sha256"]


@functools.cache
def is_intact(path: Path, crc32: int, _num_bytes: int, _mtime_ns: int) -> bool:
    """Whether a file matches its checksum.

    Size and modification time are arguments only as keys of the cache: the file is read again when
    one of them has changed.
    """
    return crc32_of(path) == crc32


def crc32_of(path: Path) -> int:
    """Compute the CRC-32 of a file, at about 1 GB/s."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(2**22):  # 4 MiB
            total = zlib.crc32(block, total)
    return total
