"""Choice of one stack of parallel slices among the files of a folder.

A folder may hold several series and files that cannot be read; a series may hold several stacks,
such as its acquisitions or phases.
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
from medseg.io.dicom.frames import VOLUME_KEYS, Frame, NoSlice, Series, printable, read_frames
from medseg.io.identity import written_date
from medseg.io.inputs import (
    DICOM_SUFFIXES,
    dicom_files,
    is_dicom_file,
    is_dicomdir,
    raise_unreadable,
)
from medseg.io.volume import shown
from medseg.wording import first_few

Item = TypeVar("Item")

# Slices nearer to each other than this have the same position: the thinnest CT slices are ten times
# as far apart.
SAME_POSITION_MM = 0.01

# Pixel spacings with a smaller relative difference are equal: headers store rounded decimals.
SAME_SPACING = 1e-3

# Distances of slices, and their thickness, are equal up to this ratio: headers round them.
ROUNDING = 1.05

# Names of the `VOLUME_KEYS` that may differ between the slices of one MR volume; all others tell
# images apart.
TURNS = ("acquisition", "time")

# Largest number of series, or of reasons, that a message lists; of the others it gives the number.
MAX_LISTED = 10


def group_by(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Collect the items of each key; keys and items keep their order."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, eq=False)
class Stack:
    """Parallel slices of one size, at two positions at least, that may be one volume.

    Attributes:
        part: Number of the stack within its series, from 1; 0 if it is the only one.
        phase: Property that distinguishes it from the other parts, as `acquisition 2`, or "".
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
        """Spacing (z, y, x): mean distance of its positions, distance of rows and of columns."""
        step_mm = float(np.ptp(self.heights_mm)) / (self.num_positions - 1)
        return (step_mm, *self.frames[0].spacing_mm)


