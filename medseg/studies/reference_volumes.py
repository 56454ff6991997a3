"""Volumes of the labels in the references of a study, and the range that is plausible for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

import numpy as np

from medseg.anatomy.plausibility import touches_border
from medseg.metrics.scores import volume_ml
from medseg.studies.held_out import HeldOut

# With fewer patients the interval is so wide that it checks nothing.
LEAST_PATIENTS = 5
# Share of patients whose volumes lie in their range.
SHARE = 0.99


@dataclass(frozen=True)
class ReferenceVolume:
    """Volume of one region or label in the reference of one scan.

    Attributes:
        case: Name of the scan.
        patient: Its patient.
        part: Name of the region; of the label in a task without regions.
        volume_ml: Its volume, above 0.
        is_cut: Whether it reaches a face of the scan, so that a part of it may be missing.
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
    """Prediction interval of the volume of each part in a new patient, in ml.

    Volumes of organs and lesions are skewed, so their logarithms are taken as normally distributed:
    mean ± t · s · √(1 + 1/n) over n patients. No volume of the references lies outside.

    Args:
        volumes: Of the references. Parts that the scan cuts are left out, and so are parts of fewer
            than `LEAST_PATIENTS` patients.
    """
    from scipy.stats import t  # takes half a second

    logs: dict[str, dict[str, list[float]]] = {}
    for volume in volumes:
        if volume.is_cut:
            continue
        logs_of_part = logs.setdefault(volume.part, {})
        logs_of_patient = logs_of_part.setdefault(volume.patient, [])
        logs_of_patient.append(math.log(volume.volume_ml))
    ranges_ml = {}
    for part, logs_by_patient in logs.items():
        means = [fmean(values) for values in logs_by_patient.values()]
        if len(means) < LEAST_PATIENTS:
            continue
        quantile = float(t.ppf((1 + SHARE) / 2, len(means) - 1))
        half_width = quantile * stdev(means) * math.sqrt(1 + 1 / len(means))
        all_values = list(chain(*logs_by_patient.values()))
        low = min(fmean(means) - half_width, *all_values)
        high = max(fmean(means) + half_width, *all_values)
        ranges_ml[part] = _rounded_outwards(math.exp(low), math.exp(high))
    return ranges_ml


def _rounded_outwards(low: float, high: float) -> tuple[float, float]:
    """Round a range to three digits, so that it becomes no narrower.

    Example:
        >>> _rounded_outwards(0.012349, 1234.5)
        (0.0123, 1240.0)
    """
    step_of_low = 10.0 ** (math.floor(math.log10(low)) - 2)
    step_of_high = 10.0 ** (math.floor(math.log10(high)) - 2)
    # Formatted, so that 0.0123 is not 0.012300000000000002.
    return (
        float(f"{math.floor(low / step_of_low) * step_of_low:.6g}"),
        float(f"{math.ceil(high / step_of_high) * step_of_high:.6g}"),
    )
