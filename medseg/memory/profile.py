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

SAMPLE_INTERVAL_S = 0.05  # of `MemoryProfile`
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
        stat: Further counters, one name and number per line.
        cached_counter: Name of the counter in `stat` of the bytes of cached files that the kernel
            drops first.
    """

    limit: Path
    usage: Path
    stat: Path
    cached_counter: str

    @classmethod
    def of(cls, folder: Path, version: int) -> ControlGroup:
        """Name the files of a group's folder, which differ between the versions 1 and 2."""
        if version == 2:
            return cls(
                limit=folder / "memory.max",
                usage=folder / "memory.current",
                stat=folder / "memory.stat",
                cached_counter="inactive_file",
            )
        return cls(
            limit=folder / "memory.limit_in_bytes",
            usage=folder / "memory.usage_in_bytes",
            stat=folder / "memory.stat",
            cached_counter="total_inactive_file",
        )

    def limit_bytes(self) -> int | None:
        """Largest number of bytes that the group may use; None where it is not limited."""
        with suppress(OSError, ValueError):  # no such file, or "max"
            return int(self.limit.read_text(encoding="ascii"))
        return None

    def used_bytes(self) -> int:
        """Bytes in use, without cached files, which the kernel would drop; 0 where not known."""
        with suppress(OSError, ValueError):
            used = int(self.usage.read_text(encoding="ascii"))
            lines = self.stat.read_text(encoding="ascii").splitlines()
            counters = dict(line.split() for line in lines)
            cached = int(counters.get(self.cached_counter, 0))
            # Both files change while they are read, so the difference may be negative.
            return max(0, used - cached)
        return 0


def memory_limit_bytes() -> int:
    """Memory that this process may use: all of the machine, or less in a container.

    Each control group limits the groups inside it, so the smallest limit from the process's group
    upwards counts.
    """
    smallest_limit = int(psutil.virtual_memory().total)
    for group in control_groups():
        limit = group.limit_bytes()
        if limit is not None:
            smallest_limit = min(smallest_limit, limit)
    return smallest_limit


def free_memory_bytes() -> int:
    """Memory that the processes of this container could take beyond their present memory."""
    free = int(psutil.virtual_memory().available)
    for group in control_groups():
        limit = group.limit_bytes()
        if limit is not None:
            free = min(free, limit - group.used_bytes())
    return max(0, free)


def control_groups() -> list[ControlGroup]:
    """List the control groups of this process that may limit its memory, the innermost first.

    Other systems than Linux have none.
    """
    groups: list[ControlGroup] = []
    try:
        memberships = CGROUPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return groups
    for line in memberships:
        # "7:memory:/user.slice" of version 1, "0::/user.slice" of version 2; see cgroups(7).
        _, controllers, group_path = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers, whose list is empty.
        version = 1 if controllers else 2
        if version == 2 or "memory" in controllers.split(","):
            folders = _group_folders(PurePosixPath(group_path), version, mounts)
            groups += [ControlGroup.of(folder, version) for folder in folders]
    return groups


def _group_folders(group_path: PurePosixPath, version: int, mounts: Sequence[str]) -> list[Path]:
    """List the folders of a control group and its parents, as far as they are mounted here.

    Args:
        group_path: Path of the group in its hierarchy.
        version: 1 or 2.
        mounts: Lines of `mountinfo`, see proc(5).

    Returns:
        The innermost folder first.
    """
    for line in mounts:
        # "36 35 98:0 /root /mount/point rw … - cgroup2 device options"
        mount_text, _, filesystem_text = line.partition(" - ")
        filesystem, _, options = filesystem_text.split(" ", 2)
        has_group = filesystem == "cgroup2"
        if version == 1:
            has_group = filesystem == "cgroup" and "memory" in options.split(",")
        if not has_group:
            continue
        # The path in the hierarchy that is mounted, and where it is mounted.
        root, mount_point = mount_text.split(" ")[3:5]
        top = Path(mount_point.replace("\\040", " "))  # a space in a path is written \040
        # In a container only its own group is mounted, but the path may be that of the host.
        if not group_path.is_relative_to(root):
            return [top]
        innermost = top / group_path.relative_to(root)
        around = [folder for folder in innermost.parents if folder.is_relative_to(top)]
        return [innermost, *around]
    return []


