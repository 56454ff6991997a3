"""Model of nnU-Net: a model folder whose networks segment scans as nnU-Net's predictor does."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from medseg.errors import UserError
from medseg.findings import Finding, information_of, warnings_of
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.sizes import Shape
from medseg.inference.options import Backend, InferenceOptions, Seen, Sums
from medseg.inference.segmentation import Segmentation
from medseg.io.scratch import new_array, new_tensor, scratch_at_most
from medseg.io.volume import Volume
from medseg.memory.accounting import count_pass, forward_bytes_per_voxel
from medseg.memory.precision import autocast, tf32_as
from medseg.memory.profile import timed_step
from medseg.memory.shapes import meta_layers
from medseg.memory.tracker import MemoryTracker
from medseg.models.traits import build_on_meta
from medseg.nnunet.checkpoint import read_checkpoint
from medseg.nnunet.folder import ModelFolder, open_model_folder, previous_folder
from medseg.nnunet.labels import MAX_FOLDS_BYTES, PLANE_BYTES, mean_planes, reduce_planes
from medseg.nnunet.network import call_network, first_difference, make_network, network_input
from medseg.nnunet.pass_watch import PassWatch
from medseg.nnunet.plan import SPLINE, NnunetPlan, PlanError
from medseg.nnunet.planes import Planes, SpacingMm, make_planes
from medseg.nnunet.preprocess import (
    Prepared,
    filtered_image_axes,
    preparation_bytes,
    prepare,
    resampled_shape,
)
from medseg.nnunet.slabs import count_in_slabs, least_budget_bytes, logits_in_slabs
from medseg.nnunet.tiles import all_starts, finished_planes
from medseg.preprocess.orient import Orientation, orientation_of, ras_orientation_of
from medseg.task import Channel, Task
from medseg.weights.files import checksum

STEPS = ("prepare", "segment")
PREPARE, SEGMENT = STEPS
# Step of a cascade before `STEPS`: the first stage segments the scan.
PREVIOUS = "previous"
# Networks run one at a time, because a model loads the weights of each fold into one network.
_NETWORK_LOCK = threading.Lock()
# The times below are of work outside of the networks. One unit is the time in which one voxel of a
# channel is read, checked and normalised: 15 ns on an AMD EPYC.
# Time to filter a voxel of a channel along one axis for a cubic spline.
FILTER_TIME = 2.0
# Times to interpolate a logit of the scan, by an estimate or exactly, see `medseg.nnunet.labels`.
ESTIMATE_TIME = 0.18
EXACT_TIME = 1.0
# Time to add a logit of a tile to the sums.
SUM_TIME = 0.18
# Time to start a pass of a network; it does not depend on the size of the tile.
PASS_TIME = 3000.0
# Size in bytes above which arrays that are seldom used (`waits` in `medseg.io.scratch`) are files:
# the scan, its image and its labels. For a CT of 800 slices this saves 600 MiB. A case takes
# minutes and uses them for seconds only; their pages come back to memory within half a second.
WAITING_BYTES = 2**25
# Options of `inference` for the passes of medseg's own networks; a model folder of nnU-Net refuses
# them.
REFUSED_OPTIONS = ("tile_size", "half_weights")


@dataclass(frozen=True)
class Fold:
    """Network weights of one fold.

    Attributes:
        name: `0`, `1`, … or `all`.
        path: Its checkpoint.
        mirror_axes: Spatial axes of the network's input along which it was trained with mirrored
            images.
    """

    name: str
    path: Path
    mirror_axes: tuple[int, ...]


class StepArray(NamedTuple):
    """An array that a step has in memory, or in a temporary file if it is large.

    Attributes:
        num_bytes: Its size.
        written_share: Share of the array that is written before the last pass of a network begins.
            Until then the system gives no memory to the rest.
        waits: Whether the array is seldom used, and therefore a file from a smaller size on, see
            `waits` in `medseg.io.scratch`.
        touched_bytes: Bytes that are used at a time. If the array is a file, only these are in
            memory.
    """

    num_bytes: int
    written_share: float = 1.0
    waits: bool = False
    touched_bytes: float = math.inf


class ExpectedCost(NamedTuple):
    """Cost of a case, as far as it is known before the scan is read.

    Attributes:
        memory: Arrays of each step, without the scan and the passes of the network.
        other_time: Time outside of the networks, in the unit above `FILTER_TIME`.
        operations: Number of additions and multiplications of the networks.
    """

    memory: dict[str, list[StepArray]]
    other_time: float
    operations: float


@dataclass(frozen=True)
class NnunetModel:
    """A model folder that is ready to segment scans.

    Attributes:
        folder: Its files and its plan.
        task: Labels and channels.
        network: The network; the weights of each fold are loaded into it in turn.
        folds: The folds whose logits are averaged.
        options: Keys of `inference`, such as the sums, the orientation and the budget of a pass.
        device: Device of the network.
        bytes_per_voxel: Bytes of a pass per voxel of a tile.
        least_slab_bytes: Smallest budget, in bytes, with which a tile runs in slabs.
        checkpoints: Name of the configuration to the SHA-256 of each of its checkpoints, by path.
        operations_per_voxel: Additions and multiplications of a pass per voxel of a tile.
        precision: `fp32`, `bf16` on a CPU, or `fp16` on a GPU.
        previous: First stage of a cascade; None for other models.
        watch: Counts the seconds of passes of the network, for the forecast of later cases.
    """

    folder: ModelFolder
    task: Task
    network: nn.Module
    folds: tuple[Fold, ...]
    options: InferenceOptions
    device: torch.device
    bytes_per_voxel: float
    least_slab_bytes: float
    checkpoints: dict[str, dict[str, str]]
    operations_per_voxel: float = 0.0
    precision: str = "fp32"
    previous: NnunetModel | None = None
    watch: PassWatch = field(default_factory=PassWatch, compare=False)

    # Properties of all models, see `medseg.inference.scan_model.ScanModel`. Padding of a scan stays
    # as it is, because nnU-Net does not replace it by air in training.
    keeps_values = True
    has_views = False
    backend_bytes = 0

    @property
    def plan(self) -> NnunetPlan:
        """Plan of the folder."""
        return self.folder.plan

    @property
    def waiting_bytes(self) -> float:
        """Bytes above which seldom used arrays are files, see `WAITING_BYTES`.

        Infinite where the planes of the network are not slices of the scan: each plane would bring
        all pages of the scan and of the labels back into memory.
        """
        return WAITING_BYTES if self.plan.transpose[0] == 0 else math.inf

    @property
    def steps(self) -> list[str]:
        """Names of the steps of `segment`, in their order."""
        return [PREVIOUS, *STEPS] if self.previous else list(STEPS)

    @property
    def pass_steps(self) -> list[str]:
        """Steps in which a network runs."""
        return [step for step in self.steps if step != PREPARE]

    @property
    def orientation(self) -> str:
        """Orientation in which the network sees a scan: `stored`, `RAS` or `LPS`."""
        stated = self.options.orientation
        return self.plan.orientation if stated is None else stated.value

    @property
    def slab_bytes(self) -> float | None:
        """Budget of a pass in slabs, in bytes; None where the tile runs in one pass."""
        budget_bytes = self.options.budget_gib * 2**30
        if not self.can_run_in_slabs or self._tile_bytes <= budget_bytes:
            return None
        return budget_bytes

    @cached_property
    def usual_pass_bytes(self) -> int:
        """Bytes of a pass of the network, counted on the meta device, for the forecast."""
        num_bytes = count_pass(
            lambda: make_network(self.plan),
            (1, self.plan.num_image_channels, *self.plan.patch_size),
            self._run_counted,
            precision=self.precision,
        )
        if self.previous is not None:
            num_bytes = max(num_bytes, self.previous.usual_pass_bytes)
        return num_bytes

    def _run_counted(self, network: nn.Module, image: Tensor, tracker: MemoryTracker) -> None:
        """Run a network on the meta device as `_run` does on a CPU."""
        if self.slab_bytes is None:
            call_network(network, image, self.plan)
        else:
            inputs = network_input(image, self.plan)
            count_in_slabs(network, inputs, self.slab_bytes, tracker)

    @property
    def least_bytes(self) -> float:
        """Smallest budget in bytes with which a tile runs, in slabs or in one pass.

        The size of a tile is fixed, because another one would change the labels. A GPU has memory
        of its own, which the budget does not bound.
        """
        if self.device.type != "cpu":
            return 0.0
        num_bytes = self._tile_bytes
        if self.can_run_in_slabs:
            num_bytes = min(num_bytes, self.least_slab_bytes)
        if self.previous is not None:
            num_bytes = max(num_bytes, self.previous.least_bytes)
        return num_bytes

    @property
    def can_run_in_slabs(self) -> bool:
        """Whether a tile can run in slabs: on a CPU, unless it is the one plane of a 2D network."""
        return self.device.type == "cpu" and not self.plan.is_2d

    @property
    def _tile_bytes(self) -> float:
        """Bytes of a tile in one pass."""
        return self.bytes_per_voxel * math.prod(self.plan.patch_size)

    def within(self, budget_gib: float) -> NnunetModel:
        """Return the same model with a bound on the memory of a pass; larger tiles run in slabs.

        Raises:
            UserError: If the bound is too small even for slabs.
        """
        # The first stage is checked first: `least_bytes` may be that of its tile, and the message
        # below would then name the tile of the wrong stage.
        previous = None if self.previous is None else self.previous.within(budget_gib)
        if self.least_bytes > budget_gib * 2**30:
            raise UserError(
                f"inference.max_ram_gib={self.options.max_ram_gib:g} leaves {budget_gib:.2f} GiB "
                f"for a pass of the network, but a tile of {_times(self.plan.patch_size)} voxels "
                f"needs {self.least_bytes / 2**30:.2f} GiB; raise it by the difference at least"
            )
        options = replace(self.options, budget_gib=min(self.options.budget_gib, budget_gib))
        return replace(self, options=options, previous=previous)

    def check_budget(self, grid: VoxelGrid) -> None:
        """Check nothing: a tile is the same for all scans, and `within` has checked its budget."""

    def expected(self, grid: VoxelGrid) -> ExpectedCost:
        """Compute the cost of a case from the header of its scan.

        The cost is that of the whole scan, because the crop to the nonzero voxels is not known yet.

        Args:
            grid: Grid of the scan, in storage order.
        """
        logits_cost = self.expected_logits(grid)
        depth, _, height, width = self.logits_shape(grid)
        num_heads = self.plan.labels.num_heads
        # The finished planes before and after a plane of the scan, see `reduce_planes`.
        num_values = 2 * num_heads * height * width
        source_planes = StepArray(self._sums_dtype.itemsize * num_values)
        (_, rows, columns), _ = self._transposed(grid)
        scan_plane = StepArray(PLANE_BYTES * rows * columns)
        labels = StepArray(math.prod(grid.shape), waits=grid.is_axial)
        if self._has_stored_planes(grid):
            # When the last tiles begin, only the planes before them are complete.
            z_starts, _, _ = self._starts(grid)
            written_share = z_starts[-1] / max(depth, self.plan.patch_size[0])
            labels = labels._replace(written_share=written_share, touched_bytes=rows * columns)
        logits_cost.memory[SEGMENT] += [source_planes, scan_plane, labels]
        num_scan_logits = num_heads * math.prod(grid.shape)
        other_time = logits_cost.other_time + self._logit_time * num_scan_logits
        if self.previous is None:
            return logits_cost._replace(other_time=other_time)
        previous_cost = self.previous.expected(grid)
        # The preparation of the first stage is left out: its passes usually take more memory.
        return ExpectedCost(
            {PREVIOUS: previous_cost.memory[SEGMENT], **logits_cost.memory},
            previous_cost.other_time + other_time,
            previous_cost.operations + logits_cost.operations,
        )

    def expected_logits(self, grid: VoxelGrid) -> ExpectedCost:
        """Compute the cost of the logits, without their labels and without the previous stage.

        Args:
            grid: Grid of the scan, in storage order.
        """
        plan = self.plan
        shape, spacing_mm = self._transposed(grid)
        num_tiles = math.prod(map(len, self._starts(grid)))
        num_passes = num_tiles * self._passes_per_tile
        num_voxels = num_passes * math.prod(plan.patch_size)
        num_filtered_axes = len(filtered_image_axes(plan, shape, spacing_mm))
        voxel_time = 1 + FILTER_TIME * num_filtered_axes
        other_time = len(plan.channels) * voxel_time * math.prod(shape)
        other_time += SUM_TIME * plan.labels.num_heads * num_voxels + PASS_TIME * num_passes
        operations = num_voxels * self.operations_per_voxel
        return ExpectedCost(self._logits_memory(grid), other_time, operations)

    @property
    def _passes_per_tile(self) -> int:
        """Passes of all folds and all combinations of mirrored axes."""
        return sum(2 ** len(self._mirror_axes(fold)) for fold in self.folds)

    def _logits_memory(self, grid: VoxelGrid) -> dict[str, list[StepArray]]:
        """List the arrays of the two steps in which the logits are computed."""
        plan = self.plan
        has_previous = self.previous is not None
        itemsize = self._sums_dtype.itemsize
        num_heads = plan.labels.num_heads
        depth, height, width = self._padded_shape(grid)
        # All labels of the previous stage are one channel here; the network splits it, see
        # `network_input`.
        num_channels = plan.num_image_channels
        # A tile is read and added in whole rows of the scan, because memory comes in pages.
        touched_voxels = plan.patch_size[0] * plan.patch_size[1] * width
        # The image is float32.
        image = StepArray(
            4 * num_channels * depth * height * width,
            waits=True,
            touched_bytes=4 * num_channels * touched_voxels,
        )
        # Sums of the heads, and of the weights, in as many planes as a tile has.
        window = StepArray(
            itemsize * (num_heads + 1) * plan.patch_size[0] * height * width,
            touched_bytes=itemsize * num_heads * touched_voxels,
        )
        segment = [image, window]
        is_mirrored = self._passes_per_tile > len(self.folds)
        if is_mirrored:
            # Sums of the mirrored passes of a tile, in float32.
            segment.append(StepArray(4 * num_heads * math.prod(plan.patch_size)))
        fold_sums = StepArray(self.logits_bytes(grid))
        # Only several folds are summed. Larger sums are a file, see `mean_planes`.
        if len(self.folds) > 1 and fold_sums.num_bytes <= MAX_FOLDS_BYTES:
            segment.append(fold_sums)
        shape, spacing_mm = self._transposed(grid)
        preparing = preparation_bytes(plan, shape, spacing_mm, has_previous=has_previous)
        return {PREPARE: [image, StepArray(preparing)], SEGMENT: segment}

    @property
    def _logit_time(self) -> float:
        """Time to interpolate a logit of the scan, in the unit above `FILTER_TIME`."""
        resampling = self.plan.logits_resampling
        is_linear = resampling.function == SPLINE and resampling.order <= 1
        is_estimated = is_linear and self.plan.labels.region_values is None
        return ESTIMATE_TIME if is_estimated else EXACT_TIME

    def logits_shape(self, grid: VoxelGrid) -> tuple[int, int, int, int]:
        """Shape (D, K, H, W) of the logits of a whole scan at the spacing of the network."""
        shape, spacing_mm = self._transposed(grid)
        depth, height, width = resampled_shape(shape, spacing_mm, self.plan.for_scan(spacing_mm))
        return depth, self.plan.labels.num_heads, height, width

    def logits_bytes(self, grid: VoxelGrid) -> int:
        """Bytes of the logits of a scan, in the precision of the sums."""
        return self._sums_dtype.itemsize * math.prod(self.logits_shape(grid))

    def _padded_shape(self, grid: VoxelGrid) -> Shape:
        """Shape of the network's image of a scan, at least as large as a tile."""
        depth, _, height, width = self.logits_shape(grid)
        z, y, x = self.plan.patch_size
        return max(depth, z), max(height, y), max(width, x)

    def _starts(self, grid: VoxelGrid) -> tuple[list[int], list[int], list[int]]:
        """First voxels of the tiles along each axis."""
        return all_starts(
            self._padded_shape(grid),
            self.plan.patch_size,
            self.options.overlap,
            is_2d=self.plan.is_2d,
        )

    def _transposed(self, grid: VoxelGrid) -> tuple[Shape, SpacingMm]:
        """Shape and spacing of a scan in the network's order of axes."""
        grid = self.reoriented_grid(grid)
        z, y, x = self.plan.transpose
        shape = grid.shape[z], grid.shape[y], grid.shape[x]
        return shape, (grid.spacing_mm[z], grid.spacing_mm[y], grid.spacing_mm[x])

    def _has_stored_planes(self, grid: VoxelGrid) -> bool:
        """Whether the planes of the network are slices of the stored scan.

        If they are not, each plane of labels touches all memory pages of the label map.
        """
        stored_axes = self._reorientation_of(grid).orientation.order
        first_axis = self.plan.transpose[0]
        return stored_axes[first_axis] == 0

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: prepare it, run all tiles, and reduce their logits to stored labels.

        Args:
            volume: First channel.
            more_channels: The other channels, (D, H, W) each, on the grid of the first.
            on_step: Called with the name of each step when it begins.
            keep_probabilities: Must be False: logits become labels plane by plane and are dropped.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        assert not keep_probabilities, "`save=probabilities` is refused before the first case"
        # The labels are set in the last step.
        result = Segmentation(np.empty(0))
        prepared = self.prepare_scan(volume, more_channels, result, on_step)
        seconds_before = self.watch.seconds
        with timed_step(result.durations_s, on_step, SEGMENT), self._naming_the_folder():
            # Each plane of the network may touch the whole label map of a scan that is not axial,
            # so that label map stays in memory.
            result.labels = new_array(volume.array.shape, np.uint8, waits=volume.grid.is_axial)
            self._segment(prepared, self.crop_of(result.labels, prepared.box, volume.grid))
        result.pass_s += self.watch.seconds - seconds_before
        result.tiling_plans[SEGMENT] = self.described_passes()
        result.findings += self.findings_of(volume.grid)
        result.measure(volume.grid, self.task)
        return result

    def prepare_scan(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray],
        result: Segmentation,
        on_step: Callable[[str], None] | None,
    ) -> Prepared:
        """Bring a scan to the input of the network; in a cascade, segment it by the first stage.

        Args:
            volume: See `segment`.
            more_channels: See `segment`.
            result: Receives the durations, and what the first stage adds: its seconds in passes,
                its tiling plan and its findings.
            on_step: See `segment`.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        reorientation = self._reorientation_of(volume.grid)
        grid = reorientation.reorient_grid(volume.grid)
        images = [reorientation.reorient_array(image) for image in (volume.array, *more_channels)]
        previous: np.ndarray | None = None
        if self.previous is not None:
            with timed_step(result.durations_s, on_step, PREVIOUS):
                previous_result = self.previous.segment(volume, more_channels)
            previous = reorientation.reorient_array(previous_result.labels)
            result.tiling_plans[PREVIOUS] = previous_result.tiling_plans[SEGMENT]
            result.pass_s = previous_result.pass_s
            result.findings += self._findings_of_previous(previous_result, volume.grid)
        with timed_step(result.durations_s, on_step, PREPARE), self._naming_the_folder():
            return prepare(images, grid.spacing_mm, self.plan, previous)

    def crop_of(self, stored: np.ndarray, box: VoxelBox, grid: VoxelGrid) -> np.ndarray:
        """Return the crop of stored labels (D, H, W) as a view in the network's order of axes.

        Args:
            stored: Labels of the whole scan, in storage order.
            box: The crop, see `Prepared.box`.
            grid: Grid of the scan.
        """
        reoriented = self._reorientation_of(grid).reorient_array(stored)
        return reoriented.transpose(self.plan.transpose)[box.slices()]

    def reoriented_grid(self, grid: VoxelGrid) -> VoxelGrid:
        """Return the grid of a scan in the orientation of the network, not transposed."""
        return self._reorientation_of(grid).reorient_grid(grid)

    def findings_of(self, grid: VoxelGrid) -> list[Finding]:
        """Return notes on the folder, and a warning if the orientation of a scan is unusual."""
        findings = information_of("model_folder", self.folder.notes)
        return findings + warnings_of("stored_orientation", self._side_warnings(grid))

    def _findings_of_previous(self, result: Segmentation, grid: VoxelGrid) -> list[Finding]:
        """List the findings of the first stage, each with the name of its folder.

        A warning about the orientation of the scan is left out, because the second stage gives it.

        Args:
            result: Result of the first stage.
            grid: Grid of the scan.
        """
        assert self.previous is not None, "only a cascade has such findings"
        repeated = warnings_of("stored_orientation", self._side_warnings(grid))
        findings = []
        for finding in result.findings:
            if finding not in repeated:
                findings.append(finding.within(self.previous.folder.path.name))
        return findings

    def planes_of(self, prepared: Prepared) -> Planes:
        """Make the resampling of a prepared scan's logits to its crop.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        plan = self.plan.for_scan(prepared.spacing_mm)
        with self._naming_the_folder():
            return make_planes(
                plan.logits_resampling,
                prepared.shape,
                prepared.box.shape,
                plan.spacing_mm,
                prepared.spacing_mm,
            )

    @torch.inference_mode()
    def store_logits(self, prepared: Prepared) -> Tensor:
        """Write the logits of a prepared scan (D, K, H, W) to a temporary file."""
        depth, height, width = prepared.shape
        shape = (depth, self.plan.labels.num_heads, height, width)
        with scratch_at_most(MAX_FOLDS_BYTES):
            stored = new_tensor(shape, self._sums_dtype)
        with self._naming_the_folder(), _NETWORK_LOCK, tf32_as(self.precision):
            for number, plane in enumerate(self._mean_planes(prepared)):
                stored[number] = plane
        return stored

    @torch.inference_mode()
    def _segment(self, prepared: Prepared, labels: np.ndarray) -> None:
        """Segment a prepared scan.

        Args:
            prepared: The scan.
            labels: Receives the labels of its crop, see `crop_of`.
        """
        planes = self.planes_of(prepared)
        with _NETWORK_LOCK, tf32_as(self.precision):
            logits = self._mean_planes(prepared)
            reduce_planes(logits, planes, self.plan.labels.region_values, labels)

    def _mean_planes(self, prepared: Prepared) -> Iterator[Tensor]:
        """Yield planes of logits (K, H, W), averaged over the folds."""
        # A generator: the weights of a fold are loaded when its first plane is requested.
        folds = (self._fold_planes(fold, prepared) for fold in self.folds)
        depth, height, width = prepared.shape
        shape = (depth, self.plan.labels.num_heads, height, width)
        return mean_planes(folds, len(self.folds), shape)

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """Turn a `PlanError` of the block into an error that names the folder.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        try:
            yield
        except PlanError as error:
            raise UserError(f"weights={self.folder.path}: {error.sentence}") from error

    def _fold_planes(self, fold: Fold, prepared: Prepared) -> Iterator[Tensor]:
        """Yield planes of logits (K, H, W) of one fold, without the padding."""
        checkpoint = read_checkpoint(fold.path, f"weights={self.folder.path}")
        self.network.load_state_dict(checkpoint.weights)
        # The network has copied the weights. Without this line the generator would keep them until
        # its last plane.
        del checkpoint
        planes = finished_planes(
            self._run,
            prepared.image,
            self.plan.patch_size,
            self.plan.labels.num_heads,
            self._mirror_axes(fold),
            self._sums_dtype,
            self.options.overlap,
            is_2d=self.plan.is_2d,
        )
        z, y, x = prepared.padding
        depth, height, width = prepared.shape
        for number, plane in enumerate(planes):
            if z <= number < z + depth:
                yield plane[:, y : y + height, x : x + width]

    def _run(self, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """Run the network on a tile (1, C, d, h, w).

        Args:
            image: The tile.
            take: Receives the logits on the CPU, see `medseg.nnunet.tiles.Run`.
        """
        if self.device.type == "cuda":
            with autocast(self.precision, "cuda"), self.watch.running():
                # The copy to the CPU waits for the GPU, so the watch counts all of its work.
                logits = call_network(self.network, image.to(self.device), self.plan).cpu()
            take(logits)
            return

        def take_floats(planes: Tensor) -> None:
            """Pass planes on in float32, since the sums of tiles do not take bf16."""
            # The network calls this during its pass, but adding to the sums is not its work.
            with self.watch.paused():
                take(planes.float())

        with autocast(self.precision, "cpu"), self.watch.running():
            if self.slab_bytes is not None:
                inputs = network_input(image, self.plan)
                logits_in_slabs(self.network, inputs, self.slab_bytes, take_floats)
                return
            take_floats(call_network(self.network, image, self.plan))

    def _mirror_axes(self, fold: Fold) -> tuple[int, ...]:
        """Axes of the transposed scan along which the tiles of a fold are mirrored."""
        # None, the default, and True both mean the axes of the training.
        if self.options.tta is False:
            return ()
        # Axis 0 of a 2D network's plane is axis 1 of the scan.
        first_axis = 1 if self.plan.is_2d else 0
        return tuple(first_axis + axis for axis in fold.mirror_axes)

    @property
    def _sums_dtype(self) -> torch.dtype:
        """Precision of the sums of tiles and folds."""
        return torch.float32 if self.options.sums is Sums.float else torch.half

    def _reorientation_of(self, grid: VoxelGrid) -> _Reorientation:
        """Choose how arrays on a stored grid are reoriented for the network."""
        if self.orientation == Seen.stored:
            return _Reorientation(Orientation((0, 1, 2), (False, False, False)))
        if self.orientation == Seen.LPS:
            return _Reorientation(orientation_of(grid))
        return _Reorientation(ras_orientation_of(grid))

    def _side_warnings(self, grid: VoxelGrid) -> list[str]:
        """Warn if left and right labels depend on how the scan happens to be stored.

        Only a network that sees the stored array depends on the storage. A scan that is stored in
        LPS, as usual for a CT, needs no warning.
        """
        is_lps = orientation_of(grid) == Orientation((0, 1, 2), (False, False, False))
        if self.orientation != Seen.stored or is_lps or not self.task.has_sides:
            return []
        return [
            "the network sees the scan as it is stored, and its axes do not point to left, "
            "posterior and superior: left and right labels are swapped if the training scans were "
            "stored in another direction; look at them, or give inference.orientation=LPS (or RAS)"
        ]

    def described_passes(self) -> str:
        """Describe in words how tiles go through the networks."""
        names = ", ".join(fold.name for fold in self.folds)
        num_axes = max(len(self._mirror_axes(fold)) for fold in self.folds)
        sums = "float32" if self._sums_dtype is torch.float32 else "half precision"
        slabs = "" if self.slab_bytes is None else ", in slabs"
        return (
            f"tiles of {_times(self.plan.patch_size)}{slabs}, fold {names}, "
            f"mirrored along {num_axes} axes, {self.precision}, sums in {sums}, "
            f"orientation {self.orientation}"
        )


@dataclass(frozen=True)
class _Reorientation:
    """Reorientation of stored arrays and grids to what the network sees.

    Attributes:
        orientation: Axes and flips that lead to LPS, to RAS, or to the stored orientation itself.
    """

    orientation: Orientation

    def reorient_array(self, array: np.ndarray) -> np.ndarray:
        """Reorient a stored array (D, H, W); a view."""
        # `to_lps` is named after the usual target, but applies any orientation.
        return self.orientation.to_lps(array)

    def reorient_grid(self, grid: VoxelGrid) -> VoxelGrid:
        """Reorient the grid of a stored array."""
        return grid.reoriented(self.orientation.order, self.orientation.flips)


def load_nnunet(
    path: Path,
    folds: Sequence[str] | None,
    device: torch.device,
    options: InferenceOptions,
    precision: str | None = None,
) -> NnunetModel:
    """Load a model folder of nnU-Net; nothing in it is executed.

    Args:
        path: The folder, one above it, or the zip file of an export.
        folds: Names of the folds; None = all.
        device: Where the network will run.
        options: Keys of `inference`.
        precision: `fp32`, `bf16` on a CPU, or `fp16` on a GPU; None = as nnU-Net: `fp32` on a CPU,
            `fp16` on a GPU, where it runs in torch's autocast.

    Raises:
        UserError: If the folder or an option cannot be used.
    """
    _refuse_options(options, precision, device)
    if precision is None:
        precision = "fp32" if device.type == "cpu" else "fp16"
    folder = open_model_folder(path, folds)
    previous = None
    if folder.plan.previous_stage is not None:
        first_stage = previous_folder(folder, folds, path)
        source = f"weights={first_stage.path}"
        previous = _load_folder(first_stage, source, device, options, precision)
    model = _load_folder(folder, f"weights={path}", device, options, precision)
    if previous is None:
        return model
    # The labels depend on the weights of both stages.
    checkpoints = previous.checkpoints | model.checkpoints
    return replace(model, previous=previous, checkpoints=checkpoints)


def _load_folder(
    folder: ModelFolder,
    source: str,
    device: torch.device,
    options: InferenceOptions,
    precision: str,
) -> NnunetModel:
    """Load the networks of one configuration.

    Args:
        folder: Its files.
        source: Key and value of the user, for messages.
        device: See `load_nnunet`.
        options: See `load_nnunet`.
        precision: See `NnunetModel`.

    Raises:
        UserError: As `load_nnunet`.
    """
    try:
        # A plan may describe a network larger than the memory. On the meta device it takes none,
        # and its shapes are compared with those of the weights first. With
        # `may_compute=False` a constructor that needs values fails instead of running on the CPU.
        network_on_meta = build_on_meta(lambda: make_network(folder.plan), may_compute=False)
        folds = _load_folds(folder, source, network_on_meta)
        network = make_network(folder.plan).to(device).eval()
    except PlanError as error:
        raise UserError(f"{source}: {error.sentence}") from error
    checksums = {str(file): checksum(file) for file in folder.checkpoints.values()}
    model = NnunetModel(
        folder=folder,
        task=task_of(folder.plan),
        network=network,
        folds=tuple(folds),
        options=options,
        device=device,
        bytes_per_voxel=_bytes_per_voxel(network, folder.plan, device),
        least_slab_bytes=_least_slab_bytes(network_on_meta, folder.plan, precision, device),
        checkpoints={folder.plan.configuration: checksums},
        operations_per_voxel=_operations_per_voxel(network_on_meta, folder.plan),
        precision=precision,
    )
    if model.least_bytes > options.budget_gib * 2**30:
        # Rounded up to thousandths, so that the number in the message is enough.
        least_gib = math.ceil(model.least_bytes / 2**30 * 1000) / 1000
        raise UserError(
            f"inference.budget_gib={options.budget_gib:g} is too small for a tile of "
            f"{_times(folder.plan.patch_size)} voxels; raise it to {least_gib:g}, since a smaller "
            "tile would change the labels"
        )
    return model


def _load_folds(folder: ModelFolder, source: str, network_on_meta: nn.Module) -> list[Fold]:
    """Check the checkpoint of each fold; the weights stay in the files.

    Args:
        folder: Files of one configuration.
        source: Key and value of the user, for messages.
        network_on_meta: Network of the plan on the meta device.

    Raises:
        UserError: If a checkpoint is damaged or does not fit the plan.
    """
    num_axes = 2 if folder.plan.is_2d else 3
    folds: list[Fold] = []
    for name, file in folder.checkpoints.items():
        checkpoint = read_checkpoint(file, f"{source}: fold {name}")
        difference = first_difference(network_on_meta, checkpoint.weights)
        if difference:
            raise UserError(
                f"{source}: the weights of fold {name} do not fit the network of plans.json "
                f"with {folder.plan.labels.num_heads} outputs by dataset.json ({difference}); "
                "take the files of one training"
            )
        if max(checkpoint.mirror_axes, default=0) >= num_axes:
            raise UserError(
                f"{source}: fold {name} was trained with images mirrored along the axes "
                f"{checkpoint.mirror_axes}, but the network of plans.json has {num_axes}; "
                "take the files of one training"
            )
        folds.append(Fold(name, file, checkpoint.mirror_axes))
    return folds


def _least_slab_bytes(
    network_on_meta: nn.Module, plan: NnunetPlan, precision: str, device: torch.device
) -> float:
    """Compute the smallest budget of a pass in slabs; infinite for a 2D network, without slabs."""
    if plan.is_2d:
        return math.inf
    with autocast(precision, device.type):
        return least_budget_bytes(network_on_meta, plan.num_inputs, plan.patch_size)


def _bytes_per_voxel(network: nn.Module, plan: NnunetPlan, device: torch.device) -> float:
    """Measure the memory of a pass in fp32 per voxel of a tile.

    The tile is small, because a pass on a tile of the plan's size may take a minute. At the deepest
    level it still has two voxels along an axis, unless the plan's own tile has only one there: an
    instance norm needs more than one voxel.
    """
    depth, height, width = (
        min(size, 2 * step)
        for size, step in zip(plan.patch_size, plan.network["divisor"], strict=True)
    )
    shape = (1, plan.num_image_channels, depth, height, width)
    return forward_bytes_per_voxel(
        network, lambda image: call_network(network, image, plan), shape, device
    )


def _operations_per_voxel(network_on_meta: nn.Module, plan: NnunetPlan) -> float:
    """Count additions and multiplications of a pass on the meta device, per voxel of a tile."""
    image = torch.empty((1, plan.num_image_channels, *plan.patch_size), device="meta")
    with meta_layers() as layers:
        call_network(network_on_meta, image, plan)
    return layers.conv_flops / math.prod(plan.patch_size)


def task_of(plan: NnunetPlan) -> Task:
    """Make the task of a plan: its labels and channels, as a task of one stage."""
    channels = []
    for channel in plan.channels:
        # nnU-Net names no modality, but only a CT has this scheme. Its window is the range to which
        # nnU-Net clips.
        if channel.scheme == "CTNormalization":
            low_hu = channel.intensities["percentile_00_5"]
            high_hu = channel.intensities["percentile_99_5"]
            channels.append(Channel("ct", (low_hu, high_hu)))
        else:
            channels.append(Channel("other", None, "zscore"))
    return Task(plan.dataset_name, dict(plan.labels.names), (), tuple(channels))


def _refuse_options(options: InferenceOptions, precision: str | None, device: torch.device) -> None:
    """Refuse keys that would change the labels or have no meaning.

    Raises:
        UserError: With the key.
    """
    defaults = InferenceOptions()
    for key in REFUSED_OPTIONS:
        value = getattr(options, key)
        if value != getattr(defaults, key):
            raise UserError(
                f"inference.{key}={value}: a model folder of nnU-Net runs as its plan says; leave "
                "it out"
            )
    if options.backend not in (None, Backend.torch):
        raise UserError(
            f"inference.backend={options.backend}: a model folder of nnU-Net runs in torch, as "
            "nnU-Net does; leave it out"
        )
    half_precision = "bf16" if device.type == "cpu" else "fp16"
    if precision not in (None, "fp32", half_precision):
        raise UserError(
            f"precision={precision}: a model folder of nnU-Net runs in fp32 or bf16 on a CPU, and "
            "in fp16 or fp32 on a GPU; leave it out"
        )


def _times(shape: Sequence[int]) -> str:
    """Write a shape as 64×128×128."""
    return "×".join(map(str, shape))
