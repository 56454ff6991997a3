"""Training samples as functions of their number: which case, which region, which patch, which augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medseg.data.augment import AIR, Augmentation
from medseg.data.cache import AIR_HU, CachedCase
from medseg.data.randomness import ORDER, sample_rng
from medseg.data.task import Region, Task
from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import PLAIN, Crop, GridRule
from medseg.preprocess.crop import body_box, crop_padded, pad_at_end
from medseg.preprocess.intensity import normalise_hu
from medseg.preprocess.resample import resample_image, resample_labels

CropOf = Callable[[CachedCase, Region, np.random.Generator | None], Crop]
SpacingOf = Callable[[CachedCase, np.random.Generator], tuple[float, float, float] | None]
# Slices that are searched for a boundary of the region before any place is taken.
BOUNDARY_TRIES = 8
# Smallest part of a volume that is taken for a scan of its own.
LEAST_SLAB = 0.15


class Sample(TypedDict):
    """One training sample.

    image (1, D, H, W) float32 in [-1, 1]; target (D, H, W) uint8; inside (3, 2) int64: start and stop of the scan in the
    sample per axis (z, y, x), before any augmentation: beyond it there is nothing to be right or wrong about; region:
    number of the region in the task (0 for the coarse stage); case: name of the case; spacing_mm: of the sample, (z, y, x).
    """

    image: Tensor
    target: Tensor
    inside: Tensor
    region: int
    case: str
    spacing_mm: tuple[float, float, float]


class Batch(TypedDict):
    """Samples on one shape: image (N, 1, D, H, W), target (N, D, H, W), inside (N, 3, 2), region (N,) int64, case: names, spacing_mm."""

    image: Tensor
    target: Tensor
    inside: Tensor
    region: Tensor
    case: list[str]
    spacing_mm: list[tuple[float, float, float]]


class _Scan(NamedTuple):
    """What counts as scanned: a case of the cache, or a slab of one.

    Attributes:
        image_hu: Memory map (D, H, W), int16.
        labels: Memory map (D, H, W), uint8.
        grid: Grid of both.
        resampling: Filter that brings the image to a grid that is laid anew.
    """

    image_hu: np.ndarray
    labels: np.ndarray
    grid: VoxelGrid
    resampling: str

    @classmethod
    def of(cls, case: CachedCase) -> _Scan:
        """All of a case."""
        return cls(case.image_hu, case.labels, case.grid, case.resampling)

    def slab(self, first: int, stop: int) -> _Scan:
        """Some of the slices, as if no more had been scanned; nothing is read."""
        box = VoxelBox((first, 0, 0), (stop, *self.grid.shape[1:]))
        return self._replace(image_hu=self.image_hu[first:stop], labels=self.labels[first:stop], grid=self.grid.crop(box))


class CoarseSamples(Dataset[Sample]):
    """Whole volumes, cut to the body, for the coarse stage; sample n depends on (seed, n) alone.

    Samples 0 … len−1 go once through all cases in a random order, the next len samples again in another one, and so on;
    n has no upper end.

    Args:
        cases: Cases with labels.
        task: What is segmented.
        seed: Seed of the run.
        divisor: The shape is filled at its end to multiples of it, (z, y, x).
        rule: How the network's grid is laid on the cache's.
        spacings: Gives the spacing of a sample, where that is not the cache's.
        augmentation: None for validation.
        max_voxels: Upper bound on the voxels of a padded sample; a longer volume is cut to a random range of slices.
        slab_probability: How often a volume is cut to a random range of slices, as if no more had been scanned.
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
        spacings: SpacingOf = lambda _case, _rng: None,
        augmentation: Augmentation | None = None,
        max_voxels: int | None = None,
        slab_probability: float = 0.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.cases = list(cases)
        self.task = task
        self.seed = seed
        self.divisor = divisor
        self.rule = rule
        self.spacings = spacings
        self.augmentation = augmentation
        self.max_voxels = max_voxels
        self.slab_probability = slab_probability
        self.weights = _checked_weights(weights, len(self.cases))

    def __len__(self) -> int:
        """Cases of one pass."""
        return len(self.cases)

    def __getitem__(self, n: int) -> Sample:
        """Make sample n, n ≥ 0."""
        case = self.cases[draw_from_pass(self.seed, n, self.weights)]
        rng = sample_rng(self.seed, n)
        with one_thread():
            scan, crop = self._look(case, rng)
            spacing_mm = crop.lattice.spacing_mm
            window_hu = self.task.window_hu
            if self.augmentation is not None:
                window_hu = self.augmentation.draw_window(rng, window_hu)
            image = _read_image(scan, crop, window_hu)
            target = torch.from_numpy(_read_labels(scan, crop, self.task))
            if self.augmentation is not None:
                image, target = self.augmentation(image, target, rng, spacing_mm)
        inside = _inside(scan, crop)
        return {"image": image, "target": target, "inside": inside, "region": 0, "case": case.name, "spacing_mm": spacing_mm}

    def _look(self, case: CachedCase, rng: np.random.Generator) -> tuple[_Scan, Crop]:
        """Choose what counts as scanned, and the crop of it."""
        scan = _Scan.of(case)
        body = body_box(scan.image_hu, scan.grid.spacing_mm)
        if self.rule != PLAIN:
            spacing_mm = self.spacings(case, rng)
            if rng.random() < self.slab_probability:
                num_slices = max(1, int(body.shape[0] * rng.uniform(LEAST_SLAB, 1.0)))
                first = body.start[0] + int(rng.integers(0, body.shape[0] - num_slices, endpoint=True))
                scan = scan.slab(first, first + num_slices)
                body = body_box(scan.image_hu, scan.grid.spacing_mm)
            lattice = scan.grid.resampled(spacing_mm)
            body = lattice.box_from(scan.grid, body)
            return scan, self._cut_to_bound(self.rule.crop(body, lattice, (1, 1, 1), self.divisor), body, rng)
        depth, height, width = self._filled(body.shape)
        z, y, x = body.start
        step, num_slices = self.divisor[0], body.shape[0]
        if rng.random() < self.slab_probability:
            num_slices = int(num_slices * rng.uniform(LEAST_SLAB, 1.0))
            depth = max(step, num_slices // step * step)
        if self.max_voxels is not None and depth * height * width > self.max_voxels:
            depth = max(step, self.max_voxels // (height * width) // step * step)
        z += int(rng.integers(0, max(0, body.shape[0] - depth), endpoint=True))
        return scan, Crop(scan.grid, VoxelBox((z, y, x), (z + depth, y + height, x + width)))

    def _cut_to_bound(self, crop: Crop, body: VoxelBox, rng: np.random.Generator) -> Crop:
        """Keep a random range of slices where a crop has more voxels than it may; of the body, where that has enough of them."""
        depth, height, width = self._filled(crop.box.shape)
        if self.max_voxels is None or depth * height * width <= self.max_voxels:
            return crop
        step = self.divisor[0]
        depth = max(step, self.max_voxels // (height * width) // step * step)
        whole = body if body.shape[0] >= depth else crop.box
        z = whole.start[0] + int(rng.integers(0, max(0, whole.shape[0] - depth), endpoint=True))
        return Crop(crop.lattice, VoxelBox((z, *crop.box.start[1:]), (z + depth, *crop.box.stop[1:])))

    def _filled(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Shape of a sample once it is filled to multiples of the divisor."""
        z, y, x = (math.ceil(size / step) * step for size, step in zip(shape, self.divisor, strict=True))
        return z, y, x


class FineSamples(Dataset[Sample]):
    """Patches (or whole crops) of one region for the fine stage; sample n depends on (seed, n) alone.

    A pass goes once through all pairs of a case and a region that the case has. The labels of the region become 1, 2, …
    in the order of the region's labels, those of other regions background.

    Args:
        cases: Cases with labels.
        task: What is segmented.
        seed: Seed of the run.
        crops: Gives the crop of a region, as prediction would cut it; jittered when it gets a generator.
        patch_size: Shape of a sample, (D, H, W); None takes the whole crop.
        augmentation: None for validation.
        jitter: Whether `crops` gets the generator of the sample.
        mirror: Whether regions on the patient's right are mirrored along x, so that all look like left ones.
        boundary_probability: How often a patch is placed so that it holds a voxel at the boundary of the region.
        elsewhere_probability: How often a sample is cut anywhere in the scan, whether the region is there or not.
        weights: How often each case is drawn in relation to the others, > 0; None draws all equally.

    Raises:
        ValueError: If no case has a region, or a weight is not positive.
    """

    def __init__(
        self,
        cases: Sequence[CachedCase],
        task: Task,
        *,
        seed: int,
        crops: CropOf,
        patch_size: tuple[int, int, int] | None,
        augmentation: Augmentation | None = None,
        jitter: bool = True,
        mirror: bool = False,
        boundary_probability: float = 0.5,
        elsewhere_probability: float = 0.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.task = task
        self.seed = seed
        self.crops = crops
        self.patch_size = patch_size
        self.augmentation = augmentation
        self.jitter = jitter
        self.mirror = mirror
        self.boundary_probability = boundary_probability
        self.elsewhere_probability = elsewhere_probability
        by_case = [1.0] * len(cases) if weights is None else list(weights)
        self.pairs = [
            (case, number, weight)
            for case, weight in zip(cases, by_case, strict=True)
            for number, region in enumerate(task.regions)
            if region.name in case.region_boxes
        ]
        by_pair = None if weights is None else [weight for _, _, weight in self.pairs]
        self.weights = _checked_weights(by_pair, len(self.pairs))

    def __len__(self) -> int:
        """Pairs of a case and a region of one pass."""
        return len(self.pairs)

    def __getitem__(self, n: int) -> Sample:
        """Make sample n, n ≥ 0."""
        case, number, _ = self.pairs[draw_from_pass(self.seed, n, self.weights)]
        region = self.task.regions[number]
        rng = sample_rng(self.seed, n)
        with one_thread():
            grid, box = self.crops(case, region, rng if self.jitter else None)
            if rng.random() < self.elsewhere_probability:
                box = _random_box(self.patch_size or box.shape, grid.centres_within(case.grid), rng)
            elif self.patch_size is not None:
                box = self._patch_box(case, region, Crop(grid, box), rng)
            window_hu, warp, spacing_mm = self.task.window_hu, None, grid.spacing_mm
            if self.augmentation is not None:
                window_hu = self.augmentation.draw_window(rng, window_hu)
                warp = self.augmentation.draw_warp(rng, spacing_mm)
            # A warp sees beyond the patch: what is there is read, so that no false air comes in at the corners.
            source_box = box if warp is None else box.expanded(warp.margin(box.shape))

            scan = _Scan.of(case)
            image = _read_image(scan, Crop(grid, source_box), window_hu)
            target = torch.from_numpy(self._region_classes(region)[_read_labels(scan, Crop(grid, source_box), self.task)])
            inside = _inside(scan, Crop(grid, box))
            if self.mirror and region.side == "right":
                image, target = image.flip(3), target.flip(2)
                inside[2] = box.shape[2] - inside[2].flip(0)
            if warp is not None:
                image, target = warp.apply(image, target, box.shape)
            if self.augmentation is not None:
                image, target = self.augmentation.alter(image, target, rng, spacing_mm)
        return {"image": image, "target": target, "inside": inside, "region": number, "case": case.name, "spacing_mm": spacing_mm}

    def _region_classes(self, region: Region) -> np.ndarray:
        """Table from a label value of the task to the class of the fine network."""
        classes = np.zeros(256, dtype=np.uint8)
        for index, value in enumerate(self.task.region_values(region)):
            classes[value] = index + 1
        return classes

    def _patch_box(self, case: CachedCase, region: Region, crop: Crop, rng: np.random.Generator) -> VoxelBox:
        """Place a patch in the crop, in voxels of its lattice; where the crop is shorter than the patch, about its centre."""
        assert self.patch_size is not None
        # Drawn in any case, so that the place does not depend on whether a boundary is found.
        place = rng.random(3)
        wants_boundary = rng.random() < self.boundary_probability
        voxel = self._boundary_voxel(case, region, crop, rng) if wants_boundary else None
        start: list[int] = []
        for axis, (low, stop, size) in enumerate(zip(crop.box.start, crop.box.stop, self.patch_size, strict=True)):
            high = stop - size
            if high < low:
                start.append((low + high) // 2)
                continue
            first, last = low, high
            if voxel is not None:
                first, last = max(low, voxel[axis] - size + 1), min(high, voxel[axis])
            start.append(first + int(place[axis] * (last - first + 1)))
        z, y, x = start
        depth, height, width = self.patch_size
        return VoxelBox((z, y, x), (z + depth, y + height, x + width))

    def _boundary_voxel(
        self, case: CachedCase, region: Region, crop: Crop, rng: np.random.Generator
    ) -> tuple[int, int, int] | None:
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
            # One slice is read, not the crop. Beyond the tight box there is no voxel of the region, hence the padding.
            mask = np.pad(classes[labels[z, y_slice, x_slice]] > 0, 1)
            around = mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
            places = np.argwhere(mask[1:-1, 1:-1] & ~around)
            if len(places):
                y, x = places[rng.integers(len(places))]
                centre = (z, inner.start[1] + int(y), inner.start[2] + int(x))
                z, y, x = (
                    round(scale * index + offset)
                    for index, (scale, offset) in zip(centre, case.grid.axis_map_to(crop.lattice), strict=True)
                )
                return z, y, x
        return None


def draw_from_pass(seed: int, n: int, weights: np.ndarray | int) -> int:
    """Say which of K items sample n takes.

    Sample n belongs to pass n // K. Without weights each pass is a permutation. With weights w (sum 1) an item comes
    K·w times in a pass on average, and never more than one time off: the pass walks along the items, in random order,
    in equal steps from a random start (systematic sampling), and the drawn ones are shuffled.

    Args:
        seed: Seed of the run.
        n: Number of the sample.
        weights: K, or the weights (K,), > 0, sum 1.

    Returns:
        Index of the item, 0 ≤ index < K.
    """
    count = weights if isinstance(weights, int) else len(weights)
    turn, place = divmod(n, count)
    rng = sample_rng(seed, turn, ORDER)
    order = rng.permutation(count)
    if isinstance(weights, int):
        return int(order[place])
    ends = np.cumsum(weights[order])
    steps = (rng.random() + np.arange(count)) / count
    drawn = order[np.minimum(np.searchsorted(ends, steps, side="right"), count - 1)]
    return int(rng.permutation(drawn)[place])


def collate_padded(samples: Sequence[Sample], multiple: tuple[int, int, int] = (1, 1, 1)) -> Batch:
    """Stack samples of different shapes, filled at their end as in prediction.

    Args:
        samples: At least one sample.
        multiple: The common shape is the smallest multiple of it that holds all samples, (z, y, x).
    """
    largest = [max(sample["target"].shape[axis] for sample in samples) for axis in range(3)]
    shape = [math.ceil(size / step) * step for size, step in zip(largest, multiple, strict=True)]
    return {
        "image": torch.stack([pad_at_end(sample["image"], tuple(shape), AIR) for sample in samples]),
        "target": torch.stack([pad_at_end(sample["target"], tuple(shape), 0) for sample in samples]),
        "inside": torch.stack([sample["inside"] for sample in samples]),
        "region": torch.tensor([sample["region"] for sample in samples], dtype=torch.int64),
        "case": [sample["case"] for sample in samples],
        "spacing_mm": [sample["spacing_mm"] for sample in samples],
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: reductions and products differ in the last bit between thread counts."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def init_worker(_: int) -> None:
    """Keep a loader's worker to one thread (`worker_init_fn`)."""
    torch.set_num_threads(1)


def _random_box(size: tuple[int, int, int], within: VoxelBox, rng: np.random.Generator) -> VoxelBox:
    """Place a box of a size anywhere in another; about the centre of an axis that is shorter."""
    z, y, x = (
        start + (int(rng.integers(0, whole - part, endpoint=True)) if whole >= part else (whole - part) // 2)
        for start, whole, part in zip(within.start, within.shape, size, strict=True)
    )
    depth, height, width = size
    return VoxelBox((z, y, x), (z + depth, y + height, x + width))


def _inside(scan: _Scan, crop: Crop) -> Tensor:
    """Start and stop of the scan in a crop, (3, 2)."""
    part = crop.box.intersect(crop.lattice.centres_within(scan.grid))
    bounds = [(start - origin, stop - origin) for start, stop, origin in zip(part.start, part.stop, crop.box.start, strict=True)]
    return torch.tensor(bounds, dtype=torch.int64)


def _read_image(scan: _Scan, crop: Crop, window_hu: tuple[float, float]) -> Tensor:
    """Read and normalise a crop of the image, (1, D, H, W); only what it needs is read of the cache."""
    if crop.lattice == scan.grid:
        return torch.from_numpy(normalise_hu(crop_padded(scan.image_hu, crop.box, AIR_HU), window_hu))[None]
    resampled = resample_image(scan.image_hu, scan.grid, crop.grid, AIR_HU, resampling=scan.resampling, slices_go_on=True)
    return normalise_hu(resampled, window_hu)[None]


def _read_labels(scan: _Scan, crop: Crop, task: Task) -> np.ndarray:
    """Read a crop of the labels, (D, H, W) uint8."""
    if crop.lattice == scan.grid:
        return crop_padded(scan.labels, crop.box, 0)
    return resample_labels(scan.labels, scan.grid, crop.grid, task.num_classes, slices_go_on=True).numpy()


def _checked_weights(weights: Sequence[float] | None, count: int) -> np.ndarray | int:
    """Bring weights to the sum one; the plain count stands for equal weights."""
    if count == 0:
        raise ValueError("there is no case to take samples from")
    if weights is None:
        return count
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (count,) or not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise ValueError(f"expected {count} positive weights, got {list(weights)}")
    return values / values.sum()
