"""Logger of a run, beside `history.csv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from medseg.config.targets import bind_target

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


def make_logger(group: dict[str, Any], start_step: int = 0, trusted: Sequence[str] = ()) -> Logger | bool:
    """Make the logger of the `logger` group; False where there is none.

    Args:
        group: `_target_` and arguments; empty for none.
        start_step: Step that the run resumes from; what an earlier attempt logged after it is removed.
        trusted: Prefixes of `trusted_targets`.
    """
    if not group:
        return False
    from medseg.training.loggers import drop_repeated_steps

    node = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(group), resolve=True))  # references to the environment
    logger: Logger = bind_target("logger", "logger", node, trusted=trusted)()
    if start_step:
        drop_repeated_steps(logger, start_step)
    return logger
