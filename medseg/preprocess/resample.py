"""Resampling of images, labels and probabilities from one grid to another with the same axes.

The filter is separable and one of three:

* `antialiased`, the default: linear where an axis gets finer or stays, a triangle widened to the
  target's spacing where it gets coarser, so that no voxel is skipped and fine structures do not
  alias.
* `linear`: the two nearest voxels. Faster, but noise and edges alias where an axis gets coarser.
* `cubic`: the four nearest voxels (Keys 1981) where an axis gets finer or stays, `antialiased`
  where it gets coarser. Sharper, but it overshoots at edges.

Labels and probabilities always use `antialiased`: the negative weights of `cubic` make holes, and
the voxels that `linear` skips lose thin parts.

The weights depend on the position of an output voxel in the source, computed in float64 from the
two grids. An output voxel therefore gets the same taps and the same weights whether the target is a
whole grid or a crop of it: resampling a crop equals cropping the resampled volume.

Each axis is one weighted gather of rows (`embedding_bag` with weights per sample: gather, multiply
and add in one pass). It is not a matrix product, so neither TF32 nor autocast can round Hounsfield
units to ten bits. Threads work on separate slabs, so no thread waits within a slab, and no sum
depends on the number of threads.

Source of the cubic: Keys, "Cubic convolution interpolation for digital image processing", IEEE ASSP
29 (1981), a = -1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from medseg.geometry.grid import VoxelGrid
from medseg.io.scratch import new_tensor

ANTIALIASED, LINEAR, CUBIC = RESAMPLINGS = ("antialiased", "linear", "cubic")

# Voxels of one slab once its first axis is filtered: 1 MB as float32. They fit into the cache of
# the processor, and the allocator reuses blocks of this size, which the system need not clear.
SLAB_VOXELS = 2**18
# Planes of the target in a slab, where several planes of the source become one: neighbouring slabs
# read the same planes at their border.
MIN_COARSE_PLANES = 4
# Source voxels that are read and filtered along the first axis at a time.
PART_VOXELS = 2**19
# Slabs in work at a time: each takes about 50 MB, and four use the memory bandwidth.
MAX_THREADS = 4
# Rounding noise of two grids' float64 arithmetic, in source voxels; positions are rounded to it.
POSITION_DECIMALS = 9
# Tolerance by which rounding may move a voxel out of the field of view, in source voxels.
EDGE_TOLERANCE = 1e-6
# A label must win by more than the rounding of float32 sums, or ties would depend on the direction
# of an axis.
TIE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class AxisTaps:
    """The filter along one axis.

    Attributes:
        start: First output voxel inside the source's field of view.
        index: Source voxel of each tap, (num outputs inside, num taps), clamped to the source.
        weight: Its weight, same shape, float32; each row sums to 1.
        scale: Source voxels per output voxel.
    """

    start: int
    index: np.ndarray
    weight: np.ndarray
    scale: float

    def part(self, start: int, stop: int) -> tuple[slice, slice, AxisTaps]:
        """Cut out the outputs start … stop - 1 of those inside.

        Returns:
            Range of the source, range of the target, and taps that count from the source range.
        """
        index, first_output = self.index[start:stop], self.start + start
        first, last = int(index.min()), int(index.max()) + 1
        taps = AxisTaps(first_output, index - first, self.weight[start:stop], self.scale)
        return slice(first, last), slice(first_output, first_output + len(index)), taps


def axis_taps(
    num_outputs: int,
    num_inputs: int,
    scale: float,
    offset: float,
    *,
    resampling: str = ANTIALIASED,
    goes_on: bool = False,
) -> AxisTaps:
    """Compute the taps of one axis.

    The field of view reaches half a voxel beyond the outermost centres; taps beyond the centres are
    clamped to them. A widened triangle on a discrete lattice does not keep a linear ramp by itself,
    so its weights are tilted until their first moment vanishes; they stay non-negative. Those of
    the cubic are below zero beyond its two inner voxels.

    Args:
        num_outputs: Voxels of the target along this axis.
        num_inputs: Voxels of the source.
        scale: Source voxels per target voxel.
        offset: Source position of target voxel 0.
        resampling: One of `RESAMPLINGS`.
        goes_on: Whether outputs beyond the field of view repeat the outermost ones inside it.

    Returns:
        Taps of the outputs inside the field of view; none if the target lies outside.
    """
    number = np.arange(num_outputs)
    if goes_on:
        # Outputs beyond the field of view repeat the first or the last voxel of the target's
        # lattice inside it. `low` is above `high` where no voxel lies inside: no taps follow.
        low = math.ceil((-0.5 - EDGE_TOLERANCE - offset) / scale)
        high = math.floor((num_inputs - 0.5 + EDGE_TOLERANCE - offset) / scale)
        number = np.clip(number, low, max(low, high))
    position = np.round(scale * number + offset, POSITION_DECIMALS)
    # The field of view reaches to the outer faces of the outermost voxels, half a voxel beyond
    # their centres.
    lowest = -0.5 - EDGE_TOLERANCE
    highest = num_inputs - 0.5 + EDGE_TOLERANCE
    inside = np.flatnonzero((position >= lowest) & (position <= highest))
    start = int(inside[0]) if inside.size else 0
    position = position[inside, None]
    is_coarser = scale > 1.0 + EDGE_TOLERANCE
    is_cubic = resampling == CUBIC and not is_coarser
    is_widened = resampling != LINEAR and is_coarser
    # Reach of the kernel in source voxels.
    if is_cubic:
        radius = 2.0
    elif is_widened:
        radius = scale
    else:
        radius = 1.0
    # All source voxels that the kernel may reach, in rows of one length for all outputs.
    first = np.ceil(position - radius).astype(np.int64)
    num_reached = int(np.floor(2 * radius)) + 1
    index = first + np.arange(num_reached)
    distance = index - position
    if is_cubic:
        weight = _cubic(np.abs(distance))
    else:
        weight = np.maximum(0.0, 1.0 - np.abs(distance) / radius)
    if is_widened:
        weight = _tilted(weight, distance)
    weight /= weight.sum(1, keepdims=True)
    # An axis that stays has one tap, which needs no sum, see `_neighbours`.
    is_used = (np.abs(weight) > 1e-9).any(0)
    # Positions beyond the outermost centres take the outermost values.
    index = np.clip(index[:, is_used], 0, num_inputs - 1)
    return AxisTaps(start, index, weight[:, is_used].astype(np.float32), scale)


def _tilted(weight: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Tilt the weights of each output, (outputs, taps), until their first moment vanishes."""
    first_moment = (weight * distance).sum(1, keepdims=True)
    second_moment = (weight * distance**2).sum(1, keepdims=True)
    tilt = -first_moment / np.maximum(second_moment, 1e-12)
    return np.maximum(0.0, weight * (1.0 + tilt * distance))


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' kernel at distances from 0 to 2 and a little beyond, where it is 0."""
    inner = (1.5 * distance - 2.5) * distance**2 + 1.0
    outer = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return np.where(distance < 1.0, inner, np.where(distance < 2.0, outer, 0.0))


