"""Lightning module of a stage: training step, validation by whole cases, checkpoint content."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from medseg.data.sampler import torch_seed
from medseg.inference.tiles import most_probable, predict_probs
from medseg.losses.sample_losses import mean_of_samples, sample_losses
from medseg.memory.profile import release_free_memory
from medseg.memory.switches import uncompiled
from medseg.metrics.case_metric import CaseMetric
from medseg.metrics.scores import dice_per_label
from medseg.training.averaging import WeightAverage
from medseg.weights.files import NETWORK_PREFIX

Stack = dict[str, Any]
"""Samples of one shape: by key a tensor or a list with one entry per sample."""
Batch = list[Stack]
"""Stacks of a micro-batch, made by `medseg.data.samples.collate`."""

# Key of a checkpoint. Where its `state_dict` is the moving average of the weights, the weights from
# which the next step starts are kept here.
RAW_WEIGHTS = "raw_weights"


class SegmentationModule(pl.LightningModule):
    """Trains a network on patches or whole crops and scores it on whole cases.

    Args:
        network: From an image to logits; its `divisor` is the required multiple of the input size.
        loss: Called as `loss(logits, target)`.
        make_optimizer: From parameters to an optimiser.
        make_schedule: From an optimiser to a schedule that is stepped once per optimiser step.
        seed: Seed of the run; torch is reseeded from (seed, step, number of the first sample) for
            each stack of samples, so that dropout depends on nothing else.
        accumulate: Micro-batches per optimiser step.
        tile_size: Sliding window of the validation, voxels (D, H, W); None = the whole crop.
        overlap: Share of a tile that it has in common with its neighbour.
        ema_decay: Validate and save the exponential moving average of the weights; None = the
            weights themselves.
        metadata: Checkpoint metadata; plain types only, so that it loads with `weights_only=True`.
        metrics: Further scores of a validation case by name, each logged as `val/<name>`.

    Attributes:
        average: Moving average of the weights; None without `ema_decay`.
        train_loss: Loss of the last micro-batch, on its device.
        val_scores: Scores of the present validation so far, from this rank. The key is the name of
            the case, the number of its region, and the class (of a Dice) or the name of the metric:
            a case that two ranks score counts once.
        case_scores: The same of the last validation, from all ranks.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        make_schedule: Callable[[torch.optim.Optimizer], Any],
        *,
        seed: int,
        accumulate: int,
        tile_size: tuple[int, int, int] | None,
        overlap: float,
        ema_decay: float | None,
        metadata: dict[str, Any],
        metrics: Mapping[str, CaseMetric] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.loss = loss
        self.make_optimizer = make_optimizer
        self.make_schedule = make_schedule
        self.seed = seed
        self.accumulate = accumulate
        self.tile_size = tile_size
        self.overlap = overlap
        self.average = WeightAverage(network, ema_decay) if ema_decay is not None else None
        self.metadata = metadata
        self.metrics = metrics or {}
        self.train_loss: Tensor | None = None
        self.val_scores: dict[tuple[str, int, int | str], float] = {}
        self.case_scores = self.val_scores

    def configure_optimizers(self) -> Any:
        """Make optimiser and schedule; the schedule counts optimiser steps, not micro-batches."""
        optimizer = self.make_optimizer(self.network.parameters())
        # In fp16 the gradients are scaled, and must be divided by the scale before they are
        # clipped. A fused optimiser would do so afterwards, inside its step. With this attribute
        # Lightning and torch do it before, as for any other optimiser.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_schedule(optimizer), "interval": "step"},
        }

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the mean loss of the samples of one micro-batch.

        Lightning divides it by the number of micro-batches.

        Each sample has its own loss at its own shape, and each counts the same: the gradient of a
        step does not depend on how its samples are divided among micro-batches and ranks. A loss of
        a whole batch (batch Dice) is computed for each stack.
        """
        losses: list[tuple[Tensor, int]] = []  # loss, and number of samples that it is the mean of
        for stack in batch:
            # Dropout follows the sample, whichever micro-batch and rank computes it.
            torch.manual_seed(torch_seed(self.seed, self.global_step, stack["number"][0]))
            losses += sample_losses(self.loss, self.network(stack["image"]), stack["target"])
        loss = mean_of_samples(losses)
        # Not `item()`, which waits for the device: the history reads the loss when it writes a
        # line.
        self.train_loss = loss.detach()
        self.log(
            "train/loss",
            self.train_loss,
            on_step=True,
            on_epoch=False,
            batch_size=sum(count for _, count in losses),
        )
        return loss

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Any = None,
    ) -> None:
        """Take the step, free the gradients, then update the average of the weights.

        Lightning would free them only after the next forward pass, so they would add to the memory
        of its activations.
        """
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()
        if self.average is not None:
            self.average.update()

    def on_validation_epoch_start(self) -> None:
        """Validate the average of the weights if there is one, because checkpoints hold it."""
        if self.average is not None:
            self.average.exchange()

    def predict_labels(self, image: Tensor) -> Tensor:
        """Predict the classes of one case in the same way as `predict`.

        Args:
            image: (1, C, D, H, W).

        Returns:
            Classes, uint8 (D, H, W).
        """
        channels = self.metadata.get("task", {}).get("channels", ())
        with uncompiled(self.network):
            probs = predict_probs(
                self.network,
                image,
                tile_size=self.tile_size,
                overlap=self.overlap,
                divisor=self.network.divisor,  # type: ignore[arg-type]
                # The value of air is known only in a CT window.
                skips_air=all(channel["window_hu"] for channel in channels),
            )
        return most_probable(probs)

    def validation_step(self, batches: Batch, batch_idx: int) -> Tensor:
        """Compute the scores of one whole case, inside the scan.

        The Dice of a label that is absent from prediction and reference is 1.

        Returns:
            Predicted labels, uint8 (D, H, W), 0 beyond the scan.
        """
        (stack,) = batches  # of one case
        # Return freed memory of the last steps or the last case to the system, so that this case
        # does not add to it.
        release_free_memory()
        # Prediction drops voxels beyond the scan when it pastes the crop back, so they do not
        # count. The stack is changed in place, because the picture shows its target.
        bounds = stack["inside"][0]
        labels = only_inside(self.predict_labels(stack["image"]), bounds)
        stack["target"] = only_inside(stack["target"], bounds)
        ignore_value = self.metadata.get("task", {}).get("ignore_label")
        if ignore_value is not None:
            # Ignored voxels become background in both, where no score counts them.
            is_ignored = stack["target"] == ignore_value
            labels = labels.masked_fill(is_ignored[0], 0)
            stack["target"] = stack["target"].masked_fill(is_ignored, 0)
        target = stack["target"][0]
        classes = tuple(range(1, int(self.metadata["num_classes"])))  # without the background
        # The Dice by class; the scores of metrics are added by name.
        scores: dict[Any, float] = dice_per_label(labels, target, classes)
        for name, metric in self.metrics.items():
            scores[name] = metric(labels, target, stack["spacing_mm"][0])
        case, region = stack["case"][0], int(stack["region"][0])
        for class_or_metric, score in scores.items():
            self.val_scores[case, region, class_or_metric] = score
        return labels

    def on_validation_epoch_end(self) -> None:
        """Average the scores of all cases of all ranks; go on with the weights of the last step."""
        release_free_memory()
        if self.average is not None:
            self.average.exchange()
        scores = self._scores_of_all_ranks()
        self.val_scores = {}
        self.case_scores = scores
        dice: list[float] = []
        metric_scores: dict[str, list[float]] = {name: [] for name in self.metrics}
        for (_, _, class_or_metric), score in scores.items():
            if isinstance(class_or_metric, int):
                dice.append(score)
            else:
                metric_scores[class_or_metric].append(score)
        # `fmean` rounds once, so the order of ranks and cases changes no bit. Each rank has all
        # scores, and logs them.
        for name, values in metric_scores.items():
            self.log(f"val/{name}", _mean_of_defined(values), rank_zero_only=False)
        if dice:
            self.log("val/dice", fmean(dice), rank_zero_only=False)
            self.log("val/dice_worst", min(dice), rank_zero_only=False)

    def _scores_of_all_ranks(self) -> dict[tuple[str, int, int | str], float]:
        """Collect the scores of this validation; all ranks must call this together."""
        if self.trainer.world_size == 1:
            return self.val_scores
        scores_of_ranks: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(scores_of_ranks, self.val_scores)
        scores: dict[tuple[str, int, int | str], float] = {}
        for rank_scores in scores_of_ranks:
            scores |= rank_scores
        return scores

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the metadata that prediction needs, and the average of the weights.

        The average, where there is one, takes the place of the weights.
        """
        checkpoint["medseg"] = {**self.metadata, "step": self.global_step}
        if self.average is not None:
            # A run resumes only from a checkpoint with the state of the optimiser; other
            # checkpoints need only the average.
            if "optimizer_states" in checkpoint:
                checkpoint[RAW_WEIGHTS] = checkpoint["state_dict"]
            weights = dict(checkpoint["state_dict"])
            for name, value in self.average.values().items():
                weights[f"{NETWORK_PREFIX}{name}"] = value
            checkpoint["state_dict"] = weights

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the average of the weights, and count micro-batches as this run makes them.

        Lightning then loads the weights of the last step from the changed checkpoint.
        """
        # Lightning finds the end of a step by the count of micro-batches, and a step may have
        # another number of them now.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        num_processed = checkpoint["global_step"] * self.accumulate
        for counts in (progress["total"], progress["current"]):
            shift = num_processed - counts["processed"]
            # The counts of micro-batches that are ready, started and completed may differ from
            # `processed` by one, so all are moved by the same number.
            for key in counts:
                counts[key] += shift
        if self.average is not None:
            average = {}
            for name, value in checkpoint["state_dict"].items():
                if name.startswith(NETWORK_PREFIX):
                    average[name.removeprefix(NETWORK_PREFIX)] = value
            self.average.load(average)
            checkpoint["state_dict"] = checkpoint.pop(RAW_WEIGHTS)


def _mean_of_defined(scores: Sequence[float]) -> float:
    """Average the scores of a metric that are defined (not NaN).

    Returns:
        The mean; NaN where no score is defined, or one is infinite.
    """
    defined = [score for score in scores if not math.isnan(score)]
    # A distance is infinite where a label was not found at all. A mean without such scores would
    # hide these failures.
    if defined and all(map(math.isfinite, defined)):
        return fmean(defined)
    return math.nan


def only_inside(volume: Tensor, bounds: Tensor) -> Tensor:
    """Copy a volume with zeros beyond the scan.

    Args:
        volume: (…, D, H, W).
        bounds: Start and stop of the scan per axis, (3, 2).
    """
    inside = torch.zeros_like(volume)
    z, y, x = (slice(int(start), int(stop)) for start, stop in bounds)
    inside[..., z, y, x] = volume[..., z, y, x]
    return inside
