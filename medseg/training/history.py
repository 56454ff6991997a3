"""History callback: `history.csv` with losses, learning rates, scores and machine load.

Without a progress bar, it also prints each line.
"""

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor

from medseg.errors import NotFiniteError
from medseg.io.tables import write_csv
from medseg.training.loggers import earlier_rows
from medseg.training.machine_load import MachineLoad, peak_bytes

HISTORY_COLUMNS = (
    "step",
    "loss",
    "lr",
    "val_dice",
    "val_dice_worst",
    "seconds_per_step",
    "peak_gib",
    "host_gib",
    "cpu_percent",
    "gpu_gib",
    "gpu_percent",
)


class History(pl.Callback):
    """Writes `history.csv`; a resumed run drops the lines that came after its checkpoint.

    Losses stay on the device until a line is written, so that no step waits for a value.

    Args:
        path: CSV file.
        history_every: Optimiser steps between two lines of training; the loss is their mean.
        steps: Steps of the whole run; the last one always gets a line.
        metrics: Names of further scores of the validation, logged as `val/<name>`; each becomes a
            column `val_<name>`.
    """

    def __init__(
        self, path: Path, history_every: int, steps: int, metrics: Iterable[str] = ()
    ) -> None:
        self.path = path
        # Column to the name under which the module logs the score.
        self.logged_scores = {"val_dice": "val/dice", "val_dice_worst": "val/dice_worst"}
        metric_columns = []
        for name in metrics:
            self.logged_scores[f"val_{name}"] = f"val/{name}"
            metric_columns.append(f"val_{name}")
        self.columns = (*HISTORY_COLUMNS, *metric_columns)
        self.history_every = history_every
        self.steps = steps
        self.losses: list[Tensor | float] = []  # of each micro-batch since the last line
        self.num_rows = 0
        self.rows: list[dict[str, Any]] = []  # on the first rank only
        self.device = torch.device("cpu")  # of the losses
        self.load = MachineLoad(uses_gpu=False)
        self.earlier_s = 0.0  # duration of the earlier attempts of a resumed run
        # The next three are readings of `time.perf_counter`.
        self.start_s = time.perf_counter()  # when this attempt started
        # When the last line was written, plus the duration of each validation since then, so that
        # the difference to the present is the duration of the steps alone.
        self.last_time_s = 0.0
        # When a validation started after which no step has begun yet.
        self.pause_start_s: float | None = None
        self.lr = 0.0  # of the present step
        self.last_step = 0  # of the last line

    def state_dict(self) -> dict[str, Any]:
        """Describe the progress of the history, for the checkpoint.

        The losses since the last line are a part of it, because a checkpoint may fall between two
        lines.
        """
        return {"losses": self._mean_losses(), "num_rows": self.num_rows, "train_s": self.train_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint over."""
        self.losses = list(state_dict["losses"])
        self.num_rows = state_dict["num_rows"]
        self.earlier_s = state_dict["train_s"]
        self.start_s = time.perf_counter()

    def train_s(self) -> float:
        """Sum the seconds of all steps and validations so far, in all attempts of the run."""
        return self.earlier_s + time.perf_counter() - self.start_s

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the lines that the checkpoint counts."""
        self.start_s = self.last_time_s = time.perf_counter()
        self.last_step = trainer.global_step
        self.device = pl_module.device
        # A device map may leave the first part of a network on the CPU.
        uses_gpu = any(weight.is_cuda for weight in pl_module.parameters())
        self.load = MachineLoad(uses_gpu)
        if trainer.is_global_zero:
            self.rows = earlier_rows(self.path, self._rows_before_checkpoint)
            write_csv(self.path, self.rows, self.columns)

    def _rows_before_checkpoint(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take over the lines of earlier attempts that the checkpoint counts."""
        return [self._with_all_columns(row) for row in rows[: self.num_rows]]

    def _with_all_columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Complete a line of an earlier attempt: it may lack the columns of new metrics.

        Raises:
            KeyError: If it lacks another column, which `earlier_rows` takes for damage.
        """
        missing = [column for column in HISTORY_COLUMNS if column not in row]
        if missing:
            raise KeyError(missing[0])
        return {column: row.get(column, "") for column in self.columns}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the rate before the schedule moves on; leave the time of a validation out."""
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]
        if self.pause_start_s is not None:
            validation_s = time.perf_counter() - self.pause_start_s
            self.last_time_s += validation_s
            self.pause_start_s = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss on its device; where a line is due, read all losses and write it."""
        # Not `trainer.callback_metrics`, which reads every value of the progress bar from the
        # device.
        self.losses.append(pl_module.train_loss)  # type: ignore[arg-type]
        step = trainer.global_step
        is_step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        is_line_due = step % self.history_every == 0 or step == self.steps
        if not is_step_done or not is_line_due:
            return
        now_s = time.perf_counter()
        loss = fmean(self._mean_losses())
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss is not finite by step {step}; lower optimizer.lr, "
                "try memory.precision=fp32, or find the cause with debug=anomaly"
            )
        load = self.load.read()
        watched = {f"watch/{name}": value for name, value in load.items()}
        for logger in trainer.loggers:
            logger.log_metrics(watched, step - 1)  # loggers count steps from 0
        steps_s = now_s - self.last_time_s
        row: dict[str, Any] = {
            "step": step,
            "loss": round(loss, 6),
            "lr": self.lr,
            "seconds_per_step": round(steps_s / (step - self.last_step), 4),
            "peak_gib": round(peak_bytes(self.load.uses_gpu) / 2**30, 3),
        }
        row |= {name: round(value, 3) for name, value in load.items()}
        self.losses = []
        self.last_step = step
        self.last_time_s = now_s
        self._append(trainer, row)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock of the steps."""
        self.pause_start_s = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a line for the validation."""
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or "val/dice" not in metrics:
            return
        row: dict[str, Any] = {"step": trainer.global_step}
        for column, name in self.logged_scores.items():
            row[column] = round(float(metrics[name]), 5)
        self._append(trainer, row)

    def _mean_losses(self) -> list[float]:
        """Average each loss since the last line over the ranks, which must call this together.

        This waits for the device.
        """
        if not self.losses:
            return []
        # The losses of a checkpoint are numbers, the others tensors on the device.
        tensors = []
        for loss in self.losses:
            tensors.append(torch.as_tensor(loss, dtype=torch.float32, device=self.device))
        losses = torch.stack(tensors)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
            losses /= torch.distributed.get_world_size()
        means: list[float] = losses.tolist()
        return means

    def _append(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        """Add a line to the file, and print it if there is no progress bar."""
        # All ranks count, because all of them load the checkpoint; the first one writes.
        self.num_rows += 1
        if not trainer.is_global_zero:
            return
        self.rows.append(row)
        write_csv(self.path, self.rows, self.columns)
        if not sys.stderr.isatty():  # without a terminal there is no progress bar
            cells = "  ".join(f"{key} {_cell(value)}" for key, value in row.items())
            print(f"[{trainer.global_step}/{self.steps}] {cells}", flush=True)


def _cell(value: Any) -> str:
    """Write a value of a line, a float with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class HistoryBar(RichProgressBar):
    """Progress bar of the micro-batches with the last figures of the history.

    Lightning's own progress bar reads its figures from the device and waits for it at each step.

    Args:
        history: Callback of the same run.
    """

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Take the last loss and Dice from the lines of the history."""
        figures = {}
        for row in self.history.rows:
            for key in ("loss", "val_dice"):
                # A column without a value is an empty text in a line that was read from the file,
                # and is missing in a line of this attempt.
                if row.get(key, "") != "":
                    figures[key] = row[key]
        return figures

    def _get_train_description(self, current_epoch: int) -> str:
        """Name the bar; a run has no epochs, and Lightning would name it `Epoch 0/-2`."""
        return "Training".ljust(len(self.validation_description))
