"""Files under another format's name, other spellings of a header, slices that disagree."""

from __future__ import annotations

import bz2
import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack_tools import Attack, survive
from dicom_files import header, place, save
from PIL import Image
from pydicom.dataset import Dataset
from test_text_formats import CORNERS, HU, META, NRRD, RAW, TEXT, meta, nrrd

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BIG = HU.astype(">i2").tobytes()


def nifti(
    version: int = 1, order: str = "<", extension: bytes = b"\0\0\0\0", **fields: Any
) -> bytes:
    """A NIfTI file with the voxels and the place of the text formats; `fields` are set by name."""
    is_v1 = version == 1
    block = bytearray(348 if is_v1 else 540)
    values: dict[str, Any] = {
        "sizeof_hdr": 348 if is_v1 else 540, "magic": b"n+1\0" if is_v1 else b"n+2\0\r\n\x1a\n",
        "datatype": 4, "bitpix": 16,
        "dim": (3, 8, 6, 4, 1, 1, 1, 1), "pixdim": (1.0, 1.25, 1.5, 3.0, 0, 0, 0, 0),
        "vox_offset": len(block) + len(extension),
        "slope": 1.0, "inter": 0.0, "qform": 0, "sform": 1, "units": 2,
        "srow": (-1.25, 0, 0, -10, 0, -1.5, 0, -20, 0, 0, 3.0, 30), **fields,
    }  # fmt: skip
    places = {
        "sizeof_hdr": ("i", 0, 0), "magic": ("4s" if is_v1 else "8s", 344, 4),
        "datatype": ("h", 70, 12), "bitpix": ("h", 72, 14),
        "dim": ("8h" if is_v1 else "8q", 40, 16), "pixdim": ("8f" if is_v1 else "8d", 76, 104),
        "vox_offset": ("f" if is_v1 else "q", 108, 168),
        "slope": ("f" if is_v1 else "d", 112, 176), "inter": ("f" if is_v1 else "d", 116, 184),
        "qform": ("h" if is_v1 else "i", 252, 344),
        "sform": ("h" if is_v1 else "i", 254, 348), "units": ("B" if is_v1 else "i", 123, 500),
        "srow": ("12f" if is_v1 else "12d", 280, 400),
        "quatern": ("6f" if is_v1 else "6d", 256, 352),
    }  # fmt: skip
    for name, value in values.items():
        kind, first, second = places[name]
        struct.pack_into(
            order + kind,
            block,
            first if is_v1 else second,
            *(value if isinstance(value, tuple) else (value,)),
        )
    return bytes(block) + extension + (RAW if order == "<" else BIG)


