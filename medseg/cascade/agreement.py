"""Agreement of the coarse and the fine labels, and warnings of distorted crops of fixed size."""

from collections.abc import Mapping

import numpy as np

from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import distortion

# A crop of fixed size whose largest and smallest spacing have a larger ratio causes a warning.
MAX_DISTORTION = 2.0


def agreement(
    coarse_labels: np.ndarray,
    coarse_grid: VoxelGrid,
    fine_labels: np.ndarray,
    grid: VoxelGrid,
    regions: Mapping[str, tuple[int, ...]],
) -> dict[str, float]:
    """Dice coefficient of the coarse and the fine labels of each region.

    At the centre of each coarse voxel, the label of the nearest fine voxel is taken.

    Args:
        coarse_labels: Label map (D, H, W) of the coarse stage.
        coarse_grid: Its grid.
        fine_labels: Label map (D, H, W) that was joined from the fine stage's results.
        grid: Grid of `fine_labels`, with the same axes.
        regions: Name to the label values of each region that was refined.

    Returns:
        Region name to a number in [0, 1]; 0 for a region that is in neither map.
    """
    fine_at_coarse = _at_centres(fine_labels, grid, coarse_grid)
    agreements = {}
    for name, values in regions.items():
        coarse = np.isin(coarse_labels, values)
        fine = np.isin(fine_at_coarse, values)
        num_both = int((coarse & fine).sum())
        num_voxels = int(coarse.sum() + fine.sum())
        agreements[name] = 0.0
        # A region may be in neither map: the labels that it shares with an absent region have been
        # removed from the coarse map.
        if num_voxels:
            agreements[name] = 2 * num_both / num_voxels
    return agreements


def most_disputed_xyz_mm(
    coarse_labels: np.ndarray,
    coarse_grid: VoxelGrid,
    fine_labels: np.ndarray,
    grid: VoxelGrid,
) -> tuple[float, ...] | None:
    """Find where the two stages differ most.

    The point is the centroid of the differing voxels in the axial coarse slice that has most of
    them.

    Args:
        coarse_labels: Label map (D, H, W) of the coarse stage, in LPS order: its slices are axial.
        coarse_grid: Its grid.
        fine_labels: See `agreement`.
        grid: Grid of `fine_labels`, with the same axes.

    Returns:
        World point (x, y, z) in mm, LPS; None if the label maps are equal.
    """
    differs = coarse_labels != _at_centres(fine_labels, grid, coarse_grid)
    z = int(np.count_nonzero(differs, axis=(1, 2)).argmax())
    if not differs[z].any():
        return None
    rows, columns = np.nonzero(differs[z])
    centre_zyx = [z, float(rows.mean()), float(columns.mean())]
    return tuple(coarse_grid.index_to_world_xyz_mm(centre_zyx).tolist())


def nearest_voxels(source: VoxelGrid, target: VoxelGrid) -> list[np.ndarray]:
    """Find the source voxel that is nearest to each target voxel.

    Args:
        source: Grid of the voxels to be found.
        target: Grid with the same axes.

    Returns:
        Indices into the source along z, y and x, each as long as the target along that axis.
    """
    nearest = []
    # Index in `source` = scale * index in `target` + offset, on each axis.
    for axis, (scale, offset) in enumerate(target.axis_map_to(source)):
        positions = np.rint(scale * np.arange(target.shape[axis]) + offset)
        # Target voxels beyond the source take its outermost voxels.
        nearest.append(np.clip(positions, 0, source.shape[axis] - 1).astype(int))
    return nearest


def _at_centres(labels: np.ndarray, grid: VoxelGrid, coarse_grid: VoxelGrid) -> np.ndarray:
    """Read a label map at the centre of each coarse voxel, by the nearest voxel of the map.

    Returns:
        Label map with the shape of the coarse grid.
    """
    z, y, x = nearest_voxels(grid, coarse_grid)
    return np.asarray(labels[np.ix_(z, y, x)])


def distortion_warnings(name: str, grid: VoxelGrid) -> list[str]:
    """Warn where a crop of fixed size is distorted by more than `MAX_DISTORTION`.

    Args:
        name: Content of the crop, for the message.
        grid: Its grid. A crop that was stretched to the fixed size has unequal spacings.

    Returns:
        One warning, or none.
    """
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
