"""Schema and rules of a search."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from medseg.knob import Knob
from medseg.training.options import TrainConfig

ParameterType = StrEnum("ParameterType", ["float", "int", "choice"])
# Dice is maximised, memory and time are minimised.
Objective = StrEnum("Objective", ["val_dice", "peak_gib", "seconds_per_step"])
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
        """Yield a sentence for each reason why the search cannot work, see `check_clashes`."""
        yield from _sweep_clashes(self.sweep)


def _sweep_clashes(sweep: SweepConfig) -> Iterator[str]:
    """Yield contradictions of the objectives, the pruner and the space."""
    if not sweep.space:
        yield "sweep.space: expected at least one key to search"
    num_objectives = len(sweep.objectives)
    has_repeats = len(set(sweep.objectives)) < num_objectives
    if num_objectives not in (1, 2) or has_repeats:
        names = [objective.value for objective in sweep.objectives]
        yield f"sweep.objectives: one, or two different ones, are needed, but got {names}"
    if sweep.pruner is not Pruner.none and sweep.objectives != [Objective.val_dice]:
        yield (
            f"sweep.pruner={sweep.pruner.value} compares trials by their validation Dice; "
            "with other objectives choose sweep.pruner=none"
        )
    for key, parameter in sweep.space.items():
        name = f"sweep.space: {key}"
        if parameter.type is ParameterType.choice:
            yield from _choice_clashes(name, parameter)
        else:
            yield from _interval_clashes(name, parameter)


def _choice_clashes(name: str, parameter: ParameterConfig) -> Iterator[str]:
    """Yield what is wrong with a list of choices: it is empty, or has keys of an interval."""
    if not parameter.choices:
        yield f"{name}: type choice needs choices: [...]"
    numbers = (parameter.low, parameter.high, parameter.step)
    has_numbers = any(number is not None for number in numbers)
    if has_numbers or parameter.log:
        yield f"{name}: type choice uses choices only; leave out low, high, step and log"


def _interval_clashes(name: str, parameter: ParameterConfig) -> Iterator[str]:
    """Yield what is wrong with an interval of numbers: it is empty, or its keys contradict."""
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.choices is not None:
        yield f"{name}: choices need type choice, but the type is {parameter.type.value}"
    if low is None or high is None or low >= high:
        yield f"{name}: low and high are needed, the lower first, but got {low} and {high}"
        return
    if parameter.log and low <= 0:
        yield f"{name}: log needs low above 0, but got {low}"
    if parameter.log and step is not None:
        yield f"{name}: log and step cannot be combined; give one of them"
    numbers = [low, high]
    if step is not None:
        is_possible = 0 < step <= high - low
        if not is_possible:
            yield f"{name}: step must lie in (0, {high - low:g}], but got {step}"
        numbers.append(step)
    are_whole = all(float(number).is_integer() for number in numbers)
    if parameter.type is ParameterType.int and not are_whole:
        yield f"{name}: type int needs whole numbers, but got {numbers}"
