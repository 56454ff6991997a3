"""Monitoring callbacks: pictures and scores of validation cases, and distortion of fixed crops."""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from medseg.console import say
from medseg.geometry.grid_rule import distortion
from medseg.io.tables import write_csv
from medseg.report.overlay import overlay_montage
from medseg.training.loggers import earlier_rows

SCORE_COLUMNS = ("step", "case", "label", "dice", "picture", "patient")


@dataclass(frozen=True)
class View:
    """Label names and orientation for drawing the samples of one region.

    Attributes:
        label_names: Name of the label by its class of the network.
        is_mirrored: Whether the network sees the region mirrored; the picture is mirrored back.
    """

    label_names: dict[int, str]
    is_mirrored: bool


class ValidationPictures(pl.Callback):
    """Draws the labels of the first validation cases over their scans.

    The pictures go into a folder and to TensorBoard.

    Args:
        folder: Folder of the pictures `step_<step>_<case>.png`; made on first use.
        views: One per region; a single one for a stage other than the fine one.
        num_cases: Cases drawn at each validation.
    """

    def __init__(self, folder: Path, views: Sequence[View], num_cases: int = 2) -> None:
        self.folder = folder
        self.views = views
        self.num_cases = num_cases
        # File name of the latest picture by case and number of the region.
        self.drawn: dict[tuple[str, int], str] = {}

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Draw one case; `outputs` are its predicted labels (D, H, W)."""
        is_drawn = batch_idx < self.num_cases
        if trainer.sanity_checking or not trainer.is_global_zero or not is_drawn:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{trainer.global_step:06d}_{batch_idx}.png"
        (stack,) = batch  # a batch of validation has one stack of one sample
        case, region = stack["case"][0], int(stack["region"][0])
        # If drawing fails, no table may name the picture of an earlier step.
        self.drawn.pop((case, region), None)
        view = self.views[region]
        # (D, H, W) each; of the image, the first channel.
        volumes = [stack["image"][0, 0].float(), outputs, stack["target"][0]]
        if view.is_mirrored:
            volumes = [volume.flip(2) for volume in volumes]
        image, pred, target = (volume.cpu().numpy() for volume in volumes)
        try:
            overlay_montage(
                image,
                pred,
                target,
                stack["spacing_mm"][0],
                path,
                title=f"{case}, step {trainer.global_step}",
                label_names=view.label_names,
                window_hu=(-1.0, 1.0),  # not HU: the network's input is scaled to this range
            )
        except Exception as error:
            # An error of the drawing library, or a full disk, must not end the training.
            say(f"no picture of {case} ({type(error).__name__}: {error})")
            return
        finally:
            # Parts of a figure refer to each other, so that only the garbage collector frees them.
            # It seldom looks at old objects by itself: up to seven pictures of 7 MiB each would
            # stay in memory. This call takes up to 0.3 s.
            gc.collect()
        self.drawn[case, region] = path.name
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                continue
            from matplotlib.image import imread

            pixels = np.asarray(imread(path))[..., :3]  # without alpha
            logger.experiment.add_image(
                f"validation/{batch_idx}", pixels, trainer.global_step, dataformats="HWC"
            )


class ValidationScores(pl.Callback):
    """Writes the Dice of each case and label at the best and the last validation into a CSV file.

    A resumed run drops the rows that came after its checkpoint. The best validation is that of
    `best.ckpt`: helper labels, which have no row, count in its mean Dice too.

    Args:
        path: CSV file.
        pictures: Callback that draws the cases.

    Attributes:
        patients: Patient by case; filled by the caller once the data module is made.
        rows: Rows of the file, those of at most two validations.
        best_step: Step of the best validation; None before the first one.
        best_dice: Its mean Dice over all classes, as in the column `val_dice` of the history.
    """

    def __init__(self, path: Path, pictures: ValidationPictures) -> None:
        self.path = path
        self.pictures = pictures
        self.patients: Mapping[str, str] = {}
        self.rows: list[dict[str, Any]] = []
        self.best_step: int | None = None
        self.best_dice = -math.inf

    def state_dict(self) -> dict[str, Any]:
        """Describe the best validation, for the checkpoint."""
        return {"best_step": self.best_step, "best_dice": self.best_dice}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best validation of a checkpoint."""
        self.best_step = state_dict["best_step"]
        self.best_dice = state_dict["best_dice"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the rows up to the checkpoint."""
        if not trainer.is_global_zero:
            return
        rows = earlier_rows(self.path, _typed_rows)
        self.rows = [row for row in rows if row["step"] <= trainer.global_step]
        # Checkpoints of older versions do not state the best validation.
        if self.best_step is None and self.rows:
            rows_by_step: dict[int, list[dict[str, Any]]] = {}
            for row in self.rows:
                rows_by_step.setdefault(row["step"], []).append(row)
            dice_of_step = {}
            for step, step_rows in rows_by_step.items():
                dice_of_step[step] = _mean_dice(step_rows)
            self.best_step = max(dice_of_step, key=dice_of_step.__getitem__)
            self.best_dice = dice_of_step[self.best_step]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the rows of this validation and of the best one before it."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        module: Any = pl_module  # a `SegmentationModule`
        latest_rows = []
        dices = []
        # A Dice has the class of its label as key, another score the name of its metric.
        for (case, region, class_or_metric), score in module.case_scores.items():
            if not isinstance(class_or_metric, int):
                continue
            dices.append(score)
            label = self.pictures.views[region].label_names.get(class_or_metric)
            if not label:
                continue
            latest_rows.append(
                {
                    "step": trainer.global_step,
                    "case": case,
                    "label": label,
                    "dice": round(score, 6),
                    "picture": self.pictures.drawn.get((case, region), ""),
                    "patient": self.patients.get(case, ""),
                }
            )
        # A resumed run may repeat the best validation: its new rows replace the old ones.
        earlier_best_rows = []
        if self.best_step != trainer.global_step:
            earlier_best_rows = [row for row in self.rows if row["step"] == self.best_step]
        self.rows = earlier_best_rows + latest_rows
        if dices and fmean(dices) > self.best_dice:
            self.best_step = trainer.global_step
            self.best_dice = fmean(dices)
        write_csv(self.path, self.rows, SCORE_COLUMNS)


def _mean_dice(rows: Sequence[Mapping[str, Any]]) -> float:
    """Average the Dice over the rows of a validation, at least one."""
    return fmean(row["dice"] for row in rows)


def _typed_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the texts of a CSV file into rows of `SCORE_COLUMNS`, with numbers where due.

    Raises:
        KeyError: If a column is missing.
        ValueError: If a step or Dice is no number.
    """
    typed_rows = []
    for row in rows:
        cells = {"patient": "", **row}  # files of older versions have no patients
        typed_row = {column: cells[column] for column in SCORE_COLUMNS}
        typed_row["step"] = int(row["step"])
        typed_row["dice"] = float(row["dice"])
        typed_rows.append(typed_row)
    return typed_rows


class MemorySnapshot(pl.Callback):
    """Records the allocations of a GPU for https://pytorch.org/memory_viz, also of a failed run.

    Args:
        path: File (.pickle); the number of the rank is added to its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to record."""
        torch.cuda.memory._record_memory_history()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the snapshot of this rank's GPU."""
        path = self.path.with_stem(f"{self.path.stem}_{trainer.global_rank}")
        torch.cuda.memory._dump_snapshot(str(path))

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Write the snapshot of a run that failed, for example without memory."""
        self.on_train_end(trainer, pl_module)


class Distortions(pl.Callback):
    """Prints by how much crops of fixed size distort each case, each rank in its own log.

    Only the first sample of each case, which may be a slab, is measured.

    Args:
        names: Name of each region; of the whole scan for a stage other than the fine one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.printed: set[tuple[str, int]] = set()  # case and number of the region

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print the distortion of each case that a batch shows for the first time."""
        for stack in batch:
            # Stacks without anything new are skipped, because `tolist` waits for the GPU.
            if all(map(self._is_printed, stack["case"])):
                continue
            regions = stack["region"].tolist()
            for case, region, spacing_mm in zip(
                stack["case"], regions, stack["spacing_mm"], strict=True
            ):
                if (case, region) in self.printed:
                    continue
                self.printed.add((case, region))
                voxel_text = "×".join(f"{length_mm:.3g}" for length_mm in spacing_mm)
                print(
                    f"{case}, {self.names[region]}: distortion {distortion(spacing_mm):.2f}, "
                    f"voxels of {voxel_text} mm",
                    flush=True,
                )

    def _is_printed(self, case: str) -> bool:
        """Whether the distortions of all regions of a case are printed."""
        return all((case, region) in self.printed for region in range(len(self.names)))

    # The cases of a validation are printed too.
    on_validation_batch_end = on_train_batch_end
