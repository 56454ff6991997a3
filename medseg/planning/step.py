"""Training step and evaluation of a configuration: sizes of the inputs, counts of the memory."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from medseg.config.schema import PlanConfig
from medseg.errors import UserError, first_line
from medseg.geometry.sizes import Shape, bounded_depth, network_size
from medseg.inference.tiles import most_probable, predict_probs
from medseg.memory.accounting import StepMemory, count_forward, count_step
from medseg.memory.device import pick_device_type
from medseg.memory.options import Precision
from medseg.memory.switches import switch_on
from medseg.memory.tracker import Timeline
from medseg.preprocess.options import SpacingStrategy
from medseg.runs.plans import Numbers, write_plan
from medseg.training.extensions import make_loss
from medseg.training.network import count_channels, count_classes, find_divisor, make_network
from medseg.training.optimisation import make_scheduled_optimizer
from medseg.training.options import TrainConfig, samples_per_micro_batch


def largest_batch(peak: Callable[[int], int], budget: int) -> int:
    """Find the largest number of samples whose step fits, by doubling and bisection.

    Args:
        peak: Bytes of a step by number of samples. They must never fall from one number to the
            next, and must exceed the budget at some number.
        budget: Bytes that the step may use.

    Returns:
        Number of samples; 0 if one does not fit.
    """
    # The number is not extrapolated from two counts: as long as the peak lies in the optimiser's
    # update, it does not depend on the samples at all.
    too_many = 1
    while peak(too_many) <= budget:
        too_many *= 2
    # The index after the last number that fits is that number, because the range begins at 1.
    return bisect_right(range(1, too_many), budget, key=peak)


def input_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the sample to plan for.

    It is the first of these that is set: `shape`, the stage's patch, and the size of all crops. If
    none is set, it is `extent_mm` at the configured spacing.
    """
    stated_shape = config.shape or config.stage.patch_size or config.spacing.size
    return stated_shape or _whole_shape(config, config.stage.max_voxels)


def keep_numbers(config: PlanConfig, numbers: Numbers) -> None:
    """Keep the predicted numbers for the runs of a configuration.

    They are not kept if `shape` is not the size of the samples that these runs will see.
    """
    # If this is None, the samples are whole volumes or crops, and `shape` says how large these are.
    fixed_shape = config.stage.patch_size or config.spacing.size
    if config.shape and fixed_shape and config.shape != fixed_shape:
        return
    write_plan(config, numbers)


def evaluated_shape(config: PlanConfig) -> Shape:
    """Voxels (D, H, W) of the largest validation case.

    The case is `validation_shape`, or the whole volume or crop that `input_shape` describes.
    """
    if config.validation_shape:
        return config.validation_shape
    if config.spacing.size:
        return config.spacing.size
    # With patches, `shape` is the size of a patch and says nothing of the case.
    if config.shape and config.stage.patch_size is None:
        return config.shape
    return _whole_shape(config, max_voxels=None)


def _whole_shape(config: PlanConfig, max_voxels: int | None) -> Shape:
    """Voxels (D, H, W) of a whole volume or crop of `extent_mm`, a multiple of the divisor.

    Args:
        config: Checked configuration.
        max_voxels: A larger volume is cut to a range of slices with so many voxels, as in training;
            None = never.

    Raises:
        UserError: If each scan keeps its own spacing.
    """
    spacing_mm = config.spacing.target_spacing_mm
    if config.spacing.range_mm is not None:
        # The finest spacing gives the largest sample.
        finest_mm = config.spacing.range_mm[0]
        spacing_mm = (finest_mm, finest_mm, finest_mm)
    if spacing_mm is None:
        raise UserError(
            "plan: spacing.strategy=native has no spacing to count voxels with; give shape=[D,H,W] "
            "of the sample to plan for, and validation_shape=[D,H,W] of the largest validation case"
        )
    extent_mm = getattr(config.extent_mm, config.stage.name.value)
    depth = math.ceil(extent_mm[0] / spacing_mm[0])
    height = math.ceil(extent_mm[1] / spacing_mm[1])
    width = math.ceil(extent_mm[2] / spacing_mm[2])
    if config.spacing.strategy is SpacingStrategy.fixed_resolution:
        # This strategy widens or pads each crop to a cube.
        depth = height = width = max(depth, height, width)
    divisor = find_divisor(config)
    shape = network_size((depth, height, width), divisor)
    if max_voxels is None:
        return shape
    # `network_size` doubles a depth that is bounded to the divisor itself.
    depth = bounded_depth(shape, max_voxels, divisor[0])
    return network_size((depth, *shape[1:]), divisor)


