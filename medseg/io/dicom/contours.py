"""Contours of masks and filled polygons.

Outlines are found by marching squares; holes are joined to them by keyholes.
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

# Nearest points of an outline to try as the end of a keyhole. A hole and its outline have at least
# as many points.
NUM_NEIGHBOURS = 4


def outlines(mask: np.ndarray) -> list[np.ndarray]:
    """Trace each part of a mask, midway between pixels inside and outside.

    Pixels that touch at a corner alone may count as one part or as two; filling the outlines
    restores the mask either way.

    Args:
        mask: Boolean (H, W), not empty.

    Returns:
        A closed polygon for each part, (N, 2) in (row, column), the last point not repeated. Holes
        are joined to it by keyholes: the polygon runs to the hole, around it, and back along the
        same line.
    """
    pixels = np.argwhere(mask)
    low = pixels.min(axis=0)
    last_row, last_column = pixels.max(axis=0)
    inner = mask[low[0] : last_row + 1, low[1] : last_column + 1]
    # A border of background closes the outlines at the edge of the slice.
    box = np.pad(inner, 1)
    generator = contour_generator(
        z=box.astype(np.float32), name="serial", fill_type=FillType.OuterOffset
    )
    filled: Any = generator.filled(0.5, 2.0)
    parts = []
    for points, ends in zip(*filled, strict=True):
        rings = []
        for start, stop in pairwise(ends):
            # The last point repeats the first; contourpy gives x before y, in the padded box.
            rings.append(points[start : stop - 1, ::-1] + (low - 1))
        part = rings[0]
        for hole in sorted(rings[1:], key=lambda ring: float(ring[:, 1].min())):
            gate, start = _keyhole(part, hole)
            part = np.concatenate(
                [
                    part[: gate + 1],
                    np.roll(hole, -start, axis=0),
                    hole[start : start + 1],
                    part[gate:],
                ]
            )
        parts.append(_corners(part))
    return parts


def _keyhole(part: np.ndarray, hole: np.ndarray) -> tuple[int, int]:
    """Choose a point of a polygon and one of its hole that are near each other.

    No pixel centre is on the line between them, if that is possible. Programs do not agree whether
    a centre on a line that a polygon runs along twice is inside.

    Args:
        part: Polygon (N, 2), points midway between two pixels.
        hole: Polygon (M, 2) within it.

    Returns:
        Index of the point in `part` and in `hole`.
    """
    distances, nearest = cKDTree(part).query(hole, k=NUM_NEIGHBOURS)
    points, neighbours = np.unravel_index(distances.argsort(axis=None), distances.shape)
    pairs = list(zip(nearest[points, neighbours].tolist(), points.tolist(), strict=True))
    for point, hole_point in pairs:
        if not _meets_a_centre(part[point], hole[hole_point]):
            return point, hole_point
    return pairs[0]


def _meets_a_centre(start: np.ndarray, stop: np.ndarray) -> bool:
    """Whether a whole row and column lie on the line between two points midway between pixels."""
    # In half pixels: a centre has even coordinates.
    low = (2 * start).astype(int)
    step = (2 * (stop - start)).astype(int)
    num_steps = np.gcd(*step)
    points = low + np.arange(num_steps + 1)[:, None] * (step // num_steps)
    is_centre = (points % 2 == 0).all(axis=1)
    return bool(is_centre.any())


def _corners(ring: np.ndarray) -> np.ndarray:
    """Drop the points of a closed polygon on the straight line between their neighbours."""
    y_before, x_before = (ring - np.roll(ring, 1, axis=0)).T
    y_after, x_after = (np.roll(ring, -1, axis=0) - ring).T
    # Parallel steps have the cross product 0; coordinates in half pixels make it exact.
    is_corner = y_before * x_after != x_before * y_after
    return np.asarray(ring[is_corner])


def fill(polygons: Sequence[np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """Fill polygons by the even-odd rule: one within another is a hole, and keyholes cancel.

    Args:
        polygons: Closed polygons, each (N, 2) in (row, column).
        shape: Rows and columns of the slice.

    Returns:
        Mask (H, W) of the pixels whose centre is inside or on an outline.
    """
    starts = np.concatenate(polygons)
    stops = np.concatenate([np.roll(polygon, -1, axis=0) for polygon in polygons])
    low = np.floor(starts.min(axis=0)).clip(0, shape).astype(int)
    high = np.ceil(starts.max(axis=0) + 1).clip(low, shape).astype(int)
    mask = np.zeros(shape, bool)
    # A view: what is set in it is set in the mask.
    box = mask[low[0] : high[0], low[1] : high[1]]
    height, width = box.shape
    # Centres on an outline are inside after one of these shifts.
    for y_px, x_px in itertools.product((EDGE_PX, -EDGE_PX), repeat=2):
        shift = (y_px, x_px)
        box |= _inside(starts - low + shift, stops - low + shift, (height, width))
    return mask


def _inside(starts: np.ndarray, stops: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Find the pixels whose centre is inside closed polygons.

    The number of edges to the left of the centre, in its row, is odd.

    Args:
        starts: First points (N, 2) of the edges, (row, column).
        stops: Their last points (N, 2).
        shape: Rows and columns.

    Returns:
        Boolean mask of that shape.
    """
    height, width = shape
    # The rows whose centres an edge crosses: from its upper end on, without its lower end.
    upper = np.minimum(starts[:, 0], stops[:, 0])
    lower = np.maximum(starts[:, 0], stops[:, 0])
    first = np.ceil(upper).clip(0, height).astype(int)
    last = np.ceil(lower).clip(0, height).astype(int)
    counts = last - first
    # One entry for each crossing of an edge with a row.
    edges = np.repeat(np.arange(len(starts)), counts)
    # Of each crossing: the number of crossings of earlier edges, then its own among those of its
    # edge, whose first one lies in the first row.
    num_earlier = np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.arange(len(edges)) - num_earlier + first[edges]
    edge_starts, edge_stops = starts[edges], stops[edges]
    share = (rows - edge_starts[:, 0]) / (edge_stops[:, 0] - edge_starts[:, 0])
    crossings_px = edge_starts[:, 1] + share * (edge_stops[:, 1] - edge_starts[:, 1])
    # The first pixel right of the crossing; `width` where there is none.
    columns = np.ceil(crossings_px).clip(0, width).astype(int)
    crossings = np.bincount(rows * (width + 1) + columns, minlength=height * (width + 1))
    num_left = crossings.reshape(height, width + 1)[:, :-1].cumsum(axis=1)
    return np.asarray(num_left % 2 == 1)
