"""NIfTI-1 and NIfTI-2 in one file (.nii, .nii.gz).

nibabel reads the fields of a header; they are checked here, and the choice between sform and qform
is made as ITK does.
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

# The world of NIfTI is RAS, ours is LPS.
RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0])
# Spatial units of `xyzt_units` other than the millimetre: metre and micrometre.
UNIT_MM = {1: 1000.0, 3: 0.001}

# Code of an sform or qform in the coordinates of the scanner.
SCANNER_CODE = 1

# Largest difference of sform and qform that counts as rounding of their 32-bit numbers.
FORM_TOLERANCE_VOXELS = 0.1

# Largest relative difference of pixdim and the sform's steps that counts as rounding.
SPACING_TOLERANCE = 1e-3

# Largest excess over 1 of the sum b² + c² + d² of a qform that counts as rounding.
QUATERNION_TOLERANCE = 1e-5

# Fields of a header that say where its voxels are.
GEOMETRY_FIELDS = (
    "pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d",
    "qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z", "xyzt_units",
)  # fmt: skip

# Intent code of label maps (nifti1.h, NIFTI_INTENT_LABEL).
LABEL_INTENT = 1002

# Compression level of ISA-L (0 to 3). Label maps become smaller than with zlib's level 1, in an
# eighth of its time.
GZIP_LEVEL = 2

# Bytes of the header of NIfTI-2, the longer one.
HEADER_BYTES = 540


def _parse(path: Path, block: bytes) -> Nifti1Header:
    """Parse a header block of either version and byte order.

    Raises:
        UserError: If it is none, or its voxels are in another file or damaged.
    """
    header_type, order = _header_kind(path, block)
    header = header_type(block[: header_type.sizeof_hdr], order, check=False)
    mark = header["magic"].item()
    if mark != header.single_magic.rstrip(b"\0"):  # NumPy drops zeros at the end
        raise UserError(
            f"{path}: expected a NIfTI file that holds its voxels (n+1 or n+2), but its magic is "
            f"{mark!r}; convert an ANALYZE or .hdr/.img pair first."
        )
    is_nifti_2 = header_type is Nifti2Header
    # Like those of PNG, these four bytes show a transfer that changed line ends.
    if is_nifti_2 and header["eol_check"].tolist() not in ([13, 10, 26, 10], [0, 0, 0, 0]):
        raise UserError(
            f"{path}: the line ends of the NIfTI-2 header were changed, as by a transfer in text "
            "mode, and so were its voxels; copy it again."
        )
    return header


def _header_kind(path: Path, block: bytes) -> tuple[type[Nifti1Header], str]:
    """Find version and byte order of a header, which begins with its own size.

    Raises:
        UserError: If no version begins so.
    """
    for header_type in (Nifti1Header, Nifti2Header):
        size = header_type.sizeof_hdr
        for order in ("little", "big"):
            if len(block) >= size and block.startswith(size.to_bytes(4, order)):
                return header_type, order
    raise UserError(
        f"{path}: expected a NIfTI file, but it does not start with a NIfTI header; check the file."
    )


def _fault(affine: np.ndarray) -> str:
    """Say why an affine is no position of a volume, "" where it is one."""
    if not np.isfinite(affine).all():
        return "holds NaN or infinity"
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    # The length of finite numbers may overflow.
    if not np.isfinite(lengths).all() or lengths.min() <= 0:
        return "is singular: an axis has no length"
    unit = affine[:3, :3] / lengths
    if np.abs(unit.T @ unit - np.eye(3)).max() > DIRECTION_TOLERANCE:
        return "is sheared"
    return ""


class Form(NamedTuple):
    """One of the two positions that a header may give.

    Attributes:
        affine: (4, 4), index (i, j, k) to RAS in the header's own unit.
        fault: Why it is no position of a volume, "" where it is one.
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
    """Read the qform; every qfac that is not negative counts as 1, as in nifti_clib."""
    steps = np.array(header["pixdim"][1:4], dtype=np.float64)
    quaternion = np.array(
        [header["quatern_b"], header["quatern_c"], header["quatern_d"]], dtype=np.float64
    )
    affine = np.eye(4)
    # A rotation is a quaternion of length 1: a² = 1 - (b² + c² + d²). NaN is no rotation either.
    real_squared = 1.0 - quaternion @ quaternion
    if not real_squared >= -QUATERNION_TOLERANCE:
        return Form(affine, "holds no rotation")
    # As in nifti_clib: what rounding leaves of a rotation by 180 degrees counts as zero.
    real = np.sqrt(real_squared) if real_squared >= 1e-7 else 0.0
    affine[:3, :3] = quat2mat([real, *quaternion]) * steps
    if header["pixdim"][0] < 0:
        affine[:3, 2] *= -1.0
    affine[:3, 3] = header["qoffset_x"], header["qoffset_y"], header["qoffset_z"]
    if np.isfinite(steps).all() and steps.min() <= 0:
        return Form(affine, f"has no positive spacing: pixdim is {_numbers(steps)}")
    return Form(affine, _fault(affine))


