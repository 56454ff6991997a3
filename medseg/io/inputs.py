"""Search for scans: the scans at a path, their formats and their case names."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from medseg.errors import UserError

# Suffixes of volume files with their formats, in the order of messages.
SUFFIXES = {
    ".nii.gz": "nifti",
    ".nii": "nifti",
    ".nrrd": "nrrd",
    ".nhdr": "nrrd",
    ".mha": "metaimage",
    ".mhd": "metaimage",
}

# Suffix of segmentations of 3D Slicer, which are NRRD files.
SEGMENTATION_SUFFIX = ".seg.nrrd"

# Suffixes of the DICOM files that a prediction writes; such files are not scans.
DICOM_SEG_SUFFIX, RTSTRUCT_SUFFIX = ".seg.dcm", ".rtstruct.dcm"

# Suffixes of the volume files that medseg writes.
WRITTEN_SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha", ".mhd", SEGMENTATION_SUFFIX)
# Suffixes that scanners and archives give to DICOM files, which often have none.
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")

# Case names of the image in a folder of a case, as in TotalSegmentator's data set
# (`s0001/ct.nii.gz`).
CASE_IMAGES = ("ct", "mri")

# Number of first bytes that identify a DICOM file: a preamble of 128, and the mark "DICM".
NUM_DICOM_HEAD_BYTES = 132

# Control characters, line separators, and surrogates (bytes of a file name that are not UTF-8).
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def volume_suffix(path: Path) -> str | None:
    """Find the suffix of a volume file by the file's name, in lower case; None for other names."""
    name = path.name.lower()
    for suffix in (SEGMENTATION_SUFFIX, *SUFFIXES):
        # A name that is nothing but a suffix is a hidden file.
        if name.endswith(suffix) and name != suffix:
            return suffix
    return None


def volume_files(folder: Path) -> list[Path]:
    """List the volume files that lie in a folder itself, sorted by name.

    A link that leads nowhere is one of them, so that reading it fails with a message: otherwise a
    file of git-annex that was not fetched would be left out in silence.
    """
    files = []
    for entry in _visible(folder):
        is_file = entry.is_file() or leads_nowhere(entry)
        if is_file and volume_suffix(entry) is not None:
            files.append(entry)
    return files


def leads_nowhere(path: Path) -> bool:
    """Whether a path is a link to a file that does not exist, or to itself."""
    return path.is_symlink() and not path.exists()


def _scan_files(folder: Path) -> list[Path]:
    """List the volume files of a folder, sorted by name, without segmentations of 3D Slicer."""
    return [path for path in volume_files(folder) if volume_suffix(path) != SEGMENTATION_SUFFIX]


def image_in(folder: Path) -> Path | None:
    """Find the image of a folder of a case, such as `s0001/ct.nii.gz`.

    Returns:
        Path of the image; None if there is none, or more than one.
    """
    images = _case_images(folder)
    return images[0] if len(images) == 1 else None


def _case_images(folder: Path) -> list[Path]:
    """List the images in a folder of a case, see `image_in`, sorted by name."""
    return [path for path in _scan_files(folder) if case_name(path) in CASE_IMAGES]


def is_dicom_file(path: Path) -> bool:
    """Whether a file is DICOM, by its first bytes; names and suffixes are no evidence.

    A DICOM file has the mark "DICM" at byte 128. Older files lack preamble and mark: they begin
    with a data element of group 0002 or 0008, the first groups of every object.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(NUM_DICOM_HEAD_BYTES)
    if len(head) < NUM_DICOM_HEAD_BYTES:
        return False
    if head[128:] == b"DICM":
        return True
    # Group and element of the tag, 2 bytes each, little endian: (0002,00xx) or (0008,00xx).
    is_first_group = head[:2] in (b"\x02\0", b"\x08\0") and head[3:4] == b"\0"
    # Explicit encoding: the value representation follows, two letters.
    has_letters = head[4:6].isalpha() and head[4:6].isupper()
    # Implicit encoding: the length of the value follows, 4 bytes; it is below 64 KiB.
    has_length = head[6:8] == b"\0\0"
    return is_first_group and (has_letters or has_length)


def is_dicomdir(path: Path) -> bool:
    """Whether a file is a DICOMDIR, the table of contents of a medium.

    As an input it stands for its folder.
    """
    return path.name.upper() == "DICOMDIR" and is_dicom_file(path)


def _visible(folder: Path) -> list[Path]:
    """List the files and folders in a folder, sorted, without hidden ones."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def raise_unreadable(_: Path, error: OSError) -> None:
    """Raise the error of a file or folder that cannot be read."""
    raise error


