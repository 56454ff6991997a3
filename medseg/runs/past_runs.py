"""Results in run folders: reader of runs and searches, and the report over them."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from medseg.console import say
from medseg.errors import require
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import read_csv, write_csv
from medseg.report.compare import (
    FINISHED,
    LARGEST,
    METRICS,
    CaseScore,
    Comparison,
    Picture,
    Run,
    Study,
    compare,
    csv_rows,
)
from medseg.report.differences import FORMATS, Difference
from medseg.report.runs_page import difference_rows, render
from medseg.runs.folder import CONFIG_FILE, SUMMARY_FILE, read_config, read_file, read_record
from medseg.runs.signature import flat
from medseg.runs.sweeps import JOB_FILE

HISTORY_FILE = "history.csv"
VALIDATION_FILE = "validation.csv"
STUDY_FILE = "study.json"
MAX_KEYS = 1000
# Keys that name places, or the way a run was started.
HIDDEN_KEYS = frozenset(
    {
        "name",
        "resume",
        "retry_failed",
        "run_dir",
        "data.cache",
        "data.phantoms.folder",
        "logger.save_dir",
    }
)


def write_report(
    folder: Path, output: Path, num_pictures: int, baseline: str | None = None
) -> Comparison:
    """Write `report.html` and `report.csv` over all runs of a folder, and `differences.csv` where there is a baseline.

    Args:
        folder: Absolute path of a folder with runs at or below it.
        output: Folder to write to.
        num_pictures: Largest number of overlays in the page.
        baseline: Name of the run that the others are compared with, as in the column `run` of
            `report.csv`.

    Returns:
        The runs side by side.

    Raises:
        UserError: If there is no run in the folder, no baseline of this name or without scores of
            cases, or the output cannot be written.
    """
    runs = [read_run(run_dir, folder) for run_dir in find_runs(folder)]
    require(
        bool(runs),
        f"runs={folder}: no run lies below it; a run is a folder with {CONFIG_FILE} or {JOB_FILE}",
    )
    check_writable(output)
    if baseline is not None:
        names = [run.name for run in runs if run.status == FINISHED and run.cases]
        require(
            baseline in names,
            f"baseline={baseline}: expected a finished run with {VALIDATION_FILE} ({', '.join(names[:5]) or 'there is none'}); "
            "give its name as in the column run of report.csv",
        )
    comparison = compare(runs, baseline)
    page = render(comparison, read_study(folder), folder.name, str(folder), num_pictures, say)
    write_csv(output / "report.csv", csv_rows(comparison))
    if baseline is not None:
        rows = [
            {key: value for key, value in row.items() if key != "colour"}
            for row in difference_rows(comparison)
        ]
        write_csv(
            output / "differences.csv", rows, ("name", "setting", *Difference._fields), FORMATS
        )
    replace_text(output / "report.html", page)
    return comparison


def find_runs(folder: Path) -> list[Path]:
    """Run folders at or below a folder in natural order (`2` before `10`), without hidden folders and those inside a run."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if CONFIG_FILE in files or JOB_FILE in files:
            found.append(Path(place))
            folders.clear()
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that compares digits as numbers."""
    return [
        (int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))
    ]


def read_run(run_dir: Path, folder: Path) -> Run:
    """Read a run folder; a missing or damaged file leaves its part empty.

    Args:
        run_dir: The run folder.
        folder: Folder that its name is relative to.
    """
    job, summary = read_record(run_dir / JOB_FILE, dict), read_record(run_dir / SUMMARY_FILE, dict)
    config = read_file(run_dir / CONFIG_FILE, read_settings)
    given = job.get("overrides")
    # Quotes that Hydra's grammar needs are no part of a value.
    overrides = {
        key: re.sub(r"^(['\"])(.*)\1$", r"\2", str(value))
        for key, value in (
            given if isinstance(given, dict) and len(given) <= MAX_KEYS else {}
        ).items()
    }
    # A refused job has its overrides only.
    settings = (
        config if config is not None else {key: _value(text) for key, text in overrides.items()}
    )
    scores = read_scores(run_dir / VALIDATION_FILE)
    by_step = [
        [score for score in scores if score.step == step]
        for step in {score.step for score in scores}
    ]
    pictures = sorted(
        (int(match[1]), path)
        for path in (run_dir / "pictures").glob("step_*.png")
        if (match := re.fullmatch(r"step_(\d{1,18})_[^_]*", path.stem))
    )
    return Run(
        name=str(run_dir.relative_to(folder)),
        folder=run_dir,
        status=str(job.get("status") or summary.get("status") or "unfinished"),
        message=str(job.get("message") or summary.get("message") or ""),
        settings={key: value for key, value in settings.items() if key not in HIDDEN_KEYS},
        has_config=config is not None,
        overrides={key: value for key, value in overrides.items() if key not in HIDDEN_KEYS},
        summary=summary,
        history=tuple(read_history(run_dir / HISTORY_FILE)),
        pictures=tuple(
            _picture(path, step, scores) for step, path in pictures if step == pictures[-1][0]
        ),
        cases=tuple(max(by_step, key=lambda one: fmean(score.dice for score in one), default=())),
    )


def _picture(path: Path, step: int, scores: Sequence[CaseScore]) -> Picture:
    """Find the case of an overlay, and its Dice at that step."""
    shown = [score for score in scores if (score.step, score.picture) == (step, path.name)]
    return Picture(
        path, step, shown[0].case if shown else "", {score.label: score.dice for score in shown}
    )


def read_scores(path: Path) -> list[CaseScore]:
    """Read the Dice of validation cases; a damaged line, or one without a score from 0 to 1, is left out."""
    scores = []
    for row in read_file(path, read_csv) or []:
        with suppress(KeyError, TypeError, ValueError):
            step, dice, patient = int(row["step"]), float(row["dice"]), row.get("patient") or ""
            scores.append(CaseScore(step, row["case"], row["label"], dice, row["picture"], patient))
    return [score for score in scores if 0 <= score.dice <= 1 and score.case and score.label]


def read_settings(path: Path) -> dict[str, Any]:
    """Read a `config.yaml` as a flat mapping.

    Raises:
        UserError: If it is damaged, or has more keys than any configuration, whose comparison would
            take hours.
    """
    settings = flat(read_config(path.parent))
    require(
        len(settings) <= MAX_KEYS, f"expected at most {MAX_KEYS} keys, but found {len(settings)}"
    )
    return settings


def read_study(folder: Path) -> Study | None:
    """Read the result of a search in a folder; None where there is none, or none of known objectives."""
    saved = read_record(folder / STUDY_FILE, dict)
    objectives, space, importances, best = (
        saved.get(key) for key in ("objectives", "space", "importances", "best")
    )
    if not (isinstance(objectives, dict) and isinstance(space, dict) and objectives):
        return None
    if not objectives.keys() <= {metric.key for metric in METRICS}:
        return None
    return {
        "name": folder.name,
        "num_trials": 0,
        **saved,
        "importances": importances if isinstance(importances, dict) else {},
        "best": list(map(str, best)) if isinstance(best, list) else [],
    }


def read_history(path: Path) -> list[dict[str, float]]:
    """Read the lines of a `history.csv` without empty cells; a line that is being written, or has no finite number, is left out."""
    lines = []
    for line in read_file(path, read_csv) or []:
        with suppress(TypeError, ValueError):
            lines.append({key: float(value) for key, value in line.items() if key and value})
    return [line for line in lines if all(abs(value) <= LARGEST for value in line.values())]


def _value(text: str) -> Any:
    """The value of an override as the configuration would have it: numbers, booleans, null and lists of them."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
