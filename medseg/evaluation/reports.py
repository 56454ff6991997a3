"""Reports of predictions: time and memory, warnings and the path of the scan, read from `<case>.json` beside a label map."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medseg.data.case_table import Case
from medseg.errors import UserError, require
from medseg.evaluation.matching import Reference
from medseg.findings import Severity
from medseg.inference.segmentation import StatedBound
from medseg.io.inputs import case_name
from medseg.io.text import read_json
from medseg.preprocess.scale import HuScale
from medseg.report.case_viewer import CaseReport
from medseg.task import Task

# Costs of a prediction: seconds from file to file, area under its memory over time, most memory of
# its process.
COSTS = ("total_s", "memory_gb_s", "peak_gb")
# Errors of a report that is missing, damaged, or of another program.
_NO_REPORT = (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read_cost(prediction: Path) -> dict[str, float]:
    """Read the `COSTS` of a prediction from the report beside its label map; empty where there is no such report."""
    try:
        report = read_json(beside(prediction, ".json"))
        costs = [
            float(report["durations_s"]["total"]),
            float(report["memory_gb_s"]),
            report["peak_resident_bytes"] / 1e9,
        ]
    except _NO_REPORT:
        return {}
    return dict(zip(COSTS, costs, strict=True)) if all(map(math.isfinite, costs)) else {}


def check_labels(prediction: Path, task: Task) -> None:
    """Refuse a prediction of another task: its values would be scored under the names of other labels.

    Raises:
        UserError: If the report beside the label map gives a label of the task another value, or
            has none of its labels and another number of labels.
    """
    try:
        names = list(
            map(str, read_json(beside(prediction, ".json"))["volume_ml"])
        )  # in the order of the values
    except _NO_REPORT:
        return
    known = list(task.labels)
    common = set(names) & set(known)
    require(
        all(names.index(name) == known.index(name) for name in common)
        and (bool(common) or len(names) == len(known)),
        f"the prediction {prediction.name} has the labels {', '.join(names)}, but the task {task.name} has {', '.join(known)}; give the "
        "task of the prediction (task=<name>), or import the data set with the labels of the prediction (labels=[…])",
    )


def read_words(prediction: Path) -> CaseReport:
    """Read what a viewer shows of the report beside a label map; empty where there is no such report."""
    try:
        report = read_json(beside(prediction, ".json"))
        place = report["most_disputed_xyz_mm"]
        return CaseReport(
            str(report["status"]),
            [str(text) for text in report["warnings"]],
            information_in_report(report),
            {str(name): float(dice) for name, dice in report["agreements"].items()},
            None if place is None else [float(x) for x in place],
            read_bounds(report),
        )
    except _NO_REPORT:
        return CaseReport()


def information_in_report(report: Mapping[str, Any]) -> list[str]:
    """List the findings of a report that ask for nothing; reports of older versions have none."""
    findings = report.get("findings", [])
    return [
        str(finding["sentence"])
        for finding in findings
        if finding["severity"] == Severity.information
    ]


def read_bounds(report: Mapping[str, Any]) -> dict[str, StatedBound]:
    """Read the lower bounds on Dice of a report, by region; empty where there are none.

    Reports of older versions hold bare numbers without level and patients, also for regions with
    additions. They state no bound, nor does a damaged entry.
    """
    try:
        entries = report["dice_at_least"].items()
        return {str(region): StatedBound(**entry) for region, entry in entries}
    except _NO_REPORT:
        return {}


def scan_of(reference: Reference, prediction: Path, task: Task) -> Case | None:
    """Find the scan of a case: its row of the table, or with a folder of references what the report of the prediction names."""
    if reference.case is not None or len(task.channels) > 1:
        return reference.case
    try:
        report = read_json(beside(prediction, ".json"))
        scan = Case(
            reference.name,
            Path(report["input"]),
            None,
            "",
            series=report["series"],
            hu=HuScale(**report["hu"]),
        )
    except _NO_REPORT:
        return None
    return scan if scan.image.exists() else None


def beside(prediction: Path, ending: str) -> Path:
    """Path of a file that `predict` writes beside a label map."""
    return prediction.with_name(case_name(prediction) + ending)
