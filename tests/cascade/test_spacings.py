"""Whatever grid a stage works on, the result lies on the input's own grid, and each side stays where it is."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import TASK, CoarseOracle, FineOracle, dice, scan, stage

from medseg.cascade.segment import segment
from medseg.preprocess.orient import Orientation

STORED = [Orientation((0, 1, 2), (False, False, False)), Orientation((2, 0, 1), (True, False, True))]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("coarse_mm", [None, (4.0, 2.0, 2.5)])
@pytest.mark.parametrize("fine_mm", [None, (3.0, 1.0, 0.8)])
def test_every_grid_comes_back_to_the_input(
    coarse_mm: tuple[float, float, float] | None, fine_mm: tuple[float, float, float] | None, stored: Orientation
) -> None:
    volume, labels = scan(stored)
    coarse, fine = stage(CoarseOracle(), "coarse", spacing_mm=coarse_mm), stage(FineOracle(), "fine", spacing_mm=fine_mm)
    result = segment(volume, coarse, fine)
    assert result.labels.shape == volume.array.shape
    for value in TASK.labels.values():
        assert dice(result.labels == value, labels == value) > 0.95
    if fine_mm is None:
        np.testing.assert_array_equal(result.labels, labels)
