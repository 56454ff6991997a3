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
from medseg.io.names import joined_name
from medseg.io.read import read_grid
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.wording import first_few

if TYPE_CHECKING:
    from medseg.geometry.grid import VoxelGrid
    from medseg.io.dicom.frames import NoSlice, Series
    from medseg.io.dicom.studies import Study
    from medseg.io.volume import Volume
    from medseg.task import Task

# Cases that a sentence names; it counts the others.
MAX_NAMED = 10


class Archive(NamedTuple):
    """A zip archive that was unpacked.

    Attributes:
        path: The archive.
        folder: Temporary folder that stands for it.
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
        labels: Reference of a case table; None where there is none.
        files: The DICOM files of its study, where they are not all files at the path.
        identity: Patient and date as far as they are known before it is read: of a study by its
            headers, of a row of a case table by its columns.
        refusal: Why it cannot be predicted, a message; "" for one that can be read.
        archive: What it was unpacked from; None for a scan that lies where it was.
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

    @property
    def place(self) -> str:
        """Where the user has it: its path, or that in its archive."""
        return self.in_words_of_user(str(self.path))

    def in_words_of_user(self, text: str) -> str:
        """Name the archive in a message in place of the folder that it was unpacked to."""
        if self.archive is None:
            return text
        return text.replace(str(self.archive.folder), str(self.archive.path))

    def identity_with(self, volume: Volume) -> Identity:
        """Patient, study and series: those of the volume that was read, else what was known."""
        return volume.identity if any(volume.identity) else self.identity

    def reading(self) -> dict[str, Any]:
        """Settings of the reader for this scan, in plain types."""
        return {"series": self.series, "hu": {"slope": self.hu.slope, "offset": self.hu.offset}}

    def paths(self, num_channels: int) -> list[Path | None]:
        """List the file of each channel; None where there is none."""
        return list_channels(self.path, self.more_paths, num_channels)

    def files_by_channel(self, num_channels: int) -> list[tuple[Path, ...]]:
        """List the DICOM files of each channel; empty where they are all files at its path."""
        return [self.files, *[()] * (num_channels - 1)]


def scan_grid(scan: Scan, task: Task) -> VoxelGrid:
    """Read the grid of a scan from its header.

    Raises:
        UserError: If its header cannot be read.
    """
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
            input_format(path)
        scan = Scan(case_name(source[0]), source[0], series, hu, tuple(source[1:]))
        return [scan], dict.fromkeys(source, f"a channel of the case {scan.name}")
    if not is_table:
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
    table = read_case_table(path, labels_column, hu=hu, needs_labels=False)
    scans = [_scan_of_row(case) for case in table if split is None or case.split == split]
    if not scans:
        raise UserError(
            f"input={path}: no case of the table is marked split={split}; give a split of the table"
        )
    # Files of the other splits must not be overwritten either.
    protected = {file: f"a file of the case {name}" for name, file in named_files(path)}
    for case in table:
        protected[case.image] = f"the scan of the case {case.name}"
    return scans, protected


def _scan_of_row(case: Case) -> Scan:
    """Make the scan of a row of a case table."""
    # Without a patient in the table, the case stands for one.
    patient = "" if case.patient == case.name else case.patient
    return Scan(
        case.name,
        case.image,
        case.series,
        case.hu,
        case.more_images,
        case.labels,
        identity=Identity(patient, case.study_date),
    )


class Part(NamedTuple):
    """A study in one of the folders of an input.

    Attributes:
        scan: The folder.
        study: The study.
        num_studies: Number of studies in the folder.
    """

    scan: Scan
    study: Study
    num_studies: int


@dataclass(frozen=True, eq=False)
class StudyCase:
    """A study, or the part of it in one folder, that makes a case.

    Attributes:
        parts: The study in each of the folders over which its series are spread.
    """

    parts: tuple[Part, ...]

    @property
    def scan(self) -> Scan:
        """Scan of its first folder."""
        return self.parts[0].scan

    @property
    def study(self) -> Study:
        """Study of its first folder."""
        return self.parts[0].study

    @property
    def series(self) -> list[Series]:
        """All its series."""
        series: list[Series] = []
        for part in self.parts:
            series += part.study.series
        return series

    @property
    def is_divided(self) -> bool:
        """Whether its files are not those of one folder."""
        return len(self.parts) > 1 or self.parts[0].num_studies > 1

    def goes_on_in(self, part: Part) -> bool:
        """Whether a series of it has slices in a further folder."""
        return any(part.study.shares_series(earlier.study) for earlier in self.parts)


def divide_studies(
    source: Path,
    scans: Sequence[Scan],
    modality: str,
    on_file: Callable[[], None] = lambda: None,
    on_empty: Callable[[Study], None] = lambda _: None,
    on_loose: Callable[[NoSlice], None] = lambda _: None,
) -> list[Scan]:
    """Make each DICOM study of a folder one case, and one of folders over which a series is spread.

    A study without a volume of the modality makes no case, but keeps its folder if it is alone.

    A folder with one study, none of whose series goes on elsewhere, stays a case with its name. A
    folder with several becomes a case for each of them. Cases are left out that cannot hold what
    `series=` names, see `_choose`.

    Args:
        source: The input, a folder.
        scans: Its scans by folder, see `find_scans`.
        modality: Modality of the first channel, as a task names it.
        on_file: Called after each DICOM file whose header was read.
        on_empty: Called with each study that makes no case.
        on_loose: Called with each file that cannot be read and tells no series, beside the slices
            of several: no case has it.
    """
    holders = [scan for scan in scans if may_hold_studies(scan)]
    if not holders:
        return list(scans)
    parts, alone = _find_parts(holders, modality, on_file, on_empty, on_loose)
    result = []
    # Scans without a study stay as they are.
    paths_with_study = {part.scan.path for part in parts}
    for scan in scans:
        if scan.path in alone:
            result.append(scan._replace(identity=alone[scan.path].identity))
        elif scan.path not in paths_with_study:
            result.append(scan)
    result += _scans_of_cases(_join_parts(parts), source, scans)
    return sorted(result, key=lambda scan: scan.name)


def _find_parts(
    holders: Sequence[Scan],
    modality: str,
    on_file: Callable[[], None],
    on_empty: Callable[[Study], None],
    on_loose: Callable[[NoSlice], None],
) -> tuple[list[Part], dict[Path, Study]]:
    """Find the studies of folders, see `divide_studies`.

    Returns:
        The studies with a volume of the modality; and the study of each folder that has no other
        than one without.
    """
    # pydicom is imported only for DICOM.
    from medseg.io.dicom.studies import find_studies

    # A medium is named by its DICOMDIR.
    folders = []
    for scan in holders:
        folders.append(scan.path if scan.path.is_dir() else scan.path.parent)
    parts: list[Part] = []
    alone: dict[Path, Study] = {}
    by_folder = find_studies(folders, modality, on_file, on_loose)
    for scan, all_studies in zip(holders, by_folder, strict=True):
        studies = [study for study in all_studies if study.has_volume]
        parts += [Part(scan, study, len(studies)) for study in studies]
        empty = [study for study in all_studies if not study.has_volume]
        if not studies and len(empty) == 1:
            # Its reader says what is there instead.
            alone[scan.path] = empty[0]
            continue
        for study in empty:
            on_empty(study)
    return parts, alone


def _scans_of_cases(cases: Sequence[StudyCase], source: Path, scans: Sequence[Scan]) -> list[Scan]:
    """Make the scans of the studies that may hold what `series=` names.

    Args:
        cases: All studies.
        source: The input, a folder.
        scans: All its scans by folder, with whose names those of the studies must not clash.
    """
    chosen = set(_choose(cases))
    # The names of divided folders become free: none of their cases keeps them.
    divided_paths: set[Path] = set()
    for case in cases:
        if case.is_divided:
            divided_paths.update(part.scan.path for part in case.parts)
    names = {scan.name for scan in scans if scan.path not in divided_paths}
    result = []
    for case in cases:
        scan = case.scan
        # Cases that are not chosen take their names as well.
        if case.is_divided:
            # Its name does not depend on the choice, so that a later one does not write over it.
            scan = _scan_of(case, source, names)
            names.add(scan.name)
        if case in chosen:
            result.append(scan._replace(identity=case.study.identity))
    return result


def _join_parts(parts: Sequence[Part]) -> list[StudyCase]:
    """Join the parts of a study over which a series is spread."""
    cases: list[StudyCase] = []
    for part in parts:
        # A part may join cases that were apart until now.
        apart = []
        joined_parts: list[Part] = []
        for case in cases:
            if case.goes_on_in(part):
                joined_parts += case.parts
            else:
                apart.append(case)
        cases = [*apart, StudyCase((*joined_parts, part))]
    return cases


def _choose(cases: Sequence[StudyCase]) -> Sequence[StudyCase]:
    """Leave out the cases that cannot hold what `series=` names, if others may hold it.

    A UID is in one study. A number is looked for in every study of its scope, in all folders of
    that study. Where nothing is named so, all cases stay, and their readers list what there is.
    """
    if not cases:
        return cases
    from medseg.io.dicom.choice import parse_series

    # All scans of an input have the same choice.
    choice = parse_series(cases[0].scan.series)
    with_uid = [case for case in cases if any(map(choice.is_uid_of, case.series))]
    if with_uid:
        return with_uid
    in_scope = [case for case in cases if any(map(choice.is_scope_of, case.series))]
    holders = {case for case in in_scope if any(map(choice.selects, case.series))}
    # A study in several folders is answered by one of them; the others have nothing to add.
    answered = {case.study.scope for case in holders if case.study.uid}
    candidates = []
    for case in in_scope:
        if case in holders or case.study.scope not in answered:
            candidates.append(case)
    return candidates or cases


def _scan_of(case: StudyCase, source: Path, names: set[str]) -> Scan:
    """Make the scan of a divided case, with a name that no other case has."""
    from medseg.io.dicom.choice import parse_series

    is_joined = len(case.parts) > 1
    path = case.scan.path
    if is_joined:
        path = source
    # A folder within the input begins the name of its studies.
    folder = ""
    if path != source:
        folder = case.scan.name
    name = _study_name(case.study, folder)
    while name in names:
        name += "_2"
    files: list[Path] = []
    for part in case.parts:
        files += part.study.files
    return case.scan._replace(
        name=name,
        path=path,
        series=parse_series(case.scan.series).within(case.study.scope),
        files=tuple(files),
    )


def may_hold_studies(scan: Scan) -> bool:
    """Whether a scan is a DICOM folder or medium, whose files may belong to several studies."""
    return scan.path.is_dir() or is_dicomdir(scan.path)


def _study_name(study: Study, folder: str) -> str:
    """Name the case of a study after its folder, patient and date."""
    name = joined_name([study.patient, study.date])
    return "_".join(filter(None, (folder, name))) or "study"


def describe_studies(scans: Sequence[Scan]) -> str:
    """Say that cases are studies instead of folders; "" where nothing was divided or joined."""
    names = [scan.name for scan in scans if scan.files]
    if not names:
        return ""
    number = "1 case" if len(names) == 1 else f"{len(names)} cases"
    named = first_few(names, MAX_NAMED)
    return f"by the patients and studies in their headers the DICOM files are {number}: {named}"


def describe_empty(studies: Sequence[Study]) -> str:
    """Name the studies that make no case; "" without one."""
    if not studies:
        return ""
    number = "1 study has" if len(studies) == 1 else f"{len(studies)} studies have"
    names = [str(study.identity) or "unknown patient" for study in studies]
    return (
        f"{number} no scan of the task's modality: {first_few(names, MAX_NAMED, '; ')}; "
        "`medseg list` says why"
    )


def describe_loose(images: Sequence[NoSlice]) -> str:
    """Name files that cannot be read and belong to no case; "" without one."""
    if not images:
        return ""
    number = "1 file" if len(images) == 1 else f"{len(images)} files"
    names = first_few([f"'{image.path.name}'" for image in images], 1)
    reason = images[0].reason.rstrip(".")
    return (
        f"the scans go on without {number} that may be a slice of any of them, since nothing tells "
        f"the series: {names}: {reason}"
    )


def join_channels(scans: Sequence[Scan], num_channels: int) -> list[Scan]:
    """Join the channels of a case that are numbered as nnU-Net does: `<case>_0000`, `<case>_0001`.

    Files are joined to a case only if there is one for each channel of the task: such numbers may
    also count scans.

    Args:
        scans: Scans of a folder, or one scan, by name.
        num_channels: Channels of the task.
    """
    # A study in a folder of several is no file of a channel.
    by_name = {scan.name: scan for scan in scans if not scan.files}
    numbers = [f"{index:04d}" for index in range(num_channels)]
    joined: dict[str, Scan] = {}
    for scan in scans:
        case, _, number = scan.name.rpartition("_")
        paths = []
        if number in numbers and case and case not in by_name:
            paths = _paths_of_channels(case, numbers, by_name)
        if paths:
            joined[case] = scan._replace(name=case, path=paths[0], more_paths=tuple(paths[1:]))
        else:
            joined[scan.name] = scan
    return list(joined.values())


def _paths_of_channels(
    case: str, numbers: Sequence[str], by_name: Mapping[str, Scan]
) -> list[Path]:
    """List the file of each channel of a case; none where a channel is missing or there are more.

    Args:
        case: Name of the case.
        numbers: Numbers of the channels of the task, from `0000`.
        by_name: Scans by name, that is `<case>_<number>`.
    """
    channels = [by_name.get(f"{case}_{number}") for number in numbers]
    has_more = f"{case}_{len(numbers):04d}" in by_name
    if has_more or None in channels:
        return []
    return [channel.path for channel in channels if channel is not None]


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
    suffix = volume_suffix(output)
    if not output.is_dir() and suffix in WRITTEN_SUFFIXES:
        if len(names) != 1:
            raise UserError(f"output={output}: the input has {len(names)} cases, so give a folder")
        return [output]
    # The file of one scan with another suffix is a mistyped name, and no new folder.
    is_mistyped = is_one_scan and bool(output.suffix)
    is_new_folder = suffix is None and not output.exists() and not is_mistyped
    if not output.is_dir() and not is_new_folder:
        suffixes = ", ".join(WRITTEN_SUFFIXES)
        raise UserError(f"output={output}: give a name that ends in {suffixes}, or a folder")
    return [output / f"{name}.nii.gz" for name in names]


def check_outputs(outputs: list[Path], protected: Mapping[Path, str]) -> None:
    """Refuse outputs that would overwrite a file of the input, or each other, also through links.

    Args:
        outputs: Paths of the label maps.
        protected: Description of each file of the input, from `find_scans`.

    Raises:
        UserError: If a path would be written twice or overwrite an input.
    """
    # Not `Path.resolve`, which fails for a link to itself.
    inputs = {os.path.realpath(path): description for path, description in protected.items()}
    earlier_outputs: dict[str, Path] = {}
    for output in outputs:
        target = os.path.realpath(output)
        if target in inputs:
            raise UserError(
                f"{output} is {inputs[target]} and would be overwritten; give another output"
            )
        # Some file systems treat two encodings of ü as one name.
        key = unicodedata.normalize("NFC", target)
        if key in earlier_outputs:
            raise UserError(
                f"{earlier_outputs[key]} and {output} would be one file; rename one of the cases"
            )
        earlier_outputs[key] = output
