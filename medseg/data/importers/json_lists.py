"""Importers of data sets that a JSON file describes: nnU-Net, the Decathlon, MONAI datalists.

Sources of the layouts: documentation/dataset_format.md of nnU-Net 2, medicaldecathlon.com,
`monai.data.load_decathlon_datalist`.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medseg.data.case_table import Case
from medseg.data.importers.account import Account, Kind
from medseg.data.importers.dataset import (
    MAX_NAMED,
    DataSet,
    LabelMembers,
    channel_of,
    label_names,
    require_pairs,
)
from medseg.data.importers.splits import SPLITS_FILE, read_folds
from medseg.errors import UserError
from medseg.io.inputs import SUFFIXES, case_name, volume_files
from medseg.io.names import free_name
from medseg.io.read import read_image, read_labels
from medseg.io.text import read_json
from medseg.task import IGNORE, Channel
from medseg.wording import counted, first_few

NNUNET = "nnunet"
MSD = "msd"
DATASET_FILE = "dataset.json"
BACKGROUND = "background"  # name of the background among labels
# A scan with values below this is a CT in HU: air is -1000, and MR has no negative values of this
# size.
CT_HU = -500
# Key of each list of a datalist, and the split of its cases. None leaves the column `split` empty:
# the cases are trained on, and folds may choose some of them for validation.
LISTS = {"training": None, "validation": "val", "val": "val", "test": "test", "testing": "test"}
# Keys that are read of an entry of these lists, of nnU-Net's dataset.json, and of a datalist. All
# other keys are entered in the account as left out.
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
MSD_KEYS = (*LISTS, "labels", "modality", "name", "numTraining", "numTest")


@dataclass(frozen=True)
class _RawFolder:
    """nnU-Net raw folder: the values that the steps of its import share.

    Attributes:
        folder: Folder that holds `dataset.json` and `imagesTr`.
        about: Content of its `dataset.json`.
        channel_names: Names of the channels in their order.
        ending: Ending of all images and labels, such as `.nii.gz`.
        account: Lists what the import uses and leaves out.
    """

    folder: Path
    about: Mapping[str, Any]
    channel_names: Sequence[str]
    ending: str
    account: Account

    @property
    def json_path(self) -> Path:
        """The file that describes the folder, for messages."""
        return self.folder / DATASET_FILE

    def has_list(self, key: str) -> bool:
        """Whether `dataset.json` lists the cases under this key, as only nnU-Net 1 does.

        nnU-Net 2, whose file has `channel_names`, takes all cases of the folder.
        """
        return "channel_names" not in self.about and key in self.about


def import_nnunet(folder: Path) -> DataSet:
    """Read an nnU-Net raw folder.

    It holds `dataset.json`, `imagesTr/<case>_0000.nii.gz`, `labelsTr/<case>.nii.gz`, and
    `imagesTs`. `splits_final.json` in the folder, or in nnU-Net's folder of preprocessed data,
    gives the folds. The older `dataset.json` of nnU-Net 1 is read too: its lists `training` and
    `test` choose among the files.

    Raises:
        UserError: If a file is missing, or `dataset.json` is damaged.
    """
    raw = _read_raw_folder(folder)
    images, label_files = _training_files(raw)
    _check_count(raw.about, "numTraining", len(images), raw.account)
    # nnU-Net writes its own splits among the preprocessed data, beside its folder of raw data.
    preprocessed = folder.parent.parent / "nnUNet_preprocessed" / folder.name
    split_files = [folder / SPLITS_FILE, preprocessed / SPLITS_FILE]
    folds = read_folds(split_files, images, raw.account)
    cases = []
    for name, files in images.items():
        place = folds.place(name)
        case = Case(
            name,
            files[0],
            label_files[name],
            patient=name,
            fold=place.fold,
            fold_sides=place.sides,
            more_images=tuple(files[1:]),
        )
        cases.append(case)
    cases += _test_cases(raw, num_sides=folds.num_sides)
    named_values = required_value(raw.about, "labels", dict, raw.json_path)
    labels, background, ignore = _disjoint_labels(named_values, raw.json_path, raw.account)
    notes: tuple[str, ...] = ()
    if folds.advice:
        notes = (folds.advice,)
    return DataSet(
        format=NNUNET,
        name=str(raw.about.get("name") or folder.name),
        cases=tuple(cases),
        labels=labels,
        channels=tuple(map(channel_of, raw.channel_names)),
        background=background,
        ignore=ignore,
        notes=notes,
        account=raw.account,
    )


def _read_raw_folder(folder: Path) -> _RawFolder:
    """Read the description of an nnU-Net folder, and note the reasons why its files are left out.

    Raises:
        UserError: If `dataset.json` is damaged, or the files have another format.
    """
    path = folder / DATASET_FILE
    account = Account()
    about = read_about(path)
    account.claim(path)
    is_first_version = "channel_names" not in about
    channels_key = "modality" if is_first_version else "channel_names"
    channel_names = _names_in_order(required_value(about, channels_key, dict, path))
    ending = about.get("file_ending", ".nii.gz")
    # The keys of `SUFFIXES` are compared as a list: the value in the file may be a list or a
    # mapping, which has no hash.
    if ending not in list(SUFFIXES):
        raise UserError(
            f"{path}: expected file_ending to be one of {', '.join(SUFFIXES)}, got {ending!r}; "
            "convert the files to one of them."
        )
    # The reason why files of these folders are left out, unless a later step uses them or gives a
    # better reason.
    why = f"no file of a case that ends in {ending}"
    if "dataset" in about:
        why = "the key dataset does not name it"
    for name in ("imagesTr", "labelsTr", "imagesTs", "labelsTs"):
        account.explain(folder / name, why)
    account.explain(
        folder / "splits_final.pkl", f"a pickle is not read: save the folds as {SPLITS_FILE}"
    )
    used_keys = (*NNUNET_KEYS, "training", "test") if is_first_version else NNUNET_KEYS
    account.leave_out_keys(about, used_keys, DATASET_FILE)
    return _RawFolder(folder, about, channel_names, ending, account)


def _training_files(raw: _RawFolder) -> tuple[dict[str, list[Path]], dict[str, Path]]:
    """Find the files of the training cases.

    Returns:
        Name of each case to its images, one per channel; and name of each case to its labels.
    """
    if "dataset" in raw.about:
        images, labels = _listed_files(raw)
    else:
        images, labels = _files_in_folders(raw)
    if raw.has_list("training"):
        images = _choose_listed(raw, "training", images, raw.folder / "imagesTr")
        _check_label_names(raw, labels)
    return images, labels


def _listed_files(raw: _RawFolder) -> tuple[dict[str, list[Path]], dict[str, Path]]:
    """Read the images and labels that the key `dataset` lists."""
    images: dict[str, list[Path]] = {}
    labels: dict[str, Path] = {}
    for name, content in required_value(raw.about, "dataset", dict, raw.json_path).items():
        # An entry that is no mapping is treated as an empty mapping: `file_paths` and `file_path`
        # refuse its missing keys.
        entry = content if isinstance(content, dict) else {}
        images[name] = [
            raw.folder / image for image in file_paths(entry.get("images"), raw.json_path)
        ]
        labels[name] = raw.folder / file_path(entry.get("label"), raw.json_path)
        if len(images[name]) != len(raw.channel_names):
            raise UserError(
                f"{raw.json_path}: expected {len(raw.channel_names)} images of {name}, "
                f"one per channel, got {len(images[name])}."
            )
    return images, labels


def _files_in_folders(raw: _RawFolder) -> tuple[dict[str, list[Path]], dict[str, Path]]:
    """Find the images and labels of the training cases by the names of the files."""
    images_folder = raw.folder / "imagesTr"
    labels_folder = raw.folder / "labelsTr"
    images = _images_by_case(images_folder, raw)
    if not images:
        raise UserError(
            f"{images_folder}: expected files that end in {raw.ending} "
            f"(file_ending of {raw.json_path}), found none; rename the files, or correct "
            "file_ending."
        )
    labels = _files_by_name(labels_folder, raw.ending)
    require_pairs(images, labels, images_folder, labels_folder)
    return images, labels


def _choose_listed(
    raw: _RawFolder, key: str, images: dict[str, list[Path]], folder: Path
) -> dict[str, list[Path]]:
    """Choose the cases that a list of nnU-Net 1 names.

    nnU-Net 1 trains on its list, not on the files of the folder.

    Args:
        raw: The data set.
        key: Name of the list.
        images: Images of each case in the folder.
        folder: The folder, for messages.

    Returns:
        Images of the cases that are in the list.

    Raises:
        UserError: If the list names a case that has no file.
    """
    counts: Counter[str] = Counter()
    for entry in required_value(raw.about, key, list, raw.json_path):
        image = entry.get("image") if isinstance(entry, dict) else entry
        counts[_name_in_list(file_path(image, raw.json_path))] += 1
    for name, count in counts.items():
        if name not in images:
            raise UserError(
                f"{raw.json_path}: the list {key} names {name}, which {folder} does not hold; "
                "add the file, or remove the entry."
            )
        if count > 1:
            raw.account.merge(Kind.list, f"{name} in {key}", "named more than once, counts once")
    why = f"the list {key} of {DATASET_FILE} does not name it"
    for name, files in images.items():
        if name in counts:
            continue
        raw.account.leave_out(Kind.case, name, why)
        for file in files:
            raw.account.explain(file, why)
    raw.account.use(Kind.list, key, f"names {counted(len(counts), 'case')} of {DATASET_FILE}")
    return {name: files for name, files in images.items() if name in counts}


def _check_label_names(raw: _RawFolder, labels: Mapping[str, Path]) -> None:
    """Refuse a list of nnU-Net 1 that gives a case a label file with another name.

    nnU-Net 1 reads the file that the list names, nnU-Net 2 the file that has the name of the case.

    Args:
        raw: The data set. `_choose_listed` has checked that `training` is a list, and that all its
            cases have files.
        labels: Label file in `labelsTr` of each case.

    Raises:
        UserError: With the case and both files.
    """
    for entry in raw.about["training"]:
        if not isinstance(entry, dict) or "label" not in entry:
            continue
        name = _name_in_list(file_path(entry.get("image"), raw.json_path))
        listed_name = Path(file_path(entry["label"], raw.json_path)).name
        if listed_name != labels[name].name:
            raise UserError(
                f"{raw.json_path}: the list training gives the case {name} the labels "
                f"{listed_name}, "
                f"but expected {labels[name].name}; name the file of the right labels so, "
                "and correct the list."
            )


def _name_in_list(image: str) -> str:
    """Name a case of nnU-Net 1 after its image in a list.

    Some lists name `<case>.nii.gz`, others the file of the first channel, `<case>_0000.nii.gz`.
    """
    return re.sub(r"_0000$", "", case_name(Path(image)))


def _test_cases(raw: _RawFolder, *, num_sides: int) -> list[Case]:
    """Find the test cases.

    Args:
        raw: The data set.
        num_sides: Number of columns `fold_0`, `fold_1`, …; the cells of a test case are empty.
    """
    images_folder = raw.folder / "imagesTs"
    if not images_folder.is_dir():
        if raw.has_list("test") and required_value(raw.about, "test", list, raw.json_path):
            raise UserError(
                f"{raw.json_path}: the list test names cases, but {images_folder} does not exist; "
                "copy the folder, or empty the list."
            )
        return []
    images = _images_by_case(images_folder, raw)
    if raw.has_list("test"):
        images = _choose_listed(raw, "test", images, images_folder)
    labels_folder = raw.folder / "labelsTs"
    labels: dict[str, Path] = {}
    if labels_folder.is_dir():
        labels = _files_by_name(labels_folder, raw.ending)
    for name, file in labels.items():
        if name not in images:
            raw.account.explain(file, "labels without an image")
    cases = []
    for name, files in images.items():
        case = Case(
            name,
            files[0],
            labels.get(name),
            patient=name,
            split="test",
            fold_sides=(None,) * num_sides,
            more_images=tuple(files[1:]),
        )
        cases.append(case)
    return cases


def _check_count(about: Mapping[str, Any], key: str, count: int, account: Account) -> None:
    """Note in the account whether the stated number of cases is right.

    A wrong number does not change the import: it reads all cases that it finds.
    """
    if key not in about:
        return
    if about[key] == count:
        account.use(Kind.key, key, "agrees with the cases")
        return
    there_are = "is 1 case" if count == 1 else f"are {count} cases"
    account.leave_out(Kind.key, key, f"says {str(about[key])[:20]}, but there {there_are}")


def import_msd(source: Path) -> DataSet:
    """Read a data set of the Medical Segmentation Decathlon, or a MONAI datalist.

    Args:
        source: Folder with `dataset.json`, or a datalist. Paths are relative to the folder of the
            file.

    Raises:
        UserError: If the file is damaged, or lists a scan twice.
    """
    path = source if source.is_file() else source / DATASET_FILE
    about = read_about(path)
    notes: list[str] = []
    account = Account()
    account.claim(path)
    account.leave_out_keys(about, MSD_KEYS, path.name)
    # `_entries` refuses lists of another type, so that `len` below is safe.
    entries = _entries(about, path, account)
    num_test = len(about.get("test", ())) + len(about.get("testing", ()))
    _check_count(about, "numTraining", len(about["training"]), account)
    _check_count(about, "numTest", num_test, account)
    images = []
    for _, entry in entries:
        images.append([path.parent / image for image in file_paths(entry.get("image"), path)])
    cases = _leave_out_unlabelled(_msd_cases(entries, images, path, account), account)
    background: LabelMembers = {}
    ignore = None
    if "labels" in about:
        named_values = required_value(about, "labels", dict, path)
        labels, background, ignore = _disjoint_labels(named_values, path, account)
    else:
        labels = values_in(cases, notes)
    channels: list[Channel] = []
    if "modality" in about:
        modalities = required_value(about, "modality", dict, path)
        channels = [channel_of(name) for name in _names_in_order(modalities)]
    _check_channels(path, images, len(channels))
    if not channels:
        # The task gets as many channels as an entry has files, all of the guessed modality.
        channel = channel_of(guess_modality(cases, notes))
        channels = [channel] * max(map(len, images), default=1)
    return DataSet(
        format=MSD,
        name=str(about.get("name") or path.parent.name),
        cases=tuple(cases),
        labels=labels,
        channels=tuple(channels),
        background=background,
        ignore=ignore,
        notes=tuple(notes),
        account=account,
    )


Entries = list[tuple[str | None, dict[str, Any]]]
"""Entries of a datalist: the split of each, as in `LISTS`, and its mapping in the file."""


def _entries(about: Mapping[str, Any], path: Path, account: Account) -> Entries:
    """Read the lists of a datalist; an entry that is repeated counts once.

    Raises:
        UserError: If the value of a key of `LISTS` is no list, or two different entries have the
            same image.
    """
    entries: Entries = []
    # First image of an entry, to the key of its list and the entry.
    first_uses: dict[str, tuple[str, dict[str, Any]]] = {}
    for key, split in LISTS.items():
        if key not in about and key != "training":
            continue
        content = required_value(about, key, list, path)
        account.use(Kind.list, key, f"has {counted(len(content), 'entry', 'entries')}")
        for value in content:
            # An entry of the list `test` may be the path of its image alone.
            entry = value if isinstance(value, dict) else {"image": value}
            account.leave_out_keys(entry, ENTRY_KEYS, f"an entry of {key}")
            # The first image identifies an entry; "./a.nii.gz" and "a.nii.gz" are the same file.
            image = os.path.normpath(file_paths(entry.get("image"), path)[0])
            if image not in first_uses:
                first_uses[image] = key, entry
                entries.append((split, entry))
                continue
            first_key, first_entry = first_uses[image]
            if first_entry == entry and LISTS[first_key] == split:
                account.merge(Kind.list, f"{image} in {key}", "listed more than once, counts once")
            else:
                raise UserError(
                    f"{path}: {image} is listed twice, in {first_key} and in {key}, "
                    "with different entries or splits; keep one entry."
                )
    return entries


def _msd_cases(
    entries: Entries, images: Sequence[Sequence[Path]], path: Path, account: Account
) -> list[Case]:
    """Make a case of each entry of a datalist.

    Args:
        entries: Entries of all lists of the file.
        images: Images of each entry, one per channel, or one file of all channels.
        path: The datalist, to whose folder the paths in it are relative.
        account: Lists the folds that have no effect.

    Raises:
        UserError: If a fold is no whole number, or the datalist has both folds and a list of
            validation cases.
    """
    names = _case_names(path.parent, [files[0] for files in images])
    cases = []
    for name, files, (split, entry) in zip(names, images, entries, strict=True):
        fold = entry.get("fold")
        # `isinstance` would accept True as a fold.
        is_fold = type(fold) is int and fold >= 0
        if fold is not None and not is_fold:
            raise UserError(f"{path}: expected a fold >= 0 for {name}, got {fold!r}.")
        if fold is not None and split is not None:
            account.leave_out(Kind.key, f"fold of {name}", "the case is not in the list training")
            fold = None
        # A number may identify the patient, and 0 is a patient, too.
        patient = entry.get("patient")
        if patient is None or patient == "":
            patient = name
        # An entry, such as that of a test case, may have no label map.
        labels = None
        if entry.get("label") is not None:
            labels = path.parent / file_path(entry["label"], path)
        case = Case(
            name,
            files[0],
            labels,
            patient=str(patient),
            split=split,
            fold=fold,
            more_images=tuple(files[1:]),
        )
        cases.append(case)
    _check_folds(cases, path, account)
    return cases


def _leave_out_unlabelled(cases: list[Case], account: Account) -> list[Case]:
    """Leave out the cases without a label map, except test cases: `train` would refuse them.

    Where no case has a label map all stay, and `check_dataset` refuses the data set.
    """
    if all(case.labels is None for case in cases):
        return cases
    why = "no label: neither trained on nor validated"
    used_cases = []
    for case in cases:
        if case.labels is not None or case.split == "test":
            used_cases.append(case)
            continue
        account.leave_out(Kind.case, case.name, why)
        for image in (case.image, *case.more_images):
            if image is not None:
                account.explain(image, why)
    return used_cases


def _check_folds(cases: Sequence[Case], path: Path, account: Account) -> None:
    """List the training cases without a fold in the account, if other cases have one.

    Raises:
        UserError: If the file has folds and a list of validation cases.
    """
    if all(case.fold is None for case in cases):
        return
    if any(case.split == "val" for case in cases):
        raise UserError(
            f"{path}: expected a list validation or a fold of each case, but it has both; "
            "remove one of them."
        )
    for case in cases:
        if case.split is None and case.fold is None:
            why = "none: trained on in every fold, as MONAI does"
            account.use(Kind.list, f"fold of {case.name}", why)


def _check_channels(path: Path, images: Sequence[Sequence[Path]], num_channels: int) -> None:
    """Refuse entries of several images whose number is not that of the channels.

    Where each entry has one image, that file may hold all channels, along its fourth axis.

    Args:
        path: The datalist, for messages.
        images: Images of each entry.
        num_channels: Number of channels in `modality`; 0 where it is not stated.
    """
    max_images = max(map(len, images), default=1)
    if max_images == 1:
        return
    expected = max_images if num_channels == 0 else num_channels
    for files in images:
        if len(files) != expected:
            raise UserError(
                f"{path}: expected {expected} images of each case, one per channel, "
                f"got {len(files)} ({files[0]}); correct the entry or modality."
            )


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON file that describes a data set.

    Raises:
        UserError: If it is no mapping.
    """
    about = read_json(path, unique_keys=True)
    if not isinstance(about, dict):
        raise UserError(
            f"{path}: expected a description of a data set (a JSON mapping), got another value."
        )
    return about


