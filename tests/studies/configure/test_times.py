"""Steps within the hours: the largest number that fits, or the hours that would be enough."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from medseg.errors import UserError
from medseg.studies.configure.times import PLANNED_SHARE, Costs, Schedule, StageCosts

SINGLE = StageCosts(step_s=0.25, start_s=8.0, peak_gib=0.8)
COARSE = StageCosts(step_s=0.5, start_s=6.0, peak_gib=0.9)
COSTS = Costs(
    stages=(SINGLE,),
    prepare_s=10.0,
    predict_start_s=5.0,
    case_s=2.0,
    score_s=1.5,
    predict_peak_gib=0.7,
)
CASCADE = replace(COSTS, stages=(COARSE, SINGLE))


def test_the_parts_are_those_of_a_cross_validation() -> None:
    # Two folds of seven cases, 100 steps with a batch of two.
    parts = {
        "preparation of the cases": 10.0,
        "training steps": 100.0,
        "start of the trainings": 16.0,
        "validations": 10.0,
        "predictions": 24.0,
        "scores and pictures": 15.5,
    }
    assert Schedule(COSTS, 2, 7).parts([200]) == parts
    # Two trainings a fold, of 60 and of 80 steps.
    both = parts | {"training steps": 2 * (60 * 0.5 + 80 * 0.25), "start of the trainings": 28.0}
    assert Schedule(CASCADE, 2, 7).parts([60, 80]) == both


def test_the_peak_is_that_of_the_part_that_takes_most() -> None:
    assert (COSTS.peak_gib, CASCADE.peak_gib) == (0.8, 0.9)
    assert replace(CASCADE, predict_peak_gib=1.1).peak_gib == 1.1


@pytest.mark.parametrize("hours", [0.05, 0.1, 0.37, 4.0])
@pytest.mark.parametrize("num_folds", [2, 5])
def test_the_steps_are_the_most_that_fit(hours: float, num_folds: int) -> None:
    schedule = Schedule(COSTS, num_folds, 9)
    (steps,) = schedule.steps_within(hours, [1.0], [1])
    planned_s = PLANNED_SHARE * hours * 3600
    assert schedule.total_s([steps]) <= planned_s < schedule.total_s([steps + 1])


def test_both_stages_get_their_shares_of_the_time_for_steps() -> None:
    schedule = Schedule(CASCADE, 2, 9)
    coarse, fine = schedule.steps_within(0.5, [0.25, 0.75], [1, 1])
    planned_s = PLANNED_SHARE * 0.5 * 3600
    assert schedule.total_s([coarse, fine]) <= planned_s < schedule.total_s([coarse + 1, fine + 1])
    assert fine * SINGLE.step_s == pytest.approx(3 * coarse * COARSE.step_s, rel=0.02)


@pytest.mark.parametrize(
    ("costs", "shares", "least_steps"),
    [(COSTS, [1.0], [100]), (CASCADE, [0.25, 0.75], [100, 200])],
    ids=["single", "cascade"],
)
def test_too_few_hours_are_refused_with_those_that_would_do(
    costs: Costs, shares: list[float], least_steps: list[int]
) -> None:
    schedule = Schedule(costs, 5, 9)
    with pytest.raises(UserError, match="the nearest possible wish is hours=") as refused:
        schedule.steps_within(0.01, shares, least_steps)
    nearest = float(re.findall(r"wish is hours=([\d.]+)", str(refused.value))[0])
    steps = schedule.steps_within(nearest, shares, least_steps)
    assert all(number >= least for number, least in zip(steps, least_steps, strict=True))
    with pytest.raises(UserError):
        schedule.steps_within(nearest * 0.85, shares, least_steps)
    # A week is 168 hours: the number is one to type.
    long_schedule = Schedule(replace(costs, prepare_s=1e6), 5, 9)
    with pytest.raises(UserError, match=r"wish is hours=3\d0, or"):
        long_schedule.steps_within(24.0, shares, least_steps)
