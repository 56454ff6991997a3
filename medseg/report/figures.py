"""The charts of a report: curves, what a setting costs, Dice by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from medseg.report.chart import Axes, Series, choices, line_chart, point_chart
from medseg.report.compare import Column, Comparison
from medseg.report.run import FINISHED, METRICS, PEAK, STEP, VAL_DICE, Metric, Study
from medseg.report.scale import Scale, for_scores, for_sizes, linear

_DICE_TITLE = "validation Dice"
_SMALL = (400, 270)
# With fewer results a chart per key shows nothing that the table does not.
_MIN_RESULTS = 4
_MAX_KEYS = 9


@dataclass(frozen=True)
class Figure:
    """A chart and its heading."""

    heading: str
    chart: Markup


def curves(comparison: Comparison) -> list[Figure]:
    """Validation Dice and loss over the optimiser steps."""
    figures = []
    for column, heading, y_title, make_scale in (
        ("val_dice", "Validation Dice", "mean Dice of the cases", for_scores),
        ("loss", "Training loss", "loss", for_sizes),
    ):
        series = [
            Series(
                comparison.setting_of[index],
                _tooltip(comparison, index, f"{curve[-1][1]:.4f} at step {curve[-1][0]:.0f}"),
                curve,
                is_dashed=run.status != FINISHED,
            )
            for index, run in enumerate(comparison.runs)
            if (curve := run.curve(column))
        ]
        if series:
            x = linear([0.0, *(point[0] for one in series for point in one.points)], is_count=True)
            y = make_scale([point[1] for one in series for point in one.points])
            title = f"{heading} over the optimiser steps of {len(series)} runs"
            figures.append(Figure(heading, line_chart(series, Axes(x, y, "optimiser step", y_title), title)))
    return figures


def costs(comparison: Comparison) -> list[Figure]:
    """Validation Dice against memory and against time: what each setting buys."""
    figures = []
    for metric, heading, x_title in (
        (PEAK, "Dice for memory", "peak memory in GiB"),
        (STEP, "Dice for time", "seconds per step"),
    ):
        points = {
            index: (cost, dice)
            for index, dice in _dices(comparison).items()
            if (cost := metric.of(comparison.runs[index])) is not None
        }
        if len({comparison.setting_of[index] for index in points}) > 1 and len({cost for cost, _ in points.values()}) > 1:
            x, y = for_sizes([cost for cost, _ in points.values()]), for_scores([dice for _, dice in points.values()])
            title = f"{heading}: validation Dice of {len(points)} runs over {x_title}"
            series = _dots(comparison, points, metric)
            figures.append(Figure(heading, point_chart(series, Axes(x, y, x_title, _DICE_TITLE), title)))
    return figures


def by_key(comparison: Comparison) -> list[Figure]:
    """Validation Dice over each key that differs; none where only one does, or few runs have a result."""
    dices = _dices(comparison)
    columns = [column for column in comparison.setting_columns if len({column.values[index] for index in dices}) > 1]
    if len(dices) < _MIN_RESULTS or len(columns) < 2:
        return []
    y = for_scores(list(dices.values()))
    figures = []
    for column in columns[:_MAX_KEYS]:
        x, places = _places(column, list(dices))
        series = _dots(comparison, {index: (places[index], dice) for index, dice in dices.items()})
        title = f"Validation Dice of {len(dices)} runs over {column.key}"
        figures.append(Figure(column.key, point_chart(series, Axes(x, y, column.key, _DICE_TITLE, _SMALL), title)))
    return figures


def progress(comparison: Comparison, study: Study) -> list[Figure]:
    """The first objective of each finished trial in the order of the trials, and the best so far."""
    key, direction = next(iter(study.objectives.items()))
    metric = next(metric for metric in METRICS if metric.key == key)
    better = max if direction == "maximize" else min
    points = {
        index: (float(run.name), value)
        for index, run in enumerate(comparison.runs)
        if run.status == FINISHED and run.name.isdigit() and (value := metric.of(run)) is not None
    }
    if len(points) < 2:
        return []
    steps: list[tuple[float, float]] = []
    for number, value in points.values():
        best = better(value, steps[-1][1]) if steps else value
        steps += [(number, steps[-1][1] if steps else best), (number, best)]
    values = [value for _, value in points.values()]
    axes = Axes(
        linear([number for number, _ in points.values()], is_count=True),
        for_scores(values) if metric is VAL_DICE else for_sizes(values),
        "trial",
        _DICE_TITLE if metric is VAL_DICE else metric.title,
    )
    title = f"{metric.title} of {len(points)} trials, and the best so far"
    return [Figure(title, point_chart(_dots(comparison, points), axes, title, steps))]


def _dices(comparison: Comparison) -> dict[int, float]:
    """Validation Dice of each finished run."""
    finished = [index for index, run in enumerate(comparison.runs) if run.status == FINISHED]
    return {index: dice for index in finished if (dice := VAL_DICE.of(comparison.runs[index])) is not None}


def _dots(comparison: Comparison, points: Mapping[int, tuple[float, float]], metric: Metric | None = None) -> list[Series]:
    def what(cost: float, dice: float) -> str:
        return f"{dice:.4g}" + (f", {metric.title}: {metric.write(cost)}" if metric else "")

    return [
        Series(comparison.setting_of[index], _tooltip(comparison, index, what(*point)), [point])
        for index, point in points.items()
    ]


def _places(column: Column, indices: Sequence[int]) -> tuple[Scale, dict[int, float]]:
    """The axis of a key, and where each run lies on it: numbers to scale, names in the order of their appearance."""
    texts = {index: column.values[index] for index in indices}
    try:
        numbers = {index: float(text) for index, text in texts.items()}
    except ValueError:
        names = list(dict.fromkeys(texts.values()))
        return choices(names), {index: float(names.index(text)) for index, text in texts.items()}
    return for_sizes(list(numbers.values())), numbers


def _tooltip(comparison: Comparison, index: int, what: str) -> str:
    """Run, setting, figure."""
    run, setting = comparison.runs[index], comparison.settings[comparison.setting_of[index]]
    return f"{run.name}{f' · {setting.label}' if setting.label != run.name else ''}: {what}"
