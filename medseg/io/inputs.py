"""Input paths: the scans at a path, and their case names."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from medseg.errors import UserError

# Suffixes of volume files, the longer ones first, and their formats.
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

# Suffixes of DICOM results; such files are no scans.
DICOM_SEG_SUFFIX, RTSTRUCT_SUFFIX = ".seg.dcm", ".rtstruct.dcm"

WRITTEN_SUFFIXES = (".nii.gz", ".nii", ".nrrd", ".mha", ".mhd", SEGMENTATION_SUFFIX)
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")

# Name of the image in a folder of a case, as in TotalSegmentator's data set.
CASE_IMAGES = ("ct", "mri")


# Control characters, line separators, and bytes of a file name that are no UTF-8.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def volume_suffix(path: Path) -> str | None:
    """Find the suffix that makes a name a volume file, in lower case; None for others."""
    name = path.name.lower()
    for suffix in (SEGMENTATION_SUFFIX, *SUFFIXES):
        if name.endswith(suffix) and len(name) > len(suffix):
            return suffix
    return None


def volume_files(folder: Path) -> list[Path]:
    """List the volume files that lie in a folder itself, sorted by name.

    A link that leads nowhere is one of them, so that its reader tells it: a file of git-annex that
    was not fetched would else be left out in silence.
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
    """List the volume files of a folder but segmentations, which 3D Slicer keeps beside scans."""
    return [path for path in volume_files(folder) if volume_suffix(path) != SEGMENTATION_SUFFIX]


def image_in(folder: Path) -> Path | None:
    """Find the image of a folder of a case, such as `s0001/ct.nii.gz`.

    Returns:
        Its path; None where there is none, or more than one.
    """
    images = [path for path in _scan_files(folder) if case_name(path) in CASE_IMAGES]
    return images[0] if len(images) == 1 else None


def is_dicom_file(path: Path) -> bool:
    """Whether a file is DICOM, by its first bytes; names and suffixes are no evidence.

    A DICOM file has the mark at byte 128 or, without a preamble, begins with a field of the groups
    with which every object begins.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(132)
    if len(head) < 132:
        return False
    if head[128:] == b"DICM":
        return True
    # (0002,00xx) or (0008,00xx), little endian; then two letters, or a length below 64 KiB.
    is_group = head[:2] in (b"\x02\0", b"\x08\0") and head[3:4] == b"\0"
    has_letters = head[4:6].isalpha() and head[4:6].isupper()
    return is_group and (has_letters or head[6:8] == b"\0\0")


def is_dicomdir(path: Path) -> bool:
    """Whether a file is the table of contents of a medium, which stands for its folder."""
    return path.name.upper() == "DICOMDIR" and is_dicom_file(path)


def _visible(folder: Path) -> list[Path]:
    """List what lies in a folder, sorted, without hidden files and folders."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def dicom_files(folder: Path, *, is_deep: bool = True) -> Iterator[Path]:
    """Find the DICOM files of a folder, sorted by name, hidden ones and DICOMDIR left out.

    Args:
        folder: Where to look.
        is_deep: Whether also in the folders below, links followed once.
    """
    searched: set[str] = set()
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        if os.path.realpath(current) in searched:
            continue
        searched.add(os.path.realpath(current))
        entries = _visible(current)
        for entry in entries:
            if volume_suffix(entry) is None and not is_dicomdir(entry) and is_dicom_file(entry):
                yield entry
        if is_deep:
            # The last of the list is searched next.
            waiting += reversed([entry for entry in entries if entry.is_dir()])


def _has_slices(folder: Path, *, is_deep: bool = True) -> bool:
    """Whether a folder holds DICOM files other than results of a prediction."""
    return any(
        not path.name.lower().endswith((DICOM_SEG_SUFFIX, RTSTRUCT_SUFFIX))
        for path in dicom_files(folder, is_deep=is_deep)
    )


def _case_image(folder: Path) -> Path | None:
    """Find the scan of a subfolder: its image, or itself where it holds DICOM files.

    None where there is none. A folder that cannot be searched counts as a scan.
    """
    try:
        image = image_in(folder)
        if image is not None:
            return image
        return folder if _has_slices(folder) else None
    except OSError:  # as in another user's folder
        return folder


