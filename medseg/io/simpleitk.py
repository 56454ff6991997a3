"""Reader and writer of NRRD and MetaImage by SimpleITK, and conversion of its images in memory.

A file is read in three steps: its header here, field by field (`read_header`, `_checked`); the
geometry by SimpleITK from a copy of the checked fields (`_geometry`); the voxels here
(`lazy_volume`). SimpleITK never gets the user's file: its MetaImage reader corrupts the heap on a
damaged header and opens whatever file a header names, and it ignores damage to compressed voxels
(README.md).
"""

import itertools
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import SimpleITK

from medseg.errors import UserError
from medseg.findings import warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.atomic import replace_bytes, replace_path
from medseg.io.names import RAW_NAMES, utf8_path
from medseg.io.scratch import scratch_folder
from medseg.io.volume import (
    LazyVolume,
    Volume,
    check_shape,
    grid_from_columns,
    lazy_volume,
    load_image,
    shown,
)
from medseg.task import AIR_HU

# Headers beyond 1 MiB are not read: no program writes them.
MAX_HEADER_BYTES = 2**20

# Most files that a pattern in a header, such as `slice%03d.raw 1 120 1`, may name.
MAX_DATA_FILES = 100_000


class Rule(NamedTuple):
    """The values that a header field may have.

    Attributes:
        pattern: Regular expression of the value or, with `power`, of each of its words; letters of
            either case.
        expected: Description for messages.
        power: The value has (number of axes) ** power words: 1 for a vector, 2 for a matrix. None:
            the value is one text.
    """

    pattern: str
    expected: str
    power: int | None = None


# Patterns of one word. The limits on the digits keep numbers within the range of a double, so that
# SimpleITK (in C++) and Python read the same.
UNSIGNED_NUMBER = r"(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d\d?)?"
NUMBER = rf"[-+]?{UNSIGNED_NUMBER}"
# Of a NRRD: (x,y,z), or (x,y,z,t) where `space` includes time.
VECTOR = rf"\({NUMBER}(,{NUMBER}){{2,3}}\)"
# Units of length other than mm, as whole words; Unicode has two letters mu, and both occur.
OTHER_UNIT = r"(?<![a-zµμ])(m|cm|um|µm|μm|microns?|nm|in|inch|met(er|re)|micrometer)(?![a-z])"

SIZES = Rule(r"[1-9]\d{0,8}", "a whole number for each axis", 1)
NUMBERS = Rule(NUMBER, "a number for each axis", 1)
# Without 0, for which `grid_from_columns` has a message of its own.
UNSIGNED_NUMBERS = Rule(UNSIGNED_NUMBER, "a positive number for each axis", 1)
# -1 says that the voxels are the last bytes of their file.
NUM_BYTES = Rule(r"-1|\d{1,9}", "a number of bytes")
# A text that names no unit but mm. A length in another unit would be ambiguous, since other
# programs ignore units.
LENGTHS = Rule(rf"(?!.*{OTHER_UNIT}).*", "lengths in mm")

# Names of the number types in NRRD.
NRRD_TYPES = (
    "(signed |unsigned |u)?(char|short|int|long ?long)|(unsigned |signed )?(short|long long) int|"
    "u?int(8|16|32|64)(_t)?|float|double"
)
# Encodings in a NRRD header, to their names in `medseg.io.volume.decoded`.
NRRD_ENCODINGS = {
    "raw": "raw",
    "gzip": "deflate",
    "gz": "deflate",
    "bzip2": "bzip2",
    "bz2": "bzip2",
    "ascii": "text",
    "text": "text",
    "txt": "text",
}
# Fields of NRRD that are used, and the values that they may have.
NRRD_RULES = {
    "dimension": Rule("[3-5]", "3 to 5 axes"),
    "sizes": SIZES,
    "space directions": Rule(f"{VECTOR}|none", "'(x,y,z)' or 'none' for each axis", 1),
    "space origin": Rule(VECTOR, "a point '(x,y,z)'"),
    "spacings": UNSIGNED_NUMBERS,
    "axis mins": NUMBERS,
    "type": Rule(NRRD_TYPES, "a number type"),
    "encoding": Rule("|".join(NRRD_ENCODINGS), "raw, gzip, gz, bzip2, bz2, ascii, text or txt"),
    "endian": Rule("little|big", "little or big"),
    "units": LENGTHS,
    "space units": LENGTHS,
    "line skip": Rule(r"\d{1,9}", "a number of lines"),
    "byte skip": NUM_BYTES,
}
# Other names of NRRD fields, to the names that are used here.
NRRD_SYNONYMS = {
    "axismins": "axis mins",
    "centers": "centerings",
    "datafile": "data file",
    "lineskip": "line skip",
    "byteskip": "byte skip",
}

