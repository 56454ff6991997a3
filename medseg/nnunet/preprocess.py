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

# Smallest divisor of a normalisation.
EPSILON = 1e-8
# The numbers of bytes are per voxel of the scan.
# Taken while a channel is scaled by its own statistics, by scheme: a copy in float32, and for a
# standard deviation as much again.
SCALING_BYTES = {"ZScoreNormalization": 8, "RescaleTo01Normalization": 4}
# The same for a z-score within a mask, which copies the voxels of the mask too.
MASKED_SCALING_BYTES = 16
# The mask, and what is taken while its holes are filled.
MASK_BYTES = 1
FILLING_BYTES = 5
# Labels of a previous stage: as stored, and as int16.
STORED_LABEL_BYTES, LABEL_BYTES = 1, 2
# Taken while the labels beyond the mask are found.
BEYOND_BYTES = 3
Normalise = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Prepared:
    """Input of the network, and what leads its result back to the scan.

    Attributes:
        image: Normalised image (C, D', H', W'), float32, padded to a tile at least; in a cascade
            one more channel has the labels of the previous stage.
        padding: Voxels that were added before each axis.
        shape: Its shape without padding.
        box: Crop of the transposed scan.
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
        images: Channels (D, H, W) in the orientation that the network expects.
        spacing_mm: Their spacing.
        plan: The plan of the network.
        previous: Labels (D, H, W) of the previous stage; None without a cascade.

    Raises:
        PlanError: If the plan cannot resample this scan.
    """
    transposed = [image.transpose(plan.transpose) for image in images]
    z, y, x = plan.transpose
    spacing = spacing_mm[z], spacing_mm[y], spacing_mm[x]
    plan = plan.for_scan(spacing)
    box = nonzero_box(transposed)
    shape = resampled_shape(box.shape, spacing, plan)
    # A scan smaller than a patch lies in the middle of one.
    padded = [max(size, tile) for size, tile in zip(shape, plan.patch_size, strict=True)]
    padding = [(whole - size) // 2 for whole, size in zip(padded, shape, strict=True)]
    inside = VoxelBox.of(padding, map(operator.add, padding, shape))
    depth, height, width = inside.slices()
    # The labels of the previous stage of a cascade are one more channel.
    num_channels = len(images) + (previous is not None)
    image = new_tensor((num_channels, *padded), torch.float32, waits=True)
    if tuple(padded) != shape:
        image.zero_()
    mask = None
    labels = None
    if previous is not None or _needs_mask(plan.channels):
        mask = _nonzero_mask(transposed, box)
    if previous is not None:
        assert mask is not None, "it was made above"
        labels = previous.transpose(plan.transpose)[box.slices()].astype(np.int16, order="C")
        labels[(labels == 0) & ~mask] = BEYOND
        # nnU-Net takes a voxel with a label into the statistics, even where all channels are zero.
        mask = labels != BEYOND
    for number, channel in enumerate(plan.channels):
        normalised = _normalised_planes(transposed[number], box, channel, mask)
        _resample(normalised, image[number, depth, height, width], box.shape, spacing, plan)
    if labels is not None:
        assert plan.labels_resampling is not None, "the plan of a cascade has one"
        target = image[-1, depth, height, width]
        resample_previous(labels, target, plan.labels_resampling, spacing, plan.spacing_mm)
    return Prepared(image, (padding[0], padding[1], padding[2]), shape, box, spacing)


def image_axes(plan: NnunetPlan, shape: Shape, spacing_mm: SpacingMm) -> list[int]:
    """Axes along which an image is filtered for a cubic spline before it is resampled.

    Args:
        plan: The plan of the network.
        shape: Shape of the transposed scan.
        spacing_mm: Its spacing.
    """
    plan = plan.for_scan(spacing_mm)
    is_kept = resampled_shape(shape, spacing_mm, plan) == shape
    if is_kept or plan.image_resampling.function == TORCH:
        return []
    return filtered_axes(orders_of(plan.image_resampling, spacing_mm, plan.spacing_mm))


def preparation_bytes(
    plan: NnunetPlan, shape: Shape, spacing_mm: SpacingMm, *, has_previous: bool
) -> int:
    """Memory that `prepare` takes beside the scan and its result.

    Args:
        plan: The plan of the network.
        shape: Shape of the transposed scan.
        spacing_mm: Its spacing.
        has_previous: Whether there are labels of a previous stage.
    """
    num_voxels = math.prod(shape)
    # A channel is scaled before it is filtered.
    scaling = num_voxels * _scaling_bytes(plan, has_previous=has_previous)
    return max(scaling, filtering_bytes(shape, image_axes(plan, shape, spacing_mm)))


def _scaling_bytes(plan: NnunetPlan, *, has_previous: bool) -> int:
    """Bytes per voxel of the scan while a channel is scaled."""
    per_voxel = 0
    for channel in plan.channels:
        is_masked = channel.scheme == "ZScoreNormalization" and channel.is_masked
        needed = MASKED_SCALING_BYTES if is_masked else SCALING_BYTES.get(channel.scheme, 0)
        per_voxel = max(per_voxel, needed)
    if has_previous:
        # More than while the holes are filled, when only the stored labels are there.
        labels_bytes = STORED_LABEL_BYTES + LABEL_BYTES
        per_voxel = labels_bytes + MASK_BYTES + max(BEYOND_BYTES, per_voxel)
    elif _needs_mask(plan.channels):
        per_voxel = max(FILLING_BYTES, MASK_BYTES + per_voxel)
    return per_voxel


def nonzero_box(images: Sequence[np.ndarray]) -> VoxelBox:
    """Box of the voxels that are not zero in any channel; the whole where all are zero."""

    def nonzero_masks() -> Iterator[np.ndarray]:
        """Yield for each plane where it is not zero in any channel."""
        for planes in zip(*images, strict=True):
            mask = planes[0] != 0
            for plane in planes[1:]:
                mask |= plane != 0
            yield mask

    return VoxelBox.around(nonzero_masks()) or VoxelBox.full(images[0].shape)


def resampled_shape(shape: Shape, spacing_mm: SpacingMm, plan: NnunetPlan) -> Shape:
    """Shape at the spacing of the plan."""
    if plan.image_resampling.function == NONE:
        return shape
    # At a half, `round` takes the even number, as nnU-Net does.
    depth, height, width = (
        max(1, round(native_mm / target_mm * size))
        for native_mm, target_mm, size in zip(spacing_mm, plan.spacing_mm, shape, strict=True)
    )
    return depth, height, width


def _needs_mask(channels: Sequence[ChannelPlan]) -> bool:
    # The other schemes take the whole crop, whatever the plan says of a mask.
    scaled = [channel for channel in channels if channel.scheme == "ZScoreNormalization"]
    return any(channel.is_masked for channel in scaled)


def _nonzero_mask(images: Sequence[np.ndarray], box: VoxelBox) -> np.ndarray:
    """Voxels of the crop that are not zero in any channel, with the holes among them."""
    mask = np.zeros(images[0].shape, dtype=bool)
    for image in images:
        mask |= image != 0
    filled: np.ndarray = binary_fill_holes(mask)
    return filled[box.slices()]


def _normalised_planes(
    image: np.ndarray, box: VoxelBox, channel: ChannelPlan, mask: np.ndarray | None
) -> Sequence[np.ndarray]:
    """Normalise the crop of one channel; what needs no statistics is done when a plane is read."""
    if channel.scheme == "CTNormalization":
        return _LazyPlanes(image[box.slices()], _ct_normalisation(channel))
    if channel.scheme == "NoNormalization":
        return _LazyPlanes(image[box.slices()], _as_float)
    # The sums of NumPy depend on the layout in memory: the crop must be a view of a whole array
    # that is laid out as nnU-Net's.
    order = np.argsort([-abs(stride) for stride in image.strides])
    stored_shape = [image.shape[axis] for axis in order]
    stored = new_array(tuple(stored_shape), np.float32)
    # `argsort` of an order is its inverse.
    whole = stored.transpose(np.argsort(order))
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
            crop[mask] = (values - values.mean()) / max(values.std(), EPSILON)
    else:
        mean, deviation = crop.mean(), crop.std()
        crop -= mean
        crop /= max(deviation, EPSILON)
    return list(crop)


def _as_float(plane: np.ndarray) -> np.ndarray:
    return plane.astype(np.float32)


def _ct_normalisation(channel: ChannelPlan) -> Normalise:
    """Clip to the percentiles of the training and scale by its statistics, in float32."""
    of_training = channel.intensities

    def normalise(plane: np.ndarray) -> np.ndarray:
        values = _as_float(plane)
        np.clip(values, of_training["percentile_00_5"], of_training["percentile_99_5"], out=values)
        values -= of_training["mean"]
        values /= max(of_training["std"], EPSILON)
        return values

    return normalise


class _LazyPlanes(Sequence[np.ndarray]):
    """Planes that are normalised each time that they are read."""

    def __init__(self, image: np.ndarray, normalise: Normalise) -> None:
        self._image = image
        self._normalise = normalise

    def __len__(self) -> int:
        return len(self._image)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
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
        source: Its planes.
        target: Receives the result (D', H', W').
        shape: Shape of the source.
        spacing_mm: Its spacing.
        plan: The plan of the network.
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
            parts = [torch.from_numpy(source[index]) for index in planes.sources(number)]
            target[number] = planes.resample(number, parts)
        return
    orders = orders_of(resampling, spacing_mm, plan.spacing_mm)
    # Splines overshoot at edges.
    limits = _Limits(source, shape, new_shape, orders)
    axes = filtered_axes(orders)
    values = list(filtered(source, axes)) if axes else source
    for number in range(planes.num_planes):
        parts = []
        for index in planes.sources(number):
            parts.append(torch.from_numpy(values[index].astype(np.float64)))
        target[number] = limits.clip(number, planes.resample(number, parts))


class _Limits:
    """Range of the values to which a resampled image is clipped.

    It is the range of the volume, or of each slice where one axis is resampled apart: nnU-Net
    resamples these slices one by one.

    Args:
        source: Planes of the volume.
        shape: Its shape.
        new_shape: Shape of the result.
        orders: Order of the spline along each axis.
    """

    def __init__(
        self, source: Sequence[np.ndarray], shape: Shape, new_shape: Shape, orders: Shape
    ) -> None:
        apart = [axis for axis in range(3) if orders[axis] == 0]
        # A plan of order 0 has three such axes, none of which is apart.
        self._apart = apart[0] if len(apart) == 1 else None
        if self._apart is None or self._apart == 0:
            low = np.array([plane.min() for plane in source])
            high = np.array([plane.max() for plane in source])
        else:
            # A plane has the axes 1 and 2: each slice along one of them is reduced along the other.
            across = 2 - self._apart
            low = np.min([plane.min(axis=across) for plane in source], axis=0)
            high = np.max([plane.max(axis=across) for plane in source], axis=0)
        if self._apart is None:
            low, high = low.min(keepdims=True), high.max(keepdims=True)
        else:
            # A new slice has the range of the source slice that it is taken from.
            nearest = axis_taps(new_shape[self._apart], shape[self._apart], 0).index[:, 0]
            low, high = low[nearest], high[nearest]
        self._low = torch.from_numpy(low.astype(np.float64))
        self._high = torch.from_numpy(high.astype(np.float64))

    def clip(self, plane: int, values: Tensor) -> Tensor:
        """Clip an output plane (H, W)."""
        if self._apart is None:
            return torch.clamp(values, self._low, self._high)
        if self._apart == 0:
            return torch.clamp(values, self._low[plane], self._high[plane])
        if self._apart == 1:
            return torch.clamp(values, self._low[:, None], self._high[:, None])
        return torch.clamp(values, self._low, self._high)
