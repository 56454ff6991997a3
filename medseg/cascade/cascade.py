"""Cascade: the trained stages of a task, which segment a scan together."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from medseg.anatomy.contradictions import remove_contradictions
from medseg.anatomy.plausibility import airless_warnings, volume_warnings
from medseg.cascade.agreement import agreement, distortion_warnings, most_disputed_xyz_mm
from medseg.cascade.bound import DiceBound
from medseg.cascade.join import RegionResult, join, paste_percent
from medseg.cascade.localise import Localisation, localise, predict_body
from medseg.cascade.stage import X_AXIS, Prediction, TrainedStage
from medseg.errors import UserError
from medseg.findings import Finding, information_of, warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop, distortion, region_crop
from medseg.inference.clean_up import clean
from medseg.inference.options import InferenceOptions
from medseg.inference.segmentation import (
    NO_LABEL,
    RegionBox,
    Segmentation,
    StatedBound,
    label_volumes_ml,
)
from medseg.inference.tile_workers import Job, TileWorkers, process_group
from medseg.inference.tile_workers import serve_tiles as serve_jobs
from medseg.inference.tiles import TilingPlan
from medseg.io.scratch import new_array, new_tensor
from medseg.io.volume import Volume
from medseg.memory.profile import timed_step
from medseg.preprocess.crop import erase_outside_, probability_channel, resample_crop
from medseg.preprocess.intensity import Intensity, normalise
from medseg.preprocess.orient import orient, oriented_grid
from medseg.task import Region, Task

REFINE = "refine_"
"""Beginning of the name of a step of the fine stage; the name of its region follows."""
FLIPPED_PLANES = 8
"""Planes that are reversed at a time: their copy stays in the cache of the processor."""
Timed = Callable[[str], AbstractContextManager[None]]
"""Maps the name of a step to a context manager that announces and times the step."""
Deviations = list[tuple[Tensor, VoxelGrid]]
"""For each crop, the standard deviation (D, H, W) of its probabilities, and its grid."""


@dataclass(frozen=True)
class Cascade:
    """Trained stages of one task, and how to run them.

    Attributes:
        coarse: Finds the regions in the whole scan. For a task without regions it segments all
            labels.
        fine: Refines one region in its crop; None for a task without regions.
        options: Tiles, memory, flips.

    Raises:
        UserError: If the stages were trained for different tasks, or one is missing or superfluous.
    """

    coarse: TrainedStage
    fine: TrainedStage | None = None
    options: InferenceOptions = field(default_factory=InferenceOptions)

    def __post_init__(self) -> None:
        task = self.coarse.task
        subject = f"the task {task.name} of the coarse checkpoint"
        if self.fine is None:
            if task.regions:
                raise UserError(
                    f"{subject} has regions, which a fine stage refines; give fine=<checkpoint>"
                )
            return
        if not task.regions:
            raise UserError(f"{subject} has no regions; leave fine out")
        if not task.finds_regions_of(self.fine.task):
            raise UserError(
                f"the coarse checkpoint was trained for the task {task.name} with the labels "
                f"{task.labels}, the fine one for {self.fine.task.name} with "
                f"{self.fine.task.labels}; give two checkpoints of the same task"
            )

    @property
    def stages(self) -> tuple[TrainedStage, ...]:
        """All stages, in the order in which they run."""
        if self.fine is None:
            return (self.coarse,)
        return (self.coarse, self.fine)

    @property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """Name of each stage to the SHA-256 of its files by their paths."""
        return {stage.name: stage.checkpoints for stage in self.stages}

    @property
    def device(self) -> torch.device:
        """Device of the last stage."""
        return self.last.device

    @property
    def precision(self) -> str:
        """Number format of the last stage."""
        return self.last.precision

    @property
    def has_views(self) -> bool:
        """Whether several networks or flips of the last stage are averaged."""
        return self.last.has_views(self.options)

    @property
    def keeps_values(self) -> bool:
        """Whether the networks see the padding value of a scanner as it is stored.

        Otherwise the padding is replaced by air when the scan is read.
        """
        # Our networks are trained on scans whose padding was replaced.
        return False

    @property
    def waiting_bytes(self) -> float:
        """Size above which a seldom used array is a file, see `waits` in `medseg.io.scratch`."""
        # No limit: files suit arrays that are read in the order in which they were written, but
        # crops are read in any order.
        return math.inf

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
        """Task of the results: without the helper labels that the networks may also predict."""
        return self.last.task.without_helpers()

    @property
    def dice_bound(self) -> DiceBound | None:
        """Bound that was calibrated for these two stages together.

        None if they were not calibrated together, or if several checkpoints or flips are averaged.
        """
        # The files of two stages that were calibrated together hold the same bound.
        if self.fine is None or self.fine.dice_bound != self.coarse.dice_bound:
            return None
        if any(stage.has_views(self.options) for stage in self.stages):
            return None
        return self.coarse.dice_bound

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`; a result's `durations_s` lacks those of regions not found."""
        if self.fine is None:
            return ["segment", "join"]
        refining = [f"{REFINE}{region.name}" for region in self.task.regions]
        return ["localise", *refining, "join"]

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

        Returns:
            Labels in the storage order of the volume, with findings, volumes, boxes and durations.

        Raises:
            UserError: If the task has another number of channels.
        """
        task = self.task
        require_channels(task, 1 + len(more_channels))
        # All steps work in LPS order, whatever the storage order of the file.
        first, grid, orientation = orient(volume.array, volume.grid)
        images = [first, *map(orientation.to_lps, more_channels)]
        # The steps fill in the result; its labels come last.
        result = Segmentation(np.empty(0), findings=self._findings_of_stages())
        timed = partial(timed_step, result.durations_s, on_step)
        localisation: Localisation | None = None
        if self.fine is None:
            region_results, stds = _segment_whole(
                images, grid, self.coarse, self.options, result, timed
            )
        else:
            localisation = self._localise(images, grid, self.fine, result, timed)
            region_results, stds = _refine_regions(
                images, grid, localisation, self.fine, self.options, result, timed
            )
        with timed("join"):
            # Receives a sentence for each label of which `join` removes a component that the coarse
            # stage does not mark.
            apart_warnings: list[str] = []
            labels = join(region_results, grid, task, first, localisation, warnings=apart_warnings)
            result.findings += warnings_of("apart", apart_warnings)
            # `_judge` needs the volumes, and updates them where it removes a region.
            result.volumes_ml = label_volumes_ml(labels, grid, task)
            if localisation is not None:
                refined = [region for region, _, _ in region_results]
                values = {region.name: task.region_values(region) for region in refined}
                _compare_stages(localisation, labels, grid, values, result)
        self._judge(labels, first, grid, result)
        result.labels = _contiguous(orientation.from_lps(labels))
        if keep_probabilities:
            # A label that two regions share has a crop in each of them.
            for region, probs, crop_grid in region_results:
                for name, prob in zip(region.labels, probs, strict=True):
                    result.probabilities.setdefault(name, []).append((prob, crop_grid))
        if self.has_views:
            result.disagreement = _contiguous(orientation.from_lps(paste_percent(stds, grid)))
        return result

    def _findings_of_stages(self) -> list[Finding]:
        """Warn of stages whose use differs from their training; every result gets these."""
        findings: list[Finding] = []
        for stage in self.stages:
            findings += warnings_of("other_tiles", stage.warnings)
        return findings

    def _localise(
        self,
        images: Sequence[np.ndarray],
        grid: VoxelGrid,
        fine: TrainedStage,
        result: Segmentation,
        timed: Timed,
    ) -> Localisation:
        """Run the coarse stage; `result` receives its tiling plan and findings."""
        with timed("localise"):
            # The probabilities take the memory of several volumes: they are kept only for a fine
            # stage that has them as a channel.
            localisation = localise(
                images, grid, self.coarse, self.options, keep_probs=fine.has_coarse_channel
            )
        result.findings += localisation.findings
        plan = localisation.tiling_plan
        crop_grid = localisation.crop_grid
        assert plan is not None, "`localise` runs the network"
        assert crop_grid is not None, "`localise` runs the network"
        _note_crop(result, "localise", "whole scan", self.coarse, plan, crop_grid)
        return localisation

    def _judge(
        self, labels: np.ndarray, image: np.ndarray, grid: VoxelGrid, result: Segmentation
    ) -> None:
        """Remove regions on which the stages contradict each other, clean up, and add warnings.

        Args:
            labels: Joined label map (D, H, W) in LPS order; changed in place.
            image: The first channel of the scan, (D, H, W).
            grid: Its grid.
            result: Has volumes and the agreement of the stages, which are used; receives findings
                and bounds, and loses the boxes of regions that are removed.
        """
        task = self.task
        absent_regions, contradiction_warnings = remove_contradictions(
            labels, task, result.volumes_ml, result.agreements
        )
        result.findings += warnings_of("little_agreement", contradiction_warnings)
        for name in absent_regions:
            del result.boxes[name]
        self._clean_up(labels, grid, result)
        result.dice_at_least = self._stated_bounds(result)
        # In a task with regions, the localisation has already warned of an empty result.
        if not task.regions and not any(result.volumes_ml.values()):
            result.findings += warnings_of("empty_result", [NO_LABEL])
        if task.is_ct:
            airless = airless_warnings(labels, image, task)
            result.findings += warnings_of("airless_side", airless)
        implausible = volume_warnings(result.volumes_ml, labels, task)
        result.findings += warnings_of("implausible_volume", implausible)

    def _clean_up(self, labels: np.ndarray, grid: VoxelGrid, result: Segmentation) -> None:
        """Apply the clean-up of the model, in place, and report the changes of volume.

        The clean-up is the last step that changes labels, since a cross-validation chose it on
        results of all other steps. The agreements of the stages are not computed again: the
        bound on Dice was calibrated with agreements from before a clean-up.
        """
        clean_ups = self.last.clean_up
        if not clean_ups:
            return
        clean(labels, grid, self.task, clean_ups)
        before_ml = result.volumes_ml
        result.volumes_ml = label_volumes_ml(labels, grid, self.task)
        for name, volume_ml in result.volumes_ml.items():
            change_ml = volume_ml - before_ml[name]
            if change_ml:
                sentence = f"{name}: the clean-up of the model changed it by {change_ml:+.2f} ml"
                result.findings += information_of("clean_up", [sentence])

    def _stated_bounds(self, result: Segmentation) -> dict[str, StatedBound]:
        """State the bound of each region that was found.

        Args:
            result: Volumes, boxes and agreements after the removal of contradictions.
        """
        bounds: dict[str, StatedBound] = {}
        if self.dice_bound is None:
            return bounds
        for region in self.task.regions:
            is_empty = not any(result.volumes_ml[label] for label in region.labels)
            if region.name not in result.boxes or is_empty:
                continue
            bounds[region.name] = self.dice_bound.stated(result.agreements[region.name])
        return bounds

    def within(self, budget_gib: float) -> "Cascade":
        """Return the same cascade with a bound on the memory of a network pass."""
        # Never more than the user allows.
        allowed_gib = min(self.options.budget_gib, budget_gib)
        return replace(self, options=replace(self.options, budget_gib=allowed_gib))

    def check_budget(self, grid: VoxelGrid) -> None:
        """Refuse a scan if neither its tiles nor slabs of one plane fit into the budget.

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
                # After an error too: the other processes wait for jobs until they are dismissed.
                workers.dismiss()

    def serve_tiles(self) -> None:
        """Run networks for rank 0 until it has segmented all scans.

        For the other processes of torchrun.
        """
        stages = {stage.name: stage for stage in self.stages}

        def run_job(job: Job, images: Tensor) -> Tensor:
            name, network_index, slab_bytes = job
            return stages[name].serve(network_index, images, slab_bytes)

        with process_group():
            serve_jobs(run_job)


