"""A constant outside the field of view of a CT has no noise, and is replaced by air."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from medseg.data.audit.image import check_channels
from medseg.preprocess.fill import find_fill, replace_fill

SHAPE = (20, 70, 80)
AIR, TISSUE, LUNG = -1000, 40, -850


def chest(noise_hu: float = 12.0, reach: float = 0.9) -> np.ndarray:
    """A body in air with two lungs; with a reach above 1 the border of the slices cuts it off."""
    y, x = np.mgrid[-1 : 1 : SHAPE[1] * 1j, -1 : 1 : SHAPE[2] * 1j]
    plane = np.where(y**2 + x**2 < reach**2, TISSUE, AIR)
    for side in (-0.4, 0.4):
        plane[y**2 + (x - side) ** 2 < 0.25**2] = LUNG
    noise = np.random.default_rng(3).normal(0, noise_hu, SHAPE)
    return np.clip(np.rint(plane + noise), -1024, 3071).astype(np.int16)


def outside_circle() -> np.ndarray:
    y, x = np.mgrid[-1 : 1 : SHAPE[1] * 1j, -1 : 1 : SHAPE[2] * 1j]
    return np.broadcast_to(y**2 + x**2 > 0.98, SHAPE)


def outside_turned() -> np.ndarray:
    inside = ndimage.rotate(np.ones(SHAPE), 20, axes=(1, 2), reshape=False, order=0)
    return inside == 0


def beyond_some_slices() -> np.ndarray:
    return np.broadcast_to(np.arange(SHAPE[0])[:, None, None] < 3, SHAPE)


@pytest.mark.parametrize("fill", [0, -500, 200, 3071, 32767])
@pytest.mark.parametrize("outside", [outside_circle(), outside_turned(), beyond_some_slices()])
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_fill_becomes_air_and_nothing_else(
    fill: int, outside: np.ndarray, axes: tuple[int, int, int]
) -> None:
    """In any order of the axes, also where the border cuts the patient off."""
    scan = chest(reach=1.2)
    filled = np.where(outside, np.int16(fill), scan).transpose(axes)
    assert find_fill(filled) == fill
    share = replace_fill(filled, fill)
    changed = (filled != scan.transpose(axes)) & ~outside.transpose(axes)
    assert (filled[outside.transpose(axes)] == -1024).all()
    # A voxel of tissue that has the value by chance and touches the fill counts with it.
    assert changed.sum() < 0.003 * scan.size
    assert share == pytest.approx(outside.mean(), abs=0.003)


@pytest.mark.parametrize("side", range(4))
def test_a_stripe_along_any_one_side_becomes_air(side: int) -> None:
    """Lower, upper, left and right side; a block of the same value inside the body is an organ."""
    outside = np.rot90(np.broadcast_to(np.arange(60)[:, None] < 4, (60, 60)), side)
    scan = np.rint(np.random.default_rng(5).normal(40, 12, (20, 60, 60))).astype(np.int16)
    scan[scan == 500] = 501
    filled = np.where(outside, np.int16(500), scan)
    filled[:, 20:30, 20:30] = 500
    expected = np.where(outside, np.int16(-1024), filled)
    assert find_fill(filled) == 500
    share = replace_fill(filled, 500)
    assert np.array_equal(filled, expected)
    assert share == 240 / 3600


@pytest.mark.parametrize("axis", [1, 2])
def test_a_stripe_along_a_short_side_is_found_and_repeated_tissue_on_a_tiny_one_is_not(
    axis: int,
) -> None:
    """As in a CT that is stored as coronal planes."""
    scan = np.rint(np.random.default_rng(5).normal(40, 12, (8, 24, 240))).astype(np.int16)
    scan[:, :, :4] = 500
    assert find_fill(scan if axis == 1 else scan.transpose(0, 2, 1)) == 500
    thin = scan[:, :12]  # a side of 12 voxels may have one value by chance
    assert find_fill(thin if axis == 1 else thin.transpose(0, 2, 1)) is None


@pytest.mark.parametrize("length", [130, 240])
def test_a_stripe_along_a_part_of_a_long_side_is_found(length: int) -> None:
    scan = np.rint(np.random.default_rng(5).normal(40, 12, (8, 64, 240))).astype(np.int16)
    scan[:, :4, :length] = 500
    assert find_fill(scan) == 500


@pytest.mark.parametrize(("length", "is_replaced"), [(19, False), (20, True)])
def test_a_piece_of_twenty_voxels_is_a_fill_and_a_smaller_one_is_chance(
    length: int, is_replaced: bool
) -> None:
    image = np.full((2, 40, 50), 40, np.int16)
    image[1, 0, 5 : 5 + length] = 0
    share = replace_fill(image, 0)
    assert share == (length / 4000 if is_replaced else 0)
    assert (image[0] == 40).all(), "other values at the border are tissue"
    assert (image[1, 0, 5 : 5 + length] == (-1024 if is_replaced else 0)).all()


@pytest.mark.parametrize(("above_lowest", "is_found"), [(25, False), (26, True)])
def test_a_fill_within_the_reach_of_a_clip_is_the_clipped_air_itself(
    above_lowest: int, is_found: bool
) -> None:
    """The lowest tissue is at 0 HU here; voxels far below air do not count as the lowest."""
    image = np.random.default_rng(8).integers(0, 400, (20, 60, 60)).astype(np.int16)
    image[:, 30, 30] = -1100
    image[:, :, :4] = above_lowest
    assert find_fill(image) == (above_lowest if is_found else None)


@pytest.mark.parametrize(("equal_of_four", "is_found"), [(2, True), (3, False)])
def test_an_image_whose_neighbours_are_mostly_equal_has_no_noise(
    equal_of_four: int, is_found: bool
) -> None:
    """Of every four neighbours along a row so many are equal; those in the fill do not count."""
    widths = [equal_of_four + 1] + [1] * (4 - equal_of_four)
    row = np.repeat(np.arange(len(widths)) % 2, widths)[:4]
    rows = np.cumsum(np.tile(np.diff(np.concatenate([row, [1 - row[-1]]])) != 0, 15)) + 40
    image = np.broadcast_to(rows[:60], (20, 60, 60)).astype(np.int16)
    image[:, :12] = 700
    assert find_fill(image) == (700 if is_found else None)


@pytest.mark.parametrize(
    "image",
    [
        chest(),
        chest(reach=2.0),
        chest(noise_hu=2.0, reach=2.0),
        chest(noise_hu=0.0, reach=2.0),
        np.maximum(chest(), -500),
        np.where(outside_circle(), np.int16(-2000), chest()),
        np.where(outside_circle(), np.int16(-1000), chest()),
        chest().astype(np.float32),
    ],
)
def test_an_image_without_a_fill_stays(image: np.ndarray) -> None:
    """Air, tissue at the border, an image without noise, clipped air, and padding below air."""
    assert find_fill(image) is None


def test_the_caller_keeps_the_own_image_and_is_told() -> None:
    image = np.where(outside_circle(), np.int16(0), chest())
    before = image.copy()
    checked = check_channels([image], ["ct"], is_owned=False)
    assert np.array_equal(image, before)
    assert checked.images[0].min() == -1024
    assert checked.facts[0].low_hu == -1024
    (finding,) = (finding for finding in checked.findings if finding.code == "padding")
    assert str(finding) == (
        "25.1% of the voxels hold exactly 0 HU up to the border of their slices: a constant "
        "was filled in outside the field of view; "
        "nothing to do: it is read as air, -1024 HU"
    )
    assert check_channels([image], ["mr"]).images[0] is image
    assert check_channels([image], ["ct"]).images[0] is image
