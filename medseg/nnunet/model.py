"""Model of nnU-Net: segments a scan with the networks of a folder, as its predictor does."""

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
    image_axes,
    preparation_bytes,
    prepare,
    resampled_shape,
)
from medseg.nnunet.slabs import count_in_slabs, least_budget_bytes, logits_in_slabs
from medseg.nnunet.tiles import all_starts, finished_planes
from medseg.preprocess.orient import Orientation, orientation_of, ras_orientation_of
from medseg.task import Channel, Task
from medseg.weights.files import checksum

PREPARE, SEGMENT = STEPS = ("prepare", "segment")
# Step of a cascade before them.
PREVIOUS = "previous"
# Networks run one at a time: their weights are replaced from fold to fold.
_NETWORK_LOCK = threading.Lock()
# Time of what a case takes outside of its networks, by that of a voxel of a channel, which is read,
# checked and normalised: 15 ns on an AMD EPYC. Of such a voxel that is filtered along an axis for a
# cubic spline; of a logit of the scan that is estimated, or interpolated exactly; of a logit of a
# tile that is added to the sums; and of a pass of a network, however small its tile.
FILTER_TIME, ESTIMATE_TIME, EXACT_TIME, SUM_TIME, PASS_TIME = 2.0, 0.18, 1.0, 0.18, 3000.0
# Arrays that wait are files from this size on. The scan, its image and its labels, 600 MiB for 800
# slices, are needed for seconds of minutes; their pages are brought back within half a second.
WAITING_BYTES = 2**25
# Options of `inference` that change a pass of our own networks and have no meaning here.
FIXED = ("tile_size", "half_weights")


@dataclass(frozen=True)
class Fold:
    """Network weights of one fold.

    Attributes:
        name: `0`, `1`, … or `all`.
        path: Its checkpoint.
        mirror_axes: Axes along which it may be mirrored.
    """

    name: str
    path: Path
    mirror_axes: tuple[int, ...]


class Held(NamedTuple):
    """Array of a step.

    Attributes:
        num_bytes: Its size.
        share: Share of it that is written before the last pass of a network: the system gives no
            memory to the rest before.
        waits: Whether it waits, see `medseg.io.scratch.scratch_above`.
        touched: Bytes that are used at a time: where it is a file the others are not in memory.
    """

    num_bytes: int
    share: float = 1.0
    waits: bool = False
    touched: float = math.inf


class Expected(NamedTuple):
    """Cost of a case that is known beforehand.

    Attributes:
        memory: Arrays of each step, without the scan and the passes of the network.
        cost: Time outside of networks, by that of a voxel of a channel, see `FILTER_TIME`.
        operations: Additions and multiplications of the networks.
    """

    memory: dict[str, list[Held]]
    cost: float
    operations: float


