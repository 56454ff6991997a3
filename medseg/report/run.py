"""What a report knows of one run, and the figures it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FINISHED = "finished"
# Neither good nor bad news: there is no result yet.
OPEN = frozenset({"running", "interrupted", "unfinished"})
# Ended on purpose: a search had seen enough.
PRUNED = "pruned"


@dataclass(frozen=True)
class Run:
    """One run folder, as far as it goes: any of its files may be missing.

    Attributes:
        name: Path below the reported folder; `.` is that folder itself.
        folder: Where it lies.
        status: `finished`, `running`, `refused`, … as in `job.json`; `unfinished` where nothing says how it ended.
        message: Why it did not finish, or "".
        settings: Resolved configuration, flat, without the keys that only say where things lie. A run that never began knows only what
            it was asked for.
        has_config: Whether `settings` is the whole configuration.
        overrides: Arguments that made a job of a multirun.
        summary: `summary.json`.
        history: Lines of `history.csv`; an empty cell is left out.
        pictures: Overlays of validation cases at the last step that has any.
    """

    name: str
    folder: Path
    status: str
    message: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_config: bool = True
    overrides: Mapping[str, str] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[Mapping[str, float], ...] = ()
    pictures: tuple[Path, ...] = ()

    def curve(self, column: str) -> list[tuple[float, float]]:
        """Points (optimiser step, value) of a column of the history."""
        return [(line["step"], line[column]) for line in self.history if column in line and "step" in line]

    @property
    def is_failed(self) -> bool:
        """Whether it ended without a result that was wanted."""
        return self.status not in {FINISHED, PRUNED} | OPEN


@dataclass(frozen=True)
class Metric:
    """A figure by which runs are compared.

    Attributes:
        key: Column of `report.csv`.
        title: Heading of a column.
        what: One sentence for the heading's tooltip.
        of: Reads it from a run; None where the run does not have it.
        write: Formats a value for people.
        better: 1 when more is better, -1 when less is, 0 when neither.
    """

    key: str
    title: str
    what: str
    of: Callable[[Run], float | None]
    write: Callable[[float], str]
    better: int


@dataclass(frozen=True)
class Study:
    """What a search leaves beside its runs.

    Attributes:
        name: Its name.
        objectives: Metric key to `maximize` or `minimize`.
        space: Searched key to what it was drawn from.
        num_trials: How many it will make in all.
        best: Names of the best runs: one, or the front of two objectives.
        importances: Searched key to its share in what sets the best apart; empty for few results.
    """

    name: str
    objectives: Mapping[str, str]
    space: Mapping[str, str]
    num_trials: int
    best: tuple[str, ...]
    importances: Mapping[str, float]


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < float("inf") else None


def _val_dice(run: Run) -> float | None:
    best = _number(run.summary.get("val_dice_best"))
    return best if best is not None else max((value for _, value in run.curve("val_dice")), default=None)


def _val_dice_worst(run: Run) -> float | None:
    lines = [line for line in run.history if "val_dice" in line and "val_dice_worst" in line]
    return max(lines, key=lambda line: line["val_dice"])["val_dice_worst"] if lines else None


def _steps(run: Run) -> float | None:
    steps = _number(run.summary.get("steps"))
    return steps if steps is not None else max((line["step"] for line in run.history if "step" in line), default=None)


def _peak_gib(run: Run) -> float | None:
    peak = _number(run.summary.get("peak_gib"))
    return peak if peak is not None else max((value for _, value in run.curve("peak_gib")), default=None)


def _step_s(run: Run) -> float | None:
    values = [value for _, value in run.curve("seconds_per_step")]
    return median(values) if values else None


def write_duration(duration_s: float) -> str:
    """Seconds as people say them.

    Example:
        >>> [write_duration(s) for s in (0.4, 59.6, 60, 3599, 7260, 200000)]
        ['0.4 s', '1 min', '1 min', '1 h', '2 h 1 min', '55 h 33 min']
    """
    if duration_s < 10:
        return f"{duration_s:.1f} s"
    if round(duration_s) < 60:
        return f"{duration_s:.0f} s"
    minutes = round(duration_s / 60)
    hours, rest = divmod(minutes, 60)
    return " ".join(part for part, is_there in ((f"{hours} h", hours), (f"{rest} min", rest or not hours)) if is_there)


def write_count(number: float) -> str:
    """A large count, short.

    Example:
        >>> [write_count(n) for n in (950, 12_300, 1_450_000)]
        ['950', '12.3 k', '1.45 M']
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


VAL_DICE = Metric("val_dice", "Val Dice", "Best mean Dice over the validation cases", _val_dice, lambda v: f"{v:.4f}", 1)
PEAK = Metric(
    "peak_gib", "Peak GiB", "Most memory held: on the GPU where there is one, else resident", _peak_gib, lambda v: f"{v:.2f}", -1
)
STEP = Metric(
    "seconds_per_step", "s/step", "Median seconds per optimiser step, validation left out", _step_s, lambda v: f"{v:.3g}", -1
)
METRICS = (
    VAL_DICE,
    Metric(
        "val_dice_worst", "Worst case", "Dice of the worst validation case, at the step of the best mean", _val_dice_worst,
        lambda v: f"{v:.4f}", 1,
    ),
    Metric("steps", "Steps", "Optimiser steps made", _steps, lambda v: f"{v:.0f}", 0),
    STEP,
    Metric("train_s", "Time", "Training and validation together", lambda run: _number(run.summary.get("train_s")), write_duration, -1),
    PEAK,
    Metric(
        "num_parameters", "Weights", "Number of parameters of the network",
        lambda run: _number(run.summary.get("num_parameters")), write_count, 0,
    ),
)  # fmt: skip
