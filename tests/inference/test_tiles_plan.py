"""The largest input that the budget allows, whole where it can be."""

from __future__ import annotations

import math

import pytest

from medseg.inference.tiles import TilingPlan, plan_tiling

DIVISOR = (16, 16, 16)
CROP = (250, 200, 150)
WHOLE = 256 * 208 * 160


def test_whole_where_it_fits_to_the_byte() -> None:
    assert plan_tiling(CROP, DIVISOR, 10.0, 10.0 * WHOLE) == TilingPlan(None, 1, 10 * WHOLE)
    assert plan_tiling(CROP, DIVISOR, 10.0, 10.0 * WHOLE - 1).tile_size is not None
    assert plan_tiling(CROP, DIVISOR, 0.0, 1.0).tile_size is None, "nobody has counted"


@pytest.mark.parametrize("budget_voxels", [64**3, 70**3, 2 * 64**3, 100**3, 150**3, WHOLE - 1])
@pytest.mark.parametrize("divisor", [DIVISOR, (8, 16, 16), (1, 1, 1)])
def test_a_tile_keeps_the_budget_and_uses_it(budget_voxels: int, divisor: tuple[int, int, int]) -> None:
    plan = plan_tiling(CROP, divisor, 10.0, 10.0 * budget_voxels)
    tile = plan.tile_size
    if tile is None:  # with the divisor 1 nothing is added to the crop, which then fits
        assert math.prod(CROP) <= budget_voxels
        return
    assert plan.num_bytes == 10 * math.prod(tile) <= 10 * budget_voxels
    assert all(size % step == 0 and size >= 64 for size, step in zip(tile, divisor, strict=True))
    # Without the last cut it would be too much; the cut axes differ by a step at most.
    assert max(tile) - min(tile) <= max(divisor) or tile[2] in (150, 160)
    grown = max(
        math.prod(size + step * (axis == other) for other, (size, step) in enumerate(zip(tile, divisor, strict=True)))
        for axis in range(3)
        if tile[axis] < CROP[axis]
    )
    assert grown > budget_voxels


def test_a_budget_that_holds_no_tile_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"the smallest tile, 64×64×64, needs 1\.00 GiB"):
        plan_tiling(CROP, DIVISOR, 4096.0, 4096.0 * 64**3 - 1)
    # A crop smaller than the smallest tile is one.
    assert plan_tiling((30, 200, 20), DIVISOR, 1.0, 32 * 64 * 32).tile_size == (32, 64, 32)


def test_a_wanted_tile_is_kept_batched_and_cut_down() -> None:
    wanted = (120, 160, 160)
    voxels = 128 * 160 * 160
    assert plan_tiling(CROP, DIVISOR, 2.0, 1e12, wanted) == TilingPlan((128, 160, 160), 1, 2 * voxels)
    assert plan_tiling(CROP, DIVISOR, 2.0, 7.9 * voxels, wanted, max_batch=8) == TilingPlan((128, 160, 160), 3, 6 * voxels)
    assert plan_tiling(CROP, DIVISOR, 2.0, 1e12, wanted, max_batch=8).batch_size == 8
    small = plan_tiling(CROP, DIVISOR, 2.0, 2.0 * voxels - 1, wanted, max_batch=8)
    assert small == TilingPlan((128, 144, 160), 1, 2 * 128 * 144 * 160)


def test_a_pass_in_words() -> None:
    assert str(TilingPlan(None, 1, 0)) == "whole"
    assert str(TilingPlan((64, 96, 128), 1, 0)) == "tiles of 64×96×128"
    assert str(TilingPlan((64, 96, 128), 4, 0)) == "tiles of 64×96×128, 4 at a time"
