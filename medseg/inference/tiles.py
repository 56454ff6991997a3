"""Tiles of a sliding window.

The tiling plan that fits the memory budget, positions and weights of the tiles, and the blended
class probabilities.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medseg.geometry.grid import VoxelBox
from medseg.geometry.sizes import Shape, network_size
from medseg.io.scratch import new_tensor
from medseg.preprocess.crop import pad_at_end
from medseg.preprocess.intensity import AIR

# Number format of stored probabilities; rounds by 0.00025 at most.
PROBS_DTYPE = torch.float16
# Voxels whose logits become float32 probabilities at a time, within the cache of the processor.
SLAB_VOXELS = 2**18
# Standard deviation of the weights of a tile, as part of its length.
SIGMA_SHARE = 1 / 8


def predict_probs(
    network: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    tile_size: Shape | None,
    overlap: float,
    divisor: Shape,
    batch_size: int = 1,
    run_batches: Callable[[list[Tensor]], list[Tensor]] | None = None,
    num_parallel: int = 1,
    skips_air: bool = True,
    run_in_slabs: Callable[[Tensor, Callable[[Tensor], None]], None] | None = None,
) -> Tensor:
    """Predict class probabilities of one crop.

    An axis that is shorter than a tile, or no multiple of the divisor, is padded at its end, as in
    training, and cut back. Tiles are blended with Gaussian weights that sum to one. Beside the
    image and the result, memory holds the float32 sums of one layer of tiles and the tiles of one
    batch. A tile of pure air may count as background without going through the network.

    Args:
        network: Maps images (N, C, d, h, w) to logits (N, K, d, h, w).
        image: Normalised crop (1, C, D, H, W).
        tile_size: Tile in voxels (z, y, x), raised to a multiple of the divisor; None runs the crop
            as a whole.
        overlap: Share of a tile that its neighbour covers too, in [0, 1).
        divisor: Required multiple of the network's input size, (z, y, x).
        batch_size: Number of tiles that go through the network together.
        run_batches: Runs the network on several batches at once, in several processes; None runs
            them here, one by one.
        num_parallel: Largest number of batches that `run_batches` takes.
        skips_air: Whether a tile of nothing but `AIR` is background; not where that value occurs in
            the body.
        run_in_slabs: Runs the network on a whole crop and gives the logits (1, K, d, H, W) of one
            slab of planes after the other to a function; None runs it in one pass. Tiles do not
            use it: the logits of a tile are small, so `network` itself may run a tile in slabs.

    Returns:
        Probabilities (K, D, H, W), float16, on the device of the logits.
    """
    shape = image.shape[2:]
    with torch.inference_mode():
        if tile_size is None:
            result = _Probabilities(shape)
            padded = pad_at_end(image, network_size(shape, divisor), AIR)
            if run_in_slabs is None:
                result.add(network(padded))
            else:
                run_in_slabs(padded, result.add)
            return result.probs
        tile_size = network_size(tile_size, divisor)
        # An axis that is shorter than a tile is filled up to one.
        padded = pad_at_end(image, tuple(map(max, shape, tile_size)), AIR)
        run = run_batches or (lambda batches: [network(batch) for batch in batches])
        probs = _blend_tiles(run, padded, tile_size, overlap, batch_size, num_parallel, skips_air)
        depth, height, width = shape
        return probs[:, :depth, :height, :width]


def most_probable(probs: Tensor) -> Tensor:
    """Pick the most probable class of each voxel; the first of equals.

    Args:
        probs: Probabilities (K, D, H, W), K at most 256.

    Returns:
        Labels (D, H, W), uint8; `argmax` would use eight bytes a voxel.
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
    tile_size: Shape,
    overlap: float,
    batch_size: int,
    num_parallel: int,
    skips_air: bool,
) -> Tensor:
    """Sum weighted tiles in a fixed order, so that the number of processes changes no bit.

    Float32 sums exist only for the planes that the present layer of tiles covers. No later tile
    reaches the planes below, which are final and move to float16.

    Args:
        run: Runs the network on several batches.
        image: Padded crop (1, C, D, H, W), no axis shorter than the tile.
        tile_size: See `predict_probs`, a multiple of the divisor.
        overlap: See `predict_probs`.
        batch_size: See `predict_probs`.
        num_parallel: See `predict_probs`.
        skips_air: See `predict_probs`.

    Returns:
        Probabilities (K, D, H, W), float16.
    """
    _, _, depth, height, width = image.shape
    shape = (depth, height, width)
    # The weight of a voxel is the product of three axis weights, which sum to one over the tiles of
    # their axis.
    axis_tables = []
    for size, tile in zip(shape, tile_size, strict=True):
        axis_tables.append(_axis_weights_on(image.device, size, tile, overlap))
    weights_z, weights_y, weights_x = axis_tables
    boxes = tile_boxes(shape, tile_size, overlap)
    is_skipped = [False] * len(boxes)
    if skips_air:
        is_skipped = _has_air_only(image, boxes)
        # At least one tile must go through the network: its result has the number of classes.
        if all(is_skipped):
            is_skipped[0] = False
    run_boxes = [box for box, skips in zip(boxes, is_skipped, strict=True) if not skips]
    tiles = _tile_probs(run, image, run_boxes, batch_size, num_parallel)
    # Only a result tells the number of classes: the first is looked at and put back.
    first = next(tiles)
    num_classes = len(first)
    tiles = chain([first], tiles)
    probs = new_tensor((num_classes, *shape), PROBS_DTYPE, image.device)
    sums = new_tensor((num_classes, tile_size[0], height, width), torch.float32, image.device)
    sums.zero_()
    lowest = 0  # z of the lowest plane of `sums`
    # The boxes come in the order of their z. Final planes are stored, and the others move down.
    for box, skips in zip(boxes, is_skipped, strict=True):
        num_final = box.start[0] - lowest
        if num_final:
            probs[:, lowest : box.start[0]] = sums[:, :num_final]
            sums[:, :-num_final] = sums[:, num_final:].clone()
            sums[:, -num_final:] = 0
            lowest = box.start[0]
        z, y, x = box.start
        plane_weights = weights_z[z][:, None, None]
        row_weights = weights_y[y][:, None]
        weight = plane_weights * row_weights * weights_x[x]
        _, rows, columns = box.slices()
        view = sums[..., rows, columns]
        if skips:
            # The background has probability one, all other classes zero.
            view[0].add_(weight)
        else:
            view.addcmul_(next(tiles), weight)
    probs[:, lowest:] = sums[:, : depth - lowest]
    return probs


