"""Series of the DICOM scans of a batch.

`pick_series` chooses one series of each study by a rule. `find_files` lists the files of the rows
of a case table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from medseg.io.dicom.choice import parse_series
from medseg.io.inputs import is_dicomdir
from medseg.prediction.scans import Scan, may_hold_studies
from medseg.wording import first_few

if TYPE_CHECKING:
    from medseg.io.dicom.listing import ListedSeries

# Largest number of series that a refusal lists; it counts the others.
MAX_LISTED = 10


class Candidate(NamedTuple):
    """A series that may be chosen from its study.

    Attributes:
        scan: The scan of the batch whose files hold it.
        listed: The series.
    """

    scan: Scan
    listed: ListedSeries


def pick_series(
    scans: Sequence[Scan], rule: str, modality: str, on_file: Callable[[], None] = lambda: None
) -> list[Scan]:
    """Choose one series of each study by a rule, also where a study lies in several folders.

    Args:
        scans: Scans of a batch, each of one study at most, see `divide_studies`.
        rule: Value of `series_pick`, see `medseg.io.dicom.pick.pick`.
        modality: Modality of the first channel, as a task names it.
        on_file: Called after each DICOM file whose header was read.

    Returns:
        A scan for each study, with its series; sorted by name. The scan of a study without a series
        that can be chosen has a refusal. Scans without a DICOM volume stay as they are, except for
        folders that hold only the rest of a study, such as its localiser.
    """
    candidates_by_study: dict[str, list[Candidate]] = {}
    # Scans without a volume, each with its series.
    without_volume: list[tuple[Scan, list[ListedSeries]]] = []
    picked: list[Scan] = []
    for scan in scans:
        all_series: list[ListedSeries] = []
        if may_hold_studies(scan):
            all_series = _list_all(scan, modality, on_file)
        # A series that is no volume has no shape.
        volumes = [listed for listed in all_series if listed.shape]
        if not volumes:
            without_volume.append((scan, all_series))
        for listed in volumes:
            # Where the headers name no study, each folder counts as one.
            study = listed.series.scope if listed.series.study else scan.name
            candidates = candidates_by_study.setdefault(study, [])
            candidates.append(Candidate(scan, listed))
    for scan, all_series in without_volume:
        # The reader of the scan reports which files are there instead of a volume.
        if not _are_rest(all_series, candidates_by_study):
            picked.append(scan)
    for candidates in candidates_by_study.values():
        picked.append(_pick_one(candidates, rule))
    return sorted(picked, key=lambda scan: scan.name)


def _are_rest(all_series: Sequence[ListedSeries], studies: Collection[str]) -> bool:
    """Tell whether a folder holds only the rest of studies whose volumes lie in other folders.

    The rest are localisers, reports and other objects that can be read and are no volume.

    Args:
        all_series: The series of the folder, none of them a volume.
        studies: The studies with a volume, see `Series.scope`.
    """
    for listed in all_series:
        is_of_study = listed.series.study != "" and listed.series.scope in studies
        if listed.is_damaged or not is_of_study:
            return False
    return bool(all_series)


def _list_all(scan: Scan, modality: str, on_file: Callable[[], None]) -> list[ListedSeries]:
    """List the series among the files of a DICOM scan; none if the folder cannot be read."""
    # pydicom is imported only for DICOM.
    from medseg.io.dicom.listing import list_series

    # A scan on a DICOM medium, such as a CD, has the path of the file DICOMDIR.
    folder = scan.path.parent if is_dicomdir(scan.path) else scan.path
    try:
        return list_series(folder, modality, scan.files, on_file)
    except OSError:  # the reader of the scan reports it
        return []


def _pick_one(candidates: Sequence[Candidate], rule: str) -> Scan:
    """Choose the series of a study, or make a scan with the reason why none can be chosen."""
    from medseg.io.dicom.pick import pick

    readable = [candidate for candidate in candidates if not candidate.listed.fault]
    chosen = pick([candidate.listed for candidate in readable], rule)
    # The series that the rule would choose if all could be read.
    preferred = pick([candidate.listed for candidate in candidates], rule)
    if chosen is None or preferred is None:
        return _refused(candidates, readable, preferred, rule)
    scan = next(candidate.scan for candidate in readable if candidate.listed is chosen)
    choice_warning = ""
    if preferred.fault:
        choice_warning = f"series_pick={rule} would take {_faulty(preferred)}; it was left out"
    return scan._replace(
        series=chosen.choice,
        files=chosen.files,
        identity=chosen.series.identity,
        choice_warning=choice_warning,
    )


def _faulty(listed: ListedSeries) -> str:
    """Name a series and why it cannot be read."""
    return f"{listed.series}: {listed.fault.rstrip('.')}"


def _refused(
    candidates: Sequence[Candidate],
    readable: Sequence[Candidate],
    preferred: ListedSeries | None,
    rule: str,
) -> Scan:
    """Make a scan that says why no series of a study can be chosen.

    Args:
        candidates: All series of the study.
        readable: Those that can be read, none of which fits the rule.
        preferred: The series that the rule would choose if it could be read; None if none fits.
        rule: Value of `series_pick`. If there are readable series, it is a text to look for: the
            other rules always choose one of them.
    """
    scan = candidates[0].scan
    if readable and preferred is not None:
        names = [str(candidate.listed.series) for candidate in readable]
        refusal = (
            f"{scan.path}: series_pick={rule} takes {_faulty(preferred)}. The study also has "
            f"{first_few(names, MAX_LISTED)}; give another series_pick, or a number with series=."
        )
    elif readable:
        names = [str(candidate.listed.series) for candidate in readable]
        refusal = (
            f"{scan.path}: no series has {rule!r} in its description or kernel, but there is "
            f"{first_few(names, MAX_LISTED)}; give another series_pick, or a number with series=."
        )
    else:
        faults = [_faulty(candidate.listed) for candidate in candidates]
        refusal = f"{scan.path}: no series can be read: {first_few(faults, MAX_LISTED, '; ')}."
    return scan._replace(refusal=refusal, identity=candidates[0].listed.series.identity)


def find_files(
    scans: Sequence[Scan], modality: str, on_file: Callable[[], None] = lambda: None
) -> list[Scan]:
    """List the files of each row of a case table that shares its DICOM folder with another row.

    The headers of the folder are then read once, and not for each row; and a file of another series
    that is added to the folder does not make the case outdated.

    Args:
        scans: Scans of a case table.
        modality: Modality of the first channel, as a task names it.
        on_file: Called after each DICOM file whose header was read.

    Returns:
        All rows in their order, with `files` where they share a folder.
    """
    num_rows = Counter(scan.path for scan in scans)
    listings: dict[Path, list[ListedSeries]] = {}  # by folder
    completed = []
    for scan in scans:
        is_shared = num_rows[scan.path] > 1
        if is_shared and scan.series is not None and may_hold_studies(scan):
            if scan.path not in listings:
                listings[scan.path] = _list_all(scan, modality, on_file)
            files = _files_of_choice(scan.series, listings[scan.path])
            scan = scan._replace(files=files)
        completed.append(scan)
    return completed


def _files_of_choice(series: str, listing: Sequence[ListedSeries]) -> tuple[Path, ...]:
    """List the files of the series that a value of `series=` names, each once; empty for none."""
    choice = parse_series(series)
    files: dict[Path, None] = {}  # a set in the order of the files
    for listed in listing:
        if choice.selects(listed.series):
            files.update(dict.fromkeys(listed.files))
    return tuple(files)
