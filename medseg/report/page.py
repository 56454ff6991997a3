"""The report as one HTML page that needs no server, no network and no other file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from medseg import __version__
from medseg.report.compare import MISSING, Comparison
from medseg.report.figures import by_key, costs, curves, progress
from medseg.report.images import data_uri
from medseg.report.rows import ranked, run_rows, setting_rows, shown_metrics, write_spread
from medseg.report.run import FINISHED, METRICS, OPEN, PRUNED, VAL_DICE, Run, Study, write_duration

_TEMPLATES = Path(__file__).parent / "page"
# So many settings can be told apart by hue; more are shaded from the first to the last by rank.
_NUM_HUES = 8


@dataclass(frozen=True)
class Picture:
    """An overlay that is drawn into the page."""

    uri: str
    width: int
    height: int
    run: Run
    setting: int
    alt: str


def render(
    comparison: Comparison, study: Study | None, title: str, folder: str, num_pictures: int, say: Callable[[str], None]
) -> str:
    """Draw the page.

    Args:
        comparison: Runs side by side.
        study: The search that made the runs, if one did.
        title: Heading.
        folder: Where the runs lie, as the reader is told.
        num_pictures: At most so many overlays, the best runs first.
        say: Takes a sentence about a picture that could not be read.

    Returns:
        HTML.
    """
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    metrics = shown_metrics(comparison)
    pictures, num_left_out = _pictures(comparison, num_pictures, say)
    return templates.get_template("page.html").render(
        css=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        js=Markup((_TEMPLATES / "page.js").read_text(encoding="utf-8")),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        title=title,
        folder=folder,
        comparison=comparison,
        colours=_colours(comparison),
        legend=[comparison.settings[number] for number in ranked(comparison)],
        is_named_by_run=len(comparison.settings) > _NUM_HUES and len(comparison.settings) == len(comparison.runs),
        study=study,
        best_trials=_best_trials(comparison, study) if study else [],
        progress=progress(comparison, study) if study else [],
        tiles=_tiles(comparison),
        best=_best(comparison),
        settings=setting_rows(comparison, metrics) if len(comparison.settings) < len(comparison.runs) else [],
        runs=run_rows(comparison, metrics),
        metrics=metrics,
        curves=curves(comparison),
        costs=costs(comparison),
        by_key=by_key(comparison),
        failures=[run for run in comparison.runs if run.is_failed],
        pictures=pictures,
        num_left_out=num_left_out,
        kind=_kind,
    )


def _kind(run: Run) -> str:
    """Class of a status, for its colour."""
    return "good" if run.status == FINISHED else "open" if run.status in OPEN | {PRUNED} else "bad"


def _colours(comparison: Comparison) -> list[str]:
    """CSS colour of each setting: hues while they can be told apart, then shades from the best to the worst."""
    count = len(comparison.settings)
    if count <= _NUM_HUES:
        return [f"var(--hue-{number})" for number in range(count)]
    colours = [""] * count
    for rank, number in enumerate(ranked(comparison)):
        share = 200 * rank / (count - 1)
        ends = ("best", "middle", share) if share <= 100 else ("middle", "worst", share - 100)
        colours[number] = f"color-mix(in oklab, var(--rank-{ends[0]}), var(--rank-{ends[1]}) {ends[2]:.0f}%)"
    return colours


def _tiles(comparison: Comparison) -> list[tuple[str, str]]:
    """The figures at the head of the page: (name, value)."""
    runs = comparison.runs
    counts = Counter(run.status for run in runs)
    tiles = [("runs", str(len(runs)))]
    tiles += [
        (status.replace("_", " "), str(count)) for status, count in sorted(counts.items(), key=lambda one: one[0] != FINISHED)
    ]
    total_s = sum(value for run in runs if isinstance(value := run.summary.get("train_s"), (int, float)))
    return [*tiles, ("training in all", write_duration(total_s))] if total_s else tiles


def _best(comparison: Comparison) -> Mapping[str, Any] | None:
    """What the head of the page says of the best setting."""
    if comparison.best is None:
        return None
    setting = comparison.settings[comparison.best]
    scored = [
        run for index in setting.runs if (run := comparison.runs[index]).status == FINISHED and VAL_DICE.of(run) is not None
    ]
    run = max(scored, key=lambda one: VAL_DICE.of(one) or 0.0)
    return {
        "setting": setting,
        "run": run,
        "values": [
            (column.key, value)
            for column, value in zip(comparison.setting_columns, setting.values, strict=True)
            if value != MISSING
        ],
        "figures": [
            (metric.title, write_spread(metric, setting.metrics[metric.key]))
            for metric in METRICS
            if metric.better and metric.key in setting.metrics
        ],
        "count": setting.metrics[VAL_DICE.key].count,
        "checkpoint": run.summary.get("checkpoint", ""),
    }


def _best_trials(comparison: Comparison, study: Study) -> list[dict[str, Any]]:
    """The best trials of a search: run, what it was judged by, what it was drawn as."""
    metrics = {metric.key: metric for metric in METRICS}
    rows = []
    for index, run in enumerate(comparison.runs):
        if run.name in study.best:
            found = {key: metrics[key].of(run) for key in study.objectives}
            figures = {key: MISSING if value is None else metrics[key].write(value) for key, value in found.items()}
            drawn = {key: _shorten(run.overrides.get(key, MISSING)) for key in study.space}
            rows.append({"number": comparison.setting_of[index], "name": run.name, "figures": figures, "drawn": drawn})
    return rows


def _shorten(text: str) -> str:
    """A number with four digits; any other text as it is.

    Example:
        >>> _shorten("0.0036053181174911424"), _shorten("16"), _shorten("amp")
        ('0.003605', '16', 'amp')
    """
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def _pictures(comparison: Comparison, limit: int, say: Callable[[str], None]) -> tuple[list[Picture], int]:
    """Overlays of the best runs first; and how many more there are."""
    ranks = {number: rank for rank, number in enumerate(ranked(comparison))}
    order = sorted(range(len(comparison.runs)), key=lambda index: (ranks[comparison.setting_of[index]], index))
    wanted = [(index, path) for index in order for path in comparison.runs[index].pictures]
    pictures = []
    for index, path in wanted[:limit]:
        run = comparison.runs[index]
        try:
            uri, width, height = data_uri(path)
        except OSError as error:
            say(f"{path} is left out: {error}")
            continue
        step = path.stem.split("_")[1].lstrip("0") or "0"
        alt = f"Run {run.name} at step {step}: slices of a validation case with the prediction filled and the reference as a line"
        pictures.append(Picture(uri, width, height, run, comparison.setting_of[index], alt))
    return pictures, max(0, len(wanted) - limit)
