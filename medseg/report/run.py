"""One run as the report sees it, and the metrics by which runs are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

FINISHED = "finished"
# No result yet: neither a success nor a failure.
OPEN = frozenset({"running", "interrupted", "unfinished"})
# Ended on purpose by a search.
PRUNED = "pruned"


@dataclass(frozen=True)
class Run:
    """One run folder; any of its files may be missing.

    Attributes:
        name: Path below the reported folder; `.` is that folder itself.
        folder: The run folder.
        status: `finished`, `running`, `refused`, … as in `job.json`; `unfinished` where no file gives a status.
        message: Why it did not finish, or "".
        settings: Resolved configuration, flat, without the keys that only name places. A run that never began has its overrides only.
        has_config: Whether `settings` is the whole configuration.
        overrides: Arguments that made a job of a multirun.
        summary: `summary.json`.
        history: Lines of `history.csv` without their empty cells.
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
        """Whether it ended without a result, and not on purpose."""
        return self.status not in {FINISHED, PRUNED} | OPEN


class Metric(NamedTuple):
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


Study = Mapping[str, Any]
"""Result of a search as in `study.json`: `name`, `objectives` (metric key to `maximize` or `minimize`), `space` (searched key to its
distribution), `num_trials` planned in all, `best` (names of the best runs: one, or the front of two objectives) and `importances`
(searched key to its share in [0, 1]; empty for few results)."""


def write_duration(duration_s: float) -> str:
    """Format seconds in the units that people use.

    Example:
        >>> [write_duration(s) for s in (0.4, 59.6, 60, 3599, 7260, 200000)]
        ['0.4 s', '1 min', '1 min', '1 h', '2 h 1 min', '55 h 33 min']
    """
    if round(duration_s) < 60:
        return f"{duration_s:.{1 if duration_s < 10 else 0}f} s"
    hours, minutes = divmod(round(duration_s / 60), 60)
    return " ".join(part for part, is_there in ((f"{hours} h", hours), (f"{minutes} min", minutes or not hours)) if is_there)


def write_count(number: float) -> str:
    """Format a large count with three digits.

    Example:
        >>> [write_count(n) for n in (950, 12_300, 1_450_000)]
        ['950', '12.3 k', '1.45 M']
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _reader(key: str, column: str = "", pick: Callable[[Sequence[float]], float] = max) -> Callable[[Run], float | None]:
    """Make a reader of a finite number in the summary; where it is absent, `pick` takes one of a column of the history."""

    def read(run: Run) -> float | None:
        value = run.summary.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        values = [value for _, value in run.curve(column)]
        return pick(values) if values else None

    return read


def _val_dice_worst(run: Run) -> float | None:
    lines = [line for line in run.history if "val_dice" in line and "val_dice_worst" in line]
    return max(lines, key=lambda line: line["val_dice"])["val_dice_worst"] if lines else None


# fmt: off
VAL_DICE = Metric(
    "val_dice", "Val Dice", "Best mean Dice over the validation cases", _reader("val_dice_best", "val_dice"), "{:.4f}".format, 1
)
PEAK = Metric(
    "peak_gib", "Peak GiB", "Most memory held: on the GPU where there is one, else resident", _reader("peak_gib", "peak_gib"),
    "{:.2f}".format, -1,
)
STEP = Metric(
    "seconds_per_step", "s/step", "Median seconds per optimiser step, validation left out", _reader("", "seconds_per_step", median),
    "{:.3g}".format, -1,
)
METRICS = (
    VAL_DICE,
    Metric(
        "val_dice_worst", "Worst case", "Dice of the worst validation case, at the step of the best mean", _val_dice_worst,
        "{:.4f}".format, 1,
    ),
    Metric("steps", "Steps", "Optimiser steps made", _reader("steps", "step"), "{:.0f}".format, 0),
    STEP,
    Metric("train_s", "Time", "Training and validation together", _reader("train_s"), write_duration, -1),
    PEAK,
    Metric("num_parameters", "Weights", "Number of parameters of the network", _reader("num_parameters"), write_count, 0),
)
# fmt: on
