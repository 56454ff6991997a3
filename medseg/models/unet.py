"""3D UNet with additive skips; by default its first level is at half resolution to save memory."""

import math
from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape
from medseg.geometry.strides import Strides, level_strides, total_strides
from medseg.models.blocks import (
    POINT,
    ConvNormAct,
    depth_to_space,
    make_activation,
    make_block,
    padding_of,
    space_to_depth,
)

STEMS = ("conv", "strided", "space_to_depth")
# Largest number of planes of features in a part of `Head._logits_by_parts`. Not larger, because the
# allocator reuses only small blocks (`medseg.memory.heap`). Not smaller, because `Conv3d` computes
# fewer than 3 planes in fp32; with 8, a split gives parts of at least 4 (9 planes become 5 and 4).
PART_PLANES = 8


class Stem(nn.Module):
    """First unit: from the image to the features of the first level.

    The stem `conv` keeps the resolution. `strided` halves it by the stride of the convolution;
    `space_to_depth` moves the voxels of each cell into channels before the convolution.

    Args:
        in_channels: Channels C of the image.
        width: Channels of the result.
        stem: One of `STEMS`.
        norm: Norm of the unit.
        kernel: Kernel of the unit's convolution.
        cell: Voxels of the image for each voxel of the result, (z, y, x).

    Attributes:
        channel_cell: Voxels of the image that become channels of one voxel, (z, y, x); only
            `space_to_depth` has more than one.
    """

    def __init__(
        self, in_channels: int, width: int, *, stem: str, norm: str, kernel: Shape, cell: Shape
    ) -> None:
        super().__init__()
        self.channel_cell = cell if stem == "space_to_depth" else POINT
        stride = cell if stem == "strided" else POINT
        unit_channels = in_channels * math.prod(self.channel_cell)
        self.unit = ConvNormAct(unit_channels, width, kernel, norm=norm, stride=stride)

    def forward(self, image: Tensor) -> Tensor:
        """Make features (N, width, D/a, H/b, W/c) of an image (N, C, D, H, W), for a cell a×b×c."""
        if self.channel_cell != POINT:
            image = space_to_depth(image, self.channel_cell)  # (N, abc·C, D/a, H/b, W/c)
        return self.unit(image)


