"""The steps around an exported network, by its metadata alone, without imports of medseg.

Images are arrays (C, z, y, x) with axes towards superior, posterior and left. The filters are those
of medseg.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer
from monai.transforms import MapTransform
from torch import Tensor

# Values of a CT above this belong to the body; in other modalities, all values but 0.
BODY_HU = -500.5
# Value of air after normalisation to [-1, 1].
AIR = -1.0
# Percentiles that become -1 and 1 in a channel without a window, of at most so many values.
PERCENTILES = (0.5, 99.5)
MAX_VALUES = 2**24
# Rounding error of positions, in voxels.
TOLERANCE = 1e-6
# Shape of the crop before its padding, in the metadata of an image.
CROP_SHAPE = "crop_shape"


def axis_weights(
    num_outputs: int, num_inputs: int, scale: float, offset: float, is_antialiased: bool = True
) -> Tensor:
    """Compute the filter along one axis: linear, or a triangle of the coarser output's spacing.

    Args:
        num_outputs: Voxels of the output.
        num_inputs: Voxels of the input.
        scale: Input voxels per output voxel; negative for a reversed axis.
        offset: Input position of output voxel 0.
        is_antialiased: Whether the triangle widens.

    Returns:
        Weights (num_outputs, num_inputs), float32; rows of outputs outside of the input's field of
        view are 0.
    """
    position = np.round(scale * np.arange(num_outputs) + offset, 9)[:, None]
    radius = 1.0  # half width of the triangle, in input voxels
    if is_antialiased and abs(scale) > 1 + TOLERANCE:
        radius = abs(scale)
    # Input voxels that the triangle may reach, (num_outputs, 2 * radius + 1).
    index = np.ceil(position - radius).astype(np.int64) + np.arange(int(2 * radius) + 1)
    distance = index - position
    weight = np.maximum(0.0, 1.0 - np.abs(distance) / radius)
    if radius > 1:
        # Tilted until the first moment vanishes, so that a linear ramp stays one.
        first_moment = (weight * distance).sum(1, keepdims=True)
        second_moment = (weight * distance**2).sum(1, keepdims=True)
        tilt = -first_moment / np.maximum(second_moment, 1e-12)
        weight = np.maximum(0.0, weight * (1.0 + tilt * distance))
    weight /= weight.sum(1, keepdims=True)
    is_inside = (position >= -0.5 - TOLERANCE) & (position <= num_inputs - 0.5 + TOLERANCE)
    weights = np.zeros((num_outputs, num_inputs))
    outputs = np.arange(num_outputs)[:, None]
    # Beyond the ends the image continues with its outermost voxel.
    inputs = np.clip(index, 0, num_inputs - 1)
    np.add.at(weights, (outputs, inputs), weight * is_inside)
    return torch.from_numpy(weights.astype(np.float32))


def filtered(image: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Resample an image (z, y, x) by the filter of each axis."""
    for axis, weights_of_axis in enumerate(weights):
        # `tensordot` puts the new axis first.
        image = torch.tensordot(weights_of_axis.to(image), image, dims=([1], [axis]))
        image = image.movedim(0, axis)
    return image


