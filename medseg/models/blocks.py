"""Building blocks of a UNet: norms, convolution units, blocks, space-to-depth and its inverse.

Each unit saves two tensors for the backward pass: the input of its convolution and the input of its
norm. The activation needs no third one, because it works in place on the norm's output, which
autograd does not save. A convolution before a norm has no bias, because the norm shifts its result
anyway.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape

BLOCKS = ("plain", "residual", "bottleneck")
NORMS = ("instance", "group", "batch", "channel", "affine")
NEGATIVE_SLOPE = 0.01  # of the leaky ReLU
POINT = (1, 1, 1)  # kernel, stride or cell of a single voxel
GROUP_CHANNELS = 8  # channels in each group of a group norm
# Torch's batch-norm kernel for channels-last tensors on CPU sums voxel by voxel in fp32. Above this
# number of voxels of a channel the rounding error of the mean exceeds that of bf16.
MAX_CHANNELS_LAST_VOXELS_CPU = 2**21


class InstanceNorm(nn.Module):
    """Normalise each channel of each sample over its voxels, then scale and shift.

    The same function as `torch.nn.InstanceNorm3d(affine=True)`, computed by the batch-norm kernel
    on single samples. That kernel keeps the channels-last layout (torch's instance norm copies to
    the contiguous layout and back, which takes longer), reads half precision and sums in fp32.
    There are no running statistics: training and evaluation compute the same.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W); each sample needs more than one voxel."""
        num_voxels = features[0, 0].numel()
        if features.device.type == "cpu" and num_voxels > MAX_CHANNELS_LAST_VOXELS_CPU:
            features = features.contiguous()
        normalised = [
            F.batch_norm(sample, None, None, self.weight, self.bias, training=True, eps=self.eps)
            for sample in features.split(1)
        ]
        # A single sample needs no copy.
        if len(normalised) == 1:
            return normalised[0]
        return torch.cat(normalised)


class GroupNorm(nn.GroupNorm):
    """Group norm whose result has the precision of its input.

    Autocast on CUDA computes group norm in fp32, whose result would double the bytes of all
    following activations.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W) over groups of channels and all voxels."""
        return super().forward(features).to(features.dtype)


class ChannelNorm(nn.Module):
    """Normalise each voxel over its channels, then scale and shift.

    A voxel's result depends on that voxel alone, not on the field of view or on padding.

    Source: Ba et al., Layer Normalization (2016), over the channels only.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Normalise (N, C, D, H, W) to a channels-last result of the same precision."""
        by_voxel = features.movedim(1, -1)  # (N, D, H, W, C), a view
        normalised = F.layer_norm(by_voxel, self.weight.shape, self.weight, self.bias, self.eps)
        # Autocast on CUDA computes layer norm in fp32.
        return normalised.movedim(-1, 1).to(features.dtype)


def make_norm(norm: str, channels: int) -> nn.Module:
    """Make a norm with scale and shift.

    Args:
        norm: One of `NORMS` but `affine`, which is part of `ScaledConv3d`. A group norm has groups
            of `GROUP_CHANNELS` channels, or a single group if that does not divide `channels`.
        channels: Channels of its input and result.

    Raises:
        ValueError: If the name is unknown.
    """
    if norm == "instance":
        return InstanceNorm(channels)
    if norm == "group":
        num_groups = 1
        if channels % GROUP_CHANNELS == 0:
            num_groups = channels // GROUP_CHANNELS
        return GroupNorm(num_groups, channels)
    if norm == "batch":
        return nn.BatchNorm3d(channels)
    if norm == "channel":
        return ChannelNorm(channels)
    raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")


def make_activation() -> nn.Module:
    """Make the activation of every unit, in place."""
    return nn.LeakyReLU(NEGATIVE_SLOPE, inplace=True)


class Conv3d(nn.Conv3d):
    """Convolution that computes small features on a CPU in fp32, even under autocast.

    Features are small where an axis has two voxels or fewer, or the kernel is deeper than the
    features. For these, the bf16 weight gradient of torch 2.13 (oneDNN, kernels of avx512_bf16)
    reads and writes out of bounds: it differs from run to run, may be NaN, and may end the process.
    Since the features are small, fp32 costs little.
    """

    def forward(self, features: Tensor) -> Tensor:
        """Convolve features (N, C, D, H, W)."""
        # Distance from the first to the last slice that the kernel reads, in slices.
        reach = self.dilation[0] * (self.kernel_size[0] - 1)
        is_small = min(features.shape[2:]) <= 2 or features.shape[2] <= reach
        # Weights in half precision belong to a prediction, which needs no gradient.
        if features.device.type == "cpu" and is_small and self.weight.dtype == torch.float32:
            with torch.autocast("cpu", enabled=False):
                return super().forward(features.to(self.weight.dtype))
        return super().forward(features)


class ScaledConv3d(Conv3d):
    """Convolution with a factor for each output channel and a bias (`norm=affine`).

    They stand for the scale and the shift of a norm, without its statistics. The factor multiplies
    the weights instead of the result, so that autograd keeps no features for it. Like the scale of
    a norm, it starts at zero at the end of a residual branch.

    Source: De and Smith, Batch normalization biases residual blocks towards the identity function
    in deep networks (2020): SkipInit.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Shape, *, stride: Shape, padding: Shape
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=padding)
        self.scale = nn.Parameter(torch.ones(out_channels))
        nn.init.zeros_(self.bias)  # type: ignore[arg-type]

    def fold_scale(self) -> None:
        """Multiply the weights by their factors for good.

        A prediction does so before it rounds the weights to half precision: the product of two
        rounded numbers would be less exact.
        """
        with torch.no_grad():
            self.weight.copy_(self.scaled_weight)
            self.scale.fill_(1.0)

    @property
    def scaled_weight(self) -> Tensor:
        """Weights times their factors."""
        return self.weight * self.scale.view(-1, 1, 1, 1, 1)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Torch's `forward` passes the plain weight, which `scaled_weight` replaces.
        return super()._conv_forward(input, self.scaled_weight, bias)


