"""Results in run folders: reader of runs and searches, and the report over them."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from medseg.console import say
from medseg.errors import UserError
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
from medseg.runs.sweeps import JOB_FILE, latest_end

T = TypeVar("T")

# Files of a run folder: losses of steps, and scores of validation cases.
HISTORY_FILE = "history.csv"
VALIDATION_FILE = "validation.csv"
# File of a search with its result.
STUDY_FILE = "study.json"
# A configuration has some 200 keys; more are a damaged file.
MAX_KEYS = 1000
# Keys that name places, or the way a run was started: they are no settings to compare.
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
    """Write `report.html` and `report.csv` over all runs of a folder.

    Where there is a baseline, `differences.csv` compares the other runs with it.

    Args:
        folder: Absolute path of a folder with runs at or below it.
        output: Folder of the page and the tables; made if needed.
        num_pictures: Largest number of overlays in the page.
        baseline: Name of the run that the others are compared with, as in the column `run` of
            `report.csv`.

    Returns:
        The runs side by side.

    Raises:
        UserError: If the folder has no run, the baseline is no finished run with scores of cases,
            or the output cannot be written.
    """
    runs = [read_run(run_dir, folder) for run_dir in find_runs(folder)]
    if not runs:
        raise UserError(
            f"runs={folder}: no run lies below it; "
            f"a run is a folder with {CONFIG_FILE} or {JOB_FILE}"
        )
    check_writable(output)
    if baseline is not None:
        _check_baseline(baseline, runs)
    comparison = compare(runs, baseline)
    page = render(
        comparison,
        read_study(folder),
        title=folder.name,
        folder=str(folder),
        num_pictures=num_pictures,
        say=say,
    )
    write_csv(output / "report.csv", csv_rows(comparison))
    if baseline is not None:
        rows = difference_rows(comparison)
        for row in rows:
            row.pop("colour", None)  # only the page uses it
        columns = ("name", "setting", *Difference._fields)
        write_csv(output / "differences.csv", rows, columns, FORMATS)
    replace_text(output / "report.html", page)
    return comparison


def _check_baseline(baseline: str, runs: Sequence[Run]) -> None:
    """Refuse a baseline that is no finished run with scores of cases."""
    names = [run.name for run in runs if run.status == FINISHED and run.cases]
    if baseline not in names:
        examples = ", ".join(names[:5]) or "there is none"
        raise UserError(
            f"baseline={baseline}: expected a finished run with {VALIDATION_FILE} ({examples}); "
            "give its name as in the column run of report.csv"
        )


def find_runs(folder: Path) -> list[Path]:
    """List the run folders at or below a folder in natural order (`2` before `10`).

    Hidden folders and those inside a run are left out.
    """
    run_dirs = []
    for place, subfolders, files in os.walk(folder):
        # Changed in place: `os.walk` goes into the folders that are left in its list.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        if CONFIG_FILE in files or JOB_FILE in files:
            run_dirs.append(Path(place))
            # A run holds no other runs, but many files.
            subfolders.clear()
    return sorted(run_dirs, key=_natural_sort_key)


def _natural_sort_key(path: Path) -> list[tuple[int, str]]:
    """Sort key that compares digits as numbers."""
    key = []
    # The group keeps the digits in the result, so texts and numbers take turns: all paths have a
    # number at the same positions of the key. The other element of each pair makes the types equal.
    for part in re.split(r"(\d+)", str(path)):
        # Not `isdigit`, which is true for `²`, of which `int` makes no number.
        if part.isdecimal():
            key.append((int(part), ""))
        else:
            key.append((0, part))
    return key


def read_run(run_dir: Path, folder: Path) -> Run:
    """Read a run folder; the part of a missing or damaged file is empty.

    Args:
        run_dir: The run folder.
        folder: Folder at or above it; the name of the run is the path from there.
    """
    job = read_record(run_dir / JOB_FILE, dict)
    summary = read_record(run_dir / SUMMARY_FILE, dict)
    # Through `read_file`, which returns None for a missing or damaged file.
    config = read_file(run_dir / CONFIG_FILE, lambda _: read_settings(run_dir))
    overrides = _overrides_of(job)
    settings = config
    if settings is None:  # a job that was refused has no configuration
        settings = {key: _parse_override(text) for key, text in overrides.items()}
    scores = read_scores(run_dir / VALIDATION_FILE)
    history = read_history(run_dir / HISTORY_FILE)
    recorded_status = str(job.get("status") or "")
    status, message = latest_end(recorded_status, str(job.get("message") or ""), summary)
    return Run(
        name=str(run_dir.relative_to(folder)),
        folder=run_dir,
        status=status or "unfinished",
        message=message,
        settings=_without_hidden_keys(settings),
        has_config=config is not None,
        overrides=_without_hidden_keys(overrides),
        summary=summary,
        history=tuple(history),
        pictures=tuple(_last_pictures(run_dir / "pictures", scores)),
        cases=tuple(_best_step(scores, history)),
    )


def _overrides_of(job: Mapping[str, Any]) -> dict[str, str]:
    """Read the arguments of a job from its record, by key; empty where they are damaged."""
    overrides = job.get("overrides")
    if not isinstance(overrides, dict) or len(overrides) > MAX_KEYS:
        return {}
    values = {}
    for key, value in overrides.items():
        # Without the quotes around a value, which Hydra's grammar needs.
        values[key] = re.sub(r"^(['\"])(.*)\1$", r"\2", str(value))
    return values


def _without_hidden_keys(values: Mapping[str, T]) -> dict[str, T]:
    """Leave out the keys that are no settings of a run."""
    return {key: value for key, value in values.items() if key not in HIDDEN_KEYS}


def _best_step(
    scores: Sequence[CaseScore], history: Sequence[Mapping[str, float]]
) -> list[CaseScore]:
    """Select the scores of the step with the highest mean Dice; empty without scores.

    Among several such steps the first one is selected: `best.ckpt` has its weights. Helper labels,
    which have no scores here, count in the mean Dice of the history.
    """
    scores_by_step: dict[int, list[CaseScore]] = defaultdict(list)
    for score in scores:
        scores_by_step[score.step].append(score)
    dice_of_step = {}
    for line in history:
        if "step" in line and "val_dice" in line:
            dice_of_step[int(line["step"])] = line["val_dice"]
    # A damaged history may lack a step: then the means of the scores are compared alone.
    is_complete = scores_by_step.keys() <= dice_of_step.keys()

    def dices(step_scores: Sequence[CaseScore]) -> tuple[float, float]:
        """Mean Dice of the history, which is rounded, and that of the scores."""
        mean_dice = _mean_dice(step_scores)
        if is_complete:
            return dice_of_step[step_scores[0].step], mean_dice
        return mean_dice, mean_dice

    # The file has its steps in ascending order, and `max` takes the first of equal values.
    return max(scores_by_step.values(), key=dices, default=[])


def _mean_dice(scores: Sequence[CaseScore]) -> float:
    """Mean Dice of at least one score."""
    return fmean(score.dice for score in scores)


def _last_pictures(folder: Path, scores: Sequence[CaseScore]) -> list[Picture]:
    """List the overlays of the last step that has overlays."""
    paths_by_step: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("step_*.png")):
        # `step_000200_0.png`: the step and the number of the case. More than 18 digits are no step.
        match = re.fullmatch(r"step_(\d{1,18})_[^_]*", path.stem)
        if match is not None:
            paths_by_step[int(match[1])].append(path)
    if not paths_by_step:
        return []
    last_step = max(paths_by_step)
    return [_picture(path, last_step, scores) for path in paths_by_step[last_step]]


def _picture(path: Path, step: int, scores: Sequence[CaseScore]) -> Picture:
    """Find the case of an overlay, and its Dice at that step; empty where no score names it."""
    case = ""
    dice_by_label = {}
    for score in scores:
        if score.step == step and score.picture == path.name:
            # An overlay shows one case, which has a score for each label.
            case = case or score.case
            dice_by_label[score.label] = score.dice
    return Picture(path, step, case, dice_by_label)


def read_scores(path: Path) -> list[CaseScore]:
    """Read the Dice of validation cases from a `validation.csv`.

    A damaged line, or one without a score from 0 to 1, is left out.
    """
    scores = []
    for row in read_file(path, read_csv) or []:
        with suppress(KeyError, TypeError, ValueError):
            score = CaseScore(
                step=int(row["step"]),
                case=row["case"],
                label=row["label"],
                dice=float(row["dice"]),
                picture=row["picture"],
                patient=row.get("patient") or "",  # absent in older runs
            )
            if 0 <= score.dice <= 1 and score.case and score.label:
                scores.append(score)
    return scores


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Read the configuration of a run as a flat mapping with dotted keys.

    Raises:
        UserError: If the configuration is missing or damaged, or has more than `MAX_KEYS` keys:
            their comparison would take hours.
    """
    settings = flat(read_config(run_dir))
    if len(settings) > MAX_KEYS:
        raise UserError(f"expected at most {MAX_KEYS} keys, but found {len(settings)}")
    return settings


