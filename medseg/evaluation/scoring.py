"""Scoring of label maps against references: scores, their statistics, tables, pictures, a page."""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from medseg.data.case_table import Case
from medseg.errors import UserError, first_line
from medseg.evaluation.matching import (
    Prediction,
    Reference,
    find_predictions,
    find_references,
    read_pair,
)
from medseg.evaluation.pictures import draw_overlay, write_viewers
from medseg.evaluation.report_page import (
    ALL,
    DIRECTION_OF_METRIC,
    TABLE_DIGITS,
    check_baseline,
    read_baseline,
    write_page,
)
from medseg.evaluation.reports import (
    COSTS,
    beside,
    check_labels,
    read_case_report,
    read_cost,
    scan_of,
)
from medseg.geometry.grid import VoxelGrid
from medseg.inference.segmentation import StatedBound
from medseg.io.atomic import check_writable, replace_text
from medseg.io.inputs import case_name
from medseg.io.tables import refuse_table, table_lines, write_csv
from medseg.metrics.scores import score_region
from medseg.report.case_viewer import SUFFIX
from medseg.report.plots import score_plot
from medseg.task import LabelValues, Region, Task
from medseg.wording import first_few

# Tables that every evaluation writes; with a baseline there is `differences.csv` too.
TABLES = ("metrics.csv", "summary.csv", "costs.csv")
# Names of the scores of `score_region`, in the order of the tables.
METRICS = (*DIRECTION_OF_METRIC, "volume_pred_ml", "volume_ref_ml")
# Function of the masks of prediction and reference, both uint8 tensors (D, H, W) of 0 and 1, and of
# the voxel spacing (z, y, x) in mm, such as a `CaseMetric`.
RegionMetric = Callable[[Any, Any, tuple[float, float, float]], float]
# Statistics in `summary.csv`: column to the function that computes it from the finite scores.
FIGURES: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": np.mean,
    "std": np.std,
    "median": np.median,
    "min": np.min,
    "max": np.max,
}
# Columns of `summary.csv`, see `summarise`. `trust` is the reliability of the references that the
# case table states, such as `reference`; `infinite` counts the scores that are infinite or NaN.
COLUMNS = ("region", "trust", "metric", "number", "infinite", *FIGURES, "worst_case")
# Columns of the console table: key of a row to heading. The columns of metrics hold means; `std`,
# `min` and `worst_case` are those of Dice, see `console_table`.
_HEADINGS = {
    "region": "region",
    "trust": "trust",
    "number": "n",
    "dice": "Dice",
    "std": "±",
    "min": "min",
    "nsd_1mm": "NSD 1mm",
    "nsd_2mm": "NSD 2mm",
    "hd95_mm": "HD95 mm",
    "infinite": "inf",
    "worst_case": "worst case",
}
# Largest value of a label map with 16 bits.
MAX_FILE_VALUE = 65535
# Row of a table: column to value.
Row = Mapping[str, Any]


