"""The configuration of a search: its schema, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from medseg.config.schema import TrainConfig
from medseg.errors import UserError, require


class ParameterType(Enum):
    """Kind of a searched value."""

    float = "float"
    int = "int"
    choice = "choice"


class Objective(Enum):
    """What a search improves: Dice upwards, memory and time downwards."""

    val_dice = "val_dice"
    peak_gib = "peak_gib"
    seconds_per_step = "seconds_per_step"


class Sampler(Enum):
    """How a search chooses the next trial; see `medseg.studies.study`."""

    tpe = "tpe"
    random = "random"


class Pruner(Enum):
    """When a search ends a trial early."""

    median = "median"
    none = "none"


@dataclass
class ParameterConfig:
    """One searched key: an interval of numbers, or a list of choices. What a type does not need is left out."""

    type: ParameterType
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: list[Any] | None = None


@dataclass
class SweepConfig:
    """A search: its space, what counts as better, and how trials are chosen and ended."""

    name: str
    num_trials: int
    objectives: list[Objective]
    sampler: Sampler
    num_random: int
    seed: int
    pruner: Pruner
    prune_after_trials: int
    prune_after_steps: int
    space: dict[str, ParameterConfig]


@dataclass
class SearchConfig(TrainConfig):
    """Root of `search`: the experiment that is varied, and how."""

    sweep: SweepConfig


def check_sweep(sweep: SweepConfig) -> None:
    """Refuse a search that cannot work."""
    require(bool(sweep.space), "sweep.space: at least one key to search is needed")
    require(
        1 <= len(sweep.objectives) <= 2 and len(set(sweep.objectives)) == len(sweep.objectives),
        f"sweep.objectives: one, or two different ones, are needed, but got {[one.value for one in sweep.objectives]}",
    )
    require(
        sweep.pruner is Pruner.none or sweep.objectives == [Objective.val_dice],
        f"sweep.pruner={sweep.pruner.value} compares trials by their validation Dice; with other objectives choose sweep.pruner=none",
    )
    for key, parameter in sweep.space.items():
        _check_parameter(f"sweep.space: {key}", parameter)


def _check_parameter(name: str, parameter: ParameterConfig) -> None:
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.type is ParameterType.choice:
        require(bool(parameter.choices), f"{name}: type choice needs choices: [...]")
        require(
            low is None and high is None and step is None and not parameter.log,
            f"{name}: type choice has choices alone; leave out low, high, step and log",
        )
        return
    require(parameter.choices is None, f"{name}: choices need type choice, but the type is {parameter.type.value}")
    if low is None or high is None or low >= high:
        raise UserError(f"{name}: low and high are needed, the lower first, but got {low} and {high}")
    require(not parameter.log or low > 0, f"{name}: log needs low above 0, but got {low}")
    require(not (parameter.log and step is not None), f"{name}: log and step exclude each other")
    require(step is None or 0 < step <= high - low, f"{name}: step must lie in (0, {high - low:g}], but got {step}")
    whole = [number for number in (low, high, step) if number is not None]
    require(
        parameter.type is ParameterType.float or all(float(number).is_integer() for number in whole),
        f"{name}: type int needs whole numbers, but got {whole}",
    )
