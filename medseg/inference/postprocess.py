"""Clean masks: parts and holes.

A part is what hangs together over faces (6 neighbours). All work is done inside the mask's bounding box.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from medseg.geometry.box import VoxelBox

COUNTED_AT_ONCE = 2**22


def keep_large_parts(mask: np.ndarray, min_fraction: float = 1.0) -> np.ndarray:
    """Keep the largest part and every part of at least a fraction of its size.

    Of several largest parts of equal size all are kept. An empty mask stays empty.

    Args:
        mask: Boolean mask (D, H, W).
        min_fraction: Least size of a kept part, as a share of the largest, in (0, 1].

    Returns:
        New boolean mask.
    """
    result = np.zeros_like(mask, dtype=bool)
    box = VoxelBox.from_mask(mask)
    if box is None:
        return result
    parts, sizes = _parts(mask[box.slices()])
    result[box.slices()] = (sizes >= min_fraction * sizes.max())[parts]
    return result


def gas_parts(mask: np.ndarray, is_gas: np.ndarray) -> np.ndarray:
    """Find the parts more than half of whose voxels are gas: their median lies below the bound of gas.

    Args:
        mask: Boolean mask (D, H, W).
        is_gas: Boolean (D, H, W): which voxels lie below the bound.

    Returns:
        New boolean mask of those parts.
    """
    parts, sizes = _parts(mask)
    num_gas = _sizes(parts, len(sizes), where=is_gas)
    return (2 * num_gas > sizes)[parts]


def fill_holes(mask: np.ndarray) -> np.ndarray:
    """Fill cavities that the mask encloses on all sides, in 3D; a cavity open to the volume's border stays open.

    Args:
        mask: Boolean mask (D, H, W).

    Returns:
        New boolean mask.
    """
    result = np.array(mask, dtype=bool)
    box = VoxelBox.from_mask(mask)
    if box is None:
        return result
    inner = result[box.slices()]
    # A cavity cannot touch the faces of the bounding box: the background parts that do are the outside.
    parts, num_parts = ndimage.label(~inner)
    is_cavity = np.ones(num_parts + 1, dtype=bool)
    is_cavity[0] = False
    for axis in range(3):
        for end in (0, -1):
            is_cavity[np.unique(parts.take(end, axis=axis))] = False
    inner |= is_cavity[parts]
    return result


def _parts(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the parts of a mask from 1; their sizes by number, 0 for the background."""
    parts, num_parts = ndimage.label(mask)
    return parts, _sizes(parts, num_parts + 1)


def _sizes(parts: np.ndarray, num: int, where: np.ndarray | None = None) -> np.ndarray:
    """Voxels of each part, of all or of those `where` is true; 0 for the background."""
    sizes = np.zeros(num, dtype=np.int64)
    # Slice by slice: `bincount` makes eight bytes of each voxel.
    step = max(1, COUNTED_AT_ONCE // max(1, parts[0].size)) if len(parts) else 1
    for start in range(0, len(parts), step):
        numbers = parts[start : start + step]
        sizes += np.bincount((numbers if where is None else numbers[where[start : start + step]]).reshape(-1), minlength=num)
    sizes[0] = 0
    return sizes
