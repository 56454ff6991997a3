"""The input size of a network holds the array and more than one voxel at the deepest level."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import GridRule
from medseg.geometry.sizes import Shape, network_size


@pytest.mark.parametrize("divisor", [(8, 8, 8), (4, 16, 8), (1, 1, 1)])
def test_a_size_grows_to_the_least_one_that_a_network_takes(divisor: Shape) -> None:
    shapes = np.random.default_rng(0).integers(1, 40, (200, 3)).tolist()
    for shape in (*shapes, divisor, (1, 1, 1)):
        size = network_size(shape, divisor)
        assert all(voxels % step == 0 for voxels, step in zip(size, divisor, strict=True))
        is_single = all(voxels <= step for voxels, step in zip(shape, divisor, strict=True))
        least = tuple(
            2 * step if is_single else -(-voxels // step) * step
            for voxels, step in zip(shape, divisor, strict=True)
        )
        assert size == least, "a single voxel at the deepest level has no variance"
        assert network_size(size, divisor) == size


@pytest.mark.parametrize("shape", [(3, 9, 30), (4, 16, 8), (1, 1, 1)])
def test_a_crop_has_a_size_that_the_network_takes(shape: Shape) -> None:
    divisor = (4, 16, 8)
    lattice = VoxelGrid((50, 60, 70), (2.0, 1.0, 1.0))
    crop = GridRule().crop(VoxelBox.full(shape), lattice, None, divisor)
    assert crop.box.shape == network_size(shape, divisor)
    assert crop.box.contains(VoxelBox.full(shape))


def test_a_divisor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="divisors"):
        network_size((3, 3, 3), (0, 1, 1))