def required_value(about: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """Return a value of a JSON file, checked to be a list or a mapping.

    Args:
        about: Content of the file.
        key: Key of the value.
        kind: `list` or `dict`.
        path: The file, for messages.

    Raises:
        UserError: If it is missing or of another kind.
    """
    value = about.get(key)
    if not isinstance(value, kind):
        kind_name = "mapping" if kind is dict else "list"
        raise UserError(
            f"{path}: expected {key!r} as a {kind_name}, got {str(value)[:60]!r}; correct the file."
        )
    return value


def file_path(value: Any, path: Path) -> str:
    """Return a value of a JSON file, checked to be a path.

    Args:
        value: Value that should be a path.
        path: The file, for messages.

    Raises:
        UserError: If it is no text, is empty, or holds a zero byte, which no path can have.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise UserError(
            f"{path}: expected the path of an image or a label map, got {str(value)[:60]!r}; "
            "correct the file."
        )
    return value


def file_paths(value: Any, path: Path) -> list[str]:
    """Return the paths of a value: one path, or a non-empty list of paths; see `file_path`."""
    if isinstance(value, list) and value:
        return [file_path(item, path) for item in value]
    return [file_path(value, path)]


def values_in(cases: Sequence[Case], notes: list[str]) -> LabelMembers:
    """Find the values of all label maps, for data sets that name no labels.

    A damaged label map does not stop the import: `prepare` will refuse its case alone.

    Args:
        cases: The cases, whose label maps are read completely.
        notes: Gets a sentence that lists the values, and one about damaged label maps.

    Returns:
        Labels with the names `label_<value>`.

    Raises:
        UserError: If no label map can be read, or there is no value but 0.
    """
    present: set[int] = set()
    errors: dict[str, UserError] = {}
    for case in cases:
        if case.labels is None:
            continue
        try:
            present.update(np.unique(read_labels(case.labels).array).tolist())
        except UserError as error:
            errors[case.name] = error
    values = sorted(present - {0})
    if not values:
        if errors:
            raise next(iter(errors.values()))
        raise UserError("the label maps hold nothing but zeros; check the data set.")
    if errors:
        names = first_few(errors, MAX_NAMED)
        first_error = next(iter(errors.values()))
        notes.append(
            f"{names}: the label map cannot be read, and its values are not among the labels; "
            f"prepare will refuse the case ({first_error})"
        )
    notes.append(
        "the data set does not name its labels; its label maps hold "
        f"{', '.join(map(str, values))}: name them with labels={{<name>: <value>, …}}"
    )
    return {f"label_{value}": [value] for value in values}


def guess_modality(cases: Sequence[Case], notes: list[str]) -> str:
    """Guess from the values of one scan whether the scans are CT.

    Args:
        cases: The cases; the first image that can be read is used.
        notes: Gets a sentence about the guess.

    Returns:
        `ct` or `other`, the latter also for a data set without cases, which is refused later.

    Raises:
        UserError: If no image can be read; the error is that of the first.
    """
    if not cases:
        return "other"
    image, lowest = _first_minimum([case.image for case in cases])
    is_ct = lowest < CT_HU
    content = "holds HU" if is_ct else "holds no HU"
    notes.append(
        f"the data set does not name its modality; {image.name} {content}: "
        "correct task.yaml if that is wrong"
    )
    return "ct" if is_ct else "other"


def _first_minimum(images: Sequence[Path]) -> tuple[Path, float]:
    """Find the first image that can be read, and its lowest value.

    Raises:
        UserError: If none can be read; the error is that of the first.
    """
    errors: list[UserError] = []
    for path in images:
        try:
            # With `other`, a DICOM series of any modality can be read.
            return path, float(read_image(path, modality="other").array.min())
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _names_in_order(names_by_number: Mapping[str, Any]) -> list[str]:
    """List the names of channels in the order of their numbers, which are texts in JSON."""
    # Shorter texts come first, so that "10" follows "9".
    numbers = sorted(names_by_number, key=lambda number: (len(number), number))
    return [str(names_by_number[number]) for number in numbers]


def _images_by_case(folder: Path, raw: _RawFolder) -> dict[str, list[Path]]:
    """Find the images `<case>_0000`, `<case>_0001`, … of each case, in the order of the channels.

    Raises:
        UserError: If the folder or a channel is missing, or a name has no number.
    """
    # Name of a case to its files by the number of the channel.
    files_of_case: dict[str, dict[int, Path]] = {}
    for name, path in _files_by_name(folder, raw.ending).items():
        match = re.fullmatch(r"(.+)_(\d{4})", name, re.ASCII)
        if match is None:
            raise UserError(
                f"{path}: expected a name that ends in the number of a channel, "
                f"such as {name}_0000{raw.ending}; rename the file."
            )
        case, number = match.groups()
        files_of_case.setdefault(case, {})[int(number)] = path
    expected = range(len(raw.channel_names))
    for name, files in files_of_case.items():
        missing = sorted(set(expected) - set(files))
        if missing:
            raise UserError(
                f"{folder}: {name} lacks the channel {missing[0]:04d}, "
                f"expected {len(expected)} channels ({DATASET_FILE}); add the file."
            )
        extra = sorted(set(files) - set(expected))
        if extra:
            raise UserError(
                f"{folder}: {name} has a channel {extra[0]:04d}, "
                f"but {DATASET_FILE} names {len(expected)}; correct one of them."
            )
    images = {}
    for name, files in files_of_case.items():
        images[name] = [files[number] for number in expected]
    return images


def _files_by_name(folder: Path, ending: str) -> dict[str, Path]:
    """Map the name of each volume file with this ending, without the ending, to its path.

    The case of letters in the ending does not matter, so two files may have the same name.

    Raises:
        UserError: If the folder is missing, or two files have one name.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist, but an nnU-Net data set needs it; check the folder."
        )
    files: dict[str, Path] = {}
    for path in volume_files(folder):
        if not path.name.lower().endswith(ending):
            continue
        name = path.name[: -len(ending)]
        first = files.setdefault(name, path)
        if first != path:
            raise UserError(
                f"{folder}: {first.name} and {path.name} would both be {name!r}; keep one of them."
            )
    return files


