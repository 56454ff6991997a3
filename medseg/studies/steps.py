"""Resumable sequences of medseg commands, each in a process of its own: finished trainings are left out, stopped ones are resumed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra

from medseg.config.check import to_config
from medseg.config.schema import RecipeConfig, TrainConfig
from medseg.errors import EXIT_FAILED, UserError
from medseg.runs.folder import CONFIG_FILE, read_summary, settle
from medseg.runs.status import Status

Step = Sequence[str]
"""Arguments of `medseg`, the command first."""


def run_steps(steps: Sequence[Step]) -> None:
    """Print and run commands one after the other.

    A prediction or an evaluation in which single cases failed has said so, and the next command still runs.

    Raises:
        SystemExit: With the exit code of the command that failed; the commands after it do not run.
    """
    for step in steps:
        print(f"\n$ medseg {shlex.join(step)}", flush=True)
        code = subprocess.run([sys.executable, "-m", "medseg.commands.cli", *step], check=False).returncode
        if code and not (code == EXIT_FAILED and step[0] in ("predict", "evaluate")):
            sys.exit(code)


def train_steps(run_dir: Path, *arguments: str) -> list[Step]:
    """The command that trains a run or resumes it; none if the run has finished."""
    if read_summary(run_dir).get("status") == Status.finished.value:
        return []
    resume = [f"resume={run_dir}"] if (run_dir / CONFIG_FILE).is_file() else []
    return [["train", *arguments, f"hydra.run.dir={run_dir}", *resume]]


def last_checkpoint(run_dir: Path) -> Path:
    """The checkpoint of the last step of a run."""
    return run_dir / "checkpoints" / "last.ckpt"


def cascade_steps(config: RecipeConfig, folder: Path, data: Sequence[str], phantom_runs: Path) -> list[Step]:
    """The commands that train both stages.

    Args:
        config: Names the experiment of each stage, and the experiment on phantoms whose weights it starts from; null = random weights.
        folder: Folder of the two runs, `coarse` and `fine`.
        data: Arguments that select the training cases. Trainings on phantoms do not get them: they see no patient.
        phantom_runs: Folder of the runs on phantoms and of the cache, shared by all cascades of a study.
    """
    cache, steps = f"data.cache={phantom_runs / 'cache'}", []
    for stage in ("coarse", "fine"):
        begin = []
        if pretrain := getattr(config, f"pretrain_{stage}"):
            steps += train_steps(phantom_runs / pretrain, f"experiment={pretrain}", cache)
            begin = [f"init_from={last_checkpoint(phantom_runs / pretrain)}"]
        steps += train_steps(folder / stage, f"experiment={getattr(config, stage)}", cache, *data, *begin)
    return steps


def compose_train(arguments: Sequence[str], where: str) -> TrainConfig:
    """Compose and check the configuration of a training.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study that gives them, for messages.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    try:
        config = to_config(hydra.compose("train", list(arguments)), TrainConfig)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    settle(config)
    return config


def key_of(argument: str) -> str:
    """The key of a command-line argument.

    Example:
        >>> [key_of(argument) for argument in ("steps=5", "+data.label_values.trachea=5", "~rows")]
        ['steps', 'data.label_values.trachea', 'rows']
    """
    return argument.split("=", 1)[0].lstrip("+~")


def without_keys(arguments: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Remove the arguments that set one of the keys, or a key below one of them."""
    return [argument for argument in arguments if key_of(argument).split(".")[0] not in keys]


def merge_arguments(*groups: Sequence[str]) -> tuple[str, ...]:
    """Keep one argument per key: an argument of a later group replaces that of an earlier one.

    Example:
        >>> merge_arguments(["steps=5", "seed=1"], ["steps=9"])
        ('steps=9', 'seed=1')
    """
    return tuple({key_of(argument): argument for group in groups for argument in group}.values())


def label_values_argument(label_values: Mapping[str, Any]) -> str:
    """The argument that maps names to the values in reference files."""
    given = ", ".join(f"{name}: {value}" for name, value in label_values.items())
    return f"data.label_values={{{given}}}"


def folder_name(name: str) -> str:
    """The folder of a row; names that differ only in punctuation share one.

    Example:
        >>> folder_name("isotropic 1 mm")
        'isotropic_1_mm'
    """
    return re.sub(r"\W+", "_", name)
