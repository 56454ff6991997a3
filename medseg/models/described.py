"""Network that a configuration or the metadata of a checkpoint describes: its class, arguments, classes and channels."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.models.options import UNET
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import Traits, channel_arguments, find_traits
from medseg.targets import TARGET, bind_arguments, import_target
from medseg.task import Task


def make_described_network(
    node: dict[str, Any],
    task: Task,
    stage: str,
    trusted: Sequence[str] = (),
    *,
    has_coarse_channel: bool = False,
) -> StageNetwork:
    """Make the network that a configuration or the metadata of a checkpoint describes.

    Args:
        node: `_target_` and arguments beside the channels; metadata of version 0.1 name no target
            and mean our UNet.
        task: Gives the number of channels and classes.
        stage: `coarse`, `fine` or `single`.
        trusted: Prefixes of `trusted_targets`, of the present command.
        has_coarse_channel: Whether its input has a channel with the probability of the region.

    Raises:
        UserError: If the class is not trusted, or the arguments contradict each other.
    """
    num_classes = task.num_region_classes if stage == "fine" else task.num_classes
    node = {TARGET: UNET, **node}
    found = import_target("model", "model", node, trusted)
    stated = {name: node.pop(name, None) for name in ("divisor", "blocks")}
    del node[TARGET]

    def make(channels: int) -> nn.Module:
        network: nn.Module = bind_arguments(
            "model",
            "model",
            found,
            channel_arguments(found, to_tuples(node), channels, num_classes),
        )()
        return network

    channels = len(task.channels) + has_coarse_channel
    try:
        traits = _find_traits(
            lambda: make(channels),
            repr((found, node, stated)),
            channels,
            num_classes,
            stated,
            node.get("img_size"),
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
    make: Callable[[], nn.Module],
    description: str,
    channels: int,
    num_classes: int,
    stated: dict[str, Any],
    img_size: Any,
) -> Traits:
    """Find the traits of a network once in a process: tracing takes a second."""
    key = (description, channels, num_classes)
    if key not in _known_traits:
        fixed = (
            (img_size,) * 3 if isinstance(img_size, int) else tuple(img_size) if img_size else None
        )
        divisor = tuple(stated["divisor"]) if stated["divisor"] else None
        _known_traits[key] = find_traits(
            make, channels, num_classes, divisor=divisor, blocks=stated["blocks"], fixed_size=fixed
        )
    return _known_traits[key]


def to_tuples(value: Any) -> Any:
    """Convert nested lists of a JSON file to tuples."""
    if isinstance(value, dict):
        return {key: to_tuples(item) for key, item in value.items()}
    return tuple(map(to_tuples, value)) if isinstance(value, list) else value
