"""One network on several devices: parts live where a map puts them, and what passes between them moves."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medseg.memory.parts import named_parts


def place_parts(network: nn.Module, places: Mapping[str, str], home: torch.device) -> None:
    """Move each part of a network to its device; inputs follow, and the logits come back home. Names and values stay.

    Args:
        network: Network with a method `blocks()`, all of it at home.
        places: Device by the name of a part, or by the beginning of names up to a dot (`encoder`, `encoder.0`); the longest
            beginning counts. What is not named stays at home.
        home: Where the input lies and the loss is computed.

    Raises:
        ValueError: If a name fits no part.
    """
    parts = named_parts(network)
    found = resolve(list(parts), places)
    for name, modules in parts.items():
        device = torch.device(found.get(name, home))
        for module in modules:
            module.to(device)
            module.register_forward_pre_hook(functools.partial(_bring, device))
    network.register_forward_hook(lambda _, __, logits: logits.to(home))


def resolve(names: Sequence[str], places: Mapping[str, str]) -> dict[str, str]:
    """Give each part the device of the longest name that it begins with; parts that none fits are left out.

    Args:
        names: Names of the parts.
        places: Device by name or beginning.

    Raises:
        ValueError: If a name fits no part.

    Example:
        >>> resolve(["stem", "encoder.0.block0", "encoder.1.down"], {"encoder": "cuda:0", "encoder.1": "cpu"})
        {'encoder.0.block0': 'cuda:0', 'encoder.1.down': 'cpu'}
    """
    found: dict[str, str] = {}
    for wanted in sorted(places, key=len):
        fitting = [name for name in names if name == wanted or name.startswith(f"{wanted}.")]
        if not fitting:
            raise ValueError(f"device_map names {wanted!r}, which is no part of the network; the parts are {', '.join(names)}")
        found |= dict.fromkeys(fitting, places[wanted])
    return {name: found[name] for name in names if name in found}


def plan_devices(sizes: Mapping[str, int], capacities: Mapping[str, int]) -> dict[str, str]:
    """Divide parts among devices so that the fullest device is as little full as can be.

    Each device gets neighbours in the order in which the parts work, so that little passes between devices.

    Args:
        sizes: Bytes of each part, in the order in which they work.
        capacities: Bytes of each device.

    Returns:
        Device of each part.

    Example:
        >>> plan_devices({"stem": 4, "encoder": 2, "decoder": 2, "head": 4}, {"cuda:0": 100, "cuda:1": 100})
        {'stem': 'cuda:0', 'encoder': 'cuda:0', 'decoder': 'cuda:1', 'head': 'cuda:1'}
    """
    names, devices = list(sizes), list(capacities)
    sums = [0, *itertools.accumulate(sizes.values())]

    @functools.cache
    def best(start: int, device: int) -> tuple[float, tuple[int, ...]]:
        """Least possible filling of the devices from one on, and where each of them ends."""
        if device == len(devices) - 1:
            return (sums[-1] - sums[start]) / capacities[devices[device]], (len(names),)
        choices = []
        for stop in range(start, len(names) + 1):
            rest, stops = best(stop, device + 1)
            choices.append((max((sums[stop] - sums[start]) / capacities[devices[device]], rest), (stop, *stops)))
        return min(choices)

    places: dict[str, str] = {}
    start = 0
    for device, stop in zip(devices, best(0, 0)[1], strict=True):
        places |= dict.fromkeys(names[start:stop], device)
        start = stop
    return places


def working_order(names: Sequence[str]) -> list[str]:
    """Sort the parts of a UNet, or of several, by when they work: down the encoder and up again.

    Example:
        >>> working_order(["head", "stem", "encoder.0.block0", "decoder.0.up", "encoder.1.down", "decoder.1.up"])
        ['stem', 'encoder.0.block0', 'encoder.1.down', 'decoder.1.up', 'decoder.0.up', 'head']
    """

    def place(name: str) -> tuple[int, int, int]:
        words = name.split(".")
        network = int(words.pop(0)) if words[0].isdigit() else 0
        level = int(words[1]) if len(words) > 1 else 0
        rank = ("stem", "encoder", "decoder", "head").index(words[0])
        return network, rank, -level if words[0] == "decoder" else level

    return sorted(names, key=place)


def _bring(device: torch.device, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for value in args)
