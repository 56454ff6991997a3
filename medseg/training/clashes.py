"""Checks for contradictions between keys of several groups of `train`.

Contradictions within one group are found beside its keys, in the module `options` of its package.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medseg.data.options import StageName, missing_file
from medseg.geometry.sizes import Shape
from medseg.losses.options import loss_clashes
from medseg.memory.options import Accelerator, Precision
from medseg.models.options import UNET, is_batch_norm, model_clashes
from medseg.targets import TARGET
from medseg.training.input_sizes import input_sizes, stated_divisor
from medseg.training.options import (
    LrScaling,
    TrainConfig,
    micro_batches_per_step,
    samples_per_micro_batch,
)

# Schedules that multiply the rate of the step before, so that a warm-up can multiply it too. Other
# schedules set the rate of each step as a number.
CHAINABLE_SCHEDULES = (
    "ConstantLR",
    "CosineAnnealingLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "PolynomialLR",
    "StepLR",
)
# Kinds of devices that a run with an accelerator uses for certain; `auto` leaves them open.
DEVICE_KINDS = {Accelerator.cpu: {"cpu"}, Accelerator.gpu: {"cuda"}, Accelerator.auto: set[str]()}


def train_clashes(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction.

    Later checks assume that the earlier ones found no contradiction.
    """
    # A run folder to resume has its weights in a checkpoint: the initial ones may be gone.
    names_run_folder = config.resume not in (None, "auto")
    if not names_run_folder:
        yield from _start_clashes(config.init_from)
    yield from model_clashes(config.model)
    yield from loss_clashes(config.loss)
    yield from _size_clashes(config)
    yield from _rank_clashes(config)
    yield from _device_clashes(config)
    yield from _schedule_clashes(config)
    yield from _optimiser_clashes(config)
    yield from _side_clashes(config)
    yield from _region_clashes(config)


def _start_clashes(init_from: str | None) -> Iterator[str]:
    """Yield a sentence if initial weights are neither a file nor a model folder of nnU-Net."""
    if init_from is not None and Path(init_from).is_dir():
        # Imported here because it loads torch, which the other checks do not need.
        from medseg.nnunet.folder import is_start

        if is_start(Path(init_from)):
            return
    yield from missing_file("init_from", init_from)


def _size_clashes(config: TrainConfig) -> Iterator[str]:
    """Check that the sizes of network inputs lie within the crop.

    If the divisor is known without building the network, the sizes must be multiples of it.
    """
    divisor = stated_divisor(config.model, config.spacing)
    if divisor is not None:
        yield from divisor_clashes(
            config,
            divisor,
            has_instance_norm=config.model.get("norm") == "instance",
            has_batch_norm=is_batch_norm(config.model),
        )
    crop_size = config.spacing.size
    if crop_size is None:
        return
    for key, size in input_sizes(config).items():
        is_larger = any(
            length > crop_length for length, crop_length in zip(size, crop_size, strict=True)
        )
        if is_larger:
            yield (
                f"{key}={list(size)} is larger than the whole crop, "
                f"spacing.size={list(crop_size)}; choose a smaller size, or null"
            )
    max_voxels = config.stage.max_voxels
    if max_voxels is not None and math.prod(crop_size) > max_voxels:
        yield (
            f"spacing.size={list(crop_size)} has more voxels than stage.max_voxels={max_voxels} "
            "allows; choose a smaller size, or stage.max_voxels=null"
        )


def divisor_clashes(
    config: TrainConfig, divisor: Shape, *, has_instance_norm: bool, has_batch_norm: bool
) -> Iterator[str]:
    """Check that input sizes are multiples of the divisor, and leave voxels at the deepest level.

    A norm over voxels needs two of them or more at the deepest level: instance norm in each sample,
    batch norm in all samples that the network sees at once in training.

    Args:
        config: The configuration.
        divisor: Required multiple of the input size, (z, y, x).
        has_instance_norm: Whether the network has instance norm.
        has_batch_norm: Whether it has batch norm.
    """
    model = config.model
    reason = f"model={model[TARGET]}"
    if model[TARGET] == UNET:
        reason = f"model.depth={model['depth']}, model.stem={model['stem']}"
    # A single number where the axes agree.
    multiple = divisor[0] if len(set(divisor)) == 1 else list(divisor)
    for key, size in input_sizes(config).items():
        if any(length % step for length, step in zip(size, divisor, strict=True)):
            yield f"{key}: expected multiples of {multiple} ({reason}), but got {list(size)}"
        if size != divisor:
            continue
        begin = f"{key}={list(size)}: the deepest level of the network would have one voxel"
        if has_instance_norm:
            yield (
                f"{begin}, but instance norm needs at least two for a variance; choose a larger "
                "size along an axis"
            )
        elif has_batch_norm and _trains_on_one_sample(config, key):
            yield (
                f"{begin} of one sample, but batch norm needs at least two for a variance; choose "
                "a larger size along an axis, or more samples of a micro-batch (stage.batch_size)"
            )


