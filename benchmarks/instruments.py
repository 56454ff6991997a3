"""Instruments of the memory benchmarks, none of which `plan` uses.

Allocations are counted by a preloaded library, resident memory is read from /proc.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from medseg.console import say
from medseg.errors import EXIT_USER_ERROR
from medseg.memory.heap import map_large_blocks
from medseg.memory.instructions import train_without_amx

ROOT = Path(__file__).resolve().parents[1]
BEGUN_ANEW = "MEDSEG_BENCHMARK"


def given_arguments(keys: Collection[str]) -> tuple[Path, dict[str, str]]:
    """Read the arguments of a benchmark.

    Returns:
        Its output folder, which is made, and the values of the other keys.
    """
    values = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    if "output" not in values or values.keys() - {"output", *keys}:
        options = ", ".join(f"{key}=…" for key in keys)
        name = Path(sys.argv[0]).name
        say(f"{name}: expected output=<folder>, and optionally {options}")
        sys.exit(EXIT_USER_ERROR)
    output = Path(values.pop("output")).absolute()
    output.mkdir(parents=True, exist_ok=True)
    return output, values


def print_values(row: Mapping[str, Any], num_digits: int) -> None:
    """Print the values of a row in a line, numbers with some significant digits."""
    texts = []
    for value in row.values():
        texts.append(f"{value:.{num_digits}g}" if isinstance(value, float) else str(value))
    print(" ".join(texts), flush=True)


def allocation_counter(output: Path) -> Path:
    """Compile `allocations.c` into a folder."""
    library = output / "allocations.so"
    source = ROOT / "benchmarks" / "allocations.c"
    compiler = ["cc", "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, source, "-o", library, "-ldl"], check=True)
    return library


def begin_anew(**variables: str) -> None:
    """Restart this process once, with the settings of `train` and further environment variables.

    `train` sets the heap and the instructions of the processor.

    The settings take effect only when a process starts: when a benchmark runs, its libraries have
    already made tensors.
    """
    if BEGUN_ANEW not in os.environ:
        map_large_blocks()
        train_without_amx()
        os.execve(sys.executable, sys.orig_argv, os.environ | variables | {BEGUN_ANEW: "1"})


def train(
    arguments: Sequence[str], run_dir: Path, environment: Mapping[str, str], limit: float = math.inf
) -> int:
    """Train in a separate process.

    Args:
        arguments: Arguments of `train`.
        run_dir: Folder of the run; its output goes to `<run_dir>.log`.
        environment: Environment variables.
        limit: Resident bytes; a run that exceeds them is killed.

    Returns:
        The peak of its resident memory in bytes, read every 20 ms.

    Raises:
        RuntimeError: If the run fails, with the end of its output.
    """
    command = [sys.executable, "-m", "medseg.commands.cli", "train", *arguments]
    command.append(f"hydra.run.dir={run_dir}")
    log_file = run_dir.with_suffix(".log")
    peak = 0
    with log_file.open("wb") as log:
        process = psutil.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
        )
        while process.poll() is None:
            peak = max(peak, resident_bytes(process))
            if peak > limit:
                process.kill()
            time.sleep(0.02)
    if process.returncode and peak <= limit:
        raise RuntimeError(log_file.read_text(encoding="utf-8")[-2000:])
    return peak


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and its children; a page that several share counts once.

    Pages of files (libraries, mapped caches) are counted for the process only, since its children
    share them. The kernel's proportional set size would divide them among all programs that map the
    files.
    """
    total = 0
    try:
        total += 1024 * _kib(process.pid, "status")["RssFile"]
        for member in (process, *process.children(recursive=True)):
            sizes = _kib(member.pid, "smaps_rollup")
            total += 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"])
    except (OSError, psutil.Error, KeyError):
        return 0  # one of them has just ended
    return total


def largest_resident_bytes(process: psutil.Process) -> int:
    """Largest resident memory of a process since its start, as counted by the system.

    It is 0 when the process has ended.
    """
    try:
        return 1024 * _kib(process.pid, "status")["VmHWM"]
    except (OSError, KeyError):
        return 0


def _kib(pid: int, name: str) -> dict[str, int]:
    """Sizes in KiB that a file of /proc lists, as in `VmHWM:  1234 kB`."""
    sizes = {}
    for line in Path(f"/proc/{pid}/{name}").read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[-1] == "kB":
            sizes[words[0].rstrip(":")] = int(words[1])
    return sizes
