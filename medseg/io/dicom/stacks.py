"""Choice of one stack of parallel slices among the files of a folder.

A folder may hold several series, a series several acquisitions or phases, and some files cannot be
read.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from medseg.errors import SeveralSeriesError, UserError
from medseg.findings import Finding, information_of, warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE
from medseg.io.dicom.choice import SeriesChoice, parse_series
from medseg.io.dicom.frames import PHASES, Frame, NoSlice, Series, plain, read_frames
from medseg.io.identity import written_date
from medseg.io.inputs import DICOM_SUFFIXES, dicom_files, is_dicom_file, is_dicomdir
from medseg.io.volume import shown
from medseg.wording import first_few

Item = TypeVar("Item")

# Slices nearer than this have one position: the thinnest CT slices are ten times as far apart.
SAME_POSITION_MM = 0.01

# Pixel spacings with a smaller relative difference are equal: headers store rounded decimals.
SAME_SPACING = 1e-3

# Largest number of series that a message lists; it counts the others.
MAX_LISTED = 10


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

    @property
    def series(self) -> Series:
        """The series of its slices."""
        return self.frames[0].series

    @property
    def num_positions(self) -> int:
        """Number of positions of its slices."""
        return num_positions(self.heights_mm)

    @property
    def spacing_mm(self) -> tuple[float, ...]:
        """Mean distance of its positions, then of rows and of columns."""
        step_mm = float(np.ptp(self.heights_mm)) / (self.num_positions - 1)
        return (step_mm, *self.frames[0].spacing_mm)


class Contents(NamedTuple):
    """What some files hold.

    Attributes:
        images: Everything that was read, in the order of the files.
        stacks: The stacks among it, sorted by series.
        left_out: Readable objects that belong to no stack.
        unreadable: Files that may hold slices and cannot be read.
    """

    images: list[Frame | NoSlice]
    stacks: list[Stack]
    left_out: list[NoSlice]
    unreadable: list[NoSlice]


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


def _by_phase(frames: Sequence[Frame], key: int = 0) -> list[tuple[str, Sequence[Frame]]]:
    """Divide parallel slices that fill the same space more than once, by `PHASES` from `key` on.

    Values that follow each other along the normal (the rotations of one scan) are one stack, also
    where they share a slice.

    Returns:
        Pairs (what distinguishes the stack, its slices).
    """
    if key == len(PHASES):
        return [("", frames)]
    groups = group_by(frames, lambda frame: frame.phases[key])
    # A value of its own for nearly every slice, such as a time, distinguishes slices, not volumes.
    may_be_volumes = 1 < len(groups) <= len(frames) // 2
    if not may_be_volumes or not _overlap(list(groups.values())):
        return _by_phase(frames, key + 1)
    stacks: list[tuple[str, Sequence[Frame]]] = []
    for value in sorted(groups, key=natural):
        name = f"{PHASES[key][0]} {plain(value) or 'unknown'}"
        for rest, part in _by_phase(groups[value], key + 1):
            phase = f"{name}, {rest}" if rest else name
            stacks.append((phase, part))
    return stacks


def _overlap(groups: list[list[Frame]]) -> bool:
    """Whether two groups of parallel slices share more than one position along the normal."""
    normal = normal_of(groups[0][0])
    heights_mm = [heights_of(group, normal) for group in groups]
    steps_mm = np.diff(np.sort(np.concatenate(heights_mm)))
    steps_mm = steps_mm[steps_mm > SAME_POSITION_MM]
    # The median: a gap between the groups must not count as their step.
    step_mm = np.median(steps_mm) if steps_mm.size else 0.0
    ranges_mm = [(heights.min(), heights.max()) for heights in heights_mm]
    starts_mm, stops_mm = np.array(sorted(ranges_mm)).T
    # A long group may reach beyond the start of more than the next one.
    reached_mm = np.maximum.accumulate(stops_mm)
    # Groups that share one slice overlap by 0 mm; those that share two, by a step.
    overlaps_mm = reached_mm[:-1] - starts_mm[1:]
    return bool((overlaps_mm > 0.5 * step_mm).any())


def find_stacks(frames: Sequence[Frame]) -> tuple[list[Stack], list[NoSlice]]:
    """Divide the slices of one series into stacks.

    Returns:
        The stacks, and the slices that have no parallel slice at another position.
    """
    planes = group_by(frames, lambda frame: _first_parallel(frame, frames))
    parts: list[tuple[str, tuple[Frame, ...], np.ndarray]] = []
    alone: list[Frame] = []
    for plane in planes.values():
        for phase, part in _by_phase(plane):
            slices, heights_mm = _sorted_along_normal(part)
            if num_positions(heights_mm) > 1:
                parts.append((phase, slices, heights_mm))
            else:
                alone += part
    stacks = [Stack(number, *part) for number, part in enumerate(parts, start=1)]
    if len(stacks) == 1:
        stacks = [replace(stacks[0], part=0)]
    reason = "single slice without neighbours"
    left_out = [NoSlice(frame.path, frame.series, reason, is_image=True) for frame in alone]
    return stacks, left_out


def _first_parallel(frame: Frame, frames: Sequence[Frame]) -> Frame:
    """Find the first slice that a slice is parallel to, which may be itself."""
    parallel = (other for other in frames if _is_parallel(frame, other))
    return next(parallel)


def _sorted_along_normal(frames: Sequence[Frame]) -> tuple[tuple[Frame, ...], np.ndarray]:
    """Sort parallel slices by position, those of one position by file and frame.

    Returns:
        The slices, and their positions along the normal in mm.
    """
    heights_mm = heights_of(frames, normal_of(frames[0]))
    # Rounded, so that noise does not decide between slices of one position.
    steps = [round(height_mm / SAME_POSITION_MM) for height_mm in heights_mm]
    order = sorted(
        range(len(frames)),
        key=lambda index: (steps[index], frames[index].path, frames[index].index),
    )
    return tuple(frames[index] for index in order), heights_mm[order]


def _name_pattern(path: Path) -> str:
    """Reduce a name to what the names of slices share.

    That is a suffix of DICOM, else all but their numbers, which may have letters for digits.

    Example:
        >>> _name_pattern(Path("IM.0012")), _name_pattern(Path("IM.00001Z"))
        ('im.#', 'im.#')
        >>> _name_pattern(Path("1.dcm"))
        '.dcm'
    """
    name = path.name.lower()
    for suffix in DICOM_SUFFIXES:
        if name.endswith(suffix):
            return suffix
    return re.sub(r"[0-9a-f]*[0-9][0-9a-z]*", "#", name)


def broken_copies(files: set[Path], slices: set[Path]) -> Iterator[Path]:
    """Find files that are named like slices beside them and are no DICOM.

    Such are copies that never got a byte.

    Args:
        files: All DICOM files of the folders of the slices.
        slices: The slices.
    """
    for folder, neighbours in group_by(slices, lambda path: path.parent).items():
        patterns = set(map(_name_pattern, neighbours))
        for entry in sorted(folder.iterdir()):
            if entry in files or entry.name.startswith(".") or entry.is_dir():
                continue
            if _name_pattern(entry) in patterns:
                yield entry


def refused_copy(path: Path) -> NoSlice:
    """Describe a file that should be a slice and is no DICOM."""
    num_bytes = path.stat().st_size if path.is_file() else 0
    reason = (
        "expected a slice, as its name is like those of the slices beside it, "
        f"but its {num_bytes} bytes are no DICOM; copy it again or remove it."
    )
    return NoSlice(path, Series(), reason, is_unreadable=True)


class SliceFolders:
    """Folders that hold the slices of each volume; tells to which one a nameless file may belong.

    Args:
        slices: Series and path of each slice; a series of one slice is no volume.
    """

    def __init__(self, slices: Iterable[tuple[str, Path]]) -> None:
        self._folders: dict[str, list[Path]] = {}
        for uid, path in slices:
            self._folders.setdefault(uid, []).append(path.parent)

    def owner(self, path: Path) -> str | None:
        """Series of a file that does not tell its own: the only volume of its folder, or of all.

        Returns:
            None where several volumes, or none, may own it: each of them goes on without it.
        """
        # One entry per slice, and a volume has two slices at least.
        volumes = {uid: folders for uid, folders in self._folders.items() if len(folders) > 1}
        near = [uid for uid, folders in volumes.items() if path.parent in folders]
        candidates = near or list(volumes)
        return candidates[0] if len(candidates) == 1 else None


def slice_folders(images: Iterable[Frame | NoSlice]) -> SliceFolders:
    """Note the folders of the slices among images."""
    frames = (image for image in images if isinstance(image, Frame))
    return SliceFolders((frame.series.uid, frame.path) for frame in frames)


def read_images(
    path: Path,
    modality: str,
    files: Sequence[Path],
    *,
    is_deep: bool,
    on_file: Callable[[], None] = lambda: None,
) -> list[Frame | NoSlice]:
    """Read the headers of some files, or of all DICOM files at a path.

    Files without DICOM are unreadable: all such among `files`, else those named like slices.

    Args:
        path: Folder, or a file of it.
        modality: Modality of the slices, as DICOM names it; "" takes any.
        files: The files to read instead of all files at the path.
        is_deep: Whether the folders below are searched too.
        on_file: Called after each file.
    """
    if files:
        dicom = [file for file in files if is_dicom_file(file)]
    else:
        folder = path.parent if path.is_file() else path
        dicom = list(dicom_files(folder, is_deep=is_deep))
    images: list[Frame | NoSlice] = []
    for file in dicom:
        images += read_frames(file, modality)
        on_file()
    if files:
        broken = set(files) - set(dicom)
    else:
        slices = {image.path for image in images if isinstance(image, Frame)}
        broken = set(broken_copies(set(dicom), slices))
    return [*images, *map(refused_copy, sorted(broken))]


def _in_scope(images: list[Frame | NoSlice], choice: SeriesChoice) -> list[Frame | NoSlice]:
    """Keep the images of the chosen patient or study.

    All stay where that would leave no slice: the refusal then lists what there is.
    """
    # A file whose series cannot be read may belong to any study.
    in_scope = [
        image for image in images if choice.is_scope_of(image.series) or not image.series.uid
    ]
    has_slices = any(isinstance(image, Frame) for image in in_scope)
    return in_scope if has_slices else images


def _sort_contents(images: list[Frame | NoSlice]) -> Contents:
    """Build the stacks of images, and tell apart what is left."""
    frames: list[Frame] = []
    left_out: list[NoSlice] = []
    unreadable: list[NoSlice] = []
    for image in images:
        if isinstance(image, Frame):
            frames.append(image)
        elif image.is_unreadable:
            unreadable.append(image)
        else:
            left_out.append(image)
    stacks: list[Stack] = []
    for same_series in group_by(frames, lambda frame: frame.series.uid).values():
        series_stacks, alone = find_stacks(same_series)
        stacks += series_stacks
        left_out += alone
    # Messages list the stacks in this order.
    stacks.sort(key=lambda stack: (natural(stack.series.number), stack.series.uid, stack.part))
    return Contents(images, stacks, left_out, unreadable)


def choose_stack(
    path: Path, series: str | None, modality: str, files: Sequence[Path] = ()
) -> tuple[Stack, list[Finding]]:
    """Read the headers of all files and find the one stack that the arguments select.

    Unreadable files are refused with their series: other series stay readable beside them. A file
    that does not tell its series belongs to the only volume of its folder; beside several it is
    told, and each of them goes on. A series that consists of unreadable files only is left out,
    like an object of another modality, if exactly one other series can be read.

    Args:
        path: Folder, DICOMDIR or one file of a series, as for `open_dicom`.
        series: Series Instance UID or Series Number, with `/<part>` for a part of a series; before
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
    only_file = None if is_folder else path
    choice = parse_series(series)
    kind = f"{modality or 'scan'} series"
    images = read_images(path, modality, files, is_deep=is_folder)
    folders = slice_folders(images)
    contents = _sort_contents(_in_scope(images, choice))
    candidates = _stacks_with(contents.stacks, only_file)
    # A series of one stack may be named as its own part 1.
    chosen = [stack for stack in candidates if choice.selects(stack.series, stack.part or 1)]
    if len(chosen) > 1:
        raise _several(path, kind, chosen, contents.stacks)
    # Files that cannot be read may be why there is none, and are refused first: those of the named
    # series or, without any stack, all.
    if chosen:
        uids = {chosen[0].series.uid}
    elif candidates:
        uids = _uids_of(contents.images, choice, only_file)
    else:
        uids = _uids_of(contents.images, parse_series(None), only_file)
    _refuse_unreadable(contents, uids, folders)
    left_out = contents.left_out
    # Where nothing selects a series, all that the folder holds is of interest.
    is_selected = bool(choice.name) or only_file is not None
    if is_selected:
        left_out = [image for image in left_out if image.series.uid in uids]
    if not candidates:
        raise _no_stack(path, kind, left_out)
    if not chosen:
        raise _no_such_series(path, choice, candidates, contents.stacks)
    _check_patient(path, chosen[0])
    findings = _left_out_findings(left_out, uids)
    if is_selected:
        return chosen[0], findings + _loose_findings(contents.unreadable)
    return chosen[0], findings + _unreadable_findings(contents.unreadable)


