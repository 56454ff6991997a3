"""Audit of a label map: its grid and values, and the plausibility of its regions.

The side of a region is judged by world coordinates, not by names or the order of storage: x
increases towards the patient's left.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from medseg.anatomy.position import UPSIDE_DOWN_SIGN, apex_excess, side_pairs, turned_pairs
from medseg.anatomy.rules import (
    EXTENT_MM,
    FAR_FACTOR,
    MAX_REGION_MM,
    SIDE_SHARE,
    TINY_FACTOR,
    TOUCHING_CM2,
    UPSIDE_DOWN_EXCESS,
)
from medseg.data.audit.finding import make_finding
from medseg.data.options import BACKGROUND
from medseg.findings import Finding
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.preprocess.orient import FACES
from medseg.task import IGNORE, Region, Task, is_side_pair, sides_in_names
from medseg.wording import first_few

ABSENT = "absent"
"""Value of the column `trust_<region>` where the patient does not have the region."""

GRID_TOLERANCE_MM = 0.1
"""Image and label map are on one grid if their corners agree within this.

Rounded decimals and float32 directions differ by less, and it is a small part of any voxel.
"""

MAX_LISTED = 10  # most unknown values that a message lists

BODY_HU = -500  # the body is denser than this; air and air-filled organs are not
# Values below FIELD_HU are padding outside the round field of view. The field cuts a region if
# FIELD_CM2 of the region's surface lie within FIELD_MM of padding, in plane.
FIELD_HU = -1500
FIELD_MM = 5.0
FIELD_CM2 = 1.0
MAX_SLICES = 32  # slices of a region that are examined for padding, or for the body's midline


def audit_grids(
    image_grid: VoxelGrid, label_grid: VoxelGrid, stored_shapes: tuple[Sequence[int], Sequence[int]]
) -> list[Finding]:
    """Compare the grid of a label map with that of its image.

    Args:
        image_grid: Grid of the oriented image.
        label_grid: Grid of the oriented label map.
        stored_shapes: Shapes of image and label map in storage order.

    Returns:
        One finding; none where the corners agree within `GRID_TOLERANCE_MM`.
    """
    if label_grid.is_close(image_grid, GRID_TOLERANCE_MM):
        return []
    difference = _difference(image_grid, label_grid)
    stored_image_shape, stored_label_shape = stored_shapes
    # Equal shapes in the files: perhaps only the header is wrong, and the user may ignore the
    # finding.
    if tuple(stored_image_shape) == tuple(stored_label_shape):
        return [make_finding("label_grid", difference=difference, tolerance_mm=GRID_TOLERANCE_MM)]
    if label_grid.shape == image_grid.shape:
        return [make_finding("label_shape:axes", difference=difference)]
    return [
        make_finding(
            "label_shape",
            shape=per_axis_text(label_grid.shape),
            image_shape=per_axis_text(image_grid.shape),
        )
    ]


def audit_extent(grid: VoxelGrid) -> list[Finding]:
    """Check that a scan is as large as a patient or a part of one."""
    extents_mm = _extents_mm(grid.shape, grid)
    least_mm, most_mm = EXTENT_MM
    if least_mm <= max(extents_mm) <= most_mm:
        return []
    return [
        make_finding(
            "implausible_size:scan",
            extent=per_axis_text(extents_mm),
            least_mm=least_mm,
            most_mm=most_mm,
        )
    ]


def _extents_mm(shape: Sequence[int], grid: VoxelGrid) -> list[float]:
    """Compute the length in mm of a box of this shape (D, H, W) along each axis."""
    return [size * step_mm for size, step_mm in zip(shape, grid.spacing_mm, strict=True)]


def _difference(image_grid: VoxelGrid, label_grid: VoxelGrid) -> str:
    """Describe the differences of two grids: shape, spacing, rotation, place.

    Spacings that differ by 0.1 % and axes that differ by 0.1 degrees count as equal.
    """
    clauses = []
    is_same_shape = label_grid.shape == image_grid.shape
    if not is_same_shape:
        shape = per_axis_text(label_grid.shape)
        image_shape = per_axis_text(image_grid.shape)
        clauses.append(f"it has {shape} voxels in LPS order, the image {image_shape}")
    if not np.allclose(label_grid.spacing_mm, image_grid.spacing_mm, rtol=1e-3):
        spacing = per_axis_text(label_grid.spacing_mm)
        image_spacing = per_axis_text(image_grid.spacing_mm)
        clauses.append(f"its spacing is {spacing} mm, the image's {image_spacing} mm")
    # The columns of a direction are the unit vectors of the axes. The dot product of a column in
    # both grids is the cosine of the angle between the two axes; the largest angle counts.
    cosines = (np.array(label_grid.direction) * np.array(image_grid.direction)).sum(axis=0)
    angle_deg = float(np.degrees(np.arccos(np.clip(cosines.min(), -1, 1))))
    if angle_deg > 0.1:
        clauses.append(f"its axes are turned by {angle_deg:.1f} degrees")
    if is_same_shape:
        offsets_mm = np.abs(label_grid.corners_xyz_mm() - image_grid.corners_xyz_mm())
        clauses.append(f"its corners lie up to {offsets_mm.max():.2f} mm off")
    return ", ".join(clauses)


def per_axis_text(values: Sequence[float]) -> str:
    """Format one number per axis, such as `512×512×60`."""
    return "×".join(f"{value:.4g}" for value in values)


def map_values(
    labels: np.ndarray, task: Task, label_values: Mapping[int, str], *, may_be_empty: bool = False
) -> tuple[np.ndarray, list[Finding]]:
    """Translate the values of a file to the values of the task.

    Args:
        labels: Label map (D, H, W), integers.
        task: Has the value of each label name.
        label_values: Value in the file to label name. The value 0 is always background; labels that
            the task does not know become background.
        may_be_empty: Whether to accept a label map that holds only 0 and the ignore label.

    Returns:
        Label map in the task's values, uint8, with unknown values as background (the input itself
        if nothing changes); and the findings.
    """
    # Plane by plane: finding the values of all planes at once would sort a copy of the label map.
    values: set[int] = set()
    for plane in labels:
        values.update(_values_of(plane))
    present = sorted(values - {0})
    findings = []
    # `all` is true for a label map of zeros, too, which has no value in `present`.
    is_empty = all(label_values.get(value) == IGNORE for value in present)
    if is_empty and not may_be_empty:
        findings.append(make_finding("empty_labels", regions=", ".join(task.parts)))
    unknown = [value for value in present if value not in label_values]
    if unknown:
        kind = "unknown_values" if len(unknown) <= MAX_LISTED else "unknown_values:many"
        plural = "s" if len(unknown) > 1 else ""
        background = [value for value, name in label_values.items() if name == BACKGROUND]
        finding = make_finding(
            kind,
            s=plural,
            few=", ".join(map(str, unknown[:MAX_LISTED])),
            all=",".join(map(str, [*background, *unknown])),
            sign="" if background else "+",
            known=", ".join(map(str, sorted(label_values))) or "no value",
        )
        findings.append(finding)
    new_values = {}
    for value in present:
        name = label_values.get(value, "")
        new_values[value] = task.values.get(name, 0)
    if labels.dtype == np.uint8 and all(old == new for old, new in new_values.items()):
        return labels, findings
    mapped = np.zeros(labels.shape, dtype=np.uint8)
    for old, new in new_values.items():
        mapped[labels == old] = new
    return mapped, findings


def _values_of(plane: np.ndarray) -> list[int]:
    """List the distinct values of a plane."""
    # Counting bytes is faster than `unique`, which sorts.
    if plane.dtype == np.uint8:
        return np.flatnonzero(np.bincount(plane.ravel())).tolist()
    return np.unique(plane).tolist()


class RegionFacts(NamedTuple):
    """Location of a region that has voxels.

    Attributes:
        region: The region.
        box: Its tight box in voxels of the label map.
        x_index: Index along x of its centre of mass, in voxels.
        centre_x_mm: World x of its centre of mass, towards the patient's left.
    """

    region: Region
    box: VoxelBox
    x_index: float
    centre_x_mm: float


def measure_volumes(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, float]:
    """Measure the volume of each label of the task in ml; labels (D, H, W), uint8."""
    # Plane by plane: `bincount` converts its input to int64, eight times the size of the label map.
    counts = np.zeros(256, dtype=np.int64)
    for plane in labels:
        counts += np.bincount(plane.ravel(), minlength=256)
    ml_per_voxel = voxel_ml(grid)
    return {name: float(counts[value]) * ml_per_voxel for name, value in task.labels.items()}


def measure_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, RegionFacts]:
    """Locate the regions that have voxels: region name to its location."""
    if not task.regions:
        return {}
    # To save time, only the box around all labels is searched for each region.
    labels_box = VoxelBox.from_mask(labels != 0)
    if labels_box is None:
        return {}
    cropped_labels = labels[labels_box.slices()]
    regions = {}
    for region in task.regions:
        mask = _mask(cropped_labels, region, task)
        box_in_crop = VoxelBox.from_mask(mask)
        if box_in_crop is None:
            continue
        tight_mask = mask[box_in_crop.slices()]
        box = box_in_crop.shifted(labels_box.start)
        regions[region.name] = _locate(region, tight_mask, box, grid)
    return regions


def _locate(region: Region, tight_mask: np.ndarray, box: VoxelBox, grid: VoxelGrid) -> RegionFacts:
    """Locate a region by its mask within its tight box."""
    centre = []  # index (z, y, x)
    # The centre of mass needs only the number of voxels at each index of an axis; the indices of
    # all voxels would take far more memory.
    for axis, other_axes in enumerate(((1, 2), (0, 2), (0, 1))):
        counts = tight_mask.sum(axis=other_axes)
        offset = float(np.average(np.arange(len(counts)), weights=counts))
        centre.append(box.start[axis] + offset)
    _, _, x_index = centre
    centre_x_mm, _, _ = grid.index_to_world_xyz_mm(centre)
    return RegionFacts(region, box, x_index, float(centre_x_mm))


def _mask(labels: np.ndarray, region: Region, task: Task) -> np.ndarray:
    """Mask the voxels of a region."""
    # `isin` is slower for few values.
    mask = np.zeros(labels.shape, dtype=bool)
    for value in task.region_values(region):
        mask |= labels == value
    return mask


def audit_labels(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    trust: Mapping[str, str],
    volumes_ml: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Check the regions of a case for plausibility.

    Args:
        image_hu: Oriented image, (D, H, W), with its padding; None if the values are not HU.
        labels: Label map in the task's values on the same grid, uint8.
        grid: Grid of both.
        task: Labels and regions.
        trust: Region name to trust; a region that is `absent` may be empty.
        volumes_ml: Volume of each label; None measures them.
    """
    if volumes_ml is None:
        volumes_ml = measure_volumes(labels, grid, task)
    regions = measure_regions(labels, grid, task)
    parts = _missing_parts(task, regions, volumes_ml)
    findings = _audit_missing([name for name in parts if trust.get(name) != ABSENT])
    findings += _audit_position(image_hu, labels, grid, task, regions)
    if not task.regions:
        findings += _audit_paired_labels(labels, grid, task)
    for facts in regions.values():
        extents_mm = _extents_mm(facts.box.shape, grid)
        # A region without a side, such as the body, may be as long as the scan.
        if facts.region.side is not None and max(extents_mm) > MAX_REGION_MM:
            finding = make_finding(
                "implausible_size:region",
                name=facts.region.name,
                extent=per_axis_text(extents_mm),
                most_mm=MAX_REGION_MM,
            )
            findings.append(finding)
    cut_ends = _find_cuts(image_hu, labels, grid, task, regions)
    # Labels without a region have no finding of their own, but a cut label may be small, too.
    single_labels = measure_regions(labels, grid, _with_single_labels(task))
    cut_labels = _find_cuts(image_hu, labels, grid, task, single_labels)
    findings += _audit_volumes(volumes_ml, task, [*cut_ends, *cut_labels])
    if cut_ends:
        descriptions = [f"{name} ({'; '.join(ends)})" for name, ends in cut_ends.items()]
        findings.append(make_finding("cut_region", regions=" and ".join(descriptions)))
    return findings


