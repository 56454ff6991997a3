"""Malformed NRRD and MetaImage files: endless headers, missing data files, words for numbers."""

from __future__ import annotations

import bz2
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attack_tools import Attack, survive

pytestmark = pytest.mark.slow

SHAPE = (4, 6, 8)
HU = np.random.default_rng(20261122).integers(-1000, 1000, SHAPE, dtype=np.int16)
RAW = HU.tobytes()
CORNERS = np.array(
    [(10 + x * 1.25, 20 + y * 1.5, 30 + z * 3.0) for z in (0, 3) for y in (0, 5) for x in (0, 7)]
)
TEXT = " ".join(map(str, HU.ravel())).encode()
NRRD = {
    "type": "int16", "dimension": "3", "space": "LPS", "sizes": "8 6 4",
    "space directions": "(1.25,0,0) (0,1.5,0) (0,0,3)",
    "space origin": "(10,20,30)", "endian": "little", "encoding": "raw",
}  # fmt: skip
META = {
    "NDims": "3", "BinaryData": "True", "BinaryDataByteOrderMSB": "False",
    "CompressedData": "False", "TransformMatrix": "1 0 0 0 1 0 0 0 1",
    "Offset": "10 20 30", "ElementSpacing": "1.25 1.5 3", "DimSize": "8 6 4",
    "ElementType": "MET_SHORT", "ElementDataFile": "LOCAL",
}  # fmt: skip
Change = dict[str, "str | None"]


def nrrd(
    changes: Change, data: bytes = RAW, mark: bytes = b"NRRD0005\n", newline: str = "\n"
) -> bytes:
    fields = {key: value for key, value in (NRRD | changes).items() if value is not None}
    return (
        mark
        + "".join(f"{key}: {value}{newline}" for key, value in fields.items()).encode()
        + newline.encode()
        + data
    )


def meta(changes: Change, data: bytes = RAW, newline: str = "\n") -> bytes:
    fields = {key: value for key, value in (META | changes).items() if value is not None}
    return "".join(f"{key} = {value}{newline}" for key, value in fields.items()).encode() + data


