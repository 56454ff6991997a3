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
    """Run a network on one image in slabs along z.

    The caller sets the precision, for example with `torch.autocast`.

    Args:
        network: In evaluation mode.
        image: Normalised image (1, C, D, H, W), each size a multiple of the divisor. It may be on
            another device than the network; feature maps are held on its device.
        budget_bytes: Memory of feature maps and layers, beside the image and the weights.
        take: Receives the logits (1, K, d, H, W) of the next planes, from z = 0 on, on the device
            of the network.

    Raises:
        ValueError: If one plane of a layer exceeds half of the budget.
    """
    device = next(network.parameters()).device
    _UnetPass(budget_bytes, device, image.device).run(network, image, take)


def least_budget_bytes(network: UNet, height: int, width: int) -> float:
    """Estimate the smallest budget with which `logits_in_slabs` runs an image of any depth.

    This budget holds one plane at a time. As there, the caller sets the precision.

    Args:
        network: On any device: only the sizes of its layers are read.
        height: Voxels of the image along y, a multiple of the divisor.
        width: Voxels of the image along x, a multiple of the divisor.
    """
    area = height * width
    # The input of the stem's convolution: cells with the stem `space_to_depth`, else voxels.
    _, cell_height, cell_width = network.stem.channel_cell
    stem_area = area // (cell_height * cell_width)
    part_bytes = [_largest_layer_bytes(network.stem, stem_area)]
    # The features of the first level: `network.cell` holds the stride of the stem `strided` too.
    _, cell_height, cell_width = network.cell
    first_area = area // (cell_height * cell_width)
    if isinstance(network.head, Head):
        part_bytes.append(_largest_layer_bytes(network.head, first_area))
    else:
        # One plane of cells and its neighbour on each side.
        part_bytes.append(3 * _refining_bytes(network.head, area))
    # Any level may need the most: the channels double from one to the next, but the voxels of a
    # plane stay as many where the stride along y and x is 1.
    level_area = first_area
    for level, encoder in enumerate(network.encoder):
        for name, part in encoder.named_children():
            # `down` comes first: its input still has the size of the previous level.
            part_bytes.append(_largest_layer_bytes(part, level_area))
            if name == "down":
                down_conv = cast(nn.Conv3d, cast(ConvNormAct, part)[0])
                level_area //= math.prod(down_conv.stride[1:])
        # The deepest level has no decoder.
        if level < len(network.decoder):
            # An overestimate for the convolution of `up`, which runs at the deeper level.
            part_bytes.append(_largest_layer_bytes(network.decoder[level], level_area))
    # Layers have half of the budget; feature maps have the other half.
    return 2 * max(part_bytes)


def _largest_layer_bytes(part: nn.Module, area: int) -> float:
    """Estimate the most memory that a convolution of a part needs for its smallest slab.

    The smallest slab is one plane of output, with the planes of input that the kernel reaches.

    Args:
        part: Part of a network.
        area: Voxels of a plane of the input of its convolutions.
    """
    largest_bytes = 0.0
    for module in part.modules():
        if isinstance(module, nn.Conv3d):
            bytes_per_plane, extra_bytes = layer_bytes(module, area)
            largest_bytes = max(largest_bytes, bytes_per_plane + extra_bytes)
    return largest_bytes


def _refining_bytes(head: RefiningHead, area: int) -> float:
    """Estimate the memory of the refining head for one plane of cells.

    Args:
        head: Only its channels and its cell are read.
        area: Voxels of a plane of the image.
    """
    # At full resolution: the image, the features from the cells and those from the image, which are
    # added, and the logits.
    channels = head.detail.in_channels + 2 * head.detail.out_channels + head.conv.out_channels
    planes_of_voxels = head.cell[0]
    return WORKSPACE * ITEMSIZE * planes_of_voxels * area * channels


