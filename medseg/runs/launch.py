"""From a run folder to its worker processes: one per rank, asked to stop when this process is, ended when it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from medseg.config.schema import TrainConfig
from medseg.console import say
from medseg.errors import UserError
from medseg.runs.folder import END_S, SUMMARY_FILE, write_end
from medseg.runs.ranks import PARENT_PIPE, agent_store, is_under_torchrun, rank
from medseg.runs.status import Status, status_of

WORKER = (sys.executable, "-m", "medseg.runs.worker")
# Under which torchrun's processes find the folder of their run.
RUN_DIR_KEY = "medseg/run_dir"
# Between two looks at what a run has noted.
ASK_S = 1.0


def check_start(config: TrainConfig) -> None:
    """Refuse a start that this process cannot make.

    Raises:
        UserError: With the way to make it.
    """
    if config.trainer.num_nodes > 1 and config.start and not is_under_torchrun():
        raise UserError(
            f"trainer.num_nodes={config.trainer.num_nodes}: this command starts one machine; put torchrun in the place of python, "
            "on each machine"
        )


def join_torchrun() -> None:
    """Under torchrun every process becomes the worker of its rank as soon as the run folder is known; elsewhere nothing happens.

    Returns only in the first process of the first start, which is to compose, and to `tell_torchrun` of the folder. torchrun keeps
    what it is told when it starts its processes again after one of them has died: they go on with that folder.

    Raises:
        SystemExit: Where there is nothing to run.
    """
    if not is_under_torchrun():
        return
    store = agent_store()
    if rank() == 0 and not store.check([RUN_DIR_KEY]):
        return
    become_worker(store.get(RUN_DIR_KEY).decode())


def tell_torchrun(run_dir: Path | None) -> None:
    """Tell the other processes of torchrun what this one has composed, and become the worker of the first rank.

    Args:
        run_dir: Run folder; None = there is nothing to run.
    """
    folder = str(run_dir or "")
    agent_store().set(RUN_DIR_KEY, folder)
    become_worker(folder)


def become_worker(run_dir: str) -> NoReturn:
    """Go on as the worker of a run folder, in the same process; without a folder, end."""
    if not run_dir:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(WORKER[0], [*WORKER, run_dir])


def num_local_ranks(config: TrainConfig) -> int:
    """Processes of a run on this machine."""
    return config.trainer.devices


def start_workers(run_dir: Path, num_ranks: int, is_enough: Callable[[], bool] | None = None) -> int:
    """Run the workers of a run folder to their end.

    However they end, `summary.json` says how: a worker writes it, and where none could, this does.

    Args:
        run_dir: Run folder.
        num_ranks: Processes on this machine.
        is_enough: Asked every second; when it says so, the workers are asked to stop.

    Returns:
        Exit code of the first worker that failed, else 0.
    """
    summary = run_dir / SUMMARY_FILE
    summary.unlink(missing_ok=True)  # an earlier end is none of this one
    reader, writer = os.pipe()
    common = {
        **os.environ, PARENT_PIPE: str(reader), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": run_dir.name,
    }  # fmt: skip
    if num_ranks > 1:
        common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    command = [*WORKER, str(run_dir)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with _forwarded(workers):
            for rank in range(num_ranks):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                workers.append(subprocess.Popen(command, env=environment, pass_fds=[reader]))
            os.close(reader)
            code = _wait(workers, is_enough)
    except KeyboardInterrupt:
        # It reached the workers too, since all share the terminal; raised again, it ends a multirun.
        say(f"waiting for the worker to stop; resume={run_dir} goes on from its last checkpoint")
        _wait(workers)
        raise
    finally:
        os.close(writer)  # whoever is left saves and ends
        for worker in workers:
            worker.wait()
    if code and not summary.is_file():
        status = status_of(code)
        full = ", as the system does to a process when memory is full" if status is Status.out_of_memory else ""
        message = f"the worker was killed by signal {-code}{full}" if code < 0 else f"the worker ended with code {code}"
        write_end(run_dir, status, message)
        say(message)
    return code


def _wait(workers: list[subprocess.Popen[bytes]], is_enough: Callable[[], bool] | None = None) -> int:
    """Wait for all; when one fails, or it is enough, the others, which may wait for it in vain, are asked to stop and then killed."""
    code, asked_s, deadline_s = 0, time.monotonic(), float("inf")
    while any(worker.poll() is None for worker in workers):
        if deadline_s == float("inf"):
            code = next((worker.returncode for worker in workers if worker.returncode), 0)
            is_over = bool(code)
            if is_enough is not None and not is_over and time.monotonic() - asked_s > ASK_S:
                is_over, asked_s = is_enough(), time.monotonic()
            if is_over:
                deadline_s = time.monotonic() + END_S
                for worker in workers:
                    worker.terminate()
        if time.monotonic() > deadline_s:
            for worker in workers:
                worker.kill()
        time.sleep(0.05)
    return code or next((worker.returncode for worker in workers if worker.returncode), 0)


@contextmanager
def _forwarded(workers: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Hand the signals that ask to stop over to the workers, which save and end; then this process ends too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, _: FrameType | None) -> None:
        for worker in workers:
            worker.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
