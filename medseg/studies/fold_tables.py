"""Tables `folds.csv` and `folds.md`: scores of the held-out scans of all folds."""

import functools
import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from medseg.evaluation.scoring import METRICS
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_text
from medseg.io.tables import Formats, markdown_table, read_csv, write_csv
from medseg.report.spacings import distance_text
from medseg.studies.folds import Folds
from medseg.studies.held_out import reference_labels
from medseg.task import LabelValues, Task

# Row of folds.csv: column to value, for one scan and region.
Row = dict[str, Any]
# Column of folds.md to its heading.
COLUMNS = {
    "case": "case",
    "fold": "fold",
    "region": "region",
    "trust": "reference",
    "dice": "Dice",
    "nsd_1mm": "NSD 1 mm",
    "hd95_mm": "HD95 mm",
    "volume_pred_ml": "predicted ml",
    "volume_ref_ml": "reference ml",
    "share_in_crop": "in the crop",
}
# Table of scores that `evaluate` writes.
METRICS_FILE = "metrics.csv"


def fold_rows(
    folds: Folds,
    output: Path,
    task: Task,
    label_values: LabelValues,
    is_cascade: bool,
) -> list[Row]:
    """Make one row per scored case and region, with its fold and scores.

    Args:
        folds: Folds with the scored cases.
        output: Folder of the study.
        task: The task of the study.
        label_values: Value, or name of a structure, in the reference files to label name.
        is_cascade: Whether two stages made the predictions. The rows then also have `agreement` (of
            the two stages) and `share_in_crop`.
    """

    @functools.lru_cache(maxsize=1)  # the rows of a case follow each other
    def reference(name: str) -> tuple[np.ndarray, VoxelGrid]:
        """Read the reference of a case."""
        return reference_labels(folds.cases[name], task, label_values)

    rows = []
    for score in read_csv(output / "scores" / METRICS_FILE):
        name, region = score["case"], score["region"]
        report = json.loads((output / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
        row = {
            "case": name,
            "fold": folds.fold_of[name],
            "region": region,
            "trust": score["trust"],
            **{metric: float(score[metric]) for metric in METRICS},
            "total_s": round(report["durations_s"]["total"], 1),
        }
        if is_cascade:
            box = report["boxes"].get(region)
            # Without a box the coarse stage found no region. Agreement on an absent region says
            # nothing about the Dice of regions that are found, so it is left out.
            row["agreement"] = None if box is None else report["agreements"].get(region)
            labels, grid = reference(name)
            row["share_in_crop"] = share_in_crop(labels, grid, task.part_values(region), box)
        rows.append(row)
    return rows


def share_in_crop(
    labels: np.ndarray, grid: VoxelGrid, values: Sequence[int], box: dict[str, Any] | None
) -> float:
    """Measure the share of a region's reference voxels that lies in the crop of the fine stage.

    Args:
        labels: Label map of the reference, (D, H, W).
        grid: Its grid.
        values: Values of the region in it.
        box: Entry of the region under `boxes` in the report of the prediction; None if the coarse
            stage did not find the region.

    Returns:
        Share in [0, 1]; 1 if the reference has no voxel of the region.
    """
    # (number of the region's voxels, 3): indices (z, y, x) in the reference.
    indices = np.argwhere(np.isin(labels, values))
    if len(indices) == 0:
        return 1.0
    if box is None:
        return 0.0
    corners = grid.world_to_index_zyx(np.array(box["corners_xyz_mm"]))
    low = corners.min(axis=0)
    high = corners.max(axis=0)
    # The corners are centres of the crop's corner voxels: the crop extends half of its own voxels
    # further. `half_voxel` is this half in voxels of the reference.
    half_voxel = np.divide(box["spacing_mm"], grid.spacing_mm) / 2
    is_inside = (indices >= low - half_voxel) & (indices <= high + half_voxel)
    return float(is_inside.all(axis=1).mean())


def write_rows(rows: Sequence[Row], output: Path, names_by_heading: Mapping[str, Set[str]]) -> None:
    """Write `folds.csv` and `folds.md`.

    Args:
        rows: From `fold_rows`.
        output: Folder of the study.
        names_by_heading: Heading of each table in `folds.md` to the names of its scans; the heading
            may be empty.
    """
    write_csv(output / "folds.csv", rows)
    sections = []
    for heading, names in names_by_heading.items():
        group_rows = [row for row in rows if row["case"] in names]
        if not group_rows:
            continue
        section = _section(group_rows)
        if heading:
            section = f"{heading}\n\n{section}"
        sections.append(section)
    replace_text(output / "folds.md", "\n".join(sections))


def _section(rows: Sequence[Row]) -> str:
    """Format a table of `folds.md`, with a summary below it.

    For rows whose reference has the region, the summary states mean and worst Dice for each trust;
    for the other rows, the largest predicted volume.
    """
    formats: Formats = {
        "dice": ".4f",
        "nsd_1mm": ".3f",
        "volume_pred_ml": ".0f",
        "volume_ref_ml": ".0f",
        "hd95_mm": distance_text,
        "share_in_crop": _percent,
    }
    # A study of one stage has no shares in the crop.
    columns = {key: heading for key, heading in COLUMNS.items() if key in rows[0]}
    lines = [markdown_table(rows, columns, formats)]
    # Rows whose reference has the region, by trust in the reference; and the other rows.
    present: dict[str, list[Row]] = {}
    absent: list[Row] = []
    for row in rows:
        if row["volume_ref_ml"] > 0:
            present.setdefault(row["trust"], []).append(row)
        else:
            absent.append(row)
    for trust, trust_rows in present.items():
        worst = min(trust_rows, key=lambda row: row["dice"])
        mean = sum(row["dice"] for row in trust_rows) / len(trust_rows)
        lines.append(
            f"Mean Dice, {trust or 'all'} ({len(trust_rows)}): {mean:.4f}, "
            f"worst {worst['dice']:.4f}: {_where(worst)}\n"
        )
    if absent:
        largest = max(absent, key=lambda row: row["volume_pred_ml"])
        lines.append(
            f"Largest false-positive volume where the region is absent ({len(absent)}): "
            f"{largest['volume_pred_ml']:.1f} ml: {_where(largest)}\n"
        )
    return "\n".join(lines)


def _where(row: Row) -> str:
    """Name the scan and region of a row, and the picture that shows it."""
    return f"{row['case']} {row['region']} (scores/overlays/{row['case']}.png)"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
