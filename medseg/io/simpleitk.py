"""Bridge to SimpleITK: grids of its images and file headers, images in and out, and its writer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from medseg.errors import UserError, require
from medseg.geometry.grid import VoxelGrid
from medseg.io.checks import check_shape, grid_from_columns
from medseg.io.lazy import LazyVolume, load_image
from medseg.io.volume import Volume

NAME = Path("SimpleITK image")


def grid_of(path: Path, source: Any, num_components: int) -> VoxelGrid:
    """Read the grid of an image or of the header that an `ImageFileReader` has read.

    Args:
        path: File, for messages.
        source: `SimpleITK.Image` or `SimpleITK.ImageFileReader`, of three axes, or more of which the others hold one frame.
        num_components: Numbers per voxel.

    Raises:
        UserError: If it is not one regular 3D volume of grey values.
    """
    require(num_components == 1, f"{path}: expected one number per voxel, got {num_components}; export grey values.")
    shape = check_shape(path, source.GetSize())
    count = source.GetDimension()
    direction = np.reshape(source.GetDirection(), (count, count))
    require(
        not (direction[:3, 3:].any() or direction[3:, :3].any()),
        f"{path}: expected three axes in space and one in time, but the direction {direction.tolist()} mixes them; repair the header.",
    )
    return grid_from_columns(path, shape, direction[:3, :3] * source.GetSpacing()[:3], source.GetOrigin()[:3])


def is_simpleitk(image: object) -> bool:
    """Whether an object has the methods of a `SimpleITK.Image`."""
    return all(hasattr(image, name) for name in ("GetSpacing", "GetOrigin", "GetDirection", "GetSize", "CopyInformation"))


def from_simpleitk(image: Any) -> Volume:
    """Convert an image, as if it were read from a file.

    Args:
        image: `SimpleITK.Image` of three axes, one number per voxel, in HU.

    Returns:
        HU (D, H, W), int16 where that is exact, else float32, in the image's own order.

    Raises:
        UserError: If it is not one regular 3D volume of numbers.
    """
    import SimpleITK

    grid = grid_of(NAME, image, image.GetNumberOfComponentsPerPixel())
    array = SimpleITK.GetArrayViewFromImage(image).reshape(grid.shape)
    # One slice at a time: conversions need no second copy of the volume.
    return load_image(LazyVolume(NAME, grid, array.dtype, lambda: (part[None] for part in array)))


def to_simpleitk(labels: np.ndarray, image: Any) -> Any:
    """Make an image of labels (D, H, W) on the grid of the image that they belong to."""
    import SimpleITK

    result = SimpleITK.GetImageFromArray(labels)
    result.CopyInformation(image)
    return result


def save(path: Path, part: Path, array: np.ndarray, grid: VoxelGrid) -> None:
    """Write voxels (D, H, W) to a compressed file whose suffix chooses the format.

    Args:
        path: Final name, for messages.
        part: Temporary name, which is written.
        array: Voxels of a type that the format has.
        grid: Their position.

    Raises:
        UserError: If SimpleITK cannot write the file.
    """
    import SimpleITK

    image = SimpleITK.GetImageFromArray(array)
    image.SetSpacing(grid.spacing_mm[::-1])
    image.SetOrigin(grid.origin_xyz_mm)
    image.SetDirection(np.ravel(grid.direction).tolist())
    try:
        SimpleITK.WriteImage(image, str(part), True)
    except RuntimeError as error:
        reason = re.sub(r".*(Reason:|\[nrrd\]) *", "", str(error).strip().splitlines()[-1])
        raise UserError(f"{path}: cannot be written ({reason}); check the folder, its permissions and its space.") from error
