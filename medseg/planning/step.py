"""Training step of a configuration: size of its input, and the count of its memory."""

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from medseg.config.schema import PlanConfig
from medseg.errors import UserError, first_line
from medseg.geometry.sizes import Shape, network_size
from medseg.inference.tiles import most_probable, predict_probs
from medseg.memory.accounting import StepMemory, count_forward, count_step
from medseg.memory.device import pick_device_type
from medseg.memory.options import Precision
from medseg.memory.switches import switch_on
from medseg.memory.tracker import Timeline
from medseg.preprocess.options import SpacingStrategy
from medseg.training.extensions import make_loss
from medseg.training.network import count_channels, count_classes, find_divisor, make_network
from medseg.training.optimisation import make_scheduled_optimizer
from medseg.training.options import TrainConfig


def largest_batch(peak: Callable[[int], int], budget: int) -> int:
    """Find the largest number of samples whose step fits: a linear estimate, then exact counts around it.

    Args:
        peak: Bytes of a step by number of samples; must not fall.
        budget: Bytes that the step may use.

    Returns:
        Number of samples; 0 if one does not fit.
    """
    # Growth is linear from two samples on; one sample may do without a copy that several need.
    two, three = peak(2), peak(3)
    samples = max(1, 2 + (budget - two) // (three - two))
    while samples and peak(samples) > budget:
        samples -= 1
    while peak(samples + 1) <= budget:
        samples += 1
    return samples


def samples_per_rank(config: TrainConfig) -> int:
    """Number of samples in a micro-batch of one rank."""
    return config.stage.batch_size // num_shares(config)


def num_shares(config: TrainConfig) -> int:
    """Number of micro-batches of a step, over all ranks."""
    return config.trainer.devices * config.trainer.num_nodes * config.memory.accumulate


def input_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the sample to plan for: `shape`, the stage's patch, the size of all crops, or `extent_mm` at its spacing."""
    return (
        config.shape
        or config.stage.patch_size
        or config.spacing.size
        or _whole_shape(config, config.stage.max_voxels)
    )


def evaluated_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the largest validation case: `validation_shape`, or the whole volume or crop that `input_shape` describes."""
    known = (
        config.validation_shape
        or config.spacing.size
        or (config.shape if config.stage.patch_size is None else None)
    )
    return known or _whole_shape(config, None)


def _whole_shape(config: PlanConfig, max_voxels: int | None) -> Shape:
    """Voxels (D, H, W) of a whole volume or crop of `extent_mm`, a multiple of the divisor."""
    spacing_mm, range_mm = config.spacing.target_spacing_mm, config.spacing.range_mm
    if range_mm is not None:
        spacing_mm = (
            range_mm[0],
            range_mm[0],
            range_mm[0],
        )  # the finest spacing gives the largest sample
    if spacing_mm is None:
        raise UserError(
            "plan: spacing.strategy=native has no spacing to count voxels with; give shape=[D,H,W] of the sample to plan for, and "
            "validation_shape=[D,H,W] of the largest validation case"
        )
    extent_mm = getattr(config.extent_mm, config.stage.name.value)
    depth, height, width = (
        math.ceil(mm / voxel_mm) for mm, voxel_mm in zip(extent_mm, spacing_mm, strict=True)
    )
    if config.spacing.strategy is SpacingStrategy.fixed_resolution:
        depth = height = width = max(depth, height, width)
    if max_voxels:
        depth = min(depth, max(1, max_voxels // (height * width)))
    return network_size((depth, height, width), find_divisor(config))


def count_memory(
    config: TrainConfig,
    shape: Shape,
    make_baseline: Callable[[], nn.Module] | None = None,
    *,
    samples: int | None = None,
    compute: bool = False,
    timeline: Timeline | None = None,
) -> StepMemory:
    """Count the memory of a training step of a configuration.

    Args:
        config: Checked configuration.
        shape: Voxels of a sample, (D, H, W).
        make_baseline: Builds a network that replaces the configured one and is called with the
            image alone.
        samples: Samples of a micro-batch; None = those of the configuration.
        compute: See `count_step`.
        timeline: See `count_step`.

    Raises:
        UserError: If the network does not accept the shape, or a part cannot be counted.
    """
    memory, samples = config.memory, samples or samples_per_rank(config)
    # Compiled code chooses what it saves, which cannot be counted: the network is counted before
    # compilation.
    uncompiled = replace(memory, compile=False)
    # Only GPUs train in fp16.
    needs_gpu = memory.offload or memory.precision is Precision.fp16
    is_gpu = needs_gpu or pick_device_type(config.trainer.accelerator) == "cuda"

    def make_ours() -> nn.Module:
        return switch_on(
            make_network(config),
            uncompiled,
            "cuda" if is_gpu else "cpu",
            sync_batchnorm=config.trainer.sync_batchnorm,
        )

    try:
        return count_step(
            make_baseline or make_ours,
            (samples, count_channels(config), *shape),
            loss=make_loss(config),
            make_optimizer=make_scheduled_optimizer(config),
            precision=memory.precision.value,
            accumulate=memory.accumulate,
            averages=config.ema_decay is not None,
            compute=compute,
            is_gpu=is_gpu and not compute,
            timeline=timeline,
        )
    except ValueError as error:
        raise UserError(f"plan: {error}") from error
    except (RuntimeError, TypeError) as error:
        # A loss or an optimiser of another package may leave torch, which fake tensors do not
        # allow.
        if compute:
            raise
        raise UserError(
            f"plan: a part cannot be counted without computing it ({first_line(error)}); give compute=true"
        ) from error


def evaluation_bytes(config: TrainConfig, shape: Shape) -> tuple[int, int]:
    """Count the live bytes of the evaluation of one case, without the optimiser's state.

    Args:
        config: Checked configuration.
        shape: Voxels of the case, (D, H, W).

    Returns:
        Bytes of the case itself, and the peak of the weights and of one pass of the network.
    """
    beside, timeline = count_evaluation(config, shape)
    peaks = [
        max(after + workspace for after, workspace, _ in segment.calls)
        for segment in timeline.segments
        if segment.calls
    ]
    return beside, max(peaks)


def count_evaluation(config: TrainConfig, shape: Shape) -> tuple[int, Timeline]:
    """Count the memory of the evaluation of one case, with the weights, the image and the reference.

    A case in tiles goes through the network tile by tile; the sums and probabilities of the whole
    case are held meanwhile.

    Args:
        config: Checked configuration.
        shape: Voxels of the case, (D, H, W).

    Returns:
        Bytes beside weights, image and operations, and the operations of the case or of one tile.
    """
    tile_size = config.inference.tile_size
    channels, divisor = count_channels(config), find_divisor(config)

    def call(network: nn.Module, image: Tensor) -> Tensor:
        probs = predict_probs(network, image, tile_size=None, overlap=0.0, divisor=divisor)
        return probs if tile_size else most_probable(probs)

    def make() -> nn.Module:
        return switch_on(
            make_network(config), replace(config.memory, compile=False, offload=False), "cpu"
        )

    seen = network_size(tile_size, divisor) if tile_size else shape
    is_gpu = pick_device_type(config.trainer.accelerator) == "cuda"
    timeline = count_forward(
        make, (1, channels, *seen), call, precision=config.memory.precision.value, is_gpu=is_gpu
    )
    target = math.prod(shape)  # uint8
    if tile_size is None:
        return target, timeline
    depth, height, width = (max(pair) for pair in zip(shape, seen, strict=True))
    classes = count_classes(config)
    # float32 sums of one layer of tiles, moved by a copy; float16 probabilities; the image and its
    # padded copy.
    sums, probs = classes * seen[0] * height * width * 4, classes * depth * height * width * 2
    return target + 2 * sums + probs + 2 * channels * depth * height * width * 4, timeline
