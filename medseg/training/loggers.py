"""Loggers of a run that goes on: what came after its checkpoint comes again, and must not stand there twice."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


def go_on(logger: Logger, step: int) -> None:
    """Drop what a logger has from a step on; to be called before anything else uses it.

    Args:
        logger: Lightning's TensorBoard or CSV logger; another one is left alone.
        step: Optimiser steps that the run has made; they count from 0 in a logger.
    """
    if isinstance(logger, TensorBoardLogger):
        # TensorBoard skips the older events from there on when it reads the folder.
        logger._kwargs.setdefault("purge_step", step)
    elif isinstance(logger, CSVLogger):
        path = Path(logger.log_dir) / "metrics.csv"
        rows: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) < step]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it deletes the file, and says so
            logger.experiment.metrics = list(rows)
