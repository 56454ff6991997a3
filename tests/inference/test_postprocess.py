"""Cleaning against the plain scipy recipes, on random masks."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from medseg.inference import postprocess
from medseg.inference.postprocess import fill_holes, gas_parts, keep_large_parts

DENSITIES = [0.0, 0.02, 0.2, 0.35, 0.7, 0.9, 1.0]


def random_mask(density: float, seed: int) -> np.ndarray:
    """Blobs of random size somewhere in a volume with three different sizes."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((14, 19, 23), dtype=bool)
    mask[2:11, 3:19, 0:20] = rng.random((9, 16, 20)) < density
    return mask


def part_sizes(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    parts, num = ndimage.label(mask)
    return parts, np.array([np.sum(parts == number) for number in range(1, num + 1)])


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("seed", range(3))
def test_cleaning_agrees_with_scipy_on_the_whole_array(density: float, seed: int) -> None:
    mask = random_mask(density, seed)
    before = mask.copy()
    parts, sizes = part_sizes(mask)
    np.testing.assert_array_equal(fill_holes(mask), ndimage.binary_fill_holes(mask))
    if sizes.size:
        kept = 1 + np.flatnonzero(sizes >= 0.3 * sizes.max())
        np.testing.assert_array_equal(keep_large_parts(mask, 0.3), np.isin(parts, kept))
    np.testing.assert_array_equal(mask, before)


def test_an_empty_mask_stays_empty() -> None:
    mask = np.zeros((3, 4, 5), dtype=bool)
    for result in (keep_large_parts(mask, 0.1), fill_holes(mask)):
        assert result.shape == mask.shape
        assert result.dtype == bool
        assert not result.any()


def test_a_hole_is_filled_and_a_bay_is_not() -> None:
    mask = np.zeros((9, 9, 9), dtype=bool)
    mask[1:8, 1:8, 1:8] = True
    mask[3, 3, 3] = False
    mask[4:8, 5, 5] = False
    filled = fill_holes(mask)
    assert filled[3, 3, 3]
    assert not filled[4:8, 5, 5].any()


@pytest.mark.parametrize("counted_at_once", [1, 10**9])
def test_a_part_is_gas_where_its_median_lies_below(counted_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postprocess, "COUNTED_AT_ONCE", counted_at_once)
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
    np.testing.assert_array_equal(gas_parts(mask, image_hu < bound_hu)[sure], expected[sure])
