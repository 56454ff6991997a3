"""Lung benchmark: label maps of lungs against references, and airway and effusion labelled as lung.

    python -m benchmarks.lungs output=<folder> pred=<folder> cases=<table.csv> [airways=<folder>]

`pred` holds `<case>.nii.gz` of each case. Writes `lungs.csv` with a row for each side, and
`lungs.md` with a row for each combination of trust and health of the sides. A mask
`effusion.nii.gz` beside a scan is measured too. Airways are tracked in the scans alone
(`benchmarks/airways.py`); the folder `airways` keeps their masks for the next measurement (default:
`<output>/airways`).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.airway_labels import read_airway
from benchmarks.instruments import given_arguments
from medseg.data.case_table import Case
from medseg.data.importers.formats import read_cases
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_text
from medseg.io.read import read_labels
from medseg.io.tables import markdown_table, write_csv
from medseg.metrics.scores import score_region, volume_ml
from medseg.preprocess.orient import orient
from medseg.studies.pieces import oriented_image

SIDES = {"left_lung": 1, "right_lung": 2}
EFFUSION = "effusion.nii.gz"
# Voxels above `DENSE_HU` are denser than healthy lung. Vessels and partial volume are at most a
# tenth of a lung, so a side whose share of dense voxels reaches `DISEASED_SHARE` has disease.
DENSE_HU = -500.0
DISEASED_SHARE = 0.15
Row = dict[str, Any]
# Heading of each key of a summary.
SUMMARY = {
    "kind": "sides", "number": "n", "dice": "Dice", "worst": "worst", "nsd_2mm": "NSD 2 mm",
    "hd95_mm": "HD95 mm", "volume_error": "volume error",
}  # fmt: skip


def main() -> None:
    """Measure all cases and write the tables."""
    output, arguments = given_arguments(["airways"], required=["pred", "cases"])
    airways = Path(arguments.get("airways", output / "airways"))
    airways.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for case in read_cases(Path(arguments["cases"])):
        file = f"{case.name}.nii.gz"
        rows += side_rows(case, Path(arguments["pred"]) / file, airways / file)
        print(case.name, flush=True)
    write_csv(output / "lungs.csv", rows)
    formats = {
        "dice": ".4f",
        "worst": ".4f",
        "nsd_2mm": ".3f",
        "hd95_mm": ".1f",
        "volume_error": ".3f",
    }
    replace_text(output / "lungs.md", markdown_table(summarise(rows), SUMMARY, formats))
    print((output / "lungs.md").read_text(encoding="utf-8"))


def side_rows(case: Case, prediction: Path, airway_file: Path) -> list[Row]:
    """Measure both sides of a case.

    Args:
        case: Case; without labels it has no scores.
        prediction: Label map with the values of `SIDES`.
        airway_file: Mask of the airway, made if it is absent.

    Returns:
        A row for each side: `case`, `region`, `trust`, `is_diseased`; the scores of `score_region`;
        `volume_error`, the difference of the volumes as a share of the reference; `dense_share`,
        the share of the reference above `DENSE_HU`; `airway_ml` and `effusion_ml`, the volumes in
        the whole scan, and what the prediction labels as this side (`…_called_ml`, and as a share
        of the volume `…_share`). Values that do not exist are None.
    """
    stored_values, grid = oriented_image(case)
    image_hu = case.hu.apply(stored_values)
    pred = _oriented_labels(prediction)
    # Structures that do not belong to the lung, (D, H, W) bool.
    structures = {"airway": read_airway(image_hu, grid, airway_file)}
    effusion_file = case.image.parent / EFFUSION
    if effusion_file.is_file():
        structures["effusion"] = _oriented_labels(effusion_file) > 0
    reference = _oriented_labels(case.labels) if case.labels else None
    rows = []
    for region, value in SIDES.items():
        row: Row = {"case": case.name, "region": region, "trust": case.trust.get(region, "")}
        if reference is not None:
            row |= _scores(pred == value, reference == value, image_hu, grid)
        for name in ("airway", "effusion"):
            row |= _called_lung(name, structures.get(name), pred == value, grid)
        rows.append(row)
    return rows


def _scores(pred: np.ndarray, target: np.ndarray, image_hu: np.ndarray, grid: VoxelGrid) -> Row:
    """Score a side, bool (D, H, W); only volumes if the reference does not show the side."""
    scores: Row = score_region(pred, target, grid.spacing_mm)
    if not target.any():
        return {"volume_pred_ml": scores["volume_pred_ml"], "volume_ref_ml": 0.0}
    scores["volume_error"] = scores["volume_pred_ml"] / scores["volume_ref_ml"] - 1.0
    scores["dense_share"] = float((image_hu[target] > DENSE_HU).mean())
    scores["is_diseased"] = scores["dense_share"] >= DISEASED_SHARE
    return scores


def _called_lung(name: str, mask: np.ndarray | None, pred: np.ndarray, grid: VoxelGrid) -> Row:
    """Measure how much of a structure the prediction labels as one side of the lung.

    Args:
        name: Name of the structure, with which the columns begin.
        mask: Voxels of the structure (D, H, W), bool; None if there is no mask.
        pred: Voxels of the predicted side.
        grid: Grid of both.
    """
    if mask is None or not mask.any():
        return {f"{name}_ml": None, f"{name}_called_ml": None, f"{name}_share": None}
    whole_ml = volume_ml(mask, grid.spacing_mm)
    called_ml = volume_ml(mask & pred, grid.spacing_mm)
    return {
        f"{name}_ml": whole_ml,
        f"{name}_called_ml": called_ml,
        f"{name}_share": called_ml / whole_ml,
    }


def _oriented_labels(file: Path) -> np.ndarray:
    """Read a label map with the axes of `oriented_image`."""
    volume = read_labels(file)
    labels, _, _ = orient(volume.array, volume.grid)
    return labels


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Average the scores over the sides of each trust, healthy and diseased ones apart."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("dice") is None:
            continue  # there is no reference of this side
        health = "diseased" if row["is_diseased"] else "healthy"
        # A table without the column of trust has one group of each health.
        groups.setdefault(f"{row['trust'] or 'all'}, {health}", []).append(row)
    summaries = []
    for kind, sides in sorted(groups.items()):
        # A side that was not found has an infinite distance, and is left out of the median.
        finite_mm = [row["hd95_mm"] for row in sides if math.isfinite(row["hd95_mm"])]
        summaries.append(
            {
                "kind": kind,
                "number": len(sides),
                "dice": fmean(row["dice"] for row in sides),
                "worst": min(row["dice"] for row in sides),
                "nsd_2mm": fmean(row["nsd_2mm"] for row in sides),
                "hd95_mm": float(np.median(finite_mm)) if finite_mm else math.inf,
                "volume_error": fmean(row["volume_error"] for row in sides),
            }
        )
    return summaries


if __name__ == "__main__":
    main()
