"""Sides of an organ: components in which both are mixed, and a lone side that the cut of the scan contradicts."""

from collections.abc import Mapping

import numpy as np
from scipy import ndimage

from medseg.anatomy.position import side_pairs
from medseg.anatomy.rules import CUT_SHARE, MAX_WALL_MM, MIXED_SHARE, OPEN_SHARE
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.preprocess.intensity import BODY_HU
from medseg.task import Region, Task


def lone_side_warnings(
    boxes: Mapping[str, VoxelBox], image_hu: np.ndarray, grid: VoxelGrid, task: Task
) -> list[str]:
    """Warn of a lone region of a pair whose side contradicts the cut of the scan.

    A scan of half a chest is cut towards the midline and shows the skin on its other side. The
    network does not see where a scan ends.

    Args:
        boxes: Tight boxes of the regions that were found.
        image_hu: Image (D, H, W) in HU; array x points to the patient's left.
        grid: The whole scan on the coarse grid.
        task: Labels and regions.

    Returns:
        A warning for each such region.
    """
    warnings = []
    for left, right in side_pairs(task):
        present = [region for region in (left, right) if region.name in boxes]
        if len(present) != 1:
            continue
        lone = present[0]
        other = right if lone is left else left
        box = boxes[lone.name]
        z, y, _ = box.slices()
        share = (image_hu[z, y] > BODY_HU).mean(axis=(0, 1))
        # Both run from the side of the body wall that the lone region would have.
        if lone is left:
            body_share, start = share[::-1], grid.shape[2] - box.stop[2]
        else:
            body_share, start = share, box.start[2]
        is_cut_at_wall = body_share[0] > CUT_SHARE
        shows_other_skin = body_share[-1] <= OPEN_SHARE
        if not (is_cut_at_wall and shows_other_skin):
            continue
        skin = int(np.flatnonzero(body_share > OPEN_SHARE)[-1]) + 1
        wall_mm = (skin - start - (box.stop[2] - box.start[2])) * grid.spacing_mm[2]
        if wall_mm <= MAX_WALL_MM:
            warnings.append(
                f"{lone.name} may be {other.name}: the scan is cut on the side where the body wall of {lone.name} "
                "would be, and shows the skin on the other; check the side"
            )
    return warnings


def _matching_pairs(task: Task) -> list[tuple[Region, Region]]:
    """List the (left, right) regions whose labels correspond one to one, so that one side can be relabelled as the other; lobes do not."""
    return [
        (left, right) for left, right in side_pairs(task) if len(left.labels) == len(right.labels)
    ]


def unmix_sides(labels: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Assign a component that mixes both sides of an organ to the side with most of its voxels, in place.

    Sides that only touch keep their border; they count as mixed where one reaches across the
    other's centre. On a scan of one side alone, a network that does not see the midline may label
    half of the organ as the other side.

    Returns:
        Warnings of what was changed.
    """
    warnings = []
    for pair in _matching_pairs(task):
        values = [task.region_values(region) for region in pair]
        components, _ = ndimage.label(np.isin(labels, (*values[0], *values[1])))
        for number, slices in enumerate(ndimage.find_objects(components), start=1):
            component, inner = components[slices] == number, labels[slices]
            masks = [component & np.isin(inner, one) for one in values]
            counts = [int(mask.sum()) for mask in masks]
            if min(counts) < MIXED_SHARE * max(counts) or not _reach_across(*masks):
                continue
            winner, loser = (0, 1) if counts[0] >= counts[1] else (1, 0)
            for value, new_value in zip(values[loser], values[winner], strict=True):
                inner[component & (inner == value)] = new_value
            warnings.append(
                f"{counts[loser] * voxel_ml(grid):.0f} ml that the coarse stage labelled {pair[loser].name} lie within "
                f"{pair[winner].name} and were relabelled accordingly; check the sides"
            )
    return warnings


def _reach_across(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the left mask reaches beyond the right one's centre, or the other way round; array x points to the left."""
    left_n, right_n = (mask.sum((0, 1)) for mask in (left, right))
    left_centre, right_centre = (
        float(np.average(np.arange(len(n)), weights=n)) for n in (left_n, right_n)
    )
    return bool(
        np.flatnonzero(left_n)[0] < right_centre or np.flatnonzero(right_n)[-1] > left_centre
    )
