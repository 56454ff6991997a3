"""Scans of an input, and the paths of their results."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from medseg.data.case_table import Case, list_channels, named_files, read_case_table
from medseg.errors import UserError
from medseg.io.identity import UNKNOWN, Identity
from medseg.io.inputs import (
    WRITTEN_SUFFIXES,
    case_name,
    input_format,
    is_dicomdir,
    list_inputs,
    volume_suffix,
)
from medseg.io.names import free_name, joined_name
from medseg.io.read import read_grid
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.wording import counted, first_few

if TYPE_CHECKING:
    from medseg.geometry.grid import VoxelGrid
    from medseg.io.dicom.frames import NoSlice, Series
    from medseg.io.dicom.studies import Study
    from medseg.io.volume import Volume
    from medseg.task import Task

# Largest number of cases or studies that a sentence names; it counts the others.
MAX_NAMED = 10
# Longest name of a file or folder, in bytes, on the file systems of Linux and macOS.
MAX_NAME_BYTES = 255


class Archive(NamedTuple):
    """A zip archive that was unpacked.

    Attributes:
        path: The archive.
        folder: Temporary folder that holds its files.
    """

    path: Path
    folder: Path


class Scan(NamedTuple):
    """A scan to predict.

    Attributes:
        name: Name of the case.
        path: Path of the file or folder.
        series: Which DICOM series, where the path holds several.
        hu: Scale that turns its values into HU.
        more_paths: Files of the channels after the first; None where a case table leaves one empty.
        labels: Reference labels, from a case table; None where there are none.
        files: The DICOM files of its study; empty if every file at the path belongs to it.
        identity: Patient and date as far as they are known before the scan is read: from the DICOM
            headers of a study, or from the columns of a case table.
        refusal: Message that says why it cannot be predicted; "" if it can.
        archive: Archive that it was unpacked from; None for a scan that lies where it was.
        choice_warning: What the report warns of in the choice of the series; "" for nothing.
    """

    name: str
    path: Path
    series: str | None = None
    hu: HuScale = AS_STORED
    more_paths: tuple[Path | None, ...] = ()
    labels: Path | None = None
    files: tuple[Path, ...] = ()
    identity: Identity = UNKNOWN
    refusal: str = ""
    archive: Archive | None = None
    choice_warning: str = ""

    @property
    def place(self) -> str:
        """Where the user has it: its path, or its path in the archive."""
        return self.in_words_of_user(str(self.path))

    def in_words_of_user(self, text: str) -> str:
        """Name the archive in a message in place of the folder to which it was unpacked."""
        if self.archive is None:
            return text
        return text.replace(str(self.archive.folder), str(self.archive.path))

    def identity_with(self, volume: Volume) -> Identity:
        """Return patient, study and series as the read volume states them, else as known before."""
        has_own = any(volume.identity)  # at least one field is not empty
        return volume.identity if has_own else self.identity

    def reading(self) -> dict[str, Any]:
        """List the settings with which this scan is read, for its JSON report."""
        return {"series": self.series, "hu": {"slope": self.hu.slope, "offset": self.hu.offset}}

    def paths(self, num_channels: int) -> list[Path | None]:
        """List the file of each channel; None for a channel without a file."""
        return list_channels(self.path, self.more_paths, num_channels)

    def files_by_channel(self, num_channels: int) -> list[tuple[Path, ...]]:
        """List the DICOM files of each channel; empty if every file at its path belongs to it."""
        # Only the first channel may be one of several studies at its path.
        files_of_other_channels = [()] * (num_channels - 1)
        return [self.files, *files_of_other_channels]


def scan_grid(scan: Scan, task: Task) -> VoxelGrid:
    """Read the grid of a scan from its header.

    Raises:
        UserError: If its header cannot be read.
    """
    # Several channels may be volumes of one file, such as a 4D NIfTI file.
    num_volumes = scan.paths(len(task.channels)).count(scan.path)
    return read_grid(scan.path, scan.series, task.channels[0].modality, num_volumes, scan.files)


def find_scans(
    source: Path | Sequence[Path],
    split: str | None,
    series: str | None = None,
    hu: HuScale = AS_STORED,
    labels_column: str | None = None,
) -> tuple[list[Scan], dict[Path, str]]:
    """Find every scan of an input.

    Args:
        source: Scan, DICOM folder, folder of scans, or case table; or the channels of one case, a
            scan each.
        split: Only this split of a case table.
        series: Which DICOM series of each case is taken.
        hu: HU scale of the cases that have none of their own in the table.
        labels_column: Column of the case table with references; it may be absent.

    Returns:
        The scans to predict; and a description of each file and folder of the input, none of which
        may be overwritten.

    Raises:
        UserError: If there is nothing to predict.
    """
    is_table = isinstance(source, Path) and source.suffix.lower() == ".csv"
    if split is not None and not is_table:
        name = source if isinstance(source, Path) else list(map(str, source))
        raise UserError(f"split={split}: input={name} is not a case table; leave split out")
    if not isinstance(source, Path):
        for path in source:
            input_format(path)  # refuses a file of no known format
        scan = Scan(case_name(source[0]), source[0], series, hu, tuple(source[1:]))
        return [scan], dict.fromkeys(source, f"a channel of the case {scan.name}")
    if not is_table:
        # `series=` asks for DICOM, so volume files beside DICOM files are no reason to refuse.
        paths = list_inputs(source, is_dicom=series is not None)
        scans = [Scan(name, path, series, hu) for name, path in paths]
        return scans, {scan.path: f"the scan of the case {scan.name}" for scan in scans}
    if series is not None:
        raise UserError(
            f"series={series}: a case table has a column series for that; "
            f"fill in that column of input={source}"
        )
    return _scans_of_table(source, split, hu, labels_column)


def _scans_of_table(
    path: Path, split: str | None, hu: HuScale, labels_column: str | None
) -> tuple[list[Scan], dict[Path, str]]:
    """List the scans of a split of a case table, and describe its files; see `find_scans`."""
    table = read_case_table(path, labels_column, hu=hu, needs_labels=False, is_divided=False)
    scans = [_scan_of_row(case) for case in table if split is None or case.split == split]
    if not scans:
        raise UserError(
            f"input={path}: no case of the table is marked split={split}; give a split of the table"
        )
    # Files of the other splits must not be overwritten either, so all cases are described. The file
    # of a scan is among the named files too: it is described as a scan in the end.
    protected = {file: f"a file of the case {name}" for name, file in named_files(path)}
    for case in table:
        protected[case.image] = f"the scan of the case {case.name}"
    protected[path] = "the case table"
    return scans, protected


def _scan_of_row(case: Case) -> Scan:
    """Make the scan of a row of a case table."""
    # A table without patients names each patient like the case, which is no patient ID.
    patient = "" if case.patient == case.name else case.patient
    return Scan(
        name=case.name,
        path=case.image,
        series=case.series,
        hu=case.hu,
        more_paths=case.more_images,
        labels=case.labels,
        identity=Identity(patient, case.study_date),
    )


class FolderStudy(NamedTuple):
    """The series of one study in one of the folders of an input.

    Attributes:
        scan: The folder, as a scan.
        study: The study, with its series in this folder.
        num_studies: Number of studies with a volume in the folder.
    """

    scan: Scan
    study: Study
    num_studies: int


# `eq=False` keeps equality and hash by identity, so that cases can be members of a set.
@dataclass(frozen=True, eq=False)
class StudyCase:
    """A study, or the part of one, that makes a case.

    A study in several folders is one case only if the slices of a series are spread over them;
    otherwise each folder makes a case.

    Attributes:
        parts: The parts of the study, one for each folder.
    """

    parts: tuple[FolderStudy, ...]

    @property
    def scan(self) -> Scan:
        """The first of its folders, as a scan."""
        return self.parts[0].scan

    @property
    def study(self) -> Study:
        """The part of the study in the first folder; patient and date are the same in all."""
        return self.parts[0].study

    @property
    def series(self) -> list[Series]:
        """Series of all parts; a series that is spread over folders is listed once for each."""
        series: list[Series] = []
        for part in self.parts:
            series += part.study.series
        return series

    @property
    def is_divided(self) -> bool:
        """Whether the case differs from a whole folder: it has several, or shares its only one."""
        has_several_folders = len(self.parts) > 1
        shares_its_folder = self.parts[0].num_studies > 1
        return has_several_folders or shares_its_folder

    def goes_on_in(self, part: FolderStudy) -> bool:
        """Tell whether one of the case's series has further slices in the folder of `part`."""
        return any(part.study.shares_series(earlier.study) for earlier in self.parts)


