"""Images of nibabel and arrays with an affine are what the same file would be."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK
from io_volumes import finding_texts

from medseg.errors import UserError
from medseg.io.arrays import from_array, from_nibabel, is_nibabel, to_nibabel
from medseg.io.read import read_image
from medseg.io.simpleitk import from_simpleitk, to_simpleitk
from medseg.task import AIR_HU

RNG = np.random.default_rng(0)
# Stored from left to right, from front to back and downwards, with an oblique tilt.
TILT = np.array([[1, 0, 0], [0, np.cos(0.2), -np.sin(0.2)], [0, np.sin(0.2), np.cos(0.2)]])
AFFINE = np.eye(4)
AFFINE[:3, :3] = TILT @ np.diag([0.7, -0.8, -2.5])
AFFINE[:3, 3] = (-100.0, 30.5, 12.0)


@pytest.mark.parametrize("dtype", [np.int16, np.float64, np.uint8])
def test_an_image_in_memory_is_what_its_file_is(dtype: type, tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(RNG.integers(0, 200, (5, 6, 4)).astype(dtype), AFFINE)
    nibabel.save(image, tmp_path / "scan.nii.gz")
    expected = read_image(tmp_path / "scan.nii.gz")
    for volume in (from_nibabel(image), from_array(image.get_fdata(), AFFINE)):
        assert np.array_equal(volume.array, expected.array)
        assert volume.array.shape == (4, 6, 5)
        assert volume.grid.shape == expected.grid.shape
        assert np.allclose(volume.grid.origin_xyz_mm, expected.grid.origin_xyz_mm, atol=1e-4)
        assert np.allclose(volume.grid.spacing_mm, expected.grid.spacing_mm, rtol=1e-6)
        assert np.allclose(volume.grid.direction, expected.grid.direction, atol=1e-6)


def test_labels_go_back_in_the_order_of_the_image() -> None:
    image = nibabel.Nifti1Image(np.zeros((5, 6, 4), dtype=np.int16), AFFINE)
    labels = RNG.integers(0, 3, (4, 6, 5)).astype(np.uint8)
    result = to_nibabel(labels, image)
    assert is_nibabel(result)
    assert np.array_equal(result.affine, AFFINE)
    assert np.asanyarray(result.dataobj)[1, 2, 3] == labels[3, 2, 1]


def test_a_time_axis_of_one_step_is_left_out(tmp_path: Path) -> None:
    voxels = RNG.integers(0, 200, (5, 6, 4, 1)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), tmp_path / "scan.nii.gz")
    volume = from_nibabel(nibabel.load(tmp_path / "scan.nii.gz"))
    assert np.array_equal(volume.array, read_image(tmp_path / "scan.nii.gz").array)
    image = SimpleITK.GetImageFromArray(np.zeros((1, 4, 6, 5), np.int16), isVector=False)
    image.SetSpacing((0.7, 0.8, 2.5, 1.0))
    image.SetOrigin((1.0, 2.0, 3.0, 0.0))
    labels = to_simpleitk(np.ones(from_simpleitk(image).array.shape, np.uint8), image)
    assert labels.GetSpacing() == (0.7, 0.8, 2.5)
    assert labels.GetOrigin() == (1.0, 2.0, 3.0)


def test_an_image_in_metres_is_what_its_file_is(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.ones((5, 6, 4), np.int16), np.diag([7e-4, 8e-4, 2.5e-3, 1]))
    image.header.set_xyzt_units("meter", "sec")
    nibabel.save(image, tmp_path / "scan.nii.gz")
    volume = from_nibabel(image)
    assert volume.grid.spacing_mm == pytest.approx((2.5, 0.8, 0.7))
    nibabel.save(to_nibabel(volume.array.astype(np.uint8), image), tmp_path / "labels.nii.gz")
    for name in ("scan.nii.gz", "labels.nii.gz"):
        assert read_image(tmp_path / name).grid.is_close(volume.grid)


def test_an_image_without_forms_is_what_its_file_is(tmp_path: Path) -> None:
    """Its sides are unknown, so that a reader has to assume them, and says so."""
    image = nibabel.Nifti1Image(np.ones((5, 6, 4), np.int16), None)
    image.header.set_zooms((0.7, 0.8, 2.5))
    nibabel.save(image, tmp_path / "scan.nii.gz")
    expected = read_image(tmp_path / "scan.nii.gz")
    volume = from_nibabel(nibabel.load(tmp_path / "scan.nii.gz"))
    assert volume.grid.is_close(expected.grid)
    assert finding_texts(volume) == finding_texts(expected)
    assert "check the sides" in finding_texts(volume)[0]


def test_a_changed_affine_counts() -> None:
    image = nibabel.Nifti1Image(np.ones((5, 6, 4), np.int16), np.eye(4))
    image.affine[:3, 3] = (1, 2, 3)
    assert from_nibabel(image).grid.origin_xyz_mm == (-1, -2, 3)


def test_forms_that_swap_the_sides_are_refused_as_in_a_file() -> None:
    image = nibabel.Nifti1Image(np.ones((3, 3, 3), np.int16), np.eye(4))
    image.set_qform(np.diag([-1, 1, -1, 1]), 1)
    with pytest.raises(UserError, match="left and right are unknown"):
        from_nibabel(image)


def test_what_is_no_number_becomes_air() -> None:
    array = np.zeros((3, 3, 3), dtype=np.float32)
    array[0, 1, 2] = np.nan
    assert from_array(array, np.eye(4)).array[2, 1, 0] == AIR_HU


@pytest.mark.parametrize(
    ("shape", "affine", "message"),
    [
        ((2, 3, 3, 3), np.eye(4), r"expected numbers \(X, Y, Z\).*one array for each channel"),
        ((3, 3, 3), np.eye(3), r"expected an affine \(4, 4\)"),
        ((3, 3, 3), "RAS", r"expected an affine \(4, 4\) .* but got .RAS"),
        ((3, 3, 3), np.zeros((4, 4)), "axes of positive length"),
    ],
)
def test_what_is_no_volume_is_refused(
    shape: tuple[int, ...], affine: np.ndarray, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        from_array(np.ones(shape), affine)
