"""Processes of a run: its ranks, one process per sweep job, and stop signals."""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.console import say
from medseg.errors import EXIT_OUT_OF_MEMORY, EXIT_RESUME, UserError
from medseg.io.atomic import is_locked, locked
from medseg.processors import num_processors
from medseg.runs.folder import (
    LOCK_FILE,
    START_LOCK_FILE,
    SUMMARY_FILE,
    read_summary,
    write_end,
)
from medseg.runs.ranks import is_under_torchrun
from medseg.runs.status import Status, exit_code_of, num_oom_kills, status_of
from medseg.runs.train_run import run_rank
from medseg.training.options import TrainConfig, TrainerOptions
from medseg.training.preemption import SIGNALS, STOP

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# Interval at which the parent of a job checks whether the job has ended or should stop, in s.
LOOK_S = 0.5
# Ranks that were asked to stop may need a long step and a save before they end; they are killed
# after this time, in s.
STOP_S = 600


def check_start(trainer: TrainerOptions, resume: str | None) -> None:
    """Refuse a run on several machines unless torchrun has started it and could restart it.

    Raises:
        UserError: If so; the message names the command that works.
    """
    if trainer.num_nodes == 1:
        return
    if not is_under_torchrun():
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes}: this command starts ranks on one machine "
            "only; run it with torchrun instead of python, on each machine"
        )
    if resume is None:
        raise UserError(
            f"trainer.num_nodes={trainer.num_nodes}: after a restart by torchrun, the ranks must "
            "find their run folder; give hydra.run.dir=<run folder> resume=auto"
        )


def start_ranks(config: TrainConfig) -> int:
    """Train in this process, or with several ranks in processes of torchrun's elastic agent.

    Args:
        config: Configuration of an opened run folder.

    Returns:
        Exit code of the run, also written as a status to `summary.json`.

    Raises:
        KeyboardInterrupt: If the ranks were interrupted.
        SystemExit: If this process was asked to stop before the ranks began.
    """
    if config.trainer.devices == 1 or is_under_torchrun():
        return run_rank(config)
    exit_if_asked()
    run_dir = Path(config.run_dir)
    # A job of a sweep starts its ranks under the lock of the process that started the job.
    with locked(run_dir / START_LOCK_FILE, wait_s=0.0):
        # Of an earlier start: from here on, a summary is one that a rank of this start has written.
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        return _launch_ranks(config)