class Slab(NamedTuple):
    """One piece of work along z.

    Attributes:
        source: Box to read.
        target: Box to write.
        taps: Filter between them, of z, y and x.
    """

    source: tuple[slice, slice, slice]
    target: tuple[slice, slice, slice]
    taps: tuple[AxisTaps, AxisTaps, AxisTaps]


def plan_slabs(
    source: VoxelGrid,
    target: VoxelGrid,
    *,
    resampling: str = ANTIALIASED,
    slices_go_on: bool = False,
) -> Iterator[Slab]:
    """Split the work along z.

    A slab has about `SLAB_VOXELS` once its first axis is filtered, and reads only what the target
    needs.
    """
    axes = []
    for axis, (scale, offset) in enumerate(target.axis_map_to(source)):
        taps_of_axis = axis_taps(
            target.shape[axis],
            source.shape[axis],
            scale,
            offset,
            resampling=resampling,
            goes_on=slices_go_on and axis == 0,
        )
        axes.append(taps_of_axis)
    if any(len(axis.index) == 0 for axis in axes):
        return
    z, y, x = axes
    # A slab has all rows and columns, but a part of the planes.
    source_z, _, _ = z.part(0, len(z.index))
    source_y, target_y, taps_y = y.part(0, len(y.index))
    source_x, target_x, taps_x = x.part(0, len(x.index))
    planes, rows, columns = (
        source_range.stop - source_range.start for source_range in (source_z, source_y, source_x)
    )
    if _is_z_first(z, y):
        step = SLAB_VOXELS // (rows * columns)
    else:
        # As many source planes as fit into a slab, counted in planes of the target.
        num_fitting = SLAB_VOXELS / (len(y.index) * columns)
        step = round(num_fitting * len(z.index) / planes)
    least_step = MIN_COARSE_PLANES if z.scale > 1.0 else 1
    step = max(step, least_step)
    for start in range(0, len(z.index), step):
        source_z, target_z, taps_z = z.part(start, start + step)
        yield Slab(
            source=(source_z, source_y, source_x),
            target=(target_z, target_y, target_x),
            taps=(taps_z, taps_y, taps_x),
        )


def _is_z_first(z: AxisTaps, y: AxisTaps) -> bool:
    """Whether z is filtered before y and x: the axis that shrinks most comes first."""
    return z.scale > y.scale


