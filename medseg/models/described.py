"""Construction of the network that a configuration or the metadata of a checkpoint describes."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from medseg.errors import UserError, first_line, is_out_of_memory
from medseg.geometry.sizes import Shape
from medseg.models.options import UNET
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import Traits, channel_arguments, find_traits
from medseg.models.unet import UNet
from medseg.targets import TARGET, bind_arguments, import_target
from medseg.task import Task

# Cache of this process, because tracing takes a second: traits by the description of a network.
_traits: dict[str, Traits] = {}


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
        node: `_target_` and its arguments without the channels; may state `divisor` and `blocks`.
            Metadata of version 0.1 have no target and mean our UNet. Not changed.
        task: Gives the number of channels and classes.
        stage: `coarse`, `fine` or `single`.
        trusted: Prefixes of further classes that this command may import (`trusted_targets`).
        has_coarse_channel: Whether the input has a further channel, with the coarse stage's
            probability of the region.

    Raises:
        UserError: If the class is not trusted, or the arguments contradict each other.
    """
    num_classes = task.num_region_classes if stage == "fine" else task.num_classes
    node = {TARGET: UNET, **node}
    network_class = import_target("model", "model", node, trusted)
    # Keys of the framework; all other keys are arguments of the class.
    divisor = node.pop("divisor", None)
    blocks = node.pop("blocks", None)
    del node[TARGET]

    def make(in_channels: int) -> nn.Module:
        # Each construction gets copies: a class may change a dictionary that it is given.
        own_arguments = to_tuples(node)
        all_arguments = channel_arguments(network_class, own_arguments, in_channels, num_classes)
        network: nn.Module = bind_arguments("model", "model", network_class, all_arguments)()
        return network

    in_channels = len(task.channels)
    if has_coarse_channel:
        in_channels += 1
    is_unet = isinstance(network_class, type) and issubclass(network_class, UNet)
    # Sorted, because a file of weights may have the arguments in another order than a
    # configuration.
    sorted_arguments = sorted(to_tuples(node).items())
    key = repr((network_class, sorted_arguments, divisor, blocks, in_channels, num_classes))
    try:
        if is_unet and divisor is None and blocks is None:
            # Our UNet states its traits itself: no further network is built to find them.
            return StageNetwork(make, in_channels=in_channels)
        if key not in _traits:
            _traits[key] = find_traits(
                lambda: make(in_channels),
                in_channels,
                num_classes,
                divisor=tuple(divisor) if divisor else None,
                blocks=blocks,
                fixed_size=_fixed_size(node.get("img_size")),
            )
        return StageNetwork(make, in_channels=in_channels, traits=_traits[key])
    except UserError:
        raise
    # The configuration may name a class that raises anything.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # The class of a ValueError tells a user nothing.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"model: {kind}{first_line(error)}") from error


def _fixed_size(img_size: Any) -> Shape | None:
    """Read the only input size of a network from its argument `img_size`, as MONAI's have it."""
    if not img_size:
        return None
    if isinstance(img_size, int):
        return img_size, img_size, img_size
    # `Any`, because length and values are not checked here; tracing fails on wrong ones.
    size: Any = tuple(img_size)
    return size


def to_tuples(value: Any) -> Any:
    """Convert lists to tuples, also those nested in mappings and lists."""
    if isinstance(value, dict):
        return {key: to_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(map(to_tuples, value))
    return value
