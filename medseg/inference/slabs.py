"""Slab execution: our UNet layer by layer in slabs along z, within a memory budget.

The result is that of one pass, see `medseg.inference.slab_pass`. An instance or group norm needs
statistics over the whole field of view: they are summed over all slabs of the convolution before
it, and the norm is applied when the next layer reads its input.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape
from medseg.inference.slab_pass import (
    ITEMSIZE,
    WORKSPACE,
    Features,
    Finish,
    Planes,
    SlabPass,
    layer_bytes,
)
from medseg.models.blocks import (
    POINT,
    ConvNormAct,
    InstanceNorm,
    ResidualBlock,
    depth_to_space,
    space_to_depth,
)
from medseg.models.unet import Head, RefiningHead, UNet


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
    _UnetPass(budget_bytes, device, image.device).run(network, image, take)


def least_budget_bytes(network: UNet, height: int, width: int) -> float:
    """Budget with which `logits_in_slabs` runs at any depth, one plane at a time, in fp32 or less.

    Args:
        network: The network.
        height: Voxels of the image along y, a multiple of the divisor.
        width: Voxels along x, likewise.
    """
    area = height * width
    _, high, wide = network.stem.cell
    stem = layer_bytes(cast(nn.Conv3d, network.stem.unit[0]), area // (high * wide))
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
                needs.append(sum(layer_bytes(module, area // (high * wide))))
    # Feature maps share the other half of the budget.
    return 2 * max(needs)


def _refined_bytes(head: RefiningHead, area: int) -> float:
    """Memory of the refining head for one plane of cells, at full resolution."""
    channels = head.detail.in_channels + 2 * head.detail.out_channels + head.conv.out_channels
    return WORKSPACE * ITEMSIZE * head.cell[0] * area * channels


class _Cells:
    """Image whose cells of voxels are channels, as the stem `space_to_depth` sees it.

    Attributes:
        depth: Planes of cells.
        plane: Channels and cells of a plane.
    """

    def __init__(self, image: Features, cell: Shape) -> None:
        self.depth = image.depth // cell[0]
        channels, area = image.plane
        self.plane = channels * math.prod(cell), area // math.prod(cell[1:])
        self._image = image
        self._cell = cell

    def read(self, start: int, stop: int) -> Tensor:
        """Planes of cells, as `Features.read`."""
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


class _UnetPass(SlabPass):
    """One execution of our UNet in slabs."""

    def run(self, network: UNet, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """See `logits_in_slabs`."""
        whole = Features(image.shape[2], self, image[0].transpose(0, 1))
        cell = network.stem.cell
        stem_input = whole if cell == POINT else _Cells(whole, cell)
        features = self._unit(network.stem.unit, stem_input)
        skips: list[Features] = []
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
        for start, stop in self.slabs(features, head.conv):
            planes = features.read(start, stop)
            take(head(planes, planes))

    def _unit(self, unit: ConvNormAct, source: Planes) -> Features:
        """Run a convolution with what follows it: a norm, or none, and an activation."""
        conv, *functions = unit
        assert isinstance(conv, nn.Conv3d)
        result = Features(source.depth // conv.stride[0], self)
        norm = functions[0] if functions else None
        if not isinstance(norm, (InstanceNorm, nn.GroupNorm)):
            for start, stop in self.slabs(source, conv):
                planes = self.convolve(conv, source, start, stop)
                planes = _apply(functions, planes)
                result.write(start, planes)
            return result
        statistics = _Statistics()
        for start, stop in self.slabs(source, conv):
            planes = self.convolve(conv, source, start, stop)
            statistics.add(planes)
            result.write(start, planes)
        result.finish = functools.partial(_apply, [statistics.norm(norm), *functions[1:]])
        return result

    def _block(self, block: ConvNormAct | ResidualBlock, features: Features) -> Features:
        if isinstance(block, ConvNormAct):
            return self._unit(block, features)
        branch = features
        for unit in block.branch:
            branch = self._unit(cast(ConvNormAct, unit), branch)
        for start, stop in self.split(branch.depth, branch.plane_bytes, 0):
            # Without a name: it would keep the planes of this slab while the next one is read.
            branch.write(
                start, block.activation(branch.read(start, stop).add_(features.read(start, stop)))
            )
        # What is read from now on has had its norm.
        branch.finish = None
        return branch

    def _add_up(self, deeper: Features, skip: Features, factors: tuple[float, ...]) -> Features:
        """Add the deeper features to the skip, in its place."""
        step = int(factors[0])  # planes of the skip for each one of the deeper features
        for start, stop in self.split(skip.depth, skip.plane_bytes, 0, step):
            low = F.interpolate(
                deeper.read(start // step, stop // step), scale_factor=factors, mode="nearest"
            )
            skip.write(start, low.add_(skip.read(start, stop)))
        skip.finish = None
        return skip

    def _refine(
        self,
        head: RefiningHead,
        features: Features,
        image: Features,
        take: Callable[[Tensor], None],
    ) -> None:
        """Run the refining head.

        Beside a border of two slabs, its voxels of half resolution are computed twice.
        """
        step = head.cell[0]
        reach, padding_y, padding_x = map(int, head.conv.padding)
        per_plane = _refined_bytes(head, image.plane[1])
        for start, stop in self.split(features.depth, per_plane, 2 * per_plane):
            low, high = max(start - reach, 0), min(stop + reach, features.depth)
            voxels = depth_to_space(head.cells(features.read(low, high)), head.cell)
            voxels.add_(self.convolve(head.detail, image, low * step, high * step))
            voxels = head.activation(voxels)
            # Zeros beyond the ends, as in the convolution of the whole.
            first = (start - low) * step - reach
            last = (stop - low) * step + reach
            num_before = max(-first, 0)
            num_after = max(last - voxels.shape[2], 0)
            padding = (0, 0, 0, 0, num_before, num_after)
            voxels = F.pad(voxels[:, :, max(first, 0) : last], padding)
            weight, bias = head.conv.weight, head.conv.bias
            take(F.conv3d(voxels, weight, bias, 1, (0, padding_y, padding_x)))


def _apply(functions: Iterable[Callable[[Tensor], Tensor]], planes: Tensor) -> Tensor:
    """Call functions one after the other."""
    for function in functions:
        planes = function(planes)
    return planes
