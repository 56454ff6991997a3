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
from medseg.models.convolution import convolve_as_whole

# Bytes that a layer takes per byte of its input and output: copies in the layout of the kernels,
# and sums in fp32.
WORKSPACE = 3.0
# Bytes of a feature in fp32; the plan of the slabs counts those of half precision the same.
ITEMSIZE = 4
Finish = Callable[[Tensor], Tensor]


class Planes(Protocol):
    """Feature map of which ranges of planes are read.

    Attributes:
        depth: Number of planes.
    """

    depth: int

    @property
    def plane(self) -> tuple[int, int]:
        """Channels and voxels of a plane."""

    def read(self, start: int, stop: int) -> Tensor:
        """Planes start … stop - 1, (1, C, d, H, W); beyond the ends they are zero."""


def layer_bytes(conv: nn.Conv3d, area: int) -> tuple[float, float]:
    """Memory of a convolution.

    Args:
        conv: The convolution.
        area: Voxels of a plane of its input.

    Returns:
        Bytes for each plane of its output, and for the planes beside them that its kernel reaches.
    """
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    input_bytes = ITEMSIZE * conv.in_channels * area
    output_bytes = ITEMSIZE * conv.out_channels * area // math.prod(conv.stride[1:])
    # The last summand is the copy in fp32 for the statistics.
    bytes_per_plane = WORKSPACE * (stride * input_bytes + output_bytes) + output_bytes
    return bytes_per_plane, WORKSPACE * (kernel - stride) * input_bytes


class Features:
    """Feature map (1, C, D, H, W) of which ranges of planes are read and written.

    Attributes:
        finish: Function of each voxel that is due to planes when they are read: the norm and
            activation of their layer.
    """

    def __init__(
        self,
        depth: int,
        owner: "SlabPass",
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

    def replace_channels(self, size: int, function: Callable[[Tensor, slice], Tensor]) -> None:
        """Replace the values in place, a group of channels after the other.

        Args:
            size: Channels of a group, at most.
            function: Maps all planes of a group (1, c, D, H, W) and its channels to new values.
        """
        assert self._values is not None
        for start in range(0, self._values.shape[1], size):
            channels = slice(start, start + size)
            group = self._values[:, channels].transpose(0, 1)[None].to(self._owner.device)
            self._values[:, channels] = function(group.contiguous(), channels)[0].transpose(0, 1)
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
            values = self._owner.new_file(sizes, like.dtype)
        return values.permute(0, 3, 1, 2) if is_channels_last else values


class SlabPass:
    """One execution of a network in slabs.

    Attributes:
        device: Device of the network.
        storage: Device of the feature maps.
        in_memory: Feature maps that are no files.
        least_bytes: Smallest budget with which the layers so far would have run.
    """

    def __init__(self, budget_bytes: float, device: torch.device, storage: torch.device) -> None:
        self.device = device
        self.storage = storage
        self._half = budget_bytes / 2
        # Weak: a feature map counts until its last reader has dropped it.
        self.in_memory: WeakSet[Features] = WeakSet()
        self.least_bytes = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """Whether another feature map fits beside those in memory."""
        used_bytes = sum(features.num_bytes for features in self.in_memory)
        return used_bytes + num_bytes <= self._half

    def new_file(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a feature map in a scratch file."""
        # As bytes, because numpy lacks bfloat16.
        content = torch.from_numpy(scratch_array((math.prod(sizes) * dtype.itemsize,), np.uint8))
        return content.view(dtype).view(sizes)

    def slabs(self, source: Planes, conv: nn.Conv3d) -> Iterator[tuple[int, int]]:
        """Split the output of a convolution into as few slabs as half of the budget allows."""
        bytes_per_plane, extra_bytes = layer_bytes(conv, source.plane[1])
        return self.split(source.depth // conv.stride[0], bytes_per_plane, extra_bytes)

    def split(
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
        fitting = self._fitting(depth, bytes_per_plane, extra_bytes, step)
        num_slabs = math.ceil(depth / fitting)
        planes = math.ceil(depth / step / num_slabs) * step
        for start in range(0, depth, planes):
            yield start, min(start + planes, depth)

    def convolve(self, conv: nn.Conv3d, source: Planes, start: int, stop: int) -> Tensor:
        """Planes start … stop - 1 of the output of a convolution."""
        stride = conv.stride[0]
        if (start, stop * stride) == (0, source.depth):
            return conv(source.read(0, source.depth))
        padding, high, wide = cast(Shape, conv.padding)
        # The planes that the kernel reaches are read, so along z nothing is padded.
        first = start * stride - padding
        num_planes = (stop - start - 1) * stride + conv.kernel_size[0]
        planes = source.read(first, first + num_planes)
        weight = conv.scaled_weight if isinstance(conv, ScaledConv3d) else conv.weight
        return convolve_as_whole(
            planes, weight, conv.bias, conv.stride, (0, high, wide), source.depth
        )

    def channels_at_a_time(self, features: Features) -> int:
        """Channels of all planes that half of the budget holds, for `replace_channels`.

        Raises:
            ValueError: If the budget is too small for one.
        """
        channels, area = features.plane
        return self._fitting(channels, WORKSPACE * ITEMSIZE * area * features.depth, 0, 1)

    def _fitting(self, count: int, bytes_each: float, extra_bytes: float, step: int) -> int:
        """How many of `count` planes or channels fit at a time, a multiple of `step`.

        Raises:
            ValueError: If `step` of them do not.
        """
        least_bytes = 2 * (extra_bytes + step * bytes_each)
        self.least_bytes = max(self.least_bytes, least_bytes)
        if least_bytes > 2 * self._half:
            raise ValueError(f"a plane of a layer needs {least_bytes / 2**30:.2f} GiB")
        fitting = min(count, (self._half - extra_bytes) / bytes_each)
        return int(fitting) // step * step
