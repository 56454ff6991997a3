"""Charts of the report page: Matplotlib figures as inline SVG that takes its colours from the page's style sheet."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from medseg.report.compare import FINISHED, LARGEST, METRICS, PEAK, STEP, VAL_DICE, Comparison, Study

_DICE_TITLE = "validation Dice"
_SIZE_IN, _SMALL_SIZE_IN = (5.6, 3.3), (4.4, 3.0)
# With fewer results a chart per key shows nothing that the table does not.
_MIN_RESULTS = 4
_MAX_KEYS = 9
_MAX_NAMES = 60
"""Characters of all names of an axis together; longer names are cut, the tooltips have them whole."""
_DICE_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
_NEAREST_TO_ONE = 0.9995
_LOG_RATIO = 8.0
"""An axis is logarithmic where its largest value is at least so many times the smallest."""
# Colours that Matplotlib writes, and the CSS variables of the page that take their place (light or dark scheme).
_VARIABLES = {"#010101": "var(--quiet)", "#020202": "var(--rule)", "#030303": "var(--c)", "#040404": "var(--card)"}
_QUIET, _RULE, _SETTING, _CARD = _VARIABLES
# The pointer meets a wide invisible line; the last point of a line is marked.
_LINE: dict[str, dict[str, Any]] = {
    "hit": {"linewidth": 12, "alpha": 0},
    "mark": {"linewidth": 1.6, "marker": "o", "markersize": 4, "markevery": [-1]},
}
_DOT: dict[str, dict[str, Any]] = {
    "mark": {"linestyle": "", "marker": "o", "markersize": 9, "markeredgecolor": _CARD, "alpha": 0.85}
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "medseg", "font.size": 10, "text.parse_math": False, "axes.edgecolor": _QUIET, "axes.labelcolor": _QUIET,
    "xtick.color": _QUIET, "ytick.color": _QUIET, "grid.color": _RULE, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "ytick.major.size": 0,
}  # fmt: skip


Charts = list[tuple[str, Markup]]
"""Pairs of a heading and a drawing."""


def curves(comparison: Comparison) -> Charts:
    """Draw validation Dice and training loss over the optimiser steps; the line of an unfinished run is broken."""
    charts = []
    for column, heading, y_title in (("val_dice", "Validation Dice", _DICE_TITLE), ("loss", "Training loss", "loss")):
        points = {index: curve for index, run in enumerate(comparison.runs) if (curve := run.curve(column))}
        if points:
            title = f"{heading} over the optimiser steps of {len(points)} runs"
            charts.append(
                (heading, draw(comparison, points, title, "optimiser step", y_title, "{y:.4f} at step {x:.0f}", is_line=True))
            )
    return charts


def costs(comparison: Comparison) -> Charts:
    """Draw validation Dice over memory and over time, where several settings have a result."""
    axes = ((PEAK, "Dice for memory", "peak memory in GiB"), (STEP, "Dice for time", "seconds per step"))
    return [
        chart
        for metric, heading, x_title in axes
        for chart in _dice_chart(
            comparison, heading, x_title, [metric.of(run) for run in comparison.runs], f"{{y:.4g}}, {metric.title}: {{x:.3g}}"
        )
    ]


def by_key(comparison: Comparison) -> Charts:
    """Draw validation Dice over each key that differs; none where only one differs, or few runs have a result."""
    num_results = sum(len(setting.metrics.get(VAL_DICE.key, ())) for setting in comparison.settings)
    charts = [
        chart
        for column in comparison.setting_columns
        for chart in _dice_chart(comparison, column.key, column.key, column.values, size_in=_SMALL_SIZE_IN)
    ]
    return charts[:_MAX_KEYS] if len(charts) > 1 and num_results >= _MIN_RESULTS else []


def progress(comparison: Comparison, study: Study) -> Charts:
    """Draw the first objective of each finished trial in the order of the trials, and the best so far as a line."""
    key, direction = next(iter(study["objectives"].items()))
    metric = next(metric for metric in METRICS if metric.key == key)
    points = {
        index: [(float(run.name), value)]
        for index, run in enumerate(comparison.runs)
        if run.status == FINISHED and run.name.isdigit() and (value := metric.of(run)) is not None
    }
    if len(points) < 2:
        return []
    title = f"{metric.title} of {len(points)} trials, and the best so far"
    y_title = _DICE_TITLE if metric is VAL_DICE else metric.title
    best_of = np.maximum if direction == "maximize" else np.minimum
    return [(title, draw(comparison, points, title, "trial", y_title, best_of=best_of))]


def draw(
    comparison: Comparison,
    points: Mapping[int, Sequence[tuple[Any, float]]],
    title: str,
    x_title: str,
    y_title: str = _DICE_TITLE,
    tooltip: str = "{y:.4g}",
    *,
    size_in: tuple[float, float] = _SIZE_IN,
    is_line: bool = False,
    best_of: np.ufunc | None = None,
) -> Markup:
    """Draw points of runs as an SVG element that needs no script to be read.

    Args:
        comparison: Runs and their settings.
        points: Index of a run to its points (x, y); x is a number, or a name in all of them.
        title: Accessible name of the drawing.
        x_title: Title of the horizontal axis.
        y_title: Title of the vertical axis; that of a Dice is stretched towards 1 where a point is near it.
        tooltip: Format of the text under the pointer, from the `x` and `y` of the last point of a run.
        size_in: Width and height in inches of 72 units.
        is_line: Lines through the points, or dots.
        best_of: Reduction of y over the runs in order that a step line behind the dots shows; None = no line.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=size_in, layout="constrained")
        axes = figure.add_subplot(xlabel=x_title, ylabel=y_title)
        axes.grid(axis="y", clip_on=False)
        x, y = zip(*(point for line in points.values() for point in line), strict=True)
        if best_of is not None:
            axes.step(x, best_of.accumulate(y), where="post", color=_QUIET, linewidth=1.2, clip_on=False, gid="best")
        groups = {}
        for index, line in points.items():
            run, setting = comparison.runs[index], comparison.setting_of[index]
            label = f" · {setting.label}" if setting.label != run.name else ""
            text = escape(f"{run.name}{label}: {tooltip.format(x=line[-1][0], y=line[-1][1])}")
            for kind, style in (_LINE if is_line else _DOT).items():
                axes.plot(*zip(*line, strict=True), color=_SETTING, clip_on=False, gid=f"{kind}-{index}", **style)
                groups[f"{kind}-{index}"] = f'<g class="series {kind} s{setting.number}"><title>{text}</title>'
            if run.status != FINISHED:
                axes.lines[-1].set_linestyle("--")
        _scale(axes, "x", x, is_count=is_line or best_of is not None)
        _scale(axes, "y", y, is_dice=y_title == _DICE_TITLE)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    _, _, drawing = file.getvalue().partition("<svg ")  # without the prolog of a file
    for colour, variable in _VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    drawing = re.sub(r'<g id="((?:hit|mark)-\d+)">', lambda group: groups[group[1]], drawing)
    return Markup(f'<svg class="chart" role="img" aria-label="{escape(title)}" {drawing}')


