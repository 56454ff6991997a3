"""Agreement of the two stages, and the distortion of crops of fixed size.

How much the stages agree, and where they agree least.
"""

from collections.abc import Mapping

import numpy as np

from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import distortion

# A crop of fixed size that is distorted by more than this causes a warning.
MAX_DISTORTION = 2.0


def agreement(
    coarse_labels: np.ndarray,
    coarse_grid: VoxelGrid,
    labels: np.ndarray,
    grid: VoxelGrid,
    regions: Mapping[str, tuple[int, ...]],
) -> dict[str, float]:
    """Dice coefficient of the coarse and the fine labels of each region.

    The final label map is read at the centres of the coarse voxels, from its nearest voxel.

    Args:
        coarse_labels: Label map (D, H, W) of the coarse stage.
        coarse_grid: Its grid.
        labels: Final label map (D, H, W).
        grid: Its grid, with the same axes.
        regions: Label values of each region that the coarse stage found.

    Returns:
        Region name to a number in [0, 1]; 0 for a region that neither has any more.
    """
    fine_labels = _at_centres(labels, grid, coarse_grid)
    agreements = {}
    for name, values in regions.items():
        coarse = np.isin(coarse_labels, values)
        fine = np.isin(fine_labels, values)
        num_both = int((coarse & fine).sum())
        num_voxels = int(coarse.sum() + fine.sum())
        # Regions may share labels: the coarse map lacks those of regions that are absent.
        agreements[name] = 2 * num_both / num_voxels if num_voxels else 0.0
    return agreements


def most_disputed_xyz_mm(
    coarse_labels: np.ndarray,
    coarse_grid: VoxelGrid,
    labels: np.ndarray,
    grid: VoxelGrid,
) -> tuple[float, ...] | None:
    """Find where the two stages differ most.

    The point is the centre of the different voxels in the axial coarse slice with the most of them.

    Args:
        coarse_labels: Label map (D, H, W) of the coarse stage.
        coarse_grid: Its grid.
        labels: Final label map (D, H, W).
        grid: Its grid, with the same axes.

    Returns:
        World point in mm, LPS; None where they are equal.
    """
    differs = coarse_labels != _at_centres(labels, grid, coarse_grid)
    # The first axis runs along z: the slice is one that a reader can open.
    index = int(np.count_nonzero(differs, axis=(1, 2)).argmax())
    if not differs[index].any():
        return None
    rows, columns = np.nonzero(differs[index])
    centre = [index, float(rows.mean()), float(columns.mean())]
    return tuple(coarse_grid.index_to_world_xyz_mm(centre).tolist())


def nearest_voxels(grid: VoxelGrid, reader: VoxelGrid) -> list[np.ndarray]:
    """Find the voxel of a grid that is nearest to each voxel of a reading grid with the same axes.

    Returns:
        Indices into `grid` along z, y and x, each as long as the reading grid along that axis.
    """
    nearest = []
    for axis, (scale, offset) in enumerate(reader.axis_map_to(grid)):
        positions = np.rint(scale * np.arange(reader.shape[axis]) + offset)
        # Centres beyond the grid read its outermost voxels.
        nearest.append(np.clip(positions, 0, grid.shape[axis] - 1).astype(int))
    return nearest


def _at_centres(labels: np.ndarray, grid: VoxelGrid, coarse_grid: VoxelGrid) -> np.ndarray:
    """Read a label map at the centres of coarse voxels, from its nearest voxel."""
    return np.asarray(labels[np.ix_(*nearest_voxels(grid, coarse_grid))])


def distortion_warnings(name: str, grid: VoxelGrid) -> list[str]:
    """Warn where a crop of fixed size is distorted by more than `MAX_DISTORTION`.

    Args:
        name: Content of the crop.
        grid: Its grid.
    """
    # The spacing of a crop of fixed size differs by axis where its shape was not kept.
    ratio = distortion(grid.spacing_mm)
    if ratio <= MAX_DISTORTION:
        return []
    voxels = "×".join(str(size) for size in grid.shape)
    extents_mm = np.multiply(grid.shape, grid.spacing_mm)
    extent = "×".join(f"{extent_mm:.0f}" for extent_mm in extents_mm)
    return [
        f"{name}: {extent} mm were resized to {voxels} voxels, a distortion of {ratio:.1f}; "
        f"above {MAX_DISTORTION:g} the network may not recognise the shape"
    ]
