"""Audit of regions: presence, sides, contact, and cuts by the field of view.

World coordinates decide about sides, not names or the order of storage: x increases towards the patient's left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from medseg.data.audit.finding import Finding, find
from medseg.data.task import Region, Task, is_side_pair
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import FACES

ABSENT = "absent"
"""Trust in a reference that is empty because the region is absent."""

# Separately drawn masks of two lungs share up to 1.1 cm² in front of the heart.
TOUCHING_CM2 = 3.0
# A single region counts as on the other side if its centre lies there by this share of the body's width.
SIDE_SHARE = 0.08
BODY_HU = -500
# A region is cut by the round field of view if this area of its surface is within this distance of the padding, in plane.
FIELD_HU = -1500
FIELD_MM = 5.0
FIELD_CM2 = 1.0
FIELD_SLICES = 32


class RegionFacts(NamedTuple):
    """Location of a region that has voxels.

    Attributes:
        region: The region.
        box: Its tight box.
        x_index: Index along x of its centre of mass.
        centre_x_mm: World x of its centre of mass.
    """

    region: Region
    box: VoxelBox
    x_index: float
    centre_x_mm: float


def measure_volumes(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, float]:
    """Measure the volume of each label of the task in ml; labels (D, H, W), uint8."""
    counts = np.asarray(sum(np.bincount(plane.ravel(), minlength=256) for plane in labels))
    return {name: float(counts[value]) * (math.prod(grid.spacing_mm) / 1000.0) for name, value in task.labels.items()}


def measure_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, RegionFacts]:
    """Locate the regions that have voxels; only the box around all labels is read more than once."""
    around = VoxelBox.from_mask(labels != 0)
    if around is None:
        return {}
    inner = labels[around.slices()]
    found = {}
    for region in task.regions:
        mask = _mask(inner, region, task)
        box = VoxelBox.from_mask(mask)
        if box is None:
            continue
        tight = mask[box.slices()]
        box = box.shifted(around.start)
        centre = [
            start + float(np.average(np.arange(size), weights=tight.sum(axis=tuple({0, 1, 2} - {axis}))))
            for axis, (start, size) in enumerate(zip(box.start, box.shape, strict=True))
        ]
        found[region.name] = RegionFacts(region, box, centre[2], float(grid.index_to_world_xyz_mm(centre)[0]))
    return found


def _mask(labels: np.ndarray, region: Region, task: Task) -> np.ndarray:
    """Mask the voxels of a region; `isin` is slower for few values."""
    first, *others = task.region_values(region)
    mask = labels == first
    for value in others:
        mask |= labels == value
    return mask


def audit_labels(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, task: Task, trust: Mapping[str, str]
) -> list[Finding]:
    """Check the regions of a case for plausibility.

    Args:
        image_hu: Oriented image, (D, H, W), with its padding; None if its values are not HU.
        labels: Label map in the task's values on the same grid, uint8.
        grid: Grid of both.
        task: Labels and regions.
        trust: Region name to trust; a region that is `absent` may be empty.
    """
    regions = measure_regions(labels, grid, task)
    missing = [one.name for one in task.regions if one.name not in regions and trust.get(one.name) != ABSENT]
    found = [find("missing_region", region=name) for name in missing]
    lefts, rights = ([one for one in regions.values() if one.region.side == side] for side in ("left", "right"))
    for left, right in itertools.product(lefts, rights):
        names = {"left": left.region.name, "right": right.region.name}
        if left.centre_x_mm <= right.centre_x_mm:
            found.append(find("swapped_sides", **names, left_mm=left.centre_x_mm, right_mm=right.centre_x_mm))
        if is_side_pair(left.region, right.region):
            contact_mm2 = _contact_mm2(labels, grid, task, left, right)
            if contact_mm2 >= TOUCHING_CM2 * 100:
                found.append(find("touching_regions", **names, area=contact_mm2 / 100))
    for one in [] if lefts and rights else [*lefts, *rights]:
        off_mm, width_mm = (0.0, 0.0) if image_hu is None else _off_side_mm(image_hu, grid, one)
        if off_mm > SIDE_SHARE * width_mm:
            found.append(find("doubtful_side", region=one.region.name, off_mm=off_mm))
    cuts = {one.region.name: _cut_ends(image_hu, labels, grid, task, one) for one in regions.values()}
    if any(cuts.values()):
        found.append(
            find("cut_region", regions=" and ".join(f"{name} ({'; '.join(ends)})" for name, ends in cuts.items() if ends))
        )
    return found


def _off_side_mm(image_hu: np.ndarray, grid: VoxelGrid, one: RegionFacts) -> tuple[float, float]:
    """Measure how far a region lies on the other side of the body's midline, and the width of the body, in its slices."""
    start, stop = one.box.start[0], one.box.stop[0]
    step = math.ceil((stop - start) / FIELD_SLICES)
    body = np.count_nonzero(image_hu[start:stop:step] > BODY_HU, axis=(0, 1))
    if not body.any():
        return 0.0, 0.0
    middle = float(np.average(np.arange(len(body)), weights=body))
    off_mm = (one.x_index - middle) * grid.spacing_mm[2] * (-1 if one.region.side == "left" else 1)
    return off_mm, float(np.ptp(np.flatnonzero(body)) * grid.spacing_mm[2])


