"""Reader and writer of NIfTI-1 and NIfTI-2 in one file (.nii, .nii.gz).

nibabel reads the fields of a header; they are checked here. A header may give two affines from
voxel indices to world coordinates, sform and qform; this module chooses between them as ITK does.
"""

import gzip
import io
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isal import igzip
from nibabel.nifti1 import Nifti1Extension, Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.quaternions import quat2mat
from nibabel.spatialimages import HeaderDataError

from medseg.errors import UserError
from medseg.findings import warnings_of
from medseg.geometry.grid import DIRECTION_TOLERANCE, VoxelGrid
from medseg.io.atomic import replace_path
from medseg.io.label_table import EXTENSION_CODE, Structure, nifti_extension
from medseg.io.volume import (
    LazyVolume,
    check_shape,
    grid_from_columns,
    is_gzip,
    lazy_volume,
    size_text,
)

# Matrix from LPS, the world axes of `VoxelGrid`, to RAS, those of NIfTI; it is its own inverse.
RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0])
# Spatial unit of `xyzt_units` to its length in mm: 1 is the metre, 3 the micrometre. Each other
# code counts as the millimetre.
UNIT_MM = {1: 1000.0, 3: 0.001}

# Code of an sform or qform in the coordinates of the scanner.
SCANNER_CODE = 1

# Largest difference of sform and qform that counts as rounding of their 32-bit numbers.
FORM_TOLERANCE_VOXELS = 0.1

# Largest relative difference of pixdim and the spacing of sform or qform that counts as rounding.
SPACING_TOLERANCE = 1e-3

# In a qform, b² + c² + d² is at most 1; this excess counts as rounding.
QUATERNION_TOLERANCE = 1e-5

# Fields of a header that give spacing, orientation, origin and their unit.
GEOMETRY_FIELDS = (
    "pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d",
    "qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z", "xyzt_units",
)  # fmt: skip

# Intent code of label maps (nifti1.h, NIFTI_INTENT_LABEL).
LABEL_INTENT = 1002

# Compression level of ISA-L (0 to 3). Label maps become smaller than with zlib's level 1, in an
# eighth of its time.
GZIP_LEVEL = 2

# Bytes of the header of NIfTI-2. As many are read of NIfTI-1, whose header is shorter.
HEADER_BYTES = 540

# Valid contents of the field `eol_check` of NIfTI-2: CR, LF, Ctrl-Z and LF, or nothing. As in PNG,
# other bytes show that a transfer has changed line ends.
LINE_END_CHECKS = ([13, 10, 26, 10], [0, 0, 0, 0])


def _parse(path: Path, block: bytes) -> Nifti1Header:
    """Parse a header of either version and byte order.

    Args:
        path: File, for messages.
        block: Its first `HEADER_BYTES`, or all of a shorter file.

    Raises:
        UserError: If the block is no header, or the voxels are in another file or damaged.
    """
    header_type, order = _header_kind(path, block)
    header = header_type(block[: header_type.sizeof_hdr], order, check=False)
    magic = header["magic"].item()
    if magic != header.single_magic.rstrip(b"\0"):  # NumPy drops zeros at the end
        raise UserError(
            f"{path}: expected a NIfTI file that holds its voxels (n+1 or n+2), but its magic is "
            f"{magic!r}; convert an ANALYZE or .hdr/.img pair first."
        )
    is_nifti_2 = header_type is Nifti2Header
    if is_nifti_2 and header["eol_check"].tolist() not in LINE_END_CHECKS:
        raise UserError(
            f"{path}: the line ends of the NIfTI-2 header were changed, as by a transfer in text "
            "mode, and so were its voxels; copy it again."
        )
    return header


def _header_kind(path: Path, block: bytes) -> tuple[type[Nifti1Header], str]:
    """Find version and byte order of a header.

    Returns:
        nibabel's type of the version, and `little` or `big`.

    Raises:
        UserError: If it is no header of either version.
    """
    for header_type in (Nifti1Header, Nifti2Header):
        size = header_type.sizeof_hdr
        for order in ("little", "big"):
            # The first field is the size of the header, which differs between the versions.
            if len(block) >= size and block.startswith(size.to_bytes(4, order)):
                return header_type, order
    raise UserError(
        f"{path}: expected a NIfTI file, but it does not start with a NIfTI header; check the file."
    )


