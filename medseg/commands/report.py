"""The `report` command: one page and one table over all runs below a folder."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from medseg.commands import entry
from medseg.config.schema import ReportConfig
from medseg.config.signature import flat
from medseg.console import say
from medseg.errors import UserError
from medseg.io.replacing import check_writable
from medseg.report.compare import compare, csv_table
from medseg.report.page import render
from medseg.report.run import Run, Study
from medseg.runs.folder import CONFIG_FILE, SUMMARY_FILE, replace_text
from medseg.runs.sweeps import JOB_FILE

HISTORY_FILE = "history.csv"
STUDY_FILE = "study.json"
# Keys that say where a run lies, or how it was started.
HIDDEN_KEYS = frozenset({"name", "resume", "retry_failed", "run_dir", "data.cache", "data.phantoms.folder", "logger.save_dir"})


def main() -> None:
    """Compose, check, report."""
    entry.run("report", ReportConfig, report)


def report(config: ReportConfig) -> int:
    """Write `report.html` and `report.csv` over the runs of a folder.

    Raises:
        UserError: If there is no such folder, or no run in it.
    """
    folder = Path(config.runs).absolute()
    if not folder.is_dir():
        raise UserError(f"runs={config.runs}: there is no such folder")
    runs = [read_run(run_dir, folder) for run_dir in find_runs(folder)]
    if not runs:
        raise UserError(f"runs={config.runs}: no run lies below it; a run is a folder with {CONFIG_FILE} or {JOB_FILE}")
    output = Path(config.output).absolute() if config.output else folder
    check_writable(output)
    comparison = compare(runs)
    page = render(comparison, read_study(folder), folder.name, str(folder), config.num_pictures, entry.say)
    replace_text(output / "report.csv", csv_table(comparison))
    replace_text(output / "report.html", page)
    print(f"{len(runs)} runs: {output / 'report.html'}, {output / 'report.csv'}")
    return 0


def find_runs(folder: Path) -> list[Path]:
    """Run folders at or below a folder, in natural order (`2` before `10`); hidden folders and what lies inside a run are passed over."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if CONFIG_FILE in files or JOB_FILE in files:
            found.append(Path(place))
            folders.clear()
    return sorted(found, key=lambda path: natural(str(path)))


def natural(text: str) -> list[tuple[int, str]]:
    """A key for sorting that takes digits as numbers.

    Example:
        >>> sorted(["run 10", "run 9"], key=natural)
        ['run 9', 'run 10']
    """
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


def read_run(run_dir: Path, folder: Path) -> Run:
    """Read what a run folder has; a missing or damaged file leaves its part empty."""
    job, summary = _json(run_dir / JOB_FILE), _json(run_dir / SUMMARY_FILE)
    config = _config(run_dir / CONFIG_FILE)
    overrides = {str(key): _unquoted(str(value)) for key, value in dict(job.get("overrides", {})).items()}
    # A job that was refused knows only what it was asked for.
    settings = config if config is not None else {key: _scalar(value) for key, value in overrides.items()}
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
        pictures=_last_pictures(run_dir / "pictures"),
    )


def read_study(folder: Path) -> Study | None:
    """What a search left in the folder; None where none did."""
    saved = _json(folder / STUDY_FILE)
    if not {"objectives", "space"} <= saved.keys():
        return None
    return Study(
        name=str(saved.get("name", folder.name)),
        objectives=dict(saved["objectives"]),
        space=dict(saved["space"]),
        num_trials=int(saved.get("num_trials", 0)),
        best=tuple(str(number) for number in saved.get("best", [])),
        importances=dict(saved.get("importances", {})),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        say(f"{path} is passed over: {error}")
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _config(path: Path) -> dict[str, Any] | None:
    """The flat configuration; None where there is none."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        say(f"{path} is passed over: {error}")
        return None
    return flat(loaded) if isinstance(loaded, dict) else None


def read_history(path: Path) -> Iterator[dict[str, float]]:
    """Lines of a `history.csv`; empty cells are left out, and so is a line that is being written."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                try:
                    yield {key: float(value) for key, value in line.items() if key and value}
                except (TypeError, ValueError):
                    continue
    except FileNotFoundError:
        return


def _last_pictures(folder: Path) -> tuple[Path, ...]:
    """The pictures `step_<step>_<case>.png` of the last step."""
    steps: dict[int, list[Path]] = {}
    for path in folder.glob("step_*_*.png"):
        parts = path.stem.split("_")
        if len(parts) == 3 and parts[1].isdigit():
            steps.setdefault(int(parts[1]), []).append(path)
    return tuple(sorted(steps[max(steps)])) if steps else ()


def _unquoted(text: str) -> str:
    """An override's value without the quotes that Hydra's grammar needs."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _scalar(text: str) -> Any:
    """An override's value as the configuration would hold it."""
    try:
        value = float(text)
    except ValueError:
        return {"true": True, "false": False, "null": None}.get(text, text)
    return int(text) if text.lstrip("-").isdigit() else value
