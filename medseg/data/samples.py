"""Data set of samples: scans for the coarse stage, crops of regions for the fine stage, or patches.

Sample n is a function of (seed, n). The data set holds plain data, so it can be pickled for loader
workers.
"""

import math
import multiprocessing.queues
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medseg.console import say
from medseg.data.audit.labels import ABSENT
from medseg.data.cache import CachedCase
from medseg.data.crops import StageCrops
from medseg.data.options import StageOptions
from medseg.data.sampler import draw_from_pass, normalised_weights, sample_rng
from medseg.data.transforms import Transforms
from medseg.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, UserError, first_line, is_out_of_memory
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import PLAIN, Crop
from medseg.geometry.sizes import bounded_depth, network_size
from medseg.preprocess.crop import (
    body_box,
    crop_padded,
    erase_outside,
    pad_at_end,
    probability_channel,
)
from medseg.preprocess.intensity import AIR, Intensity, normalise, window
from medseg.preprocess.resample import resample_image, resample_labels
from medseg.task import Region, Task

# Number of random slices in which a boundary is searched, before all slices are searched in random
# order: most organs have a boundary in each slice of their box.
BOUNDARY_TRIES = 8
# Smallest share of the body's slices in a slab, the random range of slices of `stage.slab_share`.
LEAST_SLAB = 0.15

Sample = dict[str, Any]
"""One training sample.

* `image`: (C, D, H, W) float32; a channel with a window is in [-1, 1]. The coarse channel, where
  there is one, is the last.
* `target`: (D, H, W) uint8, classes of the network or the ignore label of the task.
* `inside`: (3, 2) int64, start and stop of the scan in the sample per axis (z, y, x), before any
  augmentation; voxels outside this range are padding.
* `region`: index of the region in `Task.regions`; 0 for the coarse stage.
* `case`: name of the case.
* `spacing_mm`: voxel spacing of the sample, (z, y, x).
* `number`: number of the sample in the run.
"""


class _Organ(NamedTuple):
    """A region or label in which a boundary is looked for.

    Attributes:
        box: Tight box of the region or label on the grid of the cache.
        values: Label values of the region, or the value of the label.
    """

    box: VoxelBox
    values: tuple[int, ...]


class _Scan(NamedTuple):
    """A case of the cache, or a part of a case that is treated as a whole scan.

    Attributes:
        images: Memory map (D, H, W) of each channel.
        labels: Memory map (D, H, W), uint8.
        grid: Grid of the images and the labels.
        case: Case of the cache that the arrays are of, whole even where they are a part.
        task: Labels and channels.
    """

    images: list[np.ndarray]
    labels: np.ndarray
    grid: VoxelGrid
    case: CachedCase
    task: Task

    def part(self, axis: int, first: int, stop: int) -> "_Scan":
        """Cut out the slices (axis 0) or columns (axis 2) `first` to `stop - 1` as a new scan."""
        starts = [0, 0, 0]
        stops = list(self.grid.shape)
        starts[axis] = first
        stops[axis] = stop
        box = VoxelBox.of(starts, stops)
        slices = box.slices()
        return self._replace(
            images=[image[slices] for image in self.images],
            labels=self.labels[slices],
            grid=self.grid.crop(box),
        )

    def body(self) -> VoxelBox:
        """Find the box of the body."""
        return body_box(self.images[0], self.grid.spacing_mm, self.task.channels[0].modality)

    def read(self, crop: Crop, intensities: Sequence[Intensity]) -> tuple[Tensor, Tensor]:
        """Read a crop of all channels and the labels; only the crop is read from disk.

        Args:
            crop: Where to read.
            intensities: Map of each channel to the range of the network.

        Returns:
            Normalised image (C, D, H, W) float32 and labels (D, H, W) uint8.
        """
        # Both ways repeat the first and last slice beyond the scan: `crop_padded` does so always,
        # `resample_image` and `resample_labels` with `slices_go_on`.
        is_on_grid = crop.lattice == self.grid
        channels = []
        for image, channel, intensity in zip(
            self.images, self.task.channels, intensities, strict=True
        ):
            if is_on_grid:
                cropped = torch.from_numpy(crop_padded(image, crop.box, channel.outside))
            else:
                cropped = resample_image(
                    image,
                    self.grid,
                    crop.grid,
                    channel.outside,
                    resampling=self.case.resampling,
                    slices_go_on=True,
                )
            cropped = erase_outside(cropped, crop, channel.outside)
            channels.append(normalise(cropped, intensity))
        # `stack` would copy a single channel.
        stacked = torch.stack(channels) if len(channels) > 1 else channels[0][None]
        if is_on_grid:
            labels = torch.from_numpy(crop_padded(self.labels, crop.box, outside=0))
        else:
            labels = resample_labels(
                self.labels, self.grid, crop.grid, self.task.num_values, slices_go_on=True
            )
        return stacked, erase_outside(labels, crop, outside=0)


