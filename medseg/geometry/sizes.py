"""Sizes of arrays in voxels, and the sizes that a network takes."""

import operator
from collections.abc import Sequence

# Size in voxels, (D, H, W).
Shape = tuple[int, int, int]


def network_size(shape: Sequence[int], divisor: Sequence[int]) -> Shape:
    """Raise a size to one that a network takes.

    It has multiples of the divisor, and more than one of them on some axis. With one multiple on
    every axis the deepest level of a network has a single voxel, and the norm of one sample has no
    variance: such a size is raised to two multiples on every axis.

    Args:
        shape: Size in voxels, (D, H, W).
        divisor: Required multiple of the input size, (z, y, x).

    Raises:
        ValueError: If a divisor is below one.

    Example:
        >>> network_size((9, 8, 1), (4, 8, 8)), network_size((3, 8, 1), (4, 8, 8))
        ((12, 8, 8), (8, 16, 16))
    """
    if min(divisor) < 1:
        raise ValueError(f"divisors must be 1 or more, got {tuple(divisor)}")
    # -(-a // b) rounds up.
    multiples = [-(-length // step) for length, step in zip(shape, divisor, strict=True)]
    z, y, x = map(operator.mul, multiples, divisor)
    if (z, y, x) == tuple(divisor):
        return 2 * z, 2 * y, 2 * x
    return z, y, x


def bounded_depth(shape: Shape, max_voxels: int, divisor_z: int) -> int:
    """Count the slices that a volume may keep to have at most `max_voxels`.

    Args:
        shape: Size in voxels, (D, H, W), D a multiple of the divisor.
        max_voxels: Largest number of voxels.
        divisor_z: Required multiple of the number of slices.

    Returns:
        A multiple of the divisor; one multiple if not even that fits.

    Example:
        >>> bounded_depth((96, 100, 100), 600_000, 16), bounded_depth((96, 100, 100), 10, 16)
        (48, 16)
    """
    depth, height, width = shape
    num_fitting = max_voxels // (height * width)
    return min(depth, max(divisor_z, num_fitting // divisor_z * divisor_z))
