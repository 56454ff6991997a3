"""Sliding window: tiling plan within a memory budget, tile positions and weights, blending."""

import math
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medseg.geometry.grid import VoxelBox
from medseg.geometry.sizes import Shape, network_size
from medseg.io.scratch import new_tensor
from medseg.preprocess.crop import pad_at_end
from medseg.preprocess.intensity import AIR

# Number format of stored probabilities. Values in [0, 1] are at most 1/2048 apart, so rounding
# changes a probability by at most 0.00025.
PROBS_DTYPE = torch.float16
# Number of voxels whose logits are converted to float32 probabilities at a time: few enough for the
# processor's cache.
SLAB_VOXELS = 2**18
ALL = slice(None)  # all classes
# Standard deviation of the Gaussian weights of a tile, as a fraction of the tile's length.
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
    classes: slice = ALL,
) -> Tensor:
    """Predict class probabilities of one crop.

    With tiles, an axis that is shorter than a tile is padded at its end, as in training; without
    tiles, an axis that is no multiple of the divisor. The padding is cut off the result. Tiles are
    blended with Gaussian weights that sum to one. Beside the image and the result, memory holds the
    float32 sums of one layer of tiles and the tiles of one batch.

    Args:
        network: Maps images (N, C, d, h, w) to logits (N, K, d, h, w).
        image: Normalised crop (1, C, D, H, W).
        tile_size: Tile in voxels (z, y, x), raised to a multiple of the divisor; None runs the crop
            as a whole.
        overlap: Share of a tile that its neighbour covers too, in [0, 1).
        divisor: Required multiple of the network's input size, (z, y, x).
        batch_size: Number of tiles that go through the network together.
        run_batches: Runs the network on several batches at once, in several processes; None runs
            the batches one by one in this process.
        num_parallel: Largest number of batches that `run_batches` takes.
        skips_air: Whether a tile of nothing but `AIR`, the value of air after normalisation, counts
            as background without a pass; False for images in whose body that value occurs.
        run_in_slabs: Runs the network on a whole crop (first argument) and passes the logits
            (1, K, d, H, W) of one slab after the other to a function (second argument); None runs
            `network` in one pass. Not used for tiles: their logits are small, so `network` itself
            may run a tile in slabs.
        classes: The classes whose probabilities are returned.

    Returns:
        Probabilities of the chosen classes, (K, D, H, W), float16, on the device of the logits.
    """
    shape = image.shape[2:]
    with torch.inference_mode():
        if tile_size is None:
            collector = _ProbsCollector(shape, classes)
            padded = pad_at_end(image, network_size(shape, divisor), AIR)
            if run_in_slabs is None:
                collector.add(network(padded))
            else:
                run_in_slabs(padded, collector.add)
            return collector.probs

        def run_one_by_one(batches: list[Tensor]) -> list[Tensor]:
            return [network(batch) for batch in batches]

        if run_batches is None:
            run_batches = run_one_by_one
        tile_size = network_size(tile_size, divisor)
        # An axis that is shorter than a tile is padded to the length of a tile.
        padded_shape = [max(size, tile) for size, tile in zip(shape, tile_size, strict=True)]
        padded = pad_at_end(image, tuple(padded_shape), AIR)
        probs = _blend_tiles(
            run_batches, padded, tile_size, overlap, batch_size, num_parallel, skips_air
        )
        depth, height, width = shape
        return probs[classes, :depth, :height, :width]


def most_probable(probs: Tensor) -> Tensor:
    """Pick the most probable class of each voxel; of equally probable classes the first.

    Args:
        probs: Probabilities (K, D, H, W), K at most 256.

    Returns:
        Labels (D, H, W), uint8.
    """
    # The result is that of `argmax`, which would take eight bytes a voxel.
    highest = probs[0].clone()
    labels = torch.zeros(highest.shape, dtype=torch.uint8, device=probs.device)
    for label, class_probs in enumerate(probs[1:], start=1):
        labels.masked_fill_(class_probs > highest, label)
        torch.maximum(highest, class_probs, out=highest)
    return labels


