"""Logger of a run, beside `history.csv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from medseg.build.optimisation import make_target
from medseg.config.schema import TrainConfig

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def make_logger(config: TrainConfig, start_step: int = 0) -> Logger | bool:
    """Make the logger of the `logger` group; False where there is none.

    Args:
        config: Checked configuration.
        start_step: Step that the run resumes from; what an earlier attempt logged after it is removed.
    """
    if not config.logger:
        return False
    from medseg.training.loggers import drop_repeated_steps

    logger: Logger = make_target("logger", config.logger)()
    if start_step:
        drop_repeated_steps(logger, start_step)
    return logger
