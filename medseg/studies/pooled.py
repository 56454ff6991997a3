"""Held-out scores of all folds pooled over patients, and the cost of each training."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medseg.data.case_table import Case
from medseg.io.atomic import replace_text
from medseg.io.tables import latex_table, markdown_table, write_csv
from medseg.runs.folder import read_summary
from medseg.studies.held_out import patients_of

# Row of a table: column to value.
Row = Mapping[str, Any]

POOLED_CSV = "pooled.csv"
POOLED_MD = "pooled.md"
POOLED_TEX = "pooled.tex"
# Metric to its number of decimals in the tables for readers.
POOLED_METRICS = {"dice": 4, "nsd_1mm": 3, "hd95_mm": 1}
# Column to its heading in the tables for readers.
COLUMNS = {
    "region": "region",
    "trust": "reference",
    "patients": "patients",
    "scans": "scans",
    "dice": "Dice",
    "nsd_1mm": "NSD 1 mm",
    "hd95_mm": "HD95 mm",
    "not_found": "not found",
    "false_regions": "found where absent",
}
# Column of the table of costs to its heading.
COST_COLUMNS = {
    "fold": "fold",
    "run": "run",
    "steps": "steps",
    "train_s": "training, s",
    "peak_resident_mib": "peak memory, MiB",
}


def pooled_rows(rows: Sequence[Row], patients: Mapping[str, str]) -> list[dict[str, Any]]:
    """Pool the scores of held-out scans: mean and standard deviation over patients.

    The scans of one patient are averaged first: they are no independent observations. A region that
    was not found counts with a Dice and an NSD of 0. Its HD95 is infinite and left out of the mean;
    the column `not_found` counts such regions. Scans without the region are left out of all means;
    `false_regions` counts those in which the region was predicted nevertheless.

    Args:
        rows: One per scan and region with `case`, `region`, `trust`, `volume_pred_ml`,
            `volume_ref_ml` and the keys of `POOLED_METRICS`.
        patients: Scan to its patient.

    Returns:
        One row per region and trust. `<metric>` is the mean over patients, None without a patient;
        `<metric>_sd` is the sample standard deviation, None with fewer than two patients.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["region"], row["trust"]].append(row)
    pooled = []
    for (region, trust), group in groups.items():
        pooled.append({"region": region, "trust": trust, **_pooled_figures(group, patients)})
    return pooled


def _pooled_figures(rows: Sequence[Row], patients: Mapping[str, str]) -> dict[str, Any]:
    """Pool the scores of one region and trust, see `pooled_rows`."""
    # Scores against an empty reference have no meaning (a Dice of 0 or 1, an infinite distance), so
    # scans with such a reference are only counted.
    present = [row for row in rows if row["volume_ref_ml"] > 0]
    absent = [row for row in rows if row["volume_ref_ml"] == 0]
    figures: dict[str, Any] = {
        "patients": len({patients[row["case"]] for row in present}),
        "scans": len(present),
        "not_found": sum(row["volume_pred_ml"] == 0 for row in present),
        "false_regions": sum(row["volume_pred_ml"] > 0 for row in absent),
    }
    for metric in POOLED_METRICS:
        means = _patient_means(present, metric, patients)
        figures[metric] = statistics.fmean(means) if means else None
        figures[f"{metric}_sd"] = statistics.stdev(means) if len(means) > 1 else None
    return figures


def _patient_means(rows: Sequence[Row], metric: str, patients: Mapping[str, str]) -> list[float]:
    """Compute the mean of the finite scores of each patient that has some."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if math.isfinite(row[metric]):
            scores[patients[row["case"]]].append(row[metric])
    return [statistics.fmean(values) for values in scores.values()]


def fold_costs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the cost of each training from the summaries of the runs.

    Args:
        folders: Folder of each fold, which holds the run folders.

    Returns:
        One row per training, with the keys of `COST_COLUMNS`.
    """
    costs = []
    for fold, folder in enumerate(folders):
        for summary_file in sorted(folder.glob("*/summary.json")):
            summary = read_summary(summary_file.parent)
            cost = {key: summary.get(key) for key in COST_COLUMNS}
            costs.append({**cost, "fold": fold, "run": summary_file.parent.name})
    return costs


def write_pooled(
    rows: Sequence[Row], cases: Mapping[str, Case], costs: Sequence[Row], output: Path
) -> None:
    """Write the pooled scores as CSV, Markdown and LaTeX.

    The Markdown also has the costs, and names the scans without scores.

    Args:
        rows: As for `pooled_rows`.
        cases: Held-out scan to its case; a scan without a patient is a patient of its own.
        costs: From `fold_costs`.
        output: Folder of the study.
    """
    pooled = pooled_rows(rows, patients_of(cases.values()))
    write_csv(output / POOLED_CSV, pooled)
    readable = [_readable(row) for row in pooled]
    scores = markdown_table(readable, COLUMNS)
    scored = {row["case"] for row in rows}
    missing = [name for name, case in cases.items() if case.labels and name not in scored]
    note = ""
    if missing:
        note = f"\nIn no mean, because their prediction or score failed: {', '.join(missing)}.\n"
    cost_table = markdown_table(costs, COST_COLUMNS, {"train_s": ".0f", "peak_resident_mib": ".0f"})
    replace_text(
        output / POOLED_MD,
        "Held-out scans, mean ± standard deviation over patients:\n\n"
        f"{scores}{note}\nCost of each training:\n\n{cost_table}",
    )
    replace_text(output / POOLED_TEX, latex_table(readable, COLUMNS))


def _readable(row: Row) -> dict[str, Any]:
    """Replace the mean of each metric by a text, `mean ± standard deviation`."""
    texts = dict(row)
    for metric, decimals in POOLED_METRICS.items():
        mean, deviation = row[metric], row[f"{metric}_sd"]
        if mean is None:
            texts[metric] = "none"
        elif deviation is None:
            texts[metric] = f"{mean:.{decimals}f}"
        else:
            texts[metric] = f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"
    return texts
