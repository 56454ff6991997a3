"""Network of a stage: from a configuration, from checkpoint metadata, and its initial weights."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from medseg.build.task import make_task
from medseg.config.rules import choose_strides, stated_divisor
from medseg.config.schema import UNET, SpacingConfig, StageName, TrainConfig
from medseg.config.targets import TARGET, bind_arguments, import_target
from medseg.data.task import Task
from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.geometry.strides import level_strides
from medseg.models.adapter import Traits, build_on_meta, channel_arguments, find_traits
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet
from medseg.weights.checks import check_arguments
from medseg.weights.files import read_weights


def make_network(config: TrainConfig) -> StageNetwork:
    """Make the network of a configuration, with fresh weights.

    Raises:
        UserError: If the arguments contradict each other.
    """
    node = network_node(config.model, config.spacing)
    if node[TARGET] != UNET:  # no argument of our UNet is only a label or a seed: too large a one runs out of memory
        try:
            check_arguments(node)  # what `predict` would refuse is refused before training
        except ValueError as error:
            raise UserError(f"model: {error}") from error
    return make_described_network(node, make_task(config.task), config.stage.name.value, config.trusted_targets)


def make_described_network(node: dict[str, Any], task: Task, stage: str, trusted: Sequence[str] = ()) -> StageNetwork:
    """Make the network that a configuration or the metadata of a checkpoint describes.

    Args:
        node: `_target_` and arguments beside the channels; metadata of version 0.1 name no target and mean our UNet.
        task: Gives the number of channels and classes.
        stage: `coarse`, `fine` or `single`.
        trusted: Prefixes of `trusted_targets`, of the present command.

    Raises:
        UserError: If the class is not trusted, or the arguments contradict each other.
    """
    num_classes = task.num_region_classes if stage == StageName.fine else task.num_classes
    node = {TARGET: UNET, **node}
    found = import_target("model", "model", node, trusted)
    stated = {name: node.pop(name, None) for name in ("divisor", "blocks")}
    del node[TARGET]

    def make(channels: int) -> nn.Module:
        network: nn.Module = bind_arguments(
            "model", "model", found, channel_arguments(found, to_tuples(node), channels, num_classes)
        )()
        return network

    channels = len(task.channels)
    try:
        traits = _find_traits(
            lambda: make(channels), repr((found, node, stated)), channels, num_classes, stated, node.get("img_size")
        )
        return StageNetwork(make, in_channels=channels, traits=traits)
    except UserError:
        raise
    except Exception as error:  # of any class that the configuration names
        if is_out_of_memory(error):
            raise
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model: {kind}{first_line(error)}") from error


_known_traits: dict[tuple[str, int, int], Traits] = {}


def _find_traits(
    make: Callable[[], nn.Module], description: str, channels: int, num_classes: int, stated: dict[str, Any], img_size: Any
) -> Traits:
    """Find the traits of a network once in a process: tracing takes a second."""
    key = (description, channels, num_classes)
    if key not in _known_traits:
        fixed = (img_size,) * 3 if isinstance(img_size, int) else tuple(img_size) if img_size else None
        divisor = tuple(stated["divisor"]) if stated["divisor"] else None
        _known_traits[key] = find_traits(make, channels, num_classes, divisor=divisor, blocks=stated["blocks"], fixed_size=fixed)
    return _known_traits[key]


def network_node(model: dict[str, Any], spacing: SpacingConfig) -> dict[str, Any]:
    """Describe the network of the `model` group by its class and arguments; the strides of our UNet follow the spacing."""
    # Null is an argument like any other, but for the keys of the framework.
    node = {
        name: value
        for name, value in model.items()
        if name != "device_map" and (value is not None or name not in ("divisor", "blocks"))
    }
    return {**node, "strides": choose_strides(model, spacing)} if model[TARGET] == UNET else node


def find_divisor(config: TrainConfig) -> tuple[int, int, int]:
    """Find the required multiple of the network's input size, in voxels (z, y, x)."""
    stated = stated_divisor(config.model, config.spacing)
    if stated is not None:
        return stated
    return make_network_on_meta(config).divisor


def make_network_on_meta(config: TrainConfig) -> StageNetwork:
    """Make the network of a configuration without memory and values."""
    return build_on_meta(lambda: make_network(config))


def load_initial_weights(network: StageNetwork, config: TrainConfig) -> None:
    """Copy the weights of `init_from` into a new network; without `init_from` nothing changes.

    Raises:
        UserError: If the file cannot be used, or holds another network than the configured one.
    """
    if config.init_from is None:
        return
    given = f"init_from={config.init_from}"
    metadata, weights = read_weights(Path(config.init_from), config.stage.name.value, "init_from")
    ours = _with_defaults(network_node(config.model, config.spacing))
    theirs = _with_defaults(metadata["model"])
    if ours != theirs:
        raise UserError(f"{given}: its network is {theirs}, but the configured one is {ours}; give the same model")
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
    node.pop("blocks", None)  # they change no result
    if node[TARGET] != UNET:
        return node
    parameters = inspect.signature(UNet).parameters.items()
    full = {name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty} | node
    full["strides"] = full["strides"] or level_strides(None, full["depth"] + (full["stem"] != "conv"))
    return full
