"""Crops of a volume; a crop may reach outside the volume.

Along z a scan ends inside the body. Beyond that end the last slice is repeated, since air there
would look like a border of an organ. In plane a scan ends beside the body; beyond that end there is
air.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.io.scratch import new_tensor
from medseg.preprocess.intensity import BODY_HU
from medseg.preprocess.resample import ANTIALIASED, resample_image

BODY_MARGIN_MM = 10.0


def body_box(
    image: np.ndarray, spacing_mm: tuple[float, float, float], modality: str = "ct"
) -> VoxelBox:
    """Find the box of the body, with a margin.

    It holds all voxels of a CT denser than air, with table and clothes; of other modalities the
    nonzero ones.

    A field of view of 700 mm for a chest of 400 mm is two thirds air, which costs memory and shifts
    the network's norms.

    Args:
        image: Volume (D, H, W), of a CT in HU.
        spacing_mm: Its spacing, (z, y, x).
        modality: Modality of the volume.

    Returns:
        Box inside the volume; the whole volume if nothing is denser than air.
    """
    full = VoxelBox.full((image.shape[0], image.shape[1], image.shape[2]))
    is_body = image > BODY_HU if modality == "ct" else image != 0
    box = VoxelBox.from_mask(is_body)
    if box is None:
        return full
    # 1e-6: a margin of exactly n voxels must not become n + 1 by rounding noise.
    z, y, x = (math.ceil(BODY_MARGIN_MM / spacing - 1e-6) for spacing in spacing_mm)
    return box.expanded((z, y, x)).intersect(full)


def crop_padded(array: np.ndarray, box: VoxelBox, outside: float) -> np.ndarray:
    """Cut a box out of a volume that it may leave.

    The first and the last slice are repeated beyond the ends; one value fills the rest.

    Args:
        array: Volume (D, H, W); a memory map is read only inside the box.
        box: Box in voxels of the volume; may reach outside or lie outside completely.
        outside: Value beyond the edges of the slices.

    Returns:
        New array of the box' shape and the volume's type.
    """
    crop = np.full(box.shape, outside, dtype=array.dtype)
    depth = array.shape[0]
    z, y, x = box.start
    # Slices of the volume that are read, at least one. A box that ends or begins inside the volume
    # reads what it covers; one before the volume its first slice, one beyond it its last.
    first = min(max(z, 0), depth - 1)
    stop = max(min(box.stop[0], depth), first + 1)
    _, y_stop, x_stop = box.stop
    inner = VoxelBox((first, y, x), (stop, y_stop, x_stop)).clipped(array.shape)
    if inner.is_empty:
        return crop
    rows, columns = inner.shifted((0, -y, -x)).slices()[1:]
    planes = array[inner.slices()]
    # Where they lie in the crop: a box before the volume has its first slice at the end, a box
    # beyond it its last slice at the start. The slices of the crop before and after repeat them.
    crop_start = min(max(first - z, 0), box.shape[0] - 1)
    crop_stop = crop_start + len(planes)
    crop[crop_start:crop_stop, rows, columns] = planes
    crop[:crop_start, rows, columns] = planes[0]
    crop[crop_stop:, rows, columns] = planes[-1]
    return crop


def view_or_resample(
    image: Tensor, grid: VoxelGrid, crop: Crop, outside: float, resampling: str = ANTIALIASED
) -> Tensor:
    """Take a crop out of a volume (D, H, W).

    It is a view if the crop is on the volume's grid and inside, else resampled.
    """
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
    """Resample a volume to a crop.

    Directly if the crop is on the lattice, else via the lattice, as training does with the cache.

    Args:
        image: Volume (D, H, W).
        source: Its grid.
        lattice: The stage's lattice for it; the source's own grid, or that at another spacing.
        crop: Crop on the lattice, or on another grid.
        outside: Value beyond the edges of the slices; beyond the ends the first and the last slice
            are repeated.
        resampling: The filter, see `medseg.preprocess.resample`.
        limits: See `resample_image`.

    Returns:
        Image (D', H', W') of the crop, float32.
    """
    is_source_lattice = lattice == source
    is_on_lattice = lattice == crop.lattice
    if is_source_lattice or is_on_lattice:
        return resample_image(
            image,
            source,
            crop.grid,
            outside,
            resampling=resampling,
            slices_go_on=True,
            limits=limits,
        )
    # Only the part of the lattice that the filter reads is made. With `scale` lattice voxels per
    # voxel of the crop, a cubic or linear filter reaches at most 2 of them where the crop is finer;
    # where it is coarser (scale > 1), the filter is a triangle that reaches `scale`, or the linear
    # one, which reaches 1.
    reach = [math.ceil(max(2.0, scale)) for scale, _ in crop.lattice.axis_map_to(lattice)]
    near = lattice.box_from(crop.lattice, crop.box).expanded(reach).clipped(lattice.shape)
    # Values are clipped on the way to the lattice, once. Slices go on beyond the scan only in the
    # crop: training resamples the cache, which holds the lattice without them.
    part = resample_image(
        image, source, lattice.crop(near), outside, resampling=resampling, limits=limits
    )
    return resample_image(
        part, lattice.crop(near), crop.grid, outside, resampling=resampling, slices_go_on=True
    )


def erase_outside(image: Tensor, crop: Crop, outside: float) -> Tensor:
    """Set the voxels of a crop (D, H, W) beyond its content to one value.

    An image whose crop has no content box, or nothing beyond it, is returned as it is.
    """
    if crop.content is None or crop.content.contains(crop.box):
        return image
    in_crop = _content_slices(crop, crop.content)
    erased = image.new_full(image.shape, outside)
    erased[in_crop] = image[in_crop]
    return erased


def erase_outside_(image: Tensor, crop: Crop, outside: float) -> Tensor:
    """Do the same in place, without a second crop in memory; returns the image."""
    if crop.content is None or crop.content.contains(crop.box):
        return image
    z, y, x = _content_slices(crop, crop.content)
    image[: z.start] = outside
    image[z.stop :] = outside
    planes = image[z]
    planes[:, : y.start] = outside
    planes[:, y.stop :] = outside
    rows = planes[:, y]
    rows[:, :, : x.start] = outside
    rows[:, :, x.stop :] = outside
    return image


def _content_slices(crop: Crop, content: VoxelBox) -> tuple[slice, slice, slice]:
    """Slices of the content of a crop, in voxels of the crop, which begins at 0."""
    z, y, x = crop.box.start
    return content.intersect(crop.box).shifted((-z, -y, -x)).slices()


def probability_channel(
    probs: np.ndarray | Tensor,
    grid: VoxelGrid,
    crop: Crop,
    values: Sequence[int],
) -> Tensor:
    """Make the input channel that shows a network what an earlier stage says about a region.

    Args:
        probs: Probabilities of the background and all labels (K, d, h, w) on a coarser grid.
        grid: Their grid.
        crop: Crop of the network.
        values: Label values of the region.

    Returns:
        Channel (D, H, W), float32, from -1 (probability 0) to 1; -1 beyond the grid in plane.
    """
    planes = probs[list(values)]
    total = torch.as_tensor(planes).to(torch.float32).sum(0)
    part = resample_image(total, grid, crop.grid, 0.0, slices_go_on=True)
    return erase_outside_(part, crop, 0.0).mul_(2.0).sub_(1.0)


def pad_at_end(image: Tensor, shape: tuple[int, ...], outside: float) -> Tensor:
    """Pad (…, D, H, W) at the end of each axis to a shape (D', H', W').

    The last slice is repeated; one value fills the rest.

    An image of that shape is returned as it is.
    """
    depth, height, width = image.shape[-3:]
    if (depth, height, width) == tuple(shape):
        return image
    padded = new_tensor((*image.shape[:-3], *shape), image.dtype, image.device)
    padded[..., :depth, :height, :width] = image
    padded[..., :depth, height:, :] = outside
    padded[..., :depth, :height, width:] = outside
    padded[..., depth:, :, :] = padded[..., depth - 1 : depth, :, :]
    return padded
