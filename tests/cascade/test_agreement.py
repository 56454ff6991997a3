"""Agreement of the stages: nearest voxels of another grid, and the distortion of a crop."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.cascade.agreement import agreement, distortion_warnings, nearest_voxels
from medseg.geometry.grid import VoxelGrid


def test_the_nearest_voxel_of_a_reader_that_reaches_beyond_is_the_outermost_one() -> None:
    grid = VoxelGrid((4, 5, 3), (2.0, 1.0, 3.0), (0.0, 0.0, 0.0))
    reader = VoxelGrid((6, 4, 8), (1.5, 2.0, 1.0), (-1.2, -1.8, 0.8))
    z, y, x = nearest_voxels(grid, reader)
    # Positions in voxels of the grid: 0.4 + 0.75 n, -1.8 + 2 n and -0.4 + n / 3.
    assert z.tolist() == [0, 1, 2, 3, 3, 3]
    assert y.tolist() == [0, 0, 2, 4]
    assert x.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_agreement_reads_the_final_labels_at_the_centres_of_the_coarse_voxels() -> None:
    grid = VoxelGrid((6, 6, 6), (1.0, 1.0, 1.0))
    coarse_grid = VoxelGrid((2, 2, 2), (3.0, 3.0, 3.0), (1.0, 1.0, 1.0))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[1, 1, 1] = labels[4, 4, 1] = 1
    labels[1, 4, 4] = 2
    labels[5, 5, 5] = 2
    coarse = np.zeros(coarse_grid.shape, dtype=np.uint8)
    coarse[0, 0, 0] = coarse[0, 0, 1] = 1
    coarse[0, 1, 1] = 3
    found = agreement(coarse, coarse_grid, labels, grid, {"a": (1,), "b": (2, 3), "c": (4,)})
    assert found == {"a": 2 / 4, "b": 1.0, "c": 0.0}


@pytest.mark.parametrize(
    ("spacing_mm", "said"),
    [
        ((1.0, 2.0, 1.5), []),
        (
            (3.0, 1.0, 1.5),
            [
                "liver: 30×20×45 mm were resized to 10×20×30 voxels, a distortion of 3.0; above 2 "
                "the network may not recognise the shape"
            ],
        ),
    ],
)
def test_a_distortion_above_two_is_told_with_the_extent_of_the_crop(
    spacing_mm: tuple[float, float, float], said: list[str]
) -> None:
    assert distortion_warnings("liver", VoxelGrid((10, 20, 30), spacing_mm)) == said