def require_channels(task: Task, num_channels: int) -> None:
    """Refuse a scan whose number of channels is not that of the task.

    Raises:
        UserError: If the numbers differ.
    """
    if num_channels == len(task.channels):
        return
    kinds = ", ".join(channel.modality for channel in task.channels)
    if len(task.channels) == 1:
        raise UserError(
            f"the task {task.name} has one channel ({kinds}), but the scan has {num_channels}; "
            "give a file of this channel alone; a folder or a case table gives several scans"
        )
    raise UserError(
        f"the task {task.name} has {len(task.channels)} channels ({kinds}), but the scan has "
        f"{num_channels}; give input=[a,b,…] with a file of each, or a case table with the columns "
        "image, image_1, …"
    )


def _segment_whole(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    stage: TrainedStage,
    options: InferenceOptions,
    result: Segmentation,
    timed: Timed,
) -> tuple[list[RegionResult], Deviations]:
    """Segment all labels at once, for a task without regions.

    Args:
        images: Oriented volume (D, H, W) of each channel.
        grid: Their grid, oriented.
        stage: Its classes are the background and all labels of its task.
        options: How the networks run.
        result: Receives tiling plan and findings.
        timed: Announces and times a step.

    Returns:
        The probabilities for `join`, as those of a single region that has all labels, and their
        standard deviations for `paste_percent`.
    """
    with timed("segment"):
        prediction, crop, _, _ = predict_body(images, grid, stage, options)
    _note_crop(result, "segment", "whole scan", stage, prediction.tiling_plan, crop.grid)
    result.findings += warnings_of("out_of_memory", prediction.warnings)
    # For `join`, the task is one region with all labels. It takes no probabilities of class 0, the
    # background.
    whole = Region(stage.task.name, tuple(stage.task.labels))
    region_results = [(whole, prediction.probs[1:], crop.grid)]
    if prediction.std is None:
        return region_results, []
    return region_results, [(prediction.std, crop.grid)]


