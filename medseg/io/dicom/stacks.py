"""Choice of one stack of parallel slices among the files of a folder: series, acquisitions and phases, files that cannot be read."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from medseg.errors import UserError, require
from medseg.findings import Finding, information_of, warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.dicom.choice import parse_series
from medseg.io.dicom.frames import PHASES, Frame, NoSlice, Series, plain, read_frames
from medseg.io.inputs import DICOM_SUFFIXES, dicom_files, is_dicom_file, is_dicomdir
from medseg.io.volume import shown
from medseg.wording import first_few

Item = TypeVar("Item")

SAME_POSITION_MM = 0.01
"""Slices nearer than this have one position: the thinnest CT slices are ten times as far apart."""

SAME_SPACING = 1e-3
"""Pixel spacings with a smaller relative difference are equal: headers store rounded decimals."""

MAX_LISTED = 10
"""Largest number of series that a message lists; it counts the others."""


def group_by(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Collect items of equal key, in their order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, eq=False)
class Stack:
    """Parallel slices of one size, at two positions at least, that may be one volume.

    Attributes:
        part: Number of the stack within its series, from 1; 0 where it is the only one.
        phase: What distinguishes it from the other parts, or "".
        frames: Its slices, sorted along the normal.
        heights_mm: Their positions along the normal, ascending.
    """

    part: int
    phase: str
    frames: tuple[Frame, ...]
    heights_mm: np.ndarray


def normal_of(frame: Frame) -> np.ndarray:
    """Compute the LPS unit vector across a slice, right-handed with its row and column."""
    normal = np.cross(*frame.axes)
    return np.asarray(normal / np.linalg.norm(normal))


def natural(value: str) -> tuple[float, str]:
    """Sort key that puts 2 before 10, and both before text."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value


def _is_parallel(frame: Frame, other: Frame) -> bool:
    """Whether size, pixel spacing and orientation of two slices agree."""
    return (
        frame.pixels.shape == other.pixels.shape
        and np.abs(frame.axes - other.axes).max() <= DIRECTION_TOLERANCE
        and np.abs(np.divide(frame.spacing_mm, other.spacing_mm) - 1).max() <= SAME_SPACING
    )


def heights_of(frames: Sequence[Frame], normal: np.ndarray) -> np.ndarray:
    """Compute the positions of slices along a normal, in mm."""
    return np.array([frame.position_xyz_mm for frame in frames]) @ normal


def num_positions(heights_mm: np.ndarray) -> int:
    """Count the positions of sorted slices."""
    return 1 + int((np.diff(heights_mm) > SAME_POSITION_MM).sum())


def _by_phase(frames: Sequence[Frame], first_key: int = 0) -> list[tuple[str, Sequence[Frame]]]:
    """Divide parallel slices that fill the same space more than once: acquisitions, time points, kernels.

    Values that follow each other along the normal (the rotations of one scan) are one stack, also
    where they share a slice.

    Returns:
        Pairs (what distinguishes the stack, its slices).
    """
    for key in range(first_key, len(PHASES)):
        groups = group_by(frames, lambda frame, key=key: frame.phases[key])  # type: ignore[misc]
        # A value of its own for nearly every slice, such as a time, distinguishes slices, not
        # volumes.
        if 1 < len(groups) <= len(frames) // 2 and _overlap(list(groups.values())):
            return [
                (
                    ", ".join(
                        filter(None, (f"{PHASES[key][0]} {plain(value) or 'unknown'}", rest))
                    ),
                    part,
                )
                for value in sorted(groups, key=natural)
                for rest, part in _by_phase(groups[value], key + 1)
            ]
    return [("", frames)]


