"""Search for the studies below folders: examinations of patients, by the headers of all files."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medseg.io.dicom.frames import Frame, NoSlice, Series, read_frames
from medseg.io.dicom.stacks import SliceFolders, broken_copies, lacks_study, refused_copy
from medseg.io.identity import Identity, written_date
from medseg.io.inputs import dicom_files

# Centre of the first pixel of a slice, LPS in mm.
Position = tuple[float, ...]


@dataclass(frozen=True)
class Study:
    """An examination of a patient, as far as its files lie below one folder.

    Attributes:
        patient: Patient ID, or "".
        uid: Study Instance UID, or "".
        date: Study Date as DICOM writes it, or "".
        scope: Value by which `series=<scope>:` chooses it, see `Series.scope`.
        series: Its series, also those that are no volume.
        positions: Positions of the slices of each volume of the requested modality, by Series
            Instance UID; empty if there is no volume.
        files: Its files, and unreadable files of unknown study that belong to one of its volumes.
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
        """Patient and date, without a series."""
        return Identity(self.patient, written_date(self.date))

    @property
    def has_volume(self) -> bool:
        """Whether it has a volume: a series of at least two slices."""
        return bool(self.positions)

    def shares_series(self, other: "Study") -> bool:
        """Whether a series of this study continues in another one, below another folder.

        A series with the same positions there is a copy, and does not count.
        """
        if not self.uid or self.scope != other.scope:
            return False
        common_uids = self.positions.keys() & other.positions.keys()
        return any(self.positions[uid] != other.positions[uid] for uid in common_uids)


@dataclass
class _Folder:
    """Content of the DICOM files below a folder, from their headers.

    Attributes:
        series: The series by UID, each as the first of its `files` describes it.
        files: Files by the UID of their series.
        loose: Files that cannot be read and whose study is unknown.
        dicom: All DICOM files.
        slices: Series Instance UID and file of each slice; a file of several frames occurs once for
            each frame.
        positions: Positions of the slices by the UID of their series.
    """

    series: dict[str, Series] = field(default_factory=dict)
    files: dict[str, list[Path]] = field(default_factory=dict)
    loose: list[NoSlice] = field(default_factory=list)
    dicom: set[Path] = field(default_factory=set)
    slices: list[tuple[str, Path]] = field(default_factory=list)
    positions: dict[str, list[Position]] = field(default_factory=dict)


def find_studies(
    folders: Sequence[Path],
    modality: str,
    on_file: Callable[[], None] = lambda: None,
    on_loose: Callable[[NoSlice], None] = lambda _: None,
) -> list[list[Study]]:
    """Find the studies whose files lie below folders.

    Localisers, reports, structures and other modalities make no volume of a study. All slices of a
    series belong to the study of the first one, even where their headers disagree; the reader of
    the series later refuses several patients, and warns of several studies.

    Args:
        folders: Where to look, to the bottom.
        modality: Modality of a channel, as a task names it: `ct`, `mr`, or `other` for any.
        on_file: Called after each file.
        on_loose: Called with each unreadable file that cannot be assigned to a study: its header
            names none, and `SliceFolders.owner` finds no volume for it.

    Returns:
        The studies of each folder, sorted by patient and date; an empty list for a folder that
        cannot be searched.
    """
    dicom_modality = "" if modality == "other" else modality.upper()
    contents = [_read_folder(folder, dicom_modality, on_file) for folder in folders]
    # The slices of one series may lie below several folders: count them over all.
    num_slices: Counter[str] = Counter()
    for folder in contents:
        for uid, positions in folder.positions.items():
            num_slices[uid] += len(positions)
    volume_uids = {uid for uid, number in num_slices.items() if number > 1}
    return [_divide(folder, volume_uids, on_loose) for folder in contents]


def _read_folder(path: Path, modality: str, on_file: Callable[[], None]) -> _Folder:
    """Read the headers of all DICOM files below a folder; empty if it cannot be searched."""
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
    """Add a slice, or a file without one, to the series of a folder."""
    series = image.series
    # Patient and study of the series are known where another file of the series was read before.
    if lacks_study(image) and series.uid not in folder.series:
        assert isinstance(image, NoSlice), "slices can be read"
        folder.loose.append(image)
        return
    folder.series.setdefault(series.uid, series)
    files = folder.files.setdefault(series.uid, [])
    # A file of several frames is added once; its frames follow one another.
    if not files or files[-1] != image.path:
        files.append(image.path)
    if isinstance(image, Frame):
        folder.slices.append((series.uid, image.path))
        folder.positions.setdefault(series.uid, []).append(image.position_xyz_mm)


def _divide(
    folder: _Folder, volume_uids: set[str], on_loose: Callable[[NoSlice], None]
) -> list[Study]:
    """Divide the series of a folder by study.

    Args:
        folder: What was read of the files below a folder.
        volume_uids: Series Instance UIDs of all volumes, below any folder.
        on_loose: As for `find_studies`.
    """
    owned_files = _owned_files(folder, on_loose)
    by_scope: dict[str, list[Series]] = {}
    for series in folder.series.values():
        by_scope.setdefault(series.scope, []).append(series)
    studies = []
    for scope, all_series in by_scope.items():
        volumes = []
        positions = {}
        for series in all_series:
            # A series without a slice in this folder is no volume of it.
            if series.uid in volume_uids and series.uid in folder.positions:
                volumes.append(series)
                positions[series.uid] = frozenset(folder.positions[series.uid])
        # Series of one study may have several dates, or none. The earliest date of its volumes
        # counts or, without a volume, the earliest of all series.
        first = min(volumes or all_series, key=lambda series: (series.date == "", series.date))
        study = Study(
            patient=first.patient,
            uid=first.study,
            date=first.date,
            scope=scope,
            series=tuple(all_series),
            positions=positions,
            files=_files_of(folder, all_series, owned_files),
        )
        studies.append(study)
    return sorted(studies, key=lambda study: (study.patient, study.date, study.uid))


def _owned_files(folder: _Folder, on_loose: Callable[[NoSlice], None]) -> dict[str, list[Path]]:
    """Assign files of unknown study, and broken copies, to volumes, see `SliceFolders.owner`.

    Returns:
        The assigned files by the UID of their volume; `on_loose` gets the others.
    """
    slice_folders = SliceFolders(folder.slices)
    slice_paths = {path for _, path in folder.slices}
    copies = map(refused_copy, broken_copies(folder.dicom, slice_paths))
    owned_files: dict[str, list[Path]] = {}
    for image in [*folder.loose, *copies]:
        owner = slice_folders.owner(image.path)
        if owner is None:
            on_loose(image)
        else:
            owned_files.setdefault(owner, []).append(image.path)
    return owned_files


def _files_of(
    folder: _Folder, all_series: Iterable[Series], owned_files: dict[str, list[Path]]
) -> tuple[Path, ...]:
    """List the files of some series, with the files that `_owned_files` assigns to them."""
    files: set[Path] = set()
    for series in all_series:
        files.update(folder.files[series.uid])
        files.update(owned_files.get(series.uid, []))
    return tuple(sorted(files))
