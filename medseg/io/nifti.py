"""NIfTI-1 and NIfTI-2 in one file (.nii, .nii.gz)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from medseg.errors import UserError
from medseg.geometry.grid import DIRECTION_TOLERANCE, VoxelGrid
from medseg.io.payload import Payload, is_gzip, open_packed, read_up_to, skip
from medseg.io.stored import MAX_DEFLATE_RATIO, Stored, check_length, check_shape, grid_from_columns
from medseg.io.volume import FileHeader

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

RAS_FROM_LPS = np.diag([-1.0, -1.0, 1.0])
UNIT_MM = {1: 1000.0, 3: 0.001}
"""Spatial units of `xyzt_units` other than the millimetre: metre and micrometre."""

MAGIC = {348: b"n+1\0", 540: b"n+2\0\r\n\x1a\n"}
_MAGIC_AT = {348: 344, 540: 4}
SCANNER_CODE = 1
FORM_TOLERANCE_VOXELS = 0.1
"""Largest difference of sform and qform that counts as rounding of their 32-bit numbers."""

SPACING_TOLERANCE = 1e-3
"""Largest relative difference of pixdim and the sform's steps that counts as rounding."""

QUATERNION_TOLERANCE = 1e-5
"""How far the sum b² + c² + d² of a qform may exceed 1 by rounding."""

GEOMETRY_FIELDS = (
    *("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z", "xyzt_units"),
)


def _header(path: Path, block: bytes) -> Nifti1Header:
    """Parse a header block of either version and byte order."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    for order, endianness in (("little", "<"), ("big", ">")):
        size = int.from_bytes(block[:4], order)  # type: ignore[arg-type]
        header_type = {348: Nifti1Header, 540: Nifti2Header}.get(size)
        if header_type is not None and len(block) >= size:
            header = header_type(block[:size], endianness, check=False)
            if not block[_MAGIC_AT[size] :].startswith(MAGIC[size]):
                raise UserError(
                    f"{path}: expected a NIfTI file that holds its voxels (n+1 or n+2), but its mark is "
                    f"{header['magic'].item()!r}; convert an ANALYZE or .hdr/.img pair first."
                )
            return header
    raise UserError(f"{path}: expected a NIfTI file, but it does not start with a NIfTI header; check the file.")


@dataclass(frozen=True)
class _Form:
    """One of the two places that a NIfTI header may give: index (i, j, k) to RAS.

    Attributes:
        name: `sform` or `qform`.
        affine: 4×4, in the header's own unit.
        fault: Why it places nothing, "" where it does.
    """

    name: str
    affine: np.ndarray
    fault: str = ""


def _fault(affine: np.ndarray) -> str:
    """Why an affine is no place of a volume, "" where it is one."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.isfinite(affine).all():
        return "holds NaN or infinity"
    if not (np.isfinite(lengths).all() and lengths.min() > 0):
        return "is singular: an axis has no length"
    unit = affine[:3, :3] / lengths
    return "is sheared" if np.abs(unit.T @ unit - np.eye(3)).max() > DIRECTION_TOLERANCE else ""


def _qform(header: Nifti1Header) -> _Form:
    """The qform; any qfac that is not negative counts as 1, as in the reference library nifti_clib."""
    from nibabel.quaternions import quat2mat

    steps = np.array(header["pixdim"][1:4], dtype=np.float64)
    quaternion = np.array([header["quatern_b"], header["quatern_c"], header["quatern_d"]], dtype=np.float64)
    affine = np.eye(4)
    real_squared = 1.0 - quaternion @ quaternion
    if not real_squared >= -QUATERNION_TOLERANCE:
        return _Form("qform", affine, "holds no rotation")
    # Like nifti_clib: what is left by rounding of a rotation by 180 degrees is none.
    real = np.sqrt(real_squared) if real_squared >= 1e-7 else 0.0
    affine[:3, :3] = quat2mat([real, *quaternion]) * steps
    affine[:3, 2] *= -1.0 if header["pixdim"][0] < 0 else 1.0
    affine[:3, 3] = header["qoffset_x"], header["qoffset_y"], header["qoffset_z"]
    if np.isfinite(steps).all() and steps.min() <= 0:
        return _Form("qform", affine, f"has no positive spacing: pixdim is {_numbers(steps)}")
    return _Form("qform", affine, _fault(affine))


def _numbers(values: np.ndarray) -> str:
    return " x ".join(f"{value:.6g}" for value in values)


