"""Lower bound on the Dice coefficient of a region with its reference, which the user does not have, from the agreement of the two stages.

Split conformal prediction with normalised scores (Lei et al., Journal of the American Statistical Association 113 (2018) 1094): for a new patient
like those of the calibration, all bounds hold with at least the stated probability, whatever the distribution. Scans of one patient are not
independent, so a patient counts once, with the worst of its regions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Full agreement leaves this much room for an error, so that the bound does not rest on the last thousandth of it.
OFFSET = 0.02


@dataclass(frozen=True)
class DiceBound:
    """A calibrated bound.

    Attributes:
        factor: Largest error of a region, 1 - Dice, in units of 1 - agreement + `OFFSET`.
        level: Share of patients whose regions all reach their bounds, in (0, 1).
        num_patients: Patients of the calibration.

    Raises:
        ValueError: If a number is out of its range.
    """

    factor: float
    level: float
    num_patients: int

    def __post_init__(self) -> None:
        if not (0 <= self.factor < math.inf and 0 < self.level < 1 and self.num_patients >= 1):
            raise ValueError(f"a bound on Dice has a factor >= 0, a level in (0, 1) and patients, got {self}")

    def at(self, agreement: float) -> float:
        """Dice coefficient that a region reaches whose stages agree this much, in [0, 1]."""
        return max(0.0, 1.0 - self.factor * (1.0 - agreement + OFFSET))


Scores = Mapping[str, Sequence[tuple[float, float]]]
"""Patient to the agreement and the Dice coefficient of each of its regions."""


def calibrate(scores: Scores, level: float) -> DiceBound | None:
    """Fit the bound to held-out patients.

    Args:
        scores: Of patients that no network was trained on; each has a region at least.
        level: Share of patients for which the bound shall hold, in (0, 1).

    Returns:
        The bound; None if there are too few patients for the level: 9 are needed for 0.9.
    """
    largest = sorted(max((1.0 - dice) / (1.0 - agreement + OFFSET) for agreement, dice in regions) for regions in scores.values())
    rank = math.ceil((len(largest) + 1) * level - 1e-9)
    return DiceBound(largest[rank - 1], level, len(largest)) if 1 <= rank <= len(largest) else None


def count_covered(scores: Scores, level: float) -> int:
    """Count the patients all of whose regions reach the bound that the other patients give."""
    covered = 0
    for patient, regions in scores.items():
        bound = calibrate({other: found for other, found in scores.items() if other != patient}, level)
        covered += bound is not None and all(dice >= bound.at(agreement) for agreement, dice in regions)
    return covered
