"""Scoring of label maps against references: scores and their statistics, time and memory of the predictions, tables, pictures."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medseg.errors import UserError, require
from medseg.evaluation.matching import Reference, find_predictions, find_references, read_pair
from medseg.evaluation.pictures import draw_overlay, write_viewers
from medseg.evaluation.report_page import ALL, RANKED, TABLE_DIGITS, read_baseline, write_page
from medseg.evaluation.reports import COSTS, beside, check_labels, read_cost, read_words, scan_of
from medseg.inference.segmentation import StatedBound
from medseg.io.atomic import check_writable, replace_text
from medseg.io.inputs import case_name
from medseg.io.tables import refuse_table, table_lines, write_csv
from medseg.metrics.scores import score_region
from medseg.report.case_viewer import SUFFIX
from medseg.report.plots import score_plot
from medseg.task import LabelValues, Region, Task
from medseg.wording import first_few

METRICS = (*RANKED, "volume_pred_ml", "volume_ref_ml")
RegionMetric = Callable[[Any, Any, tuple[float, float, float]], float]
"""Function of two tensors (D, H, W) of 0 and 1, prediction and reference, and the voxel spacing in mm, such as a `CaseMetric`."""
COLUMNS = (
    "region",
    "trust",
    "metric",
    "number",
    "infinite",
    "mean",
    "std",
    "median",
    "min",
    "max",
    "worst_case",
)
_HEADINGS = {
    "region": "region", "trust": "trust", "number": "n", "dice": "Dice", "std": "±", "min": "min", "nsd_1mm": "NSD 1mm",
    "nsd_2mm": "NSD 2mm", "hd95_mm": "HD95 mm", "infinite": "inf", "worst_case": "worst case",
}  # fmt: skip
MAX_FILE_VALUE = 65535
Row = Mapping[str, Any]


@dataclass
class EvaluationSummary:
    """Result of an evaluation.

    Attributes:
        rows: One per scored case and region: `case`, `region`, `trust`, `METRICS` and further
            metrics by their name.
        failed: Case to the reason why it could not be scored. The caller exits with 1 if there is
            any.
        without_prediction: Cases that have a reference only.
        without_reference: Cases that have a prediction only.
        warnings: Further messages to the user.
        statistics: Per region and over all, per trust and over all; see `summarise`.
        costs: Scored case to its `COSTS`, where the report beside the prediction has them.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    without_prediction: list[str] = field(default_factory=list)
    without_reference: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    statistics: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)


