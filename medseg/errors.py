"""Exceptions with messages for the user, and exit codes of the commands."""

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_NOT_FINITE = 4
# Asked to stop by the system, and saved: start the same again with resume. The number is
# EX_TEMPFAIL of sysexits.h.
EXIT_RESUME = 75
EXIT_INTERRUPTED = 130
# Nobody reads what is printed any more, as after `| head`: what a shell says of a program that
# SIGPIPE ended.
EXIT_UNREAD = 141


class UserError(Exception):
    """A mistake of the user or a bad file, described in one clear sentence: what was expected, what was found, what to do.

    Only the outermost entry (`medseg.commands.entry`) turns it into exit code 2, without a
    traceback.
    """


class NotFiniteError(UserError):
    """The loss became infinite or not a number."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError` with a message unless a condition holds.

    Raises:
        UserError: If the condition does not hold.
    """
    if not condition:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    """Quote an error in one line of at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out on the device, on the host, or in a loader worker."""
    if (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    ):  # torch's, which is not imported here
        return True
    text, code = str(error), f"with exit code {EXIT_OUT_OF_MEMORY}."
    words = (
        "can't allocate memory",
        "Cannot allocate memory",
        "CUDA out of memory",
        "CUDA error: out of memory",
    )
    is_worker = text.startswith("DataLoader worker") and code in text
    return isinstance(error, (RuntimeError, OSError)) and (
        is_worker or any(word in text for word in words)
    )
