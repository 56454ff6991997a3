"""Metrics of MONAI and torchmetrics for label maps of one case."""

from __future__ import annotations

import math
from typing import Any

import monai.metrics
import pytest
import torch
import torchmetrics.classification
import torchmetrics.segmentation

from medseg.metrics.case_metric import CaseMetric, default_arguments
from medseg.metrics.scores import dice_per_label

SPACING_MM = (2.0, 1.0, 1.5)


def maps() -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.zeros(12, 14, 16, dtype=torch.uint8)
    target[2:8, 3:9, 2:7] = 1
    target[3:9, 3:11, 9:14] = 2
    return target.roll((1, 0, 1), (0, 1, 2)), target


@pytest.mark.parametrize(
    "metric",
    [
        monai.metrics.DiceMetric(include_background=False),
        torchmetrics.segmentation.DiceScore(
            num_classes=3, include_background=False, input_format="index", average="macro"
        ),
    ],
    ids=["monai", "torchmetrics"],
)
def test_dice_is_the_mean_of_ours(metric: Any) -> None:
    pred, target = maps()
    expected = sum(dice_per_label(pred, target, (1, 2)).values()) / 2
    adapted = CaseMetric(metric, 3)
    assert adapted(pred, target, SPACING_MM) == pytest.approx(expected, abs=1e-5)
    assert adapted(target, target, SPACING_MM) == pytest.approx(1.0), "no case remembers another"


def test_counts_of_monai_become_a_score() -> None:
    pred, target = maps()
    metric = monai.metrics.ConfusionMatrixMetric(
        metric_name="sensitivity", compute_sample=True, include_background=False
    )
    hits = [float((pred == value)[target == value].float().mean()) for value in (1, 2)]
    adapted = CaseMetric(metric, 3)
    assert adapted(pred, target, SPACING_MM) == pytest.approx(sum(hits) / 2, abs=1e-5)
    assert adapted(target, target, SPACING_MM) == pytest.approx(1.0), "no case remembers another"
    f_score = CaseMetric(monai.metrics.FBetaScore(include_background=False), 3)
    dices = dice_per_label(pred, target, (1, 2)).values()
    assert f_score(pred, target, SPACING_MM) == pytest.approx(sum(dices) / 2, abs=1e-5)
    only_first = target * (target == 1)
    assert f_score(only_first, only_first, SPACING_MM) == pytest.approx(1.0), "no class 2"


class OwnDice(monai.metrics.DiceMetric):
    """A metric of a user, in a module of the user."""


def test_an_own_class_derived_from_one_of_monai_is_one_of_monai() -> None:
    _, target = maps()
    assert CaseMetric(OwnDice(), 3)(target, target, SPACING_MM) == pytest.approx(1.0)


def test_several_scores_of_a_metric_are_refused() -> None:
    names = ["sensitivity", "precision"]
    several = CaseMetric(monai.metrics.ConfusionMatrixMetric(metric_name=names), 3)
    with pytest.raises(ValueError, match="gives 2 scores"):
        several(*maps(), SPACING_MM)
    of_instances = CaseMetric(monai.metrics.PanopticQualityMetric(num_classes=2), 2)
    pred, target = maps()
    with pytest.raises(ValueError, match="does not score label maps"):
        of_instances(pred == 1, target == 1, SPACING_MM)


def test_intersection_over_union_of_torchmetrics() -> None:
    pred, target = maps()
    dice = dice_per_label(pred, target, (1, 2))
    background = dice_per_label(pred, target, (0,))[0]
    expected = sum(score / (2 - score) for score in (background, *dice.values())) / 3
    assert CaseMetric(torchmetrics.classification.MulticlassJaccardIndex(3), 3)(
        pred, target, SPACING_MM
    ) == pytest.approx(expected, abs=1e-5)


class OwnOverlap(torchmetrics.segmentation.MeanIoU):
    """A metric of a user, in a module of the user."""


@pytest.mark.parametrize("overlap", [torchmetrics.segmentation.MeanIoU, OwnOverlap])
def test_a_class_that_both_lack_has_no_share_in_the_mean(overlap: Any) -> None:
    _, target = maps()
    per_class = overlap(num_classes=4, per_class=True, input_format="index")
    adapted = CaseMetric(per_class, 4)
    assert adapted(target, target, SPACING_MM) == pytest.approx(1.0)
    # A class that one of the two has counts with 0.
    missed = target * (target != 2)
    is_background = target == 0
    background = float(is_background.sum() / (missed == 0).sum())
    assert adapted(missed, target, SPACING_MM) == pytest.approx((background + 1.0 + 0.0) / 3)


def test_distances_are_in_mm_and_a_missing_class_has_no_score() -> None:
    _, target = maps()
    distance = CaseMetric(monai.metrics.HausdorffDistanceMetric(include_background=False), 3)
    assert distance(target.roll(1, 0), target, SPACING_MM) == pytest.approx(2.0)
    assert distance(target.roll(1, 2), target, SPACING_MM) == pytest.approx(1.5)
    empty = torch.zeros_like(target)
    assert math.isnan(
        CaseMetric(monai.metrics.DiceMetric(include_background=False), 3)(empty, empty, SPACING_MM)
    )


@pytest.mark.parametrize("percentile", [None, 95])
@pytest.mark.parametrize("include_background", [True, False])
def test_the_distance_of_a_class_that_one_map_lacks_is_infinite(
    percentile: float | None, include_background: bool
) -> None:
    """MONAI's percentile of it is NaN, which the mean over the classes would leave out."""
    _, target = maps()
    metric = monai.metrics.HausdorffDistanceMetric(
        include_background=include_background, percentile=percentile
    )
    missed = target * (target != 2)
    distance = CaseMetric(metric, 3)
    assert distance(missed, target, SPACING_MM) == math.inf
    assert distance(target, missed, SPACING_MM) == math.inf
    assert distance(missed, missed, SPACING_MM) == 0.0, "a class that both lack has no distance"


class OwnRecall(monai.metrics.CumulativeIterationMetric):
    """Recall of each class, with the arguments of a distance; NaN where the reference lacks it."""

    def _compute_tensor(
        self, y_pred: torch.Tensor, y: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        assert y is not None
        return (y_pred * y).flatten(2).sum(2) / y.flatten(2).sum(2)

    def aggregate(self, *_: Any, **__: Any) -> Any:
        return self.get_buffer()


def test_a_score_that_is_no_distance_does_not_become_infinite() -> None:
    """Its classes without a score do not count."""
    _, target = maps()
    lacking = target * (target != 2)
    recall = CaseMetric(OwnRecall(), 3)
    background_recall = float((target == 0).sum() / (lacking == 0).sum())
    assert recall(target, lacking, SPACING_MM) == pytest.approx((background_recall + 1) / 2)


def test_torchmetrics_learns_the_number_of_classes() -> None:
    assert default_arguments(object, ["num_classes", "input_format"], [], 4) == {
        "num_classes": 4,
        "input_format": "index",
    }
    assert default_arguments(object, ["num_classes"], ["num_classes"], 4) == {}
