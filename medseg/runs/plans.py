"""Plans on this machine: predicted memory and time of a configuration, beside what runs took."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TypeVar

from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.machine_cache import machine_folder
from medseg.runs.signature import plain
from medseg.training.options import TrainConfig

# Groups and keys that decide memory and seconds of a run.
DECISIVE = (
    "stage",
    "task",
    "spacing",
    "augment",
    "model",
    "loss",
    "optimizer",
    "memory",
    "trainer",
    "inference",
    "ema_decay",
)
DECISIVE_DATA = ("num_workers", "prefetch", "pin_memory")
# Predicted number to its name in a sentence.
TITLES = {"peak_resident_mib": "resident peak", "seconds_per_step": "seconds per step"}
# The ratios of the last runs of this machine.
RUNS_FILE = "runs.json"
MAX_RUNS = 50
# Number of finished runs from which on the history of a machine counts, and the error of their
# median that is told.
LEAST_RUNS = 3
TOLD_ERROR = 0.1

T = TypeVar("T")
Numbers = dict[str, float]
"""`peak_resident_mib` and `seconds_per_step`."""


def write_plan(config: TrainConfig, numbers: Numbers) -> None:
    """Keep the predicted numbers of a configuration for its runs; without a folder, not at all."""
    with suppress(UserError):
        replace_text(_plan_path(config), json.dumps(numbers))


def compare_with_plan(config: TrainConfig, measured: Numbers) -> dict[str, dict[str, float]]:
    """Put the predicted numbers of a run beside the measured ones.

    The run is added to the history of this machine.

    Args:
        config: Configuration of the run.
        measured: What it took.

    Returns:
        For each number `predicted`, `measured` and their `ratio`; empty if the run was never
        planned on this machine.
    """
    predicted = _read(_plan_path(config), dict)
    comparison = {}
    for name, value in measured.items():
        if predicted.get(name) and value:
            comparison[name] = {
                "predicted": predicted[name],
                "measured": value,
                "ratio": round(predicted[name] / value, 4),
            }
    if comparison:
        path = machine_folder() / RUNS_FILE
        ratios = {name: numbers["ratio"] for name, numbers in comparison.items()}
        runs = [*_read(path, list), ratios]
        # A home that cannot be written must not fail a run that has finished.
        with suppress(UserError):
            replace_text(path, json.dumps(runs[-MAX_RUNS:]))
    return comparison


def past_errors() -> list[str]:
    """Say by how much each predicted number was off in the runs of this machine.

    Errors of less than a tenth are left out.
    """
    runs = _read(machine_folder() / RUNS_FILE, list)
    sentences = []
    for name, title in TITLES.items():
        ratios = [run[name] for run in runs if isinstance(run, Mapping) and name in run]
        if len(ratios) < LEAST_RUNS:
            continue
        ratio = median(ratios)
        if abs(ratio - 1) > TOLD_ERROR:
            sentences.append(
                f"{title}: in the last {len(ratios)} planned runs of this machine, "
                f"the prediction was {ratio:.2f} times what was measured"
            )
    return sentences


def _plan_path(config: TrainConfig) -> Path:
    """File of the plan of a configuration, named by a hash of what decides its numbers."""
    values = plain(config)
    decisive = {name: values[name] for name in DECISIVE}
    decisive |= {name: values["data"][name] for name in DECISIVE_DATA}
    # A bound and paths change neither memory nor time.
    del decisive["memory"]["budget_gib"]
    del decisive["stage"]["coarse"]
    del decisive["stage"]["coarse_folds"]
    text = json.dumps(decisive, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return machine_folder() / "plans" / f"{key}.json"


def _read(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a kind, `dict` or `list`; empty where there is none or a damaged one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return kind()
    if not isinstance(content, kind):
        return kind()
    return content
