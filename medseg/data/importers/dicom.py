"""Importer of DICOM folders of any depth: image series with labels in SEG or RTSTRUCT files.

An example is LCTSC of The Cancer Imaging Archive: folders <patient>/<study>/<series>/, where one
series of each study is an RTSTRUCT.
"""

import re
from collections import Counter
from pathlib import Path

from medseg.data.case_table import Case
from medseg.data.importers.account import Account, Kind
from medseg.data.importers.dataset import (
    DICOM,
    DataSet,
    channel_of,
    labels_of_structures,
    plain_name,
)
from medseg.errors import UserError
from medseg.io.dicom.catalogue import Catalogue, ImageSeries, LabelEntry, is_copy, read_catalogue
from medseg.io.inputs import CONTROL_CHARACTERS
from medseg.wording import first_few


def import_dicom(folder: Path) -> DataSet:
    """Read a folder of DICOM files.

    Each series that a SEG or an RTSTRUCT refers to is a case, named after its patient; several
    series of one patient are the cases `<patient>_1`, `<patient>_2`, …. Structures whose names
    agree by `plain_name` are one label.

    Raises:
        UserError: If there are no label files, the folder has the series of none, two of them label
            one series, the series are of several modalities, or two patients get one name.
    """
    catalogue = read_catalogue(folder)
    account = Account()
    series = catalogue.series
    if not catalogue.labels:
        # An unreadable file is the likely cause: the first one with a known reason is reported.
        for path, reason in catalogue.unreadable.items():
            if reason:
                raise UserError(f"{path}: {reason}")
        raise UserError(
            f"{folder}: expected DICOM labels (SEG or RTSTRUCT) beside {len(series)} image series, "
            "but found none; add them."
        )
    label_files = _choose_labels(catalogue, folder, account)
    modalities = sorted({series[uid].modality for uid in label_files})
    if len(modalities) != 1:
        raise UserError(
            f"{folder}: expected series of one modality, got {' and '.join(modalities)}; "
            "import a folder of each."
        )
    _account_series(catalogue, label_files, account)
    patients = {uid: _patient_name(series[uid], folder) for uid in label_files}
    _check_patients(patients, series)
    # Number of labelled series of each patient, and of those that have a name so far.
    num_series = Counter(patients.values())
    num_named: Counter[str] = Counter()
    cases = []
    structures: dict[str, tuple[str, ...]] = {}
    structure_names: list[str] = []
    for uid, file in label_files.items():
        patient = patients[uid]
        num_named[patient] += 1
        name = f"{patient}_{num_named[patient]}" if num_series[patient] > 1 else patient
        cases.append(Case(name, series[uid].folder, file.path, patient, series=uid))
        structures[name] = file.names
        structure_names += file.names
        for structure in file.empty:
            why = "empty there: nothing is enclosed, which states its absence"
            account.use(Kind.structure, f"{structure} of {name}", why)
    labels = labels_of_structures(sorted(structure_names, key=plain_name), account)
    notes: tuple[str, ...] = ()
    if len(num_series) == 1 and len(cases) > 1:
        # Programs that remove identities often write the same Patient ID into all files.
        notes = (
            f"all {len(cases)} series are of the patient {cases[0].patient!r}, so none is left for "
            "validation; if they show several patients, correct the column patient of the table",
        )
    return DataSet(
        format=DICOM,
        name=folder.name,
        cases=tuple(cases),
        labels=labels,
        channels=(channel_of(modalities[0]),),
        background={},
        notes=notes,
        structures=structures,
        account=account,
    )


def _choose_labels(catalogue: Catalogue, folder: Path, account: Account) -> dict[str, LabelEntry]:
    """Find the file that labels each series.

    Returns:
        UID of each labelled series to its file.

    Raises:
        UserError: If the series of no file is below the folder, or two files label one series.
    """
    label_files: dict[str, LabelEntry] = {}
    without_series: list[Path] = []
    for file in catalogue.labels:
        image = _series_of(file, catalogue.series)
        if image is None:
            without_series.append(file.path)
            account.explain(file.path, "labels a series that is not below the folder")
            continue
        first = label_files.setdefault(image.uid, file)
        if first is file:
            continue
        if is_copy(file, first):
            account.explain(file.path, f"a copy of {first.path.relative_to(folder)}")
            continue
        raise UserError(
            f"{file.path} and {first.path} label the same series of "
            f"{_patient_name(image, folder)}; "
            "which one counts is not said: move the other one to another folder."
        )
    if without_series and not label_files:
        raise UserError(
            f"{first_few(without_series, 1)}: the series that it labels is not below {folder}; "
            "copy it there."
        )
    return label_files


def _account_series(
    catalogue: Catalogue, label_files: dict[str, LabelEntry], account: Account
) -> None:
    """Enter the files of the series and all DICOM files without image or labels in the account."""
    for image in catalogue.series.values():
        if image.uid not in label_files:
            account.leave_out(Kind.series, image.uid, "no labels refer to it")
            for path in image.files:
                account.explain(path, "of a series without labels")
            continue
        for path in image.files:
            account.claim(path)
        num_folders = len({path.parent for path in image.files})
        why = "labelled"
        if num_folders > 1:
            why += f"; its files lie in {num_folders} folders, equal slices count once"
        account.use(Kind.series, image.uid, why)
    for path, reason in catalogue.unreadable.items():
        account.explain(path, reason or "damaged DICOM, cannot be read")
    for path, modality in catalogue.others.items():
        account.explain(path, f"DICOM without an image ({modality})")


def _series_of(file: LabelEntry, series: dict[str, ImageSeries]) -> ImageSeries | None:
    """Find the series that a file labels: the series that it names, else its patient's only series.

    Returns:
        The series; None if the named series are not in the folder, or if the file names no series
        and its patient does not have exactly one.

    Raises:
        UserError: If several of the named series are in the folder.
    """
    if file.series_uids:
        named = [series[uid] for uid in file.series_uids if uid in series]
        if len(named) > 1:
            raise UserError(
                f"{file.path}: it refers to {len(named)} series below the folder "
                f"({named[0].folder}, {named[1].folder}); move all but one to another folder."
            )
        return named[0] if named else None
    of_patient = [image for image in series.values() if image.patient == file.patient]
    if len(of_patient) != 1:
        return None
    return of_patient[0]


def _patient_name(series: ImageSeries, folder: Path) -> str:
    """Name the patient of a series by its Patient ID, else by the first folder of its path.

    Characters that a case name must not have are replaced.
    """
    name = series.patient
    if not name:
        inner_folders = series.folder.relative_to(folder).parts
        name = inner_folders[0] if inner_folders else folder.name
    name = re.sub(r"[/\\]", "_", CONTROL_CHARACTERS.sub("_", name))
    return name.lstrip(".") or "patient"


def _check_patients(patients: dict[str, str], series: dict[str, ImageSeries]) -> None:
    """Refuse two patients whose IDs become the same name.

    Args:
        patients: UID of each labelled series to the name of its patient.
        series: Series by UID.

    Raises:
        UserError: With both IDs.
    """
    identities: dict[str, str] = {}
    for uid, patient in patients.items():
        identity = series[uid].patient
        first = identities.setdefault(patient, identity)
        if first != identity:
            raise UserError(
                f"the patients {first!r} and {identity!r} would both be called {patient!r}; "
                "import a folder of each."
            )
