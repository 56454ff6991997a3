"""Charts of the pages as Vega-Lite specifications.

They are plain dictionaries that the page's script draws as SVG in the page's colours.
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

_HEIGHT_PX = 260
_SMALL_HEIGHT_PX = 200
# With fewer results a chart per key shows nothing that the table does not.
_MIN_RESULTS = 4
_MAX_KEYS = 9
# Points of a curve; a longer history is thinned evenly and keeps its end.
_MAX_POINTS = 200
_DICE_TICKS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
# A Dice nearer to 1 is drawn at this distance, since the axis is logarithmic in 1 - Dice.
_LEAST_ERROR = 0.0005
# An axis is logarithmic where its largest value is at least so many times the smallest.
_LOG_RATIO = 8.0
_RATE_NAMES = ("lr", "learning_rate")

Rows = list[dict[str, Any]]


class Chart(NamedTuple):
    """A heading and the Vega-Lite specification of a drawing."""

    heading: str
    spec: dict[str, Any]


def curves(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice and training loss over the optimiser steps.

    The line of an unfinished run is broken.
    """
    charts = []
    for column, heading in (("val_dice", "Validation Dice"), ("loss", "Training loss")):
        rows: Rows = []
        num_lines = 0
        for index, run in enumerate(comparison.runs):
            points = _thinned(run.curve(column))
            rows += [{**_run(comparison, index), "x": x, **_dice(y)} for x, y in points]
            num_lines += bool(points)
        if not rows:
            continue
        description = f"{heading} over the optimiser steps of {num_lines} runs"
        x = _axis("optimiser step", rows, "x", is_count=True)
        y = _axis(heading, rows, "y", is_dice=column == "val_dice")
        charts.append(_chart(heading, description, rows, _curve_layers(heading), x, y))
    return charts


def _curve_layers(heading: str) -> Rows:
    """Lines of the runs, and the point under the pointer with its values."""
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
    is_near = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    return [
        {
            "mark": {"type": "line", "strokeWidth": 1.6},
            "encoding": {"detail": {"field": "run"}, "strokeDash": dash},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 70},
            "params": [near],
            "encoding": {"opacity": is_near, "tooltip": tooltip},
        },
    ]


