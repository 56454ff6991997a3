"""Shared parts of the benchmarks: their arguments, and instruments that measure memory on Linux.

Allocations are counted by a preloaded library, resident memory is read from /proc. `plan` uses
neither, so that its predictions are compared with independent figures.
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
# Environment variable that marks the process which `begin_anew` has started.
BEGUN_ANEW = "MEDSEG_BENCHMARK"


def given_arguments(
    optional: Collection[str], required: Collection[str] = ()
) -> tuple[Path, dict[str, str]]:
    """Read the arguments of a benchmark, each `key=value`, from the command line.

    Exits with a message if a required key is missing or a key is unknown.

    Args:
        optional: Keys that may be given.
        required: Keys that must be given in addition to `output`.

    Returns:
        The output folder, which is made, and the values of the other keys that were given.
    """
    values = {}
    for argument in sys.argv[1:]:
        key, _, value = argument.partition("=")
        values[key] = value
    needed = {"output", *required}
    unknown = values.keys() - needed - {*optional}
    missing = needed - values.keys()
    if unknown or missing:
        texts = ["output=<folder>", *(f"{key}=…" for key in required)]
        options = ", ".join(f"{key}=…" for key in optional)
        name = Path(sys.argv[0]).name
        say(f"{name}: expected {' '.join(texts)}, and optionally {options}")
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
    """Compile `allocations.c` into a folder; returns the library for `LD_PRELOAD`."""
    library = output / "allocations.so"
    source = ROOT / "benchmarks" / "allocations.c"
    compiler = ["cc", "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, source, "-o", library, "-ldl"], check=True)
    return library


def begin_anew(**variables: str) -> None:
    """Restart this process once, with the settings of `train` and further environment variables.

    `train` sets the heap and the instructions of the processor. The settings take effect only when
    a process starts: when a benchmark runs, its libraries have already made tensors.

    Args:
        variables: Environment variables of the new process, such as `LD_PRELOAD`.
    """
    if BEGUN_ANEW not in os.environ:
        # Both change `os.environ`, which the new process inherits.
        map_large_blocks()
        train_without_amx()
        os.execve(sys.executable, sys.orig_argv, os.environ | variables | {BEGUN_ANEW: "1"})


def train(
    arguments: Sequence[str],
    run_dir: Path,
    environment: Mapping[str, str],
    limit_bytes: float = math.inf,
) -> int:
    """Train in a separate process.

    Args:
        arguments: Arguments of `train`.
        run_dir: Folder of the run; its output goes to `<run_dir>.log`.
        environment: Environment variables.
        limit_bytes: A run with more resident memory is killed.

    Returns:
        The peak of its resident memory in bytes, read every 20 ms; above `limit_bytes` if the run
        was killed.

    Raises:
        RuntimeError: If the run fails for another reason, with the end of its output.
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
            if peak > limit_bytes:
                process.kill()
            time.sleep(0.02)
    if process.returncode and peak <= limit_bytes:
        raise RuntimeError(log_file.read_text(encoding="utf-8")[-2000:])
    return peak


def resident_bytes(process: psutil.Process) -> int:
    """Resident memory of a process and its children; a page that several share counts once.

    Pages of files (libraries, mapped caches) are counted for the process only, since its children
    share them. The kernel's proportional set size would divide them among all programs that map the
    files.
    """
    total_kib = 0
    try:
        total_kib += _sizes_kib(process.pid, "status")["RssFile"]
        for member in (process, *process.children(recursive=True)):
            # Proportional set size: a page of n processes counts as 1/n for each of them.
            sizes_kib = _sizes_kib(member.pid, "smaps_rollup")
            total_kib += sizes_kib["Pss_Anon"] + sizes_kib["Pss_Shmem"]
    except (OSError, psutil.Error, KeyError):
        # One of the processes has just ended. 0 does not change the peak that callers keep.
        return 0
    return 1024 * total_kib


def largest_resident_bytes(process: psutil.Process) -> int:
    """Largest resident memory of a process since its start, as counted by the system.

    It is 0 when the process has ended.
    """
    try:
        return 1024 * _sizes_kib(process.pid, "status")["VmHWM"]
    except (OSError, KeyError):
        return 0


def _sizes_kib(pid: int, name: str) -> dict[str, int]:
    """Sizes in KiB that a file of /proc lists, as in `VmHWM:  1234 kB`.

    Linux writes "kB" and means KiB. Lines without a size are skipped.
    """
    sizes_kib = {}
    for line in Path(f"/proc/{pid}/{name}").read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[-1] == "kB":
            sizes_kib[words[0].rstrip(":")] = int(words[1])
    return sizes_kib
