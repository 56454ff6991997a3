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
    sizes = np.zeros(num_parts + 1, dtype=np.int64)
    # Piece by piece: `bincount` makes eight bytes of each voxel.
    for start in range(0, parts.size, COUNTED_AT_ONCE):
        sizes += np.bincount(parts.reshape(-1)[start : start + COUNTED_AT_ONCE], minlength=num_parts + 1)
    sizes[0] = 0
    return parts, sizes
