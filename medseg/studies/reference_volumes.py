"""Volumes of parts in a study's references, and the ranges of plausible volumes from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

import numpy as np

from medseg.anatomy.plausibility import touches_border
from medseg.metrics.scores import volume_ml
from medseg.studies.held_out import HeldOut

# Fewest patients of a range. With fewer patients the range is so wide that it excludes nothing.
LEAST_PATIENTS = 5
# Level of the prediction interval: share of new patients whose volume is to lie in the range.
SHARE = 0.99


@dataclass(frozen=True)
class ReferenceVolume:
    """Volume of one part (region or label) in the reference of one scan.

    Attributes:
        case: Name of the scan.
        patient: Name of the patient.
        part: Name of the region; of the label in a task without regions.
        volume_ml: Volume of the part, above 0.
        is_cut: Whether the part reaches a face of the scan, so it may continue outside.
    """

    case: str
    patient: str
    part: str
    volume_ml: float
    is_cut: bool


def measure_references(held_out: HeldOut) -> list[ReferenceVolume]:
    """Measure all parts that the trusted references show."""
    volumes = []
    for case, _, target, grid in held_out.pairs():
        for part in held_out.trusted_parts(case):
            values = held_out.task.part_values(part)
            mask = np.isin(target, values)
            if not mask.any():
                continue
            volume = ReferenceVolume(
                case=case.name,
                patient=held_out.patients[case.name],
                part=part,
                volume_ml=volume_ml(mask, grid.spacing_mm),
                is_cut=touches_border(target, values),
            )
            volumes.append(volume)
    return volumes


def plausible_ranges(volumes: Sequence[ReferenceVolume]) -> dict[str, tuple[float, float]]:
    """Compute a prediction interval of the volume of each part in a new patient.

    Volumes of organs and lesions are skewed, so their logarithms are taken as normally distributed:
    mean ± t · s · √(1 + 1/n), with mean and standard deviation s of the logarithms of n patients,
    and the quantile t of Student's distribution with n - 1 degrees of freedom. The range is widened
    to hold all volumes of the references.

    Args:
        volumes: Volumes in the references; a volume with `is_cut` does not count.

    Returns:
        Part to its range (low, high) in ml. A part is left out if fewer than `LEAST_PATIENTS`
        patients show the whole part.
    """
    # Imported here because the import takes half a second.
    from scipy.stats import t

    # Part to patient to the logarithms of the volumes in the scans.
    logs: dict[str, dict[str, list[float]]] = {}
    for volume in volumes:
        if volume.is_cut:
            continue
        logs_of_part = logs.setdefault(volume.part, {})
        logs_of_patient = logs_of_part.setdefault(volume.patient, [])
        logs_of_patient.append(math.log(volume.volume_ml))
    ranges_ml = {}
    for part, logs_by_patient in logs.items():
        # One mean per patient: scans of one patient are no independent observations.
        means = [fmean(patient_logs) for patient_logs in logs_by_patient.values()]
        num_patients = len(means)
        if num_patients < LEAST_PATIENTS:
            continue
        quantile = float(t.ppf((1 + SHARE) / 2, num_patients - 1))
        half_width = quantile * stdev(means) * math.sqrt(1 + 1 / num_patients)
        all_logs = list(chain(*logs_by_patient.values()))
        low = min(fmean(means) - half_width, *all_logs)
        high = max(fmean(means) + half_width, *all_logs)
        ranges_ml[part] = _rounded_outwards(math.exp(low), math.exp(high))
    return ranges_ml


def _rounded_outwards(low: float, high: float) -> tuple[float, float]:
    """Round a range to three significant digits, low down and high up.

    Example:
        >>> _rounded_outwards(0.012349, 1234.5)
        (0.0123, 1240.0)
    """
    # Value of one unit in the third significant digit.
    step_of_low = 10.0 ** (math.floor(math.log10(low)) - 2)
    step_of_high = 10.0 ** (math.floor(math.log10(high)) - 2)
    rounded_low = math.floor(low / step_of_low) * step_of_low
    rounded_high = math.ceil(high / step_of_high) * step_of_high
    # Six digits as text remove the rounding error of the product: 0.012300000000000002 to 0.0123.
    return float(f"{rounded_low:.6g}"), float(f"{rounded_high:.6g}")
