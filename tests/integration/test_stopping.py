"""A run that is asked to stop saves first; one whose parent is killed does not live on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medseg.io.locks import is_locked
from medseg.runs.folder import LOCK_FILE

from .test_runs import command


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None, limit_s: float = 300) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            if process is not None:
                process.kill()
            raise AssertionError("it takes too long")
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.is_file() else 0


def saved_step(run_dir: Path) -> int:
    step: int = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    return step


@pytest.mark.slow
def test_signals_reach_the_worker_and_nothing_survives_its_parent(tiny_table: Path, tmp_path: Path) -> None:
    endless = ["steps=1000", "stage.validate_every=100000", "checkpoint_every=null", "data.num_workers=1"]
    start = [*command(tiny_table, tmp_path / "run", *endless), "resume=auto"]
    run_dir = tmp_path / "run"
    lock, history = run_dir / LOCK_FILE, run_dir / "history.csv"
    steps = [0]
    for ask in (signal.SIGTERM, signal.SIGUSR1):
        process = subprocess.Popen(start, stderr=subprocess.PIPE, encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"})
        lines = num_lines(history)
        wait_for(lambda lines=lines: num_lines(history) > lines + (lines == 0), process)
        process.send_signal(ask)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 75, said
        assert "Traceback" not in said
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"
        steps.append(saved_step(run_dir))
    process = subprocess.Popen(start, stderr=subprocess.DEVNULL, encoding="utf-8")
    lines = num_lines(history)
    wait_for(lambda: num_lines(history) > lines)
    assert is_locked(lock)
    process.kill()
    wait_for(lambda: not is_locked(lock), limit_s=60)
    process.wait()
    steps.append(saved_step(run_dir))
    assert steps == sorted(set(steps)), "it saved each time"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "it went on each time"
