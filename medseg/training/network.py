"""Network of a stage: from a configuration, from checkpoint metadata, and its initial weights."""

import inspect
from dataclasses import replace
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
from medseg.task import IGNORE, Task
from medseg.task_options import make_task
from medseg.training.input_sizes import choose_strides, stated_divisor
from medseg.training.options import TrainConfig
from medseg.training.plan_weights import load_plan_weights
from medseg.weights.checks import check_arguments
from medseg.weights.files import read_weights

# Added to the background's logits to start a class that initial weights lack: its probability is
# then a seventh (e^-2) of that of the background.
RARE_LOGIT = -2.0


def make_network(config: TrainConfig) -> StageNetwork:
    """Make the network of a configuration, with fresh weights.

    Raises:
        UserError: If the arguments contradict each other.
    """
    node = network_node(config.model, config.spacing)
    # `predict` refuses a checkpoint with an argument above a limit, so such an argument is refused
    # before training too. Our UNet needs no check: with such an argument it would not fit into
    # memory.
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
        # The devices are no property of the network.
        if name == "device_map":
            continue
        # For these two keys, which are no arguments of the class, None means that the value is
        # found by tracing. An argument of the class may be None.
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

    If only the new network has a coarse channel, the weights of that channel are zero: at first the
    network predicts the same as the network of the file.

    Classes are matched by the names of their labels. A class that the file lacks starts with the
    weights of the background and a lower logit (RARE_LOGIT), so that it is hardly predicted. If
    file and task have no label in common, classes are matched by their numbers, as for a label that
    was renamed.

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
    has_coarse_channel = bool(metadata.get("coarse_channel"))  # older files do not state it
    if has_coarse_channel and not config.stage.coarse_channel:
        raise UserError(
            f"{key}: its network also sees the probability of the coarse stage; give "
            "stage.coarse_channel=true stage.coarse=<coarse checkpoint>"
        )
    if config.stage.coarse_channel and not has_coarse_channel:
        weights = _with_zero_channel(network, weights)
    old_classes = _classes_of_file(metadata, config.stage.name, key)
    new_classes = _labels_of_classes(make_task(config.task), config.stage.name)
    sources = _match_classes(old_classes, new_classes)
    has_same_classes = sources == list(range(len(old_classes)))
    # Neither None (no class) nor 0, the background.
    has_common_label = any(sources)
    if has_common_label and not has_same_classes:
        weights = _with_matched_classes(config, weights, len(old_classes), sources)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        # Torch's first line says only that there are errors; the last one names a tensor.
        last_line = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{key}: its weights do not fit the task {config.task.name} ({last_line})"
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


def _classes_of_file(metadata: dict[str, Any], stage: StageName, key: str) -> list[set[str]]:
    """List the labels of each class of a file, see `_labels_of_classes`.

    Args:
        metadata: From `read_weights`.
        stage: The configured stage.
        key: The key that gave the path and its value, for messages.

    Raises:
        UserError: If the metadata are damaged.
    """
    try:
        return _labels_of_classes(Task.from_dict(metadata["task"]), stage)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{key}: its metadata are damaged or of another version "
            f"({type(error).__name__}: {first_line(error)}); take another copy"
        ) from error


def _labels_of_classes(task: Task, stage: StageName) -> list[set[str]]:
    """List the labels that each class of a stage's network stands for; the background has none.

    In the fine stage class 1 is the first label of the region that is cropped, so it stands for the
    first label of every region.
    """
    classes: list[set[str]] = [set()]  # the background
    if stage is not StageName.fine:
        for name in sorted(task.labels, key=task.labels.__getitem__):
            classes.append({name})
        return classes
    for index in range(task.num_region_labels):
        labels = {region.labels[index] for region in task.regions if index < len(region.labels)}
        classes.append(labels)
    for name in task.helper_labels:
        classes.append({name})
    return classes


def _match_classes(old: list[set[str]], new: list[set[str]]) -> list[int | None]:
    """Find for each new class the number of the old class with one of its labels; None = no class.

    Args:
        old: Labels of the classes in the file, from `_labels_of_classes`.
        new: Labels of the classes of the configured network.
    """
    sources: list[int | None] = [0]  # the background
    for labels in new[1:]:
        matches = [number for number, old_labels in enumerate(old) if labels & old_labels]
        sources.append(matches[0] if matches else None)
    return sources


def _with_matched_classes(
    config: TrainConfig, weights: dict[str, Tensor], num_old: int, sources: list[int | None]
) -> dict[str, Tensor]:
    """Select, for each class of the network, its outputs in each layer that makes the logits.

    Such a layer, of shape (outputs, ...), has one output per class, or the same number of outputs
    for each class where a head unfolds channels into voxels. Its outputs are in the order of the
    classes.

    Args:
        config: Describes the network.
        weights: Weights with the classes of the file, not changed.
        num_old: Classes of the weights.
        sources: For each class of the network the class of the weights, from `_match_classes`.
    """
    is_rare = torch.tensor([source is None for source in sources])
    indices = torch.tensor([source or 0 for source in sources])  # the background for None
    selected = dict(weights)
    for name in _logit_weights(config):
        value = weights.get(name)
        # The weights are those of another network, which the caller refuses.
        if value is None or value.shape[0] % num_old != 0:
            continue
        # (outputs, ...) -> (classes, outputs per class, ...)
        by_class = value.unflatten(0, (num_old, -1))[indices]
        if name.endswith("bias"):
            by_class[is_rare] += RARE_LOGIT
        selected[name] = by_class.flatten(0, 1)
    return selected


def _logit_weights(config: TrainConfig) -> list[str]:
    """Name the weights of the layers that make the logits, whose shape depends on the classes."""
    # One label more, which is in no region, adds a class in every stage. Its name is `IGNORE`,
    # because no other label may have that name.
    labels = {**config.task.labels, IGNORE: len(config.task.labels) + 1}
    wider_config = replace(config, task=replace(config.task, labels=labels))
    wider_weights = make_network_on_meta(wider_config).state_dict()
    names = []
    for name, value in make_network_on_meta(config).state_dict().items():
        if name in wider_weights and value.shape != wider_weights[name].shape:
            names.append(name)
    return names


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Complete the node of a network for a comparison with another one.

    Metadata of an older version may lack arguments of our UNet. Without a class they mean our UNet.
    """
    node = {TARGET: UNET, **to_tuples(node)}
    node.pop("blocks", None)  # recomputed blocks, which do not change the network
    if node[TARGET] != UNET:
        return node
    completed = {}
    for name, parameter in inspect.signature(UNet).parameters.items():
        if parameter.default is not parameter.empty:
            completed[name] = parameter.default
    completed |= node
    # The strides that the UNet has by default; the other node may state them.
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