def _trains_on_one_sample(config: TrainConfig, key: str) -> bool:
    """Whether a key states the input of the training, and batch norm sees one sample of it.

    Args:
        config: The configuration.
        key: One of `input_sizes`.
    """
    training_key = "spacing.size" if config.stage.patch_size is None else "stage.patch_size"
    num_samples = samples_per_micro_batch(config)
    if config.trainer.sync_batchnorm:
        num_samples *= config.trainer.num_ranks
    return key == training_key and num_samples == 1


def _rank_clashes(config: TrainConfig) -> Iterator[str]:
    """Check the keys that do not suit several ranks or a device map."""
    stage = config.stage
    trainer = config.trainer
    if config.model["device_map"] is not None:
        for key, reason in _excluded_by_map(config):
            yield f"{key} cannot be combined with model.device_map ({reason}); change one of them"
    # Other networks are checked once they are built, see `medseg.training.check`.
    lacks_batch_norm = config.model[TARGET] == UNET and not is_batch_norm(config.model)
    if trainer.sync_batchnorm and lacks_batch_norm:
        yield (
            "trainer.sync_batchnorm=true works with model.norm=batch only, but "
            f"model.norm={config.model.get('norm')}; choose trainer.sync_batchnorm=false"
        )
    accumulate = config.memory.accumulate
    num_micro_batches = micro_batches_per_step(config)
    if stage.batch_size % num_micro_batches:
        yield (
            f"stage.batch_size={stage.batch_size} cannot be divided among {trainer.num_ranks} "
            f"rank(s) × memory.accumulate={accumulate}; choose a multiple of {num_micro_batches}"
        )


