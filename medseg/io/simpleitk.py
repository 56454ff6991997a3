"""NRRD and MetaImage by SimpleITK: headers, streams of voxels, writer, images in memory.

SimpleITK gets a copy of the checked fields and never the user's file: its MetaImage reader corrupts
the heap on a damaged header and opens whatever file a header names. The voxels are decoded here,
because SimpleITK ignores damage to compressed voxels (README.md).
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

# Longer headers are not read: no program writes them.
MAX_HEADER_BYTES = 2**20

# Largest number of files that a pattern of a header may name.
MAX_DATA_FILES = 100_000

# Patterns of one word. No number is so long that a C program reads it in another way than Python.
NUMBER = r"[-+]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d\d?)?"
VECTOR = rf"\({NUMBER}(,{NUMBER}){{2,3}}\)"
# The values that a header field may have: the number of words as a power of the number of axes, or
# None where the value is one text; regular expression of each word or of the text, letters of
# either case; description for messages.
Rules = dict[str, tuple[int | None, str, str]]
SIZES = (1, r"[1-9]\d{0,8}", "a whole number for each axis")
NUMBERS = (1, NUMBER, "a number for each axis")
POSITIVE_NUMBERS = (1, NUMBER.removeprefix("[-+]?"), "a positive number for each axis")
NUM_BYTES = (None, r"-1|\d{1,9}", "a number of bytes")
# Other programs ignore units, so a length in another unit than mm is ambiguous.
LENGTHS = (
    None,
    r"(?!.*(?<![a-zµμ])(m|cm|um|µm|μm|microns?|nm|in|inch|met(er|re)|micrometer)(?![a-z])).*",
    "lengths in mm",
)
NRRD_TYPES = (
    "(signed |unsigned |u)?(char|short|int|long ?long)|(unsigned |signed )?(short|long long) int|"
    "u?int(8|16|32|64)(_t)?|float|double"
)
NRRD_RULES: Rules = {
    "dimension": (None, "[3-5]", "3 to 5 axes"),
    "sizes": SIZES,
    "space directions": (1, f"{VECTOR}|none", "'(x,y,z)' or 'none' for each axis"),
    "space origin": (None, VECTOR, "a point '(x,y,z)'"),
    "spacings": POSITIVE_NUMBERS,
    "axis mins": NUMBERS,
    "type": (None, NRRD_TYPES, "a number type"),
    "encoding": (
        None,
        "raw|gzip|gz|bzip2|bz2|ascii|text|txt",
        "raw, gzip, gz, bzip2, bz2, ascii, text or txt",
    ),
    "endian": (None, "little|big", "little or big"),
    "units": LENGTHS,
    "space units": LENGTHS,
    "line skip": (None, r"\d{1,9}", "a number of lines"),
    "byte skip": NUM_BYTES,
}
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
# Fields of MetaImage that SimpleITK gets.
META_GEOMETRY: Rules = {
    "NDims": (None, "[34]", "3 or 4 axes"),
    "DimSize": SIZES,
    "ElementType": (None, "MET_(U?(CHAR|SHORT|INT|LONG_LONG)|FLOAT|DOUBLE)", "a number type"),
    "ElementNumberOfChannels": (None, "1", "one number per voxel"),
    **dict.fromkeys(META_SPACINGS, POSITIVE_NUMBERS),
    **dict.fromkeys(META_ORIGINS, NUMBERS),
    **dict.fromkeys(META_DIRECTIONS, (2, NUMBER, "a matrix of all axes")),
}

META_RULES: Rules = {
    **META_GEOMETRY,
    **dict.fromkeys(
        ("BinaryData", "CompressedData", *META_ORDERS), (None, "true|false|1|0", "True or False")
    ),
    "HeaderSize": NUM_BYTES,
    "DistanceUnits": LENGTHS,
}
# Spaces of NRRD whose axes are those of the patient.
LPS_SPACES = re.compile(
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
    """Whether a file is NRRD, by its suffix; else it is MetaImage."""
    return path.name.lower().endswith((".nrrd", ".nhdr"))


def read_header(path: Path) -> tuple[dict[str, str], int, tuple[Path, ...]]:
    """Read the fields of a header and find the files with its voxels; the values are not checked.

    Returns:
        Values of the fields by name, white space at the ends removed; first byte after the header;
        files that hold the voxels in equal shares, in their order, which is the header's own file
        where they follow the header.

    Raises:
        UserError: If it is no header of its format, gives a field twice, or names files outside its
            own folder.
    """
    is_of_nrrd = is_nrrd(path)
    data_key = "data file" if is_of_nrrd else "ElementDataFile"
    with path.open("rb") as file:
        if is_of_nrrd and re.fullmatch(rb"NRRD000[1-5]\r?\n", file.readline(16)) is None:
            raise UserError(
                f"{path}: expected a NRRD file, but it does not start with 'NRRD' and a version "
                "up to 5; check the file."
            )
        fields = _read_fields(path, file, data_key)
        offset = file.tell()
        is_list = fields.get(data_key, "").upper().startswith("LIST")
        following = file.read(MAX_HEADER_BYTES) if is_list else b""
    if offset > MAX_HEADER_BYTES or (not is_of_nrrd and data_key not in fields):
        name = "NRRD" if is_of_nrrd else "MetaImage"
        raise UserError(
            f"{path}: expected a {name} file, but its header does not say where the voxels are "
            f"({data_key}); check the file."
        )
    if data_key not in fields:
        return fields, offset, (path,)
    if not is_of_nrrd and fields[data_key].upper() == "LOCAL":
        return fields, offset, (path,)
    names = following.decode("utf-8", "surrogateescape").splitlines()
    return fields, offset, _data_files(path, fields[data_key], names)


def _field_lines(file: BinaryIO, *, is_of_nrrd: bool) -> Iterator[str]:
    """Yield the lines of a header that should be fields, one at a time.

    An empty line ends a header of NRRD and is skipped in one of MetaImage.
    """
    while line := file.readline(MAX_HEADER_BYTES):
        # Bytes that are no UTF-8 may be those of a file name.
        text = line.rstrip(b"\r\n").decode("utf-8", "surrogateescape")
        if file.tell() > MAX_HEADER_BYTES or (is_of_nrrd and not text):
            return
        if is_of_nrrd:
            _, _, value = text.partition(":")
            is_pair = value.strip().startswith("=")  # for `_read_pairs`
            if is_pair or text.startswith("#"):
                continue
        if text.strip():
            yield text


def _read_fields(path: Path, file: BinaryIO, data_key: str) -> dict[str, str]:
    """Read the fields of a header up to its end.

    A header of MetaImage ends with the field of the voxels; one of NRRD with a list of files in
    that field or with an empty line.

    Args:
        path: File, for messages.
        file: Open at the first field.
        data_key: The field that says where the voxels are.

    Raises:
        UserError: If a line is no field, or repeats one.
    """
    is_of_nrrd = is_nrrd(path)
    separator = ":" if is_of_nrrd else "="
    fields: dict[str, str] = {}
    for text in _field_lines(file, is_of_nrrd=is_of_nrrd):
        key, delimiter, value = (part.strip() for part in text.partition(separator))
        if not delimiter or not key:
            name = "NRRD" if is_of_nrrd else "MetaImage"
            raise UserError(
                f"{path}: expected a {name} file with a name, '{separator}' and a value on each "
                f"line of its header, got {shown(text)}; check the file."
            )
        if is_of_nrrd:
            key = NRRD_SYNONYMS.get(key.lower(), key.lower())
        if key in fields:
            raise UserError(
                f"{path}: the header gives the field {shown(key)} twice; remove one of the lines."
            )
        fields[key] = value
        if key == data_key and (not is_of_nrrd or value.upper().startswith("LIST")):
            break
    return fields


def _data_files(path: Path, value: str, following: list[str]) -> tuple[Path, ...]:
    """Find the files that a header means.

    Args:
        path: File of the header.
        value: `name`, `name%03d.raw first last step`, or `LIST`.
        following: The lines after the header: for `LIST` a name on each.

    Raises:
        UserError: If it means none, or one outside the folder of the header.
    """
    words = value.split()
    if words and words[0].upper() == "LIST":
        names = [line.strip() for line in following if line.strip()]
    elif "%" in value and len(words) >= 4:
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
    """List the names that a pattern of C's `printf` means, as `slice%03d.raw 1 120 1`.

    Raises:
        UserError: If it is another pattern, or means too many.
    """
    words = value.split()
    pattern = r"[^%]*%0?\d?d[^%]*(\s-?\d{1,9}){2}\s-?[1-9]\d{0,8}(\s\d)?"
    numbers = range(0)
    is_pattern = re.fullmatch(pattern, " ".join(words), re.ASCII) is not None
    if is_pattern:
        first, last, step = map(int, words[1:4])
        # The last number belongs to the range.
        stop = last + 1 if step > 0 else last - 1
        numbers = range(first, stop, step)
    if not is_pattern or len(numbers) > MAX_DATA_FILES:
        raise UserError(
            f"{path}: expected a pattern such as 'slice%03d.raw 1 120 1', got {shown(value)}; "
            "repair the header."
        )
    return [words[0] % number for number in numbers]


def _checked(path: Path, fields: dict[str, str]) -> dict[str, str]:
    """Check the values of the fields that are used.

    Returns:
        The values with single blanks between their words, of which `(1, 2, 3)` is one.

    Raises:
        UserError: If a field is missing or has another value than its format allows.
    """
    rules, required = META_RULES, ["NDims", "DimSize", "ElementType"]
    if is_nrrd(path):
        rules, required = NRRD_RULES, ["dimension", "sizes", "type", "encoding"]
    for key in required:
        if not fields.get(key):
            raise UserError(
                f"{path}: expected the field '{key}' in the header, but it is missing or empty; "
                "check the file."
            )
    values = {key: _with_single_blanks(value) for key, value in fields.items()}
    for key, (power, pattern, expected) in rules.items():
        if key not in values:
            continue
        words, count = [values[key]], 1
        if power is not None:
            words = values[key].split()
            # The number of axes is checked first: it is a digit here.
            count = int(values[required[0]]) ** power
        are_valid = all(re.fullmatch(pattern, word, re.IGNORECASE | re.ASCII) for word in words)
        if len(words) != count or not are_valid:
            raise UserError(
                f"{path}: expected {expected} in the header field '{key}', got "
                f"{shown(fields[key])}; repair the header or export the scan again."
            )
    return values


def _with_single_blanks(value: str) -> str:
    """Write a value with single blanks between its words.

    Example:
        >>> _with_single_blanks("( 1 , 2 )  3"), _with_single_blanks("(1)(2)")
        ('(1,2) 3', '(1) (2)')
    """
    separated = value.replace(")", ") ")
    without_inner = re.sub(r"(?<=[(,])\s+|\s+(?=[,)])", "", separated)
    return " ".join(without_inner.split())


def _geometry(path: Path, values: dict[str, str], num_layers: int) -> tuple[VoxelGrid, str]:
    """Read the grid and NumPy's code of the voxel type, by SimpleITK from a copy of the header.

    Raises:
        UserError: If SimpleITK refuses the header, or it describes no 3D volume of grey values.
    """
    reader = SimpleITK.ImageFileReader()
    with tempfile.TemporaryDirectory(prefix="medseg-") as folder:
        copy = Path(folder) / ("header.nrrd" if is_nrrd(path) else "header.mha")
        lines = _nrrd_lines(values) if is_nrrd(path) else _meta_lines(values)
        copy.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        reader.SetFileName(str(copy))
        try:
            reader.ReadImageInformation()
        except RuntimeError as error:
            # The last line of an ITK error has the reason, after its place in the source.
            place = r".*(ReadImageInformation:|\[nrrd\]) *(_nrrd\w+: )?"
            reason = re.sub(place, "", str(error).strip().splitlines()[-1])
            plain = "".join(letter if letter.isprintable() else "?" for letter in reason[:160])
            raise UserError(
                f"{path}: the header cannot be read ({plain}); repair it or export the scan again."
            ) from None
    type_name = SimpleITK.GetPixelIDValueAsString(reader.GetPixelID()).removeprefix("vector of ")
    num_components = reader.GetNumberOfComponents()
    if num_components == num_layers:
        # The layers of a segmentation are expected; `grid_of` refuses any other number.
        num_components = 1
    return grid_of(path, reader, num_components), NUMPY_CODES[type_name]


def _nrrd_lines(values: dict[str, str]) -> list[str]:
    """Write a NRRD header of checked fields, without those that lead to voxels."""
    directions = values.get("space directions", "").split()
    if "none" in directions and "kinds" not in values:
        # SimpleITK finds axes that are not spatial by their kind alone.
        kinds = ["list" if direction == "none" else "domain" for direction in directions]
        values = values | {"kinds": " ".join(kinds)}
    left_out = ("data file", "line skip", "byte skip")
    fields = [f"{key}: {value}" for key, value in values.items() if key not in left_out]
    return ["NRRD0005", *fields, "\n"]


def _meta_lines(values: dict[str, str]) -> list[str]:
    """Write a MetaImage header of checked fields, without voxels."""
    fields = [f"{key} = {values[key]}" for key in META_GEOMETRY if key in values]
    return ["ObjectType = Image", *fields, "ElementDataFile = LOCAL\n"]


def _assumptions(values: dict[str, str]) -> tuple[str, ...]:
    """Name what the header does not give, and what is assumed for it."""
    keys = values.keys()
    # The axes of other spaces than those of the patient are unknown.
    is_lps = "space directions" in values and LPS_SPACES.fullmatch(values.get("space", ""))
    missing: dict[str, str] = {}
    if keys.isdisjoint(("space directions", "spacings", *META_SPACINGS)):
        missing["no spacing"] = "1 mm"
    if not is_lps and keys.isdisjoint(META_DIRECTIONS):
        missing["no orientation"] = "left, posterior, superior"
    if keys.isdisjoint(("space origin", "axis mins", *META_ORIGINS)):
        missing["no origin"] = "0"
    if not missing:
        return ()
    lacking = " and ".join(missing)
    assumed = " and ".join(missing.values())
    return (f"the header gives {lacking}; taken instead: {assumed}; check size, sides and place",)


def open_text_volume(path: Path, num_layers: int = 1) -> LazyVolume:
    """Read the header of a NRRD or MetaImage file and check that its files can hold the voxels.

    Args:
        path: The file.
        num_layers: Numbers of each voxel; with several, the volume is that many times wider and
            holds them side by side.

    Raises:
        UserError: If it is damaged or no scalar 3D volume, or a file with voxels is missing, too
            short or too long.
    """
    fields, offset, files = read_header(path)
    values = _checked(path, fields)
    grid, code = _geometry(path, values, num_layers)
    depth, height, width = grid.shape
    stored = replace(grid, shape=(depth, height, width * num_layers))
    true_keys = {key for key, value in values.items() if value.lower() in ("true", "1")}
    if is_nrrd(path):
        is_big_endian = values.get("endian", "").lower() == "big"
        encoding = NRRD_ENCODINGS[values["encoding"].lower()]
    else:
        is_big_endian = not true_keys.isdisjoint(META_ORDERS)
        encoding = "raw"
        if "CompressedData" in true_keys:
            encoding = "deflate"
        elif "BinaryData" in values and "BinaryData" not in true_keys:
            encoding = "text"
    byte_order = ">" if is_big_endian else "<"
    # Files of their own begin with the voxels.
    if files != (path,):
        offset = 0
    return lazy_volume(
        path,
        stored,
        np.dtype(f"{byte_order}{code}"),
        files,
        encoding,
        offset=offset,
        num_lines=int(values.get("line skip", 0)),
        num_skipped=int(values.get("byte skip", values.get("HeaderSize", 0))),
        findings=tuple(warnings_of("reading", _assumptions(values))),
    )


class Segment(NamedTuple):
    """One segment of a segmentation of 3D Slicer.

    Attributes:
        name: Its name.
        value: Value of its voxels in its layer.
        layer: Layer that holds it, from 0; segments of different layers may overlap.
        num_layers: Layers of the file.
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
            or that of another one.
    """
    num_layers = _num_layers(read_header(path)[0])
    pairs = _read_pairs(path)
    pattern = re.compile(r"Segment(\d{1,6})_(?:Name|ID|LabelValue)", re.ASCII)
    matches = filter(None, map(pattern.fullmatch, pairs))
    segments: list[Segment] = []
    owners: dict[tuple[int, int], str] = {}
    for number in sorted({int(match[1]) for match in matches}):
        segment = _read_segment(path, pairs, number, num_layers)
        place = segment.layer, segment.value
        if place in owners:
            raise UserError(
                f"{path}: the segments {shown(owners[place])} and {shown(segment.name)} share the "
                f"value {segment.value}; save it again."
            )
        owners[place] = segment.name
        segments.append(segment)
    return segments


def _read_segment(path: Path, pairs: Mapping[str, str], number: int, num_layers: int) -> Segment:
    """Read one segment from the pairs of a header.

    Args:
        path: File, for messages.
        pairs: The pairs.
        number: Number of the segment in the keys, from 0.
        num_layers: Layers of the file.

    Raises:
        UserError: If it has no value, or no layer of the file.
    """
    # 3D Slicer shows the ID of a segment without a name.
    name = pairs.get(f"Segment{number}_Name") or pairs.get(f"Segment{number}_ID")
    name = name or f"Segment {number}"
    value = pairs.get(f"Segment{number}_LabelValue", "")
    layer = pairs.get(f"Segment{number}_Layer", "0")
    is_value = re.fullmatch(r"[1-9]\d{0,8}", value, re.ASCII)
    is_layer = re.fullmatch(r"\d{1,6}", layer, re.ASCII)
    if not is_value or not is_layer:
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

    Programs keep there what the format does not define.

    Raises:
        UserError: If a key has two values.
    """
    pairs: dict[str, str] = {}
    with path.open("rb") as file:
        while line := file.readline(MAX_HEADER_BYTES).rstrip(b"\r\n"):
            key, separator, value = line.decode("utf-8", "surrogateescape").partition(":=")
            if not separator:
                continue
            if pairs.setdefault(key, value) != value:
                raise UserError(
                    f"{path}: the header gives the field {shown(key)} twice; "
                    "remove one of the lines."
                )
    return pairs


