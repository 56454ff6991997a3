"""Post-processing of masks and label maps: small components, gas components and holes.

A component is connected over faces (6 neighbours). Masks are processed in slabs along z, and a slab
as runs: rows of voxels along x without a gap. A smooth organ has a hundred times fewer runs than
voxels, and no number of a component is stored for a voxel.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from medseg.geometry.grid import VoxelBox

# The masks of a slab stay in the cache of the processor, and noise in them, of which each voxel may
# be a run, takes at most 100 MB.
SLAB_VOXELS = 2**21

# Returns the planes of a boolean volume, (d, H, W), for a range of z.
Planes = Callable[[slice], np.ndarray]
# Returns a part (d, h, w) of a boolean volume.
Part = Callable[[tuple[slice, slice, slice]], np.ndarray]


class Rejection(NamedTuple):
    """A reason to remove a component: more than a share of its voxels lies in a mask.

    Attributes:
        where: The mask.
        share: Largest share in a kept component.
    """

    where: Part
    share: float


class Runs:
    """Runs of voxels along x in the mask of a slab, and the components that they form.

    Positions count through the slab in rows that are one voxel longer than those of the mask, so
    that the end of a row is no position in the next one.

    Attributes:
        mask: The mask (d, H, W).
        row: Length of a row of positions.
        plane: Positions of a plane.
        start: Position of the first voxel of each run, in their order.
        stop: Position after its last voxel.
        component: Number of its component in this slab, from 0.
        num_components: Components in this slab.
    """

    def __init__(self, mask: np.ndarray) -> None:
        """Find the runs of a mask (d, H, W), no axis empty."""
        self.mask = mask
        depth, height, width = mask.shape
        self.row = width + 1
        self.plane = height * self.row
        # True at the first voxel of a run, and at the position after its last one.
        is_edge = np.empty((depth, height, self.row), dtype=bool)
        is_edge[..., 0] = mask[..., 0]
        np.not_equal(mask[..., 1:], mask[..., :-1], out=is_edge[..., 1:-1])
        is_edge[..., -1] = mask[..., -1]
        edges = np.flatnonzero(is_edge)
        # Both ends of a run are in one row, so they alternate.
        self.start, self.stop = edges[::2], edges[1::2]
        # No run of the last row of a plane touches the first row of the next one.
        has_next_row = self.start % self.plane < self.plane - self.row
        pairs = [
            _touching(self, np.flatnonzero(has_next_row), self, self.row),
            _touching(self, np.arange(len(self.start)), self, self.plane),
        ]
        self.num_components, self.component = _join(len(self.start), np.concatenate(pairs, axis=1))

    def count(self, where: np.ndarray | None = None) -> np.ndarray:
        """Count the voxels of each component, all or those where a mask (d, H, W) is true."""
        if where is None:
            # Float64 sums of lengths are exact up to 2**53.
            lengths = np.bincount(self.component, self.stop - self.start, self.num_components)
            return lengths.astype(np.int64)
        voxels = np.flatnonzero(where & self.mask)
        positions = voxels + voxels // self.mask.shape[2]  # in rows that are one voxel longer
        runs = np.searchsorted(self.start, positions, side="right") - 1
        return np.bincount(self.component[runs], minlength=self.num_components)

    def open_components(self, is_first: bool, is_last: bool) -> np.ndarray:
        """List the components that reach a face of the volume.

        Args:
            is_first: Whether the first plane of the slab is that of the volume.
            is_last: Whether its last plane is.
        """
        # The faces left and right, then those in front and behind, then those below and above.
        is_open = self.start % self.row == 0
        is_open |= self.stop % self.row == self.row - 1
        in_plane = self.start % self.plane
        is_open |= (in_plane < self.row) | (in_plane >= self.plane - self.row)
        if is_first:
            is_open |= self.start < self.plane
        if is_last:
            is_open |= self.start >= (len(self.mask) - 1) * self.plane
        return np.unique(self.component[is_open])

    def draw(self, is_chosen: np.ndarray) -> np.ndarray:
        """Make the mask (d, H, W) of the chosen components; `is_chosen` is by their number."""
        runs = np.flatnonzero(is_chosen[self.component])
        chosen = np.zeros(self.mask.shape, dtype=bool)
        _, positions = _ranges(self.start[runs], self.stop[runs])
        chosen.reshape(-1)[positions - positions // self.row] = True
        return chosen


class Components:
    """Connected components of a mask, numbered from 0.

    Attributes:
        counts: For each mask to count, its number of voxels in each component, by the component's
            number.
        is_open: Whether the component reaches a face of the volume.
    """

    def __init__(
        self, shape: tuple[int, ...], mask: Planes, counted: Sequence[Planes | None] = ()
    ) -> None:
        """Number the components slab by slab, then join those that touch across a border of slabs.

        Args:
            shape: Size of the volume (D, H, W), no axis empty.
            mask: Voxels of the components; `where` reads it again and must get the same answer.
            counted: Masks whose voxels are counted; None = all voxels.
        """
        depth, height, width = shape
        step = max(1, SLAB_VOXELS // (height * width))
        self._mask = mask
        self._slabs = [slice(start, min(start + step, depth)) for start in range(0, depth, step)]
        self._offsets = [0]  # numbers given before each slab
        slab_counts: list[list[np.ndarray]] = [[] for _ in counted]
        open_numbers: list[np.ndarray] = []
        pairs = [np.zeros((2, 0), np.int64)]
        below: Runs | None = None
        for planes in self._slabs:
            runs = Runs(mask(planes))
            offset = self._offsets[-1]
            for counts, where in zip(slab_counts, counted, strict=True):
                counts.append(runs.count(None if where is None else where(planes)))
            is_first, is_last = planes.start == 0, planes.stop == depth
            open_numbers.append(offset + runs.open_components(is_first, is_last))
            if below is not None:
                lower, upper = _pairs_across(below, runs)
                pairs.append(np.stack([self._offsets[-2] + lower, offset + upper]))
            self._offsets.append(offset + runs.num_components)
            below = runs
        num_components, self._component_of = _join(self._offsets[-1], np.concatenate(pairs, axis=1))
        self.counts = []
        for counts in slab_counts:
            sums = np.bincount(self._component_of, np.concatenate(counts), num_components)
            self.counts.append(sums.astype(np.int64))
        self.is_open = np.zeros(num_components, dtype=bool)
        self.is_open[self._component_of[np.concatenate(open_numbers)]] = True

    def where(self, is_chosen: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the planes of the slabs with chosen components, and the voxels of these in them.

        Args:
            is_chosen: Boolean, by the component's number.
        """
        for index, planes in enumerate(self._slabs):
            numbers = slice(self._offsets[index], self._offsets[index + 1])
            is_chosen_here = is_chosen[self._component_of[numbers]]
            if is_chosen_here.any():
                yield planes, Runs(self._mask(planes)).draw(is_chosen_here)


