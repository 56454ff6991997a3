"""NRRD with its voxels (.nrrd) or beside them (.nhdr). Source: teem.sourceforge.net/nrrd/format.html."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import VoxelGrid
from medseg.io.stored import Stored, check_shape, grid_from_columns
from medseg.io.textheader import (
    MAX_HEADER_BYTES,
    VoxelFiles,
    check_spacing,
    check_unit,
    data_files,
    decode_text,
    encode_text,
    missing_remark,
    numbers,
    read_fields,
    shown,
    stored_voxels,
    whole_numbers,
)
from medseg.io.volume import FileHeader

TYPES = {
    **dict.fromkeys(("signed char", "int8", "int8_t"), "i1"),
    **dict.fromkeys(("uchar", "unsigned char", "uint8", "uint8_t"), "u1"),
    **dict.fromkeys(("short", "short int", "signed short", "signed short int", "int16", "int16_t"), "i2"),
    **dict.fromkeys(("ushort", "unsigned short", "unsigned short int", "uint16", "uint16_t"), "u2"),
    **dict.fromkeys(("int", "signed int", "int32", "int32_t"), "i4"),
    **dict.fromkeys(("uint", "unsigned int", "uint32", "uint32_t"), "u4"),
    **dict.fromkeys(("longlong", "long long", "long long int", "signed long long", "int64", "int64_t"), "i8"),
    **dict.fromkeys(("ulonglong", "unsigned long long", "unsigned long long int", "uint64", "uint64_t"), "u8"),
    **dict.fromkeys(("float",), "f4"),
    **dict.fromkeys(("double",), "f8"),
}
TYPE_NAMES = {"i1": "int8", "u1": "unsigned char", "i2": "short", "u2": "unsigned short", "i4": "int", "f4": "float"}
ENCODINGS = {
    "raw": "raw",
    **dict.fromkeys(("gzip", "gz"), "deflate"),
    **dict.fromkeys(("bzip2", "bz2"), "bzip2"),
    **dict.fromkeys(("ascii", "text", "txt"), "text"),
}
LPS_SIGNS = {
    **dict.fromkeys(("left-posterior-superior", "lps"), (1.0, 1.0, 1.0)),
    **dict.fromkeys(("right-anterior-superior", "ras"), (-1.0, -1.0, 1.0)),
    **dict.fromkeys(("left-anterior-superior", "las"), (1.0, -1.0, 1.0)),
}
"""Signs that turn a space into LPS."""

SPACES_WITHOUT_SIDES = ("scanner-xyz", "3d-right-handed", "3d-left-handed")
"""Spaces that say nothing of the patient; they are taken for LPS, as ITK does."""

SYNONYMS = {
    "axismins": "axis mins",
    "axismaxs": "axis maxs",
    "centers": "centerings",
    "datafile": "data file",
    "lineskip": "line skip",
    "byteskip": "byte skip",
    "oldmin": "old min",
    "oldmax": "old max",
    "blocksize": "block size",
    "sample units": "sampleunits",
}
GEOMETRY_KEYS = (
    *("space", "space dimension", "space units", "space directions", "space origin", "spacings", "thicknesses"),
    *("axis mins", "axis maxs", "centerings", "units"),
)
KNOWN_KEYS = frozenset(
    {
        *GEOMETRY_KEYS,
        *("type", "dimension", "sizes", "encoding", "endian", "content", "kinds", "labels", "min", "max", "old min", "old max"),
        *("block size", "line skip", "byte skip", "number", "sampleunits", "data file", "measurement frame"),
    }
)
ENDIANS = {"little": "<", "big": ">"}
GREY_KINDS = frozenset({"domain", "space", "none", "???"})
FRAME_KINDS = frozenset({"list", "time"})
_AXIS_DIRECTION = re.compile(r"none|\([^()]*\)")


def _key(line: str) -> str:
    """The field of a line, under its one name."""
    name = line.split(":", 1)[0].strip().lower()
    return SYNONYMS.get(name, name)


def _fields(path: Path, lines: list[str]) -> dict[str, str]:
    """Split `key: value` lines; comments and `key:=value` pairs are no fields.

    Raises:
        UserError: If a line is no field of the format, as in its reference library: a damaged name must not be passed over.
    """
    named = [f"{_key(line)}:{line.partition(':')[2]}" for line in lines if not _is_remark(line)]
    fields = read_fields(path, named, ":")
    for key in fields:
        if key not in KNOWN_KEYS:
            raise UserError(f"{path}: expected fields of the NRRD format in the header, got {shown(key)}; repair the header.")
    return fields


def _is_remark(line: str) -> bool:
    """Whether a line is a comment or a `key:=value` pair."""
    return line.startswith("#") or (":" in line and line.partition(":")[2].startswith("="))


@dataclass(frozen=True)
class _Axes:
    """The axes of the array, in the order of the file.

    Attributes:
        count: How many there are.
        spatial: The three that make the volume; all others have the size 1.
        directions: World step of each as text, `none` where it is no step; empty where the header gives none.
    """

    count: int
    spatial: tuple[int, ...]
    directions: list[str]


def _read_axes(path: Path, fields: dict[str, str]) -> tuple[_Axes, tuple[int, int, int]]:
    """Find the axes and the shape (D, H, W).

    Raises:
        UserError: If it is not one volume of grey values.
    """
    sizes = whole_numbers(path, fields.get("sizes", ""), "sizes")
    directions = _AXIS_DIRECTION.findall(fields.get("space directions", ""))
    if _AXIS_DIRECTION.sub("", fields.get("space directions", "")).strip():
        raise UserError(
            f"{path}: expected one '(x,y,z)' or 'none' an axis in the header field 'space directions', got "
            f"{shown(fields['space directions'])}; repair the header."
        )
    kinds = fields.get("kinds", "").lower().split()
    if fields.get("dimension") != str(len(sizes)) or len(directions or sizes) != len(sizes) or len(kinds or sizes) != len(sizes):
        raise UserError(
            f"{path}: expected as many axes in every field of the NRRD header, got {shown(fields.get('dimension', ''))} axes, "
            f"{len(sizes)} sizes, {len(directions)} directions and {len(kinds)} kinds; repair the header."
        )
    spatial = tuple(axis for axis in range(len(sizes)) if not directions or directions[axis] != "none")[:3]
    others = [axis for axis in range(len(sizes)) if axis not in spatial]
    for axis, kind in enumerate(kinds):
        is_wrong = kind not in GREY_KINDS if axis in spatial else sizes[axis] > 1 and kind not in GREY_KINDS | FRAME_KINDS
        if is_wrong:
            raise UserError(
                f"{path}: expected one number per voxel, but an axis of the NRRD header is of the kind {shown(kind)} and holds "
                f"{sizes[axis]}; export grey values."
            )
    shape = check_shape(path, [sizes[axis] for axis in (*spatial, *others)])
    return _Axes(len(sizes), spatial, directions), shape


def _world_steps(path: Path, fields: dict[str, str], axes: _Axes) -> tuple[np.ndarray, np.ndarray]:
    """Find the step along each axis (3×3, one column an axis) and the first voxel's centre, in the header's own space."""
    origin_text = fields.get("space origin")
    if axes.directions:
        num_world = len(axes.directions[axes.spatial[0]].split(","))
        steps = [numbers(path, axes.directions[axis], num_world, "space directions") for axis in axes.spatial]
        origin = numbers(path, origin_text, num_world, "space origin") if origin_text is not None else [0.0] * 3
        if num_world not in (3, 4) or any(any(step[3:]) for step in steps):
            raise UserError(
                f"{path}: expected a step of three numbers along each axis, but the header field 'space directions' is "
                f"{shown(fields['space directions'])}; repair the header."
            )
        return np.array(steps)[:, :3].T, np.array(origin[:3])
    text = fields.get("spacings", " ".join(["1"] * axes.count))
    spacing = np.array(numbers(path, text, axes.count, "spacings"))[list(axes.spatial)]
    check_spacing(path, spacing.tolist(), text, "spacings")
    if origin_text is not None:
        return np.diag(spacing), np.array(numbers(path, origin_text, 3, "space origin"))
    if "axis mins" not in fields:
        return np.diag(spacing), np.zeros(3)
    mins = np.array(numbers(path, fields["axis mins"], axes.count, "axis mins"))[list(axes.spatial)]
    is_node = "node" in fields.get("centerings", "")
    return np.diag(spacing), mins + (0.0 if is_node else 0.5) * spacing


def _place(path: Path, fields: dict[str, str]) -> tuple[VoxelGrid, tuple[str, ...]]:
    """Find the grid that header fields describe, and what the user must know about it."""
    axes, shape = _read_axes(path, fields)
    for key in ("space units", "units"):
        check_unit(path, fields.get(key, ""), key)
    space = fields.get("space", "").lower().removesuffix("-time")
    if space and space not in LPS_SIGNS and space not in SPACES_WITHOUT_SIDES:
        raise UserError(f"{path}: expected a space of the NRRD format in the header, got {shown(fields['space'])}; repair it.")
    columns, origin = _world_steps(path, fields, axes)
    signs = np.array(LPS_SIGNS.get(space, (1.0, 1.0, 1.0)))
    missing = {}
    if not axes.directions and "spacings" not in fields:
        missing["spacing"] = "1 mm"
    if not axes.directions or space not in LPS_SIGNS:
        missing["orientation"] = "left, posterior, superior"
    if "space origin" not in fields and "axis mins" not in fields:
        missing["origin"] = "0"
    grid = grid_from_columns(path, shape, signs[:, None] * columns, (signs * origin).tolist())
    return grid, missing_remark(missing)


def _header_lines(path: Path) -> tuple[list[str], int]:
    """Read the lines of the header after the magic one, and where the voxels would start."""
    lines: list[str] = []
    with path.open("rb") as file:
        if not re.fullmatch(rb"NRRD\d{4}\r?\n", file.readline(16)):
            raise UserError(f"{path}: expected a NRRD file, but it does not start with 'NRRD' and a version; check the file.")
        while line := file.readline(MAX_HEADER_BYTES).rstrip(b"\r\n"):
            lines.append(decode_text(line))
            if file.tell() > MAX_HEADER_BYTES:
                raise UserError(f"{path}: expected a NRRD file, but its header has no end; check the file.")
        return lines, file.tell()


def open_nrrd(path: Path) -> Stored:
    """Read the header of a NRRD file.

    Raises:
        UserError: If it is no NRRD file or no scalar 3D volume.
    """
    lines, offset = _header_lines(path)
    names: list[str] = []
    for number, line in enumerate(lines):
        if not _is_remark(line) and _key(line) == "data file" and line.partition(":")[2].strip().upper().startswith("LIST"):
            lines, names = lines[: number + 1], lines[number + 1 :]
            break
    fields = _fields(path, lines)
    grid, remarks = _place(path, fields)
    header = None
    if fields["dimension"] == "3":
        kept = [line for line in lines if not _is_remark(line) and _key(line) in GEOMETRY_KEYS]
        header = FileHeader("nrrd", encode_text("\n".join([f"{key}: {fields[key]}" for key in ("dimension", "sizes")] + kept)))
    code = TYPES.get(fields.get("type", "").lower())
    if code is None:
        raise UserError(
            f"{path}: expected a number type in the NRRD header, got {shown(fields.get('type', ''))}; export grey values."
        )
    encoding = ENCODINGS.get(fields.get("encoding", "").lower())
    if encoding is None:
        raise UserError(
            f"{path}: expected the encoding {', '.join(ENCODINGS)}, got {shown(fields.get('encoding', ''))}; save it as gzip."
        )
    endian = fields.get("endian", "").lower()
    if endian not in ENDIANS and (code not in ("i1", "u1") and encoding != "text"):
        raise UserError(f"{path}: expected endian little or big in the NRRD header, got {shown(endian)}; export the scan again.")
    dtype = np.dtype(ENDIANS.get(endian, "<") + code)
    skips = [whole_numbers(path, fields.get(key, "0"), key)[0] for key in ("line skip", "byte skip")]
    is_detached = "data file" in fields
    paths = data_files(path, fields["data file"], names) if is_detached else (path,)
    voxels = VoxelFiles(paths, encoding, 0 if is_detached else offset, *skips)
    return stored_voxels(path, grid, header, dtype, voxels, remarks)


def grid_of_header(path: Path, raw: bytes) -> VoxelGrid:
    """Find the grid that kept header lines describe."""
    return _place(path, _fields(path, decode_text(raw).split("\n")))[0]


def _vector(values: np.ndarray) -> str:
    return "(" + ",".join(repr(float(value)) for value in values) + ")"


def encode_header(dtype: np.dtype, grid: VoxelGrid, like: FileHeader | None) -> bytes:
    """Make the header of a NRRD file with gzip voxels; with `like` the geometry lines are the input's own."""
    lines = ["NRRD0004", f"type: {TYPE_NAMES[dtype.str[1:]]}", "dimension: 3"]
    if like is not None:
        lines += [line for line in decode_text(like.raw).split("\n") if not line.startswith(("dimension:", "sizes:"))]
    else:
        columns = np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]
        lines.append("space: left-posterior-superior")
        lines.append("space directions: " + " ".join(_vector(column) for column in columns.T))
        lines.append("space origin: " + _vector(np.array(grid.origin_xyz_mm)))
    # Teem wants the sizes before all fields that have one value per axis.
    lines.insert(3, "sizes: " + " ".join(str(size) for size in grid.shape[::-1]))
    lines += ["kinds: domain domain domain", "endian: little", "encoding: gzip"]
    return encode_text("\n".join(lines) + "\n\n")
