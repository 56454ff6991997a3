"""Budget benchmark: its budgets run from the smallest to the largest peak."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.budgets import list_budgets


@pytest.mark.parametrize(("number", "budgets"), [(1, [10]), (2, [10, 40]), (4, [10, 20, 30, 40])])
def test_budgets_lie_at_equal_distances(number: int, budgets: list[int]) -> None:
    sets: Any = [(None, SimpleNamespace(peak=peak)) for peak in (40, 25, 10)]
    assert list_budgets(sets, number) == budgets
