"""How a run ends: the status that its files name, and the exit code that carries it from process to process."""

from __future__ import annotations

import signal
from enum import Enum

from medseg.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_RESUME,
    EXIT_USER_ERROR,
    NotFiniteError,
    UserError,
    is_out_of_memory,
)
from medseg.training.preemption import SIGNALS, Preempted


class Status(Enum):
    """What became of a run."""

    running = "running"
    finished = "finished"
    refused = "refused"
    interrupted = "interrupted"
    pruned = "pruned"
    out_of_memory = "out_of_memory"
    not_finite = "not_finite"
    failed = "failed"


# A job with one of these has had its turn; the others go on when the sweep is resumed.
FAILURES = frozenset({Status.refused, Status.out_of_memory, Status.not_finite, Status.failed})

_STATUS_OF = {
    0: Status.finished,
    EXIT_USER_ERROR: Status.refused,
    EXIT_OUT_OF_MEMORY: Status.out_of_memory,
    EXIT_NOT_FINITE: Status.not_finite,
    EXIT_RESUME: Status.interrupted,
    EXIT_INTERRUPTED: Status.interrupted,
    # Asked to stop before it could listen.
    **{-number: Status.interrupted for number in (signal.SIGINT, *SIGNALS)},
    # What Linux does to a process when the machine's memory is full.
    -signal.SIGKILL: Status.out_of_memory,
}


def status_of(code: int) -> Status:
    """The status that an exit code of a worker means.

    Example:
        >>> [status_of(code).value for code in (0, 2, -9, -11)]
        ['finished', 'refused', 'out_of_memory', 'failed']
    """
    return _STATUS_OF.get(code, Status.failed)


def exit_code_of(status: Status) -> int:
    """The exit code that carries a status."""
    return next((code for code, meant in _STATUS_OF.items() if meant is status), EXIT_FAILED)


def ending_of(error: BaseException) -> tuple[int, str]:
    """The exit code of a worker that ends with an error, and the sentence that its files keep.

    Args:
        error: What ended the training.

    Returns:
        Exit code and message.
    """
    if isinstance(error, Preempted):
        return EXIT_RESUME, "asked to stop; saved, resume goes on with the next step"
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted; resume goes on from the last checkpoint"
    if isinstance(error, NotFiniteError):
        return EXIT_NOT_FINITE, str(error)
    if isinstance(error, UserError):
        return EXIT_USER_ERROR, str(error)
    first_line = (str(error).strip().splitlines() or [""])[0]
    if is_out_of_memory(error):
        return EXIT_OUT_OF_MEMORY, f"out of memory: {first_line}"
    return EXIT_FAILED, f"{type(error).__name__}: {first_line}"
