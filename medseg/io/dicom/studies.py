"""Studies below a folder, by the headers of their files: which patients and examinations there are, wherever the files lie."""

from dataclasses import dataclass
from pathlib import Path

from medseg.io.dicom.frames import Frame, Series, read_frames
from medseg.io.inputs import dicom_files


@dataclass(frozen=True)
class Study:
    """An examination of a patient that has slices of the wanted modality.

    Attributes:
        patient: Patient ID, or "".
        uid: Study Instance UID, or "".
        date: Study Date as DICOM writes it, or "".
        scope: What `series=<scope>:` takes for it.
    """

    patient: str
    uid: str
    date: str
    scope: str


def find_studies(folder: Path, modality: str) -> list[Study]:
    """Find the studies whose files lie below a folder.

    A study counts if it has a series of two slices at least: localisers, reports, structures and other modalities
    make none. All slices of a series belong to one study, even where their headers disagree; the reader refuses such.

    Args:
        folder: Where to look, to the bottom.
        modality: Modality of a channel, as a task names it: `ct`, `mr`, or `other` for any.

    Returns:
        The studies, by patient and date.
    """
    wanted = "" if modality == "other" else modality.upper()
    by_uid: dict[str, Series] = {}
    num_slices: dict[str, int] = {}
    for file in dicom_files(folder):
        for image in read_frames(file, wanted):
            if isinstance(image, Frame):
                by_uid.setdefault(image.series.uid, image.series)
                num_slices[image.series.uid] = num_slices.get(image.series.uid, 0) + 1
    volumes = [series for uid, series in by_uid.items() if num_slices[uid] > 1]
    studies = {Study(series.patient, series.study, series.date, series.scope) for series in volumes}
    first = {study.scope: study for study in sorted(studies, key=lambda study: study.date, reverse=True)}
    return sorted(first.values(), key=lambda study: (study.patient, study.date, study.uid))
