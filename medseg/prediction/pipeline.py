"""Cases that take three steps, overlapped: the next is read while the present one is computed and the last one is finished."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")
Computed = TypeVar("Computed")
Answer = TypeVar("Answer")


def overlapped(
    cases: Sequence[Case],
    read: Callable[[Case, bool], Any],
    compute: Callable[[Case, Any], Computed],
    finish: Callable[[Case, Computed], Answer],
) -> list[Answer]:
    """Do the steps of all cases, each step in the order of the cases.

    Two cases at most are there beside the one that is computed: one that is read ahead and one that is finished. An interrupt lets the
    case that is being finished come to its end, and gives up the one that is being read.

    Args:
        cases: What is to be done.
        read: Reads a case; told whether it is ahead of its turn, in a thread of its own, where it may answer None: not before its turn.
        compute: Takes what was read; runs in the thread of the caller.
        finish: Runs in a thread of its own, one case after the other.

    Returns:
        What `finish` answers, by case.

    Raises:
        Exception: Whatever a step raises ends the whole at the case's turn: errors of single cases are values.
    """
    answers: list[Answer] = []
    ahead: _Background[Any] | None = None
    finishing: _Background[Answer] | None = None
    try:
        for index, case in enumerate(cases):
            loaded = None if ahead is None else ahead.result()
            if loaded is None:
                loaded = read(case, False)
            # A daemon: reading leaves nothing behind, so nobody need wait for its end.
            ahead = _Background(read, cases[index + 1], True, is_daemon=True) if index + 1 < len(cases) else None
            computed = compute(case, loaded)
            del loaded
            if finishing is not None:
                last, finishing = finishing, None  # asked once, also where an interrupt comes now
                answers.append(last.result())
            finishing = _Background(finish, case, computed, is_daemon=False)
            del computed
    finally:
        if finishing is not None:
            answers.append(finishing.result())
    return answers


class _Background(Generic[Answer]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Answer], *arguments: Any, is_daemon: bool) -> None:
        self._answers: list[Answer] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call, *arguments), daemon=is_daemon)
        self._thread.start()

    def _run(self, call: Callable[..., Answer], *arguments: Any) -> None:
        try:
            self._answers.append(call(*arguments))
        except BaseException as error:
            self._error = error

    def result(self) -> Answer:
        """Wait for the answer and hand it over; what the call raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._answers.pop()
