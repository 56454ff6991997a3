"""The steps around an exported network, by its metadata alone, without imports of medseg.

Images are arrays (C, z, y, x) with axes towards superior, posterior and left. The filters are those
of medseg.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer
from monai.transforms import MapTransform
from torch import Tensor

BODY_HU = -500.5
AIR = -1.0
PERCENTILES = (0.5, 99.5)
MAX_VALUES = 2**24
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
    radius = abs(scale) if is_antialiased and abs(scale) > 1 + TOLERANCE else 1.0
    index = np.ceil(position - radius).astype(np.int64) + np.arange(int(2 * radius) + 1)
    distance = index - position
    weight = np.maximum(0.0, 1.0 - np.abs(distance) / radius)
    if radius > 1:  # tilted until the first moment vanishes, so that a linear ramp stays one
        tilt = -(weight * distance).sum(1, keepdims=True) / np.maximum(
            (weight * distance**2).sum(1, keepdims=True), 1e-12
        )
        weight = np.maximum(0.0, weight * (1.0 + tilt * distance))
    weight /= weight.sum(1, keepdims=True)
    is_inside = (position >= -0.5 - TOLERANCE) & (position <= num_inputs - 0.5 + TOLERANCE)
    weights = np.zeros((num_outputs, num_inputs))
    np.add.at(
        weights,
        (np.arange(num_outputs)[:, None], np.clip(index, 0, num_inputs - 1)),
        weight * is_inside,
    )
    return torch.from_numpy(weights.astype(np.float32))


def filtered(image: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Resample an image (z, y, x) by the filter of each axis."""
    for axis, one in enumerate(weights):
        image = torch.tensordot(one.to(image), image, dims=([1], [axis])).movedim(0, axis)
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
        self.spacing_mm, self.is_antialiased, self.channels = spacing_mm, is_antialiased, channels
        self.body_margin_mm, self.multiple_of, self.is_flipped = (
            body_margin_mm,
            multiple_of,
            is_flipped,
        )
        self.tile_size, self.least_size = tile_size, tile_size or least_size or (1, 1, 1)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Prepare the image of a case."""
        prepared = dict(data)
        for key in self.key_iterator(prepared):
            prepared[key] = self._prepare(prepared[key])
        return prepared

    def _prepare(self, scan: MetaTensor) -> MetaTensor:
        affine = np.asarray(scan.affine, dtype=np.float64)
        native_mm = np.linalg.norm(affine[:3, :3], axis=0)
        spacing_mm = (
            native_mm if self.spacing_mm is None else np.asarray(self.spacing_mm, dtype=np.float64)
        )
        size = np.array(scan.shape[1:])
        shape = np.maximum(1, np.floor(size * native_mm / spacing_mm + 0.5 + TOLERANCE)).astype(int)
        ratio = spacing_mm / native_mm
        first = (size - 1) / 2 - (shape - 1) / 2 * ratio  # the centre of the field of view stays
        weights = [
            axis_weights(*one, self.is_antialiased)
            for one in zip(shape, size, ratio, first, strict=True)
        ]
        values = scan.as_tensor().float()
        images = []
        for image, channel in zip(values, self.channels, strict=True):
            clipped = image if channel["clip"] is None else image.clamp(*channel["clip"])
            images.append(clipped if self.spacing_mm is None else filtered(clipped, weights))
        start, stop = self._body(images[0], spacing_mm)
        box = tuple(map(slice, start, stop))
        seen = torch.stack(
            [self._normalise(*one)[box] for one in zip(images, values, self.channels, strict=True)]
        )
        moved = np.eye(4)
        moved[:3, :3], moved[:3, 3] = np.diag(ratio), first + start * ratio
        if self.is_flipped:
            seen = seen.flip(-1)
        crop_shape = torch.tensor(seen.shape[1:])
        return MetaTensor(
            self._pad(seen),
            affine=torch.from_numpy(affine @ moved),
            meta={**scan.meta, CROP_SHAPE: crop_shape},
        )

    def _body(self, image: Tensor, spacing_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the box of the body with its margin; the whole image where there is none."""
        size = np.array(image.shape)
        is_body = image > BODY_HU if self.channels[0]["modality"] == "ct" else image != 0
        if self.body_margin_mm is None or not bool(is_body.any()):
            return np.zeros(3, int), size
        margin = np.ceil(self.body_margin_mm / spacing_mm - TOLERANCE).astype(int)
        covered = [is_body.any(a).any(b).nonzero().flatten() for a, b in ((1, 1), (0, 1), (0, 0))]
        start, stop = (np.array([int(one[end]) for one in covered]) for end in (0, -1))
        return np.maximum(0, start - margin), np.minimum(size, stop + 1 + margin)

    @staticmethod
    def _normalise(image: Tensor, values: Tensor, channel: Mapping[str, Any]) -> Tensor:
        """Map a channel to the range of the network, by its window or the scan's own values."""
        if channel["normalise"] == "window":
            low, high = channel["window_hu"]
            return (image.clamp(low, high) - low) * (2 / (high - low)) + AIR
        foreground = values[values > BODY_HU if channel["modality"] == "ct" else values != 0]
        known = (foreground if foreground.numel() else values.flatten()).double().numpy()
        if channel["normalise"] == "zscore":
            return (
                (image - known.mean()) / known.std() if known.std() > 0 else torch.zeros_like(image)
            )
        low, high = np.percentile(known[:: -(-known.size // MAX_VALUES)], PERCENTILES)
        return (image.clamp(low, high) - low) * (2 / (high - low) if high > low else 0.0) + AIR

    def _pad(self, image: Tensor) -> Tensor:
        """Pad (C, z, y, x) at the end of each axis: repeat the last slice, fill with air."""
        least = [max(pair) for pair in zip(image.shape[1:], self.least_size, strict=True)]
        depth, height, width = (
            -(-size // step) * step for size, step in zip(least, self.multiple_of, strict=True)
        )
        if self.tile_size is not None:
            depth, height, width = least
        elif [depth, height, width] == list(
            self.multiple_of
        ):  # a single voxel at the lowest level has no variance
            depth, height, width = 2 * depth, 2 * height, 2 * width
        padded = torch.full((len(image), depth, height, width), AIR)
        padded[:, : image.shape[1], : image.shape[2], : image.shape[3]] = image
        padded[:, image.shape[1] :] = padded[:, image.shape[1] - 1 : image.shape[1]]
        return padded


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
        axes = [self._starts(*one) for one in zip(image.shape[2:], self.tile_size, strict=True)]
        weights = [
            self._weights(*one).to(image)
            for one in zip(image.shape[2:], self.tile_size, axes, strict=True)
        ]
        total = torch.zeros(())
        for z, y, x in ((z, y, x) for z in axes[0] for y in axes[1] for x in axes[2]):
            place: tuple[Any, ...] = (
                ...,
                *(
                    slice(start, start + size)
                    for start, size in zip((z, y, x), self.tile_size, strict=True)
                ),
            )
            probs = torch.softmax(network(image[place]).float(), dim=1)
            if total.ndim == 0:
                total = probs.new_zeros((1, probs.shape[1], *image.shape[2:]))
            along = [self._profile(size).to(image) for size in self.tile_size]
            weight = along[0][:, None, None] * along[1][:, None] * along[2]
            total[place] += probs * weight
        return total / (weights[0][:, None, None] * weights[1][:, None] * weights[2])

    def _starts(self, size: int, tile: int) -> list[int]:
        """Spread tiles evenly over one axis."""
        num_steps = int(np.ceil((size - tile) / max(1.0, tile * (1.0 - self.overlap))))
        return (
            [round(step * (size - tile) / num_steps) for step in range(num_steps + 1)]
            if num_steps > 0
            else [0]
        )

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
        depth, height, width = (int(size) for size in image.meta[CROP_SHAPE])
        plain = probs.as_tensor() if isinstance(probs, MetaTensor) else probs
        plain = plain[1:, :depth, :height, :width].cpu()
        if self.is_flipped:
            plain = plain.flip(-1)
        stored = np.asarray(image.meta["original_affine"], dtype=np.float64)
        size = [int(one) for one in np.ravel(image.meta["spatial_shape"])[:3]]
        to_crop = (
            np.linalg.inv(np.asarray(image.affine, dtype=np.float64)) @ stored
        )  # each axis of the crop is one stored axis
        order = [int(np.abs(to_crop[axis, :3]).argmax()) for axis in range(3)]
        weights = [
            axis_weights(
                size[order[axis]],
                plain.shape[1 + axis],
                to_crop[axis, order[axis]],
                to_crop[axis, 3],
            )
            for axis in range(3)
        ]
        native = tuple(size[axis] for axis in order)
        top, labels, background = (
            torch.zeros(native),
            torch.zeros(native, dtype=torch.uint8),
            torch.ones(native),
        )
        for value, prob in zip(self.values, plain, strict=False):
            resampled = filtered(prob, weights)
            background -= resampled
            labels.masked_fill_(resampled > top, value)
            torch.maximum(top, resampled, out=top)
        labels.masked_fill_(top <= background, 0)
        back = tuple(order.index(axis) for axis in range(3))
        return MetaTensor(
            labels.permute(back)[None],
            affine=torch.from_numpy(stored),
            meta={**image.meta, "affine": stored},
        )