def reset_peak_resident() -> None:
    """Reset the peak of this process's resident memory to the present value.

    Raises:
        OSError: If the system cannot.
    """
    # 5 resets VmHWM, which `peak_resident_bytes` reads; see proc(5).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def release_free_memory() -> None:
    """Give the free pages of the C library's heap back to the system.

    glibc keeps up to 0.3 GB of them after a network has run.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def timed_step(
    durations_s: dict[str, float], on_step: Callable[[str], None] | None, step: str
) -> Iterator[None]:
    """Announce a step of a case and record its seconds, unless it fails.

    First the memory that the previous step has freed is given back to the system.

    Args:
        durations_s: Gets the seconds under the name of the step.
        on_step: Called with the name of the step when it begins.
        step: Name of the step.
    """
    release_free_memory()
    if on_step is not None:
        on_step(step)
    start_s = time.perf_counter()
    yield
    durations_s[step] = time.perf_counter() - start_s


def private_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other.

    If the system does not report it, all its resident memory counts; 0 if the process has ended.
    """
    try:
        sizes_kib = _sizes_kib(pid, "smaps_rollup")
    except (OSError, ValueError):
        with suppress(psutil.NoSuchProcess):
            return int(psutil.Process(pid).memory_info().rss)
        return 0
    # Private_Clean, Private_Dirty and Private_Hugetlb.
    return 1024 * sum(size for name, size in sizes_kib.items() if name.startswith("Private_"))


def bytes_beside(pid: int, child_pids: Sequence[int]) -> int:
    """Sum the memory that child processes take in addition to that of their parent.

    A forked process shares each page of memory with its parent until one of them writes to it. So
    this is the memory of all of them together, in which a shared page counts once, less that of the
    parent. Pages of files are not counted, because all processes share them.

    Args:
        pid: The parent.
        child_pids: Processes that it has started; one that has ended takes nothing.
    """
    # Without children the sizes of the parent are not read: the kernel would walk through all of
    # its pages for them.
    if not child_pids:
        return 0
    try:
        parent_sizes_kib = _sizes_kib(pid, "smaps_rollup")
        shared_kib = _sizes_kib(pid, "status").get("RssShmem", 0)
        parent_kib = parent_sizes_kib["Anonymous"] + shared_kib
        # The sum of "Pss" over all processes counts a shared page once: in each of them it is the
        # size of the page divided by the number of processes that share it.
        total_kib = parent_sizes_kib["Pss_Anon"] + parent_sizes_kib["Pss_Shmem"]
    except (OSError, KeyError, ValueError):  # another system, or an old kernel
        return sum(map(private_bytes, child_pids))
    for child_pid in child_pids:
        with suppress(OSError, KeyError, ValueError):  # it has just ended
            child_sizes_kib = _sizes_kib(child_pid, "smaps_rollup")
            total_kib += child_sizes_kib["Pss_Anon"] + child_sizes_kib["Pss_Shmem"]
    return 1024 * max(0, total_kib - parent_kib)


def _sizes_kib(pid: int, file_name: str) -> dict[str, int]:
    """Read the sizes from a file of a process in /proc, such as "VmHWM:  1234 kB", by name."""
    path = Path(f"/proc/{pid}/{file_name}")
    sizes_kib = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.endswith(" kB"):
            name, size, _ = line.split()
            sizes_kib[name.rstrip(":")] = int(size)
    return sizes_kib


class MemoryProfile:
    """Memory over time while a block runs, sampled in a thread of its own.

    Attributes:
        area_gb_s: Area under the curve by the trapezoidal rule, in 10⁹ bytes times seconds.
    """

    def __init__(self, measure: Callable[[], int] = resident_bytes) -> None:
        self.area_gb_s = 0.0
        self._measure = measure
        self._last_point: tuple[float, int] | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # held while a point is added

    def add(self, time_s: float, num_bytes: int) -> None:
        """Add a point to the curve; times must not decrease."""
        if self._last_point is not None:
            last_s, last_bytes = self._last_point
            mean_gb = (last_bytes + num_bytes) / 2 / 1e9
            self.area_gb_s += (time_s - last_s) * mean_gb
        self._last_point = (time_s, num_bytes)

    def __enter__(self) -> MemoryProfile:
        self._sample()
        # `threading.Thread.start` waits for ever for a thread that ends at once because there is no
        # memory for it.
        _thread.start_new_thread(self._watch, ())
        return self

    def __exit__(self, *_: object) -> None:
        # With the lock, the thread is not in the middle of a sample. So the sample below is the
        # last one.
        with self._lock:
            self._is_over.set()
        self._sample()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_INTERVAL_S):
            with self._lock:
                # The block may have ended between the wait and the lock.
                if not self._is_over.is_set():
                    self._sample()

    def _sample(self) -> None:
        self.add(time.perf_counter(), self._measure())
