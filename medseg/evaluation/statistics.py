"""Statistics of scores: per region and over all, per trust in the reference and over all, and their printed table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from medseg.report.tables import table_lines

METRICS = ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm", "volume_pred_ml", "volume_ref_ml")
ALL = "all"
COLUMNS = ("region", "trust", "metric", "number", "infinite", "mean", "std", "median", "min", "max", "worst_case")
_HEADINGS = {
    "region": "region", "trust": "trust", "number": "n", "dice": "Dice", "std": "±", "min": "min", "nsd_1mm": "NSD 1mm",
    "nsd_2mm": "NSD 2mm", "hd95_mm": "HD95 mm", "infinite": "inf", "worst_case": "worst case",
}  # fmt: skip

Row = Mapping[str, Any]


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compute the statistics of every group: each region and all, each trust and all.

    Args:
        rows: Scores with the keys `case`, `region`, `trust` ("" = not given) and `METRICS`; none give no statistics.

    Returns:
        Rows with the keys `COLUMNS`: `number` of scores, `infinite` ones among them, which the following figures leave
        out; `std` is divided by the number, not by one less; the figures are None where every score is infinite.
        `worst_case` has the worst score (an infinite distance counts); it is empty for volumes, which are neither.
    """
    statistics = []
    for region in [*dict.fromkeys(row["region"] for row in rows), ALL]:
        for trust in [ALL, *sorted({row["trust"] for row in rows} - {""})]:
            group = [row for row in rows if region in (row["region"], ALL) and trust in (row["trust"], ALL)]
            if group:
                statistics += [_statistics(group, region, trust, metric) for metric in METRICS]
    return statistics


def console_table(statistics: Sequence[Row]) -> list[str]:
    """Lay the main figures of each group out in aligned columns; no statistics give no line."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for one in statistics:
        groups.setdefault((one["region"], one["trust"]), {})[one["metric"]] = one
    has_trusts = len({trust for _, trust in groups} - {ALL}) > 1
    rows = [
        {**group["dice"], **{metric: group[metric]["mean"] for metric in METRICS}, "infinite": group["hd95_mm"]["infinite"]}
        for (_, trust), group in groups.items()
        if trust == ALL or has_trusts
    ]
    formats = {"hd95_mm": ".2f", **dict.fromkeys(("dice", "std", "min", "nsd_1mm", "nsd_2mm"), ".4f")}
    return table_lines(rows, _HEADINGS, formats, missing="-") if rows else []


def _statistics(group: Sequence[Row], region: str, trust: str, metric: str) -> dict[str, Any]:
    """Statistics of one metric over one group of at least one row."""
    values = [float(row[metric]) for row in group]
    finite = np.array([value for value in values if math.isfinite(value)])
    figures = (float(function(finite)) if len(finite) else None for function in (np.mean, np.std, np.median, np.min, np.max))
    worst = max(values) if metric == "hd95_mm" else min(values)
    worst_case = "" if metric.startswith("volume") else group[values.index(worst)]["case"]
    return dict(zip(COLUMNS, (region, trust, metric, len(values), len(values) - len(finite), *figures, worst_case), strict=True))
