"""Localisation: the coarse stage finds the regions in the whole volume and puts a tight box around each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from medseg.anatomy.impossible import remove_impossible
from medseg.anatomy.plausibility import (
    border_warnings,
    measure_region,
    pair_warnings,
    position_warnings,
    side_warnings,
)
from medseg.anatomy.position import side_pairs
from medseg.anatomy.rules import MIN_PART_FRACTION, MIN_REGION_ML, MIN_REGION_SHARE
from medseg.anatomy.sides import lone_side_warnings, unmix_sides
from medseg.cascade.stage import Prediction, TrainedStage
from medseg.findings import Finding, sentences_of, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.geometry.grid_rule import Crop
from medseg.inference.options import InferenceOptions
from medseg.inference.postprocess import remove_components
from medseg.inference.tiles import TilingPlan, most_probable
from medseg.preprocess.crop import body_box, cut, erase_outside
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
        tiling_plan: How the volume went through the network; None where labels were given.
        crop_grid: Grid of the network's input; None where labels were given.
        probs: Probabilities of the background and all labels (K, d, h, w), float16, before the
            clean-up; None unless asked for.
        probs_grid: Their grid.
        beyond: Voxels of `grid` beside the patient, (D, H, W), see `beyond_patient`, as far as the
            network saw the scan; None where labels were given, and for other images than CT.
    """

    labels: np.ndarray
    grid: VoxelGrid
    boxes: dict[str, VoxelBox]
    findings: list[Finding]
    tiling_plan: TilingPlan | None = None
    crop_grid: VoxelGrid | None = None
    beyond: np.ndarray | None = None
    probs: Tensor | None = None
    probs_grid: VoxelGrid | None = None

    @property
    def warnings(self) -> list[str]:
        """Sentences of all findings but information."""
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
        The probabilities and their crop; the first channel at the stage's spacing, and its grid.
    """
    intensities = intensities or stage.intensities(images)
    lattice = grid.resampled(stage.spacing_mm)
    resampled = [
        resample_image(image, grid, lattice, outside, resampling=stage.resampling, limits=limits)
        for image, outside, limits in zip(images, stage.outside, stage.limits, strict=True)
    ]
    scaled = lattice.resampled(stage.rule.spacing_mm(scan_spacing_mm or grid.spacing_mm))
    body = scaled.box_from(
        lattice, body_box(resampled[0].numpy(), lattice.spacing_mm, stage.task.channels[0].modality)
    )
    # No patch size: the network pads the body at its end, so the box of the body does not grow.
    crop = stage.rule.crop(body, scaled, (1, 1, 1), stage.divisor)
    seen = [
        normalise(
            erase_outside(cut(one, lattice, crop, outside, stage.resampling), crop, outside),
            intensity,
        )
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
    *,
    keep_probs: bool = False,
) -> Localisation:
    """Segment the whole volume coarsely and find the box of each region.

    Args:
        images: Oriented volume (D, H, W) of each channel; a CT in HU.
        grid: Their grid, oriented.
        stage: The coarse stage.
        options: How the networks run; the defaults where None.
        scan_spacing_mm: Spacing of the original scan, (z, y, x), where the volume is a resampled
            one.
        intensities: Map of each channel to the range of the network, where the volume is a
            resampled one; None = by its values.
        keep_probs: Whether the result has the probabilities.

    Returns:
        Labels, boxes and warnings; an empty label map without boxes where nothing was found.
    """
    options = options or InferenceOptions()
    prediction, crop, resampled, lattice = predict_body(
        images, grid, stage, options, scan_spacing_mm, intensities
    )
    # Keep the labels of voxels inside the scan only: the crop may reach beyond it.
    scanned = crop.lattice.centres_within(lattice)
    coarse_grid, part = crop.lattice.crop(scanned), crop.box.intersect(scanned)
    inner, in_crop = (
        part.shifted([-start for start in box.start]).slices() for box in (scanned, crop.box)
    )
    labels = np.zeros(coarse_grid.shape, dtype=np.uint8)
    labels[inner] = _organs_alone(most_probable(prediction.probs).numpy()[in_crop], stage.task)
    coarse_hu = cut(
        resampled, lattice, Crop(crop.lattice, scanned), stage.outside[0], stage.resampling
    ).numpy()
    removed, beyond = remove_impossible(labels[inner], coarse_hu[inner], coarse_grid, stage.task)
    found = locate_regions(labels, coarse_grid, stage.task)
    findings = [
        *warnings_of("out_of_memory", prediction.warnings),
        *warnings_of("removed_parts", removed),
        *found.findings,
        *(
            warnings_of(
                "doubtful_side", lone_side_warnings(found.boxes, coarse_hu, coarse_grid, stage.task)
            )
            if stage.task.is_ct
            else []
        ),
        *warnings_of(
            "doubtful_side",
            side_warnings(prediction.probs.numpy()[:, *in_crop], found.labels[inner], stage.task),
        ),
        *(
            warnings_of(
                "body_position",
                position_warnings(coarse_hu, found.labels, found.boxes, coarse_grid, stage.task),
            )
            if stage.task.is_ct
            else []
        ),
    ]
    if beyond is not None:
        is_beyond = np.zeros(labels.shape, dtype=bool)
        is_beyond[inner] = beyond
        found = replace(found, beyond=is_beyond)
    if keep_probs:
        # Beyond the scan the network sees padding.
        probs = prediction.probs[:, *in_crop].clone()
        found = replace(found, probs=probs, probs_grid=crop.lattice.crop(part))
    return replace(
        found, findings=findings, tiling_plan=prediction.tiling_plan, crop_grid=crop.grid
    )


def _organs_alone(labels: np.ndarray, task: Task) -> np.ndarray:
    """Make background of the labels that belong to no region, such as an airway."""
    values = np.zeros(task.num_classes, dtype=np.uint8)
    values[list(task.organ_values)] = task.organ_values
    return values[labels]


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
    findings = warnings_of("mixed_sides", unmix_sides(cleaned, grid, task))
    masks = {region.name: np.isin(cleaned, task.region_values(region)) for region in task.regions}
    volumes_ml = {name: float(mask.sum()) * voxel_ml(grid) for name, mask in masks.items()}
    pairs = side_pairs(task)
    found = {}
    for region in task.regions:
        mask, volume_ml = masks[region.name], volumes_ml[region.name]
        partner_ml = max(
            (
                volumes_ml[side.name]
                for pair in pairs
                if region in pair
                for side in pair
                if side != region
            ),
            default=0.0,
        )
        least_ml = max(MIN_REGION_ML, MIN_REGION_SHARE * partner_ml)
        if volume_ml < least_ml or not mask.any():
            sentence = f"no {region.name} found: the coarse stage marks {volume_ml:.1f} ml, and regions below {least_ml:.3g} ml are reported as absent"
            findings += warnings_of("missing_region", [sentence])
            cleaned[mask] = 0
        else:
            found[region.name] = measure_region(region, mask, grid)
    if not found:
        sentence = "no region found at all: the result is empty; check that the scan shows the organ and is in HU"
        findings += warnings_of("empty_result", [sentence])
    for one in found.values():
        findings += warnings_of("cut_region", border_warnings(one, grid))
    for left, right in pairs:
        if {left.name, right.name} <= found.keys():
            findings += warnings_of(
                "implausible_pair", pair_warnings(found[left.name], found[right.name])
            )
    return Localisation(cleaned, grid, {name: one.box for name, one in found.items()}, findings)