BOMB = gzip.compress(bytes(2**27))
# Name to the file and whether the voxels that were written may come out.
NRRD_FILES: dict[str, tuple[bytes, bool]] = {
    "digits of another script in the sizes": (nrrd({"sizes": "\u0668 \u0666 \u0664"}), False),
    "digits of another script in the origin": (
        nrrd({"space origin": "(\u0661\u0660,\uff12\uff10,30)"}),
        False,
    ),
    "a superscript": (nrrd({"sizes": "8 6 2\u00b2"}), False),
    "a line without end": (nrrd({"content": "x" * 2**21}), False),
    "a header without end": (b"NRRD0005\n" + b"# comment\n" * 300_000, False),
    "zero bytes in a name": (nrrd({"na\0me": "x"}), False),
    "zero bytes in a value": (nrrd({"content": "\0\0"}), True),
    "zero bytes between numbers": (nrrd({"sizes": "8\0 6 4"}), False),
    "lines that end as on Windows": (nrrd({}, newline="\r\n"), True),
    "lines that end as on old Macs": (nrrd({}, newline="\r"), False),
    "UTF-16": (nrrd({}).decode("latin-1").encode("utf-16"), False),
    "a byte order mark": (b"\xef\xbb\xbf" + nrrd({}), False),
    "a version of the future": (nrrd({}, mark=b"NRRD9999\n"), False),
    "a version of words": (nrrd({}, mark=b"NRRDabcd\n"), False),
    "a million pairs": (b"NRRD0005\n" + b"".join(b"k%d:=v\n" % i for i in range(100_000)), False),
    "upper case": (nrrd({"ENDIAN": "little"}), False),
    "fields twice in another spelling": (nrrd({"Sizes": "8 6 4"}), False),
    "sizes whose product overflows": (nrrd({"sizes": "999999999 999999999 999999999"}), False),
    "sizes of zero": (nrrd({"sizes": "0 6 4"}), False),
    "signs": (nrrd({"sizes": "+8 +6 +4"}), False),
    "sixteen axes": (nrrd({"dimension": "16", "sizes": "8 6 4" + " 1" * 13}), False),
    "other frames": (
        nrrd(
            {
                "dimension": "5",
                "sizes": "8 6 2 2 1",
                "space directions": "(1.25,0,0) (0,1.5,0) (0,0,3) none none",
            }
        ),
        False,
    ),
    "a space of another order": (nrrd({"space": "scanner-xyz"}), True),
    "a space and its dimension": (nrrd({"space dimension": "3"}), False),
    "directions of denormals": (
        nrrd({"space directions": "(1e-99,0,0) (0,1e-99,0) (0,0,1e-99)"}),
        False,
    ),
    "directions of infinity": (nrrd({"space directions": "(inf,0,0) (0,inf,0) (0,0,inf)"}), False),
    "directions of large numbers": (
        nrrd({"space directions": "(1e99,0,0) (0,1e99,0) (0,0,1e99)"}),
        False,
    ),
    "directions that are parallel": (nrrd({"space directions": "(1,0,0) (1,0,0) (0,0,3)"}), False),
    "no direction at all": (nrrd({"space directions": "none none none"}), False),
    "a frame of directions": (nrrd({"measurement frame": "(1,0,0) (0,1,0) (0,0,nan)"}), True),
    "many skipped lines": (nrrd({"line skip": "999999999"}), False),
    "many skipped bytes": (nrrd({"byte skip": "999999999"}), False),
    "skipped bytes below -1": (nrrd({"byte skip": "-2"}), False),
    "many skipped packed bytes": (
        nrrd({"byte skip": "999999999", "encoding": "gzip"}, gzip.compress(RAW)),
        False,
    ),
    "bzip2 under the name of gzip": (nrrd({"encoding": "gzip"}, bz2.compress(RAW)), False),
    "gzip under the name of bzip2": (nrrd({"encoding": "bz2"}, gzip.compress(RAW)), False),
    "a bomb of gzip": (nrrd({"encoding": "gzip"}, BOMB), False),
    "a bomb that is promised": (
        nrrd({"encoding": "gzip", "sizes": "2000 2000 400"}, BOMB * 8),
        False,
    ),
    "a bomb of bzip2": (nrrd({"encoding": "bz2"}, bz2.compress(bytes(2**27))), False),
    "a bomb of bzip2 that is promised": (
        nrrd({"encoding": "bz2", "sizes": "4000 4000 4000"}, bz2.compress(bytes(2**24))),
        False,
    ),
    "a word without end": (nrrd({"encoding": "text"}, b"1" * 2**22), False),
    "words of hexadecimal": (nrrd({"encoding": "text"}, TEXT.replace(b" ", b" 0x", 1)), False),
    "words of NaN": (nrrd({"encoding": "text"}, b"nan " * HU.size), False),
    "words that overflow": (nrrd({"encoding": "text"}, b"99999 " * HU.size), False),
    "words of fractions": (nrrd({"encoding": "text"}, b"1.5 " * HU.size), False),
    "words on one line": (nrrd({"encoding": "text"}, TEXT), True),
    "words of which each has a line": (
        nrrd({"encoding": "text"}, TEXT.replace(b" ", b"\n\n\t\r\n")),
        True,
    ),
    "too many words": (nrrd({"encoding": "text"}, TEXT + b" 7"), False),
    "too few words": (nrrd({"encoding": "text"}, TEXT[:-5]), False),
    "words of another script": (nrrd({"encoding": "text"}, TEXT + "\u0661".encode()), False),
    "letters that look like others": (nrrd({"encoding": "a\u017fcii"}, TEXT), False),
    "a block type": (nrrd({"type": "block", "block size": "2"}), False),
    "an odd byte order": (nrrd({"endian": "middle"}), False),
    "the other byte order": (nrrd({"endian": "big"}, HU.astype(">i2").tobytes()), True),
    "units of a metre": (nrrd({"space units": '"m" "m" "m"'}), False),
    "a quote without end": (nrrd({"space units": '"mm "mm'}), False),
    "spaces everywhere": (
        nrrd({"sizes": "   8   6\t4   ", "space origin": " ( 10 , 20 , 30 ) "}),
        True,
    ),
}  # fmt: skip
META_FILES: dict[str, tuple[bytes, bool]] = {
    "digits of another script": (meta({"DimSize": "\u0668 \u0666 \u0664"}), False),
    "digits of another script in HeaderSize": (meta({"HeaderSize": "\u0660"}), False),
    "a line without end": (meta({"Comment": "x" * 2**21}), False),
    "a header without end": (
        b"Comment = x\n" + b"".join(b"K%d = x\n" % i for i in range(200_000)),
        False,
    ),
    "zero bytes": (meta({"Comm\0ent": "\0"}), True),
    "zero bytes between numbers": (meta({"DimSize": "8\x006\x004"}), False),
    "lines that end as on Windows": (meta({}, newline="\r\n"), True),
    "UTF-16": (meta({}).decode("latin-1").encode("utf-16"), False),
    "a byte order mark": (b"\xef\xbb\xbf" + meta({"NDims": "3"}), False),
    "another object": (b"ObjectType = Tube\n" + meta({}), True),
    "the data file not last": (
        b"ElementDataFile = LOCAL\n" + meta({"ElementDataFile": None}),
        False,
    ),
    "sizes whose product overflows": (meta({"DimSize": "999999999 999999999 999999999"}), False),
    "a size that is real": (meta({"DimSize": "8.0 6 4"}), False),
    "many channels": (meta({"ElementNumberOfChannels": "192", "DimSize": "1 1 1"}), False),
    "no channel": (meta({"ElementNumberOfChannels": "0"}), False),
    "an array type": (meta({"ElementType": "MET_SHORT_ARRAY"}), False),
    "a long type": (meta({"ElementType": "MET_LONG"}), False),
    "both byte orders": (meta({"ElementByteOrderMSB": "True"}, HU.astype(">i2").tobytes()), True),
    "a length of the packed voxels that lies": (
        meta({"CompressedData": "True", "CompressedDataSize": "5"}, zlib.compress(RAW)),
        True,
    ),
    "packed voxels that are text": (
        meta({"CompressedData": "True", "BinaryData": "False"}, zlib.compress(RAW)),
        True,
    ),
    "packed voxels that are plain": (meta({"CompressedData": "True"}), False),
    "raw deflate": (meta({"CompressedData": "True"}, zlib.compress(RAW)[2:-4]), False),
    "gzip in place of zlib": (meta({"CompressedData": "True"}, gzip.compress(RAW)), True),
    "zlib with a dictionary": (
        meta({"CompressedData": "True"}, b"\x78\x20" + bytes(4) + zlib.compress(RAW)[2:]),
        False,
    ),
    "two streams": (meta({"CompressedData": "True"}, zlib.compress(RAW) * 2), False),
    "a bomb": (meta({"CompressedData": "True"}, zlib.compress(bytes(2**27))), False),
    "a bomb that is promised": (
        meta(
            {"CompressedData": "True", "DimSize": "2000 2000 400"},
            zlib.compress(bytes(2**20)) + bytes(2**22),
        ),
        False,
    ),
    "a header size of -1 with packed voxels": (
        meta({"CompressedData": "True", "HeaderSize": "-1"}, zlib.compress(RAW)),
        False,
    ),
    "a header size of -2": (meta({"HeaderSize": "-2"}), False),
    "a header size beyond the file": (meta({"HeaderSize": "999999999"}), False),
    "a header size of -1": (meta({"HeaderSize": "-1"}, b"junk" + RAW), True),
    "a matrix of zeros": (meta({"TransformMatrix": "0 0 0 0 0 0 0 0 0"}), False),
    "a matrix of large numbers": (meta({"TransformMatrix": "1e99 0 0 0 1e99 0 0 0 1e99"}), False),
    "a matrix of NaN": (meta({"TransformMatrix": "nan 0 0 0 nan 0 0 0 nan"}), False),
    "a short matrix": (meta({"TransformMatrix": "1 0 0 0 1 0 0 0"}), False),
    "an origin of infinity": (meta({"Offset": "inf 0 0"}), False),
    "a spacing of denormals": (meta({"ElementSpacing": "1e-99 1e-99 1e-99"}), False),
    "a spacing of kilometres": (meta({"ElementSpacing": "1e6 1e6 1e6"}), False),
    "numbers of C": (meta({"ElementSpacing": "1.25f 1.5f 3f"}), False),
    "numbers of commas": (meta({"ElementSpacing": "1,25 1,5 3"}), False),
    "time as an axis": (
        meta(
            {
                "NDims": "4",
                "DimSize": "8 6 2 2",
                "TransformMatrix": "1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1",
                "Offset": "0 0 0 0",
                "ElementSpacing": "1 1 1 1",
            }
        ),
        False,
    ),
    "text without end": (meta({"BinaryData": "False"}, b"-" * 2**22), False),
    "text of signs": (meta({"BinaryData": "False"}, TEXT.replace(b" ", b" +-", 1)), False),
    "text": (meta({"BinaryData": "False"}, TEXT), True),
}  # fmt: skip
# Values of the field that names the voxels, in a folder with `v.raw`; whether they may be read.
DATA_FILES = {
    ".": False, "..": False, "/": False, "": False, "sub": False, "sub/v.raw": True, "v.raw": True,
    "./v.raw": True, "sub/../v.raw": False,
    "link.raw": True, "pipe.raw": False, "zero.raw": False, "a.nhdr": False, "a.mhd": False,
    "V.RAW": False, "v.raw ": True, "v.raw\0": False,
    "v\u00fc.raw": True, "%d.raw 1 4": False, "%d.raw 1 4 0": False, "%d.raw 1 99999999 1": False,
    "%n%n%n%n 1 4 1": False, "%99999999d 1 4 1": False,
    "%d.raw 4 1 1": False, "%d.raw 1 4 1": True, "%d.raw 1 4 1 2": True, "~/v.raw": False,
    "file:///etc/passwd": False, "C:\\v.raw": False, "x" * 5000: False,
}  # fmt: skip


