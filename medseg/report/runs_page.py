"""Report page of runs: best setting, cases, differences to a baseline, tables and charts."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from medseg.report.charts import Chart, by_key, costs, curves, differences, progress
from medseg.report.compare import (
    FINISHED,
    METRICS,
    MISSING,
    OPEN,
    PRUNED,
    TRAIN_TIME,
    VAL_DICE,
    Comparison,
    Metric,
    Picture,
    Run,
    Setting,
    Study,
    format_duration,
)
from medseg.report.differences import METHOD, describe_patients
from medseg.report.html import data_uri, render_page

# Number of hues that a reader can distinguish; with more settings, each gets a shade by its rank.
_NUM_HUES = 8
# Largest number of settings with a column in the table of cases.
_MAX_CASE_SETTINGS = 8


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
        num_pictures: Largest number of overlays, those of the best runs first.
        say: Receives a sentence about each picture that cannot be read.

    Returns:
        HTML.
    """
    metrics = shown_metrics(comparison)
    settings = comparison.settings
    runs = comparison.runs
    # Number of a setting to its rank, from 0.
    ranks = {number: rank for rank, number in enumerate(comparison.ranked)}
    ranked_settings = [settings[number] for number in comparison.ranked]
    pictures = _pictures(comparison, ranks, num_pictures, say)
    num_all_pictures = sum(len(run.pictures) for run in runs)
    baseline_rows = difference_rows(comparison)
    charts: dict[str, list[Chart]] = {
        "curves": curves(comparison),
        "costs": costs(comparison),
        "by_key": by_key(comparison),
        "progress": [],
        "differences": differences(baseline_rows, "Difference of the Dice"),
    }
    # Statuses of runs that have not failed, but have no final result.
    open_statuses = OPEN | {PRUNED}
    failures = []
    for run in runs:
        if run.status != FINISHED and run.status not in open_statuses:
            failures.append(run)
    best_trials: list[dict[str, Any]] = []
    if study:
        charts["progress"] = progress(comparison, study)
        best_trials = _best_trials(comparison, study)
    return render_page(
        "runs.html",
        kind="report",
        title=title,
        tiles=_tiles(runs),
        charts=charts,
        folder=folder,
        comparison=comparison,
        num_hues=_NUM_HUES,
        ranks=ranks,
        legend=ranked_settings,
        # Labels of many settings are long; where each setting has one run, the name of the run
        # takes their place.
        is_named_by_run=len(settings) > _NUM_HUES and len(settings) == len(runs),
        study=study,
        best_trials=best_trials,
        has_results=any(setting.metrics.get(VAL_DICE.key) for setting in settings),
        missing=MISSING,
        format_mean=format_mean,
        setting_figures=setting_figures(comparison, metrics),
        run_texts=_run_texts(comparison),
        run_figures=run_figures(comparison, metrics),
        run_links=[_link_to(pictures, run=run) for run in runs],
        metrics=metrics,
        differences=baseline_rows,
        method=METHOD,
        failures=failures,
        pictures=pictures,
        num_left_out=max(0, num_all_pictures - num_pictures),
        open_statuses=open_statuses,
        **_best_values(comparison),
        **_case_values(comparison, ranked_settings, pictures),
    )


def _best_values(comparison: Comparison) -> dict[str, Any]:
    """Make the values of the template about the best setting and the setting of the baseline."""
    values: dict[str, Any] = {
        "best": None,
        "best_run": None,
        "best_metrics": [],
        "baseline_label": None,
    }
    if comparison.best is not None:
        best = comparison.settings[comparison.best]
        values["best"] = best
        values["best_run"] = _best_run(best.runs)
        for metric in METRICS:
            if metric.better and metric.key in best.metrics:
                values["best_metrics"].append(metric)
    if comparison.baseline is not None:
        values["baseline_label"] = comparison.settings[comparison.baseline].label
    return values


