"""Clean masks: parts and holes.

A part is what hangs together over faces (6 neighbours). A mask is looked at slab by slab along z, so that numbers of parts, four bytes a
voxel, are held of one slab only, however large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy import ndimage

from medseg.geometry.box import VoxelBox

# A lung at 1 mm is one slab, whose parts are numbered once; of larger masks they are numbered again when they are asked for.
SLAB_VOXELS = 2**25
COUNTED_AT_ONCE = 2**22

Planes = Callable[[slice], np.ndarray]
"""Gives the planes of a boolean volume, (d, H, W), from a range of z."""


class Parts:
    """The parts of a mask, numbered from 1; 0 is what lies outside.

    Attributes:
        sizes: Voxels of each part by its number, 0 for the outside.
        marked: Those of them that are marked.
        is_open: Whether the part reaches a face of the volume; true for the outside.
    """

    def __init__(self, shape: tuple[int, ...], mask: Planes, marks: Planes | None = None) -> None:
        """Number the parts.

        Args:
            shape: Size of the volume (D, H, W), no axis empty.
            mask: Which voxels belong to parts; asked for again by `slabs`, where it must say the same.
            marks: Which voxels are to be counted in `marked`; none where None.
        """
        depth, height, width = shape
        step = max(1, SLAB_VOXELS // (height * width))
        self._mask = mask
        self._slabs = [slice(start, min(start + step, depth)) for start in range(0, depth, step)]
        self._before = [0]  # numbers given before each slab
        pairs, sizes, marked, open_numbers = [], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], []
        num, below = 0, np.zeros((height, width), np.int64)
        for planes in self._slabs:
            numbers, count = ndimage.label(mask(planes))
            self._last = planes, numbers
            sizes.append(_count(numbers, count))
            marked.append(np.zeros(count, np.int64) if marks is None else _count(numbers, count, marks(planes)))
            faces = [numbers[:, 0], numbers[:, -1], numbers[:, :, 0], numbers[:, :, -1]]
            faces += [numbers[0]] * (planes.start == 0) + [numbers[-1]] * (planes.stop == depth)
            open_numbers += [_global(np.unique(face), num) for face in faces]
            first = _global(numbers[0], num)
            both = (below > 0) & (first > 0)
            pairs.append(np.unique(np.stack([below[both], first[both]]), axis=1))
            below = _global(numbers[-1], num)
            num += count
            self._before.append(num)
        self._part_of = _joined(num + 1, np.concatenate(pairs, axis=1))
        num_parts = int(self._part_of.max()) + 1
        self.sizes = _summed(self._part_of, np.concatenate(sizes), num_parts)
        self.marked = _summed(self._part_of, np.concatenate(marked), num_parts)
        self.is_open = np.zeros(num_parts, dtype=bool)
        self.is_open[0] = True
        self.is_open[self._part_of[np.concatenate(open_numbers)]] = True

    def where(self, is_chosen: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Give, slab by slab, the planes and which of their voxels belong to a chosen part.

        Args:
            is_chosen: Boolean, by the part's number.
        """
        # The slab that was numbered last need not be numbered again.
        for index, planes in reversed(list(enumerate(self._slabs))):
            numbers = self._last[1] if self._last[0] == planes else ndimage.label(self._mask(planes))[0]
            part_of = self._part_of[self._before[index] + 1 : self._before[index + 1] + 1]
            yield planes, np.concatenate([is_chosen[:1], is_chosen[part_of]])[numbers]


def keep_large_parts(mask: np.ndarray, min_fraction: float = 1.0) -> np.ndarray:
    """Keep the largest part and every part of at least a fraction of its size.

    Of several largest parts of equal size all are kept. An empty mask stays empty.

    Args:
        mask: Boolean mask (D, H, W).
        min_fraction: Least size of a kept part, as a share of the largest, in (0, 1].

    Returns:
        New boolean mask.
    """
    result = np.array(mask, dtype=bool)
    remove_small_parts(result, True, min_fraction)
    return result


def gas_parts(mask: np.ndarray, is_gas: np.ndarray) -> np.ndarray:
    """Find the parts more than half of whose voxels are gas: their median lies below the bound of gas.

    Args:
        mask: Boolean mask (D, H, W).
        is_gas: Boolean (D, H, W): which voxels lie below the bound.

    Returns:
        New boolean mask of those parts.
    """
    result = np.zeros(mask.shape, dtype=bool)
    parts = Parts(mask.shape, mask.__getitem__, is_gas.__getitem__)
    for planes, is_part in parts.where(2 * parts.marked > parts.sizes):
        result[planes] = is_part
    return result


