"""NIfTI-1 and NIfTI-2 in one file (.nii, .nii.gz): header checks by nibabel, and the choice between sform and qform."""

import gzip
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from isal import igzip
from nibabel.nifti1 import Nifti1Extension, Nifti1Header
from nibabel.nifti2 import Nifti2Header
from nibabel.quaternions import quat2mat
from nibabel.spatialimages import HeaderDataError

from medseg.errors import UserError, require
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

RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0])
UNIT_MM = {1: 1000.0, 3: 0.001}
"""Spatial units of `xyzt_units` other than the millimetre: metre and micrometre."""

SCANNER_CODE = 1
FORM_TOLERANCE_VOXELS = 0.1
"""Largest difference of sform and qform that counts as rounding of their 32-bit numbers."""

SPACING_TOLERANCE = 1e-3
"""Largest relative difference of pixdim and the sform's steps that counts as rounding."""

QUATERNION_TOLERANCE = 1e-5
"""Largest excess over 1 of the sum b² + c² + d² of a qform that counts as rounding."""

GEOMETRY_FIELDS = (
    *("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z", "xyzt_units"),
)


LABEL_INTENT = 1002
"""Intent code of label maps (nifti1.h, NIFTI_INTENT_LABEL)."""

GZIP_LEVEL = 2
"""Compression level of ISA-L (0 to 3): label maps become smaller than with zlib's level 1, in an eighth of its time."""


def _parse(path: Path, block: bytes) -> Nifti1Header:
    """Parse a header block of either version and byte order."""
    types = [
        (header_type, order)
        for header_type in (Nifti1Header, Nifti2Header)
        for order in ("little", "big")
        if len(block) >= header_type.sizeof_hdr
        and block.startswith(header_type.sizeof_hdr.to_bytes(4, order))
    ]
    require(
        bool(types),
        f"{path}: expected a NIfTI file, but it does not start with a NIfTI header; check the file.",
    )
    header_type, order = types[0]
    header = header_type(block[: header_type.sizeof_hdr], order, check=False)
    mark = header["magic"].item()
    require(
        mark == header.single_magic.rstrip(b"\0"),  # NumPy drops zeros at the end
        f"{path}: expected a NIfTI file that holds its voxels (n+1 or n+2), but its magic is {mark!r}; convert an ANALYZE or "
        ".hdr/.img pair first.",
    )
    require(
        header_type is not Nifti2Header
        or header["eol_check"].tolist() in ([13, 10, 26, 10], [0, 0, 0, 0]),
        f"{path}: the line ends of the NIfTI-2 header were changed, as by a transfer in text mode, and so were its voxels; copy it again.",
    )
    return header


