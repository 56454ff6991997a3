"""Reports of predictions, read from `<case>.json` beside a label map."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medseg.data.case_table import Case
from medseg.errors import UserError
from medseg.evaluation.matching import Reference
from medseg.findings import Severity
from medseg.inference.segmentation import StatedBound
from medseg.io.identity import Identity
from medseg.io.inputs import case_name
from medseg.io.text import read_json
from medseg.preprocess.scale import HuScale
from medseg.report.case_viewer import CaseReport
from medseg.task import Task

# Costs of a prediction: seconds from reading the scan to the written files, the integral of its
# memory over this time in GB·s, and the largest memory of its process in GB.
COSTS = ("total_s", "memory_gb_s", "peak_gb")
# Exceptions of reading a report that is missing, damaged, or of another program.
_NO_REPORT = (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read_cost(prediction: Path) -> dict[str, float]:
    """Read the `COSTS` of a prediction from its report; empty where there is no such report."""
    try:
        report = read_json(beside(prediction, ".json"))
        costs = [
            float(report["durations_s"]["total"]),
            float(report["memory_gb_s"]),
            report["peak_resident_bytes"] / 1e9,
        ]
    except _NO_REPORT:
        return {}
    # `summary.json` cannot hold a number that is not finite: the evaluation would end after all
    # cases have been scored.
    if not all(map(math.isfinite, costs)):
        return {}
    return dict(zip(COSTS, costs, strict=True))


def check_labels(prediction: Path, task: Task) -> None:
    """Refuse a prediction of another task, whose values would be scored as other labels.

    Raises:
        UserError: If the report beside the label map gives a label of the task another value, or
            has none of its labels and another number of labels.
    """
    try:
        report = read_json(beside(prediction, ".json"))
        names = list(map(str, report["volume_ml"]))  # in the order of the values
    except _NO_REPORT:
        return
    task_names = list(task.labels)
    common_names = set(names) & set(task_names)
    # Label values follow the order of the names, from 1.
    have_same_values = all(names.index(name) == task_names.index(name) for name in common_names)
    # Without a common name, the same labels may have other names, as in another language.
    may_be_same_labels = bool(common_names) or len(names) == len(task_names)
    if not have_same_values or not may_be_same_labels:
        raise UserError(
            f"the prediction {prediction.name} has the labels {', '.join(names)}, but the task "
            f"{task.name} has {', '.join(task_names)}; give the task of the prediction "
            "(task=<name>), or import the data set with the labels of the prediction (labels=[…])"
        )


def read_case_report(prediction: Path) -> CaseReport:
    """Read what a viewer shows of the report of a prediction; empty without such a report.

    Args:
        prediction: Label map of the prediction.
    """
    try:
        report = read_json(beside(prediction, ".json"))
        place_xyz_mm = report["most_disputed_xyz_mm"]
        if place_xyz_mm is not None:
            place_xyz_mm = list(map(float, place_xyz_mm))
        return CaseReport(
            status=str(report["status"]),
            warnings=list(map(str, report["warnings"])),
            information=information_in_report(report),
            agreements={str(name): float(dice) for name, dice in report["agreements"].items()},
            most_disputed_xyz_mm=place_xyz_mm,
            dice_at_least=read_bounds(report),
            identity=Identity(**report.get("identity", {})),
        )
    except _NO_REPORT:
        return CaseReport()


def information_in_report(report: Mapping[str, Any]) -> list[str]:
    """List the findings of a report that ask for no action.

    Reports of older versions have no findings.
    """
    sentences = []
    for finding in report.get("findings", []):
        if finding["severity"] == Severity.information:
            sentences.append(str(finding["sentence"]))
    return sentences


def read_bounds(report: Mapping[str, Any]) -> dict[str, StatedBound]:
    """Read the lower bounds on Dice of a report, by region; empty where there are none.

    A report with a damaged entry states no bound, nor does one of an older version, which has bare
    numbers without level and patients.
    """
    try:
        entries = report["dice_at_least"].items()
        return {str(region): StatedBound(**entry) for region, entry in entries}
    except _NO_REPORT:
        return {}


def scan_of(reference: Reference, prediction: Path, task: Task) -> Case | None:
    """Find the scan of a case: its row of the table, or else what the prediction's report names.

    Args:
        reference: Reference of the case.
        prediction: Label map of the case.
        task: Task with the channels. A report names one file, so scans of several channels come
            from a table only.

    Returns:
        A case with the file of the scan; None where it is not known, or is gone.
    """
    if reference.case is not None or len(task.channels) > 1:
        return reference.case
    try:
        report = read_json(beside(prediction, ".json"))
        scan = Case(
            reference.name,
            Path(report["input"]),
            labels=None,
            patient="",
            series=report["series"],
            hu=HuScale(**report["hu"]),
        )
    except _NO_REPORT:
        return None
    # The scan may have been moved since its prediction.
    return scan if scan.image.exists() else None


def beside(prediction: Path, ending: str) -> Path:
    """Path of a file that `predict` writes beside a label map."""
    return prediction.with_name(case_name(prediction) + ending)
