"""Additions: thick parts of a region that only the coarse stage finds, joined to the fine result.

Such a part is consolidated lung.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from medseg.anatomy.rules import MAX_ADDED_BEYOND_SHARE, MIN_REPORTED_ML
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.inference.postprocess import Rejection, remove_components
from medseg.preprocess.resample import resample_image
from medseg.task import Region, Task

# Planes of the crop that are written at a time, for the memory.
SLAB_PLANES = 32


def add_coarse_parts(
    labels: np.ndarray,
    grid: VoxelGrid,
    beyond: np.ndarray | None,
    fine: Sequence[tuple[Region, Tensor, VoxelGrid]],
    task: Task,
    least_mm: float,
    warnings: list[str],
) -> dict[str, np.ndarray]:
    """Raise the fine probabilities where only the coarse stage finds a region, in place.

    What the fine stage gives to another region stays there. A part is not added if most of it lies
    beside the patient, and is removed from `labels`, in place: it says nothing about the agreement
    of the stages.

    Args:
        labels: Label map (D, H, W) of the coarse stage.
        grid: Its grid.
        beyond: Voxels of that grid beside the patient, (D, H, W); None where they are not known.
        fine: Regions with the probabilities (L, D, H, W) of their labels, float16, and the grids of
            their crops.
        task: Labels and regions.
        least_mm: A part is added only if a ball of this diameter fits into it.
        warnings: Gets a sentence about each region with parts beside the patient.

    Returns:
        Region name to the mask of its additions on the coarse grid.
    """
    # Where the fine stage finds any region: what it gives to another one stays there.
    is_fine = np.zeros(labels.shape, dtype=bool)
    for _, probs, crop_grid in fine:
        total = torch.zeros(grid.shape)
        for prob in probs:
            total += resample_image(prob, crop_grid, grid, outside=0.0)
        is_fine |= total.numpy() > 0.5
    additions = {}
    for region, probs, crop_grid in fine:
        values = task.region_values(region)
        in_region = np.isin(labels, values)
        parts = thick_parts(in_region & ~is_fine, grid.spacing_mm, least_mm)
        mask = parts.copy()
        if beyond is not None:
            rejection = Rejection(beyond.__getitem__, MAX_ADDED_BEYOND_SHARE)
            # Seen as a label map of zeros and ones, the mask loses the parts beside the patient.
            (num_removed,) = remove_components(mask.view(np.uint8), 1, [rejection])
            volume_ml = num_removed * voxel_ml(grid)
            if volume_ml >= MIN_REPORTED_ML:
                warnings.append(
                    f"{region.name}: {volume_ml:.0f} ml that the coarse stage alone found were not "
                    "added: they lie beside the patient, as foam of the table and blankets do"
                )
        is_beside = parts & ~mask
        labels[is_beside] = 0
        additions[region.name] = mask
        if not mask.any():
            continue
        # One voxel wider: a fraction of a coarse voxel would be left between what the fine stage
        # finds and what is added.
        wide = ndimage.binary_dilation(mask, np.ones((3, 3, 3))) & in_region & ~is_beside
        for prob, value in zip(probs, values, strict=True):
            _raise(prob, crop_grid, wide & (labels == value), grid)
    return additions


def thick_parts(
    mask: np.ndarray, spacing_mm: tuple[float, float, float], least_mm: float
) -> np.ndarray:
    """Keep the parts of a mask into which a ball fits. The border of the volume makes no part thin.

    A layer of one voxel is thin, whatever the spacing: an outline.

    Args:
        mask: (D, H, W), bool.
        spacing_mm: Its spacing, (z, y, x).
        least_mm: Diameter of the ball.
    """
    thick = np.zeros_like(mask)
    tight = VoxelBox.from_mask(mask)
    if tight is None:
        return thick
    part = tight.expanded((1, 1, 1)).clipped(mask.shape).slices()
    # Beyond the border of the volume the mask goes on, farther than the ball reaches.
    margins = [1 + math.ceil(least_mm / mm) for mm in spacing_mm]
    padded = np.pad(mask[part], [(margin, margin) for margin in margins], mode="edge")
    radius_mm = max(least_mm / 2, 1.001 * max(spacing_mm))
    is_core = ndimage.distance_transform_edt(padded, sampling=spacing_mm) > radius_mm
    if not is_core.any():
        return thick
    # Twice the radius of the ball, so that corners belong to the part.
    is_near = ndimage.distance_transform_edt(~is_core, sampling=spacing_mm) <= 2 * radius_mm
    without_margin = tuple(slice(margin, -margin) for margin in margins)
    thick[part] = (is_near & padded)[without_margin]
    return thick


def _raise(prob: Tensor, crop_grid: VoxelGrid, mask: np.ndarray, grid: VoxelGrid) -> None:
    """Set probabilities (D, H, W) to at least the share of a mask on the coarse grid, in place."""
    tight = VoxelBox.from_mask(mask)
    if tight is None:
        return
    share = torch.from_numpy(mask.astype(np.float32))
    # The filter reaches into the next voxel of the coarse grid.
    box = crop_grid.box_from(grid, tight.expanded((1, 1, 1))).clipped(crop_grid.shape)
    (first, *start), (last, *stop) = box.start, box.stop
    for z in range(first, last, SLAB_PLANES):
        slab = VoxelBox((z, *start), (min(z + SLAB_PLANES, last), *stop))
        part = prob[slab.slices()]
        resampled = resample_image(share, grid, crop_grid.crop(slab), outside=0.0)
        torch.maximum(part, resampled.to(part.dtype), out=part)
