"""Choice of a series in each study by the rule of the argument `series_pick=`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from medseg.io.dicom.listing import ListedSeries
from medseg.io.dicom.stacks import group_by, natural_key

# Rules of `series_pick=`; any other value is a text or pattern.
THINNEST, LARGEST = "thinnest", "largest"


def pick(candidates: Sequence[ListedSeries], rule: str) -> ListedSeries | None:
    """Choose one of the scans of a study.

    Args:
        candidates: The scans.
        rule: `thinnest`: least distance of slices. `largest`: most voxels. Another text: the
            thinnest of those whose description, kernel or phase contains it; with `*`, `?` or `[…]`
            it is a pattern. Capitals do not matter. Between equals the larger number of voxels
            decides, then the lower series number.

    Returns:
        The chosen scan; None if no scan matches.
    """
    matching = candidates
    if rule not in (THINNEST, LARGEST):
        matching = [listed for listed in candidates if _matches(listed, rule)]
    if not matching:
        return None
    if rule == LARGEST:
        return min(matching, key=_by_size)
    return min(matching, key=_by_distance)


def study_of(listed: ListedSeries) -> tuple[str, str]:
    """Key of the study of a scan.

    Where the headers name no study, as after an anonymisation, each folder counts as one.
    """
    series = listed.series
    folder = "" if series.study else str(listed.folder)
    return series.scope, folder


def pick_each_study(scans: Sequence[ListedSeries], rule: str) -> list[ListedSeries]:
    """Choose a scan of each study by `pick`; studies without a match are left out."""
    picked = []
    for candidates in group_by(scans, study_of).values():
        chosen = pick(candidates, rule)
        if chosen is not None:
            picked.append(chosen)
    return picked


def _matches(listed: ListedSeries, text: str) -> bool:
    """Whether the description, the kernel or the phase of a scan contains a text or a pattern."""
    pattern = f"*{text}*".lower()
    texts = (listed.series.description, listed.kernel, listed.phase)
    return any(fnmatchcase(words.lower(), pattern) for words in texts)


def _by_distance(listed: ListedSeries) -> tuple[float, int, tuple[float, str], str, int]:
    """Sort key: smallest distance of slices first, then most voxels, then the common order."""
    # In steps of 1 µm: positions in headers are rounded.
    distance_mm = round(listed.spacing_mm[0], 3)
    return (distance_mm, -listed.num_voxels, *_common_order(listed))


def _by_size(listed: ListedSeries) -> tuple[int, tuple[float, str], str, int]:
    """Sort key: most voxels first, then the common order."""
    return (-listed.num_voxels, *_common_order(listed))


def _common_order(listed: ListedSeries) -> tuple[tuple[float, str], str, int]:
    """Sort key between equals: series number, UID, part."""
    return natural_key(listed.series.number), listed.series.uid, listed.part