def _with_single_labels(task: Task) -> Task:
    """Make a region of each label that belongs to no region and has a plausible volume.

    These are labels of a task without regions, and helper labels.
    """
    in_regions = {label for region in task.regions for label in region.labels}
    regions = []
    for name in task.labels:
        if name in task.volume_ml and name not in in_regions:
            regions.append(Region(name, (name,), None))
    return replace(task, regions=tuple(regions))


def _find_cuts(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    regions: Mapping[str, RegionFacts],
) -> dict[str, list[str]]:
    """Find the regions that the scan cuts: region name to its cuts, see `_cut_ends`."""
    cuts = {}
    for name, facts in regions.items():
        ends = _cut_ends(image_hu, labels, grid, task, facts)
        if ends:
            cuts[name] = ends
    return cuts


def _audit_missing(names: Sequence[str]) -> list[Finding]:
    """Report the regions, or labels, without voxels in one sentence."""
    if not names:
        return []
    kind = "missing_region" if len(names) == 1 else "missing_region:many"
    return [make_finding(kind, region=first_few(names))]


def _missing_parts(
    task: Task, regions: Mapping[str, RegionFacts], volumes_ml: Mapping[str, float]
) -> list[str]:
    """List the regions without voxels; in a task without regions, the labels if all lack voxels.

    A single label, such as a lesion, often has none. But where all lack voxels, the values of the
    file may have other meanings than in `data.label_values`.
    """
    if task.regions:
        return [region.name for region in task.regions if region.name not in regions]
    if any(volumes_ml.values()):
        return []
    return list(task.labels)


