"""Sides of an organ: components in which both are mixed, and a lone side that is doubtful."""

from collections.abc import Mapping

import numpy as np
from scipy import ndimage

from medseg.anatomy.position import side_pairs
from medseg.anatomy.rules import CUT_SHARE, MAX_WALL_MM, MIXED_SHARE, OPEN_SHARE
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.preprocess.intensity import BODY_HU
from medseg.task import Task


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
        box = boxes[lone.name]
        z, y, _ = box.slices()
        # Share of each plane across x, at the height of the region, that is denser than air.
        share = (image_hu[z, y] > BODY_HU).mean(axis=(0, 1))
        # Both run from the side of the body wall that the lone region would have.
        if lone is left:
            absent, body_share, start = right, share[::-1], grid.shape[2] - box.stop[2]
        else:
            absent, body_share, start = left, share, box.start[2]
        is_cut_at_wall = body_share[0] > CUT_SHARE
        shows_other_skin = body_share[-1] <= OPEN_SHARE
        if not (is_cut_at_wall and shows_other_skin):
            continue
        # If the skin on the other side is only a body wall away, the region belongs to that side.
        skin = int(np.flatnonzero(body_share > OPEN_SHARE)[-1]) + 1
        wall_mm = (skin - start - (box.stop[2] - box.start[2])) * grid.spacing_mm[2]
        if wall_mm <= MAX_WALL_MM:
            warnings.append(
                f"{lone.name} may be {absent.name}: the scan is cut on the side where the body "
                f"wall of {lone.name} would be, and shows the skin on the other; check the side"
            )
    return warnings


def unmix_sides(labels: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Assign a component that mixes both sides of an organ to the side with most of its voxels.

    The label map is changed in place.

    Sides that only touch keep their border; they count as mixed where one reaches across the
    other's centre. On a scan of one side alone, a network that does not see the midline may label
    half of the organ as the other side.

    Returns:
        Warnings of what was changed.
    """
    warnings = []
    for left, right in side_pairs(task):
        # Labels that correspond one to one can be relabelled as the other side; lobes do not.
        if len(left.labels) != len(right.labels):
            continue
        left_values, right_values = task.region_values(left), task.region_values(right)
        components, _ = ndimage.label(np.isin(labels, (*left_values, *right_values)))
        for number, slices in enumerate(ndimage.find_objects(components), start=1):
            component = components[slices] == number
            inner = labels[slices]
            is_left = component & np.isin(inner, left_values)
            is_right = component & np.isin(inner, right_values)
            num_left, num_right = int(is_left.sum()), int(is_right.sum())
            num_fewer, num_more = sorted((num_left, num_right))
            if num_fewer < MIXED_SHARE * num_more or not _reach_across(is_left, is_right):
                continue
            winner, loser = (left, right) if num_left >= num_right else (right, left)
            new_values = task.region_values(winner)
            for value, new_value in zip(task.region_values(loser), new_values, strict=True):
                inner[component & (inner == value)] = new_value
            warnings.append(
                f"{num_fewer * voxel_ml(grid):.0f} ml that the coarse stage labelled {loser.name} "
                f"lie within {winner.name} and were relabelled accordingly; check the sides"
            )
    return warnings


def _reach_across(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the left mask reaches beyond the right one's centre, or the other way round."""
    # Voxels at each x; array x points to the left.
    left_counts, right_counts = left.sum((0, 1)), right.sum((0, 1))
    indices = np.arange(len(left_counts))
    left_centre = float(np.average(indices, weights=left_counts))
    right_centre = float(np.average(indices, weights=right_counts))
    left_begins = np.flatnonzero(left_counts)[0]
    right_ends = np.flatnonzero(right_counts)[-1]
    return bool(left_begins < right_centre or right_ends > left_centre)
