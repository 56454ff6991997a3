"""Held-out predictions of a study with their references."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medseg.data.case_table import Case
from medseg.data.reference import read_reference
from medseg.evaluation.matching import Prediction, Reference, read_pair, task_values
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import orient
from medseg.task import LabelValues, Task

# Values of `Case.trust` of references that are used for clean-up, bound and plausible volumes. The
# empty text means that the table states no trust; all other values mark doubtful references.
TRUSTED = ("", "reference")


def patients_of(cases: Iterable[Case]) -> dict[str, str]:
    """Map each scan to its patient; a scan without a stated patient is a patient of its own."""
    return {case.name: case.patient or case.name for case in cases}


def reference_labels(
    case: Case, task: Task, label_values: LabelValues
) -> tuple[np.ndarray, VoxelGrid]:
    """Read the reference of a case: a label map, masks or DICOM structures.

    Args:
        case: Case with labels.
        task: Has the values of its labels.
        label_values: Value, or name of a structure, in the reference file to label name.

    Returns:
        Label map (D, H, W) in the values of the task and the orientation of networks; its grid.

    Raises:
        UserError: If the reference cannot be read, or a value has no meaning.
    """
    assert case.labels is not None, "only cases with labels are scored"
    volume, names_by_value = read_reference(
        case.labels,
        label_values,
        image=case.image,
        series=case.series,
        modality=task.channels[0].modality,
        kept=task.values,
    )
    labels, grid, _ = orient(volume.array, volume.grid)
    return task_values(labels, case.labels, task, names_by_value), grid


@dataclass(frozen=True)
class HeldOut:
    """Held-out predictions and their references.

    Attributes:
        cases: Scans that have a prediction and a reference.
        predictions: Folder of the predicted label maps, `<case>.nii.gz`.
        task: Task of the model that made the predictions.
        label_values: Value, or name of a structure, in the reference files to label name.
    """

    cases: Sequence[Case]
    predictions: Path
    task: Task
    label_values: LabelValues

    @property
    def patients(self) -> dict[str, str]:
        """Name of each scan to its patient, see `patients_of`."""
        return patients_of(self.cases)

    def trusted_parts(self, case: Case) -> list[str]:
        """List the parts (regions, or labels if there are none) with a trusted reference."""
        return [part for part in self.task.parts if case.trust.get(part, "") in TRUSTED]

    def pairs(self) -> Iterator[tuple[Case, np.ndarray, np.ndarray, VoxelGrid]]:
        """Read the label maps of all cases, case by case.

        The files are read anew at each call: all label maps together may not fit into memory.

        Yields:
            Case, label map of the prediction (D, H, W), label map of the reference (D, H, W), both
            in the values of the task, and their grid.
        """
        for case in self.cases:
            prediction = Prediction([self.predictions / f"{case.name}.nii.gz"])
            reference = Reference(case.name, case.labels, case)
            pair = read_pair(prediction, reference, self.task, self.label_values)
            yield case, pair.pred, pair.target, pair.grid
