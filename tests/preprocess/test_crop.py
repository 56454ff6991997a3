"""A crop agrees with padding, also outside: slices go on, in plane lies one value."""

from __future__ import annotations

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
)
from medseg.preprocess.resample import resample_image


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


@pytest.mark.parametrize("crop_mm", [0.8, 1.5, 4.0, 11.0])
def test_a_crop_over_the_lattice_is_that_of_the_whole_lattice(crop_mm: float) -> None:
    """Only the part of the lattice that the filter reads is made, however coarse the crop is."""
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
