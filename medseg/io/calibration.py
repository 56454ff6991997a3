"""Calibrations: measured numbers of this machine, such as seconds and bytes, kept in JSON files.

A calibration is valid for 30 days. One that was measured while other programs used the processors
is valid only until the machine is quiet.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from medseg.errors import UserError
from medseg.io.atomic import replace_text

# 30 days. Drivers, kernels and neighbours of a virtual machine change, so older calibrations are
# measured again.
MAX_AGE_S = 30 * 86400.0
# Largest load by other programs, as a part of all processors, on a machine that counts as quiet.
# One busy processor among eight is more.
QUIET_LOAD = 0.1
# How long `present_load` observes the processors, in s.
WATCH_S = 0.25
# Load noted for measurements that do not agree with each other: above `QUIET_LOAD`, so that a quiet
# machine measures them again.
UNSETTLED_LOAD = 1.0

Measurement = TypeVar("Measurement")


class Circumstances(NamedTuple):
    """When and under which load something was measured.

    Attributes:
        load: Part of the machine's processors that other programs used, from 0 to 1.
        time_s: Seconds since the epoch.
    """

    load: float
    time_s: float

    def is_valid(self, measure_load: Callable[[], float]) -> bool:
        """Whether a measurement still counts.

        Args:
            measure_load: Measures the load now; called only where the answer depends on it.
        """
        age_s = time.time() - self.time_s
        # The age is negative if the clock was set back, and may be NaN in a damaged file.
        is_recent = 0 <= age_s <= MAX_AGE_S
        if not is_recent:
            return False
        if self.load <= QUIET_LOAD:
            return True
        # A measurement under load is valid while the machine is loaded. A quiet machine repeats it.
        return measure_load() > QUIET_LOAD


class ProcessorTimes(NamedTuple):
    """Reading of the clock and of processor times, in seconds; only differences have a meaning.

    Attributes:
        clock_s: Reading of a monotonic clock.
        busy_s: Time that all processors together have been busy.
        own_s: Processor time of this process and of its children that have ended.
    """

    clock_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "ProcessorTimes":
        """Read the times."""
        times = psutil.cpu_times()
        # Not every system has the fields that are read with a default.
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # The sum holds the time of guest systems twice: `user` and `nice` contain it already.
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        busy_s = sum(times) - idle_s - guest_s
        process = os.times()
        own_s = process.user + process.system + process.children_user + process.children_system
        return cls(time.perf_counter(), busy_s, own_s)


class LoadMeter:
    """Context manager that measures the load by other programs while its block runs.

    Child processes of the block do not count as other programs if they end before the block; those
    that still run do.

    Attributes:
        load: Part of the machine's processors that other programs used, from 0 to 1; set when the
            block ends.
    """

    def __init__(self) -> None:
        self.load = 0.0

    def __enter__(self) -> "LoadMeter":
        self._start = ProcessorTimes.now()
        return self

    def __exit__(self, *_: object) -> None:
        end = ProcessorTimes.now()
        elapsed_s = end.clock_s - self._start.clock_s
        busy_s = end.busy_s - self._start.busy_s
        own_s = end.own_s - self._start.own_s
        num_processors = psutil.cpu_count() or 1
        if elapsed_s > 0:
            load = (busy_s - own_s) / (elapsed_s * num_processors)
            # The system counts busy and own time with different clock ticks, so the difference may
            # leave the possible range.
            self.load = min(1.0, max(0.0, load))

    def circumstances(self) -> Circumstances:
        """Describe the block that has just ended."""
        return Circumstances(round(self.load, 3), time.time())


def measure_until(
    measure: Callable[[], Measurement],
    agree: Callable[[Measurement, Measurement], bool],
    most_times: int,
) -> tuple[Measurement, Measurement, Circumstances]:
    """Repeat a measurement until two in a row agree.

    Args:
        measure: Makes one measurement.
        agree: Whether two measurements are equal within the tolerance of the caller.
        most_times: Largest number of measurements, at least 2; after these, the last two are
            returned even if they do not agree.

    Returns:
        The last but one measurement, the last one, and when and under which load they were made.
        Two that do not agree count as made under load: a quiet machine repeats them.
    """
    with LoadMeter() as meter:
        previous = measure()
        latest = measure()
        num_times = 2
        while num_times < most_times and not agree(previous, latest):
            previous, latest = latest, measure()
            num_times += 1
    circumstances = meter.circumstances()
    if not agree(previous, latest):
        circumstances = circumstances._replace(load=UNSETTLED_LOAD)
    return previous, latest, circumstances


@functools.cache
def present_load() -> float:
    """Part of the machine's processors that other programs use, when this is first called.

    The first call observes them for `WATCH_S`; later calls of the process return the same number.
    """
    with LoadMeter() as meter:
        time.sleep(WATCH_S)
    return meter.load


def read_calibration(path: Path, count: int) -> list[float] | None:
    """Read the numbers of a calibration.

    Args:
        path: File.
        count: Expected number of numbers.

    Returns:
        The numbers; None if there is no file, or if it is damaged, too old, or was measured under
        load (see `Circumstances.is_valid`).
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        numbers = [float(number) for number in content["numbers"]]
        circumstances = Circumstances(float(content["load"]), float(content["time_s"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if len(numbers) != count or not circumstances.is_valid(present_load):
        return None
    return numbers


def write_calibration(path: Path, numbers: Sequence[float], circumstances: Circumstances) -> None:
    """Write the numbers of a calibration to its file.

    A file that cannot be written is no error: the next process measures the numbers again.
    """
    content = {"numbers": list(numbers), **circumstances._asdict()}
    with suppress(UserError):
        replace_text(path, json.dumps(content))
