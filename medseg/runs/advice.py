"""Command lines that a run proposes: `plan` when memory ran out, else the next step."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.imported import IMPORTED, SOURCE_VARIABLE, VALUES_ARGUMENT
from medseg.config.overrides import PATH_KEYS, text_of
from medseg.data.options import StageName
from medseg.inference.options import Backend, InferenceOptions
from medseg.memory.options import Accelerator
from medseg.memory.profile import free_memory_bytes, private_bytes
from medseg.training.options import TrainConfig
from medseg.weights.included import INCLUDED_TASK
from medseg.wording import quote_for_shell, shell_line

# Keys of `data` that decide the cases of a run, their split and their HU: the fine stage has to be
# trained on the same data as the coarse one.
SHARED_KEYS = (
    "labels_column",
    "hu_slope",
    "hu_offset",
    "train_trust",
    "ignore_findings",
    "cache",
    "fold",
    "num_folds",
    "val_patients",
    "test_patients",
)
# Keys of `data` that `predict` has at its top level, to the values that change nothing.
HU_SCALE = {"hu_slope": 1.0, "hu_offset": 0.0}
# Arguments of `train` that `plan` does not take, or does not take beside `fit_gib`.
NOT_PLANNED = ("debug", "memory.budget_gib", "retry_failed")


def plan_command(config: TrainConfig, overrides: Sequence[str]) -> str:
    """Write the `plan` command for a training, with the free memory of this machine as its limit.

    Args:
        config: Configuration of the run; its `trainer` decides between GPU and CPU memory.
        overrides: Arguments of the training command, as Hydra got them.

    Returns:
        One command line for a shell.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(accelerator=Accelerator.cpu, devices=1)
        >>> overrides = ["stage=fine", "memory.budget_gib=2", "data.cases='my scans/cases.csv'"]
        >>> plan_command(SimpleNamespace(trainer=trainer), overrides).partition(" fit_gib=")[0]
        "medseg plan stage=fine 'data.cases=my scans/cases.csv'"
    """
    # Rounded down to tenths of a GiB, at least 0.1: a plan for more than is free would run out of
    # memory again.
    tenths = max(1, math.floor(10 * _free_gib(config)))
    fit_gib = f"fit_gib={tenths / 10:.1f}"
    return shell_line(["medseg", "plan", *_plan_arguments(overrides), fit_gib])


def next_command(config: TrainConfig, checkpoint: Path) -> str:
    """Write the command that follows a run: the fine stage after the coarse one, else a prediction.

    A prediction gets the arguments of `scale_arguments` and `prediction_arguments`.

    Args:
        config: Configuration of the run.
        checkpoint: Best checkpoint of the run.

    Returns:
        One command line for a shell; words in `<…>` are to be filled in.
    """
    # A fine stage is trained on regions, so a task without regions has no fine stage.
    if config.stage.name is StageName.coarse and config.task.regions:
        arguments = ["train", "stage=fine", *_task_argument(config), *_data_arguments(config)]
        arguments += ["stage.region_from=coarse", f"stage.coarse={checkpoint}"]
        arguments += _trusted_argument(config)
    else:
        arguments = ["predict", "input=<scan>", "output=<folder>"]
        files = [checkpoint]
        if config.stage.name is StageName.fine:
            coarse = config.stage.coarse or "<checkpoint of the coarse stage>"
            arguments += [f"coarse={coarse}", f"fine={checkpoint}"]
            if config.stage.coarse:
                files.append(Path(config.stage.coarse))
        else:
            arguments.append(f"single={checkpoint}")
        arguments += [*scale_arguments(config), *prediction_arguments(config, files)]
    words = ["medseg"]
    for argument in arguments:
        # `<…>` is not quoted: the user replaces it by a value, and the quotes would stay around it.
        # No path here begins with `<`, since all are absolute.
        is_placeholder = "=<" in argument
        words.append(argument if is_placeholder else quote_for_shell(argument))
    return " ".join(words)


def prediction_arguments(config: TrainConfig, files: Sequence[Path]) -> list[str]:
    """List the arguments of `predict` that networks need and that no checkpoint states.

    These are trusted classes, and the memory of a network pass; none where the defaults are enough.

    Args:
        config: Configuration of the training.
        files: See `budget_argument`.
    """
    return [*_trusted_argument(config), *budget_argument(files, config.trusted_targets)]


def scale_arguments(config: TrainConfig) -> list[str]:
    """List the arguments of `predict` for scans that are stored like those of the training.

    A case table may state the scale itself, as those of the studies do.
    """
    arguments = []
    for key, neutral_value in HU_SCALE.items():
        value = getattr(config.data, key)
        if value != neutral_value:
            arguments.append(f"{key}={value}")
    return arguments


def _trusted_argument(config: TrainConfig) -> list[str]:
    """Argument for the prefixes that the user trusts; none where there are none."""
    if not config.trusted_targets:
        return []
    return [f"trusted_targets={text_of(config.trusted_targets)}"]


def budget_argument(files: Sequence[Path], trusted: Sequence[str]) -> list[str]:
    """Argument of `predict` for the memory of a network pass; none where the default is enough.

    Args:
        files: Checkpoints or safetensors files of the stages. A file that cannot be loaded and run
            on the CPU is left out: `predict` says why.
        trusted: Prefixes of `trusted_targets`.

    Returns:
        List of one argument, or empty.
    """
    import torch  # takes seconds, but the run that calls this has loaded it already

    from medseg.cascade.load import load_stage

    # Not `auto`, which would measure all backends first.
    options = InferenceOptions(backend=Backend.torch)
    least_gib = options.budget_gib
    for file in files:
        # A user's network may raise anything, and advice must not fail a run that has finished.
        with suppress(Exception):
            # Measured on the CPU, which computes in fp32 where it lacks the precision of the
            # training. A GPU supports each of these precisions and so needs no more memory.
            stage = load_stage(file, None, torch.device("cpu"), trusted=trusted, options=options)
            least_gib = max(least_gib, stage.least_budget_gib)
    if least_gib == options.budget_gib:
        return []
    return [f"inference.budget_gib={least_gib:g}"]


def _data_arguments(config: TrainConfig) -> list[str]:
    """List the arguments for `SHARED_KEYS`, the case table and the label values of a run.

    Arguments that equal the defaults are left out.
    """
    data = config.data
    arguments = [f"data.cases={data.cases}"] if data.cases else []
    defaults: Any = OmegaConf.load(conf_dir() / "data" / "default.yaml")
    for key in SHARED_KEYS:
        value = getattr(data, key)
        default = defaults[key]
        is_path = f"data.{key}" in PATH_KEYS
        is_default = value == default
        if is_path and value and default:
            # The paths of a run are absolute, those of the defaults relative.
            is_default = os.path.abspath(value) == os.path.abspath(default)
        if not is_default:
            # Paths are not quoted for Hydra here: the command does it, by `quote_paths`.
            text = value if is_path else text_of(value)
            arguments.append(f"data.{key}={text}")
    # Without label values, those of the task are taken: equal ones need no argument.
    has_own_values = data.label_values and data.label_values != config.task.labels
    # The task of an imported data set brings its label values along.
    if has_own_values and not _is_task_imported():
        # `++`, since names of labels are keys that the files of `conf/` may lack.
        arguments.append(f"++data.label_values={text_of(data.label_values)}")
    return arguments


def _is_task_imported() -> bool:
    """Whether the run took its task from the user's data or from a file, not from `conf/`."""
    return bool(os.environ.get(SOURCE_VARIABLE, ""))


