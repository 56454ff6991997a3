"""Parts of the GPU report: each runs in a process of its own, within a time limit.

`run_part` starts such a process as `python -m benchmarks.gpu.parts <part> <folder>`.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.report import Report, read_report
from benchmarks.instruments import ROOT

# Time limit in s of each part on a machine with a GPU, ten minutes in all. Each part is a module of
# this package with a function `measure`.
LIMITS_S = {
    "tests": 90,
    "kernels": 30,
    "memory": 110,
    "training": 210,
    "prediction": 60,
    "speed": 100,
}
# Limit of each part of a rehearsal: a CPU needs longer even for small shapes, and may be busy.
REHEARSAL_LIMIT_S = 1500


@dataclass(frozen=True)
class Session:
    """Settings that all parts share.

    Attributes:
        output: Folder of the report; each part writes into a folder of its own below.
        is_rehearsal: Whether the parts run on the CPU with small shapes.
        scan: A real CT to predict; None = a phantom.
    """

    output: Path
    is_rehearsal: bool
    scan: Path | None = None

    @property
    def device(self) -> torch.device:
        """Device of the measurements."""
        return torch.device("cpu" if self.is_rehearsal else "cuda")

    @property
    def accelerator(self) -> str:
        """The device in the words of medseg's keys."""
        return "cpu" if self.is_rehearsal else "gpu"

    def limit_s(self, part: str) -> float:
        """Time limit of a part in s."""
        return REHEARSAL_LIMIT_S if self.is_rehearsal else LIMITS_S[part]


def session_of(output: Path) -> Session:
    """Read the session from the environment: `REHEARSAL=1`, `SCAN=<file>`."""
    scan = os.environ.get("SCAN")
    is_rehearsal = os.environ.get("REHEARSAL") == "1"
    return Session(output, is_rehearsal, Path(scan).absolute() if scan else None)


@dataclass(frozen=True)
class Ending:
    """How a part has ended.

    Attributes:
        seconds: Its duration.
        problem: Why the part did not come to its end; empty if it did.
        report: Its checks and tables; empty if it did not come to its end.
    """

    seconds: float
    problem: str
    report: Report


def run_part(name: str, session: Session) -> Ending:
    """Run a part to its end, or to its time limit; its output goes to `<part>.log`.

    The new process reads the session from the environment that it inherits, see `session_of`.
    """
    report_file = session.output / name / "report.json"
    # A report of an earlier run must not stand for this one.
    report_file.unlink(missing_ok=True)
    log_file = session.output / f"{name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name, str(session.output)]
    start = time.perf_counter()
    with log_file.open("wb") as log:
        # A session of the operating system: the part and all that it has started can be ended
        # together by the number of their group.
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        problem = _wait(process, session.limit_s(name))
    seconds = time.perf_counter() - start
    if problem:
        return Ending(seconds, f"{problem}; see {log_file.name}", Report())
    return Ending(seconds, "", read_report(report_file))


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a part; returns its problem, or an empty text."""
    try:
        exit_code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no end within {limit_s:g} s"
    return f"exit code {exit_code}" if exit_code else ""


def main() -> None:
    """Run one part in this process and write its report."""
    name, folder = sys.argv[1:]
    session = session_of(Path(folder))
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    report = module.measure(session)
    report.write(session.output / name / "report.json")


if __name__ == "__main__":
    main()
