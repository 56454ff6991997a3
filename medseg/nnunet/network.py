"""Network of an nnU-Net plan: building it, running it and checking its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from medseg.models.plan_unet import build_unet
from medseg.nnunet.plan import NnunetPlan, PlanError


def make_network(plan: NnunetPlan) -> nn.Module:
    """Build the network of a plan; its weights are to be replaced by those of a checkpoint.

    Args:
        plan: The checked plan.

    Returns:
        Maps inputs (N, `plan.num_inputs`, d, h, w) to logits (N, K, d, h, w), with K =
        `plan.labels.num_heads`. Inputs and logits of a 2D network have no axis d.

    Raises:
        PlanError: If the plan names a part that is not known, or its arguments do not fit.
        UserError: If `dynamic_network_architectures` is missing.
    """
    network = plan.network
    try:
        return build_unet(
            network["class"], network["arguments"], plan.num_inputs, plan.labels.num_heads
        )
    except ValueError as error:
        raise PlanError(str(error)) from error


def call_network(network: nn.Module, image: Tensor, plan: NnunetPlan) -> Tensor:
    """Run a network on a prepared image.

    Args:
        network: See `make_network`.
        image: See `network_input`; d is 1 for a 2D network.
        plan: Plan of the network.

    Returns:
        Logits (1, K, d, h, w).
    """
    image = network_input(image, plan)
    if plan.is_2d:
        plane_logits: Tensor = network(image[:, :, 0])
        return plane_logits[:, :, None]
    logits: Tensor = network(image)
    return logits


def first_difference(network: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Compare names and shapes of weights with those of a network.

    Returns:
        The first difference as a clause for a message; empty if there is none.
    """
    expected = network.state_dict()
    for name, value in expected.items():
        if name not in weights:
            return f"{name} is missing"
        if weights[name].shape != value.shape:
            shape = tuple(weights[name].shape)
            return f"{name} has the shape {shape}, expected {tuple(value.shape)}"
    for name in weights:
        if name not in expected:
            # A damaged file may hold a name of any type and length.
            return f"{str(name)[:100]} is no part of the network"
    return ""


def network_input(image: Tensor, plan: NnunetPlan) -> Tensor:
    """Replace the labels of a previous stage by one channel of 0 and 1 for each label.

    Args:
        image: Prepared image (1, C, d, h, w); in a cascade its last channel holds these labels.
        plan: Plan of the network.

    Returns:
        The input of the network (1, `plan.num_inputs`, d, h, w); without a previous stage the image
        itself.
    """
    values = plan.previous_values
    if not values:
        return image
    labels = image[:, -1:]
    indicators = [(labels == value).to(image.dtype) for value in values]
    return torch.cat([image[:, :-1], *indicators], dim=1)
