"""Slab execution of nnU-Net's networks, with the values of one pass.

See `medseg.inference.slab_pass`. A slab of a convolution goes through the same kernel as the whole.
Instance norm follows in a second round, one group of channels after the other: torch then takes
the statistics of whole channels, as in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape
from medseg.inference.slab_pass import Features, Planes, SlabPass
from medseg.memory.shapes import meta_layers
from medseg.memory.tracker import HOST, MemoryTracker, Owner
from medseg.models.convolution import convolve_as_whole

META = torch.device("meta")


def logits_in_slabs(
    network: nn.Module, image: Tensor, budget_bytes: float, take: Callable[[Tensor], None]
) -> None:
    """Run a network of `medseg.nnunet.network` on one image; the caller sets the precision.

    Args:
        network: In evaluation mode.
        image: Image (1, C, D, H, W), each size a multiple of the divisor.
        budget_bytes: Memory of feature maps and layers, beside the image and the weights.
        take: Receives the logits (1, K, d, H, W) of the next planes, from z = 0 on.

    Raises:
        ValueError: If one plane or one channel of a layer exceeds half of the budget.
    """
    device = next(network.parameters()).device
    _NnunetPass(budget_bytes, device, image.device).run(network, image, take)


def least_budget_bytes(network: nn.Module, num_channels: int, patch_size: Shape) -> float:
    """Smallest budget with which `logits_in_slabs` runs.

    Args:
        network: The network on the meta device: its layers are counted, not computed.
        num_channels: Channels of the image.
        patch_size: Size of the image, (z, y, x).
    """
    counted = _NnunetPass(float("inf"), META, META)
    image = torch.empty((1, num_channels, *patch_size), device=META)
    with meta_layers():
        counted.run(network, image, lambda _: None)
    return counted.least_bytes


def count_in_slabs(
    network: nn.Module, image: Tensor, budget_bytes: float, tracker: MemoryTracker
) -> None:
    """Run `logits_in_slabs` on the meta device, counted; what is in files counts as `HOST`.

    Args:
        network: See `logits_in_slabs`.
        image: See `logits_in_slabs`.
        budget_bytes: See `logits_in_slabs`.
        tracker: Counts the tensors.
    """
    _CountedPass(budget_bytes, tracker).run(network, image, lambda _: None)


class _Upsampled:
    """Feature map of the next deeper level, upsampled when it is read.

    Attributes:
        depth: Number of its planes.
        plane: Channels and voxels of a plane.
    """

    def __init__(self, deeper: Features, conv: nn.ConvTranspose3d) -> None:
        # The kernel is as long as the stride: a plane depends on one plane of the deeper level.
        self._step, high, wide = conv.stride
        self.depth = deeper.depth * self._step
        self.plane = conv.out_channels, deeper.plane[1] * high * wide
        self._deeper = deeper
        self._conv = conv

    def read(self, start: int, stop: int) -> Tensor:
        """Planes start … stop - 1, (1, C, d, H, W); beyond the ends they are zero."""
        low, high = max(start, 0), min(stop, self.depth)
        first = low // self._step
        last = -(-high // self._step)  # rounded up
        conv = self._conv
        planes = convolve_as_whole(
            self._deeper.read(first, last),
            conv.weight,
            conv.bias,
            conv.stride,
            (0, 0, 0),
            self._deeper.depth,
            transposed=True,
        )
        # The deeper planes may begin before the first one and end after the last one.
        num_before = first * self._step
        planes = planes[:, :, low - num_before : high - num_before]
        if (low, high) == (start, stop):
            return planes
        return F.pad(planes, (0, 0, 0, 0, low - start, stop - high))


class _Joined:
    """Channels of two feature maps, joined when they are read.

    Attributes:
        depth: Number of planes.
        plane: Channels and voxels of a plane.
    """

    def __init__(self, first: Planes, second: Planes) -> None:
        self.depth = first.depth
        num_channels, area = first.plane
        self.plane = num_channels + second.plane[0], area
        self._parts = first, second

    def read(self, start: int, stop: int) -> Tensor:
        """Planes start … stop - 1, (1, C, d, H, W); beyond the ends they are zero."""
        return torch.cat([part.read(start, stop) for part in self._parts], dim=1)


class _NnunetPass(SlabPass):
    """One execution of a network of nnU-Net in slabs."""

    def run(self, network: nn.Module, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """See `logits_in_slabs`."""
        encoder: Any = network.encoder
        decoder: Any = network.decoder
        features = Features(image.shape[2], self, image[0].transpose(0, 1))
        # Residual encoders alone have a stem.
        for block in _blocks(getattr(encoder, "stem", None)):
            features = self._block(block, features)
        skips: list[Features] = []
        for stage in encoder.stages:
            for block in _blocks(stage):
                features = self._block(block, features)
            skips.append(features)
        skips.pop()  # the deepest level, which goes on as it is
        for upsampling, stage in zip(decoder.transpconvs, decoder.stages, strict=True):
            first, *others = _blocks(stage)
            joined = _Joined(_Upsampled(features, upsampling), skips.pop())
            features = self._block(first, joined)
            # Its parts are free before the next block takes memory.
            del joined
            for block in others:
                features = self._block(block, features)
        head = decoder.seg_layers[-1]
        for start, stop in self.slabs(features, head):
            take(self.convolve(head, features, start, stop))

    def _block(self, block: Any, source: Planes) -> Features:
        if not _is_residual(block):
            return self._unit(block.all_modules, source)
        # A residual encoder joins no feature maps.
        residual = cast(Features, source)
        for module in _modules_of_skip(block):
            residual = self._skip(module, residual)
        branch = self._unit(block.conv1.all_modules, source)
        branch = self._unit(block.conv2.all_modules, branch)
        for start, stop in self.split(branch.depth, branch.plane_bytes, 0):
            planes = branch.read(start, stop).add_(residual.read(start, stop))
            branch.write(start, block.nonlin2(planes))
        return branch

    def _skip(self, module: Any, source: Features) -> Features:
        """Run a part of the direct way of a residual block: a pooling, or a convolution."""
        if not isinstance(module, nn.AvgPool3d):
            return self._unit(module.all_modules, source)
        step = cast(Shape, module.stride)[0]
        result = Features(source.depth // step, self)
        for start, stop in self.split(result.depth, step * source.plane_bytes, 0):
            result.write(start, module(source.read(start * step, stop * step)))
        return result

    def _unit(self, modules: Iterable[nn.Module], source: Planes) -> Features:
        """Run a convolution with what follows it: a norm, or none, and an activation."""
        conv, *functions = modules
        assert isinstance(conv, nn.Conv3d)
        result = Features(source.depth // conv.stride[0], self)
        for start, stop in self.slabs(source, conv):
            result.write(start, self.convolve(conv, source, start, stop))

        def apply(values: Tensor, channels: slice) -> Tensor:
            for function in functions:
                values = _applied(function, values, channels)
            return values

        if functions:
            result.replace_channels(self.channels_at_a_time(result), apply)
        return result


class _CountedPass(_NnunetPass):
    """An execution on the meta device, whose files are none."""

    def __init__(self, budget_bytes: float, tracker: MemoryTracker) -> None:
        super().__init__(budget_bytes, META, META)
        self._tracker = tracker

    def new_file(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a feature map that takes no memory of the pass."""
        owner = self._tracker.now
        self._tracker.now = Owner(HOST)
        values = torch.empty(sizes, dtype=dtype, device=META)
        self._tracker.now = owner
        return values


