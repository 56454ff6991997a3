"""HU statistics of labels: volume, mean, percentiles, share of emphysema-like voxels."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from medseg.geometry.grid import VoxelGrid, voxel_ml

PERCENTILES = (5, 15, 50, 95)
"""Percentiles in the tables; the 15th is that of densitometry in chest CT."""

HU_FIGURES = ("mean_hu", *(f"p{percent}_hu" for percent in PERCENTILES), "share_below_minus_950_hu")
"""Names of the figures in HU."""

EMPHYSEMA_HU = -950
"""Voxels of an organ full of air below it count as emphysema.

Source: Gevenois et al., Am J Respir Crit Care Med 1995;152:653.
"""

# Range of the histograms. Values outside, such as those of metal, count as the nearest bound in
# percentiles; the mean is that of the values as they are.
LOW_HU, HIGH_HU = -2048, 4095
# Voxels of one slab: about 20 bytes each stay within the cache of the processor.
SLAB_VOXELS = 2**18


class ScanStatistics(NamedTuple):
    """Figures of a scan: `ml` and `HU_FIGURES`; those in HU are None where there are no voxels.

    Attributes:
        labels: Label name to its figures.
        total: The same figures of all labels together.
    """

    labels: dict[str, dict[str, float | None]]
    total: dict[str, float | None]


def scan_statistics(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, values: Mapping[str, int]
) -> ScanStatistics:
    """Measure volume in ml, mean HU, percentiles in whole HU and share below −950 HU.

    Args:
        image_hu: Scan in HU, (D, H, W); None where the values are not HU, which leaves the figures
            in HU empty.
        labels: Label map (D, H, W).
        grid: Grid of both.
        values: Label name to value.

    Returns:
        The figures of each label and of all together.
    """
    # One row per label: voxels of each whole HU, and the sum of their values.
    histograms = np.zeros((len(values), HIGH_HU - LOW_HU + 1), dtype=np.int64)
    sums_hu = np.zeros(len(values))
    num_planes = max(1, SLAB_VOXELS // max(1, labels[0].size))
    for start in range(0, len(labels), num_planes):
        planes = slice(start, start + num_planes)
        is_label = labels[planes] > 0
        slab_labels = labels[planes][is_label]
        if image_hu is not None:
            slab_hu = image_hu[planes][is_label]
        for number, value in enumerate(values.values()):
            is_value = slab_labels == value
            if image_hu is None:
                # Without HU the voxels are only counted, in any bin.
                histograms[number, 0] += np.count_nonzero(is_value)
            elif is_value.any():
                label_hu = slab_hu[is_value]
                sums_hu[number] += label_hu.sum(dtype=np.float64)
                histograms[number] += _count_values(label_hu)
    is_hu = image_hu is not None
    ml = voxel_ml(grid)
    by_label = {
        name: _figures(histogram, sum_hu, ml, is_hu)
        for name, histogram, sum_hu in zip(values, histograms, sums_hu, strict=True)
    }
    total = _figures(histograms.sum(axis=0), sums_hu.sum(), ml, is_hu)
    return ScanStatistics(by_label, total)


def _count_values(values_hu: np.ndarray) -> np.ndarray:
    """Count values rounded to whole HU, from `LOW_HU` to `HIGH_HU`."""
    clipped_hu = np.clip(values_hu, LOW_HU, HIGH_HU)
    if clipped_hu.dtype.kind == "f":
        clipped_hu = np.rint(clipped_hu)
    bins = clipped_hu.astype(np.int64) - LOW_HU
    return np.bincount(bins, minlength=HIGH_HU - LOW_HU + 1)


def _figures(
    histogram: np.ndarray, sum_hu: float, ml_per_voxel: float, is_hu: bool
) -> dict[str, float | None]:
    """Figures of some voxels, from their histogram, the sum of their values and a voxel's size."""
    num_voxels = int(histogram.sum())
    volume: dict[str, float | None] = {"ml": round(ml_per_voxel * num_voxels, 2)}
    if not is_hu or num_voxels == 0:
        return volume | dict.fromkeys(HU_FIGURES)
    # A percentile is the smallest value with so many voxels at or below it.
    ranks = [math.ceil(percent / 100 * num_voxels) for percent in PERCENTILES]
    percentiles = (LOW_HU + np.searchsorted(np.cumsum(histogram), ranks)).tolist()
    mean = round(float(sum_hu) / num_voxels, 2)
    share = int(histogram[: EMPHYSEMA_HU - LOW_HU].sum()) / num_voxels
    figures = [mean, *percentiles, round(share, 4)]
    return volume | dict(zip(HU_FIGURES, figures, strict=True))
