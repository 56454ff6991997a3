"""Importers of data sets that a JSON file describes: nnU-Net raw folders, the Medical Segmentation Decathlon, MONAI datalists.

Sources of the layouts: documentation/dataset_format.md of nnU-Net 2, medicaldecathlon.com,
`monai.data.load_decathlon_datalist`.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medseg.data.case_table import Case
from medseg.data.importers.account import Account, Kind
from medseg.data.importers.dataset import (
    DataSet,
    FileValues,
    channel_of,
    label_names,
    require_pairs,
)
from medseg.data.importers.splits import SPLITS_FILE, read_folds
from medseg.errors import UserError, require
from medseg.io.inputs import SUFFIXES, case_name, volume_files
from medseg.io.read import read_image, read_labels
from medseg.io.text import read_json
from medseg.task import IGNORE

NNUNET, MSD = "nnunet", "msd"
DATASET_FILE = "dataset.json"
BACKGROUND = "background"
# A first volume with values below this is CT in HU: air is -1000, and MR has no negative values of
# this size.
CT_HU = -500
# Lists of a datalist, and the split of their cases.
LISTS = {"training": None, "validation": "val", "val": "val", "test": "test", "testing": "test"}
ENTRY_KEYS = ("image", "label", "fold", "patient")
NNUNET_KEYS = (
    "channel_names",
    "modality",
    "labels",
    "file_ending",
    "numTraining",
    "dataset",
    "name",
)
MSD_KEYS = (*LISTS, "labels", "modality", "name")


def import_nnunet(folder: Path) -> DataSet:
    """Read an nnU-Net raw folder: `dataset.json`, `imagesTr/<case>_0000.nii.gz`, `labelsTr/<case>.nii.gz`, and `imagesTs`.

    `splits_final.json` in the folder, or in nnU-Net's folder of preprocessed data, gives the folds.
    The older `dataset.json` of nnU-Net 1 is read too: its lists `training` and `test` choose among
    the files.

    Raises:
        UserError: If a file is missing, or `dataset.json` is damaged.
    """
    path, account = folder / DATASET_FILE, Account()
    about = read_about(path)
    account.claim(path)
    key = "channel_names" if "channel_names" in about else "modality"
    channels = _names(field(about, key, dict, path))
    ending = about.get("file_ending", ".nii.gz")
    require(
        ending in list(SUFFIXES),
        f"{path}: expected file_ending to be one of {', '.join(SUFFIXES)}, got {ending!r}; convert the files to one of them.",
    )
    why = (
        "the key dataset does not name it"
        if "dataset" in about
        else f"no file of a case that ends in {ending}"
    )
    _explain_places(folder, why, account)
    is_first_version = "channel_names" not in about
    read = [*NNUNET_KEYS, *(("training", "test") if is_first_version else ())]
    account.leave_out_keys(about, read, DATASET_FILE)
    if "dataset" in about:
        images, labels = _listed(folder, about, len(channels))
    else:
        images, labels = _in_folders(folder, ending, channels)
    if is_first_version and "training" in about:
        images = _chosen(images, about, "training", path, folder / "imagesTr", account)
        _require_own_labels(about, labels, path)
    _check_count(about, "numTraining", len(images), account)
    splits = [
        folder / SPLITS_FILE,
        folder.parent.parent / "nnUNet_preprocessed" / folder.name / SPLITS_FILE,
    ]
    folds = read_folds(splits, images, account)
    cases = []
    for name, files in images.items():
        place = folds.place(name)
        more = tuple(files[1:])
        case = Case(
            name,
            files[0],
            labels[name],
            name,
            fold=place.fold,
            fold_sides=place.sides,
            more_images=more,
        )
        cases.append(case)
    for name, files, reference in _tested(folder, about, ending, channels, account):
        sides = (None,) * folds.num_sides
        cases.append(
            Case(
                name,
                files[0],
                reference,
                name,
                "test",
                fold_sides=sides,
                more_images=tuple(files[1:]),
            )
        )
    groups, background, ignore = _label_groups(field(about, "labels", dict, path), path, account)
    return DataSet(
        NNUNET,
        str(about.get("name") or folder.name),
        tuple(cases),
        groups,
        tuple(map(channel_of, channels)),
        background,
        ignore,
        (folds.advice,) if folds.advice else (),
        account=account,
    )


def _explain_places(folder: Path, why: str, account: Account) -> None:
    """Say why files of an nnU-Net folder are left out, unless they are read."""
    for name in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
        account.explain(folder / name, why)
    account.explain(
        folder / "splits_final.pkl", f"a pickle is not read: save the folds as {SPLITS_FILE}"
    )


def _listed(
    folder: Path, about: Mapping[str, Any], num_channels: int
) -> tuple[dict[str, list[Path]], dict[str, Path]]:
    """Read the images and labels that the key `dataset` lists."""
    path = folder / DATASET_FILE
    listed = {
        name: entry if isinstance(entry, dict) else {}
        for name, entry in field(about, "dataset", dict, path).items()
    }
    images = {
        name: [folder / one for one in texts(entry.get("images"), path)]
        for name, entry in listed.items()
    }
    labels = {name: folder / text(entry.get("label"), path) for name, entry in listed.items()}
    for name, files in images.items():
        require(
            len(files) == num_channels,
            f"{path}: expected {num_channels} images of {name}, one per channel, got {len(files)}.",
        )
    return images, labels


def _in_folders(
    folder: Path, ending: str, channels: Sequence[str]
) -> tuple[dict[str, list[Path]], dict[str, Path]]:
    """Find the images and labels of the training cases."""
    images = _numbered(folder / "imagesTr", ending, len(channels))
    require(
        bool(images),
        f"{folder / 'imagesTr'}: expected files that end in {ending} (file_ending of {folder / DATASET_FILE}), found none; rename the files, "
        "or correct file_ending.",
    )
    labels = _by_name(folder / "labelsTr", ending)
    require_pairs(images, labels, folder / "imagesTr", folder / "labelsTr")
    return images, labels


def _chosen(
    images: dict[str, list[Path]],
    about: Mapping[str, Any],
    key: str,
    path: Path,
    folder: Path,
    account: Account,
) -> dict[str, list[Path]]:
    """Choose the cases that a list of nnU-Net 1 names: it trains on its list, not on the files of the folder.

    Raises:
        UserError: If the list names a case that has no file.
    """
    entries = field(about, key, list, path)
    paths = [
        text(entry.get("image") if isinstance(entry, dict) else entry, path) for entry in entries
    ]
    counts = Counter(map(_name_in_list, paths))
    for name, count in counts.items():
        if name not in images:
            raise UserError(
                f"{path}: the list {key} names {name}, which {folder} does not hold; add the file, or remove the entry."
            )
        if count > 1:
            account.merge(Kind.list, f"{name} in {key}", "named more than once, counts once")
    for name, files in images.items():
        if name in counts:
            continue
        account.leave_out(Kind.case, name, f"the list {key} of {path.name} does not name it")
        for file in files:
            account.explain(file, f"the list {key} of {path.name} does not name it")
    account.use(Kind.list, key, f"names {len(counts)} cases of {path.name}")
    return {name: images[name] for name in images if name in counts}


def _require_own_labels(about: Mapping[str, Any], labels: Mapping[str, Path], path: Path) -> None:
    """Refuse a list of nnU-Net 1 that gives a case the labels of another name.

    nnU-Net 1 takes the file that the list names, nnU-Net 2 the one that has the name of the case.

    Raises:
        UserError: With the case and both files.
    """
    for entry in about["training"]:
        if not isinstance(entry, dict) or "label" not in entry:
            continue
        name = _name_in_list(text(entry.get("image"), path))
        listed = Path(text(entry["label"], path)).name
        if listed != labels[name].name:
            raise UserError(
                f"{path}: the list training gives the case {name} the labels {listed}, but expected {labels[name].name}; "
                "name the file of the right labels so, and correct the list."
            )


def _name_in_list(image: str) -> str:
    """Name a case of nnU-Net 1 after the image in its list, which has the number of a channel or none."""
    return re.sub(r"_0000$", "", case_name(Path(image)))


def _tested(
    folder: Path, about: Mapping[str, Any], ending: str, channels: Sequence[str], account: Account
) -> list[tuple[str, list[Path], Path | None]]:
    """Find name, images and labels of the test cases."""
    place, labels_at, path = folder / "imagesTs", folder / "labelsTs", folder / DATASET_FILE
    is_listed = "channel_names" not in about and "test" in about
    if not place.is_dir():
        if is_listed and field(about, "test", list, path):
            raise UserError(
                f"{path}: the list test names cases, but {place} does not exist; copy the folder, or empty the list."
            )
        return []
    images = _numbered(place, ending, len(channels))
    if is_listed:
        images = _chosen(images, about, "test", path, place, account)
    labels = _by_name(labels_at, ending) if labels_at.is_dir() else {}
    for name, file in labels.items():
        if name not in images:
            account.explain(file, "labels without an image")
    return [(name, files, labels.get(name)) for name, files in images.items()]


def _check_count(about: Mapping[str, Any], key: str, count: int, account: Account) -> None:
    """Enter a number of cases that the description states: it is wrong more often than the files are."""
    if key not in about:
        return
    if about[key] == count:
        account.use(Kind.key, key, "agrees with the cases")
    else:
        account.leave_out(
            Kind.key, key, f"says {str(about[key])[:20]}, but there are {count} cases"
        )


def import_msd(source: Path) -> DataSet:
    """Read a data set of the Medical Segmentation Decathlon, or a MONAI datalist.

    Args:
        source: Folder with `dataset.json`, or a datalist. Paths are relative to the folder of the
            file.

    Raises:
        UserError: If the file is damaged, or lists a scan twice.
    """
    path = source if source.is_file() else source / DATASET_FILE
    about, notes, account = read_about(path), list[str](), Account()
    account.claim(path)
    account.leave_out_keys(about, (*MSD_KEYS, "numTraining", "numTest"), path.name)
    entries = _entries(about, path, account)
    for key, lists in {"numTraining": ["training"], "numTest": ["test", "testing"]}.items():
        _check_count(about, key, sum(len(about.get(name) or ()) for name in lists), account)
    images = [
        [path.parent / one for one in texts(entry.get("image"), path)] for _, entry in entries
    ]
    names = _case_names(path.parent, [several[0] for several in images])
    cases = []
    for name, files, (split, entry) in zip(names, images, entries, strict=True):
        labels, fold = entry.get("label"), entry.get("fold")
        require(
            fold is None or (type(fold) is int and fold >= 0),
            f"{path}: expected a fold >= 0 for {name}, got {fold!r}.",
        )
        if fold is not None and split is not None:
            account.leave_out(Kind.key, f"fold of {name}", "the case is not in the list training")
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
    has_folds = any(case.fold is not None for case in cases)
    if has_folds and any(split == "val" for split, _ in entries):
        raise UserError(
            f"{path}: expected a list validation or a fold of each case, but it has both; remove one of them."
        )
    if has_folds:
        for case in cases:
            if case.split is None and case.fold is None:
                account.use(
                    Kind.list,
                    f"fold of {case.name}",
                    "none: trained on in every fold, as MONAI does",
                )
    background: FileValues = {}
    if "labels" in about:
        groups, background, ignore = _label_groups(
            field(about, "labels", dict, path), path, account
        )
    else:
        groups, ignore = values_in(cases, notes), None
    channels = (
        [channel_of(one) for one in _names(field(about, "modality", dict, path))]
        if "modality" in about
        else []
    )
    _check_channels(path, images, len(channels))
    return DataSet(
        MSD,
        str(about.get("name") or path.parent.name),
        tuple(cases),
        groups,
        tuple(
            channels
            or [channel_of(guess_modality(cases[0].image, notes))]
            * max(map(len, images), default=1)
        ),
        background,
        ignore,
        tuple(notes),
        account=account,
    )


def _entries(
    about: Mapping[str, Any], path: Path, account: Account
) -> list[tuple[str | None, dict[str, Any]]]:
    """Read the lists of a datalist: the split of each entry, and the entry.

    Raises:
        UserError: If a list is none, or two entries have the same image.
    """
    entries: list[tuple[str | None, dict[str, Any]]] = []
    owners: dict[str, tuple[str, dict[str, Any]]] = {}
    for key, split in LISTS.items():
        if key not in about and key != "training":
            continue
        content = field(about, key, list, path)
        account.use(Kind.list, key, f"has {len(content)} entries")
        for value in content:
            entry = value if isinstance(value, dict) else {"image": value}
            account.leave_out_keys(entry, ENTRY_KEYS, f"an entry of {key}")
            image = os.path.normpath(texts(entry.get("image"), path)[0])
            other, known = owners.setdefault(image, (key, entry))
            if known is entry:
                entries.append((split, entry))
            elif known == entry and LISTS[other] == split:
                account.merge(Kind.list, f"{image} in {key}", "listed more than once, counts once")
            else:
                raise UserError(
                    f"{path}: {image} is listed twice, in {other} and in {key}, with different entries or splits; keep one entry."
                )
    return entries


def _check_channels(path: Path, images: Sequence[Sequence[Path]], num_channels: int) -> None:
    """Refuse entries of several images whose number is not that of the channels."""
    counts = {len(several) for several in images if len(several) > 1}
    expected = num_channels or max(counts, default=1)
    for several in images:
        if len(several) not in (1, expected) or (len(several) == 1 and counts):
            raise UserError(
                f"{path}: expected {expected} images of each case, one per channel, got {len(several)} ({several[0]}); "
                "correct the entry or modality."
            )


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON file that describes a data set.

    Raises:
        UserError: If it is no mapping.
    """
    about = read_json(path, unique_keys=True)
    require(
        isinstance(about, dict),
        f"{path}: expected a description of a data set (a JSON mapping), got another value.",
    )
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
        raise UserError(
            f"{path}: expected the path of an image or a label map, got {str(value)[:60]!r}; correct the file."
        )
    return value


