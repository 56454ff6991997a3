"""Polygons around masks, for the writer of RTSTRUCT, and masks of polygons, for its reader.

Outlines are found by marching squares. RTSTRUCT has no holes, so each hole is joined to the outline
around it by a keyhole: the polygon runs along a line to the hole, around the hole, and back along
the same line. Points are (row, column) in pixels; whole numbers are pixel centres.
"""

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from contourpy import FillType, contour_generator
from scipy.spatial import cKDTree

# Pixel centres nearer than this to an outline count as inside. Some programs draw through the
# centres of the outermost pixels.
EDGE_PX = 1e-3

# Number of points of an outline that are tried as the end of a keyhole: the nearest ones to each
# point of the hole. Every outline has at least four points.
NUM_NEIGHBOURS = 4


def outlines(mask: np.ndarray) -> list[np.ndarray]:
    """Trace each part of a mask, midway between pixels inside and outside.

    Pixels that touch at a corner alone may count as one part or as two; filling the outlines
    restores the mask either way.

    Args:
        mask: Boolean (H, W), not empty.

    Returns:
        A closed polygon for each part, (N, 2) in (row, column), the last point not repeated, with
        its holes joined to it by keyholes.
    """
    pixels = np.argwhere(mask)
    first_row, first_column = pixels.min(axis=0)
    last_row, last_column = pixels.max(axis=0)
    inner = mask[first_row : last_row + 1, first_column : last_column + 1]
    # A border of background closes the outlines at the edge of the slice.
    box = np.pad(inner, 1)
    box_start = (first_row - 1, first_column - 1)
    generator = contour_generator(
        z=box.astype(np.float32), name="serial", fill_type=FillType.OuterOffset
    )
    # The area with values from 0.5 to 2; no value reaches 2. For each part: the points of all its
    # rings in one array, and the index at which each ring begins, then that at which the last ends.
    filled: Any = generator.filled(0.5, 2.0)
    polygons = []
    for points, ring_bounds in zip(*filled, strict=True):
        rings = []
        for start, stop in pairwise(ring_bounds):
            ring_xy = points[start : stop - 1]  # the last point repeats the first
            ring = ring_xy[:, ::-1]
            rings.append(ring + box_start)  # from the padded box to the slice
        # The first ring is the outline, the others are its holes. They are joined from left to
        # right, so that a hole may be joined to an earlier one.
        polygon, *holes = rings
        holes.sort(key=_left_end)
        for hole in holes:
            index, hole_index = _keyhole(polygon, hole)
            # The polygon up to the keyhole, the hole around to its first point, and the rest of the
            # polygon. The points at both ends of the keyhole are passed twice.
            around_hole = np.roll(hole, -hole_index, axis=0)
            hole_end = hole[hole_index : hole_index + 1]
            polygon = np.concatenate([polygon[: index + 1], around_hole, hole_end, polygon[index:]])
        polygons.append(_corners(polygon))
    return polygons


def _left_end(ring: np.ndarray) -> float:
    """Find the lowest column of a ring (N, 2)."""
    return float(ring[:, 1].min())


def _keyhole(polygon: np.ndarray, hole: np.ndarray) -> tuple[int, int]:
    """Choose a point of a polygon and one of its hole that are near each other.

    No pixel centre is on the line between them, if that is possible. Programs do not agree whether
    a centre on a line that a polygon runs along twice is inside.

    Args:
        polygon: Polygon (N, 2), points midway between two pixels.
        hole: Polygon (M, 2) within it.

    Returns:
        Index of the point in `polygon` and in `hole`.
    """
    # Both (M, NUM_NEIGHBOURS): for each point of the hole the nearest points of the polygon.
    distances, neighbours = cKDTree(polygon).query(hole, k=NUM_NEIGHBOURS)
    by_distance = distances.argsort(axis=None)
    hole_points, ranks = np.unravel_index(by_distance, distances.shape)
    points = neighbours[hole_points, ranks]
    pairs = list(zip(points.tolist(), hole_points.tolist(), strict=True))
    for point, hole_point in pairs:
        if not _meets_a_centre(polygon[point], hole[hole_point]):
            return point, hole_point
    return pairs[0]


