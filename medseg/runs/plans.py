"""Plans on this machine: memory and time predicted for a configuration, and those measured in its runs."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

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
MAX_RUNS = 50
# Number of finished runs from which on the history of a machine counts, and the error of their
# median that is told.
LEAST_RUNS = 3
TOLD_ERROR = 0.1

Numbers = dict[str, float]
"""`peak_resident_mib` and `seconds_per_step`."""


def write_plan(config: TrainConfig, numbers: Numbers) -> None:
    """Keep the predicted numbers of a configuration for its runs, where the folder can be written."""
    with suppress(UserError):
        replace_text(_plan_path(config), json.dumps(numbers))


def compare_with_plan(config: TrainConfig, measured: Numbers) -> dict[str, dict[str, float]]:
    """Put the predicted numbers of a run beside the measured ones, and add it to the history of this machine.

    Args:
        config: Configuration of the run.
        measured: What it took.

    Returns:
        For each number `predicted`, `measured` and their `ratio`; empty if the run was never
        planned on this machine.
    """
    predicted = _read(_plan_path(config), {})
    found = {
        name: {
            "predicted": predicted[name],
            "measured": value,
            "ratio": round(predicted[name] / value, 4),
        }
        for name, value in measured.items()
        if predicted.get(name) and value
    }
    if found:
        path = machine_folder() / "runs.json"
        runs = [*_read(path, []), {name: one["ratio"] for name, one in found.items()}][-MAX_RUNS:]
        with suppress(
            UserError
        ):  # a home that cannot be written must not fail a run that has finished
            replace_text(path, json.dumps(runs))
    return found


def past_errors() -> list[str]:
    """Say for each predicted number by how much it was off in the runs of this machine, where that is more than a tenth."""
    runs = _read(machine_folder() / "runs.json", [])
    told = []
    for name, title in (
        ("peak_resident_mib", "resident peak"),
        ("seconds_per_step", "seconds per step"),
    ):
        ratios = [run[name] for run in runs if isinstance(run, Mapping) and name in run]
        if len(ratios) >= LEAST_RUNS and abs(median(ratios) - 1) > TOLD_ERROR:
            told.append(
                f"{title}: in the last {len(ratios)} planned runs of this machine, the prediction was {median(ratios):.2f} times what was measured"
            )
    return told


def _plan_path(config: TrainConfig) -> Path:
    values = plain(config)
    decisive = {name: values[name] for name in DECISIVE} | {
        name: values["data"][name] for name in DECISIVE_DATA
    }
    del decisive["memory"]["budget_gib"]
    del decisive["stage"]["coarse"], decisive["stage"]["coarse_folds"]
    key = hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]
    return machine_folder() / "plans" / f"{key}.json"


def _read(path: Path, default: Any) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or a damaged one
        return default
    return found if isinstance(found, type(default)) else default
