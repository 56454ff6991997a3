"""Localisation: the coarse stage finds the regions in the whole volume and puts a tight box around each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from medseg.cascade.patient import beyond_patient
from medseg.cascade.plausibility import (
    border_warnings,
    measure_region,
    pair_warnings,
    position_warnings,
    side_warnings,
    voxel_ml,
)
from medseg.cascade.stage import Prediction, TrainedStage
from medseg.data.audit.position import side_pairs
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.inference.options import InferenceOptions
from medseg.inference.postprocess import Rejection, remove_components
from medseg.inference.tiles import TilingPlan, most_probable
from medseg.preprocess.crop import body_box, cut, erase_outside
from medseg.preprocess.intensity import BODY_HU, Intensity, normalise
from medseg.preprocess.resample import resample_image
from medseg.task import Region, Task

# Below this share of the larger side a component is not mixed: a few voxels beyond the middle cast no doubt on the sides.
MIXED_SHARE = 0.05
# A smaller volume that is removed or added causes no warning.
MIN_REPORTED_ML = 5.0
# A label keeps its largest component and every component of at least this share of it.
MIN_PART_FRACTION = 0.1
# A smaller region on the coarse grid counts as absent, and so does one below this share of the other side of its pair.
MIN_REGION_ML = 5.0
MIN_REGION_SHARE = 0.01
# A lateral face of the scan cuts the patient if half of it, beside a region, is denser than air; it lies beyond the skin if next to nothing is.
# From the skin to the region lies the wall of the body, with a breast or an arm no thicker than this.
CUT_SHARE, OPEN_SHARE, MAX_WALL_MM = 0.5, 0.05, 120.0
# A component is gas if its median lies below the bound of gas. It is no organ if nearly all of it lies beyond the outline of the patient.
MAX_GAS_SHARE = 0.5
MAX_COARSE_BEYOND_SHARE = 0.9


@dataclass(frozen=True)
class Localisation:
    """Result of the coarse stage.

    Attributes:
        labels: Cleaned label map (D, H, W) on `grid`, uint8, without absent regions.
        grid: The coarse grid.
        boxes: Region name to the tight box of its cleaned mask, in voxels of `grid`; absent regions are missing.
        warnings: Sentences about missing or implausible regions.
        tiling_plan: How the volume went through the network; None where labels were given.
        crop_grid: Grid of the network's input; None where labels were given.
        beyond: Voxels of `grid` beside the patient, (D, H, W), see `beyond_patient`, as far as the network saw the scan; None where
            labels were given, and for other images than CT.
    """

    labels: np.ndarray
    grid: VoxelGrid
    boxes: dict[str, VoxelBox]
    warnings: list[str]
    tiling_plan: TilingPlan | None = None
    crop_grid: VoxelGrid | None = None
    beyond: np.ndarray | None = None


def predict_body(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    stage: TrainedStage,
    options: InferenceOptions,
    scan_spacing_mm: tuple[float, float, float] | None = None,
    intensities: Sequence[Intensity] | None = None,
) -> tuple[Prediction, Crop, Tensor, VoxelGrid]:
    """Run a stage on the body: everything denser than air, with a margin.

    Args:
        images: Oriented volume (D, H, W) of each channel.
        grid: Their grid, oriented.
        stage: A stage that sees the whole volume.
        options: How the networks run.
        scan_spacing_mm: See `localise`.
        intensities: See `localise`.

    Returns:
        The probabilities and their crop; the first channel at the stage's spacing, and its grid.
    """
    intensities = intensities or stage.intensities(images)
    lattice = grid.resampled(stage.spacing_mm)
    resampled = [
        resample_image(image, grid, lattice, outside, resampling=stage.resampling, limits=limits)
        for image, outside, limits in zip(images, stage.outside, stage.limits, strict=True)
    ]
    scaled = lattice.resampled(stage.rule.spacing_mm(scan_spacing_mm or grid.spacing_mm))
    body = scaled.box_from(lattice, body_box(resampled[0].numpy(), lattice.spacing_mm, stage.task.channels[0].modality))
    # No patch size: the network pads the body at its end, so the box of the body does not grow.
    crop = stage.rule.crop(body, scaled, (1, 1, 1), stage.divisor)
    seen = [
        normalise(erase_outside(cut(one, lattice, crop, outside, stage.resampling), crop, outside), intensity)
        for one, outside, intensity in zip(resampled, stage.outside, intensities, strict=True)
    ]
    return stage.predict_probs(stacked(seen), options), crop, resampled[0], lattice


def stacked(channels: Sequence[Tensor]) -> Tensor:
    """Stack channels (D, H, W) to (C, D, H, W); a view where there is one."""
    return torch.stack(list(channels)) if len(channels) > 1 else channels[0][None]


def localise(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    stage: TrainedStage,
    options: InferenceOptions | None = None,
    scan_spacing_mm: tuple[float, float, float] | None = None,
    intensities: Sequence[Intensity] | None = None,
) -> Localisation:
    """Segment the whole volume coarsely and find the box of each region.

    Args:
        images: Oriented volume (D, H, W) of each channel; a CT in HU.
        grid: Their grid, oriented.
        stage: The coarse stage.
        options: How the networks run; the defaults where None.
        scan_spacing_mm: Spacing of the original scan, (z, y, x), where the volume is a resampled one.
        intensities: Map of each channel to the range of the network, where the volume is a resampled one; None = by its values.

    Returns:
        Labels, boxes and warnings; an empty label map without boxes where nothing was found.
    """
    options = options or InferenceOptions()
    prediction, crop, resampled, lattice = predict_body(images, grid, stage, options, scan_spacing_mm, intensities)
    # Keep the labels of voxels inside the scan only: the crop may reach beyond it.
    scanned = crop.lattice.centres_within(lattice)
    coarse_grid, part = crop.lattice.crop(scanned), crop.box.intersect(scanned)
    inner, in_crop = (part.shifted([-start for start in box.start]).slices() for box in (scanned, crop.box))
    labels = np.zeros(coarse_grid.shape, dtype=np.uint8)
    labels[inner] = most_probable(prediction.probs).numpy()[in_crop]
    coarse_hu = cut(resampled, lattice, Crop(crop.lattice, scanned), stage.outside[0], stage.resampling).numpy()
    removed, beyond = remove_impossible(labels[inner], coarse_hu[inner], coarse_grid, stage.task)
    found = locate_regions(labels, coarse_grid, stage.task)
    warnings = [
        *prediction.remarks,
        *removed,
        *found.warnings,
        *(lone_side_warnings(found.boxes, coarse_hu, coarse_grid, stage.task) if stage.task.is_ct else []),
        *side_warnings(prediction.probs.numpy()[:, *in_crop], found.labels[inner], stage.task),
        *(position_warnings(coarse_hu, found.labels, found.boxes, coarse_grid, stage.task) if stage.task.is_ct else []),
    ]
    if beyond is not None:
        is_beyond = np.zeros(labels.shape, dtype=bool)
        is_beyond[inner] = beyond
        found = replace(found, beyond=is_beyond)
    return replace(found, warnings=warnings, tiling_plan=prediction.tiling_plan, crop_grid=crop.grid)


def locate_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> Localisation:
    """Clean a coarse label map, find the regions in it and warn of what is not plausible.

    Args:
        labels: Label map (D, H, W), not cleaned.
        grid: Its oriented grid.
        task: Labels and regions.
    """
    cleaned = labels.copy()
    for value in task.labels.values():
        remove_components(cleaned, value, min_fraction=MIN_PART_FRACTION)
    warnings = _unmix_sides(cleaned, grid, task)
    masks = {region.name: np.isin(cleaned, task.region_values(region)) for region in task.regions}
    volumes_ml = {name: float(mask.sum()) * voxel_ml(grid) for name, mask in masks.items()}
    pairs = side_pairs(task)
    found = {}
    for region in task.regions:
        mask, volume_ml = masks[region.name], volumes_ml[region.name]
        partner_ml = max(
            (volumes_ml[side.name] for pair in pairs if region in pair for side in pair if side != region), default=0.0
        )
        least_ml = max(MIN_REGION_ML, MIN_REGION_SHARE * partner_ml)
        if volume_ml < least_ml or not mask.any():
            warnings.append(
                f"no {region.name} found: the coarse stage marks {volume_ml:.1f} ml, and regions below {least_ml:.3g} ml are reported as absent"
            )
            cleaned[mask] = 0
        else:
            found[region.name] = measure_region(region, mask, grid)
    if not found:
        warnings.append("no region found at all: the result is empty; check that the scan shows the organ and is in HU")
    for one in found.values():
        warnings += border_warnings(one, grid)
    for left, right in pairs:
        if {left.name, right.name} <= found.keys():
            warnings += pair_warnings(found[left.name], found[right.name])
    return Localisation(cleaned, grid, {name: one.box for name, one in found.items()}, warnings)


def remove_impossible(
    labels: np.ndarray, image_hu: np.ndarray, grid: VoxelGrid, task: Task
) -> tuple[list[str], np.ndarray | None]:
    """Remove components of a CT with a median below `task.least_hu`, and those that lie beyond the patient, in place.

    Returns:
        Warnings of the larger ones, and the voxels beside the patient (None for other images than CT).
    """
    reasons, beyond = [], None
    if task.least_hu is not None:
        is_gas = Rejection((image_hu < task.least_hu).__getitem__, MAX_GAS_SHARE)
        reasons.append((is_gas, f"the median of such a component is below {task.least_hu:g} HU, so it is gas"))
    if task.is_ct:
        beyond = beyond_patient(image_hu, grid.spacing_mm)
        is_beyond = Rejection(beyond.__getitem__, MAX_COARSE_BEYOND_SHARE)
        reasons.append((is_beyond, "they lie beside the patient, as foam of the table and blankets do"))
    warnings = []
    for rejection, reason in reasons:
        for name, value in task.labels.items():
            volume_ml = remove_components(labels, value, [rejection])[0] * voxel_ml(grid)
            if volume_ml >= MIN_REPORTED_ML:
                warnings.append(f"{volume_ml:.0f} ml that the coarse stage called {name} were removed: {reason}")
    return warnings, beyond


def lone_side_warnings(boxes: Mapping[str, VoxelBox], image_hu: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Warn of a lone region of a pair whose side contradicts the cut of the scan.

    A scan of half a chest is cut towards the midline and shows the skin on its other side. The network does not
    see where a scan ends.

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
    return [(left, right) for left, right in side_pairs(task) if len(left.labels) == len(right.labels)]


def _unmix_sides(labels: np.ndarray, grid: VoxelGrid, task: Task) -> list[str]:
    """Assign a component that mixes both sides of an organ to the side with most of its voxels, in place.

    Sides that only touch keep their border; they count as mixed where one reaches across the other's centre. On a scan of one
    side alone, a network that does not see the midline may label half of the organ as the other side.

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
    left_centre, right_centre = (float(np.average(np.arange(len(n)), weights=n)) for n in (left_n, right_n))
    return bool(np.flatnonzero(left_n)[0] < right_centre or np.flatnonzero(right_n)[-1] > left_centre)
