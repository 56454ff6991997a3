"""Status of a run, and its exit code, which passes it between processes."""

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
    """Status in `summary.json` of a run and in `job.json` of a job."""

    running = "running"
    finished = "finished"
    refused = "refused"
    interrupted = "interrupted"
    pruned = "pruned"
    out_of_memory = "out_of_memory"
    not_finite = "not_finite"
    failed = "failed"


# A resumed sweep leaves jobs of these statuses, unless `retry_failed` is on, and goes on with interrupted ones.
FAILURES = frozenset({Status.refused, Status.out_of_memory, Status.not_finite, Status.failed})

_STATUS_OF = {
    0: Status.finished,
    EXIT_USER_ERROR: Status.refused,
    EXIT_OUT_OF_MEMORY: Status.out_of_memory,
    EXIT_NOT_FINITE: Status.not_finite,
    EXIT_RESUME: Status.interrupted,
    EXIT_INTERRUPTED: Status.interrupted,
    # Signals to a process that had not yet installed its handlers.
    **{-number: Status.interrupted for number in (signal.SIGINT, *SIGNALS)},
    # Linux kills a process when the machine's memory is full.
    -signal.SIGKILL: Status.out_of_memory,
}


def status_of(code: int) -> Status:
    """Translate the exit code of a process to a status.

    Example:
        >>> [status_of(code).value for code in (0, 2, -9, -11)]
        ['finished', 'refused', 'out_of_memory', 'failed']
    """
    return _STATUS_OF.get(code, Status.failed)


def exit_code_of(status: Status) -> int:
    """Translate a status to the exit code that carries it."""
    return next((code for code, meant in _STATUS_OF.items() if meant is status), EXIT_FAILED)


def end_of(error: BaseException) -> tuple[int, str]:
    """Describe the end of a run by an error.

    Args:
        error: What ended the training.

    Returns:
        Exit code, and the message for `summary.json`.
    """
    first_line = (str(error).strip().splitlines() or [""])[0]
    ends: list[tuple[bool, int, str]] = [
        (
            isinstance(error, Preempted),
            EXIT_RESUME,
            "stopped on request after saving a checkpoint; resume continues with the next step",
        ),
        (isinstance(error, KeyboardInterrupt), EXIT_INTERRUPTED, "interrupted; resume continues from the last checkpoint"),
        (isinstance(error, NotFiniteError), EXIT_NOT_FINITE, str(error)),
        (isinstance(error, UserError), EXIT_USER_ERROR, str(error)),
        (is_out_of_memory(error), EXIT_OUT_OF_MEMORY, f"out of memory: {first_line}"),
    ]
    failed = (EXIT_FAILED, f"{type(error).__name__}: {first_line}")
    return next(((code, message) for is_it, code, message in ends if is_it), failed)
