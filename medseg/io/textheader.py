"""NRRD and MetaImage: a strict check of the text header, its geometry by SimpleITK, and the streams of its voxels.

SimpleITK gets a copy of the checked fields and never the user's file: its MetaImage reader crashes on damaged headers and opens
whatever file a header names. The voxels are decoded here, because SimpleITK ignores damage to compressed voxels (README.md).
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid
from medseg.io.checks import shown
from medseg.io.lazy import LazyVolume, lazy_volume
from medseg.io.simpleitk import grid_of

MAX_HEADER_BYTES = 2**20
MAX_DATA_FILES = 100_000

# Patterns of one word. No number is so long that a C program reads it in another way than Python.
NUMBER = r"[-+]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d\d?)?"
POSITIVE = NUMBER.removeprefix("[-+]?")
SIZE = r"[1-9]\d{0,8}"
SKIPPED = r"-1|\d{1,9}"
VECTOR = rf"\({NUMBER}(,{NUMBER}){{2,3}}\)"
FLAG = "true|false|1|0"
# Other programs ignore units, so a length in another unit than mm is ambiguous.
MILLIMETRES = r"(?!.*\b(m|cm|um|µm|μm|microns?|nm|in|inch|met(er|re)|micrometer)\b).*"


class Rule(NamedTuple):
    """The values that a header field may have.

    Attributes:
        pattern: Regular expression of the whole value, or of each word; letters of either case.
        expected: Description for messages.
        power: The value has (number of axes) ** power words; None where it is one text.
    """

    pattern: str
    expected: str
    power: int | None = None


NRRD_TYPES = "(signed |unsigned |u)?(char|short|int|long ?long)|(unsigned |signed )?(short|long long) int|u?int(8|16|32|64)(_t)?|float|double"
NRRD_RULES = {
    "dimension": Rule("[3-5]", "3 to 5 axes"),
    "sizes": Rule(SIZE, "a whole number for each axis", 1),
    "space directions": Rule(f"{VECTOR}|none", "'(x,y,z)' or 'none' for each axis", 1),
    "space origin": Rule(VECTOR, "a point '(x,y,z)'"),
    "spacings": Rule(POSITIVE, "a positive number for each axis", 1),
    "axis mins": Rule(NUMBER, "a number for each axis", 1),
    "type": Rule(NRRD_TYPES, "a number type"),
    "encoding": Rule("raw|gzip|gz|bzip2|bz2|ascii|text|txt", "raw, gzip, gz, bzip2, bz2, ascii, text or txt"),
    "endian": Rule("little|big", "little or big"),
    "units": Rule(MILLIMETRES, "lengths in mm"),
    "space units": Rule(MILLIMETRES, "lengths in mm"),
    "line skip": Rule(r"\d{1,9}", "a number of lines"),
    "byte skip": Rule(SKIPPED, "a number of bytes"),
}
NRRD_REQUIRED = ("dimension", "sizes", "type", "encoding")
NRRD_FILE_KEYS = ("data file", "line skip", "byte skip")
NRRD_ENCODINGS = {
    "raw": "raw",
    **dict.fromkeys(("gzip", "gz"), "deflate"),
    **dict.fromkeys(("bzip2", "bz2"), "bzip2"),
    **dict.fromkeys(("ascii", "text", "txt"), "text"),
}
NRRD_SYNONYMS = {
    "axismins": "axis mins",
    "centers": "centerings",
    "datafile": "data file",
    "lineskip": "line skip",
    "byteskip": "byte skip",
}
META_ORIGINS = ("Offset", "Position", "Origin")
META_DIRECTIONS = ("TransformMatrix", "Rotation", "Orientation")
META_ORDERS = ("BinaryDataByteOrderMSB", "ElementByteOrderMSB")
META_SPACINGS = ("ElementSpacing", "ElementSize")
META_RULES = {
    "NDims": Rule("[34]", "3 or 4 axes"),
    "DimSize": Rule(SIZE, "a whole number for each axis", 1),
    **dict.fromkeys(META_SPACINGS, Rule(POSITIVE, "a positive number for each axis", 1)),
    **dict.fromkeys(META_ORIGINS, Rule(NUMBER, "a number for each axis", 1)),
    **dict.fromkeys(META_DIRECTIONS, Rule(NUMBER, "a matrix of all axes", 2)),
    "ElementType": Rule("MET_(U?(CHAR|SHORT|INT|LONG_LONG)|FLOAT|DOUBLE)", "a number type"),
    "ElementNumberOfChannels": Rule("1", "one number per voxel"),
    "BinaryData": Rule(FLAG, "True or False"),
    **dict.fromkeys(META_ORDERS, Rule(FLAG, "True or False")),
    "CompressedData": Rule(FLAG, "True or False"),
    "HeaderSize": Rule(SKIPPED, "a number of bytes"),
    "DistanceUnits": Rule(MILLIMETRES, "lengths in mm"),
}
META_REQUIRED = ("NDims", "DimSize", "ElementType")
META_GEOMETRY = (*META_REQUIRED, "ElementNumberOfChannels", *META_SPACINGS, *META_ORIGINS, *META_DIRECTIONS)
ASSUMED = {"spacing": "1 mm", "orientation": "left, posterior, superior", "origin": "0"}
LPS_SPACES = re.compile(r"(left-posterior-superior|lps|right-anterior-superior|ras|left-anterior-superior|las)(-time|t)?", re.I)

NUMPY_CODES = {
    "8-bit unsigned integer": "u1",
    "8-bit signed integer": "i1",
    "16-bit unsigned integer": "u2",
    "16-bit signed integer": "i2",
    "32-bit unsigned integer": "u4",
    "32-bit signed integer": "i4",
    "64-bit unsigned integer": "u8",
    "64-bit signed integer": "i8",
    "32-bit float": "f4",
    "64-bit float": "f8",
}
"""NumPy's codes of the pixel types by their names in SimpleITK."""


