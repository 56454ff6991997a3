"""Cut a box out of a volume, also one that reaches outside."""

from __future__ import annotations

import math

import numpy as np

from medseg.geometry.box import VoxelBox

# Half way between air and soft tissue; half a unit below, so that images in whole HU and not yet rounded ones agree.
BODY_HU = -500.5
BODY_MARGIN_MM = 10.0


def body_box(image_hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> VoxelBox:
    """Find the box of the body, with a margin: all that is denser than air, table and clothes included.

    A scan of 700 mm for a chest of 400 is two thirds air, which costs memory and shifts the network's norms.

    Args:
        image_hu: Volume (D, H, W) in HU.
        spacing_mm: Its spacing, (z, y, x).

    Returns:
        Box inside the volume; the whole volume where nothing is denser than air.
    """
    full = VoxelBox.full((image_hu.shape[0], image_hu.shape[1], image_hu.shape[2]))
    box = VoxelBox.from_mask(image_hu > BODY_HU)
    if box is None:
        return full
    z, y, x = (math.ceil(BODY_MARGIN_MM / spacing - 1e-6) for spacing in spacing_mm)
    return box.expanded((z, y, x)).intersect(full)


def crop_padded(array: np.ndarray, box: VoxelBox, outside: float) -> np.ndarray:
    """Cut a box out of a volume; what lies outside the volume gets one value.

    Args:
        array: Volume (D, H, W); a memory map is read only inside the box.
        box: Box in voxels of the volume; may reach outside or lie outside altogether.
        outside: Value for voxels that the volume does not have.

    Returns:
        New array of the box' shape and the volume's type.
    """
    crop = np.full(box.shape, outside, dtype=array.dtype)
    inner = box.clipped(array.shape)
    if not inner.is_empty:
        z, y, x = box.start
        crop[inner.shifted((-z, -y, -x)).slices()] = array[inner.slices()]
    return crop
