"""Sweep folder: a record of each job, used to resume a multirun and to compare its jobs."""

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
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
    is_busy,
    numbered,
    open_run,
    read_file,
    read_record,
    read_summary,
    remove_if_empty,
    settle,
)
from medseg.runs.processes import check_start, exit_if_asked, run_in_process
from medseg.runs.signature import plain, signature
from medseg.runs.status import FAILURES, Status, exit_code_of, status_of
from medseg.training.options import TrainConfig
from medseg.training.preemption import SIGNALS, STOP

JOB_FILE = "job.json"
SWEEP_FILE = "sweep.json"
# How long the jobs of a stopped sweep may take to save, in s.
STOP_S = 30.0


@dataclass(frozen=True)
class Job:
    """Content of `job.json`.

    Attributes:
        number: Place in the sweep.
        status: `running` from the start, so that a job that was killed can be recognised.
        message: Why the job was refused or failed.
        overrides: The arguments of the job, by key.
        signature: Hash of what its result depends on; empty where the configuration was refused.
    """

    number: int
    status: Status
    message: str
    overrides: dict[str, str]
    signature: str

    def write(self, job_dir: Path) -> None:
        """Write the record into the job's folder."""
        job_dir.mkdir(parents=True, exist_ok=True)
        replace_text(
            job_dir / JOB_FILE, json.dumps({**asdict(self), "status": self.status.value}, indent=1)
        )


def read_jobs(sweep_dir: Path) -> dict[Path, Job]:
    """Read the jobs of a sweep by their folder, in the order of their numbers; a job with a damaged record is left out, and named."""

    def read(path: Path) -> Job:
        record = read_json(path)
        texts = {str(key): str(value) for key, value in record["overrides"].items()}
        return Job(
            int(record["number"]),
            Status(record["status"]),
            str(record["message"]),
            texts,
            str(record["signature"]),
        )

    jobs = {
        path.parent: job
        for path in sweep_dir.rglob(JOB_FILE)
        if (job := read_file(path, read)) is not None
    }
    return dict(sorted(jobs.items(), key=lambda item: (item[1].number, str(item[0]))))


class SweepFolder(Callback):
    """Hydra callback at the start of a multirun: one folder for the whole sweep, with a record of what is swept.

    A folder that depends on a swept key (`runs/${name}/…`) or on the hour would otherwise be
    another one for each job.
    """

    started: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Fix the folder for all jobs, in whatever process they are composed, and write `sweep.json`."""
        given = [str(override) for override in config.hydra.overrides.task]
        is_named = any(
            argument.startswith("hydra.sweep.dir=") for argument in config.hydra.overrides.hydra
        )
        # Two sweeps that start in the same second are named by the same time; a sweep in a folder
        # that the user named is resumed.
        folders = numbered(Path(config.hydra.sweep.dir).absolute())
        sweep_dir = next(
            folder for folder in folders if create_text(folder / SWEEP_FILE, "{}") or is_named
        )
        self.started.append(sweep_dir)
        if _is_basic_launcher(config.hydra):
            STOP.install()
        else:
            for signal_number in SIGNALS:
                signal.signal(signal_number, lambda *_: _stop_jobs(sweep_dir))
        with open_dict(config):
            config.hydra.sweep.dir = str(sweep_dir)
            config.hydra.overrides.hydra.extend(quote_paths([f"hydra.sweep.dir={sweep_dir}"]))
        parsed = OverridesParser.create().parse_overrides(given)
        swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
        swept |= set((config.hydra.sweeper.get("params") or {}).keys())
        swept |= set(_swept(sweep_dir))
        replace_text(
            sweep_dir / SWEEP_FILE,
            json.dumps({"overrides": given, "swept": sorted(swept)}, indent=1),
        )


def run_job(config: TrainConfig) -> int:
    """Run one job of a multirun: resume it if it was interrupted, skip it if it has ended.

    Returns:
        Exit code of the job; of a skipped job, that of its earlier attempt.
    """
    if config.resume not in (None, "auto"):
        raise UserError(
            f"resume={config.resume}: to resume a multirun, leave resume out and give hydra.sweep.dir=<its folder>"
        )
    settle(config)
    sweep_dir, job_dir = _folders()
    job = Job(HydraConfig.get().job.num, Status.running, "", _overrides(), signature(plain(config)))
    earlier = find_job(sweep_dir, job)
    if earlier is not None:
        remove_if_empty(job_dir)
        job_dir, status = earlier, read_jobs(earlier)[earlier].status
        if status is Status.finished or (status in FAILURES and not config.retry_failed):
            say(f"job {job.number} has already ended ({status.value.replace('_', ' ')}): {job_dir}")
            return exit_code_of(status)
        if is_busy(job_dir):
            say(f"job {job.number} is running elsewhere: {job_dir}")
            return exit_code_of(Status.running)
        config.resume = str(job_dir) if (job_dir / CONFIG_FILE).is_file() else None
    elif (job_dir / CONFIG_FILE).is_file():  # of another job: what is swept has changed since
        job_dir = job_dir.with_name(f"{job_dir.name}_{job.signature[:8]}")
    config.run_dir = str(job_dir)
    if STOP.is_asked:
        remove_if_empty(job_dir)
        exit_if_asked()
    job.write(job_dir)
    code, message = exit_code_of(Status.interrupted), ""  # unless the job comes to an end
    # A launcher's worker process may survive the launcher; its job must not.
    parent = os.getppid()

    def is_orphan() -> bool:
        return not _is_basic_launcher(HydraConfig.get()) and os.getppid() != parent

    try:
        check_start(config.trainer, config.resume)
        open_run(config)
        code = run_in_process(config, is_orphan)
        message = read_summary(job_dir).get("message", "")
    except UserError as error:
        code, message = exit_code_of(Status.refused), str(error)
        say(message)
    finally:
        if not is_locked(
            job_dir / LOCK_FILE
        ):  # else another process runs the job, and records its end
            replace(job, status=status_of(code), message=message).write(job_dir)
        compare(sweep_dir)  # after each job: a launcher may run the jobs in other processes
    if is_orphan():
        os._exit(code)  # nobody is left to receive the code
    exit_if_asked()  # the system wants this process to end, not the next job to begin
    return code


def find_job(sweep_dir: Path, job: Job) -> Path | None:
    """Find the folder of the same job in a sweep: of the same signature, and with the same choices of what is swept.

    The choices count beside the signature, since a sweep may compare what changes no result, such
    as `data.num_workers`.
    """
    swept = _swept(sweep_dir) or list(job.overrides)
    for folder, other in read_jobs(sweep_dir).items():
        is_same = all(other.overrides.get(key) == job.overrides.get(key) for key in swept)
        if is_same and other.signature == job.signature:
            return folder
    return None


def note_refusal(message: str) -> None:
    """Record a job of a multirun whose configuration was refused."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not RunMode.MULTIRUN:
        return
    sweep_dir, job_dir = _folders()
    if (job_dir / CONFIG_FILE).is_file():
        job_dir = job_dir.with_name(f"{job_dir.name}_refused")
    Job(hydra_config.job.num, Status.refused, message, _overrides(), "").write(job_dir)
    compare(sweep_dir)


