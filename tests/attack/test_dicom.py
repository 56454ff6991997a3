"""Malformed DICOM series: impossible sizes, endless sequences, streams that swell."""

from __future__ import annotations

import copy
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from attack_tools import Attack, survive
from dicom_files import enhanced, header, place, save, save_packed, save_stack
from pydicom.dataset import Dataset
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SHAPE = (5, 7, 9)
HU = np.random.default_rng(20261122).integers(-1000, 1000, SHAPE, dtype=np.int16)
# What is left of the scan without its third slice.
FILLED = HU.copy()
FILLED[2] = np.rint((HU[1].astype(np.float32) + HU[3]) / 2)
HEIGHTS = [2.5 * index for index in range(SHAPE[0])]
LONG = "9" * 300
# Field, value as it is stored, and whether the series may be read as it was written.
FIELDS: list[tuple[str, bytes, bool]] = [
    *[("Rows", struct.pack("<H", value), False) for value in (0, 1, 8, 65535)],
    *[("Columns", struct.pack("<H", value), False) for value in (0, 8, 10, 65535)],
    *[
        ("BitsAllocated", struct.pack("<H", value), False)
        for value in (0, 1, 8, 12, 24, 32, 64, 65535)
    ],
    *[("BitsStored", struct.pack("<H", value), False) for value in (0, 17, 65535)],
    *[("HighBit", struct.pack("<H", value), False) for value in (0, 16, 65535)],
    *[("PixelRepresentation", struct.pack("<H", value), value != 1) for value in (2, 7, 65535)],
    *[("SamplesPerPixel", struct.pack("<H", value), False) for value in (0, 3, 65535)],
    *[
        ("PixelSpacing", value, False)
        for value in (
            b"0\\0",
            b"-1\\1",
            b"nan\\1",
            b"1e-30\\1e-30",
            b"1e30\\1e30",
            b"1",
            b"1\\1\\1",
            b"",
            b"\\",
            b"1_0\\1",
            b"0x1\\1",
        )
    ],
    *[
        ("ImagePositionPatient", value, False)
        for value in (
            b"0\\0",
            b"nan\\0\\0",
            b"0\\0\\1e300",
            b"1e300\\1e300\\1e300",
            b"",
            b"0\\0\\0\\0",
        )
    ],
    *[
        ("ImageOrientationPatient", value, b"e" in value)
        for value in (
            b"0\\0\\0\\0\\0\\0",
            b"1\\0\\0\\1\\0\\0",
            b"nan\\0\\0\\0\\1\\0",
            b"1\\0\\0",
            b"1e300\\0\\0\\0\\1e300\\0",
            b"1e-300\\0\\0\\0\\1e-300\\0",
        )
    ],
    *[
        ("RescaleSlope", value, False)
        for value in (b"0", b"1e308", b"nan", b"inf", b"1\\2", LONG.encode()[:16])
    ],
    *[("RescaleIntercept", value, False) for value in (b"1e308", b"nan", b"-inf", b"a")],
    *[
        ("NumberOfFrames", value, value in (b"1 ", b"1.5"))
        for value in (b"0", b"-1", b"2", b"2147483647", b"99999999999", b"1.5", b"x", b"1 ")
    ],
    *[("SeriesInstanceUID", value, True) for value in (b"\0\0", b"9" * 4000, b"x\x1b[2J")],
    *[("Modality", value, False) for value in (b"ct", b"CT\0MR", b"\xff\xfe", b"C" * 4000)],
    *[
        ("PhotometricInterpretation", value, value != b"PALETTE COLOR")
        for value in (b"RGB", b"YBR_FULL", b"PALETTE COLOR", b"\xff" * 16)
    ],
    ("PixelPaddingValue", b"", True),
    ("PixelPaddingValue", b"\x01", True),
    ("PixelPaddingValue", b"\xff" * 64, True),
    ("ImageType", b"\\" * 5000, True),
    ("SpecificCharacterSet", b"ISO_IR 999\\\\GB18030", True),
    ("SeriesDescription", b"\x1b]0;owned\x07\r\n" * 20, True),
    ("PatientID", b"\x1b[2J\n", True),
    ("AcquisitionNumber", LONG.encode(), True),
    ("KVP", b"nan", True),
    ("LossyImageCompression", b"01\\02", True),
]  # fmt: skip


def _scan(
    folder: Path,
    change: Callable[[Dataset], None] | None = None,
    which: slice = slice(None),
    syntax: str = ExplicitVRLittleEndian,
) -> Path:
    """Write a series, some slices of which are changed."""
    for index, pixels in enumerate(HU):
        dataset = header((pixels + 1024).astype(np.uint16), SeriesNumber=3)
        place(dataset, (-120.25, 33.5, HEIGHTS[index]))
        if change is not None and index in range(SHAPE[0])[which]:
            change(dataset)
        save(dataset, folder / f"{index}.dcm", syntax)
    return folder


