"""Run a network over a whole crop, or over blended tiles where the crop is too large for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from medseg.geometry.tiling import gaussian_weights, tile_boxes
from medseg.preprocess.crop import pad_at_end

Shape = tuple[int, int, int]
AIR = -1.0  # the lower end of the normalised window: what lies beside a volume


def predict_probs(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    tile_shape: Shape | None,
    overlap: float,
    divisor: Shape,
    batch_size: int = 1,
    together: Callable[[list[Tensor]], list[Tensor]] | None = None,
    num_together: int = 1,
) -> Tensor:
    """Predict class probabilities of one crop.

    An axis that is shorter than a tile, or no multiple of the divisor, is filled at its end, as in training, and cut back.
    Tiles are blended with Gaussian weights that sum to one; beside the image and the result (both float32) only the
    sum of the weights and the tiles of one batch are in memory. A tile that holds nothing but air is background and does not
    go through the network.

    Args:
        network: Maps images (N, C, d, h, w) to logits (N, K, d, h, w).
        image: Normalised crop (1, C, D, H, W).
        tile_shape: Tile size in voxels (z, y, x), raised to a multiple of the divisor; None runs the crop as a whole.
        overlap: Share of a tile that its neighbour covers too, in [0, 1).
        divisor: Numbers per axis that the network's input must be a multiple of.
        batch_size: Tiles that go through the network together.
        together: Runs the network on several batches at once, in several processes; None = one after the other, here.
        num_together: Most batches that `together` takes.

    Returns:
        Probabilities (K, D, H, W), float32, on the image's device.
    """
    shape = image.shape[2:]
    with torch.inference_mode():
        if tile_shape is None:
            padded = pad_at_end(image, multiple(shape, divisor), AIR)
            return _cut_back(_softmax(network(padded))[0], shape)
        tile_shape = multiple(tile_shape, divisor)
        padded = pad_at_end(image, tuple(max(pair) for pair in zip(shape, tile_shape, strict=True)), AIR)
        run = together or (lambda batches: [network(batch) for batch in batches])
        return _cut_back(_blend_tiles(run, padded, tile_shape, overlap, batch_size, num_together), shape)


def most_probable(probs: Tensor) -> Tensor:
    """Pick the class of each voxel; the first of equals.

    Args:
        probs: Probabilities (K, D, H, W), K at most 256.

    Returns:
        Labels (D, H, W), uint8; `argmax` would hold eight bytes a voxel.
    """
    best = probs[0].clone()
    labels = torch.zeros(best.shape, dtype=torch.uint8, device=probs.device)
    for value, prob in enumerate(probs[1:], start=1):
        labels.masked_fill_(prob > best, value)
        torch.maximum(best, prob, out=best)
    return labels


def _blend_tiles(
    run: Callable[[list[Tensor]], list[Tensor]],
    image: Tensor,
    tile_shape: Shape,
    overlap: float,
    batch_size: int,
    num_together: int,
) -> Tensor:
    """Sum weighted tiles, in one order whoever runs them, and divide by the sum of the weights; (K, D, H, W) float32."""
    _, _, depth, height, width = image.shape
    weights = torch.from_numpy(gaussian_weights(tile_shape)).to(image.device)
    weight_sum = torch.zeros((depth, height, width), device=image.device)
    places = [(..., *box.slices()) for box in tile_boxes((depth, height, width), tile_shape, overlap)]
    has_air_only = [not bool((image[at] > AIR).any()) for at in places]
    # One tile at least must say how many classes there are.
    has_air_only[0] &= not all(has_air_only)
    seen = [at for at, is_air in zip(places, has_air_only, strict=True) if not is_air]
    probs = None
    batches = [seen[start : start + batch_size] for start in range(0, len(seen), batch_size)]
    for start in range(0, len(batches), num_together):
        group = batches[start : start + num_together]
        # A single tile is a view: nothing is copied.
        tiles = [image[batch[0]] if len(batch) == 1 else torch.cat([image[at] for at in batch]) for batch in group]
        for batch, logits in zip(group, run(tiles), strict=True):
            for at, tile in zip(batch, _softmax(logits), strict=True):
                if probs is None:
                    probs = torch.zeros((tile.shape[0], depth, height, width), device=image.device)
                probs[at] += tile.mul_(weights)
                weight_sum[at] += weights
    assert probs is not None, "at least one tile is seen"
    for at, is_air in zip(places, has_air_only, strict=True):
        if is_air:
            probs[0][at] += weights
            weight_sum[at] += weights
    return probs.div_(weight_sum)


def _softmax(logits: Tensor) -> Tensor:
    """Turn logits (N, K, d, h, w) of any precision into float32 probabilities."""
    return torch.softmax(logits, dim=1, dtype=torch.float32)


def multiple(shape: tuple[int, ...], divisor: Shape) -> Shape:
    """Raise a shape to the next multiple of the divisor on each axis."""
    z, y, x = (-(-size // step) * step for size, step in zip(shape, divisor, strict=True))
    return z, y, x


def _cut_back(probs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Remove what `pad_at_end` added from (K, D, H, W)."""
    depth, height, width = shape
    return probs[:, :depth, :height, :width]