def _num_layers(fields: Mapping[str, str]) -> int:
    """Count the layers of a segmentation of 3D Slicer: its first axis where it has four."""
    sizes = fields.get("sizes", "").split()
    has_layers = len(sizes) == 4 and sizes[0].isdecimal()
    return int(sizes[0]) if has_layers else 1


def open_layer(path: Path, layer: int) -> LazyVolume:
    """Open one layer of a segmentation of 3D Slicer.

    The voxels of its layers lie side by side.

    Raises:
        UserError: As for `open_text_volume`.
    """
    num_layers = _num_layers(read_header(path)[0])
    volume = open_text_volume(path, num_layers)
    if num_layers == 1:
        return volume
    depth, height, width = volume.grid.shape
    grid = replace(volume.grid, shape=(depth, height, width // num_layers))

    def read_chunks() -> Iterator[np.ndarray]:
        # Every `num_layers`-th value, wherever a chunk begins.
        num_read = 0
        for values in volume.read_chunks():
            yield values[(layer - num_read) % num_layers :: num_layers]
            num_read += len(values)

    return replace(volume, grid=grid, read_chunks=read_chunks)


def grid_of(path: Path, source: Any, num_components: int) -> VoxelGrid:
    """Read the grid of an image or of the header that an `ImageFileReader` has read.

    Args:
        path: File, for messages.
        source: `SimpleITK.Image` or `SimpleITK.ImageFileReader`, of three axes, or more of which
            the others hold one frame.
        num_components: Numbers per voxel.

    Raises:
        UserError: If it is not one regular 3D volume of grey values.
    """
    if num_components != 1:
        raise UserError(
            f"{path}: expected one number per voxel, got {num_components}; export grey values."
        )
    shape = check_shape(path, source.GetSize())
    direction = np.reshape(source.GetDirection(), (source.GetDimension(), -1))
    if direction[:3, 3:].any() or direction[3:, :3].any():
        raise UserError(
            f"{path}: expected three axes in space and one in time, but the direction "
            f"{direction.tolist()} mixes them; repair the header."
        )
    return grid_from_columns(
        path, shape, direction[:3, :3] * source.GetSpacing()[:3], source.GetOrigin()[:3]
    )


def from_simpleitk(image: Any, air: int = AIR_HU) -> Volume:
    """Convert an image, as if it were read from a file.

    Args:
        image: `SimpleITK.Image` of three axes, one number per voxel, a CT in HU.
        air: See `load_image`.

    Returns:
        HU (D, H, W), int16 where that is exact, else float32, in the image's own order.

    Raises:
        UserError: If it is no image, or not one regular 3D volume of numbers.
    """
    if not isinstance(image, SimpleITK.Image):
        raise UserError(
            "expected a path, a Volume, an image of SimpleITK or nibabel, or an array, but got "
            f"{type(image).__name__}"
        )
    path = Path("SimpleITK image")
    grid = grid_of(path, image, image.GetNumberOfComponentsPerPixel())
    array = SimpleITK.GetArrayViewFromImage(image).reshape(grid.shape)
    # One slice at a time: conversions need no second copy of the volume.
    return load_image(LazyVolume(path, grid, array.dtype, lambda: map(np.ravel, array)), air)


def to_simpleitk(labels: np.ndarray, image: Any) -> Any:
    """Make an image of labels (D, H, W) on the grid of the image that they belong to."""
    result = SimpleITK.GetImageFromArray(labels)
    result.CopyInformation(image)
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
        fields: Further pairs of a NRRD header.

    Raises:
        UserError: If the file cannot be written.
    """
    image = SimpleITK.GetImageFromArray(array)
    for key, value in (fields or {}).items():
        image.SetMetaData(key, value)
    image.SetSpacing(grid.spacing_mm[::-1])
    image.SetOrigin(grid.origin_xyz_mm)
    image.SetDirection(np.ravel(grid.direction).tolist())
    try:
        with utf8_path(part) as writable:
            SimpleITK.WriteImage(image, str(writable), True)
    except RuntimeError as error:
        reason = re.sub(r".*(Reason:|\[nrrd\]) *", "", str(error).strip().splitlines()[-1])
        raise UserError(
            f"{path}: cannot be written ({reason}); "
            "check the folder, its permissions and its space."
        ) from error


def write_text_volume(
    path: Path, array: np.ndarray, grid: VoxelGrid, fields: Mapping[str, str] | None = None
) -> None:
    """Write voxels (D, H, W), compressed, to a .nrrd, .mha or .mhd.

    A .mhd gets a .zraw beside it, and the two replace an old pair as one: until the new header is
    in place, the old pair of files is whole. `fields` are further pairs of the header of a .nrrd.

    Raises:
        UserError: If a file cannot be written.
    """
    if path.suffix.lower() == ".mhd":
        _write_pair(Path(os.path.realpath(path)), array, grid)
        return
    with replace_path(path) as part:
        _save(path, part, array, grid, fields)


def _write_pair(path: Path, array: np.ndarray, grid: VoxelGrid) -> None:
    """Write a .mhd and its .zraw as `write_text_volume` does; `path` is no link."""
    # MetaImage gives `%` and a leading LIST or LOCAL a meaning of their own.
    stem = path.name[:-4]
    if "%" in stem or stem.upper().startswith(("LIST", "LOCAL")):
        stem = f"voxels-{zlib.crc32(os.fsencode(stem)):08x}"
    old_files: list[Path] = []
    with suppress(OSError, UserError):
        # Only files that this function may have written: another header names files of its user.
        pattern = re.escape(str(path.with_name(stem))) + r"(-\d+)?\.zraw"
        _, _, data_files = read_header(path)
        old_files = [file for file in data_files if re.fullmatch(pattern, str(file))]
    voxels = _free_name(path.with_name(stem))
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
        # The voxels have their name before the header that points to them.
        replace_bytes(path, header + f"{voxels.name}\n".encode(errors=RAW_NAMES))
    except BaseException:
        with suppress(OSError):
            voxels.unlink()
        raise
    for file in old_files:
        file.unlink(missing_ok=True)


def _free_name(stem: Path) -> Path:
    """Find a name of voxels that no file has: `<stem>.zraw`, else `<stem>-2.zraw` and so on."""
    voxels = stem.with_name(f"{stem.name}.zraw")
    for count in itertools.count(2):
        if not os.path.lexists(voxels):
            break
        voxels = stem.with_name(f"{stem.name}-{count}.zraw")
    return voxels