@dataclass(frozen=True)
class NnunetModel:
    """A model folder that is ready to segment scans.

    Attributes:
        folder: Its files and its plan.
        task: Labels and channels.
        network: Takes the weights of each fold in turn.
        folds: The folds whose logits are averaged.
        options: Sums, orientation and mirroring.
        device: Device of the network.
        bytes_per_voxel: Memory of the network per voxel of a tile.
        least_slab_bytes: Smallest budget with which a tile runs in slabs.
        checkpoints: SHA-256 of each checkpoint by its path, below the name of the configuration.
        operations_per_voxel: Additions and multiplications of the network per voxel of a tile.
        precision: `fp32`, `bf16` on a CPU, or `fp16` on a GPU.
        previous: First stage of a cascade; None for others.
        watch: Counts the seconds of its passes, for the forecast of later cases.
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

    # Values of voxels are what the networks were trained on: nothing is replaced before.
    keeps_values = True
    has_views = False
    backend_bytes = 0

    @property
    def plan(self) -> NnunetPlan:
        """Its plan."""
        return self.folder.plan

    @property
    def waiting_bytes(self) -> float:
        """Size above which arrays that wait are files; none where planes lie across those of scans.

        Each plane would bring all pages of the scan and of the labels back.
        """
        return WAITING_BYTES if self.plan.transpose[0] == 0 else math.inf

    @property
    def steps(self) -> list[str]:
        """Steps of `segment`."""
        return [PREVIOUS, *STEPS] if self.previous else list(STEPS)

    @property
    def pass_steps(self) -> list[str]:
        """Steps in which a network runs."""
        return [step for step in self.steps if step != PREPARE]

    @property
    def orientation(self) -> str:
        """Orientation in which the network sees a scan."""
        stated = self.options.orientation
        return self.plan.orientation if stated is None else stated.value

    @property
    def slab_bytes(self) -> float | None:
        """Budget of a pass in slabs; None where a tile is one pass."""
        budget_bytes = self.options.budget_gib * 2**30
        if not self.can_run_in_slabs or self._whole_bytes <= budget_bytes:
            return None
        return budget_bytes

    @cached_property
    def usual_pass_bytes(self) -> int:
        """Memory that a pass of the network takes, counted on shapes; for the forecast."""
        num_channels = len(self.plan.channels) + (self.plan.previous_stage is not None)
        num_bytes = count_pass(
            lambda: make_network(self.plan),
            (1, num_channels, *self.plan.patch_size),
            self._count,
            precision=self.precision,
        )
        if self.previous is not None:
            num_bytes = max(num_bytes, self.previous.usual_pass_bytes)
        return num_bytes

    def _count(self, network: nn.Module, image: Tensor, tracker: MemoryTracker) -> None:
        """Run a network on the meta device as `_run` does on a CPU."""
        if self.slab_bytes is None:
            call_network(network, image, self.plan)
        else:
            inputs = network_input(image, self.plan)
            count_in_slabs(network, inputs, self.slab_bytes, tracker)

    @property
    def least_bytes(self) -> float:
        """Smallest budget of a pass; a smaller tile would change the labels."""
        if self.device.type != "cpu":
            return 0.0
        num_bytes = self._whole_bytes
        if self.can_run_in_slabs:
            num_bytes = min(num_bytes, self.least_slab_bytes)
        if self.previous is not None:
            num_bytes = max(num_bytes, self.previous.least_bytes)
        return num_bytes

    @property
    def can_run_in_slabs(self) -> bool:
        """Whether a tile may run in slabs.

        A GPU has memory of its own, which the budget does not mean; a 2D network sees one plane.
        """
        return self.device.type == "cpu" and not self.plan.is_2d

    @property
    def _whole_bytes(self) -> float:
        """Memory of a tile in one pass."""
        return self.bytes_per_voxel * math.prod(self.plan.patch_size)

    def within(self, budget_gib: float) -> NnunetModel:
        """Return the same model with a bound on the memory of a pass: a larger one runs in slabs.

        Raises:
            UserError: If it is too small for slabs.
        """
        if self.least_bytes > budget_gib * 2**30:
            raise UserError(
                f"inference.max_ram_gib={self.options.max_ram_gib:g} leaves {budget_gib:.2f} GiB "
                f"for a pass of the network, but a tile of {_times(self.plan.patch_size)} voxels "
                f"needs {self.least_bytes / 2**30:.2f} GiB; raise it by the difference at least"
            )
        options = replace(self.options, budget_gib=min(self.options.budget_gib, budget_gib))
        previous = self.previous and self.previous.within(budget_gib)
        return replace(self, options=options, previous=previous)

    def check_budget(self, grid: VoxelGrid) -> None:
        """A tile is the same for all scans: `within` has checked it."""

    def expected(self, grid: VoxelGrid) -> Expected:
        """Expect the cost of a case by the header of its scan, without the crop to its voxels.

        Args:
            grid: Grid of the scan, in storage order.
        """
        expected = self.expected_logits(grid)
        depth, _, height, width = self.logits_shape(grid)
        # Finished planes on both sides of a plane of the scan, see `reduce_planes`.
        num_values = 2 * self.plan.labels.num_heads * height * width
        two_planes = Held(self._dtype.itemsize * num_values)
        (_, rows, columns), _ = self._transposed(grid)
        of_scan = Held(PLANE_BYTES * rows * columns)
        labels = Held(math.prod(grid.shape), waits=grid.is_axial)
        if self._keeps_planes(grid):
            # No later plane is complete when the last tiles begin.
            z_starts = self._starts(grid)[0]
            share = z_starts[-1] / max(depth, self.plan.patch_size[0])
            labels = labels._replace(share=share, touched=rows * columns)
        expected.memory[SEGMENT] += [two_planes, of_scan, labels]
        cost = expected.cost + self._logit_time * self.plan.labels.num_heads * math.prod(grid.shape)
        if self.previous is None:
            return expected._replace(cost=cost)
        before = self.previous.expected(grid)
        return Expected(
            {PREVIOUS: before.memory[SEGMENT], **expected.memory},
            before.cost + cost,
            before.operations + expected.operations,
        )

    def expected_logits(self, grid: VoxelGrid) -> Expected:
        """Expect the cost of the logits, without their labels and without the previous stage.

        Args:
            grid: Grid of the scan, in storage order.
        """
        plan = self.plan
        has_previous = self.previous is not None
        itemsize = self._dtype.itemsize
        num_heads = plan.labels.num_heads
        depth, height, width = self._padded_shape(grid)
        # The previous stage adds one channel of labels, which become several in the network alone.
        num_channels = len(plan.channels) + has_previous
        # Whole rows are touched where a tile is read or added.
        rows_of_tile = plan.patch_size[0] * plan.patch_size[1] * width
        image = Held(
            4 * num_channels * depth * height * width,
            waits=True,
            touched=4 * num_channels * rows_of_tile,
        )
        # Sums of the heads, and of the weights, in as many planes as a tile has.
        window = Held(
            itemsize * (num_heads + 1) * plan.patch_size[0] * height * width,
            touched=itemsize * num_heads * rows_of_tile,
        )
        starts = self._starts(grid)
        passes = sum(2 ** len(self._mirror_axes(fold)) for fold in self.folds)
        segment = [image, window]
        if passes > len(self.folds):
            # Sums of the mirrored passes of a tile, in float32.
            segment.append(Held(4 * num_heads * math.prod(plan.patch_size)))
        logits = Held(self.logits_bytes(grid))
        # Larger sums of folds are a file.
        if len(self.folds) > 1 and logits.num_bytes <= MAX_FOLDS_BYTES:
            segment.append(logits)
        shape, spacing_mm = self._transposed(grid)
        preparing = preparation_bytes(plan, shape, spacing_mm, has_previous=has_previous)
        memory = {PREPARE: [image, Held(preparing)], SEGMENT: segment}
        num_passes = math.prod(map(len, starts)) * passes
        num_voxels = num_passes * math.prod(plan.patch_size)
        num_filtered = len(image_axes(plan, shape, spacing_mm))
        cost = len(plan.channels) * (1 + FILTER_TIME * num_filtered) * math.prod(shape)
        cost += SUM_TIME * num_heads * num_voxels + PASS_TIME * num_passes
        return Expected(memory, cost, num_voxels * self.operations_per_voxel)

    @property
    def _logit_time(self) -> float:
        """Time of a logit of the scan, see `ESTIMATE_TIME`."""
        resampling = self.plan.logits_resampling
        is_linear = resampling.function == SPLINE and resampling.order <= 1
        is_estimated = is_linear and self.plan.labels.region_values is None
        return ESTIMATE_TIME if is_estimated else EXACT_TIME

    def logits_shape(self, grid: VoxelGrid) -> tuple[int, int, int, int]:
        """Shape (D, K, H, W) of the logits of a scan at the spacing of the network, uncropped."""
        shape, spacing_mm = self._transposed(grid)
        depth, height, width = resampled_shape(shape, spacing_mm, self.plan.for_scan(spacing_mm))
        return depth, self.plan.labels.num_heads, height, width

    def logits_bytes(self, grid: VoxelGrid) -> int:
        """Size of the logits of a scan."""
        return self._dtype.itemsize * math.prod(self.logits_shape(grid))

    def _padded_shape(self, grid: VoxelGrid) -> Shape:
        """Shape of the image of the network, a tile at least."""
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
        """Shape and spacing of a scan in the order of the network."""
        grid = self.turned_grid(grid)
        z, y, x = self.plan.transpose
        shape = grid.shape[z], grid.shape[y], grid.shape[x]
        return shape, (grid.spacing_mm[z], grid.spacing_mm[y], grid.spacing_mm[x])

    def _keeps_planes(self, grid: VoxelGrid) -> bool:
        """Whether the planes of the network are planes of the stored scan.

        Else each plane of labels touches all pages of their array.
        """
        order = self._orientation_of(grid).orientation.order
        return order[self.plan.transpose[0]] == 0

    def segment(
        self,
        volume: Volume,
        more_channels: Sequence[np.ndarray] = (),
        *,
        on_step: Callable[[str], None] | None = None,
        keep_probabilities: bool = False,
    ) -> Segmentation:
        """Segment one scan: prepare it, run all tiles, reduce them to labels, restore the storage.

        Args:
            volume: First channel.
            more_channels: The other channels, (D, H, W) each, on the grid of the first.
            on_step: Called with the name of each step when it begins.
            keep_probabilities: Not possible: they are reduced to labels on the way.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        assert not keep_probabilities, "`save` refuses them"
        result = Segmentation(np.empty(0))
        prepared = self.prepare_scan(volume, more_channels, result, on_step)
        seconds_before = self.watch.seconds
        with timed_step(result.durations_s, on_step, SEGMENT), self._naming_the_folder():
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
        """Bring a scan to the input of the network; a cascade segments it by its first stage.

        Args:
            volume: See `segment`.
            more_channels: See `segment`.
            result: Receives durations and what the first stage says.
            on_step: See `segment`.

        Raises:
            UserError: If the plan does not fit the scan.
        """
        orientation = self._orientation_of(volume.grid)
        grid = orientation.reoriented(volume.grid)
        images = [orientation.turned(image) for image in (volume.array, *more_channels)]
        previous: np.ndarray | None = None
        if self.previous is not None:
            with timed_step(result.durations_s, on_step, PREVIOUS):
                first = self.previous.segment(volume, more_channels)
            previous = orientation.turned(first.labels)
            result.tiling_plans[PREVIOUS] = first.tiling_plans[SEGMENT]
            result.pass_s = first.pass_s
        with timed_step(result.durations_s, on_step, PREPARE), self._naming_the_folder():
            return prepare(images, grid.spacing_mm, self.plan, previous)

    def crop_of(self, stored: np.ndarray, box: VoxelBox, grid: VoxelGrid) -> np.ndarray:
        """View of stored labels (D, H, W) in the order of the network, where the crop lies."""
        turned = self._orientation_of(grid).turned(stored).transpose(self.plan.transpose)
        return turned[box.slices()]

    def turned_grid(self, grid: VoxelGrid) -> VoxelGrid:
        """Grid of a scan in the orientation of the network, not transposed."""
        return self._orientation_of(grid).reoriented(grid)

    def findings_of(self, grid: VoxelGrid) -> list[Finding]:
        """Notes on the folder, and a warning on the orientation of a scan."""
        findings = information_of("model_folder", self.folder.notes)
        return findings + warnings_of("stored_orientation", self._side_warnings(grid))

    def planes_of(self, prepared: Prepared) -> Planes:
        """Resampling of the logits of a prepared scan to its crop.

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
            stored = new_tensor(shape, self._dtype)
        with self._naming_the_folder(), _NETWORK_LOCK, tf32_as(self.precision):
            for number, plane in enumerate(self._mean_planes(prepared)):
                stored[number] = plane
        return stored

    @torch.inference_mode()
    def _segment(self, prepared: Prepared, labels: np.ndarray) -> None:
        """Set the labels of the crop of a prepared scan, transposed."""
        planes = self.planes_of(prepared)
        with _NETWORK_LOCK, tf32_as(self.precision):
            logits = self._mean_planes(prepared)
            reduce_planes(logits, planes, self.plan.labels.region_values, labels)

    def _mean_planes(self, prepared: Prepared) -> Iterator[Tensor]:
        """Planes of logits (K, H, W), averaged over the folds."""
        folds = (self._fold_planes(fold, prepared) for fold in self.folds)
        depth, height, width = prepared.shape
        shape = (depth, self.plan.labels.num_heads, height, width)
        return mean_planes(folds, len(self.folds), shape)

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """Name the folder where its plan does not fit a scan.

        Raises:
            UserError: With the folder.
        """
        try:
            yield
        except PlanError as error:
            raise UserError(f"weights={self.folder.path}: {error.sentence}") from error

    def _fold_planes(self, fold: Fold, prepared: Prepared) -> Iterator[Tensor]:
        """Planes of logits (K, H, W) of one fold, without the padding."""
        checkpoint = read_checkpoint(fold.path, f"weights={self.folder.path}")
        self.network.load_state_dict(checkpoint.weights)
        del checkpoint
        planes = finished_planes(
            self._run,
            prepared.image,
            self.plan.patch_size,
            self.plan.labels.num_heads,
            self._mirror_axes(fold),
            self._dtype,
            self.options.overlap,
            is_2d=self.plan.is_2d,
        )
        z, y, x = prepared.padding
        depth, height, width = prepared.shape
        for number, plane in enumerate(planes):
            if z <= number < z + depth:
                yield plane[:, y : y + height, x : x + width]

    def _run(self, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """Run the network on a tile; `take` receives its logits on the CPU, see `Run`."""
        if self.device.type == "cuda":
            with autocast(self.precision, "cuda"), self.watch.running():
                logits = call_network(self.network, image.to(self.device), self.plan).cpu()
            take(logits)
            return

        def take_floats(planes: Tensor) -> None:
            with self.watch.paused():
                # The arrays that sum the tiles have no bf16.
                take(planes.float())

        with autocast(self.precision, "cpu"), self.watch.running():
            if self.slab_bytes is not None:
                inputs = network_input(image, self.plan)
                logits_in_slabs(self.network, inputs, self.slab_bytes, take_floats)
                return
            take_floats(call_network(self.network, image, self.plan))

    def _mirror_axes(self, fold: Fold) -> tuple[int, ...]:
        """Axes of the transposed scan along which tiles are mirrored."""
        if self.options.tta is False:
            return ()
        # A 2D network counts the axes of its planes.
        return tuple(axis + self.plan.is_2d for axis in fold.mirror_axes)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.options.sums is Sums.float else torch.half

    def _orientation_of(self, grid: VoxelGrid) -> _Turn:
        """How the stored array is turned for the network."""
        if self.orientation == Seen.stored:
            return _Turn(Orientation((0, 1, 2), (False, False, False)))
        if self.orientation == Seen.LPS:
            return _Turn(orientation_of(grid))
        return _Turn(ras_orientation_of(grid))

    def _side_warnings(self, grid: VoxelGrid) -> list[str]:
        """Warn where labels have sides and the stored directions are not the usual ones of a CT."""
        usual = Orientation((0, 1, 2), (False, False, False))
        is_usual = self.orientation != Seen.stored or orientation_of(grid) == usual
        if is_usual or not self.task.has_sides:
            return []
        return [
            "the network sees the scan as it is stored, and its axes do not point to left, "
            "posterior and superior: left and right labels are swapped if the training scans were "
            "stored in another direction; look at them, or give inference.orientation=LPS (or RAS)"
        ]

    def described_passes(self) -> str:
        """Say how tiles went through the networks."""
        names = ", ".join(fold.name for fold in self.folds)
        axes = max(len(self._mirror_axes(fold)) for fold in self.folds)
        sums = "float32" if self._dtype is torch.float32 else "half precision"
        passes = "" if self.slab_bytes is None else ", in slabs"
        return (
            f"tiles of {_times(self.plan.patch_size)}{passes}, fold {names}, "
            f"mirrored along {axes} axes, {self.precision}, sums in {sums}, "
            f"orientation {self.orientation}"
        )


@dataclass(frozen=True)
class _Turn:
    """Turning of arrays and grids to the orientation of the network."""

    orientation: Orientation

    def turned(self, array: np.ndarray) -> np.ndarray:
        """A view of a stored array (D, H, W)."""
        return self.orientation.to_lps(array)

    def reoriented(self, grid: VoxelGrid) -> VoxelGrid:
        """The grid of such a view."""
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
        first = previous_folder(folder, folds, path)
        previous = _load_folder(first, f"weights={first.path}", device, options, precision)
    model = _load_folder(folder, f"weights={path}", device, options, precision)
    if previous is None:
        return model
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
    """
    try:
        # A network may be larger than the memory: on the meta device it only has shapes, which
        # must be those of the weights.
        shapes = build_on_meta(lambda: make_network(folder.plan), may_compute=False)
        folds: list[Fold] = []
        for name, file in folder.checkpoints.items():
            checkpoint = read_checkpoint(file, f"{source}: fold {name}")
            difference = first_difference(shapes, checkpoint.weights)
            if difference:
                raise UserError(
                    f"{source}: the weights of fold {name} do not fit the network of plans.json "
                    f"with {folder.plan.labels.num_heads} outputs by dataset.json ({difference}); "
                    "take the files of one training"
                )
            folds.append(Fold(name, file, checkpoint.mirror_axes))
        network = make_network(folder.plan).to(device).eval()
    except PlanError as error:
        raise UserError(f"{source}: {error.sentence}") from error
    configuration = folder.plan.configuration
    model = NnunetModel(
        folder=folder,
        task=task_of(folder.plan),
        network=network,
        folds=tuple(folds),
        options=options,
        device=device,
        bytes_per_voxel=_bytes_per_voxel(network, folder.plan, device),
        least_slab_bytes=_least_slab_bytes(shapes, folder.plan),
        checkpoints={
            configuration: {str(file): checksum(file) for file in folder.checkpoints.values()}
        },
        operations_per_voxel=_operations_per_voxel(shapes, folder.plan),
        precision=precision,
    )
    if model.least_bytes > options.budget_gib * 2**30:
        # Rounded up: the named number must be enough.
        least_gib = math.ceil(model.least_bytes / 2**30 * 1000) / 1000
        raise UserError(
            f"inference.budget_gib={options.budget_gib:g} is too small for a tile of "
            f"{_times(folder.plan.patch_size)} voxels; raise it to {least_gib:g}, since a smaller "
            "tile would change the labels"
        )
    return model