def zipped(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return stream.getvalue()


def tarred(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(HU[0].astype(np.uint8)).save(stream, "png")
    return stream.getvalue()


def _disguises(folder: Path) -> Iterator[Attack]:
    """Every kind of content under every name: the scan as it is, or a sentence."""
    dataset = header((HU[0] + 1024).astype(np.uint16))
    place(dataset, (10, 20, 30))
    contents = {
        "NIfTI-1": nifti(), "NIfTI-1, big endian": nifti(1, ">"), "NIfTI-2": nifti(2),
        "NIfTI-2, big endian": nifti(2, ">"),
        "packed NIfTI-2": gzip.compress(nifti(2)), "NRRD": nrrd({}),
        "packed NRRD": gzip.compress(nrrd({})),
        "MetaImage": meta({}), "packed MetaImage": gzip.compress(meta({})),
        "DICOM": save(dataset, folder / "one.dcm").read_bytes(),
        "zip": zipped("a.nii", nifti()), "tar": tarred("a.nii", nifti()),
        "bzip2": bz2.compress(nifti()), "PNG": png(),
        "ANALYZE": nifti(magic=b"\0\0\0\0"), "header of a pair": nifti(magic=b"ni1\0"),
    }  # fmt: skip
    for content, data in contents.items():
        for suffix in (
            ".nii",
            ".nii.gz",
            ".nrrd",
            ".nhdr",
            ".mha",
            ".mhd",
            ".dcm",
            ".NII.GZ",
            ".img",
            "",
        ):
            path = folder / f"{len(list(folder.iterdir()))}{suffix}"
            path.write_bytes(data)
            yield Attack(f"{content} as {suffix or 'no suffix'}", path, HU, CORNERS)


def _versions(folder: Path) -> Iterator[Attack]:
    """NIfTI-2 (64 bit fields), extensions, and fields that are plausible in one byte order only."""
    extensions = {
        "no size": struct.pack("<4sii", b"\1\0\0\0", 0, 0),
        "a negative size": struct.pack("<4sii", b"\1\0\0\0", -16, 6),
        "a size without end": struct.pack("<4sii", b"\1\0\0\0", 2**31 - 16, 6),
        "an odd size": struct.pack("<4sii", b"\1\0\0\0", 9, 6),
        "a comment": struct.pack("<4sii", b"\1\0\0\0", 16, 6) + b"comment\0",
        "DICOM": struct.pack("<4sii", b"\1\0\0\0", 32, 2) + b"DICM" * 6,
        "a second header": b"\1\0\0\0" + nifti()[:348],
    }  # fmt: skip
    files: list[tuple[str, bytes, bool]] = [
        (
            f"an extension of {name}, version {version}, {order}",
            nifti(version, order, extension),
            True,
        )
        for name, extension in extensions.items()
        for version in (1, 2)
        for order in "<>"
    ]
    sizes = [
        (2**62, 6, 4),
        (8, 2**63 - 1, 1),
        (-8, -6, 4),
        (2**32 + 8, 6, 4),
        (8, 6, 2**31),
        (0, 6, 4),
        (8, 6, 4 + 2**32),
    ]
    files += [(f"sizes {size}", nifti(2, dim=(3, *size, 1, 1, 1, 1)), False) for size in sizes]
    files += [
        (f"{count} axes", nifti(2, dim=(count, 8, 6, 4, 1, 1, 1, 1)), 4 <= count <= 7)
        for count in (-1, 0, 1, 2, 4, 7, 8, 2**40)
    ]
    offsets = (0, 1, 543, 545, -544, 2**62, 2**63 - 1, -(2**63), 10**9)
    files += [
        (f"voxels at {offset}", nifti(2, vox_offset=offset), offset == 0) for offset in offsets
    ]
    files += [
        (f"unit {unit}", nifti(2, units=unit), unit & 7 != 1) for unit in (0, 1, 5, 2**30, -1, -7)
    ]
    steps = [
        (0.0, 1.5, 3.0),
        (5e-324, 1.5, 3.0),
        (1e308, 1e308, 1e308),
        (-1.25, -1.5, -3.0),
        (float("nan"), 1.5, 3.0),
    ]
    files += [
        (f"steps {one}", nifti(2, sform=0, pixdim=(1.0, *one, 0, 0, 0, 0)), False) for one in steps
    ]
    files += [(f"a form of code {code}", nifti(2, sform=code), True) for code in (2, 5, 2**31 - 1)]
    files += [
        (
            f"no form but code {code}",
            nifti(2, sform=0, qform=code, quatern=(2.0, 0, 0, 0, 0, 0)),
            False,
        )
        for code in (1, 2**31 - 1)
    ]
    for mark in (
        b"n+2\0\n\x1a\n\0",
        b"n+2\0\r\n\x1a\r",
        b"n+1\0\r\n\x1a\n",
        b"N+2\0\r\n\x1a\n",
        b"n+2 \r\n\x1a\n",
        b"ni2\0\r\n\x1a\n",
    ):
        files.append((f"mark {mark!r}", nifti(2, magic=mark), False))
    files += [
        (f"mixed orders of {name}", _swapped(name), False)
        for name in ("dim", "datatype", "sizeof_hdr")
    ]
    for number, (name, data, is_readable) in enumerate(files):
        path = folder / f"v{number}.nii"
        path.write_bytes(data)
        yield Attack(name, path, HU if is_readable else None, CORNERS if is_readable else None)


def _swapped(name: str) -> bytes:
    """One field in the other byte order."""
    data = bytearray(nifti(2))
    first, size = {"dim": (16, 8), "datatype": (12, 2), "sizeof_hdr": (0, 4)}[name]
    for start in range(first, first + (64 if name == "dim" else size), size):
        data[start : start + size] = data[start : start + size][::-1]
    return bytes(data)


RAS = {
    "space": "RAS",
    "space directions": "(-1.25,0,0) (0,-1.5,0) (0,0,3)",
    "space origin": "(-10,-20,30)",
}
PACKED = zlib.compress(RAW)
# Two spellings of one thing: the scan as it was written, or a sentence; never the other of two
# contradictory values.
TEXTS: dict[str, tuple[str, bytes]] = {
    "NRRD in RAS": ("nrrd", nrrd(RAS)),
    "NRRD in RAS by its long name": ("nrrd", nrrd(RAS | {"space": "right-anterior-superior"})),
    "NRRD in LAS": (
        "nrrd",
        nrrd(
            {
                "space": "LAS",
                "space directions": "(1.25,0,0) (0,-1.5,0) (0,0,3)",
                "space origin": "(10,-20,30)",
            }
        ),
    ),
    "NRRD in capitals": (
        "nrrd",
        nrrd(
            {
                "space": "Left-Posterior-Superior",
                "type": "Int16",
                "encoding": "RAW",
                "endian": "Little",
            }
        ),
    ),
    "NRRD, fourth axis of one": (
        "nrrd",
        nrrd(
            {
                "dimension": "4",
                "sizes": "8 6 4 1",
                "space directions": "(1.25,0,0) (0,1.5,0) (0,0,3) none",
            }
        ),
    ),
    "NRRD, first axis of one": (
        "nrrd",
        nrrd(
            {
                "dimension": "4",
                "sizes": "1 8 6 4",
                "space directions": "none (1.25,0,0) (0,1.5,0) (0,0,3)",
            }
        ),
    ),
    "NRRD, kinds that contradict": ("nrrd", nrrd({"kinds": "RGB-color domain domain"})),
    "NRRD, kinds of vectors": ("nrrd", nrrd({"kinds": "domain domain vector"})),
    "NRRD, kinds of space": ("nrrd", nrrd({"kinds": "space space space"})),
    "NRRD, spacings beside directions": ("nrrd", nrrd({"spacings": "9 9 9"})),
    "NRRD, axis mins beside the origin": ("nrrd", nrrd({"axis mins": "7 7 7"})),
    "NRRD, minimum and maximum swapped": ("nrrd", nrrd({"min": "999", "max": "-999"})),
    "NRRD, old minimum": ("nrrd", nrrd({"old min": "0", "old max": "1"})),
    "NRRD, sample units": ("nrrd", nrrd({"sample units": "mm"})),
    "NRRD, thicknesses": ("nrrd", nrrd({"thicknesses": "9 9 9"})),
    "NRRD, centers of nodes": ("nrrd", nrrd({"centers": "node node node"})),
    "NRRD, centers of cells": ("nrrd", nrrd({"centerings": "cell cell cell"})),
    "NRRD, centers that differ": ("nrrd", nrrd({"centerings": "cell node ???"})),
    "NRRD, labels of axes": ("nrrd", nrrd({"labels": '"z" "y" "x"'})),
    "NRRD, unsigned voxels": ("nrrd", nrrd({"type": "uint16"})),
    "NRRD, packed twice": ("nrrd", nrrd({"encoding": "gzip"}, gzip.compress(gzip.compress(RAW)))),
    "NRRD, packed with zlib": ("nrrd", nrrd({"encoding": "gzip"}, PACKED)),
    "NRRD, packed in two members": (
        "nrrd",
        nrrd({"encoding": "gz"}, gzip.compress(RAW[:100]) + gzip.compress(RAW[100:])),
    ),
    "NRRD, skipped lines": ("nrrd", nrrd({"line skip": "2"}, b"one\ntwo\n" + RAW)),
    "NRRD, skipped lines and bytes": (
        "nrrd",
        nrrd({"line skip": "1", "byte skip": "3"}, b"one\nabc" + RAW),
    ),
    "NRRD, skipped to the end": ("nrrd", nrrd({"byte skip": "-1"}, b"abc" + RAW)),
    "NRRD, text of real numbers": ("nrrd", nrrd({"encoding": "text"}, TEXT.replace(b" ", b".0 "))),
    "NRRD, text with commas": ("nrrd", nrrd({"encoding": "text"}, TEXT.replace(b" ", b", "))),
    "NRRD, hexadecimal": ("nrrd", nrrd({"encoding": "hex"}, RAW.hex().encode())),
    "NRRD, a pair of the name of a field": (
        "nrrd",
        nrrd({}).replace(b"encoding:", b"sizes:=4 6 8\nencoding:"),
    ),
    "NRRD, a comment of the name of a field": (
        "nrrd",
        nrrd({}).replace(b"encoding:", b"# sizes: 4 6 8\nencoding:"),
    ),
    "NRRD, a field without a blank": ("nrrd", nrrd({}).replace(b"sizes: ", b"sizes:")),
    "NRRD, no byte order": ("nrrd", nrrd({"endian": None})),
    "MetaImage, centre of rotation": ("mha", meta({"CenterOfRotation": "5 5 5"})),
    "MetaImage, anatomical orientation": ("mha", meta({"AnatomicalOrientation": "RAI"})),
    "MetaImage, another anatomical orientation": ("mha", meta({"AnatomicalOrientation": "LPS"})),
    "MetaImage, the same origin twice": ("mha", meta({"Position": "10 20 30"})),
    "MetaImage, another origin": ("mha", meta({"Position": "0 0 0"})),
    "MetaImage, a third origin": ("mha", meta({"Origin": "1 1 1"})),
    "MetaImage, another matrix": ("mha", meta({"Rotation": "0 1 0 1 0 0 0 0 1"})),
    "MetaImage, a third matrix": ("mha", meta({"Orientation": "0 0 1 0 1 0 1 0 0"})),
    "MetaImage, another size of elements": ("mha", meta({"ElementSize": "9 9 9"})),
    "MetaImage, size of elements alone": (
        "mha",
        meta({"ElementSpacing": None, "ElementSize": "1.25 1.5 3"}),
    ),
    "MetaImage, both orders of bytes": ("mha", meta({"ElementByteOrderMSB": "False"})),
    "MetaImage, orders that contradict": ("mha", meta({"ElementByteOrderMSB": "True"})),
    "MetaImage, a window": ("mha", meta({"ElementMin": "0", "ElementMax": "1"})),
    "MetaImage, a slope": (
        "mha",
        meta({"ElementToIntensityFunctionSlope": "2", "ElementToIntensityFunctionOffset": "5"}),
    ),
    "MetaImage, names in small letters": ("mha", meta({}).replace(b"DimSize", b"dimsize")),
    "MetaImage, a value without an equals sign": (
        "mha",
        meta({}).replace(b"DimSize =", b"DimSize"),
    ),
    "MetaImage, a colon": ("mha", meta({}).replace(b" = ", b": ")),
    "MetaImage, a fourth axis of one": (
        "mha",
        meta(
            {
                "NDims": "4",
                "DimSize": "8 6 4 1",
                "ElementSpacing": "1.25 1.5 3 1",
                "Offset": "10 20 30 0",
                "TransformMatrix": "1 0 0 0 0 1 0 0 0 0 1 0 0 0 0 1",
            }
        ),
    ),
    "MetaImage, two axes": (
        "mha",
        meta(
            {
                "NDims": "2",
                "DimSize": "8 24",
                "ElementSpacing": "1.25 1.5",
                "Offset": "10 20",
                "TransformMatrix": "1 0 0 1",
            }
        ),
    ),
    "MetaImage, packed and in the other order": (
        "mha",
        meta({"CompressedData": "True", "BinaryDataByteOrderMSB": "True"}, zlib.compress(BIG)),
    ),
    "MetaImage, packed and cut": ("mha", meta({"CompressedData": "True"}, PACKED[:-1])),
    "MetaImage, packed and followed": ("mha", meta({"CompressedData": "True"}, PACKED + b"x")),
    "MetaImage, units of metres": ("mha", meta({"DistanceUnits": "m"})),
    "MetaImage, units of millimetres": ("mha", meta({"DistanceUnits": "mm"})),
    "MetaImage, a header of -1 with voxels to spare": (
        "mha",
        meta({"HeaderSize": "-1"}, RAW + RAW),
    ),
}  # fmt: skip


def _texts(folder: Path) -> Iterator[Attack]:
    both_last = HU  # a header of -1 bytes means the last voxels of the file, here the same
    for number, (name, (suffix, data)) in enumerate(TEXTS.items()):
        path = folder / f"t{number}.{suffix}"
        path.write_bytes(data)
        values = both_last.view(np.uint16).astype(np.float32) if "unsigned" in name else HU
        yield Attack(name, path, values, CORNERS)
    # Each field is missing, empty, or there twice.
    for suffix, fields, make in (("nrrd", NRRD, nrrd), ("mha", META, meta)):
        for key in fields:
            for way, data in {
                "missing": make({key: None}), "empty": make({key: ""}),
                "in quotes": make({key: f'"{fields[key]}"'}),
                "twice": make({}).replace(
                    key.encode(),
                    key.encode() + (b": x\n" if suffix == "nrrd" else b" = x\n") + key.encode(),
                    1,
                ),
            }.items():  # fmt: skip
                path = folder / f"{key} {way}.{suffix}"
                path.write_bytes(data)
                is_assumed = way == "missing"  # a default may be assumed, which the reader says
                yield Attack(f"{suffix}: {key} {way}", path, HU, None if is_assumed else CORNERS)


SERIES_SHAPE = (7, 6, 8)
SERIES = np.random.default_rng(5).integers(-1000, 1000, SERIES_SHAPE, dtype=np.int16)
ODD = 3  # the slice that disagrees


def _series(folder: Path, change: Callable[[Dataset, int], Any]) -> Path:
    for index, pixels in enumerate(SERIES):
        dataset = header(
            (pixels + 1024).astype(np.uint16),
            SeriesNumber=1,
            InstanceNumber=index + 1,
            PatientID="P",
        )
        place(dataset, (-120.0, 30.0, 2.5 * index))
        change(dataset, index)
        save(dataset, folder / f"{index}.dcm")
    return folder


def of_odd(**fields: Any) -> Callable[[Dataset, int], None]:
    """Set fields of one slice."""
    return lambda dataset, index: dataset.update(fields) if index == ODD else None


def stored(dataset: Dataset, values: np.ndarray, **fields: Any) -> None:
    dataset.PixelData = values.tobytes()
    dataset.update(fields)


def scaled(dataset: Dataset, index: int) -> None:
    """Each slice has its own slope, as of PET; the HU stay."""
    slope = 1 if index % 2 else 0.5
    dataset.RescaleSlope = slope
    dataset.PixelData = ((SERIES[index] + 1024) / slope).astype(np.uint16).tobytes()


def signed(dataset: Dataset, index: int) -> None:
    if index == ODD:
        stored(dataset, SERIES[index], PixelRepresentation=1, RescaleIntercept=0)


def twelve_bits(dataset: Dataset, index: int) -> None:
    """Overlays in the upper four bits of one slice."""
    if index == ODD:
        stored(
            dataset,
            ((SERIES[index] + 1024).astype(np.uint16) & 0x0FFF) | 0xA000,
            BitsStored=12,
            HighBit=11,
        )


MIRRORED = np.array([-1.0, 0, 0, 0, 1, 0])
# Whether the voxels may come out as they are meant; the others must be refused or told.
CONFLICTS: dict[str, tuple[Callable[[Dataset, int], Any], bool]] = {
    "slopes that differ": (scaled, True),
    "a signed slice": (signed, True),
    "overlays in the upper bits": (twelve_bits, True),
    "slices in reverse": (lambda one, index: setattr(one, "InstanceNumber", 7 - index), True),
    "the same number for all": (lambda one, index: setattr(one, "InstanceNumber", 1), True),
    "heights of the slice that contradict": (of_odd(SliceLocation="999"), True),
    "a thickness that contradicts": (of_odd(SliceThickness="40"), True),
    "a distance that contradicts": (
        lambda one, index: one.update({"SpacingBetweenSlices": "-9"}),
        True,
    ),
    "another patient": (of_odd(PatientID="Q"), False),
    "another modality": (of_odd(Modality="PT"), False),
    "another series": (of_odd(SeriesInstanceUID="1.2.3.5"), False),
    "rows and columns exchanged": (of_odd(Rows=8, Columns=6), False),
    "a slice mirrored by its direction": (of_odd(ImageOrientationPatient=MIRRORED.tolist()), False),
    "a slice turned by a degree": (
        of_odd(ImageOrientationPatient=[0.99985, 0.01745, 0, -0.01745, 0.99985, 0]),
        False,
    ),
    "another pixel spacing": (of_odd(PixelSpacing=[0.9, 0.65]), False),
    "a pixel spacing in another order": (of_odd(PixelSpacing=[0.6484375, 0.8]), False),
    "a slice moved by ten pixels": (of_odd(ImagePositionPatient=[-113.5, 30.0, 7.5]), False),
    "a slice at the place of its neighbour": (
        of_odd(ImagePositionPatient=[-120.0, 30.0, 5.0]),
        False,
    ),
    "a slice far away": (of_odd(ImagePositionPatient=[-120.0, 30.0, 900.0]), False),
    "HU of another kind": (of_odd(RescaleType="OD"), False),
    "an intercept that is missing": (
        lambda one, index: one.pop("RescaleIntercept") if index == ODD else None,
        False,
    ),
    "a negative slope": (of_odd(RescaleSlope="-1"), False),
    "colours": (of_odd(SamplesPerPixel=3, PlanarConfiguration=0), False),
    "another acquisition": (of_odd(AcquisitionNumber="2"), False),
    "another echo": (of_odd(EchoTime="5"), False),
    "two kernels": (
        lambda one, index: one.update({"ConvolutionKernel": "B70f" if index % 2 else "B30f"}),
        False,
    ),
    "two energies": (lambda one, index: one.update({"KVP": "140" if index % 2 else "80"}), False),
}


def _conflicts(folder: Path) -> Iterator[Attack]:
    for name, (change, is_meant) in CONFLICTS.items():
        path = _series(folder / name, change)
        # What is left of a series without its odd slice, filled in.
        rest = SERIES.copy()
        rest[ODD] = np.rint((SERIES[ODD - 1].astype(np.float32) + SERIES[ODD + 1]) / 2)
        yield Attack(name, path, SERIES if is_meant else None, told_values=rest)


@pytest.mark.parametrize(
    ("attacks", "at_least"), [(_disguises, 150), (_versions, 70), (_texts, 120), (_conflicts, 25)]
)
def test_mixed_formats(
    attacks: Callable[[Path], Iterator[Attack]], at_least: int, tmp_path: Path
) -> None:
    survive(attacks(tmp_path), at_least)
