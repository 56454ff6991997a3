"""Optimiser and learning-rate schedule of a run, made from class names."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medseg.targets import TARGET, bind_target
from medseg.training.options import LrScaling, TrainConfig

# Schedules that by default set the momentum of each step too, in place of the optimiser's own.
MOMENTUM_SCHEDULES = ("torch.optim.lr_scheduler.OneCycleLR", "torch.optim.lr_scheduler.CyclicLR")
# Arguments of optimisers and schedules that are learning rates.
LR_KEYS = ("lr", "max_lr", "base_lr", "eta_min")
# Ratio of the two gradients with which `grows_with_gradient` tries an optimiser.
GRADIENT_RATIO = 100.0
# Steps after which all adaptive optimisers of torch and pytorch_optimizer have begun to adapt.
ADAPTED_STEPS = 20


def make_optimizer(
    group: dict[str, Any], lr_factor: float, trusted: Sequence[str] = ()
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the `optimizer` group as a function from parameters to an optimiser.

    Args:
        group: The group: the class (`_target_`) with its arguments.
        lr_factor: Factor on its learning rates, see `find_lr_factor`.
        trusted: Prefixes of `trusted_targets`.
    """
    scaled_group = scale_rates(group, lr_factor)
    parameters_later = None  # the caller gives them later, see `bind_target`
    return bind_target("optimizer", "optimizer", scaled_group, parameters_later, trusted=trusted)


def make_schedule(
    group: dict[str, Any], lr_factor: float, warmup_steps: int, trusted: Sequence[str] = ()
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """Return the `schedule` group as a function from an optimiser to a schedule with warm-up.

    In warm-up step n, counted from 0, the rate is (n + 1) / (`warmup_steps` + 1) of the scheduled
    rate. The optimiser keeps its momentum unless `cycle_momentum` is set.

    Args:
        group: The group: the class (`_target_`) with its arguments.
        lr_factor: Factor on its learning rates, see `find_lr_factor`.
        warmup_steps: Steps of the warm-up; 0 = none.
        trusted: Prefixes of `trusted_targets`.
    """
    if group[TARGET] in MOMENTUM_SCHEDULES:
        # The group comes last, so its own value takes precedence.
        group = {"cycle_momentum": False, **group}
    scaled_group = scale_rates(group, lr_factor)
    optimizer_later = None  # the caller gives it later, see `bind_target`
    schedule_factory = bind_target(
        "schedule", "schedule", scaled_group, optimizer_later, trusted=trusted
    )
    if not warmup_steps:
        return schedule_factory
    from torch.optim.lr_scheduler import ChainedScheduler, LinearLR

    def with_warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        warmup = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
        # Both schedules multiply the rate, so that a step has the product of their factors.
        return ChainedScheduler([warmup, schedule_factory(optimizer)], optimizer)

    return with_warmup


def make_scheduled_optimizer(config: TrainConfig) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function from parameters to the optimiser of a configuration at its first step.

    Its rates are those that the schedule sets for this step.
    """
    lr_factor = find_lr_factor(config.lr_scaling, config.stage.batch_size)
    optimizer_factory = make_optimizer(config.optimizer, lr_factor, config.trusted_targets)
    schedule_factory = make_schedule(
        config.schedule, lr_factor, config.warmup_steps, config.trusted_targets
    )

    def make_at_first_step(parameters: Any) -> torch.optim.Optimizer:
        optimizer = optimizer_factory(parameters)
        # A schedule sets the rates of the first step when it is made.
        schedule_factory(optimizer)
        return optimizer

    return make_at_first_step


def propose_lr(config: TrainConfig, batch_size: int) -> float:
    """Scale `optimizer.lr` to another batch size.

    The rate grows linearly (Goyal et al. 2017), for an adaptive optimiser with the square root
    (Malladi et al. 2022). With `lr_scaling` the run scales the rate itself, so `optimizer.lr` is
    returned unchanged.

    Args:
        config: Configuration with the rate, and with the batch size for which it was chosen.
        batch_size: The other batch size, samples of a step over all ranks.
    """
    lr = float(config.optimizer["lr"])
    if config.lr_scaling is not LrScaling.none:
        return lr
    batch_ratio = batch_size / config.stage.batch_size
    optimizer_factory = make_optimizer(
        config.optimizer, lr_factor=1.0, trusted=config.trusted_targets
    )
    if grows_with_gradient(optimizer_factory):
        return lr * batch_ratio
    return lr * batch_ratio**0.5


def grows_with_gradient(make: Callable[[Any], torch.optim.Optimizer]) -> bool:
    """Whether the steps of an optimiser grow with the gradient, as those of SGD do.

    Those of an adaptive optimiser hardly do (Malladi et al. 2022). The weights of the tried steps
    are zero, so that neither weight decay nor a ratio to their norm (LARS) counts. Some optimisers
    adapt only after some steps (RAdam), so a later step is compared.

    Args:
        make: From parameters to an optimiser.
    """
    step = step_from_zero(make, scale=1.0, num_steps=ADAPTED_STEPS)
    longer_step = step_from_zero(make, scale=GRADIENT_RATIO, num_steps=ADAPTED_STEPS)
    length = float(step.norm())
    longer_length = float(longer_step.norm())
    # If steps grow with the gradient, `longer_length` is GRADIENT_RATIO times `length`, otherwise
    # about the same. The threshold is the geometric mean of the two.
    return longer_length > GRADIENT_RATIO**0.5 * length


def step_from_zero(
    make: Callable[[Any], torch.optim.Optimizer], scale: float = 1.0, num_steps: int = 1
) -> Tensor:
    """Take steps with an optimiser, each from weights of zero and with the same gradient.

    Args:
        make: From parameters to an optimiser.
        scale: The values of the gradient rise evenly from -scale to scale.
        num_steps: Number of steps; the optimiser keeps its state between them.

    Returns:
        The last step: the weights after it, a vector.
    """
    weight = nn.Parameter(torch.zeros(2, 1, 3, 3, 3))
    optimizer = make([weight])
    gradient = scale * torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight)
    for _ in range(num_steps):
        weight.data.zero_()
        weight.grad = gradient.clone()  # some optimisers change it
        # Some optimisers require a closure that returns the loss.
        optimizer.step(lambda: 0.0)
    return weight.detach().flatten()


def find_lr_factor(lr_scaling: LrScaling, batch_size: int) -> float:
    """Find the factor on all learning rates for the batch size, as `lr_scaling` says."""
    exponents = {LrScaling.none: 0.0, LrScaling.sqrt: 0.5, LrScaling.linear: 1.0}
    return float(batch_size ** exponents[lr_scaling])


def scale_rates(group: dict[str, Any], lr_factor: float) -> dict[str, Any]:
    """Multiply the learning rates among the arguments of a group.

    A rate may be a list, with one number for each parameter group. Any other value, such as None or
    a text, stays, for the class to accept or refuse.
    """
    scaled = dict(group)
    for key in LR_KEYS:
        if key in group:
            scaled[key] = _scaled(group[key], lr_factor)
    return scaled


def _scaled(rate: Any, lr_factor: float) -> Any:
    """Multiply a rate, or each one in a list, with the factor; other values stay."""
    if isinstance(rate, list):
        return [_scaled(item, lr_factor) for item in rate]
    if isinstance(rate, (int, float)):
        return rate * lr_factor
    return rate
