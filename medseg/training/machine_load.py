"""Load of the machine: memory and processor time of a run, and of its GPUs."""

import os
import time
from contextlib import suppress
from statistics import fmean

import psutil
import torch

from medseg.memory.profile import bytes_beside, peak_resident_bytes


class MachineLoad:
    """Reads the load of this process and its loader workers, and of its GPUs.

    Nothing here waits for a device: the allocator and the driver keep the numbers.

    Attributes:
        uses_gpu: Whether the run computes on GPUs; otherwise the GPUs of the machine are not read.
    """

    def __init__(self, uses_gpu: bool) -> None:
        self.uses_gpu = uses_gpu
        self.process = psutil.Process()
        self.last_s = time.perf_counter()  # at the last reading
        self.cpu_s: dict[int, float] = {}  # processor time until the last reading, by process id
        self.worker_bytes = 0  # the largest so far, see `bytes_beside`
        self.read()  # the first reading, from which the processor time counts

    def read(self) -> dict[str, float]:
        """Read the load, and the processor time since the last reading.

        Returns:
            `host_gib`, resident memory of this process plus what its workers do not share with it;
            `cpu_percent`, 100 for each busy core; on a GPU `gpu_gib`, held by torch's allocator,
            and, where the driver answers (`medseg[gpu]`), `gpu_percent`, the mean of the GPUs that
            this process uses.
        """
        host_bytes = 0
        cpu_s = {}
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times = process.cpu_times()
                memory = process.memory_info()
            except psutil.Error:
                continue  # a worker that has just ended
            cpu_s[process.pid] = times.user + times.system
            if process == self.process:
                host_bytes += memory.rss
            else:
                shared_bytes = getattr(memory, "shared", 0)  # on Linux alone
                host_bytes += max(0, memory.rss - shared_bytes)
        now_s = time.perf_counter()
        elapsed_s = now_s - self.last_s
        # A process that is new since the last reading counts with all of its processor time.
        busy_s = sum(seconds - self.cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        load = {"host_gib": host_bytes / 2**30, "cpu_percent": 100 * busy_s / elapsed_s}
        self.cpu_s = cpu_s
        self.last_s = now_s
        child_pids = [pid for pid in cpu_s if pid != self.process.pid]
        worker_bytes = bytes_beside(os.getpid(), child_pids)
        self.worker_bytes = max(self.worker_bytes, worker_bytes)
        if self.uses_gpu:
            load |= _gpu_load()
        return load

    def peak_device_bytes(self) -> int:
        """Find the largest memory of the device that was in use so far, in bytes.

        For a run on the CPU this is the resident memory of this process and its workers. For a run
        on GPUs it is their memory in use, including that of the driver and of other programs.
        """
        if self.uses_gpu:
            return sum(map(_gpu_peak_bytes, _used_gpus()))
        # An upper bound: this process and its workers may have had their peaks at different times.
        return peak_resident_bytes() + self.worker_bytes


def peak_bytes(uses_gpu: bool) -> int:
    """Find the largest memory that this process has held so far, in bytes.

    Args:
        uses_gpu: Whether to count what torch has allocated on all GPUs; otherwise resident memory
            is counted.
    """
    if uses_gpu:
        # A device map uses several GPUs.
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return peak_resident_bytes()


def _used_gpus() -> list[int]:
    """List the indices of the GPUs on which this process has held memory; else its current GPU."""
    numbers = range(torch.cuda.device_count())
    used_numbers = [number for number in numbers if torch.cuda.max_memory_reserved(number)]
    if not used_numbers:
        return [torch.cuda.current_device()]
    return used_numbers


def _gpu_peak_bytes(number: int) -> int:
    """Estimate the most bytes of a GPU that were in use at a time.

    The estimate is the peak of torch's allocator plus what the driver, libraries and other programs
    use now.
    """
    free, total = torch.cuda.mem_get_info(number)
    beside_allocator = total - free - torch.cuda.memory_reserved(number)
    return int(beside_allocator + torch.cuda.max_memory_reserved(number))


def _gpu_load() -> dict[str, float]:
    """Read the GPU columns of `MachineLoad.read`."""
    num_bytes = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    load = {"gpu_gib": num_bytes / 2**30}
    # `torch.cuda.utilization` needs pynvml.
    try:
        from pynvml import NVMLError
    except ModuleNotFoundError:
        return load
    # `utilization` fails on a slice of a GPU (MIG), and where the driver does not answer.
    with suppress(NVMLError, RuntimeError):
        load["gpu_percent"] = fmean(map(torch.cuda.utilization, _used_gpus()))
    return load
