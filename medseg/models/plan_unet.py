"""U-Net of an nnU-Net plan, built by `dynamic_network_architectures`, for images in LPS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medseg.errors import UserError
from medseg.models.traits import outputs_of

# Classes of `dynamic_network_architectures` that a plan or a file of weights may name.
UNETS = ("PlainConvUNet", "ResidualEncoderUNet")
# Classes that a plan may name as part of its network, by the last part of their names.
PARTS: Mapping[str, type[nn.Module]] = {
    "Conv2d": nn.Conv2d,
    "Conv3d": nn.Conv3d,
    "InstanceNorm2d": nn.InstanceNorm2d,
    "InstanceNorm3d": nn.InstanceNorm3d,
    "BatchNorm2d": nn.BatchNorm2d,
    "BatchNorm3d": nn.BatchNorm3d,
    "Dropout2d": nn.Dropout2d,
    "Dropout3d": nn.Dropout3d,
    "LeakyReLU": nn.LeakyReLU,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
}
PART_KEYS = ("conv_op", "norm_op", "dropout_op", "nonlin")
# `--no-deps`, because the U-Nets of this package need only torch, and pip might install a
# torchvision that does not fit the installed torch.
INSTALL = "pip install --no-deps dynamic_network_architectures"
# Attributes of a unit that are second names of its layers. The unit calls its layers through the
# chain `all_modules`.
NAMED_TWICE = ("conv", "norm", "dropout", "nonlin")


def build_unet(
    class_name: str,
    arguments: Mapping[str, Any],
    channels: int,
    num_heads: int,
    *,
    deep_supervision: bool = False,
) -> nn.Module:
    """Build a U-Net with nnU-Net's layers and names of weights.

    Args:
        class_name: One of `UNETS`.
        arguments: Its arguments in a plan, where classes are names such as `torch.nn.LeakyReLU`.
        channels: Channels of the image.
        num_heads: Channels of the logits.
        deep_supervision: Whether the logits of all levels are returned, the finest first.

    Returns:
        A network from images (N, C, d, h, w) to logits (N, K, d, h, w), or to a list of logits.

    Raises:
        ValueError: If the class or a part is not known, or the arguments do not fit.
        UserError: If `dynamic_network_architectures` is missing.
    """
    if class_name not in UNETS:
        raise ValueError(f"{class_name[:60]} is no known U-Net; expected one of {UNETS}")
    bound = dict(arguments)
    for key in PART_KEYS:
        bound[key] = _part(bound.get(key), key)
    bound["deep_supervision"] = deep_supervision
    try:
        return _network_class(class_name)(input_channels=channels, num_classes=num_heads, **bound)
    except (TypeError, ValueError, AssertionError, IndexError, KeyError) as error:
        raise ValueError(f"its arguments do not make a network ({error})") from error


def _part(name: Any, key: str) -> type[nn.Module] | None:
    """Find the class of a part of a network; None if the plan leaves it out.

    Args:
        name: Name of the class in the plan. It comes from a file, so it is looked up in `PARTS`
            and never imported.
        key: Argument of the network, for the message.

    Raises:
        ValueError: If the name is none of `PARTS`.
    """
    if name is None:
        return None
    part = PARTS.get(str(name).rsplit(".", 1)[-1])
    if part is None or not str(name).startswith("torch.nn."):
        raise ValueError(f"{key}: {str(name)[:60]} is no known part of a network")
    return part


def _network_class(name: str) -> type[nn.Module]:
    """Import a U-Net of `dynamic_network_architectures`.

    Raises:
        UserError: If that package is missing.
    """
    try:
        from dynamic_network_architectures.architectures import unet
    except ImportError as error:
        raise UserError(
            f"weights: a model folder of nnU-Net needs dynamic_network_architectures; {INSTALL}"
        ) from error
    network_class: type[nn.Module] = getattr(unet, name)
    return network_class


class PlanUNet(nn.Module):
    """Network of an nnU-Net plan that takes our images: in LPS, a window mapped to [-1, 1].

    It reorders the axes of an image and rescales its values to those of nnU-Net's preprocessing,
    and brings the axes of the logits back. Without deep supervision, or in evaluation, it returns
    only the logits of full resolution.

    Args:
        in_channels: Channels of the image, C.
        num_classes: Classes with the background, K.
        unet: One of `UNETS`.
        arguments: Its arguments in the plan.
        transpose: Axes of the image that become the axes 0, 1 and 2 of the network.
        flips: Whether the network sees the axes z, y and x of the image reversed.
        scale: Factor of each channel; further channels of the image stay as they are.
        shift: Added to each channel after the scaling; as long as `scale`.
        deep_supervision: Whether the logits of all levels are returned in training, as nnU-Net
            trains.

    Raises:
        ValueError: If the numbers of axes or channels do not fit, or as for `build_unet`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        unet: str = "PlainConvUNet",
        arguments: dict[str, Any] | None = None,
        transpose: Sequence[int] = (0, 1, 2),
        flips: Sequence[bool] = (False, False, False),
        scale: Sequence[float] = (),
        shift: Sequence[float] = (),
        deep_supervision: bool = True,
    ) -> None:
        super().__init__()
        if sorted(transpose) != [0, 1, 2] or len(flips) != 3:
            raise ValueError(f"transpose={transpose}, flips={flips}: expected three axes each")
        if len(scale) != len(shift) or len(scale) > in_channels:
            raise ValueError(f"scale={scale}, shift={shift}: expected a number for each channel")
        network = build_unet(
            unet, arguments or {}, in_channels, num_classes, deep_supervision=deep_supervision
        )
        network.apply(network.initialize)  # type: ignore[arg-type]
        _remove_second_names(network)
        self.network = network
        # For `permute` of (N, C, D, H, W), whose first two axes stay.
        self._order = [0, 1, *(2 + axis for axis in transpose)]
        self._inverse_order = [self._order.index(axis) for axis in range(5)]
        self._flipped_axes = [2 + axis for axis, is_flipped in enumerate(flips) if is_flipped]
        num_unscaled = in_channels - len(scale)
        shape = (1, in_channels, 1, 1, 1)
        scales = torch.tensor([*scale, *[1.0] * num_unscaled]).reshape(shape)
        shifts = torch.tensor([*shift, *[0.0] * num_unscaled]).reshape(shape)
        # Not persistent: they are arguments, so files of weights need not hold them.
        self.register_buffer("scale", scales, persistent=False)
        self.register_buffer("shift", shifts, persistent=False)

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Predict logits (N, K, D, H, W), in training with deep supervision a list of them."""
        scaled = image * self.scale + self.shift
        oriented = scaled.flip(self._flipped_axes).permute(self._order)
        outputs = outputs_of(self.network(oriented), self.training)
        if isinstance(outputs, list):
            return [self._in_image_axes(output) for output in outputs]
        return self._in_image_axes(outputs)

    def _in_image_axes(self, logits: Tensor) -> Tensor:
        """Bring the axes of logits back to those of the image."""
        return logits.permute(self._inverse_order).flip(self._flipped_axes)


def _remove_second_names(network: nn.Module) -> None:
    """Leave one name to each layer, because a file of weights would hold it under all of them.

    In nnU-Net a layer of the encoder has four names: two in its unit, each of them twice, because
    the encoder is also an attribute of the decoder. The forward pass uses the names that stay.
    """
    del network.decoder.encoder  # type: ignore[union-attr]
    for module in network.modules():
        if hasattr(module, "all_modules"):
            for name in NAMED_TWICE:
                module._modules.pop(name, None)
