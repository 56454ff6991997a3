"""Steps within the hours: the largest number that fits, or the hours that would be enough."""

from __future__ import annotations

import re

import pytest

from medseg.errors import UserError
from medseg.studies.configure.times import PLANNED_SHARE, Costs, Schedule

COSTS = Costs(
    step_s=0.25,
    prepare_s=10.0,
    train_start_s=8.0,
    predict_start_s=5.0,
    case_s=2.0,
    score_s=1.5,
    peak_gib=0.8,
)


def test_the_parts_are_those_of_a_cross_validation() -> None:
    # Two folds of seven cases, 100 steps with a batch of two.
    assert Schedule(COSTS, 2, 7).parts(100, 2) == {
        "preparation of the cases": 10.0,
        "training steps": 100.0,
        "start of the trainings": 16.0,
        "validations": 10.0,
        "predictions": 24.0,
        "scores and pictures": 15.5,
    }


@pytest.mark.parametrize("hours", [0.05, 0.1, 0.37, 4.0])
@pytest.mark.parametrize("num_folds", [2, 5])
def test_the_steps_are_the_most_that_fit(hours: float, num_folds: int) -> None:
    schedule = Schedule(COSTS, num_folds, 9)
    steps = schedule.steps_within(hours, 1)
    planned_s = PLANNED_SHARE * hours * 3600
    assert schedule.total_s(steps) <= planned_s < schedule.total_s(steps + 1)


def test_too_few_hours_are_refused_with_those_that_would_do() -> None:
    schedule = Schedule(COSTS, 5, 9)
    with pytest.raises(UserError, match="the nearest possible wish is hours=") as refused:
        schedule.steps_within(0.01, 100)
    nearest = float(re.findall(r"wish is hours=([\d.]+)", str(refused.value))[0])
    assert schedule.steps_within(nearest, 100) >= 100
    with pytest.raises(UserError):
        schedule.steps_within(nearest * 0.85, 100)
