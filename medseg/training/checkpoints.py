"""What a run goes on from, the best that it has seen, and when it ends before its last step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from medseg.training.preemption import Preempted, StopRequest


class Checkpoints(Checkpoint):
    """Write `last.ckpt`, from which a run goes on, and `best.ckpt`, the weights of the best validation.

    `last.ckpt` is written at the end of optimiser steps only: every so many, before and after each validation, and when the run is
    asked to stop. A run that was interrupted in a validation begins with that validation. A last validation follows the last step.
    Without validation cases there is no `best.ckpt`. A file is replaced whole: a killed run leaves the one before.

    Args:
        folder: Where the checkpoints go; a run that was moved goes on in its new place.
        validate_every: Optimiser steps between two validations.
        save_every: Optimiser steps between two writings; None = at validations only.
        patience: Validations without a better one after which the run ends; None = never.
        stop: Says when the run is asked to stop.
    """

    def __init__(
        self,
        folder: Path,
        validate_every: int,
        save_every: int | None = None,
        patience: int | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.folder = folder
        self.validate_every = validate_every
        self.save_every = save_every
        self.patience = patience
        self.stop = stop or StopRequest()
        self.best_score: float | None = None
        self.num_worse = 0
        self.owes_validation = False
        self.is_leaving = False
        self.has_saved = False
        self.hosts: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The score to beat, how long it stands, and whether a validation comes first."""
        return {"best_score": self.best_score, "num_worse": self.num_worse, "owes_validation": self.owes_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them over."""
        self.best_score = state_dict["best_score"]
        self.num_worse = state_dict["num_worse"]
        self.owes_validation = state_dict["owes_validation"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over from Lightning, which would stop between two micro-batches; make up for a validation."""
        self.stop.install()
        if trainer.world_size > 1:
            self.hosts = torch.distributed.new_group(backend="gloo")  # asking each other must not wait for the devices
        if self.owes_validation:
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting = False
            trainer.validating = True
            validation.run()
            trainer.training = True
        self._end_if_worse(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Leave before the next step, when the loggers have the last one; of that they knew nothing when it was saved."""
        if self.has_saved and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
        self.has_saved = False
        self._leave_if_asked()
        self.stop.is_safe = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save where it is time to; ask for the last validation."""
        step, is_step_done = trainer.global_step, (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_last = step == trainer.max_steps
        # A trainer that is asked to stop validates once more, whatever its interval.
        trainer.should_stop = trainer.should_stop or is_last
        if not is_step_done:
            return
        is_validation_step, validates = step % self.validate_every == 0, bool(sum(trainer.num_val_batches))
        if is_last:
            # A run that goes on from its last step makes no validation: it must not be saved before.
            if not validates:
                self._save(trainer, "last.ckpt", weights_only=False)
            return
        self.is_leaving = self._is_asked(trainer)
        self.owes_validation = is_validation_step and validates
        if self.is_leaving or is_validation_step or (self.save_every and step % self.save_every == 0):
            self._save(trainer, "last.ckpt", weights_only=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is lost when the run ends in a validation that it owes."""
        self._leave_if_asked()
        self.stop.is_safe = self.owes_validation

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the best first: `last.ckpt` knows its score."""
        if trainer.sanity_checking:
            return
        self.stop.is_safe = self.owes_validation = False
        score = float(trainer.callback_metrics["val/dice"])
        self.num_worse += 1
        if self.best_score is None or score > self.best_score:
            self.best_score, self.num_worse = score, 0
            self._save(trainer, "best.ckpt", weights_only=True)
        self._save(trainer, "last.ckpt", weights_only=False)
        self._end_if_worse(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is left to do is done in a moment."""
        self.is_leaving = False

    def _end_if_worse(self, trainer: pl.Trainer) -> None:
        trainer.should_stop = trainer.should_stop or (self.patience is not None and self.num_worse >= self.patience)

    def _is_asked(self, trainer: pl.Trainer) -> bool:
        """Whether any rank is asked to stop: all of them must save and leave at the same step."""
        if self.hosts is None:
            return self.stop.is_asked
        asked = torch.tensor(int(self.stop.is_asked))
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX, group=self.hosts)
        return bool(asked)

    def _leave_if_asked(self) -> None:
        if self.is_leaving:
            raise Preempted

    def _save(self, trainer: pl.Trainer, name: str, *, weights_only: bool) -> None:
        self.has_saved = True
        temporary = self.folder / f"{name}.tmp"
        trainer.save_checkpoint(temporary, weights_only=weights_only)  # by all ranks: they wait for each other
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()  # a run that goes on has all lines up to here
            os.replace(temporary, self.folder / name)
