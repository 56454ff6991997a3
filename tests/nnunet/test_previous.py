"""Label maps of a previous stage: a winner for each voxel, computed plane by plane."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from medseg.nnunet.plan import NONE, SPLINE, PlanError, ResamplingPlan
from medseg.nnunet.previous import BEYOND, resample_previous

TOGETHER = ResamplingPlan(SPLINE, 1, False)


def resampled(
    labels: np.ndarray, shape: tuple[int, int, int], plan: ResamplingPlan = TOGETHER
) -> np.ndarray:
    target = torch.zeros(shape)
    resample_previous(labels.astype(np.int16), target, plan, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    return target.numpy()


@pytest.mark.parametrize("shape", [(9, 7, 8), (4, 5, 3), (5, 6, 12)])
def test_the_largest_of_whole_interpolated_indicators_wins(shape: tuple[int, int, int]) -> None:
    """Against scipy on the whole map, with ties settled by the nearest voxel where it is tied."""
    labels = np.random.default_rng(0).integers(BEYOND, 4, (5, 6, 6))
    factors = np.divide(shape, labels.shape)

    def zoomed(array: np.ndarray, order: int) -> np.ndarray:
        result: np.ndarray = zoom(array, factors, order=order, mode="nearest", grid_mode=True)
        return result

    values = np.unique(labels)
    scores = np.stack([zoomed((labels == value).astype(float), 1) for value in values]).clip(0, 1)
    expected = values[scores.argmax(0)]
    nearest = zoomed(labels.astype(float), 0)
    is_tied = np.take_along_axis(
        scores, np.searchsorted(values, nearest)[None].astype(int), axis=0
    )[0] == scores.max(0)
    expected[is_tied] = nearest[is_tied]
    assert np.array_equal(resampled(labels, shape), expected)


def test_four_labels_that_meet_leave_no_voxel_without_a_label() -> None:
    """Each has a share below one half, where older versions left the background."""
    labels = np.array([[[1, 2], [3, 4]]])
    assert 0 not in resampled(labels, (1, 3, 3))


def test_the_same_shape_is_copied() -> None:
    labels = np.arange(24).reshape(2, 3, 4)
    plan = ResamplingPlan(NONE, 1, False)
    assert np.array_equal(resampled(labels, labels.shape, plan), labels)
    with pytest.raises(PlanError, match="asks for no_resampling_hack of labels"):
        resampled(labels, (3, 3, 4), plan)
