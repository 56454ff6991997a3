"""Memory switches, applied to a network in the one order in which they work together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medseg.memory.checkpointing import checkpoint_blocks
from medseg.memory.offload import offload_activations


def apply_switches(
    network: nn.Module,
    *,
    checkpointing: str | Sequence[str] = "none",
    offload: bool = False,
    channels_last: bool = False,
    compile: bool = False,
    synchronise: bool = False,
    device_type: str = "cpu",
) -> nn.Module:
    """Change how a network runs, never what it computes or what its weights are called.

    The order is fixed: layout (all others see its weights), norms (checkpointing looks for them), checkpointing (of blocks), offload (of
    what the blocks still save), compilation (of everything).

    Args:
        network: Network with a method `blocks()` that names its blocks, like `UNet` and `RegionalNetwork`.
        checkpointing: `none`, `sqrt`, `all` or names of blocks or levels.
        offload: Keep saved activations in host memory.
        channels_last: Use the channels-last memory layout.
        compile: Compile with `torch.compile` at the first call.
        synchronise: Share the statistics of batch norms among all ranks.
        device_type: Device that the network will run on, `cpu` or `cuda`.

    Returns:
        The same network, changed in place.

    Raises:
        ValueError: If two switches exclude each other or one has no effect on the device.
    """
    checkpoints = checkpointing != "none" and len(checkpointing) > 0
    if compile and offload:
        raise ValueError("compile and offload exclude each other, compiled code decides itself what it saves: turn one off")
    if compile and synchronise:
        raise ValueError(
            "compile and synchronised batch norm exclude each other, compiled code would not wait for the other ranks"
        )
    if compile and checkpoints and any(isinstance(module, _BatchNorm) for module in network.modules()):
        raise ValueError(
            "compile, checkpointing and batch norm do not go together, compiled code cannot pause running statistics: "
            "take norm=instance or turn one off"
        )
    if channels_last:
        use_channels_last(network)
    if synchronise:
        nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if checkpoints:
        blocks = cast(Callable[[], Mapping[str, nn.Module]], network.blocks)
        checkpoint_blocks(blocks(), checkpointing)
    if offload:
        offload_activations(network, device_type)
    if compile:
        # In place: the wrapper that torch.compile returns would put `_orig_mod.` before every name.
        network.compile()
    return network


def use_channels_last(network: nn.Module) -> None:
    """Store weights channels-last and bring each image to that layout: the channels of a voxel are neighbours in memory.

    Convolutions in half precision prefer this layout. Names and values stay.
    """
    network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    network.register_forward_pre_hook(_image_to_channels_last)


def _image_to_channels_last(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    image, *others = args
    assert isinstance(image, Tensor)
    return image.contiguous(memory_format=torch.channels_last_3d), *others
