"""Slab execution: our UNet layer by layer in slabs along z, within a memory budget.

The result is that of one pass. A layer reads the planes of its input that its kernel reaches, and
writes each plane of its output once. An instance or group norm needs statistics over the whole
field of view: they are summed over all slabs of the convolution before it, and the norm is applied
when the next layer reads its input.
Feature maps share half of the budget; those that do not fit are kept in scratch files. A slab of
the present layer takes the other half.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape
from medseg.io.scratch import release_pages, scratch_array
from medseg.models.blocks import (
    POINT,
    ConvNormAct,
    InstanceNorm,
    ResidualBlock,
    ScaledConv3d,
    depth_to_space,
    space_to_depth,
)
from medseg.models.unet import Head, RefiningHead, UNet

# Bytes that a layer takes per byte of its input and output: copies in the layout of the kernels,
# and sums in fp32.
WORKSPACE = 3.0
# Bytes of a feature in fp32; the plan of the slabs counts those of half precision the same.
ITEMSIZE = 4
Finish = Callable[[Tensor], Tensor]


def logits_in_slabs(
    network: UNet,
    image: Tensor,
    budget_bytes: float,
    take: Callable[[Tensor], None],
) -> None:
    """Run a network on one image; the caller sets the precision.

    Args:
        network: In evaluation mode.
        image: Normalised image (1, C, D, H, W), each size a multiple of the divisor; may lie on
            another device than the network.
        budget_bytes: Memory of feature maps and layers, beside the image and the weights.
        take: Receives the logits (1, K, d, H, W) of the next planes, from z = 0 on, on the device
            of the network.

    Raises:
        ValueError: If one plane of a layer exceeds half of the budget.
    """
    device = next(network.parameters()).device
    _SlabPass(budget_bytes, device, image.device).run(network, image, take)


def least_budget_bytes(network: UNet, height: int, width: int) -> float:
    """Budget with which `logits_in_slabs` runs at any depth, one plane at a time, in fp32 or less.

    Args:
        network: The network.
        height: Voxels of the image along y, a multiple of the divisor.
        width: Voxels along x, likewise.
    """
    area = height * width
    _, high, wide = network.stem.cell
    stem = _layer_bytes(cast(nn.Conv3d, network.stem.unit[0]), area // (high * wide))
    # Each layer as it needs least: one plane of output, and the planes that its kernel reaches.
    needs = [sum(stem)]
    # Deeper levels need less: a plane has twice the channels and a quarter of the voxels.
    parts: list[nn.Module] = [network.encoder[0], network.decoder[0]]
    if isinstance(network.head, Head):
        parts.append(network.head)
    else:
        # One plane of cells and its neighbours on both sides.
        needs.append(3 * _refined_bytes(network.head, area))
    _, high, wide = network.cell
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Conv3d):
                needs.append(sum(_layer_bytes(module, area // (high * wide))))
    # Feature maps share the other half of the budget.
    return 2 * max(needs)


def _layer_bytes(conv: nn.Conv3d, area: int) -> tuple[float, float]:
    """Memory of a convolution.

    Args:
        conv: The convolution.
        area: Voxels of a plane of its input.

    Returns:
        Bytes for each plane of its output, and for the planes beside them that its kernel reaches.
    """
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    into = ITEMSIZE * conv.in_channels * area
    out = ITEMSIZE * conv.out_channels * area // math.prod(conv.stride[1:])
    # The last summand is the copy in fp32 for the statistics.
    return WORKSPACE * (stride * into + out) + out, WORKSPACE * (kernel - stride) * into


def _refined_bytes(head: RefiningHead, area: int) -> float:
    """Memory of the refining head for one plane of cells, at full resolution."""
    channels = head.detail.in_channels + 2 * head.detail.out_channels + head.conv.out_channels
    return WORKSPACE * ITEMSIZE * head.cell[0] * area * channels


class _Features:
    """Feature map (1, C, D, H, W) of which ranges of planes are read and written.

    Attributes:
        finish: Function of each voxel that is due to planes when they are read: the norm and
            activation of their layer.
    """

    def __init__(
        self,
        depth: int,
        owner: "_SlabPass",
        values: Tensor | None = None,
        finish: Finish | None = None,
    ) -> None:
        self.depth = depth
        self.finish = finish
        self.num_bytes = 0  # in memory
        self._owner = owner
        self._values = values  # (D, C, H, W): a plane is one piece of memory, or of a file
        self._is_file = False

    @property
    def plane(self) -> tuple[int, int]:
        """Channels and voxels of a plane."""
        assert self._values is not None
        return self._values.shape[1], math.prod(self._values.shape[2:])

    @property
    def plane_bytes(self) -> float:
        """Memory of an operation on a plane, voxel by voxel."""
        channels, area = self.plane
        return WORKSPACE * ITEMSIZE * channels * area

    def read(self, start: int, stop: int) -> Tensor:
        """Planes start … stop - 1, (1, C, d, H, W), on the device of the network.

        Beyond the ends they are zero.
        """
        assert self._values is not None
        if self._is_file:
            release_pages()  # those of the slab before
        low, high = max(start, 0), min(stop, self.depth)
        planes = self._values[low:high].transpose(0, 1)[None].to(self._owner.device)
        if self.finish is not None:
            planes = self.finish(planes)
        if (low, high) == (start, stop):
            return planes
        # After the norm: the zeros are those that the next convolution pads with.
        return F.pad(planes, (0, 0, 0, 0, low - start, stop - high))

    def write(self, start: int, planes: Tensor) -> None:
        """Set the planes from `start` on to (1, C, d, H, W)."""
        values = planes[0].transpose(0, 1)
        if self._values is None:
            self._values = self._allocate(values)
        self._values[start : start + len(values)] = values
        if self._is_file:
            release_pages()

    def _allocate(self, like: Tensor) -> Tensor:
        """Make room for all planes, in the layout of the first ones."""
        channels, height, width = like.shape[1:]
        is_channels_last = like.is_contiguous(memory_format=torch.channels_last)
        sizes = (self.depth, channels, height, width)
        if is_channels_last:
            sizes = (self.depth, height, width, channels)
        num_bytes = self.depth * like[0].nbytes
        if self._owner.has_room(num_bytes):
            self.num_bytes = num_bytes
            self._owner.in_memory.add(self)
            values = torch.empty(sizes, dtype=like.dtype, device=self._owner.storage)
        else:
            self._is_file = True
            # As bytes, because numpy lacks bfloat16.
            content = torch.from_numpy(scratch_array((num_bytes,), np.uint8))
            values = content.view(like.dtype).view(sizes)
        return values.permute(0, 3, 1, 2) if is_channels_last else values


class _Cells:
    """Image whose cells of voxels are channels, as the stem `space_to_depth` sees it.

    Attributes:
        depth: Planes of cells.
        plane: Channels and cells of a plane.
    """

    def __init__(self, image: _Features, cell: Shape) -> None:
        self.depth = image.depth // cell[0]
        channels, area = image.plane
        self.plane = channels * math.prod(cell), area // math.prod(cell[1:])
        self._image = image
        self._cell = cell

    def read(self, start: int, stop: int) -> Tensor:
        """Planes of cells, as `_Features.read`."""
        high = self._cell[0]
        return space_to_depth(self._image.read(start * high, stop * high), self._cell)


class _Statistics:
    """Mean and variance of each channel over slabs, in float64 by Chan's update (1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self.square = torch.zeros(())  # sum of the squared differences from the mean

    def add(self, planes: Tensor) -> None:
        """Include planes (1, C, d, H, W)."""
        values = planes if planes.dtype == torch.float64 else planes.float()
        variance, mean = torch.var_mean(values, dim=(0, 2, 3, 4), correction=0)
        variance, mean = variance.double(), mean.double()
        count, count_before = planes[0, 0].numel(), self.count
        self.count += count
        mean_before = self.mean.to(mean.device)
        shift = mean - mean_before
        between = shift.square() * count_before * count / self.count
        self.square = self.square.to(mean.device) + variance * count + between
        self.mean = mean_before + shift * count / self.count

    def norm(self, module: InstanceNorm | nn.GroupNorm) -> Finish:
        """Make the function that normalises planes with the statistics of all."""
        mean, variance = self.mean, self.square / self.count
        if isinstance(module, nn.GroupNorm):
            # The variance of a group is the mean variance of its channels and that of their means.
            size = len(mean) // module.num_groups
            means = mean.view(module.num_groups, -1)
            variances = variance.view_as(means) + (means - means.mean(1, keepdim=True)).square()
            mean = means.mean(1).repeat_interleave(size)
            variance = variances.mean(1).repeat_interleave(size)
        weight, bias = module.weight, module.bias
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
        return lambda planes: F.batch_norm(
            planes, mean, variance, weight, bias, training=False, eps=module.eps
        )


