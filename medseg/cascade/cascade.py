"""Cascade: the trained stages of a task, which segment a scan together."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medseg.anatomy.additions import add_coarse_parts
from medseg.anatomy.contradictions import remove_contradictions
from medseg.anatomy.plausibility import volume_warnings
from medseg.anatomy.rules import MIN_REPORTED_ML
from medseg.cascade.agreement import (
    added_volumes,
    agreement,
    distortion_warnings,
    most_disputed_xyz_mm,
)
from medseg.cascade.bound import DiceBound, StatedBound
from medseg.cascade.join import RegionResult, join, paste_percent
from medseg.cascade.localise import Localisation, localise, predict_body, stacked
from medseg.cascade.stage import X_AXIS, Prediction, TrainedStage
from medseg.errors import require
from medseg.findings import Finding, information_in, sentences_of, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.geometry.grid_rule import Crop, distortion, region_crop
from medseg.inference.options import InferenceOptions
from medseg.inference.tile_workers import TileWorkers, process_group, serve_tiles
from medseg.io.scratch import new_array, new_tensor
from medseg.io.volume import Volume
from medseg.memory.profile import release_free_memory
from medseg.preprocess.crop import erase_outside, probability_channel, resample_crop
from medseg.preprocess.intensity import Intensity, normalise
from medseg.preprocess.orient import orient, oriented_grid
from medseg.task import Region, Task

Timed = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class RegionBox:
    """Crop in which a region was refined.

    Attributes:
        voxels: Box on the fine grid of the oriented scan; may reach outside, and starts at zero
            where the crop has its own grid.
        grid: Grid of the crop in the world.
    """

    voxels: VoxelBox
    grid: VoxelGrid

    def to_dict(self) -> dict[str, Any]:
        """Plain types for a JSON file: voxels, their spacing, and the centres of the corner voxels in LPS."""
        return {
            "voxels": asdict(self.voxels),
            "spacing_mm": list(self.grid.spacing_mm),
            "corners_xyz_mm": self.grid.corners_xyz_mm().tolist(),
        }


@dataclass
class Segmentation:
    """Result of a cascade on one scan.

    Attributes:
        labels: Label map in the storage order of the scan, (D, H, W), uint8; the Python API returns
            it on its grid.
        boxes: Region name to the crop in which it was refined; absent regions are missing.
        volumes_ml: Volume of each label by its name.
        findings: What was found about the scan and the result.
        durations_s: Seconds by step: `localise`, `refine_<region>`, `join`.
        tiling_plans: How the volume and each crop went through the networks, `whole` or in tiles,
            by step.
        distortions: How much a crop of fixed size is distorted, by step, see `distortion`; empty
            where crops keep the shape.
        agreements: Dice coefficient of the two stages by region, for regions that were refined, see
            `agreement`.
        added_ml: Volume by region that only the coarse stage finds and that was added, see
            `medseg.anatomy.additions`; without zeros.
        dice_at_least: Region to a lower bound on its Dice coefficient, see `medseg.cascade.bound`.
            Absent are regions to which anything was added, and all where the stages were not
            calibrated together.
        status: `ok`; `warnings`, where there are any; `not_hu`, where the values of the scan are
            not HU and the labels are doubtful.
        most_disputed_xyz_mm: Where the two stages differ most, see `most_disputed_xyz_mm`; None
            where they do not.
        statistics: Label name to volume and figures in HU, see `label_statistics`; a cascade alone
            leaves it empty.
        probabilities: Label name to probabilities (D, H, W) and the grids of their crops, before
            the clean-up; only if asked for.
        disagreement: With several fine checkpoints or flips, the standard deviation of the
            probabilities in percent, uint8, in the order of `labels`; else None.
    """

    labels: Any
    boxes: dict[str, RegionBox] = field(default_factory=dict)
    volumes_ml: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)
    tiling_plans: dict[str, str] = field(default_factory=dict)
    distortions: dict[str, float] = field(default_factory=dict)
    agreements: dict[str, float] = field(default_factory=dict)
    added_ml: dict[str, float] = field(default_factory=dict)
    dice_at_least: dict[str, StatedBound] = field(default_factory=dict)
    status: str = "ok"
    most_disputed_xyz_mm: tuple[float, ...] | None = None
    statistics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    probabilities: dict[str, list[tuple[Tensor, VoxelGrid]]] = field(default_factory=dict)
    disagreement: np.ndarray | None = None

    @property
    def warnings(self) -> list[str]:
        """Sentences of all findings but information."""
        return sentences_of(self.findings)

    @property
    def information(self) -> list[str]:
        """Sentences of the findings that ask for nothing."""
        return information_in(self.findings)


@dataclass(frozen=True)
class Cascade:
    """Trained stages of one task, and how to run them.

    Attributes:
        coarse: Finds the regions in the whole scan; segments all labels of a task without regions.
        fine: Refines one region in its crop; None for a task without regions.
        options: Tiles, memory, flips.

    Raises:
        UserError: If the stages were trained for different tasks, or one is missing or superfluous.
    """

    coarse: TrainedStage
    fine: TrainedStage | None = None
    options: InferenceOptions = field(default_factory=InferenceOptions)

    def __post_init__(self) -> None:
        task, fine = self.coarse.task, self.last.task
        require(
            bool(task.regions) == (self.fine is not None),
            f"the task {task.name} of the coarse checkpoint has "
            + (
                "regions, which a fine stage refines; give fine=<checkpoint>"
                if task.regions
                else "no regions; leave fine out"
            ),
        )
        require(
            task.finds_regions_of(fine),
            f"the coarse checkpoint was trained for the task {task.name} with the labels {task.labels}, "
            f"the fine one for {fine.name} with {fine.labels}; give two checkpoints of the same task",
        )

    @property
    def stages(self) -> tuple[TrainedStage, ...]:
        """All stages, the first one first."""
        return (self.coarse,) if self.fine is None else (self.coarse, self.fine)

    @property
    def backend_bytes(self) -> int:
        """Memory that the backends of all stages take with their first pass and keep."""
        return sum(stage.backend_bytes for stage in self.stages)

    @property
    def last(self) -> TrainedStage:
        """The stage that makes the final labels."""
        return self.stages[-1]

    @property
    def task(self) -> Task:
        """Task of the results; the coarse stage may know further labels."""
        return self.last.task

    @property
    def dice_bound(self) -> DiceBound | None:
        """Bound that was calibrated for these two stages together; None for other pairs, several checkpoints and flips."""
        is_pair = self.fine is not None and self.fine.dice_bound == self.coarse.dice_bound
        return (
            self.coarse.dice_bound
            if is_pair and not any(stage.has_views(self.options) for stage in self.stages)
            else None
        )

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`, as in `Segmentation.durations_s`; those of absent regions are left out."""
        refining = [f"refine_{region.name}" for region in self.task.regions]
        return ["segment", "join"] if self.fine is None else ["localise", *refining, "join"]

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: orient, localise, refine each region, join, restore the storage order.

        Regions are refined one after the other; only the probabilities of their crops are kept.

        Args:
            volume: First channel; a CT in HU.
            more_channels: The other channels of the task, (D, H, W) each, on the grid of the first.
            on_step: Called with the name of each step when it begins.
            keep_probabilities: Whether the result has the probabilities.

        Raises:
            UserError: If the task has another number of channels.
        """
        task, options = self.task, self.options
        require_channels(task, 1 + len(more_channels))
        first, grid, orientation = orient(volume.array, volume.grid)
        images = [first, *map(orientation.to_lps, more_channels)]
        result = Segmentation(np.empty(0))
        for stage in self.stages:
            result.findings += warnings_of("other_tiles", stage.warnings)
        timed = partial(_timed, result.durations_s, on_step)
        found: Localisation | None = None
        added: dict[str, np.ndarray] = {}
        if self.fine is None:
            parts, stds = _segment_whole(images, grid, self.coarse, options, result, timed)
        else:
            with timed("localise"):
                keep_probs = self.fine.has_coarse_channel
                found = localise(images, grid, self.coarse, options, keep_probs=keep_probs)
            result.findings += found.findings
            _note_crop(
                result, "localise", "whole scan", self.coarse, found.tiling_plan, found.crop_grid
            )
            parts, stds = _refine_regions(images, grid, found, self.fine, options, result, timed)
        not_added: list[str] = []
        apart: list[str] = []
        with timed("join"):
            # A fine stage that sees the coarse probabilities decides about these parts itself.
            adds_parts = options.add_parts and not self.last.has_coarse_channel
            if found is not None and adds_parts and self.coarse.add_parts_mm is not None:
                added = add_coarse_parts(
                    found.labels,
                    found.grid,
                    found.beyond,
                    parts,
                    task,
                    self.coarse.add_parts_mm,
                    not_added,
                )
            labels = join(parts, grid, task, first, found, apart)
            # Plane by plane: the mask of a whole label would be a second volume.
            result.volumes_ml = {
                name: voxel_ml(grid)
                * sum(int(np.count_nonzero(plane == value)) for plane in labels)
                for name, value in task.labels.items()
            }
            if found is not None:
                regions = {region.name: task.region_values(region) for region, _, _ in parts}
                result.agreements = agreement(
                    found.labels, found.grid, labels, grid, regions, added
                )
                result.most_disputed_xyz_mm = most_disputed_xyz_mm(
                    found.labels, found.grid, labels, grid, added
                )
                result.added_ml = added_volumes(found.grid, labels, grid, regions, added)
        # Read now: the next step forgets what was added to the regions that it removes.
        changed_labels: set[str] = set()
        for region in task.regions:
            if region.name in result.added_ml:
                changed_labels.update(region.labels)
        absent, contradictions = remove_contradictions(
            labels, first, task, result.volumes_ml, result.agreements, result.added_ml
        )
        result.findings += warnings_of("beside_patient", not_added)
        result.findings += warnings_of("apart", apart)
        result.findings += warnings_of("little_agreement", contradictions)
        for name in absent:
            del result.boxes[name]
        additions = [
            f"{name}: {volume_ml:.0f} ml were found by the coarse stage alone and added, such as consolidation: check the result"
            for name, volume_ml in result.added_ml.items()
            if volume_ml >= MIN_REPORTED_ML
        ]
        result.findings += warnings_of("added_parts", additions)
        result.dice_at_least = self._stated_bounds(result, changed_labels)
        if not self.task.regions and not any(result.volumes_ml.values()):
            sentence = "no label found at all: the result is empty; check that the scan shows the organs of the task"
            result.findings += warnings_of("empty_result", [sentence])
        result.findings += warnings_of(
            "implausible_volume", volume_warnings(result.volumes_ml, labels, task)
        )
        result.labels = _contiguous(orientation.from_lps(labels))
        if keep_probabilities:
            for region, probs, crop_grid in parts:
                for name, prob in zip(region.labels, probs, strict=True):
                    result.probabilities.setdefault(name, []).append((prob, crop_grid))
        if self.last.has_views(options):
            result.disagreement = _contiguous(orientation.from_lps(paste_percent(stds, grid)))
        return result

    def _stated_bounds(
        self, result: Segmentation, changed_labels: set[str]
    ) -> dict[str, StatedBound]:
        """State the bound of each region that was found and to which nothing was added.

        Args:
            result: Volumes, boxes and agreements after the removal of contradictions.
            changed_labels: Labels to which parts of the coarse stage were added.
        """
        bounds: dict[str, StatedBound] = {}
        if self.dice_bound is None:
            return bounds
        for region in self.task.regions:
            is_empty = not any(result.volumes_ml[label] for label in region.labels)
            if region.name not in result.boxes or is_empty:
                continue
            # Regions may share a label: one may be changed by what was added to another.
            if not changed_labels.isdisjoint(region.labels):
                continue
            bounds[region.name] = self.dice_bound.stated(result.agreements[region.name])
        return bounds

    def within(self, budget_gib: float) -> "Cascade":
        """Return the same cascade with a bound on the memory of a network pass."""
        return replace(
            self, options=replace(self.options, budget_gib=min(self.options.budget_gib, budget_gib))
        )

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan whose planes exceed the budget, by its header alone.

        Args:
            grid: Grid of the scan, in storage order.

        Raises:
            UserError: If a stage cannot keep `budget_gib`.
        """
        for stage in self.stages:
            stage.check_budget(oriented_grid(grid), self.options)

    @contextmanager
    def shared_tiles(self) -> Iterator[None]:
        """Share the tiles with the other processes of torchrun; for rank 0."""
        with process_group():
            workers = TileWorkers()
            for stage in self.stages:
                stage.tile_workers = workers
            try:
                yield
            finally:
                workers.dismiss()

    def serve_tiles(self) -> None:
        """Run networks for rank 0 until it has segmented all scans; for the other processes of torchrun."""
        stages = {stage.name: stage for stage in self.stages}
        with process_group():
            serve_tiles(lambda job, images: stages[job[0]].serve(job[1], images, job[2]))


