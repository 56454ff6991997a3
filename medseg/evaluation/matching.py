"""Matching of predictions and references: pairs of files by name, and both label maps in the values of the task."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.data.audit.labels import GRID_TOLERANCE_MM
from medseg.data.case_table import Case, read_case_table
from medseg.data.task import Task
from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import SUFFIXES, case_name, volume_suffix
from medseg.io.read import read_labels
from medseg.preprocess.orient import orient

# Value of no label, in the translation of reference values.
_UNKNOWN = 255


class Reference(NamedTuple):
    """A case with a reference.

    Attributes:
        name: Name of the case.
        labels: Its label map, or None.
        case: Its row of the case table; None where the references are a folder.
    """

    name: str
    labels: Path | None
    case: Case | None = None


def find_predictions(pred_dir: Path) -> dict[str, list[Path]]:
    """Find the label maps in the folder of predictions, by the key of their case.

    Raises:
        UserError: If there is none.
    """
    if not pred_dir.is_dir():
        raise UserError(f"pred={pred_dir} is not a folder; give the folder that predict wrote.")
    found = _label_maps(pred_dir)
    if not found:
        raise UserError(f"pred={pred_dir} holds no label map ({', '.join(SUFFIXES)}); give predict's folder.")
    return found


def find_references(ref: Path, labels_column: str, split: str | None) -> tuple[dict[str, Reference], set[str]]:
    """Find the references to score, by the key of their case.

    Args:
        ref: Case table, or folder of label maps.
        labels_column: Column of the case table with the label maps.
        split: Part of the case table; None = all of it.

    Returns:
        The references, and the keys of cases that belong to another split.

    Raises:
        UserError: If there is none, or two files of a folder are one case.
    """
    if ref.is_dir():
        if split is not None:
            raise UserError(f"split={split} needs a case table as ref, got the folder {ref}; leave split out.")
        found = _label_maps(ref)
        for first, *others in found.values():
            if others:
                raise UserError(f"{ref} holds {first.name} and {others[0].name} for one case; keep one.")
        if not found:
            raise UserError(f"ref={ref} holds no label map ({', '.join(SUFFIXES)}); give a case table or their folder.")
        return {key: Reference(case_name(path), path) for key, (path,) in found.items()}, set()
    if not ref.exists():
        raise UserError(f"ref={ref} does not exist; give a case table or a folder of label maps.")
    cases = read_case_table(ref, labels_column)
    references = {_key(one.name): Reference(one.name, one.labels, one) for one in cases if split in (None, one.split)}
    if not references:
        raise UserError(f"{ref} has no case of split {split}; correct split or fill the table's column split.")
    return references, {_key(one.name) for one in cases} - set(references)


def read_pair(
    pred_files: Sequence[Path], reference: Reference, task: Task, label_values: Mapping[int, str]
) -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Read prediction and reference: label maps in the task's values, oriented, (D, H, W), and their grid.

    Raises:
        UserError: If a file cannot be read, the grids differ, or a value has no meaning.
    """
    if len(pred_files) > 1:
        raise UserError(f"there are two predictions, {pred_files[0].name} and {pred_files[1].name}; keep one")
    if reference.labels is None:
        raise UserError("the case has no reference; give its label map")
    pred_volume, target_volume = read_labels(pred_files[0]), read_labels(reference.labels)
    # Both are oriented first: the same voxels may be stored in another order.
    pred, grid, _ = orient(pred_volume.array, pred_volume.grid)
    target, target_grid, _ = orient(target_volume.array, target_volume.grid)
    if not is_same_grid(grid, target_grid):
        raise UserError(
            f"the prediction's grid ({describe(grid)}) is not the reference's ({describe(target_grid)}); "
            "predict the image that the reference belongs to"
        )
    if int(pred.min()) < 0 or int(pred.max()) > len(task.labels):
        raise UserError(
            f"the prediction {pred_files[0].name} holds values from {pred.min()} to {pred.max()}, expected 0 to "
            f"{len(task.labels)} (task {task.name}); evaluate label maps of this task"
        )
    return pred, _task_values(target, reference.labels, task, label_values), grid


def is_same_grid(one: VoxelGrid, other: VoxelGrid) -> bool:
    """Whether two grids agree within the tolerance of the audit."""
    return one.is_close(other, GRID_TOLERANCE_MM)


def describe(grid: VoxelGrid) -> str:
    """Format size, spacing and origin for a sentence."""
    shape = "×".join(map(str, grid.shape))
    spacing = "×".join(f"{step:.4g}" for step in grid.spacing_mm)
    origin = ", ".join(f"{value:.2f}" for value in grid.origin_xyz_mm)
    return f"{shape} voxels of {spacing} mm from ({origin})"


def some_of(names: Sequence[str]) -> str:
    """Format the first five names of a list and the number of the others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _key(name: str) -> str:
    """Name to match by: some systems store ü in a file's name as u and dots."""
    return unicodedata.normalize("NFC", name)


def _label_maps(folder: Path) -> dict[str, list[Path]]:
    """Label maps of a folder, by the key of their case."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and volume_suffix(path) is not None and not path.name.startswith("."):
            found.setdefault(_key(case_name(path)), []).append(path)
    return found


def _task_values(labels: np.ndarray, path: Path, task: Task, label_values: Mapping[int, str]) -> np.ndarray:
    """Translate the values of a reference file into the task's, uint8; labels that the task does not have become 0."""
    table = np.full(max(0, *label_values) + 2, _UNKNOWN, dtype=np.uint8)
    table[0] = 0
    for value, name in label_values.items():
        table[value] = task.labels.get(name, 0)
    if labels.min() < 0 or labels.max() >= len(table) or (values := table[labels]).max() == _UNKNOWN:
        unknown = sorted(set(np.unique(labels).tolist()) - {0, *label_values})
        raise UserError(
            f"the reference {path.name} holds the value {unknown[0]}, which data.label_values does not name "
            f"(it names {', '.join(map(str, sorted(label_values)))}); add it, also if it is background"
        )
    return values
