"""Hydra's composition for tests: each choice of files once, and values set on a copy of it.

Hydra reads and merges thirty files at each call, which takes a quarter of a second of processor
time; the tests compose some thousand configurations of a few hundred choices. Each file is read
once. Copies are pickled ones: `copy.deepcopy` of a configuration takes seven times as long.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, flag_override

compose_all = hydra.compose
# Hydra's plugins are the classes of its own registry, not those of an import.
Plugins.instance()
FileSource = SourcesRegistry.instance().resolve("file")
PackageSource = SourcesRegistry.instance().resolve("pkg")
read_file = FileSource.load_config
read_package_file = PackageSource.load_config
map_choices = defaults_list._create_interpolation_map

# Nodes of Hydra's store that a composition has seen. They stay, so that no other gets their id.
nodes: dict[int, Any] = {}


def install() -> None:
    """Let Hydra compose and read as this module does, in its own `hydra.main` too."""
    hydra.compose = compose
    FileSource.load_config = _load_file
    PackageSource.load_config = _load_package_file
    ConfigStore.load = _load_stored
    defaults_list._create_interpolation_map = _map_choices
    CachingConfigRepository.__init__ = _copy_repository
    ConfigLoaderImpl._embed_result_config = staticmethod(_embed)


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
    config = pickle.loads(_choose((*sources, *stored), config_name, tuple(choices)))
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
def _choose(sources: tuple[str | int, ...], config_name: str, choices: tuple[str, ...]) -> bytes:
    """Compose the chosen files; the folders and nodes that Hydra searches are part of the key."""
    return pickle.dumps(compose_all(config_name, list(choices)))


def _load_file(source: Any, config_path: str) -> ConfigResult:
    """Read a file as `FileConfigSource.load_config`, which this function replaces."""
    file = Path(source.path, source._normalize_file_name(config_path))
    if not file.is_file():
        return read_file(source, config_path)
    state = file.stat()
    return pickle.loads(
        _read_pickled(source.path, source.provider, config_path, state.st_mtime_ns, state.st_size)
    )


@functools.cache
def _read_pickled(
    folder: str, provider: str, config_path: str, modified_ns: int, num_bytes: int
) -> bytes:
    """Read a file; its state is part of the key, because tests write files of their own."""
    return pickle.dumps(read_file(FileSource(provider, folder), config_path))


def _load_package_file(source: Any, config_path: str) -> ConfigResult:
    """Read a file of Hydra's own as the method that this function replaces."""
    return pickle.loads(_read_package_pickled(source.path, source.provider, config_path))


@functools.cache
def _read_package_pickled(package: str, provider: str, config_path: str) -> bytes:
    """Read a file of a package, which no test changes."""
    return pickle.dumps(read_package_file(PackageSource(provider, f"pkg://{package}"), config_path))


def _map_choices(overrides: Any, defaults: Sequence[Any], self_added: bool) -> DictConfig:
    """Map the choices for names with interpolations; Hydra makes the map of each file for them."""
    if "${" in repr(defaults):
        return map_choices(overrides, defaults, self_added)
    return DictConfig({})


def _copy_repository(caching: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """Begin as the method that this function replaces: new sources are a new list."""
    caching.delegate = copy.copy(delegate)
    caching.cache = {}


def _embed(loaded: ConfigResult, package_override: str | None) -> ConfigResult:
    """Put a file at its place as the method that this function replaces."""
    package = loaded.header["package"] if package_override is None else package_override
    if not package:
        return loaded
    embedded = OmegaConf.create()
    with flag_override(embedded, "no_deepcopy_set_nodes", True):
        copied = pickle.loads(pickle.dumps(loaded.config))
        OmegaConf.update(embedded, package, copied, merge=False)
    placed = copy.copy(loaded)
    placed.config = embedded
    return placed


def _load_stored(store: ConfigStore, config_path: str) -> ConfigNode:
    """Load a node as `ConfigStore.load`, which this function replaces."""
    stored = store._load(config_path)
    nodes[id(stored)] = stored
    loaded = copy.copy(stored)
    loaded.node = pickle.loads(_node_pickled(id(stored)))
    return loaded


@functools.cache
def _node_pickled(node_id: int) -> bytes:
    """Pickle the configuration of a stored node."""
    return pickle.dumps(nodes[node_id].node)