def _audit_position(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    regions: Mapping[str, RegionFacts],
) -> list[Finding]:
    """Check the sides, the position of the body, and whether the image is mirrored.

    Args:
        image_hu: Oriented image with its padding, (D, H, W); None if its values are not HU.
        labels: Label map on the same grid.
        grid: Grid of both.
        task: Labels and regions.
        regions: The regions that have voxels.
    """
    if image_hu is None:
        return _audit_sides(None, labels, grid, task, regions, position="")
    position, sign = _contrary_position(image_hu, labels, grid, task, regions)
    findings = _audit_sides(image_hu, labels, grid, task, regions, position=position)
    # A body whose position contradicts the header also looks mirrored: one finding is enough.
    if not position:
        return findings + _audit_mirrored(image_hu, labels, grid, task)
    # A finding of swapped sides names the position already.
    if not any(finding.code == "swapped_sides" for finding in findings):
        findings.append(make_finding("body_position", position=position, sign=sign))
    return findings


def _audit_sides(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    regions: Mapping[str, RegionFacts],
    *,
    position: str,
) -> list[Finding]:
    """Check that left regions lie further left in the patient than right regions.

    A region is compared with its partner, the same organ of the other side; without a partner,
    with all regions of the other side, or if there are none, with the midline of the body.

    Args:
        image_hu: Oriented image with its padding, (D, H, W); None if its values are not HU.
        labels: Label map on the same grid.
        grid: Grid of both.
        task: Labels and regions.
        regions: The regions that have voxels.
        position: Position of the body that contradicts the header, or "".
    """
    findings = []
    lefts = [facts for facts in regions.values() if facts.region.side == "left"]
    rights = [facts for facts in regions.values() if facts.region.side == "right"]
    pairs = []
    for left, right in itertools.product(lefts, rights):
        if is_side_pair(left.region, right.region):
            pairs.append((left, right))
    paired_names = {facts.region.name for facts in itertools.chain.from_iterable(pairs)}
    for left, right in itertools.product(lefts, rights):
        # The left atrium may lie to the right of the right ventricle: two regions that both have a
        # partner are compared only if they are the partners.
        have_partners = paired_names.issuperset((left.region.name, right.region.name))
        if not have_partners or is_side_pair(left.region, right.region):
            findings += _compare_sides(left, right, position)
    for left, right in pairs:
        findings += _audit_contact(labels, grid, task, left, right)
    # With regions on both sides, the sides were compared above.
    if image_hu is None or (lefts and rights):
        return findings
    for facts in (*lefts, *rights):
        off_mm, width_mm = _off_side_mm(image_hu, grid, facts)
        if off_mm > SIDE_SHARE * width_mm:
            findings.append(make_finding("doubtful_side", region=facts.region.name, off_mm=off_mm))
    return findings


