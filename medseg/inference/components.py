"""Post-processing of label maps: remove components that are small or lie in a mask, fill holes.

A component is a set of voxels that are connected over faces (6 neighbours). Masks are processed in
slabs along z. Within a slab a run is a row of mask voxels along x without a gap. A smooth organ has
a hundred times fewer runs than voxels, so component numbers are stored by run, never by voxel.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from medseg.geometry.grid import VoxelBox

# Few enough voxels for the masks of a slab to stay in the processor's cache. In noise each voxel
# may be a run of its own: the runs of a slab then take at most 100 MB.
SLAB_VOXELS = 2**21

# Function that reads a mask (D, H, W): returns its planes (d, H, W) in a range of z.
ReadPlanes = Callable[[slice], np.ndarray]
# Function that reads a mask (D, H, W): returns its voxels (d, h, w) in ranges of z, y and x.
ReadPart = Callable[[tuple[slice, slice, slice]], np.ndarray]


class Rejection(NamedTuple):
    """A reason to remove a component: more than a share of its voxels lies in a mask.

    Attributes:
        mask: Reads any part of the mask of the whole volume.
        share: Largest share of a component's voxels that may lie in the mask, in [0, 1].
    """

    mask: ReadPart
    share: float


class Runs:
    """Runs of voxels along x in the mask of a slab, and the components that they form.

    The voxel (z, y, x) has the position `z * plane_size + y * row_size + x`. Rows of positions are
    one longer than those of the mask, so that the position after the last voxel of a row is not
    that of the first voxel of the next row.

    Attributes:
        mask: The mask (d, H, W).
        row_size: Number of positions of a row, W + 1.
        plane_size: Number of positions of a plane, H * row_size.
        starts: Position of the first voxel of each run, ascending.
        stops: Position after the last voxel of each run.
        component: For each run the number of its component in this slab, from 0.
        num_components: Number of components in this slab.
    """

    def __init__(self, mask: np.ndarray) -> None:
        """Find the runs of a mask (d, H, W), no axis empty."""
        self.mask = mask
        depth, height, width = mask.shape
        self.row_size = width + 1
        self.plane_size = height * self.row_size
        # True at the first voxel of a run, and at the position after its last one.
        is_edge = np.empty((depth, height, self.row_size), dtype=bool)
        is_edge[..., 0] = mask[..., 0]
        np.not_equal(mask[..., 1:], mask[..., :-1], out=is_edge[..., 1:-1])
        is_edge[..., -1] = mask[..., -1]
        edges = np.flatnonzero(is_edge)
        # Each run has both of its ends in the same row, so starts and stops alternate.
        self.starts, self.stops = edges[::2], edges[1::2]
        # In the last row of a plane, the position one row on lies in the next plane: no neighbour.
        has_next_row = self.starts % self.plane_size < self.plane_size - self.row_size
        in_next_row = _touching(self, np.flatnonzero(has_next_row), self, offset=self.row_size)
        in_next_plane = _touching(self, np.arange(len(self.starts)), self, offset=self.plane_size)
        pairs = np.concatenate([in_next_row, in_next_plane], axis=1)
        self.num_components, self.component = _join(len(self.starts), pairs)

    def count(self, where: np.ndarray | None = None) -> np.ndarray:
        """Count the voxels of each component.

        Args:
            where: Mask (d, H, W) of the voxels to count; None = all.

        Returns:
            Number of voxels of each component, int64, indexed by the component's number.
        """
        if where is None:
            lengths = self.stops - self.starts
            # With weights `bincount` sums in float64, which is exact up to 2**53.
            num_voxels = np.bincount(self.component, lengths, minlength=self.num_components)
            return num_voxels.astype(np.int64)
        voxels = np.flatnonzero(where & self.mask)
        # A row has one position more than voxels: the position of a voxel is its index plus the
        # number of rows before it.
        positions = voxels + voxels // self.mask.shape[2]
        # The run of a voxel is the last one that starts at or before it.
        runs = np.searchsorted(self.starts, positions, side="right") - 1
        return np.bincount(self.component[runs], minlength=self.num_components)

    def open_components(self, is_first: bool, is_last: bool) -> np.ndarray:
        """List the numbers of the components that reach a face of the volume.

        Args:
            is_first: Whether the slab holds the first plane of the volume.
            is_last: Whether the slab holds its last plane.
        """
        # Faces x = 0 and x = W - 1: a run that ends at W - 1 stops at the position W of its row.
        is_open = self.starts % self.row_size == 0
        is_open |= self.stops % self.row_size == self.row_size - 1
        # Faces y = 0 and y = H - 1.
        positions_in_plane = self.starts % self.plane_size
        is_open |= positions_in_plane < self.row_size
        is_open |= positions_in_plane >= self.plane_size - self.row_size
        # Faces z = 0 and z = D - 1.
        if is_first:
            is_open |= self.starts < self.plane_size
        if is_last:
            is_open |= self.starts >= (len(self.mask) - 1) * self.plane_size
        return np.unique(self.component[is_open])

    def draw(self, is_chosen: np.ndarray) -> np.ndarray:
        """Make the mask (d, H, W) of the chosen components.

        Args:
            is_chosen: Boolean, by the component's number.
        """
        chosen_runs = np.flatnonzero(is_chosen[self.component])
        _, positions = _ranges(self.starts[chosen_runs], self.stops[chosen_runs])
        # The inverse of `count`: the index of a voxel is its position minus the number of rows
        # before it.
        voxels = positions - positions // self.row_size
        drawn = np.zeros(self.mask.shape, dtype=bool)
        drawn.reshape(-1)[voxels] = True
        return drawn


class Components:
    """Connected components of a mask, numbered from 0.

    Attributes:
        counts: For each mask in `counted`, how many of its voxels each component holds: int64,
            indexed by the component's number.
        is_open: Whether a component reaches a face of the volume; indexed by its number.
    """

    def __init__(
        self, shape: tuple[int, ...], mask: ReadPlanes, counted: Sequence[ReadPlanes | None] = ()
    ) -> None:
        """Number the components slab by slab, then join those that touch across a border of slabs.

        Args:
            shape: Size of the volume (D, H, W), no axis empty.
            mask: Mask of the components. `voxels_of` reads the mask again, so it must not change.
            counted: Masks whose voxels are counted in each component; None = all voxels.
        """
        depth, height, width = shape
        slab_depth = max(1, SLAB_VOXELS // (height * width))
        self._mask = mask
        self._slabs = []  # range of planes of each slab
        for start in range(0, depth, slab_depth):
            self._slabs.append(slice(start, min(start + slab_depth, depth)))
        # A piece is a component of one slab. Pieces are numbered through all slabs: offset of the
        # slab plus number in the slab.
        self._offsets = [0]  # of each slab; the last entry becomes the number of all pieces
        piece_counts: list[list[np.ndarray]] = [[] for _ in counted]
        open_pieces: list[np.ndarray] = []
        # The empty pair list is for `concatenate`, which needs an array also for a single slab.
        touching_pieces = [np.zeros((2, 0), np.int64)]
        below: Runs | None = None
        for planes in self._slabs:
            runs = Runs(mask(planes))
            offset = self._offsets[-1]
            for counts, counted_mask in zip(piece_counts, counted, strict=True):
                mask_in_slab = None if counted_mask is None else counted_mask(planes)
                counts.append(runs.count(mask_in_slab))
            is_first, is_last = planes.start == 0, planes.stop == depth
            open_pieces.append(offset + runs.open_components(is_first, is_last))
            if below is not None:
                offset_below = self._offsets[-2]
                lower, upper = _pairs_across(below, runs)
                touching_pieces.append(np.stack([offset_below + lower, offset + upper]))
            self._offsets.append(offset + runs.num_components)
            below = runs
        # `_component_of` maps the number of a piece to that of its component.
        num_pieces = self._offsets[-1]
        num_components, self._component_of = _join(
            num_pieces, np.concatenate(touching_pieces, axis=1)
        )
        self.counts = []
        for counts in piece_counts:
            counts_of_pieces = np.concatenate(counts)
            # The sums are float64 and exact, see `Runs.count`.
            sums = np.bincount(self._component_of, counts_of_pieces, minlength=num_components)
            self.counts.append(sums.astype(np.int64))
        self.is_open = np.zeros(num_components, dtype=bool)
        self.is_open[self._component_of[np.concatenate(open_pieces)]] = True

    def voxels_of(self, is_chosen: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Find the voxels of chosen components, slab by slab.

        Args:
            is_chosen: Boolean, by the component's number.

        Yields:
            Range of planes of each slab with chosen voxels, and the mask (d, H, W) of these voxels.
        """
        for index, planes in enumerate(self._slabs):
            pieces = slice(self._offsets[index], self._offsets[index + 1])
            is_chosen_here = is_chosen[self._component_of[pieces]]
            if is_chosen_here.any():
                yield planes, Runs(self._mask(planes)).draw(is_chosen_here)


