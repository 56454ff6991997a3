"""The parts of a UNet: norms, convolution units, blocks and the moves between space and channels.

Memory decides three details. A convolution before a norm has no bias, since the norm would subtract it again. The
activation works in place: a norm saves its input, not its output, so autograd loses nothing. And every unit therefore
keeps two tensors for the backward pass, the input of its convolution and the input of its norm.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = ("plain", "residual", "bottleneck")
NORMS = ("instance", "group", "batch")
NEGATIVE_SLOPE = 0.01
Shape = tuple[int, int, int]
POINT = (1, 1, 1)
GROUP_CHANNELS = 8
# Torch's batch-norm kernel for channels-last tensors on CPU adds voxel by voxel in fp32; above this number the error of
# the mean exceeds that of bf16.
MAX_CHANNELS_LAST_VOXELS_CPU = 2**21


class InstanceNorm(nn.Module):
    """Normalise each channel of each sample over its voxels, then scale and shift.

    The same function as `torch.nn.InstanceNorm3d(affine=True)`, by way of the batch-norm kernel on single samples:
    that kernel keeps channels-last tensors as they are (torch's instance norm copies them to the contiguous layout
    and back, four times slower on CPU), reads half precision and sums in fp32. Training and evaluation do the same;
    there are no running statistics.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W); each sample needs more than one voxel."""
        if features.device.type == "cpu" and features[0, 0].numel() > MAX_CHANNELS_LAST_VOXELS_CPU:
            features = features.contiguous()
        normalised = [
            F.batch_norm(sample, None, None, self.weight, self.bias, training=True, eps=self.eps) for sample in features.split(1)
        ]
        return normalised[0] if len(normalised) == 1 else torch.cat(normalised)


class GroupNorm(nn.GroupNorm):
    """Group norm that returns the precision it was given.

    Autocast on CUDA computes it in fp32 and would hand fp32 activations, twice the bytes, to everything that follows.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W) over groups of channels and all voxels."""
        return super().forward(features).to(features.dtype)


def make_norm(norm: str, channels: int) -> nn.Module:
    """Make a norm with scale and shift; groups hold eight channels, or all of them where eight does not divide."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "instance": lambda: InstanceNorm(channels),
        "group": lambda: GroupNorm(channels // GROUP_CHANNELS if channels % GROUP_CHANNELS == 0 else 1, channels),
        "batch": lambda: nn.BatchNorm3d(channels),
    }
    if norm not in makers:
        raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
    return makers[norm]()


def make_activation() -> nn.Module:
    """Make the activation of every unit, in place."""
    return nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True)


class Conv3d(nn.Conv3d):
    """Convolution that leaves bf16 on a CPU where an axis has two voxels or fewer.

    There the weight gradient of torch 2.13 reads memory that nobody wrote and may be NaN. Such features are tiny.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Convolve features (N, C, D, H, W)."""
        if features.device.type == "cpu" and min(features.shape[2:]) <= 2:
            with torch.autocast("cpu", enabled=False):
                return super().forward(features.float())
        return super().forward(features)


class ConvNormAct(nn.Sequential):
    """Convolution without bias, norm and, unless `is_last`, activation; (N, C, D, H, W) to (N, C', D/s, H/s, W/s)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Shape, *, norm: str, stride: Shape = (1, 1, 1), is_last: bool = False
    ) -> None:
        padding = padding_of(kernel)
        conv = Conv3d(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)
        nn.init.kaiming_normal_(conv.weight, a=NEGATIVE_SLOPE, nonlinearity="leaky_relu")
        layers = [conv, make_norm(norm, out_channels)]
        super().__init__(*layers, *([] if is_last else [make_activation()]))

    @property
    def norm(self) -> nn.Module:
        """The norm of the unit."""
        return self[1]


class ResidualBlock(nn.Module):
    """Add a branch of units to the input, then activate; (N, C, D, H, W) stays.

    The branch ends with a norm whose scale starts at zero: the block starts as the identity (Goyal et al. 2017,
    section 5.1).
    """

    def __init__(self, *units: ConvNormAct) -> None:
        super().__init__()
        self.branch = nn.Sequential(*units)
        self.activation = make_activation()
        nn.init.zeros_(units[-1].norm.weight)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        """Refine features (N, C, D, H, W)."""
        # In place on the norm's output, which nothing saves; the input is a skip or a convolution's input and must
        # stay.
        return self.activation(self.branch(features).add_(features))


def padding_of(kernel: Shape) -> Shape:
    """Padding that keeps the size; a kernel of 2 with stride 2 tiles the volume and needs none."""
    z, y, x = (size // 2 if size % 2 else 0 for size in kernel)
    return z, y, x


def make_block(block: str, channels: int, *, norm: str, reduction: int = 2, kernel: Shape = (3, 3, 3)) -> nn.Module:
    """Make a block that keeps channels and size.

    Args:
        block: `plain` (one 3x3x3 unit), `residual` (two) or `bottleneck` (1x1x1 reduce, 3x3x3, 1x1x1 expand).
        channels: Channels in and out.
        norm: Name of the norm.
        reduction: What a bottleneck divides its inner channels by.
        kernel: What takes the place of 3x3x3 where an axis is coarse, (z, y, x).

    Raises:
        ValueError: If a name is unknown or `reduction` does not divide the channels.
    """
    if block == "plain":
        return ConvNormAct(channels, channels, kernel, norm=norm)
    if block == "residual":
        return ResidualBlock(
            ConvNormAct(channels, channels, kernel, norm=norm), ConvNormAct(channels, channels, kernel, norm=norm, is_last=True)
        )
    if block == "bottleneck":
        if reduction < 1 or channels % reduction:
            raise ValueError(f"reduction must divide the {channels} channels of a block, got {reduction}")
        inner = channels // reduction
        return ResidualBlock(
            ConvNormAct(channels, inner, POINT, norm=norm),
            ConvNormAct(inner, inner, kernel, norm=norm),
            ConvNormAct(inner, channels, POINT, norm=norm, is_last=True),
        )
    raise ValueError(f"block must be one of {BLOCKS}, got {block!r}")


def space_to_depth(image: Tensor, cell: Shape = (2, 2, 2)) -> Tensor:
    """Move each cell of a×b×c voxels into channels: (N, C, aD, bH, cW) to (N, abc·C, D, H, W), nothing lost."""
    batch, channels = image.shape[:2]
    a, b, c = cell
    depth, height, width = (size // step for size, step in zip(image.shape[2:], cell, strict=True))
    cells = image.reshape(batch, channels, depth, a, height, b, width, c)
    return cells.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(batch, channels * a * b * c, depth, height, width)


def depth_to_space(features: Tensor, cell: Shape = (2, 2, 2)) -> Tensor:
    """Undo `space_to_depth`: (N, abc·C, D, H, W) to (N, C, aD, bH, cW)."""
    batch, channels, depth, height, width = features.shape
    a, b, c = cell
    channels //= a * b * c
    cells = features.reshape(batch, channels, a, b, c, depth, height, width)
    return cells.permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(batch, channels, depth * a, height * b, width * c)
