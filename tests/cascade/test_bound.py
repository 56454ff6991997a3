from __future__ import annotations

import numpy as np
import pytest

from medseg.cascade.bound import DiceBound, calibrate, count_covered
from medseg.inference.segmentation import StatedBound


def patients(count: int, rng: np.random.Generator) -> dict[str, list[tuple[float, float]]]:
    """Patients of one or two regions whose errors follow the agreement loosely, and each other."""
    found = {}
    for n in range(count):
        skill = rng.exponential(1.0)
        agreements = rng.uniform(0.8, 1.0, rng.integers(1, 3))
        found[str(n)] = [
            (a, 1 - min(1.0, skill * (1.02 - a) * rng.uniform(0.1, 1.0))) for a in agreements
        ]
    return found


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_new_patients_reach_the_bound_as_often_as_stated(level: float) -> None:
    """Coverage over calibrations lies between the level and one patient more (Lei, theorem 2.2)."""
    rng, hits, trials, count = np.random.default_rng(0), 0, 4000, 19
    for _ in range(trials):
        bound = calibrate(patients(count, rng), level)
        assert bound is not None
        hits += all(dice >= bound.at(agreement) for agreement, dice in patients(1, rng)["0"])
    spread = 4 * np.sqrt(level * (1 - level) / trials)
    assert level - spread < hits / trials < level + 1 / (count + 1) + spread


def test_the_bound_is_the_worst_ratio_but_those_that_the_level_leaves_out() -> None:
    scores = {str(n): [(0.98, 1 - 0.04 * n / 10), (0.5, 1.0)] for n in range(1, 11)}
    bound = calibrate(scores, 0.9)  # of ten patients the largest
    assert bound is not None
    assert (bound.num_patients, bound.level) == (10, 0.9)
    assert bound.at(0.98) == pytest.approx(0.96)
    assert bound.at(0.93) == pytest.approx(1 - 0.09)
    assert bound.at(0.0) == 0.0
    looser = calibrate(scores, 0.5)
    assert looser is not None
    assert looser.at(0.98) == pytest.approx(1 - 0.04 * 0.6)


def test_too_few_patients_give_no_bound() -> None:
    rng = np.random.default_rng(1)
    assert calibrate(patients(8, rng), 0.9) is None
    assert calibrate(patients(9, rng), 0.9) is not None
    assert calibrate({}, 0.9) is None


def test_each_group_is_judged_by_the_others() -> None:
    def group(first: int, error: float, count: int = 10) -> dict[str, list[tuple[float, float]]]:
        return {str(first + n): [(0.9, 1 - error - 0.001 * n)] for n in range(count)}

    # Of the ten others the tenth in order is the largest error: 0.059, then 0.109.
    assert count_covered([group(0, 0.05), group(10, 0.1)], 0.9) == 10
    assert count_covered([group(0, 0.05), group(10, 0.0545)], 0.9) == 10 + 5
    assert count_covered([group(0, 0.05), group(10, 0.05, count=8)], 0.9) is None


def test_a_bound_has_the_offset_of_its_calibration() -> None:
    """At full agreement it is 1 - factor · offset; 0.01 of disagreement costs factor / 100."""
    for offset in (0.02, 0.1):
        bound = DiceBound(factor=2.0, level=0.9, num_patients=26, offset=offset)
        assert bound.at(1.0) == pytest.approx(1 - 2 * offset)
        assert bound.at(0.99) == pytest.approx(bound.at(1.0) - 0.02)
    assert DiceBound(factor=10.0, level=0.9, num_patients=26).at(0.5) == 0.0


@pytest.mark.parametrize(
    ("level", "num_patients", "sentence"),
    [
        (0.9, 26, "at least 0.57 in 9 of 10 patients (26 patients)"),
        (0.95, 19, "at least 0.57 in 19 of 20 patients (19 patients)"),
        (0.999, 1, "at least 0.57 in 999 of 1000 patients (1 patient)"),
    ],
)
def test_a_stated_bound_says_the_level_and_the_patients_of_its_calibration(
    level: float, num_patients: int, sentence: str
) -> None:
    bound = DiceBound(0.43, level, num_patients, offset=1.0).stated(1.0)
    assert (bound.value, bound.level, bound.patients) == (0.57, level, num_patients)
    assert str(bound) == sentence


def test_a_stated_bound_is_never_rounded_up() -> None:
    bound = DiceBound(1.0, 0.9, 26, offset=0.00009).stated(1.0)
    assert bound.value == 0.9999
    assert str(bound).startswith("at least 0.99 in")


@pytest.mark.parametrize("numbers", [(1.1, 0.9, 26), (0.9, 1.0, 26), (0.9, 0.9, 0)])
def test_a_bound_that_no_calibration_gives_is_refused(numbers: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="expected a value"):
        StatedBound(*numbers)


@pytest.mark.parametrize(
    ("factor", "level", "num_patients", "offset", "is_possible"),
    [
        (0.0, 0.9, 1, 0.02, True),
        (-0.1, 0.9, 1, 0.02, False),
        (float("inf"), 0.9, 1, 0.02, False),
        (1.0, 0.0, 1, 0.02, False),
        (1.0, 1.0, 1, 0.02, False),
        (1.0, 0.9, 0, 0.02, False),
        (1.0, 0.9, 1, 0.0, False),
        (1.0, 0.9, 1, float("inf"), False),
    ],
)
def test_numbers_of_a_bound_lie_in_their_ranges(
    factor: float, level: float, num_patients: int, offset: float, is_possible: bool
) -> None:
    if is_possible:
        assert DiceBound(factor, level, num_patients, offset).at(0.5) == 1.0
        return
    with pytest.raises(ValueError, match="a bound on Dice needs"):
        DiceBound(factor, level, num_patients, offset)


@pytest.mark.parametrize(
    ("value", "level", "is_possible"),
    [(0.0, 0.9, True), (1.0, 0.9, True), (-0.1, 0.9, False), (0.5, 0.0, False)],
)
def test_a_stated_value_is_a_share(value: float, level: float, is_possible: bool) -> None:
    if is_possible:
        assert StatedBound(value, level, 1).value == value
        return
    with pytest.raises(ValueError, match="expected a value"):
        StatedBound(value, level, 1)


def test_a_patient_counts_with_the_worst_region_and_a_bound_may_be_reached_exactly() -> None:
    scores = {str(n): [(1.0, 1.0), (1.0, 0.98)] for n in range(9)}
    bound = calibrate(scores, 0.9)
    assert bound is not None
    assert bound.factor == pytest.approx(1.0)
    equal = {str(n): [(0.75, 0.5)] for n in range(9)}  # all numbers are exact in binary
    assert count_covered([equal, {f"other {n}": [(0.75, 0.5)] for n in range(9)}], 0.9) == 18
