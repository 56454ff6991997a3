"""Learning rate range test (Smith 2017): the rate of a short run climbs until the loss diverges."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import numpy as np
from scipy.ndimage import gaussian_filter1d

# Steps of the running means of the losses by which divergence is judged.
WINDOW = 5
# The run ends when the last mean exceeds the lowest mean by more than this multiple of the lowest.
DIVERGED_RISE = 3.0
# A suggested rate is at most the rate of the lowest loss divided by this.
BELOW_LOWEST = 10.0


class LrRange(pl.Callback):
    """Raises the rate evenly on a logarithmic scale, one rate per optimiser step.

    When the loss diverges, the callback ends the run.

    Args:
        lowest_lr: Rate of the first step.
        highest_lr: Rate of the last step.
        steps: Optimiser steps of the run.

    Attributes:
        planned_lrs: Rate of each step of the run.
        lrs: Rate of each step that was made with a finite loss.
        losses: Loss of each of these steps, the mean over its micro-batches.
    """

    def __init__(self, lowest_lr: float, highest_lr: float, steps: int) -> None:
        self.planned_lrs = np.geomspace(lowest_lr, highest_lr, steps).tolist()
        self.lrs: list[float] = []
        self.losses: list[float] = []
        # Losses of the micro-batches of the present optimiser step so far.
        self._micro_losses: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the rate of the step."""
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.planned_lrs[trainer.global_step]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss; end the run when it is not finite or has diverged."""
        self._micro_losses.append(float(pl_module.train_loss))  # type: ignore[arg-type]
        if len(self._micro_losses) < trainer.accumulate_grad_batches:
            return
        loss = fmean(self._micro_losses)
        self._micro_losses = []
        if math.isfinite(loss):
            # The rate of this step: all steps before had finite losses, else the run had ended.
            self.lrs.append(self.planned_lrs[len(self.lrs)])
            self.losses.append(loss)
        if not math.isfinite(loss) or has_diverged(self.losses):
            trainer.should_stop = True


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the mean of the last losses has risen far above the lowest such mean."""
    starts = range(len(losses) - WINDOW + 1)
    means = [fmean(losses[start : start + WINDOW]) for start in starts]
    if not means:
        return False
    lowest_mean = min(means)
    # By its absolute value, because some losses, such as minus the Dice, are negative.
    return means[-1] - lowest_mean > DIVERGED_RISE * abs(lowest_mean)


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Smooth the noise of single batches with a Gaussian.

    Unlike a running mean of the steps so far, the smoothed losses do not lag behind.
    """
    sigma = max(1.0, len(losses) / 25)  # steps: a share of the run, at least one
    return gaussian_filter1d(np.asarray(losses, dtype=float), sigma=sigma, mode="nearest")


def suggest_lr(lrs: Sequence[float], losses: Sequence[float]) -> float | None:
    """Suggest a rate well below that of the lowest loss, at which a run is about to diverge.

    It is the rate at which the smoothed loss falls steepest over the logarithm of the rate, but at
    most a tenth of the rate of the lowest smoothed loss. The loss often falls steepest just before
    its minimum, whose place depends on single batches.

    Args:
        lrs: Rates, rising.
        losses: Loss of the step at each rate.

    Returns:
        The rate, or None where the loss never falls, or over a single step only.

    Source: Smith 2017 (range test); a tenth of the minimum as in fastai's `lr_find`.
    """
    if not losses:
        return None
    curve = smoothed(losses)
    lowest_index = int(curve.argmin())
    # With a minimum at the second rate there is one difference of losses, and nothing to compare it
    # with.
    if lowest_index < 2:
        return None
    stop = lowest_index + 1
    slopes = np.gradient(curve[:stop], np.log(lrs[:stop]))
    steepest_index = int(slopes.argmin())
    return float(min(lrs[steepest_index], lrs[lowest_index] / BELOW_LOWEST))