def remove_small_parts(labels: np.ndarray, value: int, min_fraction: float, is_gas: Planes | None = None) -> None:
    """Remove from a label the parts that are gas and, of the others, those that are small beside the largest, in place.

    Args:
        labels: Label map (D, H, W).
        value: The label.
        min_fraction: Least size of a kept part, as a share of the largest, in (0, 1].
        is_gas: Which voxels of `labels` lie below the bound of gas, by planes; None where nothing is gas.
    """
    box = label_box(labels, value)
    if box is None:
        return
    inner = labels[box.slices()]
    z, y, x = box.slices()
    gas = None if is_gas is None else lambda planes: is_gas(slice(z.start + planes.start, z.start + planes.stop))[:, y, x]
    parts = Parts(inner.shape, lambda planes: inner[planes] == value, gas)
    sizes = np.where(2 * parts.marked > parts.sizes, 0, parts.sizes)
    is_gone = sizes < max(1.0, min_fraction * sizes.max())
    is_gone[0] = False
    for planes, is_part in parts.where(is_gone):
        inner[planes][is_part] = 0


def fill_holes(labels: np.ndarray, value: int) -> None:
    """Fill cavities that a label encloses on all sides, in 3D, in place; a cavity open to the volume's border stays open.

    What other labels have taken within stays theirs.

    Args:
        labels: Label map (D, H, W).
        value: The label.
    """
    box = label_box(labels, value)
    if box is None:
        return
    inner = labels[box.slices()]
    # A cavity cannot touch the faces of the bounding box: the background parts that do are the outside.
    parts = Parts(inner.shape, lambda planes: inner[planes] != value)
    for planes, is_cavity in parts.where(~parts.is_open):
        inner[planes][is_cavity & (inner[planes] == 0)] = value


def label_box(labels: np.ndarray, value: int) -> VoxelBox | None:
    """Find the smallest box around a label, plane by plane: a mask of the whole would be a second volume; None without one."""
    rows, columns = (np.zeros(size, dtype=bool) for size in labels.shape[1:])
    held = []
    for z, plane in enumerate(labels):
        is_in = plane == value
        rows_here = is_in.any(axis=1)
        if rows_here.any():
            held.append(z)
            rows |= rows_here
            columns |= is_in.any(axis=0)
    if not held:
        return None
    (y, y_last), (x, x_last) = (np.flatnonzero(line)[[0, -1]].tolist() for line in (rows, columns))
    return VoxelBox((held[0], y, x), (held[-1] + 1, y_last + 1, x_last + 1))


def _global(numbers: np.ndarray, offset: int) -> np.ndarray:
    """Numbers of one slab as numbers of all; 0 stays."""
    return np.where(numbers > 0, numbers.astype(np.int64) + offset, 0)


def _count(numbers: np.ndarray, num: int, where: np.ndarray | None = None) -> np.ndarray:
    """Voxels of each part from 1 to `num`, of all or of those `where` is true."""
    sizes = np.zeros(num + 1, dtype=np.int64)
    # Some planes at a time: `bincount` makes eight bytes of each voxel.
    step = max(1, COUNTED_AT_ONCE // numbers[0].size)
    for start in range(0, len(numbers), step):
        part = numbers[start : start + step]
        sizes += np.bincount((part if where is None else part[where[start : start + step]]).reshape(-1), minlength=num + 1)
    return sizes[1:]


def _joined(num: int, pairs: np.ndarray) -> np.ndarray:
    """Number the parts anew, 0 … `num` - 1, so that pairs (2, P) that touch become one; 0 stays, the order too."""
    if not pairs.size:
        return np.arange(num)
    # Imported here: only masks of several slabs need it.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(pairs.shape[1], dtype=bool), (pairs[0], pairs[1])), shape=(num, num))
    _, names = connected_components(graph, directed=False)
    _, first, part_of = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[part_of]


def _summed(part_of: np.ndarray, counts: np.ndarray, num_parts: int) -> np.ndarray:
    """Add up the voxels of the numbers that are one part."""
    sums = np.zeros(num_parts, dtype=np.int64)
    np.add.at(sums, part_of, counts)
    return sums