@dataclass
class EvaluationSummary:
    """Result of an evaluation.

    Attributes:
        rows: One per scored case and region, with the keys `case`, `region`, `trust`, `METRICS` and
            the names of further metrics.
        failed: Case to the reason why it could not be scored. The caller exits with 1 if any case
            failed.
        without_prediction: Cases that have a reference only.
        without_reference: Cases that have a prediction only.
        warnings: Further messages to the user.
        statistics: Rows of `summarise`: for each region and all together, for each trust and all.
        costs: Scored case to its `COSTS` by name, if the report beside its prediction states them.
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
    """Score the label maps of a folder, and write tables, pictures, viewers and a page.

    The files are `report.html`, `metrics.csv`, `summary.csv`, `costs.csv` and `summary.json`. A
    failing case is reported and does not affect the others. A region is left out unless
    `label_values` names all its labels.

    Args:
        pred_dir: Folder of predictions `<case>.nii.gz` (or another format of label maps), values as
            in `task`.
        ref: Case table, or folder of label maps with the same file names as the predictions.
        output: Folder to write to.
        task: Labels and regions.
        label_values: Value in the reference files to label name. Voxels of a label that the task
            does not have count as background.
        labels_column: Column of the case table with the label maps.
        split: Value of the column `split` whose cases are scored; None scores every case.
        pictures: Whether to draw `scores.png` and, where the image is known, `overlays/<case>.png`
            and `viewers/<case>.html`. The case table names the image, or else the report of the
            prediction.
        progress: Takes each line for the console.
        metrics: Name of each further metric to its function.
        num_pictures: Largest number of overlays inside `report.html`, the worst cases first.
        num_viewers: Largest number of viewers, the worst cases first.
        baseline: Output folder of another evaluation; the differences on the same cases are written
            to `differences.csv`.

    Returns:
        All scores, statistics and failures.

    Raises:
        UserError: If an input is missing, no case has both a prediction and a reference, or
            `output` holds the table of a prediction, or would replace the case table.
    """
    metrics = metrics or {}
    _check_metric_names(metrics)
    regions = _regions_in_files(task, label_values)
    baseline_rows = []
    if baseline is not None:
        baseline_rows = read_baseline(baseline)
    # Predictions and references are paired by a key: the name of the case, in Unicode NFC.
    predictions = find_predictions(pred_dir)
    references, other_split_keys = find_references(ref, labels_column, split)
    labelled = _with_labels(references)
    _check_trusts(labelled.values())
    summary, common_keys = _pair_cases(predictions, labelled, other_split_keys, regions, task)
    if not common_keys:
        raise UserError(
            f"none of the {len(predictions)} predictions in {pred_dir} has a reference in {ref} "
            f"(predictions: {first_few(predictions)}; references: {first_few(references)}); "
            "name each prediction after its case."
        )
    # These checks come before the results of an earlier evaluation are removed.
    if baseline is not None:
        check_baseline(baseline, baseline_rows, [references[key].name for key in common_keys])
    check_writable(output)
    _check_tables(output, ref)
    _remove_old_results(output, labelled.values())
    overlays = output / "overlays" if pictures else None
    for number, key in enumerate(common_keys, start=1):
        result_text = _score_case(
            summary,
            predictions[key],
            references[key],
            regions=regions,
            task=task,
            label_values=label_values,
            overlays=overlays,
            metrics=metrics,
        )
        progress(f"[{number}/{len(common_keys)}] {references[key].name}: {result_text}")
    summary.statistics = summarise(summary.rows)
    _write_tables(summary, output)
    if pictures and summary.rows:
        score_plot(summary.rows, output / "scores.png")
    _print_result(summary, progress)
    if summary.rows:
        # Scores and files of results name a case by the name of its reference, not by its key.
        pairs = {}
        for key in common_keys:
            reference = references[key]
            pairs[reference.name] = predictions[key], reference
        viewers = {}
        # Viewers come last: the worst cases are known only after all cases have been scored.
        if overlays is not None:
            viewers = write_viewers(
                summary.rows,
                pairs,
                task,
                label_values,
                overlays=overlays,
                folder=output / "viewers",
                num_viewers=num_viewers,
                say=progress,
            )
        prediction_viewers, bounds = _viewers_and_bounds(pairs)
        write_page(
            summary.rows,
            _over_all_trusts(summary.statistics),
            viewers=viewers,
            prediction_viewers=prediction_viewers,
            bounds=bounds,
            output=output,
            num_pictures=num_pictures,
            say=progress,
            overlays=overlays,
            notes=_notes(summary),
            costs=_mean_costs(summary),
            baseline=baseline,
            baseline_rows=baseline_rows,
            patients=_patients_of(references.values()),
        )
    progress(f"written to {output}")
    if summary.without_prediction:
        progress(_say_missing(summary.without_prediction, len(labelled), ref))
    return summary


def _with_labels(references: Mapping[str, Reference]) -> dict[str, Reference]:
    """Select the references that have a label map."""
    labelled = {}
    for key, reference in references.items():
        if reference.labels is not None:
            labelled[key] = reference
    return labelled


def _over_all_trusts(statistics: Sequence[Row]) -> list[Row]:
    """Select the statistics that count the regions of every trust."""
    return [row for row in statistics if row["trust"] == ALL]


def _say_missing(names: Sequence[str], num_references: int, ref: Path) -> str:
    """Say how many of the references have no prediction, and name the first few."""
    place = "folder" if ref.is_dir() else "table"
    return (
        f"{len(names)} of {num_references} cases of the {place} "
        f"have no prediction: {first_few(names)}"
    )


def _pair_cases(
    predictions: Mapping[str, Prediction],
    references: Mapping[str, Reference],
    other_split_keys: Collection[str],
    regions: Sequence[Region],
    task: Task,
) -> tuple[EvaluationSummary, list[str]]:
    """Find the cases with a prediction and a reference; note the other cases and regions.

    Args:
        predictions: Key of a case to its prediction.
        references: Key of a case to its reference, which has labels.
        other_split_keys: Keys of the cases of other splits.
        regions: Regions that are scored.
        task: Task with all regions.

    Returns:
        A summary of the cases without a partner and the regions that are not scored; and the keys
        of the cases with both files.
    """
    summary = EvaluationSummary()
    common_keys = []
    for key, reference in references.items():
        if key in predictions:
            common_keys.append(key)
        else:
            summary.without_prediction.append(reference.name)
    for key, prediction in predictions.items():
        # No note about cases of other splits: `predict` may have been run on all splits.
        if key not in references and key not in other_split_keys:
            summary.without_reference.append(case_name(prediction.path))
    for region in scored_regions(task):
        if region not in regions:
            summary.warnings.append(
                f"{region.name} is not scored: data.label_values does not name all its labels"
            )
    return summary, common_keys


def _check_metric_names(metrics: Mapping[str, RegionMetric]) -> None:
    """Refuse further metrics that have the name of another column of `metrics.csv`."""
    taken_names = sorted({"case", "region", "trust", *METRICS} & set(metrics))
    if taken_names:
        raise UserError(
            f"metrics.{', '.join(taken_names)}: a column of metrics.csv has this name already; "
            "choose another one"
        )


def _check_trusts(references: Iterable[Reference]) -> None:
    """Refuse a trust called `ALL`, the name of the statistics over every trust."""
    for reference in references:
        if reference.case is not None and ALL in reference.case.trust.values():
            raise UserError(
                f"the case {reference.name!r} has the trust {ALL!r}, which stands for every trust "
                "in the scores; choose another word in the columns trust_… of the case table"
            )


def _viewers_and_bounds(
    pairs: Mapping[str, tuple[Prediction, Reference]],
) -> tuple[dict[str, Path], dict[str, Mapping[str, StatedBound]]]:
    """Find the viewers and the bounds on Dice that `predict` wrote beside the predictions.

    Args:
        pairs: Case to its prediction and reference.

    Returns:
        Case to its viewer; and case to its bounds by region.
    """
    viewers = {}
    bounds: dict[str, Mapping[str, StatedBound]] = {}
    for name, (prediction, _) in pairs.items():
        bounds[name] = read_case_report(prediction.path).dice_at_least
        viewer = beside(prediction.path, SUFFIX)
        if viewer.is_file():
            viewers[name] = viewer
    return viewers, bounds


def _notes(summary: EvaluationSummary) -> dict[str, list[str]]:
    """Map headings of the page to the lines below them: failures, missing files and warnings."""
    return {
        "Failed": [f"{case}: {reason}" for case, reason in summary.failed.items()],
        "Without a prediction": summary.without_prediction,
        "Without a reference": summary.without_reference,
        "Warnings": summary.warnings,
    }


def _patients_of(references: Iterable[Reference]) -> dict[str, str]:
    """Map each case to its patient; empty if the references do not come from a case table."""
    patients = {}
    for reference in references:
        if reference.case is not None:
            patients[reference.name] = reference.case.patient
    return patients


def _check_tables(output: Path, ref: Path) -> None:
    """Refuse to replace the case table, or the `summary.csv` of a prediction.

    Args:
        output: Folder of the results.
        ref: Case table, or folder of label maps.

    Raises:
        UserError: If `output` holds one of them under the name of a table of scores.
    """
    for name in (*TABLES, "differences.csv"):
        if os.path.realpath(output / name) == os.path.realpath(ref):
            raise UserError(
                f"{ref} is the case table and would be overwritten; give another output than "
                f"{output}"
            )
    # The first columns of the table of `predict`.
    refuse_table(
        output / "summary.csv",
        ("case", "status"),
        f"the volumes of a prediction; give another output than {output}",
    )


def _remove_old_results(output: Path, references: Iterable[Reference]) -> None:
    """Remove files of an earlier evaluation that this evaluation does not always write.

    Without a scored case there is no page, without a baseline no table of differences, without
    `pictures` no picture: the old files would stay beside the new scores. In a folder without the
    table of an evaluation, files of these names are not from `evaluate` and are kept.
    """
    if not _holds_evaluation(output):
        return
    paths = [output / "report.html", output / "differences.csv", output / "scores.png"]
    for reference in references:
        paths.append(output / "viewers" / f"{reference.name}{SUFFIX}")
        paths.append(output / "overlays" / f"{reference.name}.png")
    for path in paths:
        path.unlink(missing_ok=True)


def _holds_evaluation(folder: Path) -> bool:
    """Whether `metrics.csv` of a folder is of an evaluation: loggers write a file of this name."""
    try:
        with (folder / "metrics.csv").open(encoding="utf-8", errors="replace") as table:
            return table.readline().startswith("case,region,")
    except OSError:
        return False


def scored_regions(task: Task) -> tuple[Region, ...]:
    """Regions of a task; where it has none, a region of each label."""
    if task.regions:
        return task.regions
    return tuple(Region(name, (name,)) for name in task.labels)


def _regions_in_files(task: Task, label_values: LabelValues) -> list[Region]:
    """Select the regions whose labels are all named by `label_values`.

    Raises:
        UserError: If there is no such region, or a value is out of the range of label maps.
    """
    # If the references lack labels of a region, all scores of the region would be too low.
    names = set(label_values.values())
    regions = [region for region in scored_regions(task) if names.issuperset(region.labels)]
    if not regions:
        raise UserError(
            f"data.label_values names {', '.join(label_values.values()) or 'nothing'}, expected "
            f"the labels of at least one region of the task {task.name} "
            f"({', '.join(task.labels)}); correct the names."
        )
    for value, name in label_values.items():
        # Other keys are texts: names of structures in DICOM files or folders of binary masks.
        if not isinstance(value, int):
            continue
        # Some files mark background, or what is ignored, with a negative value.
        least = 0 if name in task.labels else -MAX_FILE_VALUE
        if not least <= value <= MAX_FILE_VALUE:
            raise UserError(
                f"data.label_values.{name} has the value {value}, "
                f"expected values of label maps from {least} to {MAX_FILE_VALUE}; correct it."
            )
    return regions


def _score_case(
    summary: EvaluationSummary,
    prediction: Prediction,
    reference: Reference,
    *,
    regions: Sequence[Region],
    task: Task,
    label_values: LabelValues,
    overlays: Path | None,
    metrics: Mapping[str, RegionMetric],
) -> str:
    """Add scores, cost and warnings of one case, or its failure, to the summary.

    Args:
        summary: Receives the results.
        prediction: Prediction of the case.
        reference: Reference of the case.
        regions: Regions to score.
        task: Labels and channels.
        label_values: Value in the reference files to label name.
        overlays: Folder for the picture of the case, if its image is known; None = no pictures.
        metrics: Name of each further metric to its function.

    Returns:
        The result of the case for the console: Dice of each region, or the reason of the failure.
    """
    try:
        check_labels(prediction.path, task)
        pred, target, grid, warnings = read_pair(prediction, reference, task, label_values)
    except (UserError, OSError, ValueError) as error:
        summary.failed[reference.name] = str(error)
        return f"FAILED, {error}"
    summary.warnings += [f"{reference.name}: {warning}" for warning in warnings]
    trust_by_region: Mapping[str, str] = {}
    # Only a case table states the trust in a reference, by region.
    if reference.case is not None:
        trust_by_region = reference.case.trust
    dice_texts = []
    for region in regions:
        values = task.region_values(region)
        pred_mask = np.isin(pred, values)
        target_mask = np.isin(target, values)
        scores = score_region(pred_mask, target_mask, grid.spacing_mm)
        further_scores, failures = _further_scores(metrics, pred_mask, target_mask, grid.spacing_mm)
        scores |= further_scores
        for failure in failures:
            summary.warnings.append(f"{reference.name}, {region.name}: {failure}")
        row = {
            "case": reference.name,
            "region": region.name,
            "trust": trust_by_region.get(region.name, ""),
            **scores,
        }
        summary.rows.append(row)
        dice_texts.append(f"{region.name} {scores['dice']:.4f}")
    cost = read_cost(prediction.path)
    if cost:
        summary.costs[reference.name] = cost
    if overlays is not None:
        scan = scan_of(reference, prediction.path, task)
        warnings = _draw(reference.name, scan, pred, target, grid, task, overlays)
        summary.warnings += [f"{reference.name}: {warning}" for warning in warnings]
    return f"Dice {', '.join(dice_texts)}"


def _draw(
    case: str,
    scan: Case | None,
    pred: np.ndarray,
    target: np.ndarray,
    grid: VoxelGrid,
    task: Task,
    overlays: Path,
) -> list[str]:
    """Draw the overlay of a case, if its scan is known, and return the warnings."""
    try:
        # An interrupted evaluation leaves pictures, which must not stand beside the new scores.
        (overlays / f"{case}.png").unlink(missing_ok=True)
        if scan is None:
            return []
        return draw_overlay(scan, pred, target, grid, task, overlays)
    # If the scan cannot be read, only the picture is missing: the scores do not need the scan.
    except (UserError, OSError, ValueError) as error:
        return [f"no picture, {error}"]


def _further_scores(
    metrics: Mapping[str, RegionMetric],
    pred_mask: np.ndarray,
    target_mask: np.ndarray,
    spacing_mm: tuple[float, float, float],
) -> tuple[dict[str, float], list[str]]:
    """Compute the further metrics of one region.

    Args:
        metrics: Name of each further metric to its function.
        pred_mask: Voxels of the region in the prediction, (D, H, W), boolean.
        target_mask: Voxels of the region in the reference, (D, H, W), boolean.
        spacing_mm: Spacing of the voxels, (z, y, x).

    Returns:
        Metric name to score, NaN if the metric failed; and a sentence for each failure.
    """
    if not metrics:
        return {}, []
    import torch  # the import takes seconds, and `score_region` needs no torch

    pred = torch.from_numpy(pred_mask.astype(np.uint8))
    target = torch.from_numpy(target_mask.astype(np.uint8))
    scores = {}
    failures = []
    for name, metric in metrics.items():
        try:
            scores[name] = metric(pred, target, spacing_mm)
        except Exception as error:  # user code, which may fail in any way, as on an empty mask
            scores[name] = math.nan
            failures.append(
                f"metrics.{name} has no score ({type(error).__name__}: {first_line(error)})"
            )
    return scores, failures


def _write_tables(summary: EvaluationSummary, output: Path) -> None:
    """Write `metrics.csv`, `summary.csv`, `costs.csv` and `summary.json`."""
    metrics = _metrics_of(summary.rows)
    metric_formats = dict.fromkeys(metrics, f".{TABLE_DIGITS}f")
    columns = ("case", "region", "trust", *metrics)
    metrics_path, summary_path, costs_path = (output / name for name in TABLES)
    write_csv(metrics_path, summary.rows, columns, metric_formats)
    figure_formats = dict.fromkeys(FIGURES, ".6f")
    write_csv(summary_path, summary.statistics, COLUMNS, figure_formats)
    costs = [{"case": case, **cost} for case, cost in summary.costs.items()]
    write_csv(costs_path, costs, ("case", *COSTS), dict.fromkeys(COSTS, ".3f"))
    scored_cases = {row["case"] for row in summary.rows}
    document = {"cases": len(scored_cases), **asdict(summary)}
    # The rows are in `metrics.csv`: JSON cannot hold their infinite distances.
    del document["rows"]
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    replace_text(output / "summary.json", f"{text}\n")


def _mean_costs(summary: EvaluationSummary) -> list[tuple[str, str]]:
    """List title and formatted mean of each cost; empty if no prediction states its costs."""
    if not summary.costs:
        return []
    titles = {"total_s": "seconds a case", "peak_gb": "GB at the peak"}
    costs = []
    for name, title in titles.items():
        mean = np.mean([cost[name] for cost in summary.costs.values()])
        costs.append((title, f"{mean:.1f}"))
    return costs


def _print_result(summary: EvaluationSummary, progress: Callable[[str], None]) -> None:
    """Print the warnings, the main statistics, the costs and the failures."""
    for text in summary.warnings:
        progress(f"warning: {text}")
    if summary.without_reference:
        progress(
            f"warning: no reference for {len(summary.without_reference)}: "
            f"{first_few(summary.without_reference)}"
        )
    for line in console_table(summary.statistics):
        progress(line)
    if summary.costs:
        means = {}
        maxima = {}
        for name in COSTS:
            values = [cost[name] for cost in summary.costs.values()]
            means[name] = np.mean(values)
            maxima[name] = max(values)
        progress(
            f"a case took {means['total_s']:.1f} s (at most {maxima['total_s']:.1f}), "
            f"{means['memory_gb_s']:.1f} GB·s of memory "
            f"(at most {maxima['memory_gb_s']:.1f}), {maxima['peak_gb']:.2f} GB at the peak"
        )
    if summary.failed:
        progress(f"{len(summary.failed)} failed: {first_few(list(summary.failed))}")


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compute the statistics of every group: each region and all, each trust and all.

    Args:
        rows: Scores with the keys `case`, `region`, `trust` ("" = not given) and `METRICS`; an
            empty list gives no statistics.

    Returns:
        Rows with the keys `COLUMNS`. `number` counts the scores, `infinite` those that are not
            finite (also NaN). The `FIGURES` are computed from the finite scores and are None if
            there are none; `std` is the population standard deviation. `worst_case` is the name of
            the case with the worst score, which may be an infinite distance; it is empty for
            volumes, which have no better or worse, and for further metrics, whose direction is not
            known.
    """
    metrics = _metrics_of(rows)
    # None stands for every region or every trust. `ALL` cannot: a region may have this name.
    regions = [*dict.fromkeys(row["region"] for row in rows), None]
    trusts = [None, *sorted({row["trust"] for row in rows} - {""})]
    statistics = []
    for region in regions:
        # With None, `region in (None, …)` holds for each row; likewise `trust` below.
        region_rows = [row for row in rows if region in (None, row["region"])]
        for trust in trusts:
            group = [row for row in region_rows if trust in (None, row["trust"])]
            if not group:
                continue
            for metric in metrics:
                statistics.append(_statistics(group, region or ALL, trust or ALL, metric))
    return statistics


