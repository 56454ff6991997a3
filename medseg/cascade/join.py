"""Join: crops of all regions resampled back, merged on the scan's own grid and cleaned."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medseg.anatomy.rules import MAX_GAS_SHARE, MAX_UNSEEN_SHARE, MIN_PART_FRACTION, MIN_REPORTED_ML
from medseg.cascade.agreement import nearest_voxels
from medseg.cascade.localise import Localisation
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.inference.components import ReadPart, Rejection, fill_holes, remove_components
from medseg.io.scratch import new_array
from medseg.preprocess.resample import resample_image
from medseg.task import Region, Task

RegionResult = tuple[Region, Tensor, VoxelGrid]
"""A region, the probabilities (L, D, H, W) of its labels and the grid of its crop."""

# Native voxels of one slab: three planes of 512×512. A voxel needs five float32 values and three
# bytes at a time. A float32 array of the slab has 3 MiB: larger arrays exceed the cache of the
# processor, and from 4 MiB on the system gives out newly zeroed memory for each of them
# (`medseg.memory.heap`).
SLAB_VOXELS = 3 * 2**18
FOOTPRINT_PLANES = 8  # planes whose probabilities are compared at a time
NO_VOXELS = VoxelBox((0, 0, 0), (0, 0, 0))


def join(
    regions: list[RegionResult],
    grid: VoxelGrid,
    task: Task,
    image_hu: np.ndarray | None = None,
    localisation: Localisation | None = None,
    warnings: list[str] | None = None,
) -> np.ndarray:
    """Merge the fine results on the native grid and clean the label map.

    Beside the crops and the result, at most 50 MB are needed while a slab is pasted, and 100 MB
    while a slab is cleaned (see `medseg.inference.components`).

    Args:
        regions: Fine results, in any order.
        grid: Oriented native grid of the scan.
        task: Labels and regions.
        image_hu: The scan on that grid, for the check against `task.least_hu`. None skips this
            check, and so does a localisation: the coarse stage has removed the gas.
        localisation: Result of the coarse stage. A component is removed if the coarse stage misses
            more than `MAX_UNSEEN_SHARE` of it. None skips this check.
        warnings: Receives a sentence for each label that loses at least `MIN_REPORTED_ML` by the
            check against the coarse stage.

    Returns:
        Label map (D, H, W) on the oriented native grid, uint8.
    """
    labels = merge(regions, grid, task)
    gas = _gas_rejections(image_hu, task.least_hu)
    if not task.regions:
        # A task without regions only loses its gas: lesions may be small and many, and enclose each
        # other.
        for value in task.labels.values():
            remove_components(labels, value, gas)
        return labels
    for name, value in task.labels.items():
        if localisation is None:
            remove_components(labels, value, gas, MIN_PART_FRACTION)
            continue
        unseen = Rejection(_unseen(localisation, grid, task, value), MAX_UNSEEN_SHARE)
        # `remove_components` returns the number of removed voxels for each rejection.
        (num_removed,) = remove_components(labels, value, [unseen], MIN_PART_FRACTION)
        volume_ml = num_removed * voxel_ml(grid)
        if warnings is not None and volume_ml >= MIN_REPORTED_ML:
            warnings.append(
                f"{volume_ml:.0f} ml that the fine stage called {name} were removed: they are "
                "apart from what the coarse stage marks"
            )
    # Filled last: a component of one label that was removed above may lie in a hole of another.
    for value in task.labels.values():
        fill_holes(labels, value)
    return labels


def _gas_rejections(image_hu: np.ndarray | None, least_hu: float | None) -> list[Rejection]:
    """Make the rejection of gas: components mostly below `least_hu`; none without HU or bound."""
    if image_hu is None or least_hu is None:
        return []
    return [Rejection(lambda part: image_hu[part] < least_hu, MAX_GAS_SHARE)]


def merge(regions: list[RegionResult], grid: VoxelGrid, task: Task) -> np.ndarray:
    """Resample each crop back, only inside its box and slab by slab; the most probable label wins.

    Within a region a voxel gets the label with the largest probability, background included. Where
    two regions claim a voxel, the larger probability wins; of equal ones, the earlier region.

    Args:
        regions: Fine results.
        grid: Oriented native grid.
        task: Labels and regions.

    Returns:
        Label map (D, H, W), uint8, not cleaned.
    """
    labels = new_array(grid.shape, np.uint8)
    footprints = [_footprint(probs) for _, probs, _ in regions]
    native_boxes = [_native_box(crop_grid, grid) for _, _, crop_grid in regions]
    boxes = []
    for (_, _, crop_grid), footprint, native in zip(regions, footprints, native_boxes, strict=True):
        boxes.append(_claimable_box(footprint, crop_grid, grid, native))
    # All regions in one slab, then the next slab: `best_probs` has the size of a slab, not of the
    # scan.
    for slab in _slabs(_hull(boxes)):
        # Probability of the label that each voxel has so far, (d, h, w).
        best_probs = np.zeros(slab.shape, dtype=np.float32)
        for (region, probs, crop_grid), footprint, native in zip(
            regions, footprints, native_boxes, strict=True
        ):
            # Smaller than the box in the whole scan, because an organ is thin at its ends.
            part = _claimable_box(footprint, crop_grid, grid, slab.intersect(native))
            if part.is_empty:
                continue
            # `best_probs` begins at the slab, `labels` at the scan.
            z, y, x = slab.start
            part_in_slab = part.shifted((-z, -y, -x))
            _claim(
                labels[part.slices()],
                best_probs[part_in_slab.slices()],
                probs,
                crop_grid,
                grid.crop(part),
                task.region_values(region),
            )
    return labels


def paste_percent(shares: list[tuple[Tensor, VoxelGrid]], grid: VoxelGrid) -> np.ndarray:
    """Resample probabilities or their standard deviations back, slab by slab.

    Where crops overlap, the larger value counts.

    Args:
        shares: For each crop, its values (D, H, W) in [0, 1] and its grid.
        grid: Oriented native grid.

    Returns:
        Percent (D, H, W), uint8; 0 outside the crops.
    """
    percent = new_array(grid.shape, np.uint8)
    for share, crop_grid in shares:
        box = _native_box(crop_grid, grid)
        # By slabs: the resampled crop in float32 would take four times the memory of the result.
        for slab in _slabs(box):
            slab_share = _paste(share, crop_grid, grid.crop(slab))
            slab_percent = slab_share.mul_(100.0).round_().to(torch.uint8).numpy()
            view = percent[slab.slices()]
            np.maximum(view, slab_percent, out=view)
    return percent


def _unseen(localisation: Localisation, grid: VoxelGrid, task: Task, value: int) -> ReadPart:
    """Mask of the native voxels outside all coarse regions to which a label belongs.

    A region consists of all of its labels: the stages may disagree about the border of two lobes.

    Args:
        localisation: Result of the coarse stage.
        grid: Oriented native grid.
        task: Labels and regions.
        value: Value of the label.

    Returns:
        A function that reads a part (d, h, w) of the mask by its slices. The whole mask would be a
        second volume.
    """
    seen_values: set[int] = set()
    for region in task.regions:
        region_values = task.region_values(region)
        if value in region_values:
            seen_values.update(region_values)
    is_unseen = ~np.isin(localisation.labels, list(seen_values))  # on the coarse grid
    # For each axis, the coarse index of each native index.
    coarse_indices = nearest_voxels(localisation.grid, grid)

    def read(part: tuple[slice, slice, slice]) -> np.ndarray:
        mask = is_unseen
        # Axis by axis: ten times as fast as all three at once.
        for axis, native_slice in enumerate(part):
            mask = mask.take(coarse_indices[axis][native_slice], axis)
        return mask

    return read


def _native_box(crop_grid: VoxelGrid, grid: VoxelGrid) -> VoxelBox:
    """Voxels of the native grid whose values a crop decides: those whose centres it shows.

    A crop of a whole scan has whole voxels, so it may end up to half a voxel before the scan. The
    native planes in between belong to the crop too; otherwise the first and the last plane of a
    scan of thin slices would lose their labels.
    """
    shown = grid.centres_within(crop_grid).clipped(grid.shape)
    if shown.is_empty:
        return shown
    z_start, y_start, x_start = shown.start
    z_stop, y_stop, x_stop = shown.stop
    half_voxel = 0.5 * crop_grid.spacing_mm[0] / grid.spacing_mm[0]  # in native planes
    if z_start <= half_voxel:
        z_start = 0
    if grid.shape[0] - z_stop <= half_voxel:
        z_stop = grid.shape[0]
    return VoxelBox((z_start, y_start, x_start), (z_stop, y_stop, x_stop))


def _paste(values: Tensor, source: VoxelGrid, target: VoxelGrid) -> Tensor:
    """Resample values (D, H, W) of a crop to a part of its native box; 0 beside the crop.

    The first and the last plane of the crop are repeated beyond its ends, see `_native_box`.
    """
    return resample_image(values, source, target, outside=0.0, slices_go_on=True)


class _Footprint(NamedTuple):
    """Rows and columns of a crop's planes with voxels that may get a label.

    Attributes:
        rows: Whether a row of a plane has such a voxel, (D, H).
        columns: Whether a column of a plane has such a voxel, (D, W).
    """

    rows: np.ndarray
    columns: np.ndarray


def _footprint(probs: Tensor) -> _Footprint:
    """Find the voxels of a crop whose probabilities (L, D, H, W) may be enough for a label.

    The probability of the background is 1 minus the sum of the L labels, so the largest of these
    L + 1 probabilities is at least 1 / (L + 1): a label with less cannot win. Resampling makes no
    probability larger than those that it reads.
    """
    # Half of 1 / (L + 1), to be safe from rounding.
    least_prob = 0.5 / (len(probs) + 1)
    _, depth, height, width = probs.shape
    rows = np.zeros((depth, height), dtype=bool)
    columns = np.zeros((depth, width), dtype=bool)
    for prob in probs:
        for start in range(0, depth, FOOTPRINT_PLANES):
            planes = slice(start, start + FOOTPRINT_PLANES)
            is_enough = (prob[planes] > least_prob).numpy()
            rows[planes] |= is_enough.any(axis=2)
            columns[planes] |= is_enough.any(axis=1)
    return _Footprint(rows, columns)


def _claimable_box(
    footprint: _Footprint, crop_grid: VoxelGrid, grid: VoxelGrid, slab: VoxelBox
) -> VoxelBox:
    """Voxels in a slab of the native grid to which a region may give a label.

    Args:
        footprint: From `_footprint`.
        crop_grid: Grid of the crop.
        grid: Oriented native grid.
        slab: Planes of the native grid, within the native box of the crop.
    """
    if slab.is_empty:
        return NO_VOXELS
    # Reach of the resampling filter in voxels of the crop: one voxel of the crop, or one voxel of a
    # coarser native grid, which is `scale` voxels of the crop.
    reach = [math.ceil(max(1.0, scale)) for scale, _ in grid.axis_map_to(crop_grid)]
    # The planes of the crop that are read for the slab.
    box_read = crop_grid.box_from(grid, slab).expanded(reach).clipped(crop_grid.shape)
    planes = box_read.slices()[0]
    tight = _bounds(footprint.rows[planes], footprint.columns[planes])
    if tight.is_empty:
        return tight
    # All voxels within reach of a probable one; below they are mapped to the native grid.
    claimable = tight.shifted((planes.start, 0, 0)).expanded(reach).clipped(crop_grid.shape)
    native = grid.box_from(crop_grid, claimable)
    z_start, y_start, x_start = native.start
    z_stop, y_stop, x_stop = native.stop
    # The outermost planes of the crop also decide the planes of the slab beyond them.
    if claimable.start[0] == 0:
        z_start = min(z_start, slab.start[0])
    if claimable.stop[0] == crop_grid.shape[0]:
        z_stop = max(z_stop, slab.stop[0])
    return VoxelBox((z_start, y_start, x_start), (z_stop, y_stop, x_stop)).intersect(slab)


def _bounds(rows: np.ndarray, columns: np.ndarray) -> VoxelBox:
    """Smallest box around the rows (D, H) and columns (D, W) of planes that are true."""
    starts, stops = [], []
    # Whether each index along z, y and x is used.
    for is_used in (rows.any(axis=1), rows.any(axis=0), columns.any(axis=0)):
        indices = np.flatnonzero(is_used)
        if not len(indices):
            return NO_VOXELS
        starts.append(int(indices[0]))
        stops.append(int(indices[-1]) + 1)
    return VoxelBox.of(starts, stops)


def _hull(boxes: Sequence[VoxelBox]) -> VoxelBox:
    """Smallest box around several boxes; empty boxes do not count."""
    filled = [box for box in boxes if not box.is_empty]
    if not filled:
        return NO_VOXELS
    starts = np.min([box.start for box in filled], axis=0)
    stops = np.max([box.stop for box in filled], axis=0)
    return VoxelBox.of(starts, stops)


def _slabs(box: VoxelBox) -> Iterator[VoxelBox]:
    """Split a box along z into slabs of about `SLAB_VOXELS`."""
    if box.is_empty:
        return
    _, height, width = box.shape
    z_start, y_start, x_start = box.start
    z_stop, y_stop, x_stop = box.stop
    num_planes = max(1, SLAB_VOXELS // (height * width))
    for start in range(z_start, z_stop, num_planes):
        stop = min(start + num_planes, z_stop)
        yield VoxelBox((start, y_start, x_start), (stop, y_stop, x_stop))


def _claim(
    labels: np.ndarray,
    best_probs: np.ndarray,
    probs: Tensor,
    source: VoxelGrid,
    target: VoxelGrid,
    values: tuple[int, ...],
) -> None:
    """Write a region's labels where they are the most probable.

    They must be more probable than its background and than the labels of earlier regions.

    Args:
        labels: Label map (D, H, W) on the target grid; written in place.
        best_probs: Probability (D, H, W) of the label that each voxel has so far; written in place.
        probs: Probabilities (L, d, h, w) of the region's labels on the source grid.
        source: Grid of the crop.
        target: Grid of `labels`, a part of a slab.
        values: Label value of each of the L probabilities.
    """
    # Most probable label of the region so far, and its probability.
    top_values = np.full(target.shape, values[0], dtype=np.uint8)
    top_probs = _paste(probs[0], source, target).numpy()
    # Probability of the background: 1 minus the sum of the labels.
    background = 1 - top_probs
    for value, prob in zip(values[1:], probs[1:], strict=True):
        resampled = _paste(prob, source, target).numpy()
        background -= resampled
        np.copyto(top_values, value, where=resampled > top_probs)
        top_probs = np.maximum(top_probs, resampled)
    # Strictly more, so that of two equal probabilities the earlier region keeps the voxel.
    is_claimed = (top_probs > background) & (top_probs > best_probs)
    np.copyto(best_probs, top_probs, where=is_claimed)
    np.copyto(labels, top_values, where=is_claimed)
