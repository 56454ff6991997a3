"""Files of single labels that a prediction writes beside its label map and its report."""

import re
from pathlib import Path

from medseg.errors import UserError
from medseg.io.text import read_json

# What follows the name of the case and that of the label in the name of a file, by its name in
# `save`.
LABEL_ENDINGS = {"masks": ".nii.gz", "probabilities": ".probability.nii.gz"}


def label_file(start: Path, label: str, kind: str) -> Path:
    """Path of the file of one label.

    Args:
        start: Folder and name of the case.
        label: Name of the label; a slash in it becomes "_".
        kind: Key of `LABEL_ENDINGS`.
    """
    file_label = re.sub(r"[/\\]", "_", label)
    return start.with_name(f"{start.name}.{file_label}{LABEL_ENDINGS[kind]}")


def labels_of_report(report: Path) -> list[str]:
    """Labels of a prediction in the order of their values; none without a report of `predict`."""
    try:
        return list(map(str, read_json(report)["volume_ml"]))
    except (UserError, ValueError, KeyError, TypeError):
        return []
