"""Position of the patient: signs in the image that contradict the header.

The audit and the prediction use the same tests: for a body turned about its long axis (front and
back exchanged), and for one upside down. In either case left and right are exchanged.
"""

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from medseg.anatomy.rules import AIRY_HU, END_SHARE, SPINE_HU, SPINE_REACH_MM, SPINE_SHARE
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.task import Region, Task, is_side_pair

UPSIDE_DOWN_SIGN = "the lower ends of the lungs look like their apices"
"""What is seen where `apex_excess` is low."""


def side_pairs(task: Task) -> list[tuple[Region, Region]]:
    """List the (left, right) regions of each organ that has two sides."""
    return [
        (one, other) if one.side == "left" else (other, one)
        for one, other in combinations(task.regions, 2)
        if is_side_pair(one, other)
    ]


def turned_pairs(
    image_hu: np.ndarray, boxes: Mapping[str, VoxelBox], grid: VoxelGrid, task: Task
) -> list[tuple[Region, Region]]:
    """List the (left, right) regions between which the spine seems to be at the front: the body is turned about its long axis.

    Between the two sides of an organ the spine is in the back half of nearly every slice. A heart
    with contrast agent is as dense and in the front half of some slices. A pair is reported if few
    slices are denser at the back.

    Args:
        image_hu: Image (D, H, W) in HU, best at about 2 mm.
        boxes: Region name to its tight box.
        grid: Grid of both.
        task: Labels and regions.
    """
    found = []
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
            found.append((left, right))
    return found


def apex_excess(
    image_hu: np.ndarray,
    labels: np.ndarray,
    boxes: Mapping[str, VoxelBox],
    grid: VoxelGrid,
    task: Task,
) -> float:
    """Measure by how much the upper ends of the lungs look more like apices than the lower ends; negative where they are upside down.

    At its apex a lung is round and fills its bounding rectangle in a slice. At its base it is a rim
    around the dome of the diaphragm and leaves the rectangle nearly empty. The two ends fill 0.60
    to 0.81 and 0.18 to 0.51 of it on the measured scans and phantoms, however the patient leans.
    Only regions that the scan does not cut are checked, and only those full of air are lungs.

    Args:
        image_hu: Image (D, H, W) in HU.
        labels: Label map (D, H, W) in the task's values.
        boxes: Region name to its tight box.
        grid: Grid of all.
        task: Labels and regions.

    Returns:
        Difference of the filled shares, the mean of all lungs; 1 without a lung.
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
    return float(np.mean(excess)) if excess else 1.0


def _filled_share(mask: np.ndarray) -> float:
    """Share of the bounding rectangles of its slices that a mask (D, H, W) fills; 0 for an empty mask."""
    boxes = (VoxelBox.from_mask(plane[None]) for plane in mask)
    return float(
        np.count_nonzero(mask)
        / max(1, sum(math.prod(box.shape) for box in boxes if box is not None))
    )
