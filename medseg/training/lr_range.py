"""Learning rate range test (Smith 2017): the rate of a short run climbs until the loss diverges."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import numpy as np
from scipy.ndimage import gaussian_filter1d

# Steps whose mean loss shows divergence.
WINDOW = 5
# The run ends when such a mean is above the lowest one by more than this multiple of it.
DIVERGED_RISE = 3.0
# Factor by which a suggested rate lies at least below the one of the lowest loss.
BELOW_LOWEST = 10.0


class LrRange(pl.Callback):
    """Raises the rate evenly on a logarithmic scale, one rate per optimiser step.

    It ends the run when the loss diverges.

    Args:
        lowest_lr: First rate.
        highest_lr: Rate of the last step.
        steps: Optimiser steps of the run.

    Attributes:
        lrs: Rate of each step made.
        losses: Its loss, the mean over the micro-batches.
    """

    def __init__(self, lowest_lr: float, highest_lr: float, steps: int) -> None:
        self.planned_lrs = np.geomspace(lowest_lr, highest_lr, steps).tolist()
        self.lrs: list[float] = []
        self.losses: list[float] = []
        # Of the optimiser step that is being made.
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
            self.lrs.append(self.planned_lrs[len(self.lrs)])
            self.losses.append(loss)
        if not math.isfinite(loss) or has_diverged(self.losses):
            trainer.should_stop = True


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the mean of the last losses has risen far above the lowest such mean."""
    means = [fmean(losses[n : n + WINDOW]) for n in range(len(losses) - WINDOW + 1)]
    if not means:
        return False
    lowest = min(means)
    # The size of the lowest mean, not its value: some losses, such as minus the Dice, are negative.
    return means[-1] - lowest > DIVERGED_RISE * abs(lowest)


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Smooth the noise of single batches with a Gaussian.

    Unlike a running mean it does not lag.
    """
    sigma = max(1.0, len(losses) / 25)
    return gaussian_filter1d(np.asarray(losses, dtype=float), sigma=sigma, mode="nearest")


def suggest_lr(lrs: Sequence[float], losses: Sequence[float]) -> float | None:
    """Suggest a rate below that of the lowest loss, where a run is about to diverge.

    It is the rate at which the smoothed loss falls steepest over the logarithm of the rate, but at
    most a tenth of the rate of its minimum: a steep fall often ends in the minimum, and one batch
    more or less moves it.

    Args:
        lrs: Rates, rising.
        losses: Loss of the step made at each.

    Returns:
        The rate, or None where the loss never falls, or over a single step only.

    Source: Smith 2017 (range test); a tenth of the minimum as in fastai's `lr_find`.
    """
    curve = smoothed(losses)
    lowest = int(curve.argmin()) if len(curve) else 0
    # Up to the second rate there is one difference of losses, and nothing to compare it with.
    if lowest < 2:
        return None
    slope = np.gradient(curve[: lowest + 1], np.log(np.asarray(lrs[: lowest + 1])))
    return float(min(lrs[int(slope.argmin())], lrs[lowest] / BELOW_LOWEST))
