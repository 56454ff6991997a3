"""Parts of a network on their own devices: results stay, and the plan is the best one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from medseg.memory.device_map import (
    _JoinDevices,
    _move_inputs,
    apply_device_map,
    plan_device_map,
    resolve_device_map,
)
from medseg.memory.switches import checkpoint_blocks
from medseg.models.unet import UNet
from medseg.training.device_map_strategy import DeviceMapStrategy


def make(refine: int) -> UNet:
    torch.manual_seed(0)
    return UNet(1, 3, width=4, depth=2, refine=refine)


def step(network: nn.Module, home: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients, on the CPU."""
    image = torch.randn(1, 1, 16, 24, 32, generator=torch.Generator().manual_seed(1)).to(home)
    logits = network(image)
    assert logits.device == image.device
    logits.square().mean().backward()
    return logits.detach().cpu(), {
        name: weight.grad.cpu()
        for name, weight in network.named_parameters()
        if weight.grad is not None
    }


@pytest.mark.parametrize("refine", [0, 4])
def test_a_map_changes_nothing_where_all_devices_are_one(refine: int) -> None:
    plain, placed = make(refine), make(refine)
    checkpoint_blocks(placed.blocks(), "sqrt")
    apply_device_map(placed, {"encoder": "cpu", "decoder.0": "cpu"}, torch.device("cpu"))
    (logits, gradients), (other_logits, other_gradients) = step(plain, "cpu"), step(placed, "cpu")
    assert torch.equal(logits, other_logits)
    assert gradients.keys() == other_gradients.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)


def test_the_longest_of_several_names_counts_whatever_their_order() -> None:
    names = ["stem", "encoder.0.block0", "encoder.0.block1", "encoder.1.down", "decoder.0.up"]
    patterns = {
        "encoder": "b",
        "*.block0": "c",  # longer, though the alphabet has it first
        "encoder.1": "d",
        "decoder.0.up": "e",
    }
    expected = dict(zip(names[1:], ("c", "b", "d", "e"), strict=True))
    for order in itertools.permutations(patterns):
        assert resolve_device_map(names, {name: patterns[name] for name in order}) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cuda:0", "cpu"])
@pytest.mark.parametrize(
    "places",
    [
        {"encoder": "cuda:0", "decoder": "cpu"},
        {"encoder": "cpu", "decoder.0": "cuda:0", "head": "cpu"},
    ],
)
def test_two_devices_compute_what_one_does(places: dict[str, str], home: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain, placed = make(4), make(4).to(home)
    checkpoint_blocks(placed.blocks(), "sqrt")
    apply_device_map(placed, places, torch.device(home))
    assert {weight.device.type for weight in placed.parameters()} == {"cpu", "cuda"}
    (logits, gradients), (other_logits, other_gradients) = step(plain, "cpu"), step(placed, home)
    torch.testing.assert_close(logits, other_logits, rtol=1e-3, atol=1e-4)
    for name in gradients:
        torch.testing.assert_close(gradients[name], other_gradients[name], rtol=1e-2, atol=1e-5)


class Copies(TorchFunctionMode):
    """Notes the tensors that `Tensor.to` moves to another device, and whether the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.to and result.device != args[0].device:
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        return result


def test_parts_move_to_their_devices_and_inputs_follow_without_a_wait() -> None:
    """The device `meta`, which every machine has, stands for a GPU."""
    meta = torch.device("meta")
    network = make(0)
    apply_device_map(network, {"encoder": "meta"}, torch.device("cpu"))
    devices = {name: weight.device.type for name, weight in network.named_parameters()}
    assert {device for name, device in devices.items() if name.startswith("encoder")} == {"meta"}
    assert {device for name, device in devices.items() if not name.startswith("encoder")} == {"cpu"}
    network = make(0)
    apply_device_map(network, {"decoder": "meta"}, meta)
    with Copies() as copies:
        logits = network(torch.zeros(1, 1, 16, 24, 32))
    assert logits.device == meta
    assert copies.non_blocking
    assert all(copies.non_blocking)


def test_a_part_on_the_cpu_waits_for_its_inputs() -> None:
    """With tensors of a GPU but no memory: an asynchronous copy to the CPU is read too early."""
    part = nn.ReLU()
    with FakeTensorMode():
        for device, source, is_asynchronous in (("cpu", "cuda:0", False), ("cuda:0", "cpu", True)):
            features = torch.empty(2, 3, device=source)
            with Copies() as copies:
                (moved,), _ = _move_inputs(torch.device(device), part, (features,), {})
            assert moved.device == torch.device(device)
            assert copies.non_blocking == [is_asynchronous]


def test_the_strategy_of_a_device_map_moves_the_parts_and_keeps_the_rest_at_home() -> None:
    module = nn.Module()
    module.network = make(0)
    strategy = DeviceMapStrategy(torch.device("cpu"), {"encoder": "meta"})
    strategy._lightning_module = strategy.model = module
    strategy.model_to_device()
    on_meta = [name for name, weight in module.network.named_parameters() if weight.is_meta]
    assert on_meta == [
        name for name, _ in module.network.named_parameters() if name.startswith("encoder")
    ]
    assert on_meta


def test_a_name_that_fits_no_part_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="device_map names 'enkoder', which is no part of the network; the parts are stem, ",
    ):
        apply_device_map(make(0), {"enkoder": "cpu"}, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(20))
def test_the_fullest_device_is_as_little_full_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = {
        f"part{index}": int(size)
        for index, size in enumerate(rng.integers(0, 100, rng.integers(1, 8)))
    }
    capacities = {
        f"cuda:{index}": int(size)
        for index, size in enumerate(rng.integers(50, 200, rng.integers(1, 4)))
    }
    places = plan_device_map(sizes, capacities)
    assert list(places) == list(sizes)
    devices, order = list(places.values()), list(capacities)
    assert devices == sorted(devices, key=order.index), "neighbours, in the order of the devices"

    def filling(chosen: dict[str, str]) -> float:
        return max(
            sum(sizes[name] for name in sizes if chosen[name] == device) / capacity
            for device, capacity in capacities.items()
        )

    every = (
        dict(zip(sizes, chosen, strict=True))
        for chosen in itertools.product(order, repeat=len(sizes))
        if list(chosen) == sorted(chosen, key=order.index)
    )
    assert filling(places) == min(map(filling, every))


def test_three_devices_share_neighbouring_parts() -> None:
    sizes = {"a": 3, "b": 3, "c": 2, "d": 2, "e": 2}
    places = plan_device_map(sizes, {"cuda:0": 10, "cuda:1": 10, "cuda:2": 20})
    assert places == {"a": "cuda:0", "b": "cuda:1", "c": "cuda:2", "d": "cuda:2", "e": "cuda:2"}


def test_a_weight_stays_and_the_features_come_to_it() -> None:
    weight = nn.Parameter(torch.empty(3, 2, device="meta"))
    with _JoinDevices():
        result = nn.functional.linear(torch.ones(4, 2), weight)
    assert result.device.type == "meta"