def read_study(folder: Path) -> Study | None:
    """Read the result of a search in a folder.

    None where the folder has no search, or where its objectives are no metrics of a report.
    """
    saved = read_record(folder / STUDY_FILE, dict)
    objectives = saved.get("objectives")
    if not isinstance(objectives, dict) or not objectives:
        return None
    if not isinstance(saved.get("space"), dict):
        return None
    if not objectives.keys() <= {metric.key for metric in METRICS}:
        return None
    best = saved.get("best")
    if not isinstance(best, list):
        best = []
    return {
        "name": folder.name,
        "num_trials": 0,
        **saved,
        "importances": _bounded_numbers(saved.get("importances")),
        "best": list(map(str, best)),
    }


def _bounded_numbers(values: Any) -> dict[str, float]:
    """Keep the numbers of a mapping up to `LARGEST`; empty where the values are no mapping."""
    if not isinstance(values, dict):
        return {}
    numbers = {}
    for key, value in values.items():
        if isinstance(value, (int, float)) and abs(value) <= LARGEST:
            numbers[key] = value
    return numbers


def read_history(path: Path) -> list[dict[str, float]]:
    """Read the lines of a `history.csv` without their empty cells.

    A line with a damaged cell, or a number above `LARGEST` or not finite, is left out.
    """
    lines = []
    for cells in read_file(path, read_csv) or []:
        with suppress(TypeError, ValueError):
            line = {key: float(cell) for key, cell in cells.items() if key and cell}
            # NaN is not <= anything: such a line is left out too.
            if all(abs(value) <= LARGEST for value in line.values()):
                lines.append(line)
    return lines


def _parse_override(text: str) -> Any:
    """Parse the value of an override: numbers, booleans, null and lists of them, else a text."""
    try:
        # Numbers, booleans, null and lists of them have the same form in JSON as in an override.
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
