"""Calibrations of this machine: numbers in files.

They are kept while they are young and were measured on a quiet machine.
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

# Drivers, kernels and neighbours of a virtual machine change: older calibrations are made anew.
MAX_AGE_S = 30 * 86400.0
# Part of the machine's processors that other programs may use while something is measured. A single
# background process of a small machine is more than that.
QUIET_LOAD = 0.1
# How long the present load is watched.
WATCH_S = 0.25
# Load that is noted for measurements that do not agree.
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

    def is_valid(self, present_load: Callable[[], float]) -> bool:
        """Whether a measurement still counts.

        One that was made under load is better than none while the machine is loaded, and is made
        anew once it is quiet.

        Args:
            present_load: Measures the load now; called only where the answer depends on it.
        """
        age_s = time.time() - self.time_s
        if not 0 <= age_s <= MAX_AGE_S:
            return False
        return self.load <= QUIET_LOAD or present_load() > QUIET_LOAD


class LoadMeter:
    """Load by other programs while a block runs.

    Processes that the block starts do not count once they have ended.

    Attributes:
        load: Part of the machine's processors that other programs used, from 0 to 1; set when the
            block ends.
    """

    def __init__(self) -> None:
        self.load = 0.0

    def __enter__(self) -> "LoadMeter":
        self._start = _readings_s()
        return self

    def __exit__(self, *_: object) -> None:
        elapsed_s, busy_s, own_s = (
            end - start for start, end in zip(self._start, _readings_s(), strict=True)
        )
        num_processors = psutil.cpu_count() or 1
        if elapsed_s > 0:
            self.load = min(1.0, max(0.0, busy_s - own_s) / elapsed_s / num_processors)

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
        agree: Whether two measurements are equal within their bounds.
        most_times: Measurements, at least 2, after which the last two are taken as they are.

    Returns:
        The last two measurements, and when and under which load they were made. Two that do not
        agree count as made under load, so that they are made anew on a quiet machine.
    """
    with LoadMeter() as meter:
        previous, latest = measure(), measure()
        num_times = 2
        while num_times < most_times and not agree(previous, latest):
            previous, latest = latest, measure()
            num_times += 1
    circumstances = meter.circumstances()
    if not agree(previous, latest):
        circumstances = circumstances._replace(load=UNSETTLED_LOAD)
    return previous, latest, circumstances


def _readings_s() -> tuple[float, float, float]:
    """Read the clock and two processor times, in seconds.

    Returns:
        The clock; the busy time of all processors; the time of this process and its ended children.
    """
    times = psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # `user` contains `guest` already.
    guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    process = os.times()
    own_s = process.user + process.system + process.children_user + process.children_system
    return time.perf_counter(), sum(times) - idle_s - guest_s, own_s


@functools.cache
def present_load() -> float:
    """Part of the machine's processors that other programs use now, watched once a process."""
    with LoadMeter() as meter:
        time.sleep(WATCH_S)
    return meter.load


def read_calibration(path: Path, count: int) -> list[float] | None:
    """Read the numbers of a calibration.

    Args:
        path: File.
        count: Expected number of numbers.

    Returns:
        The numbers; None if there is no file, or a damaged, old or loaded one (see
        `Circumstances.is_valid`).
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
    """Keep the numbers of a calibration.

    Where the folder cannot be written, they are measured again the next time.
    """
    with suppress(UserError):
        replace_text(path, json.dumps({"numbers": list(numbers), **circumstances._asdict()}))
