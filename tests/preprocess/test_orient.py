"""Laws of orientation: a view there and back, the same world, LPS axes."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import Orientation, orient, orientation_of

OBLIQUE = ((0.96, -0.28, 0.0), (0.28, 0.96, 0.0), (0.0, 0.0, 1.0))
BASE = VoxelGrid((5, 6, 7), (2.5, 0.7, 0.8), (-11.0, 20.0, 300.0), OBLIQUE)
STORED = [
    Orientation(o, f) for o in permutations(range(3)) for f in product((False, True), repeat=3)
]


@pytest.mark.parametrize("stored", STORED)
def test_every_storage_order_leads_to_the_same_lps_volume(stored: Orientation) -> None:
    """A volume stored in any of the 48 orders comes out as the one LPS volume, on the LPS grid."""
    lps = np.arange(210).reshape(BASE.shape)
    array, grid = stored.to_lps(lps), BASE.reoriented(stored.order, stored.flips)
    oriented, oriented_grid, orientation = orient(array, grid)
    assert np.array_equal(oriented, lps)
    assert oriented_grid.is_close(BASE, 1e-9)
    assert np.array_equal(orientation.from_lps(oriented), array)
    assert np.shares_memory(oriented, array)
    assert np.shares_memory(orientation.from_lps(oriented), array)


def test_each_voxel_keeps_its_world_point() -> None:
    grid = BASE.reoriented((1, 2, 0), (True, False, True))
    array = np.random.default_rng(0).normal(size=grid.shape)
    oriented, oriented_grid, _ = orient(array, grid)
    for index in ((0, 0, 0), (1, 2, 3), (4, 5, 1)):
        where = oriented_grid.world_to_index_zyx(grid.index_to_world_xyz_mm(np.array(index)))
        assert oriented[tuple(np.round(where).astype(int))] == array[index]
    assert (np.diag(np.array(oriented_grid.direction)) > 0.9).all()


def test_a_turn_by_45_degrees_is_decided_the_same_way_despite_rounding() -> None:
    half = np.sqrt(0.5)
    decisions = {
        orientation_of(
            VoxelGrid((3, 4, 5), (1, 1, 1), (0, 0, 0), ((half, -h, 0), (h, half, 0), (0, 0, 1)))
        )
        for h in (half, half - 1e-9, half + 1e-9)
    }
    assert len(decisions) == 1
