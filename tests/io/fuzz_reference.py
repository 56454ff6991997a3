"""What a file says, read again without medseg: from the standards' byte offsets and fields.

It is lenient: it takes whatever can be understood. medseg may refuse more, but must never
understand anything else.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Mapping

import numpy as np

Content = tuple[
    np.ndarray, np.ndarray
]  # values (z, y, x) float64, LPS points (8, 3) of the corner voxels
Files = Mapping[str, bytes]

NIFTI_CODES = {
    2: "u1",
    4: "i2",
    8: "i4",
    16: "f4",
    64: "f8",
    256: "i1",
    512: "u2",
    768: "u4",
    1024: "i8",
    1280: "u8",
}
META_CODES = {
    "MET_CHAR": "i1", "MET_UCHAR": "u1", "MET_SHORT": "i2", "MET_USHORT": "u2", "MET_INT": "i4",
    "MET_UINT": "u4",
    "MET_LONG_LONG": "i8", "MET_ULONG_LONG": "u8", "MET_FLOAT": "f4", "MET_DOUBLE": "f8",
}  # fmt: skip
NRRD_CODES = {
    "short": "i2",
    "float": "f4",
    "unsigned char": "u1",
    "int": "i4",
    "ushort": "u2",
    "double": "f8",
}


def corners(shape: tuple[int, ...], columns: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """World points of the corners; columns are steps along x, y, z."""
    index = np.array(
        [[i, j, k] for k in (0, shape[0] - 1) for j in (0, shape[1] - 1) for i in (0, shape[2] - 1)]
    )
    return np.asarray(index @ columns.T + origin)


def as_hu(
    data: bytes, dtype: str, shape: tuple[int, ...], slope: float = 1.0, intercept: float = 0.0
) -> np.ndarray:
    """Values as float32 holds them; what is no number is air."""
    with np.errstate(all="ignore"):
        values = np.frombuffer(data, dtype).reshape(shape).astype(np.float64) * slope + intercept
        values = values.astype(np.float32).astype(np.float64)
    return np.where(np.isfinite(values), values, -1024.0)


@np.errstate(all="ignore")
def nifti(files: Files, name: str) -> Content:
    """NIfTI-1 and NIfTI-2, after nifti1.h and nifti2.h."""
    data = files[name]
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    order = next(o for o in "<>" if struct.unpack(o + "i", data[:4])[0] in (348, 540))

    def get(code: str, first: int) -> list[float]:
        return list(struct.unpack_from(order + code, data, first))

    if get("i", 0) == [348]:
        dim, (datatype,), pixdim, (offset, slope, shift) = (
            get("8h", 40),
            get("h", 70),
            get("8f", 76),
            get("3f", 108),
        )
        (units,), codes, place, rows = (
            get("B", 123),
            get("2h", 252),
            get("6f", 256),
            get("12f", 280),
        )
    else:
        dim, (datatype,), pixdim, (offset,), (slope, shift) = (
            get("8q", 16),
            get("h", 12),
            get("8d", 104),
            get("q", 168),
            get("2d", 176),
        )
        (units,), codes, place, rows = (
            get("i", 500),
            get("2i", 344),
            get("6d", 352),
            get("12d", 400),
        )
    shape = tuple(int(size) for size in dim[3:0:-1])
    assert all(size == 1 for size in dim[4 : int(dim[0]) + 1])
    steps = np.array(pixdim[1:4])
    forms = []
    if codes[0] > 0:
        b, c, d = place[:3]
        a = np.sqrt(max(0.0, 1.0 - b * b - c * c - d * d))
        length = np.linalg.norm([a, b, c, d])
        a, b, c, d = np.array([a, b, c, d]) / (length or 1.0)
        turn = np.array(
            [
                [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
                [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
                [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
            ]
        )
        is_placed = (
            abs(length - 1) < 1e-4
            and np.isfinite(turn).all()
            and (steps > 0).all()
            and np.isfinite([*steps, *place]).all()
        )
        forms += (
            [(turn * steps * [1, 1, -1 if pixdim[0] < 0 else 1], np.array(place[3:]))]
            if is_placed
            else []
        )
    if codes[1] > 0:
        matrix = np.array(rows).reshape(3, 4)
        lengths = np.linalg.norm(matrix[:, :3], axis=0)
        with np.errstate(all="ignore"):
            skew = np.abs((matrix[:, :3] / lengths).T @ (matrix[:, :3] / lengths) - np.eye(3)).max()
        if np.isfinite(matrix).all() and lengths.min() > 0 and skew <= 1e-3:
            forms.insert(0 if codes[1] == 1 else len(forms), (matrix[:, :3], matrix[:, 3]))
    assert forms or max(codes) <= 0
    columns, origin = forms[0] if forms else (np.diag([-1, -1, 1]) * steps, np.zeros(3))
    unit = {1: 1000.0, 3: 0.001}.get(int(units) & 7, 1.0)
    to_lps = np.array([-unit, -unit, unit])
    dtype = order + NIFTI_CODES[int(datatype)]
    first = int(offset) or int(get("i", 0)[0]) + 4
    if slope == 0 or not np.isfinite(slope):
        slope, shift = 1.0, 0.0
    wanted = int(np.prod([int(size) for size in shape], dtype=object)) * np.dtype(dtype).itemsize
    values = as_hu(data[first : first + wanted], dtype, shape, slope, shift)
    return values, corners(shape, to_lps[:, None] * columns, to_lps * origin)


def lines_of(data: bytes, separator: str) -> dict[str, str]:
    """Fields of a text header, the last of equal names."""
    fields = {}
    for line in data.decode("latin-1").replace("\r\n", "\n").split("\n"):
        key, found, value = line.partition(separator)
        if found:
            fields[key.strip()] = value.strip()
    return fields


def floats(text: str) -> np.ndarray:
    """All numbers of a value."""
    return np.array([float(word) for word in re.split(r"[\s,()]+", text) if word])


def nrrd(files: Files, name: str) -> Content:
    """NRRD, after teem.sourceforge.net/nrrd/format.html."""
    head, _, data = files[name].replace(b"\r\n\r\n", b"\n\n", 1).partition(b"\n\n")
    fields = {key.lower(): value for key, value in lines_of(head, ":").items()}
    if "data file" in fields:
        data = files[fields["data file"]]
    shape = tuple(int(size) for size in fields["sizes"].split()[::-1])
    assert fields["dimension"] == "3"
    if fields["encoding"] in ("gzip", "gz"):
        data = gzip.decompress(data)
    signs = {
        "right-anterior-superior": [-1, -1, 1],
        "ras": [-1, -1, 1],
        "las": [1, -1, 1],
        "left-anterior-superior": [1, -1, 1],
    }
    to_lps = np.array(signs.get(fields.get("space", "").lower(), [1, 1, 1]))
    if "space directions" in fields:
        columns = floats(fields["space directions"]).reshape(3, 3).T
    else:
        columns = np.diag(floats(fields.get("spacings", "1 1 1")))
    origin = floats(fields.get("space origin", "0 0 0"))
    order = {"big": ">", "little": "<"}[fields.get("endian", "little").lower()]
    values = as_hu(
        data[int(fields.get("byte skip", "0")) :], order + NRRD_CODES[fields["type"].lower()], shape
    )
    return values, corners(shape, to_lps[:, None] * columns, to_lps * origin)


def metaimage(files: Files, name: str) -> Content:
    """MetaImage, after itk.org/Wiki/MetaIO/Documentation."""
    match = re.search(rb"ElementDataFile\s*=[^\n]*\n?", files[name])
    assert match is not None
    fields, data = lines_of(files[name][: match.end()], "="), files[name][match.end() :]
    if fields["ElementDataFile"].upper() != "LOCAL":
        data = files[fields["ElementDataFile"]]
    shape = tuple(int(size) for size in fields["DimSize"].split()[::-1])
    assert fields["NDims"] == "3"
    if fields.get("CompressedData", "False").lower() in ("true", "1"):
        data = zlib.decompress(data)
    columns = floats(fields.get("TransformMatrix", "1 0 0 0 1 0 0 0 1")).reshape(3, 3).T * floats(
        fields.get("ElementSpacing", "1 1 1")
    )
    order = ">" if fields.get("BinaryDataByteOrderMSB", "False").lower() in ("true", "1") else "<"
    values = as_hu(
        data[int(fields.get("HeaderSize", "0")) :], order + META_CODES[fields["ElementType"]], shape
    )
    return values, corners(shape, columns, floats(fields.get("Offset", "0 0 0")))


READERS = {"nifti": nifti, "nrrd": nrrd, "metaimage": metaimage}