def _audit_contact(
    labels: np.ndarray, grid: VoxelGrid, task: Task, left: RegionFacts, right: RegionFacts
) -> list[Finding]:
    """Report a left and a right region of one organ that touch over a large area."""
    contact_mm2 = _contact_mm2(labels, grid, task, left, right)
    if contact_mm2 < TOUCHING_CM2 * 100:
        return []
    names = {"left": left.region.name, "right": right.region.name}
    return [make_finding("touching_regions", **names, area=contact_mm2 / 100)]


def _compare_sides(left: RegionFacts, right: RegionFacts, position: str) -> list[Finding]:
    """Check that a left region lies further left in the patient than a right one.

    Args:
        left: A region with the side `left`.
        right: A region with the side `right`.
        position: Position of the body that contradicts the header, or "".
    """
    # World x increases towards the patient's left.
    if left.centre_x_mm > right.centre_x_mm:
        return []
    kind = "swapped_sides:position" if position else "swapped_sides"
    return [
        make_finding(
            kind,
            left=left.region.name,
            right=right.region.name,
            left_mm=left.centre_x_mm,
            right_mm=right.centre_x_mm,
            position=position,
        )
    ]


def _audit_paired_labels(labels: np.ndarray, grid: VoxelGrid, task: Task) -> list[Finding]:
    """Check the sides of the labels of a task without regions, which say their side in the name.

    Only the two labels of an organ are compared.
    """
    sided_labels = []
    for name, sides in sides_in_names(task.labels).items():
        if len(sides) == 1:
            (side,) = sides
            sided_labels.append(Region(name, (name,), side))
    pairs = side_pairs(replace(task, regions=tuple(sided_labels)))
    if not pairs:
        return []
    # Loads scipy, which a training from the cache does not need.
    from scipy.ndimage import find_objects

    # The box of each value from 1, None where it has no voxel. Such a task may have a hundred
    # labels: one pass finds the boxes of all, and each label is then searched in its box alone.
    boxes = find_objects(labels, max_label=max(task.labels.values()))
    facts = {}
    for region in itertools.chain.from_iterable(pairs):
        slices = boxes[task.labels[region.name] - 1]
        if slices is None:
            continue
        box = VoxelBox.of([part.start for part in slices], [part.stop for part in slices])
        facts[region.name] = _locate(region, _mask(labels[slices], region, task), box, grid)
    findings = []
    for left, right in pairs:
        if left.name in facts and right.name in facts:
            findings += _compare_sides(facts[left.name], facts[right.name], position="")
    return findings


