"""The count of a step: by hand, by other means, and the same with and without computing."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from medseg.losses.dice_ce import SLAB_VOXELS_CPU, SLAB_VOXELS_GPU, DiceCrossEntropyLoss
from medseg.memory.accounting import StepMemory, count_step
from medseg.memory.switches import apply_switches
from medseg.memory.tracker import Owner, Timeline
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import UNet

SIZE = (16, 24, 32)


class SumLoss(nn.Module):
    """Keeps nothing for the backward pass."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.sum()


class Momentum(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)


def make(norm: str = "instance", **arguments: Any) -> UNet:
    return UNet(1, 2, **{"width": 4, "depth": 2, "norm": norm, **arguments})


def count(make_network: Any, **arguments: Any) -> StepMemory:
    arguments = {"loss": DiceCrossEntropyLoss(), "make_optimizer": torch.optim.AdamW, **arguments}
    return count_step(make_network, arguments.pop("image_shape", (1, 1, *SIZE)), **arguments)


def test_one_convolution_by_hand() -> None:
    weights, voxels = (4 + 4) * 4, 2 * 4**3
    one_sample, two_samples = (
        count(
            lambda: nn.Sequential(nn.Conv3d(1, 4, 1)),
            image_shape=shape,
            loss=SumLoss(),
            make_optimizer=Momentum,
        )
        for shape in ((1, 1, 8, 4, 4), (2, 1, 4, 4, 4))
    )
    for memory in (one_sample, two_samples):
        assert (memory.parameters, memory.gradients, memory.optimizer_state) == (
            weights,
            weights,
            weights,
        )
        assert (memory.voxels, memory.input, memory.target) == (voxels, voxels * 4, voxels)
        assert memory.saved == {
            "loss": 4
        }  # the convolution keeps the input and its weight, which are there anyway
        assert sum(memory.peak_live.values()) == memory.peak
    # Just after the loss: its argument (4 channels) is still there, and no gradient yet. Two
    # numbers: the sum, and its share of the mean.
    assert one_sample.peak == weights * 2 + voxels * (4 + 1 + 4 * 4) + 4 + 4
    assert one_sample.peak_at == "forward loss"
    # Two samples have a loss each. In the backward pass their gradients are joined to one of 4
    # channels, which is still there when the gradients of the weights are made; the loss and its
    # own gradient are numbers.
    assert two_samples.peak == weights * 3 + voxels * (4 + 1 + 4 * 4) + 4 + 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_saved_bytes_are_those_that_autograd_hands_out(precision: str) -> None:
    network, image = make(), torch.zeros(1, 1, *SIZE)
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), image)}
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in left_out:
            storages[address] = tensor.detach()
        return tensor.detach()

    with (
        saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        network(image)
    handed_out = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    memory = count(make, loss=SumLoss(), precision=precision)
    assert memory.saved_bytes - memory.saved["loss"] == handed_out


@pytest.mark.parametrize(
    ("network", "switches", "step"),
    [
        ({}, {}, {}),
        (
            {"norm": "batch", "block": "residual"},
            {"checkpointing": "sqrt"},
            {"precision": "bf16", "accumulate": 3},
        ),
        ({"norm": "group", "width": 8}, {"channels_last": True}, {"precision": "fp16"}),
        (
            {"refine": 4},
            {"checkpointing": "all", "channels_last": True},
            {"precision": "bf16", "make_optimizer": Momentum},
        ),
        (
            {},
            {"offload": True, "checkpointing": "sqrt", "device_type": "cuda"},
            {"precision": "bf16"},
        ),
        (
            {"stem": "conv", "block": "plain"},
            {"checkpointing": ("encoder.0",)},
            {"image_shape": (2, 1, *SIZE)},
        ),
    ],
    ids=lambda value: "-".join(str(item) for item in value.values()) or "plain",
)
def test_nothing_needs_to_be_computed(
    network: dict[str, Any], switches: dict[str, Any], step: dict[str, Any]
) -> None:
    fake, real = (
        count(lambda: apply_switches(make(**network), **switches), **step, compute=is_computed)
        for is_computed in (False, True)
    )
    assert fake == real


def test_a_gpu_holds_a_larger_slab_of_the_loss() -> None:
    loss = DiceCrossEntropyLoss()
    shape = (1, 1, 64, 128, 128)

    def peak(*, is_gpu: bool) -> int:
        return count_step(
            lambda: nn.Conv3d(1, 2, 1),
            shape,
            loss=loss,
            make_optimizer=lambda weights: torch.optim.SGD(weights, 0.1),
            is_gpu=is_gpu,
        ).peak

    more_voxels = SLAB_VOXELS_GPU - SLAB_VOXELS_CPU
    more_bytes = peak(is_gpu=True) - peak(is_gpu=False)
    # Logits, their copy, the softmax and its sums: six to eight numbers of 4 bytes.
    assert 24 * more_voxels <= more_bytes <= 32 * more_voxels
    assert loss.slab_voxels is None, "the loss of the caller stays"


def test_recomputed_norms_of_a_gpu_are_in_fp32_as_well() -> None:
    """CUDA's autocast computes a group norm in fp32, in the forward pass and again."""
    timeline = Timeline()
    count(
        lambda: apply_switches(make(norm="group", width=8), checkpointing="all"),
        precision="bf16",
        is_gpu=True,
        timeline=timeline,
    )
    formats: dict[str, list[torch.dtype]] = {"forward": [], "backward": []}
    for segment in timeline.segments:
        for *_, key in segment.operations:
            call = timeline.calls[key]
            if call.operation is torch.ops.aten.native_group_norm.default:
                formats[segment.owner.kind].append(call.arguments[0].dtype)
    assert formats["forward"]
    assert formats["backward"] == formats["forward"] == [torch.float32] * len(formats["forward"])


def test_upsampling_on_a_gpu_is_in_fp32_and_its_sum_is_not() -> None:
    timeline = Timeline()
    count(make, precision="bf16", is_gpu=True, timeline=timeline)
    enlarged = set()
    sums = set()
    for segment in timeline.segments:
        if segment.owner != Owner("forward", "decoder.0.up"):
            continue
        for *_, key in segment.operations:
            call = timeline.calls[key]
            if call.operation is torch.ops.aten.upsample_nearest3d.default:
                enlarged.add(call.arguments[0].dtype)
            elif call.operation is torch.ops.aten.add_.Tensor:
                sums.add(call.arguments[0].dtype)
    assert (enlarged, sums) == ({torch.float32}, {torch.bfloat16})


def test_the_network_of_a_stage_is_counted() -> None:
    def stage_network() -> nn.Module:
        return StageNetwork(lambda channels: UNet(channels, 2, width=4, depth=2))

    fake, real = (count(stage_network, compute=is_computed) for is_computed in (False, True))
    assert fake == real
    weights = [weight.nbytes for weight in stage_network().parameters()]
    assert fake.gradients == sum(weights)
    assert fake.parameters == sum(weights)
    assert fake.optimizer_state == 2 * sum(weights) + 4 * len(
        weights
    )  # two moments, and a counter per tensor


@pytest.mark.parametrize("compute", [False, True])
def test_frozen_weights_have_neither_gradients_nor_state(compute: bool) -> None:
    def make_frozen() -> nn.Module:
        network = make()
        network.encoder.requires_grad_(requires_grad=False)
        return network

    trained = [weight for weight in make_frozen().parameters() if weight.requires_grad]
    memory = count(make_frozen, make_optimizer=Momentum, compute=compute)
    whole = count(make, make_optimizer=Momentum, compute=compute)
    assert memory.parameters == whole.parameters
    assert memory.gradients == sum(weight.nbytes for weight in trained)
    assert memory.optimizer_state == memory.gradients < whole.optimizer_state


def test_each_switch_moves_what_it_claims_to_move() -> None:
    plain = count(make)
    names = [*make().blocks(), "head", "loss"]
    assert list(plain.saved) == [name for name in names if name in plain.saved]
    assert {"stem", "encoder.2.block0", "head"} <= plain.saved.keys()
    recomputed = count(lambda: apply_switches(make(), checkpointing="all"))
    assert recomputed.saved_bytes < 0.5 * plain.saved_bytes
    assert recomputed.peak < plain.peak
    chosen = count(lambda: apply_switches(make(), checkpointing=("encoder.0",)))
    changed = {name for name in plain.saved if chosen.saved[name] != plain.saved[name]}
    assert changed == {"encoder.0.block0"}
    away = count(lambda: apply_switches(make(), offload=True, device_type="cuda"))
    assert set(away.saved) == {"head", "loss"}  # the logits, which the loss keeps
    assert away.offloaded >= plain.saved_bytes - away.saved_bytes
    assert away.peak < plain.peak
    half = count(make, precision="bf16")
    assert (
        0.5 * plain.saved_bytes < half.saved_bytes < 0.6 * plain.saved_bytes
    )  # and copies of the weights
    assert (half.parameters, half.gradients, half.optimizer_state) == (
        plain.parameters,
        plain.gradients,
        plain.optimizer_state,
    )
    momentum = count(make, make_optimizer=Momentum)
    assert momentum.optimizer_state == momentum.parameters < plain.optimizer_state / 1.9
    averaged = count(make, averages=True)
    assert (
        averaged.optimizer_state - plain.optimizer_state
        == averaged.peak - plain.peak
        == plain.parameters
    )
    # The second micro-batch finds the gradients of the first.
    assert plain.peak < count(make, accumulate=5).peak <= plain.peak + plain.gradients


# Optimiser, its options, and the copies of the weights that its state consists of.
STATEFUL = [
    (torch.optim.SGD, {}, 0),
    (torch.optim.SGD, {"momentum": 0.9}, 1),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 3),
    (torch.optim.Adam, {}, 2),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}, 3),
    (torch.optim.AdamW, {"fused": True}, 2),
    (torch.optim.NAdam, {}, 2),
    (torch.optim.Adagrad, {}, 1),  # made in the constructor
    (pytorch_optimizer.Lamb, {}, 2),
    (pytorch_optimizer.LARS, {}, 1),
    (pytorch_optimizer.Lion, {}, 1),
]


@pytest.mark.parametrize(
    ("optimizer", "options", "num_copies"),
    STATEFUL,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_state_of_any_optimizer_is_counted(
    optimizer: Any, options: dict[str, Any], num_copies: int
) -> None:
    """Against what exists after a step: the optimiser's tensors, by the storages below them."""

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizer(parameters, lr=0.01, **options)
        return made

    network = make()
    trained = make_optimizer(network.parameters())
    network(torch.randn(1, 1, *SIZE)).sum().backward()
    trained.step()
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in trained.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    }
    memory = count(make, make_optimizer=make_optimizer)
    assert memory.optimizer_state == sum(held.values())
    num_tensors = len(list(network.parameters()))
    assert (
        0 <= memory.optimizer_state - num_copies * memory.parameters <= 12 * num_tensors
    )  # counters and trust ratios


def test_what_decides_by_values_is_refused() -> None:
    class Jump(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(1, 2, 1)

        def forward(self, image: Tensor) -> Tensor:
            logits: Tensor = self.conv(image)
            return logits if logits.mean() > 0 else -logits

    with pytest.raises(ValueError, match="without computing"):
        count(Jump)
