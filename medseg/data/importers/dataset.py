"""Imported data set: the cases, labels and channels in a folder of another program, and the task that is made from them."""

import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medseg.data.case_table import Case, check_case_name
from medseg.data.task import IGNORE, Channel
from medseg.errors import UserError, require
from medseg.io.inputs import CONTROL_CHARACTERS

SIDES = {"left": "left", "right": "right", "l": "left", "r": "right"}
# Label maps have one byte for each voxel.
MAX_IGNORE_LABEL = 255
# Air to dense bone: a data set does not say which tissue it is about.
WINDOW_HU = (-1000.0, 1000.0)
MR_WORDS = frozenset(
    {"mr", "mri", "t1", "t1w", "t1c", "t1ce", "t1gd", "t1n", "t2", "t2w", "t2f", "flair", "adc", "dwi", "pd", "swi", "bssfp"}
)

FileValues = dict[str, list[int | str]]
"""Label name to its values, or names of structures, in the files."""


@dataclass(frozen=True)
class DataSet:
    """Content of a folder of another program.

    Attributes:
        format: Name of the layout.
        name: Name of the task.
        cases: Cases by name.
        labels: Labels of the task with their values in the files.
        channels: Channels of the task.
        background: Further names in the files, which become background.
        ignore: Value of ignored voxels; None where there are none.
        notes: Sentences for the user.
    """

    format: str
    name: str
    cases: tuple[Case, ...]
    labels: FileValues
    channels: tuple[Channel, ...]
    background: FileValues
    ignore: int | None = None
    notes: tuple[str, ...] = ()

    def keep(self, wanted: Sequence[str] | Mapping[str, Any] | None) -> "DataSet":
        """Choose the labels of the task; the others become background.

        Args:
            wanted: Names of labels, or new labels with the names or values that they consist of; None = all.

        Raises:
            UserError: If a name is unknown.
        """
        if wanted is None:
            return self
        known = {**self.background, **self.labels}
        groups = wanted if isinstance(wanted, Mapping) else {name: [name] for name in wanted}
        members = {name: given if isinstance(given, list) else [given] for name, given in groups.items()}
        values = {one for several in known.values() for one in several}
        unknown = [one for several in members.values() for one in several if one not in known and one not in values]
        require(
            bool(members) and not unknown,
            f"labels: {', '.join(map(str, unknown)) or 'no label'} is not in the data set, which has {', '.join(known)}; give some of these names.",
        )
        chosen = {name: [value for one in several for value in known.get(str(one), [one])] for name, several in members.items()}
        taken = {value for several in chosen.values() for value in several}
        rest = {name: left for name, several in known.items() if (left := [one for one in several if one not in taken])}
        return replace(self, labels=chosen, background={name: left for name, left in rest.items() if name not in chosen})

    def task(self) -> dict[str, Any]:
        """Make the groups `task` and `data` of the configuration, in plain types.

        Regions are made if every label has a side; a task with other labels has one stage.
        """
        labels = {name: value for value, name in enumerate(self.labels, start=1)}
        sides = {name: side_of(name)[0] for name in labels}
        fits = self.ignore is not None and len(labels) < self.ignore <= MAX_IGNORE_LABEL
        ignore = self.ignore if fits or self.ignore is None else len(labels) + 1
        files = {name: values[0] if len(values) == 1 else values for name, values in {**self.labels, **self.background}.items()}
        if ignore is not None and ignore != self.ignore:
            files[IGNORE] = self.ignore  # type: ignore[assignment]
        channels = [
            {"modality": one.modality, "window_hu": list(one.window_hu)}
            if one.window_hu
            else {"modality": one.modality, "normalise": one.normalise}
            for one in self.channels
        ]
        return {
            "task": {
                "name": safe_name(self.name),
                "labels": labels,
                "regions": {name: {"labels": [name], "side": side} for name, side in sides.items()}
                if all(sides.values())
                else None,
                "channels": channels,
                **({} if ignore is None else {"ignore_label": ignore}),
            },
            "data": {"label_values": files},
        }


