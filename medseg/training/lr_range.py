"""The learning rate range test (Smith 2017): one short run in which the rate climbs until the loss gets worse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import numpy as np
from scipy.ndimage import gaussian_filter1d

# Steps whose mean loss says whether the run has diverged, and by how much it then exceeds the lowest mean.
WINDOW, DIVERGED = 5, 4.0


class LrRange(pl.Callback):
    """Let the rate climb evenly on a logarithmic scale, one rate per optimiser step, and end the run when it diverges.

    Lightning's own `lr_find` halves the first losses that it shows (its bias correction is a step ahead), which hides where the loss
    begins to fall.

    Args:
        lowest: First rate.
        highest: Rate of the last step.
        steps: Optimiser steps of the run.

    Attributes:
        rates: Rate of each step made.
        losses: Its loss, the mean over the micro-batches.
    """

    def __init__(self, lowest: float, highest: float, steps: int) -> None:
        self.ladder = np.geomspace(lowest, highest, steps).tolist()
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.parts: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the rate of the step."""
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = self.ladder[trainer.global_step]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss; leave when it is not finite or has grown beyond return."""
        self.parts.append(float(trainer.callback_metrics["train/loss"]))
        if len(self.parts) < trainer.accumulate_grad_batches:
            return
        loss, self.parts = fmean(self.parts), []
        if math.isfinite(loss):
            self.rates.append(self.ladder[len(self.rates)])
            self.losses.append(loss)
        trainer.should_stop = trainer.should_stop or not math.isfinite(loss) or has_diverged(self.losses)


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the mean of the last losses is several times the lowest such mean."""
    means = [fmean(losses[n : n + WINDOW]) for n in range(len(losses) - WINDOW + 1)]
    return bool(means) and means[-1] > DIVERGED * min(means)


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Losses without the noise of single batches, and without the lag that a running mean would have."""
    return gaussian_filter1d(np.asarray(losses, dtype=float), sigma=max(1.0, len(losses) / 25), mode="nearest")


def suggest_lr(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the smoothed loss falls steepest over the logarithm of the rate, before its minimum.

    Args:
        rates: Rates, rising.
        losses: Loss of the step made at each.

    Returns:
        The rate, or None where the loss never falls.
    """
    curve = smoothed(losses)
    lowest = int(curve.argmin()) if len(curve) else 0
    if lowest < 2:
        return None
    slope = np.gradient(curve[: lowest + 1], np.log(np.asarray(rates[: lowest + 1])))
    return float(rates[int(slope.argmin())])
