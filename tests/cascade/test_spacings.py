"""Whatever grid a stage works on, results lie on the input's grid and keep their side."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import GRID, RULES, TASK, CoarseOracle, FineOracle, dice, scan, stage

from medseg.cascade.cascade import Cascade
from medseg.geometry.grid_rule import GridRule
from medseg.preprocess.orient import Orientation

STORED = [
    Orientation((0, 1, 2), (False, False, False)),
    Orientation((2, 0, 1), (True, False, True)),
]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("coarse_mm", [None, (4.0, 2.0, 2.5)])
@pytest.mark.parametrize("fine_mm", [None, (3.0, 1.0, 0.8)])
def test_every_grid_comes_back_to_the_input(
    coarse_mm: tuple[float, float, float] | None,
    fine_mm: tuple[float, float, float] | None,
    stored: Orientation,
) -> None:
    volume, labels = scan(stored)
    coarse, fine = (
        stage(CoarseOracle(), "coarse", spacing_mm=coarse_mm),
        stage(FineOracle(), "fine", spacing_mm=fine_mm),
    )
    result = Cascade(coarse, fine).segment(volume)
    assert result.labels.shape == volume.array.shape
    for value in TASK.labels.values():
        assert dice(result.labels == value, labels == value) > 0.95
    if fine_mm is None:
        np.testing.assert_array_equal(result.labels, labels)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_the_coarse_stage_finds_the_regions(rule: str, stored: Orientation) -> None:
    volume, labels = scan(stored)
    spacing_mm, how = RULES[rule]
    result = Cascade(
        stage(CoarseOracle(), "coarse", spacing_mm=spacing_mm, rule=how),
        stage(FineOracle(), "fine"),
    ).segment(volume)
    lies_right(result.labels, labels)
    for region in TASK.regions:
        values = TASK.region_values(region)
        places = np.argwhere(np.isin(labels, values))
        corners = volume.grid.world_to_index_zyx(result.boxes[region.name].grid.corners_xyz_mm())
        assert (corners.min(0) <= places.min(0)).all()
        assert (corners.max(0) >= places.max(0)).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_of_the_fine_stage_comes_back_to_the_input(
    rule: str, stored: Orientation
) -> None:
    volume, labels = scan(stored)
    spacing_mm, how = RULES[rule]
    result = Cascade(
        stage(CoarseOracle(), "coarse"),
        stage(FineOracle(), "fine", spacing_mm=spacing_mm, rule=how),
    ).segment(volume)
    lies_right(result.labels, labels)


def lies_right(result: np.ndarray, labels: np.ndarray) -> None:
    """Each side is where the reference has it: Dice, volume (3 %), centroid (1/3 voxel)."""
    assert result.shape == labels.shape
    for value in TASK.labels.values():
        pred, target = result == value, labels == value
        assert dice(pred, target) > 0.95
        assert pred.sum() == pytest.approx(target.sum(), rel=0.03)
        centroids = [np.argwhere(mask).mean(0) for mask in (pred, target)]
        np.testing.assert_allclose(*centroids, atol=0.34)


def test_a_bent_crop_is_told_and_undone() -> None:
    volume, labels = scan()
    flat = GridRule(size=(24, 96, 64))
    result = Cascade(
        stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine", spacing_mm=None, rule=flat)
    ).segment(volume)
    lies_right(result.labels, labels)
    assert set(result.distortions) == {"refine_left_lung", "refine_right_lung"}
    for region in TASK.regions:
        box = result.boxes[region.name]
        assert box.grid.shape == flat.size
        spacing_mm = box.grid.spacing_mm
        bent = result.distortions[f"refine_{region.name}"]
        assert bent == max(spacing_mm) / min(spacing_mm) > 2
        (said,) = (warning for warning in result.warnings if warning.startswith(f"{region.name}: "))
        assert f"were resized to 24×96×64 voxels, a distortion of {bent:.1f}" in said
        # The crop measures the block and at least 6 mm on each side of it, less than a coarse voxel
        # and a slice more.
        extent_mm = np.multiply(flat.size, spacing_mm)
        tight_mm = np.multiply(
            [np.ptp(axis) + 1 for axis in np.nonzero(labels == TASK.labels[region.name])],
            GRID.spacing_mm,
        )
        assert (extent_mm >= tight_mm + 12 - 1e-6).all()
        assert (extent_mm <= tight_mm + 12 + 2 * (2.0 + 2 * np.array(GRID.spacing_mm))).all()


def test_without_a_fixed_size_nothing_is_bent() -> None:
    volume, _ = scan()
    assert (
        Cascade(stage(CoarseOracle(), "coarse"), stage(FineOracle(), "fine"))
        .segment(volume)
        .distortions
        == {}
    )
