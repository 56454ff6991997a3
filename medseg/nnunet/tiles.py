"""Sliding window of nnU-Net: its tiles, their Gaussian weights, and finished planes of logits.

nnU-Net adds tiles, weights and folds in half precision, on CPUs too, in the order of its tiles. A
sum in another order or precision gives other labels where classes are close. This module keeps the
order for each voxel, but passes on the sums of a plane as soon as no later tile reaches it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from medseg.errors import UserError
from medseg.geometry.sizes import Shape
from medseg.io.scratch import new_tensor

# Standard deviation of the Gaussian weights as a share of the tile's length along an axis, and the
# largest weight, as in nnU-Net.
SIGMA = 1 / 8
LARGEST_WEIGHT = 10.0
# The axis z of logits (1, K, d, h, w).
Z_DIMENSION = 2
# Number of planes of the mean over mirrored passes that are passed on at a time.
MEAN_PLANES = 8
# Runs a network on an image (1, C, d, h, w), and calls the given function with the logits
# (1, K, d', h, w) of one range of planes after the other, from z = 0 on.
Run = Callable[[Tensor, Callable[[Tensor], None]], None]


def tile_starts(size: int, tile_size: int, overlap: float = 0.5) -> list[int]:
    """Spread tiles along one axis as nnU-Net does.

    Args:
        size: Voxels of the axis, at least `tile_size`.
        tile_size: Voxels of a tile along this axis.
        overlap: Smallest share of a tile that the next one covers too.

    Returns:
        First voxel of each tile.

    Example:
        >>> tile_starts(110, 64), tile_starts(64, 64)
        ([0, 23, 46], [0])
    """
    num_steps = math.ceil((size - tile_size) / (tile_size * (1 - overlap)))
    if num_steps == 0:
        return [0]
    step = (size - tile_size) / num_steps
    return [int(np.round(step * number)) for number in range(num_steps + 1)]


def all_starts(
    shape: Shape, tile_shape: Shape, overlap: float, *, is_2d: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Spread tiles along all axes; those of a 2D network lie in each plane.

    Args:
        shape: Voxels of the image.
        tile_shape: Shape of a tile.
        overlap: See `tile_starts`.
        is_2d: Whether a tile is a part of one plane.
    """
    z_starts = tile_starts(shape[0], tile_shape[0], overlap)
    y_starts = tile_starts(shape[1], tile_shape[1], overlap)
    x_starts = tile_starts(shape[2], tile_shape[2], overlap)
    if is_2d:
        # Each plane has its own tiles, whatever the overlap.
        z_starts = list(range(shape[0]))
    return z_starts, y_starts, x_starts