def case_name(path: Path) -> str:
    """Name a case after its file, without the suffix; a DICOM series after its folder.

    Control characters become "_".

    Example:
        >>> case_name(Path("scans/Doe, John (1.5).nii.gz"))
        'Doe, John (1.5)'
    """
    suffix = volume_suffix(path)
    if suffix is not None and not path.is_dir():
        return CONTROL_CHARACTERS.sub("_", path.name[: -len(suffix)])
    is_slice = path.name.lower().endswith(DICOM_SUFFIXES) or is_dicom_file(path)
    folder = path.parent if is_slice else path
    name = folder.name
    if name in ("", ".."):
        name = folder.resolve().name
    return CONTROL_CHARACTERS.sub("_", name)


def with_case_name(name: str, message: str, files: Iterable[Path | None]) -> str:
    """Put the name of a case before a message, unless the message begins with a file of that name.

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

    Raises:
        UserError: If the path does not exist or is none of them.
    """
    if not path.exists():
        raise UserError(f"{path}: this file or folder does not exist; check the path.")
    suffix = volume_suffix(path)
    if suffix is not None and path.is_file():
        return SUFFIXES.get(suffix, "nrrd")
    if path.is_dir():
        is_dicom = any(True for _ in dicom_files(path))
        kind = "folder without DICOM files"
    else:
        is_dicom = is_dicom_file(path)
        kind = "file of another kind"
    if is_dicom:
        return "dicom"
    raise UserError(f"{path}: expected {', '.join(SUFFIXES)} or a DICOM series, got a {kind}.")


def list_inputs(path: Path, *, is_dicom: bool = False) -> list[tuple[str, Path]]:
    """List the scans that a path stands for.

    A file is one scan; so is a folder that itself holds DICOM files or a DICOMDIR, even with its
    label map beside them. Any other folder gives its volume files, and those of its subfolders that
    hold DICOM files at any depth or an image `ct.nii.gz`, one scan each, sorted by name. Other
    files (tables, notes), DICOM results and hidden files are ignored. A subfolder that cannot be
    searched counts as a scan, whose reading then fails.

    Args:
        path: File or folder.
        is_dicom: Whether a DICOM series is asked for: volume files beside DICOM files are then left
            out.

    Returns:
        Pairs (case name, path).

    Raises:
        UserError: If there is no scan, two scans would have the same name, volume files are beside
            DICOM files, or the path cannot be searched.
    """
    try:
        if not path.is_dir():
            input_format(path)
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
    scans = _scan_files(folder)
    if any(map(is_dicomdir, entries)) or _has_slices(folder, is_deep=False):
        if not is_dicom:
            _refuse_volumes(folder, scans)
        return [(case_name(folder), folder)]
    images = {entry: _case_image(entry) for entry in entries if entry.is_dir()}
    scans += [entry for entry, image in images.items() if image is not None]
    if not scans:
        raise _no_scans(folder, images)
    cases = _by_case_name(folder, scans)
    # A folder of a case is named after itself and stands for its image.
    return [(name, images.get(scan) or scan) for name, scan in cases.items()]


def _no_scans(folder: Path, subfolders: Iterable[Path]) -> UserError:
    """Refuse a folder without a scan; name those of its subfolders that hold volume files."""
    inner = [str(subfolder) for subfolder in subfolders if volume_files(subfolder)]
    advice = "check the path."
    if inner:
        advice = f"give one of {', '.join(inner[:5])}."
    return UserError(
        f"{folder}: expected scans ({', '.join(SUFFIXES)}, or folders of one DICOM series "
        f"each), but the folder holds none; {advice}"
    )


def _refuse_volumes(folder: Path, scans: Iterable[Path]) -> None:
    """Refuse volume files beside a DICOM series; only its label map may be there, by its name.

    Raises:
        UserError: With one of the files.
    """
    names = [scan.name for scan in scans if case_name(scan) != case_name(folder)]
    if names:
        raise UserError(
            f"{folder}: holds DICOM files beside {len(names)} volume files such as "
            f"'{min(names)}'; give one of these files, choose the series with series=, or "
            "move either kind into a folder of its own."
        )


def _by_case_name(folder: Path, scans: Iterable[Path]) -> dict[str, Path]:
    """Name the scans of a folder, sorted by path.

    Raises:
        UserError: If two would have the same name.
    """
    cases: dict[str, Path] = {}
    for scan in sorted(scans):
        name = case_name(scan)
        if name in cases:
            raise UserError(
                f"{folder}: '{cases[name].name}' and '{scan.name}' would both be called '{name}'; "
                "rename one of them."
            )
        cases[name] = scan
    return cases
