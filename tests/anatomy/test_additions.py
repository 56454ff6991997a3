"""Parts that only the coarse stage finds: thick ones are added, others lose no voxel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medseg.anatomy.additions import add_coarse_parts, thick_parts
from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.task import Channel, Region, Task

TASK = Task(
    "organs",
    {"shell": 1, "core": 2, "other": 3},
    (Region("organ", ("shell", "core")), Region("neighbour", ("other",))),
    (Channel("mr", None, "zscore"),),
)
GRID = VoxelGrid((20, 24, 28), (4.0, 4.0, 4.0), (0.0, 0.0, 0.0))
ORGAN = (slice(4, 16), slice(6, 18), slice(6, 20))
SPACINGS = [(4.0, 4.0, 4.0), (4.1, 4.1, 4.1), (2.0, 2.0, 2.0), (5.0, 2.0, 2.0), (8.0, 4.0, 4.0)]


def ball(spacing_mm: tuple[float, float, float], radius_mm: float) -> np.ndarray:
    z, y, x = (mm * (np.arange(round(140 / mm)) + 0.5) - 70 for mm in spacing_mm)
    return z[:, None, None] ** 2 + y[:, None] ** 2 + x**2 < radius_mm**2


@pytest.mark.parametrize("spacing_mm", SPACINGS)
def test_an_outline_is_thin_and_half_a_ball_is_thick(
    spacing_mm: tuple[float, float, float],
) -> None:
    whole = ball(spacing_mm, 60.0)
    smaller = (
        whole
        & np.roll(whole, 1, 0)
        & np.roll(whole, -1, 0)
        & np.roll(whole, 1, 1)
        & np.roll(whole, -1, 1)
    )
    outline = whole & ~(smaller & np.roll(whole, 1, 2) & np.roll(whole, -1, 2))
    assert not thick_parts(outline, spacing_mm, 8.0).any()
    half = whole.copy()
    half[: len(half) // 2] = False
    kept = thick_parts(half | outline, spacing_mm, 8.0)
    assert not kept[~(half | outline)].any()
    assert kept[half].mean() > 0.98
    assert kept[outline & ~half].mean() < 0.15


def test_the_border_of_the_scan_makes_no_part_thin() -> None:
    mask = np.zeros(GRID.shape, dtype=bool)
    mask[:1, 6:18, 6:20] = True
    assert thick_parts(mask, GRID.spacing_mm, 8.0).sum() > 0.9 * mask.sum()
    assert not thick_parts(np.roll(mask, 5, axis=0), GRID.spacing_mm, 8.0).any()


@pytest.mark.parametrize("offset", [0.0, 0.7, 1.5, 2.3, 3.1])
def test_an_added_half_joins_the_fine_half_without_a_gap(offset: float) -> None:
    """Half of the organ is consolidated; the fine border lies anywhere within a coarse voxel."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[ORGAN] = 1
    labels[12:16][labels[12:16] == 1] = 2
    crop_grid = GRID.crop(VoxelBox((2, 4, 4), (18, 20, 22))).resampled((1.0, 1.0, 1.0))
    (_, top, left) = np.rint(crop_grid.world_to_index_zyx((22.0, 22.0, 22.0))).astype(int)
    probs = torch.zeros((2, *crop_grid.shape), dtype=torch.float16)
    first, middle, last = (
        int(crop_grid.world_to_index_zyx((0.0, 0.0, 4.0 * i - 2 + offset))[0]) for i in (4, 9, 16)
    )
    inside = (slice(top, top + 48), slice(left, left + 56))
    probs[0, first:middle, *inside] = 1.0
    added = add_coarse_parts(
        labels, GRID, None, [(TASK.regions[0], probs, crop_grid)], TASK, 8.0, []
    )
    along_z = (probs.sum(0)[first : last - 2, inside[0], inside[1]] > 0.5).float().mean((1, 2))
    assert float(along_z.min()) > 0.9
    # Each added voxel has the label of the coarse stage.
    assert float((probs[1] > 0.5).sum()) / 64 == pytest.approx((labels == 2).sum(), rel=0.05)
    assert added["organ"].sum() > 0.9 * (labels[9:] > 0).sum()
    assert float(probs.sum(0).max()) <= 1.01


def test_a_part_is_not_added_if_most_of_it_lies_beside_the_patient() -> None:
    labels, beyond = np.zeros(GRID.shape, dtype=np.uint8), np.zeros(GRID.shape, dtype=bool)
    labels[ORGAN] = 1
    foam = (slice(4, 16), slice(6, 18), slice(23, 28))
    labels[foam] = 1
    beyond[:, :, 25:] = True
    beyond[:, :, 19] = True  # a seventh of the other part
    probs = torch.zeros((2, *GRID.shape), dtype=torch.float16)
    probs[0, 4:16, 6:18, 6:10] = 1.0
    warnings: list[str] = []
    added = add_coarse_parts(
        labels, GRID, beyond, [(TASK.regions[0], probs, GRID)], TASK, 8.0, warnings
    )["organ"]
    assert added[ORGAN].sum() > 0.5 * (labels[ORGAN] > 0).sum()
    assert not added[foam].any()
    assert not probs[0].numpy()[foam].any()
    assert not labels[foam].any(), "it is no part of what the stages agree on"
    assert warnings == [
        (
            "organ: 46 ml that the coarse stage alone found were not added: they lie beside the "
            "patient, as foam of the table and blankets do"
        )
    ]


def test_what_the_fine_stage_gives_to_another_region_stays_there() -> None:
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[ORGAN] = 1
    mine, others = (torch.zeros((count, *GRID.shape), dtype=torch.float16) for count in (2, 1))
    mine[0, 4:16, 6:18, 6:12] = 1.0
    others[0, 4:16, 6:18, 12:20] = 0.9
    before = mine.clone()
    added = add_coarse_parts(
        labels,
        GRID,
        None,
        [(TASK.regions[0], mine, GRID), (TASK.regions[1], others, GRID)],
        TASK,
        8.0,
        [],
    )
    assert not any(mask.any() for mask in added.values())
    assert torch.equal(mine, before)


@pytest.mark.parametrize(("num_planes", "is_thick"), [(3, False), (5, True)])
def test_a_layer_is_thick_if_a_ball_of_the_diameter_fits(num_planes: int, is_thick: bool) -> None:
    """Distances count to centres of voxels outside: three planes of 1 mm hold less than 4 mm."""
    mask = np.zeros((15, 30, 30), dtype=bool)
    mask[5 : 5 + num_planes, 3:27, 3:27] = True
    assert thick_parts(mask, (1.0, 1.0, 1.0), 4.0).any() == is_thick
