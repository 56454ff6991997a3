"""A request to stop is recorded, and ends the process at once where nothing would be lost."""

from __future__ import annotations

import signal
import threading

import pytest

from medseg.training.preemption import SIGNALS, Preempted, StopRequest


def test_a_request_is_recorded_and_ends_a_safe_process_once() -> None:
    stop = StopRequest()
    assert (stop.is_asked, stop.is_safe) == (False, False)
    stop.end_at_once()
    with pytest.raises(Preempted):
        stop._note(signal.SIGTERM, None)
    assert stop.is_asked
    stop._note(signal.SIGTERM, None)  # while it ends, a second signal changes nothing


def test_a_request_that_came_before_ends_a_process_when_it_becomes_safe() -> None:
    stop = StopRequest()
    stop._note(signal.SIGTERM, None)
    assert (stop.is_asked, stop.is_safe) == (True, False)
    with pytest.raises(Preempted):
        stop.end_at_once()


def test_all_signals_of_clusters_are_handled_in_the_main_thread_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handled: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    # Another test may have left its handler, and a shell's background ignores interrupts.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    stop = StopRequest()
    thread = threading.Thread(target=stop.install)
    thread.start()
    thread.join()
    assert handled == []
    stop.install()
    assert handled == [*SIGNALS, signal.SIGINT]
    assert list(SIGNALS) == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def test_a_request_that_follows_an_interrupt_is_recorded_and_disturbs_nothing() -> None:
    stop = StopRequest()
    stop.end_at_once()
    with pytest.raises(KeyboardInterrupt):
        stop._interrupt(signal.SIGINT, None)
    stop._note(signal.SIGTERM, None)
    assert stop.is_asked


def test_ignored_interrupts_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    StopRequest().install()
    assert signal.SIGINT not in handled