def divide_studies(
    source: Path,
    scans: Sequence[Scan],
    modality: str,
    on_file: Callable[[], None] = lambda: None,
    on_empty: Callable[[Study], None] = lambda _: None,
    on_loose: Callable[[NoSlice], None] = lambda _: None,
) -> list[Scan]:
    """Divide the scans of a folder into cases by the DICOM studies in their headers.

    * A folder with one study, none of whose series goes on elsewhere, stays a case with its name.
    * A folder with several studies becomes a case for each of them.
    * Folders over which the slices of one series are spread become one case.
    * A study without a volume of the modality makes no case. If it is alone in its folder, the
      folder stays a case, whose reader says what is there instead.

    Cases that cannot hold what `series=` names are left out, see `_cases_with_series`.

    Args:
        source: The input, a folder.
        scans: Its scans by folder, see `find_scans`.
        modality: Modality of the first channel, as a task names it.
        on_file: Called after each DICOM file whose header was read.
        on_empty: Called with each study that makes no case.
        on_loose: Called with each unreadable file that belongs to no case: its header names no
            series, and the files beside it are of several series.

    Returns:
        The cases, sorted by name. Scans that are no DICOM stay as they are.
    """
    dicom_scans = [scan for scan in scans if may_hold_studies(scan)]
    if not dicom_scans:
        return list(scans)
    parts, lone_empty = _find_parts(dicom_scans, modality, on_file, on_empty, on_loose)
    paths_with_study = {part.scan.path for part in parts}
    result = []
    for scan in scans:
        if scan.path in lone_empty:
            result.append(scan._replace(identity=lone_empty[scan.path].identity))
        elif scan.path not in paths_with_study:
            # No DICOM, or a folder in which no study has a volume: its reader says what is there.
            result.append(scan)
    result += _scans_of_cases(_join_parts(parts), source, scans)
    return sorted(result, key=lambda scan: scan.name)