def _contact_mm2(labels: np.ndarray, grid: VoxelGrid, task: Task, left: RegionFacts, right: RegionFacts) -> float:
    """Measure the face that two regions share."""
    near = left.box.expanded((1, 1, 1)).intersect(right.box.expanded((1, 1, 1))).clipped(labels.shape)
    if near.is_empty:
        return 0.0
    inner = labels[near.slices()]
    # With the codes 1 and 4, the sum of two neighbours is 5 only where both regions meet.
    codes = _mask(inner, left.region, task).astype(np.uint8) + 4 * _mask(inner, right.region, task).astype(np.uint8)
    area_mm2 = 0.0
    for axis in range(3):
        one, other = (codes[(slice(None),) * axis + (part,)] for part in (slice(None, -1), slice(1, None)))
        area_mm2 += np.count_nonzero(one + other == 5) * math.prod(grid.spacing_mm) / grid.spacing_mm[axis]
    return area_mm2


def _cut_ends(image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, task: Task, one: RegionFacts) -> list[str]:
    """List the ends of the image that a region reaches, with the area of the cut."""
    ends = []
    for axis, (low, high) in enumerate(FACES):
        last = labels.shape[axis] - 1
        for name, index, reached in ((low, 0, one.box.start[axis]), (high, last, one.box.stop[axis] - 1)):
            if reached == index:
                num_voxels = np.count_nonzero(_mask(labels[(slice(None),) * axis + (index,)], one.region, task))
                area_mm2 = num_voxels * math.prod(grid.spacing_mm) / grid.spacing_mm[axis]
                ends.append(f"{name} end, {area_mm2 / 100:.1f} cm²")
    if image_hu is not None and _reaches_padding(image_hu, labels, grid, task, one):
        ends.append("edge of the field of view")
    return ends


def _reaches_padding(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid, task: Task, one: RegionFacts) -> bool:
    """Whether a region comes near to padding within the slices; a sample of its slices is examined."""
    reach = [0, *(max(1, round(FIELD_MM / step_mm)) for step_mm in grid.spacing_mm[1:])]
    box = one.box.expanded(reach).clipped(labels.shape).slices()
    step = math.ceil(one.box.shape[0] / FIELD_SLICES)
    is_padding = image_hu[box][::step] < FIELD_HU
    if not is_padding.any():
        return False
    mask = _mask(labels[box][::step], one.region, task)
    area_mm2 = 0.0
    for axis in (1, 2):
        low, high = (((slice(None),) * axis) + (part,) for part in (slice(None, -reach[axis]), slice(reach[axis], None)))
        hits = np.count_nonzero(mask[low] & is_padding[high]) + np.count_nonzero(mask[high] & is_padding[low])
        # Each line of voxels that ends at the padding is hit up to `reach` times.
        area_mm2 += hits / reach[axis] * step * grid.spacing_mm[0] * grid.spacing_mm[3 - axis]
    return area_mm2 >= FIELD_CM2 * 100


def audit_vanished(volumes_ml: Mapping[str, float], boxes: Mapping[str, VoxelBox], task: Task, spacing: str) -> list[Finding]:
    """Find regions that resampling has removed.

    Args:
        volumes_ml: Volume of each label before.
        boxes: Boxes of the regions that are left.
        task: Labels and regions.
        spacing: The spacing in mm, for the sentence.
    """
    before_ml = {region.name: sum(volumes_ml[label] for label in region.labels) for region in task.regions}
    gone = {name: volume_ml for name, volume_ml in before_ml.items() if volume_ml > 0 and name not in boxes}
    return [find("vanished_region", region=name, volume_ml=volume_ml, spacing=spacing) for name, volume_ml in gone.items()]
