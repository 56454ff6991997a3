"""Layers on the meta device have the results that torch computes on the CPU, but for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from medseg.memory import shapes
from medseg.memory.shapes import meta_layers
from medseg.models.convolution import convolution_by

SHAPE = (1, 4, 6, 8, 10)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv3d(4, 6, 3, stride=(1, 2, 2), padding=1, dilation=(2, 1, 1)),
    "groups": lambda: nn.Conv3d(4, 6, (1, 3, 3), groups=2, bias=False),
    "transposed": lambda: nn.ConvTranspose3d(4, 6, 2, (1, 2, 2), (0, 1, 0), (0, 1, 0)),
    "transposed groups": lambda: nn.ConvTranspose3d(4, 6, 3, 2, groups=2, dilation=2),
    "instance norm": lambda: nn.InstanceNorm3d(4, affine=True),
    "batch norm": lambda: nn.BatchNorm3d(4),
    "leaky": lambda: nn.LeakyReLU(),
    "leaky in place": lambda: nn.LeakyReLU(inplace=True),
    "relu": lambda: nn.ReLU(),
    "relu in place": lambda: nn.ReLU(inplace=True),
    "gelu": lambda: nn.GELU(),
    "silu": lambda: nn.SiLU(),
    "silu in place": lambda: nn.SiLU(inplace=True),
    "pooling": lambda: nn.AvgPool3d((1, 2, 2), (1, 2, 2)),
    # Left to torch.
    "other pooling": lambda: nn.AvgPool3d(3, 2, padding=1, ceil_mode=True),
    "dropout": lambda: nn.Dropout3d(0.5),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "pooling of planes": lambda image: F.avg_pool2d(image[:, :, 0], 2),
    "padding": lambda image: F.pad(image, (0, 0, 1, 2, 3, 0)),
    "joined": lambda image: torch.cat([image, image[:, :1]], dim=1),
    "comparison": lambda image: image == 3,
    "sum": lambda image: image.add_(image),
    "repeated": lambda image: image[0, 0, 0, 0].repeat(3),
    "more axes": lambda image: image[0, 0].repeat(2, 1, 1, 1),
    "chosen kernel": lambda image: convolution_by(
        image, image.new_zeros(6, 4, 3, 3, 3), None, (1, 2, 2), (0, 1, 1), False, True
    ),
    "chosen transposed kernel": lambda image: convolution_by(
        image, image.new_zeros(4, 6, 2, 2, 2), None, (2, 2, 2), (0, 0, 0), True, False
    ),
}


def compare(call: Callable[[Tensor], Tensor], make: Callable[[str], Tensor]) -> None:
    """Compare the results on both devices."""
    image, real_image = make("meta"), make("cpu")
    with meta_layers():
        result = call(image)
    expected = call(real_image)
    assert result.is_meta
    assert (result.shape, result.stride(), result.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert has_storage_of(result, image) == has_storage_of(expected, real_image)


def has_storage_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_turned", [False, True])
@torch.no_grad()
def test_a_layer_has_the_shape_strides_and_type_of_a_real_one(name: str, is_turned: bool) -> None:
    def make(device: str) -> Tensor:
        image = torch.zeros(SHAPE, device=device)
        # The planes of a slab have all channels of a plane side by side.
        return image.transpose(1, 2).contiguous().transpose(1, 2) if is_turned else image

    layers = {device: LAYERS[name]().to(device).eval() for device in ("meta", "cpu")}
    compare(lambda image: layers[image.device.type](image), make)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_shape_strides_and_type_of_a_real_one(name: str) -> None:
    compare(FUNCTIONS[name], lambda device: torch.zeros(SHAPE, device=device))


def test_what_is_not_on_the_meta_device_is_computed() -> None:
    image = torch.randn(SHAPE)
    layer = nn.Conv3d(4, 2, 3)
    expected = layer(image)
    with meta_layers() as layers:
        assert torch.equal(layer(image), expected)
    assert layers.conv_flops == 0


def test_operations_are_those_of_torchs_counter() -> None:
    network = nn.Sequential(
        nn.Conv3d(4, 6, 3, padding=1),
        nn.InstanceNorm3d(6),
        nn.ConvTranspose3d(6, 4, 2, 2),
        nn.Conv3d(4, 2, 1),
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(SHAPE))
    with meta_layers() as layers, torch.inference_mode(mode=False):
        network.to("meta")(torch.empty(SHAPE, device="meta"))
    assert layers.conv_flops == counter.get_total_flops()


def test_each_rule_is_compared_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set[str]()

    def noting(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
        def make_result(*args: Any, **kwargs: Any) -> Any:
            used.add(name)
            return rule(*args, **kwargs)

        return make_result

    for operation, rule in shapes.RESULT_MAKERS.items():
        monkeypatch.setitem(shapes.RESULT_MAKERS, operation, noting(str(operation), rule))
    image = torch.empty(SHAPE, device="meta")
    with meta_layers():
        for make in LAYERS.values():
            make().to("meta").eval()(image)
        for function in FUNCTIONS.values():
            function(image)
    assert used == {str(operation) for operation in shapes.RESULT_MAKERS}