def _least_slab_bytes(network_on_meta: nn.Module, plan: NnunetPlan) -> float:
    """Smallest budget of a pass in slabs; infinite for a 2D network, which has none."""
    if plan.is_2d:
        return math.inf
    return least_budget_bytes(network_on_meta, plan.num_inputs, plan.patch_size)


def _bytes_per_voxel(network: nn.Module, plan: NnunetPlan, device: torch.device) -> float:
    """Count the memory of a pass in fp32 on a small tile: that of the plan may take a minute.

    Its deepest level has two voxels along each axis, which an instance norm needs.
    """
    depth, height, width = (
        min(size, 2 * step)
        for size, step in zip(plan.patch_size, plan.network["divisor"], strict=True)
    )
    num_channels = len(plan.channels) + (plan.previous_stage is not None)
    shape = (1, num_channels, depth, height, width)
    return forward_bytes_per_voxel(
        network, lambda image: call_network(network, image, plan), shape, device
    )


def _operations_per_voxel(network_on_meta: nn.Module, plan: NnunetPlan) -> float:
    """Count additions and multiplications of a pass, which run on shapes alone."""
    num_channels = len(plan.channels) + (plan.previous_stage is not None)
    image = torch.empty((1, num_channels, *plan.patch_size), device="meta")
    with meta_layers() as layers:
        call_network(network_on_meta, image, plan)
    return layers.operations / math.prod(plan.patch_size)


def task_of(plan: NnunetPlan) -> Task:
    """Describe labels and channels of a plan as those of a task of one stage."""
    channels = []
    for channel in plan.channels:
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
    usual = InferenceOptions()
    for key in FIXED:
        value = getattr(options, key)
        if value != getattr(usual, key):
            raise UserError(
                f"inference.{key}={value}: a model folder of nnU-Net runs as its plan says; leave "
                "it out"
            )
    if options.backend not in (None, Backend.torch):
        raise UserError(
            f"inference.backend={options.backend}: a model folder of nnU-Net runs in torch, as "
            "nnU-Net does; leave it out"
        )
    half = "bf16" if device.type == "cpu" else "fp16"
    if precision not in (None, "fp32", half):
        raise UserError(
            f"precision={precision}: a model folder of nnU-Net runs in fp32 or bf16 on a CPU, and "
            "in fp16 or fp32 on a GPU; leave it out"
        )


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