class Up(nn.Module):
    """Bring the deeper features to the channels and the size of a skip, and add the skip.

    The channels are reduced before upsampling, at an eighth of the cost. Upsampling takes the
    nearest neighbour, because the backward pass of a linear interpolation is not deterministic on a
    GPU. Adding instead of concatenating halves the input of the next block.
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm: str, stride: Shape) -> None:
        super().__init__()
        self.unit = ConvNormAct(in_channels, out_channels, POINT, norm=norm)
        self.scale_factor = tuple(map(float, stride))  # `interpolate` declares floats

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        """Add a skip (N, out_channels, 2D, 2H, 2W) to features (N, in_channels, D, H, W).

        Along an axis of stride 1 both have the same size.
        """
        features = self.unit(features)  # (N, out_channels, D, H, W)
        enlarged = F.interpolate(features, scale_factor=self.scale_factor, mode="nearest")
        # CUDA's autocast interpolates in fp32, which would double the memory of the sum.
        return enlarged.to(features.dtype).add_(skip)


class Head(nn.Module):
    """Logits at the resolution of the image.

    Each voxel of the features predicts the logits of all voxels of its cell.

    Args:
        width: Channels of the features.
        num_classes: Classes K.
        cell: Voxels of the image for each voxel of the features, (z, y, x).
    """

    def __init__(self, width: int, num_classes: int, *, cell: Shape) -> None:
        super().__init__()
        self.cell = cell
        self.conv = nn.Conv3d(width, num_classes * math.prod(cell), 1)
        nn.init.zeros_(self.conv.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        """Predict logits (N, K, D, H, W) from features (N, width, d, h, w).

        The image is not used; it is an argument because `RefiningHead` needs it.
        """
        if self.cell == POINT:
            return self.conv(features)
        # A compiled graph would be fixed to one number of parts, hence to one depth. It must not
        # ask for the mode either, see `_can_move_pairs` of `medseg.models.blocks`.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return depth_to_space(self.conv(features), self.cell)
        return self._logits_by_parts(features)

    def _logits_by_parts(self, features: Tensor) -> Tensor:
        """Predict the logits of a few planes at a time, with the same result.

        For all planes at once, the result of the convolution and its rearranged copy, the logits,
        would both be in memory at the point where a prediction needs the most.
        """
        # Size of the image, (D, H, W).
        shape = [size * step for size, step in zip(features.shape[2:], self.cell, strict=True)]
        num_parts = math.ceil(features.shape[2] / PART_PLANES)
        logits: Tensor | None = None
        start = 0
        for part in features.tensor_split(num_parts, dim=2):
            part_logits = depth_to_space(self.conv(part), self.cell)  # (N, K, d, H, W)
            if logits is None:
                # Created here, because autocast chooses the precision.
                logits = part_logits.new_empty((*part_logits.shape[:2], *shape))
            stop = start + part_logits.shape[2]
            logits[:, :, start:stop] = part_logits
            start = stop
        assert logits is not None, "features have at least one plane"
        return logits


class RefiningHead(nn.Module):
    """Logits from features of half resolution and from the image, refined at full resolution.

    Each voxel of the features predicts `refine` channels of each voxel of its cell. A convolution
    of the image is added to these channels, and a last convolution mixes neighbouring cells. There
    is no norm, because features and image are normalised already.

    Args:
        in_channels: Channels C of the image.
        width: Channels of the features.
        refine: Channels at full resolution.
        num_classes: Classes K.
        kernel: Kernel of the two convolutions at full resolution, (z, y, x).
        cell: Voxels of the image for each voxel of the features, (z, y, x).
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        refine: int,
        num_classes: int,
        *,
        kernel: Shape,
        cell: Shape,
    ) -> None:
        super().__init__()
        self.cell = cell
        padding = padding_of(kernel)
        # At half resolution: the channels of all voxels of a cell.
        self.cells = nn.Conv3d(width, math.prod(cell) * refine, 1)
        self.detail = nn.Conv3d(in_channels, refine, kernel, padding=padding, bias=False)
        self.activation = make_activation()
        self.conv = nn.Conv3d(refine, num_classes, kernel, padding=padding)
        for conv in (self.cells, self.conv):
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        """Predict logits (N, K, D, H, W).

        Args:
            features: Features (N, width, D/2, H/2, W/2).
            image: Image (N, C, D, H, W).
        """
        refined = depth_to_space(self.cells(features), self.cell)  # (N, refine, D, H, W)
        refined = self.activation(refined.add_(self.detail(image)))
        return self.conv(refined)


