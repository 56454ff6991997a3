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
Batch = list[Stack]
"""Stacks of samples of one shape, see `medseg.data.samples.collate`."""

# Where a checkpoint keeps the weights that the next step starts from, when its network is their
# average.
RAW_WEIGHTS = "raw_weights"


class SegmentationModule(pl.LightningModule):
    """Trains a network on patches or whole crops and scores it on whole cases.

    Args:
        network: From an image to logits; its `divisor` is the required multiple of the input size.
        loss: Called as `loss(logits, target)`.
        make_optimizer: From parameters to an optimiser.
        make_schedule: From an optimiser to a schedule that is stepped once per optimiser step.
        seed: Seed of the run; torch is reseeded from (seed, step, micro-batch), so that dropout
            depends on nothing else.
        accumulate: Micro-batches per optimiser step.
        tile_size: Sliding window of the validation, voxels (D, H, W); None = the whole crop.
        overlap: Share of a tile that it has in common with its neighbour.
        ema_decay: Validate and save the exponential moving average of the weights; None = the
            weights themselves.
        metadata: Checkpoint metadata; plain types only, so that it loads with `weights_only=True`.
        metrics: Further scores of a validation case by name, each logged as `val/<name>`.
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
        # Scores by case, region, and label (Dice) or name of the metric: a case that two ranks
        # score counts once.
        self.val_scores: dict[tuple[str, int, int | str], float] = {}
        self.case_scores = self.val_scores  # of the last validation, from all ranks

    def configure_optimizers(self) -> Any:
        """Make optimiser and schedule; the schedule counts optimiser steps, not micro-batches."""
        optimizer = self.make_optimizer(self.network.parameters())
        # A fused optimiser would divide the loss scale out of the gradients inside its step, after
        # they have been clipped. Without this attribute Lightning and torch do it before, as for
        # any other optimiser; it is read with fp16 and by Lightning's clipping.
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
        losses: list[tuple[Tensor, int]] = []
        for stack in batch:
            # Dropout follows the sample, whichever micro-batch and rank computes it.
            torch.manual_seed(torch_seed(self.seed, self.global_step, stack["number"][0]))
            losses += sample_losses(self.loss, self.network(stack["image"]), stack["target"])
        loss = mean_of_samples(losses)
        # Without graph, and not read from the device: the history does that when it writes a line.
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
        """Validate the average of the weights, which is what is saved."""
        if self.average is not None:
            self.average.exchange()

    def predict_labels(self, image: Tensor) -> Tensor:
        """Predict the classes of one case (1, 1, D, H, W) as prediction does; uint8 (D, H, W)."""
        channels = self.metadata.get("task", {}).get("channels", ())
        with uncompiled(self.network):
            probs = predict_probs(
                self.network,
                image,
                tile_size=self.tile_size,
                overlap=self.overlap,
                divisor=self.network.divisor,  # type: ignore[arg-type]
                skips_air=all(channel["window_hu"] for channel in channels),
            )
        return most_probable(probs)

    def validation_step(self, batches: Batch, batch_idx: int) -> Tensor:
        """Compute the scores of one whole case, inside the scan.

        The Dice of a label that is absent from prediction and reference is 1.

        Returns:
            Predicted labels, uint8 (D, H, W), 0 beyond the scan.
        """
        (batch,) = batches
        # Frees the memory of the steps before, or of the case before: that of this case comes on
        # top of it.
        release_free_memory()
        # Prediction drops voxels beyond the scan when it pastes the crop back, and the reference
        # has none; the picture shows both.
        bounds = batch["inside"][0]
        labels = only_inside(self.predict_labels(batch["image"]), bounds)
        batch["target"] = only_inside(batch["target"], bounds)
        target = batch["target"][0]
        ignore_value = self.metadata.get("task", {}).get("ignore_label")
        if ignore_value is not None:  # background in both maps, which no score counts
            is_ignored = target == ignore_value
            labels = labels.masked_fill(is_ignored, 0)
            target = target.masked_fill(is_ignored, 0)
        classes = tuple(range(1, int(self.metadata["num_classes"])))
        scores: dict[Any, float] = dice_per_label(labels, target, classes)
        for name, metric in self.metrics.items():
            scores[name] = metric(labels, target, batch["spacing_mm"][0])
        case, region = batch["case"][0], int(batch["region"][0])
        self.val_scores |= {(case, region, score_of): score for score_of, score in scores.items()}
        return labels

    def on_validation_epoch_end(self) -> None:
        """Average the scores of all cases of all ranks; go on with the weights of the last step."""
        release_free_memory()
        if self.average is not None:
            self.average.exchange()
        scores = self._scores_of_all_ranks()
        self.val_scores = {}
        self.case_scores = scores
        # `fmean` rounds once, so the order of ranks and cases changes no bit.
        for name in self.metrics:
            values = [score for (_, _, score_of), score in scores.items() if score_of == name]
            self.log(f"val/{name}", _mean_of_defined(values), rank_zero_only=False)
        dice = [score for (_, _, score_of), score in scores.items() if isinstance(score_of, int)]
        if dice:
            self.log("val/dice", fmean(dice), rank_zero_only=False)
            self.log("val/dice_worst", min(dice), rank_zero_only=False)

    def _scores_of_all_ranks(self) -> dict[tuple[str, int, int | str], float]:
        """Collect the scores of this validation, which all ranks must call together."""
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
            if "optimizer_states" in checkpoint:  # a run resumes from it
                checkpoint[RAW_WEIGHTS] = checkpoint["state_dict"]
            averaged = {
                f"{NETWORK_PREFIX}{name}": value for name, value in self.average.values().items()
            }
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **averaged}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the average of the weights, and count micro-batches as this run makes them.

        Lightning gets the weights of the last step.
        """
        # A step may have another number of micro-batches now; Lightning finds the end of a step by
        # their count.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            shift = checkpoint["global_step"] * self.accumulate - counts["processed"]
            counts.update({key: count + shift for key, count in counts.items()})
        if self.average is not None:
            weights = checkpoint["state_dict"]
            averaged = {
                name.removeprefix(NETWORK_PREFIX): value
                for name, value in weights.items()
                if name.startswith(NETWORK_PREFIX)
            }
            self.average.load(averaged)
            checkpoint["state_dict"] = checkpoint.pop(RAW_WEIGHTS)


def _mean_of_defined(scores: Sequence[float]) -> float:
    """Average the scores of a metric that are defined, not NaN; NaN where there is no mean."""
    defined = [score for score in scores if not math.isnan(score)]
    # A distance is infinite where a label was not found at all: without it the mean would improve,
    # so there is no mean then.
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