def filter_slab(read: Callable[[tuple[slice, slice, slice]], Tensor], slab: Slab) -> Tensor:
    """Filter one slab along its three axes.

    The first axis is filtered part by part, which need not be in memory at the same time.

    Args:
        read: Returns a box of the source, (d, h, w), float32.
        slab: The slab.

    Returns:
        Target voxels, (D', H', W'), float32; may be a view.
    """
    z, y, x = slab.taps
    # The axis that shrinks most comes first, and few planes become many last. The order must depend
    # on the scales alone, since it decides the last bit.
    if _is_z_first(z, y):
        parts = [_filter_planes(read(box), z) for box in _parts(slab.source, axis=1)]
        return _filter_columns(_filter_rows(torch.cat(parts, dim=1), y), x)
    parts = [_filter_rows(read(box), y) for box in _parts(slab.source, axis=0)]
    values = torch.cat(parts)
    if z.scale < 1.0:
        return _filter_planes(_filter_columns(values, x), z)
    return _filter_columns(_filter_planes(values, z), x)


def _parts(box: tuple[slice, slice, slice], axis: int) -> Iterator[tuple[slice, slice, slice]]:
    """Split a box along an axis into parts of about `PART_VOXELS`."""
    sizes = [along.stop - along.start for along in box]
    step = max(1, PART_VOXELS * sizes[axis] // math.prod(sizes))
    for start in range(box[axis].start, box[axis].stop, step):
        part = list(box)
        part[axis] = slice(start, min(start + step, box[axis].stop))
        z, y, x = part
        yield z, y, x


def _filter_planes(slab: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (D, H, W) along D: as rows of one batch, a plane each."""
    _, height, width = slab.shape
    filtered = _filter_rows(slab.flatten(1)[None], taps)
    return filtered.view(-1, height, width)


def _filter_columns(slab: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (D, H, W) along W: as rows of its transpose."""
    neighbours = _neighbours(taps)
    if neighbours is not None:
        return slab[..., neighbours]
    depth, height, _ = slab.shape
    columns = slab.flatten(0, 1).t().contiguous()
    filtered = _filter_rows(columns[None], taps)[0]
    return filtered.t().contiguous().view(depth, height, -1)


def _filter_rows(rows: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (B, R, C) along R; an axis that only selects neighbouring voxels is a view."""
    neighbours = _neighbours(taps)
    if neighbours is not None:
        return rows[:, neighbours]
    batch, num_rows, num_columns = rows.shape
    num_outputs, num_taps = taps.index.shape
    index = torch.from_numpy(taps.index).to(rows.device)
    weight = torch.from_numpy(taps.weight).to(rows.device)
    # All rows of all batches are one table, and each output is a bag of weighted rows of it.
    first_rows = num_rows * torch.arange(batch, device=rows.device)[:, None, None]
    bags = (index + first_rows).reshape(-1, num_taps)
    weights = weight.expand(batch, -1, -1).reshape(-1, num_taps)
    table = rows.reshape(batch * num_rows, num_columns)
    sums = functional.embedding_bag(bags, table, per_sample_weights=weights, mode="sum")
    return sums.view(batch, num_outputs, -1)


def _neighbours(taps: AxisTaps) -> slice | None:
    """Find the range of an axis that only selects neighbouring voxels, else None."""
    num_outputs, num_taps = taps.index.shape
    first = int(taps.index[0, 0])
    is_selection = num_taps == 1 and (np.diff(taps.index[:, 0]) == 1).all()
    return slice(first, first + num_outputs) if is_selection else None


def _share_slabs(slabs: list[Slab], work: Callable[[Slab], None], device: torch.device) -> None:
    """Work on the slabs with the threads that torch has here, at most `MAX_THREADS`.

    Each slab is computed by one thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(slabs) == 1 or device.type != "cpu":
        for slab in slabs:
            work(slab)
        return
    # The mode of this thread; others start without it.
    is_inference = torch.is_inference_mode_enabled()

    def work_alone(slab: Slab) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            work(slab)

    try:
        with ThreadPoolExecutor(
            min(num_threads, MAX_THREADS), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(work_alone, slabs))  # raises the first error
    finally:
        torch.set_num_threads(num_threads)  # the workers have set the number for later threads too


def _read(
    image: np.ndarray | Tensor, box: tuple[slice, slice, slice], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Read one box of a volume, contiguous, on the volume's device.

    A memory map is read only there.
    """
    if isinstance(image, Tensor):
        return image[box].to(dtype).contiguous()
    array_dtype = np.uint8 if dtype == torch.uint8 else np.float32
    return torch.from_numpy(np.array(image[box], dtype=array_dtype, order="C"))


def _check_shape(shape: tuple[int, ...], source: VoxelGrid) -> None:
    if tuple(shape) != source.shape:
        raise ValueError(f"the array has shape {tuple(shape)}, its grid {source.shape}")


@torch.no_grad()
def resample_image(
    image: np.ndarray | Tensor,
    source: VoxelGrid,
    target: VoxelGrid,
    outside: float,
    *,
    resampling: str = ANTIALIASED,
    slices_go_on: bool = False,
    limits: tuple[float, float] | None = None,
) -> Tensor:
    """Resample an image to a grid with the same axes.

    The grid may be a whole one or any crop, also one that reaches outside.

    Memory beside the result: at most `MAX_THREADS` slabs of about `SLAB_VOXELS` voxels.

    Args:
        image: Image (D, H, W) of any real type; only the needed range of a memory map is read.
        source: Grid of the image.
        target: New grid; its axes must be the source's.
        outside: Value for voxels whose centre lies outside the source's field of view.
        resampling: The filter, one of `RESAMPLINGS`.
        slices_go_on: Whether the first and the last slice inside the source are repeated beyond it,
            as in `crop_padded`.
        limits: Lowest and highest value, to which values are clipped before the filter; None does
            not clip.

    Returns:
        Resampled image (D', H', W'), float32, on the image's device (CPU for an array).

    Raises:
        ValueError: If image and source grid differ in shape, or the axes of the grids differ.
    """
    _check_shape(image.shape, source)
    device = image.device if isinstance(image, Tensor) else torch.device("cpu")
    slabs = list(plan_slabs(source, target, resampling=resampling, slices_go_on=slices_go_on))
    result = new_tensor(target.shape, torch.float32, device)
    if sum(result[slab.target].numel() for slab in slabs) < result.numel():
        result.fill_(outside)

    def read(box: tuple[slice, slice, slice]) -> Tensor:
        values = _read(image, box)
        return values if limits is None else values.clamp(*limits)

    def work(slab: Slab) -> None:
        result[slab.target] = filter_slab(read, slab)

    _share_slabs(slabs, work, device)
    return result


@torch.no_grad()
def resample_labels(
    labels: np.ndarray | Tensor,
    source: VoxelGrid,
    target: VoxelGrid,
    num_classes: int,
    *,
    slices_go_on: bool = False,
) -> Tensor:
    """Resample a label map to a grid with the same axes.

    Each class is filtered with the antialiased filter; the class of the largest weight wins.

    Classes are filtered one after the other, slab by slab, without a one-hot volume. Values of
    `num_classes` and above count as background, and so do voxels outside the source.

    Args:
        labels: Label map (D, H, W), integers.
        source: Its grid.
        target: New grid with the same axes; may reach outside.
        num_classes: Number of classes with the background, at most 256.
        slices_go_on: See `resample_image`.

    Returns:
        Resampled labels (D', H', W'), uint8.

    Raises:
        ValueError: If labels and source grid differ in shape, or the axes of the grids differ.
    """
    _check_shape(labels.shape, source)
    device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
    result = torch.zeros(target.shape, dtype=torch.uint8, device=device)

    def work(slab: Slab) -> None:
        # Bytes are read as they are; wider values as numbers that the filter takes.
        dtype = torch.uint8 if labels.itemsize == 1 else torch.float32
        values = _read(labels, slab.source, dtype)
        present = _present_classes(values, num_classes)
        if present:
            result[slab.target] = _heaviest_class(values, present, slab)

    _share_slabs(list(plan_slabs(source, target, slices_go_on=slices_go_on)), work, device)
    return result


def _present_classes(values: Tensor, num_classes: int) -> list[int]:
    """List the classes of a slab without the background."""
    if values.dtype == torch.uint8:
        # Counting bytes is faster than `unique`, which sorts.
        counts = torch.bincount(values.flatten(), minlength=num_classes)[:num_classes].tolist()
        return [value for value in range(1, num_classes) if counts[value]]
    return [value for value in range(1, num_classes) if (values == value).any()]


def _heaviest_class(values: Tensor, present: list[int], slab: Slab) -> Tensor:
    """Pick the class with the largest filtered mask; (D', H', W') uint8.

    The background and the classes that are present compete. `values` (D, H, W) are the source of
    the slab.
    """
    depth, height, width = values.shape
    slab = slab._replace(source=(slice(0, depth), slice(0, height), slice(0, width)))

    def weight_of(value: int) -> Tensor:
        return filter_slab(lambda box: (values[box] == value).to(torch.float32), slab)

    best = weight_of(present[0])
    background = 1.0 - best
    winner = torch.full_like(best, present[0], dtype=torch.uint8)
    for value in present[1:]:
        weight = weight_of(value)
        background -= weight
        is_heavier = weight > best + TIE_TOLERANCE
        winner.masked_fill_(is_heavier, value)
        best = torch.maximum(best, weight)
    return winner.masked_fill_(background >= best - TIE_TOLERANCE, 0)
