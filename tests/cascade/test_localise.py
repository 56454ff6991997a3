"""What counts as found, what is said aloud, and the one rule for the crop of a region."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracle import OBLIQUE, TASK, CoarseOracle, scan, stage

from medseg.anatomy.impossible import remove_impossible
from medseg.anatomy.sides import lone_side_warnings
from medseg.cascade import localise as localisation
from medseg.cascade.localise import Localisation, localise, locate_regions
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import GridRule, region_crop
from medseg.task import Channel, Region, is_side_pair

COARSE = VoxelGrid((40, 60, 90), (2.0, 2.0, 2.0), (-30.0, 15.0, 400.0), OBLIQUE)
LEFT = (slice(10, 30), slice(20, 40), slice(55, 75))  # 64 ml
RIGHT = (slice(10, 30), slice(20, 40), slice(15, 35))


def locate(*blocks: tuple[tuple[slice, slice, slice], int]) -> Localisation:
    labels = np.zeros(COARSE.shape, dtype=np.uint8)
    for block, value in blocks:
        labels[block] = value
    return locate_regions(labels, COARSE, TASK)


def test_plausible_regions_give_tight_boxes_and_no_warning() -> None:
    location = locate((LEFT, 1), (RIGHT, 2))
    assert location.warnings == []
    assert location.boxes == {
        "left_lung": VoxelBox((10, 20, 55), (30, 40, 75)),
        "right_lung": VoxelBox((10, 20, 15), (30, 40, 35)),
    }


@pytest.mark.parametrize(("num_missing", "is_found"), [(0, True), (1, False)])
def test_a_region_of_five_millilitres_is_found_and_a_smaller_one_is_absent(
    num_missing: int, is_found: bool
) -> None:
    grid = VoxelGrid((30, 30, 30), (1.0, 1.0, 1.0))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[5:15, 5:25, 2:27] = 1
    labels[14, 24, 26 - num_missing + 1 : 27] = 0
    found = locate_regions(labels, grid, TASK)
    assert found.boxes.keys() == ({"left_lung"} if is_found else set())
    assert found.labels.any() == is_found


@pytest.mark.parametrize(("modality", "is_told"), [("ct", True), ("mr", False)])
def test_only_a_ct_without_a_region_is_asked_for_its_scale(modality: str, is_told: bool) -> None:
    task = replace(TASK, channels=(Channel(modality),))
    found = locate_regions(np.zeros(COARSE.shape, np.uint8), COARSE, task)
    assert found.warnings[-1].startswith("no region found at all")
    assert ("HU" in found.warnings[-1]) == is_told


def test_probabilities_and_values_lie_where_the_labels_of_the_scan_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The crop of the network is larger than the scan along some axes, and smaller along others."""
    volume, _ = scan()
    image_hu = np.full((40, *volume.array.shape[1:]), -1000, dtype=np.int16)
    image_hu[8:34] = volume.array
    grid = VoxelGrid(image_hu.shape, volume.grid.spacing_mm)
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def watch(labels: np.ndarray, values_hu: np.ndarray, *_: object) -> list[str]:
        seen.append((labels.copy(), values_hu))
        return []

    monkeypatch.setattr(localisation, "remove_impossible", watch)
    coarse = stage(CoarseOracle(), "coarse", rule=GridRule(is_cube=True))
    found = localise([image_hu], grid, coarse, keep_probs=True)
    assert found.crop_grid is not None
    assert found.probs is not None
    assert found.probs_grid is not None
    assert found.grid.shape == (62, 41, 52)
    assert found.crop_grid.shape == (52, 52, 52)
    assert found.probs_grid.shape == (52, 41, 52)
    ((labels, values_hu),) = seen
    assert labels.shape == values_hu.shape
    assert values_hu[labels > 0].min() > -700
    assert values_hu[labels == 0].max() < -300
    assert found.probs.shape[1:] == found.probs_grid.shape
    first = np.rint(found.grid.world_to_index_zyx(found.probs_grid.origin_xyz_mm)).astype(int)
    at = tuple(
        slice(start, start + size)
        for start, size in zip(first, found.probs_grid.shape, strict=True)
    )
    assert np.array_equal(found.probs.argmax(0).numpy(), found.labels[at])
    assert np.count_nonzero(found.labels) == np.count_nonzero(found.labels[at]) > 0


