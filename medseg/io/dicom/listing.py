"""List of the series below a folder with their properties, from headers alone."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from medseg.io.dicom.frames import VOLUME_KEYS, Frame, NoSlice, Series, printable
from medseg.io.dicom.read import fault_of
from medseg.io.dicom.stacks import (
    SliceFolders,
    Stack,
    find_stacks,
    natural_key,
    read_images,
    slice_folders,
)
from medseg.wording import first_few

# Images by scope and Series Instance UID.
ImagesBySeries = dict[tuple[str, str], list[Frame | NoSlice]]

# Index of the kernel in `VOLUME_KEYS`, and so in `Frame.volume_keys`.
KERNEL = [key.name for key in VOLUME_KEYS].index("kernel")


@dataclass(frozen=True, eq=False)
class ListedSeries:
    """A series, or a part of one that is a stack of its own.

    Attributes:
        series: Patient, study and series.
        folder: Folder that holds all its files.
        files: Its files, and unreadable files of unknown series that can only belong to this one.
        num_bytes: Size of its files, without files of unknown series, which are entries of their
            own.
        num_slices: Number of slice positions; if it is no stack of slices, number of images.
        fault: Why it cannot be read as a scan, as the end of a sentence; "" for a scan.
        is_unique: Whether no other patient or study has a series of this UID.
        is_damaged: Whether a file of it cannot be read.
        part: Number of the part, from 1; 0 if the series is one stack.
        phase: See `Stack.phase`.
        kernel: Convolution kernel, or "".
        thickness_mm: Slice thickness, or None.
        spacing_mm: Spacing (z, y, x); empty if it is no stack of slices.
        shape: Rows and columns; empty if it is no stack of slices.
    """

    series: Series
    folder: Path
    files: tuple[Path, ...]
    num_bytes: int
    num_slices: int
    fault: str
    is_unique: bool = True
    is_damaged: bool = False
    part: int = 0
    phase: str = ""
    kernel: str = ""
    thickness_mm: float | None = None
    spacing_mm: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def choice(self) -> str:
        """Value of `series=` that selects this entry and no other."""
        series = self.series
        choice = series.uid or series.number
        if self.part:
            choice += f"/{self.part}"
        if self.is_unique:
            return choice
        return f"{series.scope}:{choice}"

    @property
    def num_voxels(self) -> int:
        """Voxels of the stack; 0 if it is no stack of slices."""
        if not self.shape:
            return 0
        rows, columns = self.shape
        return self.num_slices * rows * columns


def list_series(
    path: Path,
    modality: str = "ct",
    files: Sequence[Path] = (),
    on_file: Callable[[], None] = lambda: None,
    *,
    lists_unreadable: bool = False,
) -> list[ListedSeries]:
    """List the series below a folder, wherever their files lie.

    Series are told apart by Patient ID, Study Instance UID and Series Instance UID. A series that
    the reader of scans would refuse has a `fault`, and so has one with a file that cannot be read.

    Args:
        path: Folder, searched to its bottom.
        modality: Modality of scans, as a task names it: `ct`, `mr`, or `other` for any.
        files: The files to read instead of all files at the path.
        on_file: Called after each file.
        lists_unreadable: Whether files and folders that the system does not let read are listed
            with a fault; otherwise the first one raises its error.

    Returns:
        The series by patient, date, study and number; last, files and folders that cannot be read
        and whose series are unknown.

    Raises:
        OSError: If the system does not let a file or folder be read, without `lists_unreadable`.
    """
    dicom_modality = "" if modality == "other" else modality.upper()
    # Files that cannot be read and whose series is unknown, and folders that cannot be read.
    loose: list[NoSlice] = []

    def note_unreadable(unreadable_path: Path, error: OSError) -> None:
        if not lists_unreadable:
            raise error
        reason = f"cannot be read ({error.strerror or error}); check its permissions."
        loose.append(NoSlice(unreadable_path, Series(), reason, is_unreadable=True))

    images = read_images(
        path,
        dicom_modality,
        files,
        is_deep=True,
        on_file=on_file,
        on_unreadable=note_unreadable,
    )
    by_series: ImagesBySeries = {}
    for image in images:
        if isinstance(image, NoSlice) and image.is_unreadable and not image.series.uid:
            loose.append(image)
        else:
            key = (image.series.scope, image.series.uid)
            by_series.setdefault(key, []).append(image)
    _join_cut_files(by_series)
    doubtful = _doubtful_files(loose, slice_folders(images))
    return [*_list_all(by_series, doubtful), *map(_loose_entry, loose)]


def _list_all(
    by_series: ImagesBySeries, doubtful: Mapping[str | None, Sequence[NoSlice]]
) -> list[ListedSeries]:
    """List series in the order of `_order`.

    Args:
        by_series: Their images.
        doubtful: See `_doubtful_files`.
    """
    # Number of scopes (patient and study) that have a series, by UID of the series.
    num_scopes = Counter(uid for _, uid in by_series)
    listed: list[ListedSeries] = []
    for (_, uid), series_images in by_series.items():
        is_unique = num_scopes[uid] == 1
        listed += _list_one(series_images, doubtful.get(uid, []), is_unique=is_unique)
    return sorted(listed, key=_order)


def _doubtful_files(
    loose: Sequence[NoSlice], folders: SliceFolders
) -> dict[str | None, list[NoSlice]]:
    """Group files by the UID of the only series that they may belong to.

    Args:
        loose: Files and folders that cannot be read. Folders are left out: they may hold anything.
        folders: Folders of all slices.

    Returns:
        The files by UID; under None the files that may belong to several series, or to none.
    """
    doubtful: dict[str | None, list[NoSlice]] = {}
    for image in loose:
        if not os.path.isdir(image.path):
            doubtful.setdefault(folders.owner(image.path), []).append(image)
    return doubtful


def _join_cut_files(by_series: ImagesBySeries) -> None:
    """Move files that were cut off in their header to their series, in place in `by_series`.

    Such files have the UID of their series, and lack patient and study.
    """
    unknown_scope = Series().scope
    # A copy of the keys, since the loop removes some.
    for scope, uid in list(by_series):
        if scope != unknown_scope or not _are_unreadable(by_series[scope, uid]):
            continue
        owners = [key for key in by_series if key[1] == uid and key[0] != unknown_scope]
        if len(owners) == 1:
            by_series[owners[0]] += by_series.pop((scope, uid))


def _are_unreadable(images: Sequence[Frame | NoSlice]) -> bool:
    """Whether all of some images are unreadable files."""
    return all(isinstance(image, NoSlice) and image.is_unreadable for image in images)


def _order(listed: ListedSeries) -> tuple[str, str, str, tuple[float, str], str, int]:
    """Sort key: patient, date, study, number, UID, part."""
    series = listed.series
    number = natural_key(series.number)
    return series.patient, series.date, series.study, number, series.uid, listed.part


def _list_one(
    images: Sequence[Frame | NoSlice], doubtful: Sequence[NoSlice], *, is_unique: bool
) -> Iterator[ListedSeries]:
    """Yield the stacks of one series or, where it has none, the series as a whole with a fault.

    Args:
        images: Slices and other objects in its files.
        doubtful: Files of an unknown series that can only belong to it.
        is_unique: See `ListedSeries`.
    """
    frames: list[Frame] = []
    others: list[NoSlice] = []
    for image in images:
        if isinstance(image, Frame):
            frames.append(image)
        else:
            others.append(image)
    stacks, single_slices = find_stacks(frames)
    damage = _damage([image for image in others if image.is_unreadable])
    # Each path once: a file of several frames gives several images.
    paths = list(dict.fromkeys(image.path for image in images))
    doubtful_paths = [image.path for image in doubtful]
    common_folder = os.path.commonpath([path.parent for path in paths])
    kernel = ""
    if frames:
        kernel = frames[0].volume_keys[KERNEL]
    whole = ListedSeries(
        series=images[0].series,
        folder=Path(common_folder),
        files=(*paths, *doubtful_paths),
        num_bytes=sum(path.stat().st_size for path in paths),
        num_slices=len(images),
        fault=damage or _reasons([*others, *single_slices]),
        is_unique=is_unique,
        is_damaged=bool(damage),
        kernel=kernel,
    )
    if not stacks:
        yield whole
        return
    # A doubtful file may be a slice of any stack of the series.
    if not damage and doubtful:
        damage = f"it may lack {_damage(doubtful)}"
    for stack in stacks:
        yield _list_stack(stack, whole, damage)


def _list_stack(stack: Stack, whole: ListedSeries, damage: str) -> ListedSeries:
    """Describe a stack of a series.

    Args:
        stack: Slices of the series that make one volume.
        whole: The series as a whole, whose common fields are kept.
        damage: Names of files of the series that cannot be read, with the reason, or "".
    """
    first = stack.frames[0]
    return replace(
        whole,
        series=stack.series,
        num_slices=stack.num_positions,
        fault=damage or fault_of(stack),
        part=stack.part,
        phase=stack.phase,
        kernel=first.volume_keys[KERNEL],
        thickness_mm=first.thickness_mm,
        spacing_mm=stack.spacing_mm,
        shape=first.pixels.shape,
    )


def _loose_entry(image: NoSlice) -> ListedSeries:
    """Describe a file or folder that cannot be read and whose series is unknown."""
    num_bytes = 0
    # A link may lead nowhere, or into a folder that may not be searched.
    with suppress(OSError):
        if image.path.is_file():
            num_bytes = image.path.stat().st_size
    return ListedSeries(
        series=image.series,
        folder=image.path.parent,
        files=(image.path,),
        num_bytes=num_bytes,
        num_slices=0,
        fault=_damage([image]),
        is_damaged=True,
    )


def _damage(unreadable: Sequence[NoSlice]) -> str:
    """Name the first of some unreadable files, how many others there are, and the reason.

    Without files the result is "".
    """
    if not unreadable:
        return ""
    names = first_few([f"'{image.path.name}'" for image in unreadable], 1)
    return f"{names}: {unreadable[0].reason}"


def _reasons(others: Iterable[NoSlice]) -> str:
    """List why images are not slices, each reason once and three at most."""
    reasons = dict.fromkeys(printable(image.reason) for image in others)
    return first_few(reasons, 3)
