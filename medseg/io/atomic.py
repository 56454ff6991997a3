"""Files that several processes use: atomic writes and locks.

A write that fails leaves the old content as it was. A lock is released when its holder dies.
"""

import errno
import fcntl
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from medseg.errors import UserError

# Start of the names of temporary files, which hides them from listings.
PART_PREFIX = ".medseg-"
# A temporary file that was last written longer ago is left from a process that was killed.
STALE_AFTER_S = 3600.0

# Error numbers of file systems without locks, such as some network and FUSE mounts.
NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})


@contextmanager
def replace_path(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces the target at the end of the block.

    The temporary file is in the folder of the target, since a file system can only rename within
    itself; missing folders are made. It has the suffix of the target, by which libraries choose the
    format. After an error, an interrupt or a full disk the old file is unchanged and the temporary
    one is removed. A link stays a link: the file that it points to is replaced.

    Raises:
        UserError: If the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    # A new name, since the target's name with an addition could be too long. For the same reason
    # the suffix, which is everything behind the last dot, is cut: no format has more than 8
    # characters.
    part = target.parent / f"{PART_PREFIX}{uuid.uuid4().hex}.part{target.suffix[:8]}"
    try:
        if target.exists() and not target.is_file():
            raise UserError(
                f"{path}: cannot be written, since it is a folder or a device; choose another name."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        yield part
        move_into_place(part, target)
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def move_into_place(part: Path, target: Path) -> None:
    """Rename a written file to its target, after its content has reached the disk."""
    with part.open("rb") as file:
        # Otherwise a power cut may leave an empty file under the new name, and lose the old file.
        os.fsync(file.fileno())
    os.replace(part, target)


def replace_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file whole or not at all.

    Raises:
        UserError: If the file cannot be written.
    """
    with replace_path(path) as part:
        part.write_bytes(data)


def replace_text(path: Path, text: str, errors: str = "backslashreplace") -> None:
    r"""Write a text file in UTF-8, whole or not at all.

    Args:
        path: The file.
        text: Its text.
        errors: How surrogates are encoded, which stand for bytes of file names that are not UTF-8:
            `backslashreplace` writes an escape such as `\udcfc`, which JSON and YAML read back and
            every program can show; `RAW_NAMES` of `medseg.io.names` writes the byte itself.

    Raises:
        UserError: If the file cannot be written.
    """
    replace_bytes(path, text.encode(errors=errors))


def create_text(path: Path, text: str) -> bool:
    """Write a text file whole, unless the path exists.

    Where several processes call this at the same moment, exactly one makes the file.

    Returns:
        Whether this call has made the file; False where the path existed.

    Raises:
        UserError: If the file cannot be written.
    """
    part = path.with_name(f"{PART_PREFIX}{uuid.uuid4().hex}.part")
    try:
        replace_text(part, text)
    except UserError as error:
        # The user knows the path, not the temporary file.
        raise UserError(str(error).replace(str(part), str(path), 1)) from error
    try:
        _link_or_claim(part, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return True


def _link_or_claim(part: Path, path: Path) -> None:
    """Give a temporary file its final name: by a hard link, else by renaming it.

    Raises:
        FileExistsError: If a file has the name already.
        OSError: If the file cannot get the name.
    """
    try:
        # Unlike a rename, a hard link fails where the path exists.
        os.link(part, path)
        return
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links
        # Claim the name with an empty file, which is then replaced.
        path.open("x").close()
    try:
        os.replace(part, path)
    except BaseException:  # an interrupt as well
        # Otherwise the empty file would count as the finished one.
        with suppress(OSError):
            path.unlink()
        raise


def check_writable(folder: Path) -> None:
    """Make a folder and, for a moment, a file in it, before a long computation writes there.

    Temporary files that killed processes left in the folder are removed.

    Raises:
        UserError: If the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _not_written(folder, error) from error
    for part in folder.glob(f"{PART_PREFIX}*.part*"):
        with suppress(OSError):  # removed already, or owned by another user
            age_s = time.time() - part.stat().st_mtime
            if age_s > STALE_AFTER_S:
                part.unlink()


def _not_written(path: Path, error: OSError) -> UserError:
    """Explain why a file or a folder cannot be written."""
    reason = error.strerror or str(error)
    # Errors of `mkdir` where a file has the name of a folder.
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        reason = "a part of its path is a file"
    return UserError(
        f"{path}: cannot be written ({reason}); check the folder, its permissions and its space."
    )


@contextmanager
def locked(path: Path, wait_s: float | None = None) -> Iterator[bool]:
    """Hold the lock of a file. Forked children, such as loader workers, do not hold it.

    On a file system without locks the block runs without one: the lock only guards against
    accidents. filelock's fallback for such file systems is off: it takes the existence of a file
    for a lock, and the file would outlive a killed holder.

    Args:
        path: Lock file; made if needed, and left in place.
        wait_s: Longest time to wait for another holder, in s; None: without limit.

    Yields:
        True, also where there are no locks; False if another holder kept the lock for `wait_s`.

    Raises:
        UserError: If the file cannot be opened.
    """
    # filelock waits without limit where the timeout is negative.
    timeout_s = -1 if wait_s is None else wait_s
    lock = FileLock(path, timeout=timeout_s, poll_interval=0.1, fallback_to_soft=False)
    is_held = True
    try:
        lock.acquire()
    except Timeout:
        is_held = False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise _not_written(path, error) from error
    try:
        yield is_held
    finally:
        lock.release()  # without effect on a lock that was not acquired


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file now.

    Read access is enough, so the file may belong to another user.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # there is no such file, or this user may not read it
        return False
    try:
        # A shared lock, without waiting, fails while another process holds the exclusive one.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
