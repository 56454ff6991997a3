"""What a piece of work costs in memory: its peak, and the area under the curve of memory over time."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")
SAMPLED_EVERY_S = 0.05


class Curve:
    """Memory over time, between whose points it is taken to change evenly.

    Attributes:
        area_gb_s: Area under the curve so far, in 10⁹ bytes times seconds.
        peak_bytes: Highest point so far.
    """

    def __init__(self) -> None:
        self.area_gb_s = 0.0
        self.peak_bytes = 0
        self._last: tuple[float, int] | None = None

    def add(self, time_s: float, num_bytes: int) -> None:
        """Add a point; times do not fall."""
        if self._last is not None:
            last_s, last_bytes = self._last
            self.area_gb_s += (time_s - last_s) * (last_bytes + num_bytes) / 2e9
        self._last = time_s, num_bytes
        self.peak_bytes = max(self.peak_bytes, num_bytes)


class MemoryMeter:
    """Watch the memory of this process while a block runs.

    Attributes:
        curve: Resident memory, or what `measure` tells.
    """

    def __init__(self, measure: Callable[[], int]) -> None:
        self.curve = Curve()
        self._measure = measure
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLED_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        self.curve.add(time.perf_counter(), self._measure())


def resident_bytes() -> int:
    """Memory that this process holds resident now; where the system does not tell, the most that it has held so far."""
    if not _STATM.exists():
        return peak_resident_bytes()
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Most memory that this process has held resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
