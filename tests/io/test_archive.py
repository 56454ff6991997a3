"""Zip archives that Python cannot unpack."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from medseg.errors import UserError
from medseg.io.archive import unpacked

DEFLATE64 = 9  # how Windows packs files beyond 2 GB


def test_an_archive_of_windows_is_to_be_unpacked_by_another_program(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(mark) + place] = DEFLATE64
    path.write_bytes(content)
    with pytest.raises(UserError, match="another program, and give the folder"), unpacked(path):
        pass


def test_an_archive_that_cannot_be_opened_is_not_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with (
        pytest.raises(UserError, match=r"x\.zip: the zip archive cannot be read \(No such file"),
        unpacked(path),
    ):
        pass
