"""Plausibility checks of a segmentation: sides, borders, position of the patient, volumes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from medseg.anatomy.mirrored.head_end import head_evidence
from medseg.anatomy.position import UPSIDE_DOWN_SIGN, apex_excess, side_pairs, turned_pairs
from medseg.anatomy.rules import AIRLESS_HU, AIRY_HU, MAX_OTHER_SIDE, MAX_VOLUME_RATIO
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.preprocess.orient import FACES
from medseg.task import Region, Task
from medseg.wording import format_ml

# Medians are computed from every third voxel along each axis, which is exact enough.
MEDIAN_STEP = 3


class FoundRegion(NamedTuple):
    """One region on the coarse grid.

    Attributes:
        region: The region.
        box: Its tight box, in voxels of the coarse grid.
        volume_ml: Its volume.
        centre_x_mm: World x of its centre of mass.
        x_range_mm: Least and largest world x of its box.
    """

    region: Region
    box: VoxelBox
    volume_ml: float
    centre_x_mm: float
    x_range_mm: tuple[float, float]


def measure_region(region: Region, mask: np.ndarray, grid: VoxelGrid) -> FoundRegion:
    """Measure a region on the coarse grid; its mask (D, H, W) must not be empty."""
    box = VoxelBox.from_mask(mask)
    assert box is not None, "the mask is not empty"
    z, y, x = np.add(box.start, ndimage.center_of_mass(mask[box.slices()]))
    # The range of world x is measured on the line through the centre along the x axis of the array:
    # in an oblique array, world x also changes along the other axes. The points are the centre, and
    # the first and the last voxel of the box on this line.
    points = np.array([[z, y, x], [z, y, box.start[2]], [z, y, box.stop[2] - 1]])
    centre_x_mm, first_x_mm, last_x_mm = grid.index_to_world_xyz_mm(points)[:, 0].tolist()
    x_range_mm = (min(first_x_mm, last_x_mm), max(first_x_mm, last_x_mm))
    volume_ml = float(mask.sum()) * voxel_ml(grid)
    return FoundRegion(region, box, volume_ml, centre_x_mm, x_range_mm)


def border_warnings(measured: FoundRegion, grid: VoxelGrid) -> list[str]:
    """Warn where a face of the scan cuts a region."""
    touched = []
    for axis, (low_face, high_face) in enumerate(FACES):
        if measured.box.start[axis] <= 0:
            touched.append(low_face)
        if measured.box.stop[axis] >= grid.shape[axis]:
            touched.append(high_face)
    if not touched:
        return []
    return [
        f"{measured.region.name} touches the {' and '.join(touched)} border of the scan: a part of "
        "it may be missing"
    ]


def pair_warnings(left: FoundRegion, right: FoundRegion) -> list[str]:
    """Warn where the two sides of an organ are exchanged, mixed up or very different in volume."""
    names = f"{left.region.name} and {right.region.name}"
    small_ml, large_ml = sorted((left.volume_ml, right.volume_ml))
    warnings = []
    # World x points to the patient's left.
    if left.centre_x_mm <= right.centre_x_mm:
        warnings.append(
            f"{names} lie on the wrong sides: the left one's centre is at x = "
            f"{left.centre_x_mm:.0f} mm, the right one's at x = {right.centre_x_mm:.0f} mm, and x "
            "points to the patient's left"
        )
    elif left.x_range_mm[0] < right.centre_x_mm or right.x_range_mm[1] > left.centre_x_mm:
        warnings.append(
            f"one of {names} extends beyond the centre of the other: the coarse stage may have "
            "mixed up the sides"
        )
    # Normal sides differ by less than this ratio. A cut or collapsed side exceeds it.
    if large_ml > MAX_VOLUME_RATIO * small_ml:
        warnings.append(
            f"{names} differ much in volume, {format_ml(left.volume_ml)} ml and "
            f"{format_ml(right.volume_ml)} ml: one of them may be incomplete"
        )
    return warnings


def side_warnings(probs: np.ndarray, labels: np.ndarray, task: Task) -> list[str]:
    """Warn of regions in which the coarse stage also finds the other side of the organ.

    The coarse stage does so where a scan ends between the sides.

    Args:
        probs: Probabilities of the background and all labels, (1 + L, D, H, W).
        labels: Cleaned label map (D, H, W).
        task: Labels and regions.
    """
    warnings = []
    for left, right in side_pairs(task):
        for region, partner in ((left, right), (right, left)):
            mask = np.isin(labels, task.region_values(region))
            box = VoxelBox.from_mask(mask)
            if box is None:
                continue
            region_total = _probability_in(mask, box, probs, task.region_values(region))
            partner_total = _probability_in(mask, box, probs, task.region_values(partner))
            total = region_total + partner_total
            if partner_total > MAX_OTHER_SIDE * total:
                warnings.append(
                    f"the side of {region.name} is doubtful: the coarse stage gives "
                    f"{partner_total / total:.1%} of it to {partner.name}, as on partial scans; "
                    "check the sides"
                )
    return warnings


def _probability_in(
    mask: np.ndarray, box: VoxelBox, probs: np.ndarray, values: Sequence[int]
) -> float:
    """Sum the probabilities (K, D, H, W) of labels over a mask (D, H, W) with its tight box."""
    part = box.slices()
    total = 0.0
    for value in values:
        # Probabilities may be float16, whose sums end at 65,504.
        total += float(np.sum(probs[value][part], where=mask[part], dtype=np.float64))
    return total


def position_warnings(
    image_hu: np.ndarray,
    labels: np.ndarray,
    boxes: Mapping[str, VoxelBox],
    grid: VoxelGrid,
    task: Task,
) -> list[str]:
    """Warn if the position of the patient seems to contradict the header.

    The patient seems to be turned about the long axis, or upside down; left and right are then
    exchanged.

    Args:
        image_hu: Image (D, H, W) in HU on the coarse grid.
        labels: Coarse label map (D, H, W).
        boxes: Region name to its tight box.
        grid: The coarse grid.
        task: Labels and regions.
    """
    warnings = [
        f"between {left.name} and {right.name} most voxels as dense as bone are at the front: if "
        "the position of the patient contradicts the header, left and right are exchanged"
        for left, right in turned_pairs(image_hu, boxes, grid, task)
    ]
    upside_down_signs = []
    # Labels of a network are judged more strictly than those that people drew: the audit of a data
    # set warns only below `UPSIDE_DOWN_EXCESS`, which is negative.
    if apex_excess(image_hu, labels, boxes, grid, task) <= 0:
        upside_down_signs.append(UPSIDE_DOWN_SIGN)
    evidence = head_evidence(image_hu, labels, grid.spacing_mm, task)
    if evidence.is_upside_down:
        upside_down_signs.append(evidence.sentence)
    if upside_down_signs:
        warnings.append(
            f"{' and '.join(upside_down_signs)}: if the position of the patient contradicts the "
            "header, left and right are exchanged"
        )
    return warnings


def volume_warnings(volumes_ml: Mapping[str, float], labels: np.ndarray, task: Task) -> list[str]:
    """Warn of labels and regions with a volume outside `task.volume_ml`.

    A part that the border of the scan cuts may be smaller.

    Args:
        volumes_ml: Volume of each label.
        labels: Final label map (D, H, W), any orientation.
        task: Labels, regions and `volume_ml`.
    """
    # A range may be given for a label or for a region.
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in task.labels}
    members.update({region.name: region.labels for region in task.regions})
    warnings = []
    for name, (low_ml, high_ml) in task.volume_ml.items():
        volume_ml = sum(volumes_ml[label] for label in members[name])
        values = [task.labels[label] for label in members[name]]
        # A missing organ has no volume to judge.
        is_small = 0 < volume_ml < low_ml and not touches_border(labels, values)
        if is_small or volume_ml > high_ml:
            warnings.append(
                f"{name} has {format_ml(volume_ml)} ml, but {low_ml:g} to {high_ml:g} ml are "
                "plausible: check the spacing of the scan and the result"
            )
    return warnings


def touches_border(labels: np.ndarray, values: Sequence[int]) -> bool:
    """Whether label values lie in a face of a map (D, H, W)."""
    for axis in range(3):
        for end in (0, -1):
            if np.isin(labels.take(end, axis), values).any():
                return True
    return False


def airless_warnings(labels: np.ndarray, image_hu: np.ndarray, task: Task) -> list[str]:
    """Warn if one side of an organ has no air while the other side is full of air.

    The airless side may be diseased throughout, or missing: fluid in the place of a lung that was
    removed looks much like a consolidated lung.

    Args:
        labels: Label map (D, H, W).
        image_hu: CT (D, H, W) in HU on the same grid.
        task: Labels and regions.
    """
    every_few = (slice(None, None, MEDIAN_STEP),) * 3
    few_labels, few_hu = labels[every_few], image_hu[every_few]
    warnings = []
    for pair in side_pairs(task):
        # The median in HU of each side that was found, and the name of the side.
        medians = []
        for region in pair:
            values_hu = few_hu[np.isin(few_labels, task.region_values(region))]
            if len(values_hu):
                medians.append((float(np.median(values_hu)), region.name))
        if len(medians) < 2:
            continue
        (airy_hu, airy_name), (dense_hu, dense_name) = sorted(medians)
        if airy_hu <= AIRY_HU and dense_hu > AIRLESS_HU:
            warnings.append(
                f"{dense_name} has no air (median {dense_hu:.0f} HU), {airy_name} is full of it "
                f"({airy_hu:.0f} HU): an organ that is ill throughout, or what lies in the place "
                "of one that is missing; look at the result"
            )
    return warnings