def _contrary_position(
    image_hu: np.ndarray,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    regions: Mapping[str, RegionFacts],
) -> tuple[str, str]:
    """Describe a position of the body that contradicts the header, and its sign in the image.

    Both texts are empty where the body lies as the header says.
    """
    boxes = {name: facts.box for name, facts in regions.items()}
    if turned_pairs(image_hu, boxes, grid, task):
        return "turned by 180 degrees about its long axis", "the spine lies at the front"
    # The excess is negative where organs full of air look upside down.
    if apex_excess(image_hu, labels, boxes, grid, task) < UPSIDE_DOWN_EXCESS:
        return "upside down", UPSIDE_DOWN_SIGN
    # Loads scipy, which a training from the cache does not need.
    from medseg.anatomy.mirrored.head_end import head_evidence

    evidence = head_evidence(image_hu, labels, grid.spacing_mm, task)
    if evidence.is_upside_down:
        return "upside down", evidence.sentence
    return "", ""


def _audit_mirrored(
    image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid, task: Task
) -> list[Finding]:
    """Find an image whose array was flipped while its header was not changed."""
    # Loads scipy, which a training from the cache does not need.
    from medseg.anatomy.mirrored.cues import mirror_evidence

    evidence = mirror_evidence(image_hu, labels, grid.spacing_mm, task)
    if not evidence.is_mirrored:
        return []
    kind = "mirrored_image" if evidence.is_confirmed else "mirrored_image:doubtful"
    return [make_finding(kind, sign=evidence.sentence)]


