"""Files of single labels that a prediction writes beside its label map and its report."""

import re
from pathlib import Path

from medseg.errors import UserError
from medseg.io.text import read_json
from medseg.task import Task

# Kind of file, as named in the key `save`, to the end of its name: a file of a label is called
# `<case>.<label><ending>`.
LABEL_ENDINGS = {"masks": ".nii.gz", "probabilities": ".probability.nii.gz"}


def label_file(start: Path, label: str, kind: str) -> Path:
    """Path of the file of one label.

    Args:
        start: Folder and name of the case: the common start of the paths of its files.
        label: Name of the label; slashes in it become "_".
        kind: Key of `LABEL_ENDINGS`.
    """
    file_label = re.sub(r"[/\\]", "_", label)
    return start.with_name(f"{start.name}.{file_label}{LABEL_ENDINGS[kind]}")


def labels_of_report(report: Path) -> list[str]:
    """List the labels of a prediction in the order of their values.

    Args:
        report: Report of a prediction, `<case>.json`.

    Returns:
        Names of the labels; an empty list if the file is missing or is no report.
    """
    try:
        # Volume of each label in ml, by name.
        volumes_ml = read_json(report)["volume_ml"]
        return [str(label) for label in volumes_ml]
    except (UserError, ValueError, KeyError, TypeError):
        return []


def values_of_report(report: Path, task: Task) -> dict[str, int]:
    """Map the labels of a prediction to their values in its label map.

    The report of a model folder states the values, since `label_values` may have changed them. In
    other reports they count from 1; only the results of a task with helper labels leave out values.

    Args:
        report: Report of a prediction, `<case>.json`.
        task: Task that the prediction may be of.

    Returns:
        Label to value, in the order of the report; empty if the file is missing or is no report.
    """
    names = labels_of_report(report)
    values = {name: value for value, name in enumerate(names, start=1)}
    result_labels = task.without_helpers().labels
    if names == list(result_labels):
        values = result_labels
    try:
        stated_values = read_json(report)["settings"]["labels"]
        return {name: int(stated_values[name]) for name in names}
    except (UserError, ValueError, KeyError, TypeError, OverflowError):
        return values
