"""Slabs of nnU-Net's networks compute what one pass computes, within their budget."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medseg.geometry.sizes import Shape
from medseg.inference.slab_pass import WORKSPACE, Features
from medseg.memory.accounting import count_pass
from medseg.memory.tracker import MemoryTracker
from medseg.models.traits import build_on_meta
from medseg.nnunet.slabs import count_in_slabs, least_budget_bytes, logits_in_slabs

unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")

SHAPE = (16, 24, 20)  # unequal; four planes at the lowest of three levels
CHANNELS, HEADS, LEVELS = 2, 5, 3
FAMILIES = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
USUAL: dict[str, Any] = {
    "kernel_sizes": [[3, 3, 3]] * LEVELS,
    "strides": [[1, 1, 1], [2, 2, 2], [2, 2, 2]],
    "conv_bias": True,
    "norm_op": nn.InstanceNorm3d,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True},
}
ANISOTROPIC = {
    "kernel_sizes": [[1, 3, 3], [1, 3, 3], [3, 3, 3]],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "anisotropic": ANISOTROPIC,
    "batch norm": {"norm_op": nn.BatchNorm3d},
    "running statistics": {"norm_op_kwargs": {"affine": True, "track_running_stats": True}},
    "no norm": {"norm_op": None, "norm_op_kwargs": None},
    "dropout": {"dropout_op": nn.Dropout3d, "dropout_op_kwargs": {"p": 0.5}},
}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def make(family: str, changes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    network: nn.Module = getattr(unet, family)(
        input_channels=CHANNELS,
        n_stages=LEVELS,
        features_per_stage=[4, 8, 12],
        conv_op=nn.Conv3d,
        num_classes=HEADS,
        n_conv_per_stage_decoder=[2, 1],
        **{FAMILIES[family]: [1, 2, 2], **USUAL, **changes},
    )
    for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
        if tensor.ndim == 1:  # scales, shifts and statistics, so that one that is left out shows
            nn.init.uniform_(tensor, -0.5 if name.endswith("bias") else 0.5, 1.5)
    return network.eval()


def least(family: str, changes: dict[str, Any], shape: Shape = SHAPE) -> float:
    network = build_on_meta(lambda: make(family, changes), may_compute=False)
    return least_budget_bytes(network, CHANNELS, shape)


def image(dtype: torch.dtype = torch.float32, shape: Shape = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((1, CHANNELS, *shape), generator=generator, dtype=dtype)


def run(network: nn.Module, inputs: Tensor, budget_bytes: float) -> list[Tensor]:
    taken: list[Tensor] = []
    with torch.inference_mode():
        logits_in_slabs(network, inputs, budget_bytes, taken.append)
    return taken


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_slabs_compute_what_one_pass_computes(family: str, variant: str) -> None:
    changes = VARIANTS[variant]
    network = make(family, changes).double()
    inputs = image(torch.float64)
    with torch.inference_mode():
        expected = network(inputs)
    least_bytes = least(family, changes)
    counts = []
    for share in (1.0, 2.0, 5.0):
        # Twice, because the budget counts features in fp32.
        slabs = run(network, inputs, 2 * share * least_bytes)
        torch.testing.assert_close(torch.cat(slabs, dim=2), expected, rtol=1e-10, atol=1e-10)
        counts.append(len(slabs))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", ["usual", "anisotropic"])
# Torch unfolds all layers of the first; those of the second only where a slab is thin.
@pytest.mark.parametrize("shape", [SHAPE, (16, 512, 20)])
def test_slabs_in_fp32_equal_one_pass_bit_by_bit(family: str, variant: str, shape: Shape) -> None:
    changes = VARIANTS[variant]
    network = make(family, changes)
    inputs = image(shape=shape)
    with torch.inference_mode():
        expected = network(inputs)
    for share in (1.0, 2.0):
        slabs = run(network, inputs, share * least(family, changes, shape))
        assert len(slabs) > 1
        assert torch.equal(torch.cat(slabs, dim=2), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_below_the_least_is_refused(family: str) -> None:
    network = make(family, {})
    least_bytes = least(family, {})
    run(network, image(), least_bytes)
    with pytest.raises(ValueError, match="a plane of a layer needs"):
        run(network, image(), 0.99 * least_bytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_feature_maps_stay_below_half_of_the_budget_and_go_to_files_beyond(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counting: bytes in memory after each allocation, and the number of files."""
    held: list[int] = []
    are_files: list[bool] = []
    allocate = Features._allocate

    def watched(self: Any, like: Tensor) -> Tensor:
        values = allocate(self, like)
        held.append(sum(features.num_bytes for features in self._owner.in_memory))
        are_files.append(self._is_file)
        return values

    network = make(family, {})
    budget = least(family, {})
    monkeypatch.setattr(Features, "_allocate", watched)
    run(network, image(), budget)
    assert 0 < max(held) <= budget / 2
    assert any(are_files)
    are_files.clear()
    run(network, image(), 2**30)
    assert not any(are_files)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_slab_keeps_half_of_the_budget(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By counting: input and output of each convolution, and the workspace of its kernel."""
    budget = least(family, {})
    network = make(family, {})
    convolve = nn.functional.conv3d
    sizes: list[int] = []

    def watched(planes: Tensor, *arguments: Any, **more: Any) -> Tensor:
        values: Tensor = convolve(planes, *arguments, **more)
        sizes.append(planes.nbytes + values.nbytes)
        return values

    monkeypatch.setattr(nn.functional, "conv3d", watched)
    run(network, image(), budget)
    assert WORKSPACE * max(sizes) <= budget / 2
    num_layers = sum(isinstance(module, nn.Conv3d) for module in network.modules())
    assert len(sizes) > num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_budget_grows_with_the_depth_of_one_channel_alone(family: str) -> None:
    """Channels of all planes are normalised at a time; a deep tile needs room for one of them."""
    assert least(family, {}, (64, 24, 20)) <= 4 * least(family, {}, SHAPE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_in_slabs_is_counted_within_its_budget(family: str) -> None:
    """The image is beside it. No file is made, and a larger budget needs more or the same."""
    # So tall that torch unfolds no layer, whose columns would come on top.
    shape = (16, 4096, 20)

    def count(budget: float) -> int:
        def call(network: nn.Module, inputs: Tensor, tracker: MemoryTracker) -> None:
            count_in_slabs(network, inputs, budget, tracker)

        return count_pass(lambda: make(family, {}), (1, CHANNELS, *shape), call)

    least_bytes = least(family, {}, shape)
    num_voxels = math.prod(shape)
    counts = [count(share * least_bytes) for share in (1.0, 2.0, 1000.0)]
    assert counts == sorted(counts)
    for share, num_bytes in zip((1.0, 2.0), counts, strict=False):
        assert num_bytes - 4 * CHANNELS * num_voxels <= share * least_bytes
    # The skips of two levels at least.
    assert counts[-1] > 2 * 4 * 4 * num_voxels
