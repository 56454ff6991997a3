"""Trained stage: its networks, the requirements on their input, and inference within a budget."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from medseg.cascade.bound import DiceBound
from medseg.errors import UserError, is_out_of_memory
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import PLAIN, GridRule
from medseg.geometry.sizes import network_size
from medseg.inference.options import InferenceOptions
from medseg.inference.slabs import least_budget_bytes, logits_in_slabs
from medseg.inference.tile_workers import Job, TileWorkers
from medseg.inference.tiles import ALL, PROBS_DTYPE, TilingPlan, plan_tiling
from medseg.inference.tiles import least_budget_gib as least_tiling_budget_gib
from medseg.inference.tiles import predict_probs as predict_tiled
from medseg.memory.accounting import forward_bytes_per_voxel
from medseg.memory.precision import HALF, autocast, inference_precision, tf32_as
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet
from medseg.preprocess.intensity import HU_LIMITS, Intensity, intensity_of
from medseg.preprocess.resample import ANTIALIASED
from medseg.task import CleanUp, Task

# Counted from the end, so that the axes fit images (D, H, W) and probabilities (K, D, H, W) alike.
SPATIAL_AXES = (-3, -2, -1)
X_AXIS = -1
# Most tiles of one pass on a GPU; a CPU gains nothing from more than one.
MAX_BATCH = 8
# Networks run one at a time: the budget holds for all of them together, and the TF32 switches
# belong to the process.
_NETWORK_LOCK = threading.Lock()


class Prediction(NamedTuple):
    """Result of a stage on one crop.

    Attributes:
        probs: Probabilities (K, D, H, W), float16, on the CPU: the mean over checkpoints and flips.
        std: Their standard deviation (D, H, W), float32, one number for all classes, from 0 to
            0.71, the square root of a half; None with a single checkpoint and no flips.
        tiling_plan: How the crop went through the network.
        warnings: A sentence for each way to run that ran out of memory, without repeats.
    """

    probs: Tensor
    std: Tensor | None
    tiling_plan: TilingPlan
    warnings: list[str]


@dataclass
class TrainedStage:
    """Networks of a stage, with the settings that their checkpoints state.

    Attributes:
        network: Maps images (N, C, D, H, W) to logits; has a `divisor`.
        name: `coarse`, `fine` or `single`.
        task: Labels, regions and window that it was trained for.
        spacing_mm: Spacing of its lattice in mm, (z, y, x); None keeps each scan's own.
        tile_size: Tile in voxels (z, y, x); None runs the whole volume or crop.
        least_size: Size of the patches in training, (z, y, x). Whole crops of a region get at least
            this size: in a scan that was a thin slab, a network saw less than in training and lost
            half of the organ.
        region_margin_mm: Margin around the coarse region, in mm on every side.
        has_coarse_channel: Whether the network of a fine stage has one more input channel: the
            probability of the region by the coarse stage.
        precision: `fp32`, `tf32`, `bf16` or `fp16`.
        device: Device of the network.
        rule: How its input is placed on the lattice.
        others: Networks of further checkpoints of the same kind; the result is the mean of all.
        bytes_per_voxel: Memory of a network per voxel of its input, see `count_memory`; 0 before it
            is counted.
        backend_bytes: Memory that the networks' backend takes with the first pass and keeps; 0 for
            torch.
        checkpoints: SHA-256 of each file that the networks come from, by its path.
        tile_workers: Processes that share the tiles; None = this process alone.
        resampling: Filter that brings a scan to the stage's spacing, see
            `medseg.preprocess.resample`.
        warnings: Sentences about how its use differs from its training, for every result.
        dice_bound: Lower bound on the Dice coefficient of its results, calibrated with one other
            stage; None without calibration.
        clean_up: What is done to its labels at the end, where it is the last stage.
    """

    network: nn.Module
    name: str
    task: Task
    spacing_mm: tuple[float, float, float] | None
    tile_size: tuple[int, int, int] | None
    region_margin_mm: float
    precision: str
    device: torch.device
    rule: GridRule = PLAIN
    least_size: tuple[int, int, int] = (1, 1, 1)
    others: tuple[nn.Module, ...] = ()
    bytes_per_voxel: float = 0.0
    backend_bytes: int = 0
    checkpoints: dict[str, str] = field(default_factory=dict)
    tile_workers: TileWorkers | None = None
    resampling: str = ANTIALIASED
    warnings: tuple[str, ...] = ()
    dice_bound: DiceBound | None = None
    clean_up: tuple[CleanUp, ...] = ()
    has_coarse_channel: bool = False

    @property
    def num_channels(self) -> int:
        """Channels of the network's input."""
        return len(self.task.channels) + self.has_coarse_channel

    @property
    def divisor(self) -> tuple[int, int, int]:
        """Numbers of which the network's input size must be a multiple, (z, y, x)."""
        return self.network.divisor  # type: ignore[return-value]

    @property
    def outside(self) -> list[float]:
        """Value of each channel outside of a volume.

        The value is the lower end of the channel's window, else the background of its modality.
        """
        values = []
        for channel in self.task.channels:
            if channel.window_hu:
                values.append(channel.window_hu[0])
            else:
                values.append(channel.outside)
        return values

    @property
    def limits(self) -> list[tuple[float, float] | None]:
        """Range to which each channel is clipped while it is resampled; None if it is no CT."""
        return [HU_LIMITS if channel.modality == "ct" else None for channel in self.task.channels]

    @property
    def image_dtype(self) -> torch.dtype:
        """Number format of the image that goes through the networks.

        A pass of our UNet in torch begins with convolutions, which round the image to half
        precision anyway: a rounded image gives the same labels and takes half of the memory. Images
        that run in tiles keep float32: tiles of nothing but air are skipped, and values just above
        that of air must not be rounded to it.
        """
        is_half = self.precision in HALF
        is_unet = self.allows_slabs  # no other network can run in slabs
        is_in_torch = self.backend_bytes == 0
        is_whole = self.tile_size is None
        if is_half and is_unet and is_in_torch and is_whole:
            return HALF[self.precision]
        return torch.float32

    def intensities(self, images: Sequence[np.ndarray]) -> list[Intensity]:
        """Choose the intensity normalisation of each channel.

        Args:
            images: Image (D, H, W) of each channel of one case: the whole scan, since a crop has
                other statistics.
        """
        return [
            intensity_of(image, channel.modality, channel.normalise, channel.window_hu)
            for image, channel in zip(images, self.task.channels, strict=True)
        ]

    @property
    def networks(self) -> tuple[nn.Module, ...]:
        """Networks of all checkpoints."""
        return (self.network, *self.others)

    def use_tiles(self, tile_size: tuple[int, int, int], measured: str = "") -> None:
        """Predict in tiles of a size; warn if the stage was validated in another.

        Tiles show less context and change the statistics of norms. With another size than the
        validated one the stage has no bound on Dice.

        Args:
            tile_size: Tile in voxels (z, y, x).
            measured: How much tiles change the labels of these weights; empty if that is unknown.

        Raises:
            UserError: If the network accepts inputs of another size only.
        """
        # A network that is not described by traits accepts any size.
        traits = getattr(self.network, "traits", None)
        fixed_size = getattr(traits, "fixed_size", None)
        if fixed_size not in (None, tile_size):
            raise UserError(
                f"inference.tile_size={list(tile_size)}: the network of the {self.name} stage "
                f"accepts inputs of {list(fixed_size)} voxels only; leave inference.tile_size out"
            )
        validated_size = self.tile_size
        self.tile_size = tile_size
        if tile_size == validated_size:
            return
        size_text = "×".join(map(str, tile_size))
        validated_text = "whole crops"
        if validated_size:
            validated_text = "×".join(map(str, validated_size))
        changed_text = "the labels"
        if measured:
            changed_text += f" ({measured})"
        # It was calibrated on labels of the validated tiles.
        self.dice_bound = None
        # Every result gets this warning, since the choice of the user changes all of them.
        self.warnings = (
            f"the {self.name} stage runs in tiles of {size_text} voxels instead of "
            f"{validated_text}, in which it was validated; this changes {changed_text}; "
            "leave inference.tile_size out",
        )

    def count_memory(self) -> None:
        """Count the memory of the network per voxel of its input, which `plan` needs."""
        call = functools.partial(self._call, self.network)
        network: Any = self.network
        # Any size will do, and a small one is quick.
        shape = (1, network.in_channels, *network.traits.small_size)
        self.bytes_per_voxel = forward_bytes_per_voxel(
            self.network, call, shape, self.device, self.image_dtype
        )

    def has_views(self, options: InferenceOptions) -> bool:
        """Whether several networks or flips are averaged."""
        return len(self.networks) * len(flips(self.task, options.tta)) > 1

    def predict_probs(
        self, image: Tensor, options: InferenceOptions, classes: slice = ALL
    ) -> Prediction:
        """Run the networks on one normalised image.

        An image or tile that exceeds the budget goes through the network in slabs, which gives the
        same result. If memory runs out, tiles go one by one, then in slabs, then on the CPU, and
        the result gets a warning. Tiles keep their size: a norm that depends on the field of view
        would change the labels.

        Args:
            image: Normalised image (C, D, H, W).
            options: Overlap of tiles, memory, flips.
            classes: The classes whose probabilities are returned.

        Raises:
            UserError: If neither the image (or a tile of it) nor a slab of one plane fits into the
                budget, or a network gives NaN.
            RuntimeError: If the memory of the CPU runs out; torch has no other class for it.
        """
        with _NETWORK_LOCK:
            warnings: list[str] = []
            stage: TrainedStage = self
            shape = (image.shape[1], image.shape[2], image.shape[3])
            first_plan = self.plan(shape, options)
            plan = first_plan
            # Each iteration tries one way to run the networks. If memory runs out, the next one
            # tries a way that needs less.
            while True:
                smaller_bytes = stage._smaller_slab_bytes(plan, shape)
                try:
                    mean, std = stage._run(image, plan, options, classes)
                    stage.check_numbers(mean)
                    return Prediction(mean, std, plan, warnings)
                # Not only torch.OutOfMemoryError: "CUDA error: out of memory" of a kernel has no
                # class of its own.
                except RuntimeError as error:
                    is_last_way = stage.device.type == "cpu" and smaller_bytes is None
                    if is_last_way or not is_out_of_memory(error):
                        raise
                # Outside of the `except` block, in which the error still holds the tensors of the
                # failed pass.
                torch.cuda.empty_cache()
                place = "CPU" if stage.device.type == "cpu" else "GPU"
                if plan.batch_size > 1:
                    way = "one tile at a time"
                    plan = plan._replace(batch_size=1)
                elif smaller_bytes is not None:
                    way = "slabs, which give the same labels"
                    if plan.slab_bytes is not None:
                        way = f"smaller {way}"
                    plan = plan._replace(slab_bytes=smaller_bytes)
                else:
                    way = "the CPU"
                    plan = first_plan._replace(batch_size=1)
                    stage = stage._on_cpu()
                warning = (
                    f"the {self.name} stage ran out of memory on the {place} and went on with {way}"
                )
                # Slabs may become smaller several times.
                if warning not in warnings:
                    warnings.append(warning)

    def check_numbers(self, probs: Tensor) -> None:
        """Refuse probabilities (K, D, H, W) with NaN, where every label would lose in silence.

        Raises:
            UserError: Says what to change.
        """
        # A sum is NaN if one of its terms is, and unlike a mask it takes no memory. A large sum of
        # float16 is infinite, which is no NaN.
        if not torch.isnan(probs.sum()):
            return
        cure = "its training may have diverged; take another checkpoint"
        if self.precision == "fp16":
            cure = "they exceed the range of fp16; give precision=fp32"
        raise UserError(
            f"the networks of the {self.name} stage give values that are no numbers (NaN): {cure}"
        )

    def _smaller_slab_bytes(self, plan: TilingPlan, shape: tuple[int, int, int]) -> float | None:
        """Choose the memory of slabs after a pass that ran out of memory: half of its need.

        Args:
            plan: Plan of the pass.
            shape: Size of the image, (D, H, W).

        Returns:
            Memory of a pass in slabs, in bytes, at least `_least_slab_bytes`. None if the networks
            cannot run in slabs, or the pass was one in the smallest slabs.
        """
        if not self.allows_slabs:
            return None
        least_bytes = self._least_slab_bytes(shape)
        if plan.slab_bytes is None:
            size = network_size(plan.tile_size or shape, self.divisor)
            needed_bytes = math.prod(size) * self.bytes_per_voxel
        elif plan.slab_bytes > least_bytes:
            needed_bytes = plan.slab_bytes
        else:
            return None
        return max(needed_bytes / 2, least_bytes)

    def plan(self, shape: tuple[int, int, int], options: InferenceOptions) -> TilingPlan:
        """Choose how an image of a size (D, H, W) goes through the networks.

        Raises:
            UserError: If the budget is too small.
        """
        max_batch = MAX_BATCH
        if self.device.type == "cpu":
            max_batch = 1
        try:
            return plan_tiling(
                shape,
                self.divisor,
                self.bytes_per_voxel,
                options.budget_gib * 2**30,
                self.tile_size,
                max_batch=max_batch,
                least_slab_bytes=self._least_slab_bytes(shape),
            )
        except ValueError as error:
            budget = f"inference.budget_gib={options.budget_gib:g}"
            cure = "raise it to that value"
            # The budget of the user, or a smaller one by `Cascade.within`.
            if options.max_ram_gib is not None:
                budget = (
                    f"inference.max_ram_gib={options.max_ram_gib:g} and inference.budget_gib leave "
                    f"{options.budget_gib:.2f} GiB to a network pass, which"
                )
                cure = "raise them"
            raise UserError(
                f"{budget} is too small for the {self.name} stage: {error}; {cure}, since smaller "
                "tiles would change the labels"
            ) from error

    def check_budget(self, grid: VoxelGrid, options: InferenceOptions) -> None:
        """Refuse a scan if neither its tiles nor slabs of one plane fit into the budget.

        A network that runs whole crops and cannot run in slabs is not checked, since the size of
        its crops is not known yet. For slabs a fine stage is checked with its smallest crop.

        Args:
            grid: Grid of the scan, oriented.
            options: The budget.

        Raises:
            UserError: If the budget is too small.
        """
        if self.tile_size is not None:
            self.plan(self.tile_size, options)
        elif self.allows_slabs:
            lattice = grid.resampled(self.spacing_mm)
            # The grid rule may rescale the lattice, depending on the spacing of the scan.
            rule_spacing_mm = self.rule.spacing_mm(grid.spacing_mm)
            scaled = lattice.resampled(rule_spacing_mm)
            shape = self.least_size if self.name == "fine" else scaled.shape
            self.plan(self.rule.size or shape, options)

    @property
    def least_budget_gib(self) -> float:
        """Smallest `inference.budget_gib` that `plan` accepts, rounded up to two decimals.

        0 where the size of the network's input depends on the scan.
        """
        shape = self.tile_size or self.rule.size
        if shape is None:
            return 0.0
        size = network_size(shape, self.divisor)
        return least_tiling_budget_gib(size, self.bytes_per_voxel, self._least_slab_bytes(shape))

    @property
    def allows_slabs(self) -> bool:
        """Whether the networks can run in slabs: all of them are our UNet."""
        return all(
            isinstance(network, StageNetwork) and isinstance(network.network, UNet)
            for network in self.networks
        )

    def _least_slab_bytes(self, shape: tuple[int, int, int]) -> float:
        """Smallest budget in which an image of a size, or a tile of it, can run in slabs.

        Infinite where the networks cannot run in slabs at all.
        """
        if not self.allows_slabs:
            return math.inf
        _, height, width = network_size(self.tile_size or shape, self.divisor)
        networks = cast(tuple[StageNetwork, ...], self.networks)
        with autocast(self.precision, self.device.type):
            return max(
                least_budget_bytes(cast(UNet, network.network), height, width)
                for network in networks
            )

    def serve(self, network_index: int, images: Tensor, slab_bytes: float | None = None) -> Tensor:
        """Run one of `networks`, as a tile worker, on images (N, C, d, h, w); returns logits."""
        return self._call(self.networks[network_index], images.to(self.device), slab_bytes)

    def _call(self, network: nn.Module, images: Tensor, slab_bytes: float | None = None) -> Tensor:
        """Run a network on images (N, C, d, h, w); returns logits.

        Args:
            network: One of `networks`.
            images: Images or tiles; with `slab_bytes`, a single one.
            slab_bytes: Memory that a slab may take; None runs the images in one pass.
        """
        if slab_bytes is not None:
            slabs: list[Tensor] = []

            def keep(slab: Tensor) -> None:
                slabs.append(slab.to(images.device))

            self._run_in_slabs(images, keep, network, slab_bytes)
            return torch.cat(slabs, dim=2)  # along z
        with tf32_as(self.precision), autocast(self.precision, self.device.type):
            return network.eval()(images)

    def _run_in_slabs(
        self, image: Tensor, take: Callable[[Tensor], None], network: nn.Module, slab_bytes: float
    ) -> None:
        """Run a network on one image (1, C, D, H, W) in slabs; see `logits_in_slabs`."""
        unet = cast(UNet, cast(StageNetwork, network.eval()).network)
        with tf32_as(self.precision), autocast(self.precision, self.device.type):
            logits_in_slabs(unet, image, slab_bytes, take)

    @torch.inference_mode()
    def _run(
        self, image: Tensor, plan: TilingPlan, options: InferenceOptions, classes: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Mean and standard deviation of the probabilities over all networks and flips.

        Both are on the CPU, as in `Prediction`. The mean has the chosen classes only, the standard
        deviation covers all.
        """
        # The image has the number format of the stage that it was made for. `self` is either that
        # stage or its copy by `_on_cpu`, which may have another precision.
        image = image.to(self.image_dtype)
        # Slabs are brought to the device one by one.
        if plan.slab_bytes is None:
            image = image.to(self.device)
        # A view is a network and the axes along which it sees the image flipped.
        views = list(product(range(len(self.networks)), flips(self.task, options.tta)))
        if len(views) == 1:
            return self._predict_view(0, (), image, plan, options, classes).cpu(), None
        # Sum of the probabilities (K, D, H, W), and of their squares over all classes (D, H, W).
        total: Tensor | None = None
        squares: Tensor | None = None
        for network_index, axes in views:
            probs = self._predict_view(network_index, axes, image, plan, options, ALL)
            probs = probs.to(torch.float32)
            # In place where possible: each of these tensors is as large as the result in float32.
            if total is None or squares is None:
                total = probs
                # Not in place: `total` is the same tensor as `probs`.
                squares = probs.square().sum(0)
            else:
                total.add_(probs)
                squares.add_(probs.square_().sum(0))
        assert total is not None, "there is at least one network"
        assert squares is not None, "it comes with the sum"
        mean = total.div_(len(views))
        # E[p²] - E[p]² summed over the classes and halved: with two classes, the variance of
        # either. Rounding may bring it below 0.
        variance = squares.div_(len(views)).sub_(mean.square().sum(0))
        variance.clamp_(min=0).div_(2)
        return mean[classes].to(PROBS_DTYPE).cpu(), variance.sqrt_().cpu()

    def _predict_view(
        self,
        network_index: int,
        axes: tuple[int, ...],
        image: Tensor,
        plan: TilingPlan,
        options: InferenceOptions,
        classes: slice,
    ) -> Tensor:
        """Probabilities (K, D, H, W) of one network for one flip of the image, flipped back.

        Args:
            network_index: Place in `networks`.
            axes: Axes to flip; may be empty.
            image: Normalised image (C, D, H, W).
            plan: How it goes through the network.
            options: Overlap of tiles.
            classes: The classes that are returned.
        """
        network = self.networks[network_index]
        slab_bytes = plan.slab_bytes
        call = functools.partial(self._call, network, slab_bytes=slab_bytes)
        # Other ways than `call` to run the network, as arguments of `tiles.predict_probs`.
        runners: dict[str, Any] = {}
        # A whole crop in slabs: its logits are taken slab by slab, never as one tensor.
        if slab_bytes is not None and plan.tile_size is None:
            runners["run_in_slabs"] = functools.partial(
                self._run_in_slabs, network=network, slab_bytes=slab_bytes
            )
        if self.tile_workers is not None:
            job = Job(self.name, network_index, slab_bytes)
            runners["run_batches"] = functools.partial(self.tile_workers.run, job, call)
            runners["num_parallel"] = self.tile_workers.size
        if axes:
            image = image.flip(axes)
        probs = predict_tiled(
            call,
            image[None],
            tile_size=plan.tile_size,
            overlap=options.overlap,
            divisor=self.divisor,
            batch_size=plan.batch_size,
            # A tile of nothing but air is not predicted. Without a window, the value of air may
            # also occur inside the body.
            skips_air=all(channel.window_hu for channel in self.task.channels),
            classes=classes,
            **runners,
        )
        if axes:
            return probs.flip(axes)
        return probs

    def _on_cpu(self) -> TrainedStage:
        """Return a copy on the CPU; the stage itself stays, as the next case may fit on the GPU."""
        cpu = torch.device("cpu")
        network, *others = map(_copy_on_cpu, self.networks)
        precision = inference_precision(self.precision, "cpu")
        return replace(
            self,
            network=network,
            others=tuple(others),
            precision=precision,
            device=cpu,
            tile_workers=None,
        )


def _copy_on_cpu(network: nn.Module) -> nn.Module:
    """Copy a network to the CPU; the copy takes no memory on the device, which may be full.

    Half-precision weights become float32, the only format of some CPUs.
    """
    # Memo of `deepcopy`, from the identity of an object to its copy: a weight that is in it is not
    # copied again on its device.
    copies: dict[int, Tensor] = {}
    for weight in chain(network.parameters(), network.buffers()):
        on_cpu = weight.detach().cpu()
        if on_cpu.dtype in HALF.values():
            copies[id(weight)] = on_cpu.float()
        else:
            # `cpu` returns the weight itself if it is on the CPU, which must not be shared.
            copies[id(weight)] = on_cpu.clone()
    # Buffers are plain tensors, but the parameters of a module must stay `nn.Parameter`.
    for parameter in network.parameters():
        copies[id(parameter)] = nn.Parameter(copies[id(parameter)], requires_grad=False)
    return copy.deepcopy(network, copies)


def flips(task: Task, tta: bool | None) -> Sequence[tuple[int, ...]]:
    """List the sets of axes to flip, one for each pass of a network.

    Args:
        task: If it has sides, x is never flipped, since that would exchange them.
        tta: Whether there is test-time augmentation; None is no.

    Returns:
        All subsets of the axes, counted from the end, the empty one first.
    """
    if not tta:
        return [()]
    axes = list(SPATIAL_AXES)
    if task.has_sides:
        axes.remove(X_AXIS)
    subsets: list[tuple[int, ...]] = []
    for num_axes in range(len(axes) + 1):
        subsets.extend(combinations(axes, num_axes))
    return subsets