def remove_components(
    labels: np.ndarray,
    value: int | Sequence[int],
    rejections: Sequence[Rejection] = (),
    min_fraction: float = 0.0,
    min_voxels: float = 0.0,
) -> list[int]:
    """Remove a label's rejected components, then those that are small beside its largest.

    The label map is changed in place.
    Of several largest components of equal size all are kept.

    Args:
        labels: Label map (D, H, W).
        value: The label, or those of a region, whose components may hold several of them.
        rejections: Each removes components.
        min_fraction: Least size of a kept component, as a share of the largest, in [0, 1].
        min_voxels: Least size of a kept component in voxels; the largest is kept in any case.

    Returns:
        Number of voxels that each rejection speaks against, whichever removed them.
    """
    box = label_box(labels, value)
    if box is None:
        return [0] * len(rejections)
    inner = labels[box.slices()]
    z, y, x = box.slices()

    def planes_of(where: Part) -> Planes:
        """Make the planes of the box from a mask of the whole volume."""

        def read(planes: slice) -> np.ndarray:
            whole_planes = slice(z.start + planes.start, z.start + planes.stop)
            return where((whole_planes, y, x))

        return read

    counted = [planes_of(rejection.where) for rejection in rejections]
    mask = partial(_mask_of, inner, value)
    components = Components(inner.shape, mask, [None, *counted])
    sizes, *counts = components.counts
    left_sizes = sizes.copy()
    num_rejected = []
    for rejection, count in zip(rejections, counts, strict=True):
        is_rejected = count > rejection.share * sizes
        num_rejected.append(int(sizes[is_rejected].sum()))
        left_sizes[is_rejected] = 0
    # Rejected ones do not count as the largest. At least one voxel, so that they are removed.
    largest = left_sizes.max()
    is_removed = left_sizes < max(1.0, min_fraction * largest, min(min_voxels, largest))
    for planes, is_in in components.where(is_removed):
        inner[planes][is_in] = 0
    return num_rejected


