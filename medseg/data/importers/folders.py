"""Importers of data sets described by folder and file names: TotalSegmentator, LUNA16, and folders of images and label maps.

Sources of the layouts: resources/convert_dataset_to_nnunet.py of TotalSegmentator; luna16.grand-challenge.org/Data.
"""

import csv
import io
import re
from pathlib import Path

from medseg.data.case_table import SPLITS, Case
from medseg.data.importers.dataset import DataSet, FileValues, channel_of, first_of, label_names, require_pairs
from medseg.data.importers.json_lists import guess_modality, values_in
from medseg.data.task import Channel
from medseg.errors import UserError, require
from medseg.io.inputs import CASE_IMAGES, SEGMENTATION_SUFFIX, case_name, image_in, list_inputs, volume_files, volume_suffix
from medseg.io.text import read_text

TOTALSEGMENTATOR, LUNA16, PAIRS = "totalsegmentator", "luna16", "pairs"
MASK_FOLDER = "segmentations"
LUNA16_MASKS = "seg-lungs-LUNA16"
# Values of its masks, which an algorithm has drawn; the audit compares the sides with the geometry.
LUNA16_LABELS: dict[str, list[int | str]] = {"left_lung": [3], "right_lung": [4]}
LUNA16_BACKGROUND: dict[str, list[int | str]] = {"trachea": [5]}
LUNA16_WINDOW_HU = (-1000.0, 400.0)
PAIR_FOLDERS = (("images", "labels"), ("images", "masks"), ("imagesTr", "labelsTr"))
LOBE = re.compile(r"(\w+)_(?:upper|middle|lower)_lobe_(left|right)")
LABEL_ENDINGS = re.compile(r"_(seg|segmentation|label|labels|mask|gt)$")


def import_totalsegmentator(folder: Path) -> DataSet:
    """Read TotalSegmentator's data set: `<case>/ct.nii.gz`, `<case>/segmentations/<structure>.nii.gz`, and the split of `meta.csv`.

    Lobes are merged to their organ: `lung_upper_lobe_left` and `lung_lower_lobe_left` are `left_lung`.

    Raises:
        UserError: If a case has no image or no masks, or `meta.csv` is damaged.
    """
    splits = _read_meta(folder / "meta.csv")
    cases, structures = [], set[str]()
    for one in sorted(path.parent for path in folder.glob(f"*/{MASK_FOLDER}") if path.is_dir()):
        image = image_in(one)
        require(
            image is not None,
            f"{one}: expected an image {' or '.join(CASE_IMAGES)} (.nii.gz) beside {MASK_FOLDER}; copy it there.",
        )
        assert image is not None
        masks = {case_name(mask) for mask in volume_files(one / MASK_FOLDER)}
        require(
            bool(masks), f"{one / MASK_FOLDER}: expected masks such as liver.nii.gz, but the folder holds none; copy them there."
        )
        structures |= masks
        cases.append(Case(one.name, image, one / MASK_FOLDER, one.name, splits.get(one.name)))
    lobes = {name: f"{match[2]}_{match[1]}" for name in structures if (match := LOBE.fullmatch(name))}
    written = label_names(sorted(structures - lobes.keys()))
    labels: dict[str, list[int | str]] = {}
    for name in sorted(structures):
        labels.setdefault(lobes.get(name) or written[name], []).append(name)
    is_mr = bool(cases) and case_name(cases[0].image) == "mri"
    return DataSet(TOTALSEGMENTATOR, folder.name, tuple(cases), labels, (channel_of("mr" if is_mr else "ct"),), {})


def import_luna16(folder: Path) -> DataSet:
    """Read LUNA16: `subset<n>/<series>.mhd` and the lung masks `seg-lungs-LUNA16/<series>.mhd`; the subsets are the folds.

    Raises:
        UserError: If the masks are missing, or that of a scan.
    """
    images = {path.stem: path for path in sorted(folder.glob("subset*/**/*.mhd"))}
    masks = {path.stem: path for path in sorted((folder / LUNA16_MASKS).rglob("*.mhd"))}
    require(
        bool(masks),
        f"{folder}: expected lung masks in {LUNA16_MASKS}, which LUNA16 offers as a file of its own; download and unpack it there.",
    )
    if alone := sorted(set(images) - set(masks)):
        raise UserError(f"{folder / LUNA16_MASKS}: no mask of the scan {first_of(alone)}; unpack the masks completely.")
    subsets = {
        name: int(match[0]) for name, path in images.items() if (match := re.search(r"\d+", path.relative_to(folder).parts[0]))
    }
    has_folds = len(set(subsets.values())) > 1
    trust = dict.fromkeys(LUNA16_LABELS, "approximate")
    cases = [
        Case(name, path, masks[name], name, None, trust, fold=subsets.get(name) if has_folds else None)
        for name, path in images.items()
    ]
    notes = ["the masks are those of an algorithm: the columns trust_left_lung and trust_right_lung say approximate"]
    if has_folds:
        notes.append(
            f"each subset is a fold: data.fold=0 validates on subset0; give data.num_folds={1 + max(subsets.values())} to choose among all of them"
        )
    return DataSet(
        LUNA16, LUNA16, tuple(cases), LUNA16_LABELS, (Channel("ct", LUNA16_WINDOW_HU),), LUNA16_BACKGROUND, notes=tuple(notes)
    )