Members = dict[str, tuple[int, ...]]
"""Name of each label or region in `dataset.json` to its values; regions may share values."""


def _disjoint_labels(
    named_values: Mapping[str, Any], path: Path, account: Account
) -> tuple[LabelMembers, LabelMembers, int | None]:
    """Make disjoint labels of the labels and regions that `dataset.json` names.

    Regions of nnU-Net may overlap, as a whole tumour and its core do. Each group of values that
    belong to the same regions becomes a label.

    Args:
        named_values: Name to value or list of values; or value to name, as in the Decathlon.
        path: The file, for messages.
        account: Lists the regions that are divided, and the labels that are renamed or left out.

    Returns:
        Labels with their values, in the order of the values; values other than 0 that are
        background; and the value to ignore, None where there is none.

    Raises:
        UserError: If a value is no whole number, two names have the same values, or no label is
            left beside the background.
    """
    members = _read_members(named_values, path)
    ignored = members.pop(IGNORE, ())
    if len(ignored) > 1:
        raise UserError(
            f"{path}: expected one value of the label {IGNORE!r}, got {list(ignored)}; keep one."
        )
    background = _take_background(members, path, account)
    if not members:
        raise UserError(
            f"{path}: expected at least one label beside the background, "
            f"got {dict(named_values)}; correct the file."
        )
    # Values that no label may have: voxels with them are ignored, or trained on as background.
    reserved: set[int | str] = set(ignored)
    for background_values in background.values():
        reserved.update(background_values)
    _check_values(members, reserved, path)
    groups = _disjoint_groups(members)
    label_of_group = label_names(groups)
    for group_name, label in label_of_group.items():
        if group_name != label:
            account.original_names[label] = group_name
    for region, values in members.items():
        labels_of_region = []
        for group_name, group in groups.items():
            if set(group) <= set(values):
                labels_of_region.append(label_of_group[group_name])
        # A region that became one label with its own name was not divided.
        if labels_of_region != [label_of_group.get(region)]:
            why = f"region that overlaps others: divided into {', '.join(labels_of_region)}"
            account.merge(Kind.label, region, why)
    labels = {label_of_group[group_name]: group for group_name, group in groups.items()}
    ignored_value = ignored[0] if ignored else None
    return labels, background, ignored_value