def _axis_weights_on(
    device: torch.device, size: int, tile: int, overlap: float
) -> dict[int, Tensor]:
    """Make the weights of `axis_weights` on a device."""
    weights = axis_weights(size, tile, overlap)
    return {start: torch.from_numpy(values).to(device) for start, values in weights.items()}


def _has_air_only(image: Tensor, boxes: list[VoxelBox]) -> list[bool]:
    """Whether each box of an image holds nothing but `AIR`."""
    has_body = [(image[(..., *box.slices())] > AIR).any() for box in boxes]
    # One transfer for all tiles: each would wait for the GPU.
    return torch.stack(has_body).logical_not().tolist()


def _tile_probs(
    run: Callable[[list[Tensor]], list[Tensor]],
    image: Tensor,
    boxes: list[VoxelBox],
    batch_size: int,
    num_parallel: int,
) -> Iterator[Tensor]:
    """Run the network on tiles.

    Yields:
        The probabilities (K, d, h, w) of each tile, float32, in their order.
    """
    places = [(..., *box.slices()) for box in boxes]
    batches = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]
    # As many batches at a time as there are processes to take them.
    for start in range(0, len(batches), num_parallel):
        group = batches[start : start + num_parallel]
        for logits in run([_batch_of(image, batch) for batch in group]):
            yield from torch.softmax(logits, dim=1, dtype=torch.float32)