def import_pairs(folder: Path) -> DataSet:
    """Read a folder of images and a folder of label maps, or of folders of binary masks, of the same names.

    3D Slicer saves `<case>.seg.nrrd` beside `<case>.nrrd`; both may lie in one folder. The names of its segments become labels.

    Raises:
        UserError: If one has no partner, or a value has two names.
    """
    images_at, labels_at = next((pair for pair in _pair_folders(folder) if all(one.is_dir() for one in pair)), (folder, folder))
    files = [path for path in volume_files(labels_at) if images_at != labels_at or is_slicer_file(path)]
    entries = [*files, *(one for one in sorted(labels_at.iterdir()) if one.is_dir() and volume_files(one))]
    images = dict(list_inputs(images_at))
    labels = {case_name(path): path for path in entries}
    if not labels.keys() & images.keys():
        labels = {LABEL_ENDINGS.sub("", name): path for name, path in labels.items()}
    require(
        len(labels) == len(entries), f"{labels_at}: expected one label map of each case, but two have the same name; keep one."
    )
    require_pairs(images, labels, images_at, labels_at)
    cases = [Case(name, path, labels[name], name) for name, path in images.items()]
    notes: list[str] = []
    structures = {case_name(mask) for one in labels.values() if one.is_dir() for mask in volume_files(one)}
    named: FileValues = {name: [name] for name in structures} or _segment_values(list(filter(is_slicer_file, files)))
    written = label_names(sorted(named))
    groups = {written[name]: named[name] for name in sorted(named)} or values_in(cases, notes)
    return DataSet(
        PAIRS, folder.name, tuple(cases), groups, (channel_of(guess_modality(cases[0].image, notes)),), {}, notes=tuple(notes)
    )


def _segment_values(files: list[Path]) -> FileValues:
    """Find the values of the segments of 3D Slicer, which must be the same in all files."""
    from medseg.io.simpleitk import segment_names  # SimpleITK takes 50 MiB

    names: dict[int, str] = {}
    for path in files:
        for value, name in segment_names(path).items():
            known = names.setdefault(value, name)
            require(
                known == name,
                f"{path}: the value {value} is {name}, but {known} in another file; save the segments of all cases in one order.",
            )
    values: FileValues = {}
    for value, name in sorted(names.items()):
        values.setdefault(name, []).append(value)
    return values


def is_slicer_file(path: Path) -> bool:
    """Whether a file is a segmentation of 3D Slicer, by its name."""
    return volume_suffix(path) == SEGMENTATION_SUFFIX


def is_totalsegmentator(folder: Path) -> bool:
    """Whether a folder looks like TotalSegmentator's data set."""
    return any(path.is_dir() for path in folder.glob(f"*/{MASK_FOLDER}"))


def is_luna16(folder: Path) -> bool:
    """Whether a folder looks like LUNA16."""
    return (folder / LUNA16_MASKS).is_dir() or next(folder.glob("subset*/**/*.mhd"), None) is not None


def is_pairs(folder: Path) -> bool:
    """Whether a folder holds a folder of images and one of labels, or segmentations of 3D Slicer."""
    if not folder.is_dir():
        return False
    return any(all(one.is_dir() for one in pair) for pair in _pair_folders(folder)) or any(
        map(is_slicer_file, volume_files(folder))
    )


def _pair_folders(folder: Path) -> list[tuple[Path, Path]]:
    return [(folder / images, folder / labels) for images, labels in PAIR_FOLDERS]


def _read_meta(path: Path) -> dict[str, str]:
    """Read the split of each case; empty where there is no table."""
    if not path.is_file():
        return {}
    rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter=";"))
    require(
        bool(rows) and {"image_id", "split"} <= rows[0].keys(),
        f"{path}: expected the columns image_id and split, separated by ';'; restore or remove it.",
    )
    for row in rows:
        require(
            row["split"] in SPLITS,
            f"{path}: expected {', '.join(SPLITS)} as the split of {row['image_id']}, got {row['split']!r}.",
        )
    return {row["image_id"]: row["split"] for row in rows}