class _Cells:
    """Image as input of the stem `space_to_depth`: each cell of voxels becomes one voxel.

    The values of a cell become the channels of that voxel.

    Attributes:
        depth: Number of planes of cells.
        channels_and_area: Number of channels, and number of cells of a plane.
    """

    def __init__(self, image: Features, cell: Shape) -> None:
        cell_depth, cell_height, cell_width = cell
        channels, area = image.channels_and_area
        self.depth = image.depth // cell_depth
        self.channels_and_area = channels * math.prod(cell), area // (cell_height * cell_width)
        self._image = image
        self._cell = cell

    def read(self, start: int, stop: int) -> Tensor:
        """Return planes of cells, as `Features.read`."""
        cell_depth = self._cell[0]
        voxels = self._image.read(start * cell_depth, stop * cell_depth)
        return space_to_depth(voxels, self._cell)


class _Statistics:
    """Mean and variance of each channel over all slabs of a feature map, in float64.

    Source: Chan, Golub and LeVeque (1979), the update of a mean and of a sum of squares by those of
    further values.
    """

    def __init__(self) -> None:
        self._count = 0  # voxels of a channel so far
        # Both become (C,) with the first planes.
        self._mean = torch.zeros(())
        self._squares = torch.zeros(())  # sum of the squared differences from the mean

    def add(self, planes: Tensor) -> None:
        """Include planes (1, C, d, H, W)."""
        # Half precision would be too coarse for the variance.
        values = planes if planes.dtype == torch.float64 else planes.float()
        variance, mean = torch.var_mean(values, dim=(0, 2, 3, 4), correction=0)
        variance, mean = variance.double(), mean.double()
        count = planes[0, 0].numel()  # voxels of a channel
        count_before = self._count
        mean_before = self._mean.to(mean.device)
        squares_before = self._squares.to(mean.device)
        self._count += count
        shift = mean - mean_before
        # Squares within the new planes, and those between the two means.
        within = variance * count
        between = shift.square() * count_before * count / self._count
        self._squares = squares_before + within + between
        self._mean = mean_before + shift * count / self._count

    def norm(self, module: InstanceNorm | nn.GroupNorm) -> Finish:
        """Make the function that normalises planes like `module` in one pass over all planes."""
        mean, variance = self._mean, self._squares / self._count
        if isinstance(module, nn.GroupNorm):
            channels_per_group = len(mean) // module.num_groups
            means = mean.view(module.num_groups, channels_per_group)
            group_means = means.mean(1, keepdim=True)  # (groups, 1)
            # Variance of a group: the mean of its channels' variances, plus the variance of their
            # means.
            squares = variance.view_as(means) + (means - group_means).square()
            mean = group_means.squeeze(1).repeat_interleave(channels_per_group)
            variance = squares.mean(1).repeat_interleave(channels_per_group)
        weight, bias = module.weight, module.bias
        mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)

        # With `training=False` `batch_norm` uses the given mean and variance.
        def normalise(planes: Tensor) -> Tensor:
            return F.batch_norm(
                planes, mean, variance, weight, bias, training=False, eps=module.eps
            )

        return normalise