def _batch_of(image: Tensor, places: list[Any]) -> Tensor:
    """Cut tiles out of an image (1, C, D, H, W) and join them, (N, C, d, h, w)."""
    if len(places) == 1:
        # A view: nothing is copied.
        return image[places[0]]
    return torch.cat([image[place] for place in places])


class _Probabilities:
    """Probabilities (K, D, H, W) of a crop, made from the logits of its planes, in their order."""

    probs: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._filled = 0  # planes from z = 0 on

    def add(self, logits: Tensor) -> None:
        """Take the logits (1, K, d, H', W') of the next planes, of any precision.

        Voxels beyond the crop are left out.
        """
        depth, height, width = self._shape
        if self._filled == 0:
            self.probs = new_tensor((logits.shape[1], *self._shape), PROBS_DTYPE, logits.device)
        # Without the padding at the end of each axis.
        inside = logits[0, :, : depth - self._filled, :height, :width]
        step = max(1, SLAB_VOXELS // (height * width))
        for source in inside.split(step, 1):
            target = self.probs[:, self._filled : self._filled + source.shape[1]]
            target[:] = torch.softmax(source, dim=0, dtype=torch.float32)
            self._filled += source.shape[1]


class TilingPlan(NamedTuple):
    """Tiling plan of one crop: whole or in tiles, each in one pass or in slabs.

    Attributes:
        tile_size: Tile in voxels (z, y, x), a multiple of the divisor; None runs the crop as a
            whole.
        batch_size: Number of tiles that go through the network together.
        slab_bytes: Memory of a pass layer by layer in slabs, see `medseg.inference.slabs`; None
            runs one pass, with the same result.
    """

    tile_size: Shape | None
    batch_size: int = 1
    slab_bytes: float | None = None

    def __str__(self) -> str:
        text = "whole"
        if self.tile_size is not None:
            text = f"tiles of {'×'.join(map(str, self.tile_size))}"
        if self.batch_size > 1:
            text += f", {self.batch_size} at a time"
        if self.slab_bytes is not None:
            text += ", in slabs"
        return text


def plan_tiling(
    shape: Shape,
    divisor: Shape,
    bytes_per_voxel: float,
    budget_bytes: float,
    tile_size: Shape | None = None,
    max_batch: int = 1,
    least_slab_bytes: float = math.inf,
) -> TilingPlan:
    """Choose between one pass and slabs by the budget, and count the tiles that fit together.

    The budget never changes the tile: a norm that depends on the field of view would change the
    labels.

    Args:
        shape: Size of the crop, (z, y, x).
        divisor: Required multiple of the input size, (z, y, x).
        bytes_per_voxel: Memory of the network per voxel of its input.
        budget_bytes: Memory that the network may use.
        tile_size: Tile; None runs the crop as a whole.
        max_batch: Largest number of tiles at a time.
        least_slab_bytes: Smallest budget for slabs; infinite for a network that cannot run in
            slabs.

    Raises:
        ValueError: If the budget allows neither; the message names the smallest one that does.
    """
    size = network_size(tile_size or shape, divisor)
    num_bytes = math.prod(size) * bytes_per_voxel
    if num_bytes > budget_bytes >= least_slab_bytes:
        slab_tile_size = size if tile_size else None
        return TilingPlan(slab_tile_size, slab_bytes=budget_bytes)
    if num_bytes > budget_bytes:
        gib = least_budget_gib(size, bytes_per_voxel, least_slab_bytes)
        subject = "one tile" if tile_size else "the crop"
        raise ValueError(f"{subject} of {'×'.join(map(str, size))} voxels needs {gib:.2f} GiB")
    if not tile_size:
        return TilingPlan(None)
    # A network whose memory is not counted (0 bytes) does not limit the batch.
    num_fitting = int(budget_bytes // max(1, num_bytes))
    return TilingPlan(size, max(1, min(max_batch, num_fitting)))


def least_budget_gib(size: Shape, bytes_per_voxel: float, least_slab_bytes: float) -> float:
    """Count the smallest budget of an input, in GiB with two decimals.

    Args:
        size: Size of the network's input, (z, y, x).
        bytes_per_voxel: See `plan_tiling`.
        least_slab_bytes: See `plan_tiling`.
    """
    num_bytes = min(math.prod(size) * bytes_per_voxel, least_slab_bytes)
    # Rounded up: the number must be enough.
    return math.ceil(num_bytes / 2**30 * 100) / 100


def _starts(size: int, tile: int, overlap: float) -> list[int]:
    """Spread tiles of one length evenly over an axis, from its start to its end."""
    span = size - tile
    if span <= 0:
        return [0]
    num_steps = math.ceil(span / max(1.0, tile * (1.0 - overlap)))
    return [round(step * span / num_steps) for step in range(num_steps + 1)]


def tile_boxes(
    shape: tuple[int, int, int], tile_shape: tuple[int, int, int], overlap: float
) -> list[VoxelBox]:
    """Cover a volume with tiles of one shape.

    All tiles lie inside the volume; an axis shorter than the tile gets one tile of its own length.

    Args:
        shape: Volume size in voxels, (D, H, W).
        tile_shape: Tile size in voxels, (D, H, W).
        overlap: Least part of a tile's length that neighbours share per axis, in [0, 1), to a voxel
            of rounding.

    Returns:
        Boxes in C order (x fastest) that cover every voxel.

    Raises:
        ValueError: If a size is below one or the overlap lies outside [0, 1).

    Example:
        >>> [box.start[0] for box in tile_boxes((10, 4, 4), (4, 8, 4), 0.5)]
        [0, 2, 4, 6]
    """
    if min(*shape, *tile_shape) < 1:
        raise ValueError(f"sizes must be at least 1, got volume {shape} and tile {tile_shape}")
    if not 0.0 <= overlap < 1.0:
        raise ValueError(f"overlap must lie in [0, 1), got {overlap}")
    lengths = [min(size, tile) for size, tile in zip(shape, tile_shape, strict=True)]
    depth, height, width = lengths
    z_starts, y_starts, x_starts = (
        _starts(size, length, overlap) for size, length in zip(shape, lengths, strict=True)
    )
    boxes = []
    for z, y, x in product(z_starts, y_starts, x_starts):
        stop = (z + depth, y + height, x + width)
        boxes.append(VoxelBox((z, y, x), stop))
    return boxes


def axis_weights(size: int, tile: int, overlap: float) -> dict[int, np.ndarray]:
    """Weigh the tiles of `tile_boxes` along one axis.

    The middle of a tile weighs most, and the weights at each voxel sum to one. The tiles stand in
    rows, so the products of three axes' weights sum to one as well, and no sum needs to be kept.

    Args:
        size: Voxels of the volume along the axis.
        tile: Voxels of a tile.
        overlap: As for `tile_boxes`.

    Returns:
        Weights of a tile's voxels, float32, by the tile's start.

    Source: Isensee et al., nnU-Net, Nature Methods 18 (2021), importance weighting of sliding
    windows.
    """
    length = min(size, tile)
    distance = (np.arange(length) - (length - 1) / 2) / (SIGMA_SHARE * length)
    profile = np.exp(-0.5 * distance**2)
    starts = _starts(size, length, overlap)
    # At each voxel the weights of all tiles over it are divided by their sum.
    total = np.zeros(size)
    for start in starts:
        total[start : start + length] += profile
    weights = {}
    for start in starts:
        share = profile / total[start : start + length]
        weights[start] = share.astype(np.float32)
    return weights
