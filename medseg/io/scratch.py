"""Scratch arrays: voxels in a temporary file instead of memory, used like any other array.

Inside `scratch_above(num_bytes)`, `new_array` and `new_tensor` make larger arrays as scratch
arrays. A smaller limit may hold for arrays that wait (`waits=True`): arrays that are written once,
plane by plane, and read a few times in the same order, so that a file hardly slows the program. A
thread drops the pages of all scratch arrays from the memory of this process every 20 ms; the values
stay in the files.
"""

from __future__ import annotations

import _thread
import errno
import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from medseg.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Interval at which the thread drops pages from memory, in s.
RELEASE_INTERVAL_S = 0.02
# Estimate of the bytes of scratch arrays in memory: the most that a process reads or writes in one
# interval.
TOUCHED_BYTES = 50_000_000

# Sizes in bytes above which an array is a file: for any array, and for an array that waits. They
# are context variables, so that the limits of one thread do not affect the others.
_limit_bytes: ContextVar[float] = ContextVar("scratch_limit_bytes", default=math.inf)
_waiting_bytes: ContextVar[float] = ContextVar("scratch_waiting_bytes", default=math.inf)

# Maps of all living scratch arrays. The array alone keeps its map alive: weak references here let
# the system remove the file with the array.
_maps: WeakSet[mmap.mmap] = WeakSet()
# Mark of the newest thread that releases pages; a thread with another mark ends.
_releaser: object = None
_lock = threading.Lock()  # guards `_maps`, and the start and the end of the thread


def scratch_folder() -> Path:
    """Folder of temporary files: TMPDIR where it is set, else /var/tmp, else Python's choice.

    Python would choose /tmp before /var/tmp, and on many systems /tmp is memory.

    Raises:
        UserError: If no folder for temporary files can be written.
    """
    if "TMPDIR" not in os.environ and os.access("/var/tmp", os.W_OK):
        return Path("/var/tmp")
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(
            "no folder for temporary files can be written; set TMPDIR to one"
        ) from error


@contextmanager
def scratch_above(num_bytes: float, waiting_bytes: float = math.inf) -> Iterator[None]:
    """Make `new_array` and `new_tensor` put larger arrays into temporary files.

    This holds in the block and for this thread.

    Args:
        num_bytes: Size in bytes above which an array is a file.
        waiting_bytes: The same for arrays that wait, see the top of this module; a size above
            `num_bytes` has no effect.
    """
    token = _limit_bytes.set(num_bytes)
    waiting_token = _waiting_bytes.set(min(num_bytes, waiting_bytes))
    try:
        yield
    finally:
        _limit_bytes.reset(token)
        _waiting_bytes.reset(waiting_token)


@contextmanager
def scratch_at_most(num_bytes: float) -> Iterator[None]:
    """Lower the size in bytes above which arrays of this thread are files to `num_bytes`.

    A size that is lower already stays.
    """
    with scratch_above(min(num_bytes, _limit_bytes.get()), _waiting_bytes.get()):
        yield


def new_array(shape: tuple[int, ...], dtype: Any, *, waits: bool = False) -> np.ndarray:
    """Make an array of zeros, in memory or in a temporary file.

    Args:
        shape: Its shape.
        dtype: Its type.
        waits: Whether it waits, see the top of this module.

    Raises:
        UserError: If it is larger than the limit of `scratch_above`, and the disk has no room.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    content = _scratch_bytes(num_bytes, waits=waits)
    if content is None:
        return np.zeros(shape, dtype)
    return content.view(dtype).reshape(shape)


def new_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    waits: bool = False,
) -> Tensor:
    """Make a tensor with undefined values; on the CPU in memory or in a temporary file.

    Args:
        shape: Its shape.
        dtype: Its type.
        device: Its device.
        waits: Whether it waits, see the top of this module.

    Raises:
        UserError: If it is larger than the limit of `scratch_above`, and the disk has no room.
    """
    import torch  # only here: most commands that read files make no tensor, and it takes 200 MiB

    content = None
    if torch.device(device).type == "cpu":
        content = _scratch_bytes(math.prod(shape) * dtype.itemsize, waits=waits)
    if content is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(content).view(dtype).view(shape)


def _scratch_bytes(num_bytes: int, *, waits: bool) -> np.ndarray | None:
    """Make the bytes of an array as a scratch array; None where the array belongs in memory."""
    if num_bytes > _limit_bytes.get():
        return scratch_array((num_bytes,), np.uint8)
    if waits and num_bytes > _waiting_bytes.get():
        # The file only saves memory, into which the array fits too: without room for the file
        # (UserError) or the thread that releases its pages (RuntimeError), the array is in memory.
        with suppress(UserError, RuntimeError):
            return scratch_array((num_bytes,), np.uint8)
    return None


def scratch_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an array of zeros in a temporary file without a name.

    The system removes the file with the array.

    Raises:
        UserError: If the disk has no room for it, or no folder can be written.
        MemoryError: If the system refuses to map the file into memory.
        RuntimeError: If the thread that releases pages cannot be started.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    # mmap refuses a length of 0.
    num_mapped = max(1, num_bytes)
    folder = scratch_folder()
    try:
        # The map stays valid when the file is closed.
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), num_mapped)
            pages = mmap.mmap(file.fileno(), num_mapped)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            # The disk has the room, but the addresses of this process are limited.
            raise MemoryError(
                f"Unable to map a temporary file of {num_mapped / 2**30:.2f} GiB"
            ) from error
        raise UserError(
            f"{folder}: expected room for a temporary file of {num_mapped / 2**30:.2f} GiB, but "
            f"found none ({error.strerror}); free some, or set TMPDIR to a folder on a larger disk"
        ) from error
    with _lock:
        # The thread ends with the last map. If it has not ended yet, the new one replaces it.
        if not _maps:
            # Unlike `threading.Thread.start`, this does not wait for ever where there is no memory
            # for a thread.
            _thread.start_new_thread(_release_repeatedly, ())
        _maps.add(pages)
    content = np.frombuffer(pages, np.uint8, num_bytes)
    return content.view(dtype).reshape(shape)


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give a file its size and reserve its room on the disk, where the system can.

    Without the room, a later write to the map on a full disk would end the process by a signal.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:  # macOS: the size alone
        os.ftruncate(descriptor, num_bytes)


def release_pages() -> None:
    """Drop the pages of all scratch arrays from the memory of this process; their values stay."""
    with _lock:
        for pages in _maps:
            pages.madvise(mmap.MADV_DONTNEED)


def _release_repeatedly() -> None:
    """Release pages at each interval, in a thread of its own.

    It ends when there is no scratch array, or when a later thread has started.
    """
    global _releaser
    own_mark = object()
    _releaser = own_mark
    while True:
        time.sleep(RELEASE_INTERVAL_S)
        if _releaser is not own_mark:
            return
        release_pages()
        with _lock:
            if not _maps:
                return


def _start_child() -> None:
    """Prepare a forked child, which has no thread yet: its first own array starts one."""
    global _maps
    _maps = WeakSet()
    _lock.release()


# A fork must not copy the lock while the thread holds it: nothing would release it in the child.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_start_child
)
