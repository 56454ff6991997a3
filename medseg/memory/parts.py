"""The parts of a network that are told apart when bytes are counted or devices chosen."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_parts(network: nn.Module) -> dict[str, list[nn.Module]]:
    """Name the parts of a network that are told apart: its blocks, and the layers that are in none of them."""
    if not hasattr(network, "blocks"):
        return {name: [child] for name, child in network.named_children()}
    parts: dict[str, list[nn.Module]] = {name: [block] for name, block in network.blocks().items()}  # type: ignore[operator]
    blocks = {id(block) for (block,) in parts.values()}

    def others(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if id(child) in blocks:
                continue
            if any(id(inner) in blocks for inner in child.modules()):
                yield from others(child)
            else:
                yield name, child

    for name, module in others(network):
        parts.setdefault(name, []).append(module)
    return parts