class Contents(NamedTuple):
    """Content of the files of a folder, or of one patient or study in it.

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


def lacks_study(image: Frame | NoSlice) -> bool:
    """Whether a file cannot be read and its patient and study are unknown.

    This is the case if the header was cut off, even if the UID of the series was read.
    """
    if isinstance(image, Frame) or not image.is_unreadable:
        return False
    return image.series.scope == Series().scope


def normal_of(frame: Frame) -> np.ndarray:
    """Compute the LPS unit vector (3,) across a slice, right-handed with its row and column."""
    along_row, along_column = frame.axes
    normal = np.cross(along_row, along_column)
    return np.asarray(normal / np.linalg.norm(normal))


def natural_key(value: str) -> tuple[float, str]:
    """Sort key that puts the number 2 before 10, and both before text."""
    try:
        return float(value), value
    except ValueError:
        return float("inf"), value


def _is_parallel(frame: Frame, other: Frame) -> bool:
    """Whether size, pixel spacing and orientation of two slices agree."""
    if frame.pixels.shape != other.pixels.shape:
        return False
    if np.abs(frame.axes - other.axes).max() > DIRECTION_TOLERANCE:
        return False
    spacing_ratios = np.divide(frame.spacing_mm, other.spacing_mm)
    return bool(np.abs(spacing_ratios - 1).max() <= SAME_SPACING)


def heights_of(frames: Sequence[Frame], normal: np.ndarray) -> np.ndarray:
    """Compute the positions of slices along a normal, in mm."""
    return np.array([frame.position_xyz_mm for frame in frames]) @ normal


def num_positions(heights_mm: np.ndarray) -> int:
    """Count the positions of slices that are sorted by height."""
    steps_mm = np.diff(heights_mm)
    return 1 + int(np.count_nonzero(steps_mm > SAME_POSITION_MM))


def _divide_by_phase(
    frames: Sequence[Frame], first_key: int = 0
) -> list[tuple[str, Sequence[Frame]]]:
    """Divide parallel slices that fill the same space more than once into stacks.

    Groups with different values that follow each other along the normal (the rotations of one scan)
    are one stack, even if two groups share a position.

    Args:
        frames: Parallel slices of one series.
        first_key: Index of the first of `VOLUME_KEYS` that may divide the slices; the parts are
            then divided by the later keys.

    Returns:
        Pairs of a phase, see `Stack.phase`, and the slices with this phase.
    """
    if first_key == len(VOLUME_KEYS):
        return [("", frames)]
    key_name = VOLUME_KEYS[first_key].name
    groups = group_by(frames, lambda frame: frame.volume_keys[first_key])
    # A property that differs in nearly every slice, such as a time, distinguishes no volumes.
    may_be_volumes = 1 < len(groups) <= len(frames) // 2
    if not may_be_volumes or not _overlap(list(groups.values())):
        return _divide_by_phase(frames, first_key + 1)
    if key_name in TURNS and _fill_space_once(frames):
        return _divide_by_phase(frames, first_key + 1)
    stacks: list[tuple[str, Sequence[Frame]]] = []
    for value in sorted(groups, key=natural_key):
        phase = f"{key_name} {printable(value) or 'unknown'}"
        for further_phase, slices in _divide_by_phase(groups[value], first_key + 1):
            if further_phase:
                stacks.append((f"{phase}, {further_phase}", slices))
            else:
                stacks.append((phase, slices))
    return stacks


def _fill_space_once(frames: Sequence[Frame]) -> bool:
    """Whether parallel MR slices follow each other evenly, without overlap by their thickness.

    An MR scan may acquire every second slice first, and then those between them. Two CT scans may
    be as far apart.
    """
    if frames[0].series.modality != "MR":
        return False
    thicknesses_mm = [frame.thickness_mm or 0.0 for frame in frames]
    steps_mm = np.diff(np.sort(heights_of(frames, normal_of(frames[0]))))
    step_mm = steps_mm.min()
    is_even = steps_mm.max() <= ROUNDING * step_mm
    # Slices of less than half their distance sample the space, as a sparse CT does: two such
    # scans may alternate by chance.
    fills_space = min(thicknesses_mm) >= 0.5 * step_mm
    return bool(is_even and fills_space and max(thicknesses_mm) <= ROUNDING * step_mm)


def _overlap(groups: list[list[Frame]]) -> bool:
    """Whether two groups of parallel slices share more than one position along the normal."""
    normal = normal_of(groups[0][0])
    group_heights_mm = [heights_of(group, normal) for group in groups]
    steps_mm = np.diff(np.sort(np.concatenate(group_heights_mm)))
    steps_mm = steps_mm[steps_mm > SAME_POSITION_MM]
    # The median: a gap between the groups must not count as their step.
    step_mm = np.median(steps_mm) if steps_mm.size else 0.0
    ranges_mm = [(heights_mm.min(), heights_mm.max()) for heights_mm in group_heights_mm]
    starts_mm, stops_mm = np.array(sorted(ranges_mm)).T  # in the order of the starts
    # The farthest stop of each group and all before it: a long group may reach beyond the next one
    # and overlap a later one.
    reached_mm = np.maximum.accumulate(stops_mm)
    # Groups that share one slice overlap by 0 mm; those that share two, by a step.
    overlaps_mm = reached_mm[:-1] - starts_mm[1:]
    return bool((overlaps_mm > 0.5 * step_mm).any())


def find_stacks(frames: Sequence[Frame]) -> tuple[list[Stack], list[NoSlice]]:
    """Divide the slices of one series into stacks.

    Returns:
        The stacks, and the slices that have no parallel slice at another position.
    """
    # First slice of each orientation and size, to all slices that are parallel to it.
    parallel_slices = group_by(frames, lambda frame: _first_parallel(frame, frames))
    stacks: list[Stack] = []
    single_slices: list[Frame] = []
    for same_orientation in parallel_slices.values():
        for phase, phase_frames in _divide_by_phase(same_orientation):
            slices, heights_mm = _sorted_along_normal(phase_frames)
            if num_positions(heights_mm) > 1:
                part = len(stacks) + 1
                stacks.append(Stack(part, phase, slices, heights_mm))
            else:
                single_slices += phase_frames
    if len(stacks) == 1:
        stacks = [replace(stacks[0], part=0)]
    reason = "single slice without neighbours"
    left_out = [NoSlice(frame.path, frame.series, reason, is_image=True) for frame in single_slices]
    return stacks, left_out


def _first_parallel(frame: Frame, frames: Sequence[Frame]) -> Frame:
    """Find the first slice that a slice is parallel to, which may be itself."""
    parallel = (other for other in frames if _is_parallel(frame, other))
    return next(parallel)


def _sorted_along_normal(frames: Sequence[Frame]) -> tuple[tuple[Frame, ...], np.ndarray]:
    """Sort parallel slices by position, and slices at one position by file and frame.

    Returns:
        The slices, and their positions along the normal in mm.
    """
    heights_mm = heights_of(frames, normal_of(frames[0]))

    def sort_key(number: int) -> tuple[int, Path, int]:
        # Rounded, so that noise does not decide between slices of one position.
        position = round(heights_mm[number] / SAME_POSITION_MM)
        return position, frames[number].path, frames[number].index

    order = sorted(range(len(frames)), key=sort_key)
    return tuple(frames[number] for number in order), heights_mm[order]


def _name_pattern(path: Path) -> str:
    """Reduce the name of a slice to the part that all slices of a folder have in common.

    The pattern is a suffix of DICOM or, without one, the name with "#" for each number. The digits
    may be hexadecimal or followed by letters.

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
    """Find files that are named like the slices beside them and are not DICOM.

    They may be copies that were interrupted before their first byte.

    Args:
        files: All DICOM files in the folders of the slices, and other paths to leave out.
        slices: Files of the slices.
    """
    for folder, neighbours in group_by(slices, lambda path: path.parent).items():
        patterns = set(map(_name_pattern, neighbours))
        for entry in sorted(folder.iterdir()):
            if entry in files or entry.name.startswith(".") or entry.is_dir():
                continue
            if _name_pattern(entry) in patterns:
                yield entry