def dicom_files(
    folder: Path,
    *,
    is_deep: bool = True,
    on_unreadable: Callable[[Path, OSError], None] = raise_unreadable,
) -> Iterator[Path]:
    """Yield the DICOM files of a folder, sorted by name within each folder.

    Hidden files and DICOMDIR are left out.

    Args:
        folder: Where to look.
        is_deep: Whether to search the folders below too; a folder that several links lead to is
            searched once.
        on_unreadable: Called with each file or folder that cannot be read, and the error. By
            default the error is raised.
    """
    searched: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        # Links may form a circle.
        real_path = os.path.realpath(current)
        if real_path in searched:
            continue
        searched.add(real_path)
        try:
            entries = _visible(current)
        except OSError as error:
            on_unreadable(current, error)
            continue
        subfolders = []
        for entry in entries:
            try:
                is_listed = _is_listed_dicom(entry)
                is_folder = entry.is_dir()
            except OSError as error:
                on_unreadable(entry, error)
                continue
            if is_listed:
                yield entry
            if is_folder:
                subfolders.append(entry)
        if is_deep:
            # `pop` takes the last one first.
            waiting += reversed(subfolders)


def _is_listed_dicom(path: Path) -> bool:
    """Whether a path is a DICOM file other than a DICOMDIR."""
    # A volume file is known by its name; only other files are opened.
    if volume_suffix(path) is not None or is_dicomdir(path):
        return False
    return is_dicom_file(path)


def _has_slices(folder: Path, *, is_deep: bool = True) -> bool:
    """Whether a folder holds DICOM files other than results of a prediction."""
    for path in dicom_files(folder, is_deep=is_deep):
        if not path.name.lower().endswith((DICOM_SEG_SUFFIX, RTSTRUCT_SUFFIX)):
            return True
    return False


def _scan_of(subfolder: Path) -> Path | None:
    """Find the scan of a subfolder.

    Returns:
        The image in it or, if it holds DICOM files or cannot be searched, the subfolder itself;
        None if there is no scan.
    """
    try:
        image = image_in(subfolder)
        if image is not None:
            return image
        if _has_slices(subfolder):
            return subfolder
        return None
    except OSError:  # such as another user's folder; reading the scan reports the error
        return subfolder


def case_name(path: Path) -> str:
    """Name a case after its file, without the suffix; a DICOM series after its folder.

    Characters of `CONTROL_CHARACTERS` become "_".

    Example:
        >>> case_name(Path("scans/Doe, John (1.5).nii.gz"))
        'Doe, John (1.5)'
    """
    suffix = volume_suffix(path)
    if suffix is not None and not path.is_dir():
        return CONTROL_CHARACTERS.sub("_", path.name[: -len(suffix)])
    folder = path
    if path.name.lower().endswith(DICOM_SUFFIXES) or is_dicom_file(path):
        folder = path.parent
    name = folder.name
    # Paths such as "." and ".." do not end with the folder's name.
    if name in ("", ".."):
        name = folder.resolve().name
    return CONTROL_CHARACTERS.sub("_", name)


def with_case_name(name: str, message: str, files: Iterable[Path | None]) -> str:
    """Put the name of a case before a message that does not name the case yet.

    A message that begins with a path whose case name is this one names the case already.

    Args:
        name: Name of the case.
        message: Sentence about it.
        files: Files and folders of the case.

    Example:
        >>> with_case_name("a", "ct/a.nii.gz: it is empty", [Path("ct/a.nii.gz")])
        'ct/a.nii.gz: it is empty'
        >>> with_case_name("patient 1", "ct/a.nii.gz: it is empty", [Path("ct/a.nii.gz")])
        'patient 1: ct/a.nii.gz: it is empty'
    """
    for file in files:
        if file is not None and message.startswith(str(file)) and case_name(file) == name:
            return message
    return f"{name}: {message}"


def input_format(path: Path) -> str:
    """Find the format of an input: `nifti`, `nrrd` or `metaimage` by name, `dicom` by content.

    Args:
        path: File or folder; only a DICOM series may be a folder.

    Raises:
        UserError: If the path does not exist or has none of these formats.
    """
    if not path.exists():
        raise UserError(f"{path}: this file or folder does not exist; check the path.")
    suffix = volume_suffix(path)
    if suffix is not None and path.is_file():
        # `SUFFIXES` lacks `SEGMENTATION_SUFFIX`, which is NRRD.
        return SUFFIXES.get(suffix, "nrrd")
    if path.is_dir():
        # The search ends with the first file.
        is_dicom = any(True for _ in dicom_files(path))
        kind = "folder without DICOM files"
    else:
        is_dicom = is_dicom_file(path)
        kind = "file of another kind"
    if is_dicom:
        return "dicom"
    if path.is_dir() and _case_images(path):
        names = ", ".join(image.name for image in _case_images(path))
        kind = f"folder with {names}; name one image of each case in a case table"
    raise UserError(f"{path}: expected {', '.join(SUFFIXES)} or a DICOM series, got a {kind}.")


