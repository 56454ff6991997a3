"""Records of the jobs of a sweep: found again by the same job alone, and left out where damaged."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import hydra
import psutil
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir
from medseg.config.check import to_config
from medseg.errors import EXIT_RESUME, UserError
from medseg.runs import sweeps
from medseg.runs.folder import write_end
from medseg.runs.status import Status, exit_code_of, status_of
from medseg.runs.sweeps import SWEEP_FILE, Job, SweepFolder, compare, find_job, read_jobs
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS, STOP


def job(number: int, signature: str, **overrides: str) -> Job:
    return Job(number, Status.finished, "", overrides, signature)


def test_a_job_is_found_by_its_signature_and_what_is_swept(tmp_path: Path) -> None:
    (tmp_path / SWEEP_FILE).write_text(
        json.dumps({"overrides": [], "swept": ["seed", "memory.accumulate"]})
    )
    first = job(0, "a", seed="1", steps="2", **{"memory.accumulate": "1"})
    first.write(tmp_path / "0")
    assert read_jobs(tmp_path) == {tmp_path / "0": first}
    assert (
        find_job(
            tmp_path, job(5, "a", seed="1", **{"memory.accumulate": "1", "data.num_workers": "4"})
        )
        == tmp_path / "0"
    )
    assert find_job(tmp_path, job(0, "a", seed="1", **{"memory.accumulate": "2"})) is None, (
        "compared, though it changes no result"
    )
    assert find_job(tmp_path, job(0, "b", seed="1", **{"memory.accumulate": "1"})) is None


def test_the_table_has_a_line_per_job_in_order(tmp_path: Path) -> None:
    for number in (10, 9):
        job(number, "a", seed=str(number), steps="2").write(tmp_path / str(number))
    (tmp_path / "9" / "summary.json").write_text(json.dumps({"val_dice_best": 0.5, "versions": {}}))
    lines = compare(tmp_path).read_text().splitlines()
    assert lines == [
        "run,seed,val_dice_best,status,message",
        "9,9,0.5,finished,",
        "10,10,,finished,",
    ]


def test_a_sweep_over_what_names_its_folder_stays_in_one(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "medseg.commands.cli",
        "train",
        "-m",
        "stage=coarse,fine",
        "data.cases=none.csv",
    ]
    result = forked.run(command, cwd=tmp_path)
    assert result.returncode == 1
    (sweep_dir,) = (tmp_path / "runs").glob("*/*")
    assert [job.status for job in read_jobs(sweep_dir).values()] == [Status.refused] * 2
    assert json.loads((sweep_dir / SWEEP_FILE).read_text())["swept"] == ["stage"]


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        '{"number": "x"}',
        '{"number": 0, "status": "finished", "message": "", "overrides": [], "signature": ""}',
        "[" * 9999,
    ],
)  # fmt: skip
def test_a_job_with_a_damaged_record_is_left_out_and_named(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(1, "a", seed="1").write(tmp_path / "1")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "job.json").write_text(record)
    (tmp_path / SWEEP_FILE).write_text(record)
    assert list(read_jobs(tmp_path)) == [tmp_path / "1"]
    assert f"{tmp_path / '0' / 'job.json'} is damaged and left out" in capsys.readouterr().err
    assert find_job(tmp_path, job(7, "a", seed="1")) == tmp_path / "1"
    (tmp_path / "1" / "summary.json").write_text(record)
    assert compare(tmp_path).read_text().splitlines()[1].startswith("1,")


def test_sweeps_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    def start(*named: str) -> Path:
        hydra_config = {
            "overrides": {"task": ["seed=1,2"], "hydra": list(named)},
            "sweep": {"dir": str(tmp_path / "now")}, "sweeper": {},
            "launcher": {"_target_": "BasicLauncher"},
        }  # fmt: skip
        config = OmegaConf.create({"hydra": hydra_config})
        before = [signal.getsignal(number) for number in SIGNALS]
        try:
            SweepFolder().on_multirun_start(config)
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
            folder = SweepFolder.started.pop()
        assert Path(config.hydra.sweep.dir) == folder
        return folder

    assert [start().name for _ in range(3)] == ["now", "now_2", "now_3"]
    assert start(f"hydra.sweep.dir={tmp_path / 'now'}").name == "now", (
        "a folder that the user names is that of the sweep to resume"
    )


def test_a_stop_reaches_all_jobs_though_a_process_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Child:
        def __init__(self, has_ended: bool) -> None:
            self.has_ended = has_ended

        def send_signal(self, number: int) -> None:
            if self.has_ended:
                raise psutil.NoSuchProcess(1)
            asked.append(number)

    class Launcher:
        def children(self, recursive: bool) -> list[Child]:
            return [Child(has_ended=True), Child(has_ended=False)]

    monkeypatch.setattr(psutil, "Process", Launcher)
    hydra_config = {
        "overrides": {"task": ["seed=1,2"], "hydra": []},
        "sweep": {"dir": str(tmp_path / "sweep")}, "sweeper": {},
        "launcher": {"_target_": "JoblibLauncher"},
    }  # fmt: skip
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        SweepFolder().on_multirun_start(OmegaConf.create({"hydra": hydra_config}))
        with pytest.raises(SystemExit) as stop:
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        SweepFolder.started.pop()
    assert stop.value.code == EXIT_RESUME
    assert asked == [signal.SIGTERM]


def test_a_request_to_stop_that_comes_as_a_job_ends_begins_no_other(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    given = [f"data.cases='{tiny_table}'", "seed=1"]
    own = [
        "hydra.mode=MULTIRUN",
        f"hydra.sweep.dir='{folder}'",
        f"hydra.runtime.output_dir='{folder / '0'}'",
        "hydra.job.num=0",
    ]
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = hydra.compose(
            "train", [*given, *own, f"run_dir='{folder / '0'}'"], return_hydra_config=True
        )
    monkeypatch.setattr(HydraConfig, "get", lambda: composed.hydra)

    def run(config: TrainConfig, _: Callable[[], bool]) -> int:
        write_end(Path(config.run_dir), Status.finished, "")
        STOP.is_asked = True
        return 0

    monkeypatch.setattr(STOP, "is_asked", False)
    monkeypatch.setattr(sweeps, "run_in_process", run)
    own_keys = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
    with pytest.raises(SystemExit) as end:
        sweeps.run_job(to_config(own_keys, TrainConfig))
    assert end.value.code == EXIT_RESUME
    assert [job.status for job in read_jobs(folder).values()] == [Status.finished]


class SweepJob:
    """A job of a multirun whose training is replaced by an exit code."""

    def __init__(
        self,
        folder: Path,
        table: Path,
        monkeypatch: pytest.MonkeyPatch,
        *overrides: str,
        number: int = 0,
    ) -> None:
        self.folder, self.code, self.message = folder, 0, ""
        self.resumed: list[str | None] = []
        given = [f"data.cases='{table}'", *overrides]
        own = [
            "hydra.mode=MULTIRUN",
            f"hydra.sweep.dir='{folder}'",
            f"hydra.runtime.output_dir='{folder / str(number)}'",
        ]
        own.append(f"hydra.job.num={number}")
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = hydra.compose(
                "train",
                [*given, *own, f"run_dir='{folder / str(number)}'"],
                return_hydra_config=True,
            )
        monkeypatch.setattr(HydraConfig, "get", lambda: composed.hydra)
        monkeypatch.setattr(STOP, "is_asked", False)
        monkeypatch.setattr(sweeps, "run_in_process", self.train)
        open_run = sweeps.open_run
        monkeypatch.setattr(
            sweeps,
            "open_run",
            lambda config: (self.resumed.append(config.resume), open_run(config)),
        )
        self.composed = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])

    def train(self, config: TrainConfig, _: Callable[[], bool]) -> int:
        write_end(Path(config.run_dir), status_of(self.code), self.message)
        return self.code

    def run(self) -> int:
        return sweeps.run_job(to_config(self.composed, TrainConfig))


def test_a_job_that_has_ended_is_skipped_with_its_code_and_an_interrupted_one_goes_on(
    tiny_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = SweepJob(tmp_path, tiny_table, monkeypatch, "seed=1")
    job.code, job.message = EXIT_RESUME, "asked to stop"
    assert job.run() == EXIT_RESUME
    assert read_jobs(tmp_path)[tmp_path / "0"].message == "asked to stop"
    job.code, job.message = 4, "the loss is nan"
    assert job.run() == 4
    assert job.resumed == [None, str(tmp_path / "0")]
    assert job.run() == 4, "a failure is not tried again"
    assert "job 0 has already ended (not finite)" in capsys.readouterr().err
    job.composed.retry_failed = True
    job.code, job.message = 0, ""
    assert job.run() == 0
    assert job.run() == 0
    assert len(job.resumed) == 3, "a finished job is skipped"
    with (tmp_path / "comparison.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["finished"]


def test_a_refused_job_is_recorded_and_another_job_in_its_folder_gets_one_of_its_own(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SweepJob(tmp_path, tiny_table, monkeypatch, "seed=1").run() == 0
    other = SweepJob(tmp_path, tiny_table, monkeypatch, "seed=2")
    assert other.run() == 0
    folders = {job.overrides["seed"]: folder.name for folder, job in read_jobs(tmp_path).items()}
    assert folders["1"] == "0"
    assert folders["2"].startswith("0_")
    third = SweepJob(tmp_path, tiny_table, monkeypatch, "seed=3", number=3)

    def refuse(config: TrainConfig) -> None:
        raise UserError("no room")

    monkeypatch.setattr(sweeps, "open_run", refuse)
    assert third.run() == 2
    (refused,) = [job for job in read_jobs(tmp_path).values() if job.overrides["seed"] == "3"]
    assert (refused.number, refused.status, refused.message) == (3, Status.refused, "no room")
    sweeps.note_refusal("no such key")
    assert read_jobs(tmp_path)[tmp_path / "3"].message == "no such key"
    third.composed.resume = str(tmp_path)
    with pytest.raises(
        UserError, match=r"to resume a multirun, leave resume out and give hydra\.sweep\.dir"
    ):
        third.run()


def test_a_job_that_runs_elsewhere_is_left_alone(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SweepJob(tmp_path, tiny_table, monkeypatch, "seed=1")
    job.code = EXIT_RESUME
    job.run()
    monkeypatch.setattr(sweeps, "wait_until_free", lambda folder: folder != tmp_path / "0")
    assert job.run() == exit_code_of(Status.running)
    assert len(job.resumed) == 1


def test_jobs_that_differ_in_a_key_that_changes_no_result_keep_their_records(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SWEEP_FILE).write_text(json.dumps({"swept": ["data.num_workers"]}))
    for num_workers in ("2", "8", "16", "8"):
        job = SweepJob(tmp_path, tiny_table, monkeypatch, f"data.num_workers={num_workers}")
        assert job.run() == 0
    workers = [job.overrides["data.num_workers"] for job in read_jobs(tmp_path).values()]
    assert workers == ["2", "8", "16"]
    assert len(set(tmp_path.glob("*/config.yaml"))) == 3


def test_only_the_jobs_of_this_start_decide_the_exit_code(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep_dir = tmp_path / "sweep"
    monkeypatch.setattr(SweepFolder, "started", [])
    monkeypatch.setattr(SweepFolder, "earlier_times_ns", {})
    first = SweepJob(sweep_dir, tiny_table, monkeypatch, "seed=1")
    first.code = 3  # a value that the next start no longer has
    failed_code = first.run()
    second = SweepJob(sweep_dir, tiny_table, monkeypatch, "seed=2")
    assert second.run() == 0
    sweeps.note_refusal("no such key")
    assert len(read_jobs(sweep_dir)) == 3
    for record in sweep_dir.rglob("job.json"):
        os.utime(record, (0, 0))  # written long ago

    hydra_config = {
        "overrides": {"task": ["seed=2,3"], "hydra": [f"hydra.sweep.dir={sweep_dir}"]},
        "sweep": {"dir": str(sweep_dir)}, "sweeper": {},
        "launcher": {"_target_": "BasicLauncher"},
    }  # fmt: skip
    monkeypatch.setattr(STOP, "install", lambda: None)
    SweepFolder().on_multirun_start(OmegaConf.create({"hydra": hydra_config}))
    assert second.run() == 0
    assert SweepJob(sweep_dir, tiny_table, monkeypatch, "seed=3", number=1).run() == 0
    assert sweeps.exit_codes() == [0, 0]
    with (sweep_dir / "comparison.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert statuses == [status_of(failed_code).value, "finished", "finished"]


def test_a_second_start_of_a_sweep_keeps_the_refusals_of_one_that_still_runs(
    tiny_table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SweepFolder, "started", [tmp_path])
    monkeypatch.setattr(SweepFolder, "earlier_times_ns", {})
    refused = SweepJob(tmp_path, tiny_table, monkeypatch, "seed=1")
    sweeps.note_refusal("no such key")
    hydra_config = {
        "overrides": {"task": ["seed=1,2"], "hydra": [f"hydra.sweep.dir={tmp_path}"]},
        "sweep": {"dir": str(tmp_path)}, "sweeper": {},
        "launcher": {"_target_": "BasicLauncher"},
    }  # fmt: skip
    monkeypatch.setattr(STOP, "install", lambda: None)
    with monkeypatch.context() as other_process:
        other_process.setattr(SweepFolder, "started", [])
        other_process.setattr(SweepFolder, "earlier_times_ns", {})
        SweepFolder().on_multirun_start(OmegaConf.create({"hydra": hydra_config}))
        assert sweeps.exit_codes() == [], "only the earlier start has been refused"
    assert sweeps.exit_codes() == [exit_code_of(Status.refused)]
    assert refused.run() == 0, "the job is tried again"
    assert [job.status for job in read_jobs(tmp_path).values()] == [Status.finished]
