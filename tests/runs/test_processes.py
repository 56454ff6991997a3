"""Ends of processes: what killed one is told, and no job begins after a stop request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.errors import EXIT_RESUME
from medseg.io.atomic import locked
from medseg.runs import processes
from medseg.runs.folder import LOCK_FILE, SUMMARY_FILE, read_summary, write_end
from medseg.runs.status import Status
from medseg.training.preemption import STOP


@pytest.mark.parametrize(
    ("code", "oom_kills", "expected", "status", "words"),
    [
        pytest.param(-9, 5, 1, "failed", "rank 1 was killed by signal 9 (Killed)", id="killed by someone"),
        pytest.param(-9, 6, 3, "out_of_memory", "out of memory", id="killed by the kernel, which counted it"),
        pytest.param(-11, 6, 1, "failed", "signal 11", id="a crash while another process was killed"),
        pytest.param(-15, 5, 75, "interrupted", "signal 15", id="asked to stop before it could listen"),
        pytest.param(4, 5, 4, "not_finite", "exit code 4", id="an exit code"),
    ],
)
def test_the_end_of_a_process_that_could_not_tell_it(
    code: int, oom_kills: int, expected: int, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "num_oom_kills", lambda: oom_kills)
    assert processes._note_end(tmp_path, code, "rank 1", 5) == expected
    summary = read_summary(tmp_path)
    assert summary["status"] == status
    assert words in summary["message"]


def test_a_killed_rank_counts_more_than_what_the_others_said_of_it(tmp_path: Path) -> None:
    write_end(tmp_path, Status.failed, "the connection to another rank broke off")
    assert processes._note_end(tmp_path, 1, "rank 0", 0) == 1
    assert "broke off" in read_summary(tmp_path)["message"]
    processes._note_end(tmp_path, -9, "rank 1", 0)
    assert "rank 1 was killed by signal 9" in read_summary(tmp_path)["message"]


def test_no_job_begins_after_a_request_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STOP, "is_asked", True)
    monkeypatch.setattr(STOP, "install", lambda: None)
    (tmp_path / SUMMARY_FILE).write_text("{}")
    with pytest.raises(SystemExit) as end:
        processes.run_in_process(None)  # type: ignore[arg-type]
    assert end.value.code == 75


def test_a_request_to_stop_that_comes_as_the_job_starts_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Process:
        exitcode: int | None = None

        def join(self, _: float) -> None:
            pass

        def terminate(self) -> None:
            asked.append("terminate")
            self.exitcode = EXIT_RESUME

    def spawn(*_: Any, **__: Any) -> Any:
        STOP.is_asked = True  # the signal comes after `exit_if_asked` and before the first look at the job
        return SimpleNamespace(processes=[Process()])

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(STOP, "is_asked", False)
    monkeypatch.setattr(STOP, "install", lambda: None)
    monkeypatch.setattr(processes.multiprocessing, "active_children", list)
    config: Any = SimpleNamespace(run_dir=str(tmp_path))
    assert processes.run_in_process(config) == EXIT_RESUME
    assert asked == ["terminate"]


def test_a_process_that_meets_a_running_run_leaves_its_summary_alone(tmp_path: Path) -> None:
    with locked(tmp_path / LOCK_FILE):
        assert processes._note_end(tmp_path, 2, "the process", 0) == 2
    assert not (tmp_path / SUMMARY_FILE).exists()
    assert processes._note_end(tmp_path, 2, "the process", 0) == 2
    assert read_summary(tmp_path)["status"] == "refused"
