"""Synthetic scans: a stored image with exact labels from a specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.anatomy import draw_anatomy
from medseg.phantom.scanner import body_bounds_mm, padding_mask, paint_table, place_scan, reconstruct, sample
from medseg.phantom.spec import PhantomSpec
from medseg.phantom.tissue import draw_model

_SLICES_AT_ONCE = 32
# Smaller pieces of a lung, cut off its thin edges by the voxel grid, are removed.
_MIN_PIECE_ML = 1.0


class Phantom(NamedTuple):
    """A scan and its exact labels on one grid.

    Attributes:
        image_hu: int16 (D, H, W).
        labels: uint8 (D, H, W): 1 left lung, 2 right lung.
        organs: uint8 (D, H, W): 1 left lung, 2 right lung, 3 heart, 4 spine.
        grid: Grid of the voxels, in storage order.
    """

    image_hu: NDArray[np.int16]
    labels: NDArray[np.uint8]
    organs: NDArray[np.uint8]
    grid: VoxelGrid


def make_phantom(spec: PhantomSpec) -> Phantom:
    """Make a phantom.

    Args:
        spec: The case.

    Returns:
        Image, labels and grid; a voxel belongs to a label that covers more than half of its volume.
    """
    anatomy = draw_anatomy(spec)
    scan = place_scan(spec, anatomy)
    lattice = scan.lattice(spec.model_spacing_mm, body_bounds_mm(spec, anatomy))
    model, rng = draw_model(spec, anatomy, lattice), spec.rng("noise")
    grid, shape = scan.grid, scan.grid.shape
    image = np.empty(shape, dtype=np.int16)
    labels, organs = np.zeros(shape, dtype=np.uint8), np.zeros(shape, dtype=np.uint8)
    outside_circle = padding_mask(grid)
    support_mm = (122 + 1.1 * spec.fat_mm) if spec.is_prone else (125 + 0.8 * spec.fat_mm)
    for start in range(0, shape[0], _SLICES_AT_ONCE):
        planes = slice(start, min(start + _SLICES_AT_ONCE, shape[0]))
        hu = sample(model.image_hu, lattice, scan, planes, -1000)
        if spec.has_table:
            paint_table(hu, spec, scan, support_mm, planes)
        reconstruct(hu, spec, scan, rng)
        if spec.padding_hu is not None:
            hu[:, outside_circle] = spec.padding_hu
        image[planes] = np.rint(np.clip(hu, -32768, 3071))
        for target, field, values in ((labels, model.lungs, (1, 2)), (organs, model.organs, (3, 4))):
            share = sample(field, lattice, scan, planes, 0)
            if spec.padding_hu is not None:
                share[:, outside_circle] = 0
            target[planes] = np.where(share > 50, values[0], np.where(share < -50, values[1], 0))
    _drop_crumbs(labels, float(np.prod(spec.spacing_mm)))
    np.copyto(organs, labels, where=labels > 0)
    flips = (spec.flips[0] != spec.is_feet_first, spec.flips[1], spec.flips[2])
    axes = tuple(axis for axis in range(3) if flips[axis])

    def stored(array: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(np.flip(array, axes))

    return Phantom(stored(image), stored(labels), stored(organs), grid.reoriented((0, 1, 2), flips))


def _drop_crumbs(labels: NDArray[np.uint8], voxel_mm3: float) -> None:
    """Clear the small pieces of each lung in place; the largest piece stays."""
    for value, window in enumerate(ndimage.find_objects(labels, max_label=2), start=1):
        if window is not None:
            part = labels[window]
            pieces, _ = ndimage.label(part == value)
            sizes = np.bincount(pieces.ravel())
            is_crumb = sizes * voxel_mm3 < 1000 * _MIN_PIECE_ML
            is_crumb[[0, int(np.argmax(sizes[1:])) + 1]] = False
            part[is_crumb[pieces]] = 0
