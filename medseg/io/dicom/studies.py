"""Studies below folders: patients and examinations by the headers of files, wherever these lie."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medseg.io.dicom.frames import Frame, NoSlice, Series, read_frames
from medseg.io.dicom.stacks import SliceFolders, broken_copies, refused_copy
from medseg.io.identity import Identity, written_date
from medseg.io.inputs import dicom_files

Position = tuple[float, ...]


@dataclass(frozen=True)
class Study:
    """An examination of a patient, as far as its files lie below one folder.

    Attributes:
        patient: Patient ID, or "".
        uid: Study Instance UID, or "".
        date: Study Date as DICOM writes it, or "".
        scope: What `series=<scope>:` takes for it.
        series: Its series, also those that are no volume.
        positions: Places of the slices of each volume of the requested modality, by Series
            Instance UID; empty where it has none.
        files: Its files, with those that cannot be read and belong to its only volume.
    """

    patient: str
    uid: str
    date: str
    scope: str
    series: tuple[Series, ...]
    positions: dict[str, frozenset[Position]]
    files: tuple[Path, ...]

    @property
    def identity(self) -> Identity:
        """Patient and date; its series are several."""
        return Identity(self.patient, written_date(self.date))

    @property
    def has_volume(self) -> bool:
        """Whether it has a series of two slices at least."""
        return bool(self.positions)

    def shares_series(self, other: "Study") -> bool:
        """Whether a series of this study goes on in another folder; a copy of a series does not."""
        if not self.uid or self.scope != other.scope:
            return False
        common = self.positions.keys() & other.positions.keys()
        return any(self.positions[uid] != other.positions[uid] for uid in common)


@dataclass
class _Folder:
    """What the headers of a folder say.

    Attributes:
        series: The series by UID, as the first readable slice describes them.
        files: Files by the UID of their series.
        loose: Files that cannot be read and do not tell their series.
        dicom: All DICOM files.
        positions: Places of the slices by the UID of their series.
    """

    series: dict[str, Series] = field(default_factory=dict)
    files: dict[str, list[Path]] = field(default_factory=dict)
    loose: list[NoSlice] = field(default_factory=list)
    dicom: set[Path] = field(default_factory=set)
    positions: dict[str, list[Position]] = field(default_factory=dict)


def find_studies(
    folders: Sequence[Path],
    modality: str,
    on_file: Callable[[], None] = lambda: None,
    on_loose: Callable[[NoSlice], None] = lambda _: None,
) -> list[list[Study]]:
    """Find the studies whose files lie below folders.

    Localisers, reports, structures and other modalities make no volume of a study. All slices of a
    series belong to one study, even where their headers disagree; the reader refuses such.

    Args:
        folders: Where to look, to the bottom.
        modality: Modality of a channel, as a task names it: `ct`, `mr`, or `other` for any.
        on_file: Called after each file.
        on_loose: Called with each file that cannot be read, and that a slice of several volumes may
            be: it belongs to no study.

    Returns:
        The studies of each folder, by patient and date; none of a folder that cannot be searched.
    """
    dicom_modality = "" if modality == "other" else modality.upper()
    contents = [_read_folder(folder, dicom_modality, on_file) for folder in folders]
    # The slices of one series may lie below several folders.
    num_slices: Counter[str] = Counter()
    for folder in contents:
        for uid, positions in folder.positions.items():
            num_slices[uid] += len(positions)
    volumes = {uid for uid, number in num_slices.items() if number > 1}
    return [_divide(folder, volumes, on_loose) for folder in contents]


def _read_folder(path: Path, modality: str, on_file: Callable[[], None]) -> _Folder:
    """Read the headers of all DICOM files below a folder; nothing where it cannot be searched."""
    folder = _Folder()
    try:
        for file in dicom_files(path):
            folder.dicom.add(file)
            images = read_frames(file, modality)
            for image in images:
                _add(folder, image)
            on_file()
    except OSError:  # the reader of the scan reports it
        return _Folder()
    return folder


def _add(folder: _Folder, image: Frame | NoSlice) -> None:
    """Note a slice, or a file without one, with its series."""
    series = image.series
    # A file that was cut off lacks its patient and study.
    is_nobodys = series.scope == Series().scope and series.uid not in folder.series
    if isinstance(image, NoSlice) and image.is_unreadable and is_nobodys:
        folder.loose.append(image)
        return
    folder.series.setdefault(series.uid, series)
    files = folder.files.setdefault(series.uid, [])
    # The frames of one file come one after another, and it is noted once.
    if image.path not in files[-1:]:
        files.append(image.path)
    if isinstance(image, Frame):
        folder.positions.setdefault(series.uid, []).append(image.position_xyz_mm)


def _divide(folder: _Folder, volumes: set[str], on_loose: Callable[[NoSlice], None]) -> list[Study]:
    """Divide the series of a folder by study; see `find_studies`."""
    owned = _owned_files(folder, on_loose)
    by_scope: dict[str, list[Series]] = {}
    for series in folder.series.values():
        by_scope.setdefault(series.scope, []).append(series)
    # A volume may lie below several folders: of this one, those with slices here.
    volume_uids = volumes & folder.positions.keys()
    studies = []
    for scope, all_series in by_scope.items():
        volume_series = [series for series in all_series if series.uid in volume_uids]
        positions = {}
        for series in volume_series:
            positions[series.uid] = frozenset(folder.positions[series.uid])
        # Series of an examination may have several dates; the first is its own.
        first = min(volume_series or all_series, key=lambda series: series.date)
        study = Study(
            first.patient,
            first.study,
            first.date,
            scope,
            series=tuple(all_series),
            positions=positions,
            files=_files_of(folder, all_series, owned),
        )
        studies.append(study)
    return sorted(studies, key=lambda study: (study.patient, study.date, study.uid))


def _owned_files(folder: _Folder, on_loose: Callable[[NoSlice], None]) -> dict[str, list[Path]]:
    """Give files that do not tell their series, and broken copies, to the only volume beside them.

    Returns:
        Such files by the UID of that volume.
    """
    slices: list[tuple[str, Path]] = []
    for uid in folder.positions:
        slices += [(uid, path) for path in folder.files[uid]]
    folders = SliceFolders(slices)
    copies = broken_copies(folder.dicom, {path for _, path in slices})
    owned: dict[str, list[Path]] = {}
    for image in [*folder.loose, *map(refused_copy, copies)]:
        owner = folders.owner(image.path)
        if owner is None:
            on_loose(image)
        else:
            owned.setdefault(owner, []).append(image.path)
    return owned


def _files_of(
    folder: _Folder, all_series: Iterable[Series], owned: dict[str, list[Path]]
) -> tuple[Path, ...]:
    """List the files of series, with those that only they can own."""
    files: set[Path] = set()
    for series in all_series:
        files.update(folder.files[series.uid])
        files.update(owned.get(series.uid, []))
    return tuple(sorted(files))
