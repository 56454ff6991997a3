"""Number formats of written label maps, sizes that are one volume, spacings of a bare header."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.nifti import packed_nifti
from medseg.io.read import read_image
from medseg.io.volume import check_shape
from medseg.io.write import write_labels

GRID = VoxelGrid((3, 4, 5), (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([0, 255], np.int64, np.uint8),
        ([0, 256], np.int64, (np.int16, np.uint16)),
        ([-1, 255], np.int64, np.int16),
        ([0, 40_000], np.int64, np.uint16),
        ([-1, 40_000], np.int64, np.int32),
        ([0, 70_000], np.uint64, (np.int32, np.uint32)),
        ([False, True], bool, np.uint8),
        ([0, 7], np.int16, np.int16),
    ],
)
def test_labels_are_narrowed_to_a_format_that_holds_all_of_them(
    tmp_path: Path, values: list[int], dtype: type, expected: type | tuple[type, ...]
) -> None:
    labels = np.zeros(GRID.shape, dtype)
    labels[0, 0, :2] = values
    write_labels(tmp_path / "labels.nrrd", labels, GRID)
    stored = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / "labels.nrrd")))
    assert np.array_equal(stored, labels)
    formats = expected if isinstance(expected, tuple) else (expected,)
    assert stored.dtype in [np.dtype(dtype_of_format) for dtype_of_format in formats]


def test_labels_that_fit_no_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"labels must fit into 32 bits, got 0 to 1099511627776"):
        write_labels(
            tmp_path / "labels.nrrd", np.full(GRID.shape, 2**40) * (np.arange(5) > 0), GRID
        )
    with pytest.raises(ValueError, match="labels must be whole numbers, got float32"):
        write_labels(tmp_path / "labels.nrrd", np.zeros(GRID.shape, np.float32), GRID)


def test_one_volume_has_three_sizes_and_no_frames() -> None:
    assert check_shape(Path("a"), [5, 4, 3]) == (3, 4, 5)
    assert check_shape(Path("a"), [5, 4, 3, 1, 1]) == (3, 4, 5)
    assert check_shape(Path("a"), [1, 1, 1]) == (1, 1, 1)
    for sizes in ([5, 4], [5, 4, 3, 2], [5, 0, 3], [5, 4, 3, 1, 2]):
        with pytest.raises(UserError, match="expected one 3D volume"):
            check_shape(Path("a"), sizes)


@pytest.mark.parametrize("spacing_mm", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_header_without_axes_needs_a_spacing_on_each(tmp_path: Path, spacing_mm: float) -> None:
    image = nib.Nifti1Image(np.zeros((5, 4, 3), np.int16), np.eye(4))
    image.header["sform_code"] = image.header["qform_code"] = 0
    content = bytearray(image.to_bytes())
    content[252:256] = bytes(4)  # both codes
    for axis, value in enumerate((1.0, spacing_mm, 3.0)):
        content[80 + 4 * axis : 84 + 4 * axis] = np.float32(value).tobytes()
    path = tmp_path / "scan.nii"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"expected a positive spacing on every axis"):
        read_image(path)


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_a_volume_packed_in_memory_keeps_its_values_in_either_byte_order(
    byte_order: str, tmp_path: Path
) -> None:
    values = np.arange(24).reshape(2, 3, 4).astype(f"{byte_order}i2")
    grid = VoxelGrid(values.shape, (1.0, 2.0, 3.0))
    path = tmp_path / "packed.nii.gz"
    path.write_bytes(packed_nifti(values, grid))
    assert np.array_equal(read_image(path).array, values)
