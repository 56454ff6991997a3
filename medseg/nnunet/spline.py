"""Resampling by splines, equal to scipy's `zoom` to the last bit, but plane by plane.

nnU-Net resamples with `skimage.transform.resize`, which calls `scipy.ndimage.zoom` with
`grid_mode=True` and `mode="nearest"` on a whole volume in float64. An output voxel is the sum over
its taps (the source voxels near its position) in lexicographic order, each value times its weights
along axis 0, 1 and 2, in this order. The same products in the same order give the same bits. An
interpolation axis by axis does not, and its rounding shows where half-precision logits lie close
together.
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
# Number of values that are filtered along the first axis at a time.
FILTER_VALUES = 2**22
# Planes of a file whose rows are copied before their pages are released from memory.
COPIED_PLANES = 16
# Coefficients that are larger than this, in bytes, are kept in a temporary file.
MAX_COEFFICIENTS_BYTES = 2**26
# Largest error of `SplinePlanes.estimate`, as a share of the largest source value. Three
# interpolations with five roundings of 2⁻²⁴ each err by at most 9e-7; this is twice as much.
ESTIMATE_ERROR = 2e-6


@dataclass(frozen=True)
class AxisTaps:
    """Taps of the output voxels along one axis.

    Attributes:
        index: Source voxel of each tap, (outputs, taps).
        weight: Weight of each tap, float64, same shape; None for a single tap of weight 1.
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
        by_centres: Whether input and output share the centres of their outermost voxels, as in
            scipy without `grid_mode`; otherwise they share the outer faces.
    """
    # Positions of the outputs, in voxels of the input with its margins.
    position = np.arange(num_outputs, dtype=np.float64)
    if by_centres:
        position *= (num_inputs - 1) / max(num_outputs - 1, 1)
    else:
        position = (position + 0.5) * (num_inputs / num_outputs) - 0.5
    position += margin
    last_input = num_inputs + 2 * margin - 1
    if order == 0:
        nearest = np.floor(position + 0.5).astype(np.int64)
        return AxisTaps(np.clip(nearest, 0, last_input)[:, None], None)
    voxel_before = np.floor(position)
    # Distances to the voxel before the position, and to the one after it.
    before = position - voxel_before
    after = 1.0 - before
    weight = np.empty((num_outputs, order + 1))
    # Linear weights, or those of the cubic B-spline. The formulas and the order of their terms are
    # those of scipy's C code: the last bit counts.
    if order == 1:
        weight[:, 0] = 1.0 - before
    else:
        weight[:, 1] = (before * before * (before - 2.0) * 3.0 + 4.0) / 6.0
        weight[:, 2] = (after * after * (after - 2.0) * 3.0 + 4.0) / 6.0
        weight[:, 0] = after * after * after / 6.0
    # The last weight is what the others leave of 1.
    weight[:, order] = 1.0
    for tap in range(order):
        weight[:, order] -= weight[:, tap]
    # The voxel before the position and the next one; for a cubic spline also one on each side.
    first_tap = voxel_before.astype(np.int64) - order // 2
    index = first_tap[:, None] + np.arange(order + 1)
    # Beyond the ends several taps are the outermost voxel. They are not joined, because the sum of
    # their products has other bits.
    return AxisTaps(np.clip(index, 0, last_input), weight)


class SplinePlanes:
    """Output planes of a resampled volume, each from the few source planes that it needs.

    Args:
        source: Shape of the volume, without margins.
        target: Shape of the result.
        orders: Order of the spline along each axis; 0 takes the nearest voxel.
        margins: Voxels that were added to the source at each end of an axis, for a cubic spline.

    Attributes:
        num_planes: Number of output planes.
        plane_shape: Shape of an output plane, (H, W).
        keeps_range: Whether an output lies in the range of its taps: linear interpolation does, a
            cubic spline overshoots.
    """

    def __init__(
        self, source: Shape, target: Shape, orders: Shape, margins: Shape = (0, 0, 0)
    ) -> None:
        self.num_planes = target[0]
        self.plane_shape = target[1:]
        self.keeps_range = max(orders) <= 1
        depth, height, width = (
            axis_taps(outputs, inputs, order, margin)
            for outputs, inputs, order, margin in zip(target, source, orders, margins, strict=True)
        )
        self._depth = depth
        # Indices and weights of each tap, see `_as_tensors`.
        self._rows = _as_tensors(height)
        self._columns = _as_tensors(width)

    def sources(self, number: int) -> list[int]:
        """List the source planes of an output plane, in the order that `resample` expects."""
        return [int(index) for index in self._depth.index[number]]

    def resample(self, number: int, planes: Sequence[Tensor]) -> Tensor:
        """Compute an output plane.

        Args:
            number: Number of the output plane.
            planes: Source planes (h, w) of `sources`, float64.

        Returns:
            The plane (H, W), float64.
        """
        total: Tensor | None = None
        depth_weights = self._depth.weight
        for tap, source in enumerate(planes):
            weighted = source
            if depth_weights is not None:
                weighted = source * float(depth_weights[number, tap])
            for rows in _weighted_taps(weighted, 0, *self._rows):
                for term in _weighted_taps(rows, 1, *self._columns):
                    # Product and sum are apart: a fused multiply-add rounds once instead of twice.
                    total = term if total is None else total.add_(term)
        assert total is not None, "each output has a tap"
        return total

    def estimate(self, number: int, planes: Sequence[Tensor]) -> Tensor:
        """Estimate an output plane of linear interpolation, in float32 and axis by axis.

        This takes a tenth of the time of `resample`, and errs by at most `ESTIMATE_ERROR` times the
        largest source value.

        Args:
            number: Number of the output plane.
            planes: Source planes (h, w) of `sources`, float32.

        Returns:
            The plane (H, W), float32.
        """
        assert self.keeps_range, "a cubic spline has more taps"
        values = planes[0]
        if len(planes) == 2:
            assert self._depth.weight is not None, "two taps have weights"
            second_weight_z = float(self._depth.weight[number, 1])
            values = torch.lerp(planes[0], planes[1], second_weight_z)
        # Along x first, which is axis 1 of a plane, then along y.
        for axis, taps in ((1, self._columns), (0, self._rows)):
            tap_indices, tap_weights = taps
            first = values.index_select(axis, tap_indices[0])
            if tap_weights is None:
                values = first
                continue
            second = values.index_select(axis, tap_indices[1])
            second_weight = tap_weights[1].float()
            if axis == 0:
                # One weight for each row.
                second_weight = second_weight[:, None]
            values = first.lerp_(second, second_weight)
        return values

    def resample_at(self, number: int, planes: Sequence[Tensor], voxels: Tensor) -> Tensor:
        """Compute some voxels of an output plane for all heads, with the bits of `resample`.

        Args:
            number: Number of the output plane.
            planes: Source planes (K, h, w) of `sources`.
            voxels: Indices of N voxels in the flattened output plane.

        Returns:
            Their values (K, N), float64.
        """
        num_source_rows, num_source_columns = planes[0].shape[1:]
        width = self.plane_shape[1]
        rows = torch.div(voxels, width, rounding_mode="floor")
        columns = voxels - rows * width
        column_taps = list(_taps_at(columns, *self._columns))
        total: Tensor | None = None
        depth_weights = self._depth.weight
        for tap, source in enumerate(planes):
            flat_source = source.reshape(-1, num_source_rows * num_source_columns)
            depth_weight = None if depth_weights is None else float(depth_weights[number, tap])
            for source_rows, row_weight in _taps_at(rows, *self._rows):
                for source_columns, column_weight in column_taps:
                    source_voxels = source_rows * num_source_columns + source_columns
                    term = flat_source.index_select(1, source_voxels).double()
                    # One product after the other, in this order, for the bits of `resample`.
                    for weight in (depth_weight, row_weight, column_weight):
                        if weight is not None:
                            term.mul_(weight)
                    total = term if total is None else total.add_(term)
        assert total is not None, "each output has a tap"
        return total


def _as_tensors(taps: AxisTaps) -> tuple[list[Tensor], list[Tensor] | None]:
    """Split taps into tensors of one value per output: indices of each tap, and their weights."""
    # Copies, because a column of an array is not contiguous.
    indices = [torch.from_numpy(column.copy()) for column in taps.index.T]
    if taps.weight is None:
        return indices, None
    return indices, [torch.from_numpy(column.copy()) for column in taps.weight.T]


def _weighted_taps(
    plane: Tensor, axis: int, indices: Sequence[Tensor], weights: Sequence[Tensor] | None
) -> Iterator[Tensor]:
    """Yield for each tap a plane (h, w) gathered along an axis, times the weights of the tap.

    A generator saves memory: a cubic plane has 16 products, each as large as the plane.

    Args:
        plane: The plane.
        axis: 0 for rows, 1 for columns.
        indices: See `_as_tensors`.
        weights: See `_as_tensors`.
    """
    for tap, sources in enumerate(indices):
        gathered = plane.index_select(axis, sources)
        if weights is not None and axis == 0:
            # One weight for each row.
            gathered.mul_(weights[tap][:, None])
        elif weights is not None:
            gathered.mul_(weights[tap])
        yield gathered


def _taps_at(
    outputs: Tensor, indices: Sequence[Tensor], weights: Sequence[Tensor] | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield for each tap its source voxels and weights, for some outputs of an axis."""
    for tap, sources in enumerate(indices):
        weight = None if weights is None else weights[tap][outputs]
        yield sources[outputs], weight


