"""Network of an nnU-Net plan, built by `dynamic_network_architectures`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from medseg.errors import UserError
from medseg.nnunet.plan import NnunetPlan, PlanError

# Classes that a plan may name as part of its network, by the last part of their names.
PARTS: Mapping[str, type[nn.Module]] = {
    "Conv3d": nn.Conv3d,
    "InstanceNorm3d": nn.InstanceNorm3d,
    "BatchNorm3d": nn.BatchNorm3d,
    "Dropout3d": nn.Dropout3d,
    "LeakyReLU": nn.LeakyReLU,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}
PART_KEYS = ("conv_op", "norm_op", "dropout_op", "nonlin")
# Its U-Nets need torch alone. What it requires beyond, such as torchvision, may be a build for
# another torch than that of this machine.
INSTALL = "pip install --no-deps dynamic_network_architectures"


def make_network(plan: NnunetPlan) -> nn.Module:
    """Build the network of a plan, without values of its own.

    Args:
        plan: The checked plan.

    Returns:
        Maps images (N, C, d, h, w) to logits (N, K, d, h, w).

    Raises:
        PlanError: If the plan names a part that is not known, or its arguments do not fit.
        UserError: If `dynamic_network_architectures` is missing.
    """
    arguments = dict(plan.network["arguments"])
    for key in PART_KEYS:
        arguments[key] = _part(arguments.get(key), key)
    # Without deep supervision a network returns the logits of full resolution alone.
    arguments["deep_supervision"] = False
    try:
        return _network_class(plan.network["class"])(
            input_channels=len(plan.channels), num_classes=plan.labels.num_heads, **arguments
        )
    except (TypeError, ValueError, AssertionError, IndexError, KeyError) as error:
        raise PlanError(f"its arguments do not make a network ({error})") from error


def _part(name: Any, key: str) -> type[nn.Module] | None:
    if name is None:
        return None
    part = PARTS.get(str(name).rsplit(".", 1)[-1])
    if part is None or not str(name).startswith("torch.nn."):
        raise PlanError(f"{key}: {str(name)[:60]} is no known part of a network")
    return part


def _network_class(name: str) -> type[nn.Module]:
    try:
        from dynamic_network_architectures.architectures import unet
    except ImportError as error:
        raise UserError(
            f"weights: a model folder of nnU-Net needs dynamic_network_architectures; {INSTALL}"
        ) from error
    network_class: type[nn.Module] = getattr(unet, name)
    return network_class


def fits(network: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """Compare names and shapes of weights with those of a network.

    Returns:
        What differs, as the end of a sentence; empty where all fit.
    """
    expected = network.state_dict()
    for name, value in expected.items():
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != value.shape:
            shapes = tuple(weights[name].shape), tuple(value.shape)
            return f"{name} has the shape {shapes[0]}, expected {shapes[1]}"
    for name in weights:
        if name not in expected:
            return f"{str(name)[:100]} is no part of the network"
    return ""
