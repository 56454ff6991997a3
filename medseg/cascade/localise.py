"""The coarse stage: find each region in the whole volume and put a box around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import ndimage

from medseg.cascade.stage import CascadeOptions, TrainedStage
from medseg.data.task import Region, Task, is_side_pair
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.inference.passes import Pass
from medseg.inference.postprocess import gas_parts, keep_large_parts
from medseg.inference.tiles import most_probable
from medseg.preprocess.crop import body_box, cut
from medseg.preprocess.intensity import HU_LIMITS, normalise_hu
from medseg.preprocess.orient import FACES
from medseg.preprocess.resample import resample_image

# Below this share of the larger side a part is not mixed: a few voxels beyond the middle are no doubt about the sides.
MIXED_SHARE = 0.05
# Organs with a lower median are full of air. Share of a lung's voxels at either end.
AIRY_HU = -500.0
END_SHARE = 0.05
# Less that was left out is no news.
SAID_ML = 5.0
# Bone at 2 mm; how far from the middle it is looked for; share of the slices that are denser at the back. Eleven real scans: 1.0, with contrast
# agent in the heart 0.48 to 0.70; phantoms: 0.85 and above.
SPINE_HU = 200
SPINE_REACH_MM = 35.0
SPINE_SHARE = 1 / 3


@dataclass(frozen=True)
class Localisation:
    """What the coarse stage found.

    Attributes:
        labels: Cleaned label map (D, H, W) on `grid`, uint8; regions that count as absent are removed.
        grid: The coarse grid.
        boxes: Region name to the tight box of its cleaned mask, in voxels of `grid`; absent regions are missing.
        warnings: Sentences for a person about what is missing or does not look plausible.
        how: How the volume went through the network; None where labels were given.
        crop_grid: Grid of what the network saw; None likewise.
    """

    labels: np.ndarray
    grid: VoxelGrid
    boxes: dict[str, VoxelBox]
    warnings: list[str]
    how: Pass | None = None
    crop_grid: VoxelGrid | None = None


@dataclass(frozen=True)
class FoundRegion:
    """One region on the coarse grid: its box, its volume and its place from the patient's right to left."""

    region: Region
    box: VoxelBox
    volume_ml: float
    centre_xyz_mm: np.ndarray
    x_range_mm: tuple[float, float]


def localise(
    image_hu: np.ndarray,
    grid: VoxelGrid,
    stage: TrainedStage,
    options: CascadeOptions | None = None,
    scan_spacing_mm: tuple[float, float, float] | None = None,
) -> Localisation:
    """Segment the whole volume coarsely and find the box of each region.

    Args:
        image_hu: Oriented volume (D, H, W) in HU.
        grid: Its grid, oriented.
        stage: The coarse stage.
        options: Thresholds; the defaults where None.
        scan_spacing_mm: Spacing of the scan as it was made, (z, y, x), where the volume is a resampled one.

    Returns:
        Labels, boxes and warnings; an empty label map without boxes where nothing was found.
    """
    options = options or CascadeOptions()
    lattice = grid.resampled(stage.spacing_mm)
    resampled = resample_image(image_hu, grid, lattice, stage.air_hu, resampling=stage.resampling, limits=HU_LIMITS)
    scaled = lattice.resampled(stage.rule.spacing_mm(scan_spacing_mm or grid.spacing_mm))
    body = scaled.box_from(lattice, body_box(resampled.numpy(), lattice.spacing_mm))
    # A body is filled at its end where the network needs more: it does not grow.
    crop = stage.rule.crop(body, scaled, (1, 1, 1), stage.divisor)
    seen = cut(resampled, lattice, crop, stage.air_hu, stage.resampling)
    prediction = stage.predict_probs(normalise_hu(seen, stage.task.window_hu), 0, options)
    # Its labels on the scan, and no more than that: what lies beyond was made up.
    scanned = crop.lattice.centres_within(lattice)
    coarse_grid, part = crop.lattice.crop(scanned), crop.box.intersect(scanned)
    inner, in_crop = (part.shifted([-start for start in box.start]).slices() for box in (scanned, crop.box))
    labels = np.zeros(coarse_grid.shape, dtype=np.uint8)
    labels[inner] = most_probable(prediction.probs).numpy()[in_crop]
    resampled = cut(resampled, lattice, Crop(crop.lattice, scanned), stage.air_hu, stage.resampling)
    gas = _remove_gas(labels[inner], resampled.numpy()[inner], coarse_grid, stage.task)
    found = locate_regions(labels, coarse_grid, stage.task, options)
    turned = [
        *turned_warnings(resampled.numpy(), found, stage.task),
        *upside_down_warnings(resampled.numpy(), found, stage.task),
    ]
    return replace(found, warnings=[*prediction.remarks, *gas, *found.warnings, *turned], how=prediction.how, crop_grid=crop.grid)