class Prepared(MapTransform):
    """Turn an oriented scan into the network's input: resample, crop, normalise, pad."""

    def __init__(
        self,
        keys: Any,
        spacing_mm: Sequence[float] | None,
        is_antialiased: bool,
        channels: Sequence[Mapping[str, Any]],
        body_margin_mm: float | None,
        multiple_of: Sequence[int],
        tile_size: Sequence[int] | None,
        least_size: Sequence[int] | None,
        is_flipped: bool,
    ) -> None:
        """Take what the metadata of the export state.

        Args:
            keys: Key of the image.
            spacing_mm: Spacing of the network's input, (z, y, x); None keeps that of the scan.
            is_antialiased: Whether axes that get coarser are antialiased.
            channels: `modality`, `clip`, `normalise` and `window_hu` of each channel.
            body_margin_mm: Margin around the body; None keeps the whole image.
            multiple_of: Required multiple of the input size, (z, y, x).
            tile_size: Smallest size, (z, y, x), for tiles; None = the whole image at once.
            least_size: Smallest size, (z, y, x), of an image that runs at once.
            is_flipped: Whether the network sees the image with left and right exchanged.
        """
        super().__init__(keys)
        self.spacing_mm = spacing_mm
        self.is_antialiased = is_antialiased
        self.channels = channels
        self.body_margin_mm = body_margin_mm
        self.multiple_of = multiple_of
        self.tile_size = tile_size
        self.least_size = tile_size or least_size or (1, 1, 1)
        self.is_flipped = is_flipped

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Prepare the image of a case."""
        prepared = dict(data)
        for key in self.key_iterator(prepared):
            prepared[key] = self._prepare(prepared[key])
        return prepared

    def _prepare(self, scan: MetaTensor) -> MetaTensor:
        """Prepare a scan (C, z, y, x)."""
        affine = np.asarray(scan.affine, dtype=np.float64)
        native_mm = np.linalg.norm(affine[:3, :3], axis=0)
        spacing_mm = native_mm
        if self.spacing_mm is not None:
            spacing_mm = np.asarray(self.spacing_mm, dtype=np.float64)
        size = np.array(scan.shape[1:])
        # Rounded half up, at least one voxel.
        shape = np.floor(size * native_mm / spacing_mm + 0.5 + TOLERANCE)
        shape = np.maximum(1, shape).astype(int)
        ratio = spacing_mm / native_mm  # voxels of the scan for each voxel of the output
        first = (size - 1) / 2 - (shape - 1) / 2 * ratio  # the centre of the field of view stays
        weights = []
        for along_axis in zip(shape, size, ratio, first, strict=True):
            weights.append(axis_weights(*along_axis, self.is_antialiased))
        values = scan.as_tensor().float()
        images = []
        for image, channel in zip(values, self.channels, strict=True):
            if channel["clip"] is not None:
                image = image.clamp(*channel["clip"])
            if self.spacing_mm is not None:
                image = filtered(image, weights)
            images.append(image)
        start, stop = self._body(images[0], spacing_mm)
        box = tuple(map(slice, start, stop))
        crops = []
        for image, channel_values, channel in zip(images, values, self.channels, strict=True):
            crops.append(self._normalise(image, channel_values, channel)[box])
        crop = torch.stack(crops)
        # From indices of the crop to indices of the scan.
        crop_to_scan = np.eye(4)
        crop_to_scan[:3, :3] = np.diag(ratio)
        crop_to_scan[:3, 3] = first + start * ratio
        if self.is_flipped:
            crop = crop.flip(-1)
        return MetaTensor(
            self._pad(crop),
            affine=torch.from_numpy(affine @ crop_to_scan),
            meta={**scan.meta, CROP_SHAPE: torch.tensor(crop.shape[1:])},
        )

    def _body(self, image: Tensor, spacing_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the box of the body with its margin; the whole image where there is none."""
        size = np.array(image.shape)
        is_body = _is_body(image, self.channels[0])
        if self.body_margin_mm is None or not bool(is_body.any()):
            return np.zeros(3, int), size
        margin = np.ceil(self.body_margin_mm / spacing_mm - TOLERANCE).astype(int)
        indices = is_body.nonzero().numpy()  # (voxels, 3)
        start = indices.min(axis=0) - margin
        stop = indices.max(axis=0) + 1 + margin
        return np.maximum(0, start), np.minimum(size, stop)

    @staticmethod
    def _normalise(image: Tensor, values: Tensor, channel: Mapping[str, Any]) -> Tensor:
        """Map a channel to the range of the network, by its window or the scan's own values."""
        if channel["normalise"] == "window":
            low, high = channel["window_hu"]
            return (image.clamp(low, high) - low) * (2 / (high - low)) + AIR
        foreground = values[_is_body(values, channel)]
        if not foreground.numel():
            foreground = values.flatten()
        measured = foreground.double().numpy()
        if channel["normalise"] == "zscore":
            if measured.std() == 0:
                return torch.zeros_like(image)
            return (image - measured.mean()) / measured.std()
        # Percentiles of every n-th value, so that there are at most `MAX_VALUES`.
        step = math.ceil(measured.size / MAX_VALUES)
        low, high = np.percentile(measured[::step], PERCENTILES)
        scale = 0.0
        if high > low:
            scale = 2 / (high - low)
        return (image.clamp(low, high) - low) * scale + AIR

    def _pad(self, image: Tensor) -> Tensor:
        """Pad (C, z, y, x) at the end of each axis: repeat the last slice, fill with air."""
        least = [max(pair) for pair in zip(image.shape[1:], self.least_size, strict=True)]
        sizes = least
        if self.tile_size is None:
            sizes = []
            for size, step in zip(least, self.multiple_of, strict=True):
                sizes.append(math.ceil(size / step) * step)
            # A single voxel at the lowest level has no variance.
            if sizes == list(self.multiple_of):
                sizes = [2 * size for size in sizes]
        channels, depth, height, width = image.shape
        padded = torch.full((channels, *sizes), AIR)
        padded[:, :depth, :height, :width] = image
        padded[:, depth:] = padded[:, depth - 1 : depth]
        return padded


def _is_body(values: Tensor, channel: Mapping[str, Any]) -> Tensor:
    """Make the mask of the voxels that belong to the body."""
    if channel["modality"] == "ct":
        return values > BODY_HU
    return values != 0


