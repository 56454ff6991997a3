"""Plans on this machine: memory and time of a configuration, predicted and measured."""

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

# Groups and keys that decide memory and seconds of a run; then those of the group `data`.
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
# List of the last runs of this machine; each is a mapping of a name in `TITLES` to the quotient
# predicted / measured.
RUNS_FILE = "runs.json"
# Number of runs that the file keeps.
MAX_RUNS = 50
# Errors of the plans are reported from this number of planned runs on.
LEAST_RUNS = 3
# The user is told of the errors where the median of predicted / measured is further from 1.
TOLD_ERROR = 0.1

T = TypeVar("T")
Numbers = dict[str, float]
"""Numbers of a run, predicted or measured: `peak_resident_mib` and `seconds_per_step`."""


def write_plan(config: TrainConfig, numbers: Numbers) -> None:
    """Save the predicted numbers of a configuration, for `compare_with_plan` after its runs."""
    # A home folder that cannot be written must not fail the plan.
    with suppress(UserError):
        replace_text(_plan_path(config), json.dumps(numbers))


def compare_with_plan(config: TrainConfig, measured: Numbers) -> dict[str, dict[str, float]]:
    """Compare the predicted numbers of a run with the measured ones.

    The run is added to the history of this machine.

    Args:
        config: Configuration of the run.
        measured: Measured numbers of the run.

    Returns:
        For each number `predicted`, `measured` and `ratio`, the quotient of the two; empty if the
        configuration was never planned on this machine.
    """
    predicted = _read_json(_plan_path(config), dict)
    comparison = {}
    for name, value in measured.items():
        # A plan may lack a number, and a run may have measured none (0).
        if predicted.get(name) and value:
            comparison[name] = {
                "predicted": predicted[name],
                "measured": value,
                "ratio": round(predicted[name] / value, 4),
            }
    if comparison:
        path = machine_folder() / RUNS_FILE
        ratios = {name: numbers["ratio"] for name, numbers in comparison.items()}
        runs = [*_read_json(path, list), ratios]
        # A home folder that cannot be written must not fail a run that has finished.
        with suppress(UserError):
            replace_text(path, json.dumps(runs[-MAX_RUNS:]))
    return comparison


def past_errors() -> list[str]:
    """Say by how much each predicted number was off in the runs of this machine.

    Numbers that were off by less than `TOLD_ERROR`, or in too few runs, are left out.
    """
    runs = _read_json(machine_folder() / RUNS_FILE, list)
    sentences = []
    for name, title in TITLES.items():
        # The file may be damaged: anything but a number in a mapping is left out.
        values = [run.get(name) for run in runs if isinstance(run, Mapping)]
        ratios = [value for value in values if isinstance(value, float)]
        if len(ratios) < LEAST_RUNS:
            continue
        median_ratio = median(ratios)
        if abs(median_ratio - 1) > TOLD_ERROR:
            sentences.append(
                f"{title}: in the last {len(ratios)} planned runs of this machine, "
                f"the prediction was {median_ratio:.2f} times what was measured"
            )
    return sentences


def _plan_path(config: TrainConfig) -> Path:
    """File of the plan of a configuration, named by a hash of the keys that decide its numbers."""
    values = plain(config)
    decisive = {name: values[name] for name in DECISIVE}
    decisive |= {name: values["data"][name] for name in DECISIVE_DATA}
    # Neither memory nor time depends on the bound on memory or on paths of checkpoints.
    del decisive["memory"]["budget_gib"]
    del decisive["stage"]["coarse"]
    del decisive["stage"]["coarse_folds"]
    text = json.dumps(decisive, sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return machine_folder() / "plans" / f"{key}.json"


def _read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file of a kind, `dict` or `list`; empty where it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return kind()
    if not isinstance(content, kind):
        return kind()
    return content
