"""Resampling by splines, equal to scipy's `zoom` to the last bit, but plane by plane.

nnU-Net resamples with `skimage.transform.resize`, which calls `scipy.ndimage.zoom` with
`grid_mode=True` and `mode="nearest"` on a whole volume in float64. A voxel is the sum over its taps
in lexicographic order, each value times its weights of axis 0, 1 and 2 in this order. The same
products in the same order give the same bits; an interpolation axis by axis does not, and its
rounding shows where half-precision logits lie close together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import spline_filter1d
from torch import Tensor

from medseg.geometry.sizes import Shape
from medseg.io.scratch import TOUCHED_BYTES, new_array, release_pages, scratch_at_most

# Voxels that scipy repeats at each face before it filters an image for a cubic spline.
FILTER_MARGIN = 12
# Order of a cubic spline.
CUBIC = 3
# Elements of float64 that are filtered along the first axis at a time.
FILTER_ELEMENTS = 2**22
# Planes of which rows are copied before their pages leave the memory.
COPIED_PLANES = 16
# Coefficients of more bytes are a temporary file.
MAX_COEFFICIENTS_BYTES = 2**26
# Error of `SplinePlanes.estimate` by the largest source value, at most: three interpolations of
# five roundings of 2⁻²⁴ each, doubled.
ESTIMATE_ERROR = 2e-6


@dataclass(frozen=True)
class AxisTaps:
    """Taps of the output voxels along one axis.

    Attributes:
        index: Source voxel of each tap, (outputs, taps).
        weight: Its weight, float64, same shape; None where the only tap counts as it is.
    """

    index: np.ndarray
    weight: np.ndarray | None


def axis_taps(
    num_outputs: int, num_inputs: int, order: int, margin: int = 0, *, by_centres: bool = False
) -> AxisTaps:
    """Compute the taps of one axis as scipy does.

    Args:
        num_outputs: Voxels of the output.
        num_inputs: Voxels of the input, without margins.
        order: 0, 1 or 3.
        margin: Voxels at each end of the input that were added for a cubic spline.
        by_centres: Whether the centres of the outermost voxels stay in their places, as scipy does
            without `grid_mode`, in place of their faces.
    """
    position = np.arange(num_outputs, dtype=np.float64)
    if by_centres:
        position *= (num_inputs - 1) / max(num_outputs - 1, 1)
    else:
        position = (position + 0.5) * (num_inputs / num_outputs) - 0.5
    position += margin
    last = num_inputs + 2 * margin - 1
    if order == 0:
        nearest = np.floor(position + 0.5).astype(np.int64)
        return AxisTaps(np.clip(nearest, 0, last)[:, None], None)
    first = np.floor(position)
    # Distances to the voxel before the position, and to the one after it.
    before = position - first
    after = 1.0 - before
    weight = np.empty((num_outputs, order + 1))
    # The formulas and the order of their terms are those of scipy's C code: the last bit counts.
    if order == 1:
        weight[:, 0] = 1.0 - before
    else:
        weight[:, 1] = (before * before * (before - 2.0) * 3.0 + 4.0) / 6.0
        weight[:, 2] = (after * after * (after - 2.0) * 3.0 + 4.0) / 6.0
        weight[:, 0] = after * after * after / 6.0
    weight[:, order] = 1.0
    for tap in range(order):
        weight[:, order] -= weight[:, tap]
    # Two voxels around the position, or four.
    first_tap = first.astype(np.int64) - order // 2
    index = first_tap[:, None] + np.arange(order + 1)
    # A position beyond an outermost voxel keeps two taps there, whose products are added.
    return AxisTaps(np.clip(index, 0, last), weight)


class SplinePlanes:
    """Output planes of a resampled volume, each from the few source planes that it needs.

    Args:
        source: Shape of the volume, without margins.
        target: Shape of the result.
        orders: Order of the spline along each axis; 0 takes the nearest voxel.
        margins: Voxels that were added to the source at each end of an axis, for a cubic spline.

    Attributes:
        num_planes: Number of output planes.
        plane_shape: Their shape, (H, W).
        keeps_range: Whether a result lies between its taps.
    """

    def __init__(
        self, source: Shape, target: Shape, orders: Shape, margins: Shape = (0, 0, 0)
    ) -> None:
        self.num_planes = target[0]
        self.plane_shape = target[1:]
        # No result of linear interpolation lies outside the range of its taps.
        self.keeps_range = max(orders) <= 1
        depth, height, width = (
            axis_taps(outputs, inputs, order, margin)
            for outputs, inputs, order, margin in zip(target, source, orders, margins, strict=True)
        )
        self._depth = depth
        self._rows = _as_tensors(height)
        self._columns = _as_tensors(width)

    def sources(self, plane: int) -> list[int]:
        """Source planes of an output plane, in the order in which `resample` takes them."""
        return [int(index) for index in self._depth.index[plane]]

    def resample(self, plane: int, planes: Sequence[Tensor]) -> Tensor:
        """Compute an output plane.

        Args:
            plane: Its number.
            planes: Source planes (h, w) of `sources`, float64.

        Returns:
            The plane (H, W), float64.
        """
        total: Tensor | None = None
        weights = self._depth.weight
        for tap, values in enumerate(planes):
            weighted = values if weights is None else values * float(weights[plane, tap])
            for rows in _taps(weighted, 0, *self._rows):
                for term in _taps(rows, 1, *self._columns):
                    # Never a fused multiply-add: it would round once instead of twice.
                    total = term if total is None else total.add_(term)
        assert total is not None, "each output has a tap"
        return total

    def estimate(self, plane: int, planes: Sequence[Tensor]) -> Tensor:
        """Estimate an output plane of linear interpolation, in float32 and axis by axis.

        Takes a tenth of the time of `resample`; see `ESTIMATE_ERROR`.

        Args:
            plane: Its number.
            planes: Source planes (h, w) of `sources`, float32.

        Returns:
            The plane (H, W), float32.
        """
        assert self.keeps_range, "a cubic spline has more taps"
        values = planes[0]
        if len(planes) == 2:
            assert self._depth.weight is not None, "two taps have weights"
            values = torch.lerp(planes[0], planes[1], float(self._depth.weight[plane, 1]))
        for axis, (index, weight) in ((1, self._columns), (0, self._rows)):
            first = values.index_select(axis, index[0])
            if weight is None:
                values = first
                continue
            # Along the rows the weights are a column.
            share = weight[1].float()
            share = share[:, None] if axis == 0 else share
            values = first.lerp_(values.index_select(axis, index[1]), share)
        return values

    def resample_at(self, plane: int, planes: Sequence[Tensor], voxels: Tensor) -> Tensor:
        """Compute some voxels of an output plane for all heads, with the bits of `resample`.

        Args:
            plane: Its number.
            planes: Source planes (K, h, w) of `sources`.
            voxels: Places of N voxels in the flat output plane.

        Returns:
            Their values (K, N), float64.
        """
        num_rows, num_columns = planes[0].shape[1:]
        width = self.plane_shape[1]
        row_of = torch.div(voxels, width, rounding_mode="floor")
        column_taps = list(_taps_at(voxels - row_of * width, *self._columns))
        total: Tensor | None = None
        weights = self._depth.weight
        for tap, values in enumerate(planes):
            flat = values.reshape(-1, num_rows * num_columns)
            of_depth = None if weights is None else float(weights[plane, tap])
            for row, of_row in _taps_at(row_of, *self._rows):
                for column, of_column in column_taps:
                    term = flat.index_select(1, row * num_columns + column).double()
                    for weight in (of_depth, of_row, of_column):
                        if weight is not None:
                            term.mul_(weight)
                    total = term if total is None else total.add_(term)
        assert total is not None, "each output has a tap"
        return total


def _as_tensors(taps: AxisTaps) -> tuple[list[Tensor], list[Tensor] | None]:
    """Split taps into one tensor of indices and one of weights for each tap."""
    index = [torch.from_numpy(column.copy()) for column in taps.index.T]
    if taps.weight is None:
        return index, None
    return index, [torch.from_numpy(column.copy()) for column in taps.weight.T]


def _taps(
    values: Tensor, axis: int, index: Sequence[Tensor], weight: Sequence[Tensor] | None
) -> Iterator[Tensor]:
    """Gather the values of each tap along an axis of a plane, times its weights."""
    # One at a time: a cubic plane has 16 of them, each as large as the plane.
    for tap, voxels in enumerate(index):
        gathered = values.index_select(axis, voxels)
        if weight is not None:
            # Along the rows the weights are a column.
            gathered.mul_(weight[tap][:, None] if axis == 0 else weight[tap])
        yield gathered


def _taps_at(
    outputs: Tensor, index: Sequence[Tensor], weight: Sequence[Tensor] | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Source voxel and weight of each tap for some outputs of an axis."""
    for tap, sources in enumerate(index):
        yield sources[outputs], None if weight is None else weight[tap][outputs]


