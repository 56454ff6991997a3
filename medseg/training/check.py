"""Check of a run's objects before data is read: each is built and tried once."""

import dataclasses
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from medseg.errors import UserError, first_line
from medseg.io.names import is_utf8
from medseg.memory.switches import select_blocks
from medseg.models.blocks import InstanceNorm
from medseg.models.options import UNET
from medseg.models.stage_network import StageNetwork
from medseg.targets import TARGET
from medseg.training.clashes import class_name, divisor_clashes
from medseg.training.extensions import (
    check_loss,
    make_callbacks,
    make_loggers,
    make_metrics,
    make_transforms,
)
from medseg.training.input_sizes import stated_divisor
from medseg.training.network import count_classes, make_network_on_meta
from medseg.training.optimisation import (
    find_lr_factor,
    grows_with_gradient,
    make_optimizer,
    make_schedule,
    step_from_zero,
)
from medseg.training.options import LrScaling, TrainConfig

# This logger writes its files with Python alone, so the name of its folder need not be UTF-8.
CSV_LOGGER = "lightning.pytorch.loggers.CSVLogger"
# Number of first steps that are tried with optimiser and schedule.
NUM_OPTIMISER_STEPS = 2
# The steps after these, up to this number, are tried with the schedule alone, in some microseconds
# each.
MAX_TRIED_STEPS = 2000


def check_objects(config: TrainConfig) -> bool:
    """Build the network on the meta device, and the objects of the extension points on small data.

    Returns:
        Whether the network has batch norm, see `medseg.training.notes.notes`.

    Raises:
        UserError: If one of them refuses its arguments, or the network does not fit the sizes and
            switches.
    """
    network = make_network_on_meta(config)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in network.modules())
    _check_switches(config, network, has_batch_norm)
    _check_sizes(config, network, has_batch_norm)
    output_weights = config.loss.get("output_weights")
    num_outputs = network.traits.num_outputs  # None where it is not known
    if output_weights is not None and num_outputs not in (None, len(output_weights)):
        raise UserError(
            f"loss.output_weights={output_weights}: expected {num_outputs} numbers, one for each "
            "output of the network; leave it out, or correct it"
        )
    check_loss(config)
    make_transforms(config)
    for name in ("dice", "dice_worst"):
        if name in config.metrics:
            raise UserError(
                f"metrics.{name}: history.csv already has a column val_{name}; choose another name"
            )
    make_metrics(config.metrics, count_classes(config), config.trusted_targets)
    _check_callbacks(config)
    _check_optimisation(config)
    _check_loggers(config)
    return has_batch_norm


def _check_callbacks(config: TrainConfig) -> None:
    """Make the callbacks; without a logger, refuse those of Lightning that write to one."""
    callbacks = make_callbacks(config)
    if config.logger or not callbacks:
        return
    from lightning.pytorch.callbacks import DeviceStatsMonitor, LearningRateMonitor

    for name, callback in zip(config.callbacks, callbacks, strict=True):
        if isinstance(callback, (DeviceStatsMonitor, LearningRateMonitor)):
            raise UserError(
                f"callbacks.{name}: {type(callback).__name__} writes to a logger, but there is "
                "none; choose logger=csv, or leave the callback out"
            )


def _check_loggers(config: TrainConfig) -> None:
    """Make the loggers, with a temporary folder in place of the run folder.

    Some loggers write files as soon as they are made, and the run may still be refused.
    """
    other_loggers = _list_targets(config.logger) - {CSV_LOGGER}
    needs_utf8 = len(other_loggers) > 0
    for run_dir in (config.resume, config.run_dir):
        if not run_dir:
            continue
        path = os.path.abspath(run_dir)
        if needs_utf8 and not is_utf8(path):
            raise UserError(
                f"{path}: expected a run folder whose name is UTF-8, since the files of this "
                "logger cannot be written to another one; rename the folder, or give logger=csv"
            )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        logger = _redirected(config.logger, config.run_dir, folder)
        make_loggers(dataclasses.replace(config, logger=logger))


