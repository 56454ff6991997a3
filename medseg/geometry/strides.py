"""Strides of a network: downsampling factor per level and axis, for anisotropic voxels."""

import operator

Strides = tuple[tuple[int, int, int], ...]


def level_strides(spacing_mm: tuple[float, float, float] | None, num_levels: int) -> Strides:
    """Choose the stride of each level per axis, the finest level first.

    An axis that is at least twice as coarse as the finest one is not downsampled (nnU-Net's rule).
    Downsampling makes the other axes coarser, until all spacings are about equal.

    Args:
        spacing_mm: Spacing of the input, (z, y, x); None: equal on all axes.
        num_levels: Number of times that the input is downsampled.

    Returns:
        For each level the stride, 1 or 2, along z, y and x.

    Example:
        >>> level_strides((5.0, 1.0, 1.0), 4)
        ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2))
    """
    # Only ratios matter: 1 mm stands for any spacing that is equal on all axes.
    current_mm = list(spacing_mm or (1.0, 1.0, 1.0))
    strides = []
    for _ in range(num_levels):
        finest_mm = min(current_mm)
        z, y, x = (2 if axis_mm < 2 * finest_mm else 1 for axis_mm in current_mm)
        strides.append((z, y, x))
        # The spacing at the next level: an axis of stride 2 is now twice as coarse.
        current_mm = list(map(operator.mul, current_mm, (z, y, x)))
    return tuple(strides)


def total_strides(strides: Strides) -> tuple[int, int, int]:
    """Multiply the strides of all levels, per axis (z, y, x).

    Example:
        >>> total_strides(((1, 2, 2), (2, 2, 2)))
        (2, 4, 4)
    """
    totals = [1, 1, 1]
    for level_stride in strides:
        totals = list(map(operator.mul, totals, level_stride))
    z, y, x = totals
    return z, y, x