def evaluate_folder(
    pred_dir: Path,
    ref: Path,
    output: Path,
    task: Task,
    label_values: LabelValues,
    labels_column: str = "labels",
    split: str | None = None,
    pictures: bool = True,
    progress: Callable[[str], None] = print,
    metrics: Mapping[str, RegionMetric] | None = None,
    num_pictures: int = 24,
    num_viewers: int = 10,
    baseline: Path | None = None,
) -> EvaluationSummary:
    """Score the label maps of a folder; write `report.html`, `metrics.csv`, `summary.csv`, `costs.csv`, `summary.json`, pictures, viewers.

    A failing case is reported and does not affect the others. A region whose labels the references
    do not name (`label_values`) is left out.

    Args:
        pred_dir: Folder of predictions `<case>.nii.gz` (or another format of label maps), values as
            in `task`.
        ref: Case table, or folder of label maps whose file names are those of the predictions.
        output: Folder to write to.
        task: Labels and regions.
        label_values: Value in the reference files to name of the label; names unknown to the task
            are background.
        labels_column: Column of the case table with the label maps.
        split: Part of the case table to score; None scores every case.
        pictures: Whether to draw `scores.png` and, where the image is known, `overlays/<case>.png`
            and `viewers/<case>.html`. The case table names the image, or else the report of the
            prediction.
        progress: Takes each line for the console.
        metrics: Further metrics by name.
        num_pictures: Largest number of overlays inside `report.html`, the worst cases first.
        num_viewers: Largest number of viewers, the worst cases first.
        baseline: Output folder of another evaluation; `differences.csv` gets the differences on the
            same cases.

    Returns:
        All scores, statistics and failures.

    Raises:
        UserError: If an input is missing or no case has both a prediction and a reference.
    """
    taken = sorted({"case", "region", "trust", *METRICS} & set(metrics or {}))
    require(
        not taken,
        f"metrics.{', '.join(taken)}: a column of metrics.csv has this name already; choose another one",
    )
    regions = _scored_regions(task, label_values)
    baseline_rows = read_baseline(baseline) if baseline else []
    predictions = find_predictions(pred_dir)
    references, elsewhere = find_references(ref, labels_column, split)
    labelled = {
        key: reference for key, reference in references.items() if reference.labels is not None
    }
    common = _common_keys(labelled, references, predictions, pred_dir, ref)
    check_writable(output)
    refuse_table(
        output / "summary.csv",
        ("case", "status", "label"),
        f"the volumes of a prediction; give another output than {output}",
    )
    summary = EvaluationSummary(
        without_prediction=[
            reference.name for key, reference in labelled.items() if key not in predictions
        ],
        without_reference=[
            case_name(paths[0])
            for key, paths in predictions.items()
            if key not in {*common, *elsewhere}
        ],
        warnings=[
            f"{region.name} is not scored: data.label_values does not name all its labels"
            for region in scored_regions(task)
            if region not in regions
        ],
    )
    overlays = output / "overlays" if pictures else None
    for name in (reference.name for reference in labelled.values()):  # of an earlier evaluation
        (output / "viewers" / f"{name}{SUFFIX}").unlink(missing_ok=True)
        if overlays:
            (overlays / f"{name}.png").unlink(missing_ok=True)
    for number, key in enumerate(common, start=1):
        line = _score_case(
            summary,
            predictions[key],
            references[key],
            regions,
            task,
            label_values,
            overlays,
            metrics or {},
        )
        progress(f"[{number}/{len(common)}] {references[key].name}: {line}")
    summary.statistics = summarise(summary.rows)
    _write(summary, output)
    if pictures and summary.rows:
        score_plot(summary.rows, output / "scores.png")
    _report(summary, progress)
    if summary.rows:
        pairs = {references[key].name: (predictions[key], references[key]) for key in common}
        viewers = {}
        if overlays:
            viewers = write_viewers(
                summary.rows, pairs, task, label_values, overlays, output / "viewers", num_viewers
            )
        found = {
            name: path
            for name, (files, _) in pairs.items()
            if (path := beside(files[0], SUFFIX)).is_file()
        }
        bounds = {name: read_words(files[0]).dice_at_least for name, (files, _) in pairs.items()}
        patients = {
            one.name: one.case.patient for one in references.values() if one.case is not None
        }
        _write_page(
            summary,
            viewers,
            found,
            bounds,
            output,
            overlays,
            num_pictures,
            baseline,
            baseline_rows,
            patients,
            progress,
        )
    progress(f"written to {output}")
    if summary.without_prediction:
        progress(
            f"{len(summary.without_prediction)} of {len(labelled)} cases of the {'folder' if ref.is_dir() else 'table'} "
            f"have no prediction: {first_few(summary.without_prediction)}"
        )
    return summary


def _common_keys(
    labelled: Mapping[str, Reference],
    references: Mapping[str, Reference],
    predictions: Mapping[str, Any],
    pred_dir: Path,
    ref: Path,
) -> list[str]:
    """Keys of the references that have a prediction.

    Raises:
        UserError: If there is none.
    """
    common = [key for key in labelled if key in predictions]
    require(
        bool(common),
        f"none of the {len(predictions)} predictions in {pred_dir} has a reference in {ref} "
        f"(predictions: {first_few(list(predictions))}; references: {first_few(list(references))}); "
        "name each prediction after its case.",
    )
    return common


def scored_regions(task: Task) -> tuple[Region, ...]:
    """Regions of a task; where it has none, a region of each label."""
    return task.regions or tuple(Region(name, (name,)) for name in task.labels)


def _scored_regions(task: Task, label_values: LabelValues) -> list[Region]:
    """Regions of the task whose labels the reference files have; each label is one where the task has no regions.

    Raises:
        UserError: If there is none, or a value cannot be one of a label map.
    """
    regions = [
        region
        for region in scored_regions(task)
        if set(region.labels) <= set(label_values.values())
    ]
    require(
        bool(regions),
        f"data.label_values names {', '.join(label_values.values()) or 'nothing'}, expected the labels of "
        f"at least one region of the task {task.name} ({', '.join(task.labels)}); correct the names.",
    )
    values = [value for value in label_values if isinstance(value, int)] or [0]
    require(
        0 <= min(values) <= max(values) <= MAX_FILE_VALUE,
        f"data.label_values has values from {min(values)} to {max(values)}, expected values of label "
        f"maps from 0 to {MAX_FILE_VALUE}; correct them.",
    )
    return regions


