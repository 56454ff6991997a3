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
        # `Status(None)` and `Status("unknown")`: the run was killed before it could write a
        # summary, or the record is damaged.
        return cls.interrupted


# A resumed sweep skips jobs of these statuses, unless `retry_failed` is on.
FAILURES = frozenset({Status.refused, Status.out_of_memory, Status.not_finite, Status.failed})

# Parts of torch's messages when the process at the other end of a connection has gone.
_LOST_RANK = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "DistBackendError",
    "NCCL error",
)

# Beginning of the message of a rank whose connection to another rank broke off.
_LOST_RANK_MESSAGE = "the connection to another rank broke off"

# Exit code to status. `exit_code_of` returns the first code of a status, so the order matters.
_STATUS_OF = {
    0: Status.finished,
    EXIT_USER_ERROR: Status.refused,
    EXIT_OUT_OF_MEMORY: Status.out_of_memory,
    EXIT_NOT_FINITE: Status.not_finite,
    EXIT_RESUME: Status.interrupted,
    EXIT_INTERRUPTED: Status.interrupted,
    # A process that had not yet installed its handlers was ended by the signal.
    **{-number: Status.interrupted for number in (signal.SIGINT, *SIGNALS)},
}


def status_of(code: int) -> Status:
    """Translate the exit code of a process to a status; an unknown code means failed.

    A negative code is the number of the signal that ended the process.

    Example:
        >>> [status_of(code).value for code in (0, 2, -15, -9)]
        ['finished', 'refused', 'interrupted', 'failed']
    """
    return _STATUS_OF.get(code, Status.failed)


def exit_code_of(status: Status) -> int:
    """Translate a status to an exit code; a status without a code of its own counts as failed."""
    for code, status_of_code in _STATUS_OF.items():
        if status_of_code is status:
            return code
    return EXIT_FAILED


def end_of(
    error: BaseException,
    *,
    is_asked: bool = False,
    is_saved: bool = True,
    is_memory_full: bool = False,
) -> tuple[int, str, bool]:
    """Describe the end of a run by an error.

    Args:
        error: Exception that ended the training.
        is_asked: Whether the run had been asked to stop, by a signal.
        is_saved: Whether there is a checkpoint to resume from.
        is_memory_full: Whether the kernel has killed a process for lack of memory since the run
            began.

    Returns:
        Exit code, the message for `summary.json`, and whether the error is a defect, which keeps
        its traceback.
    """
    cause = error.__cause__
    if isinstance(cause, RuntimeError) and str(cause).startswith("DataLoader worker"):
        error = cause  # its text names the signal or exit code of the worker
    resume_note = "nothing was saved, so resume begins with the first step"
    if is_saved:
        resume_note = "resume continues from the last checkpoint"
    # A stop signal reaches loader workers and other ranks too. Where the run was asked to stop, the
    # end of a worker or of another rank is no failure.
    is_broken_off = _is_worker_end(error) or _is_lost_rank(error)
    if isinstance(error, Preempted) or (is_asked and is_broken_off):
        return EXIT_RESUME, f"stopped on request; {resume_note}", False
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, f"interrupted; {resume_note}", False
    if isinstance(error, NotFiniteError):
        return EXIT_NOT_FINITE, message_of(error), False
    if isinstance(error, UserError):
        return EXIT_USER_ERROR, message_of(error), False
    line = _line_of(error)
    end = _end_by_library(error, line)
    if end is None:
        end = _end_by_machine(error, line, resume_note, is_memory_full)
    if end is None:
        return EXIT_FAILED, f"{type(error).__name__}: {line}", True
    code, message = end
    return code, message, False


def explains(written: Status, written_message: str, status: Status, message: str) -> bool:
    """Whether the end of one rank is the cause of the end of another rank.

    A rank that fails breaks the connections of the others, and torchrun asks them to stop.

    Args:
        written: Status of the rank that ended first.
        written_message: Its message.
        status: Status of the other rank.
        message: Its message.
    """
    return _cause_level(written, written_message) > _cause_level(status, message)


def _cause_level(status: Status, message: str) -> int:
    """Order of the ends of ranks: an end may be the cause of those with a lower number."""
    if message.startswith(_LOST_RANK_MESSAGE):
        return 0
    if status is Status.interrupted:
        return 1
    return 2


