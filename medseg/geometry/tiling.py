"""Tiles of a sliding window: positions and weights."""

import math

import numpy as np

from medseg.geometry.box import VoxelBox


def _starts(size: int, tile: int, overlap: float) -> list[int]:
    """Spread tiles of one length evenly over one axis, the first at its start and the last at its end."""
    span = size - tile
    if span <= 0:
        return [0]
    num_steps = math.ceil(span / max(1.0, tile * (1.0 - overlap)))
    return [round(step * span / num_steps) for step in range(num_steps + 1)]


def tile_boxes(shape: tuple[int, int, int], tile_shape: tuple[int, int, int], overlap: float) -> list[VoxelBox]:
    """Cover a volume with tiles of one shape.

    All tiles lie inside the volume; an axis shorter than the tile gets one tile of its own length.

    Args:
        shape: Volume size in voxels, (D, H, W).
        tile_shape: Tile size in voxels, (D, H, W).
        overlap: Least part of a tile's length that neighbours share per axis, in [0, 1), to a voxel of rounding.

    Returns:
        Boxes in C order (x fastest) that cover every voxel.

    Raises:
        ValueError: If a size is below one or the overlap lies outside [0, 1).

    Example:
        >>> [box.start[0] for box in tile_boxes((10, 4, 4), (4, 8, 4), 0.5)]
        [0, 2, 4, 6]
    """
    if min(*shape, *tile_shape) < 1:
        raise ValueError(f"sizes must be at least 1, got volume {shape} and tile {tile_shape}")
    if not 0.0 <= overlap < 1.0:
        raise ValueError(f"overlap must lie in [0, 1), got {overlap}")
    lengths = [min(size, tile) for size, tile in zip(shape, tile_shape, strict=True)]
    depth, height, width = lengths
    z_starts, y_starts, x_starts = (_starts(size, length, overlap) for size, length in zip(shape, lengths, strict=True))
    return [VoxelBox((z, y, x), (z + depth, y + height, x + width)) for z in z_starts for y in y_starts for x in x_starts]


def axis_weights(size: int, tile: int, overlap: float, sigma_scale: float = 1 / 8) -> dict[int, np.ndarray]:
    """Weigh the tiles of `tile_boxes` along one axis: most in the middle of a tile, in sum one at each voxel.

    The tiles stand in rows, so the products of three axes' weights sum to one as well, and no sum needs to be kept.

    Args:
        size: Voxels of the volume along the axis.
        tile: Voxels of a tile.
        overlap: As for `tile_boxes`.
        sigma_scale: Standard deviation of the Gaussian as part of the tile's length, > 0.

    Returns:
        Weights of a tile's voxels, float32, by the tile's start.

    Source: Isensee et al., nnU-Net, Nature Methods 18 (2021), importance weighting of sliding windows.
    """
    length = min(size, tile)
    distance = (np.arange(length) - (length - 1) / 2) / (sigma_scale * length)
    profile = np.exp(-0.5 * distance**2)
    starts = _starts(size, length, overlap)
    total = np.zeros(size)
    for start in starts:
        total[start : start + length] += profile
    return {start: (profile / total[start : start + length]).astype(np.float32) for start in starts}
