"""Scans of an input, and the paths of their results."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from medseg.data.case_table import list_channels, named_files, read_case_table
from medseg.errors import UserError, require
from medseg.io.inputs import (
    WRITTEN_SUFFIXES,
    case_name,
    input_format,
    is_dicomdir,
    list_inputs,
    volume_suffix,
)
from medseg.preprocess.scale import AS_STORED, HuScale

if TYPE_CHECKING:
    from medseg.io.dicom.studies import Study

# Cases that a sentence names; it counts the others.
MAX_NAMED = 10


class Scan(NamedTuple):
    """A scan to predict.

    Attributes:
        name: Name of the case.
        path: Path of the file or folder.
        series: Which DICOM series, where the path holds several.
        hu: Scale that turns its values into HU.
        more_paths: Files of the channels after the first; None where a case table leaves one empty.
        labels: Reference of a case table; None where there is none.
    """

    name: str
    path: Path
    series: str | None = None
    hu: HuScale = AS_STORED
    more_paths: tuple[Path | None, ...] = ()
    labels: Path | None = None

    def reading(self) -> dict[str, Any]:
        """Settings of the reader for this scan, in plain types."""
        return {"series": self.series, "hu": {"slope": self.hu.slope, "offset": self.hu.offset}}

    def paths(self, num_channels: int) -> list[Path | None]:
        """List the file of each channel; None where there is none."""
        return list_channels(self.path, self.more_paths, num_channels)


def find_scans(
    source: Path | Sequence[Path],
    split: str | None,
    series: str | None = None,
    hu: HuScale = AS_STORED,
    labels_column: str | None = None,
) -> tuple[list[Scan], dict[Path, str]]:
    """Find every scan of an input.

    Args:
        source: Scan, DICOM folder, folder of scans, or case table; or the channels of one case, a scan each.
        split: Only this split of a case table.
        series: Which DICOM series of each case is taken.
        hu: HU scale of the cases that have none of their own in the table.
        labels_column: Column of the case table with references; it may be absent.

    Returns:
        The scans to predict; and a description of each file and folder of the input, none of which may be overwritten.

    Raises:
        UserError: If there is nothing to predict.
    """
    if not isinstance(source, Path):
        require(split is None, f"split={split}: input={list(map(str, source))} is not a case table; leave split out")
        for path in source:
            input_format(path)
        scan = Scan(case_name(source[0]), source[0], series, hu, tuple(source[1:]))
        return [scan], dict.fromkeys(source, f"a channel of the case {scan.name}")
    if source.suffix.lower() != ".csv":
        require(split is None, f"split={split}: input={source} is not a case table; leave split out")
        paths = list_inputs(source, is_dicom=series is not None)
        scans = [Scan(name, path, series, hu) for name, path in paths]
        return scans, {scan.path: f"the scan of the case {scan.name}" for scan in scans}
    require(series is None, f"series={series}: a case table has a column series for that; fill in that column of input={source}")
    table = read_case_table(source, labels_column, hu=hu, needs_labels=False)
    chosen = [
        Scan(case.name, case.image, case.series, case.hu, case.more_images, case.labels)
        for case in table
        if split is None or case.split == split
    ]
    require(bool(chosen), f"input={source}: no case of the table is marked split={split}; give a split of the table")
    protected = {path: f"a file of the case {name}" for name, path in named_files(source)}
    return chosen, protected | {case.image: f"the scan of the case {case.name}" for case in table}


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


def divide_studies(source: Path, scans: Sequence[Scan], modality: str) -> list[Scan]:
    """Make each DICOM study one case, wherever its files lie.

    A folder with one study that has no files elsewhere stays a case with its name. A folder with several becomes a
    case for each of them; a study in several folders becomes one.

    Args:
        source: The input, a folder.
        scans: Its scans by folder, see `find_scans`.
        modality: Modality of the first channel, as a task names it.
    """
    parts: list[Part] = []
    for scan in scans:
        studies = _studies_of(scan, modality)
        parts += [Part(scan, study, len(studies)) for study in studies]
    by_scope: dict[str, list[Part]] = {}
    for part in parts:
        # Files without identities are told apart by their folders alone.
        key = part.study.scope if part.study.uid else f"{part.study.scope} {part.scan.path}"
        by_scope.setdefault(key, []).append(part)
    if len(by_scope) == 1 and len(parts) == len(scans) > 1:
        return [scans[0]._replace(name=case_name(source), path=source)]
    moved = [same for same in by_scope.values() if len(same) > 1 or same[0].num_studies > 1]
    moved_paths = {part.scan.path for same in moved for part in same}
    divided = [scan for scan in scans if scan.path not in moved_paths]
    names = {scan.name for scan in divided}
    for same in moved:
        scan, study, _ = same[0]
        name = _study_name(study, "" if scan.path == source or len(same) > 1 else scan.name)
        while name in names:
            name += "_2"
        names.add(name)
        path = source if len(same) > 1 else scan.path
        divided.append(scan._replace(name=name, path=path, series=f"{study.scope}:{scan.series or ''}"))
    # Where only one is left of a folder, nothing is to be told apart.
    return sorted(divided, key=lambda scan: scan.name) if moved else list(scans)


def may_hold_studies(scan: Scan) -> bool:
    """Whether a scan is a DICOM folder or medium, whose files may belong to several studies."""
    return scan.path.is_dir() or is_dicomdir(scan.path)


def _studies_of(scan: Scan, modality: str) -> list[Study]:
    """List the studies of a scan that is a DICOM folder or medium; none for other scans."""
    if not may_hold_studies(scan):
        return []
    # pydicom is imported only for DICOM.
    from medseg.io.dicom.studies import find_studies

    with suppress(OSError):  # the reader of the scan reports it
        return find_studies(scan.path if scan.path.is_dir() else scan.path.parent, modality)
    return []


def _study_name(study: Study, folder: str) -> str:
    """Name the case of a study after its folder, patient and date."""
    words = [folder, *(re.sub(r"[^\w.+-]+", "_", text) for text in (study.patient, study.date))]
    return "_".join(filter(None, words)) or "study"


def describe_studies(scans: Sequence[Scan], before: Sequence[Scan]) -> str:
    """Say that cases are studies instead of folders; "" where nothing was divided or joined."""
    names = [scan.name for scan in scans if scan not in before]
    if not names:
        return ""
    listed = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
    return f"by the patients and studies in their headers the DICOM files are {len(names)} cases: {listed}"


def join_channels(scans: Sequence[Scan], num_channels: int) -> list[Scan]:
    """Name scans without the number of a channel, as nnU-Net gives it: `<case>_0000`, `<case>_0001`, … are one case.

    Files are joined to a case only if there is one for each channel of the task: such numbers may also count scans.

    Args:
        scans: Scans of a folder, or one scan, by name.
        num_channels: Channels of the task.
    """
    by_name = {scan.name: scan for scan in scans}
    joined: dict[str, Scan] = {}
    for scan in scans:
        case, _, number = scan.name.rpartition("_")
        files = [by_name.get(f"{case}_{index:04d}") for index in range(num_channels + 1)]
        is_whole = None not in files[:-1] and files[-1] is None and bool(case) and case not in by_name
        if is_whole and number in {f"{index:04d}" for index in range(num_channels)}:
            paths = tuple(one.path for one in files[:-1] if one is not None)
            joined[case] = scan._replace(name=case, path=paths[0], more_paths=paths[1:])
        else:
            joined[scan.name] = scan
    return list(joined.values())


def output_paths(output: Path, names: list[str], *, is_one_scan: bool) -> list[Path]:
    """Choose the paths of the label maps: the given file, or `<case>.nii.gz` in a folder.

    Args:
        output: File, or a folder that may not exist yet.
        names: Names of the cases.
        is_one_scan: Whether the input is one scan; a new name with a suffix then means a file.

    Raises:
        UserError: If several cases would go into one file, the suffix is no format to write, or a file exists where a
            folder is needed.
    """
    suffix = volume_suffix(output)
    if not output.is_dir():
        if suffix in WRITTEN_SUFFIXES:
            require(len(names) == 1, f"output={output}: the input has {len(names)} cases, so give a folder")
            return [output]
        is_new_folder = suffix is None and not output.exists() and not (is_one_scan and output.suffix)
        require(is_new_folder, f"output={output}: give a name that ends in {', '.join(WRITTEN_SUFFIXES)}, or a folder")
    return [output / f"{name}.nii.gz" for name in names]


def check_outputs(outputs: list[Path], protected: Mapping[Path, str]) -> None:
    """Refuse outputs that would overwrite a file of the input, or each other, also through links.

    Args:
        outputs: Paths of the label maps.
        protected: Description of each file of the input, from `find_scans`.

    Raises:
        UserError: If a path would be written twice or overwrite an input.
    """
    kept = {path.resolve(): description for path, description in protected.items()}
    taken: dict[str, Path] = {}
    for output in outputs:
        target = output.resolve()
        if target in kept:
            raise UserError(f"{output} is {kept[target]} and would be overwritten; give another output")
        # Some file systems treat two encodings of ü as one name.
        other = taken.setdefault(unicodedata.normalize("NFC", str(target)), output)
        require(other is output, f"{other} and {output} would be one file; rename one of the cases")
