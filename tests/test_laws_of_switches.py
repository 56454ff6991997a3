"""Laws of the switches: what each may change in a result, over several networks and norms."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import Row
from dicom_files import save_stack
from matrix import assert_equal_weights, compose, train_and_resume
from torch import Tensor, nn

from medseg import LungSegmenter
from medseg.cascade.stage import TrainedStage
from medseg.data.samples import Sample, collate
from medseg.errors import UserError
from medseg.inference.options import InferenceOptions
from medseg.io.read import read_image, read_labels
from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.memory.precision import autocast
from medseg.memory.switches import apply_switches, save_to_host
from medseg.models.blocks import BLOCKS
from medseg.models.stage_network import StageNetwork
from medseg.models.unet import STEMS
from medseg.runs.folder import open_run
from medseg.runs.train_run import train_run
from medseg.task import Channel, Region, Task
from medseg.training.assemble import make_data_module
from medseg.training.module import SegmentationModule
from medseg.training.network import make_described_network

TASK = Task(
    "two sides",
    {"left": 1, "right": 2},
    (Region("left", ("left",), "left"), Region("right", ("right",), "right")),
    (Channel(window_hu=(-1000.0, 400.0)),),
)
UNET = {"width": 8, "depth": 2}
SEGRESNET = {
    "_target_": "monai.networks.nets.SegResNet",
    "init_filters": 4,
    "blocks_down": (1, 2),
    "blocks_up": (1,),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "unet-instance": {**UNET, "norm": "instance"},
    "unet-group": {**UNET, "norm": "group", "block": "plain", "stem": "conv"},
    "unet-batch": {**UNET, "norm": "batch", "block": "residual", "stem": "strided"},
    "unet-channel": {**UNET, "norm": "channel"},
    "unet-affine": {**UNET, "norm": "affine", "block": "residual"},
    "segresnet-instance": {**SEGRESNET, "norm": ("instance", {"affine": True})},
    "segresnet-group": {**SEGRESNET, "norm": ("group", {"num_groups": 2})},
    "segresnet-batch": {**SEGRESNET, "norm": "batch"},
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def make(node: dict[str, Any]) -> StageNetwork:
    """A two-sided network whose norms are affine: a zero scale at its end would hide a branch."""
    torch.manual_seed(0)
    network = make_described_network(node, TASK, "fine").train()
    for name, weight in network.named_parameters():
        if weight.ndim == 1 and name.endswith("weight"):
            nn.init.uniform_(weight, 0.5, 1.5)
    return network


def images() -> Tensor:
    return torch.randn(2, 1, 16, 24, 32, generator=torch.Generator().manual_seed(1))


def step(network: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of two samples, and gradients by name."""
    logits = network(images())
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {
        name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None
    }


def assert_same_step(plain: nn.Module, other: nn.Module) -> None:
    """Whether logits, gradients, weights and running statistics are equal bit by bit."""
    (logits, grads), (other_logits, other_grads) = step(plain), step(other)
    assert torch.equal(logits, other_logits)
    assert len(grads) == len(list(plain.parameters()))
    for name, grad in grads.items():
        assert torch.equal(grad, other_grads[name]), name
    state, other_state = plain.state_dict(), other.state_dict()
    assert list(state) == list(other_state)
    assert all(torch.equal(state[name], other_state[name]) for name in state)


# --- checkpointing, offload, in-place activations, gradients set to none, fused forms: the same
# bits ---------------------


@pytest.mark.parametrize("policy", ["sqrt", "all", "names"])
@every_network
def test_checkpointing_gives_the_same_bits(name: str, policy: str) -> None:
    plain = make(NETWORKS[name])
    blocks = list(plain.blocks())
    lean = apply_switches(
        copy.deepcopy(plain), checkpointing=(blocks[0], blocks[-1]) if policy == "names" else policy
    )
    assert_same_step(plain, lean)
    counts = {
        int(value)
        for key, value in lean.state_dict().items()
        if key.endswith("num_batches_tracked")
    }
    assert counts == ({1} if name.endswith("batch") else set()), "statistics are updated once"


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.endswith("batch")])
def test_checkpointed_norms_that_look_at_all_ranks_give_the_same_bits(name: str) -> None:
    plain = make(NETWORKS[name])
    lean = apply_switches(copy.deepcopy(plain), checkpointing="all", synchronise=True)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in lean.modules())
    assert_same_step(plain, lean)


