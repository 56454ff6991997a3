"""Worker processes: results, errors, deaths, and no leaked semaphores."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from medseg.worker_process import NotSentError, Worker, WorkerDiedError

ROOT = Path(__file__).resolve().parents[1]
# Prints the process number of the worker, and lets it sleep for ten minutes.
BUSY_PARENT = """
import os, time
from medseg.worker_process import Worker

if __name__ == "__main__":
    with Worker() as worker:
        print(worker.call(os.getpid), flush=True)
        worker.call(time.sleep, 600)
"""


class PairError(Exception):
    """Exception that pickles with one argument, and then cannot be loaded: it needs two."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def raise_pair_error() -> None:
    raise PairError("a", "b")


def test_a_worker_answers_in_another_process_and_returns_errors() -> None:
    with Worker() as worker:
        assert worker.call(os.getpid) != os.getpid()
        with pytest.raises(ValueError, match="invalid literal") as caught:
            worker.call(int, "x")
        assert "Traceback" in caught.value.__notes__[0]
        assert worker.call(int, "7") == 7, "the worker goes on after an error"


def test_a_worker_that_is_killed_is_an_error() -> None:
    with Worker() as worker:
        number = worker.call(os.getpid)
        os.kill(number, signal.SIGKILL)
        with pytest.raises(
            WorkerDiedError,
            match=r"^its process was killed, as the system does when memory is full$",
        ) as died:
            worker.call(os.getpid)
    assert died.value.is_killed


@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (os._exit, 7, "its process ended with exit code 7"),
        (signal.raise_signal, signal.SIGSEGV, "its process was ended by SIGSEGV"),
        (signal.raise_signal, 40, "its process was ended by signal 40"),
    ],
)
def test_a_worker_that_ends_otherwise_says_how(
    function: Callable[[int], Any], argument: int, said: str
) -> None:
    with Worker() as worker, pytest.raises(WorkerDiedError, match=f"^{said}$") as died:
        worker.call(function, argument)
    assert not died.value.is_killed


def test_what_cannot_pass_between_processes_is_told_and_the_worker_goes_on() -> None:
    with Worker() as worker:
        with pytest.raises(NotSentError, match=r"^the result of \w*lock, .*cannot pickle"):
            worker.call(threading.Lock)
        with pytest.raises(NotSentError, match=r"PairError: a and b\nTraceback"):
            worker.call(raise_pair_error)
        assert worker.call(int, "7") == 7


class NotHere:
    """Object that pickles, and can be loaded only in the process that pickled it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return refuse_elsewhere, (os.getpid(),)


def refuse_elsewhere(number: int) -> None:
    if os.getpid() != number:
        raise OSError("not here")


def test_an_answer_that_cannot_be_read_is_told_and_the_worker_goes_on() -> None:
    with Worker() as worker:
        with pytest.raises(NotSentError, match=r"^the answer cannot be read: OSError"):
            worker.call(NotHere)
        assert worker.call(int, "7") == 7


def cut_answer() -> None:
    """Announce an answer of 100 bytes, send three, and end."""
    (pipe,) = (one for one in gc.get_objects() if isinstance(one, Connection))
    os.write(pipe.fileno(), struct.pack("!i", 100) + b"abc")
    os._exit(7)


def test_an_answer_that_is_cut_off_is_the_death_of_the_worker() -> None:
    with Worker() as worker, pytest.raises(WorkerDiedError, match=r"ended with exit code 7$"):
        worker.call(cut_answer)


def test_a_request_that_is_cut_off_ends_the_worker_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Worker() as worker:
        os.write(worker._pipe.fileno(), struct.pack("!i", 100) + b"abc")
        worker._pipe.close()
        worker._process.join()
        assert worker._process.exitcode == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_busy_worker_ends_with_its_parent_and_leaks_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Python's resource tracker would print semaphores that were not removed."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY_PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.2)
    parent.send_signal(number)
    _, said = parent.communicate(
        timeout=30
    )  # ends when the worker and the tracker have closed the stream
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert "leaked" not in said
