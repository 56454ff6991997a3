"""Offloading: activations wait in host memory, not on the GPU, for the backward pass."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_copies_to_host: ContextVar[bool] = ContextVar("copies_to_host", default=False)


def offload_activations(network: nn.Module, device_type: str) -> None:
    """Keep what the network's forward pass saves in pinned host memory; parameters and their names stay.

    With checkpointing, the inputs of the recomputed blocks are moved.

    Args:
        network: Network that will run on `device_type`.
        device_type: `cuda`, or another device that is not the host.

    Raises:
        ValueError: If the network runs on the CPU, whose memory offloading would move activations to.
    """
    if device_type == "cpu":
        raise ValueError("offload moves activations from a GPU to host memory and saves nothing on cpu: turn it off")
    save_to_host(network)


def save_to_host(network: nn.Module) -> None:
    """Wrap the network's forward pass so that saved activations go to the host and come back in the same memory layout.

    Torch's `save_on_cpu` copies the parameters too, and returns channels-last activations in contiguous layout.
    """
    forward = network.forward

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        with saved_tensors_hooks(_to_host, _from_host):
            return forward(*args)

    network.forward = run


def is_copying_to_host() -> bool:
    """Whether the tensor that is being made now is an offloaded copy; on fake tensors its device does not show it."""
    return _copies_to_host.get()


def _to_host(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
    if isinstance(tensor, nn.Parameter):
        return None, tensor
    token = _copies_to_host.set(True)
    try:
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=tensor.is_cuda)
    finally:
        _copies_to_host.reset(token)


def _from_host(saved: tuple[torch.device | None, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor if device is None else tensor.to(device, non_blocking=True, copy=True)
