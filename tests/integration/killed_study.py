"""A script: start a study again and again, and kill all its processes at random moments.

`python killed_study.py <seed> <arguments of medseg>`: each start is killed with its processes after
some lines of its output, the last one ends by itself. Prints what the starts printed, and how each
of them ended.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

# Fewest and most lines before each kill. A training prints about twelve, a prediction five: the
# kills hit the first training, what follows it, and the same of the second fold.
LINES = ((1, 8), (13, 18), (5, 10), (1, 5), (10, 14), (15, 19))


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, which tells each line at once."""
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def main() -> None:
    rng = random.Random(int(sys.argv[1]))
    command = [sys.executable, "-m", "medseg.commands.cli", *sys.argv[2:]]
    for fewest, most in LINES:
        process = start(command)
        assert process.stdout is not None
        for _ in range(rng.randint(fewest, most)):
            print(process.stdout.readline(), end="")
        time.sleep(rng.uniform(0, 0.5))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        print(process.communicate()[0])
        print(f"---- ended with {process.returncode}", flush=True)
    process = start(command)
    print(process.communicate()[0])
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
