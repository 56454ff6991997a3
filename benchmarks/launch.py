"""Launcher: starts a program and reports its cost.

    launch.py <file> <program> <arguments>

On Linux a process begins with the largest resident memory of the process that starts it, since the
system keeps that number over `exec`. A benchmark that has imported torch, or made a phantom, must
therefore not start what it measures. This program imports next to nothing and holds 10 MB.
"""

import json
import os
import sys
import time


def main() -> None:
    """Run the program to its end and write its cost to the file.

    The file has wall and CPU seconds, largest resident bytes and exit code as JSON.
    """
    report_file, program, *arguments = sys.argv[1:]
    start = time.perf_counter()
    pid = os.posix_spawn(program, [program, *arguments], os.environ)
    # `wait4` also gives the costs of the children that the program has waited for.
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.perf_counter() - start
    # macOS counts bytes, Linux KiB.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    cost = {
        "wall_s": wall_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * unit_bytes,
        "exit_code": os.waitstatus_to_exitcode(status),
    }
    with open(report_file, "w", encoding="utf-8") as file:
        json.dump(cost, file)


if __name__ == "__main__":
    main()
