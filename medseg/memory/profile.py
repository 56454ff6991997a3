"""Memory of a process, its limits, and the profile of a piece of work over time."""

from __future__ import annotations

import _thread
import ctypes
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

SAMPLE_INTERVAL_S = 0.05
# Files of this process that name its control groups and where they are mounted.
CGROUPS, MOUNTS = Path("/proc/self/cgroup"), Path("/proc/self/mountinfo")


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far."""
    # On Linux `ru_maxrss` survives `exec`, so a new process starts with the peak of the process
    # that started it.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # KiB, but bytes on macOS.
    return peak if sys.platform == "darwin" else 1024 * peak


class ControlGroup(NamedTuple):
    """Files of a control group that bounds the memory of its processes.

    Attributes:
        limit: Largest number of bytes, or `max`.
        usage: Bytes in use, with those of cached files.
        stat: Further counters, a name and a number a line.
        cached: Name of the counter of cached files that the kernel drops first.
    """

    limit: Path
    usage: Path
    stat: Path
    cached: str

    @classmethod
    def of(cls, folder: Path, version: int) -> ControlGroup:
        """Name the files of a group's folder, which differ between the versions 1 and 2."""
        stat = folder / "memory.stat"
        if version == 2:
            return cls(folder / "memory.max", folder / "memory.current", stat, "inactive_file")
        limit = folder / "memory.limit_in_bytes"
        usage = folder / "memory.usage_in_bytes"
        return cls(limit, usage, stat, "total_inactive_file")

    def limit_bytes(self) -> int | None:
        """Its bound; None without one."""
        with suppress(OSError, ValueError):  # no such file, or "max"
            return int(self.limit.read_text(encoding="ascii"))
        return None

    def used_bytes(self) -> int:
        """Bytes in use without cached files that would make room; 0 where it is not known."""
        with suppress(OSError, ValueError):
            used = int(self.usage.read_text(encoding="ascii"))
            lines = self.stat.read_text(encoding="ascii").splitlines()
            counters = dict(line.split() for line in lines)
            return max(0, used - int(counters.get(self.cached, 0)))
        return 0


def memory_limit_bytes() -> int:
    """Memory that this process may use: that of the machine, or less in a container.

    Each control group bounds the groups inside it, so the smallest bound from the process's group
    upwards counts.
    """
    smallest = int(psutil.virtual_memory().total)
    for group in control_groups():
        bound = group.limit_bytes()
        if bound is not None:
            smallest = min(smallest, bound)
    return smallest


def free_memory_bytes() -> int:
    """Memory that processes of this container could take in addition to what they hold now."""
    free = int(psutil.virtual_memory().available)
    for group in control_groups():
        bound = group.limit_bytes()
        if bound is not None:
            free = min(free, bound - group.used_bytes())
    return max(0, free)


def control_groups() -> list[ControlGroup]:
    """List the control groups of this process that may bound its memory, the innermost first.

    Other systems than Linux have none.
    """
    groups: list[ControlGroup] = []
    try:
        names = CGROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return groups
    for line in names:
        _, controllers, name = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers, whose list is empty.
        version = 1 if controllers else 2
        if version == 2 or "memory" in controllers.split(","):
            folders = _folders(PurePosixPath(name), version, mounts)
            groups += [ControlGroup.of(folder, version) for folder in folders]
    return groups


def _folders(name: PurePosixPath, version: int, mounts: Sequence[str]) -> list[Path]:
    """Folders of a control group and of those around it, as far as they are mounted here.

    Args:
        name: Path of the group in its hierarchy.
        version: 1 or 2.
        mounts: Lines of `mountinfo`, see proc(5).
    """
    for line in mounts:
        # "36 35 98:0 /root /mount/point rw … - cgroup2 device options"
        place, _, kind = line.partition(" - ")
        filesystem, _, options = kind.split(" ", 2)
        is_unified = version == 2 and filesystem == "cgroup2"
        is_memory = version == 1 and filesystem == "cgroup" and "memory" in options.split(",")
        if not (is_unified or is_memory):
            continue
        root, mount_point = place.split(" ")[3:5]
        top = Path(mount_point.replace("\\040", " "))
        # A container sees only its own group, under the name that it has outside.
        if not name.is_relative_to(root):
            return [top]
        inner = top / name.relative_to(root)
        return [inner, *(folder for folder in inner.parents if folder.is_relative_to(top))]
    return []


def reset_peak_resident() -> None:
    """Let the largest resident memory of this process begin anew at the present one.

    Raises:
        OSError: If the system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def release_free_memory() -> None:
    """Give the free pages of the C library's heap back to the system.

    glibc keeps up to 0.3 GB of them after a network.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def timed_step(
    durations_s: dict[str, float], on_step: Callable[[str], None] | None, step: str
) -> Iterator[None]:
    """Announce a step of a case and record its seconds, unless it fails.

    What the step before has freed goes back to the system first, see `release_free_memory`.
    """
    release_free_memory()
    if on_step is not None:
        on_step(step)
    start_s = time.perf_counter()
    yield
    durations_s[step] = time.perf_counter() - start_s


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other.

    Where the system does not tell, its resident memory. A process that has ended takes nothing.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    except (OSError, ValueError):
        with suppress(psutil.NoSuchProcess):
            return int(psutil.Process(pid).memory_info().rss)
        return 0


def bytes_beside(pid: int, child_pids: Sequence[int]) -> int:
    """Sum the memory that child processes take beside that of the process that forked them.

    A fork shares its memory page by page until one of the processes writes. So this is the memory
    of all of them together, in which a shared page counts once, without that of the process itself.
    Pages of files are not counted: all share them.

    Args:
        pid: The process.
        child_pids: Processes that it has started; one that has ended takes nothing.
    """
    # The kernel walks through all pages for the sizes of a process.
    if not child_pids:
        return 0
    try:
        sizes = _kib(pid, "smaps_rollup")
        parent_kib = sizes["Anonymous"] + _kib(pid, "status").get("RssShmem", 0)
        # Pss: each shared page is divided by the number of processes that share it.
        total_kib = sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    except (OSError, KeyError, ValueError):  # another system, or an old kernel
        return sum(map(private_bytes, child_pids))
    for child_pid in child_pids:
        with suppress(OSError, KeyError, ValueError):  # it has just ended
            sizes = _kib(child_pid, "smaps_rollup")
            total_kib += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return 1024 * max(0, total_kib - parent_kib)


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
        # `threading.Thread.start` waits for ever for a thread that ends at once because there is no
        # memory for it.
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