def _stacks_with(stacks: list[Stack], file: Path | None) -> list[Stack]:
    """Keep the stacks that have a slice in a file; None keeps all."""
    if file is None:
        return stacks
    stacks_of_file = []
    for stack in stacks:
        paths = {frame.path for frame in stack.frames}
        if file in paths:
            stacks_of_file.append(stack)
    return stacks_of_file


def _uids_of(
    images: Sequence[Frame | NoSlice], choice: SeriesChoice, file: Path | None
) -> set[str]:
    """List the series of a choice to which images belong, of one file or, with None, of all."""
    return {
        image.series.uid
        for image in images
        if file in (None, image.path) and choice.selects(image.series)
    }


def _several(
    path: Path, kind: str, stacks: Sequence[Stack], all_stacks: Sequence[Stack]
) -> SeveralSeriesError:
    """Refuse a path with several stacks to choose from."""
    return SeveralSeriesError(
        f"{path}: expected one {kind}, but it holds {len(stacks)}: {_list(stacks, all_stacks)}; "
        "choose one with series=, or in the column series of a case table."
    )


def _no_stack(path: Path, kind: str, left_out: Sequence[NoSlice]) -> UserError:
    """Refuse a path without a stack, with what was found instead."""
    return UserError(
        f"{path}: expected a {kind} of at least two slices, but found only "
        f"{_count_reasons(left_out) or 'no image'}; give the folder of a {kind}."
    )