def refused_copy(path: Path) -> NoSlice:
    """Describe a file that should be a slice and is not DICOM."""
    num_bytes = 0
    if path.is_file():
        num_bytes = path.stat().st_size
    reason = (
        "expected a slice, as its name is like those of the slices beside it, "
        f"but its {num_bytes} bytes are no DICOM; copy it again or remove it."
    )
    return NoSlice(path, Series(), reason, is_unreadable=True)


class SliceFolders:
    """The folders of all slices, by which a file of unknown series gets an owner: a series.

    Args:
        slices: Series Instance UID and path of each slice; a series of one slice is no volume.
    """

    def __init__(self, slices: Iterable[tuple[str, Path]]) -> None:
        self._folders: dict[str, list[Path]] = {}
        for uid, path in slices:
            self._folders.setdefault(uid, []).append(path.parent)

    def owner(self, path: Path) -> str | None:
        """Find the volume that a file belongs to: the only one with slices in the file's folder.

        Where no volume has slices in that folder, it is the only volume of all folders.

        Returns:
            Series Instance UID; None where several volumes, or none, may own the file.
        """
        # One entry per slice, and a volume has two slices at least.
        volumes = {uid: folders for uid, folders in self._folders.items() if len(folders) > 1}
        candidates = [uid for uid, folders in volumes.items() if path.parent in folders]
        if not candidates:
            candidates = list(volumes)
        if len(candidates) != 1:
            return None
        return candidates[0]


def slice_folders(images: Iterable[Frame | NoSlice]) -> SliceFolders:
    """Collect the folders of the slices among images."""
    frames = [image for image in images if isinstance(image, Frame)]
    return SliceFolders((frame.series.uid, frame.path) for frame in frames)