def _blend_tiles(
    run_batches: Callable[[list[Tensor]], list[Tensor]],
    image: Tensor,
    tile_size: Shape,
    overlap: float,
    batch_size: int,
    num_parallel: int,
    skips_air: bool,
) -> Tensor:
    """Sum weighted tiles in a fixed order, so that the number of processes changes no bit.

    Tiles are sorted by z. For a tile at z with depth d, float32 sums are held only for the planes
    z … z + d - 1. No later tile reaches a plane below z, so those planes are final and are stored
    as float16.

    Args:
        run_batches: Maps several batches of images to their logits, see `predict_probs`.
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
    # The weight of a voxel is the product of its weights along the three axes. Each table maps the
    # start of a tile on an axis to the weights of its voxels along that axis.
    axis_tables = []
    for size, tile in zip(shape, tile_size, strict=True):
        axis_tables.append(_axis_weights_on(image.device, size, tile, overlap))
    weights_z, weights_y, weights_x = axis_tables
    boxes = tile_boxes(shape, tile_size, overlap)
    is_skipped = [False] * len(boxes)
    if skips_air:
        is_skipped = _has_air_only(image, boxes)
        # At least one tile must go through the network: only its result tells the number of
        # classes.
        if all(is_skipped):
            is_skipped[0] = False
    run_boxes = [box for box, skipped in zip(boxes, is_skipped, strict=True) if not skipped]
    tiles = _tile_probs(run_batches, image, run_boxes, batch_size, num_parallel)
    # The first tile tells the number of classes; then it is put back for the loop below.
    first_tile = next(tiles)
    num_classes = len(first_tile)
    tiles = chain([first_tile], tiles)
    probs = new_tensor((num_classes, *shape), PROBS_DTYPE, image.device)
    sums = new_tensor((num_classes, tile_size[0], height, width), torch.float32, image.device)
    sums.zero_()
    sums_start = 0  # z in the crop of the first plane of `sums`
    for box, skipped in zip(boxes, is_skipped, strict=True):
        z, y, x = box.start
        num_final = z - sums_start
        if num_final > 0:
            probs[:, sums_start:z] = sums[:, :num_final]
            # Move the planes that are not final to the start of `sums`. If this tile begins where
            # the last one ended, there are none. Cloned, since source and target overlap.
            sums[:, :-num_final] = sums[:, num_final:].clone()
            sums[:, -num_final:] = 0
            sums_start = z
        plane_weights = weights_z[z][:, None, None]
        row_weights = weights_y[y][:, None]
        weight = plane_weights * row_weights * weights_x[x]  # (d, h, w)
        _, rows, columns = box.slices()
        tile_sums = sums[..., rows, columns]  # a view of `sums`, (K, d, h, w)
        if skipped:
            # The background has probability one, all other classes zero.
            tile_sums[0].add_(weight)
        else:
            tile_sums.addcmul_(next(tiles), weight)
    # The planes of the last layer of tiles.
    probs[:, sums_start:] = sums[:, : depth - sums_start]
    return probs


def _axis_weights_on(
    device: torch.device, size: int, tile: int, overlap: float
) -> dict[int, Tensor]:
    """Make the weights of `axis_weights` on a device."""
    weights = axis_weights(size, tile, overlap)
    return {start: torch.from_numpy(values).to(device) for start, values in weights.items()}


def _has_air_only(image: Tensor, boxes: list[VoxelBox]) -> list[bool]:
    """Tell for each box of an image whether it holds nothing but `AIR`.

    `AIR` is the least value of a normalised image where tiles are skipped.
    """
    has_body = []
    for box in boxes:
        z, y, x = box.slices()
        tile = image[..., z, y, x]
        has_body.append((tile > AIR).any())
    # One transfer for all boxes: with a transfer for each box, each would wait for the GPU.
    return torch.stack(has_body).logical_not().tolist()


def _tile_probs(
    run_batches: Callable[[list[Tensor]], list[Tensor]],
    image: Tensor,
    boxes: list[VoxelBox],
    batch_size: int,
    num_parallel: int,
) -> Iterator[Tensor]:
    """Run the network on tiles, lazily: `num_parallel` batches at a time.

    Yields:
        The probabilities (K, d, h, w) of each tile, float32, in the order of the boxes.
    """
    batches = [boxes[start : start + batch_size] for start in range(0, len(boxes), batch_size)]
    for start in range(0, len(batches), num_parallel):
        group = batches[start : start + num_parallel]
        # No variable for the images: it would keep them while the results are blended.
        for logits in run_batches([_cut_batch(image, batch_boxes) for batch_boxes in group]):
            yield from torch.softmax(logits, dim=1, dtype=torch.float32)


def _cut_batch(image: Tensor, boxes: list[VoxelBox]) -> Tensor:
    """Cut tiles out of an image (1, C, D, H, W) and join them, (N, C, d, h, w)."""
    tiles = []
    for box in boxes:
        z, y, x = box.slices()
        tiles.append(image[..., z, y, x])
    # A single tile stays a view: nothing is copied.
    if len(tiles) == 1:
        return tiles[0]
    return torch.cat(tiles)


class _ProbsCollector:
    """Converts the logits of a crop into probabilities, slab by slab in ascending z.

    Attributes:
        probs: Probabilities of the chosen classes, (K, D, H, W), float16; set by the first call of
            `add`.
    """

    probs: Tensor

    def __init__(self, shape: tuple[int, ...], classes: slice) -> None:
        """Prepare for a crop of the shape (D, H, W)."""
        self._shape = shape
        self._classes = classes
        self._num_filled = 0  # planes of `probs` that have their values

    def add(self, logits: Tensor) -> None:
        """Add the logits (1, K, d, H', W') of the next d planes, in any precision.

        H' >= H and W' >= W: voxels of the padding are left out.
        """
        depth, height, width = self._shape
        if self._num_filled == 0:
            num_kept = len(range(logits.shape[1])[self._classes])
            self.probs = new_tensor((num_kept, *self._shape), PROBS_DTYPE, logits.device)
        # The crop was padded at the end of each axis.
        inside = logits[0, :, : depth - self._num_filled, :height, :width]
        planes_at_a_time = max(1, SLAB_VOXELS // (height * width))
        for slab in inside.split(planes_at_a_time, dim=1):
            stop = self._num_filled + slab.shape[1]
            target = self.probs[:, self._num_filled : stop]
            target[:] = torch.softmax(slab, dim=0, dtype=torch.float32)[self._classes]
            self._num_filled = stop


class TilingPlan(NamedTuple):
    """How one crop goes through a network: whole or in tiles, each in one pass or in slabs.

    Attributes:
        tile_size: Tile in voxels (z, y, x), a multiple of the divisor; None runs the crop as a
            whole.
        batch_size: Number of tiles that go through the network together.
        slab_bytes: Memory that a pass layer by layer in slabs may use, see
            `medseg.inference.slabs`; None runs the network in one pass, with the same result.
    """

    tile_size: Shape | None
    batch_size: int = 1
    slab_bytes: float | None = None

    def __str__(self) -> str:
        """Describe the plan in reports, e.g. `tiles of 96×96×96, 4 at a time`."""
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
    """Choose between one pass and slabs by the budget, and count the tiles that fit into a batch.

    The budget never changes the tile: a norm that depends on the field of view would change the
    labels.

    Args:
        shape: Size of the crop, (z, y, x).
        divisor: Required multiple of the input size, (z, y, x).
        bytes_per_voxel: Memory of the network per voxel of its input; 0 = unknown, taken to fit.
        budget_bytes: Memory that the network may use.
        tile_size: Tile in voxels, (z, y, x); None runs the crop as a whole.
        max_batch: Largest number of tiles that go through the network together.
        least_slab_bytes: Smallest budget for slabs; infinite for a network that cannot run in
            slabs.

    Raises:
        ValueError: If the budget allows neither; the message names the smallest sufficient budget.
    """
    is_tiled = tile_size is not None
    # Input size of one pass: a tile, or the whole crop.
    size = network_size(tile_size or shape, divisor)
    pass_bytes = math.prod(size) * bytes_per_voxel
    if pass_bytes <= budget_bytes:
        if not is_tiled:
            return TilingPlan(tile_size=None)
        batch_size = max_batch
        # A network of unknown memory (0 bytes a voxel) gets the largest batch.
        if pass_bytes > 0:
            batch_size = min(max_batch, int(budget_bytes // pass_bytes))
        return TilingPlan(size, batch_size)
    if budget_bytes >= least_slab_bytes:
        return TilingPlan(size if is_tiled else None, slab_bytes=budget_bytes)
    gib = least_budget_gib(size, bytes_per_voxel, least_slab_bytes)
    subject = "one tile" if is_tiled else "the crop"
    raise ValueError(f"{subject} of {'×'.join(map(str, size))} voxels needs {gib:.2f} GiB")


def least_budget_gib(size: Shape, bytes_per_voxel: float, least_slab_bytes: float) -> float:
    """Compute the smallest budget with which an input runs, in one pass or in slabs.

    Args:
        size: Size of the network's input, (z, y, x).
        bytes_per_voxel: See `plan_tiling`.
        least_slab_bytes: See `plan_tiling`.

    Returns:
        Budget in GiB, rounded up to two decimals: the rounded number is enough too.
    """
    pass_bytes = math.prod(size) * bytes_per_voxel
    least_gib = min(pass_bytes, least_slab_bytes) / 2**30
    return math.ceil(least_gib * 100) / 100


def _tile_starts(size: int, tile: int, overlap: float) -> list[int]:
    """List the starts of tiles of one length that are spread evenly over an axis, in voxels.

    The first tile begins at 0, the last one ends at `size`.
    """
    last_start = size - tile
    if last_start <= 0:
        return [0]
    # At least one voxel: with an overlap near 1, two tiles could otherwise have the same start.
    largest_step = max(1.0, tile * (1.0 - overlap))
    num_steps = math.ceil(last_start / largest_step)
    return [round(step * last_start / num_steps) for step in range(num_steps + 1)]


def tile_boxes(
    shape: tuple[int, int, int], tile_shape: tuple[int, int, int], overlap: float
) -> list[VoxelBox]:
    """Cover a volume with tiles of one shape.

    All tiles lie inside the volume; an axis shorter than the tile gets one tile of its own length.

    Args:
        shape: Volume size in voxels, (D, H, W).
        tile_shape: Tile size in voxels, (D, H, W).
        overlap: Smallest fraction of a tile's length that neighbours share per axis, in [0, 1).
            Starts are rounded, so neighbours may share one voxel less.

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
    z_starts = _tile_starts(shape[0], depth, overlap)
    y_starts = _tile_starts(shape[1], height, overlap)
    x_starts = _tile_starts(shape[2], width, overlap)
    boxes = []
    for z, y, x in product(z_starts, y_starts, x_starts):
        stop = (z + depth, y + height, x + width)
        boxes.append(VoxelBox((z, y, x), stop))
    return boxes