def costs(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice over memory and over time, where several settings have a result."""
    axes = (
        (PEAK, "Dice for memory", "peak memory in GiB"),
        (STEP, "Dice for time", "seconds per step"),
    )
    charts = []
    for metric, heading, title in axes:
        values = [metric.of(run) for run in comparison.runs]
        charts += _dice_chart(comparison, heading, title, values)
    return charts


def by_key(comparison: Comparison) -> list[Chart]:
    """Draw validation Dice over each key that differs.

    There are none where only one differs, or few runs have a result.
    """
    num_results = sum(len(setting.metrics.get(VAL_DICE.key, ())) for setting in comparison.settings)
    charts = []
    for column in comparison.setting_columns:
        key = column.key
        charts += _dice_chart(comparison, key, key, column.values, _SMALL_HEIGHT_PX)
    if len(charts) < 2 or num_results < _MIN_RESULTS:
        return []
    return charts[:_MAX_KEYS]


def progress(comparison: Comparison, study: Study) -> list[Chart]:
    """Draw the first objective of each finished trial, and the best so far as a line.

    The trials are in their order.
    """
    key, direction = next(iter(study["objectives"].items()))
    metric = next(metric for metric in METRICS if metric.key == key)
    results: dict[int, float] = {}
    for index, run in enumerate(comparison.runs):
        value = metric.of(run)
        # The folder of a trial has its number as name.
        if run.status == FINISHED and run.name.isdigit() and value is not None:
            results[index] = value
    if len(results) < 2:
        return []
    # Running maximum or minimum in the order of the trials.
    best_of = np.maximum if direction == "maximize" else np.minimum
    bests = best_of.accumulate(list(results.values())).tolist()
    rows = []
    for (index, value), best in zip(results.items(), bests, strict=True):
        place = {"x": int(comparison.runs[index].name), **_dice(value), "best": _dice(best)}
        rows.append({**_run(comparison, index), **place})
    x = _axis("trial", rows, "x", is_count=True)
    y = _axis(metric.title, rows, "y", is_dice=metric is VAL_DICE)
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
            `setting`, `colour`.
        title: Title of the horizontal axis.
    """
    if not rows:
        return []
    # A line for each key of a setting: a long name in one line is cut where it differs from the
    # others.
    axis = {"labelLimit": 130, "labelExpr": "split(datum.label, ', ')", "grid": False}
    y = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": axis}
    # Lines of 14 pixels.
    row_px = 16 + 14 * max(row["name"].count(", ") + 1 for row in rows)
    x = {"field": "difference", "type": "quantitative", "title": title, "axis": {"tickCount": 4}}
    tooltip = _tooltip(
        name="of", difference="mean difference", ci95_low="from", ci95_high="to", cases="cases"
    )
    zero: dict[str, Any] = {
        "data": {"values": [{}]},
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
    if any(row["ci95_low"] is not None for row in rows):
        layers = [zero, intervals, means]
    description = f"{title} of {len(rows)} rows, with 95 % intervals"
    return [_chart(title, description, rows, layers, height=row_px * len(rows) + 20)]


def dice_by_region(rows: Rows) -> Chart:
    """Draw the Dice of each case by region, with boxes around the middle halves.

    Args:
        rows: `case`, `region`, `dice`, `link` to the case in the page, `colour`, and `row`, its
            number for the filters.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index]["dice"])
    offsets = dict(zip(order, rank_offsets(len(rows)).tolist(), strict=True))
    points: Rows = []
    for index, row in enumerate(rows):
        name = row["region"].replace("_", " ")
        points.append({**row, **_dice(row["dice"]), "offset": offsets[index], "name": name})
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
    # Over- and underestimation are seen as such only beside zero.
    y["scale"] = {"zero": True}
    tooltip = _tooltip(
        case="case", region="region", volume_ref_ml="reference ml", error_ml="difference ml"
    )
    description = f"Volume error of {len(rows)} results over the reference volume"
    return _chart("Volume error", description, points, _errors_about_zero(x, y, tooltip))


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
    return _chart("Difference by case", description, points, _errors_about_zero(x, y, tooltip))


def _errors_about_zero(x: dict[str, Any], y: dict[str, Any], tooltip: Rows) -> Rows:
    """Points of cases, and a line at zero."""
    return [
        {"data": {"values": [{}]}, "mark": _ZERO, "encoding": {"y": {"datum": 0}}},
        {"mark": _DOT, "encoding": {"x": x, "y": y, **_case_look(tooltip)}},
    ]


def _case_look(tooltip: Rows) -> dict[str, Any]:
    """Colour, link and tooltip of the point of a case."""
    return {"color": _COLOUR, "href": {"field": "link"}, "tooltip": tooltip}


_COLOUR = {"field": "colour", "type": "nominal", "scale": None}
_SETTING_LOOK = {
    "color": _COLOUR,
    "href": {"field": "link"},
    "opacity": {
        "condition": {"test": "lit === null || lit === datum.setting", "value": 0.9},
        "value": 0.12,
    },
}
_DOT = {
    "type": "point",
    "filled": True,
    "size": 80,
    "opacity": 0.85,
    "stroke": "var(--card)",
    "strokeWidth": 1,
}
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
    """Build a drawing as wide as its place.

    The legend and the filters of the page set its parameters `lit` and `shown`.
    """
    shared: dict[str, Any] = {}
    if x:
        shared["encoding"] = {"x": x, "y": y, **_SETTING_LOOK}
    # Cases have filters, which the page's script writes into `shown`.
    if "row" in rows[0]:
        shared["transform"] = [{"filter": "shown === null || indexof(shown, datum.row) >= 0"}]
    spec = {
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": rows},
        "params": [{"name": "lit", "value": None}, {"name": "shown", "value": None}],
        **shared,
        "layer": layers,
    }
    return Chart(heading, spec)


def _tooltip(**titles: str) -> Rows:
    """Fields with their titles under the pointer; numbers with four digits."""
    texts = ("run", "label", "case", "region", "name", "x")
    fields: Rows = []
    for field, title in titles.items():
        entry = {"field": field, "title": title}
        if field not in texts:
            entry["format"] = ".4~g"
        fields.append(entry)
    return fields


def _dice(value: float) -> dict[str, float]:
    """Value of a vertical axis, and its distance from 1 for the axis of a Dice."""
    return {"y": value, "error": max(1 - value, _LEAST_ERROR)}


def _run(comparison: Comparison, index: int) -> dict[str, Any]:
    """Fields of a run that every point of it has."""
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


def _thinned(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Finite points of a curve, at most `_MAX_POINTS`."""
    # JSON has no NaN.
    finite = [point for point in line if all(map(math.isfinite, point))]
    places = np.linspace(0, len(finite) - 1, min(len(finite), _MAX_POINTS))
    return [finite[round(place)] for place in places]


def _axis(
    title: str,
    rows: Rows,
    name: str,
    *,
    is_dice: bool = False,
    is_rate: bool = False,
    is_count: bool = False,
) -> dict[str, Any]:
    """Choose scale and ticks of an axis.

    There are axes for names, a Dice near 1, values of several magnitudes, and whole numbers.

    Args:
        title: Title of the axis.
        rows: Points; those of a Dice have `error`.
        name: Field of the rows.
        is_dice: Whether the values are Dice scores; near 1, 0.98 then stands as far from 0.99 as
            0.90 from 0.95.
        is_rate: Whether the values are learning rates, which always get a logarithmic axis.
        is_count: Whether the axis stays linear, since it counts steps or trials.
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
        is_short = sum(map(len, set(values))) < 40
        labels = {"labelAngle": 0 if is_short else -35, "labelLimit": 110}
        return {**axis, "type": "nominal", "sort": None, "scale": {}, "axis": labels}
    low = min(values)
    high = max(values)
    # Below 0.9 a linear axis shows the differences well.
    if is_dice and high > 0.9:
        return {**axis, "field": "error", **_dice_scale(low, high)}
    is_linear = is_dice or is_count or not low > 0  # NaN too
    if not is_linear and (is_rate or high >= _LOG_RATIO * low):
        return {**axis, **_log_scale(low, high)}
    if all(float(value).is_integer() for value in values):
        return {**axis, "axis": {"tickMinStep": 1, "tickCount": 5, "format": ",~f"}}
    return {**axis, "axis": {"tickCount": 5}}


def _dice_scale(low: float, high: float) -> dict[str, Any]:
    """Choose a logarithmic scale of 1 - Dice and its ticks, for scores from `low` to `high`."""
    # The axis ends at ticks around the scores.
    lowest = max((tick for tick in _DICE_TICKS if tick <= low), default=0.0)
    highest = min((tick for tick in _DICE_TICKS if tick >= high), default=1.0)
    ticks = [tick for tick in (*_DICE_TICKS, 1.0) if lowest <= tick <= highest]
    # From the larger error to the smaller one: a better Dice is up.
    domain = [1 - lowest, max(1 - highest, _LEAST_ERROR)]
    return {
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {
            "values": [max(1 - tick, _LEAST_ERROR) for tick in ticks],
            "labelExpr": f"datum.value > {_LEAST_ERROR} ? format(1 - datum.value, '.4~f') : '1'",
        },
    }


def _log_scale(lowest: float, highest: float) -> dict[str, Any]:
    """Choose a logarithmic scale and its ticks for values from `lowest` to `highest`, both > 0."""
    ratio = highest / lowest
    # Ticks within a decade: the more decades, the fewer.
    if ratio < 30:
        steps: tuple[int, ...] = (1, 2, 5)
    elif ratio < 1e4:
        steps = (1, 3)
    else:
        steps = (1,)
    first_decade = math.floor(math.log10(lowest))
    last_decade = math.ceil(math.log10(highest))
    ticks: list[float] = []
    for decade in range(first_decade, last_decade + 1):
        # Not `step * 10**decade`, which would be 0.30000000000000004.
        ticks += [float(f"{step}e{decade}") for step in steps]
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
    """Map the index of each finished run with both figures to its value and its Dice."""
    points: dict[int, tuple[Any, float]] = {}
    for index, (run, value) in enumerate(zip(comparison.runs, values, strict=True)):
        dice = VAL_DICE.of(run)
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

    There is nothing to draw where the settings or values of the finished runs do not differ.
    """
    points = _finished_points(comparison, values)
    num_settings = len({comparison.setting_of[index].number for index in points})
    num_values = len({value for value, _ in points.values()})
    if num_settings < 2 or num_values < 2:
        return []
    # Names that are no numbers have one place each, in the order of their appearance.
    with suppress(ValueError):
        numbers = {index: (float(value), dice) for index, (value, dice) in points.items()}
        if all(abs(number) <= LARGEST for number, _ in numbers.values()):
            points = numbers
    rows: Rows = []
    for index, (value, dice) in points.items():
        rows.append({**_run(comparison, index), "x": value, **_dice(dice)})
    # Such as `optimizer.lr`.
    is_rate = title.rpartition(".")[2].endswith(_RATE_NAMES)
    tooltip = _tooltip(run="run", label="setting", x=title, y="validation Dice")
    layers: Rows = [{"mark": _DOT, "encoding": {"tooltip": tooltip}}]
    x = _axis(title, rows, "x", is_rate=is_rate)
    y = _axis("validation Dice", rows, "y", is_dice=True)
    description = f"Validation Dice of {len(rows)} runs over {title}"
    return [_chart(heading, description, rows, layers, x, y, height)]