def _refine_regions(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    localisation: Localisation,
    fine: TrainedStage,
    options: InferenceOptions,
    result: Segmentation,
    timed: Timed,
) -> tuple[list[RegionResult], Deviations]:
    """Refine the regions that were found, one after the other.

    Args:
        images: Oriented volume (D, H, W) of each channel.
        grid: Their grid, oriented.
        localisation: Boxes of the coarse stage.
        fine: The fine stage.
        options: How the networks run.
        result: Receives boxes, tiling plans and findings.
        timed: Announces and times a step.

    Returns:
        The probabilities of the regions for `join`, and their standard deviations for
        `paste_percent`.
    """
    lattice = grid.resampled(fine.spacing_mm)
    # The grid rule of the stage may rescale the lattice, depending on the spacing of the scan.
    lattice = lattice.resampled(fine.rule.spacing_mm(grid.spacing_mm))
    # Measured once, on the whole scan: a crop has other statistics.
    intensities = fine.intensities(images)
    region_results: list[RegionResult] = []
    stds: Deviations = []
    for region in fine.task.regions:
        if region.name not in localisation.boxes:
            continue
        step = f"{REFINE}{region.name}"
        with timed(step):
            crop = region_crop(
                localisation.boxes[region.name],
                from_grid=localisation.grid,
                lattice=lattice,
                margin_mm=fine.region_margin_mm,
                patch_size=fine.tile_size,
                divisor=fine.divisor,
                rule=fine.rule,
                least_size=fine.least_size,
            )
            prediction = refine(
                images, grid, crop, region, fine, options, intensities, localisation
            )
        # Not the tight box: the fine stage looks for the region in all of its crop.
        result.boxes[region.name] = RegionBox(crop.box, crop.grid)
        _note_crop(result, step, region.name, fine, prediction.tiling_plan, crop.grid)
        for finding in warnings_of("out_of_memory", prediction.warnings):
            result.findings.append(finding.within(region.name))
        region_results.append((region, prediction.probs, crop.grid))
        if prediction.std is not None:
            stds.append((prediction.std, crop.grid))
    return region_results, stds