class _UnetPass(SlabPass):
    """One execution of our UNet in slabs."""

    def run(self, network: UNet, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """See `logits_in_slabs`."""
        image_features = Features(image.shape[2], owner=self, values=image[0].transpose(0, 1))
        cell = network.stem.channel_cell
        stem_input = image_features if cell == POINT else _Cells(image_features, cell)
        features = self._unit(network.stem.unit, stem_input)
        skips: list[Features] = []
        for level in network.encoder:
            for block in level:  # type: ignore[attr-defined]
                features = self._block(block, features)
            skips.append(features)
        skips.pop()  # the features of the deepest level, which are no skip
        for level in reversed(network.decoder):
            up = level["up"]  # type: ignore[index]
            features = self._unit(up.unit, features)
            features = self._add_to_skip(features, skips.pop(), up.scale_factor)
            features = self._block(level["block0"], features)  # type: ignore[index]
        head = network.head
        if isinstance(head, RefiningHead):
            self._refine(head, features, image_features, take)
            return
        for start, stop in self.slabs(features, head.conv):
            planes = features.read(start, stop)
            take(head(planes, planes))  # a head without refinement ignores its second input

    def _unit(self, unit: ConvNormAct, source: Planes) -> Features:
        """Run a convolution and the functions after it: a norm (or none) and an activation."""
        conv, *functions = unit
        assert isinstance(conv, nn.Conv3d)
        result = Features(source.depth // conv.stride[0], owner=self)
        norm = functions[0] if functions else None
        # Only these norms need statistics of the whole feature map.
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
        # The statistics are complete only now, so the norm is applied when the next layer reads.
        pending: list[Finish] = [statistics.norm(norm), *functions[1:]]
        result.finish = functools.partial(_apply, pending)
        return result

    def _block(self, block: ConvNormAct | ResidualBlock, features: Features) -> Features:
        """Run a unit, or a residual block: its input is added in place to its branch."""
        if isinstance(block, ConvNormAct):
            return self._unit(block, features)
        branch = features
        for unit in block.branch:
            branch = self._unit(cast(ConvNormAct, unit), branch)
        for start, stop in self.split(branch.depth, branch.plane_bytes, extra_bytes=0):
            # No variable: it would keep the planes of this slab while the next slab is read.
            branch.write(
                start, block.activation(branch.read(start, stop).add_(features.read(start, stop)))
            )
        # `read` has applied the norm of the branch before the sum was written, so the next layer
        # must not apply the norm again.
        branch.finish = None
        return branch

    def _add_to_skip(
        self, deeper: Features, skip: Features, factors: tuple[float, ...]
    ) -> Features:
        """Upsample the deeper features by factors (z, y, x) and add them to the skip, in place."""
        step = int(factors[0])  # planes of the skip for each plane of the deeper features
        for start, stop in self.split(skip.depth, skip.plane_bytes, extra_bytes=0, step=step):
            planes = deeper.read(start // step, stop // step)
            planes = F.interpolate(planes, scale_factor=factors, mode="nearest")
            skip.write(start, planes.add_(skip.read(start, stop)))
        # As in `_block`, `read` has applied the norm of the skip.
        skip.finish = None
        return skip

    def _refine(
        self,
        head: RefiningHead,
        features: Features,
        image: Features,
        take: Callable[[Tensor], None],
    ) -> None:
        """Run the refining head, slab by slab.

        The last convolution of the head reaches voxels beyond a slab. The cells of these voxels are
        computed twice, once for each of the two neighbouring slabs.
        """
        cell_depth = head.cell[0]
        # Planes that the kernel of the last convolution reaches on each side.
        reach, padding_y, padding_x = map(int, head.conv.padding)
        _, area = image.channels_and_area
        bytes_per_plane = _refining_bytes(head, area)
        # A slab has up to one more plane of cells on each side, see below.
        extra_bytes = 2 * bytes_per_plane
        for start, stop in self.split(features.depth, bytes_per_plane, extra_bytes):
            # The last convolution needs `reach` more planes of voxels on each side: 0 or 1, since
            # its kernel has 1 or 3 planes. `reach` planes of cells hold at least as many voxels.
            low, high = max(start - reach, 0), min(stop + reach, features.depth)
            voxels = depth_to_space(head.cells(features.read(low, high)), head.cell)
            voxels.add_(self.convolve(head.detail, image, low * cell_depth, high * cell_depth))
            voxels = head.activation(voxels)
            # Planes of `voxels` that the convolution needs, counted from its first plane. At the
            # ends of the volume some lie outside, where the whole convolution would pad zeros.
            needed_start = (start - low) * cell_depth - reach
            needed_stop = (stop - low) * cell_depth + reach
            num_before = max(-needed_start, 0)
            num_after = max(needed_stop - voxels.shape[2], 0)
            padding = (0, 0, 0, 0, num_before, num_after)
            voxels = F.pad(voxels[:, :, max(needed_start, 0) : needed_stop], padding)
            weight, bias = head.conv.weight, head.conv.bias
            take(F.conv3d(voxels, weight, bias, stride=1, padding=(0, padding_y, padding_x)))


def _apply(functions: Iterable[Callable[[Tensor], Tensor]], planes: Tensor) -> Tensor:
    """Call functions one after the other."""
    for function in functions:
        planes = function(planes)
    return planes