@dataclass(frozen=True)
class TextHeader:
    """The fields of a header and the files with its voxels.

    Attributes:
        fields: Values by name, white space at the ends removed.
        offset: First byte after the header.
        files: Files that hold the voxels in equal shares, in their order; the header's own file where they follow the header.
    """

    fields: dict[str, str]
    offset: int
    files: tuple[Path, ...]


def is_nrrd(path: Path) -> bool:
    """Whether a file is NRRD, by its suffix; else it is MetaImage."""
    return path.name.lower().endswith((".nrrd", ".nhdr"))


def read_header(path: Path) -> TextHeader:
    """Read the fields of a header and find the files with its voxels; the values are not checked.

    Raises:
        UserError: If it is no header of its format, gives a field twice, or names files outside its own folder.
    """
    nrrd, fields, following = is_nrrd(path), dict[str, str](), ""
    name, separator, data_key = ("NRRD", ":", "data file") if nrrd else ("MetaImage", "=", "ElementDataFile")
    with path.open("rb") as file:
        require(
            not nrrd or re.fullmatch(rb"NRRD\d{4}\r?\n", file.readline(16)) is not None,
            f"{path}: expected a NRRD file, but it does not start with 'NRRD' and a version; check the file.",
        )
        while line := file.readline(MAX_HEADER_BYTES):
            text = line.rstrip(b"\r\n").decode("utf-8", "surrogateescape")
            key, found, value = (part.strip() for part in text.partition(separator))
            if file.tell() > MAX_HEADER_BYTES or (nrrd and not text):
                break
            if (nrrd and (text.startswith("#") or value.startswith("="))) or not text.strip():
                continue  # a comment or a pair of NRRD, an empty line of MetaImage
            require(
                bool(found and key),
                f"{path}: expected a {name} file with a name, '{separator}' and a value on each line of its header, got {shown(text)}; check the file.",
            )
            key = NRRD_SYNONYMS.get(key.lower(), key.lower()) if nrrd else key
            require(key not in fields, f"{path}: the header gives the field {shown(key)} twice; remove one of the lines.")
            fields[key] = value
            if key == data_key and (not nrrd or value.upper().startswith("LIST")):
                break
        offset = file.tell()
        if fields.get(data_key, "").upper().startswith("LIST"):
            following = file.read(MAX_HEADER_BYTES).decode("utf-8", "surrogateescape")
    require(
        offset <= MAX_HEADER_BYTES and (nrrd or data_key in fields),
        f"{path}: expected a {name} file, but its header does not say where the voxels are ({data_key}); check the file.",
    )
    is_attached = fields.get(data_key, "LOCAL").upper() == "LOCAL" and not (nrrd and data_key in fields)
    return TextHeader(fields, offset, (path,) if is_attached else _data_files(path, fields[data_key], following.splitlines()))


