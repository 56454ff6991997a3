"""Malformed NIfTI files: contradicting fields, nested streams, things that are no files."""

from __future__ import annotations

import gzip
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attack_tools import Attack, survive

pytestmark = pytest.mark.slow

SEED = 20261122
SHAPE = (4, 6, 8)
SPACING_MM = (3.0, 1.5, 1.25)
HU = np.random.default_rng(SEED).integers(-1000, 1000, SHAPE, dtype=np.int16)
CORNERS = np.array([(-x * 1.25, -y * 1.5, z * 3.0) for z in (0, 3) for y in (0, 5) for x in (0, 7)])


def block(**fields: object) -> bytearray:
    """A NIfTI-1 header without sform and qform; `fields` are set by name."""
    header = bytearray(352)
    values: dict[str, object] = {
        "sizeof_hdr": 348, "dim": (3, 8, 6, 4, 1, 1, 1, 1), "datatype": 4, "bitpix": 16,
        "pixdim": (1.0, 1.25, 1.5, 3.0, 0, 0, 0, 0),
        "vox_offset": 352.0, "scl_slope": 1.0, "scl_inter": 0.0, "xyzt_units": 2, "qform_code": 0,
        "sform_code": 1,
        "quatern": (0.0,) * 6, "srow": (1.25, 0, 0, 0, 0, 1.5, 0, 0, 0, 0, 3.0, 0),
        "magic": b"n+1\0", "extension": b"\0\0\0\0", **fields,
    }  # fmt: skip
    places = {
        "sizeof_hdr": ("i", 0), "dim": ("8h", 40), "datatype": ("h", 70), "bitpix": ("h", 72),
        "pixdim": ("8f", 76), "vox_offset": ("f", 108),
        "scl_slope": ("f", 112), "scl_inter": ("f", 116), "xyzt_units": ("B", 123),
        "qform_code": ("h", 252), "sform_code": ("h", 254),
        "quatern": ("6f", 256), "srow": ("12f", 280), "magic": ("4s", 344),
        "extension": ("4s", 348),
        "slice": ("hhB", 74), "cal": ("2f", 124), "dim_info": ("B", 39), "intent": ("3f", 56),
        "descrip": ("80s", 148),
    }  # fmt: skip
    for name, value in values.items():
        kind, offset = places[name]
        struct.pack_into(
            "<" + kind, header, offset, *(value if isinstance(value, tuple) else (value,))
        )
    return header


