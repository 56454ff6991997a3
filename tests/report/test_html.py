"""Pictures inside of HTML pages."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from medseg.report.html import data_uri

# Bytes of the first chunk of a PNG, from the name `IHDR` on; its checksum follows.
HEADER = slice(12, 29)


def with_header(png: bytes, start: int, value: bytes) -> bytes:
    """Replace bytes of the header of a PNG, and correct its checksum."""
    damaged = bytearray(png)
    damaged[start : start + len(value)] = value
    damaged[29:33] = struct.pack(">I", zlib.crc32(bytes(damaged[HEADER])))
    return bytes(damaged)


@pytest.fixture
def png(tmp_path: Path) -> bytes:
    """Bytes of a small picture."""
    Image.new("RGB", (40, 30)).save(tmp_path / "whole.png")
    return (tmp_path / "whole.png").read_bytes()


@pytest.mark.parametrize("damage", ["short header", "huge size", "unknown chunk", "no file"])
def test_a_damaged_picture_is_left_out(damage: str, png: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    damaged = {
        "short header": png[:11] + b"\x04" + png[12:],
        "huge size": with_header(png, 16, struct.pack(">II", 2**30, 2**30)),
        "unknown chunk": png[:33] + struct.pack(">I", 4) + b"\x01\x02\x03\x04" + png[41:],
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    said: list[str] = []
    assert data_uri(path, said.append) == ""
    assert len(said) == 1
    assert said[0].startswith(f"{path} is left out: ")


def test_a_whole_picture_becomes_a_jpeg(png: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png)
    said: list[str] = []
    assert data_uri(tmp_path / "a.png", said.append).startswith("data:image/jpeg;base64,")
    assert said == []
