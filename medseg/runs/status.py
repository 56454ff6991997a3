"""Status of a run, and the exit code that passes the status between processes."""

import re
import signal
from enum import Enum
from pathlib import Path

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

    @classmethod
    def _missing_(cls, _: object) -> "Status":
        return cls.interrupted  # killed before it could write a summary, or a damaged record


# A resumed sweep leaves jobs of these statuses, unless `retry_failed` is on, and goes on with
# interrupted ones.
FAILURES = frozenset({Status.refused, Status.out_of_memory, Status.not_finite, Status.failed})

# What torch says when the process at the other end of a connection has gone.
_LOST_RANK = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "DistBackendError",
    "NCCL error",
)

_STATUS_OF = {
    0: Status.finished,
    EXIT_USER_ERROR: Status.refused,
    EXIT_OUT_OF_MEMORY: Status.out_of_memory,
    EXIT_NOT_FINITE: Status.not_finite,
    EXIT_RESUME: Status.interrupted,
    EXIT_INTERRUPTED: Status.interrupted,
    # Signals to a process that had not yet installed its handlers.
    **{-number: Status.interrupted for number in (signal.SIGINT, *SIGNALS)},
}


def status_of(code: int) -> Status:
    """Translate the exit code of a process to a status.

    Example:
        >>> [status_of(code).value for code in (0, 2, -15, -9)]
        ['finished', 'refused', 'interrupted', 'failed']
    """
    return _STATUS_OF.get(code, Status.failed)


def exit_code_of(status: Status) -> int:
    """Translate a status to the exit code that carries it."""
    return next((code for code, meant in _STATUS_OF.items() if meant is status), EXIT_FAILED)


def end_of(
    error: BaseException,
    *,
    is_asked: bool = False,
    is_saved: bool = True,
    is_memory_full: bool = False,
) -> tuple[int, str, bool]:
    """Describe the end of a run by an error.

    Args:
        error: What ended the training.
        is_asked: Whether the run had been asked to stop.
        is_saved: Whether there is a checkpoint to resume from.
        is_memory_full: Whether the kernel has killed a process for lack of memory since the run
            began.

    Returns:
        Exit code, the message for `summary.json`, and whether the error is a defect, which keeps
        its traceback.
    """
    cause = error.__cause__
    if isinstance(cause, RuntimeError) and str(cause).startswith("DataLoader worker"):
        error = cause  # it has the signal or exit code of the worker
    text = str(error).strip()
    # An error in a loader worker arrives with the worker's traceback as its text; the last line is
    # the error itself.
    last = (text.splitlines() or [""])[-1]
    message = (last.partition(": ")[2] or last) if text.startswith("Caught ") else text
    line = (message.splitlines() or [type(error).__name__])[0].partition(". Details are lost")[0]
    rest = (
        "resume continues from the last checkpoint"
        if is_saved
        else "nothing was saved, so resume begins with the first step"
    )
    # A worker that is killed while it hands over a batch breaks the connection; no file of a run is
    # read through one.
    is_worker = isinstance(error, (ConnectionResetError, ConnectionRefusedError)) or (
        isinstance(error, RuntimeError) and text.startswith("DataLoader worker")
    )
    is_file = (isinstance(error, OSError) and not is_worker) or "No space left on device" in text
    # By their names, since torch's compiler and Lightning take seconds to import.
    class_names = {one.__name__ for one in type(error).__mro__}
    is_compiler = "TorchDynamoException" in class_names
    is_misconfigured = "MisconfigurationException" in class_names
    is_lost = isinstance(error, RuntimeError) and any(
        words in f"{type(error).__name__} {text}" for words in _LOST_RANK
    )
    ends: list[tuple[bool, int, str]] = [
        # A loader worker that ended after the request has received the signal too.
        (
            isinstance(error, Preempted) or (is_asked and (is_worker or is_lost)),
            EXIT_RESUME,
            f"stopped on request; {rest}",
        ),
        (isinstance(error, KeyboardInterrupt), EXIT_INTERRUPTED, f"interrupted; {rest}"),
        (isinstance(error, NotFiniteError), EXIT_NOT_FINITE, message),
        (isinstance(error, UserError), EXIT_USER_ERROR, message),
        (
            is_misconfigured,
            EXIT_USER_ERROR,
            f"Lightning refuses the configuration ({line}); change the callback or key that it names",
        ),
        (
            is_out_of_memory(error) or (is_worker and is_memory_full),
            EXIT_OUT_OF_MEMORY,
            f"out of memory: {line}",
        ),
        (
            is_file,
            EXIT_USER_ERROR,
            f"a file could not be read or written ({line}); check its folder, permissions and space: {rest}",
        ),
        (
            is_compiler,
            EXIT_USER_ERROR,
            f"torch.compile cannot compile this network ({line}); give memory.compile=false, or samples of one shape (stage.patch_size)",
        ),
        (is_worker, EXIT_FAILED, f"a loader worker ended ({line}); {rest}"),
        (
            is_lost,
            EXIT_FAILED,
            f"the connection to another rank broke off ({line}); the log of that rank is in the folder ranks; {rest}",
        ),
    ]
    known = next(((code, told, False) for is_it, code, told in ends if is_it), None)
    return known or (EXIT_FAILED, f"{type(error).__name__}: {line}", True)


def num_oom_kills() -> int:
    """Count the processes that the kernel of this machine has killed for lack of memory, in whatever control group; 0 outside Linux."""
    path = Path("/proc/vmstat")
    found = (
        re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.is_file()
        else None
    )
    return int(found[1]) if found else 0