def _no_such_series(
    path: Path, choice: SeriesChoice, candidates: Sequence[Stack], all_stacks: Sequence[Stack]
) -> UserError:
    """Refuse a value of `series=` that names none of the candidates."""
    name = choice.name
    if not choice.is_scope_of(candidates[0].series):
        name = choice.within(choice.scope)
    return UserError(
        f"{path}: there is no series={plain(name)} among "
        f"{_list(candidates, all_stacks)}; give one of them."
    )


def _refuse_unreadable(contents: Contents, uids: set[str], folders: SliceFolders) -> None:
    """Refuse files that cannot be read and belong to one of these series.

    Raises:
        UserError: With the first of them.
    """
    broken = []
    for image in contents.unreadable:
        owner = image.series.uid or folders.owner(image.path)
        # Without any stack, `uids` may hold the empty UID of files that do not tell theirs.
        if owner in uids or image.series.uid in uids:
            broken.append(image)
    if broken:
        paths = first_few([image.path for image in broken], 1)
        raise UserError(f"{paths}: {broken[0].reason}")


def _check_patient(path: Path, stack: Stack) -> None:
    """Refuse a stack that mixes the slices of several patients.

    Raises:
        UserError: With their number.
    """
    # Slices without a Patient ID may be those of the only patient.
    num_patients = len({frame.series.patient for frame in stack.frames} - {""})
    if num_patients > 1:
        raise UserError(
            f"{path}: expected a series of one patient, but its slices carry {num_patients} "
            "different Patient IDs; put the files of each patient into a folder of their own."
        )


