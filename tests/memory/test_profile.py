"""Memory over time: the area under straight lines, and a watch that sees the whole of a block."""

from __future__ import annotations

import time

import numpy as np
import pytest

from medseg.memory.profile import Curve, MemoryMeter, peak_resident_bytes, resident_bytes


def test_the_area_is_that_under_straight_lines() -> None:
    curve = Curve()
    for time_s, gigabytes in ((10.0, 1), (12.0, 3), (12.0, 5), (13.0, 0)):
        curve.add(time_s, gigabytes * 10**9)
    assert curve.area_gb_s == 2 * 2.0 + 0.0 + 2.5
    assert curve.peak_bytes == 5 * 10**9


def test_the_watch_begins_and_ends_with_the_block_also_where_it_fails() -> None:
    outer_s = time.perf_counter()
    meter = MemoryMeter(lambda: 10**9)

    def work() -> float:
        with meter:
            inner_s = time.perf_counter()
            time.sleep(0.12)
            inner_s = time.perf_counter() - inner_s
            raise MemoryError(inner_s)

    with pytest.raises(MemoryError) as caught:
        work()
    outer_s = time.perf_counter() - outer_s
    assert caught.value.args[0] <= meter.curve.area_gb_s * (1 + 1e-9) <= outer_s * (1 + 2e-9)
    before = meter.curve.area_gb_s
    time.sleep(0.12)
    assert meter.curve.area_gb_s == before


def test_resident_memory_is_counted_in_bytes() -> None:
    before = resident_bytes()
    block = np.ones(2**26, dtype=np.uint8)
    grown = resident_bytes() - before
    assert 0.9 * block.nbytes < grown < 2 * block.nbytes
    assert peak_resident_bytes() >= before + grown - 2**20