class Samples(Dataset[Sample]):
    """Samples of one stage for training or validation; sample n depends on (seed, n) alone.

    A sample of the coarse stage is a whole scan or a part of it. A sample of the fine stage is the
    crop of a region or a patch of this crop.

    Items are cases in the coarse stage, and pairs of a case and a region in the fine stage. Without
    weights, samples 0 … len-1 take each item once, in a random order; the next len samples do so in
    another random order, and so on without end. With weights, see `draw_from_pass`.

    Regions on the patient's right are mirrored along x, so that all look like left regions. The
    target of a region has the classes 1, 2, … in the order of the region's labels; other labels are
    background.

    Args:
        cases: Cases with labels.
        task: Labels, regions and channels.
        crops: Chooses the spacing and the crop of a region.
        stage: How samples are drawn.
        seed: Seed of the run.
        augmentation: Transforms of a sample; None for validation.
        jitter: Whether spacings and boxes of regions vary at random, as in training; otherwise
            `crops` chooses them as in prediction.
        weights: Relative frequency of the items of each case, > 0; None draws all items equally
            often.
        train_trust: Accepted values of the columns `trust_<region>`. An item is then a region with
            an accepted value; in the coarse stage, a case whose regions all have one or are absent.
            None accepts all.

    Raises:
        ValueError: If there are no cases, or a weight is not positive.
        UserError: If no region has an accepted trust, or none has voxels.
    """

    def __init__(
        self,
        cases: Sequence[CachedCase],
        task: Task,
        crops: StageCrops,
        stage: StageOptions,
        *,
        seed: int,
        augmentation: Transforms | None = None,
        jitter: bool = True,
        weights: Sequence[float] | None = None,
        train_trust: Collection[str] | None = None,
    ) -> None:
        self.task = task
        self.crops = crops
        self.stage = stage
        self.seed = seed
        self.augmentation = augmentation
        self.jitter = jitter
        # Each item is a case with the index of a region in the task; the index is 0 for whole
        # scans.
        self.items: list[tuple[CachedCase, int]] = []
        item_weights: list[float] = []
        case_weights = [1.0] * len(cases) if weights is None else weights
        for case, weight in zip(cases, case_weights, strict=True):
            for region_index in trained_regions(case, task, stage, train_trust):
                self.items.append((case, region_index))
                item_weights.append(weight)
        if cases and not self.items:
            raise UserError(describe_no_items(cases, task, stage, train_trust))
        if weights is None:
            # A list of equal weights would give another order: `draw_from_pass` then draws other
            # random numbers.
            self.weights = normalised_weights(None, len(self.items))
        else:
            self.weights = normalised_weights(item_weights, len(self.items))

    def __len__(self) -> int:
        """Number of items."""
        return len(self.items)

    def size(self, n: int) -> int:
        """Estimate the number of voxels of sample n from its case (coarse stage) or its region.

        Jitter, patches and slabs are left out.
        """
        case, region_index = self.items[draw_from_pass(self.seed, n, self.weights)]
        if self.stage.sees_whole_scans:
            return math.prod(case.grid.shape)
        crop = self.crops.crop(case, self.task.regions[region_index], rng=None)
        return math.prod(crop.box.shape)

    def __getitem__(self, n: int) -> Sample:
        """Make sample n, n ≥ 0."""
        # The results of a run depend on the order of the draws from `rng`, which must not change.
        # So a number is also drawn where the share that it is compared with is 0 or not set.
        case, region_index = self.items[draw_from_pass(self.seed, n, self.weights)]
        region = None if self.stage.sees_whole_scans else self.task.regions[region_index]
        rng = sample_rng(self.seed, n)
        with one_thread():
            if region is None:
                scan, crop = self._choose_scan(case, rng)
            else:
                scan, crop = self._choose_region(case, region, rng)
            intensities = self._draw_intensities(case, rng)
            spacing_mm = crop.lattice.spacing_mm
            shape = crop.box.shape
            warp = None
            if self.augmentation is not None:
                warp = self.augmentation.draw_warp(rng, spacing_mm)
            # Whether the patient continues beyond the crop. A whole scan is cropped to the box of
            # the body, so that nothing of the patient is left out.
            is_part_of_scan = region is not None or self.stage.patch_size is not None
            read_crop = crop
            if warp is not None and is_part_of_scan:
                # A warp samples points beyond the crop. The scan is read there too, so that no
                # false air appears at the corners.
                read_crop = crop._replace(box=crop.box.expanded(warp.margin(shape)))
            image, target = scan.read(read_crop, intensities)
            inside = _scanned_part(crop, scan.grid)
            if region is not None:
                image = self._add_coarse_channel(image, case, region, read_crop)
                target = self._region_classes(target, region)
                # One network serves both sides: it sees right regions mirrored to the left.
                if region.side == "right":
                    # The axis x is the last of both.
                    image = image.flip(3)
                    target = target.flip(2)
                    # After mirroring, the distance of the old stop from the end is the new start.
                    inside[2] = shape[2] - inside[2].flip(0)
            if warp is not None:
                # The result has the shape of the crop, without the margin of `read_crop`.
                image, target = warp.apply(image, target, shape)
            if self.augmentation is not None:
                num_scanned = len(self.task.channels)
                image, target = self.augmentation.alter(image, target, rng, spacing_mm, num_scanned)
        return {
            "image": image,
            "target": target,
            "inside": inside,
            "region": region_index,
            "case": case.name,
            "spacing_mm": spacing_mm,
            "number": n,
        }

    def _add_coarse_channel(
        self, image: Tensor, case: CachedCase, region: Region, crop: Crop
    ) -> Tensor:
        """Append the coarse stage's probability of a region as the last channel, if there is one.

        Args:
            image: Channels of the scan in the crop, (C, D, H, W).
            case: Case whose probabilities are looked up by its name.
            region: The region of the sample.
            crop: Where the image was read.
        """
        coarse = self.crops.coarse_probs.get(case.name)
        if coarse is None:
            return image
        values = self.task.region_values(region)
        channel = probability_channel(coarse.probs, coarse.grid, crop, values)
        return torch.cat([image, channel[None]])

    def _region_classes(self, labels: Tensor, region: Region) -> Tensor:
        """Map label values to the classes 1, 2, … of a region; the ignore label stays.

        The classes of helper labels follow those of the region with the most labels.
        """
        values = list(self.task.region_values(region))
        # Class of each label value. Values of other regions become background, 0.
        class_of_value = np.zeros(256, dtype=np.uint8)
        class_of_value[values] = np.arange(1, len(values) + 1)
        first_helper_class = 1 + self.task.num_region_labels
        for index, name in enumerate(self.task.helper_labels):
            class_of_value[self.task.labels[name]] = first_helper_class + index
        if self.task.ignore_label is not None:
            class_of_value[self.task.ignore_label] = self.task.ignore_label
        return torch.from_numpy(class_of_value[labels.numpy()])

    def _draw_intensities(self, case: CachedCase, rng: np.random.Generator) -> list[Intensity]:
        """Make the intensity map of each channel.

        The map is made from the channel's window, which the augmentation may shift. Without a
        window, it is the map of the case in the cache.
        """
        intensities = []
        for channel, intensity in zip(self.task.channels, case.intensities, strict=True):
            if channel.window_hu is not None:
                window_hu = channel.window_hu
                if self.augmentation is not None:
                    window_hu = self.augmentation.draw_window(rng, window_hu)
                intensity = window(window_hu)
            assert intensity is not None, "the cache holds the map of each channel without a window"
            intensities.append(intensity)
        return intensities

    def _choose_scan(self, case: CachedCase, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose a whole case or a part of it, and the crop around its body.

        On the grid of the cache, the crop is a range of the body's slices or a patch. With a rule
        for other grids (`crops.rule`), it is the body on such a grid, or some slices or a patch of
        it.
        """
        scan = self._scan(case)
        body = scan.body()
        # Without `side_share` nothing is drawn, so that the samples of older runs do not change.
        if self.stage.side_share and rng.random() < self.stage.side_share:
            scan, body = _cut(scan, body, axis=2, least_share=self.stage.side_least, rng=rng)
        rule = self.crops.rule
        patch_size = self.stage.patch_size
        if rule == PLAIN and patch_size is None:
            return scan, self._choose_slices(scan, body, rng)
        if rule == PLAIN:
            scan, body = self._cut_slab(scan, body, rng)
            crop = Crop(scan.grid, body)
        else:
            # The spacing is drawn before the slab; without a generator it does not vary.
            jitter_rng = rng if self.jitter else None
            spacing_mm = self.crops.spacing_mm(case, jitter_rng)
            scan, body = self._cut_slab(scan, body, rng)
            lattice = scan.grid.resampled(spacing_mm)
            body = lattice.box_from(scan.grid, body)
            # A patch size of one voxel keeps the crop from growing to a valid size of the network:
            # a patch is cut below, or `collate` pads the sample.
            crop = rule.crop(body, lattice, patch_size=(1, 1, 1), divisor=self.crops.divisor)
        if patch_size is not None:
            organ = self._any_label(case, rng)
            return scan, self._cut_patch(case, crop, organ, patch_size, rng)
        depth = self._bounded_depth(network_size(crop.box.shape, self.crops.divisor))
        if depth is None:
            return scan, crop
        # Too many voxels: a range of the body's slices, or of the crop's if the body has too few.
        choices = body if body.shape[0] >= depth else crop.box
        return scan, _cut_depth(crop, choices, depth, rng)

    def _choose_slices(self, scan: _Scan, body: VoxelBox, rng: np.random.Generator) -> Crop:
        """Choose a range of slices of the body on the grid of the scan: all of them, or a slab."""
        divisor_z = self.crops.divisor[0]
        shape = network_size(body.shape, self.crops.divisor)
        if rng.random() < (self.stage.slab_share or 0.0):
            num_slices = int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0))
            # Rounded down to a multiple of the divisor, but at least the divisor itself.
            shape = (max(divisor_z, num_slices // divisor_z * divisor_z), *shape[1:])
        depth = self._bounded_depth(shape) or shape[0]
        if any(channel.window_hu is None for channel in self.task.channels):
            # Without a window, the value of air differs between cases. So the crop is not larger
            # than the body, and `collate` pads it after the intensity map, as prediction does.
            depth = min(depth, body.shape[0])
            shape = body.shape
        crop = Crop(scan.grid, VoxelBox.full(shape).shifted(body.start))
        return _cut_depth(crop, body, depth, rng)

    def _cut_slab(
        self, scan: _Scan, body: VoxelBox, rng: np.random.Generator
    ) -> tuple[_Scan, VoxelBox]:
        """Cut `slab_share` of the scans to a random range of the body's slices.

        Returns:
            The scan and the box of its body.
        """
        if rng.random() >= (self.stage.slab_share or 0.0):
            return scan, body
        return _cut(scan, body, axis=0, least_share=LEAST_SLAB, rng=rng)

    def _bounded_depth(self, shape: tuple[int, int, int]) -> int | None:
        """Count the slices, a multiple of the divisor, with which a shape has at most `max_voxels`.

        None if the shape has no more voxels than that.
        """
        if self.stage.max_voxels is None or math.prod(shape) <= self.stage.max_voxels:
            return None
        return bounded_depth(shape, self.stage.max_voxels, self.crops.divisor[0])

    def _choose_region(
        self, case: CachedCase, region: Region, rng: np.random.Generator
    ) -> tuple[_Scan, Crop]:
        """Choose the crop of the region, a patch of this crop, or a crop elsewhere in the scan."""
        jitter_rng = rng if self.jitter else None
        crop = self.crops.crop(case, region, jitter_rng)
        if rng.random() < (self.stage.elsewhere_share or 0.0):
            # A crop of the same size anywhere in the scan.
            size = self.stage.patch_size or crop.box.shape
            scan_box = crop.lattice.centres_within(case.grid)
            offsets = []
            for scan_length, length in zip(scan_box.shape, size, strict=True):
                num_free = scan_length - length
                # Along an axis on which the scan is shorter, the crop is centred; nothing is drawn.
                offset = num_free // 2
                if num_free >= 0:
                    offset = int(rng.integers(0, num_free, endpoint=True))
                offsets.append(offset)
            box = VoxelBox.full(size).shifted(scan_box.start).shifted(offsets)
            crop = Crop(crop.lattice, box)
        elif self.stage.patch_size is not None:
            organ = _Organ(case.region_boxes[region.name], self.task.region_values(region))
            crop = self._cut_patch(case, crop, organ, self.stage.patch_size, rng)
        return self._scan(case), crop

    def _scan(self, case: CachedCase) -> _Scan:
        """Map the arrays of a case into memory."""
        return _Scan(case.images, case.labels, case.grid, case, self.task)

    def _any_label(self, case: CachedCase, rng: np.random.Generator) -> _Organ | None:
        """Choose one of the labels that a case has, all equally likely; None if it has none."""
        names = [name for name in self.task.labels if name in case.label_boxes]
        if not names:
            return None
        name = names[int(rng.integers(len(names)))]
        return _Organ(case.label_boxes[name], (self.task.labels[name],))

    def _cut_patch(
        self,
        case: CachedCase,
        crop: Crop,
        organ: _Organ | None,
        patch_size: tuple[int, int, int],
        rng: np.random.Generator,
    ) -> Crop:
        """Place a patch in the crop, at random or over a boundary of an organ.

        The patch is centred along an axis on which the crop is shorter.

        Args:
            case: Case whose label map is searched for a boundary.
            crop: Where the patch may lie.
            organ: Organ of which a share `boundary_share` of the patches must hold a boundary
                voxel; None for a case without labelled voxels.
            patch_size: Size of the patch in voxels of the crop's lattice, (D, H, W).
            rng: Generator of the sample.
        """
        # The place of the patch along each axis, as a share of the free distance, 0 ≤ place < 1. It
        # is drawn first, so that it does not depend on whether a boundary is found.
        place = rng.random(3)
        needs_boundary = rng.random() < (self.stage.boundary_share or 0.0)
        voxel = None
        if needs_boundary and organ is not None:
            voxel = self._boundary_voxel(case, crop, organ, rng)
        start: list[int] = []
        for axis, size in enumerate(patch_size):
            first = crop.box.start[axis]
            last = crop.box.stop[axis] - size
            if last < first:
                start.append((first + last) // 2)
                continue
            if voxel is not None:
                # First and last start of a patch that holds the voxel.
                first = max(first, voxel[axis] - size + 1)
                last = min(last, voxel[axis])
            start.append(first + int(place[axis] * (last - first + 1)))
        return crop._replace(box=VoxelBox.full(patch_size).shifted(start))

    def _boundary_voxel(
        self,
        case: CachedCase,
        crop: Crop,
        organ: _Organ,
        rng: np.random.Generator,
    ) -> list[int] | None:
        """Find a random voxel of an organ inside the crop, at a boundary within its slice.

        At a boundary, a neighbour in the slice has neither a value of the organ nor the ignore
        label.

        Args:
            case: Case whose label map is searched, one slice at a time.
            crop: Where the voxel must lie.
            organ: Box and label values of the organ.
            rng: Generator of the sample.

        Returns:
            Index (z, y, x) of the voxel of the crop's lattice that holds the centre of the voxel
            found; None where none was found.
        """
        search_box = organ.box.intersect(case.grid.box_from(crop.lattice, crop.box))
        if search_box.is_empty:
            return None
        is_organ_value = np.zeros(256, dtype=bool)
        is_organ_value[list(organ.values)] = True
        for z in _slices_to_search(search_box, rng):
            # A memory map: only one slice is read.
            candidates = _boundary_voxels(
                case.labels[z], search_box, is_organ_value, self.task.ignore_label
            )
            if len(candidates) == 0:
                continue
            y, x = candidates[rng.integers(len(candidates))]
            cache_voxel = (z, search_box.start[1] + int(y), search_box.start[2] + int(x))
            # From indices of the cache's grid to indices of the lattice.
            axis_maps = case.grid.axis_map_to(crop.lattice)
            voxel = []
            for index, (scale, offset) in zip(cache_voxel, axis_maps, strict=True):
                voxel.append(round(scale * index + offset))
            return voxel
        return None


def _slices_to_search(box: VoxelBox, rng: np.random.Generator) -> Iterator[int]:
    """Yield `BOUNDARY_TRIES` random slices of a box, then each of its slices in a random order.

    Small lesions that are far apart leave most slices of their box empty.
    """
    first, stop = box.start[0], box.stop[0]
    for _ in range(BOUNDARY_TRIES):
        yield int(rng.integers(first, stop))
    for z in rng.permutation(range(first, stop)):
        yield int(z)


def _boundary_voxels(
    labels: np.ndarray, box: VoxelBox, is_organ_value: np.ndarray, ignore_label: int | None
) -> np.ndarray:
    """Find the voxels of an organ in a slice with a neighbour that is neither organ nor ignored.

    Voxels outside the box do not count as organ, so that all voxels of the organ at an edge of the
    box are found: the organ ends there, or a crop cuts it.

    Args:
        labels: The slice, (H, W) uint8.
        box: Box in which the voxels are searched; its range along z has no effect.
        is_organ_value: Whether each of the 256 values belongs to the organ.
        ignore_label: The ignore label; None where the task has none.

    Returns:
        Indices (y, x) in the box, (n, 2).
    """
    _, y_slice, x_slice = box.slices()
    is_organ = is_organ_value[labels[y_slice, x_slice]]
    # Most of the slices that are searched for scattered lesions are empty.
    if not is_organ.any():
        return np.empty((0, 2), dtype=np.intp)
    # Whether a voxel makes no boundary for its neighbours; in the box with a margin of one voxel.
    is_organ_or_ignored = np.pad(is_organ, 1)
    if ignore_label is not None:
        # Padding moves the indices of the whole slice by one: these ranges are the box with the
        # same margin of one voxel on each side.
        is_ignored = np.pad(labels == ignore_label, 1)
        _, y_start, x_start = box.start
        _, y_stop, x_stop = box.stop
        is_organ_or_ignored |= is_ignored[y_start : y_stop + 2, x_start : x_stop + 2]
    # The neighbours of each voxel of the box in the four directions of the slice.
    above = is_organ_or_ignored[:-2, 1:-1]
    below = is_organ_or_ignored[2:, 1:-1]
    before = is_organ_or_ignored[1:-1, :-2]
    behind = is_organ_or_ignored[1:-1, 2:]
    is_surrounded = above & below & before & behind
    return np.argwhere(is_organ & ~is_surrounded)


def _scanned_part(crop: Crop, grid: VoxelGrid) -> Tensor:
    """Find start and stop of the scan in a crop per axis, in voxels of the crop, (3, 2) int64.

    Args:
        crop: Crop on the lattice of the sample, which may extend beyond the scan.
        grid: Grid of the scan.
    """
    scanned_box = crop.box.intersect(crop.lattice.centres_within(grid))
    bounds = torch.tensor([scanned_box.start, scanned_box.stop]) - torch.tensor(crop.box.start)
    return bounds.T.contiguous()


def _cut_depth(crop: Crop, choices: VoxelBox, depth: int, rng: np.random.Generator) -> Crop:
    """Cut a crop to a range of slices at a random place.

    Args:
        crop: Crop whose range along y and x stays.
        choices: Box in whose slices the range lies. If it has fewer slices than the range, the
            range starts at its first slice.
        depth: Number of slices.
        rng: Generator of the sample.
    """
    num_free = max(0, choices.shape[0] - depth)
    z = choices.start[0] + int(rng.integers(0, num_free, endpoint=True))
    start = (z, *crop.box.start[1:])
    stop = (z + depth, *crop.box.stop[1:])
    return crop._replace(box=VoxelBox(start, stop))


def _cut(
    scan: _Scan, body: VoxelBox, *, axis: int, least_share: float, rng: np.random.Generator
) -> tuple[_Scan, VoxelBox]:
    """Cut a scan to a random range of its body along an axis, as if only this range were scanned.

    Args:
        scan: Whole scan, or a part of it.
        body: Box of its body.
        axis: 0 for slices, 2 for columns.
        least_share: Smallest share of the body that stays.
        rng: Generator of the sample.

    Returns:
        The scan and the box of its body.
    """
    length = max(1, int(body.shape[axis] * rng.uniform(least_share, 1.0)))
    num_free = body.shape[axis] - length
    first = body.start[axis] + int(rng.integers(0, num_free, endpoint=True))
    scan = scan.part(axis, first, first + length)
    return scan, scan.body()


def trained_regions(
    case: CachedCase, task: Task, stage: StageOptions, train_trust: Collection[str] | None
) -> Sequence[int]:
    """List the indices of the regions of a case that are items of `Samples`.

    A whole scan is an item with the index 0. Arguments as of `Samples`.
    """
    if stage.sees_whole_scans:
        is_item = train_trust is None or _has_trust(case, task, train_trust)
        return [0] if is_item else []
    indices = []
    for index, region in enumerate(task.regions):
        # A region without voxels has no box.
        if region.name not in case.region_boxes:
            continue
        if train_trust is None or case.trust.get(region.name) in train_trust:
            indices.append(index)
    return indices


def describe_no_items(
    cases: Sequence[CachedCase],
    task: Task,
    stage: StageOptions,
    train_trust: Collection[str] | None,
) -> str:
    """Say why some cases, at least one, have no items to train on."""
    # Without any region, each trust would be refused.
    has_regions = any(trained_regions(case, task, stage, None) for case in cases)
    if train_trust is not None and has_regions:
        return (
            f"data.train_trust={' or '.join(train_trust)}: of {len(cases)} training case(s), such "
            f"as {cases[0].name}, none has a region with this trust; enter it in the columns "
            "trust_<region> of the case table (phantoms have the trust reference), or leave "
            "data.train_trust out"
        )
    names = " or ".join(region.name for region in task.regions)
    return (
        f"of {len(cases)} case(s), such as {cases[0].name}, none has a voxel of {names}; "
        "check data.label_values, the label maps and the split"
    )


def _has_trust(case: CachedCase, task: Task, train_trust: Collection[str]) -> bool:
    """Whether each region of a case has an accepted trust, or is stated as absent.

    A region without a value in the column `trust_<region>` is not accepted.
    """
    accepted = {*train_trust, ABSENT}
    return all(case.trust.get(name) in accepted for name in task.parts)


def collate(
    samples: Sequence[Sample],
    multiple: tuple[int, int, int] = (1, 1, 1),
    *,
    is_stacked: bool = True,
) -> list[dict[str, Any]]:
    """Make a micro-batch: a list of stacks that the network sees one after the other.

    Samples of the same shape make one stack. Where shapes vary, each sample is a stack of its own:
    padding to a common shape would change the loss, since norms and means include the padding.
    `is_stacked` is the same for all micro-batches of a run, so that all ranks call the network
    equally often.

    Args:
        samples: At least one sample.
        multiple: Each sample is padded at its end to a multiple of this, as in prediction, (z, y,
            x).
        is_stacked: Whether all samples of the run have the same shape, and make one stack.

    Returns:
        Stacks of n samples: image (n, C, D, H, W), target (n, D, H, W), inside (n, 3, 2), region
        (n,) int64; lists of n: case, spacing_mm, number.
    """
    if not is_stacked:
        stacks = []
        for sample in samples:
            stacks += collate([sample], multiple)
        return stacks
    # All samples have the shape of the first.
    shape = network_size(samples[0]["target"].shape, multiple)
    images = [pad_at_end(sample["image"], shape, outside=AIR) for sample in samples]
    targets = [pad_at_end(sample["target"], shape, outside=0) for sample in samples]
    inside = [sample["inside"] for sample in samples]
    regions = [sample["region"] for sample in samples]
    batch: dict[str, Any] = {
        "image": torch.stack(images),
        "target": torch.stack(targets),
        "inside": torch.stack(inside),
        "region": torch.tensor(regions, dtype=torch.int64),
    }
    for key in ("case", "spacing_mm", "number"):
        batch[key] = [sample[key] for sample in samples]
    return [batch]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread.

    Reductions and products differ in the last bit between thread counts.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def init_worker(_: int) -> None:
    """Limit a loader worker to one thread, and end it if it cannot send a sample.

    This is the `worker_init_fn` of the loader, which gives the number of the worker. Signals to the
    process group do not reach a worker, see `medseg.training.data_module.TrainLoader`.
    """
    torch.set_num_threads(1)
    # By default, multiprocessing prints the error in its thread and drops the sample, for which the
    # training process would wait forever.
    queue = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    sys.excepthook = _report_unless_training_ends


def _report_unless_training_ends(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error that ends a thread of a worker.

    A broken connection means that the training process ends; that process reports the reason.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _end_worker(error: Exception, _: object) -> None:
    """End the worker process; its exit status distinguishes lack of memory from other failures.

    Args:
        error: Why a sample could not be sent.
        _: The sample.
    """
    say(
        "a loader worker cannot send a sample to the training: "
        f"{type(error).__name__}: {first_line(error)}"
    )
    # This runs in a thread, which `sys.exit` would end alone.
    os._exit(EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else EXIT_FAILED)