def is_planned_for_gpu(config: TrainConfig) -> bool:
    """Whether a run is counted as on a GPU, even if this machine has none."""
    # Only GPUs offload, or train in fp16.
    needs_gpu = config.memory.offload or config.memory.precision is Precision.fp16
    return needs_gpu or pick_device_type(config.trainer.accelerator) == "cuda"


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
    memory = config.memory
    samples = samples or samples_per_micro_batch(config)
    # Compiled code chooses which tensors it saves, and these cannot be counted: the network is
    # counted without compilation.
    options = replace(memory, compile=False)
    is_gpu = is_planned_for_gpu(config)
    device_type = "cuda" if is_gpu else "cpu"

    def make_configured() -> nn.Module:
        return switch_on(
            make_network(config),
            options,
            device_type,
            sync_batchnorm=config.trainer.sync_batchnorm,
        )

    try:
        return count_step(
            make_baseline or make_configured,
            (samples, count_channels(config), *shape),
            loss=make_loss(config),
            make_optimizer=make_scheduled_optimizer(config),
            precision=memory.precision.value,
            accumulate=memory.accumulate,
            averages=config.ema_decay is not None,
            compute=compute,
            # A computed step runs on the CPU, without the copies that a GPU's kernels make.
            is_gpu=is_gpu and not compute,
            timeline=timeline,
        )
    except ValueError as error:
        raise UserError(f"plan: {error}") from error
    except (RuntimeError, TypeError) as error:
        # With real tensors the error is a fault of the part. Without them a loss or an optimiser of
        # another package may compute outside of torch (e.g. with NumPy), which fake tensors do not
        # allow.
        if compute:
            raise
        raise UserError(
            f"plan: a part cannot be counted without computing it ({first_line(error)}); "
            "give compute=true"
        ) from error


def evaluation_bytes(config: TrainConfig, shape: Shape) -> tuple[int, int]:
    """Count the bytes of the evaluation of one case, without the optimiser's state.

    Counted are live tensors, and the workspaces that are known without measuring.

    Args:
        config: Checked configuration.
        shape: Voxels of the case, (D, H, W).

    Returns:
        Bytes that are held beside the pass of the network (the reference; with tiles also the whole
        image, sums and probabilities), and the peak of one pass with its weights and input. Their
        sum is the peak of the evaluation.
    """
    case_bytes, timeline = count_evaluation(config, shape)
    pass_bytes = 0
    for segment in timeline.segments:
        for operation in segment.operations:
            pass_bytes = max(pass_bytes, operation.live_bytes + operation.known_workspace)
    return case_bytes, pass_bytes


def count_evaluation(config: TrainConfig, shape: Shape) -> tuple[int, Timeline]:
    """Count the memory of the evaluation of one case, with weights, image and reference.

    A case in tiles goes through the network tile by tile; sums of one layer of tiles and
    probabilities of the whole case are held meanwhile, see `medseg.inference.tiles`.

    Args:
        config: Checked configuration.
        shape: Voxels of the case, (D, H, W).

    Returns:
        Bytes that are held beside the pass of the network, see `evaluation_bytes`, and the
        operations of the pass on the case or on one tile. Their live bytes include the weights and
        the case or tile.
    """
    tile_size = config.inference.tile_size
    num_channels = count_channels(config)
    divisor = find_divisor(config)

    def run_pass(network: nn.Module, image: Tensor) -> Tensor:
        probs = predict_probs(network, image, tile_size=None, overlap=0.0, divisor=divisor)
        # The labels of a case in tiles are found later, from the summed probabilities of all tiles.
        return probs if tile_size else most_probable(probs)

    def make_switched_network() -> nn.Module:
        # A validation runs uncompiled, see `medseg.memory.switches.uncompiled`, and saves nothing
        # that could be offloaded.
        memory = replace(config.memory, compile=False, offload=False)
        # Only offloading depends on the type of the device.
        return switch_on(make_network(config), memory, "cpu")

    pass_shape = network_size(tile_size, divisor) if tile_size else shape
    timeline = count_forward(
        make_switched_network,
        (1, num_channels, *pass_shape),
        run_pass,
        precision=config.memory.precision.value,
        is_gpu=is_planned_for_gpu(config),
    )
    target_bytes = math.prod(shape)  # uint8
    if tile_size is None:
        return target_bytes, timeline
    # A case that is smaller than a tile is padded to the tile.
    padded_shape = tuple(map(max, shape, pass_shape))
    num_voxels = math.prod(padded_shape)
    num_layer_voxels = pass_shape[0] * math.prod(padded_shape[1:])
    num_classes = count_classes(config)
    # float32 sums of one layer of tiles, and the copy with which they move on to the next layer.
    sums_bytes = 2 * num_classes * num_layer_voxels * 4
    probs_bytes = num_classes * num_voxels * 2  # float16
    image_bytes = num_channels * math.prod(shape) * 4  # float32
    if padded_shape != shape:
        image_bytes += num_channels * num_voxels * 4  # the padded copy
    return target_bytes + sums_bytes + probs_bytes + image_bytes, timeline