@every_network
def test_offloaded_activations_give_the_same_bits(name: str) -> None:
    plain = make(NETWORKS[name])
    away = copy.deepcopy(plain)
    save_to_host(away)
    assert_same_step(plain, away)


@pytest.mark.parametrize(
    "node",
    [
        *NETWORKS.values(),
        *({**UNET, "block": block, "stem": stem} for block, stem in product(BLOCKS, STEMS)),
    ],
    ids=lambda node: "-".join(str(node.get(key)) for key in ("norm", "block", "stem")),
)
def test_in_place_activation_changes_no_gradient(node: dict[str, Any]) -> None:
    plain = make(node)
    apart = copy.deepcopy(plain)
    changed = [module for module in apart.modules() if getattr(module, "inplace", False)]
    for module in changed:
        module.inplace = False
    assert changed
    assert_same_step(plain, apart)


@every_network
def test_gradients_set_to_none_or_to_zero_make_the_same_steps(name: str) -> None:
    networks = [make(NETWORKS[name]) for _ in range(2)]
    for network, set_to_none in zip(networks, (True, False), strict=True):
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            step(network)
            optimizer.step()
    assert all(
        torch.equal(weight, same)
        for weight, same in zip(*(network.parameters() for network in networks), strict=True)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        ["model.width=4", "model.depth=1", "model.blocks_per_level=[1,1]"],
        [
            "model=segresnet",
            "model.init_filters=8",
            "model.blocks_down=[1,1]",
            "model.blocks_up=[1]",
        ],
    ],
    ids=["unet", "segresnet"],
)
def test_a_fused_optimizer_takes_the_steps_of_the_plain_one_with_clipping(
    model: list[str], precision: str, fit: Callable[..., Any]
) -> None:
    settings = [*model, "steps=2", f"memory.precision={precision}", "trainer.gradient_clip=0.1"]
    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "image": torch.randn(1, 1, 8, 8, 12, generator=generator),
            "target": torch.randint(3, (1, 8, 8, 12), generator=generator),
            "region": torch.zeros(1, dtype=torch.int64),
            "number": [0],
        }
        for _ in range(2)
    ]
    plain, fused = (
        fit([*settings, f"optimizer.fused={is_fused}"], batches) for is_fused in ("false", "true")
    )
    for weight, same in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-6)


# --- accumulation, ranks, composition of a batch: the same weights after a step in fp64
# ----------------------------------

SHAPES = {
    "crops": [(8, 20, 16), (16, 8, 16), (9, 14, 17), (16, 16, 9)],
    "patches": [(8, 16, 12)] * 4,
}


def samples(kind: str) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "image": torch.rand(1, *shape, generator=generator, dtype=torch.float64) * 2 - 1,
            "target": torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8),
            "inside": torch.tensor([(0, size) for size in shape]),
            "region": n % 2,
            "case": str(n),
            "number": n,
            "spacing_mm": (1.0, 1.0, 1.0),
        }
        for n, shape in enumerate(SHAPES[kind])
    ]