def check_dataset(data: DataSet, folder: Path) -> DataSet:
    """Refuse a data set that cannot be trained on, and add notes on what may surprise.

    Raises:
        UserError: If there is no case, a name clashes or cannot name a file, or a file is missing.
    """
    require(bool(data.cases), f"{folder}: the {data.format} data set has no case; check the folder.")
    seen: dict[str, Case] = {}
    notes = list(data.notes)
    for case in data.cases:
        check_case_name(case.name, str(case.image))
        other = seen.get(case.name.casefold())
        if other is not None and other.name == case.name:
            raise UserError(f"{folder}: {other.image} and {case.image} would both be the case {case.name!r}; rename one of them.")
        if other is not None:
            notes.append(
                f"the cases {other.name!r} and {case.name!r} differ in upper and lower case only: some systems take their files for one"
            )
        seen[case.name.casefold()] = case
    files = [path for case in data.cases for path in (case.image, *case.more_images, case.labels) if path is not None]
    if missing := [path for path in files if not path.exists()]:
        raise UserError(f"{first_of(missing)} does not exist, but the data set names it; copy the data set completely.")
    root = Path(os.path.realpath(folder if folder.is_dir() else folder.parent))
    outside = [path for path in files if not Path(os.path.realpath(path)).is_relative_to(root)]
    if outside:
        notes.append(f"{len(outside)} of {len(files)} files lie outside of {root}, such as {os.path.realpath(outside[0])}")
    unlabelled = sum(case.labels is None for case in data.cases)
    if unlabelled:
        notes.append(f"{unlabelled} of {len(data.cases)} cases have no labels: they are not trained on")
    # As a case table is read: programs write ü in two ways.
    cases = tuple(replace(case, patient=nfc(case.patient)) for case in data.cases)
    return replace(data, cases=cases, notes=tuple(notes))


def nfc(name: str) -> str:
    """Write letters with marks as one character; file systems may store them as two."""
    return unicodedata.normalize("NFC", name)


def first_of(paths: Sequence[Any]) -> str:
    """Name the first of several, and count the others."""
    return f"{paths[0]}{f' (and {len(paths) - 1} more)' if len(paths) > 1 else ''}"


def side_of(name: str) -> tuple[str | None, str]:
    """Find the side that a name begins or ends with, and the name of the organ without it.

    Example:
        >>> [side_of(name) for name in ("left_lung", "Lung_R", "kidney_left", "heart", "l")]
        [('left', 'lung'), ('right', 'Lung'), ('left', 'kidney'), (None, 'heart'), (None, 'l')]
    """
    words = re.split(r"[\s_.-]+", name)
    for index in (0, -1):
        if len(words) > 1 and (side := SIDES.get(words[index].casefold())):
            return side, "_".join(words[1:] if index == 0 else words[:-1])
    return None, name


def safe_name(name: str) -> str:
    """Join the words of a name by `_`, without signs that a file name or a key of the configuration cannot have."""
    return re.sub(r"[^\w-]+", "_", CONTROL_CHARACTERS.sub("_", name)).strip("_-") or "label"


def plain_name(name: str) -> str:
    """Reduce a name to the form in which names are compared: without upper case and signs, the side first and written out.

    Example:
        >>> [plain_name(name) for name in ("Lung_L", "left lung", "lung-left", "Heart")]
        ['left_lung', 'left_lung', 'left_lung', 'heart']
    """
    side, organ = side_of(safe_name(name))
    return f"{side}_{organ}".casefold() if side else organ.casefold()


def label_names(names: Iterable[str]) -> dict[str, str]:
    """Turn the names of a data set into names of labels: words joined by `_`, sides written out.

    Returns:
        Name in the data set to name of the label.

    Raises:
        UserError: If two names become one.

    Example:
        >>> label_names(["Lung_L", "Lung_R", "left atrium", "Heart"])
        {'Lung_L': 'left_lung', 'Lung_R': 'right_lung', 'left atrium': 'left_atrium', 'Heart': 'Heart'}
    """
    known = {name: safe_name(name) for name in names}
    organs = [side_of(name) for name in known.values()]
    for name, label in known.items():
        side, organ = side_of(label)
        is_pair = {one for one, other in organs if other == organ} >= {"left", "right"}
        if side and is_pair and side not in label.casefold():
            known[name] = f"{side}_{organ.casefold()}"
    taken: dict[str, str] = {}
    for name, label in known.items():
        other = taken.setdefault(label.casefold(), name)
        require(other == name, f"the labels {other!r} and {name!r} would both be {label}; rename one of them in the data set.")
    return known


def channel_of(name: str) -> Channel:
    """Guess modality and normalisation of a channel from its name in a data set."""
    words = set(re.split(r"[^a-z0-9]+", name.casefold()))
    if "ct" in words:
        return Channel("ct", WINDOW_HU)
    return Channel("mr" if words & MR_WORDS else "other", None, "zscore")


def require_pairs(images: Collection[str], labels: Collection[str], images_at: Path, labels_at: Path) -> None:
    """Refuse images without labels and labels without images.

    Raises:
        UserError: With the name of the first.
    """
    if alone := sorted(set(images) - set(labels)):
        raise UserError(
            f"{labels_at}: no labels for {first_of(alone)}, which {images_at.name} holds; add them, or move the image to another folder."
        )
    if alone := sorted(set(labels) - set(images)):
        raise UserError(
            f"{images_at}: no image for {first_of(alone)}, which {labels_at.name} holds; add it, or move the labels to another folder."
        )
