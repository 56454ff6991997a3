"""Optimiser and learning-rate schedule of a run, made from class names."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from medseg.config.schema import LrScaling
from medseg.errors import UserError

# Arguments of optimisers and schedules that are learning rates.
LR_KEYS = ("lr", "max_lr", "base_lr", "eta_min")
# Extras of the package that install the classes which medseg itself does not depend on.
EXTRAS = {"pytorch_optimizer": "optimizers"}


def make_target(group: str, node: dict[str, Any], *leading: Any) -> Callable[..., Any]:
    """Bind the arguments of a white-listed class to its signature, before any data is touched.

    Args:
        group: Name of the group, for messages.
        node: `_target_` and arguments.
        leading: Stand-ins for the positional arguments that come later (parameters, an optimiser).

    Returns:
        The class with its arguments; call it with what `leading` stood for.

    Raises:
        UserError: If the class does not exist or does not take the arguments.
    """
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    module_name, _, name = str(node["_target_"]).rpartition(".")
    key = f"{group}._target_: {node['_target_']}"
    try:
        target = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        extra = EXTRAS.get(module_name.partition(".")[0])
        if extra and isinstance(error, ImportError):
            raise UserError(f"{key} needs pip install 'medseg[{extra}]' ({error})") from error
        raise UserError(f"{key} does not exist in the installed version ({error})") from error
    if not inspect.isclass(target):
        raise UserError(f"{key} is not a class")
    signature = inspect.signature(target)
    try:
        signature.bind(*leading, **arguments)
        unknown = arguments.keys() - signature.parameters.keys()
        if unknown and group != "logger":  # `**kwargs` would swallow a misspelled name
            raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[len(leading) :])
        raise UserError(f"{group}: {name} does not take these arguments ({error}); it knows {known}") from error
    return functools.partial(target, **arguments)


def make_optimizer(group: dict[str, Any], lr_factor: float) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the `optimizer` group as a function of the parameters, its rates multiplied by a factor."""
    return make_target("optimizer", scale_rates(group, lr_factor), None)


def make_schedule(
    group: dict[str, Any], lr_factor: float, warmup_steps: int
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the `schedule` group as a function of the optimiser, multiplied by the warm-up.

    In step n, counted from 0, of the warm-up the rate is (n + 1) / (`warmup_steps` + 1) of the schedule's.
    """
    make = make_target("schedule", scale_rates(group, lr_factor), None)
    if not warmup_steps:
        return make
    from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

    def make_both(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        ramp = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
        return ChainedScheduler([ramp, make(optimizer)], optimizer)

    return make_both


def find_lr_factor(lr_scaling: LrScaling, batch_size: int) -> float:
    """Factor on all learning rates for the batch size, as `lr_scaling` says."""
    return float(batch_size ** {LrScaling.none: 0.0, LrScaling.sqrt: 0.5, LrScaling.linear: 1.0}[lr_scaling])


def scale_rates(group: dict[str, Any], lr_factor: float) -> dict[str, Any]:
    """Multiply the learning rates among the arguments of a group."""
    return {key: value * lr_factor if key in LR_KEYS else value for key, value in group.items()}
