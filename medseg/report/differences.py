"""Paired differences between the scores of two results on the same cases, by patient."""

from collections.abc import Collection, Mapping
from statistics import fmean
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
METHOD = (
    "95 % interval of Student's t distribution and p of Wilcoxon's signed-rank test over the "
    "differences of the patients, each the mean over the cases of a patient"
)
# Decimals to which gains are rounded before they are compared: smaller gains are rounding errors of
# means. They count as zero, and gains that are equal after rounding are ties in the rank test.
_DIGITS = 9


class Difference(NamedTuple):
    """Difference of a score to a baseline over the cases that both have.

    A patient counts once, with the mean over the cases: scans of one patient are not independent.

    Attributes:
        cases: Number of pairs; a case whose score is not finite on one side is no pair.
        baseline_mean: Mean score of the baseline over the patients.
        mean: Mean score over the patients.
        difference: `mean` minus `baseline_mean`.
        ci95_low: Lower end of the confidence interval of the difference; None for a single patient.
        ci95_high: Upper end of the interval; None for a single patient.
        better: Number of cases with a better score than the baseline's.
        worse: Number of cases with a worse score.
        patients: Number of patients.
        wilcoxon_p: Two-sided p of Wilcoxon's signed-rank test over the patients. Patients with
            equal means are left out, and p is 1 where all are equal. With n patients p is at least
            2 / 2^n: 0.06 with five, 0.03 with six.
    """

    cases: int
    baseline_mean: float
    mean: float
    difference: float
    ci95_low: float | None
    ci95_high: float | None
    better: int
    worse: int
    patients: int
    wilcoxon_p: float


_SCORES = ("baseline_mean", "mean", "difference", "ci95_low", "ci95_high")
# Formats of a CSV table with the fields of `Difference`.
FORMATS = {**dict.fromkeys(_SCORES, ".6f"), "wilcoxon_p": ".4g"}


def paired_difference(
    scores: Mapping[str, float],
    baseline: Mapping[str, float],
    direction: int = 1,
    patients: Mapping[str, str] | None = None,
) -> Difference | None:
    """Compare two results patient by patient.

    The patients count equally, whatever the number of their cases. The mean of a patient with more
    cases varies less; Student's t then keeps its level or is slightly conservative (Ibragimov and
    Müller, Journal of Business & Economic Statistics 28 (2010) 453).

    Args:
        scores: Case to its score.
        baseline: Case to the score of the baseline; only common cases count.
        direction: 1 when more is better, -1 when less is better.
        patients: Case to its patient; a case that is missing is a patient of its own.

    Returns:
        The difference, or None where no case has two finite scores.

    Source:
        Student's t for paired samples, as in `scipy.stats.ttest_rel(...).confidence_interval()`,
        and `scipy.stats.wilcoxon`, exact for up to 50 patients, with ties for up to 13.
    """
    from scipy.stats import sem, t

    pairs = _finite_pairs(scores, baseline)
    if not pairs:
        return None
    # Means of patients: with two scans of each of ten patients, cases as independent samples give
    # 14 % false positives instead of 5 %, see `docs/decisions/false_positives.csv`.
    means = _patient_means(pairs, patients or {})
    case_gains = [score - baseline_score for score, baseline_score in pairs.values()]
    # Above 0 where the case is better, whether a higher or a lower score is better.
    case_merits = direction * np.round(case_gains, _DIGITS)
    gains = means[:, 0] - means[:, 1]
    mean_gain = float(gains.mean())
    ci95_low = None
    ci95_high = None
    # A single patient has no variance.
    if len(gains) > 1:
        # Half width = quantile of t * standard error of the mean.
        quantile = t.ppf((1 + CONFIDENCE) / 2, len(gains) - 1)
        half_width = float(quantile * sem(gains))
        ci95_low = mean_gain - half_width
        ci95_high = mean_gain + half_width
    return Difference(
        cases=len(pairs),
        baseline_mean=float(means[:, 1].mean()),
        mean=float(means[:, 0].mean()),
        difference=mean_gain,
        ci95_low=ci95_low,
        ci95_high=ci95_high,
        better=int(np.count_nonzero(case_merits > 0)),
        worse=int(np.count_nonzero(case_merits < 0)),
        patients=len(gains),
        wilcoxon_p=_wilcoxon_p(gains),
    )


