"""Checksums of files, against the library's on their whole content."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from medseg.data.source_files import crc32_of, is_intact


@pytest.mark.parametrize("num_bytes", [0, 5, 2**22, 2 * 2**22 + 5])
def test_the_checksum_is_of_all_bytes(num_bytes: int, tmp_path: Path) -> None:
    """A file is read in blocks of 2^22 bytes."""
    content = np.random.default_rng(1).bytes(num_bytes)
    (tmp_path / "file").write_bytes(content)
    assert crc32_of(tmp_path / "file") == zlib.crc32(content)


def test_damage_at_the_beginning_is_found(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2**22 + 5))
    checksum = crc32_of(path)
    assert is_intact(path, checksum, path.stat().st_size, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.write(b"\1")
    os.utime(path, ns=(1, 1))
    assert not is_intact(path, checksum, path.stat().st_size, path.stat().st_mtime_ns)
