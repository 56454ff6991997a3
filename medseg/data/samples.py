"""Data set of samples: whole volumes for the coarse stage, crops or patches of regions for the fine stage.

Sample n is a function of (seed, n). The data set holds plain data, so it can be pickled for loader workers.
"""

import math
import multiprocessing.queues
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medseg.console import say
from medseg.data.cache import CachedCase
from medseg.data.crops import StageCrops
from medseg.data.sampler import draw_from_pass, normalised_weights, sample_rng
from medseg.data.task import Region, Task
from medseg.data.transforms import Transforms
from medseg.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, first_line, is_out_of_memory
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import PLAIN, Crop
from medseg.preprocess.crop import body_box, crop_padded, pad_at_end
from medseg.preprocess.intensity import AIR, AIR_HU, normalise_hu
from medseg.preprocess.resample import resample_image, resample_labels

# Random slices of the region in which a boundary is looked for; without a hit the patch lies anywhere in the crop.
BOUNDARY_TRIES = 8
# Smallest part of a volume that is cut out as a scan of its own.
LEAST_SLAB = 0.15


Sample = dict[str, Any]
"""One training sample.

image (1, D, H, W) float32 in [-1, 1]; target (D, H, W) uint8; inside (3, 2) int64: start and stop of the scan in the
sample per axis (z, y, x), before any augmentation; region: number of the region in the task (0 for the coarse stage);
case: name of the case; spacing_mm: of the sample, (z, y, x).
"""


class _Scan(NamedTuple):
    """A case of the cache, or a slab of one that counts as a scan of its own.

    Attributes:
        image_hu: Memory map (D, H, W), int16.
        labels: Memory map (D, H, W), uint8.
        grid: Grid of both.
        resampling: Filter that brings the image to another grid.
    """

    image_hu: np.ndarray
    labels: np.ndarray
    grid: VoxelGrid
    resampling: str

    @classmethod
    def of(cls, case: CachedCase) -> "_Scan":
        """Take a whole case."""
        return cls(case.image_hu, case.labels, case.grid, case.resampling)

    def slab(self, first: int, stop: int) -> "_Scan":
        """Take a range of slices, as if no more had been scanned."""
        grid = self.grid.crop(VoxelBox((first, 0, 0), (stop, *self.grid.shape[1:])))
        return _Scan(self.image_hu[first:stop], self.labels[first:stop], grid, self.resampling)

    def read(self, crop: Crop, window_hu: tuple[float, float], num_classes: int) -> tuple[Tensor, Tensor]:
        """Read a crop of image and labels; only the crop is read from disk.

        Returns:
            Normalised image (1, D, H, W) float32 and labels (D, H, W) uint8.
        """
        if crop.lattice == self.grid:
            image = normalise_hu(crop_padded(self.image_hu, crop.box, AIR_HU), window_hu)
            return torch.from_numpy(image)[None], torch.from_numpy(crop_padded(self.labels, crop.box, 0))
        resampled = resample_image(self.image_hu, self.grid, crop.grid, AIR_HU, resampling=self.resampling, slices_go_on=True)
        labels = resample_labels(self.labels, self.grid, crop.grid, num_classes, slices_go_on=True)
        return normalise_hu(resampled, window_hu)[None], labels


