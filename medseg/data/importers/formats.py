"""Formats of data sets: detection of the format of a folder, and the importer of each format."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from medseg.data.case_table import Case, is_case_table, read_case_table, table_at
from medseg.data.importers.dataset import DICOM, DataSet, check_dataset
from medseg.data.importers.folders import (
    LUNA16,
    LUNA16_MASKS,
    PAIRS,
    TOTALSEGMENTATOR,
    import_luna16,
    import_pairs,
    import_totalsegmentator,
    is_luna16,
    is_pairs,
    is_totalsegmentator,
)
from medseg.data.importers.json_lists import (
    DATASET_FILE,
    MSD,
    NNUNET,
    import_msd,
    import_nnunet,
    read_about,
)
from medseg.errors import UserError
from medseg.io.inputs import dicom_files
from medseg.preprocess.scale import AS_STORED, HuScale


class Format(NamedTuple):
    """A format of data sets: a layout of files and folders, and how to read it.

    Attributes:
        sign: By which files a user recognises it, for messages.
        is_at: Whether a path looks like a data set of this format.
        read: Reads the data set at a path.
    """

    sign: str
    is_at: Callable[[Path], bool]
    read: Callable[[Path], DataSet]


def _is_nnunet(path: Path) -> bool:
    """Whether a folder has a `dataset.json` of nnU-Net.

    The file of nnU-Net 2 has the key `channel_names`. That of nnU-Net 1 has the keys of the
    Decathlon, but its images are called `<case>_0000.nii.gz`, and its list names `<case>.nii.gz`.
    An image of the Decathlon may also be called `liver_0000.nii.gz`, but then its list names this
    file, which exists.
    """
    if not (path / DATASET_FILE).is_file():
        return False
    about = read_about(path / DATASET_FILE)
    if "channel_names" in about:
        return True
    has_numbered_image = next((path / "imagesTr").glob("*_0000.*"), None) is not None
    if "modality" not in about or not has_numbered_image:
        return False
    return not _is_decathlon_list(path, about.get("training"))


def _is_decathlon_list(folder: Path, entries: Any) -> bool:
    """Whether a list names files that all exist, and at least one name does not end in `_0000`.

    A list in which all names end in `_0000` may also be a list of nnU-Net 1.
    """
    if not isinstance(entries, list):
        return False
    paths = []
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("image"), str):
            paths.append(folder / entry["image"])
    if not paths or all("_0000." in path.name for path in paths):
        return False
    return all(path.is_file() for path in paths)


def _is_msd(path: Path) -> bool:
    """Whether a path is a datalist, or a folder with one named `dataset.json`."""
    if path.is_file():
        return path.suffix.lower() == ".json"
    return (path / DATASET_FILE).is_file() and "training" in read_about(path / DATASET_FILE)


def _is_dicom(path: Path) -> bool:
    """Whether a folder holds DICOM files at any depth."""
    return path.is_dir() and next(dicom_files(path), None) is not None


def _import_dicom(folder: Path) -> DataSet:
    """Read a folder of DICOM files, see `medseg.data.importers.dicom.import_dicom`."""
    from medseg.data.importers.dicom import import_dicom  # pydicom takes 30 MiB

    return import_dicom(folder)


# Detection tries the formats in this order: a folder of one format may also look like a later one.
FORMATS = {
    NNUNET: Format(
        "dataset.json with channel_names, imagesTr, labelsTr", _is_nnunet, import_nnunet
    ),
    MSD: Format("dataset.json or another JSON file with a list training", _is_msd, import_msd),
    TOTALSEGMENTATOR: Format(
        "<case>/ct.nii.gz with <case>/segmentations/", is_totalsegmentator, import_totalsegmentator
    ),
    LUNA16: Format(f"subset<n>/*.mhd with {LUNA16_MASKS}/", is_luna16, import_luna16),
    PAIRS: Format(
        "images/ with labels/, or <case>.nrrd with <case>.seg.nrrd", is_pairs, import_pairs
    ),
    DICOM: Format("DICOM series with SEG or RTSTRUCT files", _is_dicom, _import_dicom),
}


@functools.cache
def import_dataset(path: Path, format_name: str | None = None) -> DataSet:
    """Read a data set in the format of another program.

    Only headers, tables and names are read where these name the labels; otherwise label maps are
    read for their values. The result is cached: a process reads a data set once, and does not
    notice a later change.

    Args:
        path: Folder, or datalist (.json).
        format_name: Key of `FORMATS`; None detects the format from the content of the folder.

    Raises:
        UserError: If the path does not exist, has no known format, or the data set is incomplete.
    """
    if not path.exists():
        raise UserError(f"{path}: this folder does not exist; check the path.")
    # Importers use the names of the folder and of its parents, which "." does not have.
    path = Path(os.path.abspath(path))
    try:
        # A `dataset.json` is a datalist, but that of nnU-Net stands for its folder. A datalist may
        # have `channel_names`, too; its images lie anywhere.
        may_be_nnunet = format_name == NNUNET
        if format_name is None:
            may_be_nnunet = (path.parent / "imagesTr").is_dir()
        if path.name == DATASET_FILE and may_be_nnunet and _is_nnunet(path.parent):
            path = path.parent
        data_format = FORMATS[format_name or find_format(path)]
        return check_dataset(data_format.read(path), path)
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: cannot be read ({error.strerror or error}); "
            "check the path and its permissions."
        ) from error


def find_format(path: Path) -> str:
    """Detect the format of a data set from the content of its folder.

    Raises:
        UserError: If the format is unknown, or the folder holds several data sets or a case table.
    """
    name = _format_at(path)
    if name is not None:
        return name
    _refuse_case_table(path)
    folders: list[Path] = []
    if path.is_dir():
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    # The user may have given the parent of a data set. DICOM is excluded: DICOM files at any depth
    # would have made the given folder itself a data set.
    inner = [folder.name for folder in folders if _format_at(folder, excluded=DICOM) is not None]
    if inner:
        count = f"{len(inner)} data sets" if len(inner) > 1 else "a data set"
        raise UserError(
            f"{path}: it holds {count}: {', '.join(inner[:10])}; "
            f"give one of them, such as {path / inner[0]}."
        )
    # Or the user has given a folder inside a data set. DICOM is excluded: DICOM files in any
    # sibling folder would make the parent a DICOM data set.
    outer = path.absolute().parent
    name = _format_at(outer, excluded=DICOM)
    if name is not None:
        raise UserError(
            f"{path}: expected a data set, but found a part of the {name} data set {outer}; "
            "give that folder."
        )
    signs = "; ".join(f"{name}: {data_format.sign}" for name, data_format in FORMATS.items())
    raise UserError(
        f"{path}: expected a data set in one of these layouts, but found none ({signs}); "
        "give one, or a case table."
    )


def _refuse_case_table(path: Path) -> None:
    """Refuse a case table, or a folder with one, which needs no import.

    Raises:
        UserError: With the key that takes the table.
    """
    tables = [path] if is_case_table(path) else []
    if path.is_dir():
        tables = [file for file in sorted(path.glob("*.csv")) if is_case_table(file)]
    if tables:
        raise UserError(
            f"{path}: expected a data set of another program, but found the case table "
            f"{tables[0].name}, which needs no import; give data.cases={tables[0]}."
        )


def _format_at(path: Path, excluded: str = "") -> str | None:
    """Find the first format that a path looks like; None if there is none.

    Args:
        path: Folder or file.
        excluded: Name of a format that is not tried.
    """
    for name, data_format in FORMATS.items():
        if name != excluded and data_format.is_at(path):
            return name
    return None


def read_cases(
    path: Path,
    labels_column: str | None = "labels",
    *,
    hu: HuScale = AS_STORED,
    ignore_findings: frozenset[str] = frozenset(),
) -> list[Case]:
    """Read the cases of a case table, or of a data set that `import_dataset` reads.

    The arguments are those of `read_case_table`. A folder in which `table_at` finds a table counts
    as a case table.

    Raises:
        UserError: If the path is neither a case table nor a data set of a known format.
    """
    # `table_at` returns a folder without a table as it is.
    if table_at(path).is_dir() or path.suffix.lower() == ".json":
        data = import_dataset(path)
        data.require_structures()
        return [replace(case, hu=hu, ignore_findings=ignore_findings) for case in data.cases]
    return read_case_table(path, labels_column, hu=hu, ignore_findings=ignore_findings)