# Groups of MetaImage fields with the same meaning.
META_ORIGINS = ("Offset", "Position", "Origin")
META_DIRECTIONS = ("TransformMatrix", "Rotation", "Orientation")
META_ORDERS = ("BinaryDataByteOrderMSB", "ElementByteOrderMSB")
META_SPACINGS = ("ElementSpacing", "ElementSize")
# Fields of MetaImage that SimpleITK gets.
META_GEOMETRY = {
    "NDims": Rule("[34]", "3 or 4 axes"),
    "DimSize": SIZES,
    "ElementType": Rule("MET_(U?(CHAR|SHORT|INT|LONG_LONG)|FLOAT|DOUBLE)", "a number type"),
    "ElementNumberOfChannels": Rule("1", "one number per voxel"),
    **dict.fromkeys(META_SPACINGS, UNSIGNED_NUMBERS),
    **dict.fromkeys(META_ORIGINS, NUMBERS),
    **dict.fromkeys(META_DIRECTIONS, Rule(NUMBER, "a matrix of all axes", 2)),
}
# Fields of MetaImage that are True or False.
META_FLAGS = ("BinaryData", "CompressedData", *META_ORDERS)
META_RULES = {
    **META_GEOMETRY,
    **dict.fromkeys(META_FLAGS, Rule("true|false|1|0", "True or False")),
    "HeaderSize": NUM_BYTES,
    "DistanceUnits": LENGTHS,
}

# Values of the NRRD field `space` that name axes of the patient.
PATIENT_SPACES = re.compile(
    r"(left-posterior-superior|lps|right-anterior-superior|ras|left-anterior-superior|las)"
    r"(-time|t)?",
    re.I,
)

# NumPy's codes of the pixel types by their names in SimpleITK.
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


def is_nrrd(path: Path) -> bool:
    """Whether a file, which is NRRD or MetaImage, is NRRD; its suffix decides."""
    return path.name.lower().endswith((".nrrd", ".nhdr"))


def _format_name(path: Path) -> str:
    """Name the format of a file in messages."""
    return "NRRD" if is_nrrd(path) else "MetaImage"


class TextHeader(NamedTuple):
    """Header of a NRRD or MetaImage file, whose values have not been checked.

    Attributes:
        fields: Values of the fields by name, white space at the ends removed.
        offset: First byte after the header.
        files: Files that hold the voxels in equal shares, in their order; the header's own file
            where they follow the header.
    """

    fields: dict[str, str]
    offset: int
    files: tuple[Path, ...]


def read_header(path: Path) -> TextHeader:
    """Read the fields of a header and find the files with its voxels.

    Raises:
        UserError: If the file has no header of its format, or the header gives a field twice or
            names files outside its own folder.
    """
    is_meta = not is_nrrd(path)
    # The field with the place of the voxels; in a NRRD without it, they follow the header.
    data_key = "ElementDataFile" if is_meta else "data file"
    with path.open("rb") as file:
        # The first line of NRRD; MetaImage begins with the first field.
        if not is_meta and re.fullmatch(rb"NRRD000[1-5]\r?\n", file.readline(16)) is None:
            raise UserError(
                f"{path}: expected a NRRD file, but it does not start with 'NRRD' and a version "
                "up to 5; check the file."
            )
        fields = _read_fields(path, file, data_key)
        offset = file.tell()
        lines_after = b""
        if _announces_list(fields.get(data_key, "")):
            lines_after = file.read(MAX_HEADER_BYTES)
    # A header beyond the limit was read only in part, and `data_key` may be in the rest.
    if offset > MAX_HEADER_BYTES or (is_meta and data_key not in fields):
        raise UserError(
            f"{path}: expected a {_format_name(path)} file, but its header does not say where the "
            f"voxels are ({data_key}); check the file."
        )
    if data_key not in fields:
        return TextHeader(fields, offset, (path,))
    if is_meta and fields[data_key].upper() == "LOCAL":
        return TextHeader(fields, offset, (path,))
    names = lines_after.decode("utf-8", RAW_NAMES).splitlines()
    return TextHeader(fields, offset, _data_files(path, fields[data_key], names))


