"""Monitoring callbacks: pictures of validation cases, and the distortion of crops of fixed size."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from medseg.geometry.grid_rule import distortion
from medseg.pictures.overlay import overlay_montage


@dataclass(frozen=True)
class View:
    """Names and orientation for drawing the samples of one region.

    Attributes:
        label_names: Class of the network to name.
        is_mirrored: Whether the network sees it mirrored; the picture is mirrored back.
    """

    label_names: dict[int, str]
    is_mirrored: bool


class ValidationPictures(pl.Callback):
    """Draws the labels of the first validation cases over their scans, into `pictures/` and the logger.

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
        (shown,) = batch
        view = self.views[int(shown["region"][0])]
        arrays = (shown["image"][0, 0].float(), outputs, shown["target"][0])
        image, pred, target = ((array.flip(2) if view.is_mirrored else array).cpu().numpy() for array in arrays)
        try:
            overlay_montage(
                image,
                pred,
                target,
                shown["spacing_mm"][0],
                path,
                title=f"{shown['case'][0]}, step {trainer.global_step}",
                label_names=view.label_names,
                window_hu=(-1.0, 1.0),
            )
        except Exception as error:
            # An error of the drawing library, or a full disk, must not end the training.
            print(f"medseg: no picture of {shown['case'][0]} ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                from matplotlib.image import imread

                pixels = np.asarray(imread(path))[..., :3]
                logger.experiment.add_image(f"validation/{batch_idx}", pixels, trainer.global_step, dataformats="HWC")


class MemorySnapshot(pl.Callback):
    """Records the allocations of a GPU and writes them to a file for https://pytorch.org/memory_viz, also when the run fails.

    Args:
        path: File (.pickle).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to record."""
        torch.cuda.memory._record_memory_history()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the snapshot of this rank's GPU."""
        torch.cuda.memory._dump_snapshot(str(self.path.with_stem(f"{self.path.stem}_{trainer.global_rank}")))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the snapshot of a run that failed, for example without memory."""
        self.on_train_end(trainer, pl_module)


class Distortions(pl.Callback):
    """Prints by how much crops of fixed size distort each case, by its first sample (which may be a slab); each rank in its own log.

    Args:
        names: Name of each region; of the whole scan for the coarse stage.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.printed: set[tuple[str, int]] = set()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print what a batch of training or validation shows first."""
        described = [zip(one["case"], one["region"].tolist(), one["spacing_mm"], strict=True) for one in batch]
        for case, region, spacing_mm in itertools.chain.from_iterable(described):
            if (case, region) not in self.printed:
                self.printed.add((case, region))
                voxel = "×".join(f"{mm:.3g}" for mm in spacing_mm)
                print(f"{case}, {self.names[region]}: distortion {distortion(spacing_mm):.2f}, voxels of {voxel} mm", flush=True)

    on_validation_batch_end = on_train_batch_end