def _end_by_library(error: BaseException, line: str) -> tuple[int, str] | None:
    """Exit code and message where Lightning or torch's compiler refuses the configuration.

    Args:
        error: Exception that ended the training.
        line: First line of its text.

    Returns:
        None for other errors.
    """
    # Classes are recognised by their names, since Lightning and torch's compiler take seconds to
    # import.
    class_names = {base.__name__ for base in type(error).__mro__}
    if "MisconfigurationException" in class_names:
        return EXIT_USER_ERROR, (
            f"Lightning refuses the configuration ({line}); "
            "change the callback or key that it names"
        )
    # The compiler wraps errors of memory and files too, whose own messages say more.
    if is_out_of_memory(error) or _is_file_error(error):
        return None
    if "TorchDynamoException" in class_names:
        return EXIT_USER_ERROR, (
            f"torch.compile cannot compile this network ({line}); "
            "give memory.compile=false, or samples of one shape (stage.patch_size)"
        )
    return None


def _end_by_machine(
    error: BaseException, line: str, resume_note: str, is_memory_full: bool
) -> tuple[int, str] | None:
    """Exit code and message where memory, a disk, a loader worker or another rank failed.

    Args:
        error: Exception that ended the training.
        line: First line of its text.
        resume_note: Sentence on what `resume` would do.
        is_memory_full: See `end_of`.

    Returns:
        None for other errors.
    """
    has_worker_ended = _is_worker_end(error)
    if is_out_of_memory(error) or (has_worker_ended and is_memory_full):
        return EXIT_OUT_OF_MEMORY, f"out of memory: {line}"
    if _is_file_error(error):
        return EXIT_USER_ERROR, (
            f"a file could not be read or written ({line}); "
            f"check its folder, permissions and space: {resume_note}"
        )
    if has_worker_ended:
        return EXIT_FAILED, f"a loader worker ended ({line}); {resume_note}"
    if _is_lost_rank(error):
        # The other rank was killed. Torch reports only the rank whose end it notices first, which
        # may be this one.
        if is_memory_full:
            return EXIT_OUT_OF_MEMORY, (
                f"{_LOST_RANK_MESSAGE} ({line}): "
                f"out of memory, the kernel has killed a process; {resume_note}"
            )
        return EXIT_FAILED, (
            f"{_LOST_RANK_MESSAGE} ({line}); "
            f"the log of that rank is in the folder ranks; {resume_note}"
        )
    return None


def message_of(error: BaseException) -> str:
    """Text of an error, as it was raised.

    An error in a loader worker arrives as "Caught <class> in DataLoader worker …" with the worker's
    traceback as its text; the last line, `<class>: <text>`, is the error itself.
    """
    text = str(error).strip()
    if not text.startswith("Caught "):
        return text
    last_line = text.splitlines()[-1]
    return last_line.partition(": ")[2] or last_line


def _line_of(error: BaseException) -> str:
    """First line of an error's text, or its class where the text is empty."""
    lines = message_of(error).splitlines() or [type(error).__name__]
    # Torch adds advice to the end of a loader worker: "… Details are lost due to multiprocessing.
    # Rerunning with num_workers=0 may give better error trace."
    return lines[0].partition(". Details are lost")[0]


def _is_worker_end(error: BaseException) -> bool:
    """Whether a loader worker ended."""
    # A worker that is killed while it hands over a batch breaks the connection. Nothing else in a
    # run raises these errors: no files are read over a network connection.
    if isinstance(error, (ConnectionResetError, ConnectionRefusedError)):
        return True
    return isinstance(error, RuntimeError) and str(error).strip().startswith("DataLoader worker")


def _is_lost_rank(error: BaseException) -> bool:
    """Whether the connection to another rank broke off."""
    if not isinstance(error, RuntimeError):
        return False
    text = f"{type(error).__name__} {error}"
    return any(words in text for words in _LOST_RANK)


def _is_file_error(error: BaseException) -> bool:
    """Whether a file could not be read or written."""
    if isinstance(error, OSError):
        # An error of a connection is an OSError too.
        return not _is_worker_end(error)
    # Torch raises a RuntimeError where the disk is full.
    return "No space left on device" in str(error)


def num_oom_kills() -> int:
    """Count the processes that the kernel of this machine has killed for lack of memory.

    The count begins with the start of the machine, over all control groups (containers). It is 0
    outside Linux.
    """
    path = Path("/proc/vmstat")
    if not path.is_file():
        return 0
    match = re.search(r"^oom_kill (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(match[1]) if match else 0
