"""Schema and rules of a search."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.errors import UserError, require
from medseg.knob import Knob
from medseg.training.options import TrainConfig

ParameterType = StrEnum("ParameterType", ["float", "int", "choice"])
Objective = StrEnum(
    "Objective", ["val_dice", "peak_gib", "seconds_per_step"]
)  # Dice is maximised, memory and time are minimised
Sampler = StrEnum("Sampler", ["tpe", "random"])  # see `medseg.studies.search`
Pruner = StrEnum("Pruner", ["median", "none"])


@dataclass
class ParameterConfig:
    """One searched key: an interval of numbers, or a list of choices."""

    type: Annotated[ParameterType, Knob("Kind of the value.")]
    low: Annotated[float | None, Knob("Lower bound of a number.")] = None
    high: Annotated[float | None, Knob("Upper bound of a number.")] = None
    log: Annotated[bool, Knob("Draw the logarithm uniformly.")] = False
    step: Annotated[float | None, Knob("Step between the possible numbers.")] = None
    choices: Annotated[list[Any] | None, Knob("Values of type choice.")] = None


@dataclass
class SweepConfig:
    """Search: its space, its objectives, its sampler and its pruner."""

    name: Annotated[str, Knob("Name of the search.")]
    num_trials: Annotated[
        int,
        Knob(
            "Trials in total, failed ones included; a greater number continues a search.",
            "[1, inf)",
            "trials",
        ),
    ]
    objectives: Annotated[
        list[Objective],
        Knob("Objectives; two of them give a Pareto front instead of one best trial."),
    ]
    sampler: Annotated[Sampler, Knob("tpe learns from earlier trials.")]
    num_random: Annotated[int, Knob("First trials, drawn at random.", "[1, inf)", "trials")]
    seed: Annotated[
        int, Knob("Trial n is drawn from (seed, n) and the trials before it.", "[0, inf)")
    ]
    pruner: Annotated[
        Pruner,
        Knob("median stops a trial whose Dice is below the median of earlier ones at that step."),
    ]
    prune_after_trials: Annotated[
        int, Knob("Finished trials before any is stopped early.", "[1, inf)", "trials")
    ]
    prune_after_steps: Annotated[
        int, Knob("Steps before a trial may be stopped.", "[0, inf)", "optimiser steps")
    ]
    space: Annotated[dict[str, ParameterConfig], Knob("Searched key, or group: its values.")]


@dataclass
class SearchConfig(TrainConfig):
    """Keys of `search`."""

    sweep: SweepConfig

    def clashes(self, _: str) -> Iterator[str]:
        """Refuse a search that cannot work."""
        check_sweep(self.sweep)
        yield from ()


def check_sweep(sweep: SweepConfig) -> None:
    """Refuse a search that cannot work."""
    require(bool(sweep.space), "sweep.space: expected at least one key to search")
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
            f"{name}: type choice uses choices only; leave out low, high, step and log",
        )
        return
    require(
        parameter.choices is None,
        f"{name}: choices need type choice, but the type is {parameter.type.value}",
    )
    if low is None or high is None or low >= high:
        raise UserError(
            f"{name}: low and high are needed, the lower first, but got {low} and {high}"
        )
    require(not parameter.log or low > 0, f"{name}: log needs low above 0, but got {low}")
    require(
        not (parameter.log and step is not None),
        f"{name}: log and step cannot be combined; give one of them",
    )
    require(
        step is None or 0 < step <= high - low,
        f"{name}: step must lie in (0, {high - low:g}], but got {step}",
    )
    whole = [number for number in (low, high, step) if number is not None]
    require(
        parameter.type is ParameterType.float
        or all(float(number).is_integer() for number in whole),
        f"{name}: type int needs whole numbers, but got {whole}",
    )
