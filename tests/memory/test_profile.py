"""Memory profile: the area under straight lines, for exactly as long as the block runs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from medseg.memory.profile import MemoryProfile, peak_resident_bytes, resident_bytes


def test_the_area_is_that_under_straight_lines() -> None:
    profile = MemoryProfile()
    for time_s, gigabytes in ((10.0, 1), (12.0, 3), (12.0, 5), (13.0, 0)):
        profile.add(time_s, gigabytes * 10**9)
    assert profile.area_gb_s == 2 * 2.0 + 0.0 + 2.5


def test_the_profile_begins_and_ends_with_the_block_also_where_it_fails() -> None:
    outer_s = time.perf_counter()
    profile = MemoryProfile(lambda: 10**9)

    def work() -> float:
        with profile:
            inner_s = time.perf_counter()
            time.sleep(0.12)
            inner_s = time.perf_counter() - inner_s
            raise MemoryError(inner_s)

    with pytest.raises(MemoryError) as caught:
        work()
    outer_s = time.perf_counter() - outer_s
    assert caught.value.args[0] <= profile.area_gb_s * (1 + 1e-9) <= outer_s * (1 + 2e-9)
    before = profile.area_gb_s
    time.sleep(0.12)
    assert profile.area_gb_s == before


@pytest.mark.timeout(20)
def test_a_thread_that_finds_no_memory_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap", fail)  # what CPython does where the new thread cannot allocate
    with MemoryProfile(lambda: 10**9) as profile:
        time.sleep(0.06)
    assert profile.area_gb_s >= 0.06


def test_resident_memory_is_counted_in_bytes() -> None:
    before = resident_bytes()
    block = np.ones(2**26, dtype=np.uint8)
    grown = resident_bytes() - before
    assert 0.9 * block.nbytes < grown < 2 * block.nbytes
    assert peak_resident_bytes() >= before + grown - 2**20


def test_the_peak_is_that_of_the_process_alone() -> None:
    block = np.ones(2**29, dtype=np.uint8)
    code = "from medseg.memory.profile import peak_resident_bytes; print(peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert int(done.stdout) < block.nbytes