def _fault(affine: np.ndarray) -> str:
    """Say why an affine (4, 4) cannot place a volume, as the end of a sentence; "" where it can."""
    if not np.isfinite(affine).all():
        return "holds NaN or infinity"
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    # The length of finite numbers may overflow.
    if not np.isfinite(lengths).all() or lengths.min() <= 0:
        return "is singular: an axis has no length"
    directions = affine[:3, :3] / lengths  # unit vectors in columns
    # Scalar products of axes: 1 for each with itself, 0 for two axes at a right angle.
    products = directions.T @ directions
    if np.abs(products - np.eye(3)).max() > DIRECTION_TOLERANCE:
        return "is sheared"
    return ""


class Form(NamedTuple):
    """One of the two affines that a header may give: its sform or its qform.

    Attributes:
        affine: (4, 4), index (i, j, k) to RAS in the header's own unit.
        fault: Why it cannot place a volume, see `_fault`; "" where it can.
    """

    affine: np.ndarray
    fault: str


def _read_form(header: Nifti1Header, name: str) -> Form:
    """Read the `sform` or the `qform` of a header."""
    if name == "qform":
        return _read_qform(header)
    affine = np.asarray(header.get_sform(), dtype=np.float64)
    return Form(affine, _fault(affine))


def _read_qform(header: Nifti1Header) -> Form:
    """Read the qform: a rotation as a quaternion (a, b, c, d), the spacing, and an offset.

    The header holds b, c and d. Source: nifti1.h, "QUATERNION REPRESENTATION OF ROTATION MATRIX".
    """
    spacing = np.array(header["pixdim"][1:4], dtype=np.float64)
    bcd = np.array(
        [header["quatern_b"], header["quatern_c"], header["quatern_d"]], dtype=np.float64
    )
    affine = np.eye(4)
    # A rotation is a quaternion of length 1: a² = 1 - (b² + c² + d²).
    a_squared = 1.0 - bcd @ bcd
    if np.isnan(a_squared) or a_squared < -QUATERNION_TOLERANCE:
        return Form(affine, "holds no rotation")
    # As in nifti_clib: a is 0 in a rotation by 180 degrees, where rounding leaves a small number.
    a = 0.0
    if a_squared >= 1e-7:
        a = float(np.sqrt(a_squared))
    affine[:3, :3] = quat2mat([a, *bcd]) * spacing
    # pixdim[0] is qfac, which mirrors the third axis if it is negative. Any other value counts as
    # 1, as in nifti_clib.
    if header["pixdim"][0] < 0:
        affine[:3, 2] *= -1.0
    affine[:3, 3] = header["qoffset_x"], header["qoffset_y"], header["qoffset_z"]
    if np.isfinite(spacing).all() and spacing.min() <= 0:
        return Form(affine, f"has no positive spacing: pixdim is {_numbers(spacing)}")
    return Form(affine, _fault(affine))


def _numbers(values: np.ndarray) -> str:
    """Write numbers for a message, as in `0.7 x 0.7 x 3`."""
    return " x ".join(f"{value:.6g}" for value in values)


def _choose_form(
    path: Path, header: Nifti1Header, shape: tuple[int, int, int]
) -> tuple[np.ndarray, list[str]]:
    """Choose between sform and qform as ITK does.

    The sform is used if its code says scanner coordinates (1) or if there is no qform, else the
    qform; where that form is faulty, the other one is used. Without either, index axes are assumed
    to be LPS axes and the origin is zero. Two forms that turn the scan into opposite directions are
    refused, since one of them swaps the patient's sides.

    Returns:
        Affine (index to RAS in the header's own unit) and warnings for the user.

    Raises:
        UserError: If no form can place the volume, or the two turn it into opposite directions.
    """
    # The preferred form first.
    order = ("qform", "sform")
    if header["sform_code"] == SCANNER_CODE:
        order = ("sform", "qform")
    # A code of 0 says that the header does not give the form.
    forms = {name: _read_form(header, name) for name in order if header[f"{name}_code"] > 0}
    pixdim = np.array(header["pixdim"][1:4], dtype=np.float64)
    if not forms:
        return _affine_of_pixdim(path, pixdim)
    usable_names = [name for name, form in forms.items() if not form.fault]
    if not usable_names:
        name = next(iter(forms))
        raise UserError(
            f"{path}: expected axes of positive length at right angles, but the {name} of the "
            f"NIfTI header {forms[name].fault}; repair the header or export the scan again."
        )
    chosen = usable_names[0]
    affine = forms[chosen].affine
    warnings = []
    for name, form in forms.items():
        if form.fault:
            warnings.append(f"the {name} of the header {form.fault}: the {chosen} is used")
    if len(usable_names) == 2:
        other_affine = forms[usable_names[1]].affine
        _check_directions(path, affine, other_affine)
        distance_voxels = _distance_voxels(affine, other_affine, shape)
        if distance_voxels > FORM_TOLERANCE_VOXELS:
            warnings.append(
                "the sform and the qform of the header disagree by up to "
                f"{distance_voxels:.3g} voxels: the {chosen} is used, as ITK does"
            )
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(spacing, pixdim, rtol=SPACING_TOLERANCE):
        warnings.append(
            f"the header's pixdim is {_numbers(pixdim)}, but its {chosen} gives a spacing of "
            f"{_numbers(spacing)}: the {chosen} is used"
        )
    return affine, warnings