def axis_weights(size: int, tile: int, overlap: float) -> dict[int, np.ndarray]:
    """Compute the blending weights of the tiles of `tile_boxes` along one axis.

    The weight is largest in the middle of a tile. At each voxel the weights of all tiles that cover
    it sum to one. Tiles are all combinations of the starts of three axes, so the products of three
    weights sum to one too: blended probabilities need no division by a sum of weights.

    Args:
        size: Voxels of the volume along the axis.
        tile: Voxels of a tile.
        overlap: As for `tile_boxes`.

    Returns:
        Start of each tile to the weights of its voxels, float32.

    Source: Isensee et al., nnU-Net, Nature Methods 18 (2021), importance weighting of sliding
    windows.
    """
    length = min(size, tile)
    distance_voxels = np.arange(length) - (length - 1) / 2  # from the middle of the tile
    distance_sigmas = distance_voxels / (SIGMA_SHARE * length)
    gaussian = np.exp(-0.5 * distance_sigmas**2)
    starts = _tile_starts(size, length, overlap)
    # For each voxel, the sum over its tiles, by which each weight is divided.
    totals = np.zeros(size)
    for start in starts:
        totals[start : start + length] += gaussian
    weights = {}
    for start in starts:
        tile_weights = gaussian / totals[start : start + length]
        weights[start] = tile_weights.astype(np.float32)
    return weights
