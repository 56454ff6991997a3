"""Channels-last memory: the channels of a voxel lie side by side, as convolutions in half precision like it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def use_channels_last(network: nn.Module) -> None:
    """Lay out the weights channels-last and bring the image to that layout before each call; names and values stay."""
    network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    network.register_forward_pre_hook(_image_to_channels_last)


def _image_to_channels_last(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    image, *others = args
    assert isinstance(image, Tensor)
    return image.contiguous(memory_format=torch.channels_last_3d), *others
