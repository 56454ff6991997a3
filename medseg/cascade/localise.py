"""Localisation: the coarse stage finds the regions in the whole volume, each in a tight box."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from medseg.anatomy.impossible import remove_impossible
from medseg.anatomy.plausibility import (
    FoundRegion,
    border_warnings,
    measure_region,
    pair_warnings,
    position_warnings,
    side_warnings,
)
from medseg.anatomy.position import side_pairs
from medseg.anatomy.rules import MIN_PART_FRACTION, MIN_REGION_ML
from medseg.anatomy.sides import lone_side_warnings
from medseg.cascade.stage import Prediction, TrainedStage
from medseg.findings import Finding, sentences_of, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.geometry.grid_rule import Crop
from medseg.inference.components import remove_components
from medseg.inference.options import InferenceOptions
from medseg.inference.tiles import TilingPlan, most_probable
from medseg.preprocess.crop import body_box, erase_outside, view_or_resample
from medseg.preprocess.intensity import Intensity, normalise
from medseg.preprocess.resample import resample_image
from medseg.task import Task


@dataclass(frozen=True)
class Localisation:
    """Result of the coarse stage.

    Attributes:
        labels: Cleaned label map (D, H, W) on `grid`, uint8, without absent regions.
        grid: The coarse grid.
        boxes: Region name to the tight box of its cleaned mask, in voxels of `grid`; absent regions
            are missing.
        findings: What was found about missing or implausible regions.
        tiling_plan: How the volume went through the network; None from `locate_regions`, which is
            given a label map.
        crop_grid: Grid of the network's input; None from `locate_regions`.
        probs: Probabilities of the background and all labels (K, d, h, w), float16, before the
            clean-up; None unless asked for.
        probs_grid: Their grid: the part of `grid` that the network saw.
    """

    labels: np.ndarray
    grid: VoxelGrid
    boxes: dict[str, VoxelBox]
    findings: list[Finding]
    tiling_plan: TilingPlan | None = None
    crop_grid: VoxelGrid | None = None
    probs: Tensor | None = None
    probs_grid: VoxelGrid | None = None

    @property
    def warnings(self) -> list[str]:
        """Sentences of all findings except information."""
        return sentences_of(self.findings)


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
        The prediction, the crop that it covers, the first channel (d, h, w) of the whole scan at
        the stage's spacing, not normalised, and the grid of this channel.
    """
    intensities = intensities or stage.intensities(images)
    lattice = grid.resampled(stage.spacing_mm)
    resampled = []
    for image, outside, limits in zip(images, stage.outside, stage.limits, strict=True):
        channel = resample_image(
            image, grid, lattice, outside, resampling=stage.resampling, limits=limits
        )
        resampled.append(channel)
    # The grid rule of the stage may rescale the lattice, depending on the spacing of the scan.
    original_spacing_mm = scan_spacing_mm or grid.spacing_mm
    scaled = lattice.resampled(stage.rule.spacing_mm(original_spacing_mm))
    first_modality = stage.task.channels[0].modality
    body_on_lattice = body_box(resampled[0].numpy(), lattice.spacing_mm, first_modality)
    body = scaled.box_from(lattice, body_on_lattice)
    # A patch size of one voxel does not enlarge the box of the body. `predict_probs` pads the input
    # of the network to a multiple of the divisor.
    crop = stage.rule.crop(body, scaled, patch_size=(1, 1, 1), divisor=stage.divisor)

    def network_input(channel: Tensor, outside: float, intensity: Intensity) -> Tensor:
        # Each step binds `image` again, so that the crop of the step before is freed.
        image = view_or_resample(channel, lattice, crop, outside, stage.resampling)
        image = erase_outside(image, crop, outside)
        return normalise(image, intensity)

    inputs = [
        network_input(channel, outside, intensity)
        for channel, outside, intensity in zip(resampled, stage.outside, intensities, strict=True)
    ]
    prediction = stage.predict_probs(stacked(inputs), options)
    return prediction, crop, resampled[0], lattice


def stacked(channels: Sequence[Tensor]) -> Tensor:
    """Stack channels (D, H, W) to (C, D, H, W); a view if there is a single channel."""
    if len(channels) == 1:
        return channels[0][None]
    return torch.stack(list(channels))


