"""Network of a stage: from a configuration, from checkpoint metadata, and its initial weights."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medseg.data.options import StageName
from medseg.errors import UserError, first_line
from medseg.geometry.strides import level_strides
from medseg.models.described import make_described_network, to_tuples
from medseg.models.options import UNET, count_strides
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import build_on_meta
from medseg.models.unet import UNet
from medseg.nnunet.folder import is_start
from medseg.preprocess.options import SpacingOptions
from medseg.targets import TARGET
from medseg.task_options import make_task
from medseg.training.input_sizes import choose_strides, stated_divisor
from medseg.training.options import TrainConfig
from medseg.training.plan_weights import load_plan_weights
from medseg.weights.checks import check_arguments
from medseg.weights.files import read_weights

# A class that initial weights lack starts with the logits of the background plus this number.
RARE_LOGIT = -2.0


def make_network(config: TrainConfig) -> StageNetwork:
    """Make the network of a configuration, with fresh weights.

    Raises:
        UserError: If the arguments contradict each other.
    """
    node = network_node(config.model, config.spacing)
    # `predict` refuses a checkpoint whose arguments are numbers that are too large. They are
    # refused here too, before time is spent on a training. Our UNet needs no check: with such
    # numbers it does not fit into memory, so that there is no training.
    if node[TARGET] != UNET:
        try:
            check_arguments(node)
        except ValueError as error:
            raise UserError(f"model: {error}") from error
    return make_described_network(
        node,
        make_task(config.task),
        config.stage.name.value,
        config.trusted_targets,
        has_coarse_channel=config.stage.coarse_channel,
    )


def count_channels(config: TrainConfig) -> int:
    """Count the channels of the network's input: those of the task and the coarse channel."""
    return len(make_task(config.task).channels) + config.stage.coarse_channel


def network_node(model: dict[str, Any], spacing: SpacingOptions) -> dict[str, Any]:
    """Describe the network of the `model` group by its class and arguments.

    The strides of our UNet follow the spacing.
    """
    node = {}
    for name, value in model.items():
        # On which devices the parts of a network are is no property of the network.
        if name == "device_map":
            continue
        # Of these two keys, which are no arguments of the class, null means "find it out". Of any
        # argument it is a value.
        if value is None and name in ("divisor", "blocks"):
            continue
        node[name] = value
    if model[TARGET] == UNET:
        node["strides"] = choose_strides(model, spacing)
    return node


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

    If only the new network has a coarse channel, the weights of that channel are zero, so that the
    network predicts at first what that of the file does. Classes that the file lacks start with the
    weights of the background and a lower logit (RARE_LOGIT), so that they are hardly predicted.

    Raises:
        UserError: If the file cannot be used, or holds another network than the configured one.
    """
    if config.init_from is None:
        return
    # A model folder of nnU-Net, one of its folds, or a zip file of it.
    if is_start(Path(config.init_from)):
        load_plan_weights(network, config)
        return
    key = f"init_from={config.init_from}"
    metadata, weights = read_weights(Path(config.init_from), config.stage.name.value, "init_from")
    configured = _with_defaults(network_node(config.model, config.spacing))
    saved = _with_defaults(metadata["model"])
    if configured != saved:
        raise UserError(
            f"{key}: its network is {saved}, but the configured one is {configured}; "
            "give the same model"
        )
    if config.stage.coarse_channel and not metadata.get("coarse_channel"):
        weights = _with_zero_channel(network, weights)
    # `<` of two sets: the file has some of the labels of the task, with the same values. Values are
    # 1, 2, … without a gap, so the labels that it lacks have the highest ones.
    has_fewer_labels = metadata["task"]["labels"].items() < make_task(config.task).labels.items()
    if has_fewer_labels:
        num_classes = int(metadata["num_classes"])
        weights = _with_rare_classes(network, weights, num_classes, count_classes(config))
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"{key}: its weights do not fit the task {config.task.name} ({first_line(error)})"
        ) from error


def _with_zero_channel(network: StageNetwork, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add zeros for the last channel of the input to the weights of each layer that sees the input.

    Such a layer, of shape (outputs, inputs, ...), has more inputs in the network than in the
    weights, and is the same along the other axes. Its inputs are in the order of the channels, also
    where a stem folds voxels into channels, so that the last channel is at the end of the axis.
    """
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    extended = dict(weights)
    for name, value in weights.items():
        shape = shapes.get(name, value.shape)
        if value.ndim < 2 or len(shape) != value.ndim:
            continue
        num_added = shape[1] - value.shape[1]
        differs_elsewhere = shape[0] != value.shape[0] or shape[2:] != value.shape[2:]
        if num_added <= 0 or differs_elsewhere:
            continue
        zeros = value.new_zeros(shape[0], num_added, *shape[2:])
        extended[name] = torch.cat([value, zeros], dim=1)
    return extended


def _with_rare_classes(
    network: StageNetwork, weights: dict[str, Tensor], num_old: int, num_new: int
) -> dict[str, Tensor]:
    """Add the classes that the weights lack, as the last ones, to each layer that makes the logits.

    Such a layer, of shape (outputs, ...), has `num_new` outputs in the network for `num_old` in the
    weights, or the same multiple of both where a head unfolds channels into voxels. Its outputs are
    in the order of the classes, so that the first ones are those of the background.

    Args:
        network: The network with all classes.
        weights: Weights with fewer classes, not changed.
        num_old: Classes of the weights.
        num_new: Classes of the network.
    """
    shapes = {name: value.shape for name, value in network.state_dict().items()}
    extended = dict(weights)
    for name, value in weights.items():
        shape = shapes.get(name, value.shape)
        # A layer of the logits has as many outputs per class in the network as in the weights.
        makes_logits = shape != value.shape and shape[0] * num_old == value.shape[0] * num_new
        if not makes_logits or shape[1:] != value.shape[1:]:
            continue
        background = value[: value.shape[0] // num_old]
        if name.endswith("bias"):
            background = background + RARE_LOGIT
        added_classes = [background] * (num_new - num_old)
        extended[name] = torch.cat([value, *added_classes])
    return extended


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Complete the node of a network for a comparison with another one.

    Metadata of an older version may lack arguments of our UNet, or the class, which then is our
    UNet.
    """
    node = {TARGET: UNET, **to_tuples(node)}
    node.pop("blocks", None)  # they change no result
    if node[TARGET] != UNET:
        return node
    completed = {}
    for name, parameter in inspect.signature(UNet).parameters.items():
        if parameter.default is not parameter.empty:
            completed[name] = parameter.default
    completed |= node
    # Without strides the network has these; the other node may state the same ones.
    if not completed["strides"]:
        completed["strides"] = level_strides(None, count_strides(completed))
    return completed


def count_classes(config: TrainConfig) -> int:
    """Count the classes of the stage's network, with the background."""
    task = make_task(config.task)
    # The fine stage sees a crop of one region at a time, and has no classes for labels of others.
    if config.stage.name is StageName.fine:
        return task.num_region_classes
    return task.num_classes