class UNet(nn.Module):
    """A 3D UNet with additive skips.

    The first level has `width` channels; they double per level up to `max_width`. With the stems
    `strided` and `space_to_depth` the first level is at half the image's resolution and the head
    predicts the eight voxels of each cell, so that no tensor of `width` channels exists at full
    resolution. With `refine`, the number of channels at full resolution, the head is a
    `RefiningHead`.

    Attributes:
        divisor: Required multiple of the image size, in voxels (z, y, x).
        cell: Voxels of the image for each voxel of the first level, (z, y, x).
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        width: int = 16,
        depth: int = 3,
        block: str = "bottleneck",
        blocks_per_level: int | tuple[int, ...] = 1,
        stem: str = "space_to_depth",
        refine: int = 0,
        norm: str = "instance",
        reduction: int = 2,
        max_width: int = 256,
        strides: Strides | None = None,
    ) -> None:
        """Build the network.

        Args:
            in_channels: Channels C of the image.
            num_classes: Classes K with the background.
            width: Channels of the first level.
            depth: Number of downsamplings after the stem, at least 1.
            block: `plain`, `residual` or `bottleneck`.
            blocks_per_level: Blocks of each encoder level: one number for all, or `depth + 1`
                numbers, the finest level first. A decoder level has one block.
            stem: `conv` (full resolution), `strided` or `space_to_depth` (both half resolution).
            refine: Channels at full resolution that refine the result of half resolution; 0 = none.
            norm: `instance`, `group`, `batch`; or `channel` or `affine`, which have no statistics
                over the field of view.
            reduction: Channels of a bottleneck block divided by the channels inside it.
            max_width: Largest number of channels of a level, at least `width`.
            strides: Strides 1 or 2 along (z, y, x): first of the stem if it halves, then of each
                downsampling; see `level_strides`; None = 2 everywhere.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        _check_positive(
            in_channels=in_channels,
            width=width,
            depth=depth,
            reduction=reduction,
            max_width=max_width,
        )
        if num_classes < 2:
            raise ValueError(
                f"num_classes counts the background and must be at least 2, got {num_classes}"
            )
        if width > max_width:
            raise ValueError(f"width must be at most max_width={max_width}, got {width}")
        _check_stem(stem, refine)
        block_counts = _block_counts(blocks_per_level, depth + 1)
        # If the stem halves the resolution, the first of the strides is the stem's.
        num_stem_strides = 0 if stem == "conv" else 1
        if strides is None:
            strides = level_strides(None, num_stem_strides + depth)
        _check_strides(strides, num_stem_strides + depth)
        widths = [min(width * 2**level, max_width) for level in range(depth + 1)]
        self.in_channels = in_channels
        self.divisor: tuple[int, int, int] = total_strides(strides)
        # Kernel of each resolution, the image's first, by the stride to the next resolution. The
        # coarsest resolution has no next one; stride 2 in its place gives a kernel of 3x3x3.
        kernels = [_kernel(stride) for stride in (*strides, (2, 2, 2))]
        self.cell: Shape = strides[0] if num_stem_strides else POINT
        # After space-to-depth the stem sees the resolution of the first level, else the image's.
        stem_kernel = kernels[1] if stem == "space_to_depth" else kernels[0]
        self.stem = Stem(
            in_channels,
            width,
            stem=stem,
            norm=norm,
            kernel=stem_kernel,
            cell=self.cell,
        )
        make = partial(make_block, block, norm=norm, reduction=reduction)
        # The kernel of each level, level 0 first, and the stride from it to the next deeper level.
        level_kernels = kernels[num_stem_strides:]
        down_strides = strides[num_stem_strides:]
        # Modules draw their random weights in the order in which they are made: keep this order.
        self.encoder = nn.ModuleList()
        for level, channels in enumerate(widths):
            layers: OrderedDict[str, nn.Module] = OrderedDict()
            if level > 0:
                # The kernel is as large as the stride. 2x2x2 has 8/27 of the arithmetic of 3x3x3,
                # and the blocks mix neighbours anyway.
                stride = down_strides[level - 1]
                layers["down"] = ConvNormAct(
                    widths[level - 1], channels, stride, norm=norm, stride=stride
                )
            for number in range(block_counts[level]):
                layers[f"block{number}"] = make(channels, kernel=level_kernels[level])
            self.encoder.append(nn.Sequential(layers))
        self.decoder = nn.ModuleList()
        for level in range(depth):
            up = Up(widths[level + 1], widths[level], norm=norm, stride=down_strides[level])
            block0 = make(widths[level], kernel=level_kernels[level])
            self.decoder.append(nn.ModuleDict({"up": up, "block0": block0}))
        self.head: Head | RefiningHead
        if refine:
            self.head = RefiningHead(
                in_channels, width, refine, num_classes, kernel=kernels[0], cell=self.cell
            )
        else:
            self.head = Head(width, num_classes, cell=self.cell)

    def forward(self, image: Tensor) -> Tensor:
        """Predict class logits.

        Args:
            image: Normalised image (N, C, D, H, W), each size a multiple of `divisor`.

        Returns:
            Logits (N, K, D, H, W).

        Raises:
            ValueError: If the image has another number of channels, or a size that is no multiple
                of `divisor`.
        """
        if image.ndim != 5 or image.shape[1] != self.in_channels:
            raise ValueError(
                f"image must be (N, {self.in_channels}, D, H, W), got {tuple(image.shape)}"
            )
        shape = tuple(image.shape[2:])
        if any(length % step for length, step in zip(shape, self.divisor, strict=True)):
            raise ValueError(
                f"image size must be a multiple of {self.divisor}, got {shape}: pad it"
            )
        features = self.stem(image)  # (N, C, D/2, H/2, W/2), or full size with the stem `conv`
        skips: list[Tensor] = []
        for level in self.encoder:
            features = level(features)
            skips.append(features)
        # The features of the deepest level are no skip.
        skips.pop()
        for level in reversed(self.decoder):
            # Popped, so that a prediction frees each skip as soon as it is used.
            features = level["up"](features, skips.pop())  # type: ignore[index]
            features = level["block0"](features)  # type: ignore[index]
        return self.head(features, image)

    def blocks(self) -> dict[str, nn.Module]:
        """Give the blocks that can be recomputed by name, those that save the most bytes first.

        Together they are the whole network but a plain `Head`, which keeps only its input for the
        backward pass, so that recomputing it saves nothing. Names in the levels begin with
        `encoder.0`, `decoder.0`, …; level 0 is the finest.
        """
        blocks: dict[str, nn.Module] = {}
        # A refining head works at full resolution and saves the most.
        if isinstance(self.head, RefiningHead):
            blocks["head"] = self.head
        blocks["stem"] = self.stem
        for level, encoder in enumerate(self.encoder):
            for name, block in encoder.named_children():
                blocks[f"encoder.{level}.{name}"] = block
            # The coarsest level has no decoder.
            if level < len(self.decoder):
                for name, block in self.decoder[level].named_children():
                    blocks[f"decoder.{level}.{name}"] = block
        return blocks