def _left_out_findings(left_out: Sequence[NoSlice], uids: set[str]) -> list[Finding]:
    """Tell what is left out: a warning where it may be a part of one of these series."""
    # A slice of the chosen series may be missed; a topogram, a report or another series is not.
    lost_slices: list[NoSlice] = []
    unrelated: list[NoSlice] = []
    for image in left_out:
        if image.is_image and image.series.uid in uids:
            lost_slices.append(image)
        else:
            unrelated.append(image)
    sentence = "left out, because they are not slices of the scan: "
    findings: list[Finding] = []
    if unrelated:
        findings += information_of("left_out", [sentence + _count_reasons(unrelated)])
    if lost_slices:
        findings += warnings_of("reading", [sentence + _count_reasons(lost_slices)])
    return findings


def _unreadable_findings(unreadable: Sequence[NoSlice]) -> list[Finding]:
    """Warn of each series that is left out because its files cannot be read."""
    sentences = []
    for series, images in group_by(unreadable, lambda image: image.series).items():
        names = first_few([f"'{image.path.name}'" for image in images], 1)
        reason = images[0].reason.rstrip(".")
        sentences.append(f"{series} was left out, since it cannot be read: {names}: {reason}")
    return warnings_of("reading", sentences)


def _loose_findings(unreadable: Sequence[NoSlice]) -> list[Finding]:
    """Warn of files that cannot be read and do not tell their series, which may be this one."""
    loose = [image for image in unreadable if not image.series.uid]
    if not loose:
        return []
    names = first_few([f"'{image.path.name}'" for image in loose], 1)
    reason = loose[0].reason.rstrip(".")
    sentence = f"a file that does not tell its series may be a slice of the scan: {names}: {reason}"
    return warnings_of("reading", [sentence])


