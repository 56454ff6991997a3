"""Matching of predictions and references: files paired by name, label values converted to those of the task."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.data.audit.labels import GRID_TOLERANCE_MM, times
from medseg.data.case_table import Case, read_case_table, table_at
from medseg.data.reference import read_reference
from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import SUFFIXES, case_name, volume_files, volume_suffix
from medseg.io.read import read_labels
from medseg.preprocess.orient import orient
from medseg.task import LabelValues, Task


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
    require(
        pred_dir.is_dir(), f"pred={pred_dir} is not a folder; give the folder that predict wrote."
    )
    found = _label_maps(pred_dir)
    require(
        bool(found),
        f"pred={pred_dir} holds no label map ({', '.join(SUFFIXES)}); give predict's folder.",
    )
    return found


def find_references(
    ref: Path, labels_column: str, split: str | None
) -> tuple[dict[str, Reference], set[str]]:
    """Find the references to score, by the key of their case.

    Args:
        ref: Case table, or folder of label maps.
        labels_column: Column of the case table with the label maps.
        split: Part of the case table; None = all of it.

    Returns:
        The references, and the keys of cases that belong to another split.

    Raises:
        UserError: If there is none, or two files of a folder belong to one case.
    """
    if ref.is_dir() and not volume_files(ref):
        ref = table_at(ref)
    if ref.is_dir():
        require(
            split is None,
            f"split={split} needs a case table as ref, got the folder {ref}; leave split out.",
        )
        found = _label_maps(ref)
        for paths in found.values():
            names = " and ".join(path.name for path in paths[:2])
            require(len(paths) == 1, f"{ref} holds {names} for one case; keep one.")
        require(
            bool(found),
            f"ref={ref} holds no label map ({', '.join(SUFFIXES)}); give a case table, a folder of label maps, or the output of `import`.",
        )
        return {key: Reference(case_name(path), path) for key, (path,) in found.items()}, set()
    require(ref.exists(), f"ref={ref} does not exist; give a case table or a folder of label maps.")
    cases = read_case_table(ref, labels_column)
    references = {
        _key(one.name): Reference(one.name, one.labels, one)
        for one in cases
        if split in (None, one.split)
    }
    require(
        bool(references),
        f"{ref} has no case with split={split}; give another split, or fill in the column split of the table.",
    )
    return references, {_key(one.name) for one in cases} - set(references)


def read_pair(
    pred_files: Sequence[Path], reference: Reference, task: Task, label_values: LabelValues
) -> tuple[np.ndarray, np.ndarray, VoxelGrid]:
    """Read prediction and reference: label maps in the task's values, oriented, (D, H, W), and their grid; ignored voxels are 0.

    Raises:
        UserError: If a file cannot be read, the grids differ, or a value has no meaning.
    """
    names = " and ".join(path.name for path in pred_files[:2])
    require(len(pred_files) == 1, f"there are two predictions, {names}; keep one")
    if reference.labels is None:
        raise UserError("the case has no reference; give its label map")
    case = reference.case
    given = (case.image, case.series, task.channels[0].modality) if case else ()
    pred_volume = read_labels(pred_files[0])
    target_volume, values = read_reference(reference.labels, label_values, *given, kept=task.values)
    # Both are oriented first: the same voxels may be stored in another order.
    pred, grid, _ = orient(pred_volume.array, pred_volume.grid)
    target, target_grid, _ = orient(target_volume.array, target_volume.grid)
    check_grid(
        "prediction's",
        grid,
        "reference's",
        target_grid,
        "; predict the image that the reference belongs to",
    )
    require(
        int(pred.min()) >= 0 and int(pred.max()) <= len(task.labels),
        f"the prediction {pred_files[0].name} holds values from {pred.min()} to {pred.max()}, expected 0 to "
        f"{len(task.labels)} (task {task.name}); evaluate label maps of this task",
    )
    target = task_values(target, reference.labels, task, values)
    if task.ignore_label is not None:
        # Background in both maps, so that the scores leave ignored voxels out.
        is_ignored = target == task.ignore_label
        pred, target = (
            np.where(is_ignored, 0, pred),
            np.where(is_ignored, 0, target).astype(np.uint8),
        )
    return pred, target, grid


def check_grid(
    owner: str, grid: VoxelGrid, other_owner: str, other: VoxelGrid, cure: str = ""
) -> None:
    """Refuse two grids that differ by more than the tolerance of the audit."""
    difference = (
        f"the {owner} grid ({_describe(grid)}) is not the {other_owner} ({_describe(other)})"
    )
    require(grid.is_close(other, GRID_TOLERANCE_MM), difference + cure)


def _describe(grid: VoxelGrid) -> str:
    """Format size, spacing and origin for a sentence."""
    origin = ", ".join(f"{value:.2f}" for value in grid.origin_xyz_mm)
    return f"{times(grid.shape)} voxels of {times(grid.spacing_mm)} mm from ({origin})"


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


def task_values(
    labels: np.ndarray, path: Path, task: Task, label_values: Mapping[int, str]
) -> np.ndarray:
    """Translate the values of a reference file into the task's, uint8; labels that the task does not have become 0."""
    table = np.zeros(max(0, *label_values) + 1, dtype=np.uint8)
    table[list(label_values)] = [task.values.get(name, 0) for name in label_values.values()]
    is_known = np.zeros(len(table), dtype=bool)
    is_known[[0, *label_values]] = True
    if labels.min() < 0 or labels.max() >= len(table) or not is_known[labels].all():
        unknown = sorted(set(np.unique(labels).tolist()) - {0, *label_values})
        raise UserError(
            f"the reference {path.name} holds the value {unknown[0]}, which data.label_values does not name "
            f"(it names {', '.join(map(str, sorted(label_values)))}); add it, also if it is background"
        )
    return table[labels]
