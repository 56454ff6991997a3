"""Exceptions with messages for the user, and exit codes of the commands."""

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_OUT_OF_MEMORY = 3
EXIT_NOT_FINITE = 4
# The system asked the run to stop, and it saved its state: start it again with resume. The number
# is EX_TEMPFAIL of sysexits.h.
EXIT_RESUME = 75
# 128 + the signal, as a shell reports it: SIGINT (Ctrl-C), and SIGPIPE where nobody reads the
# output any more, as after `| head`.
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141

# Parts of the error messages of torch, CUDA and the system when memory runs out.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    # A library of CUDA cannot allocate its workspace.
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # The end of "Unable to find …" and of "GET was unable to find …".
    "nable to find an engine to execute this computation",
    # The system has no memory for the stack of a thread.
    "can't start new thread",
)
# All that oneDNN says where it finds no memory for the code or the constants of a kernel. With
# "descriptor" behind it, the words mean a kernel that does not exist.
_ONEDNN_OUT_OF_MEMORY = "could not create a primitive"


class UserError(Exception):
    """A mistake of the user or a bad file, described in one clear sentence.

    The sentence says what was expected, what was found, and what to do. Only the outermost entry
    (`medseg.commands.entry`) turns it into exit code 2, without a traceback.
    """


class SeveralSeriesError(UserError):
    """Several DICOM series where one is expected; the message lists them."""


class NotFiniteError(UserError):
    """The loss became infinite or not a number."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error, at most 200 characters, or its type without a message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out on the device, on the host, or in a loader worker."""
    # `OutOfMemoryError` is torch's, which is not imported here.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error)
    # A loader worker ends with this code when its memory runs out.
    if text.startswith("DataLoader worker") and f"with exit code {EXIT_OUT_OF_MEMORY}." in text:
        return True
    if text.strip() == _ONEDNN_OUT_OF_MEMORY:
        return True
    return any(words in text for words in _OUT_OF_MEMORY)
