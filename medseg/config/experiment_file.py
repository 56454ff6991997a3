"""Experiments outside of `conf/experiment`: `experiment=<path>.yaml` names a file anywhere."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from medseg.config.yaml_file import read_yaml
from medseg.errors import UserError

GROUP = "experiment"
SUFFIX = ".yaml"


def register_experiments(arguments: Sequence[str]) -> None:
    """Let Hydra find each experiment that an argument names by its file.

    Args:
        arguments: Arguments of a command. Other keys, experiments of `conf/experiment` and lists
            for a sweep are ignored.

    Raises:
        UserError: If a file is missing, damaged, or no mapping of keys.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        value = value.strip("'\"")
        is_one_file = value.endswith(SUFFIX) and "," not in value  # a comma divides a sweep
        if key.lstrip("+") == GROUP and is_one_file:
            _register(value)


def _register(value: str) -> None:
    """Register a file with Hydra, so that its path is a choice of the group `experiment`."""
    path = Path(value)
    if not path.is_file():
        raise UserError(f"experiment={value}: there is no such file; check the path")
    content = read_yaml(path, "an experiment", "correct it")
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected the keys of an experiment, but it holds none")
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
