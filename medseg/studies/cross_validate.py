"""The `cross_validate` command: train on all folds but one, predict that one, score every case by a cascade that never saw its patient."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from medseg.build.cases import file_values
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import TRUST_PREFIX, Case, read_case_table
from medseg.data.splits import split_cases
from medseg.data.task import Task
from medseg.io.read import read_labels
from medseg.io.replacing import check_writable
from medseg.preprocess.orient import orient
from medseg.runs.folder import replace_text
from medseg.studies.pieces import cut_pieces
from medseg.studies.steps import cascade_steps, label_values_argument, last_checkpoint, run_steps

COLUMNS = ("dice", "nsd_1mm", "nsd_2mm", "hd95_mm", "volume_pred_ml", "volume_ref_ml")


def cross_validate(config: CrossValidateConfig) -> int:
    """Run all folds; started again, it goes on where it was stopped.

    Writes `scores/` (as `evaluate` does), `folds.csv` with one row per case and region, and `folds.md`, the same to be read.

    Returns:
        Exit code of the step that failed, else 0.
    """
    from medseg.build.task import make_task

    output = Path(config.output)
    cases = read_case_table(Path(config.cases), config.data.labels_column)
    check_writable(output)
    task, values = make_task(config.task), file_values(config.data.label_values)
    label_values = label_values_argument(config.data.label_values)
    organ = [value for value, name in values.items() if name in task.labels]
    fold_of: dict[str, int] = {}
    scored: list[Case] = []
    steps: list[list[str]] = []
    for fold in range(config.num_folds):
        held_out = list(split_cases(cases, fold=fold, num_folds=config.num_folds).val)
        if config.pieces:
            held_out += [piece for case in held_out if case.labels for piece in cut_pieces(case, organ, output / "pieces")]
        scored += held_out
        fold_of |= {case.name: fold for case in held_out}
        folder = output / f"fold_{fold}"
        table = write_table(held_out, folder / "held_out.csv")
        data = [
            f"data.cases={Path(config.cases).absolute()}",
            f"data.fold={fold}",
            f"data.num_folds={config.num_folds}",
            "data.val_patients=[]",
            "data.test_patients=[]",
            f"data.labels_column={config.data.labels_column}",
            label_values,
        ]
        steps += cascade_steps(
            folder,
            data,
            coarse=config.coarse,
            fine=config.fine,
            pretrain_coarse=config.pretrain_coarse,
            pretrain_fine=config.pretrain_fine,
            runs=output,
        )
        steps.append(
            [
                "predict",
                f"input={table}",
                f"output={output / 'predictions'}",
                f"coarse={last_checkpoint(folder / 'coarse')}",
                f"fine={last_checkpoint(folder / 'fine')}",
            ]
        )
    table = write_table(scored, output / "scored.csv")
    steps.append(["evaluate", f"pred={output / 'predictions'}", f"ref={table}", f"output={output / 'scores'}", label_values])
    # The folds share what is trained on phantoms: it stands once in the row.
    code = run_steps(list(dict.fromkeys(map(tuple, steps))))
    if code:
        return code
    rows = fold_rows(scored, fold_of, output, task, values)
    write_rows(rows, output, {case.name for case in cases})
    print((output / "folds.md").read_text(encoding="utf-8"))
    return 0


def write_table(cases: Sequence[Case], path: Path) -> Path:
    """Write a case table with absolute paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    regions = sorted({region for case in cases for region in case.trust})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("case", "image", "labels", "patient", "series", "hu_slope", "hu_offset", *(TRUST_PREFIX + name for name in regions))
    )
    for case in cases:
        labels = case.labels.absolute() if case.labels else ""
        trust = [case.trust.get(name, "") for name in regions]
        writer.writerow(
            (case.name, case.image.absolute(), labels, case.patient, case.series or "", case.hu.slope, case.hu.offset, *trust)
        )
    replace_text(path, text.getvalue())
    return path


