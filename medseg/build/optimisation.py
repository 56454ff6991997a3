"""Optimiser and learning-rate schedule of a run, made from class names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from medseg.config.schema import LrScaling
from medseg.config.targets import bind_target

# Arguments of optimisers and schedules that are learning rates.
LR_KEYS = ("lr", "max_lr", "base_lr", "eta_min")


def make_optimizer(
    group: dict[str, Any], lr_factor: float, trusted: Sequence[str] = ()
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the `optimizer` group as a function of the parameters, its rates multiplied by a factor."""
    return bind_target("optimizer", "optimizer", scale_rates(group, lr_factor), None, trusted=trusted)


def make_schedule(
    group: dict[str, Any], lr_factor: float, warmup_steps: int, trusted: Sequence[str] = ()
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the `schedule` group as a function of the optimiser, multiplied by the warm-up.

    In step n, counted from 0, of the warm-up the rate is (n + 1) / (`warmup_steps` + 1) of the schedule's.
    """
    make = bind_target("schedule", "schedule", scale_rates(group, lr_factor), None, trusted=trusted)
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
