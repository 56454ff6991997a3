"""MetaImage with its voxels (.mha) or beside them (.mhd)."""

from __future__ import annotations

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
    "MET_CHAR": "i1",
    "MET_UCHAR": "u1",
    "MET_SHORT": "i2",
    "MET_USHORT": "u2",
    "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG_LONG": "i8",
    "MET_ULONG_LONG": "u8",
    "MET_FLOAT": "f4",
    "MET_DOUBLE": "f8",
}
TYPE_NAMES = {code: name for name, code in TYPES.items()}
ORIGIN_KEYS = ("Offset", "Position", "Origin")
DIRECTION_KEYS = ("TransformMatrix", "Rotation", "Orientation")
SPACING_KEYS = ("ElementSpacing", "ElementSize")
GEOMETRY_KEYS = (
    *DIRECTION_KEYS,
    *ORIGIN_KEYS,
    "CenterOfRotation",
    "AnatomicalOrientation",
    *SPACING_KEYS,
    "DistanceUnits",
)
FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _first(fields: dict[str, str], keys: tuple[str, ...]) -> tuple[str, str | None]:
    """Find the first of several names of one field; gives (name, value)."""
    return next(((key, fields[key]) for key in keys if key in fields), (keys[0], None))


def _flag(path: Path, fields: dict[str, str], keys: tuple[str, ...], default: bool) -> bool:
    key, text = _first(fields, keys)
    if text is None:
        return default
    if text.lower() not in FLAGS:
        raise UserError(f"{path}: expected True or False in the header field '{key}', got {shown(text)}; repair the header.")
    return FLAGS[text.lower()]


def _place(path: Path, fields: dict[str, str]) -> tuple[VoxelGrid, tuple[str, ...]]:
    """Find the grid that fields describe, and what the user must know about it.

    World points are LPS, whatever AnatomicalOrientation says, as in ITK. Of four axes the last may hold one frame.
    """
    sizes = whole_numbers(path, fields.get("DimSize", ""), "DimSize")
    if fields.get("NDims") != str(len(sizes)):
        raise UserError(
            f"{path}: expected as many sizes as axes, but the MetaImage header gives {shown(fields.get('NDims', ''))} axes and "
            f"{len(sizes)} sizes; repair the header."
        )
    shape, count = check_shape(path, sizes), len(sizes)
    check_unit(path, fields.get("DistanceUnits", ""), "DistanceUnits")
    missing = {}
    spacing_key, spacing = _first(fields, SPACING_KEYS)
    steps = [1.0] * count
    if spacing is None:
        missing["spacing"] = "1 mm"
    else:
        steps = numbers(path, spacing, count, spacing_key)
        check_spacing(path, steps, spacing, spacing_key)
    matrix_key, matrix = _first(fields, DIRECTION_KEYS)
    rows = np.eye(count)
    if matrix is None:
        missing["orientation"] = "left, posterior, superior"
    else:
        # One row per index axis: its world direction.
        rows = np.array(numbers(path, matrix, count**2, matrix_key)).reshape(count, count)
    origin_key, origin = _first(fields, ORIGIN_KEYS)
    point = [0.0] * count
    if origin is None:
        missing["origin"] = "0"
    else:
        point = numbers(path, origin, count, origin_key)
    if rows[:3, 3:].any() or rows[3:, :3].any():
        raise UserError(
            f"{path}: expected three axes in space and one in time, but the header field '{matrix_key}' mixes them: "
            f"{shown(str(matrix))}; repair the header."
        )
    return grid_from_columns(path, shape, rows[:3, :3].T * steps[:3], point[:3]), missing_remark(missing)


def _header_lines(path: Path) -> tuple[list[str], int, list[str]]:
    """Read the lines up to the one that says where the voxels lie, where that line ends, and the lines after a LIST."""
    lines: list[str] = []
    with path.open("rb") as file:
        while file.tell() < MAX_HEADER_BYTES and (line := file.readline(MAX_HEADER_BYTES)):
            text = decode_text(line.rstrip(b"\r\n"))
            if text.strip():
                lines.append(text)
            key, _, value = text.partition("=")
            if key.strip() == "ElementDataFile":
                offset = file.tell()
                is_list = value.strip().upper().startswith("LIST")
                return lines, offset, decode_text(file.read(MAX_HEADER_BYTES)).split("\n") if is_list else []
    raise UserError(
        f"{path}: expected a MetaImage file, but its header does not say where the voxels lie (ElementDataFile); check it."
    )