def require_channels(task: Task, num_given: int) -> None:
    """Refuse a scan of another number of channels than that of the task.

    Raises:
        UserError: With both numbers.
    """
    kinds = ", ".join(channel.modality for channel in task.channels)
    require(
        num_given == len(task.channels),
        f"the task {task.name} has {len(task.channels)} channels ({kinds}), but the scan has {num_given}; give input=[a,b,…] with a file of "
        "each, or a case table with the columns image, image_1, …",
    )


def _segment_whole(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    stage: TrainedStage,
    options: InferenceOptions,
    result: Segmentation,
    timed: Timed,
) -> tuple[list[RegionResult], list[tuple[Tensor, VoxelGrid]]]:
    """Segment all labels at once, for a task without regions.

    Args:
        images: Oriented volume (D, H, W) of each channel.
        grid: Their grid, oriented.
        stage: The only stage.
        options: How the networks run.
        result: Receives tiling plan and warnings.
        timed: Records a step.

    Returns:
        The probabilities for `join`, as of one region with all labels, and their standard deviation
        for `paste_percent`.
    """
    with timed("segment"):
        prediction, crop, *_ = predict_body(images, grid, stage, options)
    _note_crop(result, "segment", "whole scan", stage, prediction.tiling_plan, crop.grid)
    result.findings += warnings_of("out_of_memory", prediction.warnings)
    whole = Region(stage.task.name, tuple(stage.task.labels))
    stds = [] if prediction.std is None else [(prediction.std, crop.grid)]
    return [(whole, prediction.probs[1:], crop.grid)], stds


