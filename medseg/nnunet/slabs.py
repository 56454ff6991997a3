"""Slab execution of nnU-Net's networks, whose logits equal those of one pass.

See `medseg.inference.slab_pass`. A convolution runs slab by slab, with the kernel that torch would
choose for the whole image. A norm follows when all slabs are done, some channels at a time: torch
then computes the statistics of whole channels, as in one pass.
"""

from __future__ import annotations

import math
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
        network: The network in evaluation mode.
        image: Image (1, C, D, H, W), each size a multiple of the divisor.
        budget_bytes: Memory of feature maps and layers, beside the image and the weights.
        take: Receives the logits (1, K, d, H, W) of the next planes, from z = 0 on.

    Raises:
        ValueError: If one plane or one channel of a layer exceeds half of the budget.
    """
    device = next(network.parameters()).device
    slab_pass = _NnunetPass(budget_bytes, device=device, storage=image.device)
    slab_pass.run(network, image, take)


def least_budget_bytes(network: nn.Module, num_channels: int, patch_size: Shape) -> float:
    """Compute the smallest budget with which `logits_in_slabs` runs; the caller sets the precision.

    Args:
        network: The network on the meta device, where its layers are counted, not computed.
        num_channels: Channels of the image.
        patch_size: Size of the image, (z, y, x).
    """
    # A pass without a bound records the budget that its layers need, in `least_bytes`.
    unbounded = _NnunetPass(math.inf, device=META, storage=META)
    image = torch.empty((1, num_channels, *patch_size), device=META)
    with meta_layers():
        unbounded.run(network, image, lambda _: None)
    return unbounded.least_bytes


def count_in_slabs(
    network: nn.Module, image: Tensor, budget_bytes: float, tracker: MemoryTracker
) -> None:
    """Run `logits_in_slabs` on the meta device and count its tensors.

    Tensors that would be files count as `HOST`, not as memory of the pass.

    Args:
        network: See `logits_in_slabs`.
        image: See `logits_in_slabs`.
        budget_bytes: See `logits_in_slabs`.
        tracker: Counts the tensors.
    """
    _CountedPass(budget_bytes, tracker).run(network, image, lambda _: None)


class _Upsampled:
    """Feature map of the next deeper level, upsampled when it is read.

    Args:
        deeper: Feature map of the deeper level.
        conv: The upsampling, whose kernel is as large as its stride: a plane depends on one plane
            of the deeper level.

    Attributes:
        depth: Number of its planes.
        channels_and_area: Number of channels, and number of voxels of a plane.
    """

    def __init__(self, deeper: Features, conv: nn.ConvTranspose3d) -> None:
        self._z_stride, y_stride, x_stride = conv.stride
        deeper_area = deeper.channels_and_area[1]
        self.depth = deeper.depth * self._z_stride
        self.channels_and_area = conv.out_channels, deeper_area * y_stride * x_stride
        self._deeper = deeper
        self._conv = conv

    def read(self, start: int, stop: int) -> Tensor:
        """Compute planes start … stop - 1, (1, C, d, H, W); beyond the ends they are zero."""
        inner_start, inner_stop = max(start, 0), min(stop, self.depth)
        deeper_start = inner_start // self._z_stride
        deeper_stop = math.ceil(inner_stop / self._z_stride)
        conv = self._conv
        planes = convolve_as_whole(
            self._deeper.read(deeper_start, deeper_stop),
            conv.weight,
            conv.bias,
            conv.stride,
            padding=(0, 0, 0),
            whole_depth=self._deeper.depth,
            transposed=True,
        )
        # A deeper plane at an end may give more planes than were requested.
        first = deeper_start * self._z_stride
        planes = planes[:, :, inner_start - first : inner_stop - first]
        if (inner_start, inner_stop) == (start, stop):
            return planes
        return F.pad(planes, (0, 0, 0, 0, inner_start - start, stop - inner_stop))


class _Joined:
    """Channels of two feature maps, joined when they are read.

    Attributes:
        depth: Number of planes.
        channels_and_area: Number of channels, and number of voxels of a plane.
    """

    def __init__(self, first: Planes, second: Planes) -> None:
        self.depth = first.depth
        first_channels, area = first.channels_and_area
        second_channels, _ = second.channels_and_area
        self.channels_and_area = first_channels + second_channels, area
        self._parts = first, second

    def read(self, start: int, stop: int) -> Tensor:
        """Read planes start … stop - 1, (1, C, d, H, W); beyond the ends they are zero."""
        return torch.cat([part.read(start, stop) for part in self._parts], dim=1)


class _NnunetPass(SlabPass):
    """One execution of a network of nnU-Net in slabs."""

    def run(self, network: nn.Module, image: Tensor, take: Callable[[Tensor], None]) -> None:
        """Run the network, see `logits_in_slabs`."""
        encoder: Any = network.encoder
        decoder: Any = network.decoder
        # The image as planes (D, C, H, W), the layout of a feature map.
        features = Features(image.shape[2], self, image[0].transpose(0, 1))
        # Only residual encoders have a stem.
        for block in _blocks(getattr(encoder, "stem", None)):
            features = self._run_block(block, features)
        skips: list[Features] = []
        for stage in encoder.stages:
            for block in _blocks(stage):
                features = self._run_block(block, features)
            skips.append(features)
        # The features of the deepest level are no skip.
        skips.pop()
        for upsampling, stage in zip(decoder.transpconvs, decoder.stages, strict=True):
            first, *others = _blocks(stage)
            joined = _Joined(_Upsampled(features, upsampling), skips.pop())
            features = self._run_block(first, joined)
            # Frees the deeper features and the skip before the next block takes memory.
            del joined
            for block in others:
                features = self._run_block(block, features)
        # The other `seg_layers` give the coarser outputs of deep supervision.
        head = decoder.seg_layers[-1]
        for start, stop in self.slabs(features, head):
            take(self.convolve(head, features, start, stop))

    def _run_block(self, block: Any, source: Planes) -> Features:
        """Run a convolution with its norm and activation, or a residual block."""
        if not _is_residual(block):
            return self._run_unit(block.all_modules, source)
        # A residual block reads one feature map: only decoders join two, and they have no residual
        # blocks.
        shortcut = cast(Features, source)
        for module in _shortcut_modules(block):
            shortcut = self._run_shortcut(module, shortcut)
        branch = self._run_unit(block.conv1.all_modules, source)
        branch = self._run_unit(block.conv2.all_modules, branch)
        # In place: a third feature map of this level would take memory.
        for start, stop in self.split(branch.depth, branch.plane_bytes, extra_bytes=0):
            planes = branch.read(start, stop).add_(shortcut.read(start, stop))
            branch.write(start, block.nonlin2(planes))
        return branch

    def _run_shortcut(self, module: Any, source: Features) -> Features:
        """Run one module of the shortcut of a residual block: a pooling, or a convolution."""
        if not isinstance(module, nn.AvgPool3d):
            return self._run_unit(module.all_modules, source)
        # The kernel of the pooling is as large as its stride.
        z_stride = cast(Shape, module.stride)[0]
        result = Features(source.depth // z_stride, self)
        bytes_per_plane = z_stride * source.plane_bytes
        for start, stop in self.split(result.depth, bytes_per_plane, extra_bytes=0):
            # In one expression, so that the source planes are freed before the result is written.
            result.write(start, module(source.read(start * z_stride, stop * z_stride)))
        return result

    def _run_unit(self, modules: Iterable[nn.Module], source: Planes) -> Features:
        """Run a convolution and the modules after it, such as a norm and an activation."""
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
    """An execution on the meta device that counts its tensors.

    Args:
        budget_bytes: See `logits_in_slabs`.
        tracker: Counts the tensors.
    """

    def __init__(self, budget_bytes: float, tracker: MemoryTracker) -> None:
        super().__init__(budget_bytes, device=META, storage=META)
        self._tracker = tracker

    def new_file(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor in place of a file; it counts as `HOST`, not as memory of the pass."""
        owner = self._tracker.now
        self._tracker.now = Owner(HOST)
        values = torch.empty(shape, dtype=dtype, device=META)
        self._tracker.now = owner
        return values


