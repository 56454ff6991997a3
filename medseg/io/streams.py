"""Voxel streams: plain, compressed or written as text, decoded slab by slab in bounded memory."""

from __future__ import annotations

import bz2
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal import igzip
from isal.igzip_lib import DECOMP_ZLIB, IgzipDecompressor

from medseg.errors import UserError, require
from medseg.io.checks import describe

SLAB_BYTES = 2**21
"""Bytes that are decoded at once: large enough for speed, small beside a volume."""

PACKED_BYTES = 2**18
"""Bytes of a compressed stream that are taken from the file at once."""


class ChunkStream:
    """A stream of the chunks that a decoder yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = bytearray()

    def read(self, size: int, /) -> bytearray:
        """Return the next `size` bytes, fewer at the end."""
        while len(self._rest) < size and (chunk := next(self._chunks, None)) is not None:
            self._rest += chunk
        data = self._rest[:size]
        del self._rest[:size]
        return data


def is_gzip(file: BinaryIO) -> bool:
    """Whether gzip data begin at the current position: names and headers are often wrong about it."""
    magic = file.read(2)
    file.seek(-len(magic), 1)
    return magic == b"\x1f\x8b"


def open_stream(path: Path, file: BinaryIO, encoding: str, dtype: np.dtype[Any]) -> Any:
    """Decode a file from its current position on; checksums are compared at the end.

    Args:
        path: File, for messages.
        file: The open file.
        encoding: `raw`, `deflate` (gzip or zlib), `bzip2` or `text`.
        dtype: Type of the voxels.

    Returns:
        An object whose `read(size)` returns `size` bytes, fewer at the end.
    """
    if encoding == "bzip2":
        return bz2.BZ2File(file)
    if encoding == "deflate":
        return igzip.IGzipFile(fileobj=file, mode="rb") if is_gzip(file) else ChunkStream(_inflate(path, file))
    return ChunkStream(_encode_text(path, file, dtype)) if encoding == "text" else file


def _inflate(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Decode a zlib stream; ISA-L needs half of zlib's time and releases the GIL."""
    decoder = IgzipDecompressor(DECOMP_ZLIB)
    while not decoder.eof:
        packed = file.read(PACKED_BYTES) if decoder.needs_input else b""
        if decoder.needs_input and not packed:
            raise EOFError
        yield decoder.decompress(packed, PACKED_BYTES)
    # Some programs fill up the file with zeros.
    rest = decoder.unused_data + file.read(PACKED_BYTES)
    require(not rest.strip(b"\0"), f"{path}: the file cannot be read: other bytes follow its compressed voxels; export it again.")


def _encode_text(path: Path, file: BinaryIO, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Convert numbers that are separated by white space to bytes."""
    for line in file:
        try:
            if b"_" in line:  # Python alone takes 1_000 for a number
                raise ValueError
            yield np.array(line.split(), "S").astype(dtype).tobytes() if line.strip() else b""
        except (ValueError, OverflowError):
            raise UserError(
                f"{path}: the file cannot be read: a word of its voxels is no number of the type {dtype.name}; export it again."
            ) from None


def skip(stream: Any, size: int) -> None:
    """Pass over this many bytes, fewer at the end of the stream."""
    while size > 0 and (data := stream.read(min(size, PACKED_BYTES))):
        size -= len(data)


def read_slabs(path: Path, stream: Any, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> Iterator[np.ndarray]:
    """Yield the voxels of a stream slab by slab along z.

    Args:
        path: File, for messages.
        stream: Bytes of exactly one volume.
        shape: Its size in voxels (D, H, W).
        dtype: Type of the stored values, with byte order.

    Raises:
        UserError: If the stream holds fewer or more bytes.
    """
    depth, height, width = shape
    slice_bytes = height * width * dtype.itemsize
    per_slab = max(1, SLAB_BYTES // slice_bytes)
    for first in range(0, depth, per_slab):
        count = min(per_slab, depth - first)
        data = stream.read(count * slice_bytes)
        require(
            len(data) == count * slice_bytes,
            f"{path}: expected {depth} slices, but the file ends in slice {first + len(data) // slice_bytes + 1}; it is truncated or "
            "damaged: copy or export it again.",
        )
        yield np.frombuffer(data, dtype).reshape(count, height, width)
    # A compressed stream compares its checksum when its end is read.
    require(not stream.read(1), surplus(path, shape, dtype))


def num_bytes(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> int:
    """Count the bytes of a volume."""
    return shape[0] * shape[1] * shape[2] * dtype.itemsize


def expected_bytes(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> str:
    """Write the beginning of a message about the length of a file."""
    return f"{path}: expected {num_bytes(shape, dtype)} bytes of voxels ({describe(shape[::-1])} of {dtype.itemsize} bytes)"


def surplus(path: Path, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> str:
    """Write the message about a file with more bytes than its header promises."""
    return f"{expected_bytes(path, shape, dtype)}, but the file holds more; its header belongs to other voxels: export it again."
