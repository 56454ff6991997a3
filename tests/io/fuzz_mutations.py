"""Valid files, and ways to damage them; everything follows from one seed."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from io_volumes import make_hu

Files = dict[str, bytes]
RNG = np.random.Generator

NUMBERS = [
    "0", "-1", "1", "2", "0.0", "-0.5", "1e30", "-1e30", "1e-30", "1e999", "nan", "-inf", "65535",
    "65536", "2147483648",
    "9223372036854775807", "99999999999999999999999", "1.5", "0x10", "1_0", "", "x", "9 9", "%d",
    "9" * 5000,
]  # fmt: skip
WORDS = [
    "True", "False", "LOCAL", "LIST", "LIST 2", "big", "little", "raw", "gzip", "bzip2", "ascii",
    "hex", "short", "float", "double",
    "MET_SHORT", "MET_FLOAT", "MET_UCHAR", "unsigned char", "none", "right-anterior-superior",
    "scanner-xyz", "v.raw", "a%03d.raw 1 5 1",
    "a%d.raw 1 999999999 1", "../a", ".", "/dev/zero", "um",
]  # fmt: skip
NIFTI_1_FIELDS = [
    ("i", 0), *[("h", 40 + 2 * n) for n in range(8)], ("h", 70), ("h", 72),
    *[("f", 76 + 4 * n) for n in range(8)], ("f", 108),
    ("f", 112), ("f", 116), ("B", 123), ("h", 252), ("h", 254),
    *[("f", 256 + 4 * n) for n in range(18)], ("4s", 344),
]  # fmt: skip
NIFTI_2_FIELDS = [
    ("i", 0), ("8s", 4), ("h", 12), *[("q", 16 + 8 * n) for n in range(8)],
    *[("d", 104 + 8 * n) for n in range(8)], ("q", 168),
    ("d", 176), ("d", 184), ("i", 344), ("i", 348), *[("d", 352 + 8 * n) for n in range(18)],
    ("i", 500),
]  # fmt: skip
INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    16,
    32,
    64,
    127,
    128,
    255,
    512,
    1024,
    2**15 - 1,
    -(2**15),
    2**31 - 1,
    -(2**31),
    2**62,
]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    3.5,
    1e-30,
    1e30,
    -1e30,
    3e38,
    float("nan"),
    float("inf"),
    -float("inf"),
    352.0,
    353.0,
    1e6,
]


@dataclass(frozen=True)
class Sample:
    """A valid file.

    Attributes:
        kind: `nifti`, `nrrd` or `metaimage`.
        name: The file to read.
        files: It, and the one with its voxels.
        header_bytes: Length of its header.
        order: Byte order of a binary header.
    """

    kind: str
    name: str
    files: Files
    header_bytes: int
    order: str = ""


def nifti_block(version: int, order: str, dtype: str, slope: float) -> bytes:
    """A header with an oblique sform and the qform that agrees with it; voxels follow."""
    turn, spacing, origin = (
        np.array([[0.8, -0.6, 0], [0.6, 0.8, 0], [0, 0, 1.0]]),
        np.array([0.7, 0.8, 2.5]),
        [-120.25, 33.5, -1434.5],
    )
    quaternion = [0.0, 0.0, float(np.sin(np.arctan2(0.6, 0.8) / 2))]
    code = {"i2": 4, "f4": 16}[dtype]
    rows = [
        number
        for row, shift in zip((turn * spacing).tolist(), origin, strict=True)
        for number in (*row, shift)
    ]
    block = bytearray(352 if version == 1 else 544)

    def put(kind: str, first: int, *values: object) -> None:
        struct.pack_into(order + kind, block, first, *values)

    size = np.dtype(dtype).itemsize * 8
    if version == 1:
        (
            put("i", 0, 348),
            put("8h", 40, 3, 9, 7, 5, 1, 1, 1, 1),
            put("2h", 70, code, size),
            put("8f", 76, 1, *spacing, 0, 0, 0, 0),
        )
        (
            put("3f", 108, 352, slope, -3.0),
            put("B", 123, 2),
            put("2h", 252, 1, 1),
            put("6f", 256, *quaternion, *origin),
        )
        put("12f", 280, *rows)
        block[344:348] = b"n+1\0"
    else:
        (
            put("i", 0, 540),
            put("2h", 12, code, size),
            put("8q", 16, 3, 9, 7, 5, 1, 1, 1, 1),
            put("8d", 104, 1, *spacing, 0, 0, 0, 0),
        )
        (
            put("q", 168, 544),
            put("2d", 176, slope, -3.0),
            put("2i", 344, 1, 1),
            put("6d", 352, *quaternion, *origin),
            put("12d", 400, *rows),
        )
        put("i", 500, 2)
        block[4:12] = b"n+2\0\r\n\x1a\n"
    return bytes(block)


def _samples() -> list[Sample]:
    hu = make_hu()
    raw, big, real = (
        hu.astype("<i2").tobytes(),
        hu.astype(">i2").tobytes(),
        (hu.astype("<f4") + 0.25).tobytes(),
    )
    place = (
        "space: left-posterior-superior\nsizes: 9 7 5\n"
        "space directions: (0.56,0.42,0) (-0.48,0.64,0) (0,0,2.5)\n"
    )
    nrrd = (
        "NRRD0004\n# made by hand\ntype: {}\ndimension: 3\n"
        + place
        + "kinds: domain domain domain\nendian: {}\nencoding: {}\n"
    )
    nrrd += "space origin: (-120.25,33.5,-1434.5)\nnote:=kept\n{}\n"
    meta = (
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = {}\n"
        "CompressedData = {}\n"
    )
    meta += (
        "TransformMatrix = 0.8 0.6 0 -0.6 0.8 0 0 0 1\nOffset = -120.25 33.5 -1434.5\n"
        "ElementSpacing = 0.7 0.8 2.5\n"
    )
    meta += "DimSize = 9 7 5\nElementType = {}\nElementDataFile = {}\n"
    made: list[tuple[str, str, bytes, bytes, str]] = [
        ("nifti", "a.nii", nifti_block(1, "<", "i2", 1.0), raw, "<"),
        ("nifti", "a.nii", nifti_block(2, ">", "i2", 2.0), big, ">"),
        ("nifti", "a.nii.gz", nifti_block(1, "<", "f4", 0.0), real, "<"),
        ("nrrd", "a.nrrd", nrrd.format("short", "big", "raw", "").encode(), big, ""),
        (
            "nrrd",
            "a.nrrd",
            nrrd.format("float", "little", "gzip", "").encode(),
            gzip.compress(real, mtime=0),
            "",
        ),
        (
            "nrrd",
            "a.nhdr",
            nrrd.format("short", "little", "raw", "data file: v.raw").encode(),
            raw,
            "",
        ),
        (
            "metaimage",
            "a.mha",
            meta.format("True", "False", "MET_SHORT", "LOCAL").encode(),
            big,
            "",
        ),
        (
            "metaimage",
            "a.mha",
            meta.format("False", "True", "MET_FLOAT", "LOCAL").encode(),
            zlib.compress(real),
            "",
        ),
        (
            "metaimage",
            "a.mhd",
            meta.format("False", "False", "MET_SHORT", "v.raw").encode(),
            raw,
            "",
        ),
    ]
    samples = []
    for kind, name, header, data, order in made:
        if name.endswith(("hdr", "mhd")):
            files = {name: header, "v.raw": data}
        else:
            files = {
                name: gzip.compress(header + data, mtime=0)
                if name.endswith(".gz")
                else header + data
            }
        samples.append(Sample(kind, name, files, len(header), order))
    return samples


SAMPLES = _samples()


def pick(rng: RNG, things: list[str]) -> str:
    return things[int(rng.integers(len(things)))]


def damage_bytes(data: bytes, rng: RNG) -> bytes:
    """Flip bits, or cut, repeat, overwrite or insert a piece."""
    if not data:
        return b"\0"
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 40))
    way = int(rng.integers(7))
    if way <= 1:
        changed = bytearray(data)
        for place in rng.integers(len(data), size=int(rng.integers(1, 4))):
            changed[place] ^= 1 << int(rng.integers(8))
        return bytes(changed)
    middle = {
        2: b"",
        3: data[at : at + length] * 2,
        4: rng.bytes(len(data[at : at + length])),
        5: rng.bytes(length) + data[at : at + length],
    }
    return data[:at] if way == 6 else data[:at] + middle[way] + data[at + length :]


def damage_text(data: bytes, rng: RNG) -> bytes:
    """Damage a text header as a person or a broken program would: lines, numbers, words."""
    lines = data.decode("latin-1").split("\n")
    at, way = int(rng.integers(len(lines))), int(rng.integers(8))
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(at, lines[at])
    elif way == 2:
        other = int(rng.integers(len(lines)))
        lines[at], lines[other] = lines[other], lines[at]
    elif way == 3:
        lines.insert(at, lines[at].replace("0", "1"))
    elif way == 4:
        lines = [line + "\r" for line in lines]
    else:
        pattern = r"-?\d[\d.]*" if way < 7 else r"[A-Za-z]\w*$|[\w.]+$"
        found = list(re.finditer(pattern, lines[at]))
        if found:
            match = found[int(rng.integers(len(found)))]
            new = pick(rng, NUMBERS if way < 7 else WORDS)
            lines[at] = lines[at][: match.start()] + new + lines[at][match.end() :]
    return "\n".join(lines).encode("latin-1")


def damage_block(data: bytes, rng: RNG, order: str) -> bytes:
    """Set fields of a NIfTI header to values at the border of what they can hold."""
    block, fields = bytearray(data), NIFTI_1_FIELDS if len(data) < 500 else NIFTI_2_FIELDS
    for _ in range(int(rng.integers(1, 3))):
        kind, first = fields[int(rng.integers(len(fields)))]
        size = struct.calcsize(kind)
        if kind.endswith("s"):
            block[first : first + size] = rng.bytes(size)
        elif kind in "fd":
            struct.pack_into(
                order + kind, block, first, float(FLOATS[int(rng.integers(len(FLOATS)))])
            )
        else:
            value = INTEGERS[int(rng.integers(len(INTEGERS)))] % 2 ** (8 * size)
            block[first : first + size] = value.to_bytes(size, "little" if order == "<" else "big")
    return bytes(block)


def mutated(sample: Sample, rng: RNG) -> Files:
    """One damaged copy of a sample."""
    files = dict(sample.files)
    data = files[sample.name]
    is_packed = sample.name.endswith(".gz")
    way = rng.random()
    if way < 0.3:
        # The bytes as they lie: headers, packed streams, voxels.
        target = pick(rng, sorted(files))
        files[target] = damage_bytes(files[target], rng)
        return files
    plain = gzip.decompress(data) if is_packed else data
    head, rest = plain[: sample.header_bytes], plain[sample.header_bytes :]
    change: Callable[[bytes, RNG], bytes] = damage_bytes
    if way > 0.5:
        change = (
            damage_text
            if not sample.order
            else lambda block, rng: damage_block(block, rng, sample.order)
        )
    plain = change(head, rng) + rest
    files[sample.name] = gzip.compress(plain, 1, mtime=0) if is_packed else plain
    return files
