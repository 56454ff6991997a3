"""Samples of both stages: their content, their order and their place in the scan."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ct_effects import CT, effects
from torch.utils.data import DataLoader

from medseg.data.cache import CachedCase
from medseg.data.crops import StageCrops
from medseg.data.sampler import StepBatchSampler, draw_from_pass
from medseg.data.samples import Sample, Samples, collate, init_worker, one_thread
from medseg.errors import UserError
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import Crop, GridRule
from medseg.geometry.sizes import network_size
from medseg.preprocess.crop import crop_padded
from medseg.preprocess.intensity import normalise, normalise_hu, zscore
from medseg.task import Channel, Region, Task

from .conftest import GivenCrops, as_stored, stage_of

AUGMENTATION = effects(
    affine_probability=0.8, noise_probability=0.5, low_resolution_probability=0.5
)

Maker = Callable[..., Samples]


def wide_box(case: CachedCase, region: Region, rng: np.random.Generator | None) -> VoxelBox:
    """The tight box and three voxels, jittered by up to two, at least as large as the patches."""
    offset = (0, 0, 0) if rng is None else tuple(int(v) for v in rng.integers(-2, 3, size=3))
    box = case.region_boxes[region.name].expanded((3, 3, 3)).shifted(offset).at_least((16, 16, 16))
    return box.at_least(network_size(box.shape, (8, 8, 8)))


def on_the_cache(box_of: Callable[..., VoxelBox]) -> Callable[..., Crop]:
    return lambda case, region, rng: Crop(case.grid, box_of(case, region, rng))


def fine(
    cases: list[CachedCase],
    task: Task,
    box_of: Callable[..., VoxelBox] = wide_box,
    **arguments: object,
) -> Samples:
    options: dict = {
        "seed": 3,
        "patch_size": (8, 16, 8),
        "augmentation": AUGMENTATION,
        "boundary_share": 0.5,
    }
    options |= {"crops": GivenCrops(of=on_the_cache(box_of))} | arguments
    return Samples(cases, task, stage=stage_of("fine", options), **options)


def coarse(cases: list[CachedCase], task: Task, **arguments: object) -> Samples:
    options: dict = {
        "seed": 3,
        "crops": StageCrops(divisor=(8, 8, 8)),
        "augmentation": AUGMENTATION,
    } | arguments
    return Samples(cases, task, stage=stage_of("coarse", options), **options)


def is_same(first: Sample, second: Sample) -> bool:
    tensors = all(torch.equal(first[key], second[key]) for key in ("image", "target"))
    return tensors and first["case"] == second["case"] and first["region"] == second["region"]


@pytest.mark.parametrize("make", [coarse, fine])
def test_any_number_of_workers_gives_the_same_batches(
    make: Maker, cached_cases: list[CachedCase], task: Task
) -> None:
    samples = make(cached_cases, task)
    batches = []
    for num_workers in (0, 2):
        loader = DataLoader(
            samples,
            batch_sampler=StepBatchSampler(4, 2),
            num_workers=num_workers,
            worker_init_fn=init_worker,
            collate_fn=partial(collate, multiple=(8, 8, 8), is_stacked=False),
        )
        batches.append(list(loader))
    assert len(batches[0]) == 4
    # Each batch is a list of stacks.
    alone, by_workers = (
        [stack for batch in batches_of_loader for stack in batch] for batches_of_loader in batches
    )
    for stack, expected in zip(by_workers, alone, strict=True):
        assert all(torch.equal(stack[key], expected[key]) for key in ("image", "target", "region"))
        assert stack["case"] == expected["case"]


def test_data_sets_survive_pickling(cached_cases: list[CachedCase], task: Task) -> None:
    """Loader workers that start by `spawn` get the data set by pickle."""
    crops = StageCrops(
        region_margin_mm=4.0, box_jitter_mm=3.0, patch_size=(8, 16, 8), divisor=(8, 8, 8)
    )
    cubes = StageCrops(GridRule(is_cube=True), divisor=(8, 8, 8))
    for samples in (
        coarse(cached_cases, task, crops=cubes, max_voxels=40_000, slab_share=0.5),
        fine(cached_cases, task, crops=crops, weights=[1.0, 2.0, 1.0]),
    ):
        copied = pickle.loads(pickle.dumps(samples))
        assert all(is_same(samples[n], copied[n]) for n in range(6))


@pytest.mark.parametrize("make", [coarse, fine])
def test_a_sample_depends_on_seed_and_number_alone(
    make: Maker, cached_cases: list[CachedCase], task: Task
) -> None:
    samples, fresh = make(cached_cases, task), make(cached_cases, task)
    in_order = [samples[n] for n in range(8)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        backwards = [fresh[n] for n in reversed(range(8))][::-1]
        assert torch.get_num_threads() == 2, "sampling must give the threads back"
    finally:
        torch.set_num_threads(threads)
    assert all(is_same(a, b) for a, b in zip(in_order, backwards, strict=True))
    other_seed = make(cached_cases, task, seed=4)
    assert not any(is_same(in_order[n], other_seed[n]) for n in range(8))


@pytest.mark.parametrize("make", [coarse, fine])
def test_each_pass_takes_everything_once(
    make: Maker, cached_cases: list[CachedCase], task: Task
) -> None:
    samples = make(cached_cases, task, augmentation=None)
    assert len(samples) == {coarse: 3, fine: 5}[make]  # the third case has no left lung
    passes = [
        [
            (samples[n]["case"], samples[n]["region"])
            for n in range(turn * len(samples), (turn + 1) * len(samples))
        ]
        for turn in range(6)
    ]
    assert all(set(items) == set(passes[0]) and len(set(items)) == len(samples) for items in passes)
    assert len({tuple(items) for items in passes}) > 1, "the order changes from pass to pass"


def test_a_coarse_sample_is_the_volume_filled_at_its_end(
    cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    samples = coarse(cached_cases, task, augmentation=None)
    for n in range(3):
        sample, case = samples[n], by_name[samples[n]["case"]]
        depth, height, width = case.grid.shape
        assert all(size % 8 == 0 for size in sample["target"].shape)
        image, target = sample["image"][0], sample["target"]
        assert np.array_equal(
            image[:depth, :height, :width], normalise_hu(np.array(case.image_hu), task.window_hu)
        )
        assert np.array_equal(target[:depth, :height, :width], case.labels)
        assert bool(
            (image[depth:] == image[depth - 1]).all()
            and (target[depth:] == target[depth - 1]).all()
        )
        assert bool((image[:, height:] == -1).all() and (image[:, :, width:] == -1).all())
        assert int((target[:depth] > 0).sum()) == int((case.labels > 0).sum())


def test_long_volumes_are_cut_to_a_range_of_slices(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = coarse(cached_cases, task, augmentation=None, max_voxels=16 * 32 * 48)
    starts = set()
    by_name = {case.name: case for case in cached_cases}
    for n in range(30):
        sample, case = samples[n], by_name[samples[n]["case"]]
        image, whole = sample["image"][0], normalise_hu(np.array(case.image_hu), task.window_hu)
        assert image.numel() <= 16 * 32 * 48
        _, height, width = case.grid.shape
        depth = min(len(image), len(whole))
        part = image[:depth, :height, :width].numpy()
        start = [
            z for z in range(len(whole) - depth + 1) if np.array_equal(part, whole[z : z + depth])
        ]
        assert len(start) == 1
        starts.add((case.name, start[0]))
    assert len(starts) > 5


def test_slabs_are_scans_of_their_own_of_all_lengths(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = coarse(cached_cases, task, augmentation=None, slab_share=0.5)
    by_name = {case.name: case for case in cached_cases}
    is_whole, lengths = [], set()
    for n in range(200):
        sample = samples[n]
        case = by_name[sample["case"]]
        start, stop = (int(end) for end in sample["inside"][0])
        assert start == 0
        depth = case.grid.shape[0]
        is_whole.append(stop == depth)
        lengths.add((case.name, stop))
        if stop < depth:  # no part of it is made up
            assert len(sample["target"]) == stop
    assert 0.4 < np.mean(is_whole) < 0.75
    assert len(lengths) > 5


def test_half_chests_are_ranges_of_columns_of_whole_scans(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = coarse(cached_cases, task, augmentation=None, side_share=1.0)
    by_name, places = {case.name: case for case in cached_cases}, set()
    for n in range(30):
        sample, case = samples[n], by_name[samples[n]["case"]]
        whole = normalise_hu(np.array(case.image_hu), task.window_hu)
        depth, height, width = (int(stop - start) for start, stop in sample["inside"])
        assert sample["inside"][:, 0].tolist() == [0, 0, 0]
        # Rows and slices may be those of a smaller body.
        part, labels = (
            sample["image"][0, :depth, :height, :width].numpy(),
            sample["target"][:depth, :height, :width].numpy(),
        )
        columns = [
            (z, y, x)
            for z, y, x in np.ndindex(*np.subtract(whole.shape, (depth, height, width)) + 1)
            if np.array_equal(part, whole[z : z + depth, y : y + height, x : x + width])
        ]
        assert len(columns) == 1
        (z, y, x) = columns[0]
        assert np.array_equal(labels, case.labels[z : z + depth, y : y + height, x : x + width])
        places.add((case.name, x, width))
    assert len(places) > 20


def test_a_half_chest_keeps_the_least_share_of_the_columns(
    cached_cases: list[CachedCase], task: Task
) -> None:
    shares = []
    for least in (0.1, 0.9, 1.0):
        samples = coarse(
            cached_cases[:1], task, augmentation=None, side_share=1.0, side_least=least
        )
        width = cached_cases[0].grid.shape[2]
        shares.append([int(samples[n]["inside"][2, 1]) / width for n in range(20)])
    assert min(shares[0]) < 0.5
    assert min(shares[1]) >= 0.85
    assert set(shares[2]) == {max(shares[2])}


def test_a_fine_sample_is_its_box_with_the_region_alone(
    cached_cases: list[CachedCase], task: Task
) -> None:
    by_name = {case.name: case for case in cached_cases}
    samples = fine(cached_cases, task, augmentation=None, patch_size=None, jitter=False)
    sides = set()
    for n in range(5):
        sample, case = samples[n], by_name[samples[n]["case"]]
        region = task.regions[sample["region"]]
        box = wide_box(case, region, None)
        expected = normalise_hu(crop_padded(case.image_hu, box, -1024), task.window_hu)
        labels = crop_padded(case.labels, box, 0) == task.labels[region.name]
        assert np.array_equal(as_stored(sample["image"][0], region), expected)
        assert np.array_equal(as_stored(sample["target"], region), labels)
        sides.add(region.side)
    assert sides == {"left", "right"}


def test_helper_labels_are_classes_behind_those_of_the_largest_region(
    cached_cases: list[CachedCase], task: Task
) -> None:
    case = cached_cases[0]
    labels = np.array(case.labels)
    labels[:, 0] = 3
    np.save(case.folder / "labels.npy", labels)
    left, right = task.regions
    lobes = replace(left, labels=("left_lung", "left_lobe"))
    with_airway = replace(
        task, labels={**task.labels, "airway": 3, "left_lobe": 4}, regions=(lobes, right)
    )
    options: dict = {"augmentation": None, "box_of": wide_box, "patch_size": None, "jitter": False}
    samples = fine([case], with_airway, **options)
    for n in range(2):
        sample = samples[n]
        region = with_airway.regions[sample["region"]]
        lung = 1 if region is lobes else 2
        expected = np.select([labels == lung, labels == 3], [1, 3], 0)
        box = wide_box(case, region, None)
        target = as_stored(sample["target"], region)
        assert np.array_equal(target, crop_padded(expected, box, 0))


def test_classes_of_a_region_helpers_and_the_ignore_label_in_every_region() -> None:
    """One head serves all regions: a helper has one class, whatever labels the region has."""
    two, one = Region("two", ("a", "b"), None), Region("one", ("c",), None)
    values = {"a": 4, "b": 2, "c": 7, "airway": 3, "vessel": 9}
    task = Task("t", values, (two, one), (Channel(window_hu=(-1000.0, 400.0)),), ignore_label=200)
    samples = Samples.__new__(Samples)  # the classes follow from the task alone
    samples.task = task
    labels = torch.tensor([0, 4, 2, 7, 3, 9, 200], dtype=torch.uint8)
    assert samples._region_classes(labels, two).tolist() == [0, 1, 2, 0, 3, 4, 200]
    assert samples._region_classes(labels, one).tolist() == [0, 0, 0, 1, 3, 4, 200]


def test_patches_lie_in_their_box_and_meet_the_boundary(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """Each patch is found again in its volume: the tissue noise has no two equal places."""
    by_name = {case.name: case for case in cached_cases}
    samples = fine(
        cached_cases,
        task,
        augmentation=None,
        jitter=False,
        boundary_share=1.0,
        patch_size=(4, 6, 4),
    )
    starts = set()
    for n in range(40):
        sample = samples[n]
        case, region = by_name[sample["case"]], task.regions[sample["region"]]
        box = wide_box(case, region, None)
        whole = normalise_hu(crop_padded(case.image_hu, box, -1024), task.window_hu)
        windows = np.lib.stride_tricks.sliding_window_view(whole, (4, 6, 4))
        found = np.argwhere(
            (windows == as_stored(sample["image"][0], region).numpy()).all(axis=(3, 4, 5))
        )
        assert len(found) == 1
        assert int(sample["target"].sum()) > 0
        starts.add((n % 5, tuple(found[0])))
    assert len(starts) > 30


def test_a_patch_larger_than_its_box_is_centred_on_it(
    cached_cases: list[CachedCase], task: Task
) -> None:
    def tight(case: CachedCase, region: Region, rng: np.random.Generator | None) -> VoxelBox:
        return case.region_boxes[region.name]

    samples = fine(
        cached_cases,
        task,
        augmentation=None,
        box_of=tight,
        patch_size=(32, 32, 32),
        boundary_share=1.0,
    )
    by_name = {case.name: case for case in cached_cases}
    for n in range(5):
        sample = samples[n]
        region = task.regions[sample["region"]]
        place = np.argwhere(sample["target"].numpy() == 1)
        num_voxels = np.count_nonzero(by_name[sample["case"]].labels == task.labels[region.name])
        assert len(place) == num_voxels, "the whole region is inside"
        assert np.abs((place.min(axis=0) + place.max(axis=0)) / 2 - 15.5).max() <= 1


def test_a_mirrored_right_sample_equals_the_left_sample_of_the_mirrored_body(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """Mirroring precedes augmentation: the network cannot tell a right lung from a left one."""

    def whole(case: CachedCase, region: Region, rng: np.random.Generator | None) -> VoxelBox:
        return VoxelBox.full(case.grid.shape)

    options: dict = {
        "box_of": whole,
        "seed": 1,
        "patch_size": None,
        "jitter": False,
        "augmentation": AUGMENTATION,
    }
    body = cached_cases[2]  # has a right lung alone
    right = [fine([body], task, **options)[n] for n in range(6)]

    np.save(body.folder / "image.npy", np.array(body.image_hu)[:, :, ::-1])
    np.save(body.folder / "labels.npy", (np.array(body.labels)[:, :, ::-1] > 0).astype(np.uint8))
    mirrored = replace(body, region_boxes={"left_lung": body.region_boxes["right_lung"]})
    left = [fine([mirrored], task, **options)[n] for n in range(6)]
    for left_sample, right_sample in zip(left, right, strict=True):
        assert torch.equal(left_sample["image"], right_sample["image"])
        assert torch.equal(left_sample["target"], right_sample["target"])
        assert (left_sample["region"], right_sample["region"]) == (0, 1)


def test_augmented_coarse_samples_keep_their_sides(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = coarse(cached_cases[:2], task)
    for n in range(20):
        places = [np.argwhere(samples[n]["target"].numpy() == value) for value in (1, 2)]
        if all(len(place) for place in places):
            assert places[0][:, 2].mean() > places[1][:, 2].mean()


def test_a_warped_patch_holds_tissue_where_the_scan_goes_on(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """A patch in the middle of a scan without air must not get false air at its corners."""
    case = cached_cases[0]
    np.save(case.folder / "image.npy", np.full(case.grid.shape, 100, dtype=np.int16))

    def middle(case: CachedCase, region: Region, rng: np.random.Generator | None) -> VoxelBox:
        return VoxelBox.full(case.grid.shape).expanded((-8, -10, -16))

    options: dict[str, Any] = {name: 0.0 for name in CT if name.endswith("_probability")}
    options |= {"affine_probability": 1.0, "translation_mm": (3.0, 3.0, 3.0)}
    warp_alone = effects(**options)
    samples = fine([case], task, middle, patch_size=None, augmentation=warp_alone)
    for n in range(10):
        assert float(samples[n]["image"].min()) > 0


def test_collation_fills_at_the_end_as_prediction_does() -> None:
    samples: list[Sample] = [
        {
            "image": torch.ones(1, *shape),
            "target": torch.ones(shape, dtype=torch.uint8),
            "inside": torch.tensor([(0, size) for size in shape]),
            "spacing_mm": (1.0, 1.0, 1.0),
            "region": n,
            "case": f"c{n}",
            "number": n,
        }
        for n, shape in enumerate([(3, 9, 4), (5, 2, 4)])
    ]
    batch = collate(samples, (4, 1, 8), is_stacked=False)
    assert [part["image"].shape for part in batch] == [(1, 1, 4, 9, 8), (1, 1, 8, 2, 8)], (
        "each at its own shape"
    )
    for n, shape in enumerate([(3, 9, 4), (5, 2, 4)]):
        inside = torch.zeros(batch[n]["target"].shape[1:], dtype=torch.bool)
        inside[:, : shape[1], : shape[2]] = True  # the last slice goes on
        assert torch.equal(batch[n]["image"][0, 0], torch.where(inside, 1.0, -1.0))
        assert torch.equal(batch[n]["target"][0], inside.to(torch.uint8))
        assert batch[n]["region"].tolist() == [n]
        assert batch[n]["case"] == [f"c{n}"]


@pytest.mark.parametrize("weights", [[1.0, 2.0], [1.0, 0.0, 1.0], [1.0, float("nan"), 1.0]])
def test_bad_weights_are_refused(
    weights: list[float], cached_cases: list[CachedCase], task: Task
) -> None:
    with pytest.raises(ValueError, match=r"weights|shorter"):
        coarse(cached_cases, task, weights=weights)
    with pytest.raises(ValueError, match=r"weights|shorter|longer"):
        fine(cached_cases, task, weights=weights)


def test_inside_marks_where_the_scan_is(cached_cases: list[CachedCase], task: Task) -> None:
    def box_beyond(case: CachedCase, region: Region, rng: object) -> VoxelBox:
        return case.region_boxes[region.name].expanded((40, 30, 20))

    samples = fine(
        cached_cases,
        task,
        box_beyond,
        patch_size=None,
        augmentation=None,
        jitter=False,
    )
    for n in range(len(samples)):
        sample = samples[n]
        inside = torch.zeros_like(sample["target"], dtype=torch.bool)
        inside[tuple(slice(int(start), int(stop)) for start, stop in sample["inside"])] = True
        case = next(case for case in cached_cases if case.name == sample["case"])
        box = box_beyond(case, task.regions[sample["region"]], None)
        assert inside.sum() == np.prod(box.intersect(VoxelBox.full(case.grid.shape)).shape)
        (first, stop), *in_plane = sample["inside"].tolist()
        beside = torch.ones_like(inside)
        beside[(slice(None), *(slice(*ends) for ends in in_plane))] = False
        assert (sample["image"][0][beside] == -1).all(), "beside the scan is air"
        assert not sample["target"][beside].any()
        for values in (sample["image"][0], sample["target"]):
            assert (values[:first] == values[first]).all()
            assert (values[stop:] == values[stop - 1]).all()


def test_samples_from_elsewhere_lie_anywhere_in_the_scan(
    cached_cases: list[CachedCase], task: Task
) -> None:
    samples = fine(cached_cases, task, augmentation=None, patch_size=(4, 6, 4), elsewhere_share=1.0)
    by_name = {case.name: case for case in cached_cases}
    corners: dict[str, list[np.ndarray]] = {name: [] for name in by_name}
    empty = 0
    for n in range(60):
        sample = samples[n]
        case = by_name[sample["case"]]
        whole = normalise_hu(np.asarray(case.image_hu), task.window_hu)
        windows = np.lib.stride_tricks.sliding_window_view(whole, (4, 6, 4))
        region = task.regions[sample["region"]]
        (place,) = np.argwhere(
            (windows == as_stored(sample["image"][0], region).numpy()).all(axis=(3, 4, 5))
        )
        corners[case.name].append(place)
        box = VoxelBox(tuple(place), tuple(place + np.array((4, 6, 4))))
        value = task.labels[region.name]
        assert np.array_equal(
            as_stored(sample["target"], region), np.asarray(case.labels)[box.slices()] == value
        )
        empty += not sample["target"].any()
    assert empty > 10
    for name, places in corners.items():
        room = np.array(by_name[name].grid.shape) - (4, 6, 4)
        assert (np.ptp(places, axis=0) > 0.5 * room).all()


def test_channels_are_stacked_and_each_has_its_own_intensity(
    cached_cases: list[CachedCase], task: Task
) -> None:
    case = cached_cases[0]
    mr = np.random.default_rng(0).uniform(0, 500, case.grid.shape).astype(np.float32)
    np.save(case.folder / "image_1.npy", mr)
    intensity = zscore(mr, "mr")
    two = replace(task, channels=(*task.channels, Channel("mr", None, "zscore")))
    both = [replace(case, intensities=(None, intensity))]
    for make in (coarse, fine):
        plain, stacked = (
            make(cases, task_of_cases, augmentation=None)[0]
            for cases, task_of_cases in ((cached_cases[:1], task), (both, two))
        )
        depth, height, width = stacked["target"].shape  # without the filling of whole scans
        assert torch.equal(stacked["image"][:1], plain["image"][:, :depth, :height, :width])
        assert torch.equal(stacked["target"], plain["target"][:depth, :height, :width])
    whole = coarse(both, two, augmentation=None)[0]["image"][1]
    assert torch.equal(whole, torch.from_numpy(normalise(mr, intensity)))
    assert fine(both, two)[0]["image"].shape[0] == 2, "augmented"


def test_patches_find_lesions_that_leave_most_slices_of_their_box_empty(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """Two voxels of one label, in the first and the last of 25 slices."""
    case = cached_cases[2]
    labels = np.zeros(case.grid.shape, np.uint8)
    labels[0, 3, 4] = labels[-1, 15, 30] = 1
    np.save(case.folder / "labels.npy", labels)
    box = VoxelBox.from_mask(labels == 1)
    assert box is not None
    scattered = replace(case, region_boxes={"left_lung": box})
    samples = fine(
        [scattered],
        task,
        lambda case, region, rng: VoxelBox.full(case.grid.shape),
        augmentation=None,
        patch_size=(3, 4, 4),
        boundary_share=1.0,
    )
    assert all(samples[n]["target"].any() for n in range(40))


def test_the_ignore_label_stays_in_the_target_and_makes_no_boundary(
    cached_cases: list[CachedCase], task: Task
) -> None:
    case = cached_cases[0]
    labels = np.array(case.labels)
    labels[(labels == 0) & (np.arange(labels.shape[1])[:, None] >= labels.shape[1] // 4)] = (
        255  # all around but in front
    )
    np.save(case.folder / "labels.npy", labels)
    ignoring = replace(task, ignore_label=255)
    options: dict = {
        "augmentation": None,
        "box_of": wide_box,
        "patch_size": (1, 2, 1),
        "boundary_share": 1.0,
        "jitter": False,
    }
    samples = fine([case], ignoring, **options)
    targets = [samples[n]["target"] for n in range(40)]
    assert all(set(target.unique().tolist()) <= {0, 1, 255} for target in targets)
    front = sum(bool((target[0, :, 0] == torch.tensor([0, 1])).all()) for target in targets)
    assert front > 10, "the boundary to the background is met"
    assert not any(bool((target[0, :, 0] == torch.tensor([1, 255])).all()) for target in targets)


def test_patches_of_a_whole_scan_meet_every_label_as_often(
    cached_cases: list[CachedCase], task: Task
) -> None:
    boxes = [
        {
            name: VoxelBox.from_mask(np.array(case.labels) == value)
            for name, value in task.labels.items()
        }
        for case in cached_cases
    ]
    cases = [
        replace(case, label_boxes={name: box for name, box in found.items() if box is not None})
        for case, found in zip(cached_cases, boxes, strict=True)
    ]
    no_regions = replace(task, regions=())
    samples = coarse(
        cases[:2], no_regions, augmentation=None, patch_size=(4, 6, 4), boundary_share=1.0
    )
    values_of_sample = [set(samples[n]["target"].unique().tolist()) for n in range(60)]
    assert all(samples[n]["target"].shape == (4, 6, 4) for n in range(5))
    assert all(values & {1, 2} for values in values_of_sample)
    assert 15 < sum(1 in values for values in values_of_sample) < 45
    assert not all(
        coarse(cases[:2], no_regions, augmentation=None, patch_size=(4, 6, 4))[n]["target"].any()
        for n in range(30)
    ), "elsewhere without"


def test_patches_of_a_slab_see_nothing_beyond_it(
    cached_cases: list[CachedCase], task: Task
) -> None:
    options: dict[str, Any] = {"augmentation": None, "patch_size": (8, 6, 6), "boundary_share": 0.0}
    cut, uncut = (
        coarse(cached_cases[:1], replace(task, regions=()), slab_share=share, **options)
        for share in (1.0, 0.0)
    )
    scanned = [[int(samples[n]["inside"][0].diff()) for n in range(40)] for samples in (cut, uncut)]
    assert set(scanned[1]) == {8}
    assert min(scanned[0]) < 8


def test_only_trusted_regions_are_trained_on(cached_cases: list[CachedCase], task: Task) -> None:
    trust = [
        {"left_lung": "reference", "right_lung": "approximate"},
        {"left_lung": "reference", "right_lung": "absent"},
        {},
    ]
    cases = [
        replace(case, trust=trust_of_case)
        for case, trust_of_case in zip(cached_cases, trust, strict=True)
    ]
    samples = fine(cases, task, augmentation=None, train_trust=["reference"])
    assert sorted((samples[n]["case"], samples[n]["region"]) for n in range(len(samples))) == [
        ("case_0", 0),
        ("case_1", 0),
    ]
    assert [
        samples_case.name
        for samples_case, _ in coarse(cases, task, train_trust=["reference"]).items
    ] == ["case_1"]
    both = coarse(cases, task, train_trust=["reference", "approximate"])
    assert [samples_case.name for samples_case, _ in both.items] == ["case_0", "case_1"]
    half_known = [replace(cases[0], trust={"left_lung": "reference"}), *cases[1:]]
    assert [
        samples_case.name
        for samples_case, _ in coarse(half_known, task, train_trust=["reference"]).items
    ] == ["case_1"]
    empty = [
        *cases[1:],
        replace(cases[0], trust=dict.fromkeys(("left_lung", "right_lung"), "absent")),
    ]
    items = coarse(empty, task, train_trust=["reference"]).items
    assert [samples_case.name for samples_case, _ in items] == ["case_1", "case_0"], (
        "a scan that is known to have no region is known"
    )
    with pytest.raises(
        UserError,
        match=r"data\.train_trust=sure or certain: of 3 training case\(s\), such as case_0",
    ):
        fine(cases, task, train_trust=["sure", "certain"])
    without_regions = [replace(case, region_boxes={}) for case in cases]
    with pytest.raises(UserError, match=r"of 3 case\(s\), such as case_0, none has a voxel of"):
        fine(without_regions, task, train_trust=["reference"])


def test_samples_are_made_on_one_thread_whatever_the_process_has() -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(num_threads)


def test_a_window_that_the_augmentation_moves_is_that_of_the_sample(
    cached_cases: list[CachedCase], task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_hu = (-700.0, 250.0)
    never = {key: 0.0 for key in CT if key.endswith("_probability")}
    augmentation = effects(**never, window_shift_hu=30.0)
    monkeypatch.setattr(type(augmentation), "draw_window", lambda *_: moved_hu)
    sample = coarse(cached_cases[:1], task, augmentation=augmentation)[0]
    moved = replace(task, channels=(replace(task.channels[0], window_hu=moved_hu),))
    expected = coarse(cached_cases[:1], moved, augmentation=None)[0]
    torch.testing.assert_close(sample["image"], expected["image"], rtol=0, atol=1e-6)
    assert not torch.equal(
        sample["image"], coarse(cached_cases[:1], task, augmentation=None)[0]["image"]
    )


def test_the_spacing_of_a_validation_case_is_not_drawn(
    cached_cases: list[CachedCase], task: Task
) -> None:
    crops = StageCrops(GridRule(range_mm=(1.0, 6.0)), divisor=(8, 8, 8))
    drawn, fixed = (
        {
            coarse(cached_cases[:1], task, crops=crops, augmentation=None, jitter=jitter)[n][
                "spacing_mm"
            ]
            for n in range(6)
        }
        for jitter in (True, False)
    )
    assert len(drawn) > 1
    assert len(fixed) == 1


def test_a_range_of_a_cube_lies_in_the_body_where_that_is_long_enough(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """The cube of 41 voxels a side, 48 when it is filled, is longer than the scan of 22 slices."""
    options: dict[str, Any] = {
        "augmentation": None,
        "crops": StageCrops(GridRule(is_cube=True), divisor=(8, 8, 8)),
    }
    assert coarse(cached_cases[:1], task, **options)[0]["target"].shape == (41, 41, 41)
    samples = coarse(cached_cases[:1], task, **options, max_voxels=16 * 48 * 48)
    for n in range(25):
        assert samples[n]["target"].shape == (16, 41, 41)
        assert samples[n]["inside"][0].tolist() == [0, 16], "slices of the scan alone"
    longer = coarse(cached_cases[:1], task, **options, max_voxels=24 * 48 * 48)
    starts = {tuple(longer[n]["inside"][0].tolist()) for n in range(25)}
    assert len(starts) > 3, "no 24 slices of the scan are there, so any range of the cube is"


def test_targets_are_bytes_and_images_floats(cached_cases: list[CachedCase], task: Task) -> None:
    for samples in (
        coarse(cached_cases, task),
        fine(cached_cases, task),
        fine(cached_cases, task, augmentation=None),
    ):
        assert samples[0]["target"].dtype == torch.uint8
        assert samples[0]["image"].dtype == torch.float32


def test_the_size_of_a_sample_is_that_of_its_region_or_of_its_scan(
    cached_cases: list[CachedCase], task: Task
) -> None:
    """Without jitter: the ranks of a run divide their work by it."""
    regions = fine(cached_cases, task)
    sizes = set()
    for n in range(len(regions)):
        case, number = regions.items[draw_from_pass(regions.seed, n, regions.weights)]
        box = wide_box(case, task.regions[number], None)
        assert regions.size(n) == math.prod(box.shape)
        sizes.add(regions.size(n))
    assert len(sizes) > 1
    scans = coarse(cached_cases, task)
    for n in range(len(scans)):
        case, _ = scans.items[draw_from_pass(scans.seed, n, scans.weights)]
        assert scans.size(n) == math.prod(case.grid.shape)


def test_cases_without_any_region_are_refused_with_their_names(
    cached_cases: list[CachedCase], task: Task
) -> None:
    bare = [replace(case, region_boxes={}) for case in cached_cases[:2]]
    with pytest.raises(
        UserError, match=r"of 2 case\(s\), such as case_0, none has a voxel of left_lung or right_"
    ):
        fine(bare, task)
    assert len(fine([*bare, cached_cases[2]], task)) == len(cached_cases[2].region_boxes)
