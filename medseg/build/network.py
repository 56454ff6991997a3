"""Network of a stage: from a configuration, from checkpoint metadata, and its initial weights."""

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from medseg.build.task import make_task
from medseg.config.rules import choose_strides, stated_divisor
from medseg.config.schema import UNET, SpacingConfig, StageConfig, TrainConfig
from medseg.config.targets import TARGET, bind_arguments, import_target
from medseg.data.task import Task
from medseg.errors import UserError, first_line
from medseg.models.unet import RegionalNetwork, UNet
from medseg.strides import level_strides
from medseg.weights.files import read_weights


def make_network(config: TrainConfig) -> RegionalNetwork:
    """Make the network of a configuration, with fresh weights.

    Raises:
        UserError: If the arguments contradict each other.
    """
    node = network_node(config.model, config.spacing)
    return make_described_network(node, make_task(config.task), region_mode_of(config.stage), config.trusted_targets)


def make_described_network(node: dict[str, Any], task: Task, region_mode: str, trusted: Sequence[str] = ()) -> RegionalNetwork:
    """Make the network that a configuration or the metadata of a checkpoint describes.

    Args:
        node: `_target_` and arguments beside the channels; metadata of version 0.1 name no target and mean our UNet.
        task: Gives the number of classes and regions.
        region_mode: `whole` for the coarse stage, else a mode of `RegionalNetwork`.
        trusted: Prefixes of `trusted_targets`, of the present command.

    Raises:
        UserError: If the class is not trusted, or the arguments contradict each other.
    """
    is_whole = region_mode == "whole"
    num_classes = task.num_classes if is_whole else task.num_region_classes
    arguments = {name: value for name, value in node.items() if name != TARGET}
    found = import_target("model", "model", {TARGET: UNET, **node}, trusted)
    bind = partial(bind_arguments, "model", "model", found)
    try:
        return RegionalNetwork(
            lambda in_channels: bind({"in_channels": in_channels, "num_classes": num_classes, **arguments})(),
            num_regions=1 if is_whole else len(task.regions),
            mode=region_mode,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def network_node(model: dict[str, Any], spacing: SpacingConfig) -> dict[str, Any]:
    """Describe the network of the `model` group by its class and arguments; the strides of our UNet follow the spacing."""
    node = {name: value for name, value in model.items() if name != "device_map" and value is not None}
    return {**node, "strides": choose_strides(model, spacing)} if model[TARGET] == UNET else node


def find_divisor(config: TrainConfig) -> tuple[int, int, int]:
    """Find the required multiple of the network's input size, in voxels (z, y, x)."""
    stated = stated_divisor(config.model, config.spacing)
    if stated is not None:
        return stated
    with torch.device("meta"):
        return make_network(config).divisor


def region_mode_of(stage: StageConfig) -> str:
    """Name how the regions share the network; the coarse stage predicts all of them at once (`whole`)."""
    return stage.region_mode.value if stage.region_mode else "whole"


def load_initial_weights(network: RegionalNetwork, config: TrainConfig) -> None:
    """Copy the weights of `init_from` into a new network; without `init_from` nothing changes.

    Raises:
        UserError: If the file cannot be used, or holds another network than the configured one.
    """
    if config.init_from is None:
        return
    given = f"init_from={config.init_from}"
    metadata, weights = read_weights(Path(config.init_from), config.stage.name.value, "init_from")
    ours = {"model": _with_defaults(network_node(config.model, config.spacing)), "region_mode": region_mode_of(config.stage)}
    theirs = {"model": _with_defaults(metadata["model"]), "region_mode": metadata["region_mode"]}
    if ours != theirs:
        raise UserError(
            f"{given}: its network is {theirs}, but the configured one is {ours}; give the same model and region_mode"
        )
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{given}: its weights do not fit the task {config.task.name} ({first_line(error)})") from error


def to_tuples(value: Any) -> Any:
    """Convert nested lists of a JSON file to tuples."""
    if isinstance(value, dict):
        return {key: to_tuples(item) for key, item in value.items()}
    return tuple(map(to_tuples, value)) if isinstance(value, list) else value


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Complete the arguments of our UNet: where metadata predates an argument, its default holds."""
    node = {TARGET: UNET, **to_tuples(node)}
    if node[TARGET] != UNET:
        return node
    parameters = inspect.signature(UNet).parameters.items()
    full = {name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty} | node
    full["strides"] = full["strides"] or level_strides(None, full["depth"] + (full["stem"] != "conv"))
    return full
