"""Sizes of arrays in voxels, and the sizes that a network takes."""

import operator
from collections.abc import Sequence

# Size in voxels, (D, H, W).
Shape = tuple[int, int, int]


def network_size(shape: Sequence[int], divisor: Sequence[int]) -> Shape:
    """Raise a size to one that a network takes.

    Each axis is rounded up to a multiple of its divisor. A size that equals the divisor on all axes
    is doubled: the deepest level of the network would have a single voxel, over which an instance
    norm has no variance.

    Args:
        shape: Size in voxels, (D, H, W).
        divisor: The input size must be a multiple of this, (z, y, x).

    Raises:
        ValueError: If a divisor is below one.

    Example:
        >>> network_size((9, 8, 1), (4, 8, 8)), network_size((3, 8, 1), (4, 8, 8))
        ((12, 8, 8), (8, 16, 16))
    """
    if min(divisor) < 1:
        raise ValueError(f"divisors must be 1 or more, got {tuple(divisor)}")
    # -(-a // b) is a / b rounded up.
    factors = [-(-length // step) for length, step in zip(shape, divisor, strict=True)]
    depth, height, width = map(operator.mul, factors, divisor)
    if (depth, height, width) == tuple(divisor):
        return 2 * depth, 2 * height, 2 * width
    return depth, height, width


def bounded_depth(shape: Shape, max_voxels: int, divisor_z: int) -> int:
    """Count the slices that a volume may keep to have at most `max_voxels`.

    Args:
        shape: Size in voxels, (D, H, W), with D a multiple of `divisor_z`.
        max_voxels: Largest number of voxels.
        divisor_z: The number of slices must be a multiple of this.

    Returns:
        A multiple of `divisor_z`, at least `divisor_z` itself, even where that does not fit.

    Example:
        >>> bounded_depth((96, 100, 100), 600_000, 16), bounded_depth((96, 100, 100), 10, 16)
        (48, 16)
    """
    depth, height, width = shape
    num_fitting = max_voxels // (height * width)
    num_kept = num_fitting // divisor_z * divisor_z  # rounded down to a multiple
    return min(depth, max(divisor_z, num_kept))