@pytest.mark.parametrize(("suffix", "files"), [("nrrd", NRRD_FILES), ("mha", META_FILES)])
def test_malformed_headers_and_voxels(
    suffix: str, files: dict[str, tuple[bytes, bool]], tmp_path: Path
) -> None:
    def attacks() -> Iterator[Attack]:
        for number, (name, (data, is_readable)) in enumerate(files.items()):
            path = tmp_path / f"{number}.{suffix}"
            path.write_bytes(data)
            yield Attack(name, path, HU if is_readable else None, CORNERS if is_readable else None)

    survive(attacks(), 40)


@pytest.mark.parametrize("suffix", ["nhdr", "mhd"])
def test_data_files_that_are_none(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    for name in ("v.raw", "sub/v.raw", "v\u00fc.raw"):
        (folder / name).write_bytes(RAW)
    for number, plane in enumerate(HU, start=1):
        (folder / f"{number}.raw").write_bytes(plane.tobytes())
    (tmp_path / "secret.raw").write_bytes(RAW)
    (folder / "link.raw").symlink_to(tmp_path / "secret.raw")
    (folder / "zero.raw").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.raw")

    def attacks() -> Iterator[Attack]:
        path = folder / f"a.{suffix}"
        for value, is_readable in DATA_FILES.items():
            for listed in (False, True):
                key = "data file" if suffix == "nhdr" else "ElementDataFile"
                rest = f"{value}\n".encode() if listed else b""
                made = nrrd if suffix == "nhdr" else meta
                data = made({key: "LIST" if listed else value}, rest)
                # A list begins behind the line that says so; a NRRD header has no empty line before
                # it.
                path.write_bytes(data.replace(b"LIST\n\n", b"LIST\n"))
                is_right = is_readable and (not listed or "%" not in value)
                yield Attack(f"{value[:40]!r}, listed: {listed}", path, HU if is_right else None)
        many = "".join(f"{number}.raw\n" for number in range(1, 300_000)).encode()
        path.write_bytes(
            (
                nrrd({"data file": "LIST"}, b"")
                if suffix == "nhdr"
                else meta({"ElementDataFile": "LIST"}, b"")
            )
            + many
        )
        yield Attack("a list without end", path)

    survive(attacks(), 55)