def open_metaimage(path: Path) -> Stored:
    """Read the header of a MetaImage file.

    Raises:
        UserError: If it is no MetaImage file or no scalar 3D volume.
    """
    lines, offset, names = _header_lines(path)
    fields = read_fields(path, lines, "=")
    grid, remarks = _place(path, fields)
    if fields.get("ElementNumberOfChannels", "1") != "1":
        raise UserError(
            f"{path}: expected one number per voxel, got {shown(fields['ElementNumberOfChannels'])}; export grey values."
        )
    header = None
    if fields["NDims"] == "3":
        kept = [line for line in lines if line.split("=", 1)[0].strip() in GEOMETRY_KEYS]
        header = FileHeader(
            "metaimage", encode_text("\n".join([f"{key} = {fields[key]}" for key in ("NDims", "DimSize")] + kept))
        )
    code = TYPES.get(fields.get("ElementType", ""))
    if code is None:
        raise UserError(
            f"{path}: expected a number type in the MetaImage header, got {shown(fields.get('ElementType', ''))}; export grey "
            "values."
        )
    is_big = _flag(path, fields, ("BinaryDataByteOrderMSB", "ElementByteOrderMSB"), False)
    is_packed = _flag(path, fields, ("CompressedData",), False)
    encoding = "deflate" if is_packed else "raw" if _flag(path, fields, ("BinaryData",), True) else "text"
    num_skipped = whole_numbers(path, fields.get("HeaderSize", "0"), "HeaderSize")[0]
    is_local = fields["ElementDataFile"].upper() == "LOCAL"
    paths = (path,) if is_local else data_files(path, fields["ElementDataFile"], names)
    voxels = VoxelFiles(paths, encoding, offset if is_local else 0, num_skipped=num_skipped)
    return stored_voxels(path, grid, header, np.dtype((">" if is_big else "<") + code), voxels, remarks)


def data_name_of(path: Path) -> str:
    """Name of the file that holds the voxels of a header, "" where there is none."""
    try:
        return read_fields(path, _header_lines(path)[0], "=")["ElementDataFile"]
    except (OSError, UserError):
        return ""


@np.errstate(over="ignore", invalid="ignore")
def grid_of_header(path: Path, raw: bytes) -> VoxelGrid:
    """Find the grid that kept header lines describe."""
    return _place(path, read_fields(path, decode_text(raw).split("\n"), "="))[0]


def _text(values: np.ndarray) -> str:
    return " ".join(repr(float(value)) for value in values)


def encode_header(dtype: np.dtype, grid: VoxelGrid, like: FileHeader | None, num_bytes: int, data_name: str) -> bytes:
    """Make the header of a MetaImage file with zlib voxels; with `like` the geometry lines are the input's own.

    Args:
        dtype: Type of the voxels.
        grid: Shape and place.
        like: Header whose geometry lines are kept.
        num_bytes: Bytes of the voxels, compressed.
        data_name: Name of the file beside it, or `LOCAL`.
    """
    lines = ["ObjectType = Image", "NDims = 3", "BinaryData = True", "BinaryDataByteOrderMSB = False"]
    lines += ["CompressedData = True", f"CompressedDataSize = {num_bytes}"]
    if like is not None:
        lines += [line for line in decode_text(like.raw).split("\n") if not line.startswith(("NDims", "DimSize"))]
    else:
        lines.append("TransformMatrix = " + _text(np.array(grid.direction).T.ravel()))
        lines.append("Offset = " + _text(np.array(grid.origin_xyz_mm)))
        lines.append("CenterOfRotation = 0 0 0")
        lines.append("ElementSpacing = " + _text(np.array(grid.spacing_mm)[::-1]))
    lines.append("DimSize = " + " ".join(str(size) for size in grid.shape[::-1]))
    lines += [f"ElementType = {TYPE_NAMES[dtype.str[1:]]}", f"ElementDataFile = {data_name}"]
    return encode_text("\n".join(lines) + "\n")