@functools.lru_cache(maxsize=2)
def tile_weights(tile_shape: tuple[int, ...]) -> Tensor:
    """Compute Gaussian weights of the voxels of a tile, in half precision; none is zero.

    The result is cached, so it must not be changed.

    Args:
        tile_shape: Shape of a tile, of any number of axes.

    Returns:
        Weights of this shape, `LARGEST_WEIGHT` in the middle.
    """
    # The Gaussian is the impulse response of SciPy's filter, as in nnU-Net.
    impulse = np.zeros(tile_shape)
    middle = [size // 2 for size in tile_shape]
    impulse[tuple(middle)] = 1
    sigmas = [size * SIGMA for size in tile_shape]
    weights = gaussian_filter(impulse, sigmas, order=0, mode="constant", cval=0)
    weights /= weights.max() / LARGEST_WEIGHT
    half_weights = torch.from_numpy(weights).to(torch.half)
    # Sums of logits are divided by sums of weights, which must not be 0.
    is_zero = half_weights == 0
    half_weights[is_zero] = half_weights[~is_zero].min()
    return half_weights


def run_mirrored(
    run: Run, tile: Tensor, axes: Sequence[int], num_heads: int, take: Callable[[Tensor], None]
) -> None:
    """Run all combinations of mirrored axes, and average the logits in the order of nnU-Net.

    Args:
        run: Runs the network.
        tile: One image (1, C, d, h, w).
        axes: Spatial axes along which the tile is mirrored, 0 to 2.
        num_heads: Heads of the network, K.
        take: Receives the mean logits (1, K, d', h, w) of one range of planes after the other.
    """
    if not axes:
        run(tile, take)
        return
    dimensions = [Z_DIMENSION + axis for axis in axes]
    # No axis first, then single axes, pairs and all three.
    combinations: list[tuple[int, ...]] = [()]
    for num_flipped in range(1, len(dimensions) + 1):
        combinations += itertools.combinations(dimensions, num_flipped)
    sums = _MirroredSums((1, num_heads, *tile.shape[2:]))
    for flipped in combinations:
        sums.begin(flipped)
        # A flip along no axis would copy the tile.
        mirrored_tile = torch.flip(tile, flipped) if flipped else tile
        run(mirrored_tile, sums.add)
    # In parts, because the sums may be a temporary file, which need not be in memory as a whole.
    for planes in sums.logits.split(MEAN_PLANES, dim=Z_DIMENSION):
        take(planes.div_(len(combinations)))


class _MirroredSums:
    """Sums of the logits of mirrored passes, mirrored back.

    Args:
        shape: Shape of the logits of a tile, (1, K, d, h, w).

    Attributes:
        logits: The sums (1, K, d, h, w); they exist once the first planes are added.
    """

    logits: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._is_first = True
        self._axes: tuple[int, ...] = ()
        self._start = 0

    def begin(self, axes: tuple[int, ...]) -> None:
        """Begin a pass; the next calls of `add` bring its planes.

        Args:
            axes: Axes of (1, C, d, h, w) along which the image of the pass is mirrored; none in the
                first pass.
        """
        self._is_first = not axes
        self._axes = axes
        self._start = 0

    def add(self, planes: Tensor) -> None:
        """Add the next planes (1, K, d', h, w) of a pass at their place in the tile."""
        start = self._start
        stop = start + planes.shape[2]
        self._start = stop
        if self._is_first:
            if start == 0:
                # The first planes show the precision.
                self.logits = new_tensor(self._shape, planes.dtype)
            self.logits[:, :, start:stop] = planes
            return
        # The first planes of an image that is mirrored along z are the last ones of the tile.
        if Z_DIMENSION in self._axes:
            depth = self._shape[2]
            start, stop = depth - stop, depth - start
        self.logits[:, :, start:stop] += torch.flip(planes, self._axes)


def finished_planes(
    run: Run,
    image: Tensor,
    tile_shape: Shape,
    num_heads: int,
    axes: Sequence[int],
    dtype: torch.dtype,
    overlap: float = 0.5,
    *,
    is_2d: bool = False,
) -> Iterator[Tensor]:
    """Run a network on all tiles; yield the logits of each plane as soon as they are final.

    Args:
        run: Runs the network.
        image: Image (C, D, H, W), at least as large as a tile.
        tile_shape: Shape of a tile.
        num_heads: Heads of the network, K.
        axes: Axes along which tiles are mirrored.
        dtype: Precision of the sums: half, as in nnU-Net, or float32.
        overlap: See `tile_starts`.
        is_2d: Whether a tile is a part of one plane.

    Yields:
        Logits (K, H, W) of each plane in order; a later plane overwrites their memory.

    Raises:
        UserError: If a sum exceeds half precision, or a logit is NaN.
    """
    depth, height, width = image.shape[1:]
    window_depth = tile_shape[0]
    # Plane z of the scan is stored at z modulo this depth, so nothing is moved when planes leave.
    sums = new_tensor((window_depth, num_heads, height, width), dtype).zero_()
    weight_sums = torch.zeros((window_depth, height, width), dtype=dtype)
    # nnU-Net computes the weights of a 2D network without the axis of its single plane.
    weighted_shape = tile_shape[1:] if is_2d else tile_shape
    weights = tile_weights(weighted_shape).reshape(tile_shape).to(dtype)

    def run_in_precision(tile: Tensor, take: Callable[[Tensor], None]) -> None:
        """Run the network; half logits, as of a GPU, get the precision of the sums before."""
        run(tile, lambda planes: take(planes.to(torch.promote_types(planes.dtype, dtype))))

    first_unfinished = 0
    z_starts, y_starts, x_starts = all_starts(
        (depth, height, width), tile_shape, overlap, is_2d=is_2d
    )
    # The planes before the start of a tile are final: neither it nor a later tile reaches them. The
    # end of the scan counts as one more start, before which all planes are final.
    for z in [*z_starts, depth]:
        for plane in range(first_unfinished, z):
            slot = plane % window_depth
            finished = torch.div(sums[slot], weight_sums[slot], out=sums[slot])
            _check_finite(finished)
            yield finished
            # The slot is free for plane `plane + window_depth`.
            sums[slot] = 0
            weight_sums[slot] = 0
        first_unfinished = z
        if z == depth:
            return
        for y, x in itertools.product(y_starts, x_starts):
            rows = slice(y, y + tile_shape[1])
            columns = slice(x, x + tile_shape[2])
            tile_image = image[None, :, z : z + tile_shape[0], rows, columns].contiguous()
            tile_sums = _TileSums(sums, weights, z, (rows, columns))
            run_mirrored(run_in_precision, tile_image, axes, num_heads, tile_sums.add)
            _add(weight_sums, weights, z, (rows, columns))


class _TileSums:
    """Part of the window of sums to which the logits of one tile are added.

    Args:
        sums: The window (d, K, H, W) of `finished_planes`.
        weights: Weights of a tile (d, h, w).
        start: First plane of the tile in the scan.
        rows_and_columns: Rows and columns of the tile in the scan.
    """

    def __init__(
        self, sums: Tensor, weights: Tensor, start: int, rows_and_columns: tuple[slice, slice]
    ) -> None:
        self._sums = sums
        self._weights = weights
        self._start = start
        # The window has the axis of the heads before rows and columns.
        self._place = (slice(None), *rows_and_columns)
        self._num_added = 0

    def add(self, planes: Tensor) -> None:
        """Weight and add the next planes (1, K, d', h, w); the planes are changed."""
        first = self._num_added
        stop = first + planes.shape[2]
        self._num_added = stop
        # (d', K, h, w), as the window.
        weighted = planes[0].mul_(self._weights[first:stop]).transpose(0, 1)
        _add(self._sums, weighted, self._start + first, self._place)


def _add(sums: Tensor, planes: Tensor, start: int, place: tuple[slice, ...]) -> None:
    """Add planes to the window of sums.

    Args:
        sums: The window, which holds plane z of the scan at z modulo its length.
        planes: The planes, one after the other.
        start: Number of the first one in the scan.
        place: Part of a plane of the window to which they are added.
    """
    for number, plane in enumerate(planes):
        slot = (start + number) % len(sums)
        target = sums[slot][place]
        # The same result as `target += plane`, for halves and floats, in a quarter of the time.
        target.copy_(target.float().add_(plane))


def _check_finite(logits: Tensor) -> None:
    """Refuse logits that are infinite or NaN; nnU-Net calls a voxel of NaN background.

    Raises:
        UserError: If there are some, with the option that avoids them.
    """
    # If the largest magnitude is finite, all values are; this check takes a tenth of the time of
    # `isinf`.
    if torch.isfinite(logits.abs().max()):
        return
    if torch.isinf(logits).any():
        raise UserError(
            "a sum of logits exceeds the range of half precision, at which nnU-Net stops too; give "
            "inference.sums=float"
        )
    raise UserError(
        "some logits are NaN, as where values in the network exceed the range of half precision; "
        "give precision=fp32; in fp32 already, the default on a CPU, take another checkpoint"
    )
