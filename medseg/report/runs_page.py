"""Report page of runs: best setting, validation cases, differences to a baseline, tables, charts and pictures."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from medseg.report.charts import by_key, costs, curves, differences, progress
from medseg.report.compare import (
    FINISHED,
    METRICS,
    MISSING,
    OPEN,
    PRUNED,
    VAL_DICE,
    Comparison,
    Metric,
    Run,
    Setting,
    Study,
    write_duration,
)
from medseg.report.differences import METHOD, describe_patients
from medseg.report.html import data_uri, render_page

# A reader can distinguish so many hues; more settings get shades by rank.
_NUM_HUES = 8
_MAX_CASE_SETTINGS = 8
"""Settings with a column in the table of cases."""


def render(
    comparison: Comparison,
    study: Study | None,
    title: str,
    folder: str,
    num_pictures: int,
    say: Callable[[str], None],
) -> str:
    """Render the page.

    Args:
        comparison: Runs side by side.
        study: The search that made the runs, if one did.
        title: Heading.
        folder: Folder of the runs, as shown to the reader.
        num_pictures: Largest number of overlays, the best runs first.
        say: Takes a sentence about a picture that could not be read.

    Returns:
        HTML.
    """
    metrics = shown_metrics(comparison)
    settings, runs = comparison.settings, comparison.runs
    best = None if comparison.best is None else settings[comparison.best]
    places = {number: place for place, number in enumerate(comparison.ranked)}
    total_s = sum(
        metric.of(run) or 0.0 for metric in METRICS if metric.key == "train_s" for run in runs
    )
    statuses = sorted(
        Counter(run.status for run in runs).items(), key=lambda one: one[0] != FINISHED
    )
    pictures = _pictures(comparison, places, num_pictures, say)
    baseline_rows = difference_rows(comparison)
    case_settings = [settings[number] for number in comparison.ranked if settings[number].cases]
    case_rows = _case_rows(case_settings[:_MAX_CASE_SETTINGS], pictures)
    return render_page(
        "runs.html",
        "report",
        title,
        tiles=[
            ("runs", len(runs)),
            *((status.replace("_", " "), count) for status, count in statuses),
            *([("training in all", write_duration(total_s))] if total_s else []),
        ],
        charts={
            "curves": curves(comparison),
            "costs": costs(comparison),
            "by_key": by_key(comparison),
            "progress": progress(comparison, study) if study else [],
            "differences": differences(baseline_rows, "Difference of the Dice"),
        },
        folder=folder,
        comparison=comparison,
        num_hues=_NUM_HUES,
        places=places,
        legend=[settings[number] for number in comparison.ranked],
        is_named_by_run=_NUM_HUES < len(settings) == len(runs),
        study=study,
        best_trials=_best_trials(comparison, study) if study else [],
        best=best,
        has_results=any(setting.metrics.get(VAL_DICE.key) for setting in settings),
        best_run=_best_run(best.runs) if best else None,
        best_metrics=[
            metric for metric in METRICS if best and metric.better and metric.key in best.metrics
        ],
        missing=MISSING,
        write_mean=write_mean,
        setting_figures=setting_figures(comparison, metrics),
        run_texts=[
            [column.values[index] for column in comparison.columns] for index in range(len(runs))
        ],
        run_figures=run_figures(comparison, metrics),
        run_links=[
            next((f"#{one['id']}" for one in pictures if one["run"] is run), "") for run in runs
        ],
        metrics=metrics,
        case_settings=case_settings[:_MAX_CASE_SETTINGS],
        num_hidden_settings=len(case_settings[_MAX_CASE_SETTINGS:]),
        case_rows=case_rows,
        differences=baseline_rows,
        baseline_label=None if comparison.baseline is None else settings[comparison.baseline].label,
        method=METHOD,
        pairing=describe_patients({row["case"] for row in case_rows}, comparison.patients),
        failures=[run for run in runs if run.status not in {FINISHED, PRUNED} | OPEN],
        pictures=pictures,
        num_left_out=max(0, sum(len(run.pictures) for run in runs) - num_pictures),
        open_statuses=OPEN | {PRUNED},
    )


def difference_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Differences of the settings to the baseline, the best first; `differences.csv` and the page have these rows."""
    return [
        {
            "name": comparison.settings[number].label,
            "setting": number,
            "colour": f"var(--s{number})",
            **comparison.differences[number]._asdict(),
        }
        for number in sorted(
            comparison.differences, key=lambda number: -comparison.differences[number].difference
        )
    ]