def is_established(
    scores: Mapping[str, float],
    others: Mapping[str, float],
    patients: Mapping[str, str],
    num_comparisons: int = 1,
) -> bool:
    """Whether the scores of a result are better than those of another by more than chance.

    A paired t-test over the patients at a level of 5 % decides.

    Args:
        scores: Case to its score; more is better.
        others: Case to its score in the other result; only common cases count.
        patients: Case to its patient; a case that is missing is a patient of its own.
        num_comparisons: Number of comparisons that could have been made; the level is divided by it
            (Bonferroni).

    Returns:
        True where the scores are established to be better; False with fewer than two patients.
    """
    from scipy.stats import sem, t

    pairs = _finite_pairs(scores, others)
    if not pairs:
        return False
    means = _patient_means(pairs, patients)
    gains = np.round(means[:, 0] - means[:, 1], _DIGITS)
    if len(gains) < 2:
        return False
    # Two-sided, although only a gain counts: as strict as the 95 % intervals that reports show.
    level = (1 - CONFIDENCE) / num_comparisons
    least_t = t.ppf(1 - level / 2, len(gains) - 1)
    # t = mean / standard error, without a division by 0 where all gains are equal.
    return bool(gains.mean() > least_t * sem(gains))


def case_means(scores: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Average the scores of each case over its labels or regions.

    Args:
        scores: Case and label, or case and region, to the score.
    """
    scores_by_case: dict[str, list[float]] = {}
    for (case, _), score in scores.items():
        scores_by_case.setdefault(case, []).append(score)
    return {case: fmean(case_scores) for case, case_scores in scores_by_case.items()}


def describe_patients(cases: Collection[str], patients: Mapping[str, str]) -> str:
    """Say how many patients the cases come from, and how they count.

    Example:
        >>> describe_patients(["a_1", "a_2", "b"], {"a_1": "a", "a_2": "a"})
        '3 cases of 2 patients; the cases of a patient count together, by their mean'
        >>> describe_patients(["a", "b"], {})
        'each of the 2 cases counts as a patient of its own: no patient is named for several cases'
        >>> describe_patients(["a"], {})
        'a single case'
    """
    if len(cases) == 1:
        return "a single case"
    num_patients = len({patients.get(case, case) for case in cases})
    if num_patients == len(cases):
        return (
            f"each of the {len(cases)} cases counts as a patient of its own: "
            "no patient is named for several cases"
        )
    noun = "patient" if num_patients == 1 else "patients"
    return (
        f"{len(cases)} cases of {num_patients} {noun}; "
        "the cases of a patient count together, by their mean"
    )


def format_difference(difference: Difference) -> str:
    """Format a difference with its interval, if it has one.

    Example:
        >>> format_difference(Difference(5, 0.9, 0.91, 0.01, 0.004, 0.016, 4, 1, 5, 0.0625))
        '+0.0100 [+0.0040, +0.0160]'
    """
    text = f"{difference.difference:+.4f}"
    if difference.ci95_low is None:
        return text
    return f"{text} [{difference.ci95_low:+.4f}, {difference.ci95_high:+.4f}]"


def _finite_pairs(
    scores: Mapping[str, float], baseline: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Map each case with a finite score in both results to the two scores."""
    pairs = {case: (scores[case], baseline[case]) for case in scores if case in baseline}
    return {case: pair for case, pair in pairs.items() if np.isfinite(pair).all()}


def _patient_means(
    pairs: Mapping[str, tuple[float, float]], patients: Mapping[str, str]
) -> np.ndarray:
    """Average the scores of each patient over the cases.

    Returns:
        Mean score, and mean score of the baseline, of each patient, (patients, 2).
    """
    pairs_by_patient: dict[str, list[tuple[float, float]]] = {}
    for case, pair in pairs.items():
        # A case without a patient is a patient of its own.
        patient = patients.get(case, case)
        pairs_by_patient.setdefault(patient, []).append(pair)
    means = []
    for patient_pairs in pairs_by_patient.values():
        scores, baseline_scores = zip(*patient_pairs, strict=True)
        means.append((fmean(scores), fmean(baseline_scores)))
    return np.array(means)


def _wilcoxon_p(gains: np.ndarray) -> float:
    """Compute the two-sided p of the signed-rank test over gains other than 0; 1 without any."""
    from scipy.stats import wilcoxon

    rounded_gains = np.round(gains, _DIGITS)
    nonzero_gains = rounded_gains[rounded_gains != 0]
    if len(nonzero_gains) == 0:
        return 1.0
    return float(wilcoxon(nonzero_gains).pvalue)