def localise(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    stage: TrainedStage,
    options: InferenceOptions | None = None,
    scan_spacing_mm: tuple[float, float, float] | None = None,
    intensities: Sequence[Intensity] | None = None,
    *,
    keep_probs: bool = False,
) -> Localisation:
    """Segment the whole volume coarsely and find the box of each region.

    Args:
        images: Oriented volume (D, H, W) of each channel; a CT in HU.
        grid: Their grid, oriented.
        stage: The coarse stage.
        options: How the networks run; the defaults where None.
        scan_spacing_mm: Spacing of the original scan, (z, y, x), if the volume was resampled from
            it; None = that of `grid`.
        intensities: Intensity normalisation of each channel, chosen from the original scan if the
            volume was resampled from it; None = chosen from `images`.
        keep_probs: Whether the result has the probabilities.

    Returns:
        Labels, boxes and findings; only background and no boxes where nothing was found.
    """
    options = options or InferenceOptions()
    prediction, crop, resampled, lattice = predict_body(
        images, grid, stage, options, scan_spacing_mm, intensities
    )
    # Three boxes in voxels of `crop.lattice`: `scan_box` covers the scan, `crop.box` is what the
    # network saw and may reach beyond it, and `seen_box` is the part that both contain. The label
    # map covers `scan_box`; the prediction covers `crop.box`, of which `seen_box` is kept.
    scan_box = crop.lattice.centres_within(lattice)
    coarse_grid = crop.lattice.crop(scan_box)
    seen_box = crop.box.intersect(scan_box)
    seen_in_scan = _slices_in(scan_box, seen_box)
    seen_in_crop = _slices_in(crop.box, seen_box)
    labels = np.zeros(coarse_grid.shape, dtype=np.uint8)
    crop_labels = _without_helpers(most_probable(prediction.probs).numpy(), stage.task)
    labels[seen_in_scan] = crop_labels[seen_in_crop]
    # The first channel, in HU if it is a CT.
    coarse_image = view_or_resample(
        resampled, lattice, Crop(crop.lattice, scan_box), stage.outside[0], stage.resampling
    ).numpy()
    # `remove_impossible` changes `labels` in place, through a view. It gets only what the network
    # saw, since only that can show where the patient ends.
    removal_warnings = remove_impossible(
        labels[seen_in_scan], coarse_image[seen_in_scan], coarse_grid, stage.task
    )
    located = locate_regions(labels, coarse_grid, stage.task)
    findings = warnings_of("out_of_memory", prediction.warnings)
    findings += warnings_of("removed_parts", removal_warnings)
    findings += located.findings
    if stage.task.is_ct:
        lone_warnings = lone_side_warnings(located.boxes, coarse_image, coarse_grid, stage.task)
        findings += warnings_of("doubtful_side", lone_warnings)
    mixed_warnings = side_warnings(
        prediction.probs.numpy()[:, *seen_in_crop], located.labels[seen_in_scan], stage.task
    )
    findings += warnings_of("doubtful_side", mixed_warnings)
    if stage.task.is_ct:
        turned_warnings = position_warnings(
            coarse_image, located.labels, located.boxes, coarse_grid, stage.task
        )
        findings += warnings_of("body_position", turned_warnings)
    if keep_probs:
        # Copied, so that the probabilities of the padding beyond the scan are freed.
        probs = prediction.probs[:, *seen_in_crop].clone()
        located = replace(located, probs=probs, probs_grid=crop.lattice.crop(seen_box))
    return replace(
        located, findings=findings, tiling_plan=prediction.tiling_plan, crop_grid=crop.grid
    )


def _slices_in(box: VoxelBox, part: VoxelBox) -> tuple[slice, slice, slice]:
    """Slices that cut a part of a box out of an array whose first voxel is that of the box."""
    z, y, x = box.start
    return part.shifted((-z, -y, -x)).slices()


def _without_helpers(labels: np.ndarray, task: Task) -> np.ndarray:
    """Set helper labels to background: those of no region, which only help to train the network."""
    # New value of each class: organs keep their values, all others become 0.
    new_values = np.zeros(task.num_classes, dtype=np.uint8)
    new_values[list(task.organ_values)] = task.organ_values
    return new_values[labels]


def locate_regions(labels: np.ndarray, grid: VoxelGrid, task: Task) -> Localisation:
    """Clean a coarse label map, find the regions in it and warn of implausible ones.

    Args:
        labels: Label map (D, H, W), not cleaned.
        grid: Its oriented grid.
        task: Labels and regions.

    Returns:
        A cleaned copy of the labels, boxes and findings.
    """
    cleaned = labels.copy()
    for value in task.labels.values():
        remove_components(cleaned, value, min_fraction=MIN_PART_FRACTION)
    findings: list[Finding] = []
    measured: dict[str, FoundRegion] = {}
    for region in task.regions:
        mask = np.isin(cleaned, task.region_values(region))
        volume_ml = float(mask.sum()) * voxel_ml(grid)
        if mask.any() and volume_ml >= MIN_REGION_ML:
            measured[region.name] = measure_region(region, mask, grid)
            continue
        sentence = (
            f"no {region.name} found: the coarse stage marks {volume_ml:.1f} ml, and regions below "
            f"{MIN_REGION_ML:g} ml are reported as absent"
        )
        findings += warnings_of("missing_region", [sentence])
        cleaned[mask] = 0  # so that the agreement of the stages does not count it
    if not measured:
        sentence = (
            "no region found at all: the result is empty; check that the scan shows the organ"
        )
        # Only a CT has a scale that may be wrong.
        if task.is_ct:
            sentence += " and is in HU"
        findings += warnings_of("empty_result", [sentence])
    for found_region in measured.values():
        findings += warnings_of("cut_region", border_warnings(found_region, grid))
    for left, right in side_pairs(task):
        if left.name in measured and right.name in measured:
            implausible = pair_warnings(measured[left.name], measured[right.name])
            findings += warnings_of("implausible_pair", implausible)
    boxes = {name: found_region.box for name, found_region in measured.items()}
    return Localisation(cleaned, grid, boxes, findings)