def locate_regions(labels: np.ndarray, grid: VoxelGrid, task: Task, options: CascadeOptions) -> Localisation:
    """Clean a coarse label map, find the regions in it and say aloud what is not plausible.

    Args:
        labels: Label map (D, H, W), not cleaned.
        grid: Its oriented grid.
        task: Labels and regions.
        options: Thresholds.

    Returns:
        What was found.
    """
    cleaned = np.zeros_like(labels)
    for value in task.labels.values():
        cleaned[keep_large_parts(labels == value, options.min_part_fraction)] = value
    found: list[FoundRegion] = []
    warnings = _part_sides(cleaned, grid, task)
    masks = [np.isin(cleaned, task.region_values(region)) for region in task.regions]
    volumes_ml = [float(mask.sum()) * math.prod(grid.spacing_mm) / 1000.0 for mask in masks]
    for region, mask, volume_ml in zip(task.regions, masks, volumes_ml, strict=True):
        partners = [v for other, v in zip(task.regions, volumes_ml, strict=True) if is_side_pair(region, other)]
        least_ml = max(options.min_region_ml, options.min_region_share * max(partners, default=0.0))
        if volume_ml < least_ml or not mask.any():
            warnings.append(
                f"no {region.name} found: the coarse stage marks {volume_ml:.1f} ml, less than {least_ml:.3g} ml count as absent"
            )
            cleaned[mask] = 0
        else:
            found.append(_measure(region, mask, volume_ml, grid))
    if not found:
        warnings.append("no region found at all: the result is empty; check that the scan shows the organ and is in HU")
    warnings += [warning for one in found for warning in _border_warnings(one, grid)]
    for one, other in combinations(found, 2):
        if is_side_pair(one.region, other.region):
            left, right = (one, other) if one.region.side == "left" else (other, one)
            warnings += _pair_warnings(left, right, options)
    return Localisation(cleaned, grid, {one.region.name: one.box for one in found}, warnings)


def turned_warnings(image_hu: np.ndarray, found: Localisation, task: Task) -> list[str]:
    """Say where the patient seems to lie the other way round than the header says, so that left and right are exchanged.

    Between the two sides of an organ the spine lies in the back half of nearly each slice, and the heart, which contrast agent makes as
    dense, in front of it in some: a scan is doubted where few slices are denser at the back.

    Args:
        image_hu: Image (D, H, W) in HU on the coarse grid.
        found: What was found in it.
        task: Labels and regions.

    Returns:
        A sentence for a pair of sides, or nothing.
    """
    warnings = []
    for one, other in combinations([region for region in task.regions if region.name in found.boxes], 2):
        if not is_side_pair(one, other):
            continue
        boxes = [found.boxes[one.name], found.boxes[other.name]]
        (low_z, low_y, _), (high_z, high_y, _) = (
            [pick(ends) for ends in zip(*corners, strict=True)]
            for pick, corners in ((min, [box.start for box in boxes]), (max, [box.stop for box in boxes]))
        )
        middle_x = sum(box.start[2] + box.stop[2] for box in boxes) / 4
        reach = SPINE_REACH_MM / found.grid.spacing_mm[2]
        columns = slice(max(0, round(middle_x - reach)), round(middle_x + reach))
        dense = image_hu[low_z:high_z, low_y:high_y, columns] > SPINE_HU
        half = (high_y - low_y) // 2
        front, back = dense[:, :half].sum((1, 2)), dense[:, half:].sum((1, 2))
        num_slices = int(np.count_nonzero(front + back))
        if num_slices and np.count_nonzero(back > front) < SPINE_SHARE * num_slices:
            warnings.append(
                f"between {one.name} and {other.name} most that is as dense as bone lies at the front: if the patient lay the other way "
                "round than the header says, left and right are exchanged"
            )
    return warnings


