"""Slabs: same logits as one pass, no voxel computed twice, memory within the budget."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from medseg.geometry.strides import level_strides
from medseg.inference.slab_pass import Features
from medseg.inference.slabs import least_budget_bytes, logits_in_slabs
from medseg.models.blocks import BLOCKS, NORMS, replace_convolutions
from medseg.models.unet import STEMS, UNet

SHAPE = (64, 16, 48)  # three different sizes; four planes at the lowest of four levels
COARSE_Z = ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def make(**arguments: Any) -> UNet:
    torch.manual_seed(0)
    network = UNet(1, 3, **{"width": 8, **arguments})
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:  # a scale of zero would hide the output of a branch
            nn.init.uniform_(
                parameter, 0.5 if "bias" not in name else -0.5, 1.5 if "bias" not in name else 0.5
            )
    for buffer in network.buffers():
        if buffer.ndim:
            nn.init.uniform_(buffer, 0.5, 1.5)
    replace_convolutions(network)
    return network.eval()


def image(dtype: torch.dtype = torch.float64, shape: tuple[int, int, int] = SHAPE) -> Tensor:
    return torch.randn(1, 1, *shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def run(network: UNet, inputs: Tensor, budget_bytes: float) -> tuple[Tensor, int]:
    """Run a network in slabs; returns the logits, and in how many parts they came."""
    taken: list[Tensor] = []
    with torch.inference_mode():
        logits_in_slabs(network, inputs, budget_bytes, taken.append)
    return torch.cat(taken, 2), len(taken)


def least(network: UNet, shape: tuple[int, int, int] = SHAPE) -> float:
    return least_budget_bytes(network, *shape[1:])


CASES = [
    *(
        {"norm": norm, "stem": stem, "refine": 4 * (stem != "conv")}
        for norm, stem in itertools.product(NORMS, STEMS)
    ),
    *({"norm": "instance", "block": block, "blocks_per_level": 2} for block in BLOCKS),
    {"norm": "group", "width": 16, "refine": 2, "strides": COARSE_Z},
    {"norm": "channel", "stem": "strided", "strides": COARSE_Z},
]


@pytest.mark.parametrize("arguments", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_slabs_compute_what_one_pass_computes(arguments: dict[str, Any]) -> None:
    network = make(**arguments).double()
    with torch.inference_mode():
        expected = network(image())
    for budgets in (1.0, 3.0):
        logits, num_slabs = run(network, image(), budgets * least(network))
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
        assert num_slabs > 4 / budgets
    whole, num_slabs = run(network, image(), 2.0**40)
    assert num_slabs == 1
    torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["instance", "affine"])
def test_half_precision_is_as_near_to_fp32_as_in_one_pass(norm: str) -> None:
    network = make(norm=norm, refine=4).to(memory_format=torch.channels_last_3d)
    inputs = image(torch.float32).contiguous(memory_format=torch.channels_last_3d)
    with torch.inference_mode():
        expected = network(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            logits, num_slabs = run(network, inputs, 2 * least(network))
            one_pass = network(inputs)
    assert num_slabs > 2
    assert logits.dtype == torch.bfloat16
    errors = [float((result.float() - expected).abs().mean()) for result in (logits, one_pass)]
    assert 0 < errors[0] < 1.1 * errors[1]


class Convolved(TorchDispatchMode):
    """Mode that counts the multiplications of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "conv" in str(func):
            self.total += result.numel() * args[1][0].numel()
        return result


@pytest.mark.parametrize(("refine", "most"), [(0, 1.0), (4, 1.1)])
def test_no_voxel_is_computed_more_than_once_but_at_the_borders_of_the_refining_head(
    refine: int, most: float
) -> None:
    network, inputs = make(refine=refine), image(torch.float32, (128, 16, 32))
    with (
        torch.no_grad(),
        Convolved() as whole,
    ):  # inference mode hides convolutions
        network(inputs)
    with torch.no_grad(), Convolved() as parts:
        logits_in_slabs(network, inputs, 8 * least(network, (128, 16, 32)), lambda _: None)
    assert whole.total > 0
    assert whole.total <= parts.total <= most * whole.total


def stored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the most bytes of feature maps in memory, and the number of their files."""
    most_and_files = [0, 0]
    allocate = Features._allocate

    def watched(self: Any, like: Tensor) -> Tensor:
        values = allocate(self, like)
        most_and_files[0] = max(
            most_and_files[0], sum(one.num_bytes for one in self._owner.in_memory)
        )
        most_and_files[1] += self._is_file
        return values

    monkeypatch.setattr(Features, "_allocate", watched)
    return most_and_files


def test_feature_maps_stay_below_half_of_the_budget_and_go_to_files_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = make()
    for budget in (least(network), 2**30):
        held = stored(monkeypatch)
        run(network, image(torch.float32, (256, 16, 48)), budget)
        in_memory, num_files = held
        assert 0 < in_memory <= budget / 2
        assert (num_files > 0) == (budget < 2**30)


def test_a_budget_below_one_plane_is_refused() -> None:
    network = make()
    with pytest.raises(ValueError, match=r"a plane of a layer needs 0\.0\d GiB"):
        run(network, image(torch.float32), 0.1 * least(network))
    assert math.isclose(least_budget_bytes(network, 32, 96), 4 * least(network), rel_tol=1e-6)


@pytest.mark.parametrize("refine", [2, 48])
def test_the_least_budget_is_enough_and_less_is_refused(refine: int) -> None:
    """Also if the layer that needs the most is the refining head."""
    network = make(refine=refine)
    inputs = image(torch.float32, (16, 16, 48))
    logits, _ = run(network, inputs, least(network))
    assert logits.shape == (1, 3, 16, 16, 48)
    with pytest.raises(ValueError, match="a plane of a layer needs"):
        run(network, inputs, 0.95 * least(network))


def test_the_least_budget_of_a_network_whose_stem_needs_the_most() -> None:
    """An image of many channels, in cells: one plane is the largest input of all layers."""
    torch.manual_seed(0)
    network = UNet(12, 3, width=4, depth=1, norm="affine").eval()
    inputs = torch.randn(1, 12, 8, 16, 48)
    budget = least_budget_bytes(network, 16, 48)
    logits, _ = run(network, inputs, budget)
    with torch.inference_mode():
        torch.testing.assert_close(logits, network(inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a plane of a layer needs"):
        run(network, inputs, 0.95 * budget)


@pytest.mark.parametrize("stem", ["conv", "space_to_depth"])
@pytest.mark.parametrize(
    "spacing_mm", [(1.0, 2.5, 5.0), (1.0, 3.0, 3.0), (1.0, 5.0, 5.0), (5.0, 1.0, 1.0)]
)
def test_the_least_budget_is_enough_where_a_deeper_level_needs_the_most(
    stem: str, spacing_mm: tuple[float, float, float]
) -> None:
    strides = level_strides(spacing_mm, 2 if stem == "conv" else 3)
    network = make(depth=2, stem=stem, strides=strides)
    shape = (32, 32, 32)
    _, num_slabs = run(network, image(torch.float32, shape), least(network, shape))
    assert num_slabs > 1
