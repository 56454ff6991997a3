"""Stopwatch of the passes of a network, by which later cases are forecast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PassWatch:
    """Sum of the seconds inside the passes of a network.

    Attributes:
        seconds: The sum so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the seconds of the block, unless it raises."""
        start_s = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the seconds of the block, inside a block of `running`."""
        start_s = time.perf_counter()
        yield
        self.seconds -= time.perf_counter() - start_s
