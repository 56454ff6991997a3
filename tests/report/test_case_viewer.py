"""Case viewer of an evaluation: where the worst slice lies and what its regions reach."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.report.case_viewer import pack_case
from medseg.task import Channel, Region, Task

# Stored from the feet up in direction (L, P, S), as the viewer shows it.
GRID = VoxelGrid((6, 20, 24), (2.5, 0.7, 0.7), (-11.0, 20.0, 300.0))
LEFT, RIGHT = 1, 2
LUNGS = Task(
    "lungs",
    {"left_lung": LEFT, "right_lung": RIGHT},
    (Region("left_lung", ("left_lung",), "left"), Region("right_lung", ("right_lung",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)


def test_the_worst_slice_is_the_one_with_most_differences() -> None:
    reference = np.zeros(GRID.shape, np.uint8)
    reference[:, 2:18, 2:10] = RIGHT
    reference[:, 2:18, 14:22] = LEFT
    labels = reference.copy()
    labels[1, 2:4, 2:10] = 0
    labels[4, 10:18, 14:22] = RIGHT
    packed = pack_case(np.zeros(GRID.shape, np.int16), labels, GRID, reference, LUNGS)
    # The middle of the 64 voxels of slice 4 that differ: (x, y, z) in mm.
    expected_xyz_mm = (-11 + 0.7 * 17.5, 20 + 0.7 * 13.5, 300 + 2.5 * 4)
    assert packed.worst_xyz_mm == pytest.approx(expected_xyz_mm)
    num_right, num_left = 6 * 16 * 8, 6 * 16 * 8
    assert packed.dice == pytest.approx(
        {
            "left_lung": 2 * (num_left - 64) / (num_left + num_left - 64),
            "right_lung": 2 * (num_right - 16) / (num_right + num_right - 16 + 64),
        }
    )


def test_a_case_without_differences_has_no_worst_slice() -> None:
    labels = np.ones(GRID.shape, np.uint8)
    packed = pack_case(np.zeros(GRID.shape, np.int16), labels, GRID, labels, LUNGS)
    assert packed.worst_xyz_mm is None
    assert packed.dice == {"left_lung": 1.0}