def _audit_volumes(
    label_volumes_ml: Mapping[str, float], task: Task, cut_parts: Collection[str]
) -> list[Finding]:
    """Compare volumes with the plausible ranges of the task.

    A region or label that the scan cuts may be smaller. An absent one is not judged.

    Args:
        label_volumes_ml: Volume of each label.
        task: Labels, regions and ranges.
        cut_parts: Names of the regions, and of the labels without a region, that the scan cuts.
    """
    volumes_ml = {**label_volumes_ml, **_region_volumes(label_volumes_ml, task)}
    # The labels of a cut region may also be smaller.
    cut_names = set(cut_parts)
    for region in task.regions:
        if region.name in cut_parts:
            cut_names.update(region.labels)
    findings = []
    for name, (low, high) in task.volume_ml.items():
        volume_ml = volumes_ml[name]
        is_too_small = 0 < volume_ml < low and name not in cut_names
        is_too_large = volume_ml > high
        if not (is_too_small or is_too_large):
            continue
        kind = "implausible_volume"
        if volume_ml > high * FAR_FACTOR:
            kind = "implausible_volume:far"
        elif volume_ml < low / TINY_FACTOR:
            kind = "implausible_volume:tiny"
        findings.append(make_finding(kind, name=name, volume_ml=volume_ml, low=low, high=high))
    return findings


def _region_volumes(volumes_ml: Mapping[str, float], task: Task) -> dict[str, float]:
    """Add up the volumes of the labels of each region, in ml."""
    region_volumes_ml = {}
    for region in task.regions:
        region_volumes_ml[region.name] = sum(volumes_ml[label] for label in region.labels)
    return region_volumes_ml


def _off_side_mm(image_hu: np.ndarray, grid: VoxelGrid, facts: RegionFacts) -> tuple[float, float]:
    """Measure how far a region lies on the wrong side of the body's midline.

    The midline is the mean position of the body along x, in a sample of the region's slices.

    Returns:
        The distance of the region's centre in mm, negative where the region lies on its own side;
        and the width of the body in mm. Both are 0 where there is no body.
    """
    start = facts.box.start[0]
    stop = facts.box.stop[0]
    step = math.ceil((stop - start) / MAX_SLICES)
    # Body voxels at each index along x, (W,).
    body_counts = np.count_nonzero(image_hu[start:stop:step] > BODY_HU, axis=(0, 1))
    if not body_counts.any():
        return 0.0, 0.0
    middle = float(np.average(np.arange(len(body_counts)), weights=body_counts))
    off_mm = (facts.x_index - middle) * grid.spacing_mm[2]
    width_mm = float(np.ptp(np.flatnonzero(body_counts)) * grid.spacing_mm[2])
    # The index along x increases towards the patient's left.
    if facts.region.side == "left":
        off_mm = -off_mm
    return off_mm, width_mm


def _face_mm2(grid: VoxelGrid, axis: int) -> float:
    """Compute the area of the face of a voxel that is perpendicular to an axis."""
    return math.prod(grid.spacing_mm) / grid.spacing_mm[axis]