def _count_reasons(images: Iterable[NoSlice]) -> str:
    """List how often each reason occurs in each series; "" without an image."""
    counts = Counter((str(image.series), image.reason) for image in images)
    sentences = []
    for (series, reason), count in counts.items():
        sentences.append(f"{count} x {reason} ({series})")
    return first_few(sentences, MAX_LISTED)


def _list(stacks: Sequence[Stack], all_stacks: Sequence[Stack]) -> str:
    """List stacks by the value that `series=` takes, and what distinguishes them."""
    # Several stacks may be parts of one series, which counts once.
    series_by_uid = {stack.series.uid: stack.series for stack in all_stacks}
    all_series = list(series_by_uid.values())
    descriptions = [_describe(stack, all_series) for stack in stacks]
    return first_few(descriptions, MAX_LISTED, "; ")


def _describe(stack: Stack, all_series: Sequence[Series]) -> str:
    """Write the value of `series=` that names a stack, and what distinguishes it.

    That is patient and date, where the folder holds several studies, the description, the number of
    slices and the spacing (z, y, x).
    """
    series = stack.series
    key = plain(_shortest_name(series, all_series))
    if stack.part:
        key += f"/{stack.part}"
    properties = []
    if len({candidate.scope for candidate in all_series}) > 1:
        properties.append(f"patient {plain(series.patient or 'unknown')}")
        properties.append(plain(written_date(series.date)))
        # In one study the key holds the number.
        if series.number:
            properties.append(f"series {plain(series.number)}")
    if series.description:
        properties.append(shown(series.description))
    properties.append(stack.phase)
    spacing = " x ".join(f"{mm:.3g}" for mm in stack.spacing_mm)
    words = [
        f"series={key}",
        ", ".join(filter(None, properties)),
        f"({len(stack.frames)} slices, {spacing} mm)",
    ]
    return " ".join(filter(None, words))


def _shortest_name(series: Series, all_series: Sequence[Series]) -> str:
    """Choose the shortest value of `series=` that names one series alone.

    That is its number, else the number with patient and perhaps date, else its UID.
    """
    if not series.number:
        return series.uid
    same_number = [candidate for candidate in all_series if candidate.number == series.number]
    if len(same_number) == 1:
        return series.number
    # Other characters in a patient would have to be quoted on the command line.
    if re.fullmatch(r"[\w.-]+", series.patient) is None:
        return series.uid
    scopes = [series.patient]
    if series.date:
        scopes.append(f"{series.patient}:{series.date}")
    for scope in scopes:
        if sum(candidate.is_in(scope) for candidate in same_number) == 1:
            return f"{scope}:{series.number}"
    return series.uid
