"""Do image and labels lie on one grid, and what do the values of the labels mean?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from medseg.data.audit.finding import Finding, error
from medseg.data.task import Task
from medseg.geometry.grid import VoxelGrid

GRID_TOLERANCE_MM = 0.1
"""Image and label map are on one grid when their corners agree within this: rounded decimals and float32 directions are
off by less, and it is a small part of any voxel."""

MAX_LISTED = 10


def audit_grids(
    image_grid: VoxelGrid, label_grid: VoxelGrid, stored_shapes: tuple[Sequence[int], Sequence[int]]
) -> list[Finding]:
    """Say where the label map lies elsewhere than its image.

    Args:
        image_grid: Grid of the oriented image.
        label_grid: Grid of the oriented label map.
        stored_shapes: Voxels of both files in storage order.

    Returns:
        Nothing where the corners agree within `GRID_TOLERANCE_MM`.
    """
    if label_grid.is_close(image_grid, GRID_TOLERANCE_MM):
        return []
    if tuple(stored_shapes[0]) != tuple(stored_shapes[1]):
        return [
            error(
                "label_shape",
                f"the label map has {_times(label_grid.shape)} voxels, the image {_times(image_grid.shape)} (z, y, x)"
                if label_grid.shape != image_grid.shape
                else "the label map is stored in another order of axes than its image and does not lie on its grid: "
                f"{_difference(image_grid, label_grid)}",
                "resample the label map to the grid of the image with nearest neighbours",
            )
        ]
    return [
        error(
            "label_grid",
            f"the label map is not on the grid of its image: {_difference(image_grid, label_grid)} (tolerance {GRID_TOLERANCE_MM} mm)",
            "resample it to the image, or, where only its header is wrong, lay it on the image voxel by voxel with "
            "data.ignore_findings=[label_grid]",
        )
    ]


def _difference(image_grid: VoxelGrid, label_grid: VoxelGrid) -> str:
    """What differs between two grids, in the order in which a person would look."""
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
        corners = np.abs(label_grid.corners_xyz_mm() - image_grid.corners_xyz_mm())
        parts.append(f"its corners lie up to {corners.max():.2f} mm off")
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
        may_be_empty: Whether a label map of zeros is right.

    Returns:
        Label map uint8, the input itself where nothing changes, with unknown values as background; and what is wrong.
    """
    present = sorted(set().union(*(_values_of(plane) for plane in labels)) - {0})
    found = []
    if not present and not may_be_empty:
        found.append(
            error(
                "empty_labels",
                "the label map holds nothing but zeros",
                f"export it again; where the image shows none of {', '.join(region.name for region in task.regions)}, say so with "
                "'absent' in the columns trust_<region> of the case table",
            )
        )
    unknown = [value for value in present if value not in label_values]
    if unknown:
        few = ",".join(map(str, unknown))
        found.append(
            error(
                "unknown_values",
                f"the label map holds the value{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown[:MAX_LISTED]))}{', …' * (len(unknown) > MAX_LISTED)}, "
                f"which data.label_values does not name (it names {', '.join(map(str, sorted(label_values)))})",
                f"add them there, or +data.label_values.background=[{few}] if they are not wanted"
                if len(unknown) <= MAX_LISTED
                else "is it an image instead of a label map?",
            )
        )
    new_values = {value: task.labels.get(label_values.get(value, ""), 0) for value in present}
    if labels.dtype == np.uint8 and all(old == new for old, new in new_values.items()):
        return labels, found
    mapped = np.zeros(labels.shape, dtype=np.uint8)
    for old, new in new_values.items():
        if new:
            mapped[labels == old] = new
    return mapped, found


def _values_of(plane: np.ndarray) -> list[int]:
    """List the values of a plane; bytes are counted, `unique` sorts."""
    values: list[int] = (np.flatnonzero(np.bincount(plane.ravel())) if plane.dtype == np.uint8 else np.unique(plane)).tolist()
    return values