def _score_case(
    summary: EvaluationSummary,
    pred_files: Sequence[Path],
    reference: Reference,
    regions: Sequence[Region],
    task: Task,
    label_values: LabelValues,
    overlays: Path | None,
    metrics: Mapping[str, RegionMetric],
) -> str:
    """Add scores, cost, warnings or the failure of one case to the summary; draw it where its image is known.

    Returns:
        The result of the case in one line.
    """
    case = reference.case
    try:
        check_labels(pred_files[0], task)
        pred, target, grid = read_pair(pred_files, reference, task, label_values)
    except (UserError, OSError, ValueError) as error:
        summary.failed[reference.name] = str(error)
        return f"FAILED, {error}"
    dices = []
    for region in regions:
        values = task.region_values(region)
        masks = np.isin(pred, values), np.isin(target, values)
        scores = score_region(*masks, grid.spacing_mm) | _further_scores(
            metrics, masks, grid.spacing_mm
        )
        summary.rows.append(
            {
                "case": reference.name,
                "region": region.name,
                "trust": case.trust.get(region.name, "") if case else "",
                **scores,
            }
        )
        dices.append(f"{region.name} {scores['dice']:.4f}")
    if cost := read_cost(pred_files[0]):
        summary.costs[reference.name] = cost
    if overlays is not None and (scan := scan_of(reference, pred_files[0], task)) is not None:
        try:
            warnings = draw_overlay(scan, pred, target, grid, task, overlays)
            summary.warnings += [f"{scan.name}: {warning}" for warning in warnings]
        except (UserError, OSError, ValueError) as error:
            summary.warnings.append(f"{reference.name}: no picture, {error}")
    return f"Dice {', '.join(dices)}"


def _further_scores(
    metrics: Mapping[str, RegionMetric],
    masks: Sequence[np.ndarray],
    spacing_mm: tuple[float, float, float],
) -> dict[str, float]:
    if not metrics:
        return {}
    import torch  # takes seconds, and the own scores do without it

    maps = [torch.from_numpy(mask.astype(np.uint8)) for mask in masks]
    return {name: metric(maps[0], maps[1], spacing_mm) for name, metric in metrics.items()}


def _write(summary: EvaluationSummary, output: Path) -> None:
    """Write the tables and the document."""
    names = _metrics_of(summary.rows)
    write_csv(
        output / "metrics.csv",
        summary.rows,
        ("case", "region", "trust", *names),
        dict.fromkeys(names, f".{TABLE_DIGITS}f"),
    )
    write_csv(
        output / "summary.csv",
        summary.statistics,
        COLUMNS,
        dict.fromkeys(("mean", "std", "median", "min", "max"), ".6f"),
    )
    write_csv(
        output / "costs.csv",
        [{"case": case, **cost} for case, cost in summary.costs.items()],
        ("case", *COSTS),
        dict.fromkeys(COSTS, ".3f"),
    )
    document = {"cases": len({row["case"] for row in summary.rows}), **asdict(summary)}
    del document["rows"]
    replace_text(
        output / "summary.json",
        json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    )


def _write_page(
    summary: EvaluationSummary,
    viewers: Mapping[str, Path],
    prediction_viewers: Mapping[str, Path],
    bounds: Mapping[str, Mapping[str, StatedBound]],
    output: Path,
    overlays: Path | None,
    num_pictures: int,
    baseline: Path | None,
    baseline_rows: Sequence[Row],
    patients: Mapping[str, str],
    progress: Callable[[str], None],
) -> None:
    """Write the page with all that the console says."""
    write_page(
        summary.rows,
        [one for one in summary.statistics if one["trust"] == ALL],
        viewers,
        prediction_viewers,
        bounds,
        output,
        num_pictures,
        progress,
        overlays=overlays,
        notes={
            "Failed": [f"{case}: {reason}" for case, reason in summary.failed.items()],
            "Without a prediction": summary.without_prediction,
            "Without a reference": summary.without_reference,
            "Warnings": summary.warnings,
        },
        costs=[
            (name, f"{np.mean([cost[key] for cost in summary.costs.values()]):.1f}")
            for key, name in (("total_s", "seconds a case"), ("peak_gb", "GB at the peak"))
            if summary.costs
        ],
        baseline=baseline,
        baseline_rows=baseline_rows,
        patients=patients,
    )


