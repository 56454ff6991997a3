"""Removal of components that are no organ: gas, and objects beside the patient."""

import numpy as np

from medseg.anatomy.patient import beyond_patient
from medseg.anatomy.rules import MAX_BEYOND_SHARE, MAX_GAS_SHARE, MIN_REPORTED_ML
from medseg.geometry.grid import VoxelGrid, voxel_ml
from medseg.inference.components import Rejection, remove_components
from medseg.task import Task


def remove_impossible(
    labels: np.ndarray, image_hu: np.ndarray, grid: VoxelGrid, task: Task
) -> list[str]:
    """Remove components of a CT that are no organ, in place.

    Their median lies below `task.least_hu`, or they lie beyond the patient.

    Args:
        labels: Label map (D, H, W).
        image_hu: The image on the same grid.
        grid: Grid with the spacing of both arrays, which may cover only a part of it.
        task: Labels, `least_hu` and the modality.

    Returns:
        A warning for each label that loses at least `MIN_REPORTED_ML`.
    """
    # `Rejection` takes a function that reads a part of a mask by its slices: here `__getitem__`.
    reasons = []
    if task.least_hu is not None:
        gas = Rejection((image_hu < task.least_hu).__getitem__, MAX_GAS_SHARE)
        reasons.append(
            (gas, f"the median of such a component is below {task.least_hu:g} HU, so it is gas")
        )
    # Only the values of a CT tell air, foam and tissue apart.
    if task.is_ct:
        is_beyond = beyond_patient(image_hu, grid.spacing_mm)
        beyond = Rejection(is_beyond.__getitem__, MAX_BEYOND_SHARE)
        reasons.append(
            (beyond, "they lie beside the patient, as foam of the table and blankets do")
        )
    warnings = []
    # One reason after the other, so that each removal is reported with its reason.
    for rejection, reason in reasons:
        for name, value in task.labels.items():
            # A list of one number, since there is one rejection.
            (num_removed,) = remove_components(labels, value, [rejection])
            volume_ml = num_removed * voxel_ml(grid)
            if volume_ml >= MIN_REPORTED_ML:
                warnings.append(
                    f"{volume_ml:.0f} ml that the coarse stage called {name} were removed: {reason}"
                )
    return warnings