def texts(value: Any, path: Path) -> list[str]:
    """Return one path or several, at least one."""
    return [text(one, path) for one in (value if isinstance(value, list) and value else [value])]


def values_in(cases: Sequence[Case], notes: list[str]) -> FileValues:
    """Find the values of all label maps, for data sets that name no labels; the names are `label_<value>`."""
    found = {
        int(value)
        for case in cases
        if case.labels is not None
        for value in np.unique(read_labels(case.labels).array)
    }
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
    return {
        name: [files[number] for number in range(num_channels)] for name, files in found.items()
    }


def _by_name(folder: Path, ending: str) -> dict[str, Path]:
    """Find the volume files of a folder with one ending, by name.

    Raises:
        UserError: If the folder is missing, or two files have one name.
    """
    require(
        folder.is_dir(),
        f"{folder} does not exist, but an nnU-Net data set needs it; check the folder.",
    )
    files: dict[str, Path] = {}
    for path in volume_files(folder):
        if not path.name.lower().endswith(ending):
            continue
        name = path.name[: -len(ending)]
        other = files.setdefault(name, path)
        if other != path:
            raise UserError(
                f"{folder}: {other.name} and {path.name} would both be {name!r}; keep one of them."
            )
    return files


def _label_groups(
    given: Mapping[str, Any], path: Path, account: Account
) -> tuple[FileValues, FileValues, int | None]:
    """Make disjoint labels of what `dataset.json` names.

    Regions of nnU-Net are lists of values that overlap. Values that belong to the same regions
    become one label. It has the name of the smallest of these regions, with `_rest` where the
    region holds further values.

    Args:
        given: Name to value or list of values; or value to name, as in the Decathlon.
        path: File, for messages.
        account: Gets the regions that are divided.

    Returns:
        Labels with their values, in the order of the values; further values of the background; and
        the value to ignore.

    Raises:
        UserError: If a value is no whole number, or has several names.
    """
    members = _members(given, path)
    ignored = members.pop(IGNORE, ())
    if len(ignored) > 1:
        raise UserError(
            f"{path}: expected one value of the label {IGNORE!r}, got {list(ignored)}; keep one."
        )
    background: FileValues = {}
    for name, values in list(members.items()):
        if name.casefold() == BACKGROUND:
            background |= {name: [value for value in values if value]} if any(values) else {}
        elif values == (0,):
            account.leave_out(Kind.label, name, "its value 0 is the background")
        elif 0 in values:
            raise UserError(
                f"{path}: the label {name!r} has the value 0, which is the background; remove it there."
            )
        else:
            continue
        del members[name]
    require(
        bool(members),
        f"{path}: expected at least one label beside the background, got {dict(given)}; correct the file.",
    )
    _check_values(
        members, {*ignored, *(value for several in background.values() for value in several)}, path
    )
    groups: dict[tuple[str, ...], list[int | str]] = {}
    for value in sorted({value for values in members.values() for value in values}):
        owners = sorted(
            (name for name, values in members.items() if value in values),
            key=lambda name: len(members[name]),
        )
        groups.setdefault(tuple(owners), []).append(value)
    named: FileValues = {}
    for regions, group in groups.items():
        name = regions[0] if set(group) == set(members[regions[0]]) else f"{regions[0]}_rest"
        named["_and_".join(regions) if name in named else name] = group
    written = label_names(named)
    for region in members:
        parts = [
            written[name] for name, group in named.items() if set(group) <= set(members[region])
        ]
        if parts != [written.get(region)]:
            account.merge(
                Kind.label, region, f"region that overlaps others: divided into {', '.join(parts)}"
            )
    return (
        {written[name]: group for name, group in named.items()},
        background,
        ignored[0] if ignored else None,
    )


