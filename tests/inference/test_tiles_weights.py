"""Sliding window: positions and weights of the tiles."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox
from medseg.inference.tiles import axis_weights, tile_boxes


@pytest.mark.parametrize("shape", [(17, 30, 41), (8, 9, 10), (3, 64, 5), (1, 1, 1)])
@pytest.mark.parametrize("tile_shape", [(8, 9, 10), (5, 16, 40), (64, 7, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
def test_tiles_cover_every_voxel_and_stay_inside(
    shape: tuple[int, int, int], tile_shape: tuple[int, int, int], overlap: float
) -> None:
    boxes = tile_boxes(shape, tile_shape, overlap)
    count = np.zeros(shape, int)
    tile_size = tuple(min(pair) for pair in zip(shape, tile_shape, strict=True))
    for box in boxes:
        assert box.shape == tile_size
        assert VoxelBox.full(shape).contains(box)
        count[box.slices()] += 1
    assert count.min() >= 1
    assert len(set(boxes)) == len(boxes)
    for axis in range(3):
        starts = sorted({box.start[axis] for box in boxes})
        steps = np.diff(starts)
        assert (steps <= max(1, np.ceil(tile_size[axis] * (1 - overlap)))).all()
        assert steps.size == 0 or steps.max() - steps.min() <= 1


def test_no_more_tiles_than_needed() -> None:
    assert len(tile_boxes((96, 96, 96), (96, 96, 96), 0.5)) == 1
    assert len(tile_boxes((144, 96, 96), (96, 96, 96), 0.5)) == 2
    assert len(tile_boxes((192, 96, 96), (96, 96, 96), 0.0)) == 2


@pytest.mark.parametrize(("size", "tile"), [(41, 16), (8, 8), (7, 30), (64, 9), (1, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
def test_weights_sum_to_one_and_prefer_the_middle_of_a_tile(
    size: int, tile: int, overlap: float
) -> None:
    weights = axis_weights(size, tile, overlap)
    assert sorted(weights) == sorted(
        {box.start[0] for box in tile_boxes((size, 1, 1), (tile, 1, 1), overlap)}
    )
    length = min(size, tile)
    total = np.zeros(size)
    for start, weight in weights.items():
        assert weight.dtype == np.float32
        assert weight.shape == (length,)
        assert (weight >= 0).all()
        total[start : start + length] += weight
    np.testing.assert_allclose(total, 1.0, rtol=1e-6)
    # Where two tiles meet, the one whose middle is nearer weighs more.
    for start, weight in weights.items():
        for other, rival in weights.items():
            for position in range(max(start, other), min(start, other) + length):
                distances = [
                    abs(position - start_of_tile - (length - 1) / 2)
                    for start_of_tile in (start, other)
                ]
                if distances[0] < distances[1]:
                    assert weight[position - start] >= rival[position - other]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        tile_boxes((4, 4, 4), (2, 2, 2), 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        tile_boxes((4, 4, 4), (2, 0, 2), 0.5)