def _blocks(part: nn.Module | None) -> Iterator[nn.Module]:
    """Yield the blocks of a stage in order: convolutions with their norms, or residual blocks."""
    if part is None:
        return
    if hasattr(part, "all_modules") or _is_residual(part):
        yield part
        return
    for child in part.children():
        yield from _blocks(child)


def _is_residual(block: nn.Module) -> bool:
    """Whether a block is residual: only residual blocks have a second convolution."""
    return hasattr(block, "conv2")


def _shortcut_modules(block: Any) -> list[nn.Module]:
    """List the modules of the shortcut of a residual block; none if it is the identity."""
    return list(block.skip) if isinstance(block.skip, nn.Sequential) else []


def _applied(function: nn.Module, values: Tensor, channels: slice) -> Tensor:
    """Apply a norm or a function of each voxel to some channels (1, c, D, H, W)."""
    if not isinstance(function, (nn.InstanceNorm3d, nn.BatchNorm3d)):
        return cast(Tensor, function(values))
    weight = _select(function.weight, channels)
    bias = _select(function.bias, channels)
    if isinstance(function, nn.InstanceNorm3d) and not function.track_running_stats:
        return F.instance_norm(
            values, weight=weight, bias=bias, use_input_stats=True, eps=function.eps
        )
    # In evaluation a norm with running statistics uses those of the training.
    mean = _select(function.running_mean, channels)
    variance = _select(function.running_var, channels)
    return F.batch_norm(values, mean, variance, weight, bias, training=False, eps=function.eps)


def _select(attribute: Tensor | None, channels: slice) -> Tensor | None:
    """Select the values of some channels from an attribute of a norm; None if it has none."""
    return None if attribute is None else attribute[channels]
