"""Series of the DICOM scans of a batch: one of each study by a rule, and the files of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from medseg.io.dicom.choice import parse_series
from medseg.io.inputs import is_dicomdir
from medseg.prediction.scans import Scan, may_hold_studies
from medseg.wording import first_few

if TYPE_CHECKING:
    from medseg.io.dicom.listing import ListedSeries

MAX_LISTED = 10
"""Largest number of series that a refusal lists; it counts the others."""


class Candidate(NamedTuple):
    """A series that may stand for its study.

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
        The scans, those of DICOM with their series. A study of several series that the rule cannot
        choose from is refused in its turn. Other files than DICOM stay as they are.
    """
    by_study: dict[str, list[Candidate]] = {}
    picked: list[Scan] = []
    for scan in scans:
        volumes = _volumes_of(scan, modality, on_file)
        if not volumes:
            # The reader says what is there instead.
            picked.append(scan)
            continue
        for listed in volumes:
            # Without an identity a folder is a study.
            study = listed.series.scope if listed.series.study else scan.name
            by_study.setdefault(study, []).append(Candidate(scan, listed))
    picked += [_pick_one(candidates, rule) for candidates in by_study.values()]
    return sorted(picked, key=lambda scan: scan.name)


def _volumes_of(scan: Scan, modality: str, on_file: Callable[[], None]) -> list[ListedSeries]:
    """List the stacks of slices among the files of a scan; none of another format."""
    if not may_hold_studies(scan):
        return []
    all_series = _list_all(scan, modality, on_file)
    # What is no volume has no shape.
    return [listed for listed in all_series if listed.shape]


def _list_all(scan: Scan, modality: str, on_file: Callable[[], None]) -> list[ListedSeries]:
    """List the series among the files of a scan."""
    # pydicom is imported only for DICOM.
    from medseg.io.dicom.listing import list_series

    # A DICOMDIR stands for its folder.
    folder = scan.path.parent if is_dicomdir(scan.path) else scan.path
    try:
        return list_series(folder, modality, scan.files, on_file)
    except OSError:  # the reader of the scan reports it
        return []


def _pick_one(candidates: Sequence[Candidate], rule: str) -> Scan:
    """Choose the series of a study, or say why none can be."""
    from medseg.io.dicom.pick import pick

    usable = [candidate for candidate in candidates if not candidate.listed.fault]
    chosen = pick([candidate.listed for candidate in usable], rule)
    if chosen is None:
        return _refused(candidates, usable, rule)
    scan = next(candidate.scan for candidate in usable if candidate.listed is chosen)
    return scan._replace(series=chosen.choice, files=chosen.files, identity=chosen.series.identity)


def _refused(candidates: Sequence[Candidate], usable: Sequence[Candidate], rule: str) -> Scan:
    """Refuse a study whose series cannot be read, or meet no text."""
    scan = candidates[0].scan
    if usable:
        names = [str(candidate.listed.series) for candidate in usable]
        refusal = (
            f"{scan.path}: no series has {rule!r} in its description or kernel, but there is "
            f"{first_few(names, MAX_LISTED)}; give another series_pick, or a number with series=."
        )
    else:
        faults = []
        for candidate in candidates:
            listed = candidate.listed
            faults.append(f"{listed.series}: {listed.fault.rstrip('.')}")
        refusal = f"{scan.path}: no series can be read: {first_few(faults, MAX_LISTED, '; ')}."
    return scan._replace(refusal=refusal, identity=candidates[0].listed.series.identity)


def find_files(
    scans: Sequence[Scan], modality: str, on_file: Callable[[], None] = lambda: None
) -> list[Scan]:
    """Give rows of a case table that share a DICOM folder the files of their series.

    So the headers of the folder are read once, and not for each row; and a file that is added to
    the folder changes no other case.

    Args:
        scans: Scans of a case table.
        modality: Modality of the first channel, as a task names it.
        on_file: Called after each DICOM file whose header was read.
    """
    num_rows = Counter(scan.path for scan in scans)
    listings: dict[Path, list[ListedSeries]] = {}
    completed = []
    for scan in scans:
        is_shared = scan.series is not None and num_rows[scan.path] > 1
        if is_shared and may_hold_studies(scan):
            if scan.path not in listings:
                listings[scan.path] = _list_all(scan, modality, on_file)
            scan = scan._replace(files=_files_of(scan, listings[scan.path]))
        completed.append(scan)
    return completed


def _files_of(scan: Scan, listed: Sequence[ListedSeries]) -> tuple[Path, ...]:
    """List the files of what the series of a row may name; none where it names nothing."""
    choice = parse_series(scan.series)
    files: dict[Path, None] = {}
    for series in listed:
        if choice.selects(series.series):
            files.update(dict.fromkeys(series.files))
    return tuple(files)
