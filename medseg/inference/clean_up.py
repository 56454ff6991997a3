"""Clean-up of a model: small components and holes of a region or label.

A cross-validation chooses it, see `medseg.studies.clean_up`; the files of a model hold it.
"""

from collections.abc import Sequence

import numpy as np

from medseg.geometry.grid import VoxelGrid, voxel_ml
from medseg.inference.components import fill_holes, remove_components
from medseg.task import CleanUp, Task


def check_clean_up(clean_up: CleanUp, task: Task) -> None:
    """Refuse a clean-up that cannot be done to the labels of a task.

    Raises:
        KeyError: If the task has no such part.
        ValueError: If holes of a region with several labels shall be filled: it is not defined
            which of its labels would fill them.
    """
    num_labels = len(task.part_values(clean_up.part))
    if clean_up.fill_holes and num_labels > 1:
        raise ValueError(f"fill_holes: {clean_up.part} has {num_labels} labels, expected one")


def clean(labels: np.ndarray, grid: VoxelGrid, task: Task, clean_ups: Sequence[CleanUp]) -> None:
    """Remove components and fill holes, in place.

    Args:
        labels: Label map (D, H, W) in the values of the task.
        grid: Its grid.
        task: Has the parts that `clean_ups` name.
        clean_ups: One for each part at most.
    """
    for clean_up in clean_ups:
        if not clean_up.only_largest and clean_up.min_ml == 0:
            continue
        # With 1.0 a component must be as large as the largest, so only that one is kept.
        min_fraction = 1.0 if clean_up.only_largest else 0.0
        remove_components(
            labels,
            task.part_values(clean_up.part),
            min_fraction=min_fraction,
            min_voxels=clean_up.min_ml / voxel_ml(grid),
        )
    # After all removals: a component that was removed from one label may lie in a hole of another.
    for clean_up in clean_ups:
        if clean_up.fill_holes:
            (value,) = task.part_values(clean_up.part)  # one, see `check_clean_up`
            fill_holes(labels, value)