def _field_lines(file: BinaryIO, *, is_meta: bool) -> Iterator[str]:
    """Yield the lines of a header that should be fields, one at a time.

    An empty line ends a header of NRRD and is skipped in one of MetaImage.

    Args:
        file: Open at the first field.
        is_meta: Whether the file is MetaImage, otherwise NRRD.
    """
    while line := file.readline(MAX_HEADER_BYTES):
        # Bytes that are not UTF-8 may belong to a file name.
        text = line.rstrip(b"\r\n").decode("utf-8", RAW_NAMES)
        if file.tell() > MAX_HEADER_BYTES:
            return
        if not is_meta:
            if not text:
                return
            _, _, value = text.partition(":")
            is_pair = value.strip().startswith("=")  # `key:=value`, see `_read_pairs`
            is_comment = text.startswith("#")
            if is_pair or is_comment:
                continue
        if text.strip():
            yield text


def _read_fields(path: Path, file: BinaryIO, data_key: str) -> dict[str, str]:
    """Read the fields of a header up to its end.

    A header of MetaImage ends with the field `data_key`; one of NRRD with an empty line, or with
    that field if it starts a list of files.

    Args:
        path: File, for messages.
        file: Open at the first field.
        data_key: The field with the place of the voxels.

    Raises:
        UserError: If a line is no field, or repeats one.
    """
    is_meta = not is_nrrd(path)
    separator = "=" if is_meta else ":"
    fields: dict[str, str] = {}
    for text in _field_lines(file, is_meta=is_meta):
        key, delimiter, value = (part.strip() for part in text.partition(separator))
        if not delimiter or not key:
            raise UserError(
                f"{path}: expected a {_format_name(path)} file with a name, '{separator}' and a "
                f"value on each line of its header, got {shown(text)}; check the file."
            )
        if not is_meta:
            # Names in NRRD may have letters of either case.
            key = key.lower()
            key = NRRD_SYNONYMS.get(key, key)
        if key in fields:
            raise UserError(
                f"{path}: the header gives the field {shown(key)} twice; remove one of the lines."
            )
        fields[key] = value
        if key == data_key and (is_meta or _announces_list(value)):
            break
    return fields


def _announces_list(value: str) -> bool:
    """Whether the value of the data field, `LIST`, says that names of files follow the header.

    A number may follow the word, the axes of each file. Other values, such as `list.raw`, are
    names.
    """
    return re.fullmatch(r"LIST(\s+\d+D?)?", value, re.IGNORECASE | re.ASCII) is not None


def _data_files(path: Path, value: str, lines_after: list[str]) -> tuple[Path, ...]:
    """Find the files with voxels that a header names.

    Args:
        path: File of the header.
        value: `name`, `name%03d.raw first last step`, or `LIST`.
        lines_after: The lines after the header, which for `LIST` are names.

    Raises:
        UserError: If the header names no file, or a file outside its own folder.
    """
    if _announces_list(value):
        names = [line.strip() for line in lines_after if line.strip()]
    elif "%" in value and len(value.split()) >= 4:
        names = _numbered_names(path, value)
    else:
        names = [value]
    if not names or not all(names):
        raise UserError(
            f"{path}: expected the names of the files with the voxels, got {shown(value)}; "
            "repair the header."
        )
    for name in names:
        # A header from elsewhere must not make this program read other files of the user.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(
                f"{path}: expected its voxels in the folder of the header, got {shown(name)}; "
                "move the file there and repair the header."
            )
    return tuple(path.parent / name for name in names)


def _numbered_names(path: Path, value: str) -> list[str]:
    """List the names for a pattern of C's `printf` with a range, as `slice%03d.raw 1 120 1`.

    Raises:
        UserError: If the value is no such pattern, or gives more than `MAX_DATA_FILES` names.
    """
    # Name with one `%d`, which may contain blanks; first and last number, step. NRRD allows a
    # fourth number, the axis.
    pattern = r"([^%]*%0?\d?d[^%]*?)\s+(-?\d{1,9})\s+(-?\d{1,9})\s+(-?[1-9]\d{0,8})(?:\s+\d)?"
    match = re.fullmatch(pattern, value, re.ASCII)
    name = ""
    numbers = range(0)
    if match is not None:
        name = match[1]
        first, last, step = map(int, match.group(2, 3, 4))
        # The last number belongs to the range.
        stop = last + 1 if step > 0 else last - 1
        numbers = range(first, stop, step)
    if match is None or len(numbers) > MAX_DATA_FILES:
        raise UserError(
            f"{path}: expected a pattern such as 'slice%03d.raw 1 120 1', got {shown(value)}; "
            "repair the header."
        )
    return [name % number for number in numbers]