def _choose_form(path: Path, header: Nifti1Header, shape: tuple[int, int, int]) -> tuple[np.ndarray, list[str]]:
    """Choose between sform and qform as ITK does.

    The sform counts if it says where the scanner saw the patient (code 1) or if there is no qform, else the qform; one
    that places nothing gives way to the other. Without either, index axes are taken for LPS axes, the origin is zero.
    Two that turn the scan into opposite directions are refused: whoever believes the wrong one swaps the sides.

    Returns:
        Affine (index to RAS) and what the user must know about it.
    """
    forms: list[_Form] = []
    if header["sform_code"] > 0:
        sform = np.asarray(header.get_sform(), dtype=np.float64)
        forms.append(_Form("sform", sform, _fault(sform)))
    if header["qform_code"] > 0:
        forms.insert(1 if header["sform_code"] == SCANNER_CODE else 0, _qform(header))
    pixdim = np.array(header["pixdim"][1:4], dtype=np.float64)
    if not forms:
        if not (np.isfinite(pixdim).all() and pixdim.min() > 0):
            raise UserError(
                f"{path}: expected a positive spacing on every axis, but the NIfTI header's pixdim is {_numbers(pixdim)}; "
                "repair the header or export the scan again."
            )
        assumed = "the header has neither sform nor qform: its axes are taken for left, posterior, superior; check the sides"
        return np.diag([*(np.diag(RAS_FROM_LPS) * pixdim), 1.0]), [assumed]
    usable = [form for form in forms if not form.fault]
    if not usable:
        raise UserError(
            f"{path}: expected axes of positive length at right angles, but the {forms[0].name} of the NIfTI header "
            f"{forms[0].fault}; repair the header or export the scan again."
        )
    chosen = usable[0]
    remarks = [f"the {form.name} of the header {form.fault}: the {chosen.name} is taken" for form in forms if form.fault]
    if len(usable) == 2:
        remarks += _disagreement(path, usable[0], usable[1], shape)
    steps = np.linalg.norm(chosen.affine[:3, :3], axis=0)
    if not np.allclose(steps, pixdim, rtol=SPACING_TOLERANCE):
        remarks.append(
            f"the header's pixdim is {_numbers(pixdim)}, its {chosen.name} makes steps of {_numbers(steps)}: these are taken"
        )
    return chosen.affine, remarks


def _disagreement(path: Path, chosen: _Form, other: _Form, shape: tuple[int, int, int]) -> list[str]:
    """Say by how far two forms disagree, in voxels of the scan.

    Raises:
        UserError: If an axis runs into opposite directions.
    """
    if (chosen.affine[:3, :3] * other.affine[:3, :3]).sum(axis=0).min() <= 0:
        raise UserError(
            f"{path}: expected sform and qform of the NIfTI header to agree, but they turn the scan into opposite "
            "directions, so that its left and right are unknown; set the code of the wrong one (sform_code or qform_code) to 0."
        )
    corners = np.array([(i, j, k, 1) for i in (0, shape[2] - 1) for j in (0, shape[1] - 1) for k in (0, shape[0] - 1)])
    offsets = corners @ (chosen.affine - other.affine).T[:, :3]
    voxels = float(np.abs(offsets @ np.linalg.inv(chosen.affine[:3, :3]).T).max())
    if voxels <= FORM_TOLERANCE_VOXELS:
        return []
    return [
        f"the sform and the qform of the header disagree by up to {voxels:.3g} voxels: the {chosen.name} is taken, as ITK does"
    ]


def _place(path: Path, header: Nifti1Header) -> tuple[VoxelGrid, list[str]]:
    """Find the grid that a header describes, and what the user must know about it."""
    dim = [int(size) for size in header["dim"]]
    if not 1 <= dim[0] <= 7:
        raise UserError(f"{path}: the NIfTI header is damaged: it gives {dim[0]} axes; export the scan again.")
    if dim[0] >= 5 and dim[4] == 1 < dim[5]:
        raise UserError(f"{path}: expected one number per voxel, but the file holds {dim[5]} (vectors); export grey values.")
    shape = check_shape(path, dim[1 : 1 + dim[0]])
    affine, remarks = _choose_form(path, header, shape)
    unit_mm = UNIT_MM.get(int(header["xyzt_units"]) & 7, 1.0)
    columns = RAS_FROM_LPS @ affine[:3, :3] * unit_mm
    origin = RAS_FROM_LPS @ affine[:3, 3] * unit_mm
    return grid_from_columns(path, shape, columns, origin.tolist()), remarks


