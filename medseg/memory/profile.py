"""Memory profile of a piece of work: the area under the curve of memory over time, and the peak of the process."""

from __future__ import annotations

import _thread
import ctypes
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

SAMPLE_INTERVAL_S = 0.05
# Memory limit of the container, a number of bytes or `max`.
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    # On Linux `ru_maxrss` survives `exec`, so a new process starts with the peak of the process that started it.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_limit_bytes() -> int:
    """Memory that this process may use: that of the machine, or less in a container (control group)."""
    limit = int(psutil.virtual_memory().total)
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such group, or "max"
            limit = min(limit, int(path.read_text(encoding="ascii")))
    return limit


def reset_peak_resident() -> None:
    """Let the largest resident memory of this process begin anew at the present one.

    Raises:
        OSError: If the system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def release_free_memory() -> None:
    """Give the free pages of the C library's heap back to the system; glibc keeps up to 0.3 GB of them after a network."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other; its resident memory where the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    except (OSError, ValueError):
        return int(psutil.Process(pid).memory_info().rss)


def bytes_beside(pid: int, others: Sequence[int]) -> int:
    """Sum the memory that other processes take beside that of a process from which they were forked.

    That is what they have written themselves, and old copies of pages that the process has written since. A page that
    several of them share counts once. Pages of files are shared by all.

    Args:
        pid: The process.
        others: Processes that it has started; one that has ended takes nothing.
    """
    try:
        main = _kib(pid, "smaps_rollup")
        held = main["Anonymous"] + _kib(pid, "status").get("RssShmem", 0)
        total = main["Pss_Anon"] + main["Pss_Shmem"]
    except (OSError, KeyError, ValueError):  # another system, or an old kernel
        return sum(map(private_bytes, others))
    for other in others:
        with suppress(OSError, KeyError, ValueError):  # it has just ended
            sizes = _kib(other, "smaps_rollup")
            total += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return 1024 * max(0, total - held)


def _kib(pid: int, name: str) -> dict[str, int]:
    """Sizes that a file of /proc gives, in KiB."""
    lines = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace").splitlines()
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {parts[0].rstrip(":"): int(parts[1]) for parts in words}


class MemoryProfile:
    """Memory over time while a block runs, sampled in a thread of its own.

    Attributes:
        area_gb_s: Area under the curve by the trapezoidal rule, in 10⁹ bytes times seconds.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes) -> None:
        self.area_gb_s = 0.0
        self._measure = measure
        self._last: tuple[float, int] | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()

    def add(self, time_s: float, num_bytes: int) -> None:
        """Add a point to the curve; times must not decrease."""
        last_s, last_bytes = self._last or (time_s, num_bytes)
        self.area_gb_s += (time_s - last_s) * (last_bytes + num_bytes) / 2e9
        self._last = time_s, num_bytes

    def __enter__(self) -> MemoryProfile:
        self._sample()
        # `threading.Thread.start` waits for ever for a thread that ends at once because there is no memory for it.
        _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over.set()
        self._sample()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_INTERVAL_S):
            with self._lock:
                if not self._is_over.is_set():
                    self._sample()

    def _sample(self) -> None:
        self.add(time.perf_counter(), self._measure())