def _checked(path: Path, fields: dict[str, str]) -> dict[str, str]:
    """Check the values of the fields that are used.

    Returns:
        The values of all fields as `_with_single_blanks` writes them.

    Raises:
        UserError: If a field is missing or has another value than its format allows.
    """
    rules = META_RULES
    axes_key = "NDims"
    required_keys = [axes_key, "DimSize", "ElementType"]
    if is_nrrd(path):
        rules = NRRD_RULES
        axes_key = "dimension"
        required_keys = [axes_key, "sizes", "type", "encoding"]
    for key in required_keys:
        if not fields.get(key):
            raise UserError(
                f"{path}: expected the field '{key}' in the header, but it is missing or empty; "
                "check the file."
            )
    values = {key: _with_single_blanks(value) for key, value in fields.items()}
    # The rule of the number of axes is the first, so `int` below gets a digit that was checked.
    for key, rule in rules.items():
        if key not in values:
            continue
        words = [values[key]]
        num_words = 1
        if rule.power is not None:
            words = values[key].split()
            num_words = int(values[axes_key]) ** rule.power
        flags = re.IGNORECASE | re.ASCII
        are_valid = all(re.fullmatch(rule.pattern, word, flags) for word in words)
        if len(words) != num_words or not are_valid:
            raise UserError(
                f"{path}: expected {rule.expected} in the header field '{key}', got "
                f"{shown(fields[key])}; repair the header or export the scan again."
            )
    return values


def _with_single_blanks(value: str) -> str:
    """Write a value with single blanks between its words, and none within parentheses.

    `str.split` then divides the value into words, with a vector such as `(1, 2, 3)` as one word.

    Example:
        >>> _with_single_blanks("( 1 , 2 )  3"), _with_single_blanks("(1)(2)")
        ('(1,2) 3', '(1) (2)')
    """
    separated = value.replace(")", ") ")
    # Matches blanks after "(" or ",", and before "," or ")".
    without_inner = re.sub(r"(?<=[(,])\s+|\s+(?=[,)])", "", separated)
    return " ".join(without_inner.split())


def _geometry(path: Path, values: dict[str, str], num_layers: int) -> tuple[VoxelGrid, str]:
    """Let SimpleITK read the grid and the voxel type from a copy of the header.

    Args:
        path: File, for messages.
        values: Value of each field, from `_checked`.
        num_layers: Numbers per voxel that are accepted beside 1; see `open_nrrd_or_metaimage`.

    Returns:
        The grid, and NumPy's code of the voxel type.

    Raises:
        UserError: If SimpleITK refuses the header, the header describes no 3D volume of grey
            values, or there is no room for the copy.
    """
    copied_name, lines = "header.mha", _meta_lines(values)
    if is_nrrd(path):
        copied_name, lines = "header.nrrd", _nrrd_lines(values)
    reader = SimpleITK.ImageFileReader()
    scratch = scratch_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="medseg-", dir=scratch) as folder:
            copied = Path(folder) / copied_name
            copied.write_bytes("\n".join(lines).encode("utf-8", RAW_NAMES))
            reader.SetFileName(str(copied))
            reader.ReadImageInformation()
    except OSError as error:
        raise UserError(
            f"{path}: its header cannot be copied into {scratch} ({error.strerror or error}); "
            "set TMPDIR to a folder on another disk."
        ) from error
    except RuntimeError as error:
        # The last line of an ITK error has the reason, after the function of ITK that failed.
        place = r".*(ReadImageInformation:|\[nrrd\]) *(_nrrd\w+: )?"
        reason = re.sub(place, "", str(error).strip().splitlines()[-1])
        # Cut, since the reason may quote the header.
        printable = "".join(sign if sign.isprintable() else "?" for sign in reason[:160])
        raise UserError(
            f"{path}: the header cannot be read ({printable}); repair it or export the scan again."
        ) from None
    type_name = SimpleITK.GetPixelIDValueAsString(reader.GetPixelID()).removeprefix("vector of ")
    num_components = reader.GetNumberOfComponents()
    if num_components == num_layers:
        # One number for each layer, as expected. `grid_of` refuses other numbers than 1.
        num_components = 1
    return grid_of(path, reader, num_components), NUMPY_CODES[type_name]


