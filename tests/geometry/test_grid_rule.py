"""What a stage's rule makes of a box: sizes to the voxel, the same piece of the body."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import PLAIN, GridRule, distortion, region_crop

OBLIQUE = ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0))
LATTICE = VoxelGrid((40, 60, 90), (2.5, 0.7, 0.8), (-30.0, 15.0, 400.0), OBLIQUE)
COARSE = LATTICE.resampled((4.0, 4.0, 4.0))


def faces_xyz_mm(grid: VoxelGrid, box: VoxelBox) -> np.ndarray:
    """World points of the two outer corners of a box."""
    return grid.index_to_world_xyz_mm(np.array([box.start, box.stop]) - 0.5)


def random_boxes(num: int) -> list[VoxelBox]:
    rng = np.random.default_rng(0)
    starts = rng.integers(-2, 15, (num, 3))
    return [VoxelBox(tuple(start), tuple(start + rng.integers(1, 15, 3))) for start in starts]


def test_a_crop_of_fixed_size_has_that_size_and_measures_what_the_region_does() -> None:
    rule = GridRule(size=(32, 48, 40))
    for tight in random_boxes(30):
        crop = region_crop(tight, COARSE, LATTICE, 6.0, (96, 96, 96), (16, 16, 16), rule)
        assert crop.grid.shape == crop.box.shape == (32, 48, 40), (
            "neither the patch nor the divisor is asked"
        )
        same = region_crop(tight, COARSE, LATTICE, 6.0, None, (1, 1, 1), PLAIN)
        np.testing.assert_allclose(faces_xyz_mm(*crop[:2]), faces_xyz_mm(*same[:2]), atol=1e-9)
        extent_mm = np.multiply(same.box.shape, LATTICE.spacing_mm)
        spacing_mm = extent_mm / (32, 48, 40)
        np.testing.assert_allclose(crop.grid.spacing_mm, spacing_mm, rtol=1e-12)
        assert distortion(crop.grid.spacing_mm) == pytest.approx(
            spacing_mm.max() / spacing_mm.min()
        )


def test_a_cube_is_as_long_as_the_longest_axis_and_holds_the_region_in_its_middle() -> None:
    lattice, rule = LATTICE.resampled((1.5, 1.5, 1.5)), GridRule(is_cube=True)
    for tight in random_boxes(30):
        needed = region_crop(tight, COARSE, lattice, 6.0, (1, 1, 1), (8, 8, 8), PLAIN).box
        crop = region_crop(tight, COARSE, lattice, 6.0, None, (8, 8, 8), rule)
        edge = -(-max(needed.shape) // 8) * 8
        assert crop.lattice == lattice
        assert crop.box.shape == (edge, edge, edge)
        assert crop.box.contains(needed)
        assert (
            np.abs(np.add(crop.box.start, crop.box.stop) - np.add(needed.start, needed.stop)).max()
            <= 2
        ), "half a voxel, twice"
        assert (
            region_crop(tight, COARSE, lattice, 6.0, (1, 1, 1), (8, 8, 8), rule).box.shape
            == (max(needed.shape),) * 3
        )


def test_a_whole_crop_is_at_least_as_large_as_the_patches_that_its_network_knows() -> None:
    for tight in random_boxes(30):
        plain = region_crop(tight, COARSE, LATTICE, 6.0, (1, 1, 1), (1, 1, 1)).box
        crop = region_crop(tight, COARSE, LATTICE, 6.0, None, (8, 8, 8), PLAIN, (20, 40, 30)).box
        assert crop.contains(plain)
        assert crop.shape == tuple(
            -(-max(pair) // 8) * 8 for pair in zip(plain.shape, (20, 40, 30), strict=True)
        )
        assert np.abs(np.add(crop.start, crop.stop) - np.add(plain.start, plain.stop)).max() <= 2, (
            "half a voxel, twice"
        )
        fixed = GridRule(size=(32, 48, 40))
        args = (tight, COARSE, LATTICE, 6.0, None, (8, 8, 8), fixed)
        assert region_crop(*args, (64, 64, 64)) == region_crop(*args), (
            "a crop of fixed size measures what the region does"
        )


@pytest.mark.parametrize("rule", [PLAIN, GridRule(is_cube=True)])
def test_a_crop_is_never_a_single_voxel_at_the_deepest_level(rule: GridRule) -> None:
    lattice = VoxelGrid((40, 40, 40), (6.0, 6.0, 6.0))
    small, long = VoxelBox((9, 10, 11), (16, 17, 18)), VoxelBox((9, 10, 11), (16, 17, 30))
    assert region_crop(small, lattice, lattice, 6.0, None, (16, 16, 16), rule).box.shape == (
        32,
        32,
        32,
    )
    edges = (32, 32, 32) if rule.is_cube else (16, 16, 32)
    assert region_crop(long, lattice, lattice, 6.0, None, (16, 16, 16), rule).box.shape == edges


def test_a_scan_is_seen_at_the_spacing_of_the_range_that_is_nearest_to_its_own() -> None:
    rule = GridRule(range_mm=(1.0, 4.0))
    assert rule.spacing_mm((5.0, 0.7, 0.75)) == (4.0, 1.0, 1.0)
    assert rule.spacing_mm((1.25, 1.5, 8.0)) == (1.25, 1.5, 4.0)
    assert PLAIN.spacing_mm((5.0, 0.7, 0.75)) is None


@pytest.mark.parametrize(
    "rule",
    [PLAIN, GridRule(size=(32, 48, 40)), GridRule(is_cube=True), GridRule(range_mm=(0.8, 3.0))],
)
def test_a_rule_comes_back_from_the_card(rule: GridRule) -> None:
    assert GridRule(**asdict(rule)) == rule


def test_the_margin_counts_voxels_of_the_lattice() -> None:
    coarse = VoxelGrid((20, 20, 20), (4.0, 4.0, 4.0), (0.0, 0.0, 0.0))
    lattice = coarse.resampled((2.0, 1.0, 1.0))
    tight = VoxelBox((5, 6, 7), (9, 10, 11))
    crop = region_crop(tight, coarse, lattice, 6.0, None, (1, 1, 1))
    assert crop.box == lattice.box_from(coarse, tight).expanded((3, 6, 6))