def _overlap(groups: list[list[Frame]]) -> bool:
    """Whether two groups of parallel slices share more than one position along the normal."""
    heights_mm = [heights_of(group, normal_of(groups[0][0])) for group in groups]
    steps_mm = np.diff(np.sort(np.concatenate(heights_mm)))
    steps_mm = steps_mm[steps_mm > SAME_POSITION_MM]
    step_mm = np.median(steps_mm) if steps_mm.size else 0.0
    starts_mm, stops_mm = np.array(
        sorted((heights.min(), heights.max()) for heights in heights_mm)
    ).T
    return bool((np.maximum.accumulate(stops_mm)[:-1] - starts_mm[1:] > 0.5 * step_mm).any())


def find_stacks(frames: Sequence[Frame]) -> tuple[list[Stack], list[NoSlice]]:
    """Divide the slices of one series into stacks, and list the slices that have no parallel slice at another position."""
    found: list[tuple[str, tuple[Frame, ...], np.ndarray]] = []
    alone: list[NoSlice] = []
    planes = group_by(
        frames, lambda frame: next(first for first in frames if _is_parallel(frame, first))
    )
    for phase, part in [stack for plane in planes.values() for stack in _by_phase(plane)]:
        heights_mm = heights_of(part, normal_of(part[0]))
        keys = [
            (round(height_mm / SAME_POSITION_MM), frame.path, frame.index)
            for height_mm, frame in zip(heights_mm, part, strict=True)
        ]
        order = sorted(range(len(part)), key=keys.__getitem__)
        if num_positions(heights_mm[order]) > 1:
            found.append((phase, tuple(part[index] for index in order), heights_mm[order]))
        else:
            alone += [
                NoSlice(frame.path, frame.series, "single slice without neighbours", is_image=True)
                for frame in part
            ]
    return [
        Stack(number * (len(found) > 1), *stack) for number, stack in enumerate(found, start=1)
    ], alone


def _name_pattern(path: Path) -> str:
    """Reduce a name to what names of slices share: a suffix of DICOM, else all but their numbers, which may have letters for digits.

    Example:
        >>> _name_pattern(Path("IM.0012")), _name_pattern(Path("IM.00001Z")), _name_pattern(Path("1.dcm"))
        ('im.#', 'im.#', '.dcm')
    """
    name = path.name.lower()
    return next(filter(name.endswith, DICOM_SUFFIXES), "") or re.sub(
        r"[0-9a-f]*[0-9][0-9a-z]*", "#", name
    )


def broken_copies(files: set[Path], slices: set[Path]) -> Iterator[Path]:
    """Find files that are named like slices beside them and are no DICOM, such as copies that never got a byte.

    Args:
        files: All DICOM files of the folders of the slices.
        slices: The slices.
    """
    for folder, neighbours in group_by(slices, lambda path: path.parent).items():
        patterns = set(map(_name_pattern, neighbours))
        for entry in sorted(folder.iterdir()):
            is_alike = (
                _name_pattern(entry) in patterns and entry not in files and entry.name[0] != "."
            )
            if is_alike and not entry.is_dir():
                yield entry


def _refused_copy(path: Path) -> NoSlice:
    """Describe a file that should be a slice and is no DICOM."""
    num_bytes = path.stat().st_size if path.is_file() else 0
    reason = (
        "expected a slice, as its name is like those of the slices beside it, "
        f"but its {num_bytes} bytes are no DICOM; copy it again or remove it."
    )
    return NoSlice(path, Series(), reason, is_unreadable=True)


def _read_images(
    path: Path, modality: str, files: Sequence[Path], *, is_deep: bool
) -> list[Frame | NoSlice]:
    """Read the headers of the given files, or of all DICOM files at a path, and find broken ones beside them."""
    if files:
        dicom = [file for file in files if is_dicom_file(file)]
        broken = set(files) - set(dicom)
    else:
        dicom = list(dicom_files(path.parent if path.is_file() else path, is_deep=is_deep))
    images = [image for file in dicom for image in read_frames(file, modality)]
    if not files:
        slices = {image.path for image in images if isinstance(image, Frame)}
        broken = set(broken_copies(set(dicom), slices))
    return [*images, *map(_refused_copy, sorted(broken))]


