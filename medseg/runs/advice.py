"""Command lines that a run proposes: its plan when memory ran out, and what follows its end."""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.imported import IMPORTED, SOURCE_VARIABLE, VALUES
from medseg.config.overrides import PATH_KEYS, text_of
from medseg.data.options import StageName
from medseg.inference.options import Backend, InferenceOptions
from medseg.memory.options import Accelerator
from medseg.memory.profile import free_memory_bytes, private_bytes
from medseg.training.options import TrainConfig
from medseg.weights.included import INCLUDED_TASK
from medseg.wording import quote_for_shell, shell_line

# Keys of `data` that choose the cases, the split and the values of a run: the next stage must not
# train on other cases.
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
# Arguments of `train` that say where a run goes on, or that `fit_gib` excludes.
NOT_PLANNED = ("debug", "memory.budget_gib", "retry_failed")


def plan_command(config: TrainConfig, overrides: Sequence[str]) -> str:
    """Write the `plan` of a training command, with the free memory of this machine as its bound.

    Args:
        config: Configuration of the run, which tells the device.
        overrides: Arguments of the command, as Hydra got them.

    Returns:
        One command line for a shell.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(accelerator=Accelerator.cpu, devices=1)
        >>> overrides = ["stage=fine", "memory.budget_gib=2", "data.cases='my scans/cases.csv'"]
        >>> plan_command(SimpleNamespace(trainer=trainer), overrides).partition(" fit_gib=")[0]
        "medseg plan stage=fine 'data.cases=my scans/cases.csv'"
    """
    # Rounded down: a plan for more than there is would run out of memory again.
    tenths = max(1, math.floor(10 * _free_gib(config)))
    fit_gib = f"fit_gib={tenths / 10:.1f}"
    return shell_line(["medseg", "plan", *_planned(overrides), fit_gib])


def next_command(config: TrainConfig, checkpoint: Path) -> str:
    """Write the command that follows a run: the fine stage after the coarse one, else a prediction.

    A prediction gets the memory that its networks need, where the default is less.

    Args:
        config: Configuration of the run.
        checkpoint: Its best checkpoint.
    """
    if config.stage.name is StageName.coarse and config.task.regions:
        arguments = ["train", "stage=fine", *_task_argument(config), *_data_arguments(config)]
        arguments += ["stage.region_from=coarse", f"stage.coarse={checkpoint}"]
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
        arguments += budget_argument(files, config.trusted_targets)
    if config.trusted_targets:
        arguments.append(f"trusted_targets=[{','.join(config.trusted_targets)}]")
    words = ["medseg"]
    for argument in arguments:
        is_to_be_filled_in = "<" in argument
        words.append(argument if is_to_be_filled_in else quote_for_shell(argument))
    return " ".join(words)


def budget_argument(files: Sequence[Path], trusted: Sequence[str]) -> list[str]:
    """Argument of `predict` for the memory of a network pass; none where the default is enough.

    Args:
        files: Checkpoints or safetensors files of the stages. One that cannot be loaded and run on
            the CPU is left out: `predict` says why.
        trusted: Prefixes of `trusted_targets`.
    """
    import torch  # loaded by the run that has ended

    from medseg.cascade.load import load_stage

    options = InferenceOptions(backend=Backend.torch)  # another one is measured first
    least_gib = options.budget_gib
    for file in files:
        # A user's network may raise anything, and an advice must not fail a run that has finished.
        with suppress(Exception):
            # A GPU needs no more: it has every precision of a training.
            stage = load_stage(file, None, torch.device("cpu"), trusted=trusted, options=options)
            least_gib = max(least_gib, stage.least_budget_gib)
    if least_gib == options.budget_gib:
        return []
    return [f"inference.budget_gib={least_gib:g}"]


def _data_arguments(config: TrainConfig) -> list[str]:
    """Arguments for the cases of a run, their split and the values in their files.

    Those that equal the defaults are left out.
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
            # A run keeps its paths absolute.
            is_default = os.path.abspath(value) == os.path.abspath(default)
        if not is_default:
            # Paths stand as they are: `quote_paths` quotes them.
            text = value if is_path else text_of(value)
            arguments.append(f"data.{key}={text}")
    # An imported task brings its values along.
    is_imported = SOURCE_VARIABLE in os.environ
    has_own_values = data.label_values and data.label_values != config.task.labels
    if has_own_values and not is_imported:
        arguments.append(f"++data.label_values={text_of(data.label_values)}")
    return arguments


def _task_argument(config: TrainConfig) -> list[str]:
    """Argument that names the task; none where it comes with the cases, or is the default."""
    if os.environ.get(SOURCE_VARIABLE, ""):
        return _task_file_argument()
    name = config.task.name
    is_preset = (conf_dir() / "task" / f"{name}.yaml").is_file()
    if is_preset and name != INCLUDED_TASK:
        return [f"task={name}"]
    return []


def _task_file_argument() -> list[str]:
    """Argument that names the file of an imported task; none where it lies beside the cases.

    There it is found again by `data.cases`.
    """
    source = os.environ.get(SOURCE_VARIABLE, "")
    if source.endswith((".yaml", ".yml")):
        return [f"task={source}"]
    return []


def _planned(overrides: Sequence[str]) -> list[str]:
    """Arguments of `train` as a user types them for `plan`, without those of one run."""
    planned = []
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+~")
        # Of Hydra's own keys, only the search path finds something that a plan needs.
        is_hydra = name.startswith(("hydra.", "hydra/")) and name != "hydra.searchpath"
        if is_hydra or name in NOT_PLANNED or override in ("resume=auto", VALUES):
            continue
        if override == f"task={IMPORTED}":
            planned += _task_file_argument()
            continue
        is_quoted = len(value) > 1 and value[0] == value[-1] == "'"
        if name in PATH_KEYS and is_quoted:
            value = value[1:-1].replace("\\'", "'")
            override = f"{key}={value}"
        planned.append(override)
    return planned


def _free_gib(config: TrainConfig) -> float:
    """Memory that a rank would find, in GiB, once this process has ended.

    That of the GPU with the least, or its share of this machine's.
    """
    import torch  # loaded by the run that has ended

    if config.trainer.accelerator is not Accelerator.cpu and torch.cuda.is_available():
        return min(map(_free_of_gpu, range(torch.cuda.device_count()))) / 2**30
    own_bytes = private_bytes(os.getpid())
    return (free_memory_bytes() + own_bytes) / config.trainer.devices / 2**30


def _free_of_gpu(number: int) -> int:
    """Bytes of a GPU that no other process holds.

    What the driver keeps for this process is not counted.
    """
    import torch

    free, _ = torch.cuda.mem_get_info(number)
    return int(free + torch.cuda.memory_reserved(number))
