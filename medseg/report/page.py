"""Report page: one HTML file without server, network or further files."""

import base64
import io
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medseg import __version__
from medseg.report.charts import by_key, costs, curves, progress
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
    Study,
    write_duration,
)

_TEMPLATES = Path(__file__).parent / "page"
# A reader can distinguish so many hues; more settings get shades by rank.
_NUM_HUES = 8
_MAX_WIDTH_PX = 960


def render(
    comparison: Comparison, study: Study | None, title: str, folder: str, num_pictures: int, say: Callable[[str], None]
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
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    metrics = shown_metrics(comparison)
    settings, runs = comparison.settings, comparison.runs
    best = None if comparison.best is None else settings[comparison.best]
    places = {number: place for place, number in enumerate(comparison.ranked)}
    pictures = [
        (index, path)
        for index in sorted(range(len(runs)), key=lambda index: places[comparison.setting_of[index].number])
        for path in runs[index].pictures
    ]
    return templates.get_template("page.html").render(
        css=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "page.js").read_text(encoding="utf-8")),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        title=title,
        folder=folder,
        comparison=comparison,
        num_hues=_NUM_HUES,
        places=places,
        legend=[settings[number] for number in comparison.ranked],
        is_named_by_run=_NUM_HUES < len(settings) == len(runs),
        study=study,
        best_trials=_best_trials(comparison, study) if study else [],
        progress=progress(comparison, study) if study else [],
        statuses=sorted(Counter(run.status for run in runs).items(), key=lambda one: one[0] != FINISHED),
        total_s=sum(metric.of(run) or 0.0 for metric in METRICS if metric.key == "train_s" for run in runs),
        best=best,
        best_run=_best_run(best.runs) if best else None,
        best_metrics=[metric for metric in METRICS if best and metric.better and metric.key in best.metrics],
        missing=MISSING,
        write_mean=write_mean,
        write_duration=write_duration,
        setting_figures=setting_figures(comparison, metrics),
        run_texts=[[column.values[index] for column in comparison.columns] for index in range(len(runs))],
        run_figures=run_figures(comparison, metrics),
        metrics=metrics,
        curves=curves(comparison),
        costs=costs(comparison),
        by_key=by_key(comparison),
        failures=[run for run in runs if run.status not in {FINISHED, PRUNED} | OPEN],
        pictures=[
            {"uri": uri, "run": runs[index], "setting": comparison.setting_of[index], "step": path.stem.split("_")[1]}
            for index, path in pictures[:num_pictures]
            if (uri := _data_uri(path, say))
        ],
        num_left_out=max(0, len(pictures) - num_pictures),
        open_statuses=OPEN | {PRUNED},
    )


def shown_metrics(comparison: Comparison) -> list[Metric]:
    """Metrics that some run has; those without a better direction (steps, weights) only where they differ."""
    values = {metric.key: {metric.of(run) for run in comparison.runs} - {None} for metric in METRICS}
    return [metric for metric in METRICS if len(values[metric.key]) > (0 if metric.better else 1)]


def setting_figures(comparison: Comparison, metrics: Sequence[Metric]) -> list[list[dict[str, Any]]]:
    """Cells of each metric over the settings, the best first."""
    settings = [comparison.settings[number] for number in comparison.ranked]
    return [_column(metric, [one.metrics.get(metric.key, ()) for one in settings], [True] * len(settings)) for metric in metrics]


def run_figures(comparison: Comparison, metrics: Sequence[Metric]) -> list[list[dict[str, Any]]]:
    """Cells of each metric over the runs in the order of the folders; only finished runs can be the best."""
    is_finished = [run.status == FINISHED for run in comparison.runs]
    return [
        _column(metric, [() if (value := metric.of(run)) is None else (value,) for run in comparison.runs], is_finished)
        for metric in metrics
    ]


def write_mean(metric: Metric, values: Sequence[float]) -> str:
    """Format the mean of at least one value, with the standard deviation where the repeats differ."""
    text = metric.write(fmean(values))
    return f"{text} ± {metric.write(stdev(values))}" if metric.better and len(set(values)) > 1 else text


def _column(metric: Metric, rows: Sequence[Sequence[float]], is_counted: Sequence[bool]) -> list[dict[str, Any]]:
    """Cells of a metric: text, number to sort by ("" comes last), and the mark of the best counted row where they differ."""
    means = [fmean(values) if values else None for values in rows]
    candidates = {mean for mean, counts in zip(means, is_counted, strict=True) if counts and mean is not None}
    best = max(candidates, key=lambda mean: mean * metric.better) if metric.better and len(candidates) > 1 else None
    return [
        {"text": MISSING, "order": "", "is_best": False}
        if mean is None
        else {"text": write_mean(metric, values), "order": repr(mean), "is_best": mean == best and counts}
        for mean, values, counts in zip(means, rows, is_counted, strict=True)
    ]


def _best_run(runs: Sequence[Run]) -> Run:
    """The finished run with the highest validation Dice."""
    return max((run for run in runs if run.status == FINISHED), key=lambda run: VAL_DICE.of(run) or 0.0)


def _best_trials(comparison: Comparison, study: Study) -> list[dict[str, Any]]:
    """The best trials of a search: run, objectives, searched keys."""
    objectives = [metric for metric in METRICS if metric.key in study["objectives"]]
    return [
        {
            "number": comparison.setting_of[index].number,
            "name": run.name,
            "figures": {m.key: MISSING if (value := m.of(run)) is None else m.write(value) for m in objectives},
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


def _data_uri(path: Path, say: Callable[[str], None]) -> str:
    """A picture as a JPEG data URI, at most 960 pixels wide; "" and a sentence for a file that is no whole picture."""
    from PIL import Image

    try:
        with Image.open(path) as stored:
            image = stored.convert("RGB")
    except OSError as error:
        say(f"{path} is left out: {error}")
        return ""
    image.thumbnail((_MAX_WIDTH_PX, 10 * _MAX_WIDTH_PX))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82, subsampling=0, optimize=True)  # full colour: the outlines are one pixel wide
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
