"""Sliding window of nnU-Net: its tiles, their Gaussian weights, and finished planes of logits.

nnU-Net adds tiles, weights and folds in half precision, on CPUs too, in the order of its tiles. A
sum in another order or precision gives other labels where classes are close. The order at each
voxel survives here, but a plane leaves the sums as soon as no later tile reaches it.
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

# Standard deviation of the weights by the length of a tile, and the largest weight.
SIGMA = 1 / 8
LARGEST_WEIGHT = 10.0
# Of logits (1, K, d, h, w).
Z_DIMENSION = 2
# Planes of a mean over mirrored passes that are taken at a time.
MEAN_PLANES = 8
# Runs a network on an image (1, C, d, h, w), and gives the logits (1, K, d', h, w) of one range of
# planes after the other to a function, from z = 0 on.
Run = Callable[[Tensor, Callable[[Tensor], None]], None]


def tile_starts(size: int, tile: int, overlap: float = 0.5) -> list[int]:
    """Spread tiles along one axis as nnU-Net does.

    Args:
        size: Voxels of the axis, as many as a tile has at least.
        tile: Voxels of a tile.
        overlap: Share of a tile that its neighbour covers too, at least.

    Example:
        >>> tile_starts(110, 64), tile_starts(64, 64)
        ([0, 23, 46], [0])
    """
    num_steps = math.ceil((size - tile) / (tile * (1 - overlap)))
    if num_steps == 0:
        return [0]
    step = (size - tile) / num_steps
    return [int(np.round(step * number)) for number in range(num_steps + 1)]


def all_starts(
    shape: Shape, tile: Shape, overlap: float, *, is_2d: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Spread tiles along all axes; those of a 2D network lie in each plane.

    Args:
        shape: Voxels of the image.
        tile: Shape of a tile.
        overlap: See `tile_starts`.
        is_2d: Whether a tile is a part of one plane.
    """
    z_starts = tile_starts(shape[0], tile[0], overlap)
    y_starts = tile_starts(shape[1], tile[1], overlap)
    x_starts = tile_starts(shape[2], tile[2], overlap)
    if is_2d:
        z_starts = list(range(shape[0]))
    return z_starts, y_starts, x_starts


