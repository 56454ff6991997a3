"""Laws of the sliding window."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.box import VoxelBox
from medseg.geometry.tiling import MIN_WEIGHT, gaussian_weights, tile_boxes


@pytest.mark.parametrize("shape", [(17, 30, 41), (8, 9, 10), (3, 64, 5), (1, 1, 1)])
@pytest.mark.parametrize("tile_shape", [(8, 9, 10), (5, 16, 40), (64, 7, 1)])
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 0.9])
def test_tiles_cover_every_voxel_and_stay_inside(
    shape: tuple[int, int, int], tile_shape: tuple[int, int, int], overlap: float
) -> None:
    boxes = tile_boxes(shape, tile_shape, overlap)
    count = np.zeros(shape, int)
    want = tuple(min(pair) for pair in zip(shape, tile_shape, strict=True))
    for box in boxes:
        assert box.shape == want
        assert VoxelBox.full(shape).contains(box)
        count[box.slices()] += 1
    assert count.min() >= 1
    assert len(set(boxes)) == len(boxes)
    for axis in range(3):
        starts = sorted({box.start[axis] for box in boxes})
        steps = np.diff(starts)
        assert (steps <= max(1, np.ceil(want[axis] * (1 - overlap)))).all()
        assert steps.size == 0 or steps.max() - steps.min() <= 1


def test_no_more_tiles_than_needed() -> None:
    assert len(tile_boxes((96, 96, 96), (96, 96, 96), 0.5)) == 1
    assert len(tile_boxes((144, 96, 96), (96, 96, 96), 0.5)) == 2
    assert len(tile_boxes((192, 96, 96), (96, 96, 96), 0.0)) == 2


@pytest.mark.parametrize("tile_shape", [(8, 9, 10), (1, 3, 64), (96, 96, 96)])
@pytest.mark.parametrize("sigma_scale", [1 / 8, 1 / 50])
def test_weights_are_positive_symmetric_and_peak_at_one(tile_shape: tuple[int, int, int], sigma_scale: float) -> None:
    weights = gaussian_weights(tile_shape, sigma_scale)
    assert weights.dtype == np.float32
    assert weights.shape == tile_shape
    assert weights.max() == 1.0
    assert weights.min() >= np.float32(MIN_WEIGHT)
    assert np.allclose(weights, weights[::-1, ::-1, ::-1], rtol=1e-6)
    centre = tuple((size - 1) // 2 for size in tile_shape)
    assert weights[centre] == 1.0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        tile_boxes((4, 4, 4), (2, 2, 2), 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        tile_boxes((4, 4, 4), (2, 0, 2), 0.5)
