"""Preparation of a scan as nnU-Net does it: steps against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox
from medseg.nnunet.preprocess import nonzero_box


@pytest.mark.parametrize("num_channels", [1, 2, 3])
def test_the_box_holds_what_any_channel_shows(num_channels: int) -> None:
    rng = np.random.default_rng(num_channels)
    images = []
    for _ in range(num_channels):
        image = np.zeros((9, 10, 11), np.float32)
        z, y, x = rng.integers(1, 5, 3)
        image[z : z + 2, y : y + 3, x : x + 4] = rng.normal(size=(2, 3, 4))
        images.append(image)
    places = np.argwhere(np.any(images, axis=0))
    expected = VoxelBox(tuple(places.min(axis=0)), tuple(places.max(axis=0) + 1))
    assert nonzero_box(images) == expected
    assert nonzero_box([np.zeros((2, 3, 4))]) == VoxelBox.full((2, 3, 4))