def _note_crop(
    result: Segmentation,
    step: str,
    name: str,
    stage: TrainedStage,
    plan: TilingPlan,
    grid: VoxelGrid,
) -> None:
    """Note how a crop went through the network, and warn of the distortion of a fixed size.

    Args:
        result: Receives tiling plan, distortion and finding.
        step: Step of `Cascade.steps`, the key of plan and distortion.
        name: Content of the crop, for the warning.
        stage: The stage that saw the crop.
        plan: How the crop went through the network.
        grid: Grid of the crop.
    """
    result.tiling_plans[step] = str(plan)
    if stage.rule.size is not None:
        result.distortions[step] = distortion(grid.spacing_mm)
        result.findings += warnings_of("distortion", distortion_warnings(name, grid))


def _compare_stages(
    localisation: Localisation,
    labels: np.ndarray,
    grid: VoxelGrid,
    values: dict[str, tuple[int, ...]],
    result: Segmentation,
) -> None:
    """Note how much the two stages agree, and where least.

    Args:
        localisation: Result of the coarse stage.
        labels: Joined label map (D, H, W).
        grid: Its grid.
        values: Name to the label values of each region that was refined.
        result: Receives the Dice coefficients and the point of least agreement.
    """
    coarse_labels, coarse_grid = localisation.labels, localisation.grid
    result.agreements = agreement(coarse_labels, coarse_grid, labels, grid, values)
    result.most_disputed_xyz_mm = most_disputed_xyz_mm(coarse_labels, coarse_grid, labels, grid)


