"""Resampling of images, labels and probabilities from one grid to another with the same axes.

The filter is separable and one of three:

* `antialiased`, the default: linear where an axis gets finer or keeps its spacing; where it gets
  coarser, a triangle widened to the target's spacing, so that no voxel is skipped and fine
  structures do not alias.
* `linear`: the two nearest voxels. Faster, but noise and edges alias where an axis gets coarser.
* `cubic`: the four nearest voxels (Keys 1981) where an axis gets finer or keeps its spacing;
  `antialiased` where it gets coarser. Sharper, but it overshoots at edges.

Labels and probabilities always use `antialiased`: the negative weights of `cubic` make holes, and
the voxels that `linear` skips lose thin parts.

The weights depend only on the position of an output voxel in the source, which is computed in
float64 from the two grids. An output voxel therefore gets the same taps and the same weights
whether the target is a whole grid or a crop of it: resampling a crop equals cropping the resampled
volume.

Each axis is filtered by one weighted gather of rows (`embedding_bag` with `per_sample_weights`:
gather, multiply and add in one pass). This is not a matrix product, so neither TF32 nor autocast
can round HU to ten bits. Each output voxel is summed by one thread in the order of its taps, so the
result does not depend on the number of threads.

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

RESAMPLINGS = ("antialiased", "linear", "cubic")
ANTIALIASED, LINEAR, CUBIC = RESAMPLINGS

# Voxels of one slab after its first axis is filtered: 1 MiB as float32. They fit into the cache of
# the processor, and the allocator reuses blocks of this size: the system need not clear new pages.
SLAB_VOXELS = 2**18
# Minimum number of target planes in a slab where z gets coarser: neighbouring slabs both read the
# source planes at their border, which would double the work of thin slabs.
MIN_COARSE_PLANES = 4
# Source voxels that are read and filtered along the first axis at a time, 2 MiB as float32, which
# limits the memory of a slab.
PART_VOXELS = 2**19
# Most slabs that are computed at a time; four saturate the memory bandwidth. A slab of a scan with
# 512 x 512 voxels in plane takes 7 to 26 MB with its source voxels and temporary tensors
# (measured).
MAX_THREADS = 4
# Decimals to which source positions, in voxels, are rounded; further decimals are rounding noise.
POSITION_DECIMALS = 9
# Distance in source voxels by which rounding may move a voxel out of the field of view. In the
# choice of a filter, scales that exceed 1 by no more than this count as 1.
EDGE_TOLERANCE = 1e-6
# A label must win by more than this, the rounding of float32 sums: otherwise ties would depend on
# the direction of an axis. The weights of all labels sum to 1 in a voxel.
TIE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class AxisTaps:
    """The filter along one axis: each output voxel is a weighted sum of source voxels, its taps.

    Output voxels are those of the target that lie inside the source's field of view.

    Attributes:
        start: Index of the first output voxel in the target.
        index: Source voxel of each tap, (outputs, taps), clamped to the source.
        weight: Weight of each tap, same shape, float32; each row sums to 1.
        scale: Source voxels per output voxel; above 1 where the axis gets coarser.
    """

    start: int
    index: np.ndarray
    weight: np.ndarray
    scale: float

    def part(self, start: int, stop: int) -> tuple[slice, slice, AxisTaps]:
        """Cut out a range of the output voxels, counted from the first output voxel.

        Returns:
            Range of the source that these outputs read; range of these outputs in the target; and
            their taps, whose source voxels count from the start of the source range.
        """
        index = self.index[start:stop]
        first_input = int(index.min())
        inputs = slice(first_input, int(index.max()) + 1)
        first_output = self.start + start
        outputs = slice(first_output, first_output + len(index))
        taps = AxisTaps(first_output, index - first_input, self.weight[start:stop], self.scale)
        return inputs, outputs, taps


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

    The field of view reaches half a voxel beyond the outermost centres; taps beyond the outermost
    voxels are clamped to these. The weights of a widened triangle are tilted, see `_tilted`, and
    stay non-negative. The cubic filter has negative weights for the outer two of its four voxels.

    Args:
        num_outputs: Voxels of the target along this axis.
        num_inputs: Voxels of the source.
        scale: Source voxels per target voxel.
        offset: Position of target voxel 0 in source voxels; whole numbers are voxel centres.
        resampling: One of `RESAMPLINGS`.
        goes_on: Whether target voxels beyond the field of view repeat the outermost ones inside it.

    Returns:
        Taps of the outputs inside the field of view; none if the target lies outside.
    """
    # Ends of the field of view in source positions: the outer faces of the outermost voxels.
    lowest = -0.5 - EDGE_TOLERANCE
    highest = num_inputs - 0.5 + EDGE_TOLERANCE
    target_index = np.arange(num_outputs)
    if goes_on:
        # Outputs beyond the field of view get the position of the first or last output inside it,
        # even if the target, which may be a crop, does not contain that output.
        first_inside = math.ceil((lowest - offset) / scale)
        last_inside = math.floor((highest - offset) / scale)
        # A thin source may lie between two outputs: none is inside, and `last_inside` is less than
        # `first_inside`. All outputs then get the position of `first_inside`, which is outside the
        # field of view, so that the result has no taps.
        last_inside = max(first_inside, last_inside)
        target_index = np.clip(target_index, first_inside, last_inside)
    # Positions in source voxels.
    position = np.round(scale * target_index + offset, POSITION_DECIMALS)
    inside = np.flatnonzero((position >= lowest) & (position <= highest))
    start = int(inside[0]) if inside.size else 0
    position = position[inside, None]  # (outputs inside, 1)
    is_coarser = scale > 1.0 + EDGE_TOLERANCE
    is_cubic = resampling == CUBIC and not is_coarser
    is_widened = resampling != LINEAR and is_coarser
    # Reach of the kernel to each side, in source voxels.
    if is_cubic:
        radius = 2.0
    elif is_widened:
        radius = scale
    else:
        radius = 1.0
    # All source voxels that the kernel may reach, equally many for each output: (outputs inside,
    # taps).
    first_input = np.ceil(position - radius).astype(np.int64)
    num_taps = int(np.floor(2 * radius)) + 1
    index = first_input + np.arange(num_taps)
    distance = index - position
    if is_cubic:
        weight = _cubic(np.abs(distance))
    else:
        weight = np.maximum(0.0, 1.0 - np.abs(distance) / radius)
    if is_widened:
        weight = _tilted(weight, distance)
    weight /= weight.sum(1, keepdims=True)
    # Taps whose weight is 0 in all outputs are dropped; 1e-9 is far below the precision of float32.
    # Where the output voxels coincide with source voxels, one tap remains and no sum is needed, see
    # `_neighbours`.
    is_used = (np.abs(weight) > 1e-9).any(0)
    # Clamped only now: the weights depend on the true distances, also for taps beyond the source.
    index = np.clip(index[:, is_used], 0, num_inputs - 1)
    return AxisTaps(start, index, weight[:, is_used].astype(np.float32), scale)