def read_images(
    path: Path,
    modality: str,
    files: Sequence[Path],
    *,
    is_deep: bool,
    on_file: Callable[[], None] = lambda: None,
    on_unreadable: Callable[[Path, OSError], None] = raise_unreadable,
) -> list[Frame | NoSlice]:
    """Read the headers of some files, or of all DICOM files at a path.

    A file that is not DICOM is among the results, as unreadable, if it is one of `files`; without
    `files`, if it is named like the slices beside it.

    Args:
        path: Folder, or a file whose folder is read.
        modality: Modality of the slices, as DICOM names it; "" takes any.
        files: The files to read instead of all files at the path; empty: all.
        is_deep: Whether the folders below are searched too.
        on_file: Called after each file.
        on_unreadable: As for `dicom_files`: the file or folder is not among the results. Without
            effect on `files`.
    """
    unreadable_paths: set[Path] = set()

    def note_unreadable(unreadable_path: Path, error: OSError) -> None:
        unreadable_paths.add(unreadable_path)
        on_unreadable(unreadable_path, error)

    if files:
        readable_files = [file for file in files if is_dicom_file(file)]
    else:
        folder = path.parent if path.is_file() else path
        readable_files = list(dicom_files(folder, is_deep=is_deep, on_unreadable=note_unreadable))
    images: list[Frame | NoSlice] = []
    for file in readable_files:
        images += read_frames(file, modality)
        on_file()
    if files:
        broken_files = set(files) - set(readable_files)
    else:
        slices = {image.path for image in images if isinstance(image, Frame)}
        examined_paths = {*readable_files, *unreadable_paths}
        broken_files = set(broken_copies(examined_paths, slices))
    return [*images, *map(refused_copy, sorted(broken_files))]


def _in_scope(images: list[Frame | NoSlice], choice: SeriesChoice) -> list[Frame | NoSlice]:
    """Keep the images of the chosen patient or study.

    If no slice would be left, all images stay, so that the error message can list their series.
    """
    uids_in_scope: set[str] = set()
    uids_elsewhere: set[str] = set()
    for image in images:
        if choice.is_scope_of(image.series):
            uids_in_scope.add(image.series.uid)
        elif not lacks_study(image):
            uids_elsewhere.add(image.series.uid)
    # A file without a UID may belong to any series.
    other_uids = uids_elsewhere - uids_in_scope - {""}
    in_scope: list[Frame | NoSlice] = []
    for image in images:
        may_be_in_scope = lacks_study(image) and image.series.uid not in other_uids
        if choice.is_scope_of(image.series) or may_be_in_scope:
            in_scope.append(image)
    has_slices = any(isinstance(image, Frame) for image in in_scope)
    return in_scope if has_slices else images


def _sort_contents(images: list[Frame | NoSlice]) -> Contents:
    """Build the stacks of images, and sort the other images by whether they can be read."""
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
    frames_by_series = group_by(frames, lambda frame: frame.series.uid)
    for series_frames in frames_by_series.values():
        series_stacks, single_slices = find_stacks(series_frames)
        stacks += series_stacks
        left_out += single_slices
    # Messages list the stacks in this order.
    stacks.sort(key=lambda stack: (natural_key(stack.series.number), stack.series.uid, stack.part))
    return Contents(images, stacks, left_out, unreadable)