def open_nifti(path: Path) -> Stored:
    """Read the header of a NIfTI file.

    Raises:
        UserError: If it is no NIfTI file or no scalar 3D volume.
    """
    from nibabel.spatialimages import HeaderDataError

    with open_packed(path) as payload:
        block = bytes(read_up_to(payload, 540))
    header = _header(path, block)
    grid, remarks = _place(path, header)
    code = int(header["datatype"])
    try:
        dtype = header.get_data_dtype()
    except (HeaderDataError, KeyError) as error:
        raise UserError(f"{path}: the NIfTI header is damaged: {code} is no data type; export the scan again.") from error
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise UserError(
            f"{path}: expected one number per voxel, but the NIfTI header says {header.get_value_label('datatype')} (colours, "
            "complex or very long numbers); export the scan as grey values."
        )
    block = block[: int(header["sizeof_hdr"])]
    offset = _voxel_offset(path, header)
    slope, intercept = _scale(path, header)
    file_bytes, is_packed = path.stat().st_size, is_gzip(path)
    if is_packed:
        check_length(path, grid.shape, dtype, file_bytes, MAX_DEFLATE_RATIO)
    else:
        check_length(path, grid.shape, dtype, file_bytes - offset)

    @contextmanager
    def open_payload() -> Iterator[Payload]:
        with open_packed(path) as payload:
            skip(payload, offset)
            yield payload

    packed_bytes = file_bytes if is_packed else None
    kept = FileHeader("nifti", block)
    return Stored(path, grid, kept, dtype, open_payload, slope, intercept, tuple(remarks), packed_bytes)


def _voxel_offset(path: Path, header: Nifti1Header) -> int:
    """Where the voxels start."""
    stored, first = float(header["vox_offset"]), int(header["sizeof_hdr"]) + 4
    if stored == 0:
        return first
    if not (first <= stored < 2**62 and stored == int(stored)):
        raise UserError(
            f"{path}: the NIfTI header is damaged: its voxels cannot start at byte {stored:g}; export the scan again."
        )
    return int(stored)


def _scale(path: Path, header: Nifti1Header) -> tuple[float, float]:
    """Slope and intercept; a slope of 0 or no number means that the values are not scaled (nifti1.h)."""
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0.0 or not np.isfinite(slope):
        return 1.0, 0.0
    if not np.isfinite(intercept):
        raise UserError(
            f"{path}: the NIfTI header is damaged: values are to be scaled by {slope:g} and shifted by {intercept:g}; export the "
            "scan again."
        )
    return slope, intercept


@np.errstate(over="ignore", invalid="ignore")
def grid_of_header(path: Path, raw: bytes) -> VoxelGrid:
    """Find the grid that a header block describes."""
    return _place(path, _header(path, raw))[0]


def encode_header(path: Path, dtype: np.dtype[Any], grid: VoxelGrid, like: FileHeader | None) -> bytes:
    """Make the bytes before the voxels of a NIfTI file.

    With `like`, version, byte order and all geometry fields are the input's own; else sform and qform say the same
    (code 1).
    """
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    old = _header(path, like.raw) if like is not None else None
    # NIfTI-1 counts voxels with 16 bits.
    new_type = Nifti1Header if max(grid.shape) < 2**15 else Nifti2Header
    header = new_type() if old is None else type(old)(endianness=old.endianness)
    header.set_data_dtype(dtype)
    header.set_data_shape(grid.shape[::-1])
    if old is None:
        affine = np.eye(4)
        affine[:3, :3] = RAS_FROM_LPS @ np.array(grid.direction) * np.array(grid.spacing_mm)[::-1]
        affine[:3, 3] = RAS_FROM_LPS @ np.array(grid.origin_xyz_mm)
        header.set_sform(affine, SCANNER_CODE)
        header.set_qform(affine, SCANNER_CODE)
        header.set_xyzt_units("mm", "sec")
    else:
        for name in GEOMETRY_FIELDS:
            header[name] = old[name]
    block_bytes = len(header.binaryblock)
    header["magic"] = MAGIC[block_bytes]
    header["vox_offset"] = -(-(block_bytes + 4) // 16) * 16
    header["scl_slope"], header["scl_inter"] = 1.0, 0.0
    return header.binaryblock.ljust(int(header["vox_offset"]), b"\0")


def byte_order_of(path: Path, like: FileHeader | None) -> Literal["<", ">"]:
    """Byte order in which the voxels must follow the header: `<` or `>`."""
    return ">" if like is not None and _header(path, like.raw).endianness == ">" else "<"
