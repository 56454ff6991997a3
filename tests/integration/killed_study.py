"""A script: start a study again and again, and kill all its processes at random moments.

`python killed_study.py <kills> <seconds> <seed> <arguments of medseg>`: each start is killed within
so many seconds, the last one ends by itself. Prints what the starts printed, a line of dashes
between them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress


def main() -> None:
    num_kills, most_s = int(sys.argv[1]), float(sys.argv[2])
    rng = random.Random(int(sys.argv[3]))
    command = [sys.executable, "-m", "medseg.commands.cli", *sys.argv[4:]]
    for number in range(num_kills + 1):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        is_last = number == num_kills
        if not is_last:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, most_s))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(output)
        print(f"---- ended with {process.returncode}", flush=True)
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