def _contiguous(volume: np.ndarray) -> np.ndarray:
    """Return an array in C order; a view in another order is copied."""
    if volume.flags.c_contiguous:
        return volume
    # `new_array` uses a scratch file if the volume exceeds the memory.
    copied = new_array(volume.shape, volume.dtype)
    np.copyto(copied, volume)
    return copied


def _flipped(values: Tensor, axes: Sequence[int]) -> Tensor:
    """Copy a tensor on the CPU, reversed along axes; the copy may lie in a scratch file."""
    copied = new_tensor(tuple(values.shape), values.dtype)
    # NumPy's flip is a view; torch's flip would be a second copy in memory.
    np.copyto(copied.numpy(), np.flip(values.numpy(), tuple(axes)))
    return copied


def refine(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    crop: Crop,
    region: Region,
    stage: TrainedStage,
    options: InferenceOptions | None = None,
    intensities: Sequence[Intensity] | None = None,
    localisation: Localisation | None = None,
) -> Prediction:
    """Segment one region; only its crop is resampled.

    Args:
        images: Oriented volume (D, H, W) of each channel; a CT in HU.
        grid: Their grid, oriented.
        crop: Crop of the region, see `region_crop`; may reach outside.
        region: The region, one of the stage's task.
        stage: The fine stage.
        options: How the networks run; the defaults where None.
        intensities: Intensity normalisation of each channel; None = chosen from `images`.
        localisation: Result of the coarse stage with its probabilities, for a stage with a coarse
            channel.

    Returns:
        Prediction on the crop, with probabilities (L, D, H, W) of the region's L labels only: what
        they leave of 1 counts as background.
    """
    # Right sides are mirrored, as in training, so that they look like left ones to the network.
    flipped_axes = []
    if region.side == "right":
        flipped_axes = [X_AXIS]
    image = _input_image(images, grid, crop, region, stage, flipped_axes, intensities, localisation)
    # Classes 1 to L are the labels of the region, whichever it is. Class 0 is the background, and
    # classes above L belong to regions with more labels and to helper labels.
    classes = slice(1, 1 + len(region.labels))
    prediction = stage.predict_probs(image, options or InferenceOptions(), classes)
    # Copied even if no axis is flipped: with tiles, it is a view that keeps all classes in memory.
    probs = _flipped(prediction.probs, flipped_axes)
    if prediction.std is None:
        return prediction._replace(probs=probs)
    # The standard deviation has no classes to leave out.
    return prediction._replace(probs=probs, std=prediction.std.flip(flipped_axes))


def _input_image(
    images: Sequence[np.ndarray],
    grid: VoxelGrid,
    crop: Crop,
    region: Region,
    stage: TrainedStage,
    flipped_axes: list[int],
    intensities: Sequence[Intensity] | None,
    localisation: Localisation | None,
) -> Tensor:
    """Make the input (C, D, H, W) of the fine stage for a region; arguments as for `refine`.

    The input is reversed along `flipped_axes`.
    """
    # The lattice at the stage's spacing, on which training stores its cases. A crop on another grid
    # is resampled from this lattice, as in training.
    lattice = grid.resampled(stage.spacing_mm)
    intensities = intensities or stage.intensities(images)
    result = new_tensor((stage.num_channels, *crop.grid.shape), stage.image_dtype)
    for number, image in enumerate(images):
        outside = stage.outside[number]
        finish = partial(normalise, intensity=intensities[number])
        resample_crop(
            image,
            grid,
            lattice,
            crop,
            outside,
            stage.resampling,
            limits=stage.limits[number],
            finish=finish,
            out=result[number],
        )
        # A trailing underscore says that a function changes its argument in place.
        erase_outside_(result[number], crop, finish(torch.tensor(outside)).item())
    if stage.has_coarse_channel:
        assert localisation is not None, "a coarse channel needs the result of the coarse stage"
        assert localisation.probs is not None, "`localise` ran with keep_probs=True"
        assert localisation.probs_grid is not None, "probabilities come with their grid"
        # The last channel: the probabilities of the region's labels, summed and resampled.
        values = stage.task.region_values(region)
        probability_channel(
            localisation.probs, localisation.probs_grid, crop, values, out=result[-1]
        )
    if flipped_axes:
        _flip_(result, flipped_axes)
    return result


def _flip_(image: Tensor, axes: list[int]) -> None:
    """Reverse an image (C, D, H, W) in place along axes -2 (y) or -1 (x)."""
    for planes in image.split(FLIPPED_PLANES, dim=1):
        planes.copy_(planes.flip(axes))
