"""Additions: thick parts of a region that only the coarse stage finds, such as consolidated lung, joined to the fine result."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from medseg.data.task import Region, Task
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess.resample import resample_image

# Planes of the crop that are written at a time, for the memory.
SLAB_PLANES = 32


def find_additions(
    labels: np.ndarray, grid: VoxelGrid, probs: Tensor, crop_grid: VoxelGrid, values: Sequence[int], least_mm: float
) -> np.ndarray:
    """Find the thick parts of a region that the coarse stage finds and the fine stage does not.

    Thin ones, as along the outline, are left to the fine stage. The border of the scan makes no part thin.

    Args:
        labels: Label map (D, H, W) of the coarse stage.
        grid: Its grid.
        probs: Probabilities (L, D, H, W) of the region's labels by the fine stage.
        crop_grid: Their grid.
        values: Values of the region in `labels`.
        least_mm: Diameter of the smallest ball that fits into a part.

    Returns:
        Mask (D, H, W) on the coarse grid.
    """
    found = resample_image(probs.float().sum(0), crop_grid, grid, outside=0.0).numpy() > 0.5
    missing = np.isin(labels, values) & ~found
    additions = np.zeros_like(missing)
    if (tight := VoxelBox.from_mask(missing)) is None:
        return additions
    part = tight.expanded((1, 1, 1)).clipped(missing.shape).slices()
    margins = [math.ceil(least_mm / spacing) for spacing in grid.spacing_mm]
    padded = np.pad(missing[part], [(margin, margin) for margin in margins], mode="edge")
    is_core = ndimage.distance_transform_edt(padded, sampling=grid.spacing_mm) > least_mm / 2
    if is_core.any():
        # Twice the radius of the ball, so that corners belong to the part.
        near_core = ndimage.distance_transform_edt(~is_core, sampling=grid.spacing_mm) <= least_mm
        additions[part] = (near_core & padded)[tuple(slice(margin, -margin) for margin in margins)]
    return additions


def add_parts(
    labels: np.ndarray, grid: VoxelGrid, additions: np.ndarray, probs: Tensor, crop_grid: VoxelGrid, region: Region, task: Task
) -> None:
    """Raise the probabilities of the region's labels where the coarse stage is followed, in place.

    Args:
        labels: Label map (D, H, W) of the coarse stage, which names the label of each voxel.
        grid: Its grid.
        additions: Mask (D, H, W) on that grid, from `find_additions`.
        probs: Probabilities (L, D, H, W) of the region's labels, float16.
        crop_grid: Their grid.
        region: The region.
        task: Labels and regions.
    """
    if not additions.any():
        return
    depth, height, width = crop_grid.shape
    for prob, value in zip(probs, task.region_values(region), strict=True):
        added = torch.from_numpy((additions & (labels == value)).astype(np.float32))
        for start in range(0, depth, SLAB_PLANES):
            slab = VoxelBox((start, 0, 0), (min(start + SLAB_PLANES, depth), height, width))
            part = prob[slab.slices()]
            torch.maximum(part, resample_image(added, grid, crop_grid.crop(slab), outside=0.0).to(part.dtype), out=part)
