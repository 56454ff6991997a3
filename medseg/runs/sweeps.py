"""Sweep folder: a record of each job, used to resume a multirun and to compare its jobs."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from medseg.config.overrides import quote_paths
from medseg.console import say
from medseg.errors import EXIT_RESUME, UserError
from medseg.io.atomic import create_text, is_locked, replace_text
from medseg.io.tables import write_csv
from medseg.io.text import read_json
from medseg.runs.folder import (
    CONFIG_FILE,
    LOCK_FILE,
    numbered,
    open_run,
    read_file,
    read_record,
    read_summary,
    remove_if_empty,
    resolve_paths_and_spacing,
    wait_until_free,
)
from medseg.runs.processes import check_start, exit_if_asked, run_in_process
from medseg.runs.signature import plain, signature
from medseg.runs.status import FAILURES, Status, exit_code_of, status_of
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS, STOP

# Record of a job in its run folder, and record of the sweep in the sweep folder.
JOB_FILE = "job.json"
SWEEP_FILE = "sweep.json"
# How long the jobs of a stopped sweep may take to save before the launcher kills them, in s.
STOP_S = 30.0


@dataclass(frozen=True)
class Job:
    """Content of `job.json`.

    Attributes:
        number: Place in the sweep, from 0.
        status: `running` until an end is recorded, so also after the job was killed.
        message: Why the job was refused or failed.
        overrides: The arguments of the job, by key.
        signature: Hash of the values that decide its result, see `medseg.runs.signature`; empty
            where the configuration was refused.
    """

    number: int
    status: Status
    message: str
    overrides: dict[str, str]
    signature: str

    def write(self, job_dir: Path) -> None:
        """Write the record into the job's folder."""
        job_dir.mkdir(parents=True, exist_ok=True)
        record = {**asdict(self), "status": self.status.value}
        replace_text(job_dir / JOB_FILE, json.dumps(record, indent=1))


def read_jobs(sweep_dir: Path) -> dict[Path, Job]:
    """Read the jobs of a sweep by their folder, in the order of their numbers.

    A job with a damaged record is left out, and the user is told of it.
    """
    jobs = {}
    for path in sweep_dir.rglob(JOB_FILE):
        job = read_file(path, _read_job)
        if job is not None:
            jobs[path.parent] = job
    # Folders of the same number, see `run_job`, are in the order of their names.
    folders = sorted(jobs, key=lambda folder: (jobs[folder].number, str(folder)))
    return {folder: jobs[folder] for folder in folders}


def _read_job(path: Path) -> Job:
    """Read a `job.json`; any exception means that it is damaged."""
    record = read_json(path)
    return Job(
        number=int(record["number"]),
        status=Status(record["status"]),
        message=str(record["message"]),
        overrides={str(key): str(value) for key, value in record["overrides"].items()},
        signature=str(record["signature"]),
    )