def _tilted(weight: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Tilt the weights of each output, (outputs, taps), so that a linear ramp is not shifted.

    Sampled at the source voxels, a widened triangle is not symmetric about its position. With w the
    weights and d the distances, the weights w (1 + t d) with t = -sum(w d) / sum(w d²) have the
    first moment sum(w d) = 0. Tilted weights below 0 are set to 0, which changes the moment again.
    """
    first_moment = (weight * distance).sum(1, keepdims=True)
    second_moment = (weight * distance**2).sum(1, keepdims=True)
    # 1e-12 avoids 0 / 0.
    tilt = -first_moment / np.maximum(second_moment, 1e-12)
    return np.maximum(0.0, weight * (1.0 + tilt * distance))


def _cubic(distance: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2, at distances >= 0 in source voxels; it is 0 from 2 on."""
    inner = (1.5 * distance - 2.5) * distance**2 + 1.0
    outer = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    outer = np.where(distance < 2.0, outer, 0.0)
    return np.where(distance < 1.0, inner, outer)


class Slab(NamedTuple):
    """Unit of work: some planes of the target, with all rows and columns.

    Attributes:
        source: Box of the source to read.
        target: Box of the target to write.
        taps: Filters along z, y and x; their source voxels count from the start of the source box.
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
    """Split a resampling along z into slabs; arguments as for `resample_image`.

    A slab has about `SLAB_VOXELS` after its first axis is filtered, and reads only the source
    voxels that the target needs. There are no slabs if the target lies outside the source.
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
    if any(len(taps.index) == 0 for taps in axes):
        return
    z, y, x = axes
    all_source_z, _, _ = z.part(0, len(z.index))
    source_y, target_y, taps_y = y.part(0, len(y.index))
    source_x, target_x, taps_x = x.part(0, len(x.index))
    num_source_planes = all_source_z.stop - all_source_z.start
    num_rows = source_y.stop - source_y.start
    num_columns = source_x.stop - source_x.start
    # `step` is the number of target planes in a slab. After its first axis is filtered, a slab has
    # target planes with source rows (z first), or source planes with target rows (y first).
    if _is_z_first(z, y):
        step = SLAB_VOXELS // (num_rows * num_columns)
    else:
        # `source_step` source planes fit into a slab, and correspond to `step` target planes.
        source_step = SLAB_VOXELS / (len(y.index) * num_columns)
        step = round(source_step * len(z.index) / num_source_planes)
    min_step = MIN_COARSE_PLANES if z.scale > 1.0 else 1
    step = max(step, min_step)
    for start in range(0, len(z.index), step):
        source_z, target_z, taps_z = z.part(start, start + step)
        yield Slab(
            source=(source_z, source_y, source_x),
            target=(target_z, target_y, target_x),
            taps=(taps_z, taps_y, taps_x),
        )


def _is_z_first(z: AxisTaps, y: AxisTaps) -> bool:
    """Whether z is filtered before y: the axis that shrinks more comes first, in a tie y."""
    return z.scale > y.scale


def filter_slab(read: Callable[[tuple[slice, slice, slice]], Tensor], slab: Slab) -> Tensor:
    """Filter one slab along its three axes.

    The first axis is filtered part by part, so that only one part is read at a time.

    Args:
        read: Returns the voxels in a box of the source, (d, h, w), float32.
        slab: Part of a resampling, from `plan_slabs`.

    Returns:
        Target voxels, (D', H', W'), float32; may be a view.
    """
    z, y, x = slab.taps
    # z is filtered first if it shrinks more than y, and last if it grows: intermediate results are
    # then small. The order affects the last bit of the sums. It depends on the scales alone, so
    # that a resampled crop equals the same part of the resampled volume.
    if _is_z_first(z, y):
        # Parts of a few rows with all planes, which the filter along z needs.
        parts = [_filter_planes(read(box), z) for box in _split_box(slab.source, axis=1)]
        filtered_z = torch.cat(parts, dim=1)
        return _filter_columns(_filter_rows(filtered_z, y), x)
    parts = [_filter_rows(read(box), y) for box in _split_box(slab.source, axis=0)]
    filtered_y = torch.cat(parts)
    if z.scale < 1.0:
        return _filter_planes(_filter_columns(filtered_y, x), z)
    return _filter_columns(_filter_planes(filtered_y, z), x)


def _split_box(box: tuple[slice, slice, slice], axis: int) -> Iterator[tuple[slice, slice, slice]]:
    """Split a box along an axis into parts of about `PART_VOXELS`."""
    sizes = [axis_range.stop - axis_range.start for axis_range in box]
    # One index along the axis has math.prod(sizes) / sizes[axis] voxels.
    step = max(1, PART_VOXELS * sizes[axis] // math.prod(sizes))
    for start in range(box[axis].start, box[axis].stop, step):
        part = list(box)
        part[axis] = slice(start, min(start + step, box[axis].stop))
        z, y, x = part
        yield z, y, x


def _filter_planes(slab: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (D, H, W) along D."""
    _, height, width = slab.shape
    # For `_filter_rows`, each plane is one row: (1, D, H*W).
    filtered = _filter_rows(slab.flatten(1)[None], taps)
    return filtered.view(-1, height, width)


def _filter_columns(slab: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (D, H, W) along W."""
    neighbours = _neighbours(taps)
    if neighbours is not None:
        return slab[..., neighbours]
    depth, height, _ = slab.shape
    # `_filter_rows` sums whole rows, so the columns become contiguous rows: (W, D*H).
    columns = slab.flatten(0, 1).t().contiguous()
    filtered = _filter_rows(columns[None], taps)[0]  # (W', D*H)
    return filtered.t().contiguous().view(depth, height, -1)


def _filter_rows(rows: Tensor, taps: AxisTaps) -> Tensor:
    """Filter (B, R, C) along R; a view where the filter only selects neighbouring voxels."""
    neighbours = _neighbours(taps)
    if neighbours is not None:
        return rows[:, neighbours]
    batch, num_rows, num_columns = rows.shape
    num_outputs, num_taps = taps.index.shape
    index = torch.from_numpy(taps.index).to(rows.device)
    weight = torch.from_numpy(taps.weight).to(rows.device)
    # `embedding_bag` takes the rows of all batches as one table, (B*R, C); each output is a bag, a
    # weighted sum of some rows of the table. The rows of batch b begin at b * R.
    table = rows.reshape(batch * num_rows, num_columns)
    first_rows = num_rows * torch.arange(batch, device=rows.device)[:, None, None]
    bags = (index + first_rows).reshape(-1, num_taps)
    weights = weight.expand(batch, -1, -1).reshape(-1, num_taps)
    sums = functional.embedding_bag(bags, table, per_sample_weights=weights, mode="sum")
    return sums.view(batch, num_outputs, -1)


def _neighbours(taps: AxisTaps) -> slice | None:
    """Find the range of source voxels that a filter copies unchanged, one for each output.

    Returns:
        The range; None if the filter sums or repeats voxels.
    """
    num_outputs, num_taps = taps.index.shape
    if num_taps > 1 or not (np.diff(taps.index[:, 0]) == 1).all():
        return None
    first_input = int(taps.index[0, 0])
    return slice(first_input, first_input + num_outputs)


def _share_slabs(slabs: list[Slab], work: Callable[[Slab], None], device: torch.device) -> None:
    """Compute the slabs with as many threads as torch uses, at most `MAX_THREADS`.

    Slabs on a GPU are computed one after the other. If there is a single slab on the CPU, torch may
    share it among its own threads.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(slabs) == 1 or device.type != "cpu":
        for slab in slabs:
            work(slab)
        return
    # Inference mode and `no_grad` hold for one thread only: each worker enters them again.
    is_inference = torch.is_inference_mode_enabled()

    def work_alone(slab: Slab) -> None:
        with torch.inference_mode(is_inference), torch.no_grad():
            work(slab)

    try:
        with ThreadPoolExecutor(
            min(num_threads, MAX_THREADS), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            # `map` raises the errors of its workers only where its results are read.
            list(pool.map(work_alone, slabs))
    finally:
        # `set_num_threads` in a worker also changes the number for all threads that start later.
        torch.set_num_threads(num_threads)


def _read(
    image: np.ndarray | Tensor, box: tuple[slice, slice, slice], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Read one box of a volume as a contiguous tensor on the volume's device.

    Of a memory map, only this box is read from the disk.

    Args:
        image: Volume (D, H, W).
        box: Range of voxels along z, y and x.
        dtype: Type of the result, float32 or uint8.
    """
    if isinstance(image, Tensor):
        return image[box].to(dtype).contiguous()
    array_dtype = np.uint8 if dtype == torch.uint8 else np.float32
    return torch.from_numpy(np.array(image[box], dtype=array_dtype, order="C"))


def _check_shape(shape: tuple[int, ...], source: VoxelGrid) -> None:
    """Refuse an array that does not have the shape of its grid."""
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
    finish: Callable[[Tensor], Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Resample an image to a grid with the same axes.

    The target may be a whole grid or any crop of one, and may reach beyond the source.

    Besides the result, the slabs that are being computed take memory, see `MAX_THREADS`.

    Args:
        image: Image (D, H, W) of any real type; only the needed range of a memory map is read.
        source: Grid of the image.
        target: New grid; its axes must be the source's.
        outside: Value for voxels whose centre lies outside the source's field of view.
        resampling: The filter, one of `RESAMPLINGS`.
        slices_go_on: Whether the first and the last slice inside the source are repeated beyond it,
            as in `medseg.preprocess.crop.crop_padded`.
        limits: Lowest and highest value, to which the image is clipped before the filter; None:
            values are not clipped.
        finish: Maps resampled values, float32, and `outside` to final ones, such as a
            normalisation. It must not change its argument in place.
        out: Receives the result, (D', H', W'), in its own number format; None: a new float32
            tensor on the image's device (CPU for an array).

    Returns:
        Resampled image (D', H', W'): `out`, or the new tensor.

    Raises:
        ValueError: If image and source grid differ in shape, or the axes of the grids differ.
    """
    _check_shape(image.shape, source)
    device = image.device if isinstance(image, Tensor) else torch.device("cpu")
    slabs = list(plan_slabs(source, target, resampling=resampling, slices_go_on=slices_go_on))
    result = new_tensor(target.shape, torch.float32, device) if out is None else out
    if finish is not None:
        outside = finish(torch.tensor(outside)).item()
    # The slabs do not overlap. If they do not cover the whole target, the target is filled first.
    num_written = sum(result[slab.target].numel() for slab in slabs)
    if num_written < result.numel():
        result.fill_(outside)

    def read(box: tuple[slice, slice, slice]) -> Tensor:
        voxels = _read(image, box)
        return voxels if limits is None else voxels.clamp(*limits)

    def work(slab: Slab) -> None:
        voxels = filter_slab(read, slab)
        # Here, because the slab is still in the cache of the processor.
        if finish is not None:
            voxels = finish(voxels)
        result[slab.target] = voxels

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

    The mask of each class is filtered with the antialiased filter; each voxel gets the class whose
    filtered mask is largest, see `_heaviest_class` for ties.

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
        # Wider integers are read as float32, which holds labels exactly; bytes need no conversion.
        dtype = torch.uint8 if labels.itemsize == 1 else torch.float32
        slab_labels = _read(labels, slab.source, dtype)
        present = _present_classes(slab_labels, num_classes)
        # Without other classes, the slab stays background (0).
        if present:
            result[slab.target] = _heaviest_class(slab_labels, present, slab)

    _share_slabs(list(plan_slabs(source, target, slices_go_on=slices_go_on)), work, device)
    return result


def _present_classes(slab_labels: Tensor, num_classes: int) -> list[int]:
    """List the classes that occur in a slab, without the background, in increasing order."""
    if slab_labels.dtype == torch.uint8:
        # Counting bytes is faster than `unique`, which sorts.
        counts = torch.bincount(slab_labels.flatten(), minlength=num_classes).tolist()
        return [label for label in range(1, num_classes) if counts[label]]
    return [label for label in range(1, num_classes) if (slab_labels == label).any()]


def _heaviest_class(slab_labels: Tensor, present: list[int], slab: Slab) -> Tensor:
    """Pick the class with the largest filtered mask; in a tie, the smallest class, 0 included.

    Args:
        slab_labels: Labels (D, H, W) of the slab's source box.
        present: Classes that occur in it, without the background; increasing.
        slab: The slab.

    Returns:
        Class of each target voxel of the slab, (D', H', W'), uint8.
    """
    # `slab_labels` holds the source box alone, so its indices start at 0.
    depth, height, width = slab_labels.shape
    slab = slab._replace(source=(slice(0, depth), slice(0, height), slice(0, width)))

    def weight_of(label: int) -> Tensor:
        return filter_slab(lambda box: (slab_labels[box] == label).to(torch.float32), slab)

    best = weight_of(present[0])
    # The weights of all classes sum to 1 in each voxel: what no other class has is background.
    background = 1.0 - best
    winner = torch.full_like(best, present[0], dtype=torch.uint8)
    for label in present[1:]:
        weight = weight_of(label)
        background -= weight
        is_heavier = weight > best + TIE_TOLERANCE
        winner.masked_fill_(is_heavier, label)
        best = torch.maximum(best, weight)
    return winner.masked_fill_(background >= best - TIE_TOLERANCE, 0)
