"""Paired differences between the scores of two results on the same cases, with a confidence interval."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
METHOD = "95 % interval of Student's t distribution over the paired differences of the cases"


class Difference(NamedTuple):
    """Difference of a score to a baseline over the cases that both have.

    Attributes:
        cases: Number of pairs; a case whose score is not finite on one side is no pair.
        baseline_mean: Mean score of the baseline over these cases.
        mean: Mean score over these cases.
        difference: `mean` minus `baseline_mean`.
        ci95_low: Lower end of the confidence interval of the difference; None for a single pair.
        ci95_high: Upper end; None for a single pair.
        better: Number of cases with a better score than the baseline's.
        worse: Number of cases with a worse one.
    """

    cases: int
    baseline_mean: float
    mean: float
    difference: float
    ci95_low: float | None
    ci95_high: float | None
    better: int
    worse: int


FORMATS = dict.fromkeys(("baseline_mean", "mean", "difference", "ci95_low", "ci95_high"), ".6f")
"""Formats of a CSV table with the fields of `Difference`."""


def paired_difference(scores: Mapping[Any, float], baseline: Mapping[Any, float], better: int = 1) -> Difference | None:
    """Compare two results case by case.

    Cases count as independent: two scans of one patient make the interval too narrow.

    Args:
        scores: Case to its score.
        baseline: Case to the score of the baseline; only common cases count.
        better: 1 when more is better, -1 when less is.

    Returns:
        The difference, or None without a common case with two finite scores.

    Source:
        Student's t for paired samples, as in `scipy.stats.ttest_rel(...).confidence_interval()`.
    """
    from scipy.stats import sem, t

    pairs = np.array([(scores[case], baseline[case]) for case in scores if case in baseline], dtype=float).reshape(-1, 2)
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    if not len(pairs):
        return None
    gains = pairs[:, 0] - pairs[:, 1]
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1) * sem(gains)) if len(gains) > 1 else None
    mean = float(gains.mean())
    return Difference(
        cases=len(gains),
        baseline_mean=float(pairs[:, 1].mean()),
        mean=float(pairs[:, 0].mean()),
        difference=mean,
        ci95_low=None if half is None else mean - half,
        ci95_high=None if half is None else mean + half,
        better=int(np.count_nonzero(better * gains > 0)),
        worse=int(np.count_nonzero(better * gains < 0)),
    )


def write_difference(one: Difference) -> str:
    """Format a difference with its interval.

    Example:
        >>> write_difference(Difference(5, 0.9, 0.91, 0.01, 0.004, 0.016, 4, 1))
        '+0.0100 [+0.0040, +0.0160]'
    """
    interval = "" if one.ci95_low is None else f" [{one.ci95_low:+.4f}, {one.ci95_high:+.4f}]"
    return f"{one.difference:+.4f}{interval}"
