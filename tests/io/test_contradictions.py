"""Headers that contradict their voxels, and spellings of numbers: refused, or read right."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dicom_files import header, place, save, save_packed, save_slice, save_stack
from io_volumes import make_grid, make_hu, save_itk, told
from pydicom import uid
from pydicom.uid import DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian, RLELossless

from medseg.errors import UserError
from medseg.io.dicom.frames import NoSlice, read_frames
from medseg.io.read import read_image
from medseg.io.write import write_image

HEIGHTS = list(2.5 * np.arange(5))


def scan(folder: Path, **fields: Any) -> Path:
    """Five slices of which the third has other fields; values of `DS` are stored as they are."""
    for index, pixels in enumerate(make_hu()):
        save_slice(
            folder / f"{index}", pixels, (0, 0, HEIGHTS[index]), **(fields if index == 2 else {})
        )
    return folder


def said(path: Path, series: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        read_image(path, series)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_explicit_fields_under_the_name_of_implicit_ones(tmp_path: Path) -> None:
    path = scan(tmp_path)
    data = (path / "2").read_bytes()
    old, new = b"1.2.840.10008.1.2.1\0", ImplicitVRLittleEndian.encode() + b"\0"
    at = data.index(old) - 2
    (path / "2").write_bytes(
        data[:at] + struct.pack("<H", len(new)) + new + data[at + 2 + len(old) :]
    )
    assert np.array_equal(read_image(path).array, make_hu())


@pytest.mark.parametrize(("tag", "value"), [(b"\x28\0\x10\0US", 1), (b"\x28\0\x11\0US", 8)])
def test_rows_and_columns_of_other_pixels(tmp_path: Path, tag: bytes, value: int) -> None:
    path = scan(tmp_path)
    data = bytearray((path / "2").read_bytes())
    at = data.index(tag) + 8
    data[at : at + 2] = struct.pack("<H", value)
    (path / "2").write_bytes(data)
    assert "but the DICOM file holds 126 bytes of them; it is damaged" in said(path)


def test_pixels_that_are_filled_up_are_read(tmp_path: Path) -> None:
    path = scan(tmp_path)
    data = (path / "2").read_bytes()
    at = data.index(b"\xe0\x7f\x10\0OW")
    (path / "2").write_bytes(data[: at + 8] + struct.pack("<I", 130) + data[at + 12 :] + bytes(4))
    assert np.array_equal(read_image(path).array, make_hu())


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("RescaleSlope", "1e16", "a slope of 1e+16"),
        ("RescaleSlope", "0", "a slope of 0"),
        ("RescaleSlope", "-1", "a slope of -1"),
        ("RescaleIntercept", "1e16", "an intercept of 1e+16"),
    ],
)
def test_a_rescale_that_no_scanner_has(tmp_path: Path, field: str, value: str, what: str) -> None:
    assert said(scan(tmp_path, **{field: value})).endswith(
        f"expected a rescale slope and intercept to HU, but the slices have {what}; choose or "
        "export a series in HU."
    )


def test_a_rescale_of_mr_is_not_measured_by_hu(tmp_path: Path) -> None:
    path = scan(tmp_path, Modality="MR", RescaleSlope="-1")
    (refusal,) = read_frames(path / "2", "MR")
    assert isinstance(refusal, NoSlice)
    assert refusal.reason == (
        "expected a positive rescale slope and an intercept, but the slices have a slope of -1; "
        "choose another series, or export it again."
    )


@pytest.mark.parametrize(
    ("sop_class", "kind"),
    [
        (uid.SecondaryCaptureImageStorage, "secondary capture"),
        (uid.MultiFrameGrayscaleByteSecondaryCaptureImageStorage, "secondary capture"),
        # Its UID begins with the same digits, up to the middle of a number.
        (uid.OphthalmicTomographyImageStorage, None),
    ],
)
def test_what_is_no_secondary_capture(tmp_path: Path, sop_class: str, kind: str | None) -> None:
    path = scan(tmp_path, Modality="OPT", SOPClassUID=sop_class)
    (image,) = read_frames(path / "2", "")
    assert getattr(image, "reason", None) == kind


def test_numbers_that_only_python_reads(tmp_path: Path) -> None:
    path = scan(tmp_path)
    data = (path / "2").read_bytes()
    at = data.index(b"\x28\0\x30\0DS") + 8
    (path / "2").write_bytes(data[:at] + data[at:].replace(b"0.8\\", b"1_0\\", 1))
    assert "PixelSpacing should hold 2 numbers" in said(path)
    text = (
        b"NRRD0004\ntype: short\ndimension: 3\nsizes: %s 7 5\nspacings: 1 1 1\nendian: little\n"
        b"encoding: %s\n\n"
    )
    (tmp_path / "a.nrrd").write_bytes(text % ("\u0669".encode(), b"raw") + make_hu().tobytes())
    assert "expected a whole number for each axis in the header field 'sizes'" in told(
        tmp_path / "a.nrrd"
    )
    (tmp_path / "a.nrrd").write_bytes(text % (b"9", "a\u017fcii".encode()) + make_hu().tobytes())
    assert "in the header field 'encoding'" in told(tmp_path / "a.nrrd")


def test_an_rle_code_that_becomes_too_long(tmp_path: Path) -> None:
    path = scan(tmp_path)
    dataset = header(make_hu()[2].astype(np.uint16))
    place(dataset, (0, 0, HEIGHTS[2]))
    save_packed(
        dataset,
        path / "2",
        [struct.pack("<16I", 2, 64, 128, *[0] * 13) + b"\x81\0" * 100],
        RLELossless,
    )
    assert said(path).endswith(
        "its pixels, encoded as RLE Lossless, cannot be decoded; it is damaged, copy or "
        "export it again."
    )


def test_a_deflated_slice_that_swells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, pixels in enumerate(make_hu()):
        dataset = header((pixels + 1024).astype(np.uint16))
        place(dataset, (0, 0, HEIGHTS[index]))
        if index == 2:
            dataset.add_new(0x00091001, "OB", bytes(10**6))
        save(dataset, tmp_path / f"{index}", DeflatedExplicitVRLittleEndian)
    assert np.array_equal(read_image(tmp_path).array, make_hu())
    monkeypatch.setattr("medseg.io.dicom.frames.MAX_INFLATED_BYTES", 2**19)
    assert "expected a deflated DICOM file of at most 0 MiB" in said(tmp_path)
    # Empty blocks, which become nothing, hide no bytes behind them.
    data = (tmp_path / "2").read_bytes()
    at = 144 + int.from_bytes(data[140:144], "little")
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    (tmp_path / "2").write_bytes(
        data[:at]
        + b"\0\0\0\xff\xff" * 60_000
        + packer.compress(zlib.decompress(data[at:], -15))
        + packer.flush()
    )
    assert "expected a deflated DICOM file of at most 0 MiB" in said(tmp_path)


def test_a_part_that_a_series_does_not_have(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), HEIGHTS, SeriesNumber=7)
    assert np.array_equal(read_image(tmp_path / "d", "7/1").array, make_hu())
    for series in ("7/2", "7/0", "7/x"):
        assert f"there is no series={series} among series=7" in said(tmp_path / "d", series)


def test_a_list_of_many_series_is_cut(tmp_path: Path) -> None:
    for number in range(13):
        save_stack(
            tmp_path / "d" / f"{number}",
            make_hu()[:2],
            HEIGHTS[:2],
            uid=f"1.2.3.{number}",
            SeriesNumber=number,
        )
    assert said(tmp_path / "d").count("slices, ") == 10
    assert "; and 3 more; choose one" in said(tmp_path / "d")


def test_a_scan_without_a_number_or_far_away(tmp_path: Path) -> None:
    write_image(tmp_path / "a.nii", np.full((5, 7, 9), np.inf, np.float32), make_grid(np.eye(3)))
    assert (
        told(tmp_path / "a.nii")
        == "a.nii: expected a scan, but none of its voxels holds a number; export it again."
    )
    save_itk(tmp_path / "b.nii", make_hu(), make_grid(np.eye(3)))
    data = bytearray((tmp_path / "b.nii").read_bytes())
    data[252:256] = struct.pack("<2h", 0, 1)
    data[292:296] = struct.pack("<f", 3e38)
    (tmp_path / "b.nii").write_bytes(data)
    assert told(tmp_path / "b.nii").startswith(
        "b.nii: expected a scan within 1 km of its scanner, but the header gives the origin "
        "-3e+38, "
    )


def test_a_gzip_header_without_end(tmp_path: Path) -> None:
    packed = gzip.compress(b"x")
    (tmp_path / "a.nii.gz").write_bytes(packed[:3] + b"\x08" + packed[4:10] + b"a" * 10**6)
    assert told(tmp_path / "a.nii.gz").startswith(
        "a.nii.gz: the file cannot be read: its compressed voxels are damaged: "
    )


def test_a_text_volume_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.io.volume.PACKED_BYTES", 10)
    head = (
        b"NRRD0004\ntype: short\ndimension: 3\nsizes: 9 7 5\nspacings: 1 1 1\nencoding: text\n%s\n"
    )
    words = " ".join(map(str, make_hu().ravel())).encode()
    (tmp_path / "a.nrrd").write_bytes(head % b"" + words)
    assert np.array_equal(read_image(tmp_path / "a.nrrd").array, make_hu())
    (tmp_path / "a.nrrd").write_bytes(head % b"" + words.replace(b" ", b"0" * 200, 1))
    assert "a value of its voxels is no number of the type int16" in told(tmp_path / "a.nrrd")
    (tmp_path / "a.nrrd").write_bytes(head % b"line skip: 999999999\n" + words)
    assert "it is truncated or damaged" in told(tmp_path / "a.nrrd")
