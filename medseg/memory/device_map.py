"""Device map: one network on several devices, part by part, with tensors copied between them."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from medseg.memory.switches import matching_names


def named_parts(network: nn.Module) -> dict[str, list[nn.Module]]:
    """Name the parts of a network: its blocks, and the layers outside of all blocks.

    Where it has no `blocks()`, its children are the parts.

    Returns:
        Modules by the name of the part: usually one. Layers of the same name in different modules
        are one part.
    """
    if not hasattr(network, "blocks"):
        return {name: [child] for name, child in network.named_children()}
    parts: dict[str, list[nn.Module]] = {}
    for name, block in network.blocks().items():  # type: ignore[operator]
        parts[name] = [block]
    block_ids = {id(block) for (block,) in parts.values()}

    def layers_outside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Walk down to the largest modules that contain no block."""
        for name, child in module.named_children():
            if id(child) in block_ids:
                continue
            contains_block = any(id(inner) in block_ids for inner in child.modules())
            if contains_block:
                yield from layers_outside(child)
            else:
                yield name, child

    for name, layer in layers_outside(network):
        parts.setdefault(name, []).append(layer)
    return parts


def apply_device_map(network: nn.Module, device_map: Mapping[str, str], home: torch.device) -> None:
    """Move each part of a network to its device; inputs follow, the logits return to `home`.

    Names and values of the weights do not change.

    Args:
        network: Network with a method `blocks()`, all of it on `home`.
        device_map: See `resolve_device_map`; parts that it leaves out stay on `home`.
        home: Device of the input and of the loss.

    Raises:
        ValueError: If a name matches no part.
    """
    parts = named_parts(network)
    devices = resolve_device_map(list(parts), device_map)
    for name, modules in parts.items():
        device = torch.device(devices.get(name, home))
        for module in modules:
            module.to(device)
            move_inputs = functools.partial(_move_inputs, device)
            module.register_forward_pre_hook(move_inputs, with_kwargs=True)
    forward = network.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _JoinDevices():
            outputs = forward(*args, **kwargs)
            return tree_map_only(Tensor, lambda logits: logits.to(home), outputs)

    network.forward = run


class _JoinDevices(TorchFunctionMode):
    """Bring the operands of an operation between parts to one device.

    Such an operation is the sum of a skip and deeper features. The device of a weight is used, else
    that of the first tensor. This mode does not reach a recomputation in the backward pass, which
    does not need it: inside a part all tensors are on one device already.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = []
        for leaf in tree_leaves((args, kwargs)):
            # A tensor without axes may lie on the CPU in any operation.
            if isinstance(leaf, Tensor) and leaf.ndim:
                tensors.append(leaf)
        # These operations may take tensors of several devices.
        is_copy = func in (Tensor.to, Tensor.copy_)
        if is_copy or len({tensor.device for tensor in tensors}) < 2:
            return func(*args, **kwargs)
        weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        reference = weights[0] if weights else tensors[0]

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(reference.device) if tensor.ndim else tensor

        args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
        return func(*args, **kwargs)


def resolve_device_map(names: Sequence[str], device_map: Mapping[str, str]) -> dict[str, str]:
    """Give each part the device of the longest matching name; parts without a match are left out.

    Args:
        names: Names of the parts.
        device_map: Device by the name of a part, or by a pattern for several parts (`encoder`,
            `encoder.*.block0`), see `matching_names`.

    Raises:
        ValueError: If a name matches no part.

    Example:
        >>> names = ["stem", "encoder.0.block0", "encoder.1.down"]
        >>> resolve_device_map(names, {"encoder": "cuda:0", "encoder.1": "cpu"})
        {'encoder.0.block0': 'cuda:0', 'encoder.1.down': 'cpu'}
    """
    devices: dict[str, str] = {}
    # The longest pattern comes last, so that it overrides shorter ones.
    for pattern in sorted(device_map, key=len):
        matches = matching_names(names, pattern)
        if not matches:
            raise ValueError(
                f"device_map names {pattern!r}, which is no part of the network; "
                f"the parts are {', '.join(names)}"
            )
        devices |= dict.fromkeys(matches, device_map[pattern])
    return {name: devices[name] for name in names if name in devices}


def plan_device_map(sizes: Mapping[str, int], capacities: Mapping[str, int]) -> dict[str, str]:
    """Divide parts among devices so that the fullest device uses the smallest share of its memory.

    Each device gets neighbouring parts in the order of the forward pass, so that little data passes
    between devices.

    Args:
        sizes: Bytes of each part, in the order of the forward pass.
        capacities: Bytes of each device.

    Returns:
        Device of each part.

    Example:
        >>> sizes = {"stem": 4, "encoder": 2, "decoder": 2, "head": 4}
        >>> plan_device_map(sizes, {"cuda:0": 100, "cuda:1": 100})
        {'stem': 'cuda:0', 'encoder': 'cuda:0', 'decoder': 'cuda:1', 'head': 'cuda:1'}
    """
    names = list(sizes)
    devices = list(capacities)
    # Parts `start` to `stop - 1` take `sums[stop] - sums[start]` bytes.
    sums = [0, *itertools.accumulate(sizes.values())]

    # Dynamic programming: the best division of the remaining parts does not depend on how the parts
    # before them were divided.
    @functools.cache
    def best_division(start: int, device_index: int) -> tuple[float, tuple[int, ...]]:
        """Divide the parts from `start` on among the devices from `device_index` on.

        Returns:
            The smallest possible maximum of the devices' shares, and for each device the index
            after its last part.
        """
        capacity = capacities[devices[device_index]]
        if device_index == len(devices) - 1:
            return (sums[-1] - sums[start]) / capacity, (len(names),)
        choices = []
        for stop in range(start, len(names) + 1):
            share = (sums[stop] - sums[start]) / capacity
            largest_other_share, other_stops = best_division(stop, device_index + 1)
            choices.append((max(share, largest_other_share), (stop, *other_stops)))
        # Of equally good divisions, `min` takes the one with the smallest indices.
        return min(choices)

    _, stops = best_division(start=0, device_index=0)
    device_map: dict[str, str] = {}
    start = 0
    for device, stop in zip(devices, stops, strict=True):
        device_map |= dict.fromkeys(names[start:stop], device)
        start = stop
    return device_map


def _move_inputs(
    device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Move the arguments of a module's forward pass: a pre-hook of the module."""
    # To the CPU, torch would return from an asynchronous copy before the values are there. Work on
    # a GPU waits for the copies that were queued before it.
    is_asynchronous = device.type != "cpu"
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(device, non_blocking=is_asynchronous), (args, kwargs)
    )
