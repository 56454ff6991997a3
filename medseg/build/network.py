"""Network of a stage: from a configuration, from checkpoint metadata, and its initial weights."""

import inspect
from pathlib import Path
from typing import Any

from medseg.build.task import make_task
from medseg.config.rules import choose_strides
from medseg.config.schema import ModelConfig, SpacingConfig, StageConfig, TrainConfig
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
    return make_described_network(
        network_arguments(config.model, config.spacing), make_task(config.task), region_mode_of(config.stage)
    )


def make_described_network(arguments: dict[str, Any], task: Task, region_mode: str) -> RegionalNetwork:
    """Make the network that a configuration or the metadata of a checkpoint describes.

    Args:
        arguments: Arguments of `UNet` beside the channels.
        task: Gives the number of classes and regions.
        region_mode: `whole` for the coarse stage, else a mode of `RegionalNetwork`.

    Raises:
        UserError: If the arguments contradict each other.
    """
    is_whole = region_mode == "whole"
    num_classes = task.num_classes if is_whole else task.num_region_classes
    try:
        return RegionalNetwork(
            lambda in_channels: UNet(in_channels, num_classes, **arguments),
            num_regions=1 if is_whole else len(task.regions),
            mode=region_mode,
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from error


def network_arguments(model: ModelConfig, spacing: SpacingConfig) -> dict[str, Any]:
    """Translate the `model` group to arguments of `UNet`; its strides follow the spacing."""
    return {
        "width": model.width,
        "depth": model.depth,
        "block": model.block.value,
        "blocks_per_level": tuple(model.blocks_per_level),
        "stem": model.stem.value,
        "refine": model.refine,
        "norm": model.norm.value,
        "strides": choose_strides(model, spacing),
    }


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
    ours = {"model": _with_defaults(network_arguments(config.model, config.spacing)), "region_mode": region_mode_of(config.stage)}
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


def _with_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Complete the arguments of a network: where metadata predates an argument, its default holds."""
    parameters = inspect.signature(UNet).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty}
    full = {**defaults, **to_tuples(arguments)}
    full["strides"] = full["strides"] or level_strides(None, full["depth"] + (full["stem"] != "conv"))
    return full
