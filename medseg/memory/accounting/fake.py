"""Tensors without memory: torch's fake mode, held to what the real kernels return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten


def replace_tensors(network: nn.Module) -> None:
    """Put fake parameters and buffers, within torch's fake mode, into a network that was built on the meta device."""
    made: dict[int, Tensor] = {}  # a tensor that two modules share stays shared
    for module in network.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
                table[name] = made[id(tensor)]  # type: ignore[assignment]


def correct(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Give the results of a fake norm the number formats that the real kernels give.

    With half-precision features and fp32 weights the kernels keep the statistics in fp32 and return a half-precision
    gradient; torch 2.13's fake kernels say the opposite.
    """
    if func in (aten.native_batch_norm.default, aten.native_group_norm.default):
        features, weight = args[0], args[1]
        if weight is not None and weight.dtype != features.dtype:
            out, *statistics = result
            return (out, *(values.to(weight.dtype) for values in statistics))
    if func is aten.native_group_norm_backward.default and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result
