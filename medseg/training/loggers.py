"""Log entries of a resumed run: those of steps that it repeats are dropped."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from medseg.console import say
from medseg.errors import UserError, first_line
from medseg.io.tables import read_csv

Rows = list[dict[str, Any]]


def drop_repeated_steps(logger: Logger, start_step: int) -> None:
    """Drop what a logger has from a step on; call it before anything else uses the logger.

    Args:
        logger: Lightning's TensorBoard or CSV logger; another one is left alone.
        start_step: Optimiser steps that the run has made. In a logger steps count from 0, so this
            is also the first step that is dropped.
    """
    if isinstance(logger, TensorBoardLogger):
        # When TensorBoard reads the folder, it skips older events of this step and later ones.
        logger._kwargs.setdefault("purge_step", start_step)
    elif isinstance(logger, CSVLogger):

        def before_start(rows: Rows) -> Rows:
            return [row for row in rows if int(row["step"]) < start_step]

        # Read first: access to `experiment` deletes the file, and warns that it does.
        kept_rows = earlier_rows(Path(logger.log_dir) / "metrics.csv", before_start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.experiment.metrics = kept_rows


def earlier_rows(path: Path, keep: Callable[[Rows], Rows]) -> Rows:
    """Read the rows of a CSV file that an earlier attempt of the run wrote.

    Args:
        path: `metrics.csv` of a logger, `history.csv` or `validation.csv`.
        keep: Picks the rows that come before the checkpoint. For a damaged table it may raise
            KeyError, TypeError or ValueError.

    Returns:
        The picked rows; none where there is no file, or, with a message, where it is damaged.

    Raises:
        UserError: If the path is no file, so that it cannot be replaced.
    """
    if not path.exists():
        return []
    # A pipe would make the writer wait for ever.
    if not path.is_file():
        raise UserError(f"{path}: expected a file, got a folder, a pipe or a device; remove it")
    try:
        return keep(read_csv(path))
    except (UserError, KeyError, TypeError, ValueError) as error:
        say(f"{path} is damaged and begins anew: {first_line(error)}")
        return []