def choose_stack(
    path: Path, series: str | None, modality: str, files: Sequence[Path] = ()
) -> tuple[Stack, list[Finding]]:
    """Read the headers of all files and find the one stack that the arguments select.

    Unreadable files are refused where their series is chosen; other series stay readable beside
    them. An unreadable file of unknown series belongs to the only volume of its folder; beside
    several volumes it is left out with a warning. A series that consists of unreadable files only
    is left out, like an object of another modality, if exactly one other series can be read.

    Args:
        path: Folder, DICOMDIR or one file of a series, as for `open_dicom`.
        series: Series Instance UID or Series Number, with `/<part>` for a part of a series; before
            it `<scope>:` for the series of one patient or study, see `Series.is_in`; None for the
            only one.
        modality: Modality of the series, as DICOM names it; "" takes any.
        files: The files to read instead of all files at the path.

    Returns:
        The stack, and findings: on files that were left out (warnings where a file may be a part of
        the scan, else information) and on slices of several studies.

    Raises:
        UserError: If no stack is selected, or more than one, or a file of the series cannot be
            read.
    """
    is_folder = path.is_dir() or is_dicomdir(path)
    only_file = None if is_folder else path
    choice = parse_series(series)
    kind = f"{modality or 'scan'} series"
    images = read_images(path, modality, files, is_deep=is_folder)
    folders = slice_folders(images)
    contents = _sort_contents(_in_scope(images, choice))
    # All stacks of a folder; for a file, the stacks with a slice in it.
    candidates = _stacks_with(contents.stacks, only_file)
    # A series of one stack (part 0) may be named as its own part 1.
    chosen = [stack for stack in candidates if choice.selects(stack.series, stack.part or 1)]
    if len(chosen) > 1:
        raise _several(path, kind, chosen, contents.stacks)
    # Series Instance UIDs that the arguments may mean: all files of these series must be readable.
    if chosen:
        meant_uids = {chosen[0].series.uid}
    elif candidates:
        # No stack is the chosen one, perhaps because the files of that series cannot be read.
        meant_uids = _uids_of(contents.images, choice, only_file)
    else:
        # Without any stack, an unreadable file of any series may be the reason.
        meant_uids = _uids_of(contents.images, parse_series(None), only_file)
    # Before the errors below: unreadable files may be the reason why there is no stack.
    _check_readable(contents, meant_uids, folders)
    left_out = contents.left_out
    # Where the arguments select no series, the findings cover all objects of the folder.
    is_selected = bool(choice.name) or only_file is not None
    if is_selected:
        left_out = [image for image in left_out if image.series.uid in meant_uids]
    if not candidates:
        raise _no_stack(path, kind, left_out)
    if not chosen:
        raise _no_such_series(path, choice, candidates, contents.stacks)
    _check_patient(path, chosen[0])
    findings = _left_out_findings(left_out, meant_uids)
    findings += _study_findings(chosen[0])
    if is_selected:
        findings += _loose_findings(contents.unreadable, folders)
    else:
        findings += _unreadable_findings(contents.unreadable)
    return chosen[0], findings


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
    """List the Series Instance UIDs of the images that a choice selects.

    Args:
        images: Slices and other objects of the files.
        choice: The parsed value of `series=`.
        file: The only file whose images count; None: all count.
    """
    uids = set()
    for image in images:
        is_counted = file is None or image.path == file
        if is_counted and choice.selects(image.series):
            uids.add(image.series.uid)
    return uids


def _several(
    path: Path, kind: str, stacks: Sequence[Stack], all_stacks: Sequence[Stack]
) -> SeveralSeriesError:
    """Refuse a path with several stacks to choose from."""
    return SeveralSeriesError(
        f"{path}: expected one {kind}, but it holds {len(stacks)}: {_list(stacks, all_stacks)}; "
        "choose one with series=, or in the column series of a case table."
    )


def _no_stack(path: Path, kind: str, left_out: Sequence[NoSlice]) -> UserError:
    """Refuse a path without a stack; the message counts the objects that were found."""
    return UserError(
        f"{path}: expected a {kind} of at least two slices, but found only "
        f"{_count_reasons(left_out) or 'no image'}; give the folder of a {kind}."
    )


def _no_such_series(
    path: Path, choice: SeriesChoice, candidates: Sequence[Stack], all_stacks: Sequence[Stack]
) -> UserError:
    """Refuse a value of `series=` that names none of the candidates."""
    name = choice.name
    # `_in_scope` keeps stacks of other patients only if the chosen patient or study has none. The
    # message then names the chosen patient or study too.
    if not choice.is_scope_of(candidates[0].series):
        name = choice.within(choice.scope)
    return UserError(
        f"{path}: there is no series={printable(name)} among "
        f"{_list(candidates, all_stacks)}; give one of them."
    )


def _check_readable(contents: Contents, uids: set[str], folders: SliceFolders) -> None:
    """Check that all files of some series can be read.

    Raises:
        UserError: If a file cannot be read; the message gives the reason of the first such file and
            counts the others.
    """
    broken = []
    for image in contents.unreadable:
        owner = image.series.uid or folders.owner(image.path)
        # If the path has no stack, `uids` may hold "", the UID of files of unknown series: such a
        # file may be the reason why there is no stack.
        if owner in uids or image.series.uid in uids:
            broken.append(image)
    if broken:
        paths = first_few([image.path for image in broken], 1)
        raise UserError(f"{paths}: {broken[0].reason}")


def _check_patient(path: Path, stack: Stack) -> None:
    """Check that all slices of a stack are of one patient.

    Raises:
        UserError: If there are several; the message gives their number.
    """
    # Slices without a Patient ID may belong to the only patient.
    num_patients = len({frame.series.patient for frame in stack.frames} - {""})
    if num_patients > 1:
        raise UserError(
            f"{path}: expected a series of one patient, but its slices carry {num_patients} "
            "different Patient IDs; put the files of each patient into a folder of their own."
        )


