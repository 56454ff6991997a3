"""Charts of the pages as Vega-Lite specifications.

Specifications are plain dictionaries that the page's script draws as SVG. Colours are variables of
the page's style sheet: `--s<number>` of a setting, `--hue-<number>` of a region.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from medseg.report.compare import (
    FINISHED,
    LARGEST,
    METRICS,
    PEAK,
    STEP,
    VAL_DICE,
    Comparison,
    Study,
)
from medseg.report.plots import rank_offsets

# Height of a chart, and of one of the many charts of keys.
_HEIGHT_PX = 260
_SMALL_HEIGHT_PX = 200
# Least number of results for charts over keys: with fewer, the table shows as much.
_MIN_RESULTS = 4
# Largest number of charts of keys on a page.
_MAX_KEYS = 9
# Largest number of points of a curve; a longer one is thinned evenly and keeps its end.
_MAX_POINTS = 200
# Ticks of the logarithmic axis of a Dice.
_DICE_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
# Smaller values of 1 - Dice are drawn at this value, since the axis is logarithmic in 1 - Dice.
_LEAST_ERROR = 0.0005
# An axis is logarithmic where its largest value is at least this many times the smallest.
_LOG_RATIO = 8.0
# Ends of the keys of learning rates.
_RATE_NAMES = ("lr", "learning_rate")

# Dictionaries of a specification: data points, layers or fields of a tooltip.
Rows = list[dict[str, Any]]


class Chart(NamedTuple):
    """A heading and the Vega-Lite specification of a drawing."""

    heading: str
    spec: dict[str, Any]


def curves(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice and training loss over the optimiser steps.

    The line of an unfinished run is dashed.
    """
    charts = []
    for column, heading in (("val_dice", "Validation Dice"), ("loss", "Training loss")):
        rows: Rows = []
        num_lines = 0
        for index, run in enumerate(comparison.runs):
            points = _thinned(run.curve(column))
            if points:
                num_lines += 1
            for step, value in points:
                rows.append({**_run_fields(comparison, index), "x": step, **_y_fields(value)})
        if not rows:
            continue
        description = f"{heading} over the optimiser steps of {num_lines} runs"
        x = _axis("optimiser step", rows, "x", is_count=True)
        y = _axis(heading, rows, "y", is_dice=column == "val_dice")
        charts.append(_chart(heading, description, rows, _curve_layers(heading), x, y))
    return charts


def _curve_layers(heading: str) -> Rows:
    """Make the layers of a chart of curves: lines of the runs, and the point under the pointer.

    Args:
        heading: Name of the values, for the tooltip.
    """
    # Lengths of dash and gap in pixels: without a gap the line is solid.
    dash = {"condition": {"test": "datum.finished", "value": [1, 0]}, "value": [5, 4]}
    tooltip = _tooltip(run="run", label="setting", x="step", y=heading)
    # The pointer, or a finger, takes the nearest point.
    near = {
        "name": "near",
        "select": {
            "type": "point",
            "nearest": True,
            "on": "pointerover",
            "clear": "pointerout",
        },
    }
    # Other points are invisible.
    opacity = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    return [
        {
            "mark": {"type": "line", "strokeWidth": 1.6},
            "encoding": {"detail": {"field": "run"}, "strokeDash": dash},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "params": [near],
            "encoding": {"opacity": opacity, "tooltip": tooltip},
        },
    ]


