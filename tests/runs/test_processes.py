"""Ends of processes: what killed one is told, and no job begins after a stop request."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medseg.errors import EXIT_RESUME, UserError
from medseg.io.atomic import locked
from medseg.runs import processes
from medseg.runs.folder import (
    LOCK_FILE,
    SUMMARY_FILE,
    read_summary,
    status_of_run,
    write_end,
)
from medseg.runs.status import Status
from medseg.training.preemption import STOP


@pytest.mark.parametrize(
    ("code", "oom_kills", "expected", "status", "words"),
    [
        pytest.param(
            -9, 5, 1, "failed", "rank 1 was killed by signal 9 (Killed)", id="killed by someone"
        ),
        pytest.param(
            -9, 6, 3, "out_of_memory", "out of memory", id="killed by the kernel, which counted it"
        ),
        pytest.param(
            -11, 6, 1, "failed", "signal 11", id="a crash while another process was killed"
        ),
        pytest.param(
            -15, 5, 75, "interrupted", "signal 15", id="asked to stop before it could listen"
        ),
        pytest.param(4, 5, 4, "not_finite", "exit code 4", id="an exit code"),
    ],
)
def test_the_end_of_a_process_that_could_not_tell_it(
    code: int,
    oom_kills: int,
    expected: int,
    status: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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


def test_no_job_begins_after_a_request_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STOP, "is_asked", True)
    monkeypatch.setattr(STOP, "install", lambda: None)
    (tmp_path / SUMMARY_FILE).write_text("{}")
    with pytest.raises(SystemExit) as end:
        processes.run_in_process(None)
    assert end.value.code == 75


def test_a_request_to_stop_that_comes_as_the_job_starts_reaches_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Process:
        exitcode: int | None = None

        def join(self, _: float) -> None:
            pass

        def terminate(self) -> None:
            asked.append("terminate")
            self.exitcode = EXIT_RESUME

    def spawn(*_: Any, **__: Any) -> Any:
        STOP.is_asked = (
            True  # the signal comes after `exit_if_asked` and before the first look at the job
        )
        asked.append(status_of_run(tmp_path).value)
        return SimpleNamespace(processes=[Process()])

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(STOP, "is_asked", False)
    monkeypatch.setattr(STOP, "install", lambda: None)
    monkeypatch.setattr(processes.multiprocessing, "active_children", list)
    config: Any = SimpleNamespace(run_dir=str(tmp_path))
    (tmp_path / SUMMARY_FILE).write_text('{"status": "failed"}')
    assert processes.run_in_process(config) == EXIT_RESUME
    assert asked == ["running", "terminate"]


def test_a_process_that_meets_a_running_run_leaves_its_summary_alone(tmp_path: Path) -> None:
    with locked(tmp_path / LOCK_FILE):
        assert processes._note_end(tmp_path, 2, "the process", 0) == 2
    assert not (tmp_path / SUMMARY_FILE).exists()
    assert processes._note_end(tmp_path, 2, "the process", 0) == 2
    assert read_summary(tmp_path)["status"] == "refused"


@pytest.mark.parametrize(
    ("code", "expected"),
    [(-9, 1), (-15, 75), (75, 75), (1, 1)],
    ids=["killed", "stopped", "stopped after a signal to the agent", "failed"],
)
def test_a_start_that_waits_for_the_lock_writes_no_summary_as_it_ends(
    code: int, expected: int, tmp_path: Path
) -> None:
    with locked(tmp_path / LOCK_FILE):
        assert processes._note_end(tmp_path, code, "the process", 0) == expected
    assert not (tmp_path / SUMMARY_FILE).exists()


def test_a_rank_that_is_killed_after_the_run_has_finished_leaves_it_finished(
    tmp_path: Path,
) -> None:
    (tmp_path / SUMMARY_FILE).write_text('{"status": "finished", "best": 0.5}')
    assert processes._note_end(tmp_path, -6, "rank 1", 0) == 0
    assert read_summary(tmp_path) == {"status": "finished", "best": 0.5}


def of_ranks(run_dir: Path, devices: int) -> Any:
    return SimpleNamespace(run_dir=str(run_dir), trainer=SimpleNamespace(devices=devices))


def failed(rank: int, code: int) -> Any:
    """What the elastic agent raises: the rank whose failure it noticed first, and its exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = {rank: SimpleNamespace(exitcode=code, timestamp=5.0)}
    return error