def _fault(affine: np.ndarray) -> str:
    """Say why an affine is no position of a volume, "" where it is one."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.isfinite(affine).all():
        return "holds NaN or infinity"
    if not (np.isfinite(lengths).all() and lengths.min() > 0):
        return "is singular: an axis has no length"
    unit = affine[:3, :3] / lengths
    return "is sheared" if np.abs(unit.T @ unit - np.eye(3)).max() > DIRECTION_TOLERANCE else ""


def _form(header: Nifti1Header, name: str) -> tuple[np.ndarray, str]:
    """Read one of the two positions that a header may give; every qfac that is not negative counts as 1, as in nifti_clib.

    Args:
        header: The header.
        name: `sform` or `qform`.

    Returns:
        Affine (4, 4), index (i, j, k) to RAS in the header's own unit; why it is no position of a
        volume, "" where it is one.
    """
    if name == "sform":
        affine = np.asarray(header.get_sform(), dtype=np.float64)
        return affine, _fault(affine)
    steps = np.array(header["pixdim"][1:4], dtype=np.float64)
    quaternion = np.array(
        [header["quatern_b"], header["quatern_c"], header["quatern_d"]], dtype=np.float64
    )
    affine = np.eye(4)
    real_squared = 1.0 - quaternion @ quaternion
    if not real_squared >= -QUATERNION_TOLERANCE:
        return affine, "holds no rotation"
    # As in nifti_clib: what rounding leaves of a rotation by 180 degrees counts as zero.
    affine[:3, :3] = (
        quat2mat([np.sqrt(real_squared) if real_squared >= 1e-7 else 0.0, *quaternion]) * steps
    )
    affine[:3, 2] *= -1.0 if header["pixdim"][0] < 0 else 1.0
    affine[:3, 3] = header["qoffset_x"], header["qoffset_y"], header["qoffset_z"]
    is_flat = np.isfinite(steps).all() and steps.min() <= 0
    return affine, f"has no positive spacing: pixdim is {_numbers(steps)}" if is_flat else _fault(
        affine
    )


def _numbers(values: np.ndarray) -> str:
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
    order = ("sform", "qform") if header["sform_code"] == SCANNER_CODE else ("qform", "sform")
    forms = {name: _form(header, name) for name in order if header[f"{name}_code"] > 0}
    pixdim = np.array(header["pixdim"][1:4], dtype=np.float64)
    if not forms:
        require(
            bool(np.isfinite(pixdim).all()) and pixdim.min() > 0,
            f"{path}: expected a positive spacing on every axis, but the NIfTI header's pixdim is {_numbers(pixdim)}; repair the header "
            "or export the scan again.",
        )
        assumed = "the header has neither sform nor qform: its axes are assumed to be left, posterior, superior; check the sides"
        return np.diag([*(np.diag(RAS_FROM_LPS) * pixdim), 1.0]), [assumed]
    names = list(forms)
    usable = [name for name in names if not forms[name][1]]
    require(
        bool(usable),
        f"{path}: expected axes of positive length at right angles, but the {names[0]} of the NIfTI header "
        f"{forms[names[0]][1]}; repair the header or export the scan again.",
    )
    chosen, affine = usable[0], forms[usable[0]][0]
    warnings = [
        f"the {name} of the header {forms[name][1]}: the {chosen} is used"
        for name in names
        if forms[name][1]
    ]
    if len(usable) == 2:
        other = forms[usable[1]][0]
        require(
            (affine[:3, :3] * other[:3, :3]).sum(axis=0).min() > 0,
            f"{path}: expected sform and qform of the NIfTI header to agree, but they turn the scan into opposite directions, so that "
            "its left and right are unknown; set the code of the wrong one (sform_code or qform_code) to 0.",
        )
        corners = np.array(
            [
                (i, j, k, 1)
                for i in (0, shape[2] - 1)
                for j in (0, shape[1] - 1)
                for k in (0, shape[0] - 1)
            ]
        )
        offsets = corners @ (affine - other).T[:, :3]
        voxels = float(np.abs(offsets @ np.linalg.inv(affine[:3, :3]).T).max())
        if voxels > FORM_TOLERANCE_VOXELS:
            warnings.append(
                f"the sform and the qform of the header disagree by up to {voxels:.3g} voxels: the {chosen} is used, as ITK does"
            )
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(steps, pixdim, rtol=SPACING_TOLERANCE):
        warnings.append(
            f"the header's pixdim is {_numbers(pixdim)}, but its {chosen} gives a spacing of {_numbers(steps)}: the {chosen} is used"
        )
    return affine, warnings


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
    require(
        1 <= dim[0] <= 7,
        f"{path}: the NIfTI header is damaged: it gives {dim[0]} axes; export the scan again.",
    )
    require(
        dim[0] < 5 or not dim[4] == 1 < dim[5],
        f"{path}: expected one number per voxel, but the file holds {dim[5]} (vectors); export grey values.",
    )
    sizes = dim[1 : 1 + dim[0]]
    if num_volumes > 1:
        require(
            len(sizes) == 4 and sizes[3] == num_volumes,
            f"{path}: expected {num_volumes} channels, but the file holds {size_text(sizes)} values; give a 4D file of {num_volumes} volumes, "
            "or a file for each channel (image_1, image_2, … of a case table, input=[a,b,…]).",
        )
        sizes = sizes[:3]
    shape = check_shape(path, sizes)
    affine, warnings = _choose_form(path, header, shape)
    lps = RAS_FROM_LPS @ affine[:3] * UNIT_MM.get(int(header["xyzt_units"]) & 7, 1.0)
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
        encoding = "deflate" if is_gzip(file) else "raw"
        stream: Any = file if encoding == "raw" else igzip.IGzipFile(fileobj=file, mode="rb")
        header = _parse(path, stream.read(540))
    grid, warnings = grid_of_header(path, header, num_channels)
    if num_channels > 1:  # a result has one volume
        header.set_data_shape(grid.shape[::-1])
    try:
        dtype = header.get_data_dtype()
    except (HeaderDataError, KeyError) as error:
        raise UserError(
            f"{path}: the NIfTI header is damaged: {int(header['datatype'])} is no data type; export the scan again."
        ) from error
    require(
        dtype.kind in "iuf" and dtype.itemsize <= 8,
        f"{path}: expected one number per voxel, but the NIfTI header says {header.get_value_label('datatype')} (colours, complex or "
        "very long numbers); export the scan as grey values.",
    )
    offset = float(header["vox_offset"]) or float(header.single_vox_offset)
    require(
        header.single_vox_offset <= offset < 2**62 and offset == int(offset),
        f"{path}: the NIfTI header is damaged: its voxels cannot start at byte {offset:g}; export the scan again.",
    )
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0.0 or not np.isfinite(slope):  # not scaled (nifti1.h)
        slope, intercept = 1.0, 0.0
    require(
        bool(np.isfinite(intercept)),
        f"{path}: the NIfTI header is damaged: values are to be scaled by {slope:g} and shifted by {intercept:g}; export the scan again.",
    )
    volume_bytes = math.prod(grid.shape) * dtype.itemsize
    return lazy_volume(
        path,
        grid,
        dtype,
        [path],
        encoding,
        num_skipped=int(offset) + channel * volume_bytes,
        num_after=(num_channels - 1 - channel) * volume_bytes,
        slope=slope,
        intercept=intercept,
        findings=tuple(warnings_of("reading", warnings)),
        header=header,
    )


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
    # NIfTI-1 counts voxels with 16 bits.
    header_type = (
        type(like)
        if like is not None
        else Nifti1Header
        if max(grid.shape) < 2**15
        else Nifti2Header
    )
    header = header_type(endianness="<" if like is None else like.endianness)
    header.set_data_dtype(dtype)
    header.set_data_shape(grid.shape[::-1])
    if like is None:
        columns = np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]
        affine = np.vstack(
            [RAS_FROM_LPS @ np.column_stack([columns, grid.origin_xyz_mm]), [0.0, 0.0, 0.0, 1.0]]
        )
        header.set_sform(affine, SCANNER_CODE)
        header.set_qform(affine, SCANNER_CODE)
        header.set_xyzt_units("mm", "sec")
    else:
        for name in GEOMETRY_FIELDS:
            header[name] = like[name]
    header["magic"], header["vox_offset"] = header.single_magic, header.single_vox_offset
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
        # Without a name and a time in the stream, equal labels give equal files.
        packed = (
            igzip.IGzipFile("", "wb", GZIP_LEVEL, file, mtime=0)
            if path.name.lower().endswith(".gz")
            else nullcontext(file)
        )
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
    return gzip.compress(
        header.binaryblock.ljust(int(header["vox_offset"]), b"\0") + array.tobytes(), 9, mtime=0
    )
