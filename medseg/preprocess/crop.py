"""Cut a box out of a volume, also one that reaches outside.

Along z a scan ends in the middle of the body: beyond it the last slice goes on, since air there would look like a border of
the lung. In plane it ends beside the body: beyond it there is air.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from medseg.geometry.box import VoxelBox
from medseg.geometry.grid import VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.preprocess.resample import ANTIALIASED, resample_image

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
    """Cut a box out of a volume; beyond its ends the first and the last slice go on, beyond their edges lies one value.

    Args:
        array: Volume (D, H, W); a memory map is read only inside the box.
        box: Box in voxels of the volume; may reach outside or lie outside altogether.
        outside: Value for what lies beyond the edges of the slices.

    Returns:
        New array of the box' shape and the volume's type.
    """
    crop = np.full(box.shape, outside, dtype=array.dtype)
    depth = array.shape[0]
    z, y, x = box.start
    # Slices from the one nearest to the box' start to the one nearest to its end.
    first, stop = min(max(z, 0), depth - 1), max(min(box.stop[0], depth), 1)
    inner = VoxelBox((first, y, x), (max(stop, first + 1), *box.stop[1:])).clipped(array.shape)
    if inner.is_empty:
        return crop
    rows, columns = inner.shifted((0, -y, -x)).slices()[1:]
    planes = array[inner.slices()]
    start = min(max(first - z, 0), box.shape[0] - 1)
    crop[start : start + len(planes), rows, columns] = planes[: box.shape[0] - start]
    crop[:start, rows, columns] = planes[0]
    crop[start + len(planes) :, rows, columns] = planes[-1]
    return crop


def cut(image: Tensor, grid: VoxelGrid, crop: Crop, outside: float, resampling: str = ANTIALIASED) -> Tensor:
    """Take a crop out of a volume (D, H, W): a view where it lies on the volume's grid and inside, else resampled."""
    if crop.lattice == grid and VoxelBox.full(grid.shape).contains(crop.box):
        return image[crop.box.slices()]
    return resample_image(image, grid, crop.grid, outside, resampling=resampling, slices_go_on=True)


def resample_crop(
    image: np.ndarray | Tensor,
    source: VoxelGrid,
    lattice: VoxelGrid,
    crop: Crop,
    outside: float,
    resampling: str = ANTIALIASED,
    *,
    limits: tuple[float, float] | None = None,
) -> Tensor:
    """Bring a volume to a crop: at once where the crop lies on the lattice, else from the lattice, as training does with the cache.

    Args:
        image: Volume (D, H, W).
        source: Its grid.
        lattice: The stage's lattice for it; the source's own grid, or that at another spacing.
        crop: Crop on the lattice, or on a grid that was laid anew.
        outside: Value for what lies beyond the edges of the slices; beyond the ends the first and the last slice go on.
        resampling: The filter, see `medseg.preprocess.resample`.
        limits: See `resample_image`.

    Returns:
        Image (D', H', W') of the crop, float32.
    """
    if lattice in (source, crop.lattice):
        return resample_image(image, source, crop.grid, outside, resampling=resampling, slices_go_on=True, limits=limits)
    # Only what the filter reads of the lattice is made: a triangle reaches one voxel of the coarser grid, a cubic two of the source.
    reach = [math.ceil(max(2.0, scale)) for scale, _ in crop.lattice.axis_map_to(lattice)]
    near = lattice.box_from(crop.lattice, crop.box).expanded(reach).clipped(lattice.shape)
    part = resample_image(image, source, lattice.crop(near), outside, resampling=resampling, limits=limits)
    return resample_image(part, lattice.crop(near), crop.grid, outside, resampling=resampling, slices_go_on=True)


def pad_at_end(image: Tensor, shape: tuple[int, ...], outside: float) -> Tensor:
    """Fill (…, D, H, W) at the end of each axis to a shape (D', H', W'): the last slice goes on, in plane follows one value.

    An image that is as large already is given back as it is.
    """
    depth, height, width = (wanted - size for size, wanted in zip(image.shape[-3:], shape, strict=True))
    if height or width:  # torch would copy an image that is large enough; it counts the axes from the last
        image = functional.pad(image, (0, width, 0, height), value=outside)
    return torch.cat([image, image[..., -1:, :, :].expand(*image.shape[:-3], depth, -1, -1)], dim=-3) if depth else image