def exit_codes() -> list[int]:
    """Exit codes of all jobs of the sweeps that this process started, wherever the jobs ran."""
    return [
        exit_code_of(job.status)
        for sweep_dir in SweepFolder.started
        for job in read_jobs(sweep_dir).values()
    ]


def compare(sweep_dir: Path) -> Path:
    """Write `comparison.csv`, one line per job: the arguments in which the jobs differ, status, and results.

    Args:
        sweep_dir: Folder of a multirun; a job is a folder below it with a `job.json`.

    Returns:
        Path of the table.
    """
    jobs = read_jobs(sweep_dir)
    keys = list(dict.fromkeys(key for job in jobs.values() for key in job.overrides))
    differing = [key for key in keys if len({job.overrides.get(key) for job in jobs.values()}) > 1]
    rows = [
        {
            "run": str(job_dir.relative_to(sweep_dir)),
            **{key: job.overrides.get(key) for key in differing},
            **{
                key: value
                for key, value in read_summary(job_dir).items()
                if isinstance(value, (int, float, str))
            },
            "status": job.status.value,
            "message": job.message,
        }
        for job_dir, job in jobs.items()
    ]
    path = sweep_dir / "comparison.csv"
    write_csv(path, rows)
    return path


def _stop_jobs(sweep_dir: Path) -> NoReturn:
    """Ask all jobs of a sweep on this machine to stop, give them the time to save, and end this process.

    The launcher would kill its worker processes at once, and with them the jobs.
    """
    busy = [folder for folder in read_jobs(sweep_dir) if is_locked(folder / LOCK_FILE)]
    for process in psutil.Process().children(recursive=True):
        process.send_signal(signal.SIGTERM)  # loader workers ignore it
    deadline_s = time.monotonic() + STOP_S
    while (
        any(job.status is Status.running for folder in busy for job in read_jobs(folder).values())
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.1)
    sys.exit(EXIT_RESUME)


def _is_basic_launcher(hydra_config: Any) -> bool:
    """Whether the jobs of a multirun are composed in the process that the user started."""
    return str(hydra_config.launcher._target_).endswith("BasicLauncher")


def _swept(sweep_dir: Path) -> list[str]:
    """Keys that `sweep.json` names as swept; none where there is no such file."""
    keys = read_record(sweep_dir / SWEEP_FILE, dict).get("swept")
    return list(map(str, keys)) if isinstance(keys, list) else []


def _folders() -> tuple[Path, Path]:
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir).absolute(), Path(hydra_config.runtime.output_dir)


def _overrides() -> dict[str, str]:
    return dict(
        override.split("=", 1) for override in HydraConfig.get().overrides.task if "=" in override
    )