def _nrrd_lines(values: dict[str, str]) -> list[str]:
    """Write the lines of a NRRD header, without the fields that lead to voxels."""
    directions = values.get("space directions", "").split()
    if "none" in directions and "kinds" not in values:
        # SimpleITK finds axes that are not spatial by their kind alone.
        kinds = ["list" if direction == "none" else "domain" for direction in directions]
        values = values | {"kinds": " ".join(kinds)}
    voxel_keys = ("data file", "line skip", "byte skip")
    fields = [f"{key}: {value}" for key, value in values.items() if key not in voxel_keys]
    # The empty line ends the header.
    return ["NRRD0005", *fields, "\n"]


def _meta_lines(values: dict[str, str]) -> list[str]:
    """Write the lines of a MetaImage header with the fields of `META_GEOMETRY` alone."""
    fields = [f"{key} = {values[key]}" for key in META_GEOMETRY if key in values]
    return ["ObjectType = Image", *fields, "ElementDataFile = LOCAL\n"]


def _assumptions(values: dict[str, str]) -> tuple[str, ...]:
    """Warn of spacing, orientation and origin that a header lacks.

    Args:
        values: The checked fields of a NRRD or a MetaImage, whose names differ.

    Returns:
        One sentence, with the values that are assumed instead; none if the header gives all.
    """
    keys = values.keys()
    # In a NRRD, directions are vectors in `space`: without it, left and right are unknown.
    is_patient_space = PATIENT_SPACES.fullmatch(values.get("space", "")) is not None
    has_patient_axes = is_patient_space and "space directions" in values
    assumptions: dict[str, str] = {}
    if keys.isdisjoint(("space directions", "spacings", *META_SPACINGS)):
        assumptions["no spacing"] = "1 mm"
    if not has_patient_axes and keys.isdisjoint(META_DIRECTIONS):
        assumptions["no orientation"] = "left, posterior, superior"
    if keys.isdisjoint(("space origin", "axis mins", *META_ORIGINS)):
        assumptions["no origin"] = "0"
    if not assumptions:
        return ()
    missing = " and ".join(assumptions)
    assumed = " and ".join(assumptions.values())
    return (f"the header gives {missing}; taken instead: {assumed}; check size, sides and place",)


def open_nrrd_or_metaimage(path: Path, num_layers: int = 1) -> LazyVolume:
    """Read the header of a NRRD or MetaImage file and check that its files can hold the voxels.

    Args:
        path: The file.
        num_layers: Numbers per voxel, one for each layer of a segmentation. The volume then is
            (D, H, W * num_layers): the numbers of a voxel follow one another along x.

    Raises:
        UserError: If it is damaged or no scalar 3D volume, or a file with voxels is missing, too
            short or too long.
    """
    header = read_header(path)
    values = _checked(path, header.fields)
    grid, type_code = _geometry(path, values, num_layers)
    depth, height, width = grid.shape
    stored_grid = replace(grid, shape=(depth, height, width * num_layers))
    if is_nrrd(path):
        is_big_endian = values.get("endian", "").lower() == "big"
        encoding = NRRD_ENCODINGS[values["encoding"].lower()]
    else:
        true_keys = {key for key, value in values.items() if value.lower() in ("true", "1")}
        is_big_endian = not true_keys.isdisjoint(META_ORDERS)
        # A header without `BinaryData` has binary voxels too.
        encoding = "raw"
        if "CompressedData" in true_keys:
            encoding = "deflate"
        elif "BinaryData" in values and "BinaryData" not in true_keys:
            encoding = "text"
    byte_order = ">" if is_big_endian else "<"
    offset = header.offset
    # Files without the header begin with the voxels.
    if header.files != (path,):
        offset = 0
    return lazy_volume(
        path,
        stored_grid,
        np.dtype(f"{byte_order}{type_code}"),
        header.files,
        encoding,
        offset=offset,
        num_lines=int(values.get("line skip", 0)),
        num_skipped=int(values.get("byte skip", values.get("HeaderSize", 0))),
        findings=tuple(warnings_of("reading", _assumptions(values))),
    )


