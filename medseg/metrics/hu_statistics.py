"""HU statistics of labels: volume, mean, percentiles, share of emphysema-like voxels."""

import math
from collections.abc import Mapping

import numpy as np

from medseg.geometry.grid import VoxelGrid

PERCENTILES = (5, 15, 50, 95)
"""Percentiles in the tables; the 15th is that of densitometry in chest CT."""

HU_FIGURES = ("mean_hu", *(f"p{percent}_hu" for percent in PERCENTILES), "share_below_minus_950_hu")
"""Names of the figures in HU."""

EMPHYSEMA_HU = -950
"""Voxels of an organ full of air below it count as emphysema (Gevenois et al., Am J Respir Crit Care Med 1995;152:653)."""

# HU outside count as the nearest of them: no percentile but one of metal lies there. The mean is
# that of the voxels as they are.
LOW_HU, HIGH_HU = -2048, 4095
# Voxels of one slab; each needs about 20 bytes at a time.
SLAB_VOXELS = 2**22


def label_statistics(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, values: Mapping[str, int]
) -> dict[str, dict[str, float | None]]:
    """Measure each label: volume in ml, mean HU, percentiles in whole HU, share below −950 HU.

    Args:
        image_hu: Scan in HU, (D, H, W); None where the values are not HU, which leaves the figures
            in HU empty.
        labels: Label map (D, H, W).
        grid: Grid of both.
        values: Label name to value.

    Returns:
        Label name to its figures; those in HU are None for a label without voxels.
    """
    counts = np.zeros((len(values), HIGH_HU - LOW_HU + 1), dtype=np.int64)
    sums = np.zeros(len(values))
    planes = max(1, SLAB_VOXELS // max(1, labels[0].size))
    for start in range(0, len(labels), planes):
        slab = labels[start : start + planes]
        is_label = slab > 0
        found, hu = (
            slab[is_label],
            None if image_hu is None else image_hu[start : start + planes][is_label],
        )
        for number, value in enumerate(values.values()):
            is_own = found == value
            if hu is None:
                counts[number, 0] += np.count_nonzero(is_own)
            elif is_own.any():
                own = hu[is_own]
                sums[number] += own.sum(dtype=np.float64)
                bins = np.rint(np.clip(own, LOW_HU, HIGH_HU)).astype(np.int64) - LOW_HU
                counts[number] += np.bincount(bins, minlength=counts.shape[1])
    voxel_ml = math.prod(grid.spacing_mm) / 1000.0
    return {
        name: {
            "ml": round(voxel_ml * int(histogram.sum()), 2),
            **_figures(histogram, total, image_hu is not None),
        }
        for name, histogram, total in zip(values, counts, sums, strict=True)
    }


def _figures(histogram: np.ndarray, total: float, is_hu: bool) -> dict[str, float | None]:
    """Figures of one label in HU, from its histogram and the sum of its values."""
    number = int(histogram.sum())
    if not (is_hu and number):
        return dict.fromkeys(HU_FIGURES)
    ranks = [math.ceil(percent / 100 * number) for percent in PERCENTILES]
    percentiles = (LOW_HU + np.searchsorted(np.cumsum(histogram), ranks)).tolist()
    share = int(histogram[: EMPHYSEMA_HU - LOW_HU].sum()) / number
    return dict(
        zip(HU_FIGURES, [round(total / number, 2), *percentiles, round(share, 4)], strict=True)
    )
