"""What NRRD and MetaImage share: a header of text lines before, or beside, the voxels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.payload import Bzip2Payload, FilesPayload, Payload, TextPayload, ZlibPayload, skip
from medseg.io.stored import MAX_DEFLATE_RATIO, Stored, check_length, num_bytes
from medseg.io.volume import FileHeader

MAX_HEADER_BYTES = 2**20
MAX_DATA_FILES = 100_000

UNITS_NOT_MM = frozenset({"m", "cm", "um", "µm", "μm", "micron", "microns", "nm", "in", "inch", "meter", "metre", "micrometer"})

_PATTERN = re.compile(r"[^%]*%0?\d?d[^%]*")


def decode_text(data: bytes) -> str:
    """Decode header bytes so that `encode_text` gives the same bytes again."""
    return data.decode("utf-8", "surrogateescape")


def encode_text(text: str) -> bytes:
    """Encode header text; the inverse of `decode_text`."""
    return text.encode("utf-8", "surrogateescape")


def read_fields(path: Path, lines: Sequence[str], separator: str) -> dict[str, str]:
    """Split lines into fields; a field that is given twice is refused, since programs differ in which one they take.

    Raises:
        UserError: If a line is no field, or a field is there twice.
    """
    fields: dict[str, str] = {}
    for line in lines:
        key, found, value = line.partition(separator)
        key = key.strip()
        if not found or not key:
            raise UserError(
                f"{path}: expected a name, '{separator}' and a value on each line of the header, got {shown(line)}; repair it."
            )
        if key in fields:
            raise UserError(f"{path}: the header gives the field {shown(key)} twice; remove one of the lines.")
        fields[key] = value.strip()
    return fields


def shown(text: str) -> str:
    """Quote what came for a sentence: on one line, short, in letters of any alphabet that no terminal would act on."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def numbers(path: Path, text: str, count: int, name: str) -> list[float]:
    """Read numbers separated by blanks, commas or brackets.

    Raises:
        UserError: If there are not as many as expected.
    """
    words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    try:
        values = [float(word) for word in words if _is_plain(word)]
    except ValueError:
        values = []
    if len(words) != count or len(values) != count:
        raise UserError(f"{path}: expected {count} numbers in the header field '{name}', got {shown(text)}; repair the header.")
    return values


def whole_numbers(path: Path, text: str, name: str) -> list[int]:
    """Read whole numbers separated by blanks, at least one.

    Raises:
        UserError: If there is none, or a word is no whole number.
    """
    if not text:
        raise UserError(f"{path}: expected the field '{name}' in the header, but it is missing or empty; check the file.")
    try:
        values = [int(word) for word in text.split() if _is_plain(word)]
    except ValueError:
        values = []
    if len(values) != len(text.split()):
        raise UserError(f"{path}: expected whole numbers in the header field '{name}', got {shown(text)}; repair the header.")
    return values


def _is_plain(word: str) -> bool:
    # Python also takes 1_000 and the digits of other scripts; no other reader does. No number is so long.
    return word.isascii() and "_" not in word and len(word) < 400


def check_spacing(path: Path, steps: Sequence[float], text: str, name: str) -> None:
    """Refuse a spacing that is zero, negative or no number: of a negative one, readers make different sides.

    Raises:
        UserError: If so.
    """
    if not all(step > 0 for step in steps):
        raise UserError(
            f"{path}: expected a positive spacing on every axis, but the header field '{name}' is {shown(text)}; repair the "
            "header or export the scan again."
        )


def check_unit(path: Path, text: str, name: str) -> None:
    """Refuse a length unit other than mm: other readers do not look at it, so nobody knows who is right.

    Raises:
        UserError: If so.
    """
    for unit in text.replace('"', " ").split():
        if unit.lower() in UNITS_NOT_MM:
            raise UserError(f"{path}: expected lengths in mm, but the header field '{name}' is {shown(text)}; convert it to mm.")


def missing_remark(missing: dict[str, str]) -> tuple[str, ...]:
    """Tell what the header does not say and what is taken for it.

    Example:
        >>> missing_remark({"spacing": "1 mm", "origin": "0"})
        ('the header gives no spacing and no origin; taken instead: 1 mm and 0; check size, sides and place',)
    """
    if not missing:
        return ()
    lacking = " and ".join(f"no {name}" for name in missing)
    return (f"the header gives {lacking}; taken instead: {' and '.join(missing.values())}; check size, sides and place",)


