"""Adapter from label maps of one case to any metric of MONAI or torchmetrics."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Metrics of MONAI that are distances: 0 is best, and infinity worst.
DISTANCES = ("HausdorffDistanceMetric", "SurfaceDistanceMetric")


class CaseMetric:
    """Score of one case by an object of MONAI or torchmetrics.

    A metric of MONAI gets one-hot maps (1, K, D, H, W), and the voxel spacing where it takes one; a
    metric of torchmetrics gets label maps (1, D, H, W). The score is the mean over the classes that
    have one; a class that neither map contains may be NaN. One of MONAI's `DISTANCES` is infinite
    for a class that only one map contains.

    Args:
        metric: Object with `reset`; a call returns the score of a batch.
        num_classes: Classes K with the background.
    """

    def __init__(self, metric: Any, num_classes: int) -> None:
        self.metric = metric
        self.num_classes = num_classes
        # The metric may be of a user's own class, derived from one of MONAI or torchmetrics. By the
        # names of modules and classes, so that neither need be imported.
        bases = type(metric).__mro__
        self.is_monai = any(base.__module__.startswith("monai.") for base in bases)
        has_name = any(base.__name__ == "MeanIoU" for base in bases)
        self.is_mean_iou = has_name and not self.is_monai
        self.is_distance = self.is_monai and any(base.__name__ in DISTANCES for base in bases)
        self.takes_spacing = False
        # MONAI's method that scores a batch. In metrics of distances it has `**kwargs`, which may
        # contain the spacing; the few others that have it ignore the spacing.
        score_batch = getattr(metric, "_compute_tensor", None)
        if score_batch is not None:
            parameters = inspect.signature(score_batch).parameters.values()
            kinds = [parameter.kind for parameter in parameters]
            self.takes_spacing = inspect.Parameter.VAR_KEYWORD in kinds

    def __call__(
        self, pred_labels: Tensor, target_labels: Tensor, spacing_mm: tuple[float, float, float]
    ) -> float:
        """Score a case.

        Args:
            pred_labels: Integers in [0, K), (D, H, W).
            target_labels: Labels of the reference, likewise.
            spacing_mm: Voxel spacing in mm, (z, y, x).

        Returns:
            The score; NaN where no class has one.
        """
        try:
            raw_scores = self._call_metric(pred_labels, target_labels, spacing_mm)
        finally:
            # Metrics accumulate over calls: the state of this case must not count for the next.
            self.metric.reset()
        # One number, or one for each class.
        scores = torch.as_tensor(raw_scores, dtype=torch.float64)
        if self.is_mean_iou:
            # Torchmetrics gives -1 to a class that neither map contains.
            scores = scores.masked_fill(scores < 0, torch.nan)
        return float(scores.nanmean())

    def _call_metric(
        self, pred_labels: Tensor, target_labels: Tensor, spacing_mm: tuple[float, float, float]
    ) -> Any:
        """Call the metric with the arguments that its library takes."""
        if not self.is_monai:
            metric = self.metric.to(pred_labels.device)
            return metric(pred_labels.long()[None], target_labels.long()[None])
        pred = _one_hot(pred_labels, self.num_classes)
        target = _one_hot(target_labels, self.num_classes)
        options = {}
        if self.takes_spacing:
            options["spacing"] = list(spacing_mm)
        scores = self.metric(pred, target, **options)
        if scores.ndim <= 2:  # (1, K), or without the background
            return _with_infinities(scores, pred, target) if self.is_distance else scores
        # Some metrics, such as `ConfusionMatrixMetric`, return counts (1, K, 4), from which only
        # `aggregate` computes a list of scores. By default it first adds up the counts of all
        # classes, so that large classes would hide small ones.
        aggregated = self.metric.aggregate(reduction="none")
        # `PanopticQualityMetric` gives a tensor: its maps would have to be of instances.
        if not isinstance(aggregated, list):
            raise ValueError("it does not score label maps")
        if len(aggregated) != 1:
            raise ValueError(f"it gives {len(aggregated)} scores; let it compute one")
        return aggregated[0]


def default_arguments(
    _: type, parameters: Iterable[str], stated: Iterable[str], num_classes: int
) -> dict[str, Any]:
    """Choose the arguments that make a metric accept label maps of a task.

    They are arguments of torchmetrics; `make_metrics` calls this for MONAI's metrics too, of which
    some take `num_classes`.

    Args:
        _: Class of the metric; not used here. The function for transforms, which is called in the
            same way, uses the class.
        parameters: Names of the arguments that the class takes.
        stated: Names of the arguments that the user states, which stay as they are.
        num_classes: Classes with the background.

    Returns:
        Arguments to add to the stated ones.
    """
    # `input_format="index"`: labels instead of one-hot maps.
    defaults = {"num_classes": num_classes, "input_format": "index"}
    added: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in parameters and name not in stated:
            added[name] = value
    return added


def check_metric(metric: CaseMetric) -> None:
    """Try a metric on a small case that contains all classes.

    Raises:
        ValueError: If the metric raises any exception.
    """
    # The labels 0, 1, …, K - 1, over and over.
    labels = torch.arange(8**3).remainder(metric.num_classes)
    labels = labels.reshape(8, 8, 8).to(torch.uint8)
    try:
        metric(labels, labels, (1.0, 1.0, 1.0))
    except Exception as error:  # code of others, which may raise anything
        raise ValueError(
            f"it cannot score label maps of a case ({type(error).__name__}: {error})"
        ) from error


def _with_infinities(scores: Tensor, pred: Tensor, target: Tensor) -> Tensor:
    """Make distances infinite that MONAI could not compute, since only one map has the class.

    MONAI gives NaN for a percentile of such distances, because it interpolates between infinities.
    The mean over the classes would leave NaN out, and hide that the class was missed.

    Args:
        scores: Distance of each class, (1, K), or without that of the background.
        pred: One-hot map of the prediction, (1, K, D, H, W).
        target: One-hot map of the reference, likewise.
    """
    is_in_one_map = pred.flatten(2).any(2) != target.flatten(2).any(2)  # (1, K)
    is_missed = is_in_one_map[:, -scores.shape[-1] :]
    return scores.masked_fill(scores.isnan() & is_missed, torch.inf)


def _one_hot(labels: Tensor, num_classes: int) -> Tensor:
    """Make a one-hot map (1, K, D, H, W) of labels (D, H, W)."""
    return torch.stack([labels == value for value in range(num_classes)])[None].float()
