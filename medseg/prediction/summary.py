"""Table of a batch: `summary.csv`, a row for each case and label."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from medseg.errors import UserError
from medseg.evaluation.reports import information_in_report, read_bounds
from medseg.inference.segmentation import StatedBound
from medseg.io.tables import read_csv, write_csv
from medseg.metrics.hu_statistics import HU_FIGURES
from medseg.prediction.batch import BatchCase
from medseg.prediction.case import (
    locked_folder,
    read_report,
)
from medseg.task import Task

SUMMARY_FILE = "summary.csv"
# First columns of the table of the same name that `evaluate` writes.
SCORES = ("region", "trust", "metric")
# Columns of `summary.csv`. Status: `ok`, `warnings`, `not_hu` (see `Segmentation`) or `failed`; see
# `label_statistics` for the figures.
SUMMARY = ("case", "status", "label", "ml", *HU_FIGURES, "dice_at_least", "warnings", "information")


def write_summary(folder: Path, cases: Sequence[BatchCase], task: Task) -> None:
    """Write `summary.csv`: a row for each case and label, and one for a case that failed.

    Rows of cases that earlier predictions wrote into the folder stay.

    Args:
        folder: Folder of the results.
        cases: Cases with their outcomes.
        task: Its regions tell which bound on Dice belongs to a label.

    Raises:
        UserError: If the file cannot be written, unless cases have failed already, such as on a
            full disk, which the command reports.
    """
    path, rows = folder / SUMMARY_FILE, []
    for case in cases:
        report = case.report or read_report(case.output)
        status: dict[str, Any] = {"status": "failed", "warnings": " | ".join(case.messages)}
        if not case.exit_code:
            status = {
                "status": report.get("status"),
                "warnings": " | ".join(map(str, report.get("warnings", []))),
                "information": " | ".join(information_in_report(report)),
            }
        volumes = {"": None} if case.exit_code else report.get("volume_ml", {})
        figures = report.get("statistics", {})
        bounds = read_bounds({} if case.exit_code else report)
        for label, volume_ml in volumes.items():
            row = {
                "case": case.scan.name,
                "label": label,
                **figures.get(label, {}),
                "ml": volume_ml,
            }
            rows.append({**row, **status, "dice_at_least": _bound_of(label, bounds, task)})
    with (
        suppress(UserError) if any(case.exit_code for case in cases) else nullcontext(),
        locked_folder(folder),
    ):
        try:
            known = read_csv(path)
        except UserError:  # none yet, or a damaged one
            known = []
        own = {case.scan.name for case in cases}
        kept = [
            row
            for row in known
            if {"case", "status", "label"} <= row.keys() <= set(SUMMARY) and row["case"] not in own
        ]
        write_csv(path, [*kept, *rows], SUMMARY)


def _bound_of(label: str, bounds: Mapping[str, StatedBound], task: Task) -> str:
    """Say the bounds on Dice of the regions of a label; a region of another name is named."""
    sentences = []
    for region in task.regions:
        if label in region.labels and region.name in bounds:
            name = "" if region.name == label else f"{region.name} "
            sentences.append(f"{name}{bounds[region.name]}")
    return " | ".join(sentences)
