"""Logger of a run, beside `history.csv`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medseg.build.optimisation import make_target

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def make_logger(group: dict[str, Any], start_step: int = 0) -> Logger | bool:
    """Make the logger of the `logger` group; False where there is none.

    Args:
        group: `_target_` and arguments; empty for none.
        start_step: Step that the run resumes from; what an earlier attempt logged after it is removed.
    """
    if not group:
        return False
    from medseg.training.loggers import drop_repeated_steps

    logger: Logger = make_target("logger", group)()
    if start_step:
        drop_repeated_steps(logger, start_step)
    return logger