def _take_background(members: Members, path: Path, account: Account) -> LabelMembers:
    """Remove the names of the background from the members of labels, in place.

    Returns:
        Name of the background to its values other than 0; empty where it has none.

    Raises:
        UserError: If a label has the value 0 beside others.
    """
    background: LabelMembers = {}
    for name, values in list(members.items()):
        if name.casefold() == BACKGROUND:
            del members[name]
            other_values = [value for value in values if value != 0]
            if other_values:
                background[name] = list(other_values)
        elif values == (0,):
            del members[name]
            account.leave_out(Kind.label, name, "its value 0 is the background")
        elif 0 in values:
            raise UserError(
                f"{path}: the label {name!r} has the value 0, which is the background; "
                "remove it there."
            )
    return background


def _disjoint_groups(members: Members) -> LabelMembers:
    """Divide regions that overlap: values that belong to the same regions become one group.

    A group is named after the smallest of its regions. The name gets `_rest` if that region holds
    other values, too. A second group with this name is named after all of its regions. Where a name
    is still taken, it gets a number.

    Returns:
        Name of each group to its values, in the order of their smallest values.
    """
    regions_of_value: dict[int, list[str]] = {}
    for name, values in members.items():
        for value in values:
            regions_of_value.setdefault(value, []).append(name)
    # Names of some regions, the smallest first, to the values that belong to exactly these regions.
    groups: dict[tuple[str, ...], list[int | str]] = {}
    for value in sorted(regions_of_value):
        smallest_first = sorted(regions_of_value[value], key=lambda name: len(members[name]))
        groups.setdefault(tuple(smallest_first), []).append(value)
    named_groups: LabelMembers = {}
    for regions, group in groups.items():
        smallest = regions[0]
        if set(group) == set(members[smallest]):
            named_groups[smallest] = group
            continue
        # The other values of this region belong to other groups.
        name = f"{smallest}_rest"
        # Another group has the same smallest region.
        if name in named_groups:
            name = "_and_".join(regions)
        # A label of the data set may have the new name. The names of the group's own regions are
        # free unless another group took one: each is divided into several groups, so no label has
        # its name.
        taken = (members.keys() - set(regions)) | named_groups.keys()
        named_groups[free_name(name, taken)] = group
    return named_groups