def costs(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice over peak memory and over seconds per step.

    A chart is left out where fewer than two settings have a result.
    """
    axes = (
        (PEAK, "Dice for memory", "peak memory in GiB"),
        (STEP, "Dice for time", "seconds per step"),
    )
    charts = []
    for metric, heading, title in axes:
        values = [metric.read(run) for run in comparison.runs]
        charts += _dice_chart(comparison, heading, title, values)
    return charts


def by_key(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice over each key that differs between settings.

    There are no charts where only one key differs, or where fewer than `_MIN_RESULTS` runs have a
    result.
    """
    num_results = sum(len(setting.metrics.get(VAL_DICE.key, ())) for setting in comparison.settings)
    charts = []
    for column in comparison.setting_columns:
        key = column.key
        charts += _dice_chart(
            comparison, heading=key, title=key, values=column.values, height=_SMALL_HEIGHT_PX
        )
    if len(charts) < 2 or num_results < _MIN_RESULTS:
        return []
    return charts[:_MAX_KEYS]


def progress(comparison: Comparison, study: Study) -> list[Chart]:
    """Draw the first objective of each finished trial, and the best so far as a line.

    Args:
        comparison: The trials, in the order of their numbers.
        study: The search, whose first objective is drawn.

    Returns:
        One chart; none where fewer than two trials have finished.
    """
    key, direction = next(iter(study["objectives"].items()))
    metric = next(metric for metric in METRICS if metric.key == key)
    # Index of a run to its result.
    results: dict[int, float] = {}
    for index, run in enumerate(comparison.runs):
        value = metric.read(run)
        # The name of a trial's folder is its number. Not `isdigit`: it is true for `²` too, which
        # `int` refuses.
        is_trial = run.name.isdecimal()
        if is_trial and run.status == FINISHED and value is not None:
            results[index] = value
    if len(results) < 2:
        return []
    # Running maximum or minimum in the order of the trials.
    better_of = np.maximum if direction == "maximize" else np.minimum
    bests = better_of.accumulate(list(results.values())).tolist()
    rows = []
    for (index, value), best in zip(results.items(), bests, strict=True):
        number = int(comparison.runs[index].name)
        rows.append(
            {
                **_run_fields(comparison, index),
                "x": number,
                **_y_fields(value),
                "best": _y_fields(best),
            }
        )
    x = _axis("trial", rows, "x", is_count=True)
    y = _axis(metric.title, rows, "y", is_dice=metric is VAL_DICE)
    # The same vertical axis, with the field `y` or `error` inside of `best`.
    best_so_far = {**y, "field": f"best.{y['field']}"}
    layers: Rows = [
        {
            "mark": {"type": "line", "interpolate": "step-after", "color": "var(--quiet)"},
            "encoding": {"x": x, "y": best_so_far},
        },
        {
            "mark": _DOT,
            "encoding": {
                **_SETTING_LOOK,
                "x": x,
                "y": y,
                "tooltip": _tooltip(run="trial", label="setting", y=metric.title),
            },
        },
    ]
    heading = f"{metric.title} of {len(results)} trials, and the best so far"
    return [_chart(heading, heading, rows, layers)]


def differences(rows: Rows, title: str) -> list[Chart]:
    """Draw mean differences to a baseline with their confidence intervals.

    Args:
        rows: `name`, `difference`, `ci95_low`, `ci95_high` (None where there is no interval),
            `cases`, `setting` and `colour`.
        title: Title of the horizontal axis.

    Returns:
        One chart; none without a row.
    """
    if not rows:
        return []
    # A line for each key in the name of a setting: a long name in one line would be cut, perhaps
    # where it differs from the others.
    axis = {"labelLimit": 130, "labelExpr": "split(datum.label, ', ')", "grid": False}
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": axis}
    # Height of a row: lines of 14 pixels each, and a gap.
    num_lines = max(row["name"].count(", ") + 1 for row in rows)
    row_px = 16 + 14 * num_lines
    x = {"field": "difference", "type": "quantitative", "title": title, "axis": {"tickCount": 4}}
    tooltip = _tooltip(
        name="of", difference="mean difference", ci95_low="from", ci95_high="to", cases="cases"
    )
    zero: dict[str, Any] = {
        "data": _ONE_ROW,
        "mark": _ZERO,
        "encoding": {"x": {"datum": 0}},
    }
    ends = {"x": {**x, "field": "ci95_low"}, "x2": {"field": "ci95_high"}, "y": y}
    intervals = {
        "mark": {"type": "rule", "strokeWidth": 2.5},
        "encoding": {**_SETTING_LOOK, **ends},
    }
    means = {
        "mark": {**_DOT, "opacity": 1},
        "encoding": {**_SETTING_LOOK, "x": x, "y": y, "tooltip": tooltip},
    }
    layers = [zero, means]
    # The difference of a single patient has no interval.
    if any(row["ci95_low"] is not None for row in rows):
        layers = [zero, intervals, means]
    description = f"{title} of {len(rows)} rows, with 95 % intervals"
    return [_chart(title, description, rows, layers, height=row_px * len(rows) + 20)]


def dice_by_region(rows: Rows) -> Chart:
    """Draw the Dice of each case by region, with boxes around the middle halves.

    Args:
        rows: `case`, `region`, `dice`, `link` to the case in the page, `colour`, and `row`, the
            number of the row for the filters.
    """
    # Index of a row to the offset of its point: neighbours in the Dice do not overlap.
    order = sorted(range(len(rows)), key=lambda index: rows[index]["dice"])
    offsets = dict(zip(order, rank_offsets(len(rows)).tolist(), strict=True))
    points: Rows = []
    for index, row in enumerate(rows):
        name = row["region"].replace("_", " ")
        points.append({**row, **_y_fields(row["dice"]), "offset": offsets[index], "name": name})
    # Regions in the order of their first row.
    names = list(dict.fromkeys(point["name"] for point in points))
    x = {
        "field": "name",
        "type": "nominal",
        "title": None,
        "scale": {"domain": names},
        "axis": {"labelAngle": 0 if len(names) < 5 else -35},
    }
    y = _axis("Dice", points, "y", is_dice=True)
    # The domain is wider than the offsets in [0, 1), so the points stay near the middle of the
    # space of their region.
    offset = {"field": "offset", "type": "quantitative", "scale": {"domain": [-0.6, 1.6]}}
    box = {
        "type": "boxplot",
        "extent": "min-max",
        "size": 40,
        "color": "var(--quiet)",
        "box": {"opacity": 0.22},
        "median": {"color": "var(--ink)"},
    }
    tooltip = _tooltip(case="case", region="region", y="Dice")
    layers: Rows = [
        {"mark": box, "encoding": {"x": x, "y": y}},
        {"mark": _DOT, "encoding": {"x": x, "xOffset": offset, "y": y, **_case_look(tooltip)}},
    ]
    return _chart("Dice by region", f"Dice of {len(rows)} results by region", points, layers)


def volume_errors(rows: Rows) -> Chart:
    """Draw the volume error over the reference volume.

    Args:
        rows: As of `dice_by_region`, with `volume_ref_ml` and `error_ml`.
    """
    points = [{**row, "x": row["volume_ref_ml"], "y": row["error_ml"]} for row in rows]
    x = _axis("reference volume in ml", points, "x")
    y = _axis("prediction minus reference in ml", points, "y")
    # The axis includes zero, which divides over- from underestimated volumes.
    y["scale"] = {"zero": True}
    tooltip = _tooltip(
        case="case", region="region", volume_ref_ml="reference ml", error_ml="difference ml"
    )
    description = f"Volume error of {len(rows)} results over the reference volume"
    return _chart("Volume error", description, points, _points_and_zero(x, y, tooltip))


def case_differences(rows: Rows) -> Chart:
    """Draw the difference of the Dice to the baseline for each case, the largest loss first.

    Args:
        rows: As of `dice_by_region`, with `delta`.
    """
    ordered = sorted(rows, key=lambda row: row["delta"])
    points = [{**row, "x": place} for place, row in enumerate(ordered, start=1)]
    x = {
        "field": "x",
        "type": "quantitative",
        "title": "results, the largest decrease first",
        "axis": {"labels": False, "ticks": False, "grid": False},
    }
    y = {
        "field": "delta",
        "type": "quantitative",
        "title": "difference of the Dice",
        "axis": {"tickCount": 5},
    }
    tooltip = _tooltip(case="case", region="region", delta="difference", dice="Dice")
    description = f"Difference of the Dice to the baseline of {len(rows)} results"
    return _chart("Difference by case", description, points, _points_and_zero(x, y, tooltip))


def _points_and_zero(x: dict[str, Any], y: dict[str, Any], tooltip: Rows) -> Rows:
    """Make the layers of a chart of cases: a horizontal line at zero, and points."""
    return [
        {"data": _ONE_ROW, "mark": _ZERO, "encoding": {"y": {"datum": 0}}},
        {"mark": _DOT, "encoding": {"x": x, "y": y, **_case_look(tooltip)}},
    ]


def _case_look(tooltip: Rows) -> dict[str, Any]:
    """Encode colour, link and tooltip of the point of a case."""
    return {"color": _COLOUR, "href": {"field": "link"}, "tooltip": tooltip}


# `"scale": None`: the values of the field are colours, not categories to which Vega gives colours.
_COLOUR = {"field": "colour", "type": "nominal", "scale": None}
# Colour, link and opacity of a setting. The page's script sets `lit` to the number of the setting
# under the pointer, and the other settings fade.
_SETTING_LOOK = {
    "color": _COLOUR,
    "href": {"field": "link"},
    "opacity": {
        "condition": {"test": "lit === null || lit === datum.setting", "value": 0.9},
        "value": 0.12,
    },
}
# Mark of a point.
_DOT = {
    "type": "point",
    "filled": True,
    "size": 80,
    "opacity": 0.85,
    "stroke": "var(--card)",
    "strokeWidth": 1,
}
# Data of the line at zero: with the rows of the chart, the line would be drawn once for each.
_ONE_ROW: dict[str, Any] = {"values": [{}]}
# Mark of the line at zero.
_ZERO = {"type": "rule", "color": "var(--quiet)", "strokeDash": [4, 3]}


def _chart(
    heading: str,
    description: str,
    rows: Rows,
    layers: Rows,
    x: Mapping[str, Any] | None = None,
    y: Mapping[str, Any] | None = None,
    height: int = _HEIGHT_PX,
) -> Chart:
    """Build a chart as wide as its place in the page.

    The page's script sets its parameters: `lit` by the legend, `shown` by the filters.

    Args:
        heading: Heading above the chart.
        description: What the chart shows, for screen readers.
        rows: Data points of all layers, at least one.
        layers: Marks and encodings, from the lowest layer to the highest.
        x: Horizontal axis of all layers; None where each layer has its own.
        y: Vertical axis of all layers, with `x`.
        height: Height in pixels.
    """
    common: dict[str, Any] = {}
    if x:
        common["encoding"] = {"x": x, "y": y, **_SETTING_LOOK}
    # Only pages of cases have filters: `shown` has the numbers of the rows that pass.
    if "row" in rows[0]:
        common["transform"] = [{"filter": "shown === null || indexof(shown, datum.row) >= 0"}]
    spec = {
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": rows},
        "params": [{"name": "lit", "value": None}, {"name": "shown", "value": None}],
        **common,
        "layer": layers,
    }
    return Chart(heading, spec)


def _tooltip(**titles: str) -> Rows:
    """Make the fields of a tooltip; numbers have four digits.

    Args:
        titles: Field of a data point to its title.
    """
    # `x` is a number of steps, or a value of a key as it was typed.
    text_fields = ("run", "label", "case", "region", "name", "x")
    fields: Rows = []
    for field, title in titles.items():
        entry = {"field": field, "title": title}
        if field not in text_fields:
            entry["format"] = ".4~g"
        fields.append(entry)
    return fields


def _y_fields(value: float) -> dict[str, float]:
    """Make the fields of a vertical axis: `y`, the value, and `error`, its distance from 1.

    `_axis` chooses one of them: `error` for a Dice near 1.
    """
    return {"y": value, "error": max(1 - value, _LEAST_ERROR)}


def _run_fields(comparison: Comparison, index: int) -> dict[str, Any]:
    """Make the fields that every data point of a run has."""
    run = comparison.runs[index]
    setting = comparison.setting_of[index]
    return {
        "run": run.name,
        "label": setting.label,
        "setting": setting.number,
        "colour": f"var(--s{setting.number})",
        "finished": run.status == FINISHED,
        "link": f"#run-{index}",
    }


def _thinned(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Select at most `_MAX_POINTS` finite points of a curve, evenly, with the first and the last.

    Args:
        curve: Points (x, y).
    """
    # JSON has no NaN.
    points = [point for point in curve if all(map(math.isfinite, point))]
    indices = np.linspace(0, len(points) - 1, min(len(points), _MAX_POINTS))
    return [points[round(index)] for index in indices]


def _axis(
    title: str,
    rows: Rows,
    name: str,
    *,
    is_dice: bool = False,
    is_rate: bool = False,
    is_count: bool = False,
) -> dict[str, Any]:
    """Choose field, scale and ticks of an axis.

    There are axes for names, a Dice near 1, values of several magnitudes, and whole numbers.

    Args:
        title: Title of the axis.
        rows: Data points; those of a Dice have `error` too.
        name: Field of the data points.
        is_dice: Whether the values are Dice scores; near 1, 0.98 then stands as far from 0.99 as
            0.90 from 0.95.
        is_rate: Whether the values are learning rates, which always get a logarithmic axis.
        is_count: Whether the axis stays linear, since it counts steps or trials.

    Returns:
        Specification of the axis, an encoding of Vega-Lite.
    """
    values = [row[name] for row in rows]
    # The padding keeps the outer points off the frame.
    axis: dict[str, Any] = {
        "field": name,
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False, "padding": 8},
    }
    if isinstance(values[0], str):
        # Names of fewer than 40 characters together fit side by side; longer ones are turned.
        num_characters = sum(map(len, set(values)))
        labels = {"labelAngle": 0 if num_characters < 40 else -35, "labelLimit": 110}
        return {**axis, "type": "nominal", "sort": None, "scale": {}, "axis": labels}
    low = min(values)
    high = max(values)
    # Below 0.9 a linear axis shows the differences well.
    if is_dice and high > 0.9:
        return {**axis, "field": "error", **_dice_scale(low, high)}
    # `not low > 0` is true for NaN too, unlike `low <= 0`: NaN has no logarithm.
    must_be_linear = is_dice or is_count or not low > 0
    if not must_be_linear and (is_rate or high >= _LOG_RATIO * low):
        return {**axis, **_log_scale(low, high)}
    if all(float(value).is_integer() for value in values):
        return {**axis, "axis": {"tickMinStep": 1, "tickCount": 5, "format": ",~f"}}
    return {**axis, "axis": {"tickCount": 5}}


def _dice_scale(low: float, high: float) -> dict[str, Any]:
    """Choose a logarithmic scale of 1 - Dice and its ticks, for scores from `low` to `high`."""
    # The axis ends at the ticks next to the scores.
    lowest_tick = max((tick for tick in _DICE_TICKS if tick <= low), default=0.0)
    highest_tick = min((tick for tick in _DICE_TICKS if tick >= high), default=1.0)
    ticks = [tick for tick in (*_DICE_TICKS, 1.0) if lowest_tick <= tick <= highest_tick]
    # From the larger error to the smaller one: a better Dice is up.
    domain = [1 - lowest_tick, max(1 - highest_tick, _LEAST_ERROR)]
    return {
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {
            "values": [max(1 - tick, _LEAST_ERROR) for tick in ticks],
            # The label is the Dice; a Dice of 1 is drawn at `_LEAST_ERROR`.
            "labelExpr": f"datum.value > {_LEAST_ERROR} ? format(1 - datum.value, '.4~f') : '1'",
        },
    }


def _log_scale(lowest: float, highest: float) -> dict[str, Any]:
    """Choose a logarithmic scale and its ticks for values from `lowest` to `highest`, both > 0."""
    ratio = highest / lowest
    # First digits of the ticks in each decade: the more decades, the fewer.
    if ratio < 30:
        digits: tuple[int, ...] = (1, 2, 5)
    elif ratio < 1e4:
        digits = (1, 3)
    else:
        digits = (1,)
    first_decade = math.floor(math.log10(lowest))
    last_decade = math.ceil(math.log10(highest))
    ticks: list[float] = []
    for decade in range(first_decade, last_decade + 1):
        # Not `digit * 10**decade`: for 3 and -1 that would be 0.30000000000000004.
        ticks += [float(f"{digit}e{decade}") for digit in digits]
    # Room beside the outer points.
    low = lowest / 1.25
    high = highest * 1.25
    return {
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {
            "values": [tick for tick in ticks if low <= tick <= high],
            "format": ".3~g",
            "labelOverlap": "greedy",
        },
    }


def _finished_points(comparison: Comparison, values: Sequence[Any]) -> dict[int, tuple[Any, float]]:
    """Map the index of each finished run with a value and a validation Dice to both.

    Args:
        comparison: All runs.
        values: Value of each run, a number or a text; None where it has none.
    """
    points: dict[int, tuple[Any, float]] = {}
    for index, (run, value) in enumerate(zip(comparison.runs, values, strict=True)):
        dice = VAL_DICE.read(run)
        if run.status == FINISHED and value is not None and dice is not None:
            points[index] = (value, dice)
    return points


def _dice_chart(
    comparison: Comparison,
    heading: str,
    title: str,
    values: Sequence[Any],
    height: int = _HEIGHT_PX,
) -> list[Chart]:
    """Draw validation Dice over one value per run.

    Args:
        comparison: All runs.
        heading: Heading above the chart.
        title: Title of the horizontal axis; a dotted key, or the name of a metric.
        values: Value of each run, a number or a text; None where it has none.
        height: Height in pixels.

    Returns:
        One chart; none where the settings or values of the finished runs do not differ.
    """
    points = _finished_points(comparison, values)
    num_settings = len({comparison.setting_of[index].number for index in points})
    num_values = len({value for value, _ in points.values()})
    if num_settings < 2 or num_values < 2:
        return []
    # Values of keys are texts. If all of them are numbers of at most `LARGEST`, they are drawn as
    # numbers, else as names in the order of their first appearance.
    with suppress(ValueError):
        numbers = {index: (float(value), dice) for index, (value, dice) in points.items()}
        if all(abs(number) <= LARGEST for number, _ in numbers.values()):
            points = numbers
    rows: Rows = []
    for index, (value, dice) in points.items():
        rows.append({**_run_fields(comparison, index), "x": value, **_y_fields(dice)})
    # Where the title is a key such as `optimizer.lr`, its last part decides.
    is_rate = title.rpartition(".")[2].endswith(_RATE_NAMES)
    tooltip = _tooltip(run="run", label="setting", x=title, y="validation Dice")
    layers: Rows = [{"mark": _DOT, "encoding": {"tooltip": tooltip}}]
    x = _axis(title, rows, "x", is_rate=is_rate)
    y = _axis("validation Dice", rows, "y", is_dice=True)
    description = f"Validation Dice of {len(rows)} runs over {title}"
    return [_chart(heading, description, rows, layers, x, y, height)]
