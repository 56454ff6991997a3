"""Seconds inside the passes of networks: each network has a speed of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PassWatch:
    """Seconds inside the passes of networks.

    Attributes:
        seconds: Their sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the seconds of the block."""
        start_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the seconds of the block, within one that counts."""
        start_s = time.perf_counter()
        yield
        self.seconds -= time.perf_counter() - start_s
