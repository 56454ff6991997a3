"""What a run leaves behind while it goes: the history, pictures of validation cases, lines on a plain console."""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from medseg.errors import NotFiniteError
from medseg.geometry.grid_rule import distortion
from medseg.pictures.overlay import overlay_montage
from medseg.training.watch import Watch

HISTORY_COLUMNS = (
    "step", "loss", "lr", "val_dice", "val_dice_worst", "seconds_per_step", "peak_gib", "host_gib", "cpu_percent", "gpu_gib",
    "gpu_percent",
)  # fmt: skip


class History(pl.Callback):
    """Append to `history.csv`; a resumed run drops the lines that it replays and goes on.

    Args:
        path: CSV file.
        every: Optimiser steps between two lines of training; the loss is their mean.
        steps: Steps of the whole run, for the lines on the console.
    """

    def __init__(self, path: Path, every: int, steps: int) -> None:
        self.path = path
        self.every = every
        self.steps = steps
        self.losses: list[Tensor | float] = []
        self.num_rows = 0
        self.device = torch.device("cpu")
        self.earlier_s, self.start_s = 0.0, time.perf_counter()
        self.lr = 0.0
        self.last_step = 0
        self.last_time_s = 0.0
        self.watch = Watch()
        self.pause_start_s: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """The lines written, the losses since the last of them (a checkpoint may fall between two lines), and the time."""
        return {"losses": self._mean_losses(), "num_rows": self.num_rows, "train_s": self.train_s()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take them over."""
        self.losses, self.num_rows = list(state_dict["losses"]), state_dict["num_rows"]
        self.earlier_s, self.start_s = state_dict["train_s"], time.perf_counter()

    def train_s(self) -> float:
        """Time that the steps and validations up to here have taken, in all attempts."""
        return self.earlier_s + time.perf_counter() - self.start_s

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the lines that the checkpoint knew."""
        self.last_step, self.last_time_s = trainer.global_step, time.perf_counter()
        self.start_s = self.last_time_s
        self.watch = Watch()
        self.device = pl_module.device
        if not trainer.is_global_zero:
            return
        kept: list[dict[str, str]] = []
        if self.path.is_file():
            with self.path.open(newline="") as file:
                kept = list(csv.DictReader(file))[: self.num_rows]
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, HISTORY_COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
        temporary.replace(self.path)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Read the learning rate before the schedule moves on; take the time of a validation off the clock."""
        self.lr = trainer.optimizers[0].param_groups[0]["lr"]
        if self.pause_start_s is not None:
            self.last_time_s += time.perf_counter() - self.pause_start_s
            self.pause_start_s = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collect the loss on its device; read it only when a line is written."""
        self.losses.append(trainer.callback_metrics["train/loss"].detach())
        step = trainer.global_step
        is_step_done = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not is_step_done or (step % self.every and step != self.steps):
            return
        now_s = time.perf_counter()
        loss = fmean(self._mean_losses())
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss is not finite by step {step}; lower optimizer.lr, try memory.precision=fp32, or find the cause with debug=anomaly"
            )
        row = {
            "step": step,
            "loss": round(loss, 6),
            "lr": self.lr,
            "seconds_per_step": round((now_s - self.last_time_s) / (step - self.last_step), 4),
            "peak_gib": round(peak_bytes() / 2**30, 3),
        }
        seen = self.watch.look()
        row |= {name: round(value, 3) for name, value in seen.items()}
        for logger in trainer.loggers:
            logger.log_metrics({f"watch/{name}": value for name, value in seen.items()}, step - 1)  # as Lightning counts there
        self.losses, self.last_step, self.last_time_s = [], step, now_s
        self._append(trainer, row)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line per validation."""
        if trainer.sanity_checking or "val/dice" not in trainer.callback_metrics:
            return
        dice = float(trainer.callback_metrics["val/dice"])
        worst = float(trainer.callback_metrics["val/dice_worst"])
        self._append(trainer, {"step": trainer.global_step, "val_dice": round(dice, 5), "val_dice_worst": round(worst, 5)})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self.pause_start_s = time.perf_counter()

    def _mean_losses(self) -> list[float]:
        """The losses since the last line, each as the mean over the ranks; all of them must ask."""
        if not self.losses:
            return []
        losses = torch.stack([torch.as_tensor(loss, dtype=torch.float32, device=self.device) for loss in self.losses])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(losses)
            losses /= torch.distributed.get_world_size()
        means: list[float] = losses.tolist()
        return means

    def _append(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        self.num_rows += 1
        if not trainer.is_global_zero:
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, HISTORY_COLUMNS).writerow(row)
        if not sys.stderr.isatty():
            # Without a terminal there is no progress bar; lines in a log do its work.
            cells = "  ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print(f"[{trainer.global_step}/{self.steps}] {cells}", flush=True)


@dataclass(frozen=True)
class View:
    """How a sample of one region is drawn.

    Attributes:
        label_names: Class of the network to name.
        is_mirrored: Whether the network sees it mirrored; the picture shows it as it is.
    """

    label_names: dict[int, str]
    is_mirrored: bool


class ValidationPictures(pl.Callback):
    """Draw the first validation cases over their scans, into `pictures/` and the logger.

    Args:
        folder: Where the pictures go.
        views: One per region; a single one for the coarse stage.
        num_cases: Cases drawn at each validation.
    """

    def __init__(self, folder: Path, views: Sequence[View], num_cases: int = 2) -> None:
        self.folder = folder
        self.views = views
        self.num_cases = num_cases

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw one case."""
        if trainer.sanity_checking or not trainer.is_global_zero or batch_idx >= self.num_cases:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{trainer.global_step:06d}_{batch_idx}.png"
        view = self.views[int(batch["region"][0])]
        arrays = (batch["image"][0, 0].float(), outputs, batch["target"][0])
        image, pred, target = ((array.flip(2) if view.is_mirrored else array).cpu().numpy() for array in arrays)
        try:
            overlay_montage(
                image,
                pred,
                target,
                batch["spacing_mm"][0],
                path,
                title=f"{batch['case'][0]}, step {trainer.global_step}",
                label_names=view.label_names,
                window_hu=(-1.0, 1.0),
            )
        except Exception as error:
            # What goes wrong inside the drawing library, or a disk that is full, must not cost a night of training.
            print(f"medseg: no picture of {batch['case'][0]} ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                from matplotlib.image import imread

                pixels = np.asarray(imread(path))[..., :3]
                logger.experiment.add_image(f"validation/{batch_idx}", pixels, trainer.global_step, dataformats="HWC")


class Distortions(pl.Callback):
    """Say by how much crops of fixed size bend each case, by its first sample (which may be a slab); each rank in its own log.

    Args:
        names: Name of each region; of the whole scan for the coarse stage.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.said: set[tuple[str, int]] = set()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at a training batch."""
        self._look(batch)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look at a validation case."""
        self._look(batch)

    def _look(self, batch: Any) -> None:
        for case, region, spacing_mm in zip(batch["case"], batch["region"].tolist(), batch["spacing_mm"], strict=True):
            if (case, region) not in self.said:
                self.said.add((case, region))
                voxel = "×".join(f"{mm:.3g}" for mm in spacing_mm)
                print(f"{case}, {self.names[region]}: distortion {distortion(spacing_mm):.2f}, voxels of {voxel} mm", flush=True)


def peak_bytes() -> int:
    """Most memory held so far: allocated on the GPU where there is one, else resident in this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
