"""Importers of data sets described by folder and file names: TotalSegmentator, LUNA16, and folders of images and label maps.

Sources of the layouts: resources/convert_dataset_to_nnunet.py of TotalSegmentator;
luna16.grand-challenge.org/Data.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.data.case_table import SPLITS, Case
from medseg.data.importers.account import Account, Kind
from medseg.data.importers.dataset import (
    DataSet,
    FileValues,
    Structures,
    channel_of,
    named_groups,
    plain_name,
    require_pairs,
)
from medseg.data.importers.json_lists import guess_modality, values_in
from medseg.errors import UserError, require
from medseg.io.inputs import (
    CASE_IMAGES,
    SEGMENTATION_SUFFIX,
    case_name,
    image_in,
    list_inputs,
    volume_files,
    volume_suffix,
)
from medseg.io.text import read_text
from medseg.task import Channel
from medseg.wording import first_few

if TYPE_CHECKING:
    from medseg.io.simpleitk import Segment

TOTALSEGMENTATOR, LUNA16, PAIRS = "totalsegmentator", "luna16", "pairs"
MASK_FOLDER = "segmentations"
LUNA16_MASKS = "seg-lungs-LUNA16"
# Values of its masks, which an algorithm has drawn; the audit compares the sides with the geometry.
LUNA16_LABELS: dict[str, list[int | str]] = {"left_lung": [3], "right_lung": [4]}
LUNA16_BACKGROUND: dict[str, list[int | str]] = {"trachea": [5]}
LUNA16_WINDOW_HU = (-1000.0, 400.0)
PAIR_FOLDERS = (("images", "labels"), ("images", "masks"), ("imagesTr", "labelsTr"))
# A lobe of a paired organ, as `plain_name` writes it.
LOBE = re.compile(r"((?:left|right)_\w+)_(?:upper|middle|lower)_lobe")
LABEL_ENDINGS = re.compile(r"_(seg|segmentation|label|labels|mask|gt)$")


def import_totalsegmentator(folder: Path) -> DataSet:
    """Read TotalSegmentator's data set: `<case>/ct.nii.gz`, `<case>/segmentations/<structure>.nii.gz`, and the split of `meta.csv`.

    Lobes are merged to their organ: `lung_upper_lobe_left` and `lung_lower_lobe_left` are
    `left_lung`, and so is `lung_left` beside them.

    Raises:
        UserError: If a case has no image or no masks, or `meta.csv` is damaged or lacks a case.
    """
    account = Account()
    splits = _read_meta(folder / "meta.csv", account)
    cases, structures = [], dict[str, list[str]]()
    for one in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not _is_case(one):
            continue
        image = _image_of(one)
        masks = _masks_in(one / MASK_FOLDER)
        require(
            bool(masks),
            f"{one / MASK_FOLDER}: expected masks such as liver.nii.gz, but the folder holds none; copy them there.",
        )
        if splits and one.name not in splits:
            raise UserError(
                f"{folder / 'meta.csv'}: expected the split of {one.name}, but found no row; add it, or remove the table."
            )
        structures[one.name] = list(masks)
        cases.append(Case(one.name, image, one / MASK_FOLDER, one.name, splits.get(one.name)))
    for name in sorted(splits.keys() - structures.keys()):
        account.leave_out(Kind.row, name, "meta.csv lists it, but there is no such case")
    names = sorted({name for several in structures.values() for name in several})
    labels = _merge_lobes(named_groups(names, account))
    modalities = {case_name(case.image): case for case in cases}
    if len(modalities) > 1:
        raise UserError(
            f"{folder}: expected CT or MR, but found both ({', '.join(sorted(modalities))}); import a folder of each."
        )
    channel = channel_of("mr" if "mri" in modalities else "ct")
    return DataSet(
        TOTALSEGMENTATOR,
        folder.name,
        tuple(cases),
        labels,
        (channel,),
        {},
        structures=structures,
        account=account,
    )


def _merge_lobes(structures: FileValues) -> FileValues:
    """Merge the lobes of an organ, and its mask as a whole where there is one: it must not compete with its lobes.

    Args:
        structures: Labels of one structure each.

    Returns:
        Labels in the order of their first structure.
    """
    plain_names = {label: plain_name(str(members[0])) for label, members in structures.items()}
    lobes = {
        label: match[1] for label, name in plain_names.items() if (match := LOBE.fullmatch(name))
    }
    organs = set(lobes.values())
    merged: FileValues = {}
    for label, members in structures.items():
        organ = lobes.get(label, plain_names[label])
        merged.setdefault(organ if organ in organs else label, []).extend(members)
    return dict(sorted(merged.items(), key=lambda item: str(item[1][0])))


def _is_case(folder: Path) -> bool:
    """Whether a folder is a case of TotalSegmentator: it has masks, or an image that lacks them."""
    has_image = any(case_name(path) in CASE_IMAGES for path in volume_files(folder))
    return has_image or (folder / MASK_FOLDER).is_dir()


def _image_of(folder: Path) -> Path:
    """Find the image of a case.

    Raises:
        UserError: If there is none, or more than one.
    """
    images = [path.name for path in volume_files(folder) if case_name(path) in CASE_IMAGES]
    image = image_in(folder)
    if image is not None:
        return image
    if images:
        raise UserError(
            f"{folder}: expected one image, but found {' and '.join(images)}; keep one of them."
        )
    raise UserError(
        f"{folder}: expected an image {' or '.join(CASE_IMAGES)} (.nii.gz) beside {MASK_FOLDER}; copy it there."
    )


def _masks_in(folder: Path) -> dict[str, Path]:
    """Find the masks of a case by the names of their structures; none where there is no folder.

    Raises:
        UserError: If two files have the name of one structure.
    """
    masks: dict[str, Path] = {}
    for path in volume_files(folder) if folder.is_dir() else []:
        other = masks.setdefault(case_name(path), path)
        if other != path:
            raise UserError(
                f"{folder}: {other.name} and {path.name} are masks of one structure; keep one of them."
            )
    return masks


def import_luna16(folder: Path) -> DataSet:
    """Read LUNA16: `subset<n>/<series>.mhd` and the lung masks `seg-lungs-LUNA16/<series>.mhd`; the subsets are the folds.

    Raises:
        UserError: If the masks are missing, or that of a scan, or a scan or a mask is there twice.
    """
    account = Account()
    images = _by_stem(folder.glob("subset*/**/*"))
    masks = _by_stem((folder / LUNA16_MASKS).rglob("*"))
    require(
        bool(masks),
        f"{folder}: expected lung masks in {LUNA16_MASKS}, which LUNA16 offers as a file of its own; download and unpack it there.",
    )
    if alone := sorted(set(images) - set(masks)):
        raise UserError(
            f"{folder / LUNA16_MASKS}: no mask of the scan {first_few(alone, 1)}; unpack the masks completely."
        )
    account.explain(folder / LUNA16_MASKS, "its scan is in none of the subsets")
    subsets: dict[str, int] = {}
    for name, path in images.items():
        place = path.relative_to(folder).parts[0]
        if not (match := re.fullmatch(r"subset(\d+)", place, re.ASCII)):
            raise UserError(
                f"{folder / place}: expected folders subset0, subset1, …, which are the folds; rename the folder."
            )
        subsets[name] = int(match[1])
    has_folds = len(set(subsets.values())) > 1
    trust = dict.fromkeys(LUNA16_LABELS, "approximate")
    cases = [
        Case(name, path, masks[name], name, None, trust, fold=subsets[name] if has_folds else None)
        for name, path in images.items()
    ]
    notes = [
        "the masks are those of an algorithm: the columns trust_left_lung and trust_right_lung say approximate"
    ]
    for subset in sorted(set(subsets.values())):
        why = "is a fold" if has_folds else "is the only one: no fold"
        account.use(Kind.list, f"subset{subset}", why)
    if has_folds:
        notes.append(
            f"each subset is a fold: data.fold=0 validates on subset0; give data.num_folds={1 + max(subsets.values())} to choose among all of them"
        )
    return DataSet(
        LUNA16,
        LUNA16,
        tuple(cases),
        LUNA16_LABELS,
        (Channel("ct", LUNA16_WINDOW_HU),),
        LUNA16_BACKGROUND,
        notes=tuple(notes),
        account=account,
    )


def _by_stem(paths: Iterable[Path]) -> dict[str, Path]:
    """Index the scans or masks of LUNA16 among some files by the UID of their series.

    Raises:
        UserError: If one is there twice.
    """
    files: dict[str, Path] = {}
    for path in sorted(paths):
        if path.name.startswith(".") or volume_suffix(path) != ".mhd":
            continue
        other = files.setdefault(path.stem, path)
        if other != path:
            raise UserError(f"{other} and {path} have the same name; keep one of them.")
    return files


def import_pairs(folder: Path) -> DataSet:
    """Read a folder of images and a folder of label maps, or of folders of binary masks, of the same names.

    3D Slicer saves `<case>.seg.nrrd` beside `<case>.nrrd`; both may lie in one folder. The names of
    its segments become labels.

    Raises:
        UserError: If one has no partner, two pairs of folders could be meant, or labels are of
            several kinds.
    """
    account = Account()
    pairs = [pair for pair in _pair_folders(folder) if all(one.is_dir() for one in pair)]
    if len(pairs) > 1:
        names = " and ".join(f"{images.name} with {labels.name}" for images, labels in pairs)
        raise UserError(
            f"{folder}: expected one pair of folders, but found {names}; move the others to another folder."
        )
    images_at, labels_at = pairs[0] if pairs else (folder, folder)
    files = [
        path for path in volume_files(labels_at) if images_at != labels_at or is_slicer_file(path)
    ]
    entries = [
        *files,
        *(one for one in sorted(labels_at.iterdir()) if one.is_dir() and volume_files(one)),
    ]
    if images_at == labels_at:
        entries = files
    images = dict(list_inputs(images_at))
    labels = {case_name(path): path for path in entries}
    if not labels.keys() & images.keys():
        labels = {LABEL_ENDINGS.sub("", name): path for name, path in labels.items()}
    require(
        len(labels) == len(entries),
        f"{labels_at}: expected one label map of each case, but two have the same name; keep one.",
    )
    require_pairs(images, labels, images_at, labels_at)
    cases = [Case(name, path, labels[name], name) for name, path in images.items()]
    _require_one_kind(list(labels.values()), labels_at)
    notes: list[str] = []
    structures: Structures | None = None
    if any(path.is_dir() for path in labels.values()):
        structures = {name: list(_masks_in(path)) for name, path in labels.items()}
        groups = named_groups(
            sorted({str(name) for several in structures.values() for name in several}), account
        )
    elif segments := _segments_of(labels):
        structures, groups = _slicer_groups(segments, account)
    else:
        groups = values_in(cases, notes)
    channel = channel_of(guess_modality(cases[0].image, notes))
    return DataSet(
        PAIRS,
        folder.name,
        tuple(cases),
        groups,
        (channel,),
        {},
        notes=tuple(notes),
        structures=structures,
        account=account,
    )


def _require_one_kind(labels: Sequence[Path], place: Path) -> None:
    """Refuse label maps beside folders of masks or segmentations of 3D Slicer: they do not say labels alike."""
    kinds = {
        "folders of masks": [path for path in labels if path.is_dir()],
        "segmentations of 3D Slicer": [
            path for path in labels if not path.is_dir() and is_slicer_file(path)
        ],
        "label maps": [path for path in labels if not path.is_dir() and not is_slicer_file(path)],
    }
    present = {kind: paths for kind, paths in kinds.items() if paths}
    if len(present) > 1:
        names = " and ".join(
            f"{kind} ({first_few([path.name for path in paths], 1)})"
            for kind, paths in present.items()
        )
        raise UserError(
            f"{place}: expected labels of one kind, but found {names}; save all of them alike."
        )


def _segments_of(labels: Mapping[str, Path]) -> dict[str, list[Segment]]:
    """Read the segments of each case; empty where no file names any, as label maps of other programs.

    Raises:
        UserError: If some files name their segments and others do not.
    """
    if not any(is_slicer_file(path) for path in labels.values()):
        return {}
    from medseg.io.simpleitk import read_segments  # SimpleITK takes 50 MiB

    segments = {name: read_segments(path) for name, path in labels.items()}
    if not any(segments.values()):
        return {}
    for name, several in segments.items():
        require(
            bool(several),
            f"{labels[name]}: it names no segments; save the segmentation again, or remove it.",
        )
    return segments


def _slicer_groups(
    segments: Mapping[str, Sequence[Segment]], account: Account
) -> tuple[Structures, FileValues]:
    """Make labels of segments of 3D Slicer.

    Returns:
        Segments of each case, and the labels: by value where all files give each name one value of
        its own, else by the names.
    """
    every_segment = [segment for several in segments.values() for segment in several]
    names = sorted({segment.name for segment in every_segment})
    groups = named_groups(names, account)
    places = {(segment.name, segment.value) for segment in every_segment}
    num_values = len({segment.value for segment in every_segment})
    has_layers = any(segment.num_layers > 1 for segment in every_segment)
    # Each name has one value and each value one name, of which no other spelling exists.
    if has_layers or not len(places) == len(names) == num_values == len(groups):
        return {
            name: [segment.name for segment in several] for name, several in segments.items()
        }, groups
    values = dict(places)
    by_value: FileValues = {label: [values[str(members[0])]] for label, members in groups.items()}
    ordered = dict(sorted(by_value.items(), key=lambda item: item[1][0]))
    return {
        name: [segment.value for segment in several] for name, several in segments.items()
    }, ordered


def is_slicer_file(path: Path) -> bool:
    """Whether a file is a segmentation of 3D Slicer, by its name."""
    return volume_suffix(path) == SEGMENTATION_SUFFIX


def is_totalsegmentator(folder: Path) -> bool:
    """Whether a folder looks like TotalSegmentator's data set."""
    return any(path.is_dir() for path in folder.glob(f"*/{MASK_FOLDER}"))