def filtered(planes: Sequence[np.ndarray], axes: Sequence[int]) -> np.ndarray:
    """Compute the coefficients of a cubic spline, with margins, as scipy does before it resamples.

    Args:
        planes: Planes (h, w) of the volume.
        axes: Axes of the spline, in rising order; others get neither margin nor filter.

    Returns:
        Coefficients (D, H, W), float64, longer by `FILTER_MARGIN` at each end of the axes; in a
        temporary file if they are large.
    """
    z_margin, y_margin, x_margin = (FILTER_MARGIN if axis in axes else 0 for axis in range(3))
    height, width = planes[0].shape
    depth = len(planes)
    shape = (depth + 2 * z_margin, height + 2 * y_margin, width + 2 * x_margin)
    with scratch_at_most(MAX_COEFFICIENTS_BYTES):
        coefficients = new_array(shape, np.float64)
    plane_margins = ((y_margin, y_margin), (x_margin, x_margin))
    for number, plane in enumerate(planes, start=z_margin):
        coefficients[number] = np.pad(plane.astype(np.float64), plane_margins, mode="edge")
    end = z_margin + depth
    coefficients[:z_margin] = coefficients[z_margin]
    coefficients[end:] = coefficients[end - 1]
    # The axes are filtered one after the other, in place.
    if 0 in axes:
        num_rows = max(1, FILTER_VALUES // (shape[0] * shape[2]))
        for start in range(0, shape[1], num_rows):
            _filter_depth(coefficients[:, start : start + num_rows])
    for plane in coefficients:
        for axis in axes:
            if axis > 0:
                # Axis 1 or 2 of the volume is axis 0 or 1 of a plane.
                plane[:] = spline_filter1d(plane, CUBIC, axis=axis - 1, mode="nearest")
    return coefficients


def filtering_bytes(shape: Shape, axes: Sequence[int]) -> int:
    """Count the bytes in memory during `filtered`.

    Args:
        shape: Shape of the volume.
        axes: See `filtered`.
    """
    if not axes:
        return 0
    padded_shape = list(shape)
    for axis in axes:
        padded_shape[axis] += 2 * FILTER_MARGIN
    num_values = math.prod(padded_shape)
    itemsize = np.dtype(np.float64).itemsize
    # The rows of all planes that `_filter_depth` has at a time, before and after the filter.
    rows_bytes = 0
    if 0 in axes:
        rows_bytes = 2 * itemsize * min(FILTER_VALUES, num_values)
    coefficients_bytes = itemsize * num_values
    if coefficients_bytes > MAX_COEFFICIENTS_BYTES:
        # A file has some pages in memory, but they are released while rows are filtered.
        return max(TOUCHED_BYTES, rows_bytes)
    return coefficients_bytes + rows_bytes


def _filter_depth(rows: np.ndarray) -> None:
    """Filter some rows (D, h, W) of all planes along the first axis, in place.

    They may be a view of a file, where a few rows bring many pages into memory. While scipy
    filters, no other thread can release the pages, so it filters a copy, which is made of a few
    planes at a time.
    """
    copied_rows = np.empty_like(rows)
    for start in range(0, len(rows), COPIED_PLANES):
        planes = slice(start, start + COPIED_PLANES)
        copied_rows[planes] = rows[planes]
        release_pages()
    filtered_rows = spline_filter1d(copied_rows, CUBIC, axis=0, mode="nearest")
    # Freed before `rows` are written, whose pages then come into memory.
    del copied_rows
    for start in range(0, len(rows), COPIED_PLANES):
        planes = slice(start, start + COPIED_PLANES)
        rows[planes] = filtered_rows[planes]
        release_pages()
