"""Conversion of scans in memory: nibabel images, and arrays and tensors with an affine.

As in nibabel and MONAI, these arrays are (X, Y, Z), and an affine maps indices to RAS in mm. A
`Volume` has an array (Z, Y, X) and a grid in LPS.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.nifti1 import Nifti1Header, Nifti1Image
from nibabel.spatialimages import SpatialImage

from medseg.errors import UserError
from medseg.io.nifti import RAS_FROM_LPS, check_sides, unit_mm
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
    if voxels.ndim != NUM_SPATIAL_AXES or voxels.dtype.kind not in "iuf":
        raise UserError(
            f"{name}: expected numbers (X, Y, Z), but got an array of {voxels.dtype} with the "
            f"shape {voxels.shape}; give one array for each channel"
        )
    matrix = np.asarray(affine, dtype=np.float64)
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
    stored = voxels.transpose()  # (Z, Y, X), a view

    def read_slices() -> Iterator[np.ndarray]:
        # One slice (Y, X) at a time: conversions need no second copy of the volume.
        return map(np.ravel, stored)

    return load_image(LazyVolume(path, grid, stored.dtype, read_slices), air)


def is_nibabel(scan: Any) -> bool:
    """Whether a scan is an image of nibabel."""
    return isinstance(scan, SpatialImage)


def from_nibabel(image: Any, air: int = AIR_HU) -> Volume:
    """Convert an image of nibabel with one volume.

    Args:
        image: Image (X, Y, Z), HU of a CT; further axes may have one step.
        air: As for `from_array`.

    Returns:
        As `from_array`.

    Raises:
        UserError: If it is no regular 3D volume of numbers, has no affine, or has two that swap the
            patient's sides.
    """
    name = "nibabel image"
    if image.affine is None:
        raise UserError(f"{name}: expected an affine from indices to RAS in mm; it has none")
    # `dataobj` applies the slope and the intercept of a file, and keeps integers without them.
    voxels = np.asanyarray(image.dataobj)
    # Further axes, such as time, may have one step.
    if math.prod(voxels.shape[NUM_SPATIAL_AXES:]) == 1:
        voxels = voxels.reshape(voxels.shape[:NUM_SPATIAL_AXES])
    affine = np.array(image.affine, dtype=np.float64)
    if isinstance(image.header, Nifti1Header):
        check_sides(Path(name), image.header)
        affine[:NUM_SPATIAL_AXES] *= unit_mm(image.header)
    return from_array(voxels, affine, air, name)


def to_nibabel(labels: np.ndarray, image: Any) -> Any:
    """Make a NIfTI image of labels (Z, Y, X) on the grid of the image that they belong to."""
    result = Nifti1Image(labels.transpose(), image.affine)
    if isinstance(image.header, Nifti1Header):
        # The affine is in the unit of the image.
        result.header["xyzt_units"] = image.header["xyzt_units"]
    return result
