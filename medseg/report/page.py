"""The report as one HTML page without server, network or further files."""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medseg import __version__
from medseg.report.charts import by_key, costs, curves, progress
from medseg.report.compare import MISSING, Comparison
from medseg.report.rows import run_rows, setting_rows, shown_metrics, write_mean
from medseg.report.run import FINISHED, METRICS, OPEN, PRUNED, VAL_DICE, Run, Study, write_duration

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
    places = {number: place for place, number in enumerate(comparison.ranked)}
    order = sorted(range(len(runs)), key=lambda index: places[comparison.setting_of[index]])
    pictures = [(index, path) for index in order for path in runs[index].pictures]
    return templates.get_template("page.html").render(
        css=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "page.js").read_text(encoding="utf-8")),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        title=title,
        folder=folder,
        comparison=comparison,
        colours=_colours(comparison),
        legend=[settings[number] for number in comparison.ranked],
        is_named_by_run=_NUM_HUES < len(settings) == len(runs),
        study=study,
        best_trials=_best_trials(comparison, study) if study else [],
        progress=progress(comparison, study) if study else [],
        tiles=_tiles(runs),
        best=_best(comparison),
        settings=setting_rows(comparison, metrics) if len(settings) < len(runs) else [],
        runs=run_rows(comparison, metrics),
        metrics=metrics,
        curves=curves(comparison),
        costs=costs(comparison),
        by_key=by_key(comparison),
        failures=[run for run in runs if run.is_failed],
        pictures=[
            {"uri": uri, "run": runs[index], "setting": settings[comparison.setting_of[index]], "step": path.stem.split("_")[1]}
            for index, path in pictures[:num_pictures]
            if (uri := _data_uri(path, say))
        ],
        num_left_out=max(0, len(pictures) - num_pictures),
        open_statuses=OPEN | {PRUNED},
    )


def _colours(comparison: Comparison) -> list[str]:
    """CSS colour of each setting: hues where few enough, else shades from the best to the worst."""
    count = len(comparison.settings)
    if count <= _NUM_HUES:
        return [f"var(--hue-{number})" for number in range(count)]
    colours = [""] * count
    for place, number in enumerate(comparison.ranked):
        share = 200 * place / (count - 1)
        start, end, percent = ("best", "middle", share) if share <= 100 else ("middle", "worst", share - 100)
        colours[number] = f"color-mix(in oklab, var(--rank-{start}), var(--rank-{end}) {percent:.0f}%)"
    return colours


def _tiles(runs: tuple[Run, ...]) -> list[tuple[str, str]]:
    """Figures at the head of the page, (name, value): runs, runs by status, time."""
    counts = sorted(Counter(run.status for run in runs).items(), key=lambda one: one[0] != FINISHED)
    tiles = [("runs", str(len(runs))), *((status.replace("_", " "), str(count)) for status, count in counts)]
    total_s = sum(value for run in runs if isinstance(value := run.summary.get("train_s"), int | float))
    return [*tiles, ("training in all", write_duration(total_s))] if total_s else tiles


def _best(comparison: Comparison) -> Mapping[str, Any] | None:
    """The best setting, its best run and their figures, for the head of the page."""
    if comparison.best is None:
        return None
    setting = comparison.settings[comparison.best]
    finished = [comparison.runs[index] for index in setting.runs if comparison.runs[index].status == FINISHED]
    run = max(finished, key=lambda one: VAL_DICE.of(one) or 0.0)
    values = zip((column.key for column in comparison.setting_columns), setting.values, strict=True)
    return {
        "setting": setting,
        "run": run,
        "values": [(key, value) for key, value in values if value != MISSING],
        "figures": [
            (metric.title, write_mean(metric, setting.metrics[metric.key]))
            for metric in METRICS
            if metric.better and metric.key in setting.metrics
        ],
        "count": len(setting.metrics[VAL_DICE.key]),
        "checkpoint": run.summary.get("checkpoint", ""),
    }


def _best_trials(comparison: Comparison, study: Study) -> list[dict[str, Any]]:
    """The best trials of a search: run, objectives, searched keys."""
    objectives = [metric for metric in METRICS if metric.key in study["objectives"]]
    return [
        {
            "number": comparison.setting_of[index],
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