def is_luna16(folder: Path) -> bool:
    """Whether a folder looks like LUNA16."""
    if (folder / LUNA16_MASKS).is_dir():
        return True
    return any(volume_suffix(path) == ".mhd" for path in folder.glob("subset*/**/*"))


def is_pairs(folder: Path) -> bool:
    """Whether a folder holds a folder of images and one of labels, or segmentations of 3D Slicer."""
    if not folder.is_dir():
        return False
    return any(all(one.is_dir() for one in pair) for pair in _pair_folders(folder)) or any(
        map(is_slicer_file, volume_files(folder))
    )


def _pair_folders(folder: Path) -> list[tuple[Path, Path]]:
    return [(folder / images, folder / labels) for images, labels in PAIR_FOLDERS]


def _read_meta(path: Path, account: Account) -> dict[str, str]:
    """Read the split of each case; empty where there is no table.

    Raises:
        UserError: If a column is missing, a split is unknown, or a case has two.
    """
    if not path.is_file():
        return {}
    account.claim(path)
    rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter=";"))
    require(
        bool(rows) and {"image_id", "split"} <= rows[0].keys(),
        f"{path}: expected the columns image_id and split, separated by ';'; restore or remove it.",
    )
    account.leave_out_keys(map(str, rows[0]), ("image_id", "split"), path.name)
    splits: dict[str, str] = {}
    for row in rows:
        name, split = row["image_id"], row["split"]
        require(
            split in SPLITS,
            f"{path}: expected {', '.join(SPLITS)} as the split of {name}, got {split!r}.",
        )
        if name not in splits:
            splits[name] = split
        elif splits[name] == split:
            account.merge(Kind.row, name, "listed more than once in meta.csv, counts once")
        else:
            raise UserError(
                f"{path}: {name} has the splits {splits[name]} and {split}; keep one row."
            )
    return splits
