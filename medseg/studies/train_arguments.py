"""Arguments of trainings that a study runs: composed, checked and merged by key."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from medseg.config.check import explain, to_config
from medseg.config.experiment_file import register_experiments
from medseg.config.overrides import text_of
from medseg.errors import UserError
from medseg.runs.folder import settle
from medseg.targets import targets_first
from medseg.training.options import TrainConfig


def key_of(argument: str) -> str:
    """Return the key of a command-line argument.

    Example:
        >>> [key_of(argument) for argument in ("steps=5", "+data.label_values.trachea=5", "~rows")]
        ['steps', 'data.label_values.trachea', 'rows']
    """
    return argument.split("=", 1)[0].lstrip("+~")


def arguments_for_train(arguments: Sequence[str], schema: type[Any]) -> list[str]:
    """Keep the arguments of a study that `train` takes too.

    Args:
        arguments: Arguments of the study.
        schema: Schema of the study; the keys that it adds to that of `train` are left out.
    """
    train_keys = {field.name for field in fields(TrainConfig)}
    study_keys = {field.name for field in fields(schema)} - train_keys
    kept = []
    for argument in arguments:
        top_key = key_of(argument).split(".")[0]
        if top_key not in study_keys:
            kept.append(argument)
    return kept


def merge_arguments(*groups: Sequence[str]) -> tuple[str, ...]:
    """Keep one argument per key: an argument of a later group replaces that of an earlier one.

    Example:
        >>> merge_arguments(["steps=5", "seed=1"], ["steps=9"])
        ('steps=9', 'seed=1')
    """
    argument_of_key = {}
    for argument in itertools.chain(*groups):
        argument_of_key[key_of(argument)] = argument
    return tuple(argument_of_key.values())


def label_values_argument(label_values: Mapping[str, Any]) -> str:
    """Make the argument with the values in reference files; it adds names that the task lacks."""
    items = [f"{text_of(name)}: {text_of(value)}" for name, value in label_values.items()]
    return f"+data.label_values={{{', '.join(items)}}}"


def search_path_overrides() -> list[str]:
    """List the arguments `hydra.searchpath=[…]` of this command."""
    if not HydraConfig.initialized():
        return []
    overrides = HydraConfig.get().overrides.hydra
    return [override for override in overrides if key_of(override) == "hydra.searchpath"]


def compose_train(arguments: Sequence[str], where: str) -> TrainConfig:
    """Compose and check the configuration of a training.

    Args:
        arguments: Arguments of `train`.
        where: Key of the study that gives them, for messages.

    Raises:
        UserError: If `train` would refuse the arguments.
    """
    composed = compose_unchecked(arguments, where)
    try:
        config = to_config(composed, TrainConfig)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    settle(config)
    return config


def compose_unchecked(arguments: Sequence[str], where: str) -> DictConfig:
    """Compose the arguments of a training, unchecked; a mistake names the key that gave them."""
    register_experiments(arguments)
    try:
        # Folders of `--config-dir` belong to this process already.
        return hydra.compose("train", targets_first([*search_path_overrides(), *arguments]))
    except HydraException as error:
        raise UserError(f"{where}: {explain(error)}") from error


def folder_name(name: str) -> str:
    """Name the folder of a row; names that differ only in punctuation share one.

    Example:
        >>> folder_name("isotropic 1 mm")
        'isotropic_1_mm'
    """
    return re.sub(r"\W+", "_", name)


def check_names(rows: Sequence[str], *taken: str) -> None:
    """Refuse a study without rows, or with rows that would share a folder.

    Args:
        rows: Names of the rows.
        *taken: Folders that no row may have.

    Raises:
        UserError: With the names.
    """
    folders = [*map(folder_name, rows), *taken]
    if rows and len(set(folders)) == len(folders):
        return
    condition = f" and are none of {', '.join(taken)}" if taken else ""
    raise UserError(
        "rows: expected at least one row, with names that differ in more than punctuation"
        f"{condition}, but got {list(rows)}"
    )
