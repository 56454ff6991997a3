"""Streams of voxel bytes: plain, packed, written as text, in several files."""

from __future__ import annotations

import bz2
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from isal import isal_zlib
from isal.igzip_lib import IsalError

PACKED_BYTES = 2**18
"""Compressed bytes that are taken from a file at once."""

ZLIB_OR_GZIP = 47  # window bits: 15, and 32 more to recognise both formats
GZIP_MAGIC = b"\x1f\x8b"


class DamagedError(Exception):
    """A stream of bytes is not what it should be; says how."""


class Payload(Protocol):
    """A stream of voxel bytes, x fastest; an empty answer means its end."""

    def read(self, size: int, /) -> Any:
        """Give at most `size` bytes, size > 0.

        Raises:
            DamagedError: If the stream is cut short or no stream of its kind.
        """


Opener = Callable[[], AbstractContextManager[Payload]]


class ZlibPayload:
    """Decode a zlib or gzip stream (also of several members) without holding all of it; checksums are compared.

    ISA-L decodes a scan in half of zlib's time, and lets other threads run meanwhile.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = isal_zlib.decompressobj(ZLIB_OR_GZIP)
        self._packed = b""

    def read(self, size: int, /) -> bytes:
        """Give at most `size` decoded bytes."""
        while True:
            packed = self._packed or self._file.read(PACKED_BYTES)
            if self._decoder.eof:
                if not packed:
                    return b""
                if not packed.strip(b"\0"):  # some programs fill up a file with zeros
                    self._packed = b""
                    continue
                if not packed.startswith(GZIP_MAGIC):
                    raise DamagedError("other bytes follow its compressed voxels")
                self._decoder = isal_zlib.decompressobj(ZLIB_OR_GZIP)
            try:
                data = self._decoder.decompress(packed, size)
            except IsalError as error:  # type: ignore[misc]  # its stub forgets the base class
                raise DamagedError(f"its compressed voxels are damaged: {error}") from None
            self._packed = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
            if data:
                return data
            if not packed and not self._decoder.eof:
                raise DamagedError("its compressed voxels end too early")


class Bzip2Payload:
    """Decode a bzip2 stream; checksums are compared."""

    def __init__(self, file: BinaryIO) -> None:
        self._stream = bz2.BZ2File(file)

    def read(self, size: int, /) -> bytes:
        """Give at most `size` decoded bytes."""
        try:
            return self._stream.read(size)
        except (OSError, EOFError) as error:
            raise DamagedError(f"its compressed voxels are damaged: {error}") from None


class FilesPayload:
    """Read files one after the other, each from a byte of its own to its end."""

    def __init__(self, parts: Sequence[tuple[Path, int]]) -> None:
        self._parts = list(parts)
        self._file: BinaryIO | None = None

    def read(self, size: int, /) -> bytes:
        """Give at most `size` bytes."""
        while True:
            if self._file is None:
                if not self._parts:
                    return b""
                path, start = self._parts.pop(0)
                self._file = path.open("rb")
                self._file.seek(start)
            if data := self._file.read(size):
                return data
            self.close()

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TextPayload:
    """Encode numbers that are written as text, separated by white space."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._dtype = dtype
        self._rest = b""
        self._encoded = b""

    def read(self, size: int, /) -> bytes:
        """Give at most `size` bytes of encoded numbers.

        Raises:
            DamagedError: If a word is no number of the type.
        """
        while not self._encoded:
            text = self._file.read(PACKED_BYTES)
            # The last word may go on in the next part of the file.
            words = (self._rest + text).split() if text else self._rest.split()
            self._rest = words.pop() if text and words and not text[-1:].isspace() else b""
            if not text and not words:
                return b""
            self._encoded = self._encode(words)
        data, self._encoded = self._encoded[:size], self._encoded[size:]
        return data

    def _encode(self, words: Sequence[bytes]) -> bytes:
        parse: Callable[[bytes], Any] = float if self._dtype.kind == "f" else int
        try:
            if any(b"_" in word for word in words):  # Python alone takes 1_000 for a number
                raise ValueError
            return np.array([parse(word) for word in words], dtype=self._dtype).tobytes()
        except (ValueError, OverflowError):
            raise DamagedError(f"a word of its voxels is no number of the type {self._dtype.name}") from None


def is_gzip(path: Path) -> bool:
    """Whether a file is gzip by its first bytes: names lie."""
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


@contextmanager
def open_packed(path: Path) -> Iterator[Payload]:
    """Open the bytes of a file, unpacked where it is gzip."""
    is_packed = is_gzip(path)
    with path.open("rb") as file:
        yield ZlibPayload(file) if is_packed else file


def read_up_to(payload: Payload, size: int) -> Any:
    """Read this many bytes, fewer only at the end of the stream."""
    data = payload.read(size)
    if len(data) < size:
        data = bytearray(data)
        while len(data) < size and (more := payload.read(size - len(data))):
            data += more
    return data


def skip(payload: Payload, size: int) -> int:
    """Pass over this many bytes without keeping them; gives how many there were."""
    left = size
    while left and (data := payload.read(min(left, PACKED_BYTES))):
        left -= len(data)
    return size - left