def _read_members(named_values: Mapping[str, Any], path: Path) -> Members:
    """Read the values of each label.

    Args:
        named_values: Name to value or list of values; or value to name, as in the Decathlon, where
            several values may have one name.
        path: File, for messages.

    Raises:
        UserError: If a value is no whole number from 0, or names and values are mixed up.
    """
    values_of = dict(named_values)
    # The Decathlon maps values to names, such as {"1": "liver"}: the mapping is inverted.
    if all(isinstance(name, str) for name in named_values.values()):
        if not all(key.isdecimal() for key in named_values):
            raise UserError(
                f"{path}: expected labels as name: value or value: name, got {dict(named_values)}."
            )
        values_of = {}
        for value, name in named_values.items():
            values_of.setdefault(name, []).append(int(value))
    members: Members = {}
    for name, content in values_of.items():
        values = content if isinstance(content, list) else [content]
        # A bool is an int in Python, but no value of a label.
        are_whole = all(type(value) is int and value >= 0 for value in values)
        if not values or not are_whole:
            raise UserError(
                f"{path}: expected whole numbers from 0 as values of the label {name!r}, "
                f"got {content!r}; correct the file."
            )
        # Each value once, in their order.
        members[name] = tuple(dict.fromkeys(values))
    return members


def _check_values(members: Members, reserved: set[int | str], path: Path) -> None:
    """Refuse two names of the same values, since one of them would be lost.

    Args:
        members: Values of each label.
        reserved: Values that are ignored, or background.
        path: File, for messages.

    Raises:
        UserError: If two labels have the same values, or a label has a reserved value.
    """
    first_names: dict[frozenset[int], str] = {}
    for name, values in members.items():
        first_name = first_names.setdefault(frozenset(values), name)
        if first_name != name:
            raise UserError(
                f"{path}: the labels {first_name!r} and {name!r} have the same value {values[0]}; "
                "remove one of them."
            )
        shared = sorted(reserved.intersection(values))
        if shared:
            raise UserError(
                f"{path}: the value {shared[0]} of the label {name!r} is also that of {IGNORE} "
                f"or {BACKGROUND}; give it one name."
            )


def _case_names(folder: Path, images: Sequence[Path]) -> list[str]:
    """Name cases after their files, with their folders where two files have one name.

    `_0000`, the number of the first channel in files for nnU-Net, is left out where all names end
    in it. Where only some do, it is part of the name: `liver_0000`.

    Args:
        folder: Folder of the datalist, whose own name is not part of the names.
        images: First image of each case.
    """
    names = [case_name(path) for path in images]
    if all(name.endswith("_0000") for name in names):
        names = [name.removesuffix("_0000") for name in names]
    if len(set(names)) == len(names):
        return names
    long_names = []
    for path, name in zip(images, names, strict=True):
        inner_path = path.relative_to(folder) if path.is_relative_to(folder) else path
        # Names of the folders alone: no file name, no root, no "." or "..".
        folders = [part for part in inner_path.parts[:-1] if part not in (path.anchor, ".", "..")]
        long_names.append("_".join([*folders, name]))
    return long_names
