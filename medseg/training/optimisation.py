"""Optimiser and learning-rate schedule of a run, made from class names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medseg.targets import TARGET, bind_target
from medseg.training.options import LrScaling, TrainConfig

# Schedules that by default also set the momentum of each step, whatever the optimiser's own value
# is.
CYCLING = ("torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.CyclicLR")
# Arguments of optimisers and schedules that are learning rates.
LR_KEYS = ("lr", "max_lr", "base_lr", "eta_min")
# Ratio of the two gradients with which an optimiser is tried.
GRADIENT_RATIO = 100.0
# After as many steps the optimisers of torch and pytorch_optimizer have begun to adapt.
ADAPTED_STEPS = 20


def make_optimizer(
    group: dict[str, Any], lr_factor: float, trusted: Sequence[str] = ()
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the `optimizer` group as a function of the parameters, its rates multiplied."""
    return bind_target(
        "optimizer", "optimizer", scale_rates(group, lr_factor), None, trusted=trusted
    )


def make_schedule(
    group: dict[str, Any], lr_factor: float, warmup_steps: int, trusted: Sequence[str] = ()
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the `schedule` group as a function of the optimiser, multiplied by the warm-up.

    In warm-up step n, counted from 0, the rate is (n + 1) / (`warmup_steps` + 1) of the scheduled
    rate. The optimiser keeps its momentum unless `cycle_momentum` is set.
    """
    if group[TARGET] in CYCLING:
        group = {"cycle_momentum": False, **group}
    make = bind_target("schedule", "schedule", scale_rates(group, lr_factor), None, trusted=trusted)
    if not warmup_steps:
        return make
    from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

    def make_both(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        ramp = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
        return ChainedScheduler([ramp, make(optimizer)], optimizer)

    return make_both


def make_scheduled_optimizer(config: TrainConfig) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the optimiser of a configuration as a function of the parameters.

    The schedule sets it as at the first step.
    """
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    make = make_optimizer(config.optimizer, lr_factor, config.trusted_targets)
    schedule = make_schedule(
        config.schedule, lr_factor, config.warmup_steps, config.trusted_targets
    )

    def make_both(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        schedule(optimizer)
        return optimizer

    return make_both


def propose_lr(config: TrainConfig, batch_size: int) -> float:
    """Scale `optimizer.lr` to another batch size: linearly, or by its root for adaptive steps.

    With `lr_scaling` the run scales the rate itself, so `optimizer.lr` is returned unchanged.

    Source: Goyal et al. 2017 (linear); Malladi et al. 2022 (root).
    """
    rate = float(config.optimizer["lr"])
    if config.lr_scaling is not LrScaling.none:
        return rate
    ratio = batch_size / config.stage.batch_size
    make = make_optimizer(config.optimizer, 1.0, config.trusted_targets)
    if grows_with_gradient(make):
        return rate * ratio
    return rate * ratio**0.5


def grows_with_gradient(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Whether the steps of an optimiser grow with the gradient.

    In others the noise of a batch shrinks with its root (Malladi et al. 2022). The weights of the
    tried steps are zero, so that neither weight decay nor a ratio to their norm (LARS) counts.
    Some optimisers adapt only after some steps (RAdam), so a later one is compared.

    Args:
        make: From parameters to an optimiser.
    """
    length = float(step_from_zero(make, 1.0, ADAPTED_STEPS).norm())
    longer = float(step_from_zero(make, GRADIENT_RATIO, ADAPTED_STEPS).norm())
    return longer > GRADIENT_RATIO**0.5 * length


def step_from_zero(
    make: Callable[[Any], torch.optim.Optimizer], scale: float = 1.0, num_steps: int = 1
) -> Tensor:
    """Take steps with a gradient from -scale to scale, each from weights of zero.

    Returns:
        The last step, flat.
    """
    weight = nn.Parameter(torch.zeros(2, 1, 3, 3, 3))
    optimizer = make([weight])
    gradient = scale * torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight)
    for _ in range(num_steps):
        weight.data.zero_()
        weight.grad = gradient.clone()  # some optimisers change it
        optimizer.step(lambda: 0.0)
    return weight.detach().flatten()


def find_lr_factor(lr_scaling: LrScaling, batch_size: int) -> float:
    """Find the factor on all learning rates for the batch size, as `lr_scaling` says."""
    exponents = {LrScaling.none: 0.0, LrScaling.sqrt: 0.5, LrScaling.linear: 1.0}
    return float(batch_size ** exponents[lr_scaling])


def scale_rates(group: dict[str, Any], lr_factor: float) -> dict[str, Any]:
    """Multiply the learning rates among the arguments of a group."""
    scaled = dict(group)
    for key in LR_KEYS:
        if key in group:
            scaled[key] = group[key] * lr_factor
    return scaled