def _pictures(
    comparison: Comparison, places: dict[int, int], num_pictures: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Overlays of the best runs, the lowest Dice first, those of an unknown Dice last."""
    order = sorted(
        range(len(comparison.runs)), key=lambda index: places[comparison.setting_of[index].number]
    )
    chosen = [(index, picture) for index in order for picture in comparison.runs[index].pictures][
        :num_pictures
    ]
    chosen.sort(key=lambda one: min(one[1].dice.values(), default=2.0))
    return [
        {
            "id": f"picture-{number}",
            "uri": uri,
            "run": comparison.runs[index],
            "setting": comparison.setting_of[index],
            "case": picture.case,
            "dice": picture.dice,
            "alt": f"Run {comparison.runs[index].name} at step {picture.step}: slices of the validation case {picture.case} with "
            "the labels of the prediction, the reference as a line, and errors coloured",
        }
        for number, (index, picture) in enumerate(chosen)
        if (uri := data_uri(picture.path, say))
    ]


def _case_rows(
    settings: Sequence[Setting], pictures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Dice of each case and label in each setting with the link to a picture, the lowest mean first."""
    rows = []
    for case, label in dict.fromkeys(key for setting in settings for key in setting.cases):
        dices = [setting.cases.get((case, label)) for setting in settings]
        links = [
            next((f"#{one['id']}" for one in pictures if one["case"] == case and one["setting"] is setting and label in one["dice"]), "")
            for setting in settings
        ]  # fmt: skip
        mean = fmean(dice for dice in dices if dice is not None)
        rows.append(
            {
                "case": case,
                "label": label,
                "mean": mean,
                "cells": list(zip(dices, links, strict=True)),
            }
        )
    return sorted(rows, key=lambda row: row["mean"])


def shown_metrics(comparison: Comparison) -> list[Metric]:
    """Metrics that some run has; those without a better direction (steps, weights) only where they differ."""
    values = {
        metric.key: {metric.of(run) for run in comparison.runs} - {None} for metric in METRICS
    }
    return [metric for metric in METRICS if len(values[metric.key]) > (0 if metric.better else 1)]


def setting_figures(
    comparison: Comparison, metrics: Sequence[Metric]
) -> list[list[dict[str, Any]]]:
    """Cells of each metric over the settings, the best first."""
    settings = [comparison.settings[number] for number in comparison.ranked]
    is_complete = [one.is_complete for one in settings]
    return [
        _column(metric, [one.metrics.get(metric.key, ()) for one in settings], is_complete)
        for metric in metrics
    ]


def run_figures(comparison: Comparison, metrics: Sequence[Metric]) -> list[list[dict[str, Any]]]:
    """Cells of each metric over the runs in the order of the folders; only finished runs can be the best."""
    is_finished = [run.status == FINISHED for run in comparison.runs]
    return [
        _column(
            metric,
            [() if (value := metric.of(run)) is None else (value,) for run in comparison.runs],
            is_finished,
        )
        for metric in metrics
    ]


def write_mean(metric: Metric, values: Sequence[float]) -> str:
    """Format the mean of at least one value, with the standard deviation where the repeats differ."""
    text = metric.write(fmean(values))
    return (
        f"{text} ± {metric.write(stdev(values))}"
        if metric.better and len(set(values)) > 1
        else text
    )


def _column(
    metric: Metric, rows: Sequence[Sequence[float]], is_counted: Sequence[bool]
) -> list[dict[str, Any]]:
    """Cells of a metric: text, number to sort by ("" comes last), and the mark of the best counted row where they differ."""
    means = [fmean(values) if values else None for values in rows]
    candidates = {
        mean for mean, counts in zip(means, is_counted, strict=True) if counts and mean is not None
    }
    best = (
        max(candidates, key=lambda mean: mean * metric.better)
        if metric.better and len(candidates) > 1
        else None
    )
    return [
        {"text": MISSING, "order": "", "is_best": False}
        if mean is None
        else {
            "text": write_mean(metric, values),
            "order": repr(mean),
            "is_best": mean == best and counts,
        }
        for mean, values, counts in zip(means, rows, is_counted, strict=True)
    ]


def _best_run(runs: Sequence[Run]) -> Run:
    """The finished run with the highest validation Dice."""
    return max(
        (run for run in runs if run.status == FINISHED), key=lambda run: VAL_DICE.of(run) or 0.0
    )


def _best_trials(comparison: Comparison, study: Study) -> list[dict[str, Any]]:
    """The best trials of a search: run, objectives, searched keys."""
    objectives = [metric for metric in METRICS if metric.key in study["objectives"]]
    return [
        {
            "number": comparison.setting_of[index].number,
            "name": run.name,
            "figures": {
                m.key: MISSING if (value := m.of(run)) is None else m.write(value)
                for m in objectives
            },
            "drawn": {key: _four_digits(run.overrides.get(key, MISSING)) for key in study["space"]},
        }
        for index, run in enumerate(comparison.runs)
        if run.name in study["best"]
    ]


def _four_digits(text: str) -> str:
    """Shorten a number to four digits; any other text stays.

    Example:
        >>> _four_digits("0.0036053181174911424"), _four_digits("16"), _four_digits("amp")
        ('0.003605', '16', 'amp')
    """
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
