"""Loggers of a resumed run: log entries of repeated steps are dropped."""

import warnings
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from medseg.report.tables import read_csv


def drop_repeated_steps(logger: Logger, start_step: int) -> None:
    """Drop what a logger has from a step on; call it before anything else uses the logger.

    Args:
        logger: Lightning's TensorBoard or CSV logger; another one is left alone.
        start_step: Optimiser steps that the run has made; they count from 0 in a logger.
    """
    if isinstance(logger, TensorBoardLogger):
        # TensorBoard skips the older events from there on when it reads the folder.
        logger._kwargs.setdefault("purge_step", start_step)
    elif isinstance(logger, CSVLogger):
        path = Path(logger.log_dir) / "metrics.csv"
        rows = [row for row in read_csv(path) if int(row["step"]) < start_step] if path.is_file() else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it deletes the file, and warns of that
            logger.experiment.metrics = rows
