"""What a run takes of its machine stands beside its loss, and asking for it makes no step wait."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from medseg.training.history import History
from medseg.training.machine_load import MachineLoad, peak_bytes

SMALL = [
    "model.width=4",
    "model.depth=1",
    "model.blocks_per_level=[1,1]",
    "optimizer=sgd",
    "schedule=constant",
    "stage=fine",
]


def make_batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(1, 1, 8, 8, 12, generator=generator),
        "target": torch.randint(2, (1, 8, 8, 12), generator=generator),
        "region": torch.zeros(1, dtype=torch.int64),
        "number": [0],
    }


def test_memory_and_processor_time_are_those_of_this_process() -> None:
    load = MachineLoad(uses_gpu=False)
    before = load.read()
    array = np.ones(2**28 // 8)  # a quarter of a GiB, written to
    start_s = time.process_time()
    while time.process_time() - start_s < 0.2:
        array[:1000].sum()
    reading = load.read()
    assert 0.2 < reading["host_gib"] - before["host_gib"] < 0.5
    assert reading["cpu_percent"] > 0
    assert reading.keys() == {"host_gib", "cpu_percent"}


def test_workers_are_counted_with_what_they_do_not_share() -> None:
    load = MachineLoad(uses_gpu=False)
    before = load.read()
    script = "held = b'1' * 2**28; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        during = load.read()
        worker.communicate(b"\n")
    assert 0.2 < during["host_gib"] - before["host_gib"] < 0.5
    assert during["cpu_percent"] > 0
    after = load.read()
    assert abs(after["host_gib"] - before["host_gib"]) < 0.2


def test_every_line_of_the_history_has_them_and_so_has_the_logger(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    history = History(tmp_path / "history.csv", history_every=2, steps=4)
    logger = ["logger=csv", f"logger.save_dir='{tmp_path}'"]
    fit([*SMALL, *logger, "steps=4"], [make_batch(n) for n in range(4)], [history])
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    assert all(0 < float(row["host_gib"]) < 100 and float(row["cpu_percent"]) >= 0 for row in rows)
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        logged = {
            row["step"]: row["watch/host_gib"]
            for row in csv.DictReader(file)
            if row["watch/host_gib"]
        }
    assert {step: round(float(value), 3) for step, value in logged.items()} == {
        str(int(row["step"]) - 1): float(row["host_gib"]) for row in rows
    }


@pytest.mark.parametrize("answer", ["37", "not supported", "no driver"])
def test_a_gpu_that_cannot_be_asked_costs_only_its_column(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NVMLError(Exception):
        pass

    def utilization(index: int) -> int:
        if answer == "not supported":  # a slice of a GPU
            raise NVMLError(answer)
        if answer == "no driver":
            raise RuntimeError(answer)
        return int(answer) + 2 * index

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda index: (1 + index) * 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))
    reading = MachineLoad(uses_gpu=True).read()
    assert reading["gpu_gib"] == 3
    assert reading.get("gpu_percent") == (38 if answer == "37" else None), "the mean of both"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the extra is not installed
    assert "gpu_percent" not in MachineLoad(uses_gpu=True).read()


def test_peaks_are_those_of_all_gpus_that_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    # As after a training, which gives its memory back.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: (3 * gib, gib, 0)[index])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: (2 * gib, gib, 0)[index])
    # Of 16 GiB each, the contexts take one and two; a process of somebody else has the third GPU.
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda index: ((15 * gib, 14 * gib, 0)[index], 16 * gib)
    )
    assert peak_bytes(uses_gpu=True) == 3 * gib
    assert MachineLoad(uses_gpu=True).peak_device_bytes() == (1 + 3 + 2 + 1) * gib


def test_a_run_on_the_cpu_never_asks_the_gpu_of_the_machine(
    fit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else holds 15 of 16 GiB there: as peaks of this run they would mislead `plan`."""
    for name in ("memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the run is on the CPU"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30, 16 * 2**30))
    history = History(tmp_path / "history.csv", history_every=1, steps=2)

    def pretend_gpu(module: Any) -> None:
        # From here on: Lightning's own trainer looks for GPUs when it is made.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    fit([*SMALL, "steps=2"], [make_batch(0), make_batch(1)], [history], pretend_gpu)
    assert len(history.rows) == 2
    assert history.load.uses_gpu is False
    assert all("gpu_gib" not in row for row in history.rows)
    assert 0 < history.rows[-1]["peak_gib"] < 4
    assert 0 < history.load.peak_device_bytes() < 4 * 2**30


def test_a_module_with_a_part_on_a_gpu_is_watched_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device map may leave the first part of a network, and so its device, on the CPU."""
    history = History(tmp_path / "history.csv", history_every=1, steps=2)
    parts = [SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=True)]
    module: Any = SimpleNamespace(device=torch.device("cpu"), parameters=lambda: parts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2**30)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: 37)
    trainer: Any = SimpleNamespace(global_step=0, is_global_zero=False)
    history.on_train_start(trainer, module)
    assert history.load.uses_gpu
    assert history.load.read()["gpu_gib"] == 1