class Segment(NamedTuple):
    """One segment of a segmentation of 3D Slicer.

    A layer is a label map of its own: segments of different layers may overlap.

    Attributes:
        name: Its name.
        value: Value of its voxels in its layer.
        layer: Layer that holds it, from 0.
        num_layers: Number of layers in the file.
    """

    name: str
    value: int
    layer: int
    num_layers: int


def read_segments(path: Path) -> list[Segment]:
    """Read the segments that 3D Slicer describes in the header of a NRRD label map.

    Returns:
        The segments in their order; none for a file of another program.

    Raises:
        UserError: If the header cannot be read, gives a field two values, or a segment has no value
            or shares the value of another segment.
    """
    num_layers = _num_layers(read_header(path).fields)
    pairs = _read_pairs(path)
    numbers: set[int] = set()
    for key in pairs:
        match = re.fullmatch(r"Segment(\d{1,6})_(?:Name|ID|LabelValue)", key, re.ASCII)
        if match is not None:
            numbers.add(int(match[1]))
    segments: list[Segment] = []
    # Name of each segment by (layer, value), which must be unique.
    names: dict[tuple[int, int], str] = {}
    for number in sorted(numbers):
        segment = _read_segment(path, pairs, number, num_layers)
        place = (segment.layer, segment.value)
        if place in names:
            raise UserError(
                f"{path}: the segments {shown(names[place])} and {shown(segment.name)} share the "
                f"value {segment.value}; save it again."
            )
        names[place] = segment.name
        segments.append(segment)
    return segments


def _read_segment(path: Path, pairs: Mapping[str, str], number: int, num_layers: int) -> Segment:
    """Read one segment from the pairs of a header.

    Args:
        path: File, for messages.
        pairs: Value of each key, from `_read_pairs`.
        number: Number of the segment in the keys, from 0.
        num_layers: Layers of the file.

    Raises:
        UserError: If the segment has no value, or its layer is not in the file.
    """
    # 3D Slicer shows the ID of a segment without a name.
    name = (
        pairs.get(f"Segment{number}_Name")
        or pairs.get(f"Segment{number}_ID")
        or f"Segment {number}"
    )
    value = pairs.get(f"Segment{number}_LabelValue", "")
    layer = pairs.get(f"Segment{number}_Layer", "0")
    has_value = re.fullmatch(r"[1-9]\d{0,8}", value, re.ASCII) is not None
    has_layer = re.fullmatch(r"\d{1,6}", layer, re.ASCII) is not None
    if not has_value or not has_layer:
        raise UserError(
            f"{path}: expected a value from 1 and a layer of the segment {shown(name)}, got "
            f"{shown(value)} and {shown(layer)}; save the segmentation again."
        )
    if int(layer) >= num_layers:
        raise UserError(
            f"{path}: {shown(name)} is in layer {layer}, but the file has {num_layers}; "
            "save it again."
        )
    return Segment(name, int(value), int(layer), num_layers)


def _read_pairs(path: Path) -> dict[str, str]:
    """Read the lines `key:=value` of a NRRD header.

    Programs store fields of their own there, which the format does not define.

    Raises:
        UserError: If a key has two values.
    """
    pairs: dict[str, str] = {}
    with path.open("rb") as file:
        # An empty line ends the header.
        while line := file.readline(MAX_HEADER_BYTES).rstrip(b"\r\n"):
            key, separator, value = line.decode("utf-8", RAW_NAMES).partition(":=")
            if not separator:
                continue
            # The same line twice does no harm.
            if pairs.setdefault(key, value) != value:
                raise UserError(
                    f"{path}: the header gives the field {shown(key)} twice; "
                    "remove one of the lines."
                )
    return pairs


def _num_layers(fields: Mapping[str, str]) -> int:
    """Count the layers of a segmentation of 3D Slicer.

    In a file of four axes, the first axis counts the layers; a file of three axes has one layer.
    """
    sizes = fields.get("sizes", "").split()
    if len(sizes) == 4 and sizes[0].isdecimal():
        return int(sizes[0])
    return 1