def _refine_regions(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    found: Localisation,
    fine: TrainedStage,
    options: InferenceOptions,
    result: Segmentation,
    timed: Timed,
) -> tuple[list[RegionResult], list[tuple[Tensor, VoxelGrid]]]:
    """Refine the regions that were found, one after the other.

    Args:
        images: Oriented volume (D, H, W) of each channel.
        grid: Their grid, oriented.
        found: Boxes of the coarse stage.
        fine: The fine stage.
        options: How the networks run.
        result: Receives boxes, tiling plans and warnings.
        timed: Records a step.

    Returns:
        The probabilities of the regions for `join`, and their standard deviations for
        `paste_percent`.
    """
    lattice = grid.resampled(fine.spacing_mm).resampled(fine.rule.spacing_mm(grid.spacing_mm))
    intensities = fine.intensities(images)
    parts: list[RegionResult] = []
    stds: list[tuple[Tensor, VoxelGrid]] = []
    for region in (one for one in fine.task.regions if one.name in found.boxes):
        step = f"refine_{region.name}"
        with timed(step):
            tight_box = found.boxes[region.name]
            crop = region_crop(
                tight_box,
                found.grid,
                lattice,
                fine.region_margin_mm,
                fine.tile_size,
                fine.divisor,
                fine.rule,
                fine.least_size,
            )
            prediction = refine(images, grid, crop, region, fine, options, intensities, found)
        result.boxes[region.name] = RegionBox(crop.box, crop.grid)
        _note_crop(result, step, region.name, fine, prediction.tiling_plan, crop.grid)
        for finding in warnings_of("out_of_memory", prediction.warnings):
            result.findings.append(finding.within(region.name))
        parts.append((region, prediction.probs, crop.grid))
        if prediction.std is not None:
            stds.append((prediction.std, crop.grid))
    return parts, stds


