"""Memory and utilisation of the machine beside the loss: read where a line of the history is written, never in a step."""

from __future__ import annotations

import time

import psutil
import torch


class Watch:
    """What this process and its loader workers take, and the GPU.

    Nothing here waits for a device: the allocator and the driver answer from their own books.
    """

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.last_s = time.perf_counter()
        self.cpu_s: dict[int, float] = {}
        self.look()

    def look(self) -> dict[str, float]:
        """What is taken now, and how busy it was since the last look.

        Returns:
            `host_gib`, resident memory of this process and what its workers have beside what they share;
            `cpu_percent`, 100 for each core that was busy; with a GPU `gpu_gib`, held by torch's allocator, and, where the
            driver can be asked (`medseg[gpu]`), `gpu_percent`.
        """
        num_bytes, cpu_s = 0, {}
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue  # a worker that has just ended
            cpu_s[process.pid] = times.user + times.system
            num_bytes += memory.rss if process == self.process else max(0, memory.rss - getattr(memory, "shared", 0))
        now_s = time.perf_counter()
        busy_s = sum(seconds - self.cpu_s.get(pid, 0.0) for pid, seconds in cpu_s.items())
        seen = {"host_gib": num_bytes / 2**30, "cpu_percent": 100 * busy_s / (now_s - self.last_s)}
        self.cpu_s, self.last_s = cpu_s, now_s
        return {**seen, **_look_at_gpu()} if torch.cuda.is_available() else seen


def _look_at_gpu() -> dict[str, float]:
    seen = {"gpu_gib": torch.cuda.memory_reserved() / 2**30}
    try:
        from pynvml import NVMLError
    except ModuleNotFoundError:
        return seen
    try:
        return {**seen, "gpu_percent": float(torch.cuda.utilization())}
    except (NVMLError, RuntimeError):
        return seen  # a slice of a GPU, or a driver that does not answer
