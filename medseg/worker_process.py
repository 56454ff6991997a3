"""Worker process: a spawned process that calls functions for its parent, and ends with it."""

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")
# Longest wait, in seconds, for the end of a process that has closed its pipe.
END_WAIT_S = 5.0


class WorkerDiedError(Exception):
    """The worker process ended before it had answered.

    Attributes:
        is_killed: Whether it was killed, as the system does where memory is full.
    """

    def __init__(self, exit_code: int | None) -> None:
        self.is_killed = exit_code == -signal.SIGKILL
        super().__init__(f"its process {_describe_end(exit_code)}")


class NotSentError(Exception):
    """A request or an answer could not be packed or read: both must be values that pickle."""


class Worker:
    """A process of its own that calls one function at a time.

    It is spawned, since a forked child of a process with threads may hang. Requests and results go
    through a pipe: the queues of an executor need named semaphores, which would stay in the system
    if this process were killed. The worker ends when this process ends or is killed.
    """

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(worker_pipe,), daemon=True)
        self._process.start()
        # This end belongs to the worker. If this process held it too, the death of the worker would
        # not close the pipe, and `recv_bytes` would wait forever.
        worker_pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of a module in the worker, and wait for its result.

        Raises:
            WorkerDiedError: If the worker ends before it answers, for example because the system
                kills it when memory is full.
            NotSentError: If the worker cannot read the request, or the result or the error cannot
                be sent or read.
            Exception: What the function raises, or what pickle raises for an argument that it
                cannot pack.
        """
        # Pickled apart from `send_bytes`: an OSError of pickling is not the death of the worker.
        request = ForkingPickler.dumps((function, arguments))
        try:
            self._pipe.send_bytes(request)
            packed = self._pipe.recv_bytes()
        except (EOFError, OSError) as lost:
            self._process.join(END_WAIT_S)
            raise WorkerDiedError(self._process.exitcode) from lost
        # Unpacked apart from `recv_bytes`, for the same reason as the request.
        try:
            result, error = ForkingPickler.loads(packed)
        except Exception as failure:
            raise NotSentError(f"the answer cannot be read: {failure!r}") from failure
        if error is not None:
            raise error
        answer: Result = result
        return answer

    def close(self) -> None:
        """End the worker; a function that still runs is abandoned."""
        self._pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    """Call functions until the parent closes the pipe, or ends in the midst of a message."""
    # Ctrl-C reaches all processes of the terminal; the parent then ends this one by `close`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    # OSError: the pipe was closed in the midst of a message. `_answer` itself raises nothing.
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv_bytes()
            pipe.send_bytes(_answer(request))


def _answer(request: bytes) -> memoryview:
    """Call the function of a request, and pack the pair (result, error), one of which is None.

    The error has the traceback in this process as a note.
    """
    try:
        function, arguments = ForkingPickler.loads(request)
    except Exception as error:
        return _packed_error(NotSentError(f"the request cannot be read: {error!r}"))
    try:
        result = function(*arguments)
    except Exception as error:
        # A traceback cannot be sent to another process, but its text can.
        error.add_note(traceback.format_exc())
        return _packed_error(error)
    try:
        return ForkingPickler.dumps((result, None))
    except Exception as error:
        return _packed_error(
            NotSentError(
                f"the result of {function.__qualname__}, of {type(result)}, cannot be sent: "
                f"{error!r}"
            )
        )


def _packed_error(error: Exception) -> memoryview:
    """Pack an error; for one that cannot pass between processes, a `NotSentError` with its text."""
    try:
        packed = ForkingPickler.dumps((None, error))
        # Tried here: an exception class with arguments of its own often pickles, but fails to load.
        ForkingPickler.loads(packed)
    except Exception:
        lines = [f"{type(error).__qualname__}: {error}", *getattr(error, "__notes__", ())]
        return ForkingPickler.dumps((None, NotSentError("\n".join(lines))))
    return packed


def _describe_end(exit_code: int | None) -> str:
    """Say how a process ended, by its exit code or, if negative, its signal."""
    if exit_code is None:
        return "no longer answers"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        return "was killed, as the system does when memory is full"
    number = -exit_code
    name = f"signal {number}"
    # Most real-time signals have no name.
    with suppress(ValueError):
        name = signal.Signals(number).name
    return f"was ended by {name}"


def _end_with_parent() -> None:
    """Wait for the end of the parent, then end this process, even while a function runs."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        # `sys.exit` would end this thread alone.
        os._exit(1)
