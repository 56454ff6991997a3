"""Standard streams of a command, and messages to the user on the error stream."""

import errno
import io
import os
import sys
import time
from contextlib import suppress
from typing import TextIO

SHOWN_AS_CODE = "backslashreplace"
"""Error handler of the standard streams: it writes a letter that they lack as its code."""
PROGRESS_S = 15.0  # least time between two messages of a task's progress


def prepare_streams() -> None:
    """Let nothing that is printed end this process, or one that it starts, with an error.

    A letter that the terminal cannot show is written as its code. A stream that was closed before
    the start writes to nowhere; its number would otherwise go to the next file that is opened, and
    what libraries print would end up in that file.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _open_nowhere(number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SHOWN_AS_CODE)
    # Read by the interpreters of ranks, jobs and loader workers when they start.
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding or 'utf-8'}:{SHOWN_AS_CODE}"


def _open_nowhere(number: int) -> TextIO:
    """Open a stream whose output is dropped, on the descriptor of that number where it is free."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.set_inheritable(nowhere, True)
    try:
        os.fstat(number)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        os.dup2(nowhere, number)
        os.close(nowhere)
        nowhere = number
    return io.TextIOWrapper(
        io.FileIO(nowhere, "w"), encoding="utf-8", errors=SHOWN_AS_CODE, write_through=True
    )


def drop_output(stream: TextIO) -> None:
    """Send what is still to be written to a stream to nowhere.

    Its reader has left, and Python would fail at its exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(message: str) -> None:
    """Tell the user something on the error stream, so that results can be piped.

    A control character, as a file name may contain, is written as its code and cannot act on the
    terminal. Where nobody reads the error stream any more, the message is dropped.
    """
    letters = []
    for letter in message:
        if letter.isprintable() or letter == "\n":
            letters.append(letter)
        else:
            letters.append(ascii(letter)[1:-1])  # its code, without the quotes
    try:
        print(f"medseg: {''.join(letters)}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # a stream without a descriptor, as in a notebook
            drop_output(sys.stderr)


class Progress:
    """Tells the user from time to time how far a task is, and how long the rest will take.

    Its items come in random order, so that the rest takes as long as those before, item by item.
    """

    def __init__(self, command: str, total: int, items: str) -> None:
        """Start the clock.

        Args:
            command: Name before each message.
            total: Number of items.
            items: Their name, in the plural.
        """
        self._command = command
        self._total = total
        self._items = items
        self._start_s = self._told_s = time.perf_counter()

    def show(self, done: int) -> None:
        """Tell that so many items are done, unless all are, or the last message is young."""
        now_s = time.perf_counter()
        if done >= self._total or now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        rest_s = (now_s - self._start_s) / done * (self._total - done)
        say(
            f"{self._command}: {done} of {self._total} {self._items} done, "
            f"about {rest_s / 60:.1f} minutes left"
        )