class _SlabPass:
    """One execution of a network in slabs.

    Attributes:
        device: Device of the network.
        storage: Device of the feature maps.
        in_memory: Feature maps that are no files.
    """

    def __init__(self, budget_bytes: float, device: torch.device, storage: torch.device) -> None:
        self.device = device
        self.storage = storage
        self._half = budget_bytes / 2
        # Weak: a feature map counts until its last reader has dropped it.
        self.in_memory: WeakSet[_Features] = WeakSet()

    def has_room(self, num_bytes: int) -> bool:
        """Whether another feature map fits beside those in memory."""
        used_bytes = sum(features.num_bytes for features in self.in_memory)
        return used_bytes + num_bytes <= self._half

    def run(self, network: UNet, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """See `logits_in_slabs`."""
        whole = _Features(image.shape[2], self, image[0].transpose(0, 1))
        cell = network.stem.cell
        stem_input = whole if cell == POINT else _Cells(whole, cell)
        features = self._unit(network.stem.unit, stem_input)
        skips: list[_Features] = []
        for level in network.encoder:
            for block in level:  # type: ignore[attr-defined]
                features = self._block(block, features)
            skips.append(features)
        skips.pop()  # the lowest level, which goes on as it is
        for level in reversed(network.decoder):
            up = level["up"]  # type: ignore[index]
            features = self._add_up(self._unit(up.unit, features), skips.pop(), up.scale_factor)
            features = self._block(level["block0"], features)  # type: ignore[index]
        head = network.head
        if isinstance(head, RefiningHead):
            self._refine(head, features, whole, take)
            return
        for start, stop in self._slabs(features, head.conv):
            planes = features.read(start, stop)
            take(head(planes, planes))

    def _slabs(self, source: "_Features | _Cells", conv: nn.Conv3d) -> Iterator[tuple[int, int]]:
        """Split the output of a convolution into as few slabs as half of the budget allows."""
        bytes_per_plane, extra_bytes = _layer_bytes(conv, source.plane[1])
        return self._split(source.depth // conv.stride[0], bytes_per_plane, extra_bytes)

    def _split(
        self, depth: int, bytes_per_plane: float, extra_bytes: float, step: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Split planes into slabs that half of the budget holds.

        Args:
            depth: Number of planes.
            bytes_per_plane: Memory of each.
            extra_bytes: Memory of a slab beside its planes.
            step: The planes of a slab are a multiple of it.

        Yields:
            First plane and end of each slab.

        Raises:
            ValueError: If the budget is too small for `step` planes.
        """
        planes = int((self._half - extra_bytes) // bytes_per_plane) // step * step
        if planes < step:
            least_gib = 2 * (extra_bytes + step * bytes_per_plane) / 2**30
            raise ValueError(f"a plane of a layer needs {least_gib:.2f} GiB")
        for start in range(0, depth, planes):
            yield start, min(start + planes, depth)

    def _convolve(
        self, conv: nn.Conv3d, source: "_Features | _Cells", start: int, stop: int
    ) -> Tensor:
        """Planes start … stop - 1 of the output of a convolution."""
        stride = conv.stride[0]
        if (start, stop * stride) == (0, source.depth):
            return conv(source.read(0, source.depth))
        padding, high, wide = cast(Shape, conv.padding)
        # The planes that the kernel reaches are read, so along z nothing is padded.
        first = start * stride - padding
        planes = source.read(first, first + (stop - start - 1) * stride + conv.kernel_size[0])
        weight = conv.scaled_weight if isinstance(conv, ScaledConv3d) else conv.weight
        return F.conv3d(planes, weight, conv.bias, conv.stride, (0, high, wide))

    def _unit(self, unit: ConvNormAct, source: "_Features | _Cells") -> _Features:
        """Run a convolution with what follows it: a norm, or none, and an activation."""
        conv, *functions = unit
        assert isinstance(conv, nn.Conv3d)
        result = _Features(source.depth // conv.stride[0], self)
        norm = functions[0] if functions else None
        if not isinstance(norm, (InstanceNorm, nn.GroupNorm)):
            for start, stop in self._slabs(source, conv):
                planes = self._convolve(conv, source, start, stop)
                planes = _apply(functions, planes)
                result.write(start, planes)
            return result
        statistics = _Statistics()
        for start, stop in self._slabs(source, conv):
            planes = self._convolve(conv, source, start, stop)
            statistics.add(planes)
            result.write(start, planes)
        result.finish = functools.partial(_apply, [statistics.norm(norm), *functions[1:]])
        return result

    def _block(self, block: ConvNormAct | ResidualBlock, features: _Features) -> _Features:
        if isinstance(block, ConvNormAct):
            return self._unit(block, features)
        branch = features
        for unit in block.branch:
            branch = self._unit(cast(ConvNormAct, unit), branch)
        for start, stop in self._split(branch.depth, branch.plane_bytes, 0):
            # Without a name: it would keep the planes of this slab while the next one is read.
            branch.write(
                start, block.activation(branch.read(start, stop).add_(features.read(start, stop)))
            )
        # What is read from now on has had its norm.
        branch.finish = None
        return branch

    def _add_up(self, deeper: _Features, skip: _Features, factors: tuple[float, ...]) -> _Features:
        """Add the deeper features to the skip, in its place."""
        step = int(factors[0])  # planes of the skip for each one of the deeper features
        for start, stop in self._split(skip.depth, skip.plane_bytes, 0, step):
            low = F.interpolate(
                deeper.read(start // step, stop // step), scale_factor=factors, mode="nearest"
            )
            skip.write(start, low.add_(skip.read(start, stop)))
        skip.finish = None
        return skip

    def _refine(
        self,
        head: RefiningHead,
        features: _Features,
        image: _Features,
        take: Callable[[Tensor], None],
    ) -> None:
        """Run the refining head.

        Beside a border of two slabs, its voxels of half resolution are computed twice.
        """
        step = head.cell[0]
        reach, padding_y, padding_x = map(int, head.conv.padding)
        per_plane = _refined_bytes(head, image.plane[1])
        for start, stop in self._split(features.depth, per_plane, 2 * per_plane):
            low, high = max(start - reach, 0), min(stop + reach, features.depth)
            voxels = depth_to_space(head.cells(features.read(low, high)), head.cell)
            voxels.add_(self._convolve(head.detail, image, low * step, high * step))
            voxels = head.activation(voxels)
            # Zeros beyond the ends, as in the convolution of the whole.
            first, last = (start - low) * step - reach, (stop - low) * step + reach
            padding = (0, 0, 0, 0, max(-first, 0), max(last - voxels.shape[2], 0))
            voxels = F.pad(voxels[:, :, max(first, 0) : last], padding)
            weight, bias = head.conv.weight, head.conv.bias
            take(F.conv3d(voxels, weight, bias, 1, (0, padding_y, padding_x)))


def _apply(functions: Iterable[Callable[[Tensor], Tensor]], planes: Tensor) -> Tensor:
    """Call functions one after the other."""
    for function in functions:
        planes = function(planes)
    return planes
