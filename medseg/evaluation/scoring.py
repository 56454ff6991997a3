"""Score label maps against references: one row per case and region, statistics, pictures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.build.cases import file_values
from medseg.config.schema import EvaluateConfig
from medseg.data.task import Task
from medseg.errors import EXIT_FAILED, UserError
from medseg.evaluation.matching import Reference, describe, find_predictions, find_references, is_same_grid, read_pair, some_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import check_writable, replace_text
from medseg.io.inputs import case_name
from medseg.io.read import read_image
from medseg.metrics.summary import METRICS, ScoreRow, Statistics, console_table, summarise
from medseg.metrics.surface import score_region
from medseg.pictures.overlay import overlay_montage
from medseg.pictures.scores import ScorePoint, score_plot
from medseg.preprocess.orient import orient

MAX_FILE_VALUE = 65535


class Cost(NamedTuple):
    """What a prediction cost, from the report beside it.

    Attributes:
        total_s: Seconds from file to file.
        memory_gb_s: Area under its memory over time.
        peak_gb: Most memory that its process had held when it was done.
    """

    total_s: float
    memory_gb_s: float
    peak_gb: float


@dataclass(frozen=True)
class EvaluationSummary:
    """What an evaluation found.

    Attributes:
        rows: One per scored case and region.
        statistics: Per region and over all, per trust and over all.
        failed: Case to the sentence why it could not be scored. The caller exits with 1 if there is any.
        without_prediction: Cases that have a reference only.
        without_reference: Cases that have a prediction only.
        warnings: What else the user should know.
        costs: Scored case to what its prediction cost, where the report beside it says so.
    """

    rows: tuple[ScoreRow, ...]
    statistics: tuple[Statistics, ...]
    failed: dict[str, str]
    without_prediction: tuple[str, ...]
    without_reference: tuple[str, ...]
    warnings: tuple[str, ...]
    costs: dict[str, Cost]


def evaluate(config: EvaluateConfig) -> int:
    """Score the folder of a configuration.

    Returns:
        0, or 1 when a case could not be scored and the others went on.
    """
    from medseg.build.task import make_task

    summary = evaluate_folder(
        Path(config.pred),
        Path(config.ref),
        Path(config.output),
        make_task(config.task),
        file_values(config.data.label_values),
        config.data.labels_column,
        config.split,
        config.pictures,
    )
    return EXIT_FAILED if summary.failed else 0


def evaluate_folder(
    pred_dir: Path,
    ref: Path,
    output: Path,
    task: Task,
    label_values: Mapping[int, str],
    labels_column: str = "labels",
    split: str | None = None,
    pictures: bool = True,
    progress: Callable[[str], None] = print,
) -> EvaluationSummary:
    """Score the label maps of a folder and write `metrics.csv`, `summary.csv`, `costs.csv`, `summary.json` and pictures.

    A case that cannot be scored is reported and the rest goes on. A region whose labels the references do not name
    (`label_values`) is left out.

    Args:
        pred_dir: Folder of predictions `<case>.nii.gz` (or another format of label maps), values as in `task`.
        ref: Case table, or folder of label maps whose file names are those of the predictions.
        output: Folder to write to.
        task: Labels and regions.
        label_values: Value in the reference files to name of the label; names unknown to the task are background.
        labels_column: Column of the case table with the label maps.
        split: Part of the case table to score; None scores every case.
        pictures: Whether to draw `scores.png`, and `overlays/<case>.png` where the image is known.
        progress: Takes each line for the console.

    Returns:
        All scores, statistics and failures.

    Raises:
        UserError: If an input is missing or no case has both a prediction and a reference.
    """
    regions = [region for region in task.regions if set(region.labels) <= set(label_values.values())]
    if not regions:
        raise UserError(
            f"data.label_values names {', '.join(label_values.values()) or 'nothing'}, expected the labels of "
            f"at least one region of the task {task.name} ({', '.join(task.labels)}); correct the names."
        )
    if not 0 <= min(label_values) <= max(label_values) <= MAX_FILE_VALUE:
        raise UserError(
            f"data.label_values has values from {min(label_values)} to {max(label_values)}, expected values of label "
            f"maps from 0 to {MAX_FILE_VALUE}; correct them."
        )
    predictions = find_predictions(pred_dir)
    references, elsewhere = find_references(ref, labels_column, split)
    common = [name for name in references if name in predictions and references[name].labels is not None]
    if not common:
        raise UserError(
            f"none of the {len(predictions)} predictions in {pred_dir} has a reference in {ref} "
            f"(predictions: {some_of(list(predictions))}; references: {some_of(list(references))}); "
            "name each prediction after its case."
        )
    check_writable(output)
    left_out = [region.name for region in task.regions if region not in regions]
    warnings = [f"{name} is not scored: data.label_values does not name all its labels" for name in left_out]

    rows: list[ScoreRow] = []
    failed: dict[str, str] = {}
    costs: dict[str, Cost] = {}
    for number, key in enumerate(common, start=1):
        reference = references[key]
        try:
            pred, target, grid = read_pair(predictions[key], reference, task, label_values)
        except (UserError, OSError, ValueError) as error:
            failed[reference.name] = str(error)
            progress(f"[{number}/{len(common)}] {reference.name}: FAILED, {error}")
            continue
        case_rows = [
            ScoreRow(
                reference.name,
                region.name,
                reference.trust.get(region.name, ""),
                score_region(
                    np.isin(pred, task.region_values(region)),
                    np.isin(target, task.region_values(region)),
                    grid.spacing_mm,
                ),
            )
            for region in regions
        ]
        rows += case_rows
        if (cost := read_cost(predictions[key][0])) is not None:
            costs[reference.name] = cost
        dices = ", ".join(f"{row.region} {row.scores.dice:.4f}" for row in case_rows)
        progress(f"[{number}/{len(common)}] {reference.name}: Dice {dices}")
        if pictures and reference.image is not None:
            try:
                remarks = _draw(reference, reference.image, pred, target, grid, task, output / "overlays")
                warnings += [f"{reference.name}: {remark}" for remark in remarks]
            except (UserError, OSError, ValueError) as error:
                warnings.append(f"{reference.name}: no picture, {error}")

    summary = EvaluationSummary(
        rows=tuple(rows),
        statistics=tuple(summarise(rows)),
        failed=failed,
        without_prediction=tuple(
            reference.name for key, reference in references.items() if key not in predictions and reference.labels is not None
        ),
        without_reference=tuple(
            case_name(predictions[key][0]) for key in predictions if key not in common and key not in elsewhere
        ),
        warnings=tuple(warnings),
        costs=costs,
    )
    _write(summary, output)
    if pictures and rows:
        points = [ScorePoint(row.case, row.region, row.trust, row.scores.dice) for row in rows]
        score_plot(points, output / "scores.png")
    _report(summary, progress)
    progress(f"written to {output}")
    if summary.without_prediction:
        num_references = sum(reference.labels is not None for reference in references.values())
        progress(
            f"{len(summary.without_prediction)} of {num_references} cases of the {'folder' if ref.is_dir() else 'table'} "
            f"have no prediction: {some_of(summary.without_prediction)}"
        )
    return summary


def read_cost(prediction: Path) -> Cost | None:
    """What a prediction cost, from the report beside its label map; None where there is no such report."""
    try:
        report = json.loads((prediction.parent / f"{case_name(prediction)}.json").read_text(encoding="utf-8"))
        return Cost(float(report["durations_s"]["total"]), float(report["memory_gb_s"]), report["peak_resident_bytes"] / 1e9)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _draw(
    reference: Reference, image: Path, pred: np.ndarray, target: np.ndarray, grid: VoxelGrid, task: Task, folder: Path
) -> tuple[str, ...]:
    """Draw a case on its image; gives the remarks of reading it."""
    volume = read_image(image, reference.series)
    image_hu, image_grid, _ = orient(reference.hu.apply(volume.array), volume.grid)
    if not is_same_grid(image_grid, grid):
        raise UserError(f"the image's grid ({describe(image_grid)}) is not the labels' ({describe(grid)})")
    overlay_montage(
        image_hu,
        pred,
        target,
        grid.spacing_mm,
        folder / f"{reference.name}.png",
        reference.name,
        label_names={value: name for name, value in task.labels.items()},
        window_hu=task.window_hu,
    )
    return volume.remarks


def _write(summary: EvaluationSummary, output: Path) -> None:
    metrics = [["case", "region", "trust", *METRICS]]
    metrics += [
        [row.case, row.region, row.trust, *(f"{getattr(row.scores, metric):.6f}" for metric in METRICS)] for row in summary.rows
    ]
    replace_text(output / "metrics.csv", _csv_text(metrics))
    statistics = [list(Statistics.__dataclass_fields__)]
    statistics += [
        ["" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value) for value in vars(one).values()]
        for one in summary.statistics
    ]
    replace_text(output / "summary.csv", _csv_text(statistics))
    costs = [["case", *Cost._fields], *([case, *(f"{value:.3f}" for value in cost)] for case, cost in summary.costs.items())]
    replace_text(output / "costs.csv", _csv_text(costs))
    document = {
        "cases": len({row.case for row in summary.rows}),
        "failed": summary.failed,
        "without_prediction": summary.without_prediction,
        "without_reference": summary.without_reference,
        "warnings": summary.warnings,
        "statistics": [asdict(one) for one in summary.statistics],
        "costs": {case: cost._asdict() for case, cost in summary.costs.items()},
    }
    replace_text(output / "summary.json", json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _csv_text(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _report(summary: EvaluationSummary, progress: Callable[[str], None]) -> None:
    """Put the warnings and a compact table on the console."""
    for text in summary.warnings:
        progress(f"warning: {text}")
    if summary.without_reference:
        progress(f"warning: no reference for {len(summary.without_reference)}: {some_of(summary.without_reference)}")
    for line in console_table(summary.statistics):
        progress(line)
    if summary.costs:
        mean, most = ([pick(values) for values in zip(*summary.costs.values(), strict=True)] for pick in (np.mean, max))
        progress(
            f"a case took {mean[0]:.1f} s (at most {most[0]:.1f}), {mean[1]:.1f} GB·s of memory (at most {most[1]:.1f}), "
            f"{most[2]:.2f} GB at the peak"
        )
    if summary.failed:
        progress(f"{len(summary.failed)} failed: {some_of(list(summary.failed))}")
