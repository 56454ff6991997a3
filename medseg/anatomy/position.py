"""Position of the patient: signs in the image that contradict the header.

There is a test for a body turned about its long axis (front and back exchanged), and one for a body
upside down. In either case left and right are exchanged. The audit and the prediction use both.
"""

import math
from collections.abc import Mapping
from itertools import combinations

import numpy as np

from medseg.anatomy.rules import AIRY_HU, END_SHARE, SPINE_HU, SPINE_REACH_MM, SPINE_SHARE
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.task import Region, Task, is_side_pair

UPSIDE_DOWN_SIGN = "the lower ends of the lungs look like their apices"
"""Clause of a warning if `apex_excess` is low."""


def side_pairs(task: Task) -> list[tuple[Region, Region]]:
    """List the (left, right) regions of each organ that has two sides."""
    pairs = []
    for first, second in combinations(task.regions, 2):
        if not is_side_pair(first, second):
            continue
        if first.side == "left":
            pairs.append((first, second))
        else:
            pairs.append((second, first))
    return pairs


def turned_pairs(
    image_hu: np.ndarray, boxes: Mapping[str, VoxelBox], grid: VoxelGrid, task: Task
) -> list[tuple[Region, Region]]:
    """List the (left, right) regions between which the spine seems to be at the front.

    The body is turned about its long axis then. Between the two sides of an organ the spine is in
    the back half of nearly every slice. A heart with contrast agent is as dense and in the front
    half of some slices. A pair is reported if few slices are denser at the back.

    Args:
        image_hu: Image (D, H, W) in HU, best at a spacing of about 2 mm.
        boxes: Region name to its tight box.
        grid: Grid of the image and the boxes.
        task: Labels and regions.
    """
    turned = []
    for left, right in side_pairs(task):
        if left.name not in boxes or right.name not in boxes:
            continue
        left_box, right_box = boxes[left.name], boxes[right.name]
        # The smallest box around both along z and y.
        low_z, low_y, _ = map(min, left_box.start, right_box.start)
        high_z, high_y, _ = map(max, left_box.stop, right_box.stop)
        # Half way between the centres of both: the mean of the four ends.
        ends_x = (left_box.start[2], left_box.stop[2], right_box.start[2], right_box.stop[2])
        middle_x = sum(ends_x) / 4
        reach = SPINE_REACH_MM / grid.spacing_mm[2]
        columns = slice(max(0, round(middle_x - reach)), round(middle_x + reach))
        is_dense = image_hu[low_z:high_z, low_y:high_y, columns] > SPINE_HU
        half = (high_y - low_y) // 2
        # Dense voxels of each slice; y runs to the back of a body that is not turned.
        num_front = is_dense[:, :half].sum((1, 2))
        num_back = is_dense[:, half:].sum((1, 2))
        num_slices = int(np.count_nonzero(num_front + num_back))  # slices with bone
        num_denser_back = int(np.count_nonzero(num_back > num_front))
        if num_slices and num_denser_back < SPINE_SHARE * num_slices:
            turned.append((left, right))
    return turned


def apex_excess(
    image_hu: np.ndarray,
    labels: np.ndarray,
    boxes: Mapping[str, VoxelBox],
    grid: VoxelGrid,
    task: Task,
) -> float:
    """Measure by how much the upper ends of the lungs look more like apices than the lower ends.

    The number is negative if the lungs are upside down.

    At its apex a lung is round and fills its bounding rectangle in a slice. At its base it is a rim
    around the dome of the diaphragm and leaves the rectangle nearly empty. The two ends fill 0.60
    to 0.81 and 0.18 to 0.51 of it on the measured scans and phantoms, however the patient leans.
    Only regions full of air, which are lungs, are measured, and only if the scan does not cut them.

    Args:
        image_hu: Image (D, H, W) in HU.
        labels: Label map (D, H, W) in the task's values.
        boxes: Region name to its tight box.
        grid: Grid of image, labels and boxes.
        task: Labels and regions.

    Returns:
        Difference of the filled shares, the mean of all lungs; without a lung 1, which is no sign
        of a patient upside down.
    """
    excesses = []
    for region in task.regions:
        box = boxes.get(region.name)
        if region.side is None or box is None:
            continue
        is_cut = box.start[0] == 0 or box.stop[0] == grid.shape[0]
        if is_cut:
            continue
        mask = np.isin(labels[box.slices()], task.region_values(region))
        # Other organs with two sides have no apex.
        if np.median(image_hu[box.slices()][mask]) > AIRY_HU:
            continue
        # The slices below and above which the ends of the lung lie; z runs upwards.
        z_of_voxels = np.nonzero(mask)[0]
        low, high = np.quantile(z_of_voxels, [END_SHARE, 1.0 - END_SHARE]).astype(int)
        excesses.append(_filled_share(mask[high:]) - _filled_share(mask[: low + 1]))
    if not excesses:
        return 1.0
    return float(np.mean(excesses))


def _filled_share(mask: np.ndarray) -> float:
    """Share of the bounding rectangles of its slices that a mask (D, H, W) fills.

    0 for an empty mask.
    """
    rectangle_voxels = 0
    for plane in mask:
        box = VoxelBox.from_mask(plane[None])
        if box is not None:
            rectangle_voxels += math.prod(box.shape)
    return float(np.count_nonzero(mask) / max(1, rectangle_voxels))
