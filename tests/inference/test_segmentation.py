"""Volumes of labels: exact counts, for few labels and for many."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.inference.segmentation import MAX_COMPARED, label_volumes_ml
from medseg.task import Channel, Task


@pytest.mark.parametrize("num_labels", [1, MAX_COMPARED, MAX_COMPARED + 1, 40])
def test_volumes_count_each_label(num_labels: int) -> None:
    rng = np.random.default_rng(num_labels)
    # Values from 3 on, and some that belong to no label of the task.
    labels = rng.integers(0, num_labels + 5, (4, 30, 20)).astype(np.uint8)
    values = {f"label_{value}": value for value in range(3, num_labels + 3)}
    task = Task("many", values, (), (Channel(),))
    grid = VoxelGrid(labels.shape, (10.0, 5.0, 2.0))
    volumes_ml = label_volumes_ml(labels, grid, task)
    assert list(volumes_ml) == list(values)
    for name, value in values.items():
        assert volumes_ml[name] == pytest.approx(0.1 * np.sum(labels == value))