def open_layer(path: Path, layer: int) -> LazyVolume:
    """Open one layer of a segmentation of 3D Slicer, which stores the layers voxel by voxel.

    Args:
        path: NRRD file.
        layer: Which layer, from 0.

    Raises:
        UserError: As for `open_nrrd_or_metaimage`.
    """
    num_layers = _num_layers(read_header(path).fields)
    volume = open_nrrd_or_metaimage(path, num_layers)
    if num_layers == 1:
        return volume
    depth, height, width = volume.grid.shape
    grid = replace(volume.grid, shape=(depth, height, width // num_layers))

    def read_chunks() -> Iterator[np.ndarray]:
        # Value k of the file belongs to layer k % num_layers; a chunk may begin with any layer.
        num_read = 0
        for values in volume.read_chunks():
            first = (layer - num_read) % num_layers
            yield values[first::num_layers]
            num_read += len(values)

    return replace(volume, grid=grid, read_chunks=read_chunks)


def grid_of(path: Path, source: Any, num_components: int) -> VoxelGrid:
    """Read the grid of an image, or of the header that an `ImageFileReader` has read.

    Args:
        path: File, for messages.
        source: `SimpleITK.Image` or `SimpleITK.ImageFileReader`, of three axes; further axes, such
            as time, may have one step.
        num_components: Numbers per voxel.

    Raises:
        UserError: If the source is not one regular 3D volume of grey values.
    """
    if num_components != 1:
        raise UserError(
            f"{path}: expected one number per voxel, got {num_components}; export grey values."
        )
    shape = check_shape(path, source.GetSize())
    num_axes = source.GetDimension()
    direction = np.reshape(source.GetDirection(), (num_axes, num_axes))
    # All elements between a spatial axis and a further one must be 0.
    if direction[:3, 3:].any() or direction[3:, :3].any():
        raise UserError(
            f"{path}: expected three axes in space and one in time, but the direction "
            f"{direction.tolist()} mixes them; repair the header."
        )
    columns = direction[:3, :3] * source.GetSpacing()[:3]
    return grid_from_columns(path, shape, columns, source.GetOrigin()[:3])


def from_simpleitk(image: Any, air: int = AIR_HU) -> Volume:
    """Convert an image, as if it were read from a file.

    Args:
        image: `SimpleITK.Image` of three axes, or with a further one of one step, one number per
            voxel: HU of a CT, or intensities of another modality.
        air: Value that replaces NaN and infinity, see `load_image`.

    Returns:
        Volume of its values (D, H, W), int16 where that is exact, else float32, in the image's own
        order.

    Raises:
        UserError: If it is no image, or not one regular 3D volume of numbers.
    """
    if not isinstance(image, SimpleITK.Image):
        # The caller, `Segmenter`, passes everything that is none of the other types it takes.
        raise UserError(
            "expected a path, a Volume, an image of SimpleITK or nibabel, or an array, but got "
            f"{type(image).__name__}"
        )
    path = Path("SimpleITK image")  # for messages
    grid = grid_of(path, image, image.GetNumberOfComponentsPerPixel())
    array = SimpleITK.GetArrayViewFromImage(image).reshape(grid.shape)

    def read_slices() -> Iterator[np.ndarray]:
        # One slice (H, W) at a time: conversions need no second copy of the volume.
        return map(np.ravel, array)

    return load_image(LazyVolume(path, grid, array.dtype, read_slices), air)


def to_simpleitk(labels: np.ndarray, image: Any) -> Any:
    """Make an image of labels (D, H, W) on the grid of the image that they belong to."""
    result = SimpleITK.GetImageFromArray(labels)
    # Not by `CopyInformation`: the image may have a time axis of one step, which labels lack.
    num_axes = image.GetDimension()
    direction = np.reshape(image.GetDirection(), (num_axes, num_axes))[:3, :3]
    result.SetSpacing(image.GetSpacing()[:3])
    result.SetOrigin(image.GetOrigin()[:3])
    result.SetDirection(direction.ravel().tolist())
    return result


def _save(
    path: Path,
    part: Path,
    array: np.ndarray,
    grid: VoxelGrid,
    fields: Mapping[str, str] | None = None,
) -> None:
    """Write voxels to a temporary file, compressed.

    Args:
        path: The target, for messages.
        part: The temporary file; its suffix chooses the format.
        array: Voxels (D, H, W).
        grid: Their position.
        fields: Further pairs `key:=value` for a NRRD header.

    Raises:
        UserError: If the file cannot be written.
    """
    image = SimpleITK.GetImageFromArray(array)
    for key, value in (fields or {}).items():
        image.SetMetaData(key, value)
    image.SetSpacing(grid.spacing_mm[::-1])  # (z, y, x) to (x, y, z)
    image.SetOrigin(grid.origin_xyz_mm)
    image.SetDirection(np.ravel(grid.direction).tolist())
    try:
        with utf8_path(part) as writable:
            SimpleITK.WriteImage(image, str(writable), useCompression=True)
    except RuntimeError as error:
        # The last line of an ITK error has the reason, after the function of ITK that failed.
        reason = re.sub(r".*(Reason:|\[nrrd\]) *", "", str(error).strip().splitlines()[-1])
        raise UserError(
            f"{path}: cannot be written ({reason}); "
            "check the folder, its permissions and its space."
        ) from error


def write_nrrd_or_metaimage(
    path: Path, array: np.ndarray, grid: VoxelGrid, fields: Mapping[str, str] | None = None
) -> None:
    """Write voxels, compressed, to a .nrrd, .mha or .mhd.

    A .mhd gets a .zraw beside it. Until the new header is in place, the old header and the old
    voxels stay as they were.

    Args:
        path: Target; its suffix chooses the format.
        array: Voxels (D, H, W).
        grid: Their position.
        fields: Further pairs `key:=value` for the header of a .nrrd.

    Raises:
        UserError: If a file cannot be written.
    """
    if path.suffix.lower() == ".mhd":
        # A link stays a link: the file that it points to is replaced, and the voxels lie there.
        _write_pair(Path(os.path.realpath(path)), array, grid)
        return
    with replace_path(path) as part:
        _save(path, part, array, grid, fields)


def _write_pair(path: Path, array: np.ndarray, grid: VoxelGrid) -> None:
    """Write a .mhd and its .zraw as `write_nrrd_or_metaimage` does; `path` is not a link."""
    # In the name of a file with voxels, `%` and a leading LIST or LOCAL have a special meaning in
    # MetaImage.
    stem = path.name.removesuffix(path.suffix)
    if "%" in stem or stem.upper().startswith(("LIST", "LOCAL")):
        stem = f"voxels-{zlib.crc32(os.fsencode(stem)):08x}"
    old_files = _own_voxel_files(path, stem)
    voxels = _free_name(path.with_name(stem))
    new_header = b""
    try:
        with replace_path(voxels) as part:
            # SimpleITK cannot write pairs where a folder has `%` in its name, so it writes one
            # file, which is divided here.
            whole = part.with_suffix(".mha")
            try:
                _save(path, whole, array, grid)
                # LOCAL is the value of ElementDataFile, the last field.
                header, _, data = whole.read_bytes().partition(b"LOCAL\n")
                part.write_bytes(data)
            finally:
                whole.unlink(missing_ok=True)
        # The header is written after the voxels, so that it never points to a file that does not
        # exist. The last line of the header gets the name of that file in place of LOCAL.
        new_header = header + f"{voxels.name}\n".encode(errors=RAW_NAMES)
        replace_bytes(path, new_header)
    except BaseException:  # an interrupt as well
        with suppress(OSError):
            # An interrupt may come when the new header is in place already, and needs the voxels.
            if not path.exists() or path.read_bytes() != new_header:
                voxels.unlink()
        raise
    for file in old_files:
        # An old header may have named a missing file, whose name the new voxels then have.
        if file != voxels:
            file.unlink(missing_ok=True)


def _own_voxel_files(path: Path, stem: str) -> list[Path]:
    """List the voxel files of an old .mhd that `_write_pair` may have written.

    Other files that the header names belong to the user. Without an old header the list is empty.
    """
    try:
        files = read_header(path).files
    except (OSError, UserError):
        return []
    pattern = re.escape(str(path.with_name(stem))) + r"(-\d+)?\.zraw"
    return [file for file in files if re.fullmatch(pattern, str(file))]


def _free_name(stem: Path) -> Path:
    """Find a path for voxels that no file has: `<stem>.zraw`, else `<stem>-2.zraw` and so on."""
    voxels = stem.with_name(f"{stem.name}.zraw")
    for count in itertools.count(2):
        if not os.path.lexists(voxels):
            break
        voxels = stem.with_name(f"{stem.name}-{count}.zraw")
    return voxels