def _list_targets(node: dict[str, Any]) -> set[str]:
    """List the classes that a node names: that of a logger, or of several loggers by name."""
    if TARGET in node:
        return {str(node[TARGET])}
    targets = set[str]()
    for logger in node.values():
        if isinstance(logger, dict):
            targets |= _list_targets(logger)
    return targets


def _redirected(node: Any, run_dir: str, folder: str) -> Any:
    """Copy the node of a logger, with another folder in place of that of the run.

    Args:
        node: The node, or a value in it.
        run_dir: Folder of the run; may be a relative path, such as `log`.
        folder: Path of the other folder, a temporary one.
    """
    if isinstance(node, dict):
        return {key: _redirected(value, run_dir, folder) for key, value in node.items()}
    if isinstance(node, str):
        # The run folder as a whole path, also after a scheme (`sqlite:///`): without a letter,
        # digit, `_`, `.` or `-` beside it, so that the `log` in the name of a class stays.
        whole_path = rf"(?<![\w.-]){re.escape(run_dir)}(?![\w.-])"
        # A function, because in a string `re.sub` would take a backslash for an escape.
        return re.sub(whole_path, lambda _: folder, node)
    return node


def _check_optimisation(config: TrainConfig) -> None:
    """Try the optimiser and the schedule on a convolution, with tensors of one and five axes.

    Raises:
        UserError: If one of them fails, climbs the gradient, or does not suit `lr_scaling`.
    """
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    weights = list(nn.Conv3d(1, 2, 3).parameters())
    optimizer_factory = make_optimizer(config.optimizer, lr_factor, config.trusted_targets)
    with _one_sentence_errors("optimizer", config.optimizer):
        optimizer = optimizer_factory(weights)
        first_step = step_from_zero(optimizer_factory)
        has_growing_steps = grows_with_gradient(optimizer_factory)
    name = class_name(config.optimizer)
    # Such as the optimisers without a schedule: `eval` puts other weights into the network.
    if hasattr(optimizer, "eval"):
        raise UserError(
            f"optimizer: {name} evaluates other weights than those that it trains, and medseg "
            "would validate and save those that it trains; choose another optimizer, with "
            "ema_decay for an average of the weights"
        )
    # The gradient of `step_from_zero`. A positive dot product means a step along the gradient.
    gradient = torch.linspace(-1.0, 1.0, len(first_step))
    climbs = float(first_step @ gradient) > 0
    if climbs:
        raise UserError(
            f"optimizer: a step of {name} goes up the gradient, which raises the loss; leave "
            "optimizer.maximize out"
        )
    if config.lr_scaling is LrScaling.linear and not has_growing_steps:
        raise UserError(
            f"lr_scaling=linear: the steps of {name} do not grow with the gradient; choose "
            "lr_scaling=sqrt"
        )
    with _one_sentence_errors("schedule", config.schedule):
        schedule_factory = make_schedule(
            config.schedule, lr_factor, config.warmup_steps, config.trusted_targets
        )
        schedule = schedule_factory(optimizer)
    for _ in range(min(NUM_OPTIMISER_STEPS, config.steps)):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with _one_sentence_errors("optimizer", config.optimizer):
            # Some optimisers require a closure that returns the loss.
            optimizer.step(lambda: 0.0)
        with _one_sentence_errors("schedule", config.schedule):
            schedule.step()
    # The schedule of a run folder to resume was checked when the run began.
    names_run_folder = config.resume not in (None, "auto")
    if not names_run_folder:
        with _one_sentence_errors("schedule", config.schedule):
            _check_rates(optimizer, schedule, config.steps)