def _launch_ranks(config: TrainConfig) -> int:
    """Train with ranks in processes of the elastic agent; result and errors as `start_ranks`."""
    # These imports take a second.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # Until the agent has its own handlers, a stop signal ends this process.
    for number in SIGNALS:
        signal.signal(number, lambda *_: sys.exit(EXIT_RESUME))
    exit_if_asked()
    run_dir = Path(config.run_dir)
    num_ranks = config.trainer.devices
    # The ranks share the cores of this machine.
    num_threads = max(1, num_processors() // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # Each rank reports its own end: the agent would repeat it with tracebacks.
    for module in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as log_dir:
        num_kills_before = num_oom_kills()
        launch = elastic_launch(_launch_config(run_dir, num_ranks, log_dir), _rank)
        try:
            launch(config)
        except ChildFailedError as error:
            # Torch stops the other ranks as soon as it notices that one has failed.
            failed_rank, failure = error.get_first_failure()
            return _note_end(run_dir, failure.exitcode, f"rank {failed_rank}", num_kills_before)
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:
                raise KeyboardInterrupt from stop
            # Rank 0 writes its status once it has saved. If there is none, rank 0 was killed before
            # it could write, and `Status(None)` is interrupted.
            code = exit_code_of(Status(read_summary(run_dir).get("status")))
            return _note_end(run_dir, code, "the process", num_kills_before)
    return 0


def _launch_config(run_dir: Path, num_ranks: int, log_dir: str) -> "LaunchConfig":
    """Describe the ranks of one machine for torchrun's elastic agent.

    Args:
        run_dir: The run folder; its name becomes the name of the run.
        num_ranks: Number of ranks to start.
        log_dir: Temporary folder, which the agent requires.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir),
        # A key of torch's store, which takes UTF-8 only. A file name that is not UTF-8 has
        # surrogates in Python, which UTF-8 cannot encode; `ascii` escapes them.
        run_id=ascii(run_dir.name),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: any free port
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",  # a fork of a process that has used torch's threads may hang
        signals_to_handle=",".join(number.name for number in (signal.SIGINT, *SIGNALS)),
        shutdown_timeout=STOP_S,
    )


def run_in_process(config: TrainConfig, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Run a job of a sweep in a process of its own, by torch's `spawn`.

    The job may run out of memory or be killed without ending the sweep. A stop signal to this
    process is only recorded in `STOP`, since a library could catch and lose an exception; the job
    is then asked to stop, and saves. On Linux the job receives SIGINT when this process dies.

    Args:
        config: Configuration of an opened run folder.
        should_stop: Called about twice a second; when it returns True, the job is asked to stop.

    Returns:
        Exit code of the job.

    Raises:
        SystemExit: If this process was asked to stop before the job began.
    """
    STOP.install()
    exit_if_asked()
    run_dir = Path(config.run_dir)
    with locked(run_dir / START_LOCK_FILE, wait_s=0.0):
        # Of an earlier start: from here on, a summary is one that the job has written.
        (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        return _run_job(config, should_stop)


def _run_job(config: TrainConfig, should_stop: Callable[[], bool]) -> int:
    """Start a job, and wait for its end; arguments and result are those of `run_in_process`."""
    from torch.multiprocessing import spawn

    num_kills_before = num_oom_kills()
    # The joblib launcher of sweeps sets a start method "loky", which a spawned process does not
    # know. None = the default of the system.
    multiprocessing.set_start_method(None, force=True)
    is_told_to_stop = False
    try:
        (process,) = spawn(_job, (config,), nprocs=1, join=False).processes
        while process.exitcode is None:
            process.join(LOOK_S)
            # Once only, though the job may take long to save and end.
            if is_told_to_stop:
                continue
            if STOP.is_asked or should_stop():
                is_told_to_stop = True
                process.terminate()
    finally:
        # An exception, such as KeyboardInterrupt, must not leave the job behind. It may come while
        # `spawn` runs, before `process` is assigned, so all children are ended.
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
    return _note_end(Path(config.run_dir), process.exitcode, "the process", num_kills_before)


def exit_if_asked() -> None:
    """End this process if it was asked to stop, before anything else begins.

    Raises:
        SystemExit: With the code that means "start me again with resume".
    """
    if STOP.is_asked:
        sys.exit(EXIT_RESUME)


def _rank(config: TrainConfig) -> None:
    """Entry point of a rank that the elastic agent starts."""
    _use_default_start_method()
    code = run_rank(config)
    # Another exit code than 0 makes the agent stop the other ranks.
    if code:
        sys.exit(code)


def _job(_: int, config: TrainConfig) -> None:
    """Entry point of a job of a sweep; torch's `spawn` passes the number of the process first."""
    _use_default_start_method()
    sys.exit(start_ranks(config))


def _use_default_start_method() -> None:
    """Use the system's default start method for the loader workers of this process.

    Python would otherwise spawn them, because this process was spawned. A spawned worker imports
    everything again, and its process aborts if the worker ends while it sends a batch.
    """
    multiprocessing.set_start_method(None, force=True)


def _note_end(run_dir: Path, code: int, name: str, num_kills_before: int) -> int:
    """Write `summary.json` for a process that was killed, or ended before it could write one.

    No summary is written while another process trains this run, which writes its own; and the
    summary of a finished run stays, though one of its processes is killed as it ends.

    Args:
        run_dir: The run folder.
        code: Exit code of the process; minus the number of the signal where one killed it.
        name: Name of the process, for the message.
        num_kills_before: `num_oom_kills()` at the start of the process.

    Returns:
        The exit code of the run.
    """
    # A process loses its lock as it ends: a lock that is held now belongs to another process.
    is_run_elsewhere = is_locked(run_dir / LOCK_FILE)
    exit_code = code
    if code >= 0:
        # A process that succeeds has written a summary; one that fails may have ended before.
        has_summary = code == 0 or (run_dir / SUMMARY_FILE).is_file()
        if has_summary or is_run_elsewhere:
            return code
        message = f"{name} ended with exit code {code}"
    else:
        is_finished = Status(read_summary(run_dir).get("status")) is Status.finished
        if is_finished and not is_run_elsewhere:
            return 0
        message = f"{name} was killed by signal {-code} ({signal.strsignal(-code)})"
        # A process cannot end with a negative code: the code of the status takes its place.
        exit_code = exit_code_of(status_of(code))
        # The kernel kills with SIGKILL where memory runs out; others may send it too.
        if code == -signal.SIGKILL and num_oom_kills() > num_kills_before:
            exit_code = EXIT_OUT_OF_MEMORY
            message += ": out of memory, the kernel has killed a process"
    if not is_run_elsewhere:
        write_end(run_dir, status_of(exit_code), message)
    say(message)
    return exit_code
