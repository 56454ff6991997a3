"""Find and read the prediction and the reference of each case, with the task's label values.

The key of a case is its name in a form that does not depend on the file system; see `_key`.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from medseg.data.audit.labels import GRID_TOLERANCE_MM, per_axis_text
from medseg.data.case_table import Case, read_case_table, table_at
from medseg.data.reference import read_reference
from medseg.errors import UserError
from medseg.findings import sentences_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.inputs import SUFFIXES, case_name, volume_files, volume_suffix
from medseg.io.label_files import (
    LABEL_ENDINGS,
    label_file,
    labels_of_report,
    values_of_report,
)
from medseg.io.read import read_labels
from medseg.io.volume import Volume
from medseg.preprocess.orient import orient
from medseg.task import LabelValues, Task


class Reference(NamedTuple):
    """A case of the case table or of the folder of references.

    Attributes:
        name: Name of the case.
        labels: Path of its label map; None if the case table names none.
        case: Row of the case in the case table; None if the references are a folder.
    """

    name: str
    labels: Path | None
    case: Case | None = None


class Prediction(NamedTuple):
    """Files of the prediction of a case.

    Attributes:
        paths: Label maps of the case; `read_pair` refuses more than one. If `predict` saved masks
            only, the path that the label map would have.
        masks: If `predict` saved masks only, label to the file of its mask, in the order of the
            label values; else empty.
    """

    paths: Sequence[Path]
    masks: Mapping[str, Path] = MappingProxyType({})

    @property
    def path(self) -> Path:
        """Path of the label map, beside which the other files of the case lie."""
        return self.paths[0]


class LabelPair(NamedTuple):
    """Label maps of a case in the values of the task, see `read_pair`.

    Attributes:
        pred: Prediction, (D, H, W).
        target: Reference, (D, H, W).
        grid: Grid of both.
        warnings: Sentences on the reference, such as of contours that were left out.
    """

    pred: np.ndarray
    target: np.ndarray
    grid: VoxelGrid
    warnings: list[str]


def find_predictions(pred_dir: Path) -> dict[str, Prediction]:
    """Find the predictions in a folder, by the key of their case.

    Predictions are label maps, or masks if `predict` saved masks only.

    Raises:
        UserError: If `pred_dir` is no folder or holds no prediction.
    """
    if not pred_dir.is_dir():
        raise UserError(f"pred={pred_dir} is not a folder; give the folder that predict wrote.")
    predictions = {key: Prediction(paths) for key, paths in _label_maps(pred_dir).items()}
    for report, masks in _masks_by_report(pred_dir).items():
        key = _key(report.stem)
        # Masks beside a label map are ignored: the label map holds the same labels.
        if key not in predictions:
            label_map = report.with_name(f"{report.stem}.nii.gz")
            predictions[key] = Prediction([label_map], masks)
    if not predictions:
        raise UserError(
            f"pred={pred_dir} holds no label map ({', '.join(SUFFIXES)}); give predict's folder."
        )
    return predictions


def find_references(
    ref: Path, labels_column: str, split: str | None
) -> tuple[dict[str, Reference], set[str]]:
    """Find the references to score, by the key of their case.

    Args:
        ref: Case table, or folder of label maps.
        labels_column: Column of the case table with the label maps.
        split: Value of the column `split` whose cases are taken; None = all cases.

    Returns:
        Key of each case to its reference, and the keys of the cases of other splits.

    Raises:
        UserError: If there is no reference, two files of a folder or two rows of the table have the
            same key, or a split is given for a folder.
    """
    # A folder without label maps is taken for a data set folder, which holds a case table.
    if ref.is_dir() and not volume_files(ref):
        ref = table_at(ref)
    if ref.is_dir():
        if split is not None:
            raise UserError(
                f"split={split} needs a case table as ref, got the folder {ref}; leave split out."
            )
        return _references_in_folder(ref), set()
    if not ref.exists():
        raise UserError(f"ref={ref} does not exist; give a case table or a folder of label maps.")
    if volume_suffix(ref) is not None:
        raise UserError(f"ref={ref} is a single label map; give its folder, or a case table.")
    references = {}
    keys = set()
    for case in read_case_table(ref, labels_column, is_divided=False):
        key = _key(case.name)
        if key in keys:
            raise UserError(
                f"{ref}: two cases are called {case.name}, with a letter as one character and as "
                "two (Unicode NFC and NFD); rename one of them."
            )
        keys.add(key)
        if split in (None, case.split):
            references[key] = Reference(case.name, case.labels, case)
    if not references:
        raise UserError(
            f"{ref} has no case with split={split}; give another split, "
            "or fill in the column split of the table."
        )
    return references, keys - set(references)


def _references_in_folder(folder: Path) -> dict[str, Reference]:
    """List the label maps of a folder as references, by the key of their case.

    Raises:
        UserError: If there is no label map, or one case has two.
    """
    references = {}
    for key, paths in _label_maps(folder).items():
        if len(paths) > 1:
            names = " and ".join(path.name for path in paths[:2])
            raise UserError(f"{folder} holds {names} for one case; keep one.")
        references[key] = Reference(case_name(paths[0]), paths[0])
    if not references:
        raise UserError(
            f"ref={folder} holds no label map ({', '.join(SUFFIXES)}); give a case table, a folder "
            "of label maps, or the output of `import`."
        )
    return references


def read_pair(
    prediction: Prediction, reference: Reference, task: Task, label_values: LabelValues
) -> LabelPair:
    """Read prediction and reference as label maps in the values of the task.

    Args:
        prediction: Files of the prediction.
        reference: Reference of the same case.
        task: Values of the labels, and the ignore label.
        label_values: Value in the reference file to label name.

    Returns:
        Both label maps, oriented to LPS and 0 where the reference has the ignore label. Helper
        labels are 0 too, as in the results of `predict`: they belong to no region.

    Raises:
        UserError: If a label map is missing or cannot be read, there are two predictions, the grids
            differ, or a value has no meaning.
    """
    if len(prediction.paths) > 1:
        names = " and ".join(path.name for path in prediction.paths[:2])
        raise UserError(f"there are two predictions, {names}; keep one")
    if reference.labels is None:
        raise UserError("the case has no reference; give its label map")
    if prediction.masks:
        report = prediction.path.with_name(f"{case_name(prediction.path)}.json")
        pred_volume = _merge_masks(prediction.masks, values_of_report(report, task))
    else:
        pred_volume = read_labels(prediction.path)
    # A reference in DICOM is read on the grid of its scan.
    image = None
    series = None
    if reference.case is not None:
        image = reference.case.image
        series = reference.case.series
    # `kept` leaves out structures of other labels, which would take voxels from the task's labels.
    target_volume, names_by_value = read_reference(
        reference.labels,
        label_values,
        image=image,
        series=series,
        modality=task.channels[0].modality,
        kept=task.values,
    )
    warnings = []
    for sentence in sentences_of(target_volume.findings):
        warnings.append(f"reference {reference.labels.name}: {sentence}")
    # Orient before the grids are compared: the same voxels may be stored in another axis order.
    pred, grid, _ = orient(pred_volume.array, pred_volume.grid)
    target, target_grid, _ = orient(target_volume.array, target_volume.grid)
    check_grid(
        "prediction's",
        grid,
        "reference's",
        target_grid,
        "; predict the image that the reference belongs to",
    )
    if int(pred.min()) < 0 or int(pred.max()) > len(task.labels):
        raise UserError(
            f"the prediction {prediction.path.name} holds values from {pred.min()} to "
            f"{pred.max()}, expected 0 to {len(task.labels)} (task {task.name}); "
            "evaluate label maps of this task"
        )
    # `kept` had helper labels, so that structures overlap as in the targets of the training.
    target = task_values(target, reference.labels, task.without_helpers(), names_by_value)
    pred = _without_helpers(pred, prediction.path, task)
    if task.ignore_label is not None:
        # Background in both maps, so that the scores leave ignored voxels out.
        is_ignored = target == task.ignore_label
        pred = np.where(is_ignored, 0, pred)
        target = np.where(is_ignored, 0, target).astype(np.uint8)
    return LabelPair(pred, target, grid, warnings)


def _without_helpers(pred: np.ndarray, path: Path, task: Task) -> np.ndarray:
    """Set the helper labels of a prediction to 0, such as those of a network of one stage.

    Args:
        pred: Label map (D, H, W).
        path: Its file. The report beside it, if there is one, names the labels.
        task: Values of the labels.

    Raises:
        UserError: If the prediction has a helper label that its report does not name: the value
            then stands for another label, and the prediction is of another task.
    """
    for name in task.helper_labels:
        is_helper = pred == task.labels[name]
        if not is_helper.any():
            continue
        names = labels_of_report(path.with_name(f"{case_name(path)}.json"))
        if names and name not in names:
            raise UserError(
                f"the prediction {path.name} holds the value {task.labels[name]}, which is {name} "
                f"in the task {task.name}, but its labels are {', '.join(names)}; give the task of "
                "the prediction (task=<name> or task=<file>.yaml)"
            )
        pred = np.where(is_helper, 0, pred)
    return pred


def check_grid(
    owner: str, grid: VoxelGrid, other_owner: str, other: VoxelGrid, cure: str = ""
) -> None:
    """Refuse two grids that differ by more than the tolerance of the audit.

    Args:
        owner: Owner of `grid` in the genitive, such as `prediction's`, for the message.
        grid: The first grid, with its axes in the order of the other one.
        other_owner: Owner of `other` in the genitive.
        other: The second grid.
        cure: End of the message, which tells the user what to do.

    Raises:
        UserError: If they differ.
    """
    if not grid.is_close(other, GRID_TOLERANCE_MM):
        raise UserError(
            f"the {owner} grid ({_describe(grid)}) is not the {other_owner} "
            f"({_describe(other)}){cure}"
        )


def _describe(grid: VoxelGrid) -> str:
    """Format size, spacing and origin for a sentence."""
    origin = ", ".join(f"{value:.2f}" for value in grid.origin_xyz_mm)
    return (
        f"{per_axis_text(grid.shape)} voxels of {per_axis_text(grid.spacing_mm)} mm from ({origin})"
    )


def _key(name: str) -> str:
    """Normalise a case name to NFC: some file systems store ü as two characters (NFD)."""
    return unicodedata.normalize("NFC", name)


def _merge_masks(masks: Mapping[str, Path], values: Mapping[str, int]) -> Volume:
    """Merge the masks of a prediction into a label map.

    Args:
        masks: Label to the file of its mask, in the order of the label values.
        values: Label to its value in the label map.

    Raises:
        UserError: If a mask cannot be read, or their grids differ.
    """
    merged = None
    for name, path in masks.items():
        mask = read_labels(path)
        if merged is None:
            # The label map gets the grid and metadata of the first mask.
            merged = replace(mask, array=np.zeros(mask.array.shape, dtype=np.uint8))
        check_grid(f"mask {path.name}'s", mask.grid, "other masks'", merged.grid)
        merged.array[mask.array > 0] = values[name]
    assert merged is not None, "a task has labels"
    return merged


def _masks_by_report(folder: Path) -> dict[Path, dict[str, Path]]:
    """Find the masks that `predict` saved beside its reports.

    Returns:
        Report to a mapping of label to mask file. A report is included if any of its masks exists;
        reading the masks raises an error if one is missing.
    """
    masks_by_report = {}
    # A set, because a look at the disk for each label of each case would take long on a network.
    present = set(volume_files(folder))
    for report in sorted(folder.glob("*.json")):
        stem = report.with_suffix("")
        masks = {}
        for label in labels_of_report(report):
            masks[label] = label_file(stem, label, "masks")
        if any(path in present and not _is_case(path) for path in masks.values()):
            masks_by_report[report] = masks
    return masks_by_report


def _files_of_labels(folder: Path) -> set[Path]:
    """List the paths of files of single labels, such as masks, that `predict` may have saved."""
    files = set()
    for report in folder.glob("*.json"):
        stem = report.with_suffix("")
        for label in labels_of_report(report):
            for kind in LABEL_ENDINGS:
                files.add(label_file(stem, label, kind))
    return files


def _is_case(file: Path) -> bool:
    """Whether a file with the name of a label's mask is a label map: it has a report of its own.

    `a.left.nii.gz` is the mask of the label `left` of the case `a`, or the label map of a case
    `a.left`.
    """
    return file.with_name(f"{case_name(file)}.json").exists()


def _label_maps(folder: Path) -> dict[str, list[Path]]:
    """List the label maps of a folder by the key of their case, without the masks of `predict`."""
    paths_by_key: dict[str, list[Path]] = {}
    files_of_labels = _files_of_labels(folder)
    for path in volume_files(folder):
        if path not in files_of_labels or _is_case(path):
            paths_by_key.setdefault(_key(case_name(path)), []).append(path)
    return paths_by_key


def task_values(
    labels: np.ndarray, path: Path, task: Task, label_values: Mapping[int, str]
) -> np.ndarray:
    """Translate the values of a reference file into those of the task, uint8.

    Labels that the task does not have become 0.

    Args:
        labels: Label map in the values of the file, integers, (D, H, W).
        path: The file, for the message.
        task: Has the values of its labels.
        label_values: Value in the file to label name.

    Raises:
        UserError: If the file holds a value that has no name.
    """
    # Lookup tables indexed by the value in the file: `table` holds the value of the task,
    # `is_known` whether the file value has a name or is 0 (background). NumPy counts negative
    # indices from the end, where the tables have room for the negative values.
    least = min([0, *label_values])
    largest = max([0, *label_values])
    size = largest - least + 1
    table = np.zeros(size, dtype=np.uint8)
    table[list(label_values)] = [task.values.get(name, 0) for name in label_values.values()]
    is_known = np.zeros(size, dtype=bool)
    is_known[[0, *label_values]] = True
    # The range is checked first, because other values are no index of the tables.
    is_in_range = labels.min() >= least and labels.max() <= largest
    if is_in_range and is_known[labels].all():
        return table[labels]
    unknown_values = sorted(set(np.unique(labels).tolist()) - {0, *label_values})
    named_values = ", ".join(map(str, sorted(label_values))) or "no value"
    cure = "add it, also if it is background"
    if unknown_values[0] < 0:
        cure = "add it as background, or write it again without negative values"
    raise UserError(
        f"the reference {path.name} holds the value {unknown_values[0]}, which data.label_values "
        f"does not name (it names {named_values}); {cure}"
    )
