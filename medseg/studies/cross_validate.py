"""Cross-validation by patient, on whole scans and on harder ones that are made of them."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from hydra.core.hydra_config import HydraConfig

from medseg.cascade.bound import calibrate, count_covered
from medseg.config.schema import CrossValidateConfig
from medseg.data.case_table import Case, count_folds, split_cases, write_case_table
from medseg.data.importers.formats import read_cases
from medseg.data.reference import file_values
from medseg.errors import UserError, require
from medseg.evaluation.scoring import METRICS
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import Formats, markdown_table, read_csv, write_csv
from medseg.report.spacings import distance_text
from medseg.studies.pieces import cut_partial_scans, oriented_labels, paint_scan
from medseg.studies.recipes import (
    BOUND,
    Step,
    check_experiments,
    coarse_arguments,
    experiments,
    label_values_argument,
    last_checkpoint,
    run_steps,
    stage_steps,
)
from medseg.task import Task
from medseg.task_options import make_task

Row = dict[str, Any]
# Column of folds.md to its heading.
COLUMNS = {
    "case": "case", "fold": "fold", "region": "region", "trust": "reference", "dice": "Dice", "nsd_1mm": "NSD 1 mm", "hd95_mm": "HD95 mm",
    "volume_pred_ml": "predicted ml", "volume_ref_ml": "reference ml", "share_in_crop": "in the crop",
}  # fmt: skip
LEVEL = 0.9  # of the lower bound on Dice
TRUSTED = ("", "reference")
PIECES = "Partial scans cut from these scans:"
DISEASED = "These scans with disease painted into their regions:"


def cross_validate(config: CrossValidateConfig) -> int:
    """Train, predict and score fold by fold; a study that was stopped continues when started again.

    Writes `scores/` (as `evaluate` does), `folds.csv` with one row per case and region, and
    `folds.md`, a table for readers.

    Raises:
        SystemExit: With the exit code of the command that failed.
    """
    output, table = Path(config.output), Path(config.cases).absolute()
    check_experiments(config)
    cases = read_cases(Path(config.cases), config.data.labels_column)
    check_folds(cases, config.num_folds)
    check_writable(output)
    task, given = make_task(config.task), file_values(config.data.label_values or {})
    values = {value: label for value, label in given.items() if isinstance(value, int)}
    require(
        len(values) == len(given),
        "data.label_values: cross_validate reads label maps, but these are names of masks or DICOM structures; save one label map of each case",
    )
    label_values = label_values_argument(config.data.label_values or {})
    task_given = [one for one in HydraConfig.get().overrides.task if one.startswith("task")]
    scored: dict[str, tuple[int, Case]] = {}
    groups: dict[str, set[str]] = {"": set(), PIECES: set(), DISEASED: set()}
    require(
        task.is_ct or not config.diseased,
        "diseased=true paints in HU, but the first channel of the task is no CT; leave it out",
    )
    parts = {region.name: region.labels for region in task.regions} or {
        name: (name,) for name in task.labels
    }
    organs = {
        region: [value for value, name in values.items() if name in labels]
        for region, labels in parts.items()
    }
    folders = [output / f"fold_{fold}" for fold in range(config.num_folds)]
    more = coarse_arguments(config, folders)
    # The fine stage of a fold may see what the coarse stages of all folds say about their held-out
    # cases.
    coarse_steps: list[Step] = []
    fine_steps: list[Step] = []
    for fold, folder in enumerate(folders):
        held_out = list(split_cases(cases, fold=fold, num_folds=config.num_folds).val)
        whole = [case for case in held_out if case.labels]
        made = {
            "": held_out,
            PIECES: [
                part
                for case in whole
                if config.pieces
                for part in cut_partial_scans(case, organs, output / "pieces")
            ],
            DISEASED: [
                ill
                for case in whole
                if config.diseased
                for ill in paint_scan(case, list(organs.values()), output / "diseased")
            ],
        }
        for heading, some in made.items():
            groups[heading] |= {case.name for case in some}
        held_out = [case for some in made.values() for case in some]
        scored |= {case.name: (fold, case) for case in held_out}
        data = [
            f"data.cases={table}", f"data.fold={fold}", f"data.num_folds={config.num_folds}", "data.val_patients=[]",
            "data.test_patients=[]", f"data.labels_column={config.data.labels_column}", label_values,
        ]  # fmt: skip
        coarse_steps += stage_steps(config, "coarse", folder, data, output)
        fine_steps += stage_steps(config, "fine", folder, data, output, more)
        fine_steps.append(
            [
                "predict",
                f"input={write_case_table(folder / 'held_out.csv', held_out)}",
                f"output={output / 'predictions'}",
                *(f"{stage}={last_checkpoint(folder / stage)}" for stage in ("coarse", "fine")),
            ]
        )
    reference = write_case_table(output / "scored.csv", [case for _, case in scored.values()])
    fine_steps.append(
        [
            "evaluate",
            f"pred={output / 'predictions'}",
            f"ref={reference}",
            f"output={output / 'scores'}",
            label_values,
            *task_given,
        ]
    )
    # The folds share the trainings on phantoms: equal commands run once.
    run_steps(list(dict.fromkeys(map(tuple, [*coarse_steps, *fine_steps]))))
    rows = fold_rows(scored, output, task, values)
    write_rows(rows, output, groups)
    # `predict` states no bound for a region to which anything was added, so these do not calibrate
    # it.
    bound_rows = [row for row in rows if row["case"] in groups[""] and not row["added_ml"]]
    write_bound(bound_rows, {name: case for name, (_, case) in scored.items()}, config)
    print((output / "folds.md").read_text(encoding="utf-8"))
    return 0


def check_folds(cases: Sequence[Case], num_folds: int) -> None:
    """Refuse folds of a case table that a cross-validation would leave out or score twice.

    Raises:
        UserError: If the table has another number of folds, a fold that validates no case, or
            validates a case in two.
    """
    count = count_folds(cases)
    if count == 1:
        raise UserError(
            "the case table has one fold, which is no cross-validation; train on it with medseg train"
        )
    if count not in (None, num_folds):
        raise UserError(
            f"num_folds={num_folds}: the case table has {count} folds; give num_folds={count}"
        )
    if count is not None:
        _require_validation(cases, count)
    for case in cases:
        if case.fold_sides.count("val") > 1:
            raise UserError(
                f"the case table validates {case.name!r} in several folds, but a cross-validation scores each case once; keep one val "
                "in its columns fold_0, fold_1, …"
            )


def _require_validation(cases: Sequence[Case], num_folds: int) -> None:
    """Refuse a fold that validates no case, such as that of a part of LUNA16 that was not downloaded.

    Raises:
        UserError: With the number of the fold, and the column to correct.
    """
    has_columns = any(case.fold_sides for case in cases)
    validated = {case.fold for case in cases}
    for number in range(num_folds):
        if has_columns:
            is_validated = any(
                case.fold_sides[number] == "val" for case in cases if case.fold_sides
            )
            cure = f"mark some as val in its column fold_{number}, or remove the column and number those after it again"
        else:
            is_validated = number in validated
            cure = "number the folds in its column fold from 0 without a gap"
        if not is_validated:
            raise UserError(
                f"fold {number} of the case table validates no case, so there is nothing to score; {cure}"
            )


def fold_rows(
    scored: Mapping[str, tuple[int, Case]], output: Path, task: Task, label_values: dict[int, str]
) -> list[Row]:
    """Make one row per scored case and region: its fold, its scores, and how much of the region the crop contained."""
    region_labels = {region.name: region.labels for region in task.regions}
    rows = []
    for score in read_csv(output / "scores" / "metrics.csv"):
        name, region = score["case"], score["region"]
        fold, case = scored[name]
        report = json.loads((output / "predictions" / f"{name}.json").read_text(encoding="utf-8"))
        region_values = [
            value for value, label in label_values.items() if label in region_labels[region]
        ]
        rows.append(
            {
                "case": name,
                "fold": fold,
                "region": region,
                "trust": score["trust"],
                **{metric: float(score[metric]) for metric in METRICS},
                "agreement": report["agreements"].get(region)
                if region in report["boxes"]
                else None,
                "added_ml": report["added_ml"].get(region, 0.0),
                "share_in_crop": share_in_crop(case, region_values, report["boxes"].get(region)),
                "total_s": round(report["durations_s"]["total"], 1),
            }
        )
    return rows


def share_in_crop(case: Case, values: Sequence[int], box: dict[str, Any] | None) -> float:
    """Measure the share of a region's reference voxels that lies in the crop of the fine stage.

    Args:
        case: Case with labels.
        values: Values of the region in the reference file.
        box: The region's entry under `boxes` in the report of the prediction; None if the coarse
            stage did not find the region.

    Returns:
        Share in [0, 1]; 1 if the reference has no such voxel.
    """
    labels, grid = oriented_labels(case)
    indices = np.argwhere(np.isin(labels, values))
    if len(indices) == 0:
        return 1.0
    if box is None:
        return 0.0
    corners = grid.world_to_index_zyx(np.array(box["corners_xyz_mm"]))
    low, high = corners.min(axis=0), corners.max(axis=0)
    sizes = np.subtract(box["voxels"]["stop"], box["voxels"]["start"])
    # The corners are centres of voxels: the crop extends half a crop voxel beyond them.
    half = (high - low) / np.maximum(sizes - 1, 1) / 2
    return float(np.all((indices >= low - half) & (indices <= high + half), axis=1).mean())


def write_rows(rows: Sequence[Row], output: Path, groups: Mapping[str, Set[str]]) -> None:
    """Write `folds.csv` and `folds.md`.

    Args:
        rows: From `fold_rows`.
        output: Folder.
        groups: Line above each table to the names of its scans.
    """
    write_csv(output / "folds.csv", rows)
    tables = {
        heading: [row for row in rows if row["case"] in names] for heading, names in groups.items()
    }
    texts = [
        f"{heading}\n\n{_section(some)}" if heading else _section(some)
        for heading, some in tables.items()
        if some
    ]
    replace_text(output / "folds.md", "\n".join(texts))


def write_bound(
    rows: Sequence[Row], cases: Mapping[str, Case], config: CrossValidateConfig
) -> None:
    """Calibrate the lower bound on Dice on the whole scans: `bound.json`, which `make_weights` stores, and a line in `folds.md`.

    Args:
        rows: From `fold_rows`, of whole scans. Those count whose region was found and whose
            reference is not said to be doubtful.
        cases: Cases by name.
        config: Names the experiments, which the file keeps, and the folder.
    """
    output = Path(config.output)
    folds: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        if row["agreement"] is not None and row["trust"] in TRUSTED:
            patients = folds.setdefault(row["fold"], {})
            patients.setdefault(cases[row["case"]].patient or row["case"], []).append(
                (row["agreement"], row["dice"])
            )
    scores = {patient: found for patients in folds.values() for patient, found in patients.items()}
    (output / BOUND).unlink(missing_ok=True)
    if (bound := calibrate(scores, LEVEL)) is None:
        return
    replace_text(
        output / BOUND, json.dumps({"bound": asdict(bound), "experiments": experiments(config)})
    )
    usual = [bound.at(agreement) for regions in scores.values() for agreement, _ in regions]
    text = (
        f"Lower bound on Dice at a level of {LEVEL:.0%}: 1 - {bound.factor:.3g} * (1 - agreement of the stages + {bound.offset:g}), from {len(scores)} "
        f"patients; its median over their regions is {median(usual):.3f}."
    )
    if (covered := count_covered(list(folds.values()), LEVEL)) is not None:
        text += f" Each fold tested with the bound that the other folds give: {covered} patients reach it with every region."
    replace_text(
        output / "folds.md", (output / "folds.md").read_text(encoding="utf-8") + f"\n{text}\n"
    )


def _section(rows: Sequence[Row]) -> str:
    """Format a table with a summary: mean and worst Dice by trust where the reference has the region, else the largest volume found."""
    formats: Formats = {
        "dice": ".4f", "nsd_1mm": ".3f", "volume_pred_ml": ".0f", "volume_ref_ml": ".0f", "hd95_mm": distance_text, "share_in_crop": _percent,
    }  # fmt: skip
    lines = [markdown_table(rows, COLUMNS, formats)]
    present = [row for row in rows if row["volume_ref_ml"] > 0]
    for trust in dict.fromkeys(row["trust"] for row in present):
        scores = [row for row in present if row["trust"] == trust]
        worst = min(scores, key=lambda row: row["dice"])
        mean = sum(row["dice"] for row in scores) / len(scores)
        lines.append(
            f"Mean Dice, {trust or 'all'} ({len(scores)}): {mean:.4f}, worst {worst['dice']:.4f}: {_where(worst)}\n"
        )
    if absent := [row for row in rows if row["volume_ref_ml"] == 0]:
        most = max(absent, key=lambda row: row["volume_pred_ml"])
        lines.append(
            f"Largest false-positive volume where the region is absent ({len(absent)}): {most['volume_pred_ml']:.1f} ml: {_where(most)}\n"
        )
    return "\n".join(lines)


def _where(row: Row) -> str:
    return f"{row['case']} {row['region']} (scores/overlays/{row['case']}.png)"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
