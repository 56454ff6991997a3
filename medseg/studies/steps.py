"""Several commands in a row, as a user would type them: what is finished already is kept, what was stopped goes on."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medseg.errors import EXIT_FAILED
from medseg.runs.folder import CONFIG_FILE, SUMMARY_FILE


def run_steps(steps: Sequence[Sequence[str]]) -> int:
    """Run commands one after the other and print each.

    Args:
        steps: Arguments of `medseg`, the command first.

    Returns:
        0; or the exit code of the step that failed, after which nothing is run. A prediction or an evaluation that lost single
        cases has said so and does not end the row.
    """
    for step in steps:
        print(f"\n$ medseg {shlex.join(step)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "medseg.commands.cli", *step], check=False).returncode
        lost_single_cases = code == EXIT_FAILED and step[0] in ("predict", "evaluate")
        if code and not lost_single_cases:
            return code
    return 0


def key_of(argument: str) -> str:
    """The key of an argument of the command line.

    Example:
        >>> [key_of(argument) for argument in ("steps=5", "+data.label_values.trachea=5", "~rows")]
        ['steps', 'data.label_values.trachea', 'rows']
    """
    return argument.split("=", 1)[0].lstrip("+~")


def without_keys(arguments: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Leave out the arguments that say a key, or one below it."""
    return [argument for argument in arguments if key_of(argument).split(".")[0] not in keys]


def merge_arguments(*groups: Sequence[str]) -> tuple[str, ...]:
    """One argument per key: what a later group says takes the place of what an earlier one said.

    Example:
        >>> merge_arguments(["steps=5", "seed=1"], ["steps=9"])
        ('steps=9', 'seed=1')
    """
    return tuple({key_of(argument): argument for group in groups for argument in group}.values())


def label_values_argument(label_values: Mapping[str, Any]) -> str:
    """What the values in the reference files mean, as an argument."""
    given = ", ".join(f"{name}: {value}" for name, value in label_values.items())
    return f"data.label_values={{{given}}}"


def train_step(experiment: str, run_dir: Path, *arguments: str) -> list[list[str]]:
    """`run_step` of an experiment."""
    return run_step(run_dir, f"experiment={experiment}", *arguments)


def run_step(run_dir: Path, *arguments: str) -> list[list[str]]:
    """The command that trains a run, or goes on with it where it was stopped; none where it is finished."""
    if is_finished(run_dir):
        return []
    command = ["train", *arguments, f"hydra.run.dir={run_dir}"]
    if (run_dir / CONFIG_FILE).is_file():
        command.append(f"resume={run_dir}")
    return [command]


def is_finished(run_dir: Path) -> bool:
    """Whether a run has come to its end."""
    summary = run_dir / SUMMARY_FILE
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("status") == "finished"


def last_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that a run ends with."""
    return run_dir / "checkpoints" / "last.ckpt"


def cascade_steps(
    folder: Path,
    data: Sequence[str],
    *,
    coarse: str,
    fine: str,
    pretrain_coarse: str | None,
    pretrain_fine: str | None,
    runs: Path,
) -> list[list[str]]:
    """The commands that train both stages, each from the weights of a run on phantoms where one is named.

    Args:
        folder: Where the two runs lie, `coarse` and `fine`.
        data: Arguments that say which cases are trained on. The runs on phantoms do not get them: they see no patient.
        coarse: Experiment of the coarse stage.
        fine: Experiment of the fine stage.
        pretrain_coarse: Experiment on phantoms; None begins with fresh weights.
        pretrain_fine: The same for the fine stage.
        runs: Where the runs on phantoms lie, shared by all that begin with them.
    """
    steps = []
    for stage, experiment, pretrain in (("coarse", coarse, pretrain_coarse), ("fine", fine, pretrain_fine)):
        begin = []
        if pretrain is not None:
            steps += train_step(pretrain, runs / pretrain, f"data.cache={runs / 'cache'}")
            begin = [f"init_from={last_checkpoint(runs / pretrain)}"]
        steps += train_step(experiment, folder / stage, f"data.cache={runs / 'cache'}", *data, *begin)
    return steps
