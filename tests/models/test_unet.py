"""What the UNet promises: sizes, no waste, equal results by other means, and that it learns."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.losses.dice_ce import DiceCrossEntropyLoss
from medseg.memory.precision import autocast
from medseg.models.blocks import (
    BLOCKS,
    NORMS,
    ChannelNorm,
    Conv3d,
    InstanceNorm,
    ScaledConv3d,
    depth_to_space,
    make_norm,
    space_to_depth,
)
from medseg.models.unet import PART_PLANES, STEMS, UNet

SIZE = (32, 16, 48)  # unequal, each a multiple of 16


def image(batch: int = 1) -> Tensor:
    return torch.randn(batch, 1, *SIZE, generator=torch.Generator().manual_seed(1))


def make(**arguments: object) -> UNet:
    torch.manual_seed(0)
    network = UNet(1, 3, **{"width": 8, **arguments})
    # The zero scale at the end of a branch would hide what the branch does.
    for norm in network.modules():
        if isinstance(norm, InstanceNorm | nn.GroupNorm | nn.BatchNorm3d | ChannelNorm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        if isinstance(norm, ScaledConv3d):
            nn.init.uniform_(norm.scale, 0.5, 1.5)
    return network


def gradients(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    network.zero_grad()
    logits = network(inputs).float()
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [
        parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize(("stem", "block", "norm"), list(itertools.product(STEMS, BLOCKS, NORMS)))
def test_every_combination_sends_gradient_to_every_parameter(
    stem: str, block: str, norm: str
) -> None:
    network = make(stem=stem, block=block, norm=norm)
    grads = gradients(network, image(2))
    assert len(grads) == len(list(network.parameters()))
    assert all(torch.isfinite(grad).all() and grad.abs().sum() > 0 for grad in grads)
    assert network(image(2)).shape == (2, 3, *SIZE)


@pytest.mark.parametrize(("stem", "norm"), list(itertools.product(STEMS, NORMS)))
def test_no_bias_before_a_norm(stem: str, norm: str) -> None:
    convs = {
        name: module
        for name, module in make(stem=stem, norm=norm).named_modules()
        if isinstance(module, nn.Conv3d)
    }
    with_bias = [name for name, conv in convs.items() if conv.bias is not None]
    assert with_bias == (list(convs) if norm == "affine" else ["head.conv"])


@pytest.mark.parametrize("stem", ["strided", "space_to_depth"])
def test_refinement_sees_the_image_at_full_resolution(stem: str) -> None:
    network = make(stem=stem, refine=4)
    assert all(grad.abs().sum() > 0 for grad in gradients(network, image(2)))
    nn.init.zeros_(network.head.cells.weight)
    # Odd and even indices: the last convolution reads across the borders of the cells.
    voxel = (7, 9, 20)
    inputs = image().requires_grad_()
    logits = network(inputs)
    assert logits.shape == (1, 3, *SIZE)
    logits[0, 1][voxel].backward()
    voxels_with_gradient = (inputs.grad[0, 0] != 0).nonzero()
    assert len(voxels_with_gradient) == 5**3
    assert (voxels_with_gradient - torch.tensor(voxel)).abs().max() == 2


@pytest.mark.parametrize("num_planes", [1, 5, PART_PLANES, PART_PLANES + 1, 3 * PART_PLANES + 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_head_in_parts_gives_the_logits_of_all_planes(num_planes: int, precision: str) -> None:
    head = make(stem="space_to_depth").head
    features = torch.randn(2, 8, num_planes, 5, 6).to(memory_format=torch.channels_last_3d)
    images = torch.empty(0)  # this head ignores it
    with autocast(precision, "cpu"):
        with torch.no_grad():
            expected = head(features, images)
        with torch.inference_mode():
            by_parts = head(features, images)
    assert (by_parts.dtype, by_parts.shape) == (expected.dtype, expected.shape)
    assert torch.equal(by_parts, expected)


def test_no_part_of_a_head_is_small_unless_the_features_are() -> None:
    for num_planes in range(3, 200):
        features = torch.empty(1, 1, num_planes, 4, 4, device="meta")
        parts = features.tensor_split(math.ceil(num_planes / PART_PLANES), dim=2)
        assert min(part.shape[2] for part in parts) > 2


@pytest.mark.parametrize(("stem", "halvings"), [("conv", 0), ("strided", 1), ("space_to_depth", 1)])
def test_every_convolution_gives_the_size_of_its_level(stem: str, halvings: int) -> None:
    network = make(stem=stem, depth=3, blocks_per_level=(1, 2, 1, 2))
    assert network.divisor == (2 ** (3 + halvings),) * 3
    result_shapes: dict[str, tuple[int, ...]] = {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv3d):
            module.register_forward_hook(
                lambda _, __, out, name=name: result_shapes.update({name: tuple(out.shape[1:])})
            )
    network(image())
    for name, shape in result_shapes.items():
        # Such as `encoder.1.block0`; the stem and the head have no level.
        kind, level = [*name.split("."), "0"][:2]
        down = halvings + (int(level) if kind in ("encoder", "decoder") else 0)
        # The unit of `up` works before the voxels are repeated.
        down += kind == "decoder" and ".up." in name
        assert shape[1:] == tuple(size // 2**down for size in SIZE), name
    widest_at_full_size = max(
        (shape[0] for shape in result_shapes.values() if shape[1:] == SIZE), default=0
    )
    assert widest_at_full_size == (8 if stem == "conv" else 0)


def test_channels_double_up_to_the_limit() -> None:
    network = make(width=8, depth=4, max_width=32)
    widths = [level[-1].branch[-1].scale.numel() for level in network.encoder]
    assert widths == [8, 16, 32, 32, 32]


@pytest.mark.parametrize("size", [(24, 16, 16), (16, 24, 16), (16, 16, 24), (1, 16, 16)])
def test_size_that_is_no_multiple_is_refused(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"multiple of \(16, 16, 16\)"):
        make()(torch.zeros(1, 1, *size))


def test_wrong_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"image must be \(N, 1"):
        make()(torch.zeros(1, 2, 16, 16, 32))


@pytest.mark.parametrize(
    ("name", "value"),
    [("width", 0), ("depth", 0), ("block", "dense"), ("stem", "patch"), ("norm", "layer"),
        ("blocks_per_level", 0),
     ("blocks_per_level", (1, 1)), ("reduction", 3), ("max_width", 0), ("refine", -1)],
)  # fmt: skip
def test_senseless_arguments_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        make(**{name: value})


def test_a_first_level_wider_than_the_largest_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width must be at most max_width=32"):
        make(width=64, max_width=32)


def test_refinement_of_a_network_at_full_resolution_is_refused() -> None:
    with pytest.raises(ValueError, match="refine must be 0"):
        make(stem="conv", refine=4)


def test_cells_go_to_channels_and_back() -> None:
    voxels = torch.arange(2 * 3 * 4 * 6 * 8).view(2, 3, 4, 6, 8)
    cells = space_to_depth(voxels)
    assert torch.equal(depth_to_space(cells), voxels)
    assert torch.equal(cells[1, 8:16, 1, 2, 3], voxels[1, 1, 2:4, 4:6, 6:8].flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", [(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_pairs_of_voxels_move_like_single_ones(
    cell: tuple[int, int, int], dtype: torch.dtype
) -> None:
    voxels = torch.randn(2, 3, 8, 12, 16).to(dtype)
    inner = voxels[:, :, 2:6, 2:10, 2:10]
    cells, inner_cells = space_to_depth(voxels, cell), space_to_depth(inner, cell)
    with torch.inference_mode():
        paired = space_to_depth(voxels, cell)
        assert torch.equal(paired, cells)
        assert torch.equal(space_to_depth(inner, cell), inner_cells)
        assert torch.equal(depth_to_space(paired, cell), voxels)
        assert torch.equal(depth_to_space(cells.contiguous(), cell), voxels)


@pytest.mark.parametrize("batch", [1, 3])
def test_instance_norm_is_torchs(batch: int) -> None:
    features = torch.randn(batch, 4, 5, 6, 7, dtype=torch.float64) * 3 + 2
    norm = make_norm("instance", 4).double()
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    expected = F.instance_norm(features, weight=norm.weight, bias=norm.bias)
    torch.testing.assert_close(norm(features), expected)
    torch.testing.assert_close(
        norm(features.contiguous(memory_format=torch.channels_last_3d)), expected
    )


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "affine"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_computed_in_fp32(norm: str, dtype: torch.dtype) -> None:
    # Squares of 300 and sums over 2^17 voxels both leave fp16 (65504); sums in bf16 stop growing
    # after 256 terms.
    features = (
        torch.randn(1, 8, 32, 64, 64, generator=torch.Generator().manual_seed(0)) * 300 + 1000
    ).to(dtype)
    module = make_norm(norm, 8)
    with torch.autocast("cpu", dtype):
        normalised = module(features)
    assert normalised.dtype == dtype
    expected = copy.deepcopy(module).double()(features.double())
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(normalised.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("channels_last", [False, True])
def test_channel_norm_is_that_of_numpy_at_each_voxel(channels_last: bool) -> None:
    features = torch.randn(2, 6, 3, 4, 5, dtype=torch.float64) * 3 + 2
    norm = make_norm("channel", 6).double()
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    values = features.numpy()
    values = (values - values.mean(1, keepdims=True)) / np.sqrt(values.var(1, keepdims=True) + 1e-5)
    scale = norm.weight.detach().view(-1, 1, 1, 1).numpy()
    shift = norm.bias.detach().view(-1, 1, 1, 1).numpy()
    if channels_last:
        features = features.contiguous(memory_format=torch.channels_last_3d)
    np.testing.assert_allclose(
        norm(features).detach().numpy(), values * scale + shift, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("norm", "is_local"),
    [("channel", True), ("affine", True), ("batch", True), ("instance", False), ("group", False)],
)
def test_a_local_norm_gives_a_crop_the_result_of_the_whole(norm: str, is_local: bool) -> None:
    network = make(norm=norm, depth=1, blocks_per_level=1, refine=2).double().eval()
    whole = torch.randn(1, 1, 56, 44, 48, dtype=torch.float64)
    # The border is within the reach of 16 voxels: 1 + 1 + 2 + 1 cells of 2 voxels, the alignment of
    # a cell and two voxels of the head.
    with torch.inference_mode():
        crop = network(whole[..., 8:56, 4:44, 0:44])[..., 16:-16, 16:-16, 16:-16]
        expected = network(whole)[..., 24:40, 20:28, 16:28]
    assert crop.shape == expected.shape
    assert (float((crop - expected).abs().max()) < 1e-10 * float(expected.abs().max())) == is_local


def test_a_folded_scale_changes_nothing() -> None:
    network = make(norm="affine")
    expected = network(image())
    for module in network.modules():
        if isinstance(module, ScaledConv3d):
            module.fold_scale()
            assert bool((module.scale == 1).all())
    assert torch.equal(network(image()), expected)


def test_instance_norm_keeps_its_mean_over_millions_of_voxels() -> None:
    # Torch's own kernel for channels-last tensors is off by more than 0.1 here.
    features = (
        torch.randn(1, 1, 144, 160, 160, generator=torch.Generator().manual_seed(0)) + 100
    ).repeat(1, 2, 1, 1, 1)
    features = features.contiguous(memory_format=torch.channels_last_3d)
    normalised = make_norm("instance", 2)(features)
    assert normalised.mean().abs() < 1e-3
    assert abs(normalised.std().item() - 1) < 1e-3


def test_residual_blocks_start_as_the_identity() -> None:
    for block, norm in itertools.product(("residual", "bottleneck"), NORMS):
        network = UNet(1, 2, width=8, block=block, norm=norm).eval()
        features = torch.rand(1, 8, 8, 8, 8)
        assert torch.equal(network.encoder[0](features), features)


def test_blocks_are_the_whole_network_but_the_head() -> None:
    network = make(blocks_per_level=2)
    named = network.blocks()
    inside = {id(parameter) for block in named.values() for parameter in block.parameters()}
    outside = [
        name for name, parameter in network.named_parameters() if id(parameter) not in inside
    ]
    assert outside == ["head.conv.weight", "head.conv.bias"]
    assert sum(len(list(block.parameters())) for block in named.values()) == len(inside)
    assert all(network.get_submodule(name) is block for name, block in named.items())
    refining = make(refine=4)
    assert sum(len(list(block.parameters())) for block in refining.blocks().values()) == len(
        list(refining.parameters())
    )


@pytest.mark.slow
def test_learns_two_blobs() -> None:
    grid = torch.stack(torch.meshgrid(*(torch.arange(32.0),) * 3, indexing="ij"))
    blobs = [
        (grid - torch.tensor(centre).view(3, 1, 1, 1)).norm(dim=0) < 6
        for centre in ((16, 16, 9), (14, 18, 23))
    ]
    target = (blobs[0] * 1 + blobs[1] * 2).unsqueeze(0)
    torch.manual_seed(0)
    # Both blobs look alike: only their place tells the classes apart, as with two lungs.
    inputs = (target > 0).float().unsqueeze(1) * 2 - 1 + 0.3 * torch.randn(1, 1, 32, 32, 32)
    network, loss = UNet(1, 3, width=16, depth=2), DiceCrossEntropyLoss()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for _ in range(120):
        loss(network(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    labels = network(inputs).argmax(1)
    for k in (1, 2):
        dice = (
            2 * ((labels == k) & (target == k)).sum() / ((labels == k).sum() + (target == k).sum())
        )
        assert dice > 0.95


# Strides of a network for slices that are four times as far apart as the voxels in plane.
COARSE_Z = ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2))


@pytest.mark.parametrize(
    ("stem", "block", "refine"),
    [("conv", "plain", 0), ("strided", "residual", 2), ("space_to_depth", "bottleneck", 2)],
)
def test_a_coarse_axis_is_divided_later_and_its_slices_are_not_mixed_before(
    stem: str, block: str, refine: int
) -> None:
    strides = COARSE_Z[(stem == "conv") :]
    network = make(stem=stem, block=block, refine=refine, norm="batch", strides=strides).eval()
    assert network.divisor == tuple(int(n) for n in torch.tensor(strides).prod(0))
    inputs = torch.randn(1, 1, 8, 32, 48)
    assert network(inputs).shape == (1, 3, 8, 32, 48)
    assert len(gradients(network, torch.cat([inputs, inputs]))) == len(list(network.parameters()))
    # Kernel size and stride of each convolution along z.
    reaches = {
        name: (conv.kernel_size[0], conv.stride[0])
        for name, conv in network.named_modules()
        if isinstance(conv, nn.Conv3d)
    }
    # From level 1 on, where z is divided next, the kernels also cover z.
    deeper_levels = ("encoder.1", "encoder.2", "encoder.3", "decoder.1", "decoder.2")
    for name, reach in reaches.items():
        if not name.startswith(deeper_levels):
            assert reach == (1, 1), name
    assert reaches[f"encoder.{3 - (stem == 'conv')}.down.0"] == (2, 2)


@pytest.mark.parametrize(
    ("stem", "kernel"),
    [("conv", (1, 3, 3)), ("strided", (1, 3, 3)), ("space_to_depth", (3, 3, 3))],
)
def test_the_first_convolution_has_the_kernel_of_the_resolution_that_it_reads(
    stem: str, kernel: tuple[int, int, int]
) -> None:
    """Slices are coarse in the image alone, which cells of voxels have left already."""
    strides = ((1, 2, 2), *((2, 2, 2),) * (2 + (stem != "conv")))
    network = make(stem=stem, strides=strides)
    assert network.stem.unit[0].kernel_size == kernel


def test_strides_of_two_everywhere_are_the_plain_network() -> None:
    for stem in STEMS:
        same = make(stem=stem, strides=((2, 2, 2),) * (3 + (stem != "conv")))
        assert torch.equal(same(image()), make(stem=stem)(image()))


@pytest.mark.parametrize("strides", [((2, 2, 2),), ((2, 2, 3),) * 4, ((2, 2),) * 4])
def test_strides_that_do_not_fit_are_refused(strides: object) -> None:
    with pytest.raises(ValueError, match="strides must be 4 times 1 or 2"):
        make(strides=strides)


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "is_small"),
    [
        ((3, 3, 3), 3, 1, False),
        ((2, 4, 4), 3, 1, True),
        ((4, 4, 2), 3, 1, True),
        ((4, 2, 4), 1, 1, True),
        ((4, 5, 6), 3, 2, True),
        ((5, 5, 6), 3, 2, False),
    ],
)
def test_small_features_are_computed_in_the_format_of_the_weights(
    shape: tuple[int, int, int], kernel: int, dilation: int, is_small: bool
) -> None:
    """On a CPU, features are small with two voxels along an axis, or fewer than a kernel spans."""
    torch.manual_seed(0)
    convolution = Conv3d(2, 3, kernel, padding=dilation * (kernel // 2), dilation=dilation)
    features = torch.randn(1, 2, *shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = convolution(features.bfloat16())
    assert result.dtype == (torch.float32 if is_small else torch.bfloat16)
    half = convolution.bfloat16()(features.bfloat16())
    assert half.dtype == torch.bfloat16
