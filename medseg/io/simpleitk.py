"""Images of SimpleITK, where a program that has it hands one over; medseg itself does without it."""

from __future__ import annotations

from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from medseg.errors import UserError
from medseg.io.stored import Stored, check_shape, grid_from_columns, load_image
from medseg.io.volume import Volume

NAME = Path("SimpleITK image")


def is_simpleitk(image: object) -> bool:
    """Whether an object is, by what it can do, an image of SimpleITK."""
    return all(hasattr(image, name) for name in ("GetSpacing", "GetOrigin", "GetDirection", "GetSize", "CopyInformation"))


def from_simpleitk(image: Any) -> Volume:
    """Read an image as if it came from a file.

    Args:
        image: `SimpleITK.Image` of three axes, one number per voxel, in HU.

    Returns:
        HU (D, H, W), int16 where that is exact, else float32, in the image's own order.

    Raises:
        UserError: If it is not one regular 3D volume of numbers.
    """
    import SimpleITK

    if image.GetNumberOfComponentsPerPixel() != 1:
        raise UserError(f"{NAME}: expected one number per voxel, got {image.GetNumberOfComponentsPerPixel()}; give grey values.")
    if image.GetDimension() != 3:
        raise UserError(f"{NAME}: expected three axes, got {image.GetDimension()}; give one 3D volume.")
    shape = check_shape(NAME, image.GetSize())
    columns = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    grid = grid_from_columns(NAME, shape, columns, image.GetOrigin())
    array = SimpleITK.GetArrayViewFromImage(image)
    stored = Stored(NAME, grid, None, array.dtype, lambda: nullcontext(BytesIO(array.tobytes())))
    image_hu, remarks = load_image(stored)
    return Volume(image_hu, grid, None, remarks)


def to_simpleitk(labels: np.ndarray, image: Any) -> Any:
    """Make an image of labels (D, H, W) on the grid of the image that they belong to."""
    import SimpleITK

    result = SimpleITK.GetImageFromArray(labels)
    result.CopyInformation(image)
    return result