def upside_down_warnings(image_hu: np.ndarray, found: Localisation, task: Task) -> list[str]:
    """Say where lungs seem to stand on their heads, so that left and right are exchanged.

    At its apex a lung is round and fills its bounding rectangle in a slice; below it ends as a rim around the diaphragm's dome and leaves it
    nearly empty. The two ends fill 0.60 to 0.81 and 0.18 to 0.51 of it on the scans and phantoms at hand, however the patient leans. Only lungs
    that the scan does not cut are asked, and only organs full of air are lungs.

    Args:
        image_hu: Image (D, H, W) in HU on the coarse grid.
        found: What was found in it.
        task: Labels and regions.

    Returns:
        A sentence, or nothing.
    """
    excess = []
    for region in task.regions:
        box = found.boxes.get(region.name)
        if region.side is None or box is None or box.start[0] == 0 or box.stop[0] == found.grid.shape[0]:
            continue
        mask = np.isin(found.labels[box.slices()], task.region_values(region))
        if np.median(image_hu[box.slices()][mask]) > AIRY_HU:
            continue
        low, high = np.quantile(np.nonzero(mask)[0], [END_SHARE, 1.0 - END_SHARE]).astype(int)
        excess.append(_fill(mask[high:]) - _fill(mask[: low + 1]))
    if not excess or np.mean(excess) > 0:
        return []
    return [
        "the lower ends of the lungs look like their apices: if the patient lay the other way round than the header says, left and right are "
        "exchanged"
    ]


def _fill(mask: np.ndarray) -> float:
    """Share of the bounding rectangles of its slices that a mask (D, H, W) fills; 0 for an empty one."""
    boxes = (VoxelBox.from_mask(plane[None]) for plane in mask)
    return float(np.count_nonzero(mask) / max(1, sum(math.prod(box.shape) for box in boxes if box is not None)))