def _find_parts(
    dicom_scans: Sequence[Scan],
    modality: str,
    on_file: Callable[[], None],
    on_empty: Callable[[Study], None],
    on_loose: Callable[[NoSlice], None],
) -> tuple[list[FolderStudy], dict[Path, Study]]:
    """Find the studies in folders; arguments as for `divide_studies`.

    Returns:
        The studies with a volume of the modality, by folder; and for each folder whose only study
        has no such volume, its path to that study.
    """
    # pydicom is imported only for DICOM.
    from medseg.io.dicom.studies import find_studies

    folders = []
    for scan in dicom_scans:
        # A scan on a DICOM medium, such as a CD, has the path of the file DICOMDIR, which lies
        # beside the images.
        folders.append(scan.path if scan.path.is_dir() else scan.path.parent)
    parts: list[FolderStudy] = []
    lone_empty: dict[Path, Study] = {}
    studies_by_folder = find_studies(folders, modality, on_file, on_loose)
    for scan, studies in zip(dicom_scans, studies_by_folder, strict=True):
        with_volume = [study for study in studies if study.has_volume]
        parts += [FolderStudy(scan, study, len(with_volume)) for study in with_volume]
        empty = [study for study in studies if not study.has_volume]
        is_alone = not with_volume and len(empty) == 1
        if is_alone:
            lone_empty[scan.path] = empty[0]
            continue
        for study in empty:
            on_empty(study)
    return parts, lone_empty


def _scans_of_cases(cases: Sequence[StudyCase], source: Path, scans: Sequence[Scan]) -> list[Scan]:
    """Make the scans of the cases that may hold what `series=` names.

    Args:
        cases: The cases of all studies.
        source: The input, a folder.
        scans: All scans of the input by folder; the cases must not take their names.
    """
    chosen = set(_cases_with_series(cases))
    divided_paths: set[Path] = set()
    for case in cases:
        if case.is_divided:
            divided_paths.update(part.scan.path for part in case.parts)
    # The names of divided folders are free, since none of their cases keeps them.
    taken_names = {scan.name for scan in scans if scan.path not in divided_paths}
    result = []
    for case in cases:
        scan = case.scan
        # Cases that are not chosen take a name too. So a name does not depend on `series=`, and a
        # prediction of another series does not overwrite the results of this one.
        if case.is_divided:
            scan = _scan_of_divided(case, source, taken_names)
            taken_names.add(scan.name)
        if case in chosen:
            result.append(scan._replace(identity=case.study.identity))
    return result


def _join_parts(parts: Sequence[FolderStudy]) -> list[StudyCase]:
    """Join the parts of a study that share a series; every other part is a case of its own."""
    cases: list[StudyCase] = []
    for part in parts:
        # A part may share series with several cases so far: all of them become one case.
        unrelated = []
        joined_parts: list[FolderStudy] = []
        for case in cases:
            if case.goes_on_in(part):
                joined_parts += case.parts
            else:
                unrelated.append(case)
        cases = [*unrelated, StudyCase((*joined_parts, part))]
    return cases


