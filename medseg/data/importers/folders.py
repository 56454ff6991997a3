"""Importers of TotalSegmentator, LUNA16, and folders of images and label maps.

Files and folders describe these data sets by their names; there is no `dataset.json`.

Sources of the layouts: resources/convert_dataset_to_nnunet.py of TotalSegmentator;
luna16.grand-challenge.org/Data.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medseg.data.case_table import SPLITS, Case
from medseg.data.importers.account import Account, Kind
from medseg.data.importers.dataset import (
    DataSet,
    LabelMembers,
    Structures,
    channel_of,
    labels_of_structures,
    plain_name,
    require_pairs,
)
from medseg.data.importers.json_lists import guess_modality, values_in
from medseg.data.reference import masks_in
from medseg.errors import UserError
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

TOTALSEGMENTATOR = "totalsegmentator"
LUNA16 = "luna16"
PAIRS = "pairs"
# Folder of the masks in each case of TotalSegmentator.
MASK_FOLDER = "segmentations"
# Folder of the lung masks of LUNA16, and the values of their labels. An algorithm made the masks;
# the audit checks that left and right agree with the geometry.
LUNA16_MASKS = "seg-lungs-LUNA16"
LUNA16_LABELS: dict[str, list[int | str]] = {"left_lung": [3], "right_lung": [4]}
LUNA16_BACKGROUND: dict[str, list[int | str]] = {"trachea": [5]}
LUNA16_WINDOW_HU = (-1000.0, 400.0)
# Names of a folder of images and its folder of labels.
PAIR_FOLDERS = (("images", "labels"), ("images", "masks"), ("imagesTr", "labelsTr"))
# A lobe of a paired organ, as `plain_name` writes it: left_lung_upper_lobe; group 1 is the organ.
LOBE = re.compile(r"((?:left|right)_\w+)_(?:upper|middle|lower)_lobe")
# Endings that programs add to the name of an image to form the name of its label map.
LABEL_ENDINGS = re.compile(r"_(seg|segmentation|label|labels|mask|gt)$")


def import_totalsegmentator(folder: Path) -> DataSet:
    """Read TotalSegmentator's data set.

    It holds `<case>/ct.nii.gz`, `<case>/segmentations/<structure>.nii.gz`, and the split of
    `meta.csv`. Lobes are merged into their organ: `lung_upper_lobe_left` and
    `lung_lower_lobe_left` become `left_lung`, together with a mask `lung_left` if there is one.

    Raises:
        UserError: If a case has no image or no masks, or `meta.csv` is damaged or lacks a case.
    """
    account = Account()
    meta = folder / "meta.csv"
    split_of = _read_meta(meta, account)
    cases = []
    structures: dict[str, list[str]] = {}
    for case_folder in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not _is_case(case_folder):
            continue
        name = case_folder.name
        image = _image_of(case_folder)
        masks_folder = case_folder / MASK_FOLDER
        masks = masks_in(masks_folder) if masks_folder.is_dir() else {}
        if not masks:
            raise UserError(
                f"{masks_folder}: expected masks such as liver.nii.gz, but the folder holds none; "
                "copy them there."
            )
        if split_of and name not in split_of:
            raise UserError(
                f"{meta}: expected the split of {name}, but found no row; "
                "add it, or remove the table."
            )
        structures[name] = list(masks)
        cases.append(Case(name, image, masks_folder, patient=name, split=split_of.get(name)))
    for name in sorted(split_of.keys() - structures.keys()):
        account.leave_out(Kind.row, name, "meta.csv lists it, but there is no such case")
    # All structures that any case has; a case may lack some of them.
    names = sorted(set(itertools.chain.from_iterable(structures.values())))
    labels = _merge_lobes(labels_of_structures(names, account))
    # The image file of a case is named after its modality: `ct` or `mri`.
    image_names = {case_name(case.image) for case in cases}
    if len(image_names) > 1:
        raise UserError(
            f"{folder}: expected CT or MR, but found both ({', '.join(sorted(image_names))}); "
            "import a folder of each."
        )
    channel = channel_of("mr" if "mri" in image_names else "ct")
    return DataSet(
        format=TOTALSEGMENTATOR,
        name=folder.name,
        cases=tuple(cases),
        labels=labels,
        channels=(channel,),
        background={},
        structures=structures,
        account=account,
    )


def _merge_lobes(structures: LabelMembers) -> LabelMembers:
    """Merge the lobes of an organ and the mask of the whole organ into one label.

    As a label of its own, the mask of the whole organ would overlap with the lobes.

    Args:
        structures: Labels of one structure each.

    Returns:
        Labels in the order of the names of their first structures.
    """
    organ_of: dict[str, str] = {}
    organs_of_lobes: set[str] = set()
    for label, members in structures.items():
        name = plain_name(str(members[0]))
        lobe = LOBE.fullmatch(name)
        if lobe is None:
            organ_of[label] = name
        else:
            organ_of[label] = lobe[1]
            organs_of_lobes.add(lobe[1])
    merged: LabelMembers = {}
    # A second loop, since the mask of an organ may come before its lobes.
    for label, members in structures.items():
        organ = organ_of[label]
        name = organ if organ in organs_of_lobes else label
        merged.setdefault(name, []).extend(members)
    return dict(sorted(merged.items(), key=lambda item: str(item[1][0])))


def _is_case(folder: Path) -> bool:
    """Whether a folder is a case of TotalSegmentator: it has an image, masks or both.

    `import_totalsegmentator` refuses a case that lacks one of them.
    """
    has_image = any(case_name(path) in CASE_IMAGES for path in volume_files(folder))
    return has_image or (folder / MASK_FOLDER).is_dir()


def _image_of(folder: Path) -> Path:
    """Find the image of a case of TotalSegmentator.

    Raises:
        UserError: If there is none, or more than one.
    """
    image = image_in(folder)
    if image is not None:
        return image
    images = [path.name for path in volume_files(folder) if case_name(path) in CASE_IMAGES]
    if images:
        raise UserError(
            f"{folder}: expected one image, but found {' and '.join(images)}; keep one of them."
        )
    raise UserError(
        f"{folder}: expected an image {' or '.join(CASE_IMAGES)} (.nii.gz) beside {MASK_FOLDER}; "
        "copy it there."
    )


def import_luna16(folder: Path) -> DataSet:
    """Read the data set LUNA16.

    It holds `subset<n>/<series>.mhd` and the lung masks `seg-lungs-LUNA16/<series>.mhd`; the
    subsets are the folds.

    Raises:
        UserError: If there are no masks, a scan has none, a scan or a mask is there twice, or a
            folder of scans has no number.
    """
    account = Account()
    masks_folder = folder / LUNA16_MASKS
    images = _mhd_files_by_uid(folder.glob("subset*/**/*"))
    masks = _mhd_files_by_uid(masks_folder.rglob("*"))
    if not masks:
        raise UserError(
            f"{folder}: expected lung masks in {LUNA16_MASKS}, which LUNA16 offers as a file of "
            "its own; download and unpack it there."
        )
    without_mask = sorted(set(images) - set(masks))
    if without_mask:
        raise UserError(
            f"{masks_folder}: no mask of the scan {first_few(without_mask, 1)}; "
            "unpack the masks completely."
        )
    # Holds for masks of no case: `check_dataset` claims the masks of the cases as used.
    account.explain(masks_folder, "its scan is in none of the subsets")
    subset_of = {name: _subset_of(path, folder) for name, path in images.items()}
    subsets = sorted(set(subset_of.values()))
    has_folds = len(subsets) > 1
    for subset in subsets:
        why = "is a fold" if has_folds else "is the only one: no fold"
        account.use(Kind.list, f"subset{subset}", why)
    cases = []
    for name, path in images.items():
        case = Case(
            name,
            path,
            masks[name],
            patient=name,
            trust=dict.fromkeys(LUNA16_LABELS, "approximate"),
            fold=subset_of[name] if has_folds else None,
        )
        cases.append(case)
    notes = [
        "the masks are those of an algorithm: "
        "the columns trust_left_lung and trust_right_lung say approximate"
    ]
    if has_folds:
        # Some subsets may be missing: fold numbers run from 0 to that of the last existing subset.
        num_folds = 1 + subsets[-1]
        notes.append(
            "each subset is a fold: data.fold=0 validates on subset0; "
            f"give data.num_folds={num_folds} to choose among all of them"
        )
    return DataSet(
        format=LUNA16,
        name=LUNA16,
        cases=tuple(cases),
        labels=LUNA16_LABELS,
        channels=(Channel("ct", LUNA16_WINDOW_HU),),
        background=LUNA16_BACKGROUND,
        notes=tuple(notes),
        account=account,
    )


def _subset_of(image: Path, folder: Path) -> int:
    """Read the number of the subset in which an image lies.

    Raises:
        UserError: If its folder has no number.
    """
    name = image.relative_to(folder).parts[0]
    match = re.fullmatch(r"subset(\d+)", name, re.ASCII)
    if match is None:
        raise UserError(
            f"{folder / name}: expected folders subset0, subset1, …, which are the folds; "
            "rename the folder."
        )
    return int(match[1])


def _mhd_files_by_uid(paths: Iterable[Path]) -> dict[str, Path]:
    """Index the scans or masks of LUNA16 among some files by the UID of their series.

    The UID is the name of the file.

    Raises:
        UserError: If two files have one UID.
    """
    files: dict[str, Path] = {}
    for path in sorted(paths):
        if path.name.startswith(".") or volume_suffix(path) != ".mhd":
            continue
        first = files.setdefault(path.stem, path)
        if first != path:
            raise UserError(f"{first} and {path} have the same name; keep one of them.")
    return files


def import_pairs(folder: Path) -> DataSet:
    """Read a folder of images and a folder of labels with the same names.

    The labels of a case are a label map or a folder of masks. 3D Slicer saves `<case>.seg.nrrd`
    beside `<case>.nrrd`, so that images and labels may share one folder; the names of the segments
    become labels.

    Raises:
        UserError: If an image or labels have no partner, two pairs of folders could be meant, or
            labels are of several kinds.
    """
    account = Account()
    pairs = _pair_folders(folder)
    if len(pairs) > 1:
        names = " and ".join(f"{images.name} with {labels.name}" for images, labels in pairs)
        raise UserError(
            f"{folder}: expected one pair of folders, but found {names}; "
            "move the others to another folder."
        )
    images_folder, labels_folder = pairs[0] if pairs else (folder, folder)
    images = dict(list_inputs(images_folder))
    label_files = _label_files(images_folder, labels_folder, images)
    require_pairs(images, label_files, images_folder, labels_folder)
    cases = [Case(name, path, label_files[name], patient=name) for name, path in images.items()]
    _require_one_kind(list(label_files.values()), labels_folder)
    notes: list[str] = []
    # Masks and segments have names; None for label maps, which have values only.
    structures: Structures | None = None
    segments = _segments_of(label_files)
    if any(path.is_dir() for path in label_files.values()):
        structures = {name: list(masks_in(path)) for name, path in label_files.items()}
        names_of_masks: set[str] = set()
        for masks in structures.values():
            names_of_masks.update(map(str, masks))
        labels = labels_of_structures(sorted(names_of_masks), account)
    elif segments:
        structures, labels = _labels_of_segments(segments, account)
    else:
        labels = values_in(cases, notes)
    channel = channel_of(guess_modality(cases, notes))
    return DataSet(
        format=PAIRS,
        name=folder.name,
        cases=tuple(cases),
        labels=labels,
        channels=(channel,),
        background={},
        notes=tuple(notes),
        structures=structures,
        account=account,
    )


def _label_files(
    images_folder: Path, labels_folder: Path, case_names: Collection[str]
) -> dict[str, Path]:
    """Find the label map, or the folder of masks, of each case.

    Args:
        images_folder: Folder of the images.
        labels_folder: Folder of the labels; the same folder where 3D Slicer saved both.
        case_names: Names of the images.

    Returns:
        Name of each label map or folder, without an ending such as `_seg`, to its path.

    Raises:
        UserError: If two label maps have the name of one case.
    """
    files = volume_files(labels_folder)
    if images_folder == labels_folder:
        files = [path for path in files if is_slicer_file(path)]
    else:
        # A subfolder with volumes holds the masks of one case, each named after its structure.
        for path in sorted(labels_folder.iterdir()):
            if path.is_dir() and volume_files(path):
                files.append(path)
    labels = {case_name(path): path for path in files}
    # If no label map has the name of a case, they may be called `<case>_seg`.
    if labels.keys().isdisjoint(case_names):
        labels = {LABEL_ENDINGS.sub("", name): path for name, path in labels.items()}
    if len(labels) != len(files):
        raise UserError(
            f"{labels_folder}: expected one label map of each case, but two have the same name; "
            "keep one."
        )
    return labels


def _require_one_kind(labels: Sequence[Path], labels_folder: Path) -> None:
    """Refuse labels of several kinds, since each kind names its labels in another way.

    Raises:
        UserError: With a file of each kind.
    """
    kinds: dict[str, list[str]] = {
        "folders of masks": [],
        "segmentations of 3D Slicer": [],
        "label maps": [],
    }
    for path in labels:
        if path.is_dir():
            kinds["folders of masks"].append(path.name)
        elif is_slicer_file(path):
            kinds["segmentations of 3D Slicer"].append(path.name)
        else:
            kinds["label maps"].append(path.name)
    present = [f"{kind} ({first_few(names, 1)})" for kind, names in kinds.items() if names]
    if len(present) > 1:
        raise UserError(
            f"{labels_folder}: expected labels of one kind, but found {' and '.join(present)}; "
            "save all of them alike."
        )


def _segments_of(labels: Mapping[str, Path]) -> dict[str, list[Segment]]:
    """Read the segments of each case; empty where no file names any.

    Label maps of other programs may have the ending `.seg.nrrd`, too, and name no segments.

    Raises:
        UserError: If some files name their segments and others do not.
    """
    if not any(is_slicer_file(path) for path in labels.values()):
        return {}
    from medseg.io.simpleitk import read_segments  # SimpleITK takes 50 MiB

    segments = {name: read_segments(path) for name, path in labels.items()}
    if not any(segments.values()):
        return {}
    for name, segments_of_case in segments.items():
        if not segments_of_case:
            raise UserError(
                f"{labels[name]}: it names no segments; save the segmentation again, or remove it."
            )
    return segments


def _labels_of_segments(
    segments: Mapping[str, Sequence[Segment]], account: Account
) -> tuple[Structures, LabelMembers]:
    """Make labels of segments of 3D Slicer.

    Returns:
        Structures of each case, and labels with their members. Both hold values if each name has
        one value of its own, the same in all files, else names.
    """
    every_segment = list(itertools.chain.from_iterable(segments.values()))
    segment_names = sorted({segment.name for segment in every_segment})
    labels_by_name = labels_of_structures(segment_names, account)
    pairs = {(segment.name, segment.value) for segment in every_segment}
    num_values = len({segment.value for segment in every_segment})
    # Values are unique within a layer only.
    has_layers = any(segment.num_layers > 1 for segment in every_segment)
    # As many pairs as names and values: each name has one value and each value one name. As many
    # labels as names: no two names are spellings of the same structure.
    has_one_value_each = len(pairs) == len(segment_names) == num_values == len(labels_by_name)
    structures: dict[str, list[int | str]] = {}
    if has_layers or not has_one_value_each:
        for case, case_segments in segments.items():
            structures[case] = [segment.name for segment in case_segments]
        return structures, labels_by_name
    for case, case_segments in segments.items():
        structures[case] = [segment.value for segment in case_segments]
    value_of_name = dict(pairs)
    labels_by_value: LabelMembers = {}
    for label, (segment_name,) in labels_by_name.items():
        labels_by_value[label] = [value_of_name[str(segment_name)]]
    # The labels are sorted by their values.
    return structures, dict(sorted(labels_by_value.items(), key=lambda item: item[1][0]))


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
    """Whether a folder has a folder of images and one of labels, or segmentations of 3D Slicer."""
    if not folder.is_dir():
        return False
    return bool(_pair_folders(folder)) or any(map(is_slicer_file, volume_files(folder)))


def _pair_folders(folder: Path) -> list[tuple[Path, Path]]:
    """Find the pairs of a folder of images and one of labels."""
    pairs = [(folder / images, folder / labels) for images, labels in PAIR_FOLDERS]
    return [(images, labels) for images, labels in pairs if images.is_dir() and labels.is_dir()]


def _read_meta(path: Path, account: Account) -> dict[str, str]:
    """Read the split of each case from `meta.csv`; empty where there is no such file.

    Raises:
        UserError: If a column is missing, a split is unknown, or a case has two.
    """
    if not path.is_file():
        return {}
    account.claim(path)
    rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter=";"))
    # `DictReader` gives every row all keys of the header, even where cells are missing.
    if not rows or not {"image_id", "split"} <= rows[0].keys():
        raise UserError(
            f"{path}: expected the columns image_id and split, separated by ';'; "
            "restore or remove it."
        )
    account.leave_out_keys(map(str, rows[0]), ("image_id", "split"), path.name)
    split_of: dict[str, str] = {}
    for row in rows:
        name = row["image_id"]
        split = row["split"]
        if split not in SPLITS:
            raise UserError(
                f"{path}: expected {', '.join(SPLITS)} as the split of {name}, got {split!r}."
            )
        if name not in split_of:
            split_of[name] = split
        elif split_of[name] == split:
            account.merge(Kind.row, name, "listed more than once in meta.csv, counts once")
        else:
            raise UserError(
                f"{path}: {name} has the splits {split_of[name]} and {split}; keep one row."
            )
    return split_of
