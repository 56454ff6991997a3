"""Audit of the grid and the values of a label map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from medseg.data.audit.finding import Finding, find
from medseg.data.task import Task
from medseg.geometry.grid import VoxelGrid

GRID_TOLERANCE_MM = 0.1
"""Image and label map are on one grid if their corners agree within this: rounded decimals and float32 directions differ
by less, and it is a small part of any voxel."""

MAX_LISTED = 10


def audit_grids(
    image_grid: VoxelGrid, label_grid: VoxelGrid, stored_shapes: tuple[Sequence[int], Sequence[int]]
) -> list[Finding]:
    """Compare the grid of a label map with that of its image.

    Args:
        image_grid: Grid of the oriented image.
        label_grid: Grid of the oriented label map.
        stored_shapes: Shapes of image and label map in storage order.

    Returns:
        Nothing where the corners agree within `GRID_TOLERANCE_MM`.
    """
    if label_grid.is_close(image_grid, GRID_TOLERANCE_MM):
        return []
    difference = _difference(image_grid, label_grid)
    if tuple(stored_shapes[0]) == tuple(stored_shapes[1]):
        return [find("label_grid", difference=difference, tolerance_mm=GRID_TOLERANCE_MM)]
    if label_grid.shape == image_grid.shape:
        return [find("label_shape:axes", difference=difference)]
    return [find("label_shape", shape=_times(label_grid.shape), image_shape=_times(image_grid.shape))]


def _difference(image_grid: VoxelGrid, label_grid: VoxelGrid) -> str:
    """Describe the differences of two grids: shape, spacing, rotation, place."""
    parts = []
    if label_grid.shape != image_grid.shape:
        parts.append(f"it has {_times(label_grid.shape)} voxels in LPS order, the image {_times(image_grid.shape)}")
    if not np.allclose(label_grid.spacing_mm, image_grid.spacing_mm, rtol=1e-3):
        parts.append(f"its spacing is {_times(label_grid.spacing_mm)} mm, the image's {_times(image_grid.spacing_mm)} mm")
    cosines = np.einsum("ij,ij->j", np.array(label_grid.direction), np.array(image_grid.direction))
    angle_deg = float(np.degrees(np.arccos(np.clip(cosines.min(), -1, 1))))
    if angle_deg > 0.1:
        parts.append(f"its axes are turned by {angle_deg:.1f} degrees")
    if label_grid.shape == image_grid.shape:
        off_mm = np.abs(label_grid.corners_xyz_mm() - image_grid.corners_xyz_mm()).max()
        parts.append(f"its corners lie up to {off_mm:.2f} mm off")
    return ", ".join(parts)


def _times(values: Sequence[float]) -> str:
    return "×".join(f"{value:.4g}" for value in values)


def map_values(
    labels: np.ndarray, task: Task, label_values: Mapping[int, str], *, may_be_empty: bool = False
) -> tuple[np.ndarray, list[Finding]]:
    """Translate the values of a file to the values of the task.

    Args:
        labels: Label map (D, H, W), integers.
        task: Gives each label name its value.
        label_values: Value in the file to label name; 0 is background, and so is a name that the task does not know.
        may_be_empty: Whether a label map of zeros is accepted.

    Returns:
        Label map uint8 with unknown values as background (the input itself if nothing changes), and the findings.
    """
    present = sorted(set().union(*(_values_of(plane) for plane in labels)) - {0})
    found = []
    if not present and not may_be_empty:
        found.append(find("empty_labels", regions=", ".join(region.name for region in task.regions)))
    if unknown := [value for value in present if value not in label_values]:
        found.append(
            find(
                "unknown_values" if len(unknown) <= MAX_LISTED else "unknown_values:many",
                s="s" * (len(unknown) > 1),
                few=", ".join(map(str, unknown[:MAX_LISTED])),
                all=",".join(map(str, unknown)),
                known=", ".join(map(str, sorted(label_values))),
            )
        )
    new_values = {value: task.labels.get(label_values.get(value, ""), 0) for value in present}
    if labels.dtype == np.uint8 and all(old == new for old, new in new_values.items()):
        return labels, found
    mapped = np.zeros(labels.shape, dtype=np.uint8)
    for old, new in new_values.items():
        mapped[labels == old] = new
    return mapped, found


def _values_of(plane: np.ndarray) -> list[int]:
    """List the values of a plane; counting bytes is faster than `unique`, which sorts."""
    return (np.flatnonzero(np.bincount(plane.ravel())) if plane.dtype == np.uint8 else np.unique(plane)).tolist()
