"""Data sets of training samples: whole volumes for the coarse stage, crops or patches of regions for the fine stage.

Sample n is a function of (seed, n). The data sets hold plain data, so they can be pickled for loader workers.
"""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medseg.data.cache import CachedCase
from medseg.data.sampler import draw_from_pass, normalised_weights, sample_rng
from medseg.data.task import Region, Task
from medseg.data.transforms import Transforms
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import PLAIN, Crop, GridRule
from medseg.preprocess.crop import body_box, crop_padded, pad_at_end
from medseg.preprocess.intensity import AIR, AIR_HU, normalise_hu
from medseg.preprocess.resample import resample_image, resample_labels

CropOf = Callable[[CachedCase, Region, np.random.Generator | None], Crop]
SpacingOf = Callable[[CachedCase, np.random.Generator | None], tuple[float, float, float] | None]
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

    def body(self) -> VoxelBox:
        """Find the box of the body."""
        return body_box(self.image_hu, self.grid.spacing_mm)

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


class _Samples(Dataset[Sample]):
    """Samples of one stage: their order, intensity window, augmentation and reading; a subclass chooses the crop.

    Samples 0 … len−1 go once through all items in a random order, the next len samples again in another one, and so on;
    n has no upper end.
    """

    # Whether a warp reads beyond the crop, or finds air there.
    reads_around = False
    is_mirrored = False

    def __init__(
        self,
        items: Sequence[tuple[CachedCase, int]],
        task: Task,
        seed: int,
        augmentation: Transforms | None,
        jitter: bool,
        weights: Sequence[float] | None,
    ) -> None:
        self.items, self.task, self.seed = items, task, seed
        self.augmentation, self.jitter = augmentation, jitter
        self.weights = normalised_weights(weights, len(items))

    def __len__(self) -> int:
        """Items of one pass."""
        return len(self.items)

    def __getitem__(self, n: int) -> Sample:
        """Make sample n, n ≥ 0."""
        case, number = self.items[draw_from_pass(self.seed, n, self.weights)]
        rng = sample_rng(self.seed, n)
        with one_thread():
            scan, crop = self._choose(case, number, rng)
            spacing_mm, window_hu, warp = crop.lattice.spacing_mm, self.task.window_hu, None
            if self.augmentation is not None:
                window_hu = self.augmentation.draw_window(rng, window_hu)
                warp = self.augmentation.draw_warp(rng, spacing_mm)
            shape, source = crop.box.shape, crop
            if warp is not None and self.reads_around:
                # A warp samples beyond the crop. The scan is read there too, so that no false air comes in at the corners.
                source = crop._replace(box=crop.box.expanded(warp.margin(shape)))
            image, labels = scan.read(source, window_hu, self.task.num_classes)
            target = self._target(labels, number)
            part = crop.box.intersect(crop.lattice.centres_within(scan.grid))
            inside = torch.tensor(list(zip(part.start, part.stop, strict=True))) - torch.tensor(crop.box.start)[:, None]
            if self.is_mirrored and self.task.regions[number].side == "right":
                image, target = image.flip(3), target.flip(2)
                inside[2] = shape[2] - inside[2].flip(0)
            if warp is not None:
                image, target = warp.apply(image, target, shape)
            if self.augmentation is not None:
                image, target = self.augmentation.alter(image, target, rng, spacing_mm)
        return {"image": image, "target": target, "inside": inside, "region": number, "case": case.name, "spacing_mm": spacing_mm}

    def _choose(self, case: CachedCase, number: int, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose the scan and the crop of a sample."""
        raise NotImplementedError

    def _target(self, labels: Tensor, number: int) -> Tensor:
        """Turn the labels of the task into the classes of the network."""
        return labels


class CoarseSamples(_Samples):
    """Whole volumes, cut to the body, for the coarse stage; sample n depends on (seed, n) alone.

    Args:
        cases: Cases with labels.
        task: Labels, regions and HU window.
        seed: Seed of the run.
        divisor: The shape is filled at its end to multiples of it, (z, y, x).
        rule: How the network's grid is laid on the cache's.
        spacings: Gives the spacing of a sample; None is that of the cache.
        augmentation: None for validation.
        jitter: Whether `spacings` gets the generator of the sample.
        max_voxels: Upper bound on the voxels of a padded sample; a longer volume is cut to a random range of slices.
        slab_share: Share of samples that are cut to a random range of slices, as if no more had been scanned.
        weights: How often each case is drawn in relation to the others, > 0; None draws all equally.

    Raises:
        ValueError: If there is no case, or a weight is not positive.
    """

    def __init__(
        self,
        cases: Sequence[CachedCase],
        task: Task,
        *,
        seed: int,
        divisor: tuple[int, int, int],
        rule: GridRule = PLAIN,
        spacings: SpacingOf | None = None,
        augmentation: Transforms | None = None,
        jitter: bool = True,
        max_voxels: int | None = None,
        slab_share: float = 0.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__([(case, 0) for case in cases], task, seed, augmentation, jitter, weights)
        self.divisor, self.rule, self.spacings = divisor, rule, spacings
        self.max_voxels, self.slab_share = max_voxels, slab_share

    def _choose(self, case: CachedCase, number: int, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose a whole case or a slab of it, and the crop of it."""
        scan = _Scan(case.image_hu, case.labels, case.grid, case.resampling)
        body = scan.body()
        if self.rule != PLAIN:
            spacing_mm = self.spacings(case, rng if self.jitter else None) if self.spacings is not None else None
            if rng.random() < self.slab_share:
                num_slices = max(1, int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0)))
                first = body.start[0] + int(rng.integers(0, body.shape[0] - num_slices, endpoint=True))
                stop = first + num_slices
                grid = scan.grid.crop(VoxelBox((first, 0, 0), (stop, *scan.grid.shape[1:])))
                scan = scan._replace(image_hu=scan.image_hu[first:stop], labels=scan.labels[first:stop], grid=grid)
                body = scan.body()
            lattice = scan.grid.resampled(spacing_mm)
            body = lattice.box_from(scan.grid, body)
            return scan, self._cut_to_bound(self.rule.crop(body, lattice, (1, 1, 1), self.divisor), body, rng)
        shape, step = filled(body.shape, self.divisor), self.divisor[0]
        if rng.random() < self.slab_share:
            num_slices = int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0))
            shape = (max(step, num_slices // step * step), *shape[1:])
        depth = self._bounded_depth(shape)
        z = int(rng.integers(0, max(0, body.shape[0] - depth), endpoint=True))
        return scan, Crop(scan.grid, VoxelBox.full((depth, *shape[1:])).shifted(body.start).shifted((z, 0, 0)))

    def _cut_to_bound(self, crop: Crop, body: VoxelBox, rng: np.random.Generator) -> Crop:
        """Keep a random range of slices where a crop has more voxels than `max_voxels`; of the body, where it is long enough."""
        shape = filled(crop.box.shape, self.divisor)
        if self.max_voxels is None or math.prod(shape) <= self.max_voxels:
            return crop
        depth = self._bounded_depth(shape)
        whole = body if body.shape[0] >= depth else crop.box
        z = whole.start[0] + int(rng.integers(0, max(0, whole.shape[0] - depth), endpoint=True))
        return Crop(crop.lattice, VoxelBox((z, *crop.box.start[1:]), (z + depth, *crop.box.stop[1:])))

    def _bounded_depth(self, shape: tuple[int, int, int]) -> int:
        """Count the slices, a multiple of the divisor, that a filled shape keeps under `max_voxels`."""
        if self.max_voxels is None or math.prod(shape) <= self.max_voxels:
            return shape[0]
        step = self.divisor[0]
        return max(step, self.max_voxels // math.prod(shape[1:]) // step * step)


class FineSamples(_Samples):
    """Patches (or whole crops) of one region for the fine stage; sample n depends on (seed, n) alone.

    A pass goes once through all pairs of a case and a region that the case has. The labels of the region become 1, 2, …
    in the order of the region's labels, those of other regions background.

    Args:
        cases: Cases with labels.
        task: Labels, regions and HU window.
        seed: Seed of the run.
        crops: Gives the crop of a region as prediction cuts it, jittered when it gets a generator.
        patch_size: Shape of a sample, (D, H, W); None takes the whole crop.
        augmentation: None for validation.
        jitter: Whether `crops` gets the generator of the sample.
        is_mirrored: Whether regions on the patient's right are mirrored along x, so that all look like left ones.
        boundary_share: Share of patches that are placed so that they hold a voxel at the boundary of the region.
        elsewhere_share: Share of samples that are cut anywhere in the scan, whether the region is there or not.
        weights: How often each case is drawn in relation to the others, > 0; None draws all equally.

    Raises:
        ValueError: If no case has a region, or a weight is not positive.
    """

    reads_around = True

    def __init__(
        self,
        cases: Sequence[CachedCase],
        task: Task,
        *,
        seed: int,
        crops: CropOf,
        patch_size: tuple[int, int, int] | None,
        augmentation: Transforms | None = None,
        jitter: bool = True,
        is_mirrored: bool = False,
        boundary_share: float = 0.5,
        elsewhere_share: float = 0.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        found = [
            ((case, number), weight)
            for case, weight in zip(cases, [1.0] * len(cases) if weights is None else weights, strict=True)
            for number, region in enumerate(task.regions)
            if region.name in case.region_boxes
        ]
        drawn = None if weights is None else [weight for _, weight in found]
        super().__init__([pair for pair, _ in found], task, seed, augmentation, jitter, drawn)
        self.crops, self.patch_size, self.is_mirrored = crops, patch_size, is_mirrored
        self.boundary_share, self.elsewhere_share = boundary_share, elsewhere_share

    def _choose(self, case: CachedCase, number: int, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose the crop of the region, a patch of it, or one from elsewhere."""
        region = self.task.regions[number]
        crop = self.crops(case, region, rng if self.jitter else None)
        if rng.random() < self.elsewhere_share:
            size, within = self.patch_size or crop.box.shape, crop.lattice.centres_within(case.grid)
            rests = [whole - part for whole, part in zip(within.shape, size, strict=True)]
            # About the centre of an axis that is shorter.
            place = [int(rng.integers(0, rest, endpoint=True)) if rest >= 0 else rest // 2 for rest in rests]
            crop = crop._replace(box=VoxelBox.full(size).shifted(within.start).shifted(place))
        elif self.patch_size is not None:
            crop = crop._replace(box=self._patch_box(case, region, crop, self.patch_size, rng))
        return _Scan(case.image_hu, case.labels, case.grid, case.resampling), crop

    def _target(self, labels: Tensor, number: int) -> Tensor:
        return torch.from_numpy(self._region_classes(self.task.regions[number])[labels.numpy()])

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
    """Keep a loader worker to one thread, and let it outlive signals to its process group (`worker_init_fn`).

    The training process saves and then ends its workers; it could not save if they ended first.
    """
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