def test_a_resampled_scan_is_seen_at_the_spacing_that_it_had() -> None:
    """Training localises on the cache, and prediction on the scan itself: both see one spacing."""
    grid = VoxelGrid((40, 40, 40), (2.0, 2.0, 2.0), (0.0, 0.0, 0.0))
    image_hu = np.full(grid.shape, -1000, dtype=np.int16)
    image_hu[10:30, 10:30, 25:35] = 0
    coarse = stage(CoarseOracle(), "coarse", rule=GridRule(range_mm=(1.0, 4.0)))
    for scan_mm, seen_mm in ((None, (2.0, 2.0, 2.0)), ((5.0, 3.0, 3.0), (4.0, 3.0, 3.0))):
        found = localise([image_hu], grid, coarse, scan_spacing_mm=scan_mm)
        assert found.crop_grid is not None
        assert found.crop_grid.spacing_mm == pytest.approx(seen_mm)


@pytest.mark.parametrize("modality", ["ct", "mr"])
def test_what_lies_beside_the_patient_is_no_region_of_a_ct(modality: str) -> None:
    grid = VoxelGrid((10, 100, 120), (4.0, 4.0, 4.0), (0.0, 0.0, 0.0))
    body, organ, foam = (
        (slice(0, 10), *place)
        for place in (np.s_[20:70, 20:100], np.s_[30:60, 30:50], np.s_[80:90, 30:50])
    )
    image_hu = np.full(grid.shape, -1000.0)
    image_hu[body], image_hu[organ], image_hu[foam] = 40.0, -850.0, -900.0
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[organ] = labels[foam] = 1
    channel = Channel("ct", (-1000.0, 400.0)) if modality == "ct" else Channel("mr", None, "zscore")
    warnings = remove_impossible(labels, image_hu, grid, replace(TASK, channels=(channel,)))
    assert labels[organ].all()
    assert labels[foam].all() == (modality == "mr")
    expected = [
        (
            "128 ml that the coarse stage called left_lung were removed: they lie beside the "
            "patient, as foam of the table and blankets do"
        )
    ]
    assert warnings == (expected if modality == "ct" else [])


def half_chest(
    side: str, *, wall_mm: float = 40.0, skin_mm: float = 20.0
) -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Image, lung mask and grid of a half chest: array x runs to the patient's left."""
    grid = VoxelGrid((10, 40, 60), (2.0, 5.0, 4.0), (0.0, 0.0, 0.0))
    image_hu, lung = np.full(grid.shape, -1000.0), np.zeros(grid.shape, dtype=bool)
    skin, wall = round(skin_mm / 4), round(wall_mm / 4)
    image_hu[:, 5:35, skin:] = 40.0
    lung[2:8, 10:30, skin + wall : -4] = True
    image_hu[lung] = -850.0
    return (
        (image_hu, lung, grid) if side == "right" else (image_hu[..., ::-1], lung[..., ::-1], grid)
    )


@pytest.mark.parametrize("labelled", ["left", "right"])
@pytest.mark.parametrize("shown", ["left", "right"])
def test_a_lone_lung_whose_side_contradicts_the_cut_of_a_half_chest_is_told(
    shown: str, labelled: str
) -> None:
    image_hu, lung, grid = half_chest(shown)
    warnings = lone_side_warnings(
        {f"{labelled}_lung": VoxelBox.from_mask(lung)}, image_hu, grid, TASK
    )
    assert [f"{labelled}_lung may be {shown}_lung" in sentence for sentence in warnings] == [
        True
    ] * (shown != labelled)


