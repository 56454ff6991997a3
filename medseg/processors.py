"""Processors of this machine that the process may use."""

import os


def num_processors() -> int:
    """Count the processors that this process may use: a batch system may grant it only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows, which grant all
