"""File locks: one process at a time; the system releases a lock when its holder dies."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

# Answers of file systems without locks, such as some network and FUSE mounts.
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[bool]:
    """Hold the lock of a file. Forked children, such as loader workers, do not hold it.

    On a file system without locks nothing is held: the lock guards against accidents. A lock file that merely exists would outlive
    a killed holder, so filelock's fallback to one is off.

    Args:
        path: Lock file; made if needed, and left in place.
        wait_s: How long to wait for another holder; None = without limit.

    Yields:
        Whether the lock is held; False after `wait_s`.
    """
    lock = FileLock(path, timeout=-1 if wait_s is None else wait_s, poll_interval=0.1, fallback_to_soft=False)
    is_held = True
    try:
        lock.acquire()
    except Timeout:
        is_held = False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield is_held
    finally:
        lock.release()  # without effect on a lock that was not acquired


def is_locked(path: Path) -> bool:
    """Whether anyone holds the lock of a file now."""
    if not path.exists():
        return False
    with locked(path, wait_s=0) as is_free:
        return not is_free