class SweepFolder(Callback):
    """Hydra callback at the start of a multirun: one folder for the whole sweep.

    A folder whose name depends on a swept key (`runs/${name}/…`) or on the time would otherwise
    differ from job to job. `sweep.json` in the folder records the swept keys.

    Attributes:
        started: Folders of the sweeps that this process has started. An attribute of the class,
            since Hydra makes the object and gives no access to it.
        earlier_times_ns: Folders of jobs that had a record before, to the time of its last change.
    """

    started: ClassVar[list[Path]] = []
    earlier_times_ns: ClassVar[dict[Path, int]] = {}

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Fix the folder for all jobs, in whatever process they run, and write `sweep.json`."""
        overrides = [str(override) for override in config.hydra.overrides.task]
        is_named = any(
            argument.startswith("hydra.sweep.dir=") for argument in config.hydra.overrides.hydra
        )
        # A folder that the user named may hold an earlier start of the sweep, which is resumed.
        # Other folders are named by the time: of two sweeps in one second, the later gets a number.
        for sweep_dir in numbered(Path(config.hydra.sweep.dir).absolute()):
            # Of several processes, only one can create the file.
            is_new = create_text(sweep_dir / SWEEP_FILE, "{}")
            if is_new or is_named:
                break
        self.started.append(sweep_dir)
        self.earlier_times_ns.update(_record_times_ns(sweep_dir))
        # With the basic launcher, this process runs the jobs one after the other, and `run_job`
        # reads `STOP`. Other launchers have worker processes, to which the signal is passed on.
        if _is_basic_launcher(config.hydra):
            STOP.install()
        else:
            for signal_number in SIGNALS:
                signal.signal(signal_number, lambda *_: _stop_jobs(sweep_dir))
        # The folder is also an argument: launchers compose the jobs again in other processes.
        with open_dict(config):
            config.hydra.sweep.dir = str(sweep_dir)
            config.hydra.overrides.hydra.extend(quote_paths([f"hydra.sweep.dir={sweep_dir}"]))
        parsed = OverridesParser.create().parse_overrides(overrides)
        swept_keys = set()
        for override in parsed:
            if override.is_sweep_override():
                swept_keys.add(override.get_key_element())
        swept_keys.update(config.hydra.sweeper.get("params") or {})
        # A resumed sweep keeps the keys of its earlier starts.
        swept_keys.update(_swept_keys(sweep_dir))
        record = {"overrides": overrides, "swept": sorted(swept_keys)}
        replace_text(sweep_dir / SWEEP_FILE, json.dumps(record, indent=1))


def run_job(config: TrainConfig) -> int:
    """Run one job of a multirun: resume it if it was interrupted, skip it if it has ended.

    Args:
        config: Configuration of the job; its paths, `resume` and `run_dir` are changed in place.

    Returns:
        Exit code of the job; of a skipped job, that of its earlier attempt.

    Raises:
        UserError: If `resume` names a folder.
        SystemExit: If this process was asked to stop.
    """
    if config.resume not in (None, "auto"):
        raise UserError(
            f"resume={config.resume}: to resume a multirun, leave resume out "
            "and give hydra.sweep.dir=<its folder>"
        )
    resolve_paths_and_spacing(config)
    sweep_dir, job_dir = _folders()
    job = Job(
        number=HydraConfig.get().job.num,
        status=Status.running,
        message="",
        overrides=_overrides(),
        signature=signature(plain(config)),
    )
    _remove_refusals(sweep_dir, job)
    earlier_dir = find_job(sweep_dir, job)
    if earlier_dir is not None:
        remove_if_empty(job_dir)
        job_dir = earlier_dir
        # The new time tells `exit_codes` that this start has the job too.
        (job_dir / JOB_FILE).touch()
        # `read_jobs` of a job's own folder finds this one job.
        status = read_jobs(job_dir)[job_dir].status
        is_final_failure = status in FAILURES and not config.retry_failed
        if status is Status.finished or is_final_failure:
            say(f"job {job.number} has already ended ({status.value.replace('_', ' ')}): {job_dir}")
            return exit_code_of(status)
        if not wait_until_free(job_dir):
            say(f"job {job.number} is running elsewhere: {job_dir}")
            # The job counts as failed in this sweep, since its result is not known.
            return exit_code_of(Status.running)
        # A job that was refused has a record, but no configuration to resume.
        config.resume = str(job_dir) if (job_dir / CONFIG_FILE).is_file() else None
    else:
        # The folder of this number may hold another job, since the swept values have changed.
        job_dir = _without_run(job_dir)
    config.run_dir = str(job_dir)
    if STOP.is_asked:
        # The job does not begin. Where it has Hydra's own folder, that would stay empty.
        remove_if_empty(job_dir)
        exit_if_asked()
    code = _run_and_record(config, job, job_dir, sweep_dir)
    exit_if_asked()  # after a stop signal, the next job must not begin
    return code


def _run_and_record(config: TrainConfig, job: Job, job_dir: Path, sweep_dir: Path) -> int:
    """Run a job, and record its start and its end; returns its exit code."""
    job.write(job_dir)
    # This status is recorded where an exception, such as a stop, ends the job without an exit code.
    code = exit_code_of(Status.interrupted)
    message = ""
    # A launcher's worker process may survive the launcher; its job must not.
    launcher_pid = os.getppid()

    def is_orphan() -> bool:
        # With the basic launcher there is no worker process: the parent is whatever started the
        # command, such as a shell, and may end before this process.
        if _is_basic_launcher(HydraConfig.get()):
            return False
        return os.getppid() != launcher_pid

    try:
        check_start(config.trainer, config.resume)
        open_run(config)
        code = run_in_process(config, is_orphan)
        message = read_summary(job_dir).get("message", "")
    except UserError as error:
        code = exit_code_of(Status.refused)
        message = str(error)
        say(message)
    finally:
        # Where the run is still locked, another process trains it, and will record its end.
        if not is_locked(job_dir / LOCK_FILE):
            replace(job, status=status_of(code), message=message).write(job_dir)
        # The table is written after each job, since no process knows which job is the last to end.
        compare(sweep_dir)
    if is_orphan():
        # Ends at once, without the clean-up of Python: no launcher is left to receive a result.
        os._exit(code)
    return code


def find_job(sweep_dir: Path, job: Job) -> Path | None:
    """Find the folder of an earlier attempt at the same job in a sweep; None if there is none.

    The earlier job has the same signature and the same values of the swept keys. The signature
    alone is not enough: a sweep may compare keys that change no result, such as `data.num_workers`.
    """
    for folder, earlier_job in _jobs_with_values_of(sweep_dir, job).items():
        if earlier_job.signature == job.signature:
            return folder
    return None


def _jobs_with_values_of(sweep_dir: Path, job: Job) -> dict[Path, Job]:
    """Read the jobs of a sweep that have the same values of the swept keys as a job, by folder."""
    # Where `sweep.json` is missing or damaged, all arguments of the job count.
    keys = _swept_keys(sweep_dir) or list(job.overrides)
    values = [job.overrides.get(key) for key in keys]
    jobs = {}
    for folder, other_job in read_jobs(sweep_dir).items():
        if [other_job.overrides.get(key) for key in keys] == values:
            jobs[folder] = other_job
    return jobs


def note_refusal(message: str) -> None:
    """Record a job of a multirun whose configuration was refused; nothing happens in other runs."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not RunMode.MULTIRUN:
        return
    sweep_dir, job_dir = _folders()
    # The folder may hold a run of an earlier start, whose record must not be replaced.
    if (job_dir / CONFIG_FILE).is_file():
        job_dir = job_dir.with_name(f"{job_dir.name}_refused")
    job = Job(
        number=hydra_config.job.num,
        status=Status.refused,
        message=message,
        overrides=_overrides(),
        signature="",
    )
    _remove_refusals(sweep_dir, job)
    job.write(job_dir)
    compare(sweep_dir)


