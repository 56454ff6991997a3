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


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_one_name_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("d/IM1", "a"), ("d/IM1", "b"), ("../d/IM1", "c"), ("d/IM2", "d")):
            archive.writestr(name, content)
    with unpacked(path) as folder:
        files = {file.name: file.read_text() for file in (folder / "d").iterdir()}
    assert files == {"IM1": "a", "2_IM1": "b", "3_IM1": "c", "IM2": "d"}