def _put(field: str, value: bytes) -> Callable[[Dataset], None]:
    """Store a value as it is, whatever pydicom thinks of it."""

    def change(dataset: Dataset) -> None:
        from pydicom.datadict import dictionary_VR, tag_for_keyword
        from pydicom.dataelem import RawDataElement
        from pydicom.tag import Tag

        number = tag_for_keyword(field)
        assert number is not None
        vr = dictionary_VR(number).split(" or ")[0]
        data = value + b" " * (len(value) % 2)
        dataset[field] = RawDataElement(Tag(number), vr, len(data), data, 0, False, True)

    return change


def _field_attacks(folder: Path) -> Iterator[Attack]:
    for number, (field, value, is_readable) in enumerate(FIELDS):
        # In one slice, or in all: a value may be plausible as long as all agree.
        for which in (slice(2, 3), slice(None)):
            path = _scan(folder / f"{number}{which.start}", _put(field, value), which)
            name = f"{field} {value[:30]!r} in {'one' if which.start else 'all'}"
            yield Attack(
                name, path, HU if is_readable else None, told_values=FILLED if which.start else None
            )


def _structure_attacks(folder: Path) -> Iterator[Attack]:
    def nested(depth: int) -> Dataset:
        dataset = Dataset()
        for _ in range(depth):
            outer = Dataset()
            outer.SharedFunctionalGroupsSequence = [dataset]
            dataset = outer
        return dataset

    def deep(path: Path, depth: int) -> Path:
        """Sequences within sequences, written by hand: pydicom would recurse."""
        _scan(path)
        whole = (path / "2.dcm").read_bytes()
        at = whole.index(b"\x28\0\x02\0")
        opened = b"\x00\x52\x29\x92SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
        closed = b"\xfe\xff\x0d\xe0\0\0\0\0\xfe\xff\xdd\xe0\0\0\0\0"
        (path / "2.dcm").write_bytes(whole[:at] + opened * depth + closed * depth + whole[at:])
        return path

    for depth in (10, 1000, 100_000):
        yield Attack(
            f"{depth} sequences within each other", deep(folder / f"deep{depth}", depth), HU
        )
    path = _scan(
        folder / "items",
        lambda one: setattr(one, "SharedFunctionalGroupsSequence", [Dataset()] * 20_000),
        slice(2, 3),
    )
    yield Attack("20,000 empty items", path, HU)
    path = _scan(
        folder / "private", lambda one: one.add_new(0x00091001, "OB", b"x" * 2**22), slice(2, 3)
    )
    yield Attack("a private field of 4 MiB", path, HU)
    for name, length, is_whole in (
        ("a length of 4 GiB", 0xFFFFFFFE, True),
        ("a length beyond the end", 10**6, True),
        ("no length", 0xFFFFFFFF, False),
    ):
        _scan(folder / name)
        whole = bytearray((folder / name / "2.dcm").read_bytes())
        at = whole.index(b"\xe0\x7f\x10\0")
        whole[at + 8 : at + 12] = struct.pack("<I", length)
        (folder / name / "2.dcm").write_bytes(whole)
        yield Attack(f"pixels of {name}", folder / name, HU if is_whole else None)
    for name, data in {
        "nothing but a preamble": bytes(128) + b"DICM",
        "a preamble and noise": bytes(128) + b"DICM" + np.random.default_rng(0).bytes(10**6),
        "a preamble and zeros": bytes(128) + b"DICM" + bytes(10**6),
        "groups without end": bytes(128)
        + b"DICM"
        + b"\x02\0\x10\0UI\x14\x00"
        + b"1.2.840.10008.1.2.1\0"
        + b"\x08\0\x60\0CS\x02\0CT" * 100_000,
        "a mark twice": (bytes(128) + b"DICM") * 2,
    }.items():
        _scan(folder / name)
        (folder / name / "2.dcm").write_bytes(data)
        yield Attack(name, folder / name)
    for syntax in (
        ImplicitVRLittleEndian,
        ExplicitVRBigEndian,
        DeflatedExplicitVRLittleEndian,
        JPEG2000Lossless,
        "1.2.3.4.5",
        "1.2.840.10008.1.2.4.100",
    ):
        _scan(folder / f"syntax{syntax}")
        whole = (folder / f"syntax{syntax}" / "2.dcm").read_bytes()
        old, new = b"1.2.840.10008.1.2.1\0", syntax.encode()
        new = new + b"\0" * (len(new) % 2)
        at = whole.index(old) - 2
        changed = whole[:at] + struct.pack("<H", len(new)) + new + whole[at + 2 + len(old) :]
        (folder / f"syntax{syntax}" / "2.dcm").write_bytes(changed)
        # A header that is not in the encoding it names: pydicom finds out about implicit fields by
        # itself.
        yield Attack(f"the encoding {syntax} in name alone", folder / f"syntax{syntax}", HU)


