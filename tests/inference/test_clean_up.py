"""Clean-up of a model, against scipy on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from medseg.geometry.grid import VoxelGrid
from medseg.inference.clean_up import check_clean_up, clean
from medseg.task import Channel, CleanUp, Region, Task

GRID = VoxelGrid((20, 30, 40), (5.0, 2.0, 1.0), (0.0, 0.0, 0.0))  # a voxel has 0.01 ml
TASK = Task("t", {"liver": 1, "spleen": 2}, (), (Channel(window_hu=(-1000.0, 0.0)),))


def noise(seed: int) -> np.ndarray:
    """Make a label map of two labels with components of many sizes, and with holes."""
    rng = np.random.default_rng(seed)
    field = ndimage.gaussian_filter(rng.normal(size=GRID.shape), 1.2)
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[field > 0.03] = 1
    labels[field < -0.12] = 2
    return labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("min_ml", [0.0, 0.05, 0.5, 1e6])
@pytest.mark.parametrize("only_largest", [True, False])
def test_small_components_go_and_the_largest_stays(
    seed: int, min_ml: float, only_largest: bool
) -> None:
    labels = noise(seed)
    cleaned = labels.copy()
    clean(cleaned, GRID, TASK, [CleanUp("liver", min_ml, only_largest)])
    parts, _ = ndimage.label(labels == 1)
    sizes = np.bincount(parts.reshape(-1))[1:]
    least = sizes.max() if only_largest else min(100 * min_ml, sizes.max())
    is_kept = np.isin(parts, 1 + np.flatnonzero(sizes >= least))
    np.testing.assert_array_equal(cleaned, np.where((labels == 1) & ~is_kept, 0, labels))


def test_holes_are_filled_after_all_components_are_removed() -> None:
    """A speck of one label in a hole of another is removed before the hole is filled."""
    labels = np.zeros(GRID.shape, dtype=np.uint8)
    labels[2:12, 2:12, 2:12] = 1
    labels[5:8, 5:8, 5:8] = 0
    labels[6, 6, 6] = 2
    labels[14:18, 14:18, 14:18] = 2
    cleaned = labels.copy()
    clean_ups = [CleanUp("liver", fill_holes=True), CleanUp("spleen", only_largest=True)]
    clean(cleaned, GRID, TASK, clean_ups)
    assert (cleaned[2:12, 2:12, 2:12] == 1).all()
    assert np.count_nonzero(cleaned == 2) == 64


@pytest.mark.parametrize("seed", range(2))
def test_a_region_of_several_labels_is_one_part(seed: int) -> None:
    region = Region("trunk", ("liver", "spleen"))
    task = Task("t", TASK.labels, (region,), TASK.channels)
    labels = noise(seed)
    cleaned = labels.copy()
    clean(cleaned, GRID, task, [CleanUp("trunk", only_largest=True)])
    parts, _ = ndimage.label(labels > 0)
    largest = 1 + np.bincount(parts.reshape(-1))[1:].argmax()
    np.testing.assert_array_equal(cleaned, np.where(parts == largest, labels, 0))
    with pytest.raises(ValueError, match="trunk has 2 labels, expected one"):
        check_clean_up(CleanUp("trunk", fill_holes=True), task)
    with pytest.raises(KeyError):
        check_clean_up(CleanUp("kidney"), task)