class Launch:
    """Stands for torchrun's agent: raises what it is told, and notes how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: BaseException | None = None) -> None:
        from torch.distributed.launcher import api

        self.settings: Any = None
        self.end = end
        monkeypatch.setattr(api, "elastic_launch", self)
        monkeypatch.setattr(
            processes.signal,
            "signal",
            lambda number, handler: self.handlers.update({number: handler}),
        )
        self.handlers: dict[int, Any] = {}
        monkeypatch.setattr(STOP, "is_asked", False)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setenv(
            "OMP_NUM_THREADS", "1"
        )  # so that it is put back, also where it was absent
        monkeypatch.delenv("OMP_NUM_THREADS")
        # Of 64 processors a batch system grants seven.
        monkeypatch.setattr("os.cpu_count", lambda: 64)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)), raising=False)

    def __call__(self, settings: Any, entry: Any) -> Any:
        self.settings = settings
        assert entry is processes._rank

        def run(config: Any) -> None:
            self.status = status_of_run(Path(config.run_dir))
            self.num_threads = os.environ["OMP_NUM_THREADS"]
            if self.end is not None:
                raise self.end

        return run


def test_one_rank_trains_in_this_process_and_several_by_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(monkeypatch)
    monkeypatch.setattr(processes, "run_rank", lambda config: 17)
    assert processes.start_ranks(of_ranks(tmp_path, 1)) == 17
    assert launch.settings is None
    (tmp_path / SUMMARY_FILE).write_text("{}")
    assert processes.start_ranks(of_ranks(tmp_path, 3)) == 0
    assert not (tmp_path / SUMMARY_FILE).exists(), "of an earlier attempt"
    assert launch.status is Status.running, "before rank 0 locks the run"
    assert status_of_run(tmp_path) is Status.interrupted, "the ranks have written no summary"
    settings = launch.settings
    assert (
        settings.min_nodes,
        settings.max_nodes,
        settings.nproc_per_node,
        settings.max_restarts,
    ) == (1, 1, 3, 0)
    assert (settings.rdzv_backend, settings.rdzv_endpoint, settings.local_addr) == (
        "c10d",
        "127.0.0.1:0",
        "127.0.0.1",
    )
    assert (settings.start_method, settings.shutdown_timeout) == ("spawn", 600)
    assert settings.signals_to_handle == "SIGINT,SIGTERM,SIGUSR1,SIGUSR2"
    assert launch.num_threads == "2", "of seven processors"
    assert set(launch.handlers) == set(processes.SIGNALS)
    with pytest.raises(SystemExit) as end:
        launch.handlers[15](15, None)
    assert end.value.code == EXIT_RESUME
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert processes.start_ranks(of_ranks(tmp_path, 3)) == 17, "torchrun has started the ranks"


@pytest.mark.parametrize(
    ("code", "expected", "words"),
    [
        (-9, 1, "rank 1 was killed by signal 9"),
        (2, 2, "rank 1 ended with exit code 2"),
    ],
)
def test_the_rank_that_failed_first_gives_the_code(
    code: int,
    expected: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Launch(monkeypatch, failed(1, code))
    assert processes.start_ranks(of_ranks(tmp_path, 2)) == expected
    assert words in read_summary(tmp_path)["message"]


@pytest.mark.parametrize("number", [2, 15])
def test_ranks_that_were_stopped_have_saved_or_were_interrupted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    Launch(monkeypatch, SignalException("stopped", signal.Signals(number)))
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            processes.start_ranks(of_ranks(tmp_path, 2))
        return
    assert processes.start_ranks(of_ranks(tmp_path, 2)) == EXIT_RESUME


@pytest.mark.parametrize("code", [0, 4])
def test_the_exit_code_of_a_rank_is_that_of_its_run(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods: list[Any] = []
    monkeypatch.setattr(
        processes.multiprocessing,
        "set_start_method",
        lambda name, force: methods.append((name, force)),
    )
    monkeypatch.setattr(processes, "run_rank", lambda config: code)
    if code:
        with pytest.raises(SystemExit) as end:
            processes._rank(None)
        assert end.value.code == code
    else:
        processes._rank(None)
    monkeypatch.setattr(processes, "start_ranks", lambda config: code)
    with pytest.raises(SystemExit) as end:
        processes._job(0, None)
    assert end.value.code == code
    assert methods == [(None, True)] * 2


@pytest.mark.parametrize(
    ("num_nodes", "is_torchrun", "resume", "said"),
    [
        (1, False, None, None),
        (2, False, "auto", "run it with torchrun instead of python"),
        (2, True, None, "give hydra.run.dir=<run folder> resume=auto"),
        (2, True, "auto", None),
    ],
)
def test_several_machines_need_torchrun_and_a_folder_to_resume(
    num_nodes: int,
    is_torchrun: bool,
    resume: str | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "is_under_torchrun", lambda: is_torchrun)
    trainer: Any = SimpleNamespace(num_nodes=num_nodes)
    if said is None:
        processes.check_start(trainer, resume)
        return
    with pytest.raises(UserError, match=f"trainer.num_nodes=2: .*{said}"):
        processes.check_start(trainer, resume)


def test_a_job_of_which_there_is_enough_is_asked_once_and_never_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    looks = iter([None, None, None, 0])

    class Process:
        exitcode: int | None = None

        def join(self, seconds: float | None = None) -> None:
            asked.append(("join", seconds))
            self.exitcode = next(looks, 0)

        def terminate(self) -> None:
            asked.append("terminate")

    def spawn(entry: Any, arguments: Any, nprocs: int, join: bool) -> Any:
        asked.append((entry, arguments, nprocs, join))
        return SimpleNamespace(processes=[Process()])

    left = Process()
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(STOP, "is_asked", False)
    monkeypatch.setattr(STOP, "install", lambda: None)
    monkeypatch.setattr(processes.multiprocessing, "set_start_method", lambda *_, **__: None)
    monkeypatch.setattr(processes.multiprocessing, "active_children", lambda: [left])
    config: Any = SimpleNamespace(run_dir=str(tmp_path))
    answers = iter([False, True, True])
    assert processes.run_in_process(config, lambda: next(answers)) == 0
    look = ("join", 0.5)
    assert asked == [
        (processes._job, (config,), 1, False),
        look,
        look,
        "terminate",
        look,
        look,
        "terminate",
        ("join", None),
    ]
