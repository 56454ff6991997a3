from __future__ import annotations

import math

import pytest
import torch

from medseg.losses.presence import PresenceLoss
from medseg.losses.sample_losses import Term, TrainingLoss

SHAPE = (2, 3, 6, 7, 8)


def test_the_pooled_logit_is_the_mean_of_the_largest_margins() -> None:
    logits = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.zeros(2, 6, 7, 8, dtype=torch.int64)
    target[0, 2, 3, :4], target[1, 1] = 2, 1
    expected = []
    for sample, labels in zip(logits, target, strict=True):
        for value in (1, 2):
            count = int((labels == value).sum()) or 10  # a class of four voxels counts by these
            largest = (sample[value] - sample[0]).flatten().sort().values[-min(count, 10) :]
            presence = torch.sigmoid(largest.mean())
            expected.append(-torch.log(presence if (labels == value).any() else 1 - presence))
    assert torch.allclose(PresenceLoss(10)(logits, target), torch.stack(expected).mean())


def test_an_absent_class_is_pushed_down_where_it_is_most_probable() -> None:
    logits = torch.zeros(1, 2, 4, 4, 4)
    logits[0, 1, 0, 0, :2] = 5.0
    logits.requires_grad_()
    PresenceLoss(2)(logits, torch.zeros(1, 4, 4, 4, dtype=torch.int64)).backward()
    assert logits.grad is not None
    changed = logits.grad[0, 1].nonzero().tolist()
    assert changed == [[0, 0, 0], [0, 0, 1]]
    assert bool((logits.grad[0, 1, 0, 0, :2] > 0).all())


def test_an_image_smaller_than_the_pool_counts_whole() -> None:
    logits, target = torch.randn(SHAPE), torch.ones(2, 6, 7, 8, dtype=torch.int64)
    assert torch.equal(PresenceLoss(10**6)(logits, target), PresenceLoss(6 * 7 * 8)(logits, target))
    assert torch.isfinite(PresenceLoss(1)(logits, target)), "one voxel may decide"
    with pytest.raises(ValueError, match="at least 1"):
        PresenceLoss(0)


def test_ignored_voxels_are_left_out() -> None:
    """A class that only an ignored voxel predicts counts as absent and not predicted."""
    logits = torch.zeros(1, 2, 3, 3, 3)
    logits[0, 1] = -4.0
    logits[0, 1, 0, 0, 0] = 9.0
    target = torch.zeros(1, 3, 3, 3, dtype=torch.uint8)
    target[0, 0, 0, 0] = 255
    loss = TrainingLoss([Term(1.0, PresenceLoss(1), "indices")], ignore_value=255)
    assert float(loss(logits, target)) == pytest.approx(math.log1p(math.exp(-4.0)), rel=1e-4)