def _numbers(values: np.ndarray) -> str:
    """Write numbers for a message."""
    return " x ".join(f"{value:.6g}" for value in values)


def _choose_form(
    path: Path, header: Nifti1Header, shape: tuple[int, int, int]
) -> tuple[np.ndarray, list[str]]:
    """Choose between sform and qform as ITK does.

    The sform counts if its code says scanner coordinates (1) or if there is no qform, else the
    qform; a faulty one gives way to the other. Without either, index axes are assumed to be LPS
    axes and the origin is zero. Two forms that turn the scan into opposite directions are refused:
    the wrong one swaps the patient's sides.

    Returns:
        Affine (index to RAS) and warnings for the user.
    """
    is_sform_first = header["sform_code"] == SCANNER_CODE
    order = ("sform", "qform") if is_sform_first else ("qform", "sform")
    forms = {name: _read_form(header, name) for name in order if header[f"{name}_code"] > 0}
    pixdim = np.array(header["pixdim"][1:4], dtype=np.float64)
    if not forms:
        return _affine_of_pixdim(path, pixdim)
    usable = [name for name, form in forms.items() if not form.fault]
    if not usable:
        name = next(iter(forms))
        raise UserError(
            f"{path}: expected axes of positive length at right angles, but the {name} of the "
            f"NIfTI header {forms[name].fault}; repair the header or export the scan again."
        )
    chosen = usable[0]
    affine = forms[chosen].affine
    warnings = []
    for name, form in forms.items():
        if form.fault:
            warnings.append(f"the {name} of the header {form.fault}: the {chosen} is used")
    if len(usable) == 2:
        other_affine = forms[usable[1]].affine
        _refuse_opposite(path, affine, other_affine)
        distance_voxels = _distance_voxels(affine, other_affine, shape)
        if distance_voxels > FORM_TOLERANCE_VOXELS:
            warnings.append(
                "the sform and the qform of the header disagree by up to "
                f"{distance_voxels:.3g} voxels: the {chosen} is used, as ITK does"
            )
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(steps, pixdim, rtol=SPACING_TOLERANCE):
        warnings.append(
            f"the header's pixdim is {_numbers(pixdim)}, but its {chosen} gives a spacing of "
            f"{_numbers(steps)}: the {chosen} is used"
        )
    return affine, warnings


