"""Stop request: on a stop signal the run saves after the current step and exits."""

import signal
import threading
from types import FrameType

# SIGTERM: shutdown of the system. SIGUSR1: SLURM before pre-emption or the time limit
# (`--signal=USR1@120`). SIGUSR2: submitit.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Preempted(BaseException):
    """The run was asked to stop, and everything that it has done is saved.

    Not an `Exception`, so that `except Exception` does not catch it.
    """


class StopRequest:
    """Records the signals that ask this process to stop.

    Attributes:
        is_asked: Whether such a signal has arrived.
        is_safe: Whether the process can end at once without loss; a signal then ends it at once.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.is_safe = False

    def install(self) -> None:
        """Install the handlers; outside the main thread, where Python forbids it, do nothing."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._note)
            # A process that ignores interrupts, such as a background job of a shell, still does.
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._interrupt)

    def end_at_once(self) -> None:
        """From now on, end this process at once on a request.

        Raises:
            Preempted: If a request has arrived already.
        """
        self.is_safe = True
        if self.is_asked:
            raise Preempted

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: record it, and end at once if that is safe."""
        was_asked = self.is_asked
        self.is_asked = True
        # Only for the first signal: a second one must not disturb the process while it ends.
        if self.is_safe and not was_asked:
            raise Preempted

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle an interrupt as Python does, but let no stop signal disturb the end that follows.

        When a user interrupts a sweep, its job gets the interrupt of the terminal and a stop signal
        of the sweep. An exception for that signal, raised while the interrupt is cleaned up, might
        be printed and lost.
        """
        self.is_safe = False
        raise KeyboardInterrupt


# One object per process: a request before the run begins counts too.
STOP = StopRequest()