def _members(given: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Read the values of each label, from name: value or value: name; one name may have several values."""
    if all(isinstance(name, str) for name in given.values()):
        require(
            all(key.isdecimal() for key in given),
            f"{path}: expected labels as name: value or value: name, got {dict(given)}.",
        )
        by_name: dict[str, list[int]] = {}
        for value, name in given.items():
            by_name.setdefault(name, []).append(int(value))
        given = by_name
    members: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        several = value if isinstance(value, list) else [value]
        require(
            bool(several) and all(type(one) is int and one >= 0 for one in several),
            f"{path}: expected whole numbers from 0 as values of the label {name!r}, got {value!r}; correct the file.",
        )
        members[name] = tuple(dict.fromkeys(several))
    return members


def _check_values(
    members: Mapping[str, tuple[int, ...]], others: Collection[int | str], path: Path
) -> None:
    """Refuse two labels of the same values, and values that are also ignored or background: one of them would be lost."""
    owners: dict[frozenset[int], str] = {}
    for name, values in members.items():
        owner = owners.setdefault(frozenset(values), name)
        if owner != name:
            raise UserError(
                f"{path}: the labels {owner!r} and {name!r} have the same value {values[0]}; remove one of them."
            )
        if shared := sorted(set(values) & set(others)):
            raise UserError(
                f"{path}: the value {shared[0]} of the label {name!r} is also that of {IGNORE} or {BACKGROUND}; give it one name."
            )


def _case_names(folder: Path, images: Sequence[Path]) -> list[str]:
    """Name cases after their files, with their folders where two files have one name.

    The number of a first channel is left out where all files end in it; else `liver_0000` is the
    name of a case.
    """
    names = [case_name(path) for path in images]
    if all(name.endswith("_0000") for name in names):
        names = [name.removesuffix("_0000") for name in names]
    if len(set(names)) == len(names):
        return names
    parts = [
        path.relative_to(folder).parts if path.is_relative_to(folder) else path.parts[1:]
        for path in images
    ]
    return [
        "_".join([*(part for part in one[:-1] if part not in (".", "..")), name])
        for one, name in zip(parts, names, strict=True)
    ]