def weights_after_a_step(
    network: StageNetwork, stacks: list[Sample], num_micro_batches: int, num_ranks: int
) -> Tensor:
    """One step of SGD; ranks take consecutive parts of micro-batches and average gradients."""
    network = copy.deepcopy(network)
    module = SegmentationModule(
        network, DiceCrossEntropyLoss(), lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        lambda optimizer: None,
        seed=0, accumulate=num_micro_batches, tile_size=None, overlap=0.5, ema_decay=None,
        metadata={},
    )  # fmt: skip
    module.log = lambda *_, **__: None
    is_stacked = len({sample["target"].shape for sample in stacks}) == 1
    size = len(stacks) // num_micro_batches // num_ranks
    for first in range(0, len(stacks), size):
        batch: Any = collate(stacks[first : first + size], network.divisor, is_stacked=is_stacked)
        (module.training_step(batch, 0) / num_micro_batches / num_ranks).backward()
    module.make_optimizer(network.parameters()).step()
    return torch.cat([weight.detach().flatten() for weight in network.parameters()])


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", [name for name in NETWORKS if not name.endswith("batch")])
def test_a_step_does_not_depend_on_how_its_samples_are_batched(name: str, kind: str) -> None:
    network, stacks = make(NETWORKS[name]).double(), samples(kind)
    together = weights_after_a_step(network, stacks, 1, 1)
    assert not torch.equal(
        together, torch.cat([weight.detach().flatten() for weight in network.parameters()])
    )
    for num_micro_batches, num_ranks in ((2, 1), (2, 2)):
        other = weights_after_a_step(network, stacks, num_micro_batches, num_ranks)
        torch.testing.assert_close(other, together, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        weights_after_a_step(network, stacks[::-1], 1, 1), together, rtol=0, atol=1e-9
    )


# --- memory budget of the prediction: nothing
# ----------------------------------------------------------------------------


def stage_of(network: nn.Module, **changes: Any) -> TrainedStage:
    values = {
        "spacing_mm": (1.0, 1.0, 1.0), "tile_size": None, "region_margin_mm": 5.0,
        "precision": "fp32",
        "device": torch.device("cpu"),
    }  # fmt: skip
    return TrainedStage(network.eval(), "fine", TASK, **(values | changes))


@every_network
def test_a_budget_changes_no_label_or_is_refused(name: str) -> None:
    trained = stage_of(make(NETWORKS[name]))
    trained.count_memory()
    image = images()[:1, 0]
    needed_gib = trained.bytes_per_voxel * image.numel() / 2**30
    expected = trained.predict_probs(image, InferenceOptions(budget_gib=2 * needed_gib)).probs
    told = []
    for share in (1.0, 0.7, 0.5, 0.3):
        try:
            probs = trained.predict_probs(
                image, InferenceOptions(budget_gib=share * needed_gib)
            ).probs
        except UserError as error:
            told.append(str(error))
        else:
            torch.testing.assert_close(probs, expected, rtol=0, atol=2.0**-11)
    # Our UNet goes on in slabs; other networks are refused rather than tiled.
    assert len(told) == 3 if name.startswith("segresnet") else len(told) <= 1
    assert all(
        "inference.budget_gib=" in sentence and "is too small for the fine stage" in sentence
        for sentence in told
    )


# --- bf16: nearly nothing
# ------------------------------------------------------------------------------------------------


@every_network
def test_bf16_stays_near_fp32(name: str) -> None:
    network = make(NETWORKS[name])
    exact = network(images())
    with autocast("bf16", "cpu"):
        rounded = network(images())
    assert rounded.dtype == torch.bfloat16
    # About thirty roundings to 8 bits, relative to the standard deviation of the logits.
    assert (rounded.float() - exact).std() < 0.05 * exact.std()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lidc_0001", "rider_0117"])
def test_half_precision_costs_no_dice(case: str, shared_ct: Path) -> None:
    """The included weights in bf16 beside fp32."""
    reference = read_labels(shared_ct / case / "lungs.nii.gz").array
    fast, exact = (
        LungSegmenter(accelerator="cpu", precision=precision)
        .segment(shared_ct / case / "ct.nii.gz")
        .labels.array
        for precision in ("bf16", "fp32")
    )
    assert not np.array_equal(fast, exact), "two ways"
    for value in (1, 2):
        masks = [labels == value for labels in (fast, exact, reference)]
        fast_dice, exact_dice, both_dice = (
            2 * (mask & other_mask).sum() / (mask.sum() + other_mask.sum())
            for mask, other_mask in (masks[::2], masks[1:], masks[:2])
        )
        assert abs(fast_dice - exact_dice) < 0.001
        assert both_dice > 0.999