def _blocks(part: nn.Module | None) -> Iterator[nn.Module]:
    """Blocks of a stage in their order: convolutions with their norms, or residual blocks."""
    if part is None:
        return
    if hasattr(part, "all_modules") or _is_residual(part):
        yield part
        return
    for child in part.children():
        yield from _blocks(child)


def _is_residual(block: nn.Module) -> bool:
    return hasattr(block, "conv2")


def _modules_of_skip(block: Any) -> list[nn.Module]:
    """Modules of the direct way of a residual block; none where it passes its input on."""
    return list(block.skip) if isinstance(block.skip, nn.Sequential) else []


def _applied(function: nn.Module, values: Tensor, channels: slice) -> Tensor:
    """Apply a norm or a function of each voxel to some channels (1, c, D, H, W)."""
    if not isinstance(function, (nn.InstanceNorm3d, nn.BatchNorm3d)):
        return cast(Tensor, function(values))
    weight = _of_channels(function.weight, channels)
    bias = _of_channels(function.bias, channels)
    if isinstance(function, nn.InstanceNorm3d) and not function.track_running_stats:
        return F.instance_norm(values, None, None, weight, bias, True, eps=function.eps)
    mean = _of_channels(function.running_mean, channels)
    variance = _of_channels(function.running_var, channels)
    return F.batch_norm(values, mean, variance, weight, bias, False, eps=function.eps)


def _of_channels(values: Tensor | None, channels: slice) -> Tensor | None:
    """Take the values of some channels from an attribute of a norm, which may have none."""
    return None if values is None else values[channels]