NAN, INF = float("nan"), float("inf")
# Fields and whether the voxels that were written may come out (a reader may ignore the field, or
# refuse it).
FIELDS: list[tuple[dict[str, object], bool]] = [
    *[
        ({"dim": (3, *dims, 1, 1, 1, 1)}, False)
        for dims in [
            (32767, 32767, 32767),
            (-8, 6, 4),
            (8, 6, 5),
            (8, 6, 3),
            (0, 6, 4),
            (4, 6, 8000),
            (1, 1, 1),
        ]
    ],
    *[
        ({"dim": (count, 8, 6, 4, 1, 1, 1, 1)}, count in (4, 5, 6, 7))
        for count in (-1, 0, 1, 2, 4, 5, 6, 7, 8, 300)
    ],
    ({"dim": (4, 8, 6, 2, 2, 1, 1, 1)}, False),
    ({"dim": (5, 8, 6, 2, 1, 2, 1, 1)}, False),
    ({"dim": (7, 8, 6, 4, 1, 1, 1, 32767)}, False),
    ({"dim": (3, 8, 6, 4, -5, -5, -5, -5)}, True),
    *[
        ({"datatype": code}, False)
        for code in (
            0,
            1,
            2,
            8,
            16,
            32,
            64,
            128,
            255,
            256,
            768,
            1024,
            1280,
            1536,
            1792,
            2048,
            2304,
            -4,
            32767,
        )
    ],
    *[({"bitpix": bits}, True) for bits in (0, 1, 8, 32, -16, 32767)],
    *[
        ({"vox_offset": offset}, offset == 0)
        for offset in (
            0.0,
            -352.0,
            351.0,
            352.5,
            353.0,
            354.0,
            400.0,
            1e9,
            1e38,
            NAN,
            INF,
            -INF,
            348.0,
            1e-30,
        )
    ],
    *[
        ({"scl_slope": slope}, slope in (0.0, 1.0) or slope != slope or slope in (INF, -INF))
        for slope in (0.0, NAN, INF, -INF)
    ],
    *[
        ({"scl_slope": slope, "scl_inter": inter}, False)
        for slope, inter in [(1e38, 0.0), (-1e38, 1e38), (1.0, NAN), (1.0, INF)]
    ],
    *[
        ({"xyzt_units": units}, units & 7 in (0, 2, 4, 5, 6, 7))
        for units in (0, 7, 4, 5, 6, 248, 255)
    ],
    *[
        ({"pixdim": (qfac, 1.25, 1.5, 3.0, 0, 0, 0, 0)}, True)
        for qfac in (0.0, 2.0, -1.0, -0.0, NAN, 1e30)
    ],
    *[
        ({"sform_code": 0, "pixdim": (1.0, *steps, 0, 0, 0, 0)}, False)
        for steps in [
            (0.0, 1.5, 3.0),
            (-1.25, 1.5, 3.0),
            (NAN, 1.5, 3.0),
            (1e-30, 1.5, 3.0),
            (1e-38, 1e-38, 1e-38),
            (1e30, 1.5, 3.0),
            (INF, 1.5, 3.0),
            (1e-45, 1.5, 3.0),
        ]
    ],
    *[
        ({"srow": row}, False)
        for row in [
            (0.0,) * 12,
            (NAN,) * 12,
            (1.25, 0, 0, NAN, 0, 1.5, 0, 0, 0, 0, 3.0, 0),
            (1.25, 0, 0, 3e38, 0, 1.5, 0, 0, 0, 0, 3.0, 0),
            (1e-44, 0, 0, 0, 0, 1.5, 0, 0, 0, 0, 3.0, 0),
            (1.25, 1.25, 0, 0, 0, 0, 0, 0, 0, 0, 3.0, 0),
            (1.25, 0, 0, 0, 0, 1.5, 0, 0, 0, 1.5, 0, 0),
            (3e38,) * 12,
            (1.25, 0.5, 0, 0, 0, 1.5, 0, 0, 0, 0, 3.0, 0),
        ]
    ],
    *[({"sform_code": code}, True) for code in (2, 3, 4, 5, 99, 32767)],
    *[
        ({"sform_code": 0, "qform_code": 1, "quatern": quatern}, False)
        for quatern in [
            (1.0, 1.0, 1.0, 0.0, 0.0, 0.0),
            (NAN, 0.0, 0.0, 0.0, 0.0, 0.0),
            (INF, 0.0, 0.0, 0.0, 0.0, 0.0),
            (0.0, 0.0, 0.0, NAN, 0.0, 0.0),
            (1e30, 0.0, 0.0, 0.0, 0.0, 0.0),
        ]
    ],
    *[({"magic": magic}, False) for magic in (b"ni1\0", b"n+2\0", b"\0\0\0\0", b"n+3\0", b"N+1\0")],
    ({"magic": b"n+1X"}, False),
    *[({"sizeof_hdr": size}, False) for size in (0, 349, 540, 1543569408, -348)],
    *[({"extension": extension}, True) for extension in (b"\1\0\0\0", b"\xff\xff\xff\xff")],
    ({"descrip": b"\x1b[2J\n" * 16}, True),
    ({"slice": (32767, -1, 255)}, True),
    ({"cal": (NAN, INF)}, True),
    ({"dim_info": 255}, True),
    ({"intent": (NAN, NAN, NAN)}, True),
]  # fmt: skip


