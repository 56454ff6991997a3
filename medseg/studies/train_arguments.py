"""Functions that select, merge, compose and check the arguments of a study's trainings."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from medseg.config.check import explain, to_config, to_typed
from medseg.config.experiment_file import register_experiments
from medseg.config.overrides import text_of
from medseg.data.spacing import find_spacing
from medseg.errors import UserError
from medseg.preprocess.options import FOUND_IN_DATA
from medseg.runs.folder import allows_more_steps, load_config, resolve_paths_and_spacing
from medseg.runs.signature import changed_keys, decisive, describe_changes, plain
from medseg.targets import targets_first
from medseg.training.options import TrainConfig

# Keys of the configuration that hold paths on the training machine.
FOLDER_KEYS = (
    "run_dir",
    "resume",
    "init_from",
    "data.cases",
    "data.cache",
    "data.phantoms.folder",
    "stage.coarse",
    "stage.coarse_folds",
    "logger.save_dir",
)


def key_of(argument: str) -> str:
    """Return the key of a command-line argument in Hydra's grammar.

    Example:
        >>> [key_of(argument) for argument in ("steps=5", "+data.label_values.trachea=5", "~rows")]
        ['steps', 'data.label_values.trachea', 'rows']
    """
    return argument.split("=", 1)[0].lstrip("+~")


def arguments_for_train(arguments: Sequence[str], schema: type[Any]) -> list[str]:
    """Select the arguments of a study that are also arguments of `train`.

    Args:
        arguments: Arguments of the study.
        schema: Schema of the study. Keys that it has and `train` lacks are the study's own; their
            arguments are left out.
    """
    train_keys = {field.name for field in fields(TrainConfig)}
    study_keys = {field.name for field in fields(schema)} - train_keys
    train_arguments = []
    for argument in arguments:
        # `fields` of a schema are the keys at the top level, such as `data` for `data.cases`.
        top_key = key_of(argument).split(".")[0]
        if top_key not in study_keys:
            train_arguments.append(argument)
    return train_arguments


def merge_arguments(*groups: Sequence[str]) -> tuple[str, ...]:
    """Keep one argument per key: a later argument takes the place of an earlier one.

    Example:
        >>> merge_arguments(["steps=5", "seed=1"], ["steps=9"])
        ('steps=9', 'seed=1')
    """
    argument_of_key = {}
    for argument in itertools.chain(*groups):
        argument_of_key[key_of(argument)] = argument
    return tuple(argument_of_key.values())


def search_path_overrides() -> list[str]:
    """List the arguments `hydra.searchpath=[…]` of this command."""
    # Hydra is not initialised if the study was called as a function, not as a command.
    if not HydraConfig.initialized():
        return []
    overrides = HydraConfig.get().overrides.hydra
    return [override for override in overrides if key_of(override) == "hydra.searchpath"]


def compose_train(arguments: Sequence[str], where: str) -> TrainConfig:
    """Compose and check the configuration of a training.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study under which the user gave them, for messages.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    config = compose_unresolved(arguments, where)
    resolve_paths_and_spacing(config)
    return config