def _meets_a_centre(start: np.ndarray, stop: np.ndarray) -> bool:
    """Whether a pixel centre is on the line between two points that are midway between pixels."""
    # In half pixels: all coordinates are whole, and both coordinates of a pixel centre are even.
    first = (2 * start).astype(int)
    offset = (2 * (stop - start)).astype(int)
    # The points with whole coordinates divide the line into as many equal steps as the greatest
    # common divisor of its two extents.
    num_steps = np.gcd(offset[0], offset[1])
    step = offset // num_steps
    points = first + np.arange(num_steps + 1)[:, None] * step
    is_centre = (points % 2 == 0).all(axis=1)
    return bool(is_centre.any())


def _corners(polygon: np.ndarray) -> np.ndarray:
    """Drop the points of a closed polygon on the straight line between their neighbours."""
    previous_points = np.roll(polygon, 1, axis=0)
    next_points = np.roll(polygon, -1, axis=0)
    y_before, x_before = (polygon - previous_points).T
    y_after, x_after = (next_points - polygon).T
    # Parallel steps have the cross product 0; coordinates in half pixels make it exact.
    is_corner = y_before * x_after != x_before * y_after
    return np.asarray(polygon[is_corner])


def fill(polygons: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Fill polygons by the even-odd rule: a polygon within another is a hole.

    A pixel is inside where an odd number of edges is on one side of its centre. The two passes of a
    keyhole count twice, and so cancel.

    Args:
        polygons: Closed polygons, each (N, 2) in (row, column).
        shape: Rows and columns of the slice.

    Returns:
        Mask (H, W) of the pixels whose centre is inside or on an outline.
    """
    # First and last point (N, 2) of each edge.
    starts = np.concatenate(polygons)
    stops = np.concatenate([np.roll(polygon, -1, axis=0) for polygon in polygons])
    # Start and stop (row, column) of the box around the polygons; the box is empty if they lie
    # outside the slice.
    low = np.floor(starts.min(axis=0)).clip(0, shape).astype(int)
    high = np.ceil(starts.max(axis=0) + 1).clip(low, shape).astype(int)
    mask = np.zeros(shape, bool)
    # A view: pixels that are set in the box are set in the mask.
    box = mask[low[0] : high[0], low[1] : high[1]]
    height, width = box.shape
    # The polygons are moved a little in four directions: a pixel centre on an outline is then
    # inside at least once.
    for shift in itertools.product((EDGE_PX, -EDGE_PX), repeat=2):
        box |= _inside(starts - low + shift, stops - low + shift, (height, width))
    return mask


def _inside(starts: np.ndarray, stops: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Find the pixels whose centre is inside closed polygons.

    An odd number of edges crosses the row of such a centre to its left.

    Args:
        starts: First points (N, 2) of the edges, (row, column).
        stops: Their last points (N, 2).
        shape: Rows and columns.

    Returns:
        Boolean mask of that shape.
    """
    height, width = shape
    # The rows whose line of centres an edge crosses. A line through the end with the smaller y
    # counts, and a line through the other end does not: a point that two edges share counts once.
    y_starts, y_stops = starts[:, 0], stops[:, 0]
    first_rows = np.ceil(np.minimum(y_starts, y_stops)).clip(0, height).astype(int)
    stop_rows = np.ceil(np.maximum(y_starts, y_stops)).clip(0, height).astype(int)
    num_rows = stop_rows - first_rows
    # From here on, arrays have one entry for each crossing of an edge with a row, edge by edge.
    edges = np.repeat(np.arange(len(starts)), num_rows)
    # Number of each crossing within its edge, from 0: its number among all crossings, less the
    # number of crossings of earlier edges.
    num_before = np.cumsum(num_rows) - num_rows
    numbers = np.arange(len(edges)) - num_before[edges]
    rows = first_rows[edges] + numbers
    y_start, x_start = starts[edges].T
    y_stop, x_stop = stops[edges].T
    # Where on the edge the crossing is: 0 at its first point, 1 at its last.
    share = (rows - y_start) / (y_stop - y_start)
    x_crossing = x_start + share * (x_stop - x_start)
    # The first pixel right of the crossing; `width` where there is none, in a column of its own.
    columns = np.ceil(x_crossing).clip(0, width).astype(int)
    num_columns = width + 1
    crossings = np.bincount(rows * num_columns + columns, minlength=height * num_columns)
    crossings = crossings.reshape(height, num_columns)
    num_left = crossings[:, :width].cumsum(axis=1)
    return np.asarray(num_left % 2 == 1)
