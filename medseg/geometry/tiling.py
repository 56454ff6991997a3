"""Positions and weights of the sliding window."""

from __future__ import annotations

import math

import numpy as np

from medseg.geometry.box import VoxelBox

MIN_WEIGHT = 1e-6
"""Smallest blending weight, so that a voxel which only a tile's corner covers can still be divided by its weight."""


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


def gaussian_weights(tile_shape: tuple[int, int, int], sigma_scale: float = 1 / 8) -> np.ndarray:
    """Weigh a tile's voxels by their distance from its centre.

    Args:
        tile_shape: Tile size in voxels, (D, H, W).
        sigma_scale: Standard deviation as part of the tile's length, per axis, > 0.

    Returns:
        Weights (D, H, W), float32, symmetric, largest 1, smallest `MIN_WEIGHT` or more.

    Source: Isensee et al., nnU-Net, Nature Methods 18 (2021), importance weighting of sliding windows.
    """
    profiles = []
    for length in tile_shape:
        distance = (np.arange(length) - (length - 1) / 2) / (sigma_scale * length)
        profile = np.exp(-0.5 * distance**2)
        profiles.append(profile / profile.max())
    weights = np.einsum("i,j,k->ijk", *profiles)
    return np.maximum(weights, MIN_WEIGHT).astype(np.float32)
