"""Steps of a study: commands of medseg, each run in a new process."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from medseg.config.overrides import quote_paths
from medseg.console import say
from medseg.errors import EXIT_FAILED, UserError
from medseg.io.atomic import replace_text
from medseg.io.tables import read_csv
from medseg.runs.folder import CONFIG_FILE, read_summary
from medseg.runs.status import Status, status_of
from medseg.studies.train_arguments import (
    compose_unresolved,
    search_path_overrides,
    training_changes,
)
from medseg.wording import shell_line

# Arguments of `medseg`, of which the first is the name of the command.
Step = Sequence[str]
# Without `-P` Python would search the working folder first, and import a user's `json.py` in place
# of the standard module.
MEDSEG = (sys.executable, "-Pm", "medseg.commands.cli")
# Provider in Hydra's search path of a folder that was added by `--config-dir`.
COMMAND_LINE = "command-line"


def run_until_failure(steps: Sequence[Step]) -> int:
    """Print and run commands one after the other, until one fails (see `has_failed`).

    Returns:
        0, or the exit code of the command that failed; the commands after it do not run.

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    for step in steps:
        print(f"\n$ medseg {shell_line(step)}", flush=True)
        command = [*MEDSEG, *step]
        exit_code = subprocess.run(command, check=False).returncode
        if status_of(exit_code) is Status.interrupted:
            sys.exit(exit_code)
        if has_failed(step, exit_code):
            return exit_code
    return 0


def run_and_get_failure(step: Step) -> str:
    """Print and run one command, forward its error stream, and describe its failure.

    Returns:
        Sentence with exit code and last message; empty if the command did not fail (see
        `has_failed`).

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    print(f"\n$ medseg {shell_line(step)}", flush=True)
    last_message = ""
    command = [*MEDSEG, *step]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None, "stderr is a pipe"
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            # Empty lines are skipped.
            last_message = line.strip().removeprefix("medseg: ") or last_message
    exit_code = process.returncode
    if status_of(exit_code) is Status.interrupted:
        sys.exit(exit_code)
    if not has_failed(step, exit_code):
        return ""
    return f"{step[0]} ended with exit code {exit_code}: {last_message or 'without a message'}"


def has_failed(step: Step, exit_code: int) -> bool:
    """Whether a command failed as a whole.

    `predict` and `evaluate` exit with `EXIT_FAILED` if some cases failed, possibly all. They have
    printed the names of these cases, and the study goes on with the others.
    """
    if exit_code == EXIT_FAILED and step[0] in ("predict", "evaluate"):
        return False
    return exit_code != 0


def failed_predictions(predictions: Path) -> dict[str, str]:
    """Read the message of each failed case from the `summary.csv` of `predict`."""
    path = predictions / "summary.csv"
    # There is no table if the command failed early.
    if not path.is_file():
        return {}
    # The message of a failed case is in the column of warnings.
    return {row["case"]: row["warnings"] for row in read_csv(path) if row["status"] == "failed"}


def run_steps(steps: Sequence[Step]) -> None:
    """Run commands as `run_until_failure`; if one fails, exit with its exit code."""
    exit_code = run_until_failure(steps)
    if exit_code != 0:
        sys.exit(exit_code)


def train_steps(run_dir: Path, *arguments: str) -> list[Step]:
    """Make the command that trains or resumes a run.

    Args:
        run_dir: The run folder.
        *arguments: Arguments of `train`.

    Returns:
        A list of this command; empty if the run has finished.
    """
    if read_summary(run_dir).get("status") == Status.finished.value:
        _tell_changes(run_dir, arguments)
        return []
    return [train_step(run_dir, *arguments)]


def _tell_changes(run_dir: Path, arguments: Sequence[str]) -> None:
    """Tell the user if a finished run, which is kept, has another configuration.

    The same arguments may stand for other values now: those of an experiment that was edited.
    """
    # Hydra is not initialised if the study was called as a function, not as a command.
    if not GlobalHydra.instance().is_initialized():
        return
    # A run of an older version may have a configuration that cannot be compared.
    with suppress(UserError):
        config = compose_unresolved(quote_paths([*arguments, "run_dir=none"]), "train")
        changes = training_changes(run_dir, config)
        if changes:
            say(
                f"{run_dir} has finished with other values ({changes}); its result is kept; "
                "to train again, remove the folder, or give another output"
            )


def train_step(run_dir: Path, *arguments: str) -> Step:
    """Make the command that trains or resumes a run; it compares a finished run with the arguments.

    Args:
        run_dir: The run folder.
        *arguments: Arguments of `train`.
    """
    step = ["train", *search_paths(), *arguments, f"hydra.run.dir={run_dir}"]
    # An earlier start has written its configuration: resume it.
    if (run_dir / CONFIG_FILE).is_file():
        step.append(f"resume={run_dir}")
    return step


def search_paths() -> list[str]:
    """List the arguments of this process that name further folders of configuration files."""
    # Hydra is not initialised if the study was called as a function, not as a command.
    if not HydraConfig.initialized():
        return []
    hydra_config = HydraConfig.get()
    options = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == COMMAND_LINE:
            options += ["--config-dir", source.path]
    return options + search_path_overrides()


def last_checkpoint(run_dir: Path) -> Path:
    """Path of the checkpoint of the last step of a run."""
    return run_dir / "checkpoints" / "last.ckpt"


def evaluate_step(
    folder: Path, reference: Path, plain_task: Mapping[str, Any], label_values: Mapping[str, Any]
) -> Step:
    """Make the command that scores the predictions of a study.

    Args:
        folder: Folder of the study with `predictions`; the command writes `scores` into it.
        reference: Case table with the reference labels.
        plain_task: See `task_argument`.
        label_values: See `task_argument`.
    """
    return [
        "evaluate",
        f"pred={folder / 'predictions'}",
        f"ref={reference}",
        f"output={folder / 'scores'}",
        task_argument(folder, plain_task, label_values),
    ]


def task_argument(
    folder: Path, plain_task: Mapping[str, Any], label_values: Mapping[str, Any]
) -> str:
    """Write a task to `task.yaml`, and make the argument of `evaluate` that names the file.

    `evaluate` reads no checkpoint, and takes no experiment, which may have changed the task.

    Args:
        folder: Folder of the study.
        plain_task: Content of the group `task`.
        label_values: Content of `data.label_values`: label name to its value in the files. On a
            command line Hydra would refuse names such as `3_Ventrikel` and `Gefäße`.
    """
    groups = {"task": dict(plain_task), "data": {"label_values": dict(label_values)}}
    task_file = folder / "task.yaml"
    replace_text(task_file, yaml.safe_dump(groups, sort_keys=False, allow_unicode=True))
    return f"task={task_file}"
