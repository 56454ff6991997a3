"""Plausibility checks of a segmentation: sides, borders, position of the patient, agreement of the two stages."""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from medseg.cascade.stage import CascadeOptions
from medseg.data.task import Region, Task, is_side_pair
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import distortion
from medseg.preprocess.orient import FACES

# A crop of fixed size that is distorted by more than this causes a warning.
MAX_DISTORTION = 2.0
# Organs with a lower median are full of air. Share of a lung's voxels at either end.
AIRY_HU = -500.0
END_SHARE = 0.05
# Bone at 2 mm; distance from the middle in which the spine is expected; share of the slices that are denser at the back. Eleven real
# scans: 1.0, with contrast agent in the heart 0.48 to 0.70; phantoms: 0.85 and above.
SPINE_HU = 200
SPINE_REACH_MM = 35.0
SPINE_SHARE = 1 / 3


class FoundRegion(NamedTuple):
    """One region on the coarse grid: its tight box, its volume, its centre and its extent along world x."""

    region: Region
    box: VoxelBox
    volume_ml: float
    centre_x_mm: float
    x_range_mm: tuple[float, float]


def side_pairs(task: Task) -> list[tuple[Region, Region]]:
    """List the (left, right) regions of each organ that has two sides."""
    return [
        (one, other) if one.side == "left" else (other, one)
        for one, other in combinations(task.regions, 2)
        if is_side_pair(one, other)
    ]


def voxel_ml(grid: VoxelGrid) -> float:
    """Volume of a voxel in ml."""
    return math.prod(grid.spacing_mm) / 1000.0


def measure_region(region: Region, mask: np.ndarray, grid: VoxelGrid) -> FoundRegion:
    """Measure a region on the coarse grid; its mask (D, H, W) must not be empty."""
    box = VoxelBox.from_mask(mask)
    assert box is not None, "the mask is not empty"
    z, y, x = np.add(box.start, ndimage.center_of_mass(mask[box.slices()]))
    # The extent is taken on the line along x through the centre.
    points = np.array([[z, y, x], [z, y, box.start[2]], [z, y, box.stop[2] - 1]])
    centre_x_mm, *ends = grid.index_to_world_xyz_mm(points)[:, 0].tolist()
    return FoundRegion(region, box, float(mask.sum()) * voxel_ml(grid), centre_x_mm, (min(ends), max(ends)))


def border_warnings(found: FoundRegion, grid: VoxelGrid) -> list[str]:
    """Warn where a face of the scan cuts a region."""
    touched = [
        names[end]
        for axis, names in enumerate(FACES)
        for end, touches in enumerate((found.box.start[axis] <= 0, found.box.stop[axis] >= grid.shape[axis]))
        if touches
    ]
    sentence = f"{found.region.name} touches the {' and '.join(touched)} border of the scan: a part of it may be missing"
    return [sentence] if touched else []


def pair_warnings(left: FoundRegion, right: FoundRegion, options: CascadeOptions) -> list[str]:
    """Warn where the left and the right region of one organ are exchanged, mixed up or very different in volume."""
    names = f"{left.region.name} and {right.region.name}"
    small, large = sorted((left.volume_ml, right.volume_ml))
    warnings = []
    # World x points to the patient's left.
    if left.centre_x_mm <= right.centre_x_mm:
        warnings.append(
            f"{names} lie on the wrong sides: the left one's centre is at x = {left.centre_x_mm:.0f} mm, "
            f"the right one's at x = {right.centre_x_mm:.0f} mm, and x points to the patient's left"
        )
    elif left.x_range_mm[0] < right.centre_x_mm or right.x_range_mm[1] > left.centre_x_mm:
        warnings.append(f"one of {names} extends beyond the centre of the other: the coarse stage may have mixed up the sides")
    if large > options.max_volume_ratio * small:
        warnings.append(
            f"{names} differ much in volume, {left.volume_ml:.0f} ml and {right.volume_ml:.0f} ml: one of them may be incomplete"
        )
    return warnings


