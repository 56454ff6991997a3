"""Time of a cross-validation from measured parts, and the number of steps that fit into it."""

import math
from dataclasses import dataclass

from medseg.errors import UserError

# Share of the user's hours that is planned. The rest is reserve: a run may end early, but not late.
PLANNED_SHARE = 0.92


@dataclass(frozen=True)
class Costs:
    """Measured durations of the parts of a cross-validation, and the peak memory.

    Attributes:
        step_s: One optimiser step on one patch.
        prepare_s: Preparation of all cases, which happens once.
        train_start_s: Start and end of a training, including the validation of one case.
        predict_start_s: Start and end of a `predict` command, or of an `evaluate` command.
        case_s: Prediction of a case of mean size; a validation of the case takes as long.
        score_s: Scores and pictures of a case of mean size.
        peak_gib: Peak memory of training and prediction.
    """

    step_s: float
    prepare_s: float
    train_start_s: float
    predict_start_s: float
    case_s: float
    score_s: float
    peak_gib: float


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

    def parts(self, steps: int, batch_size: int) -> dict[str, float]:
        """List the seconds of each part.

        Args:
            steps: Number of optimiser steps of each training.
            batch_size: Number of patches of a step.
        """
        costs = self.costs
        # The training of a fold validates all held-out cases of the fold once. The validation of
        # the first case is part of `train_start_s`.
        num_further_validations = max(0, self.num_cases - self.num_folds)
        return {
            "preparation of the cases": costs.prepare_s,
            "training steps": self.num_folds * steps * batch_size * costs.step_s,
            "start of the trainings": self.num_folds * costs.train_start_s,
            "validations": num_further_validations * costs.case_s,
            "predictions": self.num_folds * costs.predict_start_s + self.num_cases * costs.case_s,
            "scores and pictures": costs.predict_start_s + self.num_cases * costs.score_s,
        }

    def total_s(self, steps: int, batch_size: int = 1) -> float:
        """Compute the seconds of the whole cross-validation, see `parts`."""
        return sum(self.parts(steps, batch_size).values())

    def steps_within(self, hours: float, least_steps: int) -> int:
        """Count the optimiser steps of one patch for which each training has time.

        Args:
            hours: Time of the whole cross-validation.
            least_steps: Fewest steps of a useful training.

        Raises:
            UserError: If there is time for fewer than `least_steps`; names the hours that suffice.
        """
        planned_s = PLANNED_SHARE * hours * 3600
        time_for_steps_s = planned_s - self.total_s(steps=0)
        steps = math.floor(time_for_steps_s / (self.num_folds * self.costs.step_s))
        if steps >= least_steps:
            return steps
        needed_hours = self.total_s(least_steps) / PLANNED_SHARE / 3600
        # Rounded up to two significant digits; `digit` is one unit in the second digit.
        digit = 10 ** (math.floor(math.log10(needed_hours)) - 1)
        nearest_hours = math.ceil(needed_hours / digit) * digit
        raise UserError(
            f"hours={hours:g}: {self.num_folds} folds of {self.num_cases} cases leave time for "
            f"{max(0, steps)} steps, and fewer than {least_steps} teach nothing; the nearest "
            f"possible wish is hours={nearest_hours:.2g}, or fewer folds"
        )
