"""Tiling plan: the budget chooses between one pass and slabs, and never changes the tile."""

from __future__ import annotations

import math

import pytest

from medseg.inference.tiles import TilingPlan, plan_tiling

DIVISOR = (16, 16, 16)
CROP = (250, 200, 150)
WHOLE = 256 * 208 * 160
TILE = (120, 160, 160)
TILE_VOXELS = 128 * 160 * 160


def test_whole_where_it_fits_to_the_byte_and_else_refused() -> None:
    assert plan_tiling(CROP, DIVISOR, 10.0, 10.0 * WHOLE) == TilingPlan(None)
    assert plan_tiling(CROP, DIVISOR, 0.0, 1.0) == TilingPlan(None), "nobody has counted"
    with pytest.raises(ValueError, match=r"the crop of 256×208×160 voxels needs 0\.08 GiB"):
        plan_tiling(CROP, DIVISOR, 10.0, 10.0 * WHOLE - 1)


@pytest.mark.parametrize(("budget_tiles", "batch_size"), [(1.0, 1), (3.95, 3), (1e6, 8)])
def test_a_wanted_tile_is_kept_and_batched(budget_tiles: float, batch_size: int) -> None:
    budget_bytes = math.ceil(2.0 * TILE_VOXELS * budget_tiles)
    assert plan_tiling(CROP, DIVISOR, 2.0, budget_bytes, TILE, max_batch=8) == TilingPlan(
        (128, 160, 160), batch_size
    )
    assert plan_tiling(CROP, DIVISOR, 2.0, budget_bytes, TILE) == TilingPlan((128, 160, 160), 1)


@pytest.mark.parametrize("share", [0.01, 0.999999])
def test_a_small_budget_never_cuts_the_tile(share: float) -> None:
    with pytest.raises(ValueError, match=r"one tile of 128×160×160 voxels needs 0\.01 GiB"):
        plan_tiling(CROP, DIVISOR, 2.0, share * 2.0 * TILE_VOXELS, TILE, max_batch=8)


def test_slabs_where_one_pass_does_not_fit_and_they_do() -> None:
    budget_bytes = 10.0 * WHOLE - 1
    assert plan_tiling(
        CROP, DIVISOR, 10.0, budget_bytes, least_slab_bytes=budget_bytes
    ) == TilingPlan(None, 1, budget_bytes)
    assert plan_tiling(
        CROP, DIVISOR, 9.0, budget_bytes, least_slab_bytes=budget_bytes
    ) == TilingPlan(None), "one pass fits"
    one_tile = 10.0 * TILE_VOXELS
    tiles = plan_tiling(CROP, DIVISOR, 10.0, one_tile / 2, TILE, max_batch=8, least_slab_bytes=1.0)
    assert tiles == TilingPlan((128, 160, 160), 1, one_tile / 2)
    with pytest.raises(ValueError, match=r"the crop of 256×208×160 voxels needs 0\.03 GiB"):
        plan_tiling(CROP, DIVISOR, 10.0, 2**20, least_slab_bytes=0.025 * 2**30)


def test_a_pass_in_words() -> None:
    assert str(TilingPlan(None)) == "whole"
    assert str(TilingPlan((64, 96, 128))) == "tiles of 64×96×128"
    assert str(TilingPlan((64, 96, 128), 4)) == "tiles of 64×96×128, 4 at a time"
    assert str(TilingPlan(None, 1, 1e6)) == "whole, in slabs"