def list_inputs(path: Path, *, is_dicom: bool = False) -> list[tuple[str, Path]]:
    """List the scans that a path stands for.

    A file is one scan; so is a folder that itself holds DICOM files or a DICOMDIR, even with its
    label map beside them. Any other folder gives, sorted by name, its volume files, and one scan
    for each subfolder that holds DICOM files at any depth or an image `ct.nii.gz`. Other files
    (tables, notes), DICOM results and hidden files are ignored. A subfolder that cannot be searched
    counts as a scan, whose reading then fails, and so does one with several images beside other
    scans, such as `ct.nii.gz` and `mri.nii.gz`.

    Args:
        path: File or folder.
        is_dicom: Whether the user has asked for a DICOM series: volume files beside DICOM files are
            then ignored instead of refused.

    Returns:
        Pairs (case name, path).

    Raises:
        UserError: If there is no scan, two scans would have the same name, volume files are beside
            DICOM files, or the path cannot be searched.
    """
    try:
        if not path.is_dir():
            input_format(path)  # refuses a path that is no scan
            return [(case_name(path), path)]
        return _list_folder(path, is_dicom=is_dicom)
    except OSError as error:
        place = error.filename or path
        raise UserError(
            f"{place}: cannot be read ({error.strerror or error}); "
            "check the path and its permissions."
        ) from error


def _list_folder(folder: Path, *, is_dicom: bool) -> list[tuple[str, Path]]:
    """List the scans of a folder; arguments, result and errors are those of `list_inputs`."""
    entries = _visible(folder)
    files = _scan_files(folder)
    if any(map(is_dicomdir, entries)) or _has_slices(folder, is_deep=False):
        if not is_dicom:
            _refuse_volumes(folder, files)
        return [(case_name(folder), folder)]
    subfolders = [entry for entry in entries if entry.is_dir()]
    # File or subfolder after which a scan is named, to the path of the scan: the image in a folder
    # of a case is named after the folder.
    scans = {file: file for file in files}
    for subfolder in subfolders:
        scan = _scan_of(subfolder)
        if scan is not None:
            scans[subfolder] = scan
    if not scans:
        raise _no_scans(folder, subfolders)
    # A case with several images, of which none can be chosen, must not be left out in silence.
    for subfolder in subfolders:
        if subfolder not in scans and _case_images(subfolder):
            scans[subfolder] = subfolder
    cases = _by_case_name(folder, scans)
    return [(name, scans[entry]) for name, entry in cases.items()]


def _no_scans(folder: Path, subfolders: Iterable[Path]) -> UserError:
    """Refuse a folder without a scan; name up to five subfolders that hold volume files."""
    with_volumes = [str(subfolder) for subfolder in subfolders if volume_files(subfolder)]
    advice = "check the path."
    if with_volumes:
        advice = f"give one of {', '.join(with_volumes[:5])}."
    return UserError(
        f"{folder}: expected scans ({', '.join(SUFFIXES)}, or folders of one DICOM series "
        f"each), but the folder holds none; {advice}"
    )


def _refuse_volumes(folder: Path, files: Iterable[Path]) -> None:
    """Refuse volume files beside a DICOM series.

    A file with the case name of the series is its label map, which is accepted.

    Raises:
        UserError: If there are other volume files; the message names one.
    """
    names = [file.name for file in files if case_name(file) != case_name(folder)]
    if names:
        raise UserError(
            f"{folder}: holds DICOM files beside {len(names)} volume files such as "
            f"'{min(names)}'; give one of these files, choose the series with series=, or "
            "move either kind into a folder of its own."
        )


def _by_case_name(folder: Path, entries: Iterable[Path]) -> dict[str, Path]:
    """Map case names to the files and subfolders of a folder, sorted by path.

    Raises:
        UserError: If two of them would have the same name.
    """
    cases: dict[str, Path] = {}
    for entry in sorted(entries):
        name = case_name(entry)
        if name in cases:
            raise UserError(
                f"{folder}: '{cases[name].name}' and '{entry.name}' would both be called '{name}'; "
                "rename one of them."
            )
        cases[name] = entry
    return cases