def _metrics_of(rows: Sequence[Row]) -> list[str]:
    """List the metrics of rows: `METRICS`, then the further metrics, which are in every row."""
    names = list(METRICS)
    if rows:
        for key in rows[0]:
            if key not in ("case", "region", "trust", *METRICS):
                names.append(key)
    return names


def console_table(statistics: Sequence[Row]) -> list[str]:
    """Format the main figures of each group as a table; no line if there are no statistics.

    Args:
        statistics: From `summarise`.

    Returns:
        Lines of a table: the headings, then a row for each group (a region and a trust).
    """
    # One dictionary for each group: metric to its statistics.
    groups: list[dict[str, Row]] = []
    for row in statistics:
        # `summarise` lists all metrics of a group, then those of the next group.
        if row["metric"] == METRICS[0]:
            groups.append({})
        groups[-1][row["metric"]] = row
    if not groups:
        return []
    # If all references have the same trust, its row would repeat the row of every trust.
    has_trusts = _differ_in_trust([group["dice"] for group in groups])
    rows = []
    for group in groups:
        if group["dice"]["trust"] != ALL and not has_trusts:
            continue
        # Number, standard deviation, minimum and worst case are those of Dice.
        table_row = dict(group["dice"])
        for metric in METRICS:
            table_row[metric] = group[metric]["mean"]
        # Of the columns of this table, only HD95 can be infinite.
        table_row["infinite"] = group["hd95_mm"]["infinite"]
        rows.append(table_row)
    formats = dict.fromkeys(("dice", "std", "min", "nsd_1mm", "nsd_2mm"), ".4f")
    formats["hd95_mm"] = ".2f"
    return table_lines(rows, _HEADINGS, formats, missing="-")


