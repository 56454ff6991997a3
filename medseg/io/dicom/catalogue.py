"""Catalogue of DICOM files: the image series below a folder, and the SEG and RTSTRUCT files with labels of them."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from pydicom import config, dcmread
from pydicom.errors import InvalidDicomError

from medseg.errors import UserError
from medseg.io.dicom.frames import NO_IMAGES
from medseg.io.dicom.labels import KINDS, open_label_file
from medseg.io.inputs import dicom_files

FIELDS = ["SOPClassUID", "Modality", "PatientID", "SeriesInstanceUID"]


@dataclass(frozen=True)
class ImageSeries:
    """Files of one series of images.

    Attributes:
        uid: Series Instance UID.
        folder: Folder that holds all its files.
        modality: Modality as DICOM names it, such as `CT`.
        patient: Patient ID, "" where there is none.
    """

    uid: str
    folder: Path
    modality: str
    patient: str


@dataclass(frozen=True)
class LabelEntry:
    """A SEG or RTSTRUCT file, without its content.

    Attributes:
        path: The file.
        names: Names of its structures, in the order of the file.
        series_uid: Series Instance UID of the images that it refers to, "" where it names none.
        patient: Patient ID, "" where there is none.
    """

    path: Path
    names: tuple[str, ...]
    series_uid: str
    patient: str


def read_catalogue(folder: Path) -> tuple[dict[str, ImageSeries], list[LabelEntry], list[Path]]:
    """Read the headers of all DICOM files below a folder.

    Returns:
        Series by UID; SEG and RTSTRUCT files in the order of their paths; and files that cannot be read.
    """
    found: dict[str, ImageSeries] = {}
    labels: list[LabelEntry] = []
    unreadable: list[Path] = []
    for path in dicom_files(folder):
        try:
            with config.disable_value_validation(), warnings.catch_warnings(action="ignore"):
                header = dcmread(path, stop_before_pixels=True, force=True, specific_tags=FIELDS)
                kind, modality, patient, uid = (str(header.get(keyword) or "") for keyword in FIELDS)
            if kind in KINDS:
                file = open_label_file(path)
                labels.append(LabelEntry(path, tuple(file.names.values()), file.series_uid, patient))
            elif uid and modality not in NO_IMAGES:
                known = found.get(uid)
                common = os.path.commonpath([path.parent, known.folder]) if known else path.parent
                found[uid] = ImageSeries(uid, Path(common), modality, patient)
        except (UserError, InvalidDicomError, OSError, ValueError, EOFError, AttributeError):
            unreadable.append(path)
    return found, labels, unreadable
