"""Files of single labels that a prediction writes beside its label map and its report."""

import re
from pathlib import Path

from medseg.errors import UserError
from medseg.io.text import read_json

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
