"""Check of a lone side of a paired organ against the side at which the scan is cut."""

from collections.abc import Mapping

import numpy as np

from medseg.anatomy.position import side_pairs
from medseg.anatomy.rules import CUT_SHARE, MAX_WALL_MM, OPEN_SHARE
from medseg.geometry.grid import VoxelBox, VoxelGrid
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
        # For each sagittal plane, the share of voxels denser than air in the z and y of the box.
        share = (image_hu[z, y] > BODY_HU).mean(axis=(0, 1))
        # `body_share` is `share` counted from the lateral face of the scan at which the body wall
        # of the region would be; `stop` is the end of the region in this direction.
        if lone is left:
            absent = right
            body_share = share[::-1]
            stop = grid.shape[2] - box.start[2]
        else:
            absent = left
            body_share = share
            stop = box.stop[2]
        is_cut_at_wall = body_share[0] > CUT_SHARE
        shows_other_skin = body_share[-1] <= OPEN_SHARE
        if not (is_cut_at_wall and shows_other_skin):
            continue
        # If the skin on the other side is only a body wall away, the region belongs to that side.
        # At least one plane is denser than `OPEN_SHARE`: the first one, at which the scan is cut.
        skin = int(np.flatnonzero(body_share > OPEN_SHARE)[-1]) + 1
        wall_mm = (skin - stop) * grid.spacing_mm[2]
        if wall_mm <= MAX_WALL_MM:
            warnings.append(
                f"{lone.name} may be {absent.name}: the scan is cut on the side where the body "
                f"wall of {lone.name} would be, and shows the skin on the other; check the side"
            )
    return warnings
