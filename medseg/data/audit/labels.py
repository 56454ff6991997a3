"""Are the regions there, whole, apart, and on the side that their names say?

World coordinates decide about sides, never names or the order of storage: x runs to the patient's left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from medseg.data.audit.finding import Finding, error, warning
from medseg.data.task import Region, Task, is_side_pair
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import FACES

ABSENT = "absent"
"""Trust in a reference that is rightly empty."""

# Masks of two lungs that are drawn apart share up to 1.1 cm² where they meet before the heart.
TOUCHING_CM2 = 3.0
# A region alone counts as on the other side when its centre lies there by this share of the body's width.
SIDE_SHARE = 0.08
BODY_HU = -500
# A region is cut by the round field of view where so much of its surface comes so near to the padding, within the slices.
FIELD_HU = -1500
FIELD_MM = 5.0
FIELD_CM2 = 1.0
FIELD_SLICES = 32


@dataclass(frozen=True)
class RegionFacts:
    """Where a region that has voxels lies.

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
    """Volume of each label of the task in ml; labels (D, H, W), uint8."""
    counts = sum(np.bincount(plane.ravel(), minlength=256) for plane in labels)
    voxel_ml = math.prod(grid.spacing_mm) / 1000.0
    return {name: float(np.asarray(counts)[value]) * voxel_ml for name, value in task.labels.items()}


def measure_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, RegionFacts]:
    """Find the regions that have voxels; only the box around all labels is looked at more than once."""
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
    values = task.region_values(region)
    mask = labels == values[0]
    for value in values[1:]:
        mask |= labels == value
    return mask


def audit_labels(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, task: Task, trust: Mapping[str, str]
) -> list[Finding]:
    """Say what is not plausible about the regions of a case.

    Args:
        image_hu: Oriented image, (D, H, W), with its padding; None where its values are no HU.
        labels: Label map in the task's values on the same grid, uint8.
        grid: Grid of both.
        task: Labels and regions.
        trust: Region name to trust; a region that is `absent` may be empty.
    """
    regions = measure_regions(labels, grid, task)
    found = [
        warning(
            "missing_region",
            f"{region.name} is not in the label map",
            f"where the image does not show it, say so with 'absent' in the column trust_{region.name} of the case table",
        )
        for region in task.regions
        if region.name not in regions and trust.get(region.name) != ABSENT
    ]
    pairs = [
        (left, right)
        for left, right in itertools.product(regions.values(), regions.values())
        if left.region.side == "left" and right.region.side == "right"
    ]
    for left, right in pairs:
        found += _audit_sides(left, right)
        if is_side_pair(left.region, right.region):
            found += _audit_contact(labels, grid, task, left, right)
    for one in regions.values():
        if image_hu is not None and one.region.side is not None and not any(one in pair for pair in pairs):
            found += _audit_lone_side(image_hu, grid, one)
    return found + _audit_cuts(image_hu, labels, grid, task, regions.values())


def _audit_sides(left: RegionFacts, right: RegionFacts) -> list[Finding]:
    if left.centre_x_mm > right.centre_x_mm:
        return []
    return [
        error(
            "swapped_sides",
            f"{left.region.name} lies at x = {left.centre_x_mm:.0f} mm and {right.region.name} at {right.centre_x_mm:.0f} mm, but "
            "the patient's left must lie at larger x (LPS): the labels are swapped",
            "correct data.label_values or the file",
        )
    ]


def _audit_lone_side(image_hu: np.ndarray, grid: VoxelGrid, one: RegionFacts) -> list[Finding]:
    """Compare a region that is alone with the middle of the body in the slices that show it."""
    start, stop = one.box.start[0], one.box.stop[0]
    step = math.ceil((stop - start) / FIELD_SLICES)
    body = np.count_nonzero(image_hu[start:stop:step] > BODY_HU, axis=(0, 1))
    if not body.any():
        return []
    middle = float(np.average(np.arange(len(body)), weights=body))
    off_mm = (one.x_index - middle) * grid.spacing_mm[2] * (1 if one.region.side == "left" else -1)
    width_mm = np.ptp(np.flatnonzero(body)) * grid.spacing_mm[2]
    if off_mm >= -SIDE_SHARE * width_mm:
        return []
    return [
        warning(
            "doubtful_side",
            f"{one.region.name} is alone and lies {-off_mm:.0f} mm to the other side of the body's middle",
            "look at the picture and correct data.label_values or the file where the side is wrong",
        )
    ]


def _audit_contact(labels: np.ndarray, grid: VoxelGrid, task: Task, left: RegionFacts, right: RegionFacts) -> list[Finding]:
    """Measure the face that two regions share."""
    near = left.box.expanded((1, 1, 1)).intersect(right.box.expanded((1, 1, 1))).clipped(labels.shape)
    if near.is_empty:
        return []
    inner = labels[near.slices()]
    # 1 and 4: the sum of neighbours is 5 only where both meet.
    codes = _mask(inner, left.region, task).astype(np.uint8) + 4 * _mask(inner, right.region, task).astype(np.uint8)
    area_mm2 = 0.0
    for axis in range(3):
        one, other = (codes[(slice(None),) * axis + (part,)] for part in (slice(None, -1), slice(1, None)))
        area_mm2 += np.count_nonzero(one + other == 5) * math.prod(grid.spacing_mm) / grid.spacing_mm[axis]
    if area_mm2 < TOUCHING_CM2 * 100:
        return []
    return [
        warning(
            "touching_regions",
            f"{left.region.name} and {right.region.name} touch over {area_mm2 / 100:.1f} cm²",
            "look at the picture: the border between them may be drawn by a machine",
        )
    ]


def _audit_cuts(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, task: Task, regions: Iterable[RegionFacts]
) -> list[Finding]:
    """Find the regions that reach an end of the image."""
    cut = []
    for one in regions:
        ends = []
        for axis, names in enumerate(FACES):
            for name, index, is_reached in (
                (names[0], 0, one.box.start[axis] == 0),
                (names[1], labels.shape[axis] - 1, one.box.stop[axis] == labels.shape[axis]),
            ):
                if is_reached:
                    plane = labels[(slice(None),) * axis + (index,)]
                    area_mm2 = (
                        np.count_nonzero(_mask(plane, one.region, task)) * math.prod(grid.spacing_mm) / grid.spacing_mm[axis]
                    )
                    ends.append(f"{name} end, {area_mm2 / 100:.1f} cm²")
        if image_hu is not None and _reaches_padding(image_hu, labels, grid, task, one):
            ends.append("edge of the field of view")
        if ends:
            cut.append(f"{one.region.name} ({'; '.join(ends)})")
    if not cut:
        return []
    message = f"the scan cuts {' and '.join(cut)}"
    return [warning("cut_region", message, "right where it shows a part on purpose, but volumes are those of the part")]


def _reaches_padding(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid, task: Task, one: RegionFacts) -> bool:
    """Whether a region comes near to padding within the slices; some of its slices are looked at."""
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
    """Find regions that were there and are gone after resampling.

    Args:
        volumes_ml: Volume of each label before.
        boxes: Boxes of the regions that are left.
        task: Labels and regions.
        spacing: The spacing in mm, for the sentence.
    """
    before_ml = {region.name: sum(volumes_ml[label] for label in region.labels) for region in task.regions}
    return [
        warning(
            "vanished_region",
            f"{name} has {volume_ml:.2g} ml, and nothing of it is left at {spacing} mm",
            "choose a finer spacing for that stage",
        )
        for name, volume_ml in before_ml.items()
        if volume_ml > 0 and name not in boxes
    ]