def _bomb_attacks(folder: Path) -> Iterator[Attack]:
    """Compressed data that are small in the file alone."""
    path = _scan(folder / "deflated", None, slice(None), DeflatedExplicitVRLittleEndian)
    yield Attack("deflated slices", path, HU)
    whole = (path / "2.dcm").read_bytes()
    at = 144 + int.from_bytes(whole[140:144], "little")
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    plain = zlib.decompress(whole[at:], -15)
    mib = bytes(2**20)
    field = b"\x09\0\x01\x10OB\0\0" + struct.pack("<I", 2**31 - 2**20)
    stream = packer.compress(
        plain[: plain.index(b"\x10\0\x20\0") if b"\x10\0\x20\0" in plain else 0] + field
    )
    stream += (
        b"".join(packer.compress(mib) for _ in range(2047))
        + packer.compress(plain)
        + packer.flush()
    )
    (path / "2.dcm").write_bytes(whole[:at] + stream)
    yield Attack("a deflated slice of 2 GiB", path)
    pixels = (HU[2] + 1024).astype(np.uint16)
    huge = imagecodecs.jpeg_encode(
        np.zeros((8000, 8000), np.uint16), lossless=True, bitspersample=16
    )
    codes: dict[str, tuple[bytes, str]] = {
        "a JPEG of another size": (
            imagecodecs.jpeg_encode(np.zeros((7, 10), np.uint16), lossless=True, bitspersample=16),
            JPEGLosslessSV1,
        ),
        "a JPEG of 64 million pixels": (huge, JPEGLosslessSV1),
        "a JPEG that is JPEG 2000": (imagecodecs.jpeg2k_encode(pixels), JPEGLosslessSV1),
        "a JPEG 2000 that is JPEG-LS": (imagecodecs.jpegls_encode(pixels), JPEG2000Lossless),
        "a JPEG-LS that is JPEG": (
            imagecodecs.jpeg_encode(pixels, lossless=True, bitspersample=16),
            JPEGLSLossless,
        ),
        "a JPEG 2000 of three colours": (
            imagecodecs.jpeg2k_encode(np.zeros((7, 9, 3), np.uint8)),
            JPEG2000Lossless,
        ),
        "a JPEG 2000 of 60000 x 60000": (
            _resized_j2k(imagecodecs.jpeg2k_encode(pixels, codecformat="j2k"), 60000),
            JPEG2000Lossless,
        ),
        "an empty code": (b"\0\0", JPEG2000Lossless),
        "RLE of no segment": (bytes(64), RLELossless),
        "RLE of many segments": (struct.pack("<16I", 2**32 - 1, *[64] * 15), RLELossless),
        "RLE with offsets beyond the end": (
            struct.pack("<16I", 2, 64, 2**31, *[0] * 13) + bytes(40),
            RLELossless,
        ),
        "RLE that swells": (
            struct.pack("<16I", 2, 64, 128, *[0] * 13) + b"\x81\0" * 5000,
            RLELossless,
        ),
    }  # fmt: skip
    for name, (code, syntax) in codes.items():
        _scan(folder / name)
        dataset = header(pixels, SeriesNumber=3)
        place(dataset, (-120.25, 33.5, HEIGHTS[2]))
        save_packed(dataset, folder / name / "2.dcm", [code], syntax)
        yield Attack(name, folder / name)


def _resized_j2k(code: bytes, size: int) -> bytes:
    """Declare another size in the SIZ marker of a codestream."""
    at = code.index(b"\xff\x51") + 6
    return code[:at] + struct.pack(">II", size, size) + code[at + 8 :]