class Samples(Dataset[Sample]):
    """Samples of one stage, or of its validation; sample n depends on (seed, n) alone.

    The coarse stage sees the body in whole scans, the fine stage one region in each sample. Samples 0 … len-1 go once through all items
    (cases, or pairs of a case and a region that it has) in a random order, the next len samples again in another one, and so on; n has no
    upper end. The target of a region has the classes 1, 2, … in the order of the region's labels; other labels are background.

    Args:
        cases: Cases with labels.
        task: Labels, regions and channels.
        crops: Chooses the spacing and the crop of a region as prediction does, jittered when it gets a generator.
        seed: Seed of the run.
        is_coarse: Whether a sample is a whole scan; else it is a region.
        patch_size: Fine stage: shape of a sample, (D, H, W); None takes the whole crop.
        augmentation: None for validation.
        jitter: Whether `crops` gets the generator of the sample.
        weights: How often each case is drawn in relation to the others, > 0; None draws all equally.
        max_voxels: Coarse stage: bound on the voxels of a padded sample; a longer volume is cut to a random range of slices.
        slab_share: Coarse stage: share of samples that are cut to a random range of slices, as if no more had been scanned.
        is_mirrored: Fine stage: whether regions on the patient's right are mirrored along x, so that all look like left ones.
        boundary_share: Fine stage: share of patches that are placed so that they hold a voxel at the boundary of the region.
        elsewhere_share: Fine stage: share of samples that are cut anywhere in the scan, whether the region is there or not.

    Raises:
        ValueError: If there is no item, or a weight is not positive.
    """

    def __init__(
        self,
        cases: Sequence[CachedCase],
        task: Task,
        crops: StageCrops,
        *,
        seed: int,
        is_coarse: bool,
        patch_size: tuple[int, int, int] | None = None,
        augmentation: Transforms | None = None,
        jitter: bool = True,
        weights: Sequence[float] | None = None,
        max_voxels: int | None = None,
        slab_share: float = 0.0,
        is_mirrored: bool = False,
        boundary_share: float = 0.0,
        elsewhere_share: float = 0.0,
    ) -> None:
        found = [
            ((case, number), weight)
            for case, weight in zip(cases, [1.0] * len(cases) if weights is None else weights, strict=True)
            for number in range(1 if is_coarse else len(task.regions))
            if is_coarse or task.regions[number].name in case.region_boxes
        ]
        self.items = [item for item, _ in found]
        self.weights = normalised_weights(None if weights is None else [weight for _, weight in found], len(found))
        self.task, self.crops, self.seed, self.is_coarse = task, crops, seed, is_coarse
        self.patch_size, self.augmentation, self.jitter = patch_size, augmentation, jitter
        self.max_voxels, self.slab_share, self.is_mirrored = max_voxels, slab_share, is_mirrored
        self.boundary_share, self.elsewhere_share = boundary_share, elsewhere_share

    def __len__(self) -> int:
        """Items of one pass."""
        return len(self.items)

    def __getitem__(self, n: int) -> Sample:
        """Make sample n, n ≥ 0."""
        case, number = self.items[draw_from_pass(self.seed, n, self.weights)]
        region, rng = None if self.is_coarse else self.task.regions[number], sample_rng(self.seed, n)
        with one_thread():
            scan, crop = self._choose_scan(case, rng) if region is None else self._choose_region(case, region, rng)
            spacing_mm, window_hu, warp = crop.lattice.spacing_mm, self.task.window_hu, None
            if self.augmentation is not None:
                window_hu = self.augmentation.draw_window(rng, window_hu)
                warp = self.augmentation.draw_warp(rng, spacing_mm)
            shape, source = crop.box.shape, crop
            if warp is not None and region is not None:
                # A warp samples beyond the crop. The scan is read there too, so that no false air comes in at the corners.
                source = crop._replace(box=crop.box.expanded(warp.margin(shape)))
            image, target = scan.read(source, window_hu, self.task.num_classes)
            if region is not None:
                target = torch.from_numpy(self._region_classes(region)[target.numpy()])
            part = crop.box.intersect(crop.lattice.centres_within(scan.grid))
            inside = torch.tensor(list(zip(part.start, part.stop, strict=True))) - torch.tensor(crop.box.start)[:, None]
            if self.is_mirrored and region is not None and region.side == "right":
                image, target = image.flip(3), target.flip(2)
                inside[2] = shape[2] - inside[2].flip(0)
            if warp is not None:
                image, target = warp.apply(image, target, shape)
            if self.augmentation is not None:
                image, target = self.augmentation.alter(image, target, rng, spacing_mm)
        return {"image": image, "target": target, "inside": inside, "region": number, "case": case.name, "spacing_mm": spacing_mm}

    def _choose_scan(self, case: CachedCase, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose a whole case or a slab of it, and the crop about its body."""
        scan, rule, divisor = _Scan.of(case), self.crops.rule, self.crops.divisor
        body = body_box(scan.image_hu, scan.grid.spacing_mm)
        if rule != PLAIN:
            spacing_mm = self.crops.spacing_mm(case, rng if self.jitter else None)
            if rng.random() < self.slab_share:
                num_slices = max(1, int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0)))
                first = body.start[0] + int(rng.integers(0, body.shape[0] - num_slices, endpoint=True))
                scan = scan.slab(first, first + num_slices)
                body = body_box(scan.image_hu, scan.grid.spacing_mm)
            lattice = scan.grid.resampled(spacing_mm)
            body = lattice.box_from(scan.grid, body)
            crop = rule.crop(body, lattice, (1, 1, 1), divisor)
            depth = self._bounded_depth(filled(crop.box.shape, divisor))
            if depth is None:
                return scan, crop
            # A range of the body, where it is long enough.
            whole = body if body.shape[0] >= depth else crop.box
        else:
            shape, step = filled(body.shape, divisor), divisor[0]
            if rng.random() < self.slab_share:
                num_slices = int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0))
                shape = (max(step, num_slices // step * step), *shape[1:])
            depth, whole = self._bounded_depth(shape) or shape[0], body
            crop = Crop(scan.grid, VoxelBox.full(shape).shifted(body.start))
        z = whole.start[0] + int(rng.integers(0, max(0, whole.shape[0] - depth), endpoint=True))
        return scan, crop._replace(box=VoxelBox((z, *crop.box.start[1:]), (z + depth, *crop.box.stop[1:])))

    def _bounded_depth(self, shape: tuple[int, int, int]) -> int | None:
        """Count the slices, a multiple of the divisor, that a filled shape keeps under `max_voxels`; None if it is under it."""
        if self.max_voxels is None or math.prod(shape) <= self.max_voxels:
            return None
        step = self.crops.divisor[0]
        return max(step, self.max_voxels // math.prod(shape[1:]) // step * step)

    def _choose_region(self, case: CachedCase, region: Region, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose the crop of the region, a patch of it, or one from elsewhere."""
        crop = self.crops.crop(case, region, rng if self.jitter else None)
        if rng.random() < self.elsewhere_share:
            size, within = self.patch_size or crop.box.shape, crop.lattice.centres_within(case.grid)
            rests = [whole - part for whole, part in zip(within.shape, size, strict=True)]
            # About the centre of an axis that is shorter.
            place = [int(rng.integers(0, rest, endpoint=True)) if rest >= 0 else rest // 2 for rest in rests]
            crop = crop._replace(box=VoxelBox.full(size).shifted(within.start).shifted(place))
        elif self.patch_size is not None:
            crop = crop._replace(box=self._patch_box(case, region, crop, self.patch_size, rng))
        return _Scan.of(case), crop

    def _region_classes(self, region: Region) -> np.ndarray:
        """Make the table from a label value of the task to the class of the fine network."""
        classes = np.zeros(256, dtype=np.uint8)
        classes[list(self.task.region_values(region))] = np.arange(1, len(region.labels) + 1)
        return classes

    def _patch_box(
        self, case: CachedCase, region: Region, crop: Crop, patch_size: tuple[int, int, int], rng: np.random.Generator
    ) -> VoxelBox:
        """Place a patch in the crop, in voxels of its lattice; about the centre of an axis that is shorter than the patch."""
        # Both are drawn in any case, so that the place does not depend on whether a boundary is found.
        place = rng.random(3)
        wants_boundary = rng.random() < self.boundary_share
        voxel = self._boundary_voxel(case, region, crop, rng) if wants_boundary else None
        start: list[int] = []
        for axis, (low, stop, size) in enumerate(zip(crop.box.start, crop.box.stop, patch_size, strict=True)):
            high = stop - size
            first, last = (low, high) if voxel is None else (max(low, voxel[axis] - size + 1), min(high, voxel[axis]))
            start.append((low + high) // 2 if high < low else first + int(place[axis] * (last - first + 1)))
        return VoxelBox.full(patch_size).shifted(start)

    def _boundary_voxel(self, case: CachedCase, region: Region, crop: Crop, rng: np.random.Generator) -> list[int] | None:
        """Find a voxel of the region inside the crop with a neighbour in its slice that is not of the region.

        Returns:
            The voxel of the crop's lattice that holds its centre; None where none was found.
        """
        inner = case.region_boxes[region.name].intersect(case.grid.box_from(*crop))
        if inner.is_empty:
            return None
        labels, classes = case.labels, self._region_classes(region)
        _, y_slice, x_slice = inner.slices()
        for _ in range(BOUNDARY_TRIES):
            z = int(rng.integers(inner.start[0], inner.stop[0]))
            # Only one slice is read. Beyond the tight box there is no voxel of the region, hence the padding with False.
            mask = np.pad(classes[labels[z, y_slice, x_slice]] > 0, 1)
            around = mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
            places = np.argwhere(mask[1:-1, 1:-1] & ~around)
            if len(places):
                y, x = places[rng.integers(len(places))]
                centre = (z, inner.start[1] + int(y), inner.start[2] + int(x))
                maps = case.grid.axis_map_to(crop.lattice)
                return [round(scale * index + offset) for index, (scale, offset) in zip(centre, maps, strict=True)]
        return None


def filled(shape: tuple[int, int, int], multiple: tuple[int, int, int]) -> tuple[int, int, int]:
    """Round a shape up to multiples, (z, y, x)."""
    z, y, x = (math.ceil(size / step) * step for size, step in zip(shape, multiple, strict=True))
    return z, y, x


def collate_padded(samples: Sequence[Sample], multiple: tuple[int, int, int] = (1, 1, 1)) -> dict[str, Any]:
    """Stack samples of different shapes, filled at their end as in prediction.

    Args:
        samples: At least one sample.
        multiple: The common shape is the smallest multiple of it that holds all samples, (z, y, x).

    Returns:
        image (N, 1, D, H, W), target (N, D, H, W), inside (N, 3, 2), region (N,) int64; lists of N: case, spacing_mm.
    """
    largest = [max(sample["target"].shape[axis] for sample in samples) for axis in range(3)]
    shape = filled((largest[0], largest[1], largest[2]), multiple)
    return {
        "image": torch.stack([pad_at_end(sample["image"], shape, AIR) for sample in samples]),
        "target": torch.stack([pad_at_end(sample["target"], shape, 0) for sample in samples]),
        "inside": torch.stack([sample["inside"] for sample in samples]),
        "region": torch.tensor([sample["region"] for sample in samples], dtype=torch.int64),
        "case": [sample["case"] for sample in samples],
        "spacing_mm": [sample["spacing_mm"] for sample in samples],
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: reductions and products differ in the last bit between thread counts."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def init_worker(_: int) -> None:
    """Keep a loader worker to one thread, and let it end where it cannot hand a sample over (`worker_init_fn`).

    Signals to the process group do not reach it, see `medseg.training.data_module.TrainLoader`.
    """
    torch.set_num_threads(1)
    # multiprocessing would print the error in its thread and drop the sample, for which the training process then waits for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined, method-assign]


def _end_worker(error: Exception, _: object) -> None:
    say(f"a loader worker cannot hand over a sample: {type(error).__name__}: {first_line(error)}")
    os._exit(EXIT_OUT_OF_MEMORY if is_out_of_memory(error) else EXIT_FAILED)
