"""Standard streams of a command, and messages to the user on the error stream."""

import errno
import io
import os
import sys
import time
from contextlib import suppress
from typing import TextIO

SHOWN_AS_CODE = "backslashreplace"
"""Error handler of the standard streams: characters that their encoding lacks become codes."""
PROGRESS_S = 15.0  # least time between two messages about the progress of a task


def prepare_streams() -> None:
    """Make printing safe: no text raises an error in this process or in its child processes.

    A character that the terminal cannot show is written as its code. A stream that was closed
    before the start is redirected to the null device. Otherwise the next file that is opened would
    get the descriptor of the stream, and libraries would print into that file.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        # Python sets a standard stream to None where its descriptor is closed at the start.
        if getattr(sys, name) is None:
            setattr(sys, name, _open_nowhere(descriptor))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SHOWN_AS_CODE)
    # Read by the interpreters of ranks, jobs and loader workers when they start.
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding or 'utf-8'}:{SHOWN_AS_CODE}"


def _open_nowhere(descriptor: int) -> TextIO:
    """Open a stream on the null device; it gets the given descriptor if no file has that yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.set_inheritable(nowhere, True)
    try:
        os.fstat(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # The descriptor is free: move the stream there, where libraries written in C print.
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
        nowhere = descriptor
    return io.TextIOWrapper(
        io.FileIO(nowhere, "w"), encoding="utf-8", errors=SHOWN_AS_CODE, write_through=True
    )


def drop_output(stream: TextIO) -> None:
    """Redirect a stream, whose reader has closed the pipe, to the null device.

    Otherwise Python would fail at its exit, when it flushes the buffer of the stream.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(message: str) -> None:
    """Tell the user something on the error stream, so that results can be piped.

    A control character, as a file name may contain, is written as its code and cannot act on the
    terminal. Where nobody reads the error stream any more, the message is dropped.
    """
    characters = []
    for character in message:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            characters.append(ascii(character)[1:-1])  # its code, without the quotes
    try:
        print(f"medseg: {''.join(characters)}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # a stream without a descriptor, as in a notebook
            drop_output(sys.stderr)


class Progress:
    """Tells the user from time to time how far a task is, and how long the rest will take.

    The estimate assumes that each item that is left takes the mean time of the items done. Callers
    therefore process their items in random order, not from small to large.
    """

    def __init__(self, command: str, total: int, items: str) -> None:
        """Start the clock.

        Args:
            command: Name before each message.
            total: Number of items.
            items: Noun for the items, in the plural.
        """
        self._command = command
        self._total = total
        self._items = items
        self._start_s = time.perf_counter()
        self._last_message_s = self._start_s

    def show(self, num_done: int) -> None:
        """Tell how many items are done; silent within `PROGRESS_S` of a message and at the end.

        Args:
            num_done: Number of items done, at least 1.
        """
        now_s = time.perf_counter()
        is_recent = now_s - self._last_message_s < PROGRESS_S
        if is_recent or num_done >= self._total:
            return
        self._last_message_s = now_s
        seconds_per_item = (now_s - self._start_s) / num_done
        rest_s = seconds_per_item * (self._total - num_done)
        say(
            f"{self._command}: {num_done} of {self._total} {self._items} done, "
            f"about {rest_s / 60:.1f} minutes left"
        )
