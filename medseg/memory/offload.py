"""Activations wait for the backward pass in host memory instead of on the GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_copies_to_host: ContextVar[bool] = ContextVar("copies_to_host", default=False)


def offload_activations(network: nn.Module, device_type: str) -> None:
    """Keep what the network's forward pass saves in pinned host memory.

    With checkpointing it is the inputs of the recomputed blocks that travel. Parameters stay where they are, and their
    names as well.

    Args:
        network: Network that will run on `device_type`.
        device_type: `cuda`, or another device that is not the host.

    Raises:
        ValueError: If the network runs on the CPU, whose memory is the place that offloading would move to.
    """
    if device_type == "cpu":
        raise ValueError("offload moves activations from a GPU to host memory and saves nothing on cpu: turn it off")
    save_to_host(network)


def save_to_host(network: nn.Module) -> None:
    """Wrap the network's forward pass so that saved activations are copied to the host and back, in the layout they had.

    Torch's `save_on_cpu` copies the parameters too, and gives channels-last activations back contiguous.
    """
    forward = network.forward

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        with saved_tensors_hooks(_to_host, _from_host):
            return forward(*args)

    network.forward = run


def is_copying_to_host() -> bool:
    """Whether what is being made just now lies in host memory, whatever its device is called."""
    return _copies_to_host.get()


def _to_host(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
    if isinstance(tensor, nn.Parameter):
        return None, tensor
    with _host():
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, copy.copy_(tensor, non_blocking=tensor.is_cuda)


def _from_host(saved: tuple[torch.device | None, Tensor]) -> Tensor:
    device, tensor = saved
    return tensor if device is None else tensor.to(device, non_blocking=True, copy=True)


@contextlib.contextmanager
def _host() -> Iterator[None]:
    token = _copies_to_host.set(True)
    try:
        yield
    finally:
        _copies_to_host.reset(token)