def _case_values(
    comparison: Comparison, settings: Sequence[Setting], pictures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Make the values of the template about the validation cases.

    Args:
        comparison: All runs.
        settings: All settings, the best first.
        pictures: Overlays of the page, from `_pictures`.
    """
    settings_with_cases = [setting for setting in settings if setting.cases]
    case_settings = settings_with_cases[:_MAX_CASE_SETTINGS]
    case_rows = _case_rows(case_settings, pictures)
    cases = {row["case"] for row in case_rows}
    return {
        "case_settings": case_settings,
        "num_hidden_settings": len(settings_with_cases) - len(case_settings),
        "case_rows": case_rows,
        "pairing": describe_patients(cases, comparison.patients),
    }


def _run_texts(comparison: Comparison) -> list[list[str]]:
    """List the texts of each run in the columns of the keys that differ."""
    texts = []
    for index in range(len(comparison.runs)):
        texts.append([column.values[index] for column in comparison.columns])
    return texts


def _tiles(runs: Sequence[Run]) -> list[tuple[str, Any]]:
    """Make the pairs of a name and a value at the top of the page.

    They are the number of runs, in all and by status, and the time of training.
    """
    tiles: list[tuple[str, Any]] = [("runs", len(runs))]
    counts = Counter(run.status for run in runs)
    # Finished runs first, as False sorts before True; the others stay in their order.
    for status in sorted(counts, key=lambda status: status != FINISHED):
        tiles.append((status.replace("_", " "), counts[status]))
    total_s = sum(TRAIN_TIME.read(run) or 0.0 for run in runs)
    if total_s:
        tiles.append(("training in all", format_duration(total_s)))
    return tiles


def _link_to(
    pictures: Sequence[dict[str, Any]],
    *,
    run: Run | None = None,
    setting: Setting | None = None,
    case: str = "",
    label: str = "",
) -> str:
    """Link to the first picture of a run, or of a case and a label in a setting; "" without one.

    Args:
        pictures: From `_pictures`.
        run: Run; None to search by the following arguments.
        setting: Setting of the run of the picture.
        case: Case that the picture shows.
        label: Label with a Dice in the picture.
    """
    for picture in pictures:
        is_of_run = run is not None and picture["run"] is run
        is_of_setting = setting is not None and picture["setting"] is setting
        shows_case = picture["case"] == case and label in picture["dice"]
        if is_of_run or (is_of_setting and shows_case):
            return f"#{picture['id']}"
    return ""


def difference_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """List the differences of the settings to the baseline, the best first.

    `differences.csv` and the page have these rows.
    """
    rows = []
    for number, difference in comparison.differences.items():
        row = {
            "name": comparison.settings[number].label,
            "setting": number,
            "colour": f"var(--s{number})",
            **difference._asdict(),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["difference"])


def _pictures(
    comparison: Comparison, ranks: dict[int, int], num_pictures: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Choose the overlays of the best settings, and sort them with the lowest Dice first.

    Args:
        comparison: All runs.
        ranks: Number of a setting to its rank, from 0.
        num_pictures: Largest number of overlays.
        say: Receives a sentence about each picture that cannot be read.

    Returns:
        Values of the template for each overlay; those of an unknown Dice are last.
    """
    # Indices of the runs, those of the best setting first: their overlays are chosen first.
    run_ranks = [ranks[setting.number] for setting in comparison.setting_of]
    indices = sorted(range(len(comparison.runs)), key=lambda index: run_ranks[index])
    overlays: list[tuple[int, Picture]] = []
    for index in indices:
        for picture in comparison.runs[index].pictures:
            overlays.append((index, picture))
    overlays = overlays[:num_pictures]
    # Sorted by the Dice of their worst label. An unknown Dice counts as 2, above any other, so that
    # these overlays come last.
    overlays.sort(key=lambda overlay: min(overlay[1].dice.values(), default=2.0))
    pictures = []
    for number, (index, picture) in enumerate(overlays):
        uri = data_uri(picture.path, say)
        if not uri:
            continue
        run = comparison.runs[index]
        pictures.append(
            {
                "id": f"picture-{number}",
                "uri": uri,
                "run": run,
                "setting": comparison.setting_of[index],
                "case": picture.case,
                "dice": picture.dice,
                "alt": (
                    f"Run {run.name} at step {picture.step}: slices of the validation case "
                    f"{picture.case} with the labels of the prediction, "
                    "the reference as a line, and errors coloured"
                ),
            }
        )
    return pictures


def _case_rows(
    settings: Sequence[Setting], pictures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make the rows of the table of cases, the lowest mean Dice first.

    Returns:
        For each case and label `mean`, over the settings, and `cells`: for each setting the Dice
        (None where it did not validate the case), and a link to the picture ("" without one).
    """
    rows = []
    # The cases and labels of any setting, each once and in their order.
    pairs: dict[tuple[str, str], None] = {}
    for setting in settings:
        pairs |= dict.fromkeys(setting.cases)
    for case, label in pairs:
        cells = []
        for setting in settings:
            link = _link_to(pictures, setting=setting, case=case, label=label)
            cells.append((setting.cases.get((case, label)), link))
        mean_dice = fmean(dice for dice, _ in cells if dice is not None)
        rows.append({"case": case, "label": label, "mean": mean_dice, "cells": cells})
    return sorted(rows, key=lambda row: row["mean"])


def shown_metrics(comparison: Comparison) -> list[Metric]:
    """Select the metrics that some run has.

    Metrics without a direction (steps, weights), of which neither more nor less is better, are
    shown only where they differ.
    """
    metrics = []
    for metric in METRICS:
        # The known values, each once.
        values = {metric.read(run) for run in comparison.runs} - {None}
        has_direction = metric.better != 0
        if len(values) > 1 or (values and has_direction):
            metrics.append(metric)
    return metrics


def setting_figures(
    comparison: Comparison, metrics: Sequence[Metric]
) -> list[list[dict[str, Any]]]:
    """Make the cells of each metric for the settings, the best first."""
    settings = [comparison.settings[number] for number in comparison.ranked]
    is_complete = [setting.is_complete for setting in settings]
    columns = []
    for metric in metrics:
        rows = [setting.metrics.get(metric.key, ()) for setting in settings]
        columns.append(_cells(metric, rows, is_complete))
    return columns


def run_figures(comparison: Comparison, metrics: Sequence[Metric]) -> list[list[dict[str, Any]]]:
    """Make the cells of each metric for the runs, in the order of the folders.

    Only finished runs can be the best.
    """
    is_finished = [run.status == FINISHED for run in comparison.runs]
    columns = []
    for metric in metrics:
        values = [metric.read(run) for run in comparison.runs]
        rows = [() if value is None else (value,) for value in values]
        columns.append(_cells(metric, rows, is_finished))
    return columns


def format_mean(metric: Metric, values: Sequence[float]) -> str:
    """Format the mean of at least one value, with the standard deviation where values differ.

    A metric without a direction (`better` is 0) gets the mean only.
    """
    text = metric.format(fmean(values))
    if metric.better and len(set(values)) > 1:
        text += f" ± {metric.format(stdev(values))}"
    return text


def _cells(
    metric: Metric, rows: Sequence[Sequence[float]], is_eligible: Sequence[bool]
) -> list[dict[str, Any]]:
    """Make the cells of a metric in the rows of a table, and mark the best.

    Args:
        metric: Formats the values, and says which are better.
        rows: Values of each row: one of a run, several of the repeats of a setting, or none.
        is_eligible: Whether each row may be marked as the best.

    Returns:
        For each row `text`, `order` (number to sort by, as text; "" comes last) and `is_best`.
    """
    means = [fmean(values) if values else None for values in rows]
    eligible_means = set()
    for mean, can_be_best in zip(means, is_eligible, strict=True):
        if can_be_best and mean is not None:
            eligible_means.add(mean)
    best_mean = None
    # Where all means are equal, none is marked.
    if metric.better and len(eligible_means) > 1:
        best_mean = max(eligible_means, key=lambda mean: mean * metric.better)
    cells = []
    for mean, values, can_be_best in zip(means, rows, is_eligible, strict=True):
        if mean is None:
            cells.append({"text": MISSING, "order": "", "is_best": False})
            continue
        cells.append(
            {
                "text": format_mean(metric, values),
                "order": repr(mean),
                "is_best": mean == best_mean and can_be_best,
            }
        )
    return cells


def _best_run(runs: Sequence[Run]) -> Run:
    """Find the finished run with the highest validation Dice."""
    finished = [run for run in runs if run.status == FINISHED]
    return max(finished, key=lambda run: VAL_DICE.read(run) or 0.0)


def _best_trials(comparison: Comparison, study: Study) -> list[dict[str, Any]]:
    """List the best trials of a search.

    Returns:
        For each trial `number` of its setting, `name` of its run, `figures` (metric to its text)
        and `drawn` (searched key to its text).
    """
    # In the order of the metrics, whatever the order of the objectives.
    objectives = [metric for metric in METRICS if metric.key in study["objectives"]]
    trials = []
    for setting, run in zip(comparison.setting_of, comparison.runs, strict=True):
        if run.name not in study["best"]:
            continue
        figures = {}
        for metric in objectives:
            value = metric.read(run)
            figures[metric.key] = MISSING if value is None else metric.format(value)
        drawn = {key: _four_digits(run.overrides.get(key, MISSING)) for key in study["space"]}
        trials.append(
            {"number": setting.number, "name": run.name, "figures": figures, "drawn": drawn}
        )
    return trials


def _four_digits(text: str) -> str:
    """Shorten a number with decimals to four digits; any other text stays.

    Example:
        >>> _four_digits("0.0036053181174911424"), _four_digits("-12345"), _four_digits("amp")
        ('0.003605', '-12345', 'amp')
    """
    if text.removeprefix("-").isdecimal():
        return text
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text
