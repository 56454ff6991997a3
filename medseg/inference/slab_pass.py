"""Feature maps and layers of a slab pass: a network runs layer by layer in slabs along z.

A layer reads the planes of its input that its kernel reaches, and writes each plane of its output
once. Feature maps share half of a budget; those that do not fit are kept in scratch files. A slab
of the present layer takes the other half.
"""

import math
from collections.abc import Callable, Iterator
from typing import Protocol, cast
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medseg.geometry.sizes import Shape
from medseg.io.scratch import release_pages, scratch_array
from medseg.models.blocks import ScaledConv3d
from medseg.models.convolution import convolve_as_whole, unfolds_all

# Memory of a layer as a multiple of the size of its input and output: a layer also holds copies in
# the layout of the kernels, and sums in fp32.
WORKSPACE = 3.0
# Bytes of a value in fp32. Slabs are planned for fp32 even if the network runs in half precision.
ITEMSIZE = 4
# Norm and activation that are applied to planes (1, C, d, H, W) when they are read.
Finish = Callable[[Tensor], Tensor]


class Planes(Protocol):
    """Feature map that is read in ranges of planes.

    Attributes:
        depth: Number of planes.
    """

    depth: int

    @property
    def channels_and_area(self) -> tuple[int, int]:
        """Number of channels, and number of voxels of a plane (its area)."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return planes start … stop - 1, (1, C, d, H, W); outside 0 … depth - 1 they are zero."""


def layer_bytes(conv: nn.Conv3d, area: int) -> tuple[float, float]:
    """Estimate the memory that a convolution takes for a slab, in the present precision on a CPU.

    Args:
        conv: Only its sizes are read.
        area: Voxels of a plane of its input.

    Returns:
        Bytes for each plane of output with the input planes of its stride; and bytes, once a slab,
        for the further input planes that the kernel reaches.
    """
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    input_bytes = ITEMSIZE * conv.in_channels * area
    output_area = area // math.prod(conv.stride[1:])
    output_bytes = ITEMSIZE * conv.out_channels * output_area
    # The statistics of a norm that follows take a copy of the output in fp32.
    statistics_bytes = output_bytes
    bytes_per_plane = WORKSPACE * (stride * input_bytes + output_bytes) + statistics_bytes
    kernel_size = math.prod(conv.kernel_size)
    if kernel_size > 1 and unfolds_all():
        # The columns: for each voxel of the output all values that it reads.
        bytes_per_plane += ITEMSIZE * kernel_size * conv.in_channels * output_area
    # d planes of output need (d - 1) * stride + kernel planes of input. That is
    # d * stride + (kernel - stride): the second term is the same for a slab of any depth.
    extra_bytes = WORKSPACE * (kernel - stride) * input_bytes
    return bytes_per_plane, extra_bytes


