"""One process at a time: locks that the system takes back when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[bool]:
    """Hold the lock that a file stands for; forked children, such as loader workers that outlive a killed run, do not.

    Where the file system knows no locks nothing is held: they guard against accidents, not against malice.

    Args:
        path: The file, made if needed; it says who holds it. The process must open it nowhere else, which would give the lock back.
        wait_s: How long to wait for another holder; None = as long as it takes.

    Yields:
        Whether the lock is held; False after the time is over.
    """
    deadline_s = None if wait_s is None else time.monotonic() + wait_s
    with path.open("ab") as file:
        while not (is_held := _try(file.fileno())) and (deadline_s is None or time.monotonic() < deadline_s):
            time.sleep(0.1)
        if is_held:
            file.truncate(0)
            file.write(_me().encode())
            file.flush()
        yield is_held


def is_locked(path: Path) -> bool:
    """Whether another process holds the file's lock now."""
    if not path.exists():
        return False
    with path.open("ab") as file:
        return not _try(file.fileno())


def holder(path: Path) -> int | None:
    """The process of this machine that holds the file's lock."""
    if not is_locked(path):
        return None
    number, _, host = path.read_text().partition(" ")
    return int(number) if host == socket.gethostname() else None


def _me() -> str:
    return f"{os.getpid()} {socket.gethostname()}"


def _try(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # no locks here
    return True
