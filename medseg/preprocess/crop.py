"""Crops of a volume; a crop may reach outside the volume.

Along z a scan ends inside the body, so the first and the last slice are repeated beyond its ends:
air there would look like the border of an organ. In plane a scan ends beside the body, so the crop
shows air beyond its edges.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from medseg.geometry.grid import INDEX_TOLERANCE, VoxelBox, VoxelGrid
from medseg.geometry.grid_rule import Crop
from medseg.io.scratch import new_tensor
from medseg.preprocess.intensity import BODY_HU
from medseg.preprocess.resample import ANTIALIASED, resample_image

# Margin of `body_box` on each side of the body.
BODY_MARGIN_MM = 10.0


def body_box(
    image: np.ndarray, spacing_mm: tuple[float, float, float], modality: str = "ct"
) -> VoxelBox:
    """Find the box of the body, with a margin of `BODY_MARGIN_MM`.

    The body of a CT is all voxels denser than air, table and clothes included; the body in another
    modality is all voxels that are not 0.

    A field of view of 700 mm around a chest of 400 mm is two thirds air, which costs memory and
    shifts the statistics of the network's norms.

    Args:
        image: Volume (D, H, W); in HU if it is a CT.
        spacing_mm: Its spacing, (z, y, x).
        modality: `ct`, or any other name.

    Returns:
        Box inside the volume; the whole volume if no voxel belongs to the body.
    """
    depth, height, width = image.shape
    full = VoxelBox.full((depth, height, width))
    is_body = image > BODY_HU if modality == "ct" else image != 0
    box = VoxelBox.from_mask(is_body)
    if box is None:
        return full
    # A margin of exactly n voxels must not become n + 1 by rounding noise.
    margin = [math.ceil(BODY_MARGIN_MM / axis_mm - INDEX_TOLERANCE) for axis_mm in spacing_mm]
    return box.expanded(margin).intersect(full)


def crop_padded(array: np.ndarray, box: VoxelBox, outside: float) -> np.ndarray:
    """Cut a box out of a volume; the box may reach outside.

    The first and the last slice are repeated beyond the ends; one value fills the rest.

    Args:
        array: Volume (D, H, W); a memory map is read only inside the box.
        box: Box in voxels of the volume; may reach outside or lie outside completely.
        outside: Value beyond the edges of the slices.

    Returns:
        New array with the shape of the box and the type of the volume.
    """
    crop = np.full(box.shape, outside, dtype=array.dtype)
    depth = array.shape[0]
    z, y, x = box.start
    z_stop, y_stop, x_stop = box.stop
    # Slices of the volume to read: those in the box. If no slice is in the box, the nearest slice:
    # the first if the box ends before the volume, the last if the box begins behind the volume.
    first_read = min(max(z, 0), depth - 1)
    stop_read = max(min(z_stop, depth), first_read + 1)
    inner = VoxelBox((first_read, y, x), (stop_read, y_stop, x_stop)).clipped(array.shape)
    if inner.is_empty:
        return crop
    _, rows, columns = inner.shifted((0, -y, -x)).slices()
    planes = array[inner.slices()]
    # First index of these planes in the crop. If no slice is in the box, the nearest slice goes to
    # the end of the crop on its side: to index 0 if the volume ends before the box (the difference
    # is negative), to the last index if the volume begins behind the box.
    last_in_crop = box.shape[0] - 1
    crop_start = min(max(first_read - z, 0), last_in_crop)
    crop_stop = crop_start + len(planes)
    crop[crop_start:crop_stop, rows, columns] = planes
    crop[:crop_start, rows, columns] = planes[0]
    crop[crop_stop:, rows, columns] = planes[-1]
    return crop


def view_or_resample(
    image: Tensor, grid: VoxelGrid, crop: Crop, outside: float, resampling: str = ANTIALIASED
) -> Tensor:
    """Take a crop out of a volume (D, H, W) that lies on `grid`.

    The result is a view if the crop's lattice is `grid` and the crop lies inside, else a resampled
    copy, float32. The other arguments are those of `resample_crop`.
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
    finish: Callable[[Tensor], Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Resample a volume to a crop through the same grids as in training.

    Training caches the volume on the stage's lattice. A crop on this lattice is resampled from the
    volume in one step. A crop on another grid takes two steps: the volume is resampled to the
    stage's lattice, and the result to the crop. If the stage's lattice is the volume's own grid,
    the first step changes nothing and is left out.

    Args:
        image: Volume (D, H, W).
        source: Its grid.
        lattice: The stage's lattice: the grid of the volume at the spacing of the stage.
        crop: Crop on that lattice, or on another grid with the same axes; it overlaps the lattice.
        outside: Value beyond the edges of the slices; beyond the ends the first and the last slice
            are repeated.
        resampling: The filter, one of `medseg.preprocess.resample.RESAMPLINGS`.
        limits: See `resample_image`.
        finish: See `resample_image`.
        out: See `resample_image`.

    Returns:
        Image (D', H', W') of the crop: `out`, or a new tensor, float32.
    """
    is_one_step = crop.lattice == lattice or lattice == source
    if is_one_step:
        return resample_image(
            image,
            source,
            crop.grid,
            outside,
            resampling=resampling,
            slices_go_on=True,
            limits=limits,
            finish=finish,
            out=out,
        )
    # The first step makes only the part of the lattice that the second step reads: the crop, and on
    # each side the reach of the filter. The reach is `scale` lattice voxels for the widened
    # triangle of a coarser crop (scale > 1), and at most 2 for every other filter.
    reach = [math.ceil(max(2.0, scale)) for scale, _ in crop.lattice.axis_map_to(lattice)]
    covered_box = lattice.box_from(crop.lattice, crop.box)
    read_box = covered_box.expanded(reach).clipped(lattice.shape)
    part_grid = lattice.crop(read_box)
    # As in training: the cache holds clipped values, so the first step clips; the cache ends where
    # the scan ends, so the second step repeats the end slices.
    part = resample_image(image, source, part_grid, outside, resampling=resampling, limits=limits)
    return resample_image(
        part,
        part_grid,
        crop.grid,
        outside,
        resampling=resampling,
        slices_go_on=True,
        finish=finish,
        out=out,
    )


def erase_outside(image: Tensor, crop: Crop, outside: float) -> Tensor:
    """Set the voxels of a crop (D, H, W) beyond its content to one value, in a copy.

    If the crop has no content box, or lies within it, the image itself is returned.
    """
    if crop.content is None or crop.content.contains(crop.box):
        return image
    content = _content_slices(crop, crop.content)
    erased = image.new_full(image.shape, outside)
    erased[content] = image[content]
    return erased


def erase_outside_(image: Tensor, crop: Crop, outside: float) -> Tensor:
    """Do the same as `erase_outside`, but in place, without a copy; return the image."""
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
    """Convert the content box of a crop to slices of the crop's image."""
    z, y, x = crop.box.start
    content_in_crop = content.intersect(crop.box)
    return content_in_crop.shifted((-z, -y, -x)).slices()


def probability_channel(
    probs: np.ndarray | Tensor,
    grid: VoxelGrid,
    crop: Crop,
    values: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """Make the input channel that shows a network where an earlier stage found a region.

    Args:
        probs: Probabilities of the background and all labels (K, d, h, w) on a coarser grid.
        grid: Their grid.
        crop: Crop of the network.
        values: Label values of the region.
        out: See `medseg.preprocess.resample.resample_image`.

    Returns:
        Channel (D, H, W): the probability of the region, from -1 (probability 0) to 1. It is -1
        beyond the grid in plane and beyond the content of the crop.
    """
    # Index k of the first axis is label value k. One expression: the temporary copies are bound to
    # no name, so that their memory is freed before the resampling.
    region_probs = torch.as_tensor(probs[list(values)]).to(torch.float32).sum(0)
    channel = resample_image(
        region_probs,
        grid,
        crop.grid,
        outside=0.0,
        slices_go_on=True,
        # From [0, 1] to [-1, 1], as `window` maps an image.
        finish=lambda probs: probs.mul(2.0).sub_(1.0),
        out=out,
    )
    return erase_outside_(channel, crop, outside=-1.0)


def pad_at_end(image: Tensor, shape: tuple[int, ...], outside: float) -> Tensor:
    """Pad an image (…, D, H, W) at the end of each axis to (…, D', H', W').

    The last slice is repeated along z; new rows and columns are filled with one value. An image
    that has the shape already is returned itself.

    Args:
        image: The image.
        shape: Target shape (D', H', W'), on each axis at least as long as the image.
        outside: Value of new rows and columns.
    """
    depth, height, width = image.shape[-3:]
    if (depth, height, width) == tuple(shape):
        return image
    padded = new_tensor((*image.shape[:-3], *shape), image.dtype, image.device)
    padded[..., :depth, :height, :width] = image
    padded[..., :depth, height:, :] = outside
    padded[..., :depth, :height, width:] = outside
    # Last, so that the repeated slice includes its own padding.
    padded[..., depth:, :, :] = padded[..., depth - 1 : depth, :, :]
    return padded
