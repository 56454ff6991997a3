"""Do the two stages say the same? Each is the other's check, where there is no reference."""

from __future__ import annotations

import numpy as np

from medseg.cascade.localise import Localisation
from medseg.data.task import Task
from medseg.geometry.grid import VoxelGrid


def agreement(found: Localisation, labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, float]:
    """Dice coefficient of what both stages say of each region that the coarse one has found.

    It is taken at the centres of the coarse voxels, where the final label map has the value of its nearest voxel.

    Args:
        found: What the coarse stage found.
        labels: Final label map (D, H, W).
        grid: Its grid, with the axes of the coarse one.
        task: Labels and regions.

    Returns:
        Region name to a number in [0, 1].
    """
    places = [
        np.clip(np.rint(scale * np.arange(size) + offset), 0, length - 1).astype(int)
        for (scale, offset), size, length in zip(found.grid.axis_map_to(grid), found.grid.shape, grid.shape, strict=True)
    ]
    final = labels[np.ix_(*places)]
    result = {}
    for region in task.regions:
        if region.name in found.boxes:
            values = task.region_values(region)
            ours, theirs = np.isin(found.labels, values), np.isin(final, values)
            result[region.name] = 2 * int((ours & theirs).sum()) / int(ours.sum() + theirs.sum())
    return result
