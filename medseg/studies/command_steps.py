"""Steps of a study: commands of medseg, each in a process of its own; a training is resumed."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig

from medseg.errors import EXIT_FAILED
from medseg.io.atomic import replace_text
from medseg.runs.folder import CONFIG_FILE, read_summary
from medseg.runs.status import Status, status_of
from medseg.studies.train_arguments import label_values_argument, search_path_overrides
from medseg.wording import shell_line

# Arguments of `medseg`, the command first.
Step = Sequence[str]
MEDSEG = (sys.executable, "-m", "medseg.commands.cli")
# Provider of a folder that `--config-dir` added to Hydra's search path.
COMMAND_LINE = "command-line"


def run_until_failure(steps: Sequence[Step]) -> int:
    """Print and run commands one after the other.

    A prediction or an evaluation in which single cases failed has said so, and the next command
    still runs.

    Returns:
        0, or the exit code of the command that failed; the commands after it do not run.

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    for step in steps:
        print(f"\n$ medseg {shell_line(step)}", flush=True)
        command = [*MEDSEG, *step]
        code = subprocess.run(command, check=False).returncode
        if status_of(code) is Status.interrupted:
            sys.exit(code)
        if has_failed(step, code):
            return code
    return 0


def run_and_get_failure(step: Step) -> str:
    """Print and run one command; pass its error stream on, and return why it failed.

    A prediction or an evaluation in which single cases failed has not failed as a whole.

    Returns:
        Its exit code and its last message; empty where it did not fail.

    Raises:
        SystemExit: With the exit code of a command that was interrupted.
    """
    print(f"\n$ medseg {shell_line(step)}", flush=True)
    message = ""
    command = [*MEDSEG, *step]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        assert process.stderr is not None, "it is a pipe"
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            message = line.strip().removeprefix("medseg: ") or message
    code = process.returncode
    if status_of(code) is Status.interrupted:
        sys.exit(code)
    if not has_failed(step, code):
        return ""
    return f"{step[0]} ended with exit code {code}: {message or 'without a message'}"


def has_failed(step: Step, code: int) -> bool:
    """Whether a command failed as a whole, not only for single cases of many."""
    if code == EXIT_FAILED and step[0] in ("predict", "evaluate"):
        return False
    return code != 0


def run_steps(steps: Sequence[Step]) -> None:
    """Run commands as `run_until_failure`, and exit with the code of the one that failed."""
    code = run_until_failure(steps)
    if code:
        sys.exit(code)


def train_steps(run_dir: Path, *arguments: str) -> list[Step]:
    """Make the command that trains a run or resumes it; none if the run has finished."""
    if read_summary(run_dir).get("status") == Status.finished.value:
        return []
    resume = [f"resume={run_dir}"] if (run_dir / CONFIG_FILE).is_file() else []
    return [["train", *search_paths(), *arguments, f"hydra.run.dir={run_dir}", *resume]]


def search_paths() -> list[str]:
    """List the options of this command that tell Hydra where further configuration files are."""
    if not HydraConfig.initialized():
        return []
    hydra_config = HydraConfig.get()
    options = []
    for source in hydra_config.runtime.config_sources:
        if source.provider == COMMAND_LINE:
            options += ["--config-dir", source.path]
    return options + search_path_overrides()


def last_checkpoint(run_dir: Path) -> Path:
    """Name the checkpoint of the last step of a run."""
    return run_dir / "checkpoints" / "last.ckpt"


def evaluate_step(
    folder: Path, reference: Path, plain_task: Mapping[str, Any], label_values: Mapping[str, Any]
) -> Step:
    """Make the command that scores the predictions of a study.

    Args:
        folder: Folder of the study: has `predictions`; receives `scores` and `task.yaml`, since an
            experiment may choose the task or change it.
        reference: Case table of the predictions.
        plain_task: Content of the group `task`.
        label_values: Values in the label files.
    """
    task_file = folder / "task.yaml"
    replace_text(task_file, yaml.safe_dump({"task": dict(plain_task)}, sort_keys=False))
    return [
        "evaluate",
        f"pred={folder / 'predictions'}",
        f"ref={reference}",
        f"output={folder / 'scores'}",
        f"task={task_file}",
        label_values_argument(label_values),
    ]