def replace_convolutions(network: nn.Module) -> None:
    """Turn the convolutions of any network into those of this module; weights and names stay."""
    for module in network.modules():
        # Not subclasses, which may compute something else.
        if type(module) is nn.Conv3d:
            module.__class__ = Conv3d


class ConvNormAct(nn.Sequential):
    """Convolution, norm and, unless `is_last`, activation.

    From (N, C, D, H, W) to (N, C', D/s, H/s, W/s). The convolution has no bias, except for
    `affine`, where it is a `ScaledConv3d` without a norm after it. The last unit of a residual
    branch has no activation, because the sum with the input is activated.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Shape,
        *,
        norm: str,
        stride: Shape = (1, 1, 1),
        is_last: bool = False,
    ) -> None:
        padding = padding_of(kernel)
        conv: Conv3d
        layers: list[nn.Module] = []
        if norm == "affine":
            conv = ScaledConv3d(in_channels, out_channels, kernel, stride=stride, padding=padding)
        else:
            conv = Conv3d(
                in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False
            )
            layers.append(make_norm(norm, out_channels))
        nn.init.kaiming_normal_(conv.weight, a=NEGATIVE_SLOPE, nonlinearity="leaky_relu")
        if not is_last:
            layers.append(make_activation())
        super().__init__(conv, *layers)

    @property
    def scale(self) -> nn.Parameter:
        """Factor of each channel: the scale of the norm, or of the convolution."""
        if isinstance(self[0], ScaledConv3d):
            return self[0].scale
        norm = self[1]
        return norm.weight  # type: ignore[return-value]


class ResidualBlock(nn.Module):
    """Add a branch of units to the input, then activate; the shape (N, C, D, H, W) stays.

    The branch ends with a scale that starts at zero, so that the sum starts as the input (Goyal et
    al., Accurate, large minibatch SGD, 2017, section 5.1).
    """

    def __init__(self, *units: ConvNormAct) -> None:
        super().__init__()
        self.branch = nn.Sequential(*units)
        self.activation = make_activation()
        nn.init.zeros_(units[-1].scale)

    def forward(self, features: Tensor) -> Tensor:
        """Refine features (N, C, D, H, W)."""
        # The sum overwrites the result of the branch, which autograd does not save. The input must
        # not be overwritten: a skip or a convolution reads it again.
        return self.activation(self.branch(features).add_(features))


def padding_of(kernel: Shape) -> Shape:
    """Compute the padding of each axis that keeps the size at stride 1.

    An even kernel gets no padding: its stride equals its size, so that it tiles the volume.
    """
    z, y, x = (size // 2 if size % 2 else 0 for size in kernel)
    return z, y, x


def make_block(
    block: str, channels: int, *, norm: str, reduction: int = 2, kernel: Shape = (3, 3, 3)
) -> nn.Module:
    """Make a block that keeps channels and size.

    Args:
        block: `plain` (one 3x3x3 unit), `residual` (two) or `bottleneck` (1x1x1 reduce, 3x3x3,
            1x1x1 expand).
        channels: Channels in and out.
        norm: Name of the norm.
        reduction: Channels of a bottleneck block divided by the channels inside it.
        kernel: Kernel (z, y, x) in place of 3x3x3, such as 1x3x3 where z is coarse.

    Raises:
        ValueError: If a name is unknown or `reduction` does not divide the channels.
    """
    if block == "plain":
        return ConvNormAct(channels, channels, kernel, norm=norm)
    if block == "residual":
        return ResidualBlock(
            ConvNormAct(channels, channels, kernel, norm=norm),
            ConvNormAct(channels, channels, kernel, norm=norm, is_last=True),
        )
    if block == "bottleneck":
        if reduction < 1 or channels % reduction:
            raise ValueError(
                f"reduction must divide the {channels} channels of a block, got {reduction}"
            )
        inner_channels = channels // reduction
        return ResidualBlock(
            ConvNormAct(channels, inner_channels, POINT, norm=norm),
            ConvNormAct(inner_channels, inner_channels, kernel, norm=norm),
            ConvNormAct(inner_channels, channels, POINT, norm=norm, is_last=True),
        )
    raise ValueError(f"block must be one of {BLOCKS}, got {block!r}")


def space_to_depth(image: Tensor, cell: Shape = (2, 2, 2)) -> Tensor:
    """Move each cell of a×b×c voxels into channels: (N, C, aD, bH, cW) to (N, abc·C, D, H, W)."""
    if _can_move_pairs(image, cell):
        return _space_to_depth_in_pairs(image, cell)
    batch, channels = image.shape[:2]
    a, b, c = cell
    depth, height, width = _divided_shape(image, cell)
    # Split each axis into (cell, position in the cell).
    split = image.reshape(batch, channels, depth, a, height, b, width, c)
    # Move the three positions behind the channels: (N, C, a, b, c, D, H, W).
    cells = split.permute(0, 1, 3, 5, 7, 2, 4, 6)
    return cells.reshape(batch, channels * a * b * c, depth, height, width)


def depth_to_space(features: Tensor, cell: Shape = (2, 2, 2)) -> Tensor:
    """Invert `space_to_depth`: (N, abc·C, D, H, W) to (N, C, aD, bH, cW)."""
    if _can_move_pairs(features, cell):
        return _depth_to_space_in_pairs(features, cell)
    batch, all_channels, depth, height, width = features.shape
    a, b, c = cell
    channels = all_channels // (a * b * c)
    cells = features.reshape(batch, channels, a, b, c, depth, height, width)
    # Move each position in the cell behind its axis, (N, C, D, a, H, b, W, c), then join the two.
    split = cells.permute(0, 1, 5, 2, 6, 3, 7, 4)
    return split.reshape(batch, channels, depth * a, height * b, width * c)


def _divided_shape(image: Tensor, cell: Shape) -> Shape:
    """Count the cells of an image (N, C, D, H, W) along z, y and x."""
    z, y, x = (size // step for size, step in zip(image.shape[2:], cell, strict=True))
    return z, y, x


def _can_move_pairs(values: Tensor, cell: Shape) -> bool:
    """Whether two voxels along x can move as one number of four bytes, twice as fast.

    They can in half precision on a CPU, if neither autograd nor the compiler must follow.
    """
    # `is_compiling` comes first: asking for the mode would break the compiled graph.
    is_eager = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return is_eager and values.device.type == "cpu" and values.itemsize == 2 and cell[2] == 2


def _space_to_depth_in_pairs(image: Tensor, cell: Shape) -> Tensor:
    """Do `space_to_depth` in pairs; the result has the channels-last layout of convolutions."""
    batch, channels = image.shape[:2]
    a, b, c = cell
    depth, height, width = _divided_shape(image, cell)
    cells = image.new_empty((batch, depth, height, width, channels * a * b * c))
    # A pair is one int32, so the axis c = 2 vanishes from both views.
    targets = cells.view(torch.int32).unflatten(-1, (channels, a, b))  # (N, D, H, W, C, a, b)
    pairs = image.contiguous().view(torch.int32)
    sources = pairs.view(batch, channels, depth, a, height, b, width)
    for channel, z, y in itertools.product(range(channels), range(a), range(b)):
        targets[..., channel, z, y] = sources[:, channel, :, z, :, y]
    return cells.movedim(-1, 1)


def _depth_to_space_in_pairs(features: Tensor, cell: Shape) -> Tensor:
    """Do `depth_to_space` in pairs."""
    a, b, c = cell
    batch, all_channels, depth, height, width = features.shape
    channels = all_channels // (a * b * c)
    voxels = features.new_empty((batch, channels, depth * a, height * b, width * c))
    # As in `_space_to_depth_in_pairs`, from the channels-last view to the voxels.
    targets = voxels.view(torch.int32).view(batch, channels, depth, a, height, b, width)
    pairs = features.movedim(1, -1).contiguous().view(torch.int32)
    sources = pairs.unflatten(-1, (channels, a, b))  # (N, D, H, W, C, a, b)
    for channel, z, y in itertools.product(range(channels), range(a), range(b)):
        targets[:, channel, :, z, :, y] = sources[..., channel, z, y]
    return voxels
