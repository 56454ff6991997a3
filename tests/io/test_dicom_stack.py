"""From slices to one regular grid: order, doubles, gaps, tilt; and what the user is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dicom_files import SPACING_MM, save_grid, save_slice, save_stack
from io_volumes import finding_texts, make_hu, rotation

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.dicom.stacks import _overlap
from medseg.io.read import read_image

DIRECTIONS = {
    "head first supine": np.eye(3),
    "head first prone": np.diag([-1.0, -1.0, 1.0]),
    "feet first supine": np.diag([-1.0, 1.0, -1.0]),
    "feet first prone": np.diag([1.0, -1.0, -1.0]),
    "head first on the left side": np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]),
    "coronal": np.array([[1.0, 0, 0], [0, 0, 1.0], [0, -1.0, 0]]),
    "oblique": rotation(0.4, -0.25),
}
SHAPES = [(5, 7, 9), (12, 10, 6), (3, 16, 21)]


def smooth(shape: tuple[int, int, int], points_xyz_mm: np.ndarray | None = None) -> np.ndarray:
    """Whole HU that grow linearly in space: linear interpolation is exact but for rounding."""
    z, y, x = np.indices(shape).astype(float)
    if points_xyz_mm is not None:
        x, y, z = np.moveaxis(points_xyz_mm, -1, 0)
    return np.rint(3 * x + 5 * y + 7 * z - 100).astype(np.int16)


def pixel_points(
    shape: tuple[int, int],
    position_xyz_mm: np.ndarray,
    spacing_mm: tuple[float, float] = SPACING_MM,
) -> np.ndarray:
    """World points of the pixels of an axial slice."""
    rows, columns = np.indices(shape)
    flat = np.stack([columns * spacing_mm[1], rows * spacing_mm[0], np.zeros(shape)], axis=-1)
    return np.asarray(flat + np.asarray(position_xyz_mm))


def refused(path: Path, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        read_image(path)
    assert str(caught.value) == f"{path}: {sentence}"


@pytest.mark.parametrize(("number", "name"), list(enumerate(DIRECTIONS)))
def test_every_voxel_keeps_its_place(tmp_path: Path, number: int, name: str) -> None:
    shape = SHAPES[number % len(SHAPES)]
    grid = VoxelGrid(
        shape, (2.5, 0.8, 0.6484375), (-120.25, 33.5, -1434.5), DIRECTIONS[name].tolist()
    )
    save_grid(tmp_path / "CT", make_hu(shape), grid)
    volume = read_image(tmp_path / "CT")
    assert volume.array.dtype == np.int16
    assert finding_texts(volume) == ()
    indices = np.indices(shape).reshape(3, -1).T
    stored_indices = volume.grid.world_to_index_zyx(grid.index_to_world_xyz_mm(indices))
    assert np.abs(stored_indices - np.rint(stored_indices)).max() < 1e-4
    assert np.array_equal(
        volume.array[tuple(np.rint(stored_indices).astype(int).T)], make_hu(shape)[tuple(indices.T)]
    )


def test_itk_reads_the_same(tmp_path: Path) -> None:
    sitk = pytest.importorskip("SimpleITK")
    grid = VoxelGrid(
        (5, 7, 9), (2.5, 0.8, 0.6484375), (-120.25, 33.5, -1434.5), rotation(0.4, -0.25).tolist()
    )
    save_grid(tmp_path, make_hu(), grid)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(tmp_path)))
    image = reader.Execute()
    volume = read_image(tmp_path)
    assert np.array_equal(sitk.GetArrayFromImage(image), volume.array)
    assert np.allclose(volume.grid.origin_xyz_mm, image.GetOrigin(), atol=1e-6)
    assert np.allclose(volume.grid.spacing_mm[::-1], image.GetSpacing(), atol=1e-5)
    assert np.allclose(np.ravel(volume.grid.direction), image.GetDirection(), atol=1e-6)


def test_jitter_is_rounding(tmp_path: Path) -> None:
    heights = 2.5 * np.arange(8) + np.array([0, 0.09, -0.09, 0.05, 0, -0.08, 0.04, 0])
    save_stack(tmp_path / "d", make_hu((8, 7, 9)), list(heights))
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu((8, 7, 9)))
    assert volume.grid.spacing_mm[0] == pytest.approx(2.5)
    assert finding_texts(volume) == ()


# Of a CT and of a micro-CT, where the gap is within the rounding of a CT.
@pytest.mark.parametrize("step_mm", [2.5, 0.05])
def test_a_missing_slice_is_filled_in_and_the_others_stay(tmp_path: Path, step_mm: float) -> None:
    image_hu = smooth((12, 7, 9))
    files = save_stack(tmp_path / "d", image_hu, list(step_mm * np.arange(12)))
    files[4].unlink()
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, image_hu)
    assert volume.grid.spacing_mm == pytest.approx((step_mm, *SPACING_MM))
    says = (
        f"slices missing: 1 of 12, such as between '{files[3].name}' and '{files[5].name}'; they "
        "were interpolated linearly"
    )
    assert finding_texts(volume) == (says,)


def test_what_is_filled_in_is_the_mean_of_the_neighbours(tmp_path: Path) -> None:
    image_hu = make_hu((12, 7, 9))
    for file in save_stack(tmp_path / "d", image_hu, list(2.5 * np.arange(12)))[7:8]:
        file.unlink()
    volume = read_image(tmp_path / "d")
    mean = np.rint((image_hu[6].astype(float) + image_hu[8]) / 2)
    assert np.array_equal(volume.array[7], mean)
    assert np.array_equal(np.delete(volume.array, 7, 0), np.delete(image_hu, 7, 0))


@pytest.mark.parametrize(
    ("step_mm", "missing", "sentence"),
    [
        (
            5.0,
            [5, 6],
            "expected evenly spaced slices, but '{4}' and '{7}' are 15.000 mm apart where "
            "5.000 mm are usual (2 of 30 slices "
            "missing); gaps are filled up to 10 mm and 10% of the slices: export the series again.",
        ),
        (
            1.0,
            [3, 8, 14, 21],
            "expected evenly spaced slices, but '{2}' and '{4}' are 2.000 mm apart where "
            "1.000 mm are usual (4 of 30 slices "
            "missing); gaps are filled up to 10 mm and 10% of the slices: export the series again.",
        ),
    ],
)
def test_wide_and_many_gaps_are_refused(
    tmp_path: Path, step_mm: float, missing: list[int], sentence: str
) -> None:
    files = save_stack(tmp_path / "d", make_hu((30, 7, 9)), list(step_mm * np.arange(30)))
    for index in missing:
        files[index].unlink()
    refused(tmp_path / "d", sentence.format(*(file.name for file in files)))


def test_uneven_slices_are_laid_on_an_even_grid(tmp_path: Path) -> None:
    heights = np.array([0, 1.0, 2.3, 3.0, 4.2, 5.0, 6.0, 7.0, 8.3, 9.0])
    points = np.stack(
        [pixel_points((7, 9), np.array([-120.25, 33.5, height])) for height in heights]
    )
    save_stack(tmp_path / "d", smooth((10, 7, 9), points), list(heights))
    volume = read_image(tmp_path / "d")
    assert volume.grid.shape == (10, 7, 9)
    assert volume.grid.spacing_mm[0] == pytest.approx(1.0)
    expected = smooth(
        volume.grid.shape,
        volume.grid.index_to_world_xyz_mm(np.moveaxis(np.indices(volume.grid.shape), 0, -1)),
    )
    assert np.abs(volume.array - expected).max() <= 1
    says = (
        "the slices lie 0.70 to 1.30 mm apart: 3 of 10 were interpolated linearly onto an even "
        "grid of 1.00 mm"
    )
    assert finding_texts(volume) == (says,)


def test_two_distances_in_one_stack_are_refused(tmp_path: Path) -> None:
    files = save_stack(
        tmp_path / "d", make_hu((9, 7, 9)), [0, 5, 10, 15, 20, 25, 26.25, 27.5, 28.75]
    )
    refused(
        tmp_path / "d",
        f"expected evenly spaced slices, but '{files[5].name}' and '{files[6].name}' are "
        "1.250 mm apart where 5.000 mm are usual "
        "(0 of 7 slices missing); gaps are filled up to 10 mm and 10% of the slices: export "
        "the series again.",
    )


def test_equal_doubles_are_dropped(tmp_path: Path) -> None:
    image_hu = make_hu()
    save_stack(tmp_path / "d", image_hu, list(2.5 * np.arange(5)))
    copy = save_slice(tmp_path / "d" / "zcopy.dcm", image_hu[2], (-120.25, 33.5, 5.0))
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, image_hu)
    assert finding_texts(volume) == (f"duplicate slices were dropped: '{copy.name}'",)


def test_other_slices_at_the_same_place_are_refused(tmp_path: Path) -> None:
    image_hu = make_hu()
    files = save_stack(tmp_path / "d", image_hu, list(2.5 * np.arange(5)))
    other = save_slice(tmp_path / "d" / "zother.dcm", image_hu[3], (-120.25, 33.5, 5.0))
    refused(
        tmp_path / "d",
        f"expected one slice at each position, but '{files[2].name}' and '{other.name}' share "
        "a position and differ; remove one of "
        "them.",
    )


def test_acquisitions_that_share_a_slice_are_joined(tmp_path: Path) -> None:
    image_hu = make_hu((9, 7, 9))
    heights = [0, 2.5, 5.0, 7.5, 10.0, 10.0, 12.5, 15.0, 17.5]
    files = save_stack(tmp_path / "d", image_hu, heights, AcquisitionNumber=[2] * 5 + [3] * 4)
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, np.delete(image_hu, 5, 0))
    says = (
        "two acquisitions have a slice at the same position; the earlier one was kept, dropped: "
        f"'{files[5].name}'"
    )
    assert finding_texts(volume) == (says,)


@pytest.mark.parametrize("slant", [(0.0, np.tan(np.radians(20.0))), (0.0, -0.3), (0.15, 0.1)])
def test_a_tilted_gantry(tmp_path: Path, slant: tuple[float, float]) -> None:
    """Voxels have the values of their world points; each pixel of a tilted slice is found."""
    shape, heights = (11, 14, 17), 2.5 * np.arange(11)
    places = [(-120.25 + slant[0] * height, 33.5 + slant[1] * height, height) for height in heights]
    points = np.stack([pixel_points(shape[1:], np.array(position)) for position in places])
    image_hu = smooth(shape, points)
    save_stack(tmp_path / "d", image_hu, list(heights), slant)
    volume = read_image(tmp_path / "d")
    degrees = np.degrees(np.arctan(np.hypot(*slant)))
    says = (
        f"the gantry was tilted by {degrees:.1f}°: the slices were resampled to a rectangular "
        "grid; results are on that grid"
    )
    assert finding_texts(volume) == (says,)
    assert np.allclose(volume.grid.direction, np.eye(3), atol=1e-9)
    assert volume.grid.spacing_mm == pytest.approx((2.5, *SPACING_MM))
    drift_px = np.abs(np.array(slant)[::-1]) * heights[-1] / np.array(SPACING_MM)
    assert volume.grid.shape == (11, *(np.array(shape[1:]) + np.ceil(drift_px - 1e-6).astype(int)))
    # The way back: the value at the world point of each pixel, linear within the slice.
    index = volume.grid.world_to_index_zyx(points)
    assert index.min() > -1e-3
    assert (index.max(axis=(0, 1, 2)) < np.array(volume.grid.shape) - 1 + 1e-3).all()
    near = np.rint(index).astype(int)
    inner = (slice(None), slice(2, -2), slice(2, -2))
    expected = smooth(volume.grid.shape, volume.grid.index_to_world_xyz_mm(near))
    assert np.abs(volume.array[tuple(np.moveaxis(near, -1, 0))][inner] - expected[inner]).max() <= 1
    outside = np.ones(volume.grid.shape, dtype=bool)
    for step in np.ndindex(2, 2):
        y, x = (
            np.clip(np.floor(index[..., axis + 1] + 1e-6).astype(int) + step[axis], 0, None)
            for axis in range(2)
        )
        outside[
            near[..., 0], np.minimum(y, outside.shape[1] - 1), np.minimum(x, outside.shape[2] - 1)
        ] = False
    assert (volume.array[outside] == -1024).all()


def test_padding_does_not_bleed_into_a_tilted_stack(tmp_path: Path) -> None:
    image_hu = np.full((5, 7, 9), 40, dtype=np.int16)
    image_hu[:, :, :4] = -1000
    for index, pixels in enumerate(image_hu):
        from dicom_files import header, place, save

        stored = (pixels + 1024).astype(np.int16)
        stored[0] = -2000  # -3024 HU
        dataset = header(stored, PixelPaddingValue=-2000)
        place(dataset, (0.0, 0.25 * 2.5 * index, 2.5 * index))
        save(dataset, tmp_path / "d" / f"{index}")
    assert read_image(tmp_path / "d").array.min() == -1024


def test_a_slant_within_rounding_stays(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), list(2.5 * np.arange(5)), (0.0, 0.0008))
    volume = read_image(tmp_path / "d")
    assert np.array_equal(volume.array, make_hu())
    assert finding_texts(volume) == ()
    assert volume.grid.index_to_world_xyz_mm((4, 0, 0)) == pytest.approx(
        (-120.25, 33.5 + 0.008, 10.0)
    )


def test_slices_beside_each_other(tmp_path: Path) -> None:
    image_hu = make_hu()
    for index, x_mm in enumerate(
        (0.0, 0.0, 2 * SPACING_MM[1], 2 * SPACING_MM[1], 2 * SPACING_MM[1])
    ):
        save_slice(tmp_path / "d" / str(index), image_hu[index], (x_mm, 0.0, 2.5 * index))
    volume = read_image(tmp_path / "d")
    assert volume.grid.shape == (5, 7, 11)
    assert np.array_equal(volume.array[1, :, :9], image_hu[1])
    assert np.array_equal(volume.array[2, :, 2:], image_hu[2])
    assert (volume.array[0, :, 9:] == -1024).all()
    assert finding_texts(volume) == (
        (
            "the slices are offset sideways by up to 1.3 mm: they were resampled to a rectangular "
            "grid; results are on that grid"
        ),
    )


def test_a_stack_that_runs_away_is_refused(tmp_path: Path) -> None:
    save_stack(tmp_path / "d", make_hu(), list(2.5 * np.arange(5)), (0.0, 1.2))
    refused(
        tmp_path / "d",
        "expected slices stacked along their normal, but they drift 50° away from it; such a "
        "stack is no CT of a tilted gantry "
        "(30° at most).",
    )
    save_slice(tmp_path / "e" / "1", make_hu()[0], (0, 0, 0))
    save_slice(tmp_path / "e" / "2", make_hu()[1], (0, 0, 500))
    save_slice(tmp_path / "e" / "3", make_hu()[2], (0, 400, 1000))
    refused(
        tmp_path / "e",
        (
            "expected slices stacked above each other, but they are offset sideways by up to 400 "
            "mm; give one stack per folder."
        ),
    )


def test_negative_intensities_of_another_modality_survive_a_missing_slice(tmp_path: Path) -> None:
    image = make_hu()
    save_stack(tmp_path / "d", image, list(2.5 * np.arange(len(image))))
    sorted((tmp_path / "d").iterdir())[2].unlink()
    hu, other = (
        read_image(tmp_path / "d", modality=modality).array for modality in ("ct", "other")
    )
    assert other.min() < -500
    assert np.array_equal(np.maximum(other, -1024), hu)


@pytest.mark.parametrize(
    ("second_mm", "shares"),
    [
        ((20.0, 25.0, 30.0), False),  # the next range begins a step on
        ((15.0, 20.0, 25.0), False),  # rotations share a slice
        ((10.0, 15.0, 20.0), True),
        ((0.0, 5.0, 10.0, 15.0), True),
        ((90.0, 95.0, 100.0), False),  # a gap is no step
    ],
)
def test_groups_of_slices_fill_the_same_space_where_they_share_two_positions(
    second_mm: tuple[float, ...], shares: bool
) -> None:
    def group(heights_mm: tuple[float, ...]) -> list[Any]:
        axes = np.eye(3)[:2]
        return [
            SimpleNamespace(axes=axes, position_xyz_mm=(3.0, -7.0, height)) for height in heights_mm
        ]

    first = group((0.0, 5.0, 10.0, 15.0))
    assert _overlap([first, group(second_mm)]) is shares
    assert _overlap([group(second_mm), first]) is shares
