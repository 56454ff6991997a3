"""Importers of data sets that a JSON file describes: nnU-Net raw folders, the Medical Segmentation Decathlon, MONAI datalists.

Sources of the layouts: documentation/dataset_format.md of nnU-Net 2, medicaldecathlon.com, `monai.data.load_decathlon_datalist`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medseg.data.case_table import Case
from medseg.data.importers.dataset import DataSet, FileValues, channel_of, label_names, nfc, require_pairs
from medseg.data.task import IGNORE
from medseg.errors import UserError, require
from medseg.io.inputs import SUFFIXES, case_name, volume_files
from medseg.io.read import read_image, read_labels
from medseg.io.text import read_json

NNUNET, MSD = "nnunet", "msd"
DATASET_FILE, SPLITS_FILE = "dataset.json", "splits_final.json"
BACKGROUND = "background"
# A first volume with values below this is CT in HU: air is -1000, and MR has no negative values of this size.
CT_HU = -500
# Lists of a datalist, and the split of their cases.
LISTS = {"training": None, "validation": "val", "test": "test", "testing": "test"}


def import_nnunet(folder: Path) -> DataSet:
    """Read an nnU-Net raw folder: `dataset.json`, `imagesTr/<case>_0000.nii.gz`, `labelsTr/<case>.nii.gz`, and `imagesTs`.

    `splits_final.json` in the folder, or in nnU-Net's folder of preprocessed data, gives the folds. The older `dataset.json` of nnU-Net 1 is
    read too.

    Raises:
        UserError: If a file is missing, or `dataset.json` is damaged.
    """
    path = folder / DATASET_FILE
    about = read_about(path)
    key = "channel_names" if "channel_names" in about else "modality"
    channels = _names(field(about, key, dict, path))
    ending = about.get("file_ending", ".nii.gz")
    require(
        ending in list(SUFFIXES),
        f"{path}: expected file_ending to be one of {', '.join(SUFFIXES)}, got {ending!r}; convert the files to one of them.",
    )
    notes = []
    if "dataset" in about:
        listed = {name: entry if isinstance(entry, dict) else {} for name, entry in field(about, "dataset", dict, path).items()}
        images = {name: [folder / one for one in texts(entry.get("images"), path)] for name, entry in listed.items()}
        labels = {name: folder / text(entry.get("label"), path) for name, entry in listed.items()}
        for name, files in images.items():
            require(
                len(files) == len(channels),
                f"{path}: expected {len(channels)} images of {name}, one per channel, got {len(files)}.",
            )
    else:
        images = _numbered(folder / "imagesTr", ending, len(channels))
        require(
            bool(images),
            f"{folder / 'imagesTr'}: expected files that end in {ending} (file_ending of {path}), found none; rename the files, or "
            "correct file_ending.",
        )
        labels = _by_name(folder / "labelsTr", ending)
        require_pairs(images, labels, folder / "imagesTr", folder / "labelsTr")
        count = about.get("numTraining")
        if count != len(images):
            notes.append(f"{DATASET_FILE} says numTraining={count}, but imagesTr holds {len(images)} cases")
    splits = [folder / SPLITS_FILE, folder.parent.parent / "nnUNet_preprocessed" / folder.name / SPLITS_FILE]
    folds, sides = _read_splits(next((one for one in splits if one.is_file()), None), notes)
    cases = [
        Case(name, files[0], labels[name], name, sides.get(nfc(name)), fold=folds.get(nfc(name)), more_images=tuple(files[1:]))
        for name, files in images.items()
    ]
    if (folder / "imagesTs").is_dir():
        tested = _by_name(folder / "labelsTs", ending) if (folder / "labelsTs").is_dir() else {}
        cases += [
            Case(name, files[0], tested.get(name), name, "test", more_images=tuple(files[1:]))
            for name, files in _numbered(folder / "imagesTs", ending, len(channels)).items()
        ]
    groups, ignore = _label_groups(field(about, "labels", dict, path), path)
    return DataSet(
        NNUNET,
        str(about.get("name") or folder.name),
        tuple(cases),
        groups,
        tuple(map(channel_of, channels)),
        {},
        ignore,
        tuple(notes),
    )


def import_msd(source: Path) -> DataSet:
    """Read a data set of the Medical Segmentation Decathlon, or a MONAI datalist.

    Args:
        source: Folder with `dataset.json`, or a datalist. Paths are relative to the folder of the file.

    Raises:
        UserError: If the file is damaged.
    """
    path = source if source.is_file() else source / DATASET_FILE
    about, notes = read_about(path), list[str]()
    entries = [
        (split, entry if isinstance(entry, dict) else {"image": entry})
        for key, split in LISTS.items()
        if key in about or key == "training"
        for entry in field(about, key, list, path)
    ]
    images = [[path.parent / one for one in texts(entry.get("image"), path)] for _, entry in entries]
    names = _case_names(path.parent, [several[0] for several in images])
    cases = []
    for name, files, (split, entry) in zip(names, images, entries, strict=True):
        labels, fold = entry.get("label"), entry.get("fold")
        require(fold is None or (type(fold) is int and fold >= 0), f"{path}: expected a fold >= 0 for {name}, got {fold!r}.")
        cases.append(
            Case(
                name,
                files[0],
                path.parent / text(labels, path) if labels is not None else None,
                str(entry.get("patient") or name),
                split,
                fold=fold if split is None else None,
                more_images=tuple(files[1:]),
            )
        )
    if any(split == "val" for split, _ in entries) and any(case.fold is not None for case in cases):
        raise UserError(f"{path}: expected a list validation or a fold of each case, but it has both; remove one of them.")
    if "labels" in about:
        groups, ignore = _label_groups(field(about, "labels", dict, path), path)
    else:
        groups, ignore = values_in(cases, notes), None
    channels = [channel_of(one) for one in _names(field(about, "modality", dict, path))] if "modality" in about else []
    return DataSet(
        MSD,
        str(about.get("name") or path.parent.name),
        tuple(cases),
        groups,
        tuple(channels or [channel_of(guess_modality(cases[0].image, notes))] * max(map(len, images), default=1)),
        {},
        ignore,
        tuple(notes),
    )


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON file that describes a data set.

    Raises:
        UserError: If it is no mapping.
    """
    about = read_json(path)
    require(isinstance(about, dict), f"{path}: expected a description of a data set (a JSON mapping), got another value.")
    return dict(about)


