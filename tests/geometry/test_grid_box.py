"""Laws of VoxelBox."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox

BOX = VoxelBox((-3, 4, 10), (4, 9, 31))


def _centres_doubled(box: VoxelBox) -> list[int]:
    return [start + stop for start, stop in zip(box.start, box.stop, strict=True)]


def test_expanded_keeps_the_centre_and_can_be_undone() -> None:
    grown = BOX.expanded((2, 0, 5))
    assert _centres_doubled(grown) == _centres_doubled(BOX)
    assert grown.shape == (11, 5, 31)
    assert grown.expanded((-2, 0, -5)) == BOX


@pytest.mark.parametrize("min_shape", [(7, 5, 21), (8, 6, 22), (9, 7, 23), (1, 40, 2)])
def test_at_least_keeps_the_centre_and_gives_the_odd_voxel_to_the_high_end(
    min_shape: tuple[int, int, int],
) -> None:
    grown = BOX.at_least(min_shape)
    assert grown.shape == tuple(max(pair) for pair in zip(BOX.shape, min_shape, strict=True))
    assert grown.contains(BOX)
    odd = [(new - old) % 2 for new, old in zip(grown.shape, BOX.shape, strict=True)]
    shift = [
        new - old for new, old in zip(_centres_doubled(grown), _centres_doubled(BOX), strict=True)
    ]
    assert shift == odd


def test_intersect_and_contains_are_the_set_operations() -> None:
    space = (12, 13, 14)
    rng = np.random.default_rng(3)
    for _ in range(50):
        bounds = np.sort(rng.integers(0, 13, size=(2, 2, 3)), axis=1)
        a, b = (VoxelBox(tuple(low), tuple(high)) for low, high in bounds)
        mask_a, mask_b = np.zeros(space, bool), np.zeros(space, bool)
        mask_a[a.slices()] = True
        mask_b[b.slices()] = True
        both = np.zeros(space, bool)
        both[a.intersect(b).slices()] = True
        assert np.array_equal(both, mask_a & mask_b)
        assert VoxelBox.from_mask(mask_a) == (None if a.is_empty else a)
        assert a.contains(b) == bool((mask_a[mask_b]).all())


def test_from_mask_is_tight() -> None:
    mask = np.zeros((5, 7, 11), bool)
    assert VoxelBox.from_mask(mask) is None
    mask[1, 6, 3] = mask[3, 2, 10] = True
    assert VoxelBox.from_mask(mask) == VoxelBox((1, 2, 3), (4, 7, 11))


def test_shifted_moves_and_clipped_cuts() -> None:
    assert BOX.shifted((3, -4, 1)) == VoxelBox((0, 0, 11), (7, 5, 32))
    assert BOX.clipped((3, 6, 20)) == VoxelBox((0, 4, 10), (3, 6, 20))
    assert BOX.clipped((3, 2, 20)).is_empty
    assert not BOX.is_empty


def test_a_box_below_zero_indexes_nothing() -> None:
    with pytest.raises(ValueError, match="below zero"):
        BOX.slices()
    with pytest.raises(ValueError, match="before it starts"):
        VoxelBox((0, 0, 5), (1, 1, 4))


def test_dict_survives_json_and_numpy_integers_become_plain() -> None:
    assert VoxelBox(**json.loads(json.dumps(asdict(BOX)))) == BOX
    made = VoxelBox(tuple(np.array([0, 1, 2])), tuple(np.array([3, 4, 5])))
    assert json.dumps(asdict(made)) == '{"start": [0, 1, 2], "stop": [3, 4, 5]}'
    bounds = [0, 1, 2]
    copied = VoxelBox(bounds, [3, 4, 5])
    bounds[0] = 2
    assert copied.start == (0, 1, 2)