# --- layout, compilation: the rounding of fp32
# ---------------------------------------------------------------------------


def assert_near(plain: nn.Module, other: nn.Module, of_logits: float, of_grads: float) -> None:
    """Whether logits and gradients differ by these parts of their maximum at most; same names."""
    assert list(plain.state_dict()) == list(other.state_dict())
    (logits, grads), (other_logits, other_grads) = step(plain), step(other)
    torch.testing.assert_close(
        other_logits, logits, rtol=0, atol=of_logits * logits.abs().max().item()
    )
    for name, grad in grads.items():
        torch.testing.assert_close(
            other_grads[name], grad, rtol=0, atol=of_grads * grad.abs().max().item(), msg=name
        )


@every_network
def test_channels_last_stays_within_rounding(name: str) -> None:
    plain = make(NETWORKS[name])
    # A plain ReLU behind a batch norm: features near zero change their sign.
    of_grads = 1e-2 if name == "segresnet-batch" else 1e-3
    assert_near(plain, apply_switches(copy.deepcopy(plain), channels_last=True), 1e-5, of_grads)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here"
)
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("unet-instance", "sqrt"),
        pytest.param("segresnet-group", "none", marks=pytest.mark.thorough),
    ],
)
def test_compiled_network_computes_the_same(name: str, checkpointing: str) -> None:
    plain = make(NETWORKS[name])
    fast = apply_switches(
        copy.deepcopy(plain), checkpointing=checkpointing, channels_last=True, compile=True
    )
    assert_near(plain, fast, 1e-3, 1e-2)


# --- loader workers, interruptions, order of files: nothing
# --------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [{"stage": "coarse"}, {"stage": "fine"}, {"stage": "patches"}],
    ids=lambda row: row["stage"],
)
def test_neither_loader_workers_nor_the_step_of_a_resume_change_a_batch(
    row: Row, tiny_table: Path, tmp_path: Path
) -> None:
    data = make_data_module(compose(tiny_table, row, tmp_path))
    data.prepare_data()
    data.setup("fit")
    whole = list(data.train_batches())
    data.num_workers = 2
    (resumed,) = data.train_batches(start_step=1)
    assert len(whole) == 2
    for stack, same in zip(whole[1], resumed, strict=True):
        assert stack["case"] == same["case"]
        assert all(
            torch.equal(stack[key], same[key]) for key in ("image", "target", "inside", "region")
        )


@pytest.mark.slow
@pytest.mark.parametrize("network", ["unet", pytest.param("segresnet", marks=pytest.mark.thorough)])
def test_neither_loader_workers_nor_an_interruption_change_a_bit(
    network: str, tiny_table: Path, tmp_path: Path
) -> None:
    row = {"network": network, "stage": "fine", "accumulate": "2", "average": "ema"}
    alone = train_and_resume(tiny_table, row, tmp_path)
    config = compose(tiny_table, row, tmp_path / "workers")
    config.data.num_workers = 2
    open_run(config)
    train_run(config)
    assert_equal_weights(alone, tmp_path / "workers")


def test_the_order_of_files_changes_nothing(tmp_path: Path) -> None:
    image_hu = np.random.default_rng(0).integers(-1000, 1000, (6, 7, 9), dtype=np.int16)
    heights = [2.5 * index for index in range(6)]
    save_stack(tmp_path / "sorted", image_hu, heights)
    (tmp_path / "mixed").mkdir()
    for file, name in zip(sorted((tmp_path / "sorted").iterdir()), "dbface", strict=True):
        shutil.copy(file, tmp_path / "mixed" / name)
    in_order, mixed = (read_image(tmp_path / folder) for folder in ("sorted", "mixed"))
    assert np.array_equal(in_order.array, mixed.array)
    assert in_order.grid == mixed.grid
