"""Experiments outside of `conf/experiment`: `experiment=<path>.yaml` names a file anywhere.

The file of a cascade has the keys `coarse` and `fine` of `cross_validate`, which name the files of
its stages, relative to its own folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from medseg.config.yaml_file import read_yaml
from medseg.errors import UserError

GROUP = "experiment"
# Keys of the experiments of a cascade's stages.
STAGES = ("coarse", "fine")
# All keys of such an experiment.
CASCADE_KEYS = (*STAGES, "pretrain_coarse", "pretrain_fine")
SUFFIX = ".yaml"


def register_experiments(arguments: Sequence[str]) -> None:
    """Let Hydra find each experiment that an argument names by its file.

    Args:
        arguments: Arguments of a command. Other keys, experiments of `conf/experiment` and lists
            for a sweep are ignored.

    Raises:
        UserError: If a file is missing, damaged, or no mapping of keys; if that of a cascade has a
            key which would reach no training.
    """
    for argument in arguments:
        value = _file_of(argument)
        if value is not None:
            _register(value)


def names_stages(argument: str) -> bool:
    """Whether an argument is the experiment file of a cascade, which names those of its stages."""
    value = _file_of(argument)
    return value is not None and _has_stages(_read(value))


def check_no_cascade(arguments: Sequence[str]) -> None:
    """Refuse the experiment file of a cascade, for a command that trains a single stage.

    Raises:
        UserError: Names the files of the stages.
    """
    for argument in arguments:
        value = _file_of(argument)
        if value is not None and _has_stages(_read(value)):
            content = _with_paths_of_stages(_read(value), Path(value).parent)
            raise UserError(
                f"{argument}: it names the experiments of both stages, for cross_validate; "
                f"give experiment={content['coarse']} or experiment={content['fine']}"
            )


def _file_of(argument: str) -> str | None:
    """Return the path in `experiment=<path>.yaml`; None if it is another argument."""
    key, _, value = argument.partition("=")
    value = value.strip("'\"")
    is_one_file = value.endswith(SUFFIX) and "," not in value  # a comma divides a sweep
    return value if key.lstrip("+") == GROUP and is_one_file else None


def _read(value: str) -> dict[str, Any]:
    """Read an experiment file; see `register_experiments` for the errors."""
    path = Path(value)
    if not path.is_file():
        raise UserError(f"experiment={value}: there is no such file; check the path")
    content = read_yaml(path, "an experiment", "correct it")
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected the keys of an experiment, but it holds none")
    return content


def _has_stages(content: Mapping[str, Any]) -> bool:
    """Whether an experiment names the experiments of two stages."""
    return all(isinstance(content.get(stage), str) for stage in STAGES)


def _with_paths_of_stages(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Complete the paths of the experiment files of both stages, which are relative to a folder.

    Args:
        content: Keys of the experiment of a cascade.
        folder: The folder.

    Raises:
        UserError: If the experiment has a key which would reach no training.
    """
    completed = dict(content)
    for stage in STAGES:
        # Another name is that of an experiment in `conf/experiment`.
        if content[stage].endswith(SUFFIX):
            completed[stage] = str(folder / content[stage])
    for key in content:
        if key not in CASCADE_KEYS:
            raise UserError(
                f"{key}: an experiment that names those of two stages reaches no training; set "
                f"the key in {completed['coarse']} and {completed['fine']}"
            )
    return completed


def _register(value: str) -> None:
    """Register a file with Hydra, so that its path is a choice of the group `experiment`."""
    content = _read(value)
    if _has_stages(content):
        content = _with_paths_of_stages(content, Path(value).parent)
    # Hydra looks for `a/b.yaml` as the choice `b.yaml` of the group `experiment/a`, and skips empty
    # parts of a path.
    *folders, name = [part for part in value.split("/") if part]
    ConfigStore.instance().store(
        name,
        OmegaConf.create(content),
        group="/".join([GROUP, *folders]),
        # An experiment has keys of all groups, like `# @package _global_` in `conf/experiment`.
        package="_global_",
    )