def filtered(planes: Sequence[np.ndarray], axes: Sequence[int]) -> np.ndarray:
    """Compute the coefficients of a cubic spline, with margins, as scipy does before it resamples.

    Args:
        planes: Planes (h, w) of the volume.
        axes: Axes of the spline, in rising order; others get neither margin nor filter.

    Returns:
        Coefficients, float64, longer by `FILTER_MARGIN` at each end of the axes; in a temporary
        file where it is large.
    """
    z_margin, y_margin, x_margin = (FILTER_MARGIN if axis in axes else 0 for axis in range(3))
    height, width = planes[0].shape
    depth = len(planes)
    shape = (depth + 2 * z_margin, height + 2 * y_margin, width + 2 * x_margin)
    with scratch_at_most(MAX_COEFFICIENTS_BYTES):
        coefficients = new_array(shape, np.float64)
    in_plane = ((y_margin, y_margin), (x_margin, x_margin))
    for number, plane in enumerate(planes, start=z_margin):
        coefficients[number] = np.pad(plane.astype(np.float64), in_plane, mode="edge")
    end = z_margin + depth
    coefficients[:z_margin] = coefficients[z_margin]
    coefficients[end:] = coefficients[end - 1]
    if 0 in axes:
        rows = max(1, FILTER_ELEMENTS // (shape[0] * shape[2]))
        for start in range(0, shape[1], rows):
            _filter_depth(coefficients[:, start : start + rows])
    for plane in coefficients:
        for axis in axes:
            if axis > 0:
                plane[:] = spline_filter1d(plane, CUBIC, axis - 1, mode="nearest")
    return coefficients


def filtering_bytes(shape: Shape, axes: Sequence[int]) -> int:
    """Memory of `filtered`; of a file, the pages that are in memory for a moment.

    Args:
        shape: Shape of the volume.
        axes: See `filtered`.
    """
    if not axes:
        return 0
    longer = [size + 2 * FILTER_MARGIN * (axis in axes) for axis, size in enumerate(shape)]
    itemsize = np.dtype(np.float64).itemsize
    num_bytes = itemsize * math.prod(longer)
    # The rows of all planes that are filtered at a time, before and after.
    of_rows = 2 * itemsize * min(FILTER_ELEMENTS, math.prod(longer)) if 0 in axes else 0
    if num_bytes > MAX_COEFFICIENTS_BYTES:
        # Where rows are filtered, the pages are released.
        return max(TOUCHED_BYTES, of_rows)
    return num_bytes + of_rows


def _filter_depth(part: np.ndarray) -> None:
    """Filter rows (D, h, W) of all planes along the first axis, in place.

    A few rows may bring a large piece of the file into memory with them, which the filter would
    keep for all planes at a time: it lets no other thread release them.
    """
    values = np.empty_like(part)
    for start in range(0, len(part), COPIED_PLANES):
        planes = slice(start, start + COPIED_PLANES)
        values[planes] = part[planes]
        release_pages()
    values = spline_filter1d(values, CUBIC, 0, mode="nearest")
    for start in range(0, len(part), COPIED_PLANES):
        planes = slice(start, start + COPIED_PLANES)
        part[planes] = values[planes]
        release_pages()