# Headers that are strange and whole: their voxels may be read as they say.
UNUSUAL: list[tuple[dict[str, object], np.ndarray]] = [
    ({"dim": (3, 6, 8, 4, 1, 1, 1, 1)}, HU.reshape(4, 8, 6)),
    ({"datatype": 512}, HU.view(np.uint16).astype(np.float32)),
    ({"scl_slope": 1e-45}, (HU * 1.401298464324817e-45).astype(np.float32)),
    ({"scl_inter": 3e38}, (HU + np.float64(np.float32(3e38))).astype(np.float32)),
]


def _field_attacks(folder: Path) -> Iterator[Attack]:
    for number, (fields, is_readable) in enumerate(FIELDS):
        path = folder / f"f{number}.nii"
        path.write_bytes(block(**fields) + HU.tobytes())
        yield Attack(
            f"{fields}", path, HU if is_readable else None, CORNERS if is_readable else None
        )
    for number, (fields, values) in enumerate(UNUSUAL):
        path = folder / f"u{number}.nii"
        path.write_bytes(block(**fields) + HU.tobytes())
        yield Attack(f"{fields}", path, values)


def _stream_attacks(folder: Path) -> Iterator[Attack]:
    plain = bytes(block()) + HU.tobytes()
    packed = gzip.compress(plain, mtime=0)
    bomb = gzip.compress(bytes(2**28))
    streams: dict[str, tuple[bytes, bool]] = {
        "gzip within gzip": (gzip.compress(packed), False),
        "two members": (gzip.compress(plain[:400]) + gzip.compress(plain[400:]), True),
        "many members": (
            b"".join(gzip.compress(plain[start : start + 7]) for start in range(0, len(plain), 7)),
            True,
        ),
        "empty members between": (gzip.compress(b"") * 1000 + packed, True),
        "zeros behind the stream": (packed + bytes(100), True),
        "bytes behind the stream": (packed + b"garbage", False),
        "a second scan behind": (packed * 2, False),
        "a wrong length": (packed[:-4] + struct.pack("<I", 7), False),
        "a wrong checksum": (packed[:-8] + bytes(4) + packed[-4:], False),
        "an extra field that never ends": (
            b"\x1f\x8b\x08\x04" + bytes(6) + b"\xff\xff" + packed,
            False,
        ),
        "a file name that never ends": (b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * 10**6, False),
        "an unknown method": (b"\x1f\x8b\x07" + packed[3:], False),
        "reserved flags": (b"\x1f\x8b\x08\xe0" + packed[4:], True),
        "zlib in its place": (zlib.compress(plain), False),
        "a bomb": (bomb, False),
        "a bomb behind the header": (
            gzip.compress(bytes(block(dim=(3, 8, 6, 4, 1, 1, 1, 1)))) + bomb * 4,
            False,
        ),
        "a bomb that the header promises": (
            gzip.compress(bytes(block(dim=(3, 2000, 2000, 400, 1, 1, 1, 1)))) + bomb * 8,
            False,
        ),
        "a bomb in front": (
            gzip.compress(bytes(block(vox_offset=float(2**28 + 352))))
            + bomb
            + gzip.compress(HU.tobytes()),
            True,
        ),
        "ten bytes": (packed[:10], False),
        "nothing": (b"", False),
        "one byte": (b"\x1f", False),
        "the header alone": (gzip.compress(plain[:352]), False),
        "half a header": (gzip.compress(plain[:200]), False),
    }
    for number, (name, (data, is_readable)) in enumerate(streams.items()):
        path = folder / f"s{number}.nii.gz"
        path.write_bytes(data)
        yield Attack(name, path, HU if is_readable else None)
    (folder / "plain.nii.gz").write_bytes(plain)
    yield Attack("plain voxels under the name of packed ones", folder / "plain.nii.gz", HU, CORNERS)
    (folder / "packed.nii").write_bytes(packed)
    yield Attack("packed voxels under the name of plain ones", folder / "packed.nii", HU, CORNERS)