class TileInferer(Inferer):
    """Run the network on a whole image or on tiles; returns probabilities (1, K, z, y, x)."""

    def __init__(self, tile_size: Sequence[int] | None, overlap: float) -> None:
        """Take the metadata's tile, (z, y, x) or None, and the share that neighbours overlap."""
        super().__init__()
        self.tile_size, self.overlap = tile_size, overlap

    def __call__(
        self, inputs: Tensor, network: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Predict the probabilities of an image (1, C, z, y, x)."""
        image = inputs.as_tensor() if isinstance(inputs, MetaTensor) else inputs
        if self.tile_size is None:
            return torch.softmax(network(image).float(), dim=1)
        # By axis: starts of the tiles, sum of their weights at each voxel, weights in a tile.
        starts = []
        sums = []
        profiles = []
        for size, tile in zip(image.shape[2:], self.tile_size, strict=True):
            starts_of_axis = self._starts(size, tile)
            starts.append(starts_of_axis)
            sums.append(self._weights(size, tile, starts_of_axis).to(image))
            profiles.append(self._profile(tile).to(image))
        depth, height, width = self.tile_size
        total = torch.zeros(())
        for z, y, x in itertools.product(*starts):
            place = (..., slice(z, z + depth), slice(y, y + height), slice(x, x + width))
            probs = torch.softmax(network(image[place]).float(), dim=1)
            # The first tile tells the number of classes.
            if total.ndim == 0:
                total = probs.new_zeros((1, probs.shape[1], *image.shape[2:]))
            total[place] += probs * _product(profiles)
        return total / _product(sums)

    def _starts(self, size: int, tile: int) -> list[int]:
        """Spread tiles evenly over one axis."""
        num_steps = math.ceil((size - tile) / max(1.0, tile * (1.0 - self.overlap)))
        if num_steps <= 0:
            return [0]
        return [round(step * (size - tile) / num_steps) for step in range(num_steps + 1)]

    @staticmethod
    def _profile(tile: int) -> Tensor:
        """Gaussian weights of a tile's voxels along one axis."""
        distance = (torch.arange(tile, dtype=torch.float64) - (tile - 1) / 2) / (tile / 8)
        return torch.exp(-0.5 * distance**2).float()

    def _weights(self, size: int, tile: int, starts: Sequence[int]) -> Tensor:
        """Sum the weights of all tiles along one axis."""
        total = torch.zeros(size)
        for start in starts:
            total[start : start + tile] += self._profile(tile)
        return total


def _product(along_axes: Sequence[Tensor]) -> Tensor:
    """Multiply weights along z, y and x to weights (z, y, x)."""
    along_z, along_y, along_x = along_axes
    return along_z[:, None, None] * along_y[:, None] * along_x


class Restored(MapTransform):
    """Turn probabilities into a label map on the voxels of the scan as they are stored."""

    def __init__(self, keys: Any, image_key: str, values: Sequence[int], is_flipped: bool) -> None:
        """Take the key of the image, the label values of classes, and whether it was flipped."""
        super().__init__(keys)
        self.image_key, self.values, self.is_flipped = image_key, values, is_flipped

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Restore the labels of a case."""
        restored = dict(data)
        for key in self.key_iterator(restored):
            restored[key] = self._restore(restored[key], restored[self.image_key])
        return restored

    def _restore(self, probs: Tensor, image: MetaTensor) -> MetaTensor:
        """Make the label map of the stored scan from probabilities (K, z, y, x)."""
        depth, height, width = (int(size) for size in image.meta[CROP_SHAPE])
        plain = probs.as_tensor() if isinstance(probs, MetaTensor) else probs
        plain = plain[1:, :depth, :height, :width].cpu()
        if self.is_flipped:
            plain = plain.flip(-1)
        stored = np.asarray(image.meta["original_affine"], dtype=np.float64)
        size = np.ravel(image.meta["spatial_shape"])[:3].astype(int).tolist()
        # From indices of the stored scan to indices of the crop.
        to_crop = np.linalg.inv(np.asarray(image.affine, dtype=np.float64)) @ stored
        # Each axis of the crop runs along one stored axis.
        order = [int(np.abs(to_crop[axis, :3]).argmax()) for axis in range(3)]
        weights = []
        for axis, stored_axis in enumerate(order):
            scale, offset = to_crop[axis, stored_axis], to_crop[axis, 3]
            num_inputs = plain.shape[1 + axis]
            weights.append(axis_weights(size[stored_axis], num_inputs, scale, offset))
        native = tuple(size[axis] for axis in order)
        highest = torch.zeros(native)
        labels = torch.zeros(native, dtype=torch.uint8)
        background = torch.ones(native)
        for value, prob in zip(self.values, plain, strict=False):
            resampled = filtered(prob, weights)
            background -= resampled
            labels.masked_fill_(resampled > highest, value)
            torch.maximum(highest, resampled, out=highest)
        labels.masked_fill_(highest <= background, 0)
        stored_order = tuple(order.index(axis) for axis in range(3))
        return MetaTensor(
            labels.permute(stored_order)[None],
            affine=torch.from_numpy(stored),
            meta={**image.meta, "affine": stored},
        )