@functools.lru_cache(maxsize=2)
def tile_weights(tile: tuple[int, ...]) -> Tensor:
    """Gaussian weights of the voxels of a tile, in half precision; none is zero.

    Args:
        tile: Shape of a tile, of any number of axes.

    Returns:
        Weights of this shape, 10 in the middle.
    """
    # The Gaussian is the impulse response of SciPy's filter, as in nnU-Net.
    peak = np.zeros(tile)
    middle = [size // 2 for size in tile]
    peak[tuple(middle)] = 1
    weights = gaussian_filter(peak, [size * SIGMA for size in tile], 0, mode="constant", cval=0)
    weights /= weights.max() / LARGEST_WEIGHT
    halves = torch.from_numpy(weights).to(torch.half)
    is_zero = halves == 0
    # Every voxel is divided by the sum of its weights, which must not be 0 either.
    halves[is_zero] = halves[~is_zero].min()
    return halves


def mirrored(
    run: Run, tile: Tensor, axes: Sequence[int], num_heads: int, take: Callable[[Tensor], None]
) -> None:
    """Mean of the logits over all combinations of mirrored axes, in the order of nnU-Net.

    Args:
        run: Runs the network.
        tile: One image (1, C, d, h, w).
        axes: Spatial axes, 0 to 2.
        num_heads: Heads of the network, K.
        take: Receives the mean of the next planes, as those of `run`.
    """
    if not axes:
        run(tile, take)
        return
    dimensions = [axis + 2 for axis in axes]
    combinations: list[tuple[int, ...]] = [()]
    for number in range(1, len(dimensions) + 1):
        combinations += itertools.combinations(dimensions, number)
    sums = _MirroredSums((1, num_heads, *tile.shape[2:]))
    for flipped in combinations:
        sums.begin(flipped)
        # A flip along no axis would copy the tile.
        seen = torch.flip(tile, flipped) if flipped else tile
        run(seen, sums.add)
    # In parts: the sums may be a temporary file, which memory need not hold as a whole.
    for planes in sums.logits.split(MEAN_PLANES, dim=2):
        take(planes.div_(len(combinations)))


class _MirroredSums:
    """Sums of the logits of mirrored passes.

    Attributes:
        logits: The sums (1, K, d, h, w).
    """

    logits: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._is_first = True
        self._axes: tuple[int, ...] = ()
        self._start = 0

    def begin(self, axes: tuple[int, ...]) -> None:
        """Begin a pass; `add` gets its planes next.

        Args:
            axes: Axes of (1, C, d, h, w) along which its image was mirrored; none in the first
                pass.
        """
        self._is_first = not axes
        self._axes = axes
        self._start = 0

    def add(self, planes: Tensor) -> None:
        """Add the next planes (1, K, d', h, w) of a pass where they lie in the tile."""
        start, stop = self._start, self._start + planes.shape[2]
        self._start = stop
        if self._is_first:
            if start == 0:
                # The first planes tell the precision.
                self.logits = new_tensor(self._shape, planes.dtype)
            self.logits[:, :, start:stop] = planes
            return
        # The first planes of a pass that was mirrored along z are the last ones of the tile.
        if Z_DIMENSION in self._axes:
            depth = self._shape[2]
            start, stop = depth - stop, depth - start
        self.logits[:, :, start:stop] += torch.flip(planes, self._axes)


def finished_planes(
    run: Run,
    image: Tensor,
    tile: Shape,
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
        tile: Shape of a tile.
        num_heads: Heads of the network, K.
        axes: Axes along which tiles are mirrored.
        dtype: Precision of the sums: half, as nnU-Net, or float32.
        overlap: See `tile_starts`.
        is_2d: Whether a tile is a part of one plane.

    Yields:
        Logits (K, H, W) of the planes from 0 on; a view that the next plane may overwrite.

    Raises:
        UserError: If a sum exceeds half precision.
    """
    depth, height, width = image.shape[1:]
    window = tile[0]
    # Plane z lies at z modulo the window: nothing is moved when planes leave.
    sums = new_tensor((window, num_heads, height, width), dtype).zero_()
    weight_sums = torch.zeros((window, height, width), dtype=dtype)
    # The weights of a 2D network do not depend on the axis of its single plane.
    weighted_shape = tile[1:] if is_2d else tile
    weights = tile_weights(weighted_shape).reshape(tile).to(dtype)
    first_unfinished = 0
    z_starts, y_starts, x_starts = all_starts((depth, height, width), tile, overlap, is_2d=is_2d)
    # The planes before the start of a tile are final: neither it nor a later tile reaches them. At
    # the end of the scan, as at one more start, the rest is final.
    for z in [*z_starts, depth]:
        for plane in range(first_unfinished, z):
            slot = plane % window
            finished = torch.div(sums[slot], weight_sums[slot], out=sums[slot])
            _check_finite(finished)
            yield finished
            sums[slot] = 0
            weight_sums[slot] = 0
        first_unfinished = z
        if z == depth:
            return
        for y, x in itertools.product(y_starts, x_starts):
            rows = slice(y, y + tile[1])
            columns = slice(x, x + tile[2])
            part = image[:, z : z + tile[0], rows, columns]
            target = _TileSums(sums, weights, z, (rows, columns))
            mirrored(run, part[None].contiguous(), axes, num_heads, target.add)
            _add(weight_sums, weights, z, (rows, columns))


class _TileSums:
    """Place of a tile in the window of sums.

    Args:
        sums: The window (window, K, H, W).
        weights: Weights of a tile (d, h, w).
        start: First plane of the tile.
        at: Its rows and columns.
    """

    def __init__(self, sums: Tensor, weights: Tensor, start: int, at: tuple[slice, ...]) -> None:
        self._sums = sums
        self._weights = weights
        self._start = start
        self._at = at
        self._num_added = 0

    def add(self, planes: Tensor) -> None:
        """Weight and add the next planes (1, K, d', h, w)."""
        first, last = self._num_added, self._num_added + planes.shape[2]
        self._num_added = last
        weighted = planes[0].mul_(self._weights[first:last]).transpose(0, 1)
        # The window has an axis of heads before rows and columns.
        _add(self._sums, weighted, self._start + first, (slice(None), *self._at))


def _add(sums: Tensor, values: Tensor, start: int, at: tuple[slice, ...]) -> None:
    """Add planes to the window from plane `start` on; beyond its end they go on at its start."""
    for number, plane in enumerate(values):
        of_plane = sums[(start + number) % len(sums)][at]
        # As `+=` of halves and floats computes it, in a quarter of the time.
        of_plane.copy_(of_plane.float().add_(plane))


def _check_finite(logits: Tensor) -> None:
    """Refuse infinite logits.

    Raises:
        UserError: With the cure.
    """
    # The check of each value takes ten times as long.
    if not torch.isfinite(logits.abs().max()) and torch.isinf(logits).any():
        raise UserError(
            "a sum of logits exceeds the range of half precision, at which nnU-Net stops too; give "
            "inference.sums=float"
        )
