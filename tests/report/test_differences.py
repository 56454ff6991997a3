"""Paired differences: SciPy's interval, pairs that do not count, coverage of the interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from medseg.report.differences import paired_difference, write_difference


@pytest.mark.parametrize("number", [2, 5, 40])
def test_the_interval_is_that_of_scipy(number: int) -> None:
    rng = np.random.default_rng(number)
    baseline = {f"case {n}": float(rng.normal(0.9, 0.05)) for n in range(number)}
    scores = {case: dice + float(rng.exponential(0.02)) - 0.01 for case, dice in reversed(baseline.items())}
    found = paired_difference(scores, baseline)
    assert found is not None
    expected = stats.ttest_rel([scores[case] for case in baseline], list(baseline.values())).confidence_interval(0.95)
    assert (found.ci95_low, found.ci95_high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert found.difference == pytest.approx(found.mean - found.baseline_mean)
    assert found.better + found.worse == found.cases == number


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = paired_difference(dict(enumerate(rng.normal(0.01, 0.03, 8))), dict.fromkeys(range(8), 0.0))
        assert found is not None
        assert found.ci95_low is not None
        assert found.ci95_high is not None
        hits += found.ci95_low <= 0.01 <= found.ci95_high
    assert 0.92 <= hits / 400 <= 0.98


def test_only_common_cases_with_finite_scores_are_pairs() -> None:
    found = paired_difference({"a": 3.0, "b": math.inf, "c": 1.0, "d": 2.0}, {"a": 5.0, "b": 1.0, "c": 1.0, "e": 0.0}, better=-1)
    assert found is not None
    assert (found.cases, found.difference, found.better, found.worse) == (2, -1.0, 1, 0)
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_one_pair_has_no_interval_and_equal_differences_one_of_no_width() -> None:
    one = paired_difference({"a": 0.5}, {"a": 0.25})
    assert one is not None
    assert (one.ci95_low, one.ci95_high) == (None, None)
    assert write_difference(one) == "+0.2500"
    same = paired_difference({"a": 0.5, "b": 0.75}, {"a": 0.25, "b": 0.5})
    assert same is not None
    assert (same.ci95_low, same.ci95_high) == (0.25, 0.25)