def _remove_gas(labels: np.ndarray, image_hu: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Remove parts whose median lies below `task.least_hu`, in place.

    Returns:
        What was done, in sentences; small parts are not worth one.
    """
    if task.least_hu is None:
        return []
    warnings = []
    is_gas = image_hu < task.least_hu
    for name, value in task.labels.items():
        gone = gas_parts(labels == value, is_gas)
        labels[gone] = 0
        volume_ml = float(gone.sum()) * math.prod(grid.spacing_mm) / 1000.0
        if volume_ml >= SAID_ML:
            warnings.append(
                f"{volume_ml:.0f} ml that the coarse stage called {name} were left out: the median of such a part lies below "
                f"{task.least_hu:g} HU, so it is gas"
            )
    return warnings


def _part_sides(labels: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Give a part in which both sides of an organ mix to the side that has most of it, in place.

    Sides that only touch keep their border: they are mixed where one reaches across the other's centre. Where a scan
    shows one side alone, a network that sees no middle may call a half of it the other side.

    Returns:
        What was done, in sentences.
    """
    warnings = []
    for one, other in combinations(task.regions, 2):
        if not is_side_pair(one, other):
            continue
        left, right = (one, other) if one.side == "left" else (other, one)
        parts, _ = ndimage.label(np.isin(labels, (*task.region_values(left), *task.region_values(right))))
        for number, slices in enumerate(ndimage.find_objects(parts), start=1):
            part, inner = parts[slices] == number, labels[slices]
            masks = [part & np.isin(inner, task.region_values(region)) for region in (left, right)]
            counts = [int(mask.sum()) for mask in masks]
            if min(counts) < MIXED_SHARE * max(counts) or not _reach_across(*masks):
                continue
            winner, loser = (0, 1) if counts[0] >= counts[1] else (1, 0)
            pairs = zip(task.region_values((left, right)[loser]), task.region_values((left, right)[winner]), strict=True)
            for value, new_value in pairs:
                inner[part & (inner == value)] = new_value
            volume_ml = counts[loser] * math.prod(grid.spacing_mm) / 1000.0
            warnings.append(
                f"{volume_ml:.0f} ml that the coarse stage called {(left, right)[loser].name} lie within "
                f"{(left, right)[winner].name} and were counted to it; check the sides"
            )
    return warnings


def _reach_across(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether the left mask reaches beyond the right one's centre, or the other way round; x runs to the left."""
    (left_x, left_n), (right_x, right_n) = ((np.arange(mask.shape[2]), mask.sum((0, 1))) for mask in (left, right))
    centres = [float(np.average(x, weights=n)) for x, n in ((left_x, left_n), (right_x, right_n))]
    return bool(np.flatnonzero(left_n)[0] < centres[1] or np.flatnonzero(right_n)[-1] > centres[0])


def _measure(region: Region, mask: np.ndarray, volume_ml: float, grid: VoxelGrid) -> FoundRegion:
    """Measure a region that is not empty."""
    box = VoxelBox.from_mask(mask)
    assert box is not None, "the mask is not empty"
    inner = mask[box.slices()]
    centre = [
        start + float(np.average(np.arange(size), weights=inner.sum(axis=tuple({0, 1, 2} - {axis}))))
        for axis, (start, size) in enumerate(zip(box.start, box.shape, strict=True))
    ]
    ends = np.array([[centre[0], centre[1], box.start[2]], [centre[0], centre[1], box.stop[2] - 1]])
    low, high = sorted(float(point[0]) for point in grid.index_to_world_xyz_mm(ends))
    return FoundRegion(region, box, volume_ml, grid.index_to_world_xyz_mm(np.array(centre)), (low, high))


def _border_warnings(found: FoundRegion, grid: VoxelGrid) -> list[str]:
    """Say which faces of the volume cut a region."""
    touched = [
        names[end]
        for axis, names in enumerate(FACES)
        for end, touches in enumerate((found.box.start[axis] <= 0, found.box.stop[axis] >= grid.shape[axis]))
        if touches
    ]
    if not touched:
        return []
    faces = " and ".join(touched)
    return [f"{found.region.name} touches the {faces} border of the scan: a part of it may be missing"]


def _pair_warnings(left: FoundRegion, right: FoundRegion, options: CascadeOptions) -> list[str]:
    """Say what is not plausible about the left and the right of one organ."""
    names = f"{left.region.name} and {right.region.name}"
    small, large = sorted((left.volume_ml, right.volume_ml))
    warnings = []
    # World x runs to the patient's left.
    if left.centre_xyz_mm[0] <= right.centre_xyz_mm[0]:
        warnings.append(
            f"{names} lie on the wrong sides: the left one's centre is at x = {left.centre_xyz_mm[0]:.0f} mm, "
            f"the right one's at x = {right.centre_xyz_mm[0]:.0f} mm, and x runs to the patient's left"
        )
    elif left.x_range_mm[0] < right.centre_xyz_mm[0] or right.x_range_mm[1] > left.centre_xyz_mm[0]:
        warnings.append(f"{names} reach across each other's centre: the coarse stage may have mixed up the sides")
    if large > options.max_volume_ratio * small:
        warnings.append(
            f"{names} differ much in volume, {left.volume_ml:.0f} ml and {right.volume_ml:.0f} ml: one of them may be incomplete"
        )
    return warnings