def field(about: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """Return a value of a JSON file, checked to be a list or a mapping.

    Raises:
        UserError: If it is missing or of another kind.
    """
    value = about.get(key)
    if not isinstance(value, kind):
        raise UserError(
            f"{path}: expected {key!r} as a {'mapping' if kind is dict else 'list'}, got {str(value)[:60]!r}; correct the file."
        )
    return value


def text(value: Any, path: Path) -> str:
    """Return a path of a JSON file.

    Raises:
        UserError: If it is no text.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise UserError(f"{path}: expected the path of an image or a label map, got {str(value)[:60]!r}; correct the file.")
    return value


def texts(value: Any, path: Path) -> list[str]:
    """Return one path or several, at least one."""
    return [text(one, path) for one in (value if isinstance(value, list) and value else [value])]


def values_in(cases: Sequence[Case], notes: list[str]) -> FileValues:
    """Find the values of all label maps, for data sets that name no labels; the names are `label_<value>`."""
    found = {int(value) for case in cases if case.labels is not None for value in np.unique(read_labels(case.labels).array)}
    values = sorted(found - {0})
    require(bool(values), "the label maps hold nothing but zeros; check the data set.")
    notes.append(
        f"the data set does not name its labels; its label maps hold {', '.join(map(str, values))}: name them with labels={{<name>: <value>, …}}"
    )
    return {f"label_{value}": [value] for value in values}


def guess_modality(image: Path, notes: list[str]) -> str:
    """Guess from the values of a scan whether it is CT."""
    is_ct = int(read_image(image, modality="other").array.min()) < CT_HU
    notes.append(
        f"the data set does not name its modality; {image.name} {'holds HU' if is_ct else 'holds no HU'}: correct task.yaml if that is wrong"
    )
    return "ct" if is_ct else "other"


def _names(given: Mapping[str, Any]) -> list[str]:
    """List the names of channels in their order."""
    return [str(given[key]) for key in sorted(given, key=lambda key: (len(key), key))]


def _numbered(folder: Path, ending: str, num_channels: int) -> dict[str, list[Path]]:
    """Find the images `<case>_0000`, `<case>_0001`, … of each case.

    Raises:
        UserError: If the folder or a channel is missing, or a name has no number.
    """
    found: dict[str, dict[int, Path]] = {}
    for name, path in _by_name(folder, ending).items():
        match = re.fullmatch(r"(.+)_(\d{4})", name, re.ASCII)
        if match is None:
            raise UserError(
                f"{path}: expected a name that ends in the number of a channel, such as {name}_0000{ending}; rename the file."
            )
        found.setdefault(match[1], {})[int(match[2])] = path
    for name, files in found.items():
        if lacking := sorted(set(range(num_channels)) - set(files)):
            raise UserError(
                f"{folder}: {name} lacks the channel {lacking[0]:04d}, expected {num_channels} channels ({DATASET_FILE}); add the file."
            )
        if extra := sorted(set(files) - set(range(num_channels))):
            raise UserError(
                f"{folder}: {name} has a channel {extra[0]:04d}, but {DATASET_FILE} names {num_channels}; correct one of them."
            )
    return {name: [files[number] for number in range(num_channels)] for name, files in found.items()}


def _by_name(folder: Path, ending: str) -> dict[str, Path]:
    """Find the volume files of a folder with one ending, by name."""
    require(folder.is_dir(), f"{folder} does not exist, but an nnU-Net data set needs it; check the folder.")
    return {path.name[: -len(ending)]: path for path in volume_files(folder) if path.name.lower().endswith(ending)}


def _read_splits(path: Path | None, notes: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Read the folds of nnU-Net.

    Returns:
        Case to the fold that validates it; or, where folds share cases, case to its side of the first fold.
    """
    if path is None:
        return {}, {}
    content = read_json(path)
    sides = (
        [one.get(side) for one in content if isinstance(one, dict) for side in ("train", "val")]
        if isinstance(content, list)
        else []
    )
    require(
        bool(sides) and len(sides) == 2 * len(content) and all(isinstance(side, list) for side in sides),
        f"{path}: expected a list of folds, each with train and val; correct or remove the file.",
    )
    validated = [(nfc(str(name)), number) for number, fold in enumerate(content) for name in fold["val"]]
    folds = dict(validated)
    if len(folds) == len(validated):
        notes.append(
            f"{path} divides the cases into {len(content)} folds: they are in the column fold; choose one by data.fold, with data.num_folds={len(content)}"
        )
        return folds, {}
    notes.append(
        f"{path} names some cases for validation in several folds, which a case table cannot hold: "
        "the column split has the first fold alone"
    )
    return {}, {
        **{nfc(str(name)): "train" for name in content[0]["train"]},
        **{nfc(str(name)): "val" for name in content[0]["val"]},
    }


def _label_groups(given: Mapping[str, Any], path: Path) -> tuple[FileValues, int | None]:
    """Make disjoint labels of what `dataset.json` names.

    Regions of nnU-Net are lists of values that overlap. Values that belong to the same regions become one label. It has the name of the
    smallest of these regions, with `_rest` where the region holds further values.

    Args:
        given: Name to value or list of values; or value to name, as in the Decathlon.
        path: File, for messages.

    Returns:
        Labels with their values, in the order of the values; and the value to ignore.

    Raises:
        UserError: If a value is no whole number.
    """
    if all(isinstance(name, str) for name in given.values()):
        require(
            all(key.isdecimal() for key in given), f"{path}: expected labels as name: value or value: name, got {dict(given)}."
        )
        given = {name: int(value) for value, name in given.items()}
    members: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        several = value if isinstance(value, list) else [value]
        require(
            bool(several) and all(type(one) is int and one >= 0 for one in several),
            f"{path}: expected whole numbers from 0 as values of the label {name!r}, got {value!r}; correct the file.",
        )
        members[name] = tuple(several)
    ignore = members.pop(IGNORE, (None,))[0]
    members = {name: values for name, values in members.items() if name.casefold() != BACKGROUND and values != (0,)}
    require(bool(members), f"{path}: expected at least one label beside the background, got {dict(given)}; correct the file.")
    groups: dict[tuple[str, ...], list[int | str]] = {}
    for value in sorted({value for values in members.values() for value in values}):
        owners = sorted((name for name, values in members.items() if value in values), key=lambda name: len(members[name]))
        groups.setdefault(tuple(owners), []).append(value)
    named: FileValues = {}
    for regions, group in groups.items():
        name = regions[0] if set(group) == set(members[regions[0]]) else f"{regions[0]}_rest"
        named["_and_".join(regions) if name in named else name] = group
    written = label_names(named)
    return {written[name]: group for name, group in named.items()}, ignore


def _case_names(folder: Path, images: Sequence[Path]) -> list[str]:
    """Name cases after their files without `_0000`, with their folders where two files have one name."""
    names = [re.sub(r"_0000$", "", case_name(path)) for path in images]
    if len(set(names)) == len(names):
        return names
    parts = [path.relative_to(folder).parts if path.is_relative_to(folder) else path.parts[1:] for path in images]
    return [
        "_".join([*(part for part in one[:-1] if part not in (".", "..")), name]) for one, name in zip(parts, names, strict=True)
    ]