def choose_stack(
    path: Path, wanted: str | None, modality: str, files: Sequence[Path] = ()
) -> tuple[Stack, list[Finding]]:
    """Read the headers of all files and find the one stack that the arguments select.

    Unreadable files are refused with their series: other series stay readable beside them. A series
    that consists of unreadable files only is left out, like an object of another modality, if
    exactly one other series can be read.

    Args:
        path: Folder, DICOMDIR or one file of a series, as for `open_dicom`.
        wanted: Series Instance UID or Series Number, with `/<part>` for a part of a series; before
            it `<scope>:` for the series of one patient or study, see `Series.is_in`; None for the
            only one.
        modality: Modality of the series, as DICOM names it; "" takes any.
        files: The files to read instead of all files at the path.

    Returns:
        The stack, and findings on what was left out: information, unless it may be a part of the
        scan.

    Raises:
        UserError: If there is none, or more than one, or a file of it cannot be read.
    """
    is_folder = path.is_dir() or is_dicomdir(path)
    images = _read_images(path, modality, files, is_deep=is_folder)
    choice = parse_series(wanted)
    # A file whose series cannot be read may belong to any study.
    in_scope = [
        image for image in images if choice.is_scope_of(image.series) or not image.series.uid
    ]
    # Otherwise the refusal lists what there is.
    if any(isinstance(image, Frame) for image in in_scope):
        images = in_scope
    is_named = bool(choice.name)
    only_file = None if is_folder else path
    kind = f"{modality or 'scan'} series"
    stacks: list[Stack] = []
    left_out = [image for image in images if isinstance(image, NoSlice) and not image.is_unreadable]
    unreadable = [image for image in images if isinstance(image, NoSlice) and image.is_unreadable]
    frames = [image for image in images if isinstance(image, Frame)]
    for same_series in group_by(frames, lambda frame: frame.series.uid).values():
        its_stacks, alone = find_stacks(same_series)
        stacks += its_stacks
        left_out += alone
    stacks.sort(
        key=lambda stack: (
            natural(stack.frames[0].series.number),
            stack.frames[0].series.uid,
            stack.part,
        )
    )
    in_file = [
        stack
        for stack in stacks
        if only_file is None or any(frame.path == only_file for frame in stack.frames)
    ]
    chosen = [
        stack for stack in in_file if choice.is_meant(stack.frames[0].series, stack.part or 1)
    ]
    require(
        len(chosen) <= 1,
        f"{path}: expected one {kind}, but it holds {len(chosen)}: {_list(chosen, stacks)}; choose one with series=, or in the "
        "column series of a case table.",
    )
    uids = {stack.frames[0].series.uid for stack in chosen} or {
        image.series.uid
        for image in images
        if only_file in (None, image.path) and (not in_file or choice.is_meant(image.series))
    }
    in_folder = group_by(images, lambda image: image.path.parent)
    broken = [
        image for image in unreadable if _may_belong(image, uids, in_folder[image.path.parent])
    ]
    if broken:
        raise UserError(f"{first_few([image.path for image in broken], 1)}: {broken[0].reason}")
    is_any = not is_named and only_file is None
    listed = [image for image in left_out if is_any or image.series.uid in uids]
    summary = _count_reasons(listed)
    require(
        bool(in_file),
        f"{path}: expected a {kind} of at least two slices, but found only {summary or 'no image'}; give the folder of a {kind}.",
    )
    missing = choice.name if choice.is_scope_of(in_file[0].frames[0].series) else str(wanted)
    require(
        bool(chosen),
        f"{path}: there is no series={plain(missing)} among {_list(in_file, stacks)}; give one of them.",
    )
    num_patients = len({frame.series.patient for frame in chosen[0].frames} - {""})
    require(
        num_patients <= 1,
        f"{path}: expected a series of one patient, but its slices carry {num_patients} different Patient IDs; put the files of each patient "
        "into a folder of their own.",
    )
    # A slice of the chosen series may be missed; a topogram, a report or another series is not.
    parts = [image for image in listed if image.is_image and image.series.uid in uids]
    others = [image for image in listed if image not in parts]
    findings = [
        *information_of("left_out", _left_out(others)),
        *warnings_of("reading", _left_out(parts)),
    ]
    for series, lost in group_by(unreadable if is_any else [], lambda image: image.series).items():
        names = first_few([f"'{image.path.name}'" for image in lost], 1)
        why = lost[0].reason.rstrip(".")
        findings += warnings_of(
            "reading", [f"{series} was left out, since it cannot be read: {names}: {why}"]
        )
    return chosen[0], findings