def _study_findings(stack: Stack) -> list[Finding]:
    """Warn of slices of several studies: one series belongs to one study."""
    # Slices without a Study Instance UID may belong to the only study.
    num_studies = len({frame.series.study for frame in stack.frames} - {""})
    if num_studies <= 1:
        return []
    sentence = (
        f"the slices carry {num_studies} different Study Instance UIDs; "
        "check that they are of one scan"
    )
    return warnings_of("reading", [sentence])


def _left_out_findings(left_out: Sequence[NoSlice], uids: set[str]) -> list[Finding]:
    """Make findings on the images that are left out.

    A finding is a warning where the image may be a slice of a series of `uids`, else information.
    """
    # A lost slice of the chosen series matters; a topogram, a report or another series does not.
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


def _loose_findings(unreadable: Sequence[NoSlice], folders: SliceFolders) -> list[Finding]:
    """Warn of unreadable files that may belong to several series, such as the chosen one.

    Args:
        unreadable: Files that cannot be read, without those that belong to the chosen series.
        folders: Folders of all slices.
    """
    loose = []
    for image in unreadable:
        if not image.series.uid and folders.owner(image.path) is None:
            loose.append(image)
    if not loose:
        return []
    names = first_few([f"'{image.path.name}'" for image in loose], 1)
    reason = loose[0].reason.rstrip(".")
    sentence = f"a file that does not tell its series may be a slice of the scan: {names}: {reason}"
    return warnings_of("reading", [sentence])


def _count_reasons(images: Iterable[NoSlice]) -> str:
    """List how often each reason occurs in each series; "" without an image."""
    counts = Counter((str(image.series), image.reason) for image in images)
    texts = []
    for (series_name, reason), count in counts.items():
        texts.append(f"{count} x {reason} ({series_name})")
    return first_few(texts, MAX_LISTED)


def _list(stacks: Sequence[Stack], all_stacks: Sequence[Stack]) -> str:
    """List stacks for a message, each as `_describe` writes it.

    Args:
        stacks: The stacks to list.
        all_stacks: Stacks among which each value of `series=` must be unique.
    """
    # Several stacks may be parts of one series, which counts once.
    series_by_uid = {stack.series.uid: stack.series for stack in all_stacks}
    all_series = list(series_by_uid.values())
    descriptions = [_describe(stack, all_series) for stack in stacks]
    return first_few(descriptions, MAX_LISTED, "; ")


def _describe(stack: Stack, all_series: Sequence[Series]) -> str:
    """Write the value of `series=` that names a stack, and the properties of the stack.

    The properties are patient, date and number (if the folder holds several studies), description,
    phase, number of slices and spacing (z, y, x).
    """
    series = stack.series
    key = printable(_shortest_name(series, all_series))
    if stack.part:
        key += f"/{stack.part}"
    properties = []
    all_scopes = {candidate.scope for candidate in all_series}
    if len(all_scopes) > 1:
        properties.append(f"patient {printable(series.patient or 'unknown')}")
        properties.append(printable(written_date(series.date)))
        # Where there is only one study, the key shows the number instead.
        if series.number:
            properties.append(f"series {printable(series.number)}")
    if series.description:
        properties.append(shown(series.description))
    properties.append(stack.phase)
    spacing = " x ".join(f"{mm:.3g}" for mm in stack.spacing_mm)
    # Unknown properties are "" and are left out.
    words = [
        f"series={key}",
        ", ".join(filter(None, properties)),
        f"({len(stack.frames)} slices, {spacing} mm)",
    ]
    return " ".join(filter(None, words))


def _shortest_name(series: Series, all_series: Sequence[Series]) -> str:
    """Choose the shortest value of `series=` that names one series among all.

    In this order: its number; number and patient; number, patient and date; its UID.
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
        num_in_scope = sum(candidate.is_in(scope) for candidate in same_number)
        if num_in_scope == 1:
            return f"{scope}:{series.number}"
    return series.uid