def _data_files(path: Path, value: str, following: list[str]) -> tuple[Path, ...]:
    """Find the files that a header means: `name`, `name%03d.raw first last step`, or `LIST` and a name on each following line.

    Raises:
        UserError: If it means none, or one outside the folder of the header.
    """
    words, names = value.split(), [value]
    if words and words[0].upper() == "LIST":
        names = [line.strip() for line in following if line.strip()]
    elif "%" in value and len(words) >= 4:
        is_pattern = re.fullmatch(r"[^%]*%0?\d?d[^%]*(\s-?\d{1,9}){2}\s-?[1-9]\d{0,8}(\s\d)?", " ".join(words))
        first, last, step = map(int, words[1:4]) if is_pattern else (0, 0, 1)
        numbers = range(first, last + (1 if step > 0 else -1), step)
        require(
            bool(is_pattern) and len(numbers) <= MAX_DATA_FILES,
            f"{path}: expected a pattern such as 'slice%03d.raw 1 120 1', got {shown(value)}; repair the header.",
        )
        names = [words[0] % number for number in numbers]
    require(
        bool(names) and all(names),
        f"{path}: expected the names of the files with the voxels, got {shown(value)}; repair the header.",
    )
    for name in names:
        # A header from elsewhere must not make this program read other files of the user.
        require(
            not Path(name).is_absolute() and ".." not in Path(name).parts,
            f"{path}: expected its voxels in the folder of the header, got {shown(name)}; move the file there and repair the header.",
        )
    return tuple(path.parent / name for name in names)


def _checked(path: Path, fields: dict[str, str]) -> dict[str, str]:
    """Check the values of the fields that are used.

    Returns:
        The values with single blanks between their words, of which `(1, 2, 3)` is one.

    Raises:
        UserError: If a field is missing or has another value than its format allows.
    """
    rules, required = (NRRD_RULES, NRRD_REQUIRED) if is_nrrd(path) else (META_RULES, META_REQUIRED)
    for key in required:
        require(
            bool(fields.get(key)),
            f"{path}: expected the field '{key}' in the header, but it is missing or empty; check the file.",
        )
    tight = {key: re.sub(r"(?<=[(,])\s+|\s+(?=[,)])", "", value.replace(")", ") ")) for key, value in fields.items()}
    values = {key: " ".join(value.split()) for key, value in tight.items()}
    for key in [key for key in rules if key in values]:
        pattern, expected, power = rules[key]
        words = [values[key]] if power is None else values[key].split()
        # The number of axes is checked first: it is a digit here.
        count = 1 if power is None else int(values[required[0]]) ** power
        require(
            len(words) == count and all(re.fullmatch(pattern, word, re.IGNORECASE) for word in words),
            f"{path}: expected {expected} in the header field '{key}', got {shown(fields[key])}; repair the header or export the scan "
            "again.",
        )
    return values


