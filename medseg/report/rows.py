"""Rows of the two tables of the report page: settings and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medseg.report.compare import MISSING, Comparison, Spread
from medseg.report.run import FINISHED, METRICS, VAL_DICE, Metric, Run


@dataclass(frozen=True)
class Cell:
    """What is read, and what the column is sorted by.

    Attributes:
        text: Shown.
        order: Number or text to sort by; "" lies last.
        is_best: Whether it is the best of its column.
        note: Tooltip.
    """

    text: str
    order: str
    is_best: bool = False
    note: str = ""


@dataclass(frozen=True)
class Row:
    """A setting, or a run of it.

    Attributes:
        number: Number of the setting.
        is_best: Whether that setting is the best.
        keys: One cell per key that differed.
        figures: One cell per metric.
        run: The run, in the table of runs.
    """

    number: int
    is_best: bool
    keys: tuple[Cell, ...]
    figures: tuple[Cell, ...]
    run: Run | None = None


def shown_metrics(comparison: Comparison) -> list[Metric]:
    """Metrics that some run has; those that are no merit (steps, weights) only where they differ."""
    values = {metric.key: {metric.of(run) for run in comparison.runs} - {None} for metric in METRICS}
    return [metric for metric in METRICS if len(values[metric.key]) > (0 if metric.better else 1)]


def ranked(comparison: Comparison) -> list[int]:
    """Numbers of the settings from the best to the worst; those without a result last, in their order."""

    def score(number: int) -> float:
        spread = comparison.settings[number].metrics.get(VAL_DICE.key)
        return -spread.mean if spread else float("inf")

    return sorted(range(len(comparison.settings)), key=score)


def setting_rows(comparison: Comparison, metrics: Sequence[Metric]) -> list[Row]:
    """One row per setting, the best first; the last figure is the number of its runs."""
    rows = []
    best = {
        metric.key: _best([s.metrics[metric.key].mean for s in comparison.settings if metric.key in s.metrics], metric)
        for metric in metrics
    }
    for number in ranked(comparison):
        setting = comparison.settings[number]
        figures = []
        for metric in metrics:
            spread = setting.metrics.get(metric.key)
            is_best = spread is not None and spread.mean == best[metric.key]
            figures.append(Cell(write_spread(metric, spread), repr(spread.mean), is_best) if spread else Cell(MISSING, ""))
        members = [comparison.runs[index] for index in setting.runs]
        finished = sum(run.status == FINISHED for run in members)
        count = str(finished) if finished == len(members) else f"{finished} of {len(members)}"
        figures.append(Cell(count, str(finished), note="runs " + ", ".join(run.name for run in members)))
        keys = tuple(Cell(value, value) for value in setting.values)
        rows.append(Row(number, number == comparison.best, keys, tuple(figures)))
    return rows


def run_rows(comparison: Comparison, metrics: Sequence[Metric]) -> list[Row]:
    """One row per run, in the order of the folders."""
    finished = [run for run in comparison.runs if run.status == FINISHED]
    best = {metric.key: _best([value for run in finished if (value := metric.of(run)) is not None], metric) for metric in metrics}
    rows = []
    for index, run in enumerate(comparison.runs):
        number = comparison.setting_of[index]
        figures = []
        for metric in metrics:
            value = metric.of(run)
            is_best = run.status == FINISHED and value == best[metric.key]
            figures.append(Cell(MISSING, "") if value is None else Cell(metric.write(value), repr(value), is_best))
        keys = tuple(Cell(column.values[index], column.values[index]) for column in comparison.columns)
        rows.append(Row(number, number == comparison.best, keys, tuple(figures), run))
    return rows


def write_spread(metric: Metric, spread: Spread) -> str:
    """A mean, with its standard deviation where the repeats differ."""
    text = metric.write(spread.mean)
    return f"{text} ± {metric.write(spread.sd)}" if spread.sd and metric.better else text


def _best(values: Sequence[float], metric: Metric) -> float | None:
    """The best of several values; None where nothing was to be won."""
    if not metric.better or len(set(values)) < 2:
        return None
    return max(values, key=lambda value: value * metric.better)