def _scale(axes: Any, name: str, values: Sequence[Any], *, is_dice: bool = False, is_count: bool = False) -> None:
    """Choose scale and ticks of an axis for names, a Dice near 1, values of several magnitudes, and whole numbers.

    Args:
        axes: Drawing.
        name: `x` or `y`.
        values: Every drawn value of the axis.
        is_dice: Whether the values are Dice scores.
        is_count: Whether the axis stays even, since it counts steps or trials.
    """
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

    def bend(dice: np.ndarray) -> np.ndarray:
        return -np.log1p(-np.minimum(dice, _NEAREST_TO_ONE))  # 0.98 stands as far from 0.99 as 0.90 from 0.95

    axis = axes.xaxis if name == "x" else axes.yaxis
    if isinstance(values[0], str):
        names = list(dict.fromkeys(values))
        room = max(3, _MAX_NAMES // len(names))
        axes.set_xticks(range(len(names)), [name if len(name) <= room else f"{name[: room - 1]}…" for name in names])
        axes.set_xlim(-0.6, len(names) - 0.4)
    elif is_dice and max(values) > 0.9:
        axes.set_yscale("function", functions=(bend, lambda bent: -np.expm1(-bent)))
        ticks = np.array(_DICE_TICKS)
        axes.set_ylim(ticks[ticks <= min(values)].max(initial=0.0), ticks[ticks >= max(values)].min(initial=_NEAREST_TO_ONE))
        axis.set_major_locator(FixedLocator(_DICE_TICKS))
        axis.set_major_formatter("{x:g}")
    elif not (is_dice or is_count) and min(values) > 0 and max(values) >= _LOG_RATIO * min(values):
        axes.set(**{f"{name}scale": "log"})
        axes.minorticks_off()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 30 * min(values) else (1, 3)))
        axis.set_major_formatter("{x:g}")
    elif all(float(value).is_integer() for value in values):
        axis.set_major_locator(MaxNLocator("auto", integer=True))


def _dice_chart(
    comparison: Comparison,
    heading: str,
    x_title: str,
    values: Sequence[Any],
    tooltip: str = "{y:.4g}",
    size_in: tuple[float, float] = _SIZE_IN,
) -> Charts:
    """Draw validation Dice over one value per run; nothing where the settings or values of the finished runs do not differ."""
    points = {
        index: [(value, dice)]
        for index, (run, value) in enumerate(zip(comparison.runs, values, strict=True))
        if run.status == FINISHED and value is not None and (dice := VAL_DICE.of(run)) is not None
    }
    if len({comparison.setting_of[index].number for index in points}) < 2 or len({x for ((x, _),) in points.values()}) < 2:
        return []
    with suppress(ValueError):  # names: one place each, in the order of their appearance
        numbers = {index: [(float(x), dice)] for index, ((x, dice),) in points.items()}
        points = numbers if all(abs(x) <= LARGEST for ((x, _),) in numbers.values()) else points
    return [
        (
            heading,
            draw(
                comparison,
                points,
                f"Validation Dice of {len(points)} runs over {x_title}",
                x_title,
                tooltip=tooltip,
                size_in=size_in,
            ),
        )
    ]
