"""Commands that start at once: forked from a server that has imported everything.

A new Python takes up to six seconds of processor time for the imports of a training. Tests of the
start itself, of signals to a training and its process group, of memory, and of modules in the
working folder keep new processes.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

IMPORTED = [
    *(f"medseg.training.{name}" for name in ("assemble", "extensions", "network", "versions")),
    *(
        f"medseg.training.{name}"
        for name in (
            "callbacks",
            "checkpoints",
            "data_module",
            "history",
            "loggers",
            "machine_load",
        )
    ),
    *(
        "lightning.pytorch",
        "medseg.commands.entry",
        "medseg.commands.predict",
        "medseg.commands.train",
        "medseg.weights.files",
    ),
]
# A server beside that of `multiprocessing`, whose processes start as they do for a user.
SERVER = forkserver.ForkServer()
SERVER.set_forkserver_preload(IMPORTED)


def served() -> Any:
    """Context in which the start method `forkserver` uses this server."""
    return patch.object(forkserver, "connect_to_new_process", SERVER.connect_to_new_process)


def _run(
    arguments: Sequence[str], cwd: str, environment: Mapping[str, str], files: Sequence[str]
) -> None:
    """Become the command `[python, -m, module, …]` or `[python, -c, code or script, …]`."""
    import torch

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    # Ranks and jobs of sweeps are forked too. The module has the name of one of its functions.
    spawning = sys.modules["torch.multiprocessing.spawn"]
    start = spawning.start_processes
    for module in (spawning, torch.multiprocessing):
        module.start_processes = lambda *given, start_method, **named: start(
            *given, start_method="fork", **named
        )
    _, first, *rest = arguments
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except KeyboardInterrupt:  # Python ends by the signal
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


class Popen:
    """A started command, with the parts of `subprocess.Popen` that tests use; output goes to files.

    Args:
        arguments: Command that begins with `sys.executable`.
        cwd: Working folder.
        env: Environment; None = that of this process.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.args = arguments
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name) / name for name in ("out", "err")]
        for file in self.files:
            file.touch()
        given = (
            list(arguments),
            str(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
            [*map(str, self.files)],
        )
        self.process = get_context("forkserver").Process(target=_run, args=given)
        with served():
            self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.kill, self.terminate = self.process.kill, self.process.terminate
        self.send_signal = partial(os.kill, self.pid)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (file.read_text(encoding="utf-8") for file in self.files)
        return out, err


def run(
    arguments: Sequence[str], check: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does with pipes."""
    process = Popen(arguments, **options)
    out, err = process.communicate(timeout)
    code = process.returncode
    assert code is not None
    done = subprocess.CompletedProcess(list(arguments), code, out, err)
    if check:
        assert code == 0, err
    return done
