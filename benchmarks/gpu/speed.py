"""Speed part of the GPU report: step times by precision, layout, kernel search and compilation."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.memory import compose
from benchmarks.gpu.parts import Session
from benchmarks.gpu.report import Report
from medseg.errors import UserError, first_line
from medseg.planning.step import input_shape
from medseg.studies.ladder import measure_row

BF16 = "memory.precision=bf16"
# Arguments of each row, and whether cuDNN searches for the fastest kernels. In a run the trainer
# switches the search on; these steps have no trainer, so `kernel_search` does.
ROWS = {
    "fp32": (["memory.precision=fp32"], False),
    "bf16": ([BF16], False),
    "channels last": ([BF16, "memory.channels_last=true"], False),
    "kernel search": ([BF16, "memory.channels_last=true"], True),
    "compiled": ([BF16, "memory.compile=true"], False),
}
# Row to the row than which it must not be slower: the ratio of their seconds is at most TOLERANCE.
FASTER_THAN = {"bf16": "fp32", "kernel search": "channels last", "compiled": "bf16"}
TOLERANCE = 1.05
# Timed steps of each row, and of the rehearsal.
NUM_STEPS, NUM_SMALL_STEPS = 10, 1
# 64 MiB, about four crops of 160³ in float32; a small batch for the rehearsal.
BATCH_BYTES, SMALL_BATCH_BYTES = 2**26, 2**20
# Copies of a batch, of which the first is not timed.
NUM_COPIES = 9


def measure(session: Session) -> Report:
    """Time the steps of each row, and copies from both kinds of host memory."""
    report = Report()
    seconds: dict[str, float] = {}
    num_steps = NUM_SMALL_STEPS if session.is_rehearsal else NUM_STEPS
    for name, (arguments, searches_kernels) in ROWS.items():
        print(name, flush=True)
        config = compose(arguments, session)
        try:
            with kernel_search(searches_kernels):
                measured = measure_row(config, input_shape(config), num_steps)
        except UserError as error:
            report.not_run(name, first_line(error))
            continue
        seconds[name] = measured["seconds_per_step"]
    for name, base in FASTER_THAN.items():
        if name not in seconds or base not in seconds:
            report.not_run(f"{name}: seconds by those of {base}", "one of both was not measured")
            continue
        ratio = seconds[name] / seconds[base]
        report.at_most(f"{name}: seconds by those of {base}", ratio, TOLERANCE)
    check_copies(report, session)
    rows: list[dict[str, Any]] = []
    for name, value in seconds.items():
        rows.append({"row": name, "s/step": value, "steps/s": 1 / value})
    report.table(rows, {"s/step": ".4f", "steps/s": ".2f"})
    return report


@contextmanager
def kernel_search(is_on: bool) -> Iterator[None]:
    """Switch cuDNN's search for the fastest kernels, as `memory.cudnn_benchmark` does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = is_on
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def check_copies(report: Report, session: Session) -> None:
    """Compare copies of a batch from pinned and from other host memory."""
    name = "copies from pinned memory: seconds by those from other memory"
    if session.is_rehearsal:
        # The rehearsal only checks that the function runs.
        copy_seconds(SMALL_BATCH_BYTES, is_pinned=False, device=session.device)
        report.not_run(name, "memory is pinned for a GPU only")
        return
    pinned_s = copy_seconds(BATCH_BYTES, is_pinned=True, device=session.device)
    other_s = copy_seconds(BATCH_BYTES, is_pinned=False, device=session.device)
    report.at_most(name, pinned_s / other_s, 1.0)
    gib_per_s = BATCH_BYTES / 2**30 / pinned_s
    report.texts.append(f"Copies from pinned memory: {gib_per_s:.1f} GiB/s.\n")


def copy_seconds(num_bytes: int, *, is_pinned: bool, device: torch.device) -> float:
    """Median seconds of a copy to the device, without the first one."""
    batch = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    durations_s = []
    for _ in range(NUM_COPIES):
        start = time.perf_counter()
        batch.to(device, non_blocking=True, copy=True)
        # The call returns before the copy has ended.
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - start)
    return median(durations_s[1:])
