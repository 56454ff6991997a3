"""Pasting back: identity on the same lattice, conflicts by probability, clean-up by label."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import OBLIQUE

from medseg.cascade import join as joining
from medseg.cascade.join import join, merge, paste_percent
from medseg.cascade.localise import Localisation
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess.crop import crop_padded
from medseg.preprocess.resample import resample_image
from medseg.task import Channel, Region, Task

LOBES = Task(
    "lobes",
    {"left_upper": 1, "left_lower": 2, "right_upper": 3, "right_middle": 4, "right_lower": 5},
    (
        Region("left_lung", ("left_upper", "left_lower"), "left"),
        Region("right_lung", ("right_upper", "right_middle", "right_lower"), "right"),
    ),
    (Channel(window_hu=(-1000.0, 0.0)),),
)
GRID = VoxelGrid((20, 30, 41), (1.5, 0.9, 0.8), (-11.0, 20.0, 300.0), OBLIQUE)


def one_hot(labels: np.ndarray, values: tuple[int, ...], certainty: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(
        np.stack([labels == value for value in values]).astype(np.float16) * np.float16(certainty)
    )


def random_lobes(low: int, high: int) -> np.ndarray:
    blocks = np.random.default_rng(low).integers(low - 1, high + 1, (5, 6, 9)).astype(np.uint8)
    blocks[blocks == low - 1] = 0
    return blocks.repeat(4, 0).repeat(5, 1).repeat(5, 2)[:20, :30, :41]


@pytest.mark.parametrize("slab_voxels", [1, 4000, 10**9])
@pytest.mark.parametrize(
    "box", [VoxelBox((3, 4, 5), (18, 29, 37)), VoxelBox((-4, 7, -3), (12, 40, 50))]
)
def test_crop_then_paste_is_the_identity(
    box: VoxelBox, slab_voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SLAB_VOXELS", slab_voxels)
    labels = random_lobes(3, 5)
    region = LOBES.regions[1]
    probs = one_hot(crop_padded(labels, box, 0), LOBES.region_values(region))
    result = merge([(region, probs, GRID.crop(box))], GRID, LOBES)
    inner = box.clipped(GRID.shape).slices()
    np.testing.assert_array_equal(result[inner], labels[inner])
    result[inner] = 0
    assert not result.any()


def test_the_more_probable_region_wins_in_any_order() -> None:
    left, right = VoxelBox((2, 2, 10), (18, 28, 40)), VoxelBox((2, 2, 1), (18, 28, 30))
    full = np.ones(GRID.shape, dtype=np.uint8)
    claims = [
        (LOBES.regions[0], one_hot(crop_padded(full, left, 0), (1, 2), 0.9), GRID.crop(left)),
        (
            LOBES.regions[1],
            one_hot(crop_padded(3 * full, right, 0), (3, 4, 5), 0.7),
            GRID.crop(right),
        ),
    ]
    expected = np.zeros(GRID.shape, dtype=np.uint8)
    expected[right.slices()] = 3
    expected[left.slices()] = 1
    for regions in (claims, claims[::-1]):
        np.testing.assert_array_equal(merge(regions, GRID, LOBES), expected)


def test_of_regions_that_claim_a_voxel_alike_the_earlier_one_wins() -> None:
    box = VoxelBox((2, 2, 2), (10, 10, 10))
    claims = []
    for region in LOBES.regions:
        probs = torch.zeros(len(region.labels), 8, 8, 8)
        probs[-1] = 0.75
        claims.append((region, probs, GRID.crop(box)))
    assert (merge(claims, GRID, LOBES)[box.slices()] == 2).all()
    assert (merge(claims[::-1], GRID, LOBES)[box.slices()] == 5).all()


@pytest.mark.parametrize("fine_mm", [(8.0, 7.0, 7.5), (4.0, 2.5, 3.0), (1.0, 0.5, 0.6)])
def test_no_voxel_is_missed_at_the_border_of_what_a_region_may_claim(
    fine_mm: tuple[float, float, float],
) -> None:
    """Against probabilities that are resampled as a whole, around a block of two labels."""
    fine = GRID.resampled(fine_mm)
    box = VoxelBox.full(fine.shape)
    region = LOBES.regions[0]
    generator = torch.Generator().manual_seed(1)
    probs = torch.full((2, *box.shape), 0.16)  # never more than the background
    middle = [slice(max(1, size // 4), -max(1, size // 4)) for size in box.shape]
    is_first = torch.rand(box.shape, generator=generator) < 0.5
    sure = torch.where(is_first, 0.95, 0.05)
    probs[:, *middle] = torch.stack([sure, 1 - sure])[:, *middle]
    first, second = (
        resample_image(prob, fine.crop(box), GRID, outside=0.0).numpy() for prob in probs
    )
    largest = np.maximum(first, second)
    is_claimed = largest > 1 - first - second + 1e-6
    is_clear = np.abs(largest - (1 - first - second)) > 1e-5
    is_clear &= np.abs(first - second) > 1e-5
    expected = np.where(is_claimed, np.where(first > second, 1, 2), 0)
    result = merge([(region, probs, fine.crop(box))], GRID, LOBES)
    assert (expected > 0).sum() > 20
    np.testing.assert_array_equal(result[is_clear], expected[is_clear])


@pytest.mark.parametrize(
    ("probs", "label"),
    [
        ((0.35, 0.25, 0.0), 0),
        ((0.45, 0.4, 0.0), 3),
        ((0.3, 0.35, 0.3), 4),
        ((0.25, 0.25, 0.25), 0),  # as probable as the background
        ((0.375, 0.375, 0.125), 3),  # the first of equal labels
        ((0.125, 0.375, 0.375), 4),
    ],
)
def test_the_background_is_what_all_labels_of_the_region_leave_of_one(
    probs: tuple[float, ...], label: int
) -> None:
    box = VoxelBox((2, 2, 2), (10, 10, 10))
    everywhere = torch.tensor(probs).view(3, 1, 1, 1).expand(3, 8, 8, 8)
    result = merge([(LOBES.regions[1], everywhere, GRID.crop(box))], GRID, LOBES)
    assert (result[box.slices()] == label).all()


@pytest.mark.parametrize("spacing_mm", [(1.0, 0.7, 0.8), (3.0, 2.5, 1.7)])
@pytest.mark.parametrize("slab_voxels", [1, 4000, 10**9])
def test_the_boxes_of_slabs_leave_no_voxel_out(
    spacing_mm: tuple[float, float, float], slab_voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(7)
    crops = []
    for region, start in zip(LOBES.regions, ((1, 2, 20), (-3, 8, 1)), strict=True):
        num_labels = len(region.labels)
        probs = np.zeros((num_labels, 16, 18, 24), dtype=np.float32)
        # Thin at one end, with a small part far away, and up to the edge of the crop.
        for z in range(12):
            probs[:, z, 4 : 6 + z, : 2 + 2 * z] = 0.1 * rng.random((num_labels, z + 2, 2 + 2 * z))
            for x in range(2 + 2 * z):
                probs[x // 6 % num_labels, z, 4 : 6 + z, x] += 0.6
        probs[0, 13:15, 16, 21:] = 0.9
        crop_grid = GRID.crop(VoxelBox.of(start, np.add(start, (16, 18, 24))))
        crops.append((region, torch.from_numpy(probs), crop_grid))
    target = GRID.resampled(spacing_mm)
    with monkeypatch.context() as patch:
        patch.setattr(joining, "_claimable_box", lambda *arguments: arguments[-1])
        expected = merge(crops, target, LOBES)
    assert len(np.unique(expected)) == 6
    monkeypatch.setattr(joining, "SLAB_VOXELS", slab_voxels)
    np.testing.assert_array_equal(merge(crops, target, LOBES), expected)


def test_nothing_to_join_is_empty() -> None:
    labels = join([], GRID, LOBES)
    assert labels.shape == GRID.shape
    assert labels.dtype == np.uint8
    assert not labels.any()


def test_clean_up_drops_crumbs_and_fills_holes_but_no_other_label() -> None:
    labels = np.zeros((12, 14, 16), dtype=np.uint8)
    labels[1:11, 1:13, 1:9] = 1
    expected = labels.copy()
    labels[4, 4, 4] = 0  # a hole
    labels[6:8, 6:8, 4:6] = 2  # another label within: stays
    labels[3, 9, 3] = 3  # a crumb of another label within: becomes a hole, then filled
    labels[2:6, 2:6, 11:15] = 3
    labels[9, 9, 13] = 1  # a crumb of the first
    expected[6:8, 6:8, 4:6] = 2
    expected[2:6, 2:6, 11:15] = 3
    grid = VoxelGrid(labels.shape, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    results = [
        (region, one_hot(labels, LOBES.region_values(region)), grid) for region in LOBES.regions
    ]
    np.testing.assert_array_equal(join(results, grid, LOBES), expected)


def test_gas_is_no_organ_where_the_task_says_so() -> None:
    probs = np.zeros((1, *GRID.shape), dtype=np.float32)
    probs[0, 2:5, 4:8, 5:10] = 1.0  # parenchyma
    probs[0, 2:6, 12:20, 14:24] = 1.0  # gas, and more of it
    image_hu = np.full(GRID.shape, -1000, dtype=np.int16)
    image_hu[2:5, 4:8, 5:10] = -900
    region = Region("lung", ("lung",))
    results = [(region, torch.from_numpy(probs), GRID)]
    for least_hu, expected in ((-980.0, 60), (None, 380)):
        task = Task(
            "lung", {"lung": 1}, (region,), (Channel(window_hu=(-1000.0, 400.0)),), least_hu
        )
        assert int((join(results, GRID, task, image_hu=image_hu) > 0).sum()) == expected


def test_a_component_of_which_the_coarse_stage_saw_nothing_is_removed() -> None:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    seen, unseen = (
        (slice(2, 8), slice(2, 10), slice(2, 10)),
        (slice(2, 8), slice(14, 22), slice(2, 10)),
    )
    labels[seen] = labels[unseen] = LOBES.labels[LOBES.regions[0].labels[0]]
    probs = one_hot(labels, LOBES.region_values(LOBES.regions[0]))
    coarse_grid = GRID.resampled((4.0, 4.0, 4.0))
    coarse = np.zeros(coarse_grid.shape, dtype=np.uint8)
    results = [(LOBES.regions[0], probs, GRID)]
    assert np.array_equal(join(results, GRID, LOBES), labels)
    for where, values in ((seen, (1, 0)), (seen, (2, 0)), (unseen, (3, 0))):
        # Another label of the region counts, a label of another region does not.
        world = GRID.index_to_world_xyz_mm([(one.start + one.stop - 1) / 2 for one in where])
        z, y, x = np.rint(coarse_grid.world_to_index_zyx(world)).astype(int)
        coarse[:] = values[1]
        coarse[max(z - 1, 0) : z + 2, y - 1 : y + 2, x - 1 : x + 2] = values[0]
        kept = join(results, GRID, LOBES, localisation=Localisation(coarse, coarse_grid, {}, []))
        assert kept[seen].all() == (values[0] in LOBES.region_values(LOBES.regions[0]))
        assert not kept[unseen].any()


@pytest.mark.parametrize(("num_voxels", "is_told"), [(4999, False), (5000, True)])
def test_a_part_of_five_millilitres_that_is_removed_is_told(num_voxels: int, is_told: bool) -> None:
    """Voxels of 1 mm³; the stages agree on a larger part beside it."""
    grid = VoxelGrid((30, 30, 30), (1.0, 1.0, 1.0))
    labels = np.zeros(grid.shape, dtype=np.uint8)
    labels[:12] = 1
    coarse = labels.copy()
    labels[20:].flat[:num_voxels] = 1
    said: list[str] = []
    result = join(
        [(LOBES.regions[0], one_hot(labels, (1, 2)), grid)],
        grid,
        LOBES,
        localisation=Localisation(coarse, grid, {}, []),
        warnings=said,
    )
    np.testing.assert_array_equal(result, coarse)
    sentence = (
        "5 ml that the fine stage called left_upper were removed: they are apart from what the "
        "coarse stage marks"
    )
    assert said == [sentence] * is_told


def test_a_fine_ball_returns_to_an_anisotropic_grid() -> None:
    native = VoxelGrid((15, 60, 70), (5.0, 0.8, 0.7), (-11.0, 20.0, 300.0), OBLIQUE)
    fine = native.resampled((1.0, 1.0, 1.0))

    def ball(grid: VoxelGrid) -> np.ndarray:
        index = np.stack(np.meshgrid(*(np.arange(size) for size in grid.shape), indexing="ij"), -1)
        centre = native.index_to_world_xyz_mm((7.3, 28.0, 36.0))
        return np.linalg.norm(grid.index_to_world_xyz_mm(index) - centre, axis=-1) < 17.0

    box = VoxelBox((10, 2, 4), (66, 46, 46))
    probs = one_hot(ball(fine.crop(box)).astype(np.uint8), (1, 2))
    result = join([(LOBES.regions[0], probs, fine.crop(box))], native, LOBES)
    target = ball(native)
    overlap = 2 * ((result == 1) & target).sum() / ((result == 1).sum() + target.sum())
    assert overlap > 0.98


def test_a_task_without_regions_loses_its_gas_and_keeps_small_parts() -> None:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:12, 12:20, 14:24] = 1  # gas
    labels[2:8, 4:8, 5:10] = 1
    labels[15, 3, 3] = 1
    image_hu = np.where(labels, -900, 40).astype(np.int16)
    image_hu[:, 12:20, 14:24] = -1000
    task = Task("lesions", {"lesion": 1}, (), (Channel(window_hu=(-1000.0, 400.0)),), -980.0)
    result = join(
        [(Region("all", ("lesion",)), one_hot(labels, (1,)), GRID)], GRID, task, image_hu=image_hu
    )
    np.testing.assert_array_equal(result, labels * (image_hu > -980))


@pytest.mark.parametrize("slab_voxels", [1, 10**9])
def test_percent_of_crops_that_overlap_is_the_larger_one(
    slab_voxels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "SLAB_VOXELS", slab_voxels)
    boxes = [VoxelBox((2, 2, 10), (18, 28, 40)), VoxelBox((4, 1, 1), (19, 25, 30))]
    shares = [
        (torch.full(box.shape, share), GRID.crop(box))
        for box, share in zip(boxes, (0.7, 0.31), strict=True)
    ]
    expected = np.zeros(GRID.shape, dtype=np.uint8)
    expected[boxes[1].slices()] = 31
    expected[boxes[0].slices()] = 70
    for order in (shares, shares[::-1]):
        np.testing.assert_array_equal(paste_percent(order, GRID), expected)
