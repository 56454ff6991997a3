"""Worker process: a spawned process that calls functions for this one and ends with it."""

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class WorkerDiedError(Exception):
    """The worker process ended before it had answered."""


class Worker:
    """A process of its own that calls one function at a time.

    It is spawned, since a forked child of a process with threads may hang. It talks through a pipe: the queues of an
    executor need named semaphores, which nobody removes when this process is killed. The worker ends when this
    process ends, in whatever way.
    """

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, workers_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(workers_end,), daemon=True)
        self._process.start()
        workers_end.close()  # else the death of the worker would not close the pipe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of a module in the worker, and wait for its result.

        Raises:
            WorkerDiedError: If the worker ends meanwhile, as when the system kills it for want of memory.
            Exception: What the function raises.
        """
        try:
            self._pipe.send((function, arguments))
            result, error = self._pipe.recv()
        except (EOFError, OSError) as lost:
            raise WorkerDiedError("the worker process ended") from lost
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
    """Call functions until the pipe is closed."""
    # Ctrl-C reaches the whole process group; the parent ends this process on its way out.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            pipe.send(_answer(function, arguments))


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Call a function; its result, or its error with the lines of the traceback as a note."""
    try:
        return function(*arguments), None
    except Exception as error:
        error.add_note(traceback.format_exc())
        return None, error


def _end_with_parent() -> None:
    """End this process when its parent has ended, also where a function still runs."""
    if parent := parent_process():
        parent.join()
        os._exit(1)
