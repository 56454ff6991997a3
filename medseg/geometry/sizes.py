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
