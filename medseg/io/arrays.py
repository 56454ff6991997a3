"""Conversion of scans in memory: nibabel images, and arrays and tensors with an affine.

As in nibabel and MONAI, these arrays are (X, Y, Z), and an affine maps indices to RAS in mm. A
`Volume` has an array (Z, Y, X) and a grid in LPS.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Header, Nifti1Image
from nibabel.spatialimages import SpatialImage

from medseg.errors import UserError
from medseg.findings import Finding, warnings_of
from medseg.geometry.grid import VoxelGrid
from medseg.io.nifti import RAS_FROM_LPS, grid_of_header
from medseg.io.volume import LazyVolume, Volume, check_shape, grid_from_columns, load_image
from medseg.task import AIR_HU

NUM_SPATIAL_AXES = 3


def from_array(array: Any, affine: Any, air: int = AIR_HU, name: str = "array") -> Volume:
    """Convert an array with an affine, as if it were read from a NIfTI file.

    Args:
        array: Voxels (X, Y, Z), HU of a CT; a NumPy array, or an object that NumPy converts, such
            as a tensor.
        affine: Index to RAS in mm (4, 4).
        air: Value that replaces NaN and infinity, see `load_image`.
        name: Name of the scan in messages.

    Returns:
        Volume of HU (Z, Y, X), int16 where that is exact, else float32.

    Raises:
        UserError: If the array is no volume of numbers, or the affine describes no regular grid.
    """
    # `check_shape` and the functions below, which also serve files, take the name as a path.
    path = Path(name)
    voxels = np.asarray(array)
    _check_voxels(voxels, name)
    try:
        matrix = np.asarray(affine, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: expected an affine (4, 4) from indices to RAS in mm, but got {affine!r}"
        ) from error
    if matrix.shape != (NUM_SPATIAL_AXES + 1, NUM_SPATIAL_AXES + 1):
        raise UserError(
            f"{name}: expected an affine (4, 4) from indices to RAS in mm, but got the shape "
            f"{matrix.shape}"
        )
    shape = check_shape(path, list(voxels.shape))
    # The first three rows of the affine (3, 4): directions of the axes in mm, then the origin. The
    # change from RAS to LPS is its own inverse.
    affine_lps = RAS_FROM_LPS @ matrix[:NUM_SPATIAL_AXES]
    grid = grid_from_columns(path, shape, affine_lps[:, :3], affine_lps[:, 3].tolist())
    return _to_volume(voxels, grid, air, path)


def _check_voxels(voxels: np.ndarray, name: str) -> None:
    """Refuse an array that is not numbers (X, Y, Z); `name` is the scan in messages."""
    if voxels.ndim != NUM_SPATIAL_AXES or voxels.dtype.kind not in "iuf":
        raise UserError(
            f"{name}: expected numbers (X, Y, Z), but got an array of {voxels.dtype} with the "
            f"shape {voxels.shape}; give one array for each channel"
        )


def _to_volume(
    voxels: np.ndarray, grid: VoxelGrid, air: int, path: Path, findings: Sequence[Finding] = ()
) -> Volume:
    """Convert voxels (X, Y, Z) as if they were read from a file; `air` as for `load_image`."""
    stored = voxels.transpose()  # (Z, Y, X), a view

    def read_slices() -> Iterator[np.ndarray]:
        # One slice (Y, X) at a time: conversions need no second copy of the volume.
        return map(np.ravel, stored)

    volume = LazyVolume(path, grid, stored.dtype, read_slices, findings=tuple(findings))
    return load_image(volume, air)


def is_nibabel(scan: Any) -> bool:
    """Whether a scan is an image of nibabel."""
    return isinstance(scan, SpatialImage)


def from_nibabel(image: Any, air: int = AIR_HU) -> Volume:
    """Convert an image of nibabel with one volume, as if it were read from its file.

    Args:
        image: Image (X, Y, Z), HU of a CT; further axes may have one step.
        air: As for `from_array`.

    Returns:
        As `from_array`.

    Raises:
        UserError: If it is no regular 3D volume of numbers, has no affine, or its header gives two
            that swap the patient's sides.
    """
    name = "nibabel image"
    if image.affine is None:
        raise UserError(f"{name}: expected an affine from indices to RAS in mm; it has none")
    # `dataobj` applies the slope and the intercept of a file, and keeps integers without them.
    voxels = np.asanyarray(image.dataobj)
    # Further axes, such as time, may have one step.
    if math.prod(voxels.shape[NUM_SPATIAL_AXES:]) == 1:
        voxels = voxels.reshape(voxels.shape[:NUM_SPATIAL_AXES])
    header = image.header
    # The affine may have been changed since the header was read.
    is_of_header = isinstance(header, Nifti1Header) and np.allclose(
        header.get_best_affine(), image.affine
    )
    if not is_of_header:
        return from_array(voxels, image.affine, air, name)
    _check_voxels(voxels, name)
    # The header also has the unit, and a second affine that may contradict the first.
    grid, warnings = grid_of_header(Path(name), header)
    return _to_volume(voxels, grid, air, Path(name), warnings_of("reading", warnings))


def to_nibabel(labels: np.ndarray, image: Any) -> Any:
    """Make a NIfTI image of labels (Z, Y, X) on the grid of the image that they belong to."""
    result = Nifti1Image(labels.transpose(), image.affine)
    if isinstance(image.header, Nifti1Header):
        # The affine is in the unit of the image.
        result.header["xyzt_units"] = image.header["xyzt_units"]
    return result
