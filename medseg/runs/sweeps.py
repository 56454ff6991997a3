"""The jobs of a multirun: each has a folder with a record of what it was and what became of it, by which a sweep is resumed."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from medseg.config.overrides import quote_paths
from medseg.config.schema import TrainConfig
from medseg.config.signature import plain, signature
from medseg.console import say
from medseg.errors import EXIT_RESUME, UserError
from medseg.io.atomic import replace_text
from medseg.io.locks import holder
from medseg.runs.folder import (
    CONFIG_FILE,
    END_S,
    LOCK_FILE,
    is_busy,
    open_run,
    read_summary,
    remove_if_empty,
    settle,
)
from medseg.runs.launch import check_start, num_local_ranks, start_workers
from medseg.runs.status import FAILURES, Status, exit_code_of, status_of

JOB_FILE = "job.json"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Job:
    """What `job.json` says.

    Attributes:
        number: Place in the sweep.
        status: What became of it; `running` from the start on, so that a killed job is known by it.
        message: Why it was refused or failed.
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
        replace_text(job_dir / JOB_FILE, json.dumps({**asdict(self), "status": self.status.value}, indent=1))


def read_jobs(sweep_dir: Path) -> dict[Path, Job]:
    """The jobs of a sweep by their folder, in the order of their numbers."""
    found = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in sweep_dir.rglob(JOB_FILE)}
    jobs = {folder: Job(**{**record, "status": Status(record["status"])}) for folder, record in found.items()}
    return dict(sorted(jobs.items(), key=lambda item: (item[1].number, str(item[0]))))


class SweepFolder(Callback):
    """Hydra's hook at the start of a multirun: one folder for the whole sweep, with a note of what is swept.

    A folder that depends on a swept key (`runs/${name}/…`) or on the hour would otherwise be another one for each job.
    """

    started: ClassVar[list[Path]] = []

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Pin the folder for all jobs, in whatever process they are composed, and write `sweep.json`."""
        sweep_dir = Path(config.hydra.sweep.dir).absolute()
        self.started.append(sweep_dir)
        for number in (signal.SIGTERM, signal.SIGUSR1):  # where the jobs run in other processes
            signal.signal(number, lambda *_: _stop(sweep_dir))
        with open_dict(config):
            config.hydra.overrides.hydra.extend(quote_paths([f"hydra.sweep.dir={sweep_dir}"]))
        given = [str(override) for override in config.hydra.overrides.task]
        parsed = OverridesParser.create().parse_overrides(given)
        swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
        swept |= set((config.hydra.sweeper.get("params") or {}).keys())
        path = sweep_dir / SWEEP_FILE
        if path.is_file():
            swept |= set(json.loads(path.read_text(encoding="utf-8"))["swept"])
        sweep_dir.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({"overrides": given, "swept": sorted(swept)}, indent=1))


def run_job(config: TrainConfig) -> int:
    """Run one job of a multirun, go on with it where it was interrupted, or leave it where it had its turn.

    Returns:
        Exit code of the job, that of an earlier attempt where it is left.
    """
    if config.resume not in (None, "auto"):
        raise UserError(f"resume={config.resume}: a multirun goes on by itself when it is given its folder as hydra.sweep.dir")
    settle(config)
    sweep_dir, job_dir = _folders()
    job = Job(HydraConfig.get().job.num, Status.running, "", _overrides(), signature(plain(config)))
    earlier = find_job(sweep_dir, job)
    if earlier is not None:
        remove_if_empty(job_dir)
        job_dir, status = earlier, read_jobs(earlier)[earlier].status
        if status is Status.finished or (status in FAILURES and not config.retry_failed):
            say(f"job {job.number} is {status.value.replace('_', ' ')} already: {job_dir}")
            return exit_code_of(status)
        if is_busy(job_dir):
            say(f"job {job.number} is running elsewhere: {job_dir}")
            return exit_code_of(Status.running)
        config.resume = str(job_dir) if (job_dir / CONFIG_FILE).is_file() else None
    elif (job_dir / CONFIG_FILE).is_file():  # of another job: what is swept has changed since
        job_dir = job_dir.with_name(f"{job_dir.name}_{job.signature[:8]}")
    config.run_dir = str(job_dir)
    job.write(job_dir)
    code, message = exit_code_of(Status.interrupted), ""  # unless the job comes to an end
    # A launcher has its jobs in processes of their own, which must not survive it.
    parent = None if HydraConfig.get().launcher._target_.endswith("BasicLauncher") else os.getppid()
    try:
        check_start(config)
        code = start_workers(open_run(config), num_local_ranks(config), lambda: parent is not None and os.getppid() != parent)
        message = read_summary(job_dir).get("message", "")
    except UserError as error:
        code, message = exit_code_of(Status.refused), str(error)
        say(message)
    finally:
        replace(job, status=status_of(code), message=message).write(job_dir)
        compare(sweep_dir)  # after each job: a launcher may run the jobs in processes of their own
    if parent is not None and os.getppid() != parent:
        os._exit(code)  # there is nobody left to bring the code to
    if code == EXIT_RESUME and parent is None:
        sys.exit(code)  # the system wants this process to end, not the next job to begin
    return code


def find_job(sweep_dir: Path, job: Job) -> Path | None:
    """The folder of the same job in a sweep: of the same signature, and with the same choices of what is swept.

    The choices count beside the signature, since a sweep may compare what changes no result, such as `data.num_workers`.
    """
    path = sweep_dir / SWEEP_FILE
    swept = json.loads(path.read_text(encoding="utf-8"))["swept"] if path.is_file() else list(job.overrides)
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
    """The exit codes of all jobs of the sweeps that this process started, wherever their jobs ran."""
    return [exit_code_of(job.status) for sweep_dir in SweepFolder.started for job in read_jobs(sweep_dir).values()]


def compare(sweep_dir: Path) -> Path:
    """Write `comparison.csv`, one line per job: the arguments in which the jobs differ, what became of it, what it reached.

    Args:
        sweep_dir: Folder of a multirun; a job is a folder below it with a `job.json`.

    Returns:
        Path of the table.
    """
    jobs = read_jobs(sweep_dir)
    keys = list(dict.fromkeys(key for job in jobs.values() for key in job.overrides))
    differing = [key for key in keys if len({job.overrides.get(key) for job in jobs.values()}) > 1]
    rows = []
    for job_dir, job in jobs.items():
        summary = read_summary(job_dir)
        rows.append(
            {
                "run": str(job_dir.relative_to(sweep_dir)),
                **{key: job.overrides.get(key) for key in differing},
                **{key: value for key, value in summary.items() if isinstance(value, (int, float, str))},
                "status": job.status.value,
                "message": job.message,
            }
        )
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = sweep_dir / "comparison.csv"
    replace_text(path, text.getvalue())
    return path


def _stop(sweep_dir: Path) -> None:
    """Ask the workers of a sweep that run on this machine to stop, give them the time to save, and end."""
    workers = {folder: process for folder in read_jobs(sweep_dir) if (process := holder(folder / LOCK_FILE)) is not None}
    for process in workers.values():
        os.kill(process, signal.SIGTERM)
    deadline_s = time.monotonic() + END_S
    while any(read_jobs(folder)[folder].status is Status.running for folder in workers) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    sys.exit(EXIT_RESUME)


def _folders() -> tuple[Path, Path]:
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir).absolute(), Path(hydra_config.runtime.output_dir)


def _overrides() -> dict[str, str]:
    return dict(override.split("=", 1) for override in HydraConfig.get().overrides.task if "=" in override)