def _differ_in_trust(statistics: Sequence[Row]) -> bool:
    """Whether the references of some region differ in their trust.

    In that case some trust has fewer scores than its region.

    Args:
        statistics: Rows of one metric, from `summarise`.
    """
    num_scores = 0  # of the region, with any trust
    for row in statistics:
        # In each region the row of every trust comes first.
        if row["trust"] == ALL:
            num_scores = row["number"]
        elif row["number"] < num_scores:
            return True
    return False


def _statistics(group: Sequence[Row], region: str, trust: str, metric: str) -> dict[str, Any]:
    """Compute the row of `summary.csv` for one metric over a group of at least one score row."""
    scores = [float(row[metric]) for row in group]
    finite_scores = np.array([score for score in scores if math.isfinite(score)])
    statistics = {
        "region": region,
        "trust": trust,
        "metric": metric,
        "number": len(scores),
        "infinite": len(scores) - len(finite_scores),
    }
    for name, function in FIGURES.items():
        statistics[name] = float(function(finite_scores)) if len(finite_scores) else None
    statistics["worst_case"] = ""
    # The functions of `score_region`, which alone have a direction, never give NaN.
    direction = DIRECTION_OF_METRIC.get(metric)
    if direction is not None:
        qualities = [direction * score for score in scores]  # larger is better
        worst_row = group[qualities.index(min(qualities))]
        statistics["worst_case"] = worst_row["case"]
    return statistics
