"""Clean-up of label maps: removes components and fills holes of a region or label.

`medseg.studies.clean_up` chooses the clean-ups of a model; the files of the model name them.
"""

from collections.abc import Sequence

import numpy as np

from medseg.geometry.grid import VoxelGrid, voxel_ml
from medseg.inference.components import fill_holes, remove_components
from medseg.task import CleanUp, Task


def check_clean_up(clean_up: CleanUp, task: Task) -> None:
    """Refuse a clean-up that cannot be applied to the labels of a task.

    Raises:
        KeyError: If the task has no region or label `clean_up.part`.
        ValueError: If holes of a region with several labels are to be filled: it is not defined
            with which of the labels.
    """
    num_labels = len(task.part_values(clean_up.part))
    if clean_up.fill_holes and num_labels > 1:
        raise ValueError(f"fill_holes: {clean_up.part} has {num_labels} labels, expected one")


def clean(labels: np.ndarray, grid: VoxelGrid, task: Task, clean_ups: Sequence[CleanUp]) -> None:
    """Remove components and fill holes, in place.

    Args:
        labels: Label map (D, H, W) in the values of the task.
        grid: Grid of the label map.
        task: Task with the parts (regions or labels) that the clean-ups name.
        clean_ups: At most one for each part.
    """
    for clean_up in clean_ups:
        if not clean_up.only_largest and clean_up.min_ml == 0:
            continue
        # With 1.0 a component must be as large as the largest, so only the largest is kept.
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
            (value,) = task.part_values(clean_up.part)  # one label, see `check_clean_up`
            fill_holes(labels, value)