def _enhanced_attacks(folder: Path) -> Iterator[Attack]:
    def made(name: str, change: Callable[[Dataset], None]) -> Path:
        positions = [(-120.25, 33.5, height) for height in HEIGHTS]
        dataset = enhanced((HU + 1024).astype(np.uint16), positions, [(1, -1024)] * SHAPE[0])
        change(dataset)
        save(dataset, folder / name / "e.dcm")
        return folder / name

    def drop_positions(dataset: Dataset) -> None:
        for group in dataset.PerFrameFunctionalGroupsSequence:
            del group.PlanePositionSequence

    changes: dict[str, tuple[Callable[[Dataset], Any], bool]] = {
        "as it is": (lambda enhanced_object: None, True),
        "more frames than groups": (
            lambda enhanced_object: setattr(enhanced_object, "NumberOfFrames", 6),
            False,
        ),
        "fewer frames than groups": (
            lambda enhanced_object: setattr(enhanced_object, "NumberOfFrames", 4),
            False,
        ),
        "no group": (
            lambda enhanced_object: setattr(
                enhanced_object, "PerFrameFunctionalGroupsSequence", []
            ),
            False,
        ),
        "empty groups": (
            lambda enhanced_object: setattr(
                enhanced_object, "PerFrameFunctionalGroupsSequence", [Dataset()] * 5
            ),
            False,
        ),
        "no shared group": (
            lambda enhanced_object: setattr(enhanced_object, "SharedFunctionalGroupsSequence", []),
            False,
        ),
        "no positions": (drop_positions, False),
        "one position for all": (
            lambda enhanced_object: setattr(
                enhanced_object,
                "PerFrameFunctionalGroupsSequence",
                [enhanced_object.PerFrameFunctionalGroupsSequence[0]] * 5,
            ),
            False,
        ),
        "groups within groups": (
            lambda enhanced_object: setattr(
                enhanced_object.PerFrameFunctionalGroupsSequence[2],
                "PlanePositionSequence",
                [copy.deepcopy(enhanced_object)],
            ),
            False,
        ),
        "50,000 groups": (
            lambda enhanced_object: setattr(
                enhanced_object,
                "PerFrameFunctionalGroupsSequence",
                [enhanced_object.PerFrameFunctionalGroupsSequence[0]] * 50_000,
            ),
            False,
        ),
        "pixels of four frames": (
            lambda enhanced_object: setattr(
                enhanced_object, "PixelData", enhanced_object.PixelData[: 4 * 7 * 9 * 2]
            ),
            False,
        ),
    }  # fmt: skip
    for name, (change, is_readable) in changes.items():
        yield Attack(
            f"enhanced: {name}", made(name, change), HU if is_readable else None, told_values=FILLED
        )


def _folder_attacks(folder: Path) -> Iterator[Attack]:
    path = _scan(folder / "guests")
    os.mkfifo(path / "pipe.dcm")
    (path / "zero.dcm").symlink_to("/dev/zero")
    (path / "loop").symlink_to(path)
    (path / "self.dcm").symlink_to(path / "self.dcm")
    yield Attack("a pipe, a device and loops beside the slices", path)
    path = _scan(folder / "loops")
    (path / "below").mkdir()
    (path / "below" / "above").symlink_to(path)
    yield Attack("folders that contain each other", path, HU)
    path = folder / "deep"
    for number in range(200):
        path = path / f"{number}"
    _scan(path)
    yield Attack("slices two hundred folders down", folder / "deep", HU)
    path = _scan(folder / "copies")
    for number_of_copy in range(300):
        for number in range(5):
            (path / f"c{number_of_copy}_{number}.dcm").write_bytes(
                (path / f"{number}.dcm").read_bytes()
            )
    yield Attack("1,500 copies of the slices", path, HU)
    path = _scan(folder / "texts")
    for number in range(5000):
        (path / f"note{number}.txt").write_bytes(b"x")
    yield Attack("5,000 notes beside the slices", path, HU)
    path = folder / "many series"
    for number in range(150):
        save_stack(
            path / f"{number}",
            HU[:2],
            HEIGHTS[:2],
            uid=f"1.2.3.{number}",
            SeriesNumber=number,
            SeriesDescription="\x1b[2J" * 30,
        )
    yield Attack("150 series", path)
    yield Attack("one of 150 series", path, HU[:2], series="7")
    for series in ("", "/", "7/", "7/9", "7/x", "\x1b[2J" * 100, "1" * 10**5, "7/0"):
        yield Attack(
            f"series={series[:20]!r}", path, HU[:2] if series in ("7/",) else None, series=series
        )
    save(
        header(HU[0].astype(np.uint16), SOPClassUID="1.2.840.10008.1.3.10", Modality=None),
        folder / "empty medium" / "DICOMDIR",
    )
    yield Attack("a medium without slices", folder / "empty medium" / "DICOMDIR")


@pytest.mark.parametrize(
    ("attacks", "at_least"),
    [
        (_field_attacks, 150),
        (_structure_attacks, 15),
        (_bomb_attacks, 12),
        (_enhanced_attacks, 10),
        (_folder_attacks, 12),
    ],
)
def test_malformed_series(
    attacks: Callable[[Path], Iterator[Attack]], at_least: int, tmp_path: Path
) -> None:
    survive(attacks(tmp_path), at_least)