def _affine_of_pixdim(path: Path, pixdim: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Assume LPS axes and a zero origin for a header that gives only the spacing.

    Returns:
        Affine (index to RAS in the header's own unit) and a list of one warning.

    Raises:
        UserError: If the spacing is not positive.
    """
    if not np.isfinite(pixdim).all() or pixdim.min() <= 0:
        raise UserError(
            f"{path}: expected a positive spacing on every axis, but the NIfTI header's pixdim is "
            f"{_numbers(pixdim)}; repair the header or export the scan again."
        )
    affine = np.eye(4)
    affine[:3, :3] = RAS_FROM_LPS * pixdim
    warning = (
        "the header has neither sform nor qform: its axes are assumed to be left, posterior, "
        "superior; check the sides"
    )
    return affine, [warning]


def _check_directions(path: Path, affine: np.ndarray, other_affine: np.ndarray) -> None:
    """Check that two forms do not turn an axis into opposite directions.

    The wrong one would swap the patient's sides.

    Raises:
        UserError: If an axis has opposite directions, directions at a right angle, or directions
            that cannot be compared.
    """
    # Scalar product of each axis in the first form with the same axis in the second.
    products = (affine[:3, :3] * other_affine[:3, :3]).sum(axis=0)
    # A product that overflows may be NaN.
    if np.isnan(products).any() or products.min() <= 0:
        raise UserError(
            f"{path}: expected sform and qform of the NIfTI header to agree, but they turn the "
            "scan into opposite directions, so that its left and right are unknown; set the code "
            "of the wrong one (sform_code or qform_code) to 0."
        )


def _distance_voxels(
    affine: np.ndarray, other_affine: np.ndarray, shape: tuple[int, int, int]
) -> float:
    """Measure how far the corners of a volume (D, H, W) are apart in two forms.

    Returns:
        Largest distance along an axis, in voxels of the first form.
    """
    # Affine maps differ most at a corner.
    last_index = np.array(shape[::-1]) - 1
    corners = np.array(list(np.ndindex(2, 2, 2))) * last_index  # (8, 3), index (i, j, k)
    # Homogeneous coordinates (8, 4), which an affine also shifts.
    corners = np.column_stack([corners, np.ones(8)])
    offsets = corners @ (affine - other_affine)[:3].T  # (8, 3), RAS in the header's unit
    offsets_voxels = offsets @ np.linalg.inv(affine[:3, :3]).T  # (8, 3), along i, j and k
    return float(np.abs(offsets_voxels).max())


def grid_of_header(
    path: Path, header: Nifti1Header, num_volumes: int = 1
) -> tuple[VoxelGrid, list[str]]:
    """Read the grid that a header describes, and warnings for the user.

    Args:
        path: File, for messages.
        header: Header of either version, as nibabel parses it.
        num_volumes: Volumes along the fourth axis, one per channel; each lies on the grid.

    Raises:
        UserError: If the header describes no regular 3D volume.
    """
    # The number of axes, then the size of each (nifti1.h).
    num_axes, *all_sizes = (int(size) for size in header["dim"])
    if num_axes < 1 or num_axes > 7:
        raise UserError(
            f"{path}: the NIfTI header is damaged: it gives {num_axes} axes; export the scan again."
        )
    sizes = all_sizes[:num_axes]
    # The fourth axis is time; vectors lie along the fifth.
    has_vectors = num_axes >= 5 and sizes[3] == 1 and sizes[4] > 1
    if has_vectors:
        raise UserError(
            f"{path}: expected one number per voxel, but the file holds {sizes[4]} (vectors); "
            "export grey values."
        )
    if num_volumes > 1:
        if len(sizes) != 4 or sizes[3] != num_volumes:
            raise UserError(
                f"{path}: expected {num_volumes} channels, but the file holds {size_text(sizes)} "
                f"values; give a 4D file of {num_volumes} volumes, or a file for each channel "
                "(image_1, image_2, … of a case table, input=[a,b,…])."
            )
        sizes = sizes[:3]
    shape = check_shape(path, sizes)
    affine, warnings = _choose_form(path, header, shape)
    length_unit = int(header["xyzt_units"]) & 0b111  # the other bits are the unit of time
    unit_mm = UNIT_MM.get(length_unit, 1.0)
    affine_lps = RAS_FROM_LPS @ affine[:3] * unit_mm  # (3, 4): axes in columns, then the origin
    grid = grid_from_columns(path, shape, affine_lps[:, :3], affine_lps[:, 3].tolist())
    return grid, warnings


def open_nifti(path: Path, channel: int = 0, num_channels: int = 1) -> LazyVolume:
    """Read the header of a NIfTI file; the voxels are read from the returned volume on demand.

    Args:
        path: The file.
        channel: Which volume of a 4D file, from 0.
        num_channels: Volumes of the file; 1 for a 3D file.

    Raises:
        UserError: If it is no NIfTI file, no scalar volume, or holds another number of volumes.
    """
    encoding = "raw"
    with path.open("rb") as file:
        stream: Any = file
        if is_gzip(file):
            encoding = "deflate"
            stream = igzip.IGzipFile(fileobj=file, mode="rb")
        header = _parse(path, stream.read(HEADER_BYTES))
    grid, warnings = grid_of_header(path, header, num_channels)
    if num_channels > 1:
        # Label maps and other results for this volume get this header, see `new_header`. They are
        # 3D, while the file is 4D.
        header.set_data_shape(grid.shape[::-1])
    dtype = _read_dtype(path, header)
    offset = _read_offset(path, header)
    slope, intercept = _read_scale(path, header)
    # The volumes of a 4D file follow one another. All positions are decoded bytes, as gzip packs
    # the header together with the voxels.
    volume_bytes = math.prod(grid.shape) * dtype.itemsize
    num_volumes_after = num_channels - 1 - channel
    return lazy_volume(
        path,
        grid,
        dtype,
        [path],
        encoding,
        num_skipped=offset + channel * volume_bytes,
        num_after=num_volumes_after * volume_bytes,
        slope=slope,
        intercept=intercept,
        findings=tuple(warnings_of("reading", warnings)),
        header=header,
    )


def _read_dtype(path: Path, header: Nifti1Header) -> np.dtype[Any]:
    """Read the type of the voxels.

    Raises:
        UserError: If the header gives no type, or one that is no integer or float of up to 64 bits.
    """
    try:
        dtype = header.get_data_dtype()
    except (HeaderDataError, KeyError) as error:
        raise UserError(
            f"{path}: the NIfTI header is damaged: {int(header['datatype'])} is no data type; "
            "export the scan again."
        ) from error
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise UserError(
            f"{path}: expected one number per voxel, but the NIfTI header says "
            f"{header.get_value_label('datatype')} (colours, complex or very long numbers); "
            "export the scan as grey values."
        )
    return dtype


def _read_offset(path: Path, header: Nifti1Header) -> int:
    """Read the position of the first byte of the voxels.

    Raises:
        UserError: If the voxels cannot start at the position that the header gives.
    """
    # nibabel's constant: the first byte after the header and the mark for extensions.
    first_possible = header.single_vox_offset
    # NIfTI-1 stores it as a 32-bit float.
    offset = float(header["vox_offset"])
    if offset == 0:  # not given
        offset = float(first_possible)
    # A file position has 63 bits. The limit leaves room for the bytes of the voxels, which are
    # added to the offset. NaN is outside the range too.
    is_in_range = first_possible <= offset < 2**62
    if not is_in_range or not offset.is_integer():
        raise UserError(
            f"{path}: the NIfTI header is damaged: its voxels cannot start at byte {offset:g}; "
            "export the scan again."
        )
    return int(offset)


def _read_scale(path: Path, header: Nifti1Header) -> tuple[float, float]:
    """Read slope and intercept: a value is slope * stored value + intercept.

    Raises:
        UserError: If the intercept is not finite.
    """
    slope = float(header["scl_slope"])
    # A slope of 0 says that values are not scaled (nifti1.h); programs write NaN for that as well.
    if slope == 0.0 or not np.isfinite(slope):
        return 1.0, 0.0
    intercept = float(header["scl_inter"])
    if not np.isfinite(intercept):
        raise UserError(
            f"{path}: the NIfTI header is damaged: values are to be scaled by {slope:g} and "
            f"shifted by {intercept:g}; export the scan again."
        )
    return slope, intercept


def new_header(
    dtype: np.dtype[Any], grid: VoxelGrid, like: Nifti1Header | None = None
) -> Nifti1Header:
    """Make the header of a NIfTI file.

    Args:
        dtype: Type of the voxels.
        grid: Shape and position.
        like: Header of the input, whose version, byte order, sform, qform and unit are kept; None
            makes sform and qform equal, with the code of scanner coordinates.
    """
    if like is not None:
        header = type(like)(endianness=like.endianness)
    else:
        # NIfTI-1 stores sizes as signed 16-bit integers.
        is_small = max(grid.shape) < 2**15
        header_type = Nifti1Header if is_small else Nifti2Header
        header = header_type(endianness="<")
    header.set_data_dtype(dtype)
    header.set_data_shape(grid.shape[::-1])
    if like is None:
        # Columns: the steps in LPS (mm) from a voxel to the next along i, j and k. The direction
        # vectors are columns in the same order; the spacing (z, y, x) is reversed.
        columns = np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]
        affine_lps = np.column_stack([columns, grid.origin_xyz_mm])
        affine = np.vstack([RAS_FROM_LPS @ affine_lps, [0.0, 0.0, 0.0, 1.0]])
        header.set_sform(affine, SCANNER_CODE)
        header.set_qform(affine, SCANNER_CODE)
        header.set_xyzt_units("mm", "sec")
    else:
        for name in GEOMETRY_FIELDS:
            header[name] = like[name]
    header["magic"] = header.single_magic
    header["vox_offset"] = header.single_vox_offset
    header["scl_slope"] = 1.0
    header["scl_inter"] = 0.0
    return header


def write_nifti(
    path: Path,
    array: np.ndarray,
    grid: VoxelGrid,
    like: Nifti1Header | None,
    structures: Sequence[Structure] = (),
) -> None:
    """Write voxels (D, H, W) to one file.

    Args:
        path: Target.
        array: Voxels (D, H, W); the file gets their type.
        grid: Their position, in the storage order of the array.
        like: See `new_header`; its grid must be `grid`.
        structures: Names and colours of the labels, written as a header extension; empty = none.

    Raises:
        UserError: If the file cannot be written.
        ValueError: If `like` has another grid.
    """
    if like is not None:
        like_grid, _ = grid_of_header(path, like)
        if not like_grid.is_close(grid):
            raise ValueError(f"{path}: the header to keep does not belong to the grid of the array")
    header = new_header(array.dtype, grid, like)
    if structures:
        content = nifti_extension(structures)
        header.extensions.append(Nifti1Extension(EXTENSION_CODE, content))
    # nibabel replaces 0 by the size of header and extensions together when it writes.
    header["vox_offset"] = 0
    stored_dtype = header.get_data_dtype()  # with the byte order of the header
    with replace_path(path) as part, part.open("xb") as file:
        stream: Any = nullcontext(file)
        if path.name.lower().endswith(".gz"):
            # Without a name and a time in the stream, equal labels give equal files.
            stream = igzip.IGzipFile(
                filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=file, mtime=0
            )
        with stream as target:
            header.write_to(target)
            # Plane by plane: a change of byte order needs no second copy of the volume.
            for plane in array:
                target.write(np.ascontiguousarray(plane, stored_dtype).tobytes())


def packed_nifti(
    array: np.ndarray,
    grid: VoxelGrid,
    slope: float = 1.0,
    intercept: float = 0.0,
    *,
    is_labels: bool = False,
) -> bytes:
    """Make the content of a small .nii.gz in memory, compressed as far as zlib can.

    Args:
        array: Voxels (D, H, W).
        grid: Their position.
        slope: Factor from stored value to value.
        intercept: Added after the slope.
        is_labels: Whether the header says that the values are labels.
    """
    header = new_header(array.dtype, grid)
    header["scl_slope"] = slope
    header["scl_inter"] = intercept
    if is_labels:
        header["intent_code"] = LABEL_INTENT
    stored_dtype = header.get_data_dtype()  # with the byte order of the header
    # Zeros between header and voxels say that there are no extensions.
    header_bytes = header.binaryblock.ljust(int(header["vox_offset"]), b"\0")
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(header_bytes)
        # Plane by plane: the voxels may be a view of a large array.
        for plane in array:
            file.write(plane.astype(stored_dtype, copy=False).tobytes())
    return content.getvalue()