def turned_warnings(image_hu: np.ndarray, boxes: Mapping[str, VoxelBox], grid: VoxelGrid, task: Task) -> list[str]:
    """Warn where the patient seems to lie turned about the long axis against the header, which would exchange left and right.

    Between the two sides of an organ the spine is in the back half of nearly every slice. The heart, which contrast agent makes as dense,
    is in the front half of some. A scan is doubted where few slices are denser at the back.

    Args:
        image_hu: Image (D, H, W) in HU on the coarse grid.
        boxes: Region name to its tight box.
        grid: The coarse grid.
        task: Labels and regions.
    """
    warnings = []
    for left, right in side_pairs(task):
        if not {left.name, right.name} <= boxes.keys():
            continue
        pair = boxes[left.name], boxes[right.name]
        # Box that holds both.
        low_z, low_y, _ = (min(ends) for ends in zip(*(box.start for box in pair), strict=True))
        high_z, high_y, _ = (max(ends) for ends in zip(*(box.stop for box in pair), strict=True))
        middle_x = sum(box.start[2] + box.stop[2] for box in pair) / 4
        reach = SPINE_REACH_MM / grid.spacing_mm[2]
        columns = slice(max(0, round(middle_x - reach)), round(middle_x + reach))
        dense = image_hu[low_z:high_z, low_y:high_y, columns] > SPINE_HU
        half = (high_y - low_y) // 2
        front, back = dense[:, :half].sum((1, 2)), dense[:, half:].sum((1, 2))
        num_slices = int(np.count_nonzero(front + back))
        if num_slices and np.count_nonzero(back > front) < SPINE_SHARE * num_slices:
            warnings.append(
                f"between {left.name} and {right.name} most voxels as dense as bone are at the front: if the patient lay the other way "
                "round than the header says, left and right are exchanged"
            )
    return warnings


def upside_down_warnings(
    image_hu: np.ndarray, labels: np.ndarray, boxes: Mapping[str, VoxelBox], grid: VoxelGrid, task: Task
) -> list[str]:
    """Warn where the lungs seem to be upside down against the header, which would exchange left and right.

    At its apex a lung is round and fills its bounding rectangle in a slice. At its base it is a rim around the dome of the diaphragm and
    leaves the rectangle nearly empty. The two ends fill 0.60 to 0.81 and 0.18 to 0.51 of it on the measured scans and phantoms, however
    the patient leans. Only regions that the scan does not cut are checked, and only those full of air are lungs.

    Args:
        image_hu: Image (D, H, W) in HU on the coarse grid.
        labels: Coarse label map (D, H, W).
        boxes: Region name to its tight box.
        grid: The coarse grid.
        task: Labels and regions.
    """
    excess = []
    for region in task.regions:
        box = boxes.get(region.name)
        if region.side is None or box is None or box.start[0] == 0 or box.stop[0] == grid.shape[0]:
            continue
        mask = np.isin(labels[box.slices()], task.region_values(region))
        if np.median(image_hu[box.slices()][mask]) > AIRY_HU:
            continue
        low, high = np.quantile(np.nonzero(mask)[0], [END_SHARE, 1.0 - END_SHARE]).astype(int)
        excess.append(_filled_share(mask[high:]) - _filled_share(mask[: low + 1]))
    if not excess or np.mean(excess) > 0:
        return []
    return [
        "the lower ends of the lungs look like their apices: if the patient lay the other way round than the header says, left and right are "
        "exchanged"
    ]


def _filled_share(mask: np.ndarray) -> float:
    """Share of the bounding rectangles of its slices that a mask (D, H, W) fills; 0 for an empty mask."""
    boxes = (VoxelBox.from_mask(plane[None]) for plane in mask)
    return float(np.count_nonzero(mask) / max(1, sum(math.prod(box.shape) for box in boxes if box is not None)))


def distortion_warnings(name: str, grid: VoxelGrid) -> list[str]:
    """Warn where a crop of fixed size is distorted by more than `MAX_DISTORTION`.

    Args:
        name: Content of the crop.
        grid: Its grid.
    """
    ratio = distortion(grid.spacing_mm)
    if ratio <= MAX_DISTORTION:
        return []
    voxels, extent = (
        "×".join(f"{number:.0f}" for number in numbers) for numbers in (grid.shape, np.multiply(grid.shape, grid.spacing_mm))
    )
    return [
        f"{name}: {extent} mm were resized to {voxels} voxels, which distorts them by {ratio:.1f}; above {MAX_DISTORTION:g} the network "
        "may not recognise the shape"
    ]


def agreement(
    coarse_labels: np.ndarray, coarse_grid: VoxelGrid, labels: np.ndarray, grid: VoxelGrid, regions: Mapping[str, tuple[int, ...]]
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
        Region name to a number in [0, 1].
    """
    nearest = [
        np.clip(np.rint(scale * np.arange(size) + offset), 0, length - 1).astype(int)
        for (scale, offset), size, length in zip(coarse_grid.axis_map_to(grid), coarse_grid.shape, grid.shape, strict=True)
    ]
    fine_labels = labels[np.ix_(*nearest)]
    result = {}
    for name, values in regions.items():
        coarse, fine = np.isin(coarse_labels, values), np.isin(fine_labels, values)
        result[name] = 2 * int((coarse & fine).sum()) / int(coarse.sum() + fine.sum())
    return result
