"""Post-processing of masks and label maps: small components, gas components and holes.

A component is connected over faces (6 neighbours). Masks are processed in slabs along z: component
numbers take four bytes a voxel, and only those of one slab are in memory, whatever the size of the
mask.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from medseg.geometry.grid import VoxelBox

# A region of 2 l at 1 mm is one slab and is numbered once; the slabs of larger masks are numbered
# again when they are needed.
SLAB_VOXELS = 2**25
COUNTED_AT_ONCE = 2**16

Planes = Callable[[slice], np.ndarray]
"""Returns the planes of a boolean volume, (d, H, W), for a range of z."""
Part = Callable[[tuple[slice, slice, slice]], np.ndarray]
"""Returns a part (d, h, w) of a boolean volume."""


class Rejection(NamedTuple):
    """A reason to remove a component: more than a share of its voxels lies in a mask.

    Attributes:
        where: The mask.
        share: Largest share in a kept component.
    """

    where: Part
    share: float


class Components:
    """Connected components of a mask, numbered from 1; 0 is the background.

    Attributes:
        counts: For each mask to count, its number of voxels in each component, by the component's
            number; 0 is the background.
        is_open: Whether the component reaches a face of the volume; true for the background.
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
        pairs = []
        open_numbers = []
        # Of each mask, the counts of each slab; the first one is that of the background.
        counts: list[list[np.ndarray]] = [[np.zeros(1, np.int64)] for _ in counted]
        num_given = 0
        # Numbers of the last plane of the slab before.
        below = np.zeros((height, width), np.int64)
        for planes in self._slabs:
            numbers, num_new = ndimage.label(mask(planes))
            self._last = planes, numbers
            for slab_counts, where in zip(counts, counted, strict=True):
                is_counted = where(planes) if where is not None else None
                slab_counts.append(_count(numbers, num_new, is_counted))
            faces = [numbers[:, 0], numbers[:, -1], numbers[:, :, 0], numbers[:, :, -1]]
            if planes.start == 0:
                faces.append(numbers[0])
            if planes.stop == depth:
                faces.append(numbers[-1])
            open_numbers += [_shift(np.unique(face), num_given) for face in faces]
            first = _shift(numbers[0], num_given)
            touches = (below > 0) & (first > 0)
            pairs.append(np.unique(np.stack([below[touches], first[touches]]), axis=1))
            below = _shift(numbers[-1], num_given)
            num_given += num_new
            self._offsets.append(num_given)
        self._component_of = _join(num_given + 1, np.concatenate(pairs, axis=1))
        # Float64 sums of counts are exact up to 2**53.
        self.counts = [
            np.bincount(self._component_of, np.concatenate(slab_counts)).astype(np.int64)
            for slab_counts in counts
        ]
        self.is_open = np.zeros(int(self._component_of.max()) + 1, dtype=bool)
        self.is_open[0] = True
        self.is_open[self._component_of[np.concatenate(open_numbers)]] = True

    def where(self, is_chosen: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield, slab by slab, the planes and the voxels of the chosen components in them.

        Args:
            is_chosen: Boolean, by the component's number.
        """
        if not is_chosen.any():
            return
        # From the end: the slab that was numbered last is still in memory.
        for index, planes in reversed(list(enumerate(self._slabs))):
            last_planes, numbers = self._last
            if planes != last_planes:
                numbers, _ = ndimage.label(self._mask(planes))
            # Numbers of a slab start at 1 again; 0 is the background in all of them.
            start, stop = self._offsets[index] + 1, self._offsets[index + 1] + 1
            component_of = self._component_of[start:stop]
            yield planes, np.concatenate([is_chosen[:1], is_chosen[component_of]])[numbers]


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
        # Planes of the box are asked for; the mask is one of the whole volume.
        return lambda planes: where((slice(z.start + planes.start, z.start + planes.stop), y, x))

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
    is_removed[0] = False
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
    # Plane by plane: a mask of all voxels would be a second volume.
    footprint = np.zeros(labels.shape[1:], dtype=bool)
    filled = []
    for z in range(len(labels)):
        is_in = _mask_of(labels, value, z)
        if is_in.any():
            filled.append(z)
            footprint |= is_in
    box = VoxelBox.from_mask(footprint[None])
    if box is None:
        return None
    return VoxelBox((filled[0], *box.start[1:]), (filled[-1] + 1, *box.stop[1:]))


def _mask_of(labels: np.ndarray, value: int | Sequence[int], planes: slice | int) -> np.ndarray:
    """Voxels of a label, or of several, in a range of planes."""
    values = [value] if isinstance(value, int) else value
    if len(values) == 1:
        return np.asarray(labels[planes] == values[0])
    return np.isin(labels[planes], values)


def _shift(numbers: np.ndarray, offset: int) -> np.ndarray:
    """Turn the numbers of one slab into numbers of all slabs; 0 stays."""
    return np.where(numbers > 0, numbers.astype(np.int64) + offset, 0)


def _count(numbers: np.ndarray, num: int, where: np.ndarray | None = None) -> np.ndarray:
    """Count the voxels of each component from 1 to `num`, all or those where `where` is true."""
    sizes = np.zeros(num + 1, dtype=np.int64)
    # Some planes at a time: `bincount` converts to eight bytes a voxel.
    step = max(1, COUNTED_AT_ONCE // numbers[0].size)
    for start in range(0, len(numbers), step):
        part = numbers[start : start + step]
        if where is not None:
            part = part[where[start : start + step]]
        sizes += np.bincount(part.reshape(-1), minlength=num + 1)
    return sizes[1:]


def _join(num: int, pairs: np.ndarray) -> np.ndarray:
    """Map the numbers 0 … `num` - 1 to components, so that touching pairs (2, P) share one.

    0 stays, and so does the order.
    """
    if not pairs.size:
        return np.arange(num)
    # Imported here: only masks of several slabs need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(pairs.shape[1], dtype=bool), (pairs[0], pairs[1])), shape=(num, num))
    _, names = connected_components(graph, directed=False)
    # The names are in any order: number them by their first appearance.
    _, first, component_of = np.unique(names, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[component_of]
