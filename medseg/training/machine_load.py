"""Load of the machine: memory and processor time of a run, and of its GPUs."""

import os
import time
from statistics import fmean

import psutil
import torch

from medseg.memory.profile import bytes_beside, peak_resident_bytes


class MachineLoad:
    """Reads the load of this process and its loader workers, and of its GPUs.

    Nothing here waits for a device: the allocator and the driver keep the numbers.

    Attributes:
        uses_gpu: Whether the run computes on GPUs. A run on the CPU of a machine with GPUs is not
            told what other programs hold there.
    """

    def __init__(self, uses_gpu: bool) -> None:
        self.uses_gpu = uses_gpu
        self.process = psutil.Process()
        self.last_s = time.perf_counter()
        self.cpu_s: dict[int, float] = {}
        self.worker_bytes = 0
        self.read()

    def read(self) -> dict[str, float]:
        """Read the load, and the processor time since the last reading.

        Returns:
            `host_gib`, resident memory of this process plus what its workers do not share with it;
            `cpu_percent`, 100 for each busy core; on a GPU `gpu_gib`, held by torch's allocator,
            and, where the driver answers (`medseg[gpu]`), `gpu_percent`, the mean of the GPUs that
            this process uses.
        """
        num_bytes = 0
        cpu_s = {}
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times = process.cpu_times()
                memory = process.memory_info()
            except psutil.Error:
                continue  # a worker that has just ended
            cpu_s[process.pid] = times.user + times.system
            if process == self.process:
                num_bytes += memory.rss
            else:
                num_bytes += max(0, memory.rss - getattr(memory, "shared", 0))
        now_s = time.perf_counter()
        busy_s = sum(seconds - self.cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        load = {"host_gib": num_bytes / 2**30, "cpu_percent": 100 * busy_s / (now_s - self.last_s)}
        self.cpu_s = cpu_s
        self.last_s = now_s
        worker_bytes = bytes_beside(os.getpid(), [pid for pid in cpu_s if pid != self.process.pid])
        self.worker_bytes = max(self.worker_bytes, worker_bytes)
        if self.uses_gpu:
            load |= _gpu_load()
        return load

    def peak_resident_bytes(self) -> int:
        """Find the largest memory that this process and its workers have taken so far, in bytes.

        It is resident memory; on GPUs, what is taken of them.
        """
        if self.uses_gpu:
            return sum(map(_peak_of_gpu, _used_gpus()))
        return peak_resident_bytes() + self.worker_bytes


def peak_bytes(uses_gpu: bool) -> int:
    """Find the largest memory held so far, in bytes.

    Args:
        uses_gpu: Whether the run computes on GPUs. It is then what this process has allocated on
            all of them, else what is resident.
    """
    if uses_gpu:
        # A device map uses several GPUs.
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return peak_resident_bytes()


def _used_gpus() -> list[int]:
    """List the GPUs on which this process has held memory; its own one where there is none."""
    used = [
        number
        for number in range(torch.cuda.device_count())
        if torch.cuda.max_memory_reserved(number)
    ]
    return used or [torch.cuda.current_device()]


def _peak_of_gpu(number: int) -> int:
    """Find the most bytes of a GPU that were taken at a time.

    They count torch's allocator and what it does not count.
    """
    free, total = torch.cuda.mem_get_info(number)
    # What other programs and the driver hold now, and the most that the allocator has held.
    beside_allocator = total - free - torch.cuda.memory_reserved(number)
    return int(beside_allocator + torch.cuda.max_memory_reserved(number))


def _gpu_load() -> dict[str, float]:
    """Read the GPU columns of `MachineLoad.read`."""
    num_bytes = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
    load = {"gpu_gib": num_bytes / 2**30}
    try:
        from pynvml import NVMLError
    except ModuleNotFoundError:
        return load
    try:
        return {**load, "gpu_percent": fmean(map(torch.cuda.utilization, _used_gpus()))}
    except (NVMLError, RuntimeError):
        return load  # a slice of a GPU, or a driver that does not answer
