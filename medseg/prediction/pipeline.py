"""Batch pipeline: the next case is read while the present one is computed and the last one is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Case = TypeVar("Case")
Computed = TypeVar("Computed")
Answer = TypeVar("Answer")


def run_overlapped(
    cases: Sequence[Case],
    read: Callable[[Case, bool], Any],
    compute: Callable[[Case, Any], Computed],
    finish: Callable[[Case, Computed], Answer],
) -> list[Answer]:
    """Run the three steps of all cases, each step in the order of the cases.

    Beside the computed case at most two others are in memory: one that is read ahead and one that is finished. An interrupt waits for
    the case that is being finished, and abandons the one that is being read.

    Args:
        cases: The cases.
        read: Reads a case; the flag says whether it is ahead of its turn, in a thread of its own. There it may return None, and is
            called again in its turn.
        compute: Takes what was read; runs in the caller's thread.
        finish: Runs in a thread of its own, one case after the other.

    Returns:
        Results of `finish`, by case.

    Raises:
        Exception: The first exception of a step ends the whole; steps must return the errors of single cases as values.
    """
    answers: list[Answer] = []
    ahead: Future[Any] | None = None
    finishing: Future[Answer] | None = None
    try:
        for index, case in enumerate(cases):
            loaded = None if ahead is None else ahead.result()
            ahead = None  # a future keeps its result
            if loaded is None:
                loaded = read(case, False)
            # A daemon thread: reading leaves nothing behind, so an interrupt need not wait for it.
            if index + 1 < len(cases):
                ahead = _start(read, cases[index + 1], True, daemon=True)
            computed = compute(case, loaded)
            del loaded
            if finishing is not None:
                last, finishing = finishing, None  # read once, also where an interrupt comes now
                answers.append(last.result())
                del last
            finishing = _start(finish, case, computed, daemon=False)
            del computed
    finally:
        if finishing is not None:
            answers.append(finishing.result())
    return answers


def _start(call: Callable[..., Answer], *arguments: Any, daemon: bool) -> Future[Answer]:
    """Run a call in a thread of its own; an executor's threads would all be waited for at exit."""
    future: Future[Answer] = Future()

    def run(*arguments: Any) -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, args=arguments, daemon=daemon).start()
    return future
