"""History callback: `history.csv` with losses, learning rates, scores and machine load, printed too where no progress bar is."""

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
    "step", "loss", "lr", "val_dice", "val_dice_worst", "seconds_per_step", "peak_gib", "host_gib", "cpu_percent", "gpu_gib",
    "gpu_percent",
)  # fmt: skip


class History(pl.Callback):
    """Writes `history.csv`; a resumed run drops the lines that came after its checkpoint.

    Losses stay on the device until a line is written, so that no step waits for a value.

    Args:
        path: CSV file.
        history_every: Optimiser steps between two lines of training; the loss is their mean.
        steps: Steps of the whole run, for the lines on the console.
        metrics: Names of further scores of the validation, logged as `val/<name>`; each becomes a
            column `val_<name>`.
    """

    def __init__(
        self, path: Path, history_every: int, steps: int, metrics: Iterable[str] = ()
    ) -> None:
        self.path = path
        self.scores = {
            "val_dice": "val/dice",
            "val_dice_worst": "val/dice_worst",
            **{f"val_{name}": f"val/{name}" for name in metrics},
        }
        self.columns = (
            *HISTORY_COLUMNS,
            *(column for column in self.scores if column not in HISTORY_COLUMNS),
        )
        self.history_every = history_every
        self.steps = steps
        self.losses: list[Tensor | float] = []
        self.num_rows = 0
        self.rows: list[dict[str, Any]] = []
        self.device = torch.device("cpu")
        self.load = MachineLoad()
        self.earlier_s, self.start_s = 0.0, time.perf_counter()
        self.lr = 0.0
        self.last_step, self.last_time_s = 0, 0.0
        self.pause_start_s: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Number of lines written, the losses since the last of them (a checkpoint may fall between two lines), and the time."""
        return {"losses": self._mean_losses(), "num_rows": self.num_rows, "train_s": self.train_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint over."""
        self.losses, self.num_rows = list(state_dict["losses"]), state_dict["num_rows"]
        self.earlier_s, self.start_s = state_dict["train_s"], time.perf_counter()

    def train_s(self) -> float:
        """Time of all steps and validations so far, in all attempts, in s."""
        return self.earlier_s + time.perf_counter() - self.start_s

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the lines that the checkpoint counts."""
        self.start_s = self.last_time_s = time.perf_counter()
        self.last_step = trainer.global_step
        self.load = MachineLoad()
        self.device = pl_module.device
        if trainer.is_global_zero:
            self.rows = earlier_rows(
                self.path, lambda rows: [self._row_of(row) for row in rows[: self.num_rows]]
            )
            write_csv(self.path, self.rows, self.columns)

    def _row_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """Take a line of an earlier attempt over, which had all columns but those of metrics that are new.

        Raises:
            KeyError: If it lacks another column.
        """
        return {
            column: row[column] if column in HISTORY_COLUMNS else row.get(column, "")
            for column in self.columns
        }

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Read the learning rate before the schedule moves on; subtract the time of a validation."""
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]
        if self.pause_start_s is not None:
            self.last_time_s += time.perf_counter() - self.pause_start_s
            self.pause_start_s = None

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss on its device; read all of them where a line is written."""
        # Not `trainer.callback_metrics`, which reads every value of the progress bar from the
        # device.
        self.losses.append(pl_module.train_loss)  # type: ignore[arg-type]
        step = trainer.global_step
        is_step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not is_step_done or (step % self.history_every and step != self.steps):
            return
        now_s = time.perf_counter()
        loss = fmean(self._mean_losses())
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss is not finite by step {step}; lower optimizer.lr, try memory.precision=fp32, or find the cause with debug=anomaly"
            )
        load = self.load.read()
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"watch/{name}": value for name, value in load.items()}, step - 1
            )  # Lightning counts from 0 there
        row = {
            "step": step,
            "loss": round(loss, 6),
            "lr": self.lr,
            "seconds_per_step": round((now_s - self.last_time_s) / (step - self.last_step), 4),
            "peak_gib": round(peak_bytes() / 2**30, 3),
        }
        self.losses, self.last_step, self.last_time_s = [], step, now_s
        self._append(trainer, row | {name: round(value, 3) for name, value in load.items()})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self.pause_start_s = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write a line for the validation."""
        metrics = trainer.callback_metrics
        if trainer.sanity_checking or "val/dice" not in metrics:
            return
        scores = {column: round(float(metrics[name]), 5) for column, name in self.scores.items()}
        self._append(trainer, {"step": trainer.global_step, **scores})

    def _mean_losses(self) -> list[float]:
        """The losses since the last line, each as the mean over the ranks; all ranks must call this together."""
        if not self.losses:
            return []
        losses = torch.stack(
            [torch.as_tensor(loss, dtype=torch.float32, device=self.device) for loss in self.losses]
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
            losses /= torch.distributed.get_world_size()
        means: list[float] = losses.tolist()
        return means

    def _append(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        self.num_rows += 1
        if not trainer.is_global_zero:
            return
        self.rows.append(row)
        write_csv(self.path, self.rows, self.columns)
        if not sys.stderr.isatty():  # without a terminal there is no progress bar
            cells = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in row.items()
            )
            print(f"[{trainer.global_step}/{self.steps}] {cells}", flush=True)


class HistoryBar(RichProgressBar):
    """Progress bar of the micro-batches with the last figures of the history: Lightning's own reads its figures from the device.

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
        return {
            key: row[key]
            for row in self.history.rows
            for key in ("loss", "val_dice")
            if row.get(key)
        }

    def _get_train_description(self, current_epoch: int) -> str:
        """Name the bar; a run has no epochs, and Lightning would name it `Epoch 0/-2`."""
        return "Training".ljust(len(self.validation_description))
