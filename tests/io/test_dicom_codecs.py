"""Encodings of pixels: as they are, or compressed; and what is refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
from dicom_files import (
    NATIVE,
    enhanced,
    header,
    place,
    save,
    save_by_gdcm,
    save_packed,
    save_stored,
)
from io_volumes import finding_texts, make_hu
from pydicom import dcmread
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import generate_frames
from pydicom.uid import (
    JPEG2000,
    MPEG2MPML,
    UID,
    ExplicitVRLittleEndian,
    HTJ2KLossless,
    JPEG2000Lossless,
    JPEG2000MCLossless,
    JPEGBaseline8Bit,
    JPEGExtended12Bit,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
)

from medseg.errors import UserError
from medseg.io.read import read_image

GDCM = (
    "JPEGLosslessProcess14_1",
    "JPEGLosslessProcess14",
    "JPEGLSLossless",
    "JPEG2000Lossless",
    "DeflatedExplicitVRLittleEndian",
)
SIZES = [(5, 17, 9), (4, 16, 10), (3, 11, 24)]


def rle(values: np.ndarray) -> bytes:
    """The code of one slice."""
    dataset = header(values)
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.compress(RLELossless)
    return next(generate_frames(dataset.PixelData, number_of_frames=1))


def said(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_image(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("is_signed", [False, True])
def test_encodings_without_compression(
    tmp_path: Path, name: str, is_signed: bool, shape: tuple[int, int, int]
) -> None:
    image_hu = make_hu(shape)
    stored = image_hu if is_signed else (image_hu + 1024).astype(np.uint16)
    if name == "big endian":
        stored = stored.astype(stored.dtype.newbyteorder(">"))
    intercept = 0 if is_signed else -1024
    volume = read_image(
        save_stored(tmp_path / "d", stored, NATIVE[name], RescaleIntercept=intercept)
    )
    assert np.array_equal(volume.array, image_hu)
    assert volume.array.dtype == np.int16
    assert finding_texts(volume) == ()


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("syntax", [*GDCM, "RLELossless"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_compressed_encodings(
    tmp_path: Path, syntax: str, is_signed: bool, shape: tuple[int, int, int]
) -> None:
    image_hu = make_hu(shape)
    stored = image_hu if is_signed else (image_hu + 1024).astype(np.uint16)
    save_stored(tmp_path / "plain", stored, RescaleIntercept=0 if is_signed else -1024)
    (tmp_path / "packed").mkdir()
    for file in (tmp_path / "plain").iterdir():
        target = tmp_path / "packed" / file.name
        if syntax == "RLELossless":
            dataset = dcmread(file)
            dataset.compress(RLELossless)
            dataset.save_as(target)
        else:
            save_by_gdcm(file, target, syntax)
    volume = read_image(tmp_path / "packed")
    assert np.array_equal(volume.array, image_hu)
    assert volume.grid.is_close(read_image(tmp_path / "plain").grid)


@pytest.mark.parametrize(
    ("syntax", "encode", "bits", "error"),
    [
        (JPEGBaseline8Bit, "jpeg8_encode", 8, 3),
        (JPEGExtended12Bit, "jpeg8_encode", 12, 20),
        (JPEGLSNearLossless, "jpegls_encode", 12, 3),
        (JPEG2000, "jpeg2k_encode", 12, 40),
    ],
)
def test_lossy_encodings_are_read_as_itk_reads_them_and_said(
    tmp_path: Path, syntax: str, encode: str, bits: int, error: int
) -> None:
    sitk = pytest.importorskip("SimpleITK")
    smooth = np.add.outer(np.arange(3) * 4, np.add.outer(np.arange(16) * 3, np.arange(24) * 2)) * (
        10 if bits == 12 else 1
    )
    stored = smooth.astype(np.uint16 if bits == 12 else np.uint8)
    options = {"bitspersample": 12} if encode == "jpeg8_encode" and bits == 12 else {}
    if encode != "jpeg8_encode":
        options["level"] = 2 if encode == "jpegls_encode" else 90
    for index, values in enumerate(stored):
        dataset = header(values, BitsStored=bits, LossyImageCompression="01")
        place(dataset, (0, 0, 2.5 * index))
        save_packed(
            dataset,
            tmp_path / f"{index}",
            [getattr(imagecodecs, encode)(values, **options)],
            syntax,
        )
    volume = read_image(tmp_path)
    for index in range(3):
        assert np.array_equal(
            sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / f"{index}")))[0],
            volume.array[index],
        )
    assert np.abs(volume.array + 1024 - smooth).max() <= error
    assert finding_texts(volume) == ("the slices were compressed with loss",)


@pytest.mark.parametrize(
    ("syntax", "encode", "tag", "says"),
    [
        (JPEGBaseline8Bit, "jpeg8_encode", None, "were"),
        (JPEGBaseline8Bit, "jpeg8_encode", "00", "were"),
        (JPEGLSNearLossless, "jpegls_encode", None, "were"),
        (JPEG2000, "jpeg2k_encode", None, "may have been"),
        (JPEG2000, "jpeg2k_encode", "00", ""),
        (JPEG2000, "jpeg2k_encode", "01", "were"),
        (JPEG2000Lossless, "jpeg2k_encode", None, ""),
        (JPEG2000Lossless, "jpeg2k_encode", "01", "were"),
    ],
)
def test_a_loss_is_said_whatever_the_header_leaves_out(
    tmp_path: Path, syntax: UID, encode: str, tag: str | None, says: str
) -> None:
    for index in range(2):
        values = np.random.default_rng(index).integers(0, 256, (16, 24), dtype=np.uint8)
        dataset = header(values, LossyImageCompression=tag)
        place(dataset, (0, 0, 2.5 * index))
        save_packed(dataset, tmp_path / f"{index}", [getattr(imagecodecs, encode)(values)], syntax)
    why = (
        ": their encoding permits it, and the header does not say"
        if says == "may have been"
        else ""
    )
    assert finding_texts(read_image(tmp_path)) == (
        (f"the slices {says} compressed with loss{why}",) if says else ()
    )


def test_high_throughput_jpeg_2000(tmp_path: Path) -> None:
    """Written by another library (OpenJPH) than it is read by (OpenJPEG)."""
    for index, pixels in enumerate(make_hu((3, 40, 33))):
        stored = (pixels + 1024).astype(np.uint16)
        dataset = header(stored)
        place(dataset, (0, 0, 2.5 * index))
        save_packed(
            dataset, tmp_path / f"{index}", [imagecodecs.htj2k_encode(stored)], HTJ2KLossless
        )
    assert np.array_equal(read_image(tmp_path).array, make_hu((3, 40, 33)))


@pytest.mark.parametrize("bits", [12, 13, 16])
@pytest.mark.parametrize("encode", ["jpeg_encode", "jpegls_encode", "jpeg2k_encode"])
def test_signed_values_in_codes_without_sign(tmp_path: Path, encode: str, bits: int) -> None:
    """The code holds the lower bits as unsigned numbers."""
    image_hu = make_hu((2, 17, 24)).clip(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    options = (
        {"lossless": True, "bitspersample": bits}
        if encode == "jpeg_encode"
        else {"bitspersample": bits}
    )
    options = {} if encode == "jpegls_encode" else options
    syntax = {
        "jpeg_encode": JPEGLosslessSV1,
        "jpegls_encode": JPEGLSLossless,
        "jpeg2k_encode": JPEG2000Lossless,
    }[encode]
    for index, pixels in enumerate(image_hu):
        dataset = header(pixels, BitsStored=bits, RescaleIntercept=0)
        place(dataset, (0, 0, 2.5 * index))
        code = getattr(imagecodecs, encode)(pixels.astype(np.uint16) & ((1 << bits) - 1), **options)
        save_packed(dataset, tmp_path / f"{index}", [code], syntax)
    assert np.array_equal(read_image(tmp_path).array, image_hu)


@pytest.mark.parametrize("code", ["jpeg_encode", "jpeg2k_encode"])
def test_a_code_of_another_size_is_refused_before_it_is_decoded(tmp_path: Path, code: str) -> None:
    options = {"lossless": True} if code == "jpeg_encode" else {}
    packed = getattr(imagecodecs, code)(np.zeros((3000, 3000), np.uint16), **options)
    for index in range(2):
        dataset = header(make_hu()[index])
        place(dataset, (0, 0, 2.5 * index))
        save_packed(
            dataset,
            tmp_path / f"{index}",
            [packed],
            JPEGLosslessSV1 if code == "jpeg_encode" else JPEG2000Lossless,
        )
    tracemalloc.start()
    assert "cannot be decoded; it is damaged" in said(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize("syntax", [MPEG2MPML, JPEG2000MCLossless, "1.2.840.113619.5.2"])
def test_another_encoding_is_refused_by_name(tmp_path: Path, syntax: str) -> None:
    save_stored(tmp_path / "d", make_hu())
    for file in (tmp_path / "d").iterdir():
        data = file.read_bytes()
        old, new = NATIVE["explicit"].encode(), str(syntax).encode()
        # The UID of the encoding is the only field that changes; its length and the group's follow.
        start = data.index(old)
        new += b"\0" * (len(new) % 2)
        group = int.from_bytes(data[140:144], "little") + len(new) - 20
        data = (
            data[:140]
            + group.to_bytes(4, "little")
            + data[144 : start - 2]
            + len(new).to_bytes(2, "little")
            + new
        )
        file.write_bytes(data + file.read_bytes()[start + 20 :])
    name = getattr(syntax, "name", syntax)
    assert said(tmp_path / "d") == (
        f"{tmp_path / 'd' / '0'}: its pixels are encoded as {name}, which medseg does not "
        "read; export the series without "
        "compression."
    )


def test_compressed_pixels_of_which_nothing_says_how(tmp_path: Path) -> None:
    """Their code would make a slice of noise."""
    for index, values in enumerate((make_hu((3, 16, 24)) + 1024).astype(np.uint16)):
        dataset = header(values)
        place(dataset, (0, 0, 2.5 * index))
        code = imagecodecs.jpeg_encode(values, lossless=True, bitspersample=16)
        file = save_packed(dataset, tmp_path / f"{index}", [code], JPEGLosslessSV1)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"\x02\0\x10\0UI", b"\x02\0\x11\0UI"))
    assert said(tmp_path) == (
        f"{file}: its pixels are compressed, but the header does not say how; export the "
        "series again."
    )


def test_damaged_compression_names_the_file(tmp_path: Path) -> None:
    save_stored(tmp_path / "plain", make_hu((5, 16, 24)))
    (tmp_path / "packed").mkdir()
    for file in (tmp_path / "plain").iterdir():
        save_by_gdcm(file, tmp_path / "packed" / file.name, "JPEGLosslessProcess14_1")
    bad = tmp_path / "packed" / "3"
    bad.write_bytes(bad.read_bytes().replace(b"\xff\xc3", b"\xff\xc9"))  # another kind of JPEG
    assert said(tmp_path / "packed") == (
        f"{bad}: its pixels, encoded as JPEG Lossless, Non-Hierarchical, First-Order "
        "Prediction (Process 14 [Selection Value 1]), "
        "cannot be decoded; it is damaged, copy or export it again."
    )


@pytest.mark.parametrize(
    ("syntax", "encode", "options"),
    [
        (JPEGBaseline8Bit, "jpeg8_encode", {}),
        (JPEGExtended12Bit, "jpeg8_encode", {"bitspersample": 12}),
        (JPEGLosslessSV1, "jpeg_encode", {"lossless": True, "bitspersample": 12}),
        (JPEGLSLossless, "jpegls_encode", {}),
        (JPEGLSNearLossless, "jpegls_encode", {"level": 2}),
        (JPEG2000Lossless, "jpeg2k_encode", {}),
        (JPEG2000, "jpeg2k_encode", {"level": 90}),
        (HTJ2KLossless, "htj2k_encode", {}),
        (RLELossless, "rle", {}),
    ],
)
def test_a_code_that_ends_early_is_never_completed(
    tmp_path: Path, syntax: UID, encode: str, options: dict[str, Any]
) -> None:
    """The file is whole; the code of a slice is not."""
    bits = 8 if syntax == JPEGBaseline8Bit else 12
    stored = (
        np.random.default_rng(0)
        .integers(0, 1 << bits, (3, 16, 24))
        .astype(np.uint8 if bits == 8 else np.uint16)
    )
    tail = (
        b" " if encode in ("jpeg_encode", "jpegls_encode") else b""
    )  # not every writer fills up with zeros
    codes = [
        rle(values) if encode == "rle" else getattr(imagecodecs, encode)(values, **options)
        for values in stored
    ]
    for share in (1.0, 0.3, 0.6, 0.9, 0.99):
        for index, values in enumerate(stored):
            code = (
                codes[index][: int(share * len(codes[2]))]
                if index == 2
                else codes[index] + bytes(6) + tail
            )
            dataset = header(values, BitsStored=bits, LossyImageCompression="00")
            place(dataset, (0, 0, 2.5 * index))
            save_packed(dataset, tmp_path / f"{index}", [code], syntax)
        if share == 1:
            assert read_image(tmp_path).grid.shape == stored.shape
        else:
            assert said(tmp_path) == (
                f"{tmp_path / '2'}: its pixels, encoded as {syntax.name}, cannot be decoded; "
                "it is damaged, copy or export it again."
            )


def test_a_damaged_marker_does_not_end_the_process(tmp_path: Path) -> None:
    """It announces another kind of JPEG, on which some decoders crash."""
    stored = (np.random.default_rng(1).integers(0, 40, (3, 64, 64)).cumsum(2) % 4096).astype(
        np.uint16
    )
    for index, values in enumerate(stored):
        dataset = header(values)
        place(dataset, (0, 0, 2.5 * index))
        code = imagecodecs.jpeg_encode(values, lossless=True, bitspersample=16)
        save_packed(
            dataset,
            tmp_path / f"{index}",
            [code.replace(b"\xff\xc4", b"\xff\xc5", 1)],
            JPEGLosslessSV1,
        )
    assert "cannot be decoded; it is damaged" in said(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_enhanced", [False, True])
@pytest.mark.parametrize("slant", [0.0, pytest.param(0.25, marks=pytest.mark.thorough)])
def test_reading_takes_a_few_slices_more_than_the_volume(
    tmp_path: Path, is_packed: bool, is_enhanced: bool, slant: float
) -> None:
    stored = np.broadcast_to(
        np.add.outer(np.arange(512), np.arange(512)).astype(np.uint16), (80, 512, 512)
    )
    positions = [(0.0, slant * index, float(index)) for index in range(80)]
    code = [imagecodecs.jpeg_encode(stored[0], lossless=True, bitspersample=16)]
    files = (
        [enhanced(stored, positions, [(1, -1024)] * 80)]
        if is_enhanced
        else [header(stored[0]) for _ in stored]
    )
    for index, dataset in enumerate(files):
        if not is_enhanced:
            place(dataset, positions[index])
        if is_packed:
            save_packed(
                dataset, tmp_path / f"{index}", code * (80 if is_enhanced else 1), JPEGLosslessSV1
            )
        else:
            save(dataset, tmp_path / f"{index}")
    del files, dataset
    tracemalloc.start()
    volume = read_image(tmp_path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 150 MiB are an ordinary scan of 300 slices: 1.3 times.
    packed_bytes = (
        sum(file.stat().st_size for file in tmp_path.iterdir()) if is_packed and is_enhanced else 0
    )
    assert peak_bytes - volume.array.nbytes - packed_bytes < 40 * 2**20