def _affine_of_pixdim(path: Path, pixdim: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Assume LPS axes and a zero origin for a header that gives only the spacing.

    Returns:
        Affine (index to RAS) and a warning.

    Raises:
        UserError: If the spacing is not positive.
    """
    if not np.isfinite(pixdim).all() or pixdim.min() <= 0:
        raise UserError(
            f"{path}: expected a positive spacing on every axis, but the NIfTI header's pixdim is "
            f"{_numbers(pixdim)}; repair the header or export the scan again."
        )
    affine = np.diag([*(np.diag(RAS_FROM_LPS) * pixdim), 1.0])
    warning = (
        "the header has neither sform nor qform: its axes are assumed to be left, posterior, "
        "superior; check the sides"
    )
    return affine, [warning]


def _refuse_opposite(path: Path, affine: np.ndarray, other_affine: np.ndarray) -> None:
    """Refuse two forms that turn an axis into opposite directions.

    The wrong one swaps the patient's sides.

    Raises:
        UserError: If they do.
    """
    products = (affine[:3, :3] * other_affine[:3, :3]).sum(axis=0)  # of each axis with itself
    if not products.min() > 0:  # NaN where a product overflows
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
    last = [size - 1 for size in shape[::-1]]
    corners = np.array([(*np.multiply(corner, last), 1) for corner in np.ndindex(2, 2, 2)])
    offsets = corners @ (affine - other_affine).T[:, :3]
    offsets_voxels = offsets @ np.linalg.inv(affine[:3, :3]).T
    return float(np.abs(offsets_voxels).max())


def grid_of_header(
    path: Path, header: Nifti1Header, num_volumes: int = 1
) -> tuple[VoxelGrid, list[str]]:
    """Read the grid that a header describes, and warnings for the user.

    Args:
        path: File, for messages.
        header: The header.
        num_volumes: Volumes along the fourth axis, one per channel; each lies on the grid.

    Raises:
        UserError: If it describes no regular 3D volume.
    """
    dim = [int(size) for size in header["dim"]]
    if not 1 <= dim[0] <= 7:
        raise UserError(
            f"{path}: the NIfTI header is damaged: it gives {dim[0]} axes; export the scan again."
        )
    # Vectors lie along the fifth axis (nifti1.h).
    has_vectors = dim[0] >= 5 and dim[4] == 1 and dim[5] > 1
    if has_vectors:
        raise UserError(
            f"{path}: expected one number per voxel, but the file holds {dim[5]} (vectors); "
            "export grey values."
        )
    sizes = dim[1 : 1 + dim[0]]
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
    unit_mm = UNIT_MM.get(int(header["xyzt_units"]) & 7, 1.0)  # the lowest bits: unit of length
    lps = RAS_FROM_LPS @ affine[:3] * unit_mm
    return grid_from_columns(path, shape, lps[:, :3], lps[:, 3].tolist()), warnings


def open_nifti(path: Path, channel: int = 0, num_channels: int = 1) -> LazyVolume:
    """Read the header of a NIfTI file.

    Args:
        path: The file.
        channel: Which volume of a 4D file, from 0.
        num_channels: Volumes of the file; 1 for a 3D file.

    Raises:
        UserError: If it is no NIfTI file, no scalar volume, or holds another number of volumes.
    """
    with path.open("rb") as file:
        is_packed = is_gzip(file)
        stream: Any = igzip.IGzipFile(fileobj=file, mode="rb") if is_packed else file
        header = _parse(path, stream.read(HEADER_BYTES))
    grid, warnings = grid_of_header(path, header, num_channels)
    if num_channels > 1:
        # Results take this header over, and have one volume.
        header.set_data_shape(grid.shape[::-1])
    dtype = _read_dtype(path, header)
    offset = _read_offset(path, header)
    slope, intercept = _read_scale(path, header)
    volume_bytes = math.prod(grid.shape) * dtype.itemsize
    return lazy_volume(
        path,
        grid,
        dtype,
        [path],
        "deflate" if is_packed else "raw",
        num_skipped=offset + channel * volume_bytes,
        num_after=(num_channels - 1 - channel) * volume_bytes,
        slope=slope,
        intercept=intercept,
        findings=tuple(warnings_of("reading", warnings)),
        header=header,
    )


def _read_dtype(path: Path, header: Nifti1Header) -> np.dtype[Any]:
    """Read the type of the voxels.

    Raises:
        UserError: If it is no type of one number.
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
    """Read the first byte of the voxels; 0 stands for the byte after the header.

    Raises:
        UserError: If they cannot start there.
    """
    offset = float(header["vox_offset"]) or float(header.single_vox_offset)
    # NIfTI-1 stores it as a 32-bit float. NaN fails the first comparison.
    if not header.single_vox_offset <= offset < 2**62 or offset != int(offset):
        raise UserError(
            f"{path}: the NIfTI header is damaged: its voxels cannot start at byte {offset:g}; "
            "export the scan again."
        )
    return int(offset)


def _read_scale(path: Path, header: Nifti1Header) -> tuple[float, float]:
    """Read slope and intercept from stored values to values.

    Raises:
        UserError: If the intercept is not finite.
    """
    slope = float(header["scl_slope"])
    if slope == 0.0 or not np.isfinite(slope):  # not scaled (nifti1.h)
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
        like: Header of the input, whose version, byte order, sform, qform and unit are kept; None:
            sform and qform are equal, code 1.
    """
    if like is not None:
        header = type(like)(endianness=like.endianness)
    else:
        # NIfTI-1 counts voxels with 16 bits.
        is_small = max(grid.shape) < 2**15
        header_type = Nifti1Header if is_small else Nifti2Header
        header = header_type(endianness="<")
    header.set_data_dtype(dtype)
    header.set_data_shape(grid.shape[::-1])
    if like is None:
        columns = np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]
        lps = np.column_stack([columns, grid.origin_xyz_mm])
        affine = np.vstack([RAS_FROM_LPS @ lps, [0.0, 0.0, 0.0, 1.0]])
        header.set_sform(affine, SCANNER_CODE)
        header.set_qform(affine, SCANNER_CODE)
        header.set_xyzt_units("mm", "sec")
    else:
        for name in GEOMETRY_FIELDS:
            header[name] = like[name]
    header["magic"] = header.single_magic
    header["vox_offset"] = header.single_vox_offset
    header["scl_slope"], header["scl_inter"] = 1.0, 0.0
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
        array: The voxels.
        grid: Their position.
        like: See `new_header`.
        structures: Names and colours of the labels, written as a header extension; empty = none.

    Raises:
        UserError: If the file cannot be written.
        ValueError: If `like` has another grid.
    """
    if like is not None and not grid_of_header(path, like)[0].is_close(grid):
        raise ValueError(f"{path}: the header to keep does not belong to the grid of the array")
    header = new_header(array.dtype, grid, like)
    if structures:
        header.extensions.append(Nifti1Extension(EXTENSION_CODE, nifti_extension(structures)))
    header["vox_offset"] = 0  # nibabel adds the size of the extensions
    with replace_path(path) as part, part.open("xb") as file:
        packed: Any = nullcontext(file)
        if path.name.lower().endswith(".gz"):
            # Without a name and a time in the stream, equal labels give equal files.
            packed = igzip.IGzipFile("", "wb", GZIP_LEVEL, file, mtime=0)
        with packed as target:
            header.write_to(target)
            for plane in array:
                target.write(np.ascontiguousarray(plane, header.get_data_dtype()).tobytes())


def packed_nifti(
    array: np.ndarray,
    grid: VoxelGrid,
    slope: float = 1.0,
    intercept: float = 0.0,
    *,
    is_labels: bool = False,
) -> bytes:
    """Make a small .nii.gz in memory, compressed as far as zlib can.

    Args:
        array: Voxels (D, H, W).
        grid: Their position.
        slope: Factor from stored value to value.
        intercept: Added after the slope.
        is_labels: Whether the header says that the values are labels.
    """
    header = new_header(array.dtype, grid)
    header["scl_slope"], header["scl_inter"] = slope, intercept
    header["intent_code"] = LABEL_INTENT if is_labels else 0
    head = header.binaryblock.ljust(int(header["vox_offset"]), b"\0")
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(head)
        # Plane by plane: the voxels may be a view of a large array.
        for plane in array:
            file.write(plane.tobytes())
    return content.getvalue()
