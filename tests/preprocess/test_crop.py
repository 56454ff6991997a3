"""A crop agrees with padding, also outside: slices go on, in plane lies one value."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.crop import (
    body_box,
    crop_padded,
    erase_outside,
    erase_outside_,
    pad_at_end,
    resample_crop,
    view_or_resample,
)
from medseg.preprocess.intensity import normalise, window
from medseg.preprocess.resample import RESAMPLINGS, resample_image


def random_boxes(shape: tuple[int, int, int], num: int) -> list[VoxelBox]:
    rng = np.random.default_rng(3)
    starts = rng.integers(-6, 9, (num, 3))
    return [VoxelBox(tuple(start), tuple(start + rng.integers(1, 14, 3))) for start in starts]


@pytest.mark.parametrize("box", random_boxes((7, 9, 11), 40))
def test_crop_agrees_with_padding(box: VoxelBox) -> None:
    volume = np.random.default_rng(1).integers(1, 100, (7, 9, 11)).astype(np.int16)
    padded = np.pad(
        np.pad(volume, ((0, 0), (30, 30), (30, 30)), constant_values=-1),
        ((30, 30), (0, 0), (0, 0)),
        mode="edge",
    )
    crop = crop_padded(volume, box, -1)
    assert crop.dtype == volume.dtype
    np.testing.assert_array_equal(crop, padded[box.shifted((30, 30, 30)).slices()])


@pytest.mark.parametrize("content", [*random_boxes((7, 9, 11), 40), None])
def test_what_lies_beyond_the_content_is_erased_in_place_and_in_a_copy(
    content: VoxelBox | None,
) -> None:
    box = VoxelBox((-2, 1, 3), (5, 9, 12))
    image = torch.rand(box.shape)
    is_content = np.zeros((30, 30, 30), dtype=bool)
    if content is None:
        is_content[:] = True
    else:
        is_content[content.shifted((10, 10, 10)).slices()] = True
    expected = image.clone()
    expected[~torch.from_numpy(is_content[box.shifted((10, 10, 10)).slices()])] = -7.0
    crop = Crop(VoxelGrid((7, 9, 11), (1.0, 1.0, 1.0)), box, content)
    before = image.clone()
    assert torch.equal(erase_outside(image, crop, -7.0), expected)
    assert torch.equal(image, before)
    assert erase_outside_(image, crop, -7.0) is image
    assert torch.equal(image, expected)


@pytest.mark.parametrize("lead", [(), (1,), (2, 1)])
def test_padding_at_the_end_is_that_of_a_crop(lead: tuple[int, ...]) -> None:
    volume = np.random.default_rng(2).integers(1, 100, (3, 4, 5)).astype(np.float32)
    for shape in ((3, 4, 5), (8, 4, 5), (3, 8, 6), (16, 5, 8)):
        image = torch.from_numpy(volume).expand(*lead, -1, -1, -1)
        padded = pad_at_end(image, shape, -1.0)
        assert padded.shape == (*lead, *shape)
        assert np.array_equal(
            padded.reshape(-1, *shape)[0], crop_padded(volume, VoxelBox((0, 0, 0), shape), -1.0)
        )


def test_the_body_box_holds_all_that_is_denser_than_air_and_a_margin() -> None:
    image_hu = np.full((30, 40, 60), -1000, dtype=np.int16)
    image_hu[12:20, 10:25, 30:55] = -500
    image_hu[3, 3, 3] = -501
    assert body_box(image_hu, (5.0, 2.0, 4.0)) == VoxelBox((10, 5, 27), (22, 30, 58))
    image_hu[:] = -900
    assert body_box(image_hu, (5.0, 2.0, 4.0)) == VoxelBox.full((30, 40, 60))
    rounded = np.array([[[-1000.0, -500.4, -500.4, -1000.0]]])
    assert body_box(rounded, (9.0, 9.0, 9.9)) == body_box(
        np.rint(rounded).astype(np.int16), (9.0, 9.0, 9.9)
    )


@pytest.mark.parametrize("lattice_mm", [(2.0, 2.0, 2.0), (2.0, 1.0, 1.0)])
@pytest.mark.parametrize("crop_mm", [(2.0, 2.0, 2.0), (1.5, 1.5, 1.5)])
def test_values_beyond_the_limits_never_reach_the_filter(
    lattice_mm: tuple[float, float, float], crop_mm: tuple[float, float, float]
) -> None:
    """On the way to a crop on the lattice, and to one of another spacing over the lattice."""
    source = VoxelGrid((12, 20, 20), (2.0, 1.0, 1.0))
    values = np.random.default_rng(4).integers(-4000, 8000, source.shape).astype(np.int16)
    lattice = source.resampled(lattice_mm)
    crop = Crop(lattice.resampled(crop_mm), VoxelBox((1, 1, 1), (6, 7, 8)))
    clipped = np.clip(values, -1024, 3071)
    expected = resample_crop(clipped, source, lattice, crop, -1024.0)
    found = resample_crop(values, source, lattice, crop, -1024.0, limits=(-1024.0, 3071.0))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("crop_mm", [4.0, 11.0])
def test_one_voxel_of_a_coarse_crop_has_all_of_the_lattice_that_its_filter_reads(
    crop_mm: float,
) -> None:
    source = VoxelGrid((40, 44, 48), (2.0, 1.0, 1.0))
    values = np.random.default_rng(5).normal(size=source.shape).astype(np.float32)
    lattice = source.resampled((2.0, 2.0, 2.0))
    crop_grid = lattice.resampled((crop_mm, crop_mm, crop_mm))
    depth, height, width = (length // 3 for length in crop_grid.shape)
    one_voxel = VoxelBox((depth, height, width), (depth + 1, height + 1, width + 1))
    crop = Crop(crop_grid, one_voxel)
    on_lattice = resample_image(values, source, lattice, 0.0)
    expected = resample_image(on_lattice, lattice, crop.grid, 0.0, slices_go_on=True)
    found = resample_crop(values, source, lattice, crop, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_body_of_another_modality_is_all_that_is_not_zero() -> None:
    image = np.zeros((9, 40, 50), dtype=np.float32)
    image[4, 20, 30] = -3.0
    image[5, 22, 25] = 600.0
    box = VoxelBox((2, 17, 21), (8, 26, 35))
    assert body_box(image, (5.0, 3.5, 3.0), "mr") == box
    assert body_box(image, (5.0, 3.5, 3.0), "other") == box
    assert body_box(image, (5.0, 3.5, 3.0)) == VoxelBox.full(image.shape), "0 HU is water"


@pytest.mark.parametrize("resampling", RESAMPLINGS)
@pytest.mark.parametrize("crop_mm", [(1.5, 1.5, 1.5), (2.0, 2.5, 6.0)])
@pytest.mark.parametrize("start", [(-4, 3, 2), (6, -3, 4), (2, 3, 3)])
def test_a_crop_over_the_lattice_is_that_of_the_whole_scan_on_the_lattice(
    resampling: str, crop_mm: tuple[float, float, float], start: tuple[int, int, int]
) -> None:
    """Training reads the lattice from the cache, prediction computes only what is near the crop."""
    source = VoxelGrid((14, 30, 26), (2.5, 1.0, 1.2), (4.0, -7.0, 11.0))
    image = np.random.default_rng(6).normal(0, 300, source.shape).astype(np.float32)
    lattice = source.resampled((2.0, 2.0, 2.0))
    box = VoxelBox(start, tuple(np.add(start, (13, 9, 4))))
    crop = Crop(lattice.resampled(crop_mm), box)
    cached = resample_image(image, source, lattice, -1000.0, resampling=resampling)
    expected = resample_image(
        cached, lattice, crop.grid, -1000.0, resampling=resampling, slices_go_on=True
    )
    found = resample_crop(image, source, lattice, crop, -1000.0, resampling)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    read = view_or_resample(cached, lattice, crop, -1000.0, resampling)
    torch.testing.assert_close(read, expected, rtol=0, atol=0)


@pytest.mark.parametrize("resampling", RESAMPLINGS)
def test_a_crop_on_the_lattice_is_resampled_once_with_the_filter_of_the_stage(
    resampling: str,
) -> None:
    source = VoxelGrid((14, 30, 26), (2.5, 1.0, 1.2))
    image = np.random.default_rng(7).normal(0, 300, source.shape).astype(np.float32)
    lattice = source.resampled((1.0, 2.0, 0.9))
    crop = Crop(lattice, VoxelBox((-3, 4, 5), (9, 12, 30)))
    expected = resample_image(
        image, source, crop.grid, -1000.0, resampling=resampling, slices_go_on=True
    )
    assert torch.equal(resample_crop(image, source, lattice, crop, -1000.0, resampling), expected)


def test_a_crop_inside_a_volume_is_a_view_and_one_beyond_it_a_copy() -> None:
    grid = VoxelGrid((4, 5, 6), (2.0, 1.0, 1.0))
    image = torch.arange(120.0).view(grid.shape)
    whole = view_or_resample(image, grid, Crop(grid, VoxelBox.full(grid.shape)), -1.0)
    assert whole.data_ptr() == image.data_ptr()
    box = VoxelBox((1, 2, 3), (4, 5, 6))
    inner = view_or_resample(image, grid, Crop(grid, box), -1.0)
    assert inner.data_ptr() == image[1, 2, 3].data_ptr()
    assert inner.shape == box.shape
    for axis in range(3):
        beyond = box.shifted([int(other == axis) for other in range(3)])
        found = view_or_resample(image, grid, Crop(grid, beyond), -1.0)
        assert np.array_equal(found.numpy(), crop_padded(image.numpy(), beyond, -1.0))


def test_what_lies_beyond_the_content_of_a_crop_is_erased() -> None:
    """The content may reach beyond the crop, as after a cut to patches."""
    grid = VoxelGrid((20, 20, 20), (1.0, 1.0, 1.0))
    image = torch.arange(60.0).view(3, 4, 5) + 1
    box = VoxelBox((6, 7, 8), (9, 11, 13))
    assert erase_outside(image, Crop(grid, box), -1.0) is image
    erased = erase_outside(image, Crop(grid, box, VoxelBox((7, 0, 9), (30, 9, 12))), -1.0)
    expected = torch.full_like(image, -1.0)
    expected[1:, :2, 1:4] = image[1:, :2, 1:4]
    assert torch.equal(erased, expected)
    assert image.min() == 1, "the image itself is not changed"


@pytest.mark.parametrize("crop_mm", [(2.0, 2.0, 2.0), (1.5, 1.5, 1.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_finished_slab_by_slab_are_those_of_the_finished_crop(
    crop_mm: tuple[float, float, float], dtype: torch.dtype
) -> None:
    """On the lattice and over it; the crop reaches beyond the scan, the source is not changed."""
    source = VoxelGrid((40, 90, 80), (2.0, 1.0, 1.0))
    image = torch.randn(source.shape, generator=torch.Generator().manual_seed(8)) * 500
    before = image.clone()
    lattice = source.resampled((2.0, 2.0, 2.0))
    crop = Crop(lattice.resampled(crop_mm), VoxelBox((-3, -4, 5), (30, 40, 60)))
    intensity = window((-1000.0, 400.0))
    expected = normalise(resample_crop(image, source, lattice, crop, -900.0), intensity)
    out = torch.empty((2, *crop.grid.shape), dtype=dtype)[1]
    finish = partial(normalise, intensity=intensity)
    found = resample_crop(image, source, lattice, crop, -900.0, finish=finish, out=out)
    assert found is out
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(image, before)
