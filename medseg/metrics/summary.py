"""Scores of many cases as statistics: per region and over all, per trust in the reference and over all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medseg.metrics.surface import RegionScores

METRICS = ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm", "volume_pred_ml", "volume_ref_ml")
ALL = "all"


@dataclass(frozen=True)
class ScoreRow:
    """Scores of one region of one case; `trust` is how far its reference may be trusted, empty where nobody said."""

    case: str
    region: str
    trust: str
    scores: RegionScores


@dataclass(frozen=True)
class Statistics:
    """One metric over the cases of one group.

    Attributes:
        region: Region, or `all`.
        trust: Trust in the reference, or `all`.
        metric: One of `METRICS`.
        number: Scores in the group.
        infinite: Those of them that are infinite; all following numbers leave them out.
        mean: Mean; None where every score is infinite, as are the next four.
        std: Standard deviation over the group (divided by the number, not by one less).
        median: Median.
        min: Smallest.
        max: Largest.
        worst_case: Case with the worst score (an infinite distance counts); empty for volumes, which are neither.
    """

    region: str
    trust: str
    metric: str
    number: int
    infinite: int
    mean: float | None
    std: float | None
    median: float | None
    min: float | None
    max: float | None
    worst_case: str


def summarise(rows: Sequence[ScoreRow]) -> list[Statistics]:
    """Compute the statistics of every group: each region and all, each trust and all; no rows give none."""
    regions = list(dict.fromkeys(row.region for row in rows))
    trusts = sorted({row.trust for row in rows} - {""})
    result = []
    for region in [*regions, ALL]:
        for trust in [ALL, *trusts]:
            group = [row for row in rows if region in (row.region, ALL) and trust in (row.trust, ALL)]
            if group:
                result += [_of_metric(group, region, trust, metric) for metric in METRICS]
    return result


def console_table(statistics: Sequence[Statistics]) -> list[str]:
    """Lay the main numbers of each group out as lines of equal columns; no statistics give no line."""
    groups: dict[tuple[str, str], dict[str, Statistics]] = {}
    for one in statistics:
        groups.setdefault((one.region, one.trust), {})[one.metric] = one
    has_trusts = len({trust for _, trust in groups} - {ALL}) > 1
    table = [["region", "trust", "n", "Dice", "±", "min", "NSD 1mm", "NSD 2mm", "HD95 mm", "inf", "worst case"]]
    for (region, trust), group in groups.items():
        if trust == ALL or has_trusts:
            dice, hd95 = group["dice"], group["hd95_mm"]
            means = [group[metric].mean for metric in ("nsd_1mm", "nsd_2mm")]
            table.append(
                [region, trust, str(dice.number)]
                + [_short(value) for value in (dice.mean, dice.std, dice.min, *means)]
                + ["-" if hd95.mean is None else f"{hd95.mean:.2f}", str(hd95.infinite), dice.worst_case]
            )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [_line(row, widths) for row in table] if groups else []


def _of_metric(group: Sequence[ScoreRow], region: str, trust: str, metric: str) -> Statistics:
    values = [float(getattr(row.scores, metric)) for row in group]
    finite = np.array([value for value in values if math.isfinite(value)])
    worst_case = ""
    if not metric.startswith("volume"):
        pick = max if metric == "hd95_mm" else min
        worst_case = group[values.index(pick(values))].case
    mean, std, median, smallest, largest = (
        float(function(finite)) if len(finite) else None for function in (np.mean, np.std, np.median, np.min, np.max)
    )
    num_infinite = len(values) - len(finite)
    return Statistics(region, trust, metric, len(values), num_infinite, mean, std, median, smallest, largest, worst_case)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, numbers to the right."""
    cells = [
        cell.ljust(width) if column in (0, 1, len(row) - 1) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
