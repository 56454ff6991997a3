"""Python functions that run commands: training, planning and cross-validation.

Each call runs a command in a new process and returns the results that the command wrote. The
command thus has threads, signal handlers and memory of its own; the caller is often a notebook.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medseg.config.overrides import text_of
from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.runs.folder import CONFIG_FILE, read_summary
from medseg.studies.command_steps import (
    last_checkpoint,
    run_and_get_failure,
    train_step,
    train_steps,
)
from medseg.studies.pooled import POOLED_CSV
from medseg.studies.recipes import RECIPE_FILE, note_recipe

# Arguments of a command: key, as on the command line, to the value as a Python object.
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished training.

    Attributes:
        folder: The run folder.
        checkpoint: Checkpoint of the best validation; of the last step if there was no validation.
        summary: Content of `summary.json`: steps, best Dice, seconds, peak memory.
    """

    folder: Path
    checkpoint: Path
    summary: dict[str, Any]

    @property
    def history(self) -> list[dict[str, str]]:
        """Rows of `history.csv`: losses, learning rate, validation."""
        return read_csv(self.folder / "history.csv")


@dataclass(frozen=True)
class Study:
    """A finished cross-validation.

    Attributes:
        folder: Folder of the study.
        model: Model folder with the networks of all folds, for `medseg.Segmenter(weights=…)`.
        pooled: Rows of `pooled.csv`, one for each region and trust in its reference.
    """

    folder: Path
    model: Path
    pooled: list[dict[str, str]]


def train(folder: str | Path, keys: Keys) -> Run:
    """Train one stage, resume an interrupted training, or return a finished one.

    Args:
        folder: The run folder.
        keys: Keys of `medseg train`, such as `{"stage": "single", "data.cases": "spleen"}`.

    Raises:
        UserError: If the command fails, with its message, or if the folder holds a training with
            other keys.
    """
    folder = Path(folder)
    arguments = _arguments(keys)
    has_begun = (folder / CONFIG_FILE).is_file()
    if has_begun and not (folder / RECIPE_FILE).is_file():
        # The command line began this run: `train` compares its keys.
        _run(train_step(folder, *arguments))
    # Raises if the folder holds a training with other keys: its result is not that of these keys.
    note_recipe(folder, {"arguments": arguments})
    for step in train_steps(folder, *arguments):
        _run(step)
    summary = read_summary(folder)
    checkpoint = last_checkpoint(folder)
    # Summaries of older versions may not name a checkpoint. Of its path only the name counts: the
    # folder may have been moved since.
    if summary.get("checkpoint"):
        checkpoint = checkpoint.with_name(Path(summary["checkpoint"]).name)
    return Run(folder, checkpoint, summary)


def plan(keys: Keys) -> dict[str, Any]:
    """Predict memory and time of a training.

    Args:
        keys: Keys of `medseg plan`. With `fit_gib`, the command searches for memory switches with
            which the training fits into this memory.

    Returns:
        Content of the file that `medseg plan output=<file>` writes, with keys such as
        `peak_resident_mib` and `seconds_per_step`.

    Raises:
        UserError: If the command fails, with its message, also if no memory switches make it fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        _run(["plan", *_arguments(keys), f"output={text_of(str(output))}"])
        predicted: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return predicted


def cross_validate(folder: str | Path, keys: Keys) -> Study:
    """Train, predict and score fold by fold, or continue the study of this folder.

    Args:
        folder: Folder of the study.
        keys: Keys of `medseg cross_validate`.

    Raises:
        UserError: If the command fails, with its message.
    """
    folder = Path(folder)
    _run(["cross_validate", *_arguments(keys), f"output={text_of(str(folder))}"])
    return Study(folder, folder / "model", read_csv(folder / POOLED_CSV))


def _arguments(keys: Keys) -> list[str]:
    """Format keys and values as command-line arguments `key=value`."""
    return [f"{key}={text_of(value)}" for key, value in keys.items()]


def _run(step: Sequence[str]) -> None:
    """Run a command in a new process.

    Raises:
        UserError: If it fails, with its last message.
    """
    failure = run_and_get_failure(step)
    if failure:
        raise UserError(failure)
