"""Hydra's composition for tests: each choice of files once, and values set on a copy of it.

Hydra reads and merges thirty files at each call, which takes a quarter of a second of processor
time; the tests compose some thousand configurations of a few hundred choices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

compose_all = hydra.compose


def compose(
    config_name: str, overrides: Sequence[str] = (), return_hydra_config: bool = False
) -> DictConfig:
    """Compose as `hydra.compose`, which this function replaces in the tests."""
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    if return_hydra_config or any(override.is_sweep_override() for override in parsed):
        return compose_all(config_name, list(overrides), return_hydra_config)
    choices, values = [], []
    for override in parsed:
        key = override.key_or_group
        if key.startswith("hydra") or loader.repository.group_exists(key):
            choices.append(override.input_line)
        else:
            values.append(override)
    sources = tuple(source.full_path() for source in loader.get_sources())
    config = copy.deepcopy(_choose(sources, config_name, tuple(choices)))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


@functools.cache
def _choose(sources: tuple[str, ...], config_name: str, choices: tuple[str, ...]) -> DictConfig:
    """Compose the chosen files; `sources`, the folders that Hydra searches, are part of the key."""
    return compose_all(config_name, list(choices))