def _value_attacks(folder: Path) -> Iterator[Attack]:
    """Voxels of other types, with values that HU cannot have."""
    rng = np.random.default_rng(SEED)
    air = np.float32(-1024)
    for code, dtype, values in [
        (16, "f4", np.full(SHAPE, NAN)),
        (16, "f4", np.where(rng.random(SHAPE) < 0.5, NAN, INF)),
        (64, "f8", rng.normal(0, 1e300, SHAPE)),
        (64, "f8", np.full(SHAPE, 5e-324)),
        (512, "u2", np.full(SHAPE, 65535)),
        (768, "u4", np.full(SHAPE, 2**32 - 1)),
        (1024, "i8", np.full(SHAPE, -(2**63))),
        (1280, "u8", np.full(SHAPE, 2**64 - 1, np.uint64)),
        (256, "i1", np.full(SHAPE, -128)),
        (2, "u1", np.full(SHAPE, 255)),
    ]:
        stored = values.astype("<" + dtype)
        with np.errstate(over="ignore"):
            seen = stored.astype(np.float32)
        path = folder / f"{dtype}{code}{len(list(folder.iterdir()))}.nii"
        path.write_bytes(block(datatype=code, bitpix=8 * stored.dtype.itemsize) + stored.tobytes())
        is_number = np.isfinite(seen)
        yield Attack(
            f"{dtype} {stored.flat[0]}",
            path,
            np.where(is_number, seen, air) if is_number.any() else None,
        )


def _file_attacks(folder: Path) -> Iterator[Attack]:
    """Files that are no files, and names that are no names."""
    plain = bytes(block()) + HU.tobytes()
    for suffix in (".nii", ".nii.gz"):
        os.mkfifo(folder / f"pipe{suffix}")
        yield Attack("a pipe", folder / f"pipe{suffix}")
        for device in ("zero", "null", "random", "full", "tty", "stdin"):
            (folder / f"{device}{suffix}").symlink_to(f"/dev/{device}")
            yield Attack(f"a link to {device}", folder / f"{device}{suffix}")
        (folder / f"loop{suffix}").symlink_to(folder / f"loop{suffix}")
        yield Attack("a link to itself", folder / f"loop{suffix}")
        (folder / f"folder{suffix}").mkdir()
        yield Attack("a folder", folder / f"folder{suffix}")
        (folder / suffix).write_bytes(plain)
        yield Attack("a suffix alone", folder / suffix)
    for device in (
        "/dev/zero",
        "/dev/null",
        "/dev/mem",
        "/proc/self/mem",
        "/proc/self/pagemap",
        "/proc/kmsg",
        "/sys",
    ):
        yield Attack(device, Path(device))
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket has 107 bytes at most
        listener.bind("socket.nii")
        os.chdir(here)
        yield Attack("a socket", folder / "socket.nii")
    for name in (
        "a\nb\x1b[2J.nii",
        os.fsdecode(b"\xff\xfe.nii"),
        "%s%n%x.nii",
        " .nii",
        "-i.nii",
        "=1+1.nii",
        "a" * 251 + ".nii",
        "\u202egnp.nii",
    ):
        (folder / name).write_bytes(plain)
        yield Attack(f"the name {name!r}", folder / name, HU, CORNERS)
    sparse = folder / "sparse.nii"
    sparse.write_bytes(block(dim=(3, 4000, 4000, 4000, 1, 1, 1, 1)))
    os.truncate(sparse, 352 + 2 * 4000**3)
    yield Attack("a sparse file of 128 GB", sparse)
    yield Attack("a name with a zero byte", folder / "a\0b.nii")
    yield Attack("a name that is too long", folder / ("a" * 5000 + ".nii"))


@pytest.mark.parametrize(
    ("attacks", "at_least"),
    [(_field_attacks, 100), (_stream_attacks, 25), (_value_attacks, 10), (_file_attacks, 35)],
)
def test_malformed_nifti_files(attacks, at_least: int, tmp_path: Path) -> None:
    survive(attacks(tmp_path), at_least)