def exit_codes() -> list[int]:
    """List the exit codes of all jobs of the sweeps that this process started.

    The codes come from the records, since a launcher may run the jobs in other processes. A record
    that has not changed belongs to a job that only an earlier start had.
    """
    codes = []
    for sweep_dir in SweepFolder.started:
        jobs = read_jobs(sweep_dir)
        # On a network drive, the times are up to date once the files have been read.
        times_ns = _record_times_ns(sweep_dir)
        for folder, job in jobs.items():
            if times_ns.get(folder) != SweepFolder.earlier_times_ns.get(folder):
                codes.append(exit_code_of(job.status))
    return codes


def compare(sweep_dir: Path) -> Path:
    """Write `comparison.csv`, one line per job: differing arguments, results and status.

    Args:
        sweep_dir: Folder of a multirun; a job is a folder below it with a `job.json`.

    Returns:
        Path of the table.
    """
    jobs = read_jobs(sweep_dir)
    # Each key once, in the order in which the keys first appear.
    keys = dict.fromkeys(chain.from_iterable(job.overrides for job in jobs.values()))
    differing_keys = []
    for key in keys:
        values = {job.overrides.get(key) for job in jobs.values()}
        if len(values) > 1:
            differing_keys.append(key)
    rows = []
    for job_dir, job in jobs.items():
        row: dict[str, Any] = {"run": str(job_dir.relative_to(sweep_dir))}
        row.update({key: job.overrides.get(key) for key in differing_keys})
        summary = read_summary(job_dir)
        status, message = latest_end(job.status.value, job.message, summary)
        for key, value in summary.items():
            # Versions and the comparison with the plan are mappings, and no cells of a table.
            if isinstance(value, (int, float, str)):
                row[key] = value
        row["status"] = status
        row["message"] = message
        rows.append(row)
    path = sweep_dir / "comparison.csv"
    write_csv(path, rows)
    return path


