"""Pipeline of a batch: the next case is read and the last one finished while one is computed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from medseg.prediction import batch
from medseg.prediction.batch import run_overlapped

LIMIT_S = 60.0


class Log:
    """Record of events in their order; a wait for an event fails after a limit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.events: list[str] = []

    def add(self, event: str) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, event: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, LIMIT_S), (
                f"{event} is missing in {self.events}"
            )

    def before(self, first: str, second: str) -> bool:
        return self.events.index(first) < self.events.index(second)


def test_reading_and_finishing_go_on_while_a_case_is_computed() -> None:
    """Each step waits for the others, so that this test would time out without an overlap."""
    log = Log()

    def read(case: int, is_ahead: bool) -> str:
        assert is_ahead == (case > 0)
        if is_ahead:
            log.wait_for(f"compute {case - 1}")
        log.add(f"read {case}")
        return f"scan {case}"

    def compute(case: int, scan: str) -> str:
        assert scan == f"scan {case}"
        assert threading.current_thread() is threading.main_thread()
        log.add(f"compute {case}")
        if case < 3:
            log.wait_for(f"read {case + 1}")
        if case > 0:
            log.wait_for(f"finish {case - 1}")
        log.add(f"computed {case}")
        return f"labels {case}"

    def finish(case: int, labels: str) -> int:
        assert labels == f"labels {case}"
        if case < 3:
            log.wait_for(f"compute {case + 1}")
        log.add(f"finish {case}")
        return 10 * case

    assert run_overlapped(range(4), read, compute, finish) == [0, 10, 20, 30]
    for step in ("read", "compute", "finish"):
        assert [event for event in log.events if event.startswith(f"{step} ")] == [
            f"{step} {case}" for case in range(4)
        ]


def test_one_case_ahead_and_one_behind_at_most() -> None:
    """Also if steps take no time: reading is one case ahead of computing, finishing one behind."""
    log = Log()
    events = {
        "read": lambda case, _: log.add(f"read {case}") or case,
        "compute": lambda case, _: log.add(f"compute {case}") or case,
        "finish": lambda case, _: log.add(f"finish {case}") or case,
    }
    run_overlapped(range(20), **events)
    for case in range(18):
        assert log.before(f"compute {case}", f"read {case + 2}")
        assert log.before(f"finish {case}", f"compute {case + 2}")


def test_what_a_case_held_is_let_go_once_it_is_done() -> None:
    class Large:
        pass

    arrays: list[weakref.ref[Large]] = []

    def make(*_: object) -> Large:
        large = Large()
        arrays.append(weakref.ref(large))
        return large

    def compute(case: int, scan: Large) -> Large:
        gc.collect()
        # The scan that is computed, perhaps the next one, and the labels of the last one.
        assert sum(array() is not None for array in arrays) <= 3
        return make()

    run_overlapped(range(6), make, compute, lambda *_: 0)
    gc.collect()
    assert not any(array() for array in arrays)


def test_what_is_not_read_ahead_is_read_in_its_turn() -> None:
    tries: list[tuple[int, bool]] = []

    def read(case: int, is_ahead: bool) -> int | None:
        tries.append((case, is_ahead))
        return None if is_ahead and case == 1 else case

    assert run_overlapped(
        range(3), read, lambda case, loaded: loaded, lambda case, computed: computed
    ) == [0, 1, 2]
    assert tries == [(0, False), (1, True), (1, False), (2, True)]


STEPS = ("read", "compute", "finish")


@pytest.mark.parametrize("failing", STEPS)
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_an_error_or_an_interrupt_ends_the_whole_after_what_was_computed_before(
    failing: str, error: BaseException
) -> None:
    """If case 2 ends the batch, the cases before it are finished, and no later one is computed."""
    log = Log()

    def step(name: str) -> Callable[..., int]:
        def run(case: int, *_: object) -> int:
            if (name, case) == (failing, 2):
                raise error
            log.add(f"{name} {case}")
            return case

        return run

    with pytest.raises(type(error)) as caught:
        run_overlapped(range(6), step("read"), step("compute"), step("finish"))
    assert caught.value is error
    assert {"finish 0", "finish 1"} <= set(log.events)
    assert "finish 2" not in log.events
    assert not any(f"compute {case}" in log.events for case in (4, 5))


def test_an_interrupt_does_not_wait_for_a_scan_that_is_being_read() -> None:
    release = threading.Event()

    def read(case: int, is_ahead: bool) -> int:
        if is_ahead:
            release.wait(LIMIT_S)
        return case

    def compute(case: int, _: int) -> int:
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            run_overlapped(range(2), read, compute, lambda *_: 0)
        assert not release.is_set(), "nobody has let the reader go on"
        assert [
            thread.daemon for thread in threading.enumerate() if thread.name.endswith("(run)")
        ] == [True]
    finally:
        release.set()


def test_an_interrupt_lets_the_file_that_is_being_written_become_whole() -> None:
    log = Log()

    def finish(case: int, _: int) -> int:
        log.wait_for("interrupted")
        log.add(f"finish {case}")
        return 0

    def compute(case: int, _: int) -> int:
        if case == 1:
            log.add("interrupted")
            raise KeyboardInterrupt
        return case

    with pytest.raises(KeyboardInterrupt):
        run_overlapped(range(3), lambda case, _: case, compute, finish)
    assert log.events == ["interrupted", "finish 0"]


def test_no_cases_are_no_work() -> None:
    assert run_overlapped([], lambda *_: 0, lambda *_: 0, lambda *_: 0) == []


def test_an_interrupt_between_two_cases_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    start = batch._start

    def interrupted(*arguments: Any, daemon: bool) -> Any:
        started.append(daemon)
        if started.count(False) == 2:  # the second case is about to be finished
            raise KeyboardInterrupt
        return start(*arguments, daemon=daemon)

    monkeypatch.setattr(batch, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_overlapped([1, 2, 3], lambda case, _: case, lambda case, _: case, lambda case, _: case)
