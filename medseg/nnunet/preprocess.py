"""Preprocessing of nnU-Net: transposition, crop to non-zero voxels, normalisation, resampling."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import binary_fill_holes
from torch import Tensor

from medseg.geometry.grid import VoxelBox
from medseg.geometry.sizes import Shape
from medseg.io.scratch import new_array, new_tensor
from medseg.nnunet.plan import NONE, TORCH, ChannelPlan, NnunetPlan
from medseg.nnunet.planes import SpacingMm, filtered_axes, make_planes, orders_of
from medseg.nnunet.previous import BEYOND, resample_previous
from medseg.nnunet.spline import axis_taps, filtered, filtering_bytes

# Smallest divisor of a normalisation, as in nnU-Net.
EPSILON = 1e-8
# The numbers of bytes below are per voxel of the scan.
# Memory while a channel is scaled by its own statistics, by scheme: a copy in float32, and for a
# standard deviation as much again.
SCALING_BYTES = {"ZScoreNormalization": 8, "RescaleTo01Normalization": 4}
# Memory while a channel is scaled by a z-score within a mask, with a copy of the mask's voxels.
MASKED_SCALING_BYTES = 16
# The mask, and the memory while its holes are filled.
MASK_BYTES = 1
FILLING_BYTES = 5
# Labels of a previous stage: as stored, and as int16.
STORED_LABEL_BYTES = 1
LABEL_BYTES = 2
# Memory while the labels beyond the mask are found.
BEYOND_BYTES = 3
# Normalises one plane (H, W) to float32.
Normalise = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Prepared:
    """Input of the network, and what is needed to bring its result back to the scan.

    Attributes:
        image: Normalised image (C, D', H', W'), float32, padded to at least the size of a tile; in
            a cascade one more channel has the labels of the previous stage.
        padding: Voxels that were added before the first one of each axis.
        shape: Shape of the image without padding.
        box: Crop of the transposed scan that the image shows.
        spacing_mm: Spacing of the transposed scan.
    """

    image: Tensor
    padding: Shape
    shape: Shape
    box: VoxelBox
    spacing_mm: SpacingMm


def prepare(
    images: Sequence[np.ndarray],
    spacing_mm: SpacingMm,
    plan: NnunetPlan,
    previous: np.ndarray | None = None,
) -> Prepared:
    """Bring a scan to the input of a network.

    Args:
        images: Channels (D, H, W) in the orientation that the network expects, not transposed.
        spacing_mm: Spacing of the channels, (z, y, x).
        plan: As it is read: `for_scan` is applied here.
        previous: Labels (D, H, W) of the previous stage; None without a cascade.

    Raises:
        PlanError: If the plan cannot resample this scan.
    """
    transposed = [image.transpose(plan.transpose) for image in images]
    z, y, x = plan.transpose
    transposed_mm = spacing_mm[z], spacing_mm[y], spacing_mm[x]
    plan = plan.for_scan(transposed_mm)
    box = nonzero_box(transposed)
    shape = resampled_shape(box.shape, transposed_mm, plan)
    # A scan smaller than a patch lies in the middle of one.
    padded_shape = [max(size, tile) for size, tile in zip(shape, plan.patch_size, strict=True)]
    padding = [(padded - size) // 2 for padded, size in zip(padded_shape, shape, strict=True)]
    # Where the scan lies within the padded image.
    inside = VoxelBox.of(padding, map(operator.add, padding, shape))
    planes, rows, columns = inside.slices()
    # In a cascade all labels of the previous stage are one more channel.
    num_channels = len(images) if previous is None else len(images) + 1
    image = new_tensor((num_channels, *padded_shape), torch.float32, waits=True)
    # The padding must be zero, but the voxels of a new tensor are undefined.
    if tuple(padded_shape) != shape:
        image.zero_()
    mask = None
    labels = None
    if previous is not None or _needs_mask(plan.channels):
        mask = _nonzero_mask(transposed, box)
    if previous is not None:
        assert mask is not None, "it was made above"
        previous_crop = previous.transpose(plan.transpose)[box.slices()]
        labels = previous_crop.astype(np.int16, order="C")
        # As in nnU-Net, background outside the mask is a label of its own while it is resampled.
        labels[(labels == 0) & ~mask] = BEYOND
        # nnU-Net takes a voxel with a label into the statistics, even where all channels are zero.
        mask = labels != BEYOND
    for number, channel in enumerate(plan.channels):
        normalised = _normalised_planes(transposed[number], box, channel, mask)
        target = image[number, planes, rows, columns]
        _resample(normalised, target, box.shape, transposed_mm, plan)
    if labels is not None:
        assert plan.labels_resampling is not None, "the plan of a cascade has one"
        target = image[-1, planes, rows, columns]
        resample_previous(labels, target, plan.labels_resampling, transposed_mm, plan.spacing_mm)
    z_padding, y_padding, x_padding = padding
    return Prepared(image, (z_padding, y_padding, x_padding), shape, box, transposed_mm)


def filtered_image_axes(plan: NnunetPlan, shape: Shape, spacing_mm: SpacingMm) -> list[int]:
    """List the axes along which an image is filtered for a cubic spline before it is resampled.

    Args:
        plan: As it is read: `for_scan` is applied here.
        shape: Shape of the transposed scan.
        spacing_mm: Its spacing.
    """
    plan = plan.for_scan(spacing_mm)
    is_same_shape = resampled_shape(shape, spacing_mm, plan) == shape
    if is_same_shape or plan.image_resampling.function == TORCH:
        return []
    return filtered_axes(orders_of(plan.image_resampling, spacing_mm, plan.spacing_mm))


def preparation_bytes(
    plan: NnunetPlan, shape: Shape, spacing_mm: SpacingMm, *, has_previous: bool
) -> int:
    """Count the bytes that `prepare` takes beside the scan and its result.

    Args:
        plan: The plan of the network.
        shape: Shape of the transposed scan.
        spacing_mm: Its spacing.
        has_previous: Whether there are labels of a previous stage.
    """
    num_voxels = math.prod(shape)
    scaling = num_voxels * _scaling_bytes(plan, has_previous=has_previous)
    filtering = filtering_bytes(shape, filtered_image_axes(plan, shape, spacing_mm))
    # A channel is filtered after it is scaled, so not both at a time.
    return max(scaling, filtering)


def _scaling_bytes(plan: NnunetPlan, *, has_previous: bool) -> int:
    """Count the bytes per voxel of the scan while the channels are scaled."""
    channel_bytes = 0
    for channel in plan.channels:
        if channel.scheme == "ZScoreNormalization" and channel.is_masked:
            channel_bytes = max(channel_bytes, MASKED_SCALING_BYTES)
        else:
            channel_bytes = max(channel_bytes, SCALING_BYTES.get(channel.scheme, 0))
    if has_previous:
        # Both labels and the mask are kept while the labels beyond the mask are found, and then
        # while each channel is scaled. Filling the holes of the mask comes before and takes less
        # (STORED_LABEL_BYTES + FILLING_BYTES), because the labels are not copied yet.
        kept_bytes = STORED_LABEL_BYTES + LABEL_BYTES + MASK_BYTES
        return kept_bytes + max(BEYOND_BYTES, channel_bytes)
    if _needs_mask(plan.channels):
        return max(FILLING_BYTES, MASK_BYTES + channel_bytes)
    return channel_bytes


def nonzero_box(images: Sequence[np.ndarray]) -> VoxelBox:
    """Find the box of the voxels that are not zero in some channel; all voxels if none is."""

    def nonzero_masks() -> Iterator[np.ndarray]:
        """Yield the mask (H, W) of the non-zero voxels of each plane."""
        # `planes` holds the same plane of all channels.
        for planes in zip(*images, strict=True):
            mask = planes[0] != 0
            for plane in planes[1:]:
                mask |= plane != 0
            yield mask

    return VoxelBox.around(nonzero_masks()) or VoxelBox.full(images[0].shape)


def resampled_shape(shape: Shape, spacing_mm: SpacingMm, plan: NnunetPlan) -> Shape:
    """Compute the shape of a transposed scan at the spacing of the plan."""
    if plan.image_resampling.function == NONE:
        return shape
    # At a half, `round` takes the even number, as in nnU-Net.
    depth, height, width = (
        max(1, round(native_mm / target_mm * size))
        for native_mm, target_mm, size in zip(spacing_mm, plan.spacing_mm, shape, strict=True)
    )
    return depth, height, width


def _needs_mask(channels: Sequence[ChannelPlan]) -> bool:
    """Whether some channel takes its statistics inside the non-zero mask."""
    # The other schemes use the whole crop, even if the plan asks for a mask.
    z_scored = [channel for channel in channels if channel.scheme == "ZScoreNormalization"]
    return any(channel.is_masked for channel in z_scored)


def _nonzero_mask(images: Sequence[np.ndarray], box: VoxelBox) -> np.ndarray:
    """Mask the crop's voxels that are not zero in at least one channel, and the holes in them."""
    # Holes are filled in the whole scan, which is then cropped: the order of nnU-Net.
    mask = np.zeros(images[0].shape, dtype=bool)
    for image in images:
        mask |= image != 0
    filled: np.ndarray = binary_fill_holes(mask)
    return filled[box.slices()]


def _normalised_planes(
    image: np.ndarray, box: VoxelBox, channel: ChannelPlan, mask: np.ndarray | None
) -> Sequence[np.ndarray]:
    """Normalise the crop of one channel.

    A scheme that needs no statistics of the scan is applied each time that a plane is read, and
    takes no memory.

    Args:
        image: The whole transposed channel (D, H, W).
        box: The crop.
        channel: Normalisation of the channel.
        mask: Voxels of the crop that count in masked statistics; None if no channel needs it.

    Returns:
        Planes (H, W) of the crop, float32.
    """
    if channel.scheme == "CTNormalization":
        return _LazyPlanes(image[box.slices()], _ct_normalisation(channel))
    if channel.scheme == "NoNormalization":
        return _LazyPlanes(image[box.slices()], _as_float)
    # The rounding of NumPy's sums depends on the layout in memory. As in nnU-Net, the crop must be
    # a view of a copy of the whole scan, with the axes of the copy in the order of the file.
    # Axes by falling stride: the axis that varies slowest in memory comes first.
    stored_order = np.argsort([-abs(stride) for stride in image.strides])
    stored_shape = [image.shape[axis] for axis in stored_order]
    stored = new_array(tuple(stored_shape), np.float32)
    # `argsort` of an order is its inverse.
    whole = stored.transpose(np.argsort(stored_order))
    whole[:] = image
    crop = whole[box.slices()]
    if channel.scheme == "RescaleTo01Normalization":
        crop -= crop.min()
        crop /= np.clip(crop.max(), a_min=EPSILON, a_max=None)
    elif channel.is_masked:
        assert mask is not None, "it was made for this channel"
        values = crop[mask]
        # The mask of a scan of zeros is empty, and has no mean.
        if len(values):
            centred = values - values.mean()
            crop[mask] = centred / max(values.std(), EPSILON)
    else:
        deviation = max(crop.std(), EPSILON)
        crop -= crop.mean()
        crop /= deviation
    return list(crop)


def _as_float(plane: np.ndarray) -> np.ndarray:
    """Copy a plane to float32."""
    return plane.astype(np.float32)


def _ct_normalisation(channel: ChannelPlan) -> Normalise:
    """Clip to the percentiles of the training scans and scale by their statistics, in float32."""
    statistics = channel.intensities

    def normalise(plane: np.ndarray) -> np.ndarray:
        values = _as_float(plane)
        np.clip(values, statistics["percentile_00_5"], statistics["percentile_99_5"], out=values)
        values -= statistics["mean"]
        values /= max(statistics["std"], EPSILON)
        return values

    return normalise


class _LazyPlanes(Sequence[np.ndarray]):
    """Planes of an image (D, H, W) that are normalised each time that they are read."""

    def __init__(self, image: np.ndarray, normalise: Normalise) -> None:
        self._image = image
        self._normalise = normalise

    def __len__(self) -> int:
        return len(self._image)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        # The error ends a loop over the planes; negative numbers are not needed.
        if not 0 <= index < len(self._image):
            raise IndexError(index)
        return self._normalise(self._image[index])


def _resample(
    source: Sequence[np.ndarray],
    target: Tensor,
    shape: Shape,
    spacing_mm: SpacingMm,
    plan: NnunetPlan,
) -> None:
    """Resample one channel to the spacing of the plan, plane by plane.

    The result of a spline is clipped to the range of the source.

    Args:
        source: Planes (H, W) of the normalised channel.
        target: Receives the result (D', H', W').
        shape: Shape of the source, (D, H, W).
        spacing_mm: Spacing of the source.
        plan: The plan of the network, for the scan.
    """
    new_shape = (target.shape[0], target.shape[1], target.shape[2])
    if shape == new_shape:
        for number, plane in enumerate(source):
            target[number] = torch.from_numpy(np.ascontiguousarray(plane))
        return
    resampling = plan.image_resampling
    planes = make_planes(resampling, shape, new_shape, spacing_mm, plan.spacing_mm)
    if resampling.function == TORCH:
        for number in range(planes.num_planes):
            inputs = [torch.from_numpy(source[index]) for index in planes.sources(number)]
            target[number] = planes.resample(number, inputs)
        return
    orders = orders_of(resampling, spacing_mm, plan.spacing_mm)
    # The limits are those of the voxels, not of the coefficients that `filtered` makes of them.
    limits = _Limits(source, shape, new_shape, orders)
    axes = filtered_axes(orders)
    source_planes = list(filtered(source, axes)) if axes else source
    for number in range(planes.num_planes):
        inputs = []
        for index in planes.sources(number):
            inputs.append(torch.from_numpy(source_planes[index].astype(np.float64)))
        target[number] = limits.clip(number, planes.resample(number, inputs))


class _Limits:
    """Range of the values to which a resampled image is clipped.

    It is the range of the volume. Where one axis is separate (its order is 0), each slice across it
    has a range of its own, because nnU-Net resamples these slices one by one.

    Args:
        source: Planes of the volume.
        shape: Shape of the volume.
        new_shape: Shape of the result.
        orders: Order of the spline along each axis.
    """

    def __init__(
        self, source: Sequence[np.ndarray], shape: Shape, new_shape: Shape, orders: Shape
    ) -> None:
        nearest_axes = [axis for axis in range(3) if orders[axis] == 0]
        # A plan of order 0 has three such axes, none of which is separate.
        self._separate = nearest_axes[0] if len(nearest_axes) == 1 else None
        if self._separate is None or self._separate == 0:
            low = np.array([plane.min() for plane in source])
            high = np.array([plane.max() for plane in source])
        else:
            # A slice across axis 1 or 2 of the volume has one line in each plane. Axis 1 is axis 0
            # of a plane, so the line runs along its axis 1; axis 2 is axis 1 of a plane, so the
            # line runs along its axis 0.
            reduced_axis = 2 - self._separate
            low = np.min([plane.min(axis=reduced_axis) for plane in source], axis=0)
            high = np.max([plane.max(axis=reduced_axis) for plane in source], axis=0)
        if self._separate is None:
            low, high = low.min(keepdims=True), high.max(keepdims=True)
        else:
            # A new slice has the range of the source slice from which it is taken.
            taps = axis_taps(new_shape[self._separate], shape[self._separate], order=0)
            nearest = taps.index[:, 0]
            low, high = low[nearest], high[nearest]
        self._low = torch.from_numpy(low.astype(np.float64))
        self._high = torch.from_numpy(high.astype(np.float64))

    def clip(self, number: int, plane: Tensor) -> Tensor:
        """Clip output plane (H, W) `number`."""
        if self._separate == 0:
            return torch.clamp(plane, self._low[number], self._high[number])
        if self._separate == 1:
            # One range for each row.
            return torch.clamp(plane, self._low[:, None], self._high[:, None])
        # One range for each column, or for all voxels.
        return torch.clamp(plane, self._low, self._high)
