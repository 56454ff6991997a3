"""Removal of components and filling of holes, compared with scipy on random masks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from medseg.geometry.grid import VoxelBox
from medseg.inference import components
from medseg.inference.components import Rejection, fill_holes, label_box, remove_components

DENSITIES = [0.0, 0.02, 0.2, 0.35, 0.7, 0.9, 1.0]


@pytest.fixture(params=[1, 2000, 10**9], ids=["a plane", "some planes", "all"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of voxels of a slab, on which no result may depend."""
    monkeypatch.setattr(components, "SLAB_VOXELS", request.param)


def random_mask(density: float, seed: int) -> np.ndarray:
    """Make a mask of random voxels in a part of a volume with three different sizes."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((14, 19, 23), dtype=bool)
    mask[2:11, 3:19, 0:20] = rng.random((9, 16, 20)) < density
    return mask


def part_sizes(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts, num = ndimage.label(mask)
    return parts, np.array([np.sum(parts == number) for number in range(1, num + 1)])


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("at_once")
def test_cleaning_agrees_with_scipy_on_the_whole_array(density: float, seed: int) -> None:
    mask = random_mask(density, seed)
    parts, sizes = part_sizes(mask)
    labels = np.where(mask, np.uint8(2), np.uint8(0))
    if sizes.size:
        large_parts = 1 + np.flatnonzero(sizes >= 0.3 * sizes.max())
        large = labels.copy()
        remove_components(large, 2, min_fraction=0.3)
        np.testing.assert_array_equal(large == 2, np.isin(parts, large_parts))
    fill_holes(labels, 2)
    np.testing.assert_array_equal(labels == 2, ndimage.binary_fill_holes(mask))


def test_an_empty_mask_stays_empty() -> None:
    labels = np.zeros((3, 4, 5), dtype=np.uint8)
    fill_holes(labels, 1)
    remove_components(labels, 1, min_fraction=0.1)
    assert not labels.any()
    assert label_box(labels, 1) is None


@pytest.mark.usefixtures("at_once")
def test_a_hole_is_filled_and_a_bay_is_not() -> None:
    labels = np.zeros((9, 9, 9), dtype=np.uint8)
    labels[1:8, 1:8, 1:8] = 3
    labels[3, 3, 3] = 0
    labels[4:8, 5, 5] = 0
    fill_holes(labels, 3)
    assert labels[3, 3, 3] == 3
    assert not labels[4:8, 5, 5].any()


@pytest.mark.usefixtures("at_once")
def test_another_label_in_a_cavity_stays() -> None:
    """As for a tumour in an organ: the empty voxels around it get the label of the organ."""
    labels = np.zeros((9, 9, 9), dtype=np.uint8)
    labels[1:8, 1:8, 1:8] = 1
    labels[2:7, 2:7, 2:7] = 0
    labels[3:6, 4, 4] = 2
    fill_holes(labels, 1)
    expected = np.zeros_like(labels)
    expected[1:8, 1:8, 1:8] = 1
    expected[3:6, 4, 4] = 2
    np.testing.assert_array_equal(labels, expected)


def test_the_box_of_a_label_is_that_of_its_mask() -> None:
    labels = np.random.default_rng(3).integers(0, 3, (5, 6, 7)).astype(np.uint8)
    labels[:2] = labels[:, :, 6] = 0
    labels[labels == 2] = 0
    labels[3, 2, 1:3] = 2
    for value in (1, 2):
        assert label_box(labels, value) == VoxelBox.from_mask(labels == value)


@pytest.mark.usefixtures("at_once")
def test_gas_does_not_count_among_the_large_parts() -> None:
    """The largest component is gas, so the second one decides which are small."""
    labels = np.zeros((20, 12, 14), dtype=np.uint8)
    labels[1:19, 1:6, 1:12] = 1  # gas
    labels[2:12, 8:11, 2:9] = 1
    labels[14:16, 8:10, 2:5] = 1  # small: 12 voxels, the second component has 210
    labels[15:18, 8:10, 8:10] = 2
    image_hu = np.full(labels.shape, -800)
    image_hu[:, :7] = -1000
    expected = np.where(labels == 2, 2, 0)
    expected[2:12, 8:11, 2:9] = 1
    remove_components(labels, 1, [Rejection(lambda part: image_hu[part] < -980, 0.5)], 0.1)
    np.testing.assert_array_equal(labels, expected)


@pytest.mark.usefixtures("at_once")
def test_a_part_is_gas_where_its_median_lies_below() -> None:
    rng = np.random.default_rng(5)
    mask = ndimage.gaussian_filter(rng.random((20, 30, 40)), 1.5) > 0.51
    image_hu = ndimage.gaussian_filter(rng.normal(-980, 60, mask.shape), 2.0)
    parts, num_parts = ndimage.label(mask)
    medians = ndimage.median(image_hu, parts, np.arange(1, num_parts + 1))
    bound_hu = float(np.median(medians)) + 1e-9
    expected = np.isin(parts, 1 + np.flatnonzero(medians < bound_hu))
    # A median between two values may lie on either side of the bound.
    sure = np.isin(parts, 1 + np.flatnonzero(np.abs(medians - bound_hu) > 1e-3)) | ~mask
    assert num_parts >= 5
    assert 0 < expected.sum() < mask.sum()
    labels = mask.astype(np.uint8)
    remove_components(labels, 1, [Rejection((image_hu < bound_hu).__getitem__, 0.5)])
    np.testing.assert_array_equal((mask & (labels == 0))[sure], expected[sure])