def _report(summary: EvaluationSummary, progress: Callable[[str], None]) -> None:
    """Print the warnings and a compact table."""
    for text in summary.warnings:
        progress(f"warning: {text}")
    if summary.without_reference:
        progress(
            f"warning: no reference for {len(summary.without_reference)}: {first_few(summary.without_reference)}"
        )
    for line in console_table(summary.statistics):
        progress(line)
    if summary.costs:
        mean, most = (
            {name: pick([cost[name] for cost in summary.costs.values()]) for name in COSTS}
            for pick in (np.mean, max)
        )
        progress(
            f"a case took {mean['total_s']:.1f} s (at most {most['total_s']:.1f}), {mean['memory_gb_s']:.1f} GB·s of memory "
            f"(at most {most['memory_gb_s']:.1f}), {most['peak_gb']:.2f} GB at the peak"
        )
    if summary.failed:
        progress(f"{len(summary.failed)} failed: {first_few(list(summary.failed))}")


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compute the statistics of every group: each region and all, each trust and all.

    Args:
        rows: Scores with the keys `case`, `region`, `trust` ("" = not given) and `METRICS`; an
            empty list gives no statistics.

    Returns:
        Rows with the keys `COLUMNS`: `number` of scores; `infinite`, those of them without a finite
            value, which the following figures leave out; `std` is divided by the number, not by one
            less; the figures are None where every score is infinite. `worst_case` has the worst
            score (an infinite distance counts); it is empty for volumes, which have no better or
            worse, and for further metrics, whose direction is not known.
    """
    statistics = []
    for region in [*dict.fromkeys(row["region"] for row in rows), ALL]:
        for trust in [ALL, *sorted({row["trust"] for row in rows} - {""})]:
            group = [
                row
                for row in rows
                if region in (row["region"], ALL) and trust in (row["trust"], ALL)
            ]
            if group:
                statistics += [
                    _statistics(group, region, trust, metric) for metric in _metrics_of(rows)
                ]
    return statistics


def _metrics_of(rows: Sequence[Row]) -> list[str]:
    """Names of the metrics in rows: `METRICS`, then further ones."""
    return [
        *METRICS,
        *(
            key
            for key in (rows[0] if rows else {})
            if key not in ("case", "region", "trust", *METRICS)
        ),
    ]


def console_table(statistics: Sequence[Row]) -> list[str]:
    """Lay the main figures of each group out in aligned columns; no statistics give no line."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for one in statistics:
        groups.setdefault((one["region"], one["trust"]), {})[one["metric"]] = one
    has_trusts = len({trust for _, trust in groups} - {ALL}) > 1
    rows = [
        {
            **group["dice"],
            **{metric: group[metric]["mean"] for metric in METRICS},
            "infinite": group["hd95_mm"]["infinite"],
        }
        for (_, trust), group in groups.items()
        if trust == ALL or has_trusts
    ]
    formats = {
        "hd95_mm": ".2f",
        **dict.fromkeys(("dice", "std", "min", "nsd_1mm", "nsd_2mm"), ".4f"),
    }
    return table_lines(rows, _HEADINGS, formats, missing="-") if rows else []


def _statistics(group: Sequence[Row], region: str, trust: str, metric: str) -> dict[str, Any]:
    """Statistics of one metric over one group of at least one row."""
    values = [float(row[metric]) for row in group]
    finite = np.array([value for value in values if math.isfinite(value)])
    figures = (
        float(function(finite)) if len(finite) else None
        for function in (np.mean, np.std, np.median, np.min, np.max)
    )
    worst = max(values) if metric == "hd95_mm" else min(values)
    worst_case = group[values.index(worst)]["case"] if metric in RANKED else ""
    return dict(
        zip(
            COLUMNS,
            (region, trust, metric, len(values), len(values) - len(finite), *figures, worst_case),
            strict=True,
        )
    )
