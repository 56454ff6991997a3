"""Switches and counts on networks of MONAI: gradients, repeated operations, kept bytes."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.memory.accounting import StepMemory, _copied_bytes, count_step
from medseg.memory.device_map import apply_device_map
from medseg.memory.switches import apply_switches, checkpoint_blocks, select_blocks
from medseg.memory.tracker import MemoryTracker
from medseg.models.stage_network import StageNetwork
from medseg.models.traits import build_on_meta
from medseg.task import Channel, Task
from medseg.training.network import make_described_network

NETS = "monai.networks.nets."
NETWORKS: dict[str, dict[str, Any]] = {
    "segresnet": {
        "_target_": f"{NETS}SegResNet",
        "init_filters": 8,
        "blocks_down": (1, 1, 2),
        "blocks_up": (1, 1),
    },
    "dynunet": {
        "_target_": f"{NETS}DynUNet", "kernel_size": (3, 3, 3), "strides": (1, 2, 2),
        "upsample_kernel_size": (2, 2), "filters": (8, 16, 16),
        "deep_supervision": True,
    },
    "swin_unetr": {"_target_": f"{NETS}SwinUNETR", "feature_size": 12},
}  # fmt: skip
SIZES = {"segresnet": (24, 16, 20), "dynunet": (24, 16, 20), "swin_unetr": (32, 32, 64)}
# SwinUNETR takes as long as ten of the others.
EACH = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.thorough])
    if name == "swin_unetr"
    else name
    for name in NETWORKS
]
TASK = Task("two", {"one": 1, "two": 2}, (), (Channel(window_hu=(-1000.0, 400.0)),))


def make(name: str) -> StageNetwork:
    torch.manual_seed(0)
    return make_described_network(NETWORKS[name], TASK, "coarse").train()


def loss_of(outputs: Tensor | list[Tensor]) -> Tensor:
    """A sum over all outputs of deep supervision, weighted unequally."""
    parts = [outputs] if isinstance(outputs, Tensor) else outputs
    return sum(
        (part.float().square().mean() / (index + 1) for index, part in enumerate(parts)),
        torch.zeros(()),
    )


def step(network: nn.Module, size: tuple[int, ...], seed: int = 1) -> dict[str, Tensor]:
    image = torch.randn(1, 1, *size, generator=torch.Generator().manual_seed(seed))
    loss_of(network(image)).backward()
    return {
        name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None
    }


def kept_bytes(network: nn.Module, size: tuple[int, ...]) -> int:
    """Bytes that a computed forward pass leaves behind, without weights and image.

    A hook hands out what autograd saves; the inputs of recomputed blocks are held by closures.
    """
    image = torch.rand(1, 1, *size)
    given_addresses = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*network.parameters(), *network.buffers(), image)
    }
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    gc.collect()
    # Leaves the objects that exist now out of `gc.get_objects`: millions, in a process of many
    # tests. They stay frozen, or else each later garbage collection would visit them.
    gc.freeze()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(network(image))
    after = storages()
    assert loss.requires_grad
    return sum(size for key, size in after.items() if key not in given_addresses)


def storages() -> dict[int, int]:
    """Bytes of every storage of a living tensor, by its address."""
    gc.collect()
    sizes = {}
    for tensor in gc.get_objects():
        if not isinstance(tensor, Tensor) or is_fake(tensor):
            continue
        if tensor.device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


class SumLoss(nn.Module):
    """The loss of this module as `count_step` calls it."""

    def forward(self, outputs: Tensor | list[Tensor], target: Tensor) -> Tensor:
        return loss_of(outputs)


def count(name: str, size: tuple[int, int, int], **switches: Any) -> StepMemory:
    return count_step(
        lambda: apply_switches(make(name), **switches),
        (1, 1, *size),
        loss=SumLoss(),
        make_optimizer=lambda weights: torch.optim.AdamW(weights),
    )


@pytest.mark.parametrize("name", EACH)
def test_checkpointing_changes_no_gradient_repeats_its_blocks_and_keeps_fewer_bytes(
    name: str,
) -> None:
    plain, size = make(name), SIZES[name]
    networks = {
        policy: apply_switches(copy.deepcopy(plain), checkpointing=policy)
        for policy in ("none", "sqrt", "all")
    }
    flops, grads = {}, {}
    for policy, network in networks.items():
        with FlopCounterMode(display=False) as counter:
            grads[policy] = step(network, size)
        flops[policy] = counter.get_total_flops()
    for policy in ("sqrt", "all"):
        assert grads[policy].keys() == grads["none"].keys()
        for key, grad in grads["none"].items():
            # The same kernels on the same numbers: equal but for the order of sums over several
            # uses of a tensor.
            torch.testing.assert_close(
                grads[policy][key], grad, rtol=1e-5, atol=1e-7 * float(grad.abs().max() + 1)
            )
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        plain(torch.randn(1, 1, *size))
    assert flops["none"] < flops["sqrt"] < flops["all"] <= flops["none"] + forward.get_total_flops()
    kept = {}
    for policy in networks:
        network = make(name)
        if policy != "none":
            network = apply_switches(network, checkpointing=policy)
        kept[policy] = kept_bytes(copy.deepcopy(network), size)
    assert kept["all"] < kept["sqrt"] < kept["none"]
    assert kept["all"] < 0.75 * kept["none"]


@pytest.mark.parametrize("checkpointing", ["none", "all"])
@pytest.mark.parametrize("name", EACH)
def test_the_plan_counts_what_autograd_keeps_within_one_percent(
    name: str, checkpointing: str
) -> None:
    size = SIZES[name]
    planned = count(name, size, checkpointing=checkpointing)
    network = apply_switches(make(name), checkpointing=checkpointing)
    weights = sum(weight.nbytes for weight in network.parameters())
    kept = (
        weights
        + sum(buffer.nbytes for buffer in network.buffers())
        + 2 * weights
        + kept_bytes(network, size)
    )
    planned_bytes = planned.parameters + planned.optimizer_state + planned.saved_bytes
    assert planned_bytes == pytest.approx(kept, rel=0.01)
    assert planned.gradients == weights


def test_blocks_are_chosen_by_name_and_by_pattern() -> None:
    blocks = make("segresnet").blocks()
    assert select_blocks(blocks, ["down_layers.*"]) == [
        name for name in blocks if name.startswith("down_layers")
    ]
    assert select_blocks(blocks, ["up_layers.0"]) == ["up_layers.0"]
    with pytest.raises(ValueError, match="which is no block; the blocks are down_layers"):
        select_blocks(blocks, ["encoder.*"])


@pytest.mark.parametrize("name", ["segresnet", "dynunet"])
def test_parts_on_several_devices_meet_on_one(name: str) -> None:
    """On fake tensors: no operation mixes devices, and the logits return to the first one."""
    network = build_on_meta(lambda: make(name)).requires_grad_(False)
    device_map = dict.fromkeys(list(network.blocks())[1::2], "cuda:1")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module, device in [
            (network, "cuda:0"),
            *((network.blocks()[block], "cuda:1") for block in device_map),
        ]:
            for part in module.modules():
                for table in (part._parameters, part._buffers):
                    for key, weight in table.items():
                        if weight is not None:
                            fake = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                            table[key] = (
                                nn.Parameter(fake, False) if table is part._parameters else fake
                            )
        with patch.object(nn.Module, "to"):  # which cannot move a fake weight
            apply_device_map(network, device_map, torch.device("cuda:0"))
        image = torch.zeros(1, 1, *SIZES[name], device="cuda:0")
        outputs = network(image)
        assert {
            output.device for output in (outputs if isinstance(outputs, list) else [outputs])
        } == {torch.device("cuda:0")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EACH)
def test_two_devices_compute_what_one_does(name: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    plain, placed = make(name), make(name).cuda()
    apply_device_map(
        placed, dict.fromkeys(list(placed.blocks())[1::2], "cpu"), torch.device("cuda:0")
    )
    image = torch.randn(1, 1, *SIZES[name])
    ours, theirs = (
        out if isinstance(out, list) else [out] for out in (plain(image), placed(image.cuda()))
    )
    for output, other_output in zip(ours, theirs, strict=True):
        torch.testing.assert_close(output, other_output.cpu(), rtol=1e-3, atol=1e-3)


def test_a_gpu_keeps_fp32_copies_of_the_inputs_of_group_norms() -> None:
    def counted(precision: str, *, is_gpu: bool) -> int:
        return count_step(
            lambda: nn.Sequential(nn.Conv3d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)),
            (1, 1, 16, 16, 16),
            loss=SumLoss(),
            make_optimizer=lambda weights: torch.optim.SGD(weights),
            precision=precision,
            is_gpu=is_gpu,
        ).saved_bytes

    assert counted("fp32", is_gpu=True) == counted("fp32", is_gpu=False)
    # The norm keeps its input in fp32 instead of bf16.
    assert counted("bf16", is_gpu=True) - counted("bf16", is_gpu=False) >= 2 * 8 * 16**3


@pytest.mark.parametrize(
    ("layout", "copies"), [(torch.contiguous_format, 0), (torch.channels_last_3d, 1)]
)
def test_nearest_upsampling_on_a_gpu_copies_channels_last_tensors(
    layout: torch.memory_format, copies: int
) -> None:
    features = torch.ones(1, 4, 6, 6, 6).contiguous(memory_format=layout)
    with MemoryTracker(workspace=_copied_bytes) as tracker:
        larger = nn.functional.interpolate(features, scale_factor=2.0, mode="nearest")
    given = features.nbytes + larger.nbytes
    assert tracker.peak_bytes == given * (1 + copies)


@pytest.mark.parametrize("name", EACH)
def test_one_step_of_training_on_real_losses(name: str) -> None:
    network = make(name)
    image, target = torch.randn(1, 1, *SIZES[name]), torch.zeros(1, *SIZES[name], dtype=torch.uint8)
    outputs = network(image)
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert output.shape == (1, 3, *SIZES[name])
        DiceCrossEntropyLoss()(output, target).backward(retain_graph=True)
    network.eval()
    assert isinstance(network(image), Tensor)


@pytest.mark.parametrize("rates", [{"attn_drop": 0.5}, {"drop": 0.5}, {"drop_path": 0.5}], ids=str)
def test_recomputed_windows_of_swin_unetr_draw_the_same_random_numbers(
    rates: dict[str, float],
) -> None:
    """Dropout of the attention, of the features and of whole paths."""
    from monai.networks.nets.swin_unetr import BasicLayer

    torch.manual_seed(0)
    plain = BasicLayer(8, 2, 2, (4, 4, 4), **{"drop_path": [0.0, 0.0], **rates})
    lean = copy.deepcopy(plain)
    checkpoint_blocks({"layer": lean}, "all")
    grads = []
    for layer in (plain, lean):
        torch.manual_seed(3)
        layer(
            torch.randn(2, 8, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        ).square().mean().backward()
        grads.append({name: weight.grad for name, weight in layer.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())