def _contact_mm2(
    labels: np.ndarray, grid: VoxelGrid, task: Task, left: RegionFacts, right: RegionFacts
) -> float:
    """Measure the area over which the voxels of two regions are neighbours."""
    # Two neighbouring voxels of the regions lie in both boxes after each box is enlarged by one
    # voxel: only the intersection of the enlarged boxes is searched.
    left_box = left.box.expanded((1, 1, 1))
    shared_box = left_box.intersect(right.box.expanded((1, 1, 1)))
    cropped_labels = labels[shared_box.clipped(labels.shape).slices()]
    # The left region gets the code 1, the right region 4, everything else 0: two neighbours have
    # the sum 5 only where the regions meet.
    codes = _mask(cropped_labels, left.region, task).astype(np.uint8)
    codes += 4 * _mask(cropped_labels, right.region, task).astype(np.uint8)
    contact_mm2 = 0.0
    for axis in range(3):
        # With the axis in front, neighbours along it are `[:-1]` and `[1:]`.
        axis_first = np.moveaxis(codes, axis, 0)
        num_faces = np.count_nonzero(axis_first[1:] + axis_first[:-1] == 5)
        contact_mm2 += num_faces * _face_mm2(grid, axis)
    return contact_mm2


def _cut_ends(
    image_hu: np.ndarray | None,
    labels: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    facts: RegionFacts,
) -> list[str]:
    """Describe the ends of the image that a region reaches, with the area of each cut."""
    ends = []
    for axis, names in enumerate(FACES):
        # First and last index along the axis.
        image_ends = (0, labels.shape[axis] - 1)
        region_ends = (facts.box.start[axis], facts.box.stop[axis] - 1)
        for name, image_end, region_end in zip(names, image_ends, region_ends, strict=True):
            if region_end != image_end:
                continue
            cut_mask = _mask(labels.take(image_end, axis), facts.region, task)
            area_mm2 = np.count_nonzero(cut_mask) * _face_mm2(grid, axis)
            ends.append(f"{name} end, {area_mm2 / 100:.1f} cm²")
    if image_hu is not None and _reaches_padding(image_hu, labels, grid, task, facts):
        ends.append("edge of the field of view")
    return ends


def _reaches_padding(
    image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid, task: Task, facts: RegionFacts
) -> bool:
    """Whether a region comes near to padding within its slices; a sample of slices is examined."""
    reach_in_plane = [max(1, round(FIELD_MM / step_mm)) for step_mm in grid.spacing_mm[1:]]
    reach = [0, *reach_in_plane]  # voxels, (z, y, x)
    box = facts.box.expanded(reach).clipped(labels.shape).slices()
    step = math.ceil(facts.box.shape[0] / MAX_SLICES)
    is_padding = image_hu[box][::step] < FIELD_HU
    if not is_padding.any():
        return False
    mask = _mask(labels[box][::step], facts.region, task)
    area_mm2 = 0.0
    for axis in (1, 2):
        region_axis_first = np.moveaxis(mask, axis, 0)
        padding_axis_first = np.moveaxis(is_padding, axis, 0)
        distance = reach[axis]
        # Pairs of a voxel of the region and a voxel of padding at this distance, on either side.
        num_pairs = np.count_nonzero(region_axis_first[:-distance] & padding_axis_first[distance:])
        num_pairs += np.count_nonzero(region_axis_first[distance:] & padding_axis_first[:-distance])
        # A line of voxels that runs into padding has up to `distance` pairs, but only one face.
        # Each examined slice stands for `step` slices.
        area_mm2 += num_pairs / distance * step * _face_mm2(grid, axis)
    return area_mm2 >= FIELD_CM2 * 100


def audit_vanished(
    volumes_ml: Mapping[str, float], boxes: Mapping[str, VoxelBox], task: Task, spacing: str
) -> list[Finding]:
    """Find regions, or labels in a task without regions, that resampling has removed.

    Args:
        volumes_ml: Volume of each label before resampling, in ml.
        boxes: Boxes of the regions, or labels, that still have voxels.
        task: Labels and regions.
        spacing: The spacing in mm, for the sentence.
    """
    volumes_before_ml: Mapping[str, float] = volumes_ml
    if task.regions:
        volumes_before_ml = _region_volumes(volumes_ml, task)
    findings = []
    for name, volume_ml in volumes_before_ml.items():
        if volume_ml > 0 and name not in boxes:
            finding = make_finding(
                "vanished_region", region=name, volume_ml=volume_ml, spacing=spacing
            )
            findings.append(finding)
    return findings
