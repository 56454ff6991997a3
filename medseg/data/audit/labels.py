"""Audit of a label map: its grid and values, and the plausibility of its regions.

The side of a region is judged by world coordinates, not by names or the order of storage: x
increases towards the patient's left.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from medseg.anatomy.position import UPSIDE_DOWN_SIGN, apex_excess, turned_pairs
from medseg.anatomy.rules import (
    EXTENT_MM,
    FAR_FACTOR,
    MAX_REGION_MM,
    SIDE_SHARE,
    TINY_FACTOR,
    TOUCHING_CM2,
    UPSIDE_DOWN_EXCESS,
)
from medseg.data.audit.finding import find
from medseg.findings import Finding
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess.orient import FACES
from medseg.task import IGNORE, Region, Task, is_side_pair

ABSENT = "absent"
"""Trust in a reference that is empty because the region is absent."""

GRID_TOLERANCE_MM = 0.1
"""Image and label map are on one grid if their corners agree within this: rounded decimals and float32 directions differ
by less, and it is a small part of any voxel."""

MAX_LISTED = 10

BODY_HU = -500
# A region is cut by the round field of view if this area of its surface is within this distance of
# the padding, in plane.
FIELD_HU = -1500
FIELD_MM = 5.0
FIELD_CM2 = 1.0
FIELD_SLICES = 32


def audit_grids(
    image_grid: VoxelGrid, label_grid: VoxelGrid, stored_shapes: tuple[Sequence[int], Sequence[int]]
) -> list[Finding]:
    """Compare the grid of a label map with that of its image.

    Args:
        image_grid: Grid of the oriented image.
        label_grid: Grid of the oriented label map.
        stored_shapes: Shapes of image and label map in storage order.

    Returns:
        Nothing where the corners agree within `GRID_TOLERANCE_MM`.
    """
    if label_grid.is_close(image_grid, GRID_TOLERANCE_MM):
        return []
    difference = _difference(image_grid, label_grid)
    if tuple(stored_shapes[0]) == tuple(stored_shapes[1]):
        return [find("label_grid", difference=difference, tolerance_mm=GRID_TOLERANCE_MM)]
    if label_grid.shape == image_grid.shape:
        return [find("label_shape:axes", difference=difference)]
    return [find("label_shape", shape=times(label_grid.shape), image_shape=times(image_grid.shape))]


def audit_extent(grid: VoxelGrid) -> list[Finding]:
    """Check that a scan is as large as a patient or a part of one."""
    extents_mm = _extents_mm(grid.shape, grid)
    least_mm, most_mm = EXTENT_MM
    if least_mm <= max(extents_mm) <= most_mm:
        return []
    return [
        find("implausible_size:scan", extent=times(extents_mm), least_mm=least_mm, most_mm=most_mm)
    ]


def _extents_mm(shape: Sequence[int], grid: VoxelGrid) -> list[float]:
    return [size * step_mm for size, step_mm in zip(shape, grid.spacing_mm, strict=True)]


def _difference(image_grid: VoxelGrid, label_grid: VoxelGrid) -> str:
    """Describe the differences of two grids: shape, spacing, rotation, place."""
    is_same_shape = label_grid.shape == image_grid.shape
    cosines = np.einsum("ij,ij->j", np.array(label_grid.direction), np.array(image_grid.direction))
    angle_deg = float(np.degrees(np.arccos(np.clip(cosines.min(), -1, 1))))
    off_mm = np.abs(label_grid.corners_xyz_mm() - image_grid.corners_xyz_mm()).max()
    parts = {
        f"it has {times(label_grid.shape)} voxels in LPS order, the image {times(image_grid.shape)}": not is_same_shape,
        f"its spacing is {times(label_grid.spacing_mm)} mm, the image's {times(image_grid.spacing_mm)} mm": not np.allclose(
            label_grid.spacing_mm, image_grid.spacing_mm, rtol=1e-3
        ),
        f"its axes are turned by {angle_deg:.1f} degrees": angle_deg > 0.1,
        f"its corners lie up to {off_mm:.2f} mm off": is_same_shape,
    }
    return ", ".join(text for text, holds in parts.items() if holds)


def times(values: Sequence[float]) -> str:
    """Format one number per axis."""
    return "×".join(f"{value:.4g}" for value in values)


def map_values(
    labels: np.ndarray, task: Task, label_values: Mapping[int, str], *, may_be_empty: bool = False
) -> tuple[np.ndarray, list[Finding]]:
    """Translate the values of a file to the values of the task.

    Args:
        labels: Label map (D, H, W), integers.
        task: Gives each label name its value.
        label_values: Value in the file to label name; 0 is background, and so is a name that the
            task does not know.
        may_be_empty: Whether a label map of zeros is accepted.

    Returns:
        Label map uint8 with unknown values as background (the input itself if nothing changes), and
        the findings.
    """
    present = sorted(set().union(*map(_values_of, labels)) - {0})
    found = []
    if not may_be_empty and all(label_values.get(value) == IGNORE for value in present):
        found.append(find("empty_labels", regions=", ".join(task.parts)))
    if unknown := [value for value in present if value not in label_values]:
        found.append(
            find(
                "unknown_values" if len(unknown) <= MAX_LISTED else "unknown_values:many",
                s="s" * (len(unknown) > 1),
                few=", ".join(map(str, unknown[:MAX_LISTED])),
                all=",".join(map(str, unknown)),
                known=", ".join(map(str, sorted(label_values))),
            )
        )
    new_values = {value: task.values.get(label_values.get(value, ""), 0) for value in present}
    if labels.dtype == np.uint8 and all(old == new for old, new in new_values.items()):
        return labels, found
    mapped = np.zeros(labels.shape, dtype=np.uint8)
    for old, new in new_values.items():
        mapped[labels == old] = new
    return mapped, found


def _values_of(plane: np.ndarray) -> list[int]:
    """List the values of a plane; counting bytes is faster than `unique`, which sorts."""
    return (
        np.flatnonzero(np.bincount(plane.ravel())) if plane.dtype == np.uint8 else np.unique(plane)
    ).tolist()


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
    return {
        name: float(counts[value]) * (math.prod(grid.spacing_mm) / 1000.0)
        for name, value in task.labels.items()
    }


def measure_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, RegionFacts]:
    """Locate the regions that have voxels; only the box around all labels is read more than once."""
    around = VoxelBox.from_mask(labels != 0)
    if around is None:
        return {}
    inner = labels[around.slices()]
    found = {}
    for region in task.regions:
        mask = _mask(inner, region, task)
        if (box := VoxelBox.from_mask(mask)) is not None:
            sums = [mask[box.slices()].sum(axis=tuple({0, 1, 2} - {axis})) for axis in range(3)]
            box = box.shifted(around.start)
            centre = [
                start + float(np.average(np.arange(len(one)), weights=one))
                for start, one in zip(box.start, sums, strict=True)
            ]
            found[region.name] = RegionFacts(
                region, box, centre[2], float(grid.index_to_world_xyz_mm(centre)[0])
            )
    return found


def _mask(labels: np.ndarray, region: Region, task: Task) -> np.ndarray:
    """Mask the voxels of a region; `isin` is slower for few values."""
    return reduce(np.logical_or, (labels == value for value in task.region_values(region)))


def audit_labels(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    trust: Mapping[str, str],
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
    missing = [
        one.name
        for one in task.regions
        if one.name not in regions and trust.get(one.name) != ABSENT
    ]
    found = [find("missing_region", region=name) for name in missing]
    position, sign = (
        ("", "") if image_hu is None else _position(image_hu, labels, grid, task, regions)
    )
    is_swapped = False
    lefts, rights = (
        [one for one in regions.values() if one.region.side == side] for side in ("left", "right")
    )
    for left, right in itertools.product(lefts, rights):
        names = {"left": left.region.name, "right": right.region.name}
        if left.centre_x_mm <= right.centre_x_mm:
            is_swapped = True
            sides_mm = {"left_mm": left.centre_x_mm, "right_mm": right.centre_x_mm}
            kind = "swapped_sides:position" if position else "swapped_sides"
            found.append(find(kind, **names, **sides_mm, position=position))
        if is_side_pair(left.region, right.region):
            contact_mm2 = _contact_mm2(labels, grid, task, left, right)
            if contact_mm2 >= TOUCHING_CM2 * 100:
                found.append(find("touching_regions", **names, area=contact_mm2 / 100))
    for one in [] if lefts and rights else [*lefts, *rights]:
        off_mm, width_mm = (0.0, 0.0) if image_hu is None else _off_side_mm(image_hu, grid, one)
        if off_mm > SIDE_SHARE * width_mm:
            found.append(find("doubtful_side", region=one.region.name, off_mm=off_mm))
    cuts = {
        one.region.name: _cut_ends(image_hu, labels, grid, task, one) for one in regions.values()
    }
    if position and not is_swapped:
        found.append(find("body_position", position=position, sign=sign))
    for facts in regions.values():
        extents_mm = _extents_mm(facts.box.shape, grid)
        if facts.region.side is not None and max(extents_mm) > MAX_REGION_MM:
            found.append(
                find(
                    "implausible_size:region",
                    name=facts.region.name,
                    extent=times(extents_mm),
                    most_mm=MAX_REGION_MM,
                )
            )
    found += _audit_volumes(labels, grid, task, {name for name, ends in cuts.items() if ends})
    if any(cuts.values()):
        found.append(
            find(
                "cut_region",
                regions=" and ".join(
                    f"{name} ({'; '.join(ends)})" for name, ends in cuts.items() if ends
                ),
            )
        )
    return found


def _position(
    image_hu: np.ndarray,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    regions: Mapping[str, RegionFacts],
) -> tuple[str, str]:
    """Describe a position of the body that contradicts the header, and its sign in the image; two empty texts where there is none."""
    boxes = {name: one.box for name, one in regions.items()}
    if turned_pairs(image_hu, boxes, grid, task):
        return "turned by 180 degrees about its long axis", "the spine lies at the front"
    if apex_excess(image_hu, labels, boxes, grid, task) < UPSIDE_DOWN_EXCESS:
        return "upside down", UPSIDE_DOWN_SIGN
    return "", ""


def _audit_volumes(
    labels: np.ndarray, grid: VoxelGrid, task: Task, cut: Collection[str]
) -> list[Finding]:
    """Compare volumes with the plausible ones of the task; a region that is cut, or absent, may be smaller."""
    volumes_ml = measure_volumes(labels, grid, task)
    volumes_ml |= {
        region.name: sum(volumes_ml[name] for name in region.labels) for region in task.regions
    }
    regions_of = {label: region.name for region in task.regions for label in region.labels}
    found = []
    for name, (low, high) in task.volume_ml.items():
        volume_ml = volumes_ml[name]
        is_small = 0 < volume_ml < low and regions_of.get(name, name) not in cut
        if is_small or volume_ml > high:
            kind = "implausible_volume"
            if volume_ml > high * FAR_FACTOR:
                kind = "implausible_volume:far"
            elif volume_ml < low / TINY_FACTOR:
                kind = "implausible_volume:tiny"
            found.append(find(kind, name=name, volume_ml=volume_ml, low=low, high=high))
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


def _face_mm2(grid: VoxelGrid, axis: int) -> float:
    """Area of the face of a voxel across an axis."""
    return math.prod(grid.spacing_mm) / grid.spacing_mm[axis]


def _contact_mm2(
    labels: np.ndarray, grid: VoxelGrid, task: Task, left: RegionFacts, right: RegionFacts
) -> float:
    """Measure the face that two regions share."""
    near = (
        left.box.expanded((1, 1, 1)).intersect(right.box.expanded((1, 1, 1))).clipped(labels.shape)
    )
    inner = labels[near.slices()]
    # With the codes 1 and 4, the sum of two neighbours is 5 only where both regions meet.
    codes = _mask(inner, left.region, task).astype(np.uint8) + 4 * _mask(
        inner, right.region, task
    ).astype(np.uint8)
    return sum(
        np.count_nonzero(one[1:] + one[:-1] == 5) * _face_mm2(grid, axis)
        for axis, one in enumerate([np.moveaxis(codes, axis, 0) for axis in range(3)])
    )


def _cut_ends(
    image_hu: np.ndarray | None, labels: np.ndarray, grid: VoxelGrid, task: Task, one: RegionFacts
) -> list[str]:
    """List the ends of the image that a region reaches, with the area of the cut."""
    ends = []
    for axis, names in enumerate(FACES):
        last = labels.shape[axis] - 1
        for name, index, reached in zip(
            names, (0, last), (one.box.start[axis], one.box.stop[axis] - 1), strict=True
        ):
            if reached == index:
                num_voxels = np.count_nonzero(_mask(labels.take(index, axis), one.region, task))
                ends.append(f"{name} end, {num_voxels * _face_mm2(grid, axis) / 100:.1f} cm²")
    if image_hu is not None and _reaches_padding(image_hu, labels, grid, task, one):
        ends.append("edge of the field of view")
    return ends


def _reaches_padding(
    image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid, task: Task, one: RegionFacts
) -> bool:
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
        inside, outside, voxels = (
            np.moveaxis(mask, axis, 0),
            np.moveaxis(is_padding, axis, 0),
            reach[axis],
        )
        hits = np.count_nonzero(inside[:-voxels] & outside[voxels:]) + np.count_nonzero(
            inside[voxels:] & outside[:-voxels]
        )
        # Each line of voxels that ends at the padding is hit up to `reach` times.
        area_mm2 += hits / voxels * step * _face_mm2(grid, axis)
    return area_mm2 >= FIELD_CM2 * 100


def audit_vanished(
    volumes_ml: Mapping[str, float], boxes: Mapping[str, VoxelBox], task: Task, spacing: str
) -> list[Finding]:
    """Find regions that resampling has removed.

    Args:
        volumes_ml: Volume of each label before.
        boxes: Boxes of the regions that are left.
        task: Labels and regions.
        spacing: The spacing in mm, for the sentence.
    """
    before_ml = {
        region.name: sum(volumes_ml[label] for label in region.labels) for region in task.regions
    }
    return [
        find("vanished_region", region=name, volume_ml=volume_ml, spacing=spacing)
        for name, volume_ml in before_ml.items()
        if volume_ml > 0 and name not in boxes
    ]
