"""Rows of the two tables of the report page: settings and runs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from medseg.report.compare import MISSING, Comparison
from medseg.report.run import FINISHED, METRICS, Metric, Run


class Cell(NamedTuple):
    """A figure in a table.

    Attributes:
        text: Shown.
        order: Number to sort by; "" comes last.
        is_best: Whether it is the best of its column.
        note: Tooltip.
    """

    text: str
    order: str
    is_best: bool = False
    note: str = ""


class Row(NamedTuple):
    """A setting, or one of its runs.

    Attributes:
        number: Number of the setting.
        texts: Values of the keys that differ.
        figures: One cell per metric.
        run: The run, in the table of runs.
    """

    number: int
    texts: Sequence[str]
    figures: Sequence[Cell]
    run: Run | None = None


def shown_metrics(comparison: Comparison) -> list[Metric]:
    """Metrics that some run has; those without a better direction (steps, weights) only where they differ."""
    values = {metric.key: {metric.of(run) for run in comparison.runs} - {None} for metric in METRICS}
    return [metric for metric in METRICS if len(values[metric.key]) > (0 if metric.better else 1)]


def setting_rows(comparison: Comparison, metrics: Sequence[Metric]) -> list[Row]:
    """One row per setting, the best first; the last figure is the number of its runs."""
    settings = [comparison.settings[number] for number in comparison.ranked]
    columns = [_column(metric, [setting.metrics.get(metric.key, ()) for setting in settings]) for metric in metrics]
    rows = []
    for place, setting in enumerate(settings):
        members = [comparison.runs[index] for index in setting.runs]
        finished = sum(run.status == FINISHED for run in members)
        count = str(finished) if finished == len(members) else f"{finished} of {len(members)}"
        cell = Cell(count, str(finished), note="runs " + ", ".join(run.name for run in members))
        rows.append(Row(setting.number, setting.values, [*(column[place] for column in columns), cell]))
    return rows


def run_rows(comparison: Comparison, metrics: Sequence[Metric]) -> list[Row]:
    """One row per run, in the order of the folders; only finished runs can be the best."""
    runs = comparison.runs
    is_finished = [run.status == FINISHED for run in runs]
    columns = [
        _column(metric, [() if (v := metric.of(run)) is None else (v,) for run in runs], is_finished) for metric in metrics
    ]
    return [
        Row(
            comparison.setting_of[index],
            [column.values[index] for column in comparison.columns],
            [column[index] for column in columns],
            run,
        )
        for index, run in enumerate(runs)
    ]


def write_mean(metric: Metric, values: Sequence[float]) -> str:
    """Format the mean of at least one value, with the standard deviation where the repeats differ."""
    text = metric.write(fmean(values))
    return f"{text} ± {metric.write(stdev(values))}" if metric.better and len(set(values)) > 1 else text


def _column(metric: Metric, rows: Sequence[Sequence[float]], is_counted: Sequence[bool] | None = None) -> list[Cell]:
    """Cells of a metric; the best of the counted rows is marked where they differ."""
    means = [fmean(values) if values else None for values in rows]
    candidates = {
        mean for mean, counts in zip(means, is_counted or [True] * len(means), strict=True) if counts and mean is not None
    }
    best = max(candidates, key=lambda mean: mean * metric.better) if metric.better and len(candidates) > 1 else None
    return [
        Cell(MISSING, "")
        if mean is None
        else Cell(write_mean(metric, values), repr(mean), mean == best and (is_counted is None or is_counted[place]))
        for place, (mean, values) in enumerate(zip(means, rows, strict=True))
    ]
