"""Checkpoint callback: last and best weights, early stopping, preemption."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint

from medseg.io.atomic import replace_path
from medseg.training.preemption import Preempted, StopRequest


class Checkpoints(Checkpoint):
    """Writes `last.ckpt`, from which a run resumes, and `best.ckpt`, the weights of best mean Dice.

    `last.ckpt` is written only between optimiser steps: every `checkpoint_every` steps, before and
    after each validation, and when the run is asked to stop. A run that was interrupted in a
    validation repeats this validation when it resumes. A validation follows the last step, and
    `last.ckpt` is then written after it only. Without validation cases there is no `best.ckpt`. A
    file is replaced only by a complete one: a run that is killed while it writes leaves the
    previous file.

    Args:
        folder: Folder of the checkpoints. It is not part of their state, so a run that was moved
            continues in its new folder.
        validate_every: Optimiser steps between two validations.
        checkpoint_every: Optimiser steps between two writings; None = at validations only.
        patience: Validations in a row without a new best score after which the run ends; None =
            never.
        stop: Says when the run is asked to stop.
    """

    def __init__(
        self,
        folder: Path,
        validate_every: int,
        checkpoint_every: int | None,
        patience: int | None,
        stop: StopRequest,
    ) -> None:
        self.folder = folder
        self.validate_every = validate_every
        self.checkpoint_every = checkpoint_every
        self.patience = patience
        self.stop = stop
        # The first three are saved in the checkpoint under these names.
        self.best_score: float | None = None  # largest mean Dice of a validation
        self.num_worse = 0  # validations since the best one
        self.owes_validation = False  # the step is saved, its validation has not ended
        self.is_leaving = False  # any rank is asked to stop, and the step is saved
        self.has_saved = False  # whether a file was written since the last step began

    def state_dict(self) -> dict[str, Any]:
        """Describe the best score, the validations since, and whether a validation comes first."""
        return {
            "best_score": self.best_score,
            "num_worse": self.num_worse,
            "owes_validation": self.owes_validation,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint over; its keys are attributes."""
        vars(self).update(state_dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Handle the signals, and run a pending validation.

        The signals are not left to Lightning, which would stop between two micro-batches.
        """
        self.stop.install()
        if self.owes_validation:
            # The validation runs as in Lightning's training loop, but from its first case on.
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting = False
            trainer.validating = True
            validation.run()
            trainer.training = True
        self._end_if_worse(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Raise `Preempted` here, and not in `on_train_batch_end`, if the run is asked to stop.

        That hook saved the previous step, but the loggers receive the values of the step only after
        the hook.
        """
        if self.has_saved:
            self._flush_loggers(trainer)
        self.has_saved = False
        self._leave_if_asked()
        # From here on a signal must wait until the step is done and saved.
        self.stop.is_safe = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if a checkpoint is due; request the last validation."""
        step = trainer.global_step
        is_last = step == trainer.max_steps
        # With `should_stop` Lightning validates after this step, even between two regular
        # validations, and then ends the run.
        trainer.should_stop = trainer.should_stop or is_last
        # The whole run is one epoch of complete steps: no step is cut short at the end of an epoch.
        is_step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not is_step_done:
            return
        has_cases = sum(trainer.num_val_batches) > 0
        if is_last:
            # A request to stop is ignored here, as the run ends anyway.
            # With validation cases the last step is saved after its validation, because a run that
            # resumes from its last step makes no validation.
            if not has_cases:
                self._save(trainer, "last.ckpt", weights_only=False)
            return
        is_validation_step = step % self.validate_every == 0
        is_checkpoint_step = False
        if self.checkpoint_every is not None:
            is_checkpoint_step = step % self.checkpoint_every == 0
        self.is_leaving = self._is_any_rank_asked(trainer)
        self.owes_validation = is_validation_step and has_cases
        if self.is_leaving or is_validation_step or is_checkpoint_step:
            self._save(trainer, "last.ckpt", weights_only=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a stop signal end a validation at once if a resumed run repeats it."""
        self._leave_if_asked()
        self.stop.is_safe = self.owes_validation

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the score with the best one, and save."""
        if trainer.sanity_checking:
            return
        self.stop.is_safe = False
        self.owes_validation = False
        score = float(trainer.callback_metrics["val/dice"])
        self.num_worse += 1
        if self.best_score is None or score > self.best_score:
            self.best_score = score
            self.num_worse = 0
            # Before `last.ckpt`, which states the best score: the file of that score must exist.
            self._save(trainer, "best.ckpt", weights_only=True)
        self._save(trainer, "last.ckpt", weights_only=False)
        self._end_if_worse(trainer)

    def _end_if_worse(self, trainer: pl.Trainer) -> None:
        """End the run after `patience` validations without a better one."""
        if self.patience is not None and self.num_worse >= self.patience:
            trainer.should_stop = True

    def _is_any_rank_asked(self, trainer: pl.Trainer) -> bool:
        """Whether any rank is asked to stop: all of them must save and leave at the same step."""
        if trainer.world_size == 1:
            return self.stop.is_asked
        # On the host, so that no rank waits for its device.
        asked = torch.tensor(int(self.stop.is_asked))
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        return bool(asked)

    def _leave_if_asked(self) -> None:
        """End the run if a rank is asked to stop.

        Raises:
            Preempted: In that case.
        """
        if self.is_leaving:
            raise Preempted

    def _save(self, trainer: pl.Trainer, name: str, *, weights_only: bool) -> None:
        """Write a checkpoint; all ranks must call this together.

        Args:
            trainer: Lightning's trainer.
            name: File name.
            weights_only: Leave out what a run resumes from.
        """
        self.has_saved = True
        path = self.folder / name
        # Only the first rank writes a file, under a temporary name until it is complete.
        destination: AbstractContextManager[Path] = nullcontext(path)
        if trainer.is_global_zero:
            destination = replace_path(path)
        with destination as written_path:
            trainer.save_checkpoint(written_path, weights_only=weights_only)
            # The loggers write before the file gets its name, so that a run that resumes from it
            # has all lines up to here.
            self._flush_loggers(trainer)

    def _flush_loggers(self, trainer: pl.Trainer) -> None:
        """Let the loggers write what they hold."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
