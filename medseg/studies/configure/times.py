"""Time of a cross-validation from measured parts, and the number of steps that fit into it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from medseg.errors import UserError

# Share of the user's hours that is planned. The rest is reserve: a run may end early, but not late.
PLANNED_SHARE = 0.92


@dataclass(frozen=True)
class StageCosts:
    """Measured durations and memory of a stage's training.

    Attributes:
        step_s: One optimiser step on one patch.
        start_s: Start and end of a training, including the validation of one case.
        peak_gib: Peak memory of the training.
    """

    step_s: float
    start_s: float
    peak_gib: float


@dataclass(frozen=True)
class Costs:
    """Measured durations of the parts of a cross-validation, and the peak memory.

    Attributes:
        stages: Costs of each stage's training.
        prepare_s: Preparation of all cases for all stages, which happens once.
        predict_start_s: Start and end of a `predict` command, or of an `evaluate` command.
        case_s: Prediction of a case of mean size; its validation in all stages takes as long.
        score_s: Scores and pictures of a case of mean size.
        predict_peak_gib: Peak memory of a prediction; 0 where none could be measured, see `Pilot`.
    """

    stages: tuple[StageCosts, ...]
    prepare_s: float
    predict_start_s: float
    case_s: float
    score_s: float
    predict_peak_gib: float

    @property
    def peak_gib(self) -> float:
        """Peak memory of all trainings and of a prediction."""
        return max(self.predict_peak_gib, *(stage.peak_gib for stage in self.stages))


@dataclass(frozen=True)
class Schedule:
    """Seconds of a cross-validation by part.

    Attributes:
        costs: Measured durations of the parts.
        num_folds: Number of folds.
        num_cases: Number of cases, each of which is held out in one fold.
    """

    costs: Costs
    num_folds: int
    num_cases: int

    def parts(self, num_patches: Sequence[int]) -> dict[str, float]:
        """List the seconds of each part.

        Args:
            num_patches: Number of patches that a training of each stage sees: optimiser steps times
                batch size.
        """
        costs = self.costs
        steps_s = sum(
            patches * stage.step_s for patches, stage in zip(num_patches, costs.stages, strict=True)
        )
        # The training of a fold validates all held-out cases of the fold once. The validation of
        # the first case is part of `start_s`.
        num_further_validations = max(0, self.num_cases - self.num_folds)
        starts_s = sum(stage.start_s for stage in costs.stages)
        return {
            "preparation of the cases": costs.prepare_s,
            "training steps": self.num_folds * steps_s,
            "start of the trainings": self.num_folds * starts_s,
            "validations": num_further_validations * costs.case_s,
            "predictions": self.num_folds * costs.predict_start_s + self.num_cases * costs.case_s,
            "scores and pictures": costs.predict_start_s + self.num_cases * costs.score_s,
        }

    def total_s(self, num_patches: Sequence[int]) -> float:
        """Compute the seconds of the whole cross-validation, see `parts`."""
        return sum(self.parts(num_patches).values())

    def steps_within(
        self, hours: float, shares: Sequence[float], least_steps: Sequence[int]
    ) -> list[int]:
        """Count the optimiser steps of one patch for which a training of each stage has time.

        Args:
            hours: Time of the whole cross-validation.
            shares: Share of the time for steps that each stage gets.
            least_steps: Fewest steps of a useful training of each stage.

        Raises:
            UserError: If there is time for fewer than `least_steps`; names the hours that suffice.
        """
        stages = self.costs.stages
        other_s = self.total_s([0] * len(stages))
        steps_s = (PLANNED_SHARE * hours * 3600 - other_s) / self.num_folds
        steps = []
        # Number of steps and fewest steps of each stage that has too few.
        lacking = []
        # Seconds for steps in a fold that give each stage its fewest steps.
        needed_steps_s = 0.0
        for stage, share, least in zip(stages, shares, least_steps, strict=True):
            number = math.floor(share * steps_s / stage.step_s)
            steps.append(number)
            if number < least:
                lacking.append((number, least))
            needed_steps_s = max(needed_steps_s, least * stage.step_s / share)
        if not lacking:
            return steps
        number, least = lacking[0]
        needed_hours = (other_s + self.num_folds * needed_steps_s) / PLANNED_SHARE / 3600
        # Rounded up to two significant digits; `digit` is one unit in the second digit.
        digit = 10 ** (math.floor(math.log10(needed_hours)) - 1)
        nearest_hours = math.ceil(needed_hours / digit) * digit
        # Six digits, of which only two may differ from 0: two would write 120 as 1.2e+02.
        raise UserError(
            f"hours={hours:g}: {self.num_folds} folds of {self.num_cases} cases leave time for "
            f"{max(0, number)} steps, and fewer than {least} teach nothing; the nearest "
            f"possible wish is hours={nearest_hours:.6g}, or fewer folds"
        )