@dataclass(frozen=True)
class VoxelFiles:
    """Where the voxels lie.

    Attributes:
        paths: The file, or several of equal shares in the order of the voxels.
        encoding: `raw`, `deflate` for zlib and gzip, `bzip2` or `text`.
        offset: First byte after the header.
        num_lines: Lines to pass over then.
        num_skipped: Bytes to pass over then, unpacked; -1: raw voxels are the last bytes of their file.
    """

    paths: tuple[Path, ...]
    encoding: str
    offset: int = 0
    num_lines: int = 0
    num_skipped: int = 0

    def first_byte(self, path: Path, share_bytes: int) -> int:
        """Where the voxels of one file start, packed or not; below 0 if they cannot lie there."""
        if self.num_skipped == -1:
            return path.stat().st_size - share_bytes
        with path.open("rb") as file:
            file.seek(self.offset)
            for _ in range(self.num_lines):
                if not file.readline():
                    break
            return file.tell() + (self.num_skipped if self.encoding == "raw" else 0)


def stored_voxels(
    path: Path,
    grid: VoxelGrid,
    header: FileHeader | None,
    dtype: np.dtype[Any],
    voxels: VoxelFiles,
    remarks: tuple[str, ...],
) -> Stored:
    """Describe a volume whose header has been read, after a check that its files can hold the voxels.

    Raises:
        UserError: If a file does not exist, is too short or too long, or the voxels cannot lie as the header says.
    """
    depth, height, width = grid.shape
    is_raw, num_files = voxels.encoding == "raw", len(voxels.paths)
    for data_path in voxels.paths:
        if not data_path.is_file():
            raise UserError(f"{path}: its voxels should lie in {shown(data_path.name)}, which does not exist; copy both files.")
    if depth % num_files or (not is_raw and num_files > 1) or min(voxels.num_lines, voxels.num_skipped) < -is_raw:
        raise UserError(
            f"{path}: expected its voxels as one stream, or plain in files of equally many slices, but the header gives "
            f"{num_files} {voxels.encoding} file(s) for {depth} slices and skips {voxels.num_skipped} bytes; save it as one file."
        )
    share = (depth // num_files, height, width)
    starts = [voxels.first_byte(data_path, num_bytes(share, dtype)) for data_path in voxels.paths]
    if is_raw:
        for data_path, start in zip(voxels.paths, starts, strict=True):
            check_length(path, share, dtype, data_path.stat().st_size - max(voxels.offset, start))
        parts = list(zip(voxels.paths, starts, strict=True))
        return Stored(path, grid, header, dtype, lambda: closing(FilesPayload(parts)), remarks=remarks)
    packed_bytes = voxels.paths[0].stat().st_size - starts[0]
    if voxels.encoding == "deflate":
        check_length(path, grid.shape, dtype, packed_bytes, MAX_DEFLATE_RATIO)

    @contextmanager
    def open_payload() -> Iterator[Payload]:
        with voxels.paths[0].open("rb") as file:
            file.seek(starts[0])
            payload = _decoded(file, voxels.encoding, dtype)
            skip(payload, voxels.num_skipped)
            yield payload

    return Stored(path, grid, header, dtype, open_payload, remarks=remarks, packed_bytes=packed_bytes)


def _decoded(file: BinaryIO, encoding: str, dtype: np.dtype[Any]) -> Payload:
    if encoding == "deflate":
        return ZlibPayload(file)
    return TextPayload(file, dtype) if encoding == "text" else Bzip2Payload(file)


def data_files(path: Path, value: str, following: Sequence[str]) -> tuple[Path, ...]:
    """Find the files that a header means: `name`, `name%03d.raw first last step`, or `LIST` and a name on each line that follows.

    Raises:
        UserError: If it means none.
    """
    words = value.split()
    if value.upper().split(" ")[0] == "LIST":
        names = [line.strip() for line in following if line.strip()]
    elif "%" in value and len(words) >= 4:
        pattern = _PATTERN.fullmatch(words[0])
        first, last, step = whole_numbers(path, " ".join(words[1:4]), "data file")
        numbers_of_files = range(first, last + (1 if step > 0 else -1), step) if step else range(0)
        if pattern is None or len(numbers_of_files) > MAX_DATA_FILES:
            raise UserError(f"{path}: expected a pattern such as 'slice%03d.raw 1 120 1', got {shown(value)}; repair the header.")
        names = [words[0] % number for number in numbers_of_files]
    else:
        names = [value]
    if not names or not all(names):
        raise UserError(f"{path}: expected the names of the files with the voxels, got {shown(value)}; repair the header.")
    return tuple(path.parent / name for name in names)