def _excluded_by_map(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield each key that a device map excludes, and why."""
    memory = config.memory
    trainer = config.trainer
    device_map = config.model["device_map"]
    if trainer.num_ranks > 1:
        yield f"trainer.devices={trainer.devices}", "one rank uses all devices of the map"
    if memory.offload:
        yield "memory.offload=true", "the device map already places the activations"
    if memory.compile:
        yield "memory.compile=true", "compiled code stays on one device"
    kinds = set(DEVICE_KINDS[trainer.accelerator])  # a copy, which is extended
    if isinstance(device_map, dict):
        # "cuda" of "cuda:1"
        kinds |= {str(device).partition(":")[0] for device in device_map.values()}
    if memory.precision in (Precision.bf16, Precision.fp16) and len(kinds) > 1:
        reason = "half precision needs devices of one kind, all CPU or all GPU"
        yield f"memory.precision={memory.precision.value}", reason


def _device_clashes(config: TrainConfig) -> Iterator[str]:
    """Check the switches that need a GPU."""
    memory = config.memory
    if config.trainer.accelerator is not Accelerator.cpu:
        return
    if memory.precision in (Precision.fp16, Precision.tf32):
        yield (
            f"memory.precision={memory.precision.value} needs a GPU, but trainer.accelerator=cpu; "
            "choose memory.precision=bf16"
        )
    if memory.offload:
        yield (
            "memory.offload=true moves activations from a GPU to the host, but "
            "trainer.accelerator=cpu; choose memory.offload=false"
        )
    if config.data.pin_memory:
        yield (
            "data.pin_memory=true speeds up copies to a GPU, but trainer.accelerator=cpu; choose "
            "data.pin_memory=null"
        )
    if memory.cudnn_benchmark:
        yield (
            "memory.cudnn_benchmark=true chooses kernels of a GPU, but trainer.accelerator=cpu; "
            "choose memory.cudnn_benchmark=false"
        )


def _schedule_clashes(config: TrainConfig) -> Iterator[str]:
    """Check that the schedule suits the length of the run, its warm-up and its rates."""
    steps = config.steps
    warmup_steps = config.warmup_steps
    schedule = class_name(config.schedule)
    if warmup_steps and schedule not in CHAINABLE_SCHEDULES:
        yield (
            f"warmup_steps={warmup_steps}: schedule {schedule} sets the learning rates of all "
            "steps itself; choose warmup_steps=0, or a schedule such as schedule=cosine"
        )
    if warmup_steps >= steps:
        yield f"warmup_steps={warmup_steps}: the run has only steps={steps}; choose fewer"
    total_steps = config.schedule.get("total_steps")
    # `medseg.runs.folder` checks a run folder to resume: it knows the steps of the earlier run,
    # and lets the run go on if those already passed the end of the schedule.
    names_run_folder = config.resume not in (None, "auto")
    # The class refuses anything but a number.
    ends_early = isinstance(total_steps, (int, float)) and total_steps < steps
    if ends_early and not names_run_folder:
        yield (
            f"schedule.total_steps={total_steps}: the schedule would end before the run, "
            f"steps={steps}; leave schedule.total_steps out, or give {steps} or more"
        )
    (lowest_key, lowest_lr), (highest_key, highest_lr) = _lr_bounds(config)
    if lowest_lr > highest_lr:
        yield (
            f"{lowest_key}={lowest_lr:g} is the lowest rate of the schedule, but "
            f"{highest_key}={highest_lr:g} is its highest; choose a smaller one"
        )


def _lr_bounds(config: TrainConfig) -> tuple[tuple[str, float], tuple[str, float]]:
    """Find the stated bounds of the learning rate.

    Returns:
        Key and value of the lowest rate, then of the highest; ("", 0) and ("", infinity) where they
        are not stated.
    """
    schedule = config.schedule
    lowest = ("", 0.0)
    highest = ("", math.inf)
    for key in ("base_lr", "eta_min"):
        if isinstance(schedule.get(key), (int, float)):
            lowest = f"schedule.{key}", schedule[key]
    if isinstance(schedule.get("max_lr"), (int, float)):
        highest = "schedule.max_lr", schedule["max_lr"]
    elif isinstance(config.optimizer.get("lr"), (int, float)):
        highest = "optimizer.lr", config.optimizer["lr"]
    return lowest, highest


def _optimiser_clashes(config: TrainConfig) -> Iterator[str]:
    """Check the average of the weights and the scaling of the rates."""
    steps = config.steps
    decay = config.ema_decay
    # The average covers about 1 / (1 - decay) steps, which must not exceed those of the run. In a
    # shorter run the weights of the first step would be a third of the average, or more. 1e-6
    # allows for rounding, as in 1 - 0.9.
    if decay is not None and steps * (1 - decay) < 1 - 1e-6:
        # The largest accepted decay is (steps - 1) / steps. It is rounded down, by an integer
        # division, to two decimals more than `steps` has digits.
        scale = 100 * 10 ** len(str(steps))
        scaled_decay = (steps - 1) * scale // steps
        yield (
            f"ema_decay={decay} averages over {1 / (1 - decay):.0f} steps, but steps={steps}; "
            f"choose {scaled_decay / scale} or less, or more steps"
        )
    if config.lr_scaling is not LrScaling.none and "lr" not in config.optimizer:
        yield (
            f"lr_scaling={config.lr_scaling.value}: optimizer.lr is missing, so no rate would be "
            "scaled; give optimizer.lr=<number>"
        )


def _side_clashes(config: TrainConfig) -> Iterator[str]:
    """Check the flips of a task that distinguishes left and right."""
    # A run folder to resume keeps its flips: it may have begun when fewer names had sides.
    names_run_folder = config.resume not in (None, "auto")
    flip_axes = config.augment.flip_axes
    if names_run_folder or not flip_axes or not config.task.has_sides:
        return
    # Axes are (z, y, x), and x runs from right to left.
    if 2 in flip_axes:
        yield (
            f"augment.flip_axes={flip_axes}: a flip along x (axis 2) swaps the sides that "
            f"task={config.task.name} distinguishes; leave axis 2 out"
        )
    # A flip along any axis makes a mirror image of the body, which is a rotated body with exchanged
    # sides. The fine stage may flip, because it gets the side of its crop from the coarse stage.
    if config.stage.name is not StageName.fine:
        yield (
            f"augment.flip_axes={flip_axes}: with flips the {config.stage.name} stage cannot "
            "distinguish the sides; leave it empty"
        )


def _region_clashes(config: TrainConfig) -> Iterator[str]:
    """Check that the stage suits the regions of the task."""
    if config.stage.name is not StageName.fine:
        return
    task = config.task
    regions = task.regions or {}
    if not regions:
        yield (
            f"stage=fine: the task {task.name} has no regions, and one stage segments all of its "
            "labels; choose stage=single"
        )
    num_labels = {name: len(region.labels) for name, region in regions.items()}
    if len(set(num_labels.values())) > 1:
        yield (
            f"stage=fine: one network segments all regions, but they have {num_labels} labels; "
            "give each the same number of labels, or choose stage=single task.regions=null"
        )


def class_name(node: dict[str, Any]) -> str:
    """Return the name of the class that a node of an extension point names, without its package."""
    return str(node.get(TARGET)).rpartition(".")[2]