def _check_rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    """Try the schedule alone: the steps after `NUM_OPTIMISER_STEPS`, and the last step.

    A schedule with a number of steps of its own, such as `OneCycleLR`, refuses steps beyond it.

    Raises:
        ValueError: If a rate is negative or not finite.
        Exception: Whatever the schedule raises.
    """
    for step in range(NUM_OPTIMISER_STEPS, min(steps, MAX_TRIED_STEPS)):
        rates = [group["lr"] for group in optimizer.param_groups]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"the learning rate of step {step + 1} is {rates[0]}")
        schedule.step()
    if steps > MAX_TRIED_STEPS:
        # Jump to the last step: torch's schedules count their steps in `last_epoch`. A schedule
        # that combines others, as the warm-up does, keeps them in `_schedulers`.
        inner_schedules = getattr(schedule, "_schedulers", ())
        for counting_schedule in (schedule, *inner_schedules):
            counting_schedule.last_epoch = steps - 1
        schedule.step()


@contextmanager
def _one_sentence_errors(group: str, node: Mapping[str, Any]) -> Iterator[None]:
    """Turn any exception of a class that the configuration names into a `UserError`.

    Args:
        group: Key of the group, for the message.
        node: The group, which names the class.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{group}: {node[TARGET]} cannot be used with these arguments ({type(error).__name__}: "
            f"{first_line(error)}); change them, or choose another {group}"
        ) from error


def _check_sizes(config: TrainConfig, network: StageNetwork, has_batch_norm: bool) -> None:
    """Refuse input sizes that the network does not accept.

    `medseg.training.clashes` checks those of our UNet.
    """
    if stated_divisor(config.model, config.spacing) is None:
        # Norms need two voxels at the deepest level. A network with a fixed input size, which is
        # checked below, has them.
        instance_norms = (InstanceNorm, _InstanceNorm)
        has_instance_norm = any(isinstance(module, instance_norms) for module in network.modules())
        has_any_size = network.traits.fixed_size is None
        clashes = divisor_clashes(
            config,
            network.divisor,
            has_instance_norm=has_instance_norm and has_any_size,
            has_batch_norm=has_batch_norm and has_any_size,
        )
        first_clash = next(clashes, None)
        if first_clash is not None:
            raise UserError(first_clash)
    fixed_size = network.traits.fixed_size
    if fixed_size is None:
        return
    stated_sizes = {
        "stage.patch_size": config.stage.patch_size,
        "inference.tile_size": config.inference.tile_size,
    }
    for key, stated_size in stated_sizes.items():
        # Without a stated size the whole crop is the input.
        input_size = stated_size or config.spacing.size
        if input_size == fixed_size:
            continue
        size = list(fixed_size)
        stated_text = list(stated_size) if stated_size else None
        raise UserError(
            f"{key}={stated_text}: the network accepts inputs of {size} voxels only; "
            f"choose {key}={size}, or spacing=fixed_size spacing.size={size}, "
            "or another size of the network (model.img_size)"
        )


def _check_switches(config: TrainConfig, network: StageNetwork, has_batch_norm: bool) -> None:
    """Refuse switches that the network does not allow.

    `medseg.training.clashes` checks those of our UNet.
    """
    policy = config.memory.checkpointing
    has_checkpointing = policy not in ("none", [])
    if has_checkpointing and not network.traits.blocks:
        raise UserError(
            f"memory.checkpointing: no block of {config.model[TARGET]} was found; name some in "
            "model.blocks, such as [encoder.*]"
        )
    if not isinstance(policy, str):
        policy = tuple(policy)  # names of blocks
    try:
        select_blocks(network.blocks(), policy)
    except ValueError as error:
        raise UserError(f"memory: {error}") from error
    if config.model[TARGET] == UNET:
        return
    if config.trainer.sync_batchnorm and not has_batch_norm:
        raise UserError(
            "trainer.sync_batchnorm=true works with batch norm only, which "
            f"{config.model[TARGET]} does not have; choose trainer.sync_batchnorm=false"
        )