def _cases_with_series(cases: Sequence[StudyCase]) -> Sequence[StudyCase]:
    """Leave out the cases that cannot hold what `series=` names, if others may hold it.

    `series=` names a series by its UID, or by a Series Number, which many studies may use, with an
    optional scope: the patient, the study or both. A UID keeps only the cases that hold it. A
    number keeps the cases in its scope, except those whose study has the series in another folder.
    If no case is left, all stay, and their readers list the series that there are.
    """
    if not cases:
        return cases
    from medseg.io.dicom.choice import parse_series

    # The choice is `series=` of the command, the same for all scans of an input.
    choice = parse_series(cases[0].scan.series)
    with_uid = [case for case in cases if any(map(choice.is_uid_of, case.series))]
    if with_uid:
        return with_uid
    in_scope = [case for case in cases if any(map(choice.is_scope_of, case.series))]
    with_series = {case for case in in_scope if any(map(choice.selects, case.series))}
    # A study whose series are in several folders may make several cases. If one of them holds the
    # series, the others are left out. Cases of other studies in scope stay: their readers report
    # that the series is missing. Only the UID of a study tells that two folders are of one study.
    studies_with_series = {case.study.scope for case in with_series if case.study.uid}
    candidates = []
    for case in in_scope:
        if case in with_series or case.study.scope not in studies_with_series:
            candidates.append(case)
    return candidates or cases


def _scan_of_divided(case: StudyCase, source: Path, taken_names: set[str]) -> Scan:
    """Make the scan of a divided case, with a name that no other case has."""
    from medseg.io.dicom.choice import parse_series

    is_joined = len(case.parts) > 1
    # No single folder of a joined case holds all of its files; the input does.
    path = source if is_joined else case.scan.path
    # The name of a study in a folder within the input begins with that folder.
    folder_name = "" if path == source else case.scan.name
    name = free_name(_study_name(case.study, folder_name), taken_names)
    files: list[Path] = []
    for part in case.parts:
        files += part.study.files
    choice = parse_series(case.scan.series)
    series = case.scan.series
    # A choice of another patient or study stays as it is, so that the reader refuses the case.
    if any(map(choice.is_scope_of, case.series)):
        series = choice.within(case.study.scope)
    # The path holds other studies too, so `series` and `files` are restricted to this one.
    return case.scan._replace(name=name, path=path, series=series, files=tuple(files))


def may_hold_studies(scan: Scan) -> bool:
    """Tell whether a scan is a DICOM folder or medium, whose files may be of several studies."""
    return scan.path.is_dir() or is_dicomdir(scan.path)


def _study_name(study: Study, folder_name: str) -> str:
    """Name the case of a study after its folder ("" for none), patient and date."""
    patient_and_date = joined_name([study.patient, study.date])
    known_parts = [part for part in (folder_name, patient_and_date) if part]
    return "_".join(known_parts) or "study"


def describe_studies(scans: Sequence[Scan]) -> str:
    """Say that cases are studies instead of folders; "" where nothing was divided or joined."""
    # Only scans of divided or joined folders list their files.
    names = [scan.name for scan in scans if scan.files]
    if not names:
        return ""
    number = counted(len(names), "case")
    named = first_few(names, MAX_NAMED)
    return f"by the patients and studies in their headers the DICOM files are {number}: {named}"


def describe_empty(studies: Sequence[Study]) -> str:
    """Say which studies make no case; "" if all do."""
    if not studies:
        return ""
    number = "1 study has" if len(studies) == 1 else f"{len(studies)} studies have"
    names = [str(study.identity) or "unknown patient" for study in studies]
    return (
        f"{number} no scan of the task's modality: {first_few(names, MAX_NAMED, '; ')}; "
        "`medseg list` says why"
    )


def describe_loose(images: Sequence[NoSlice]) -> str:
    """Say which files cannot be read and belong to no case, with the first one's reason.

    The text is "" if there are none.
    """
    if not images:
        return ""
    number = counted(len(images), "file")
    names = first_few([f"'{image.path.name}'" for image in images], 1)
    reason = images[0].reason.rstrip(".")
    return (
        f"the scans go on without {number} that may be a slice of any of them, since nothing tells "
        f"the series: {names}: {reason}"
    )


def may_be_channel(scan: Scan) -> bool:
    """Tell whether a scan may be a further channel of a case, see `join_channels`."""
    return scan.name.endswith("_0001")


