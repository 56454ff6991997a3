"""Catalogue of the DICOM files below a folder: image series, SEG and RTSTRUCT files, others."""

import filecmp
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from pydicom import config, dcmread

from medseg.errors import UserError
from medseg.io.dicom.frames import NO_IMAGES
from medseg.io.dicom.labels import KINDS, empty_structures, open_label_file
from medseg.io.inputs import dicom_files

# The fields that are read of each file; `read_catalogue` unpacks them in this order.
FIELDS = ["SOPClassUID", "Modality", "PatientID", "SeriesInstanceUID"]


@dataclass(frozen=True)
class ImageSeries:
    """Files of one series of images.

    Attributes:
        uid: Series Instance UID.
        folder: Deepest folder with all its files, which may lie in folders below.
        modality: Modality as DICOM names it, such as `CT`.
        patient: Patient ID, "" where there is none.
        files: Its files, in the order of `dicom_files`.
    """

    uid: str
    folder: Path
    modality: str
    patient: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class LabelEntry:
    """A SEG or RTSTRUCT file, without its content.

    Attributes:
        path: The file.
        names: Names of its structures, in the order of the file.
        empty: Names of structures without a frame (SEG) or a closed contour (RTSTRUCT).
        series_uids: Series Instance UIDs of the images that the file refers to; may be empty.
        patient: Patient ID, "" where there is none.
        uid: SOP Instance UID, which a copy has too.
    """

    path: Path
    names: tuple[str, ...]
    empty: tuple[str, ...]
    series_uids: tuple[str, ...]
    patient: str
    uid: str


@dataclass(frozen=True)
class Catalogue:
    """DICOM files below a folder.

    Attributes:
        series: Image series by UID.
        labels: SEG and RTSTRUCT files, in the order of `dicom_files`.
        unreadable: Reason why a file cannot be read, by path: the end of a sentence, or "" if the
            reason is unknown.
        others: Modality of each file of another kind, by path.
    """

    series: dict[str, ImageSeries]
    labels: list[LabelEntry]
    unreadable: dict[Path, str]
    others: dict[Path, str]


def read_catalogue(folder: Path) -> Catalogue:
    """Read the headers of all DICOM files below a folder."""
    # By Series Instance UID.
    series_files: dict[str, list[Path]] = {}
    modality_and_patient: dict[str, tuple[str, str]] = {}
    catalogue = Catalogue(series={}, labels=[], unreadable={}, others={})
    for path in dicom_files(folder):
        try:
            with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
                header = dcmread(path, stop_before_pixels=True, force=True, specific_tags=FIELDS)
                sop_class, modality, patient, uid = (
                    str(header.get(keyword) or "") for keyword in FIELDS
                )
            if sop_class in KINDS:
                catalogue.labels.append(_label_entry(path, patient))
            elif uid and modality not in NO_IMAGES:
                series_files.setdefault(uid, []).append(path)
                # If the files of a series differ in these fields, the last file counts.
                modality_and_patient[uid] = (modality, patient)
            else:
                catalogue.others[path] = modality or "unknown modality"
        except UserError as error:
            catalogue.unreadable[path] = str(error).removeprefix(f"{path}: ")
        except MemoryError:
            raise
        # pydicom raises exceptions of a dozen classes for a damaged file.
        except Exception:
            catalogue.unreadable[path] = ""
    for uid, paths in series_files.items():
        common_folder = Path(os.path.commonpath([path.parent for path in paths]))
        modality, patient = modality_and_patient[uid]
        catalogue.series[uid] = ImageSeries(uid, common_folder, modality, patient, tuple(paths))
    return catalogue


def _label_entry(path: Path, patient: str) -> LabelEntry:
    """Read the structures of a SEG or RTSTRUCT file and the series that it refers to.

    Raises:
        UserError: If the file cannot be read.
    """
    file = open_label_file(path)
    return LabelEntry(
        path,
        names=tuple(file.names.values()),
        empty=tuple(empty_structures(file)),
        series_uids=file.series_uids,
        patient=patient,
        uid=str(file.dataset.get("SOPInstanceUID") or ""),
    )


def is_copy(file: LabelEntry, other: LabelEntry) -> bool:
    """Whether two label files hold the same object.

    Equal UIDs are no proof, since corrected labels may keep the UID: the contents are compared.
    Files that cannot be compared are not copies.
    """
    if not file.uid or file.uid != other.uid or file.names != other.names:
        return False
    try:
        if filecmp.cmp(file.path, other.path, shallow=False):
            return True
        # A copy may be encoded in another way: compare all values, which may be damaged.
        with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
            return bool(dcmread(file.path, force=True) == dcmread(other.path, force=True))
    except MemoryError:
        raise
    except Exception:  # pydicom raises any type for a damaged file
        return False