def fold_rows(
    cases: Sequence[Case], fold_of: dict[str, int], output: Path, task: Task, label_values: dict[int, str]
) -> list[dict[str, Any]]:
    """One row per scored case and region: the fold that held it out, its scores, and how much of it the crop held."""
    region_labels = {region.name: set(region.labels) for region in task.regions}
    by_name = {case.name: case for case in cases}
    rows = []
    with (output / "scores" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        for score in csv.DictReader(file):
            name = score["case"]
            report = json.loads((output / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
            rows.append(
                {
                    "case": name,
                    "fold": fold_of[name],
                    "region": score["region"],
                    "trust": score["trust"],
                    **{column: float(score[column]) for column in COLUMNS},
                    "share_in_crop": share_in_crop(
                        by_name[name],
                        [value for value, label in label_values.items() if label in region_labels[score["region"]]],
                        report["boxes"].get(score["region"]),
                    ),
                    "total_s": round(report["durations_s"]["total"], 1),
                }
            )
    return rows


def share_in_crop(case: Case, values: Sequence[int], box: dict[str, Any] | None) -> float:
    """Measure which share of a region's reference voxels lies in the crop that the fine stage saw.

    Args:
        case: Case with labels.
        values: Values of the region in the reference file.
        box: The region's entry under `boxes` in the report of the prediction; None where the coarse stage found nothing.

    Returns:
        Share in [0, 1]; 1 where the reference has no such voxel.
    """
    assert case.labels is not None, "only scored cases come here"
    volume = read_labels(case.labels)
    labels, grid, _ = orient(volume.array, volume.grid)
    places = np.argwhere(np.isin(labels, values))
    if len(places) == 0:
        return 1.0
    if box is None:
        return 0.0
    corners = grid.world_to_index_zyx(np.array(box["corners_xyz_mm"]))
    low, high = corners.min(axis=0), corners.max(axis=0)
    sizes = np.subtract(box["voxels"]["stop"], box["voxels"]["start"])
    # The corners are centres of voxels: the crop reaches half a voxel of its own beyond them.
    half = (high - low) / np.maximum(sizes - 1, 1) / 2
    return float(np.all((places >= low - half) & (places <= high + half), axis=1).mean())


def write_rows(rows: Sequence[dict[str, Any]], output: Path, whole: Set[str]) -> None:
    """Write `folds.csv` and, to be read, `folds.md`.

    Args:
        rows: From `fold_rows`.
        output: Folder.
        whole: Cases of the table; the others are pieces of them, and stand in a table of their own.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(output / "folds.csv", text.getvalue())
    scans = [row for row in rows if row["case"] in whole]
    pieces = [row for row in rows if row["case"] not in whole]
    lines = [*_table(scans), *_means(scans)]
    if pieces:
        lines += ["\nPieces cut out of these scans:\n", *_table(pieces), *_means(pieces)]
    replace_text(output / "folds.md", "\n".join(lines) + "\n")


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        "| case | fold | region | reference | Dice | NSD 1 mm | HD95 mm | predicted ml | reference ml | in the crop |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['case']} | {row['fold']} | {row['region']} | {row['trust']} | {row['dice']:.4f} | {row['nsd_1mm']:.3f} | "
            f"{_short(row['hd95_mm'])} | {row['volume_pred_ml']:.0f} | {row['volume_ref_ml']:.0f} | "
            f"{100 * row['share_in_crop']:.2f} % |"
            for row in rows
        ),
    ]


def _means(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Mean and worst where the reference shows something, for each kind of trust apart; and the most that was found where it shows nothing."""
    lines = []
    shown = [row for row in rows if row["volume_ref_ml"] > 0]
    for trust in dict.fromkeys(row["trust"] for row in shown):
        scores = [row for row in shown if row["trust"] == trust]
        worst = min(scores, key=lambda row: row["dice"])
        mean = sum(row["dice"] for row in scores) / len(scores)
        lines.append(f"\nMean Dice, {trust or 'all'} ({len(scores)}): {mean:.4f}, worst {worst['dice']:.4f}: {_place(worst)}")
    if absent := [row for row in rows if row["volume_ref_ml"] == 0]:
        most = max(absent, key=lambda row: row["volume_pred_ml"])
        lines.append(f"\nMost found where nothing is ({len(absent)}): {most['volume_pred_ml']:.1f} ml: {_place(most)}")
    return lines


def _place(row: dict[str, Any]) -> str:
    return f"{row['case']} {row['region']} (scores/overlays/{row['case']}.png)"


def _short(value_mm: float) -> str:
    return f"{value_mm:.1f}" if math.isfinite(value_mm) else "none"