@pytest.mark.parametrize(
    "reason",
    ["both sides found", "the skin is not in view", "half a chest lies between skin and lung"],
)
def test_without_that_evidence_no_side_is_doubted(reason: str) -> None:
    is_far, is_cut = reason.startswith("half"), reason.startswith("the skin")
    image_hu, lung, grid = half_chest(
        "right", wall_mm=124.0 if is_far else 40.0, skin_mm=0.0 if is_cut else 20.0
    )
    boxes = dict.fromkeys(
        ["left_lung", "right_lung"][: 1 + reason.startswith("both")], VoxelBox.from_mask(lung)
    )
    assert lone_side_warnings(boxes, image_hu, grid, TASK) == []


def test_crumbs_do_not_move_the_box_and_large_parts_stay() -> None:
    crumb = (slice(2, 6), slice(2, 6), slice(80, 84))
    location = locate((LEFT, 1), (RIGHT, 2), (crumb, 1))
    assert location.boxes["left_lung"] == VoxelBox((10, 20, 55), (30, 40, 75))
    assert not location.labels[crumb].any()
    part = (slice(32, 38), slice(20, 40), slice(55, 75))
    location = locate((LEFT, 1), (RIGHT, 2), (part, 1))
    assert location.boxes["left_lung"] == VoxelBox((10, 20, 55), (38, 40, 75))


def test_a_region_below_the_least_volume_is_absent() -> None:
    small = (slice(10, 18), slice(20, 28), slice(60, 68))  # 4.1 ml
    location = locate((small, 1), (RIGHT, 2))
    assert list(location.boxes) == ["right_lung"]
    assert not (location.labels == 1).any()
    assert location.warnings == [
        (
            "no left_lung found: the coarse stage marks 4.1 ml, and regions below 5 ml are "
            "reported as absent"
        )
    ]


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (((LEFT, 2), (RIGHT, 1)), "lie on the wrong sides"),
        (((LEFT, 1), ((slice(2, 38), slice(5, 55), slice(3, 45)), 2)), "differ much in volume"),
        (
            ((LEFT, 1), (RIGHT, 2), ((slice(31, 36), slice(20, 40), slice(15, 75)), 1)),
            "extends beyond the centre of the other",
        ),
        (
            ((LEFT, 1), ((slice(0, 20), slice(20, 40), slice(15, 35)), 2)),
            "right_lung touches the lower border",
        ),
        (
            ((LEFT, 1), ((slice(10, 30), slice(20, 40), slice(0, 20)), 2)),
            "right_lung touches the right border",
        ),
    ],
)
def test_what_is_not_plausible_is_said_and_goes_on(
    blocks: tuple[tuple[tuple[slice, slice, slice], int], ...], text: str
) -> None:
    location = locate(*blocks)
    assert set(location.boxes) == {"left_lung", "right_lung"}
    (warning,) = location.warnings
    assert text in warning


def test_nothing_at_all_is_said_for_each_region_and_once_more() -> None:
    location = locate()
    assert location.boxes == {}
    assert [warning.split(":")[0] for warning in location.warnings] == [
        "no left_lung found",
        "no right_lung found",
        "no region found at all",
    ]


def test_pairs_are_the_two_sides_of_one_name() -> None:
    def named(name: str, side: str | None) -> Region:
        return Region(name, (name,), side)

    assert is_side_pair(named("left_lung", "left"), named("right_lung", "right"))
    assert is_side_pair(named("hip right", "right"), named("hip left", "left"))
    assert is_side_pair(named("Left_Kidney", "left"), named("Right_Kidney", "right"))
    assert not is_side_pair(named("left_lung", "left"), named("right_kidney", "right"))
    assert not is_side_pair(named("left_lung", "left"), named("left_lung", "left"))
    assert not is_side_pair(named("liver", None), named("right_lung", "right"))


