"""Figures of labels in a CT scan: volume, mean HU, percentiles, share of emphysema-like voxels."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from medseg.geometry.grid import VoxelGrid, rounded_ml, voxel_ml

PERCENTILES = (5, 15, 50, 95)
"""Percentiles in the tables; the 15th is that of densitometry in chest CT."""

HU_FIGURES = ("mean_hu", *(f"p{percent}_hu" for percent in PERCENTILES), "share_below_minus_950_hu")
"""Names of the figures that only a scan in HU has, in the order of the tables."""

EMPHYSEMA_HU = -950
"""In an organ full of air, voxels below this value count as emphysema.

Source: Gevenois et al., Am J Respir Crit Care Med 1995;152:653.
"""

# Range of the histograms, one bin for each whole HU. In percentiles a value outside, such as that
# of metal, counts as the nearest bound; the mean is of the unclipped values.
LOW_HU, HIGH_HU = -2048, 4095
# Voxels that are counted at once. At about 20 bytes each, 5 MB in all, they fit into the cache of
# the processor.
SLAB_VOXELS = 2**18


class ScanStatistics(NamedTuple):
    """Figures of a scan: `ml` and `HU_FIGURES`.

    The latter are None for a scan that is not in HU, and for a label without voxels.

    Attributes:
        labels: Label name to its figures.
        total: The same figures of all labels together.
    """

    labels: dict[str, dict[str, float | None]]
    total: dict[str, float | None]


def scan_statistics(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, values: Mapping[str, int]
) -> ScanStatistics:
    """Measure volume in ml, mean HU, percentiles in whole HU and the share below −950 HU.

    The scan is read in slabs of axial planes, so that large scans need little memory.

    Args:
        image_hu: Scan in HU, (D, H, W); None where the values are not HU, so that `HU_FIGURES` are
            None.
        labels: Label map (D, H, W).
        grid: Grid of the scan and the label map.
        values: Label name to value.

    Returns:
        The figures of each label and of all together.
    """
    # One row per label: the number of voxels of each whole HU, and the sum of their HU.
    histograms = np.zeros((len(values), HIGH_HU - LOW_HU + 1), dtype=np.int64)
    sums_hu = np.zeros(len(values))
    num_planes = max(1, SLAB_VOXELS // max(1, labels[0].size))
    for start in range(0, len(labels), num_planes):
        planes = slice(start, start + num_planes)
        # Most voxels are background: without them each label is searched for in fewer voxels.
        is_labelled = labels[planes] > 0
        slab_labels = labels[planes][is_labelled]
        if image_hu is not None:
            slab_hu = image_hu[planes][is_labelled]
        for row, value in enumerate(values.values()):
            is_value = slab_labels == value
            if image_hu is None:
                # Without HU only the number of voxels is needed: all go into one bin.
                histograms[row, 0] += np.count_nonzero(is_value)
            elif is_value.any():
                label_hu = slab_hu[is_value]
                sums_hu[row] += label_hu.sum(dtype=np.float64)
                histograms[row] += _count_values(label_hu)
    is_hu = image_hu is not None
    ml = voxel_ml(grid)
    by_label = {
        name: _figures(histogram, sum_hu, ml, is_hu)
        for name, histogram, sum_hu in zip(values, histograms, sums_hu, strict=True)
    }
    total = _figures(histograms.sum(axis=0), sums_hu.sum(), ml, is_hu)
    return ScanStatistics(by_label, total)


def _count_values(values_hu: np.ndarray) -> np.ndarray:
    """Make a histogram of values rounded to whole HU; the first bin is that of `LOW_HU`."""
    clipped_hu = np.clip(values_hu, LOW_HU, HIGH_HU)
    if clipped_hu.dtype.kind == "f":
        clipped_hu = np.rint(clipped_hu)
    bins = clipped_hu.astype(np.int64) - LOW_HU
    return np.bincount(bins, minlength=HIGH_HU - LOW_HU + 1)


def _figures(
    histogram: np.ndarray, sum_hu: float, ml_per_voxel: float, is_hu: bool
) -> dict[str, float | None]:
    """Compute `ml` and `HU_FIGURES` of the voxels of a label.

    Args:
        histogram: Number of voxels of each whole HU, from `LOW_HU`; without HU only its sum counts.
        sum_hu: Sum of the HU of these voxels.
        ml_per_voxel: Volume of a voxel in ml.
        is_hu: Whether the scan is in HU; otherwise `HU_FIGURES` are None.
    """
    num_voxels = int(histogram.sum())
    volume: dict[str, float | None] = {"ml": rounded_ml(ml_per_voxel * num_voxels)}
    if not is_hu or num_voxels == 0:
        return volume | dict.fromkeys(HU_FIGURES)
    # Nearest-rank method: a percentile is the smallest value with as many voxels at or below it as
    # its rank says.
    ranks = [math.ceil(percent / 100 * num_voxels) for percent in PERCENTILES]
    bins = np.searchsorted(np.cumsum(histogram), ranks)
    percentiles_hu = (LOW_HU + bins).tolist()
    mean_hu = round(float(sum_hu) / num_voxels, 2)
    num_below = int(histogram[: EMPHYSEMA_HU - LOW_HU].sum())
    figures = [mean_hu, *percentiles_hu, round(num_below / num_voxels, 4)]
    return volume | dict(zip(HU_FIGURES, figures, strict=True))