def _count_reasons(images: Iterable[NoSlice]) -> str:
    """List how often each reason occurs in each series; "" without an image."""
    counts = Counter((str(image.series), image.reason) for image in images)
    return first_few(
        [f"{count} x {reason} ({series})" for (series, reason), count in counts.items()], MAX_LISTED
    )


def _left_out(images: Sequence[NoSlice]) -> list[str]:
    """Say in one sentence what is left out, if anything is."""
    return (
        [f"left out, because they are not slices of the scan: {_count_reasons(images)}"]
        if images
        else []
    )


def _may_belong(image: NoSlice, uids: set[str], neighbours: Iterable[Frame | NoSlice]) -> bool:
    """Whether a file may belong to one of these series.

    If its own series cannot be read, it may belong to any series in its folder; without others in
    the folder, to any series at all.
    """
    if image.series.uid:
        return image.series.uid in uids
    near = {neighbour.series.uid for neighbour in neighbours} - {""}
    return not near or not near.isdisjoint(uids) or "" in uids


def _list(stacks: Sequence[Stack], all_stacks: Sequence[Stack]) -> str:
    """List stacks by the value that `series=` takes, and what distinguishes them.

    That is patient and date, where the folder holds several studies, the description, the number of
    slices and the spacing (z, y, x).
    """
    all_series = list(
        {stack.frames[0].series.uid: stack.frames[0].series for stack in all_stacks}.values()
    )
    has_studies = len({series.scope for series in all_series}) > 1
    names = []
    for stack in stacks:
        first, series = stack.frames[0], stack.frames[0].series
        key = plain(_shortest_name(series, all_series)) + (f"/{stack.part}" if stack.part else "")
        about = [
            f"patient {plain(series.patient or 'unknown')}" if has_studies else "",
            plain(written_date(series.date)) if has_studies else "",
            # The number stands in the key where it is enough.
            f"series {plain(series.number)}" if has_studies and series.number else "",
            shown(series.description) if series.description else "",
            stack.phase,
        ]
        words = ", ".join(filter(None, about))
        step_mm = np.ptp(stack.heights_mm) / (num_positions(stack.heights_mm) - 1)
        spacing = " x ".join(f"{mm:.3g}" for mm in (step_mm, *first.spacing_mm))
        size = f"({len(stack.frames)} slices, {spacing} mm)"
        names.append(" ".join(filter(None, (f"series={key}", words, size))))
    return first_few(names, MAX_LISTED, "; ")


def _shortest_name(series: Series, all_series: Sequence[Series]) -> str:
    """Choose the shortest value of `series=` that names one series alone: its number, with patient and date, or its UID."""
    is_typable = re.fullmatch(r"[\w.-]+", series.patient) is not None
    scopes = ["", series.patient, f"{series.patient}:{series.date}" if series.date else ""]
    for scope in scopes if series.number else []:
        same = [
            other
            for other in all_series
            if other.number == series.number and (not scope or other.is_in(scope))
        ]
        if len(same) == 1 and (not scope or is_typable):
            return f"{scope}:{series.number}" if scope else series.number
    return series.uid


def written_date(date: str) -> str:
    """Write a date of DICOM, `20240131`, as `2024-01-31`; other texts stay."""
    is_date = re.fullmatch(r"[0-9]{8}", date) is not None
    return f"{date[:4]}-{date[4:6]}-{date[6:]}" if is_date else date