@pytest.mark.parametrize("patch_size", [None, (32, 48, 40)])
@pytest.mark.parametrize("margin_mm", [0.0, 5.0, 7.3])
def test_the_crop_holds_region_and_margin_with_the_region_in_the_middle(
    patch_size: tuple[int, int, int] | None, margin_mm: float
) -> None:
    native = VoxelGrid((60, 170, 180), (2.5, 0.7, 0.8), (-11.0, 20.0, 300.0), OBLIQUE)
    coarse, fine = native.resampled((2.0, 2.0, 2.0)), native.resampled((1.0, 1.0, 1.1))
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = rng.integers(0, np.array(coarse.shape) - 1)
        tight = VoxelBox(tuple(start), tuple(start + rng.integers(1, 30, 3)))
        box = region_crop(tight, coarse, fine, margin_mm, patch_size, (8, 8, 16)).box
        faces = np.array([tight.start, tight.stop]) - 0.5
        low, high = (fine.world_to_index_zyx(coarse.index_to_world_xyz_mm(face)) for face in faces)
        margin = margin_mm / np.array(fine.spacing_mm)
        assert (np.array(box.start) - 0.5 <= low - margin + 1e-5).all()
        assert (np.array(box.stop) - 0.5 >= high + margin - 1e-5).all()
        centre = (np.array(box.start) + np.array(box.stop)) / 2 - 0.5
        assert np.abs(centre - (low + high) / 2).max() <= 1.0 + 1e-5
        if patch_size is None:
            assert all(size % step == 0 for size, step in zip(box.shape, (8, 8, 16), strict=True))
        else:
            assert all(size >= least for size, least in zip(box.shape, patch_size, strict=True))


def test_an_odd_voxel_goes_to_the_high_end() -> None:
    grid = VoxelGrid((50, 50, 50), (1.0, 1.0, 1.0))
    box = region_crop(
        VoxelBox((10, 10, 10), (15, 16, 17)), grid, grid, 2.0, (10, 11, 12), (1, 1, 1)
    ).box
    assert box == VoxelBox((8, 8, 8), (18, 19, 20))


def test_a_part_in_which_the_sides_mix_stays_and_is_told() -> None:
    upper = (slice(10, 22), slice(20, 40), slice(30, 60))
    lower = (slice(22, 28), slice(20, 40), slice(32, 62))
    location = locate((upper, 2), (lower, 1))
    assert (location.labels[upper] == 2).all()
    assert (location.labels[lower] == 1).all()
    (warning,) = location.warnings
    assert "extends beyond the centre of the other" in warning
    touching = (slice(10, 30), slice(20, 40), slice(35, 55))
    location = locate((LEFT, 1), (touching, 2))
    assert set(location.boxes) == {"left_lung", "right_lung"}
    assert location.warnings == []


@pytest.mark.parametrize(("median_hu", "is_removed"), [(-985.0, True), (-975.0, False)])
def test_gas_is_removed_by_the_least_value_of_the_task(median_hu: float, is_removed: bool) -> None:
    image_hu = np.full(COARSE.shape, 40.0)
    image_hu[LEFT], image_hu[RIGHT] = median_hu, -850.0
    labels = np.zeros(COARSE.shape, dtype=np.uint8)
    labels[LEFT], labels[RIGHT] = 1, 2
    task = replace(TASK, least_hu=-980.0)
    warnings = remove_impossible(labels, image_hu, COARSE, task)
    assert labels[LEFT].any() != is_removed
    assert labels[RIGHT].all()
    sentence = (
        "64 ml that the coarse stage called left_lung were removed: the median of such a "
        "component is below -980 HU, so it is gas"
    )
    assert warnings == [sentence] * is_removed
    labels[LEFT] = 1
    assert remove_impossible(labels, image_hu, COARSE, replace(task, least_hu=None)) == []
    assert labels[LEFT].all()