def compose_unresolved(arguments: Sequence[str], where: str) -> TrainConfig:
    """Compose a configuration as `compose_train`, with relative paths and without reading data.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study under which the user gave them, for messages.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    composed = compose_unchecked(arguments, where)
    try:
        return to_config(composed, TrainConfig)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def compose_unchecked(arguments: Sequence[str], where: str) -> DictConfig:
    """Compose the configuration of a training without checking its values.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study under which the user gave them, for messages.

    Raises:
        UserError: If Hydra cannot compose them.
    """
    register_experiments(arguments)
    try:
        # Hydra knows folders of `--config-dir` since the start of this process: they need no
        # argument.
        return hydra.compose("train", targets_first([*search_path_overrides(), *arguments]))
    except HydraException as error:
        raise UserError(f"{where}: {explain(error)}") from error


def spacing_argument(arguments: Sequence[str], where: str) -> list[str]:
    """Make the argument for the spacing of several trainings whose networks are to be averaged.

    Each training would average a spacing of `FOUND_IN_DATA` over its own cases, so that the
    networks of two folds would differ in it.

    Args:
        arguments: Arguments of `train` that select the cases of all these trainings.
        where: Key of the study under which the user gave them, for messages.

    Returns:
        List of the argument; empty where the spacing does not depend on the cases.

    Raises:
        UserError: If the arguments are wrong, or the cases cannot be read.
    """
    config = to_typed(compose_unchecked(arguments, where), TrainConfig)
    spacing = config.spacing
    if spacing.strategy not in FOUND_IN_DATA or spacing.target_spacing_mm is not None:
        return []
    find_spacing(spacing, config.data, config.task)
    return [f"spacing.target_spacing_mm={text_of(spacing.target_spacing_mm)}"]


def check_same_training(run_dir: Path, config: TrainConfig, *, can_extend: bool = False) -> None:
    """Refuse to take a training for that of a configuration which would give another result.

    Args:
        run_dir: Folder of the run.
        config: Configuration of `compose_train`.
        can_extend: Whether the study continues a training that has fewer steps. More steps are then
            accepted where `train` would resume the run with them.

    Raises:
        UserError: Names the keys that differ.
    """
    trained, configured = _decisive_values(run_dir, config)
    keys = _changed_keys(trained, configured)
    has_more_steps = keys == ["steps"] and configured["steps"] > trained["steps"]
    if can_extend and has_more_steps and allows_more_steps(trained, configured):
        return
    if keys:
        raise UserError(
            f"{run_dir} holds a training with another configuration "
            f"({describe_changes(keys, trained, configured)}); "
            "restore these values, or give another output"
        )


def training_changes(run_dir: Path, config: TrainConfig) -> str:
    """Describe where the configuration of a run differs, so that its result would; "" if nowhere.

    Args:
        run_dir: Folder of the run.
        config: Configuration of `compose_train` or `compose_unresolved`.

    Raises:
        UserError: If the configuration of the run is damaged, or of an older version.
    """
    trained, configured = _decisive_values(run_dir, config)
    return describe_changes(_changed_keys(trained, configured), trained, configured)


def _decisive_values(run_dir: Path, config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the values that can change a result: those of a run, and those of a configuration."""
    trained = load_config(run_dir, config.trusted_targets)
    resolve_paths_and_spacing(trained)
    spacing = config.spacing
    # The run has found its spacing in the headers of all training cases: they are not read again.
    if spacing.target_spacing_mm is None and spacing.strategy is trained.spacing.strategy:
        spacing = replace(spacing, target_spacing_mm=trained.spacing.target_spacing_mm)
    return decisive(plain(trained)), decisive(plain(replace(config, spacing=spacing)))


def _changed_keys(trained: Mapping[str, Any], configured: Mapping[str, Any]) -> list[str]:
    """List the keys that differ, without paths of files that have only moved."""
    keys = []
    for key in changed_keys(trained, configured):
        # A table that was moved may have another name too; resuming a run ignores it as well.
        if key == "data.cases":
            continue
        is_path = key in FOLDER_KEYS
        if is_path and _file_names(trained.get(key)) == _file_names(configured.get(key)):
            continue
        keys.append(key)
    return keys


def _file_names(paths: str | Sequence[str] | None) -> list[str]:
    """List the last part of one path, or of several; empty for None."""
    if paths is None:
        return []
    if isinstance(paths, str):
        return [Path(paths).name]
    return [Path(path).name for path in paths]


def folder_name(name: str) -> str:
    """Make the folder name of a row; names that differ only in punctuation give the same name.

    Example:
        >>> folder_name("isotropic 1 mm")
        'isotropic_1_mm'
    """
    return re.sub(r"\W+", "_", name)


def check_names(rows: Sequence[str], *taken: str) -> None:
    """Refuse a study without rows, or with rows that would share a folder.

    Args:
        rows: Names of the rows.
        *taken: Names of folders that no row may have.

    Raises:
        UserError: Lists the names of the rows.
    """
    folders = [*map(folder_name, rows), *taken]
    are_distinct = len(set(folders)) == len(folders)
    if rows and are_distinct:
        return
    condition = f" and are none of {', '.join(taken)}" if taken else ""
    raise UserError(
        "rows: expected at least one row, with names that differ in more than punctuation"
        f"{condition}, but got {list(rows)}"
    )
