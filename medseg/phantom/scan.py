"""From a spec to a stored scan with labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.anatomy import draw_anatomy
from medseg.phantom.scanner import body_bounds_mm, padding_mask, paint_table, place_scan, reconstruct, sample
from medseg.phantom.spec import PhantomSpec
from medseg.phantom.tissue import draw_model

_SLICES_AT_ONCE = 32
_CRUMB_ML = 1.0


@dataclass(frozen=True)
class Phantom:
    """A scan and its exact labels on one grid.

    Attributes:
        image_hu: int16 (D, H, W).
        labels: uint8 (D, H, W): 1 left lung, 2 right lung.
        organs: uint8 (D, H, W): 1 left lung, 2 right lung, 3 heart, 4 spine.
        grid: Where the voxels lie, in storage order.
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
    model = draw_model(spec, anatomy, lattice)
    rng = spec.rng("noise")
    shape = scan.grid.shape
    image = np.empty(shape, dtype=np.int16)
    labels = np.zeros(shape, dtype=np.uint8)
    organs = np.zeros(shape, dtype=np.uint8)
    outside_circle = padding_mask(scan.grid)
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
        lungs = sample(model.lungs, lattice, scan, planes, 0)
        others = sample(model.organs, lattice, scan, planes, 0)
        if spec.padding_hu is not None:
            lungs[:, outside_circle] = 0
            others[:, outside_circle] = 0
        labels[planes] = np.where(lungs > 50, 1, np.where(lungs < -50, 2, 0))
        organs[planes] = np.where(others > 50, 3, np.where(others < -50, 4, 0))
    _drop_crumbs(labels, float(np.prod(spec.spacing_mm)))
    organs = np.where(labels > 0, labels, organs).astype(np.uint8)
    grid = scan.grid
    flips = (spec.flips[0] != spec.is_feet_first, spec.flips[1], spec.flips[2])
    if any(flips):
        axes = tuple(i for i in range(3) if flips[i])
        image = np.ascontiguousarray(np.flip(image, axes))
        labels = np.ascontiguousarray(np.flip(labels, axes))
        organs = np.ascontiguousarray(np.flip(organs, axes))
        grid = grid.reoriented((0, 1, 2), flips)
    return Phantom(image, labels, organs, grid)


def _drop_crumbs(labels: NDArray[np.uint8], voxel_mm3: float) -> None:
    """Clear pieces of a lung below 1 ml that the voxel grid has cut off its thin edges, in place."""
    for value, window in enumerate(ndimage.find_objects(labels, max_label=2), start=1):
        if window is None:
            continue
        part = labels[window]
        pieces, count = ndimage.label(part == value)
        if count < 2:
            continue
        sizes = np.bincount(pieces.ravel())
        crumbs = sizes * voxel_mm3 < 1000 * _CRUMB_ML
        crumbs[0] = False
        crumbs[np.argmax(sizes[1:]) + 1] = False
        part[crumbs[pieces]] = 0