def remove_components(
    labels: np.ndarray,
    value: int | Sequence[int],
    rejections: Sequence[Rejection] = (),
    min_fraction: float = 0.0,
    min_voxels: float = 0.0,
) -> list[int]:
    """Remove a label's rejected components, then its small ones.

    The label map is changed in place. Below, the largest component is the largest that is not
    rejected; several of equal size are all kept.

    Args:
        labels: Label map (D, H, W).
        value: The label, or the labels of a region. A component of a region may hold voxels of
            several labels.
        rejections: Reasons to remove a component; a single one is enough.
        min_fraction: Smallest size of a kept component, as a share of the largest, in [0, 1].
        min_voxels: Smallest size of a kept component, in voxels; the largest is kept anyway.

    Returns:
        For each rejection the number of voxels in the components that it removes. A component with
        two reasons counts for both.
    """
    box = label_box(labels, value)
    if box is None:
        return [0] * len(rejections)
    z, y, x = box.slices()
    inner = labels[z, y, x]  # a view: writing to it changes the label map

    def planes_of(mask: ReadPart) -> ReadPlanes:
        """Make a function that reads a mask of the whole volume by planes of the box."""

        def read(planes: slice) -> np.ndarray:
            whole_planes = slice(z.start + planes.start, z.start + planes.stop)
            return mask((whole_planes, y, x))

        return read

    masks = [planes_of(rejection.mask) for rejection in rejections]
    components = Components(inner.shape, partial(_mask_of, inner, value), [None, *masks])
    sizes, *counts_in_masks = components.counts
    kept_sizes = sizes.copy()  # 0 for rejected components, which do not count as the largest
    num_rejected = []
    for rejection, num_in_mask in zip(rejections, counts_in_masks, strict=True):
        is_rejected = num_in_mask > rejection.share * sizes
        num_rejected.append(int(sizes[is_rejected].sum()))
        kept_sizes[is_rejected] = 0
    largest = kept_sizes.max()
    # The largest component is kept even if it is smaller than `min_voxels`.
    min_size = max(min_fraction * largest, min(min_voxels, largest))
    # The bound is at least 1 voxel, so that rejected components (size 0) are always removed.
    is_removed = kept_sizes < max(1.0, min_size)
    for planes, is_removed_voxel in components.voxels_of(is_removed):
        inner[planes][is_removed_voxel] = 0
    return num_rejected