def _geometry(path: Path, values: dict[str, str]) -> tuple[VoxelGrid, str]:
    """Read the grid and NumPy's code of the voxel type by SimpleITK, from a copy of the checked fields.

    Raises:
        UserError: If SimpleITK refuses the header, or it describes no 3D volume of grey values.
    """
    import SimpleITK

    directions = values.get("space directions", "").split()
    if "none" in directions and "kinds" not in values:  # SimpleITK finds axes that are not spatial by their kind alone
        values = values | {"kinds": " ".join("list" if direction == "none" else "domain" for direction in directions)}
    if is_nrrd(path):
        lines = ["NRRD0005", *(f"{key}: {value}" for key, value in values.items() if key not in NRRD_FILE_KEYS), "\n"]
    else:
        geometry = [f"{key} = {values[key]}" for key in META_GEOMETRY if key in values]
        lines = ["ObjectType = Image", *geometry, "ElementDataFile = LOCAL\n"]
    reader = SimpleITK.ImageFileReader()
    with tempfile.TemporaryDirectory(prefix="medseg-") as folder:
        copy = Path(folder) / ("header.nrrd" if is_nrrd(path) else "header.mha")
        copy.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        reader.SetFileName(str(copy))
        try:
            reader.ReadImageInformation()
        except RuntimeError as error:
            reason = re.sub(r".*(ReadImageInformation:|\[nrrd\]) *(_nrrd\w+: )?", "", str(error).strip().splitlines()[-1])
            plain = "".join(letter if letter.isprintable() else "?" for letter in reason[:160])
            raise UserError(f"{path}: the header cannot be read ({plain}); repair it or export the scan again.") from None
    grid = grid_of(path, reader, reader.GetNumberOfComponents())
    name = SimpleITK.GetPixelIDValueAsString(reader.GetPixelID())
    return grid, NUMPY_CODES[name.removeprefix("vector of ")]


def _assumptions(path: Path, values: dict[str, str]) -> tuple[str, ...]:
    """Name what the header does not give, and what is assumed for it."""
    if is_nrrd(path):
        is_placed = "space directions" in values
        given = {
            "spacing": is_placed or "spacings" in values,
            "orientation": is_placed and LPS_SPACES.fullmatch(values.get("space", "")),
            "origin": "space origin" in values or "axis mins" in values,
        }
    else:
        keys = {"spacing": META_SPACINGS, "orientation": META_DIRECTIONS, "origin": META_ORIGINS}
        given = {name: any(key in values for key in names) for name, names in keys.items()}
    missing = [name for name, is_given in given.items() if not is_given]
    if not missing:
        return ()
    lacking = " and ".join(f"no {name}" for name in missing)
    taken = " and ".join(ASSUMED[name] for name in missing)
    return (f"the header gives {lacking}; taken instead: {taken}; check size, sides and place",)


def open_text_volume(path: Path) -> LazyVolume:
    """Read the header of a NRRD or MetaImage file and check that its files can hold the voxels.

    Raises:
        UserError: If it is damaged or no scalar 3D volume, or a file with voxels is missing, too short or too long.
    """
    header = read_header(path)
    values = _checked(path, header.fields)
    grid, code = _geometry(path, values)
    true = {key for key, value in values.items() if value.lower() in ("true", "1")}
    if is_nrrd(path):
        is_big, encoding = values.get("endian", "").lower() == "big", NRRD_ENCODINGS[values["encoding"].lower()]
    else:
        is_big, is_text = bool(true & {*META_ORDERS}), "BinaryData" in values and "BinaryData" not in true
        encoding = "deflate" if "CompressedData" in true else "text" if is_text else "raw"
    return lazy_volume(
        path,
        grid,
        np.dtype((">" if is_big else "<") + code),
        header.files,
        encoding,
        offset=header.offset if header.files == (path,) else 0,
        num_lines=int(values.get("line skip", 0)),
        num_skipped=int(values.get("byte skip", values.get("HeaderSize", 0))),
        remarks=_assumptions(path, values),
    )
