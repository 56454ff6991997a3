"""The whole cascade for one scan: orient, localise, refine each region, join, turn back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from medseg.cascade.agreement import agreement
from medseg.cascade.join import RegionResult, join, paste_spread
from medseg.cascade.localise import localise
from medseg.cascade.refine import refine
from medseg.cascade.stage import CascadeOptions, TrainedStage
from medseg.data.task import Task
from medseg.errors import UserError
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import distortion, region_crop
from medseg.io.volume import Volume
from medseg.preprocess.orient import orient

# A crop of fixed size that is bent by more than this is told.
MAX_DISTORTION = 2.0


@dataclass(frozen=True)
class RegionBox:
    """The crop in which a region was refined.

    Attributes:
        voxels: Box on the fine grid of the oriented scan, which it may leave; from zero on where the crop has a grid of its own.
        grid: Grid of the crop: places it in the world.
    """

    voxels: VoxelBox
    grid: VoxelGrid

    def to_dict(self) -> dict[str, Any]:
        """Plain types for the JSON file beside the result: voxels, their spacing, and the centres of the corner voxels in LPS."""
        return {
            "voxels": self.voxels.to_dict(),
            "spacing_mm": list(self.grid.spacing_mm),
            "corners_xyz_mm": self.grid.corners_xyz_mm().tolist(),
        }


@dataclass(frozen=True)
class Segmentation:
    """What the cascade says about one scan.

    Attributes:
        labels: Label map in the file's own storage order, (D, H, W), uint8.
        boxes: Region name to the crop in which it was refined; absent regions are missing.
        volumes_ml: Label name to its volume.
        warnings: Sentences for a person.
        durations_s: Seconds by step: `localise`, `refine_<region>`, `join`.
        passes: How the volume and each crop went through the networks: `whole`, or in what tiles; by the same steps.
        distortions: By step, how much the crop of a fixed size bends the anatomy, see `distortion`; empty where crops keep it.
        agreements: Name of each region that was refined to the Dice coefficient of the two stages, see `agreement`.
        disagreement: With several fine checkpoints or flips, the standard deviation of the probabilities in percent, uint8,
            in the order of `labels`; else None.
    """

    labels: np.ndarray
    boxes: dict[str, RegionBox]
    volumes_ml: dict[str, float]
    warnings: list[str]
    durations_s: dict[str, float]
    passes: dict[str, str]
    distortions: dict[str, float]
    agreements: dict[str, float]
    disagreement: np.ndarray | None = None


def segment(volume: Volume, coarse: TrainedStage, fine: TrainedStage, options: CascadeOptions | None = None) -> Segmentation:
    """Segment one scan in two stages.

    Regions are refined one after the other; what is kept of each are the probabilities of its crop.

    Args:
        volume: Scan as read, in HU.
        coarse: Stage that finds the regions in the whole scan.
        fine: Stage that refines one region in its crop.
        options: Thresholds; the defaults where None.

    Returns:
        Labels on the file's own grid, boxes, warnings and times.

    Raises:
        UserError: If the two stages were trained for different tasks.
    """
    check_stages(coarse, fine)
    options = options or CascadeOptions()
    image_hu, grid, orientation = orient(volume.array, volume.grid)
    durations_s: dict[str, float] = {}
    with _timed(durations_s, "localise"):
        found = localise(image_hu, grid, coarse, options)
    passes, warnings = {"localise": str(found.how)}, [*found.warnings]
    distortions: dict[str, float] = {}
    if coarse.rule.size is not None and found.crop_grid is not None:
        distortions["localise"] = distortion(found.crop_grid.spacing_mm)
        warnings += distortion_warnings("whole scan", found.crop_grid)
    fine_grid = grid.resampled(fine.spacing_mm).resampled(fine.rule.spacing_mm(grid.spacing_mm))
    boxes: dict[str, RegionBox] = {}
    results: list[RegionResult] = []
    spreads: list[tuple[Tensor, VoxelGrid]] = []
    for region in fine.task.regions:
        if region.name not in found.boxes:
            continue
        step = f"refine_{region.name}"
        with _timed(durations_s, step):
            tight_box = found.boxes[region.name]
            crop = region_crop(tight_box, found.grid, fine_grid, fine.region_margin_mm, fine.patch_size, fine.divisor, fine.rule)
            crop_grid = crop.grid
            boxes[region.name] = RegionBox(crop.box, crop_grid)
            refined = refine(image_hu, grid, crop, region, fine, options)
        passes[step] = str(refined.how)
        if fine.rule.size is not None:
            distortions[step] = distortion(crop_grid.spacing_mm)
            warnings += distortion_warnings(region.name, crop_grid)
        warnings += [f"{region.name}: {remark}" for remark in refined.remarks]
        results.append((region, refined.probs, crop_grid))
        if refined.spread is not None:
            spreads.append((refined.spread, crop_grid))
    with _timed(durations_s, "join"):
        labels = join(results, grid, fine.task, options, image_hu)
        volumes_ml = label_volumes_ml(labels, grid, fine.task)
        agreements = agreement(found, labels, grid, fine.task)
    believed = {name for region, _, _ in results if agreements[region.name] >= options.min_agreement for name in region.labels}
    for region, _, _ in results:
        volume_ml, agreed = sum(volumes_ml[name] for name in region.labels), agreements[region.name]
        if not volume_ml:
            warnings.append(f"{region.name} is empty: the fine stage found nothing in the crop")
        elif agreed < options.min_agreement:
            doubted = [name for name in region.labels if name not in believed]
            for plane in labels:
                plane[np.isin(plane, [fine.task.labels[name] for name in doubted])] = 0
            volumes_ml |= dict.fromkeys(doubted, 0.0)
            del boxes[region.name]
            warnings.append(
                f"no {region.name} found: the coarse stage marks something else than the {volume_ml:.0f} ml of the fine one (Dice "
                f"{agreed:.2f}), so that neither is believed"
            )
        elif agreed < options.usual_agreement:
            warnings.append(
                f"{region.name}: the two stages agree by {agreed:.2f} only (Dice; {options.usual_agreement:g} and more is usual): look at the "
                "result"
            )
    disagreement = paste_spread(spreads, grid) if fine.has_views(options) else None
    return Segmentation(
        np.ascontiguousarray(orientation.from_lps(labels)),
        boxes,
        volumes_ml,
        warnings,
        durations_s,
        passes,
        distortions,
        agreements,
        None if disagreement is None else np.ascontiguousarray(orientation.from_lps(disagreement)),
    )


def distortion_warnings(name: str, grid: VoxelGrid) -> list[str]:
    """Say where a crop of fixed size bends what it shows by more than `MAX_DISTORTION`.

    Args:
        name: What the crop shows.
        grid: Its grid.
    """
    bent = distortion(grid.spacing_mm)
    if bent <= MAX_DISTORTION:
        return []
    voxels, extent = (
        "×".join(f"{number:.0f}" for number in numbers) for numbers in (grid.shape, np.multiply(grid.shape, grid.spacing_mm))
    )
    return [
        f"{name}: {extent} mm were resized to {voxels} voxels, which bends them by {bent:.1f}; above {MAX_DISTORTION:g} the network may "
        "not know the shape again"
    ]


def label_volumes_ml(labels: np.ndarray, grid: VoxelGrid, task: Task) -> dict[str, float]:
    """Volume of each label of the task, by its name."""
    voxel_ml = math.prod(grid.spacing_mm) / 1000.0
    # Plane by plane: a count of the whole would make a second volume.
    return {
        name: voxel_ml * sum(int(np.count_nonzero(plane == value)) for plane in labels) for name, value in task.labels.items()
    }


def check_stages(coarse: TrainedStage, fine: TrainedStage) -> None:
    """Refuse two stages that do not speak of the same organ.

    Raises:
        UserError: If labels or regions differ.
    """
    if coarse.task.labels != fine.task.labels or coarse.task.regions != fine.task.regions:
        raise UserError(
            f"the coarse checkpoint was trained for the task {coarse.task.name} with the labels {coarse.task.labels}, "
            f"the fine one for {fine.task.name} with {fine.task.labels}; give two checkpoints of the same task"
        )


@contextmanager
def _timed(durations_s: dict[str, float], step: str) -> Iterator[None]:
    """Note the seconds of a step."""
    start = time.perf_counter()
    yield
    durations_s[step] = time.perf_counter() - start
