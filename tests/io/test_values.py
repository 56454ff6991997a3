"""Stored values become HU or labels: exact where they can be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from io_volumes import finding_texts, load_itk, make_grid, make_hu, make_labels, save_itk, told

from medseg.errors import UserError
from medseg.io.read import read_image, read_labels

nib = pytest.importorskip("nibabel")


def save_scaled(path: Path, stored: np.ndarray, slope: float, intercept: float) -> None:
    """Write a NIfTI-1 file with a scale of its own."""
    image = nib.Nifti1Image(stored.T, np.eye(4))
    image.to_filename(path)
    block = bytearray(path.read_bytes())
    block[112:120] = np.array([slope, intercept], "<f4").tobytes()
    path.write_bytes(block)


@pytest.mark.parametrize(
    ("dtype", "slope", "intercept", "expected"),
    [
        (np.int16, 1.0, 0.0, np.int16),
        (np.int16, 0.0, 7.0, np.int16),  # slope 0 means: not scaled
        (np.int16, float("nan"), float("nan"), np.int16),
        (np.int16, float("inf"), 5.0, np.int16),
        (np.uint16, 1.0, -1024.0, np.int16),
        (np.int16, 2.0, -3.0, np.int16),
        (np.int16, 0.5, -1024.0, np.float32),
        (np.float32, 1.0, 0.0, np.int16),
        (np.float64, 1.0, 0.25, np.float32),
        (np.int32, 1.0, 0.0, np.int16),
        (np.int32, 1.0, 40000.0, np.float32),
        (np.uint8, 1.0, 0.0, np.int16),
    ],
)
def test_scale_is_applied_and_int16_kept_where_exact(
    tmp_path: Path, dtype: type, slope: float, intercept: float, expected: type
) -> None:
    stored = np.random.default_rng(2).integers(0, 250, (5, 7, 9)).astype(dtype)
    save_scaled(tmp_path / "scan.nii", stored, slope, intercept)
    image_hu = read_image(tmp_path / "scan.nii").array
    is_scaled = np.isfinite(slope) and slope != 0
    want = stored.astype(np.float64) * slope + intercept if is_scaled else stored
    assert image_hu.dtype == expected
    assert np.array_equal(image_hu, np.asarray(want).astype(expected))


def test_a_shift_that_is_no_number_is_refused(tmp_path: Path) -> None:
    save_scaled(tmp_path / "scan.nii", make_hu(), 1.0, float("nan"))
    assert told(tmp_path / "scan.nii") == (
        "scan.nii: the NIfTI header is damaged: values are to be scaled by 1 and shifted by "
        "nan; export the scan again."
    )


def test_a_fraction_in_a_late_slab_turns_the_whole_volume_to_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medseg.io.volume.SLAB_BYTES", 300)
    values = make_hu().astype(np.float32)
    values[4, 3, 2] += 0.5
    save_itk(tmp_path / "scan.nrrd", values, make_grid(np.eye(3)))
    image_hu = read_image(tmp_path / "scan.nrrd").array
    assert image_hu.dtype == np.float32
    assert np.array_equal(image_hu, values)
    assert image_hu.flags.writeable


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (make_labels().astype(np.float32), np.uint8),
        (make_labels().astype(np.int32), np.uint8),
        (make_labels().astype(np.uint16) * 200, np.int16),
        (make_labels().astype(np.uint16) * 30000, np.uint16),
        (make_labels().astype(np.int16) - 1, np.int16),
    ],
)
def test_labels_take_the_smallest_type(tmp_path: Path, values: np.ndarray, expected: type) -> None:
    save_itk(tmp_path / "l.mha", values, make_grid(np.eye(3)))
    labels = read_labels(tmp_path / "l.mha").array
    assert labels.dtype == expected
    assert np.array_equal(labels, values)


def test_a_large_label_in_a_late_slab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medseg.io.volume.SLAB_BYTES", 100)
    values = make_labels().astype(np.int32)
    values[1, 0, 0], values[4, 6, 8] = -5, 60000
    save_itk(tmp_path / "l.mha", values, make_grid(np.eye(3)))
    assert np.array_equal(read_labels(tmp_path / "l.mha").array, values)


@pytest.mark.parametrize(
    ("label", "dtype", "expected"),
    [(2.0**31, np.float32, np.int64), (2.0**31 - 128, np.float32, np.int32)],
)
def test_a_label_at_the_end_of_a_type(
    tmp_path: Path, label: float, dtype: type, expected: type
) -> None:
    """As a 32-bit number the end of int32 itself is rounded to 2³¹."""
    values = make_labels().astype(dtype)
    values[1, 2, 3] = label
    save_itk(tmp_path / "l.mha", values, make_grid(np.eye(3)))
    labels = read_labels(tmp_path / "l.mha").array
    assert labels.dtype == expected
    assert labels[1, 2, 3] == label


def test_a_label_beyond_64_bits_is_refused(tmp_path: Path) -> None:
    values = make_labels().astype(np.float64)
    values[1, 2, 3] = 2.0**63
    save_itk(tmp_path / "l.mha", values, make_grid(np.eye(3)))
    with pytest.raises(UserError, match=r"whole numbers.*9\.22337203685e\+18"):
        read_labels(tmp_path / "l.mha")


def test_probabilities_are_no_labels(tmp_path: Path) -> None:
    save_itk(tmp_path / "l.mha", make_labels().astype(np.float32) / 2, make_grid(np.eye(3)))
    with pytest.raises(UserError, match=r"whole numbers.*0\.5"):
        read_labels(tmp_path / "l.mha")


@pytest.mark.parametrize(
    ("stored", "slope", "intercept", "label"),
    [
        (255, 1 / 255, 0.0, 1),
        (32767, 1 / 65535, 32768 / 65535, 1),  # as nibabel stores a mask in int16
        (3, 0.1, 0.7, 1),
        (200, 1 / 200, -1.0, 0),
        (255, 3_000_000 / 255, 0.0, 3_000_000),
        (7, 1000.0, 0.0, 7000),
    ],
)
@pytest.mark.parametrize("suffix", [".nii", ".mha", ".nrrd"])
def test_labels_that_miss_a_whole_number_by_rounding(
    tmp_path: Path, stored: int, slope: float, intercept: float, label: int, suffix: str
) -> None:
    """By the scale of a NIfTI header, or by what a program made of it in 32 bits."""
    values = np.zeros((5, 7, 9), np.int16)
    values[2, 3, 4] = stored
    want = np.zeros(values.shape)
    want[2, 3, 4] = label
    if suffix == ".nii":
        values[values == 0] = round(-intercept / slope)
        save_scaled(tmp_path / "l.nii", values, slope, intercept)
    else:
        scaled = values * np.float32(slope) + np.float32(intercept) * (values != 0)
        save_itk(tmp_path / f"l{suffix}", scaled.astype(np.float32), make_grid(np.eye(3)))
    assert np.array_equal(read_labels(tmp_path / f"l{suffix}").array, want)


@pytest.mark.parametrize("residue", [1e-8, -1e-7])
def test_labels_that_resampling_has_mixed_with_the_background(
    tmp_path: Path, residue: float
) -> None:
    """Interpolation at the places of the voxels leaves 1e-08 of a label in the background."""
    want = make_labels()
    values = want.astype(np.float32)
    values[want == 0] = residue
    save_itk(tmp_path / "l.mha", values, make_grid(np.eye(3)))
    assert np.array_equal(read_labels(tmp_path / "l.mha").array, want)


@pytest.mark.parametrize("num_labels", [2, 7, 117])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_labels_that_were_rounded_to_the_steps_of_their_scale(
    tmp_path: Path, num_labels: int, dtype: type
) -> None:
    """Float labels that nibabel stores as integers: in uint8, 1 of 2 is 128 * 2/255 = 1.004."""
    want = np.resize(np.arange(num_labels + 1), (5, 7, 9))
    image = nib.Nifti1Image(want.T.astype(np.float64), np.eye(4))
    image.set_data_dtype(dtype)
    image.to_filename(tmp_path / "l.nii.gz")
    assert np.array_equal(read_labels(tmp_path / "l.nii.gz").array, want)


@pytest.mark.parametrize("stored", [1, 127, 254])
def test_probabilities_in_steps_of_a_byte_are_no_labels(tmp_path: Path, stored: int) -> None:
    save_scaled(tmp_path / "l.nii", np.full((5, 7, 9), stored, np.uint8), 1 / 255, 0.0)
    assert f"values such as {stored / 255:.4f}"[:-1] in told(tmp_path / "l.nii", read_labels)


@pytest.mark.parametrize(
    ("value", "told_value"),
    [
        (1.00001, "1.00001"),
        (0.999, "0.999"),
        (2_000_000.3, "2000000.3"),
        (1e9 + 0.5, "1000000000.5"),
    ],
)
def test_labels_that_miss_a_whole_number_by_more_are_named_with_their_digits(
    tmp_path: Path, value: float, told_value: str
) -> None:
    labels = make_labels().astype(np.float64)
    labels[2, 3, 4] = value
    save_itk(tmp_path / "l.mha", labels, make_grid(np.eye(3)))
    assert f"values such as {told_value};" in told(tmp_path / "l.mha", read_labels)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_voxels_without_a_number_count_as_air_with_a_warning(
    tmp_path: Path, value: float, dtype: type
) -> None:
    values: Any = make_hu().astype(dtype)
    values[2, 3, 4] = values[4, 0, 0] = value
    save_itk(tmp_path / "scan.nii.gz", values, make_grid(np.eye(3)))
    scan = read_image(tmp_path / "scan.nii.gz")
    want = make_hu()
    want[2, 3, 4] = want[4, 0, 0] = -1024
    assert scan.array.dtype == np.int16, "what is left are whole numbers"
    assert np.array_equal(scan.array, want)
    assert finding_texts(scan) == (
        "2 of 315 voxels (0.63 %) hold no number (NaN or infinity) and count as air, -1024 HU",
    )
    assert told(tmp_path / "scan.nii.gz", read_labels) == (
        "scan.nii.gz: expected a label map of whole numbers, but the file holds values such "
        f"as {value:g}; is it an image or a "
        "probability map?"
    )


def test_a_number_beyond_float32_is_none(tmp_path: Path) -> None:
    values: Any = make_hu().astype(np.float64)
    values[0, 0, 0] = 1e300
    save_itk(tmp_path / "scan.mha", values, make_grid(np.eye(3)))
    scan = read_image(tmp_path / "scan.mha")
    assert scan.array[0, 0, 0] == -1024
    assert finding_texts(scan)[0].startswith("1 of 315 voxels (0.32 %) hold no number")


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".mha"])
def test_voxels_that_are_no_numbers_are_air_and_counted(tmp_path: Path, suffix: str) -> None:
    values: Any = make_hu().astype(np.float32)
    values[0, 0, :3] = np.nan, np.inf, -np.inf
    save_itk(tmp_path / f"a{suffix}", values, make_grid(np.eye(3)))
    scan = read_image(tmp_path / f"a{suffix}")
    expected = make_hu()
    expected[0, 0, :3] = -1024
    assert np.array_equal(scan.array, expected)
    said = "3 of 315 voxels (0.95 %) hold no number (NaN or infinity) and count as air, -1024 HU"
    assert finding_texts(scan) == (said,)


@pytest.mark.parametrize("suffix", [".nii.gz", ".nrrd", ".mha"])
def test_one_slice_is_read_with_a_warning(tmp_path: Path, suffix: str) -> None:
    save_itk(tmp_path / f"a{suffix}", make_hu((1, 7, 9)), make_grid(np.eye(3), (1, 7, 9)))
    scan = read_image(tmp_path / f"a{suffix}")
    assert np.array_equal(scan.array, make_hu((1, 7, 9)))
    assert finding_texts(scan) == (
        "the scan of 9 x 7 x 1 voxels is a single slice: expect a poor result",
    )


INTEGERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"]


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz", ".nrrd", ".mha"])
@pytest.mark.parametrize("code", [*INTEGERS, "f4", "f8"])
def test_every_number_type_is_read(tmp_path: Path, suffix: str, code: str) -> None:
    values = np.random.default_rng(3).integers(0, 120, (5, 7, 9)).astype(code)
    save_itk(tmp_path / f"a{suffix}", values, make_grid(np.eye(3)))
    image, labels = read_image(tmp_path / f"a{suffix}"), read_labels(tmp_path / f"a{suffix}")
    assert image.array.dtype == np.int16
    assert labels.array.dtype == np.uint8
    assert np.array_equal(image.array, values)
    assert np.array_equal(labels.array, values)
    assert finding_texts(image) == finding_texts(labels) == ()


@pytest.mark.parametrize("code", [*INTEGERS[2:], "f4", "f8"])
@pytest.mark.parametrize("suffix", [".nii", ".nrrd", ".mha"])
def test_every_number_type_of_the_other_byte_order(tmp_path: Path, suffix: str, code: str) -> None:
    values = np.random.default_rng(3).integers(0, 3000, (5, 7, 9)).astype(code)
    big, path = values.astype(f">{code}"), tmp_path / f"a{suffix}"
    if suffix == ".nii":
        header = nib.Nifti1Header(endianness=">")
        header.set_data_dtype(big.dtype)
        nib.Nifti1Image(big.T, np.eye(4), header).to_filename(path)
    elif suffix == ".nrrd":
        names = {
            "u2": "ushort",
            "i2": "short",
            "u4": "uint",
            "i4": "int",
            "u8": "ulonglong",
            "i8": "longlong",
            "f4": "float",
        }
        head = (
            f"NRRD0001\ntype: {names.get(code, 'double')}\ndimension: 3\nsizes: 9 7 5\n"
            "endian: big\nencoding: raw\n\n"
        )
        path.write_bytes(head.encode() + big.tobytes())
    else:
        names = {
            "u2": "USHORT",
            "i2": "SHORT",
            "u4": "UINT",
            "i4": "INT",
            "u8": "ULONG_LONG",
            "i8": "LONG_LONG",
            "f4": "FLOAT",
        }
        head = (
            f"NDims = 3\nDimSize = 9 7 5\nElementType = MET_{names.get(code, 'DOUBLE')}\n"
            "BinaryDataByteOrderMSB = True\n"
        )
        path.write_bytes(f"{head}ElementDataFile = LOCAL\n".encode() + big.tobytes())
    image = read_image(path)
    assert image.array.dtype == np.int16
    assert np.array_equal(image.array, values)
    assert np.array_equal(load_itk(path)[0], values)


def test_large_numbers_of_64_bits(tmp_path: Path) -> None:
    values = make_labels().astype(np.uint64)
    values[0, 0, 0] = 2**63
    save_itk(tmp_path / "a.mha", values, make_grid(np.eye(3)))
    assert read_image(tmp_path / "a.mha").array.flat[0] == np.float32(2**63)
    assert "holds values such as 9.22337203685e+18" in told(tmp_path / "a.mha", read_labels)


@pytest.mark.parametrize(
    ("suffixes", "banned"), [((".nii.gz",), "SimpleITK"), ((".nrrd", ".mha"), "nibabel")]
)
def test_a_format_imports_no_library_of_another(
    tmp_path: Path, suffixes: tuple[str, ...], banned: str
) -> None:
    paths = [tmp_path / f"scan{suffix}" for suffix in suffixes]
    for path in paths:
        save_itk(path, make_hu(), make_grid(np.eye(3)))
    code = """
import sys
from pathlib import Path
from medseg.io.read import read_image
from medseg.io.write import write_image
for path in map(Path, sys.argv[2:]):
    scan = read_image(path)
    write_image(path, scan.array, scan.grid)
sys.exit(sys.argv[1] in sys.modules)
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code, banned, *map(str, paths)], check=True, cwd=root, timeout=120
    )
