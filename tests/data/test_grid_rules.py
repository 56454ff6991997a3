"""Samples whose grid is not that of the cache: the cache resampled, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ct_effects import effects

from medseg.data.cache import CachedCase
from medseg.data.crops import StageCrops
from medseg.data.samples import Sample, Samples, collate
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop, GridRule, region_crop
from medseg.preprocess.intensity import normalise_hu
from medseg.preprocess.resample import resample_image, resample_labels
from medseg.task import Region, Task

from .conftest import GivenCrops, as_stored, stage_of

SIZE = (24, 32, 16)
AUGMENTATION = effects(
    affine_probability=0.8, noise_probability=0.5, low_resolution_probability=0.5
)


def crops_of(rule: GridRule, margin_mm: float = 9.0) -> GivenCrops:
    """Crops as the data module cuts them, jittered by up to a voxel."""

    def crop(case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        offset = (0, 0, 0) if rng is None else tuple(int(v) for v in rng.integers(-1, 2, size=3))
        tight = case.region_boxes[region.name].shifted(offset)
        return region_crop(tight, case.grid, case.grid, margin_mm, None, (8, 8, 8), rule)

    return GivenCrops(of=crop)


def fine(cases: list[CachedCase], task: Task, crops: StageCrops, **arguments: Any) -> Samples:
    options: dict[str, Any] = {"seed": 3, "boundary_share": 0.5} | arguments
    return Samples(cases, task, crops, stage_of("fine", options), **options)


def coarse(cases: list[CachedCase], task: Task, rule: GridRule, **arguments: Any) -> Samples:
    return Samples(
        cases,
        task,
        StageCrops(rule, divisor=(8, 8, 8)),
        stage_of("coarse", arguments),
        seed=3,
        **arguments,
    )


def expected(
    case: CachedCase, region: Region, crop: Crop, task: Task
) -> tuple[np.ndarray, np.ndarray]:
    """Image and target of a crop, resampled from the cache; beyond the scan its slices go on."""
    image = resample_image(
        np.array(case.image_hu), case.grid, crop.grid, -1024.0, slices_go_on=True
    )
    labels = resample_labels(
        np.array(case.labels), case.grid, crop.grid, task.num_classes, slices_go_on=True
    )
    return normalise_hu(image, task.window_hu).numpy(), (labels == task.labels[region.name]).numpy()


def is_same(first: Sample, second: Sample) -> bool:
    tensors = all(torch.equal(first[key], second[key]) for key in ("image", "target", "inside"))
    return tensors and first["case"] == second["case"] and first["region"] == second["region"]


@pytest.mark.parametrize("margin_mm", [3.0, 40.0])
def test_a_sample_of_fixed_size_is_the_region_resized(
    margin_mm: float, cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    crops = crops_of(GridRule(size=SIZE), margin_mm)
    samples = fine(cached_cases, task, crops, jitter=False)
    for n in range(5):
        sample = samples[n]
        case, region = by_name[sample["case"]], task.regions[sample["region"]]
        crop = crops.crop(case, region, None)
        image, target = expected(case, region, crop, task)
        assert sample["target"].shape == SIZE
        assert sample["spacing_mm"] == crop.grid.spacing_mm
        assert np.array_equal(as_stored(sample["image"][0], region), image)
        assert np.array_equal(as_stored(sample["target"], region), target)
        if margin_mm < 10:  # fine enough to measure a volume with
            volume_mm3 = float(target.sum()) * np.prod(crop.grid.spacing_mm)
            assert volume_mm3 == pytest.approx(
                np.count_nonzero(case.labels == task.labels[region.name])
                * np.prod(case.grid.spacing_mm),
                rel=0.08,
            )
        # Voxel by voxel: which centres lie in the scan.
        middle = (np.array(case.grid.shape) - 1) / 2
        index = np.stack(np.meshgrid(*map(np.arange, SIZE), indexing="ij"), -1)
        place = case.grid.world_to_index_zyx(crop.grid.index_to_world_xyz_mm(index))
        inside = torch.zeros(SIZE, dtype=torch.bool)
        inside[tuple(slice(int(start), int(stop)) for start, stop in sample["inside"])] = True
        assert np.array_equal(
            as_stored(inside, region), (np.abs(place - middle) <= middle + 0.5 + 1e-6).all(-1)
        )


def test_samples_from_elsewhere_lie_in_the_scan_whatever_the_grid(
    cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    size, patch = (40, 48, 40), (8, 12, 10)
    samples = fine(
        cached_cases, task, crops_of(GridRule(size=size)), patch_size=patch, elsewhere_share=1.0
    )
    empty = 0
    for n in range(30):
        sample = samples[n]
        case = by_name[sample["case"]]
        longer = np.multiply(patch, sample["spacing_mm"]) > np.multiply(
            case.grid.shape, case.grid.spacing_mm
        )
        assert not longer.any(), "the scans hold such patches"
        assert sample["inside"].tolist() == [[0, part] for part in patch]
        empty += not sample["target"].any()
    assert 3 < empty < 27, "with the region and without it"


def test_samples_of_one_size_stack_without_filling(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = fine(
        cached_cases,
        task,
        crops_of(GridRule(size=SIZE)),
        augmentation=AUGMENTATION,
        elsewhere_share=0.3,
    )
    (batch,) = collate([samples[n] for n in range(6)], (8, 8, 8))
    assert batch["image"].shape == (6, 1, *SIZE)
    assert batch["target"].shape == (6, *SIZE)
    assert len(set(batch["spacing_mm"])) > 3, "each region has a spacing of its own"


def test_a_patch_is_cut_out_of_the_resized_crop_and_meets_the_boundary(
    cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    crops, patch = crops_of(GridRule(size=SIZE)), (8, 12, 10)
    samples = fine(cached_cases, task, crops, patch_size=patch, jitter=False, boundary_share=1.0)
    places = set()
    for n in range(20):
        sample = samples[n]
        case, region = by_name[sample["case"]], task.regions[sample["region"]]
        image, target = expected(case, region, crops.crop(case, region, None), task)
        windows = np.lib.stride_tricks.sliding_window_view(image, patch)
        (place,) = np.argwhere(
            np.isclose(
                windows, as_stored(sample["image"][0], region).numpy(), rtol=0, atol=1e-5
            ).all((3, 4, 5))
        )
        box = VoxelBox(tuple(place), tuple(place + patch))
        assert np.array_equal(as_stored(sample["target"], region), target[box.slices()])
        assert sample["target"].any()
        places.add((n % 5, tuple(place)))
    assert len(places) > 15


@pytest.mark.parametrize("slab_share", [0.0, 1.0])
def test_a_coarse_sample_of_fixed_size_is_the_body_or_a_slab_of_it_resized(
    slab_share: float, cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    samples, fresh = (
        coarse(cached_cases, task, GridRule(size=SIZE), slab_share=slab_share) for _ in range(2)
    )
    extents = set()
    for n in range(12):
        sample = samples[n]
        assert is_same(sample, fresh[n])
        case = by_name[sample["case"]]  # tissue from end to end: the body is the scan
        assert sample["target"].shape == SIZE
        assert sample["inside"].tolist() == [[0, size] for size in SIZE]
        extent_mm = np.multiply(SIZE, sample["spacing_mm"])
        whole_mm = np.multiply(case.grid.shape, case.grid.spacing_mm)
        np.testing.assert_allclose(extent_mm[1:], whole_mm[1:])
        num_slices = extent_mm[0] / case.grid.spacing_mm[0]
        assert num_slices == pytest.approx(round(num_slices))
        extents.add((case.name, round(num_slices)))
        matches = []
        for start in range(case.grid.shape[0] - round(num_slices) + 1):
            box = VoxelBox((start, 0, 0), (start + round(num_slices), *case.grid.shape[1:]))
            part = case.grid.crop(box)  # and no more: as if nothing beyond it had been scanned
            target = resample_labels(
                np.array(case.labels)[box.slices()], part, part.resized(SIZE), task.num_classes
            )
            matches.append(torch.equal(target, sample["target"]))
        assert any(matches)
    lengths = {by_name[name].grid.shape[0] == length for name, length in extents}
    assert lengths == {slab_share == 0} or (
        slab_share == 1 and False in lengths and len(extents) > 4
    )


def isotropic(cases: list[CachedCase]) -> list[CachedCase]:
    return [replace(case, grid=replace(case.grid, spacing_mm=(2.0, 2.0, 2.0))) for case in cases]


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_sample_of_fixed_resolution_is_a_cube_of_what_was_scanned(
    is_padded: bool, cached_cases: list[CachedCase], task: Task
) -> None:
    cases = isotropic(cached_cases)
    by_name = {case.name: case for case in cases}
    crops = crops_of(GridRule(is_cube=True, is_padded=is_padded))
    samples = fine(cases, task, crops, jitter=False)
    for n in range(5):
        sample = samples[n]
        case, region = by_name[sample["case"]], task.regions[sample["region"]]
        box = crops.crop(case, region, None).box
        # The margin of 9 mm is five voxels of 2 mm on each side; the edge is a multiple of 8.
        longest = max(case.region_boxes[region.name].shape) + 2 * 5
        edge = 8 * math.ceil(longest / 8)
        assert sample["target"].shape == (edge, edge, edge)
        assert sample["spacing_mm"] == (2.0, 2.0, 2.0)
        image = normalise_hu(np.array(case.image_hu), task.window_hu)
        content = case.region_boxes[region.name].expanded((5, 5, 5))
        places = np.indices((edge, edge, edge)) + np.reshape(box.start, (3, 1, 1, 1))
        # The first and the last plane go on above and below the scan.
        ends = np.reshape(image.shape, (3, 1, 1, 1)) - 1
        is_in = ((places >= 0) & (places <= ends))[1:].all(0)
        if is_padded:
            is_in &= (places >= np.reshape(content.start, (3, 1, 1, 1))).all(0)
            is_in &= (places < np.reshape(content.stop, (3, 1, 1, 1))).all(0)
        expected_image = np.where(is_in, image[tuple(np.clip(places, 0, ends))], -1)
        assert np.array_equal(as_stored(sample["image"][0], region), expected_image)


@pytest.mark.parametrize(
    ("slab_share", "max_voxels"), [(0.0, None), (1.0, None), (0.0, 16 * 48**2), (1.0, 16 * 48**2)]
)
def test_a_coarse_sample_of_fixed_resolution_is_a_cube_about_the_body_or_a_slab(
    slab_share: float, max_voxels: int | None, cached_cases: list[CachedCase], task: Task
) -> None:
    cases = isotropic(cached_cases)
    by_name = {case.name: case for case in cases}
    samples = coarse(
        cases, task, GridRule(is_cube=True), slab_share=slab_share, max_voxels=max_voxels
    )
    scanned = set()
    for n in range(20):
        sample = samples[n]
        whole = normalise_hu(np.array(by_name[sample["case"]].image_hu), task.window_hu)
        depth, height, width = sample["target"].shape
        # Of the three scans x is always the longest axis; tissue from end to end, so that the body
        # is the scan.
        assert height == width == whole.shape[2]
        assert depth == (width if max_voxels is None else 16), (
            "as many slices as the bound lets through"
        )
        assert max_voxels is None or -(-depth // 8) * (-(-width // 8)) ** 2 * 512 <= max_voxels
        (first, stop), (y_first, y_stop), _ = sample["inside"].tolist()
        assert y_first == (height - whole.shape[1]) // 2
        assert y_stop - y_first == whole.shape[1]
        image = sample["image"][0, :, y_first:y_stop].numpy()
        part = image[first:stop]
        start = [
            z
            for z in range(len(whole) - len(part) + 1)
            if np.array_equal(part, whole[z : z + len(part)])
        ]
        assert len(start) == 1
        assert (image[:first] == image[first]).all(), (
            "beyond the slab its end slices go on, though the scan does too"
        )
        assert (image[stop:] == image[stop - 1]).all()
        scanned.add((sample["case"], start[0], len(part)))
        if slab_share == 0 and max_voxels is None:
            assert len(part) == len(whole)
    assert len(scanned) == 3 if slab_share == 0 and max_voxels is None else len(scanned) > 6


@pytest.mark.parametrize("patch_size", [None, (8, 16, 8)])
def test_a_sample_depends_on_seed_and_number_alone(
    patch_size: tuple[int, int, int] | None, cached_cases: list[CachedCase], task: Task
) -> None:
    options = {"augmentation": AUGMENTATION, "patch_size": patch_size, "elsewhere_share": 0.3}
    samples, fresh, other = (
        fine(cached_cases, task, crops_of(GridRule(size=SIZE)), **options, seed=seed)
        for seed in (3, 3, 4)
    )
    in_order = [samples[n] for n in range(8)]
    backwards = [fresh[n] for n in reversed(range(8))][::-1]
    assert all(is_same(a, b) for a, b in zip(in_order, backwards, strict=True))
    assert not any(is_same(a, other[n]) for n, a in enumerate(in_order))


def test_a_scan_of_fewer_slices_than_a_bounded_crop_stays_in_it(
    cached_cases: list[CachedCase], task: Task
) -> None:
    case = cached_cases[0]
    for name, array in (("image", case.image_hu), ("labels", case.labels)):
        np.save(case.folder / f"{name}.npy", np.array(array)[:5])
    grid = VoxelGrid((5, *case.grid.shape[1:]), (4.0, 1.5, 2.0))
    thin = replace(case, grid=grid, audit=replace(case.audit, grid=grid))
    samples = coarse([thin], task, GridRule(range_mm=(1.0, 4.0)), max_voxels=1, jitter=False)
    assert samples[0]["inside"][0].tolist() == [0, 5]
    assert len(samples[0]["target"]) == 8