def fill_holes(labels: np.ndarray, value: int) -> None:
    """Fill cavities that a label encloses on all sides, in 3D, in place.

    A cavity open to the volume's border stays open, and other labels inside a cavity stay.

    Args:
        labels: Label map (D, H, W).
        value: Value of the label in the map.
    """
    box = label_box(labels, value)
    if box is None:
        return
    inner = labels[box.slices()]

    def read_others(planes: slice) -> np.ndarray:
        """Read the mask of all voxels without the label."""
        return inner[planes] != value

    components = Components(inner.shape, read_others)
    # A cavity cannot touch a face of the bounding box: a component that does is outside.
    for planes, is_cavity in components.voxels_of(~components.is_open):
        is_background = inner[planes] == 0
        inner[planes][is_cavity & is_background] = value


def label_box(labels: np.ndarray, value: int | Sequence[int]) -> VoxelBox | None:
    """Find the smallest box around a label, or around several; None if they are absent."""
    return VoxelBox.around(_mask_of(labels, value, z) for z in range(len(labels)))


def _mask_of(labels: np.ndarray, value: int | Sequence[int], planes: slice | int) -> np.ndarray:
    """Make the mask of a label, or of several, in a range of planes or in one plane."""
    values = [value] if isinstance(value, int) else value
    if len(values) == 1:
        return np.asarray(labels[planes] == values[0])
    return np.isin(labels[planes], values)


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List the numbers of several ranges, one range after the other.

    For the ranges 3 … 4 and 7 … 9 these are 3, 4, 7, 8, 9.

    Args:
        start: First number of each range.
        stop: End of each range, exclusive; a range may be empty.

    Returns:
        For each number the index of its range (0, 0, 1, 1, 1), and the number itself.
    """
    lengths = stop - start
    ranges = np.repeat(np.arange(len(lengths)), lengths)
    # Place of the first number of each range in the list.
    first_places = np.cumsum(lengths) - lengths
    places_in_range = np.arange(len(ranges)) - first_places[ranges]
    return ranges, start[ranges] + places_in_range


def _touching(runs: Runs, chosen: np.ndarray, others: Runs, offset: int) -> np.ndarray:
    """List the pairs of runs whose voxels are neighbours at a given offset.

    Args:
        runs: Runs of a slab.
        chosen: Indices of some of them.
        others: Runs of the same or another slab, where neighbours are searched.
        offset: What to add to a position in `runs` for the position of its neighbour in `others`.

    Returns:
        Indices (2, P): of the chosen run and of its neighbour in each pair.
    """
    starts = runs.starts[chosen] + offset
    stops = runs.stops[chosen] + offset
    # Other runs touch a shifted run if they end after its start and start before its end. Since
    # runs are sorted and disjoint, the indices of those that touch it are `first` … `end` - 1.
    first = np.asarray(np.searchsorted(others.stops, starts, side="right"))
    end = np.asarray(np.searchsorted(others.starts, stops, side="left"))
    # If none touches it, `end` may be smaller than `first`; the maximum makes the range empty.
    chosen_places, neighbours = _ranges(first, np.maximum(first, end))
    return np.stack([chosen[chosen_places], neighbours])


def _pairs_across(below: Runs, above: Runs) -> np.ndarray:
    """List the pairs (2, P) of components that touch across the border of two slabs."""
    last_plane_start = (len(below.mask) - 1) * below.plane_size
    in_last_plane = np.flatnonzero(below.starts >= last_plane_start)
    # The last plane of `below` touches the first plane of `above`, whose positions start at 0.
    lower, upper = _touching(below, in_last_plane, above, offset=-last_plane_start)
    return np.stack([below.component[lower], above.component[upper]])


def _join(num_nodes: int, pairs: np.ndarray) -> tuple[int, np.ndarray]:
    """Find the connected components of a graph of runs, or of components of slabs.

    Args:
        num_nodes: Number of nodes.
        pairs: Nodes that touch, (2, P).

    Returns:
        Number of components, and the component of each node, from 0.
    """
    if not pairs.size:
        return num_nodes, np.arange(num_nodes)
    # Imported here: the import takes long, and nodes without a pair do not need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = (pairs[0], pairs[1])
    is_edge = np.ones(pairs.shape[1], dtype=bool)
    graph = coo_array((is_edge, edges), shape=(num_nodes, num_nodes))
    return connected_components(graph, directed=False)