def join_channels(scans: Sequence[Scan], num_channels: int) -> list[Scan]:
    """Join the channels of a case that are numbered as nnU-Net does: `<case>_0000`, `<case>_0001`.

    Files are joined to a case only if there is exactly one for each channel of the task: such
    numbers may also count scans.

    Args:
        scans: Scans of a folder, or one scan.
        num_channels: Channels of the task.
    """
    # Scans with `files` are studies that were divided by their headers, not files of channels.
    by_name = {scan.name: scan for scan in scans if not scan.files}
    numbers = [f"{index:04d}" for index in range(num_channels)]
    # By name, since the loop meets a joined case once for each of its channels.
    joined: dict[str, Scan] = {}
    for scan in scans:
        case, _, number = scan.name.rpartition("_")
        is_numbered = case != "" and number in numbers
        paths = []
        # The joined case must not take the name of another scan.
        if is_numbered and case not in by_name:
            paths = _paths_of_channels(case, numbers, by_name)
        if paths:
            joined[case] = scan._replace(name=case, path=paths[0], more_paths=tuple(paths[1:]))
        else:
            joined[scan.name] = scan
    return list(joined.values())


def _paths_of_channels(
    case: str, numbers: Sequence[str], by_name: Mapping[str, Scan]
) -> list[Path]:
    """List the file of each channel of a case; empty if one is missing, or there are more.

    Args:
        case: Name of the case.
        numbers: Numbers of the channels of the task, from `0000`.
        by_name: Scans by name; the scan of a channel is called `<case>_<number>`.
    """
    has_more = f"{case}_{len(numbers):04d}" in by_name
    if has_more:
        return []
    paths = []
    for number in numbers:
        channel = by_name.get(f"{case}_{number}")
        if channel is None:
            return []
        paths.append(channel.path)
    return paths


def output_paths(output: Path, names: list[str], *, is_one_scan: bool) -> list[Path]:
    """Choose the paths of the label maps: the given file, or `<case>.nii.gz` in a folder.

    Args:
        output: File, or a folder that may not exist yet.
        names: Names of the cases.
        is_one_scan: Whether the input is one scan; a new name with a suffix then means a file.

    Raises:
        UserError: If several cases would go into one file, the suffix is no format to write, or a
            file exists where a folder is needed.
    """
    # Unlike `Path.is_dir`, this takes a name that is too long, which `check_outputs` refuses.
    is_folder = os.path.isdir(output)
    if not is_folder:
        suffix = volume_suffix(output)
        if suffix in WRITTEN_SUFFIXES:
            if len(names) != 1:
                raise UserError(
                    f"output={output}: the input has {len(names)} cases, so give a folder"
                )
            return [output]
        # A new name without the suffix of a volume is a new folder. For one scan a name with
        # another suffix, such as `labels.nii.gx`, is rather a mistyped file.
        is_mistyped = is_one_scan and bool(output.suffix)
        is_new_folder = suffix is None and not os.path.exists(output) and not is_mistyped
        if not is_new_folder:
            suffixes = ", ".join(WRITTEN_SUFFIXES)
            raise UserError(f"output={output}: give a name that ends in {suffixes}, or a folder")
    return [output / f"{name}.nii.gz" for name in names]


def check_outputs(outputs: list[Path], protected: Mapping[Path, str]) -> None:
    """Refuse outputs that would overwrite a file of the input, or each other, also through links.

    A name that is too long for a file is refused too.

    Args:
        outputs: Paths of the label maps.
        protected: Description of each file of the input, from `find_scans`.

    Raises:
        UserError: If a path would be written twice or overwrite an input, or is too long.
    """
    # Links are followed by `realpath`, since `Path.resolve` fails for a link to itself.
    inputs = {os.path.realpath(path): description for path, description in protected.items()}
    earlier_outputs: dict[str, Path] = {}
    for output in outputs:
        if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in output.parts):
            raise UserError(
                f"{output}: the name is too long for a file; rename the case or give another output"
            )
        target = os.path.realpath(output)
        if target in inputs:
            raise UserError(
                f"{output} is {inputs[target]} and would be overwritten; give another output"
            )
        # Unicode can write ü as one character or as two. Some file systems take both spellings for
        # the same name.
        normal_target = unicodedata.normalize("NFC", target)
        if normal_target in earlier_outputs:
            raise UserError(
                f"{earlier_outputs[normal_target]} and {output} would be one file; rename one of "
                "the cases"
            )
        earlier_outputs[normal_target] = output
