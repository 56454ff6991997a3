"""Reference labels of a case: a label map, or a folder of binary masks merged to one."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from medseg.data.audit.labels import GRID_TOLERANCE_MM
from medseg.data.task import LabelValues
from medseg.errors import UserError, require
from medseg.io.inputs import case_name, volume_files
from medseg.io.read import read_labels
from medseg.io.volume import Volume

MAX_LISTED = 20


def read_reference(path: Path, label_values: LabelValues) -> tuple[Volume, dict[int, str]]:
    """Read the labels of a case in the storage order of their files.

    A label that `label_values` gives no mask has the one of its own name. Upper and lower case do not matter. A label without a mask is
    absent. Where masks overlap, the later label of `label_values` counts.

    Args:
        path: Label map, or folder of binary masks, one file for each structure.
        label_values: Value, or name of a mask, to label name.

    Returns:
        Label values (D, H, W) with remarks, and value to label name.

    Raises:
        UserError: If a file cannot be read, no label has a mask, or a mask is not binary or on another grid than the first.
    """
    masks = {case_name(file): file for file in volume_files(path)} if path.is_dir() else {}
    if not masks:
        return read_labels(path), {value: label for value, label in label_values.items() if isinstance(value, int)}
    return _merge(path, masks, lambda name: read_labels(masks[name]), label_values)


def _merge(
    path: Path, names: Iterable[str], read: Callable[[str], Volume], label_values: LabelValues
) -> tuple[Volume, dict[int, str]]:
    """Merge structures to a label map, one at a time.

    Args:
        path: Where they come from, for messages.
        names: Names of all structures.
        read: Reads the mask of a structure.
        label_values: As for `read_reference`.
    """
    known = {name.casefold(): name for name in names}
    values = {label: value for value, label in enumerate(dict.fromkeys(label_values.values()), start=1)}
    named = {label: [name for name, one in label_values.items() if one == label and isinstance(name, str)] for label in values}
    wanted = [(label, name) for label in values for name in named[label] or [label]]
    missing = [name for _, name in wanted if name.casefold() not in known]
    if len(missing) == len(wanted):
        listed = ", ".join(sorted(known.values())[:MAX_LISTED]) + (", …" if len(known) > MAX_LISTED else "")
        raise UserError(
            f"{path}: expected a structure named {' or '.join(missing[:MAX_LISTED])}, but it holds {listed or 'none'}; name the structures of "
            "each label in data.label_values={<label>: [<structure>, …]}."
        )
    labels: np.ndarray | None = None
    num_shared = 0
    for label, name in wanted:
        if name in missing:
            continue
        mask = read(known[name.casefold()])
        if labels is None:
            first, labels = mask, np.zeros(mask.grid.shape, np.min_scalar_type(len(values)))
        require(
            mask.grid.is_close(first.grid, GRID_TOLERANCE_MM),
            f"{path}: the mask of {name} has another grid than the first; resample it.",
        )
        is_inside = mask.array != 0
        require(
            bool((mask.array[is_inside] == mask.array.max()).all()),
            f"{path}: expected a mask of one value, but that of {name} holds several; give its file as a label map instead.",
        )
        num_shared += int(np.count_nonzero(labels[is_inside] % values[label]))
        labels[is_inside] = values[label]
    assert labels is not None, "one structure at least was found"
    remarks = [f"{', '.join(missing)}: no such structure, taken as absent"] if missing else []
    if num_shared:
        remarks.append(f"{num_shared} voxels belong to several labels and count for the last one of data.label_values")
    return Volume(labels, first.grid, first.header, (*first.remarks, *remarks)), {value: label for label, value in values.items()}