def _note_crop(
    result: Segmentation,
    step: str,
    name: str,
    stage: TrainedStage,
    plan: Any,
    grid: VoxelGrid | None,
) -> None:
    """Note how a crop went through the network, and warn where a crop of fixed size is distorted."""
    result.tiling_plans[step] = str(plan)
    if stage.rule.size is not None and grid is not None:
        result.distortions[step] = distortion(grid.spacing_mm)
        result.findings += warnings_of("distortion", distortion_warnings(name, grid))


def _contiguous(labels: np.ndarray) -> np.ndarray:
    """The label map in the order of its axes, copied where it is a view in another order."""
    if labels.flags.c_contiguous:
        return labels
    copied = new_array(labels.shape, labels.dtype)
    np.copyto(copied, labels)
    return copied


def _flipped(values: Tensor, axes: Sequence[int]) -> Tensor:
    """Copy a tensor on the CPU, reversed along axes."""
    copied = new_tensor(tuple(values.shape), values.dtype)
    np.copyto(copied.numpy(), np.flip(values.numpy(), tuple(axes)))
    return copied


@contextmanager
def _timed(
    durations_s: dict[str, float], on_step: Callable[[str], None] | None, step: str
) -> Iterator[None]:
    """Announce a step and record its seconds; it begins without the free memory of the step before."""
    release_free_memory()
    if on_step is not None:
        on_step(step)
    start = time.perf_counter()
    yield
    durations_s[step] = time.perf_counter() - start


