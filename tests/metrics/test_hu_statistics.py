"""HU statistics of labels against numpy on the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from medseg.geometry.grid import VoxelGrid
from medseg.metrics import hu_statistics as intensity
from medseg.metrics.hu_statistics import HU_FIGURES, PERCENTILES, scan_statistics

GRID = VoxelGrid((11, 30, 40), (2.5, 0.7, 0.9))
VALUES = {"left": 1, "right": 3, "absent": 2}


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
@pytest.mark.parametrize("order", ["C", "F"])
def test_figures_are_those_of_numpy(
    monkeypatch: pytest.MonkeyPatch, dtype: type, order: str
) -> None:
    monkeypatch.setattr(intensity, "SLAB_VOXELS", 4 * 30 * 40)  # three slabs, the last one smaller
    noise = np.random.default_rng(0)
    image = np.asarray(noise.normal(-850, 120, GRID.shape).round(), dtype=dtype, order=order)
    labels = np.asarray(
        noise.integers(0, 2, GRID.shape) * noise.choice([1, 3], GRID.shape),
        dtype=np.uint8,
        order=order,
    )
    statistics = scan_statistics(image, labels, GRID, VALUES)
    figures_of = statistics.labels
    for name, value in (("left", 1), ("right", 3)):
        label_hu = image[labels == value].astype(np.float64)
        expected = [
            round(label_hu.size * 2.5 * 0.7 * 0.9 / 1000, 2),
            round(label_hu.mean(), 2),
            *(np.percentile(label_hu, percent, method="inverted_cdf") for percent in PERCENTILES),
            round((label_hu < -950).mean(), 4),
        ]
        assert list(figures_of[name].values()) == expected
        assert tuple(figures_of[name]) == ("ml", *HU_FIGURES)
    assert figures_of["absent"] == {"ml": 0.0, **dict.fromkeys(HU_FIGURES)}
    both = image[labels > 0].astype(np.float64)
    assert statistics.total["mean_hu"] == round(both.mean(), 2)
    assert statistics.total["p15_hu"] == np.percentile(both, 15, method="inverted_cdf")
    assert statistics.total["ml"] == round(both.size * 2.5 * 0.7 * 0.9 / 1000, 2)


def test_metal_does_not_change_the_mean_and_the_bounds_count_as_they_are() -> None:
    image = np.array([-3024, -951, -950, 30000], dtype=np.int16).reshape(1, 2, 2)
    figures = scan_statistics(
        image,
        np.ones_like(image, dtype=np.uint8),
        VoxelGrid((1, 2, 2), (1.0, 1.0, 1.0)),
        {"all": 1},
    ).labels["all"]
    assert figures["mean_hu"] == round((-3024 - 951 - 950 + 30000) / 4, 2)
    assert figures["share_below_minus_950_hu"] == 0.5


def test_without_hu_there_are_volumes_alone() -> None:
    labels = np.ones(GRID.shape, dtype=np.uint8)
    figures = scan_statistics(None, labels, GRID, {"left": 1}).labels["left"]
    assert figures["ml"] == round(11 * 30 * 40 * 2.5 * 0.7 * 0.9 / 1000, 2)
    assert [figures[name] for name in HU_FIGURES] == [None] * len(HU_FIGURES)


def test_values_between_whole_numbers_count_as_the_nearest() -> None:
    """A percentile is a whole HU; the mean is that of the values as they are."""
    image = np.array([-900.4, -900.6, -849.5001, 30.5001], dtype=np.float32).reshape(1, 2, 2)
    figures = scan_statistics(
        image,
        np.ones(image.shape, dtype=np.uint8),
        VoxelGrid((1, 2, 2), (1.0, 1.0, 1.0)),
        {"all": 1},
    ).labels["all"]
    assert [figures[f"p{percent}_hu"] for percent in PERCENTILES] == [-901, -901, -900, 31]
    assert figures["mean_hu"] == -655.0


def test_the_volume_of_a_small_label_is_not_rounded_to_0() -> None:
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    labels[1, 2, 3:6] = 1
    for spacing_mm, expected_ml in ((1.0, 0.003), (0.01, 3e-9)):
        grid = VoxelGrid(labels.shape, (spacing_mm, spacing_mm, spacing_mm))
        assert scan_statistics(None, labels, grid, {"lesion": 1}).total["ml"] == expected_ml
