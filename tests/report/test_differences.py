"""Paired differences: SciPy's interval and rank test over patients, uncounted pairs."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from medseg.report.differences import format_difference, is_established, paired_difference


@pytest.mark.parametrize("number", [2, 5, 40])
def test_the_interval_is_that_of_scipy(number: int) -> None:
    rng = np.random.default_rng(number)
    baseline = {f"case {n}": float(rng.normal(0.9, 0.05)) for n in range(number)}
    scores = {
        case: dice + float(rng.exponential(0.02)) - 0.01
        for case, dice in reversed(baseline.items())
    }
    difference = paired_difference(scores, baseline)
    assert difference is not None
    expected = stats.ttest_rel(
        [scores[case] for case in baseline], list(baseline.values())
    ).confidence_interval(0.95)
    assert (difference.ci95_low, difference.ci95_high) == pytest.approx(
        (expected.low, expected.high), abs=1e-12
    )
    assert difference.difference == pytest.approx(difference.mean - difference.baseline_mean)
    assert difference.better + difference.worse == difference.cases == number


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        difference = paired_difference(
            dict(enumerate(rng.normal(0.01, 0.03, 8))), dict.fromkeys(range(8), 0.0)
        )
        assert difference is not None
        assert difference.ci95_low is not None
        assert difference.ci95_high is not None
        hits += difference.ci95_low <= 0.01 <= difference.ci95_high
    assert 0.92 <= hits / 400 <= 0.98


def test_only_common_cases_with_finite_scores_are_pairs() -> None:
    difference = paired_difference(
        {"a": 3.0, "b": math.inf, "c": 1.0, "d": 2.0},
        {"a": 5.0, "b": 1.0, "c": 1.0, "e": 0.0},
        direction=-1,
    )
    assert difference is not None
    assert (difference.cases, difference.difference, difference.better, difference.worse) == (
        2,
        -1.0,
        1,
        0,
    )
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_one_pair_has_no_interval_and_equal_differences_one_of_no_width() -> None:
    single_pair = paired_difference({"a": 0.5}, {"a": 0.25})
    assert single_pair is not None
    assert (single_pair.ci95_low, single_pair.ci95_high) == (None, None)
    assert format_difference(single_pair) == "+0.2500"
    same = paired_difference({"a": 0.5, "b": 0.75}, {"a": 0.25, "b": 0.5})
    assert same is not None
    assert (same.ci95_low, same.ci95_high) == (0.25, 0.25)


def false_positives(counts: list[int], draws: int) -> tuple[float, float]:
    """Share of draws without a difference that the interval and the rank test call different.

    Args:
        counts: Number of scans of each patient.
        draws: Number of simulated comparisons; scans of a patient share four fifths of the
            variance.
    """
    rng = np.random.default_rng(sum(counts))
    patients = {
        f"{patient}_{scan}": str(patient)
        for patient, number in enumerate(counts)
        for scan in range(number)
    }
    baseline = dict.fromkeys(patients, 0.9)
    outside = significant = 0
    for _ in range(draws):
        shared = rng.normal(0.0, math.sqrt(0.8), len(counts))
        patient_effect = rng.normal(0.0, math.sqrt(0.2), len(patients))
        gains = shared[[int(patient) for patient in patients.values()]] + patient_effect
        scores = {
            case: 0.9 + 0.01 * gain for case, gain in zip(patients, gains.tolist(), strict=True)
        }
        difference = paired_difference(scores, baseline, patients=patients)
        assert difference is not None
        assert difference.ci95_low is not None
        assert difference.ci95_high is not None
        outside += not difference.ci95_low <= 0.0 <= difference.ci95_high
        significant += difference.wilcoxon_p < 0.05
    return outside / draws, significant / draws


def test_scans_of_one_patient_do_not_make_a_difference() -> None:
    """As independent cases, five scans of each patient gave 36 % false positives."""
    interval, rank = false_positives([5] * 10, 400)
    assert 0.02 <= interval <= 0.085
    assert rank <= 0.085


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("num_patients", [6, 10, 20])
@pytest.mark.parametrize("scans", [[1], [2], [5], [1, 1, 2, 3, 12]])
def test_false_positives_are_as_frequent_as_stated(num_patients: int, scans: list[int]) -> None:
    counts = [scans[patient % len(scans)] for patient in range(num_patients)]
    interval, rank = false_positives(counts, 2000)
    # Four standard errors of 2,000 draws are 0.0195.
    assert 0.03 <= interval <= 0.0695
    assert rank <= 0.0695, "exact, and so careful with few patients"


def test_a_patient_counts_once_whatever_the_number_of_scans() -> None:
    patients = {"a_1": "a", "a_2": "a", "a_3": "a", "b": "b", "c": "c"}
    baseline = dict.fromkeys(patients, 0.5)
    scores = {"a_1": 0.7, "a_2": 0.8, "a_3": 0.9, "b": 0.4, "c": 0.5}
    difference = paired_difference(scores, baseline, patients=patients)
    assert difference is not None
    assert (difference.cases, difference.patients, difference.better, difference.worse) == (
        5,
        3,
        3,
        1,
    )
    gains = [0.3, -0.1, 0.0]
    interval = stats.ttest_1samp(gains, 0.0).confidence_interval(0.95)
    assert difference.difference == pytest.approx(np.mean(gains))
    assert (difference.ci95_low, difference.ci95_high) == pytest.approx(
        (interval.low, interval.high)
    )
    assert difference.wilcoxon_p == pytest.approx(stats.wilcoxon([0.3, -0.1]).pvalue), (
        "equal patients have no rank"
    )
    alone = paired_difference(scores, baseline, patients=dict.fromkeys(patients, "a"))
    assert alone is not None
    assert (alone.patients, alone.ci95_low, alone.wilcoxon_p) == (1, None, 1.0)


@pytest.mark.parametrize("number", [5, 6, 13, 60])
def test_the_rank_test_is_that_of_scipy(number: int) -> None:
    gains = np.random.default_rng(number).normal(0.01, 0.03, number)
    difference = paired_difference(
        dict(zip(map(str, range(number)), gains, strict=True)), {str(n): 0.0 for n in range(number)}
    )
    assert difference is not None
    assert difference.wilcoxon_p == pytest.approx(stats.wilcoxon(gains).pvalue, abs=1e-6)


def test_rounding_errors_of_equal_scores_are_no_difference() -> None:
    """The mean of 0.1, 0.2 and 0.3 is 0.2 but for the last digit."""
    patients = {f"{patient}_{scan}": patient for patient in "abcdefg" for scan in range(3)}
    baseline = dict.fromkeys(patients, 0.2)
    scores = {case: (1 + int(case[-1])) / 10 for case in patients}
    difference = paired_difference(scores, baseline, patients=patients)
    assert difference is not None
    assert difference.wilcoxon_p == 1.0
    assert not is_established(scores, baseline, patients)
    assert not is_established(baseline, baseline, patients)
    # The mean over the runs of a setting, (0.1 + 0.7) / 2, is a little below 0.4.
    of_runs = paired_difference({"a": fmean([0.1, 0.7]), "b": 0.5}, {"a": 0.4, "b": 0.4})
    assert of_runs is not None
    assert (of_runs.better, of_runs.worse) == (1, 0)


def test_a_better_result_is_established_by_patients_and_not_by_scans() -> None:
    rng = np.random.default_rng(1)
    patients = {f"{patient}_{scan}": patient for patient in "abc" for scan in range(20)}
    gains = {"a": 0.03, "b": 0.02, "c": -0.01}
    baseline = dict.fromkeys(patients, 0.9)
    scores = {
        case: 0.9 + gains[patient] + rng.normal(0.0, 0.001) for case, patient in patients.items()
    }
    assert is_established(scores, baseline, {})
    assert not is_established(scores, baseline, patients)
    clear_gains = {"a": 0.03, "b": 0.02, "c": 0.025}  # p = 0.013
    clear = {case: 0.9 + clear_gains[patient] for case, patient in patients.items()}
    assert is_established(clear, baseline, patients)
    assert not is_established(baseline, clear, patients), "worse is not better"
    assert not is_established(clear, baseline, patients, num_comparisons=10)
    assert not is_established({"a_0": 0.99}, baseline, patients), "one patient establishes nothing"


def test_established_means_a_two_sided_p_of_scipy_below_the_level() -> None:
    rng = np.random.default_rng(2)
    baseline = {f"case {n}": 0.8 for n in range(5)}
    answers = set()
    for num_comparisons in (1, 3):
        for _ in range(60):
            scores = {case: dice + float(rng.normal(0.02, 0.02)) for case, dice in baseline.items()}
            paired_test = stats.ttest_rel(list(scores.values()), list(baseline.values()))
            expected = bool(
                paired_test.pvalue < 0.05 / num_comparisons and paired_test.statistic > 0
            )
            assert is_established(scores, baseline, {}, num_comparisons) == expected
            answers.add(expected)
    assert answers == {True, False}