def fill_holes(labels: np.ndarray, value: int) -> None:
    """Fill cavities that a label encloses on all sides, in 3D, in place.

    A cavity open to the volume's border stays open, and other labels inside a cavity stay.

    Args:
        labels: Label map (D, H, W).
        value: The label.
    """
    box = label_box(labels, value)
    if box is None:
        return
    inner = labels[box.slices()]
    # A cavity cannot touch the faces of the bounding box: background components that do are
    # outside.
    components = Components(inner.shape, lambda planes: inner[planes] != value)
    for planes, is_cavity in components.where(~components.is_open):
        inner[planes][is_cavity & (inner[planes] == 0)] = value


def label_box(labels: np.ndarray, value: int | Sequence[int]) -> VoxelBox | None:
    """Find the smallest box around a label, or around several; None if they are absent."""
    return VoxelBox.around(_mask_of(labels, value, z) for z in range(len(labels)))


def _mask_of(labels: np.ndarray, value: int | Sequence[int], planes: slice | int) -> np.ndarray:
    """Voxels of a label, or of several, in a range of planes."""
    values = [value] if isinstance(value, int) else value
    if len(values) == 1:
        return np.asarray(labels[planes] == values[0])
    return np.isin(labels[planes], values)


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the numbers of several ranges, one after the other.

    Returns:
        The range of each number, and the number.
    """
    lengths = stop - start
    ranges = np.repeat(np.arange(len(lengths)), lengths)
    # Place of the first number of each range in the list.
    firsts = np.cumsum(lengths) - lengths
    places_in_range = np.arange(len(ranges)) - firsts[ranges]
    return ranges, start[ranges] + places_in_range


def _touching(runs: Runs, chosen: np.ndarray, others: Runs, offset: int) -> np.ndarray:
    """List the pairs (2, P) of a chosen run and a run of others that share an x.

    Args:
        runs: Runs of a slab.
        chosen: Numbers of some of them.
        others: Runs of the same or another slab.
        offset: Distance from a position to its neighbour among the others.
    """
    starts = runs.start[chosen] + offset
    stops = runs.stop[chosen] + offset
    # Those that end after the start of the run and begin before its end, which follow each other.
    first = np.asarray(np.searchsorted(others.stop, starts, side="right"))
    last = np.asarray(np.searchsorted(others.start, stops, side="left"))
    ranges, neighbours = _ranges(first, np.maximum(first, last))
    return np.stack([chosen[ranges], neighbours])


def _pairs_across(below: Runs, above: Runs) -> np.ndarray:
    """List the pairs (2, P) of components that touch across the border of two slabs."""
    last_plane = (len(below.mask) - 1) * below.plane
    in_last_plane = np.flatnonzero(below.start >= last_plane)
    # The first plane of the slab above is the next one.
    lower, upper = _touching(below, in_last_plane, above, -last_plane)
    return np.stack([below.component[lower], above.component[upper]])


def _join(num: int, pairs: np.ndarray) -> tuple[int, np.ndarray]:
    """Map the numbers 0 … `num` - 1 to components, so that touching pairs (2, P) share one.

    Returns:
        Number of components, and the component of each number, from 0.
    """
    if not pairs.size:
        return num, np.arange(num)
    # Imported here: a mask without a voxel does not need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = (pairs[0], pairs[1])
    is_edge = np.ones(pairs.shape[1], dtype=bool)
    graph = coo_array((is_edge, edges), shape=(num, num))
    return connected_components(graph, directed=False)
