"""Calibrations in files: they expire, and count only if the machine was quiet or still is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from medseg.io import calibration
from medseg.io.calibration import (
    MAX_AGE_S,
    Circumstances,
    LoadMeter,
    ProcessorTimes,
    read_calibration,
    write_calibration,
)


@pytest.mark.parametrize(
    ("load", "age_s", "present", "is_valid"),
    [
        (0.0, 60.0, 0.0, True),
        (0.0, 60.0, 0.9, True),
        (0.0, MAX_AGE_S + 60.0, 0.0, False),
        (0.0, -3600.0, 0.0, False),  # the clock was set back
        (0.0, float("nan"), 0.0, False),  # the file is damaged
        (0.8, 60.0, 0.9, True),  # no better one can be made now
        (0.8, 60.0, 0.0, False),
    ],
)
def test_a_calibration_counts_while_it_is_young_and_the_best_that_can_be_had(
    load: float, age_s: float, present: float, is_valid: bool
) -> None:
    circumstances = Circumstances(load, time.time() - age_s)
    assert circumstances.is_valid(lambda: present) == is_valid


def test_a_calibration_is_read_as_it_was_written_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cost.json"
    assert read_calibration(path, 2) is None
    write_calibration(path, [3.0, 0.25], Circumstances(0.0, time.time()))
    assert read_calibration(path, 2) == [3.0, 0.25]
    assert read_calibration(path, 3) is None
    write_calibration(path, [3.0, 0.25], Circumstances(0.5, time.time()))
    monkeypatch.setattr(calibration, "present_load", lambda: 0.0)
    assert read_calibration(path, 2) is None
    for damaged in ("[3.0, 0.25]", '{"numbers": [', json.dumps({"numbers": [3.0, 0.25]})):
        path.write_text(damaged, encoding="utf-8")
        assert read_calibration(path, 2) is None


def test_other_programs_are_load_and_the_own_processes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten seconds, two processors: six are busy, four with this process and its children."""
    times = iter([ProcessorTimes(100.0, 50.0, 7.0), ProcessorTimes(110.0, 56.0, 11.0)])
    monkeypatch.setattr(ProcessorTimes, "now", lambda: next(times))
    monkeypatch.setattr(calibration.psutil, "cpu_count", lambda: 2)
    with LoadMeter() as meter:
        pass
    assert meter.load == pytest.approx((6 - 4) / 10 / 2)


def test_a_child_that_has_ended_is_no_load() -> None:
    start = ProcessorTimes.now()
    script = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", script], check=True)
    end = ProcessorTimes.now()
    assert end.own_s - start.own_s > 0.15
    assert end.busy_s > 0


def test_the_own_time_is_all_of_this_process_and_of_its_ended_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = os.times_result((1.0, 2.0, 4.0, 8.0, 1000.0))
    monkeypatch.setattr(calibration.os, "times", lambda: times)
    assert ProcessorTimes.now().own_s == 1 + 2 + 4 + 8