def _check_positive(**numbers: int) -> None:
    """Refuse numbers below 1.

    Raises:
        ValueError: Names the first such number.
    """
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def _check_stem(stem: str, refine: int) -> None:
    """Refuse an unknown stem, and `refine` with the stem `conv`, which keeps the full resolution.

    Raises:
        ValueError: If the stem is unknown, or `refine` negative or not 0 with `conv`.
    """
    if stem not in STEMS:
        raise ValueError(f"stem must be one of {STEMS}, got {stem!r}")
    is_full_resolution = stem == "conv"
    if refine < 0 or (refine and is_full_resolution):
        raise ValueError(
            f"refine must be 0 with the stem conv, else at least 0, got {refine} with {stem}"
        )


def _block_counts(blocks_per_level: int | tuple[int, ...], num_levels: int) -> tuple[int, ...]:
    """Give the number of blocks of each encoder level, the finest first.

    Raises:
        ValueError: If their number is wrong, or a level has none.
    """
    if isinstance(blocks_per_level, int):
        counts = (blocks_per_level,) * num_levels
    else:
        counts = tuple(blocks_per_level)
    if len(counts) != num_levels or min(counts) < 1:
        raise ValueError(
            f"blocks_per_level must be one or {num_levels} numbers >= 1, got {blocks_per_level}"
        )
    return counts


def _check_strides(strides: Strides, num_strides: int) -> None:
    """Refuse strides other than 1 and 2 along three axes.

    Raises:
        ValueError: If a stride is wrong, or their number is.
    """
    are_valid = all(len(stride) == 3 and set(stride) <= {1, 2} for stride in strides)
    if len(strides) != num_strides or not are_valid:
        raise ValueError(
            f"strides must be {num_strides} times 1 or 2 for z, y and x, got {strides}"
        )


def _kernel(stride: Shape) -> Shape:
    """Choose the kernel of a resolution by the stride to the next one.

    The kernel has the size 1 along an axis of stride 1, where voxels are farther apart than along
    the others, see `level_strides`.
    """
    z, y, x = (3 if step == 2 else 1 for step in stride)
    return z, y, x
