"""Importer of DICOM folders: image series whose labels are a SEG or an RTSTRUCT, in folders of any depth.

An example is LCTSC of The Cancer Imaging Archive: <patient>/<study>/<series>/, of which one series is an RTSTRUCT.
"""

from collections import Counter
from pathlib import Path

from medseg.data.case_table import Case
from medseg.data.importers.dataset import DataSet, FileValues, channel_of, first_of, label_names, plain_name
from medseg.errors import UserError, require
from medseg.io.dicom.catalogue import ImageSeries, LabelEntry, read_catalogue
from medseg.io.inputs import CONTROL_CHARACTERS


def import_dicom(folder: Path) -> DataSet:
    """Read a folder of DICOM files: each series that a SEG or an RTSTRUCT refers to is a case, named after its patient.

    Structures whose names agree by `plain_name` are one label.

    Raises:
        UserError: If there are no labels, none of them has its series, or the series are of several modalities.
    """
    series, files, unreadable = read_catalogue(folder)
    require(
        bool(files),
        f"{folder}: expected DICOM labels (SEG or RTSTRUCT) beside {len(series)} image series, but found none; add them.",
    )
    notes = [f"{first_of(unreadable)} cannot be read and was left out"] if unreadable else []
    chosen: dict[str, LabelEntry] = {}
    lost: list[Path] = []
    for file in files:
        one = _series_of(file, series)
        if one is None:
            lost.append(file.path)
        elif one.uid in chosen:
            notes.append(f"{file.path} labels the same series as {chosen[one.uid].path}, which is used")
        else:
            chosen[one.uid] = file
    if lost and not chosen:
        raise UserError(f"{first_of(lost)}: the series that it labels is not below {folder}; copy it there.")
    if lost:
        notes.append(f"{first_of(lost)} labels a series that is not below {folder} and was left out")
    if len(chosen) < len(series):
        notes.append(f"{len(series) - len(chosen)} of {len(series)} image series have no labels and were left out")
    kinds = sorted({series[uid].modality for uid in chosen})
    require(len(kinds) == 1, f"{folder}: expected series of one modality, got {' and '.join(kinds)}; import a folder of each.")
    counts = Counter(_patient(series[uid], folder) for uid in chosen)
    numbers: Counter[str] = Counter()
    cases = []
    for uid, file in chosen.items():
        patient = _patient(series[uid], folder)
        numbers[patient] += 1
        name = f"{patient}_{numbers[patient]}" if counts[patient] > 1 else patient
        cases.append(Case(name, series[uid].folder, file.path, patient, series=uid))
    labels = _labels(list(chosen.values()), notes)
    return DataSet("dicom", folder.name, tuple(cases), labels, (channel_of(kinds[0]),), {}, notes=tuple(notes))


def _series_of(file: LabelEntry, series: dict[str, ImageSeries]) -> ImageSeries | None:
    """Find the series that a file labels: that which it names, else the only one of its patient."""
    if file.series_uid:
        return series.get(file.series_uid)
    own = [one for one in series.values() if one.patient == file.patient]
    return own[0] if len(own) == 1 else None


def _patient(series: ImageSeries, folder: Path) -> str:
    """Name the patient of a series: by its Patient ID, else by the first folder on the way to it."""
    name = series.patient or next(iter(series.folder.relative_to(folder).parts), folder.name)
    return CONTROL_CHARACTERS.sub("_", name).replace("/", "_").replace("\\", "_").lstrip(".") or "patient"


def _labels(files: list[LabelEntry], notes: list[str]) -> FileValues:
    """Make labels of the names of structures; those that some files lack are noted."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for file in files:
        names = {plain_name(name): name for name in reversed(file.names)}
        counts.update(list(names))
        first = {**names, **first}
    if some := [f"{name} in {counts[plain]}" for plain, name in sorted(first.items()) if counts[plain] < len(files)]:
        found = ", ".join(some)
        notes.append(f"some structures are only in a part of the {len(files)} files ({found}) and count as absent in the others")
    written = label_names(first.values())
    return {written[name]: [name] for _, name in sorted(first.items())}