def latest_end(status: str, message: str, summary: Mapping[str, Any]) -> tuple[str, str]:
    """Choose status and message of a job from its record and the summary of its run.

    The record knows more, such as that a trial was pruned. But where it has no end, or an
    interruption, the run may have been resumed by itself since then.

    Args:
        status: Status in the record; empty where there is none.
        message: Message in the record.
        summary: Content of `summary.json`; empty where there is none.
    """
    is_open = status in ("", Status.running.value, Status.interrupted.value)
    if is_open and summary.get("status"):
        return str(summary["status"]), str(summary.get("message") or "")
    return status, message


def _remove_refusals(sweep_dir: Path, job: Job) -> None:
    """Remove the records of a job that begins again, and was refused before it had a run.

    Refusals of other jobs stay: another start of the sweep may still need them for its exit code.
    """
    for job_dir, earlier_job in _jobs_with_values_of(sweep_dir, job).items():
        if earlier_job.status is not Status.refused or (job_dir / CONFIG_FILE).is_file():
            continue
        with suppress(OSError):  # another process removes the folder, or uses it
            (job_dir / JOB_FILE).unlink()
            remove_if_empty(job_dir)


def _record_times_ns(sweep_dir: Path) -> dict[Path, int]:
    """Read when the record of each job last changed, in ns."""
    times_ns = {}
    for path in sweep_dir.rglob(JOB_FILE):
        with suppress(FileNotFoundError):  # another process has just removed it
            times_ns[path.parent] = path.stat().st_mtime_ns
    return times_ns


def _without_run(job_dir: Path) -> Path:
    """Return a job's folder or, where it holds a run, the first numbered one beside it without."""
    for folder in numbered(job_dir):
        if not (folder / CONFIG_FILE).is_file():
            break
    return folder


def _stop_jobs(sweep_dir: Path) -> NoReturn:
    """Ask all jobs of a sweep on this machine to stop, and end this process once they have saved.

    When this process ends, the launcher kills its worker processes at once, and with them the jobs.
    """
    busy_dirs = [folder for folder in read_jobs(sweep_dir) if is_locked(folder / LOCK_FILE)]
    for process in psutil.Process().children(recursive=True):
        # A process, such as a loader worker, may have ended meanwhile.
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)  # loader workers ignore it
    deadline = time.monotonic() + STOP_S
    while any(map(_is_recorded_as_running, busy_dirs)) and time.monotonic() < deadline:
        time.sleep(0.1)
    sys.exit(EXIT_RESUME)


def _is_recorded_as_running(job_dir: Path) -> bool:
    """Whether the record of a job has no end yet."""
    return any(job.status is Status.running for job in read_jobs(job_dir).values())


def _is_basic_launcher(hydra_config: Any) -> bool:
    """Whether Hydra's basic launcher runs the jobs, one after the other in this process.

    Args:
        hydra_config: Node `hydra` of a configuration.
    """
    return str(hydra_config.launcher._target_).endswith("BasicLauncher")


def _swept_keys(sweep_dir: Path) -> list[str]:
    """Keys that `sweep.json` names as swept; none where there is no such file."""
    keys = read_record(sweep_dir / SWEEP_FILE, dict).get("swept")
    if not isinstance(keys, list):
        return []
    return list(map(str, keys))


def _folders() -> tuple[Path, Path]:
    """Folders of the sweep and of the present job, both absolute."""
    hydra_config = HydraConfig.get()
    sweep_dir = Path(hydra_config.sweep.dir).absolute()
    # Hydra has made this path absolute.
    job_dir = Path(hydra_config.runtime.output_dir)
    return sweep_dir, job_dir


def _overrides() -> dict[str, str]:
    """Arguments of the present job, by key."""
    arguments = HydraConfig.get().overrides.task
    # An argument without a value, such as `~key`, deletes a key.
    return dict(argument.split("=", 1) for argument in arguments if "=" in argument)
