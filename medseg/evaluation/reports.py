"""Readers of prediction reports, `<case>.json` beside a label map."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medseg.data.case_table import Case
from medseg.data.source_files import is_here, is_same_source
from medseg.errors import UserError
from medseg.evaluation.matching import Reference
from medseg.findings import Severity
from medseg.inference.segmentation import StatedBound
from medseg.io.identity import Identity
from medseg.io.inputs import case_name
from medseg.io.label_files import values_of_report
from medseg.io.text import read_json
from medseg.preprocess.scale import HuScale
from medseg.report.case_viewer import CaseReport
from medseg.task import Task

# Costs of a prediction: seconds from reading the scan to the written files, the integral of the
# process memory over this time in GB·s, and the largest process memory in GB.
COSTS = ("total_s", "memory_gb_s", "peak_gb")
# Errors on reading a report that is missing, damaged, or not written by `predict`.
_NO_REPORT = (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError)


def read_cost(prediction: Path) -> dict[str, float]:
    """Read the `COSTS` of a prediction from its report, by name; empty if the report lacks any."""
    try:
        report = read_json(beside(prediction, ".json"))
        costs = [
            float(report["durations_s"]["total"]),
            float(report["memory_gb_s"]),
            report["peak_resident_bytes"] / 1e9,
        ]
    except _NO_REPORT:
        return {}
    # `summary.json` cannot hold infinity or NaN: the evaluation would fail after all cases have
    # been scored.
    if not all(map(math.isfinite, costs)):
        return {}
    return dict(zip(COSTS, costs, strict=True))


def check_labels(prediction: Path, task: Task) -> None:
    """Refuse a prediction of another task, whose values would be scored as other labels.

    A prediction without a report is accepted.

    Raises:
        UserError: If the report gives a label of the task another value, or if it has no label of
            the task and another number of labels.
    """
    labels = values_of_report(beside(prediction, ".json"), task)
    if not labels:
        return
    common_names = labels.keys() & task.labels.keys()
    have_same_values = all(labels[name] == task.labels[name] for name in common_names)
    # Without a common name, the labels may still be the same under other names, as in another
    # language, if their number is the same.
    may_be_same_labels = bool(common_names) or len(labels) == len(task.labels)
    if not have_same_values or not may_be_same_labels:
        raise UserError(
            f"the prediction {prediction.name} has the labels {_describe(labels)}, but the task "
            f"{task.name} has {_describe(task.labels)}; give the task of the prediction "
            "(task=<name> or task=<file>.yaml), or import the data set with the labels of the "
            "prediction (labels=[…])"
        )


def _describe(labels: Mapping[str, int]) -> str:
    """List labels, with their values unless these count from 1."""
    if list(labels.values()) == list(range(1, 1 + len(labels))):
        return ", ".join(labels)
    return ", ".join(f"{name} = {value}" for name, value in labels.items())


def read_case_report(prediction: Path) -> CaseReport:
    """Read the parts of a prediction's report that a viewer shows; empty without a valid report.

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
    """List the sentences of a report's findings of the severity `information`.

    Reports of older versions have no findings.
    """
    sentences = []
    for finding in report.get("findings", []):
        if finding["severity"] == Severity.information:
            sentences.append(str(finding["sentence"]))
    return sentences


def read_bounds(report: Mapping[str, Any]) -> dict[str, StatedBound]:
    """Read the lower bounds on Dice of a report, by region; empty if there are none.

    The result is also empty if an entry is damaged or, as in older versions, a bare number without
    level and patients.
    """
    try:
        entries = report["dice_at_least"].items()
        return {str(region): StatedBound(**entry) for region, entry in entries}
    except _NO_REPORT:
        return {}


def scan_of(reference: Reference, prediction: Path, task: Task) -> Case | None:
    """Find the scan of a case in the case table, or else in the prediction's report.

    Args:
        reference: Reference of the case.
        prediction: Label map of the prediction.
        task: Task with the channels. A report names one file, so scans of several channels come
            from a case table only.

    Returns:
        A case with the file of the scan; None if the scan is unknown, or the file that the report
        names no longer exists.
    """
    if reference.case is not None or len(task.channels) > 1:
        return reference.case
    try:
        report = read_json(beside(prediction, ".json"))
        path = _path_of_scan(report)
        if path is None:
            return None
        return Case(
            reference.name,
            path,
            labels=None,
            patient="",
            series=report["series"],
            hu=HuScale(**report["hu"]),
        )
    # OSError: a file that may be the scan cannot be read.
    except (*_NO_REPORT, OSError):
        return None


def _path_of_scan(report: Mapping[str, Any]) -> Path | None:
    """Find the scan of a report; None if it no longer exists.

    The path that the user gave is relative to the folder in which `predict` ran. Elsewhere it may
    lead to another patient's scan, so the absolute path comes first.
    """
    given_path = Path(report["input"])
    source = report.get("source")
    if not source:  # as in reports of older versions
        return given_path if is_here(given_path) else None
    path = Path(source["path"])
    if is_here(path):
        return path
    # The scan may have been moved together with the prediction.
    if is_here(given_path) and is_same_source(given_path, source):
        return given_path
    return None


def beside(prediction: Path, ending: str) -> Path:
    """Path of a file that `predict` writes beside a label map."""
    return prediction.with_name(case_name(prediction) + ending)