def refine(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    crop: Crop,
    region: Region,
    stage: TrainedStage,
    options: InferenceOptions | None = None,
    intensities: Sequence[Intensity] | None = None,
    found: Localisation | None = None,
) -> Prediction:
    """Segment one region; only its crop is resampled.

    Args:
        images: Oriented volume (D, H, W) of each channel; a CT in HU.
        grid: Their grid, oriented.
        crop: Crop of the region, see `region_crop`; may reach outside.
        region: The region, one of the stage's task.
        stage: The fine stage.
        options: How the networks run; the defaults where None.
        intensities: Map of each channel to the range of the network; None = by its values.
        found: Result of the coarse stage with its probabilities, for a stage with a coarse channel.

    Returns:
        Probabilities (L, D, H, W) of the region's labels on the crop. Classes of other regions are
        left out and so count as background.
    """
    lattice = grid.resampled(stage.spacing_mm)

    def channel(one: np.ndarray, outside: float, limits: tuple[float, float] | None) -> Tensor:
        resampled = resample_crop(
            one, grid, lattice, crop, outside, stage.resampling, limits=limits
        )
        return erase_outside(resampled, crop, outside)

    # One name for the image at all times: a second name would keep a second crop in memory while
    # the network runs.
    image = stacked(
        [
            normalise(channel(one, outside, limits), intensity)
            for one, outside, limits, intensity in zip(
                images,
                stage.outside,
                stage.limits,
                intensities or stage.intensities(images),
                strict=True,
            )
        ]
    )
    if stage.has_coarse_channel:
        assert found is not None, "it has the probabilities"
        assert found.probs is not None, "they were asked for"
        assert found.probs_grid is not None, "it comes with them"
        values = stage.task.region_values(region)
        coarse = probability_channel(found.probs, found.probs_grid, crop, values)
        image = torch.cat([image, coarse[None]])
    # Right sides look like left ones to the network.
    flipped = [X_AXIS] if region.side == "right" else []
    if flipped:
        image = _flipped(image, flipped)
    prediction = stage.predict_probs(image, options or InferenceOptions())
    # Copied even without an axis: a view would keep the background and the classes of other regions
    # in memory.
    probs = _flipped(prediction.probs[1 : 1 + len(region.labels)], flipped)
    std = prediction.std
    return prediction._replace(probs=probs, std=None if std is None else std.flip(flipped))
