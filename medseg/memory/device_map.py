"""Device map: one network on several devices, part by part, with tensors copied between them."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from medseg.memory.switches import names_below


def named_parts(network: nn.Module) -> dict[str, list[nn.Module]]:
    """Name the parts of a network: its blocks, and the layers outside of all blocks.

    Where it has no `blocks()`, its children are the parts.
    """
    if not hasattr(network, "blocks"):
        return {name: [child] for name, child in network.named_children()}
    parts: dict[str, list[nn.Module]] = {}
    for name, block in network.blocks().items():  # type: ignore[operator]
        parts[name] = [block]
    block_ids = {id(block) for (block,) in parts.values()}

    def outside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Walk down to the largest modules that contain no block."""
        for name, child in module.named_children():
            if id(child) in block_ids:
                continue
            if any(id(inner) in block_ids for inner in child.modules()):
                yield from outside(child)
            else:
                yield name, child

    for name, module in outside(network):
        parts.setdefault(name, []).append(module)
    return parts


def apply_device_map(network: nn.Module, device_map: Mapping[str, str], home: torch.device) -> None:
    """Move each part of a network to its device; inputs follow, the logits return to `home`.

    Names and values stay.

    Args:
        network: Network with a method `blocks()`, all of it on `home`.
        device_map: Device by the name of a part, or by the beginning of names up to a dot
            (`encoder`, `encoder.0`); the longest match counts. Unnamed parts stay on `home`.
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
    that of the first tensor. Inside a part all tensors are on one device already, so that
    recomputation in the backward pass, which this mode does not reach, needs no copies.
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
        is_copy = func in (Tensor.to, Tensor.copy_)
        if is_copy or len({tensor.device for tensor in tensors}) < 2:
            return func(*args, **kwargs)
        weights = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        # A weight stays where it is, and the other operands come to it.
        device = (weights or tensors)[0].device

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device) if tensor.ndim else tensor

        args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
        return func(*args, **kwargs)


def resolve_device_map(names: Sequence[str], device_map: Mapping[str, str]) -> dict[str, str]:
    """Give each part the device of the longest matching name; parts without a match are left out.

    Args:
        names: Names of the parts.
        device_map: Device by name or beginning of names.

    Raises:
        ValueError: If a name matches no part.

    Example:
        >>> names = ["stem", "encoder.0.block0", "encoder.1.down"]
        >>> resolve_device_map(names, {"encoder": "cuda:0", "encoder.1": "cpu"})
        {'encoder.0.block0': 'cuda:0', 'encoder.1.down': 'cpu'}
    """
    devices: dict[str, str] = {}
    # Longer names replace what shorter ones said.
    for pattern in sorted(device_map, key=len):
        matches = names_below(names, pattern)
        if not matches:
            raise ValueError(
                f"device_map names {pattern!r}, which is no part of the network; "
                f"the parts are {', '.join(names)}"
            )
        devices |= dict.fromkeys(matches, device_map[pattern])
    return {name: devices[name] for name in names if name in devices}


def plan_device_map(sizes: Mapping[str, int], capacities: Mapping[str, int]) -> dict[str, str]:
    """Divide parts among devices so that the largest share of a device's memory is smallest.

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
    sums = [0, *itertools.accumulate(sizes.values())]

    @functools.cache
    def best(start: int, device: int) -> tuple[float, tuple[int, ...]]:
        """Divide the parts from `start` on among the devices from `device` on.

        Returns:
            The smallest possible maximum share, and the end of each device's parts.
        """
        capacity = capacities[devices[device]]
        if device == len(devices) - 1:
            return (sums[-1] - sums[start]) / capacity, (len(names),)
        choices = []
        # Dynamic programming over the end of this device's parts.
        for stop in range(start, len(names) + 1):
            rest, stops = best(stop, device + 1)
            share = (sums[stop] - sums[start]) / capacity
            choices.append((max(share, rest), (stop, *stops)))
        return min(choices)

    # The ends of all devices' parts, the last of which is that of all parts.
    _, stops = best(0, 0)
    device_map: dict[str, str] = {}
    for device, (start, stop) in zip(devices, itertools.pairwise((0, *stops)), strict=True):
        device_map |= dict.fromkeys(names[start:stop], device)
    return device_map


def _move_inputs(
    device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return tree_map_only(
        Tensor, lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs)
    )
