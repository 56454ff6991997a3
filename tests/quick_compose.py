"""Hydra's composition for tests: each choice of files once, and values set on a copy of it.

Hydra reads and merges thirty files at each call, which takes a quarter of a second of processor
time; the tests compose some thousand configurations of a few hundred choices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

compose_all = hydra.compose

# Nodes of Hydra's store that a composition has seen. They stay, so that no other gets their id.
nodes: dict[int, Any] = {}


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
    stored = {id(node): node for node in _stored_nodes(ConfigStore.instance().repo)}
    nodes.update(stored)
    config = copy.deepcopy(_choose((*sources, *stored), config_name, tuple(choices)))
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def _stored_nodes(entries: Mapping[str, Any]) -> Iterator[Any]:
    """Configurations in Hydra's store: a task that is imported is put there anew."""
    for entry in entries.values():
        if isinstance(entry, Mapping):
            yield from _stored_nodes(entry)
        else:
            yield entry


@functools.cache
def _choose(
    sources: tuple[str | int, ...], config_name: str, choices: tuple[str, ...]
) -> DictConfig:
    """Compose the chosen files; the folders and nodes that Hydra searches are part of the key."""
    return compose_all(config_name, list(choices))
