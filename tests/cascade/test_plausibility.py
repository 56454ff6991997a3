"""Agreement of the two stages (Dice) against a count on a common grid; lungs upside down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import GRID, OBLIQUE, TASK, CoarseOracle, FineOracle, scan, stage

from medseg.anatomy.plausibility import (
    FoundRegion,
    airless_warnings,
    border_warnings,
    measure_region,
    pair_warnings,
    position_warnings,
    side_warnings,
    volume_warnings,
)
from medseg.cascade.agreement import agreement, most_disputed_xyz_mm
from medseg.cascade.cascade import Cascade
from medseg.geometry.grid import VoxelBox, VoxelGrid, voxel_ml
from medseg.task import Region

COARSE = VoxelGrid((40, 60, 90), (2.0, 2.0, 2.0), (-30.0, 15.0, 400.0), OBLIQUE)
REGIONS = {region.name: TASK.region_values(region) for region in TASK.regions}


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return float(2 * (one & other).sum() / (one.sum() + other.sum()))


def test_equal_labels_agree_and_other_ones_as_they_overlap() -> None:
    rng = np.random.default_rng(0)
    grid = VoxelGrid((6, 8, 10), (4.0, 2.0, 2.0), (3.0, -7.0, 1.0))
    coarse, final = (rng.integers(0, 3, grid.shape).astype(np.uint8) for _ in range(2))
    assert agreement(coarse, grid, coarse, grid, REGIONS) == {"left_lung": 1.0, "right_lung": 1.0}
    expected = {name: dice(coarse == value, final == value) for name, value in TASK.labels.items()}
    assert agreement(coarse, grid, final, grid, REGIONS) == pytest.approx(expected, abs=1e-12)


def test_a_finer_grid_is_asked_at_the_centres_of_the_coarse_voxels() -> None:
    """Of three fine voxels to a coarse one the middle decides; those outside are not used."""
    rng = np.random.default_rng(1)
    coarse_grid = VoxelGrid((4, 5, 6), (6.0, 3.0, 4.5), (10.0, 20.0, 30.0))
    fine_grid = VoxelGrid((16, 15, 18), (2.0, 1.0, 1.5), (10.0 - 1.5, 20.0 - 1.0, 30.0 - 2.0))
    coarse, final = (
        rng.integers(0, 3, coarse_grid.shape).astype(np.uint8),
        rng.integers(0, 3, fine_grid.shape).astype(np.uint8),
    )
    middle = final[1:12:3, 1::3, 1::3]
    expected = {name: dice(coarse == value, middle == value) for name, value in TASK.labels.items()}
    assert agreement(coarse, coarse_grid, final, fine_grid, REGIONS) == pytest.approx(
        expected, abs=1e-12
    )


def test_between_fine_voxels_the_nearest_is_asked() -> None:
    coarse_grid = VoxelGrid((4, 4, 6), (2.5, 2.5, 2.5))
    fine_grid = VoxelGrid(
        (10, 10, 15), (1.0, 1.0, 1.0), (-0.2, -0.2, -0.2)
    )  # centres at 0.2, 2.7, 5.2, 7.7, … fine voxels
    coarse = np.full(coarse_grid.shape, 1, dtype=np.uint8)
    final = np.zeros(fine_grid.shape, dtype=np.uint8)
    final[np.ix_([0, 3, 5, 8], [0, 3, 5, 8], [0, 3, 5, 8, 10, 13])] = 1
    assert agreement(coarse, coarse_grid, final, fine_grid, {"left_lung": (1,)}) == {
        "left_lung": 1.0
    }


def test_only_the_given_regions_have_an_agreement() -> None:
    grid = VoxelGrid((4, 4, 4), (2.0, 2.0, 2.0))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[1:3] = 2
    assert agreement(labels, grid, 0 * labels, grid, {"right_lung": REGIONS["right_lung"]}) == {
        "right_lung": 0.0
    }


@pytest.mark.parametrize("lean", [-0.3, 0.0, 0.3])
def test_lungs_that_end_round_below_and_hollow_above_stand_on_their_heads(lean: float) -> None:
    z, y, x = np.mgrid[-1:1:40j, -1:1:60j, -2.5:2.5:90j]
    y = y + lean * z  # however the patient leans
    labels = np.zeros(COARSE.shape, dtype=np.uint8)
    for value, middle in ((1, 1.0), (2, -1.0)):
        is_lung = (0.8 * z**2 + y**2 + (x - middle) ** 2 < 0.7) & (z > -0.7)
        is_dome = (z + 0.9) ** 2 + y**2 + (x - middle) ** 2 < 0.6
        labels[is_lung & ~is_dome] = value
    air_hu = np.full(COARSE.shape, -850.0, dtype=np.float32)
    for turned, is_said in ((labels, False), (labels[::-1], True)):
        boxes = {
            name: box
            for name, value in TASK.labels.items()
            if (box := VoxelBox.from_mask(turned == value))
        }
        warnings = position_warnings(air_hu, turned, boxes, COARSE, TASK)
        assert any("look like their apices" in warning for warning in warnings) == is_said
        assert not position_warnings(air_hu + 1000, turned, boxes, COARSE, TASK), (
            "no organ full of air"
        )


@pytest.mark.parametrize(("scale", "is_told"), [(1.0, False), (5.0, True), (0.2, True)])
def test_a_volume_that_the_task_calls_implausible_is_told(scale: float, is_told: bool) -> None:
    """A header with the wrong slice spacing: all shapes are right, and the volumes are not."""
    volume, target = scan()
    expected_ml = {
        name: float((target == value).sum() * voxel_ml(GRID)) for name, value in TASK.labels.items()
    }
    task = replace(TASK, volume_ml={name: (0.5 * ml, 2.0 * ml) for name, ml in expected_ml.items()})
    warnings = volume_warnings({name: scale * ml for name, ml in expected_ml.items()}, target, task)
    assert len(warnings) == 2 * is_told
    assert all("ml are plausible: check the spacing of the scan" in warning for warning in warnings)
    cascade = Cascade(stage(CoarseOracle(), "coarse", task), stage(FineOracle(), "fine", task))
    stretched = replace(volume, grid=replace(volume.grid, spacing_mm=(3.1 * scale, 0.9, 0.8)))
    assert (
        bool(
            [
                warning
                for warning in cascade.segment(stretched).warnings
                if "are plausible" in warning
            ]
        )
        is is_told
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("end", [0, -1])
def test_a_region_that_the_scan_cuts_may_be_small(axis: int, end: int) -> None:
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    np.moveaxis(labels, axis, 0)[end, 2, 2] = 1
    inside = np.zeros_like(labels)
    inside[2, 2, 2] = 1
    task = replace(TASK, volume_ml={"left_lung": (10.0, 20.0)})
    volumes_ml = {"left_lung": 5.0, "right_lung": 0.0}
    assert volume_warnings(volumes_ml, labels, task) == []
    assert len(volume_warnings(volumes_ml, inside, task)) == 1
    assert len(volume_warnings({**volumes_ml, "left_lung": 25.0}, labels, task)) == 1


@pytest.mark.parametrize("cut_value", [1, 2, 3])
def test_a_region_may_be_small_if_any_of_its_labels_is_cut(cut_value: int) -> None:
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    labels[2, 2, 2:5] = (1, 2, 3)
    labels[-1, 2, 2] = cut_value
    names = ("upper", "middle", "lower")
    task = replace(
        TASK,
        labels={name: value for value, name in enumerate(names, start=1)},
        regions=(Region("lung", names),),
        volume_ml={"lung": (10.0, 20.0)},
    )
    assert volume_warnings(dict.fromkeys(names, 1.0), labels, task) == []


@pytest.mark.parametrize(
    ("other", "doubtful"), [(0.0, False), (0.004, False), (0.006, True), (0.4, True)]
)
def test_a_region_that_is_partly_the_other_side_has_a_doubtful_side(
    other: float, doubtful: bool
) -> None:
    """Neither the background in these voxels nor probabilities elsewhere count."""
    labels = np.zeros((4, 6, 10), dtype=np.uint8)
    labels[1:3, 1:5, 6:9], labels[1:3, 1:5, 1:4] = 1, 2
    probs = np.full((3, *labels.shape), 0.5, dtype=np.float16)
    left, right = labels == 1, labels == 2
    probs[:, left] = 0.8 * np.array([[0.25], [1 - other], [other]])
    probs[:, right] = np.array([[0.1], [0.0], [0.9]])
    warnings = side_warnings(probs, labels, TASK)
    assert [one.split(":")[0] for one in warnings] == [
        "the side of left_lung is doubtful"
    ] * doubtful
    assert not doubtful or f"{100 * other:.1f}% of it to right_lung" in warnings[0]
    assert side_warnings(probs, np.zeros_like(labels), TASK) == []


def test_the_point_of_the_largest_difference_is_in_the_slice_with_most_of_it() -> None:
    grid = VoxelGrid((6, 8, 10), (4.0, 2.0, 3.0), (3.0, -7.0, 1.0))
    coarse = np.zeros(grid.shape, dtype=np.uint8)
    final = coarse.copy()
    assert most_disputed_xyz_mm(coarse, grid, final, grid) is None
    final[1, 2, 2:4] = 1
    final[4, 5:7, 6:9] = 2
    expected = grid.index_to_world_xyz_mm([4, 5.5, 7.0])
    assert most_disputed_xyz_mm(coarse, grid, final, grid) == pytest.approx(tuple(expected))


def test_a_region_that_neither_stage_is_left_with_does_not_agree() -> None:
    grid = VoxelGrid((8, 12, 12), (4.0, 4.0, 4.0))
    nothing = np.zeros(grid.shape, dtype=np.uint8)
    assert agreement(nothing, grid, nothing, grid, {"left_lung": (1,)}) == {"left_lung": 0.0}


@pytest.mark.parametrize(
    ("left_hu", "right_hu", "told"),
    [
        (-860, -850, None),
        (-190, -850, "left_lung has no air (median -190 HU), right_lung is full of it (-850 HU)"),
        (-860, 10, "right_lung has no air (median 10 HU), left_lung is full of it (-860 HU)"),
        # Half of a lung is consolidated, and organs that never have air.
        (-210, -850, None),
        (40, 45, None),
        (40, -490, None),
    ],
)
def test_a_side_without_air_is_told_beside_one_that_is_full_of_it(
    left_hu: int, right_hu: int, told: str | None
) -> None:
    _, labels = scan()
    image_hu = np.select([labels == 1, labels == 2], [left_hu, right_hu], -1000)
    warnings = airless_warnings(labels, image_hu, TASK)
    assert len(warnings) == (told is not None)
    if told is not None:
        assert warnings[0].startswith(told)
    assert airless_warnings(labels * (labels == 1), image_hu, TASK) == []


def found(side: int, volume_ml: float, centre_x_mm: float, reach_mm: float) -> FoundRegion:
    box = VoxelBox((1, 1, 1), (3, 3, 3))
    ends_mm = centre_x_mm - reach_mm, centre_x_mm + reach_mm
    return FoundRegion(TASK.regions[side], box, volume_ml, centre_x_mm, ends_mm)


@pytest.mark.parametrize(
    ("left", "right", "told"),
    [
        # Volume in ml, centre along world x and reach to both sides of it, in mm.
        ((900, 50, 40), (1000, -50, 40), []),
        ((900, -50, 40), (1000, 50, 40), ["lie on the wrong sides"]),
        ((900, 50, 0), (1000, 50, 0), ["lie on the wrong sides"]),
        ((900, 50, 100), (1000, -50, 40), []),
        ((900, 50, 101), (1000, -50, 40), ["beyond the centre"]),
        ((900, 50, 40), (1000, -50, 100), []),
        ((900, 50, 40), (1000, -50, 101), ["beyond the centre"]),
        ((125, 50, 40), (1000, -50, 40), []),
        ((1000, 50, 40), (125, -50, 40), []),
        ((124, 50, 40), (1000, -50, 40), ["124 ml and 1000 ml"]),
        ((1000, 50, 40), (124, -50, 40), ["1000 ml and 124 ml"]),
        ((0.42, 50, 40), (0.03, -50, 40), ["0.42 ml and 0.03 ml"]),
        ((124, -50, 40), (1000, 50, 40), ["lie on the wrong sides", "differ much in volume"]),
    ],
)
def test_two_sides_are_told_that_are_exchanged_mixed_up_or_of_very_different_volumes(
    left: tuple[float, float, float], right: tuple[float, float, float], told: list[str]
) -> None:
    warnings = pair_warnings(found(0, *left), found(1, *right))
    assert len(warnings) == len(told)
    for warning, words in zip(warnings, told, strict=True):
        assert words in warning
        assert "left_lung and right_lung" in warning


def test_a_region_is_measured_in_the_world_and_each_face_that_cuts_it_is_named() -> None:
    grid = VoxelGrid((6, 8, 10), (4.0, 2.0, 3.0), (3.0, -7.0, 1.0))
    mask = np.zeros(grid.shape, dtype=bool)
    mask[1:5, 2:7, 3:8] = True
    measured = measure_region(TASK.regions[0], mask, grid)
    assert measured.box == VoxelBox((1, 2, 3), (5, 7, 8))
    assert measured.volume_ml == pytest.approx(4 * 5 * 5 * 0.024)
    assert measured.centre_x_mm == pytest.approx(3.0 + 5 * 3.0)
    assert measured.x_range_mm == pytest.approx((3.0 + 3 * 3.0, 3.0 + 7 * 3.0))
    assert border_warnings(measured, grid) == []
    faces = ("lower", "upper"), ("front", "back"), ("right", "left")
    for axis, names in enumerate(faces):
        for end, name in zip((0, -1), names, strict=True):
            cut = mask.copy()
            np.moveaxis(cut, axis, 0)[end] = np.moveaxis(mask, axis, 0)[3]
            (warning,) = border_warnings(measure_region(TASK.regions[0], cut, grid), grid)
            assert warning.startswith(f"left_lung touches the {name} border of the scan")
    whole = measure_region(TASK.regions[0], np.ones(grid.shape, dtype=bool), grid)
    (warning,) = border_warnings(whole, grid)
    assert "the lower and upper and front and back and right and left border" in warning


def test_a_small_volume_has_its_digits() -> None:
    task = replace(TASK, volume_ml={"left_lung": (0.5, 40.0)})
    labels = np.zeros((5, 6, 7), np.uint8)
    (warning,) = volume_warnings({"left_lung": 0.0234}, labels, task)
    assert warning.startswith("left_lung has 0.023 ml, but 0.5 to 40 ml are plausible")
