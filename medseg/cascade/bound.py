"""Lower bound on a region's Dice coefficient with a reference, from the agreement of the stages.

Split conformal prediction with normalised scores (Lei et al., Journal of the American Statistical
Association 113 (2018) 1094). Suppose that the same network segments the patients of the calibration
and a new patient of the same population. Then, with at least the stated probability, all regions of
the new patient reach their bounds. This probability refers to a random choice of the calibration
patients as well as of the new patient.

The patients that `make_weights held_out=` names are segmented by the networks themselves. In a
cross-validation each patient is segmented by the networks that were trained without that patient,
and new patients by networks that were trained on all: the bound then holds if these networks are no
worse than those of the cross-validation.

The bound covers only regions that the scan really shows, and says nothing about missed or false
regions. Scans of one patient are not independent, so a patient counts once, with the worst of its
regions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from medseg.inference.segmentation import StatedBound, rounded_down

# An error, 1 - Dice, is divided by 1 - agreement + OFFSET. With an offset of 0, full agreement
# would promise a Dice of 1, and regions with nearly full agreement would decide about the factor,
# since their errors would be divided by nearly 0.
OFFSET = 0.02


@dataclass(frozen=True)
class DiceBound:
    """A calibrated bound.

    Attributes:
        factor: Bound on the error of a region: 1 - Dice <= factor * (1 - agreement + offset).
        level: Share of patients whose regions all reach their bounds, in (0, 1).
        num_patients: Patients of the calibration.
        offset: Added to the disagreement 1 - agreement, > 0.

    Raises:
        ValueError: If a number is out of its range.
    """

    factor: float
    level: float
    num_patients: int
    offset: float = OFFSET

    def __post_init__(self) -> None:
        # Chained comparisons refuse NaN too.
        is_valid = (
            0 <= self.factor < math.inf
            and 0 < self.level < 1
            and self.num_patients >= 1
            and 0 < self.offset < math.inf
        )
        if not is_valid:
            raise ValueError(
                "a bound on Dice needs a factor >= 0, a level in (0, 1), a patient and an "
                f"offset > 0, got {self}"
            )

    def at(self, agreement: float) -> float:
        """Lower bound on a region's Dice coefficient if the stages agree this much, in [0, 1]."""
        # With little agreement the formula falls below 0, and a bound below 0 says nothing.
        return max(0.0, 1.0 - self.factor * (1.0 - agreement + self.offset))

    def stated(self, agreement: float) -> StatedBound:
        """State the bound `at` an agreement, rounded down to four decimals."""
        return StatedBound(rounded_down(self.at(agreement), 4), self.level, self.num_patients)


Scores = Mapping[str, Sequence[tuple[float, float]]]
"""Patient to the agreement and the Dice coefficient of each of its regions."""


def calibrate(scores: Scores, level: float) -> DiceBound | None:
    """Fit the bound to held-out patients.

    Args:
        scores: Agreements and Dice coefficients of patients whom the networks had not seen in
            training; each patient has at least one region.
        level: Share of patients for which the bound shall hold, in (0, 1).

    Returns:
        The bound; None if there are too few patients for the level: a level of 0.9 needs 9.
    """
    patient_factors = []
    for regions in scores.values():
        # The largest factor of a patient, since all of its regions must reach their bounds.
        patient_factors.append(max(_factor(agreement, dice) for agreement, dice in regions))
    patient_factors.sort()
    num_patients = len(patient_factors)
    # Quantile of split conformal prediction: the ceil((n + 1) * level)-th smallest of n. The small
    # number keeps a product such as 10 * 0.9 from exceeding its integer by rounding.
    rank = math.ceil((num_patients + 1) * level - 1e-9)
    if rank < 1 or rank > num_patients:
        return None
    return DiceBound(patient_factors[rank - 1], level, num_patients)


def _factor(agreement: float, dice: float) -> float:
    """Smallest factor with which a region reaches its bound, see `DiceBound`."""
    return (1.0 - dice) / (1.0 - agreement + OFFSET)


def count_covered(groups: Sequence[Scores], level: float) -> int | None:
    """Count the patients whose regions all reach the bound that the other groups calibrate.

    Groups must differ by more than chance, as folds with networks of their own do. If patients were
    left out one by one, the number of covered patients would follow from the level alone, whatever
    the scores are.

    Args:
        groups: Scores of each group; no patient is in two of them.
        level: See `calibrate`.

    Returns:
        The number; None if, for some group, the patients of the others are too few to calibrate.
    """
    num_covered = 0
    for index, scores in enumerate(groups):
        # The patients of a group are judged by a bound that has not seen them.
        calibration: dict[str, Sequence[tuple[float, float]]] = {}
        for group in (*groups[:index], *groups[index + 1 :]):
            calibration.update(group)
        bound = calibrate(calibration, level)
        if bound is None:
            return None
        for regions in scores.values():
            if all(dice >= bound.at(agreement) for agreement, dice in regions):
                num_covered += 1
    return num_covered