def _task_argument(config: TrainConfig) -> list[str]:
    """Argument that names the task; none where it comes with the cases, or is the default."""
    if _is_task_imported():
        return _task_file_argument()
    name = config.task.name
    is_preset = (conf_dir() / "task" / f"{name}.yaml").is_file()
    # A case table may lie beside a task file, which would replace the default task.
    is_default = name == INCLUDED_TASK and not config.data.cases
    if is_preset and not is_default:
        return [f"task={name}"]
    return []


def _task_file_argument() -> list[str]:
    """Argument that names the file of an imported task.

    No argument is needed for a task that lies beside the case table: `data.cases` finds it again.
    """
    # The source is the file that the user named as the task, or the case table.
    source = os.environ.get(SOURCE_VARIABLE, "")
    if source.endswith((".yaml", ".yml")):
        return [f"task={source}"]
    return []


def _plan_arguments(overrides: Sequence[str]) -> list[str]:
    """Turn arguments of `train`, as Hydra got them, into arguments of `plan`, as a user types them.

    Arguments that concern one run only are left out.
    """
    arguments = []
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+~")
        # Among Hydra's own keys, a plan needs only the search path of the configuration files.
        is_hydra = name.startswith(("hydra.", "hydra/")) and name != "hydra.searchpath"
        # `VALUES_ARGUMENT` is the argument that every command adds itself, by `with_task`, for the
        # values of the labels in imported files. `resume=auto` says nothing about the
        # configuration, while `resume=<run folder>` names the run whose configuration is to be
        # planned.
        if is_hydra or name in NOT_PLANNED or override in ("resume=auto", VALUES_ARGUMENT):
            continue
        if override == f"task={IMPORTED}":
            arguments += _task_file_argument()
            continue
        # A path loses the quotes that `quote_paths` has put around it.
        is_quoted = len(value) > 1 and value[0] == value[-1] == "'"
        if name in PATH_KEYS and is_quoted:
            path = value[1:-1].replace("\\'", "'")
            override = f"{key}={path}"
        arguments.append(override)
    return arguments


def _free_gib(config: TrainConfig) -> float:
    """Measure the memory that a rank will find once this process has ended, in GiB.

    With GPUs it is the smallest free memory of any GPU; on the CPU the ranks share the free memory
    of the machine.
    """
    import torch  # takes seconds, but the run that calls this has loaded it already

    if config.trainer.accelerator is not Accelerator.cpu and torch.cuda.is_available():
        gpus = range(torch.cuda.device_count())
        return min(map(_free_bytes_of_gpu, gpus)) / 2**30
    own_bytes = private_bytes(os.getpid())
    bytes_per_rank = (free_memory_bytes() + own_bytes) / config.trainer.devices
    return bytes_per_rank / 2**30


def _free_bytes_of_gpu(gpu_number: int) -> int:
    """Measure the memory that is free on a GPU once this process has ended.

    The result is a little too low: memory that the driver keeps for this process counts as used.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(gpu_number)
    # When the process ends, all memory of torch's allocator becomes free, used or cached.
    return int(free_bytes + torch.cuda.memory_reserved(gpu_number))