class Features:
    """Feature map (1, C, D, H, W) that is read and written in ranges of planes.

    Attributes:
        depth: Number of planes.
        finish: Norm and activation of the layer that wrote the planes, applied whenever planes are
            read; None = the values are final as they are stored.
        num_bytes: Size in memory; 0 if the values are in a file, or belong to the caller.
    """

    def __init__(
        self,
        depth: int,
        owner: "SlabPass",
        values: Tensor | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Make a feature map.

        Args:
            depth: Number of planes.
            owner: The pass, whose budget holds the feature map.
            values: All planes, (D, C, H, W); None = they are written later.
            finish: See the class.
        """
        self.depth = depth
        self.finish = finish
        self.num_bytes = 0
        self._owner = owner
        # Planes come first, (D, C, H, W): each is one piece of memory, or of a file.
        self._values = values
        self._is_file = False

    @property
    def channels_and_area(self) -> tuple[int, int]:
        """Number of channels, and number of voxels of a plane (its area)."""
        assert self._values is not None
        return self._values.shape[1], math.prod(self._values.shape[2:])

    @property
    def plane_bytes(self) -> float:
        """Estimated memory of a voxelwise operation on one plane."""
        channels, area = self.channels_and_area
        return WORKSPACE * ITEMSIZE * channels * area

    def read(self, start: int, stop: int) -> Tensor:
        """Return planes start … stop - 1, (1, C, d, H, W), on the device of the network.

        Planes outside 0 … depth - 1 are zero.
        """
        assert self._values is not None, "planes are written before they are read"
        if self._is_file:
            release_pages()  # free the memory of the pages that the previous slab read
        low, high = max(start, 0), min(stop, self.depth)
        planes = self._values[low:high].transpose(0, 1)[None].to(self._owner.device)
        if self.finish is not None:
            planes = self.finish(planes)
        if (low, high) == (start, stop):
            return planes
        # After the norm: the zeros are the padding of the next convolution, which must stay zero.
        # `pad` takes two numbers for each axis, the last axis first: x, y, then z.
        return F.pad(planes, (0, 0, 0, 0, low - start, stop - high))

    def write(self, start: int, planes: Tensor) -> None:
        """Set the planes from `start` on to `planes`, (1, C, d, H, W)."""
        values = planes[0].transpose(0, 1)  # (d, C, H, W)
        if self._values is None:
            self._values = self._allocate(values)
        self._values[start : start + len(values)] = values
        if self._is_file:
            release_pages()

    def replace_channels(self, size: int, function: Callable[[Tensor, slice], Tensor]) -> None:
        """Replace the values in place, one group of channels after the other.

        Args:
            size: Largest number of channels of a group.
            function: Maps all planes of a group (1, c, D, H, W) and the range of its channels to
                new values of the same shape.
        """
        assert self._values is not None, "planes are written before they are replaced"
        for start in range(0, self._values.shape[1], size):
            channels = slice(start, start + size)
            group = self._values[:, channels].transpose(0, 1)[None].to(self._owner.device)
            # Contiguous, as in one pass: the kernel of a norm, and its rounding, depend on the
            # layout. No variable for the new values: it would keep them while the next group is
            # read.
            self._values[:, channels] = function(group.contiguous(), channels)[0].transpose(0, 1)
            if self._is_file:
                release_pages()

    def _allocate(self, first_planes: Tensor) -> Tensor:
        """Make room for all planes, with the type and layout of the first planes (d, C, H, W).

        Returns:
            Values (D, C, H, W), not yet set; a view of (D, H, W, C) for channels-last planes.
        """
        channels, height, width = first_planes.shape[1:]
        is_channels_last = first_planes.is_contiguous(memory_format=torch.channels_last)
        stored_shape = (self.depth, channels, height, width)
        if is_channels_last:
            stored_shape = (self.depth, height, width, channels)
        num_bytes = self.depth * first_planes[0].nbytes
        if self._owner.has_room(num_bytes):
            self.num_bytes = num_bytes
            self._owner.in_memory.add(self)
            values = torch.empty(stored_shape, dtype=first_planes.dtype, device=self._owner.storage)
        else:
            self._is_file = True
            values = self._owner.new_file(stored_shape, first_planes.dtype)
        if is_channels_last:
            return values.permute(0, 3, 1, 2)
        return values


class SlabPass:
    """One execution of a network in slabs.

    Attributes:
        device: Device of the network.
        storage: Device of the feature maps that are held in memory.
        in_memory: Feature maps that are held in memory.
        least_bytes: Smallest budget with which the layers so far would have run.
    """

    def __init__(self, budget_bytes: float, device: torch.device, storage: torch.device) -> None:
        """Begin a pass.

        Args:
            budget_bytes: Memory of feature maps and layers: one half for feature maps, one half
                for the slab of the present layer.
            device: See the class.
            storage: See the class.
        """
        self.device = device
        self.storage = storage
        self._half_budget_bytes = budget_bytes / 2
        # Weak: a feature map leaves the set when its last reader has dropped it.
        self.in_memory: WeakSet[Features] = WeakSet()
        self.least_bytes = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Whether another feature map fits beside those in memory."""
        used_bytes = sum(features.num_bytes for features in self.in_memory)
        return used_bytes + num_bytes <= self._half_budget_bytes

    def new_file(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make room for a feature map in a scratch file."""
        # The file is made of bytes that are viewed as `dtype`, because numpy has no bfloat16.
        num_bytes = math.prod(shape) * dtype.itemsize
        content = torch.from_numpy(scratch_array((num_bytes,), np.uint8))
        return content.view(dtype).view(shape)

    def slabs(self, source: Planes, conv: nn.Conv3d) -> Iterator[tuple[int, int]]:
        """Split the output of a convolution into as few slabs as half of the budget allows.

        See `split` for what it yields and raises.
        """
        _, area = source.channels_and_area
        bytes_per_plane, extra_bytes = layer_bytes(conv, area)
        output_depth = source.depth // conv.stride[0]
        return self.split(output_depth, bytes_per_plane, extra_bytes)

    def split(
        self, depth: int, bytes_per_plane: float, extra_bytes: float, step: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Split planes into slabs of about equal depth that half of the budget holds.

        Args:
            depth: Number of planes.
            bytes_per_plane: Memory of each plane.
            extra_bytes: Memory of a slab beside its planes.
            step: Each slab but the last has a multiple of this number of planes.

        Yields:
            First plane of each slab, and the plane after its last one.

        Raises:
            ValueError: If the budget is too small for `step` planes.
        """
        max_planes = self._num_fitting(depth, bytes_per_plane, extra_bytes, step)
        num_slabs = math.ceil(depth / max_planes)
        # Of about equal depth: a short last slab would take almost as long as a full one.
        steps_per_slab = math.ceil(depth / step / num_slabs)
        planes_per_slab = steps_per_slab * step
        for start in range(0, depth, planes_per_slab):
            yield start, min(start + planes_per_slab, depth)

    def convolve(self, conv: nn.Conv3d, source: Planes, start: int, stop: int) -> Tensor:
        """Compute planes start … stop - 1 of the output of a convolution, (1, C, d, H, W)."""
        stride = conv.stride[0]
        is_whole = start == 0 and stop * stride == source.depth
        if is_whole:
            return conv(source.read(0, source.depth))
        padding_z, padding_y, padding_x = cast(Shape, conv.padding)
        # All planes that the kernel reaches are read, with zeros beyond the ends: along z the
        # convolution itself pads nothing.
        first = start * stride - padding_z
        num_planes = (stop - start - 1) * stride + conv.kernel_size[0]
        planes = source.read(first, first + num_planes)
        weight = conv.scaled_weight if isinstance(conv, ScaledConv3d) else conv.weight
        padding = (0, padding_y, padding_x)
        # Torch chooses the kernel by the depth. With the kernel of the whole depth, a slab has the
        # same bits as in one pass.
        return convolve_as_whole(
            planes,
            weight,
            conv.bias,
            stride=conv.stride,
            padding=padding,
            whole_depth=source.depth,
        )

    def channels_at_a_time(self, features: Features) -> int:
        """Count the channels that half of the budget holds in full depth, for `replace_channels`.

        Raises:
            ValueError: If the budget is too small for one channel.
        """
        channels, area = features.channels_and_area
        bytes_per_channel = WORKSPACE * ITEMSIZE * area * features.depth
        return self._num_fitting(channels, bytes_per_channel, extra_bytes=0, step=1)

    def _num_fitting(self, count: int, bytes_each: float, extra_bytes: float, step: int) -> int:
        """Count how many of `count` planes or channels half of the budget holds at a time.

        Args:
            count: Number of all planes or channels.
            bytes_each: Memory of one plane or channel.
            extra_bytes: Memory that is needed once, for any number of planes or channels.
            step: Required divisor of the result.

        Returns:
            A multiple of `step`.

        Raises:
            ValueError: If `step` of them do not fit.
        """
        # Twice, since a layer has half of the budget.
        least_bytes = 2 * (extra_bytes + step * bytes_each)
        self.least_bytes = max(self.least_bytes, least_bytes)
        if least_bytes > 2 * self._half_budget_bytes:
            raise ValueError(f"a plane of a layer needs {least_bytes / 2**30:.2f} GiB")
        # The minimum comes before `int`: an infinite budget has no integer.
        num_fitting = min(count, (self._half_budget_bytes - extra_bytes) / bytes_each)
        return int(num_fitting) // step * step
