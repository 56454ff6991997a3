"""Scores of two masks: Dice, volumes and surface scores (NSD, HD95), weighted by area.

A surface element is a corner of voxels whose eight neighbouring voxel centres are neither all
inside nor all outside the mask. Its area is that of the marching-cubes triangles there. Distances
are measured between elements, in mm.

Source: Nikolov et al., Clinically applicable segmentation of head and neck anatomy (2021), and its
code, google-deepmind/surface-distance (Apache 2.0), whose numbers this module reproduces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from scipy.ndimage import distance_transform_edt

from medseg.geometry.grid import VoxelBox

if TYPE_CHECKING:  # scoring files needs no torch, whose import takes seconds
    import torch

Mask: TypeAlias = "np.ndarray | torch.Tensor"
SurfaceDistances = tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Pairs (distances, areas) of the elements of both surfaces: of the prediction, of the reference.

Distances, in mm and ascending, are those to the nearest element of the other surface; they are
infinite where the other mask is empty. Areas, in mm², follow the order of the distances.
"""


def dice(pred_mask: Mask, target_mask: Mask) -> float:
    """Measure the overlap of two masks, twice the intersection over the sum of the sizes.

    Two empty masks score 1, one empty mask 0.

    Args:
        pred_mask: Boolean, any shape; an array, or a tensor on any device.
        target_mask: Boolean, the same shape; likewise.

    Returns:
        Dice coefficient in [0, 1].

    Raises:
        ValueError: If the shapes differ.
    """
    if pred_mask.shape != target_mask.shape:
        raise ValueError(
            f"masks of one shape are needed, got {pred_mask.shape} and {target_mask.shape}"
        )
    total = _count(pred_mask) + _count(target_mask)
    if total == 0:
        return 1.0
    return 2.0 * _count(pred_mask & target_mask) / total


def _count(mask: Mask) -> int:
    """Count set voxels."""
    # NumPy cannot read the memory of a GPU. Arrays do not have `is_cuda`.
    if getattr(mask, "is_cuda", False):
        return int(mask.sum())
    # `count_nonzero` takes an eighth of the time of a sum.
    return int(np.count_nonzero(mask))


def dice_per_label(
    pred_labels: Mask, target_labels: Mask, values: Sequence[int]
) -> dict[int, float]:
    """Measure the Dice of several label values, on the device where the labels are.

    Used by validation in training. Empty masks score as in `dice`.

    Args:
        pred_labels: Integers, any shape.
        target_labels: Integers, the same shape; both arrays or both tensors on one device.
        values: Label values to score; a value that occurs nowhere scores 1.

    Returns:
        Dice by label value, in the order of `values`.

    Raises:
        ValueError: If the shapes differ.
    """
    return {value: dice(pred_labels == value, target_labels == value) for value in values}


def volume_ml(mask: np.ndarray, spacing_mm: tuple[float, float, float]) -> float:
    """Measure the volume of a mask by counting voxels.

    Args:
        mask: Boolean, (D, H, W).
        spacing_mm: Voxel spacing in mm, (z, y, x).

    Returns:
        Volume in ml.
    """
    return int(np.count_nonzero(mask)) * math.prod(spacing_mm) / 1000.0


# Marching-cubes classes: the distinct surfaces between eight voxel centres, up to rotation,
# reflection and swap of inside and outside. Each entry has the centres that are inside (bit
# 4*z + 2*y + x) and the normals (z, y, x) of the surface pieces; the length of a normal is the area
# of its piece in eighths of a face of the unit cube.
_PIECES: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...] = (
    (0b00000001, ((1, 1, 1),)),
    (0b00000011, ((2, 2, 0), (2, 2, 0))),
    (0b00000110, ((1, 1, 1), (1, 1, 1))),
    (0b00000111, ((4, 0, 0), (2, 2, 2), (1, 1, 1))),
    (0b00001111, ((4, 0, 0), (4, 0, 0))),
    (0b00010110, ((1, 1, 1), (1, 1, 1), (1, 1, 1))),
    (0b00010111, ((1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 1, 1))),
    (0b00011000, ((1, 1, 1), (1, 1, 1))),
    (0b00011001, ((0, 2, 2), (0, 2, 2), (1, 1, 1))),
    (0b00011011, ((1, 1, 1), (3, 3, 3), (0, 2, 2), (2, 0, 2))),
    (0b00011110, ((4, 0, 0), (1, 1, 1), (2, 2, 2), (1, 1, 1))),
    (0b00111100, ((2, 2, 0), (2, 2, 0), (2, 2, 0), (2, 2, 0))),
    (0b01101001, ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))),
)

# Spacings come from float32 headers; their rounding must not exclude an element exactly at the
# tolerance.
_TOLERANCE_SLACK_MM = 1e-5


@cache
def _normals_table() -> np.ndarray:
    """Absolute normals of the pieces of the 256 neighbourhoods, in faces of the unit cube.

    Returns:
        (256, 4, 3): neighbourhood, piece and axis (z, y, x). All calls return the same array, so it
        is read-only. Rows of pieces that a neighbourhood does not have are 0.
    """
    table = np.zeros((256, 4, 3))
    for inside, normals in _PIECES:
        bits = [inside >> bit & 1 for bit in range(8)]
        # C order of (z, y, x) is the order of the bits.
        corners = np.array(bits).reshape(2, 2, 2)
        pieces = np.zeros((4, 3))
        pieces[: len(normals)] = np.array(normals) / 8
        # All rotations and reflections of the cube: orders of the axes, and flips of each.
        for order in itertools.permutations(range(3)):
            for flips in itertools.product((1, -1), repeat=3):
                moved = corners.transpose(order)[:: flips[0], :: flips[1], :: flips[2]]
                # Bit i of the code is corner i, as in `inside`.
                code = int((moved.reshape(-1) << np.arange(8)).sum())
                # Flips do not change absolute normals. Several moves may lead to one code: their
                # areas are the same, so it does not matter which is written last.
                table[code] = pieces[:, order]
                # Inside and outside swapped: the same surface.
                table[255 - code] = pieces[:, order]
    table.setflags(write=False)
    return table


def area_table_mm2(spacing_mm: tuple[float, float, float]) -> np.ndarray:
    """Compute the area of surface inside each of the 256 neighbourhoods of eight voxel centres.

    Args:
        spacing_mm: Voxel spacing in mm, (z, y, x).

    Returns:
        Area in mm², (256,), indexed by the neighbourhood's code (bit 4*z + 2*y + x set = that
        corner is inside).
    """
    z_mm, y_mm, x_mm = spacing_mm
    # Area of the face of a voxel across each axis.
    face_areas_mm2 = np.array([y_mm * x_mm, z_mm * x_mm, z_mm * y_mm])
    # The component of a normal along an axis is the area of the piece projected onto the plane
    # across that axis, so it scales with the face of a voxel in that plane.
    normals_mm2 = _normals_table() * face_areas_mm2
    # The area of a piece is the length of its normal.
    piece_areas_mm2 = np.linalg.norm(normals_mm2, axis=-1)
    areas_mm2: np.ndarray = piece_areas_mm2.sum(axis=-1)
    return areas_mm2


def surface_distances(
    pred_mask: np.ndarray, target_mask: np.ndarray, spacing_mm: tuple[float, float, float]
) -> SurfaceDistances:
    """Measure the distance of each surface element of each mask from the other mask's surface.

    A mask that touches the edge of the volume has surface elements there. An empty mask has none.

    Args:
        pred_mask: Boolean, (D, H, W).
        target_mask: Boolean, the same shape.
        spacing_mm: Voxel spacing in mm, (z, y, x).

    Returns:
        The distances and areas in both directions.

    Raises:
        ValueError: If the shapes differ or are not three-dimensional.
    """
    if pred_mask.shape != target_mask.shape or pred_mask.ndim != 3:
        raise ValueError(
            "two masks (D, H, W) of one shape are needed, got "
            f"{pred_mask.shape} and {target_mask.shape}"
        )
    # There is no surface outside the joint bounding box, which takes less time and memory.
    box = VoxelBox.from_mask(pred_mask | target_mask)
    if box is None:
        return (np.empty(0), np.empty(0)), (np.empty(0), np.empty(0))
    bounds = box.slices()
    pred_elements, pred_areas_mm2 = _surface(pred_mask[bounds], spacing_mm)
    target_elements, target_areas_mm2 = _surface(target_mask[bounds], spacing_mm)
    from_pred = _sorted_distances(pred_elements, target_elements, pred_areas_mm2, spacing_mm)
    from_target = _sorted_distances(target_elements, pred_elements, target_areas_mm2, spacing_mm)
    return from_pred, from_target


def _surface(
    mask: np.ndarray, spacing_mm: tuple[float, float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Find the surface elements of a mask (D, H, W).

    Returns:
        Which corners of voxels are elements, (D+1, H+1, W+1), and the area of each element in mm²,
        in C order.
    """
    codes = _surface_codes(mask)
    # 0: all voxels around the corner are outside; 255: all are inside.
    is_element = (codes != 0) & (codes != 255)
    return is_element, area_table_mm2(spacing_mm)[codes[is_element]]


def _sorted_distances(
    elements: np.ndarray,
    other_elements: np.ndarray,
    areas_mm2: np.ndarray,
    spacing_mm: tuple[float, float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Sort the elements of one surface by distance from another.

    Returns distances in mm and areas in mm².

    Args:
        elements: Which corners are elements of the surface, (D+1, H+1, W+1).
        other_elements: Which corners are elements of the other surface, likewise.
        areas_mm2: Area of each element of the surface, in C order.
        spacing_mm: Voxel spacing in mm, (z, y, x).
    """
    distances_mm = _distances_mm(elements, other_elements, spacing_mm)
    order = np.argsort(distances_mm)
    return distances_mm[order], areas_mm2[order]


def nsd(distances: SurfaceDistances, tolerance_mm: float) -> float:
    """Compute the normalised surface Dice: the share of the surfaces within a tolerance.

    Two empty masks score 1, one empty mask 0.

    Args:
        distances: From `surface_distances`.
        tolerance_mm: Distance that still counts as agreement, in mm.

    Returns:
        Score in [0, 1].
    """
    total_mm2 = 0.0
    near_mm2 = 0.0
    for distances_mm, areas_mm2 in distances:
        is_near = distances_mm <= tolerance_mm + _TOLERANCE_SLACK_MM
        total_mm2 += float(areas_mm2.sum())
        near_mm2 += float(areas_mm2[is_near].sum())
    if total_mm2 == 0:
        return 1.0
    return near_mm2 / total_mm2


def hausdorff_mm(distances: SurfaceDistances, quantile: float = 0.95) -> float:
    """Compute the robust Hausdorff distance.

    It is the larger of the two directions' quantiles, weighted by area. Two empty masks have
    distance 0, one empty mask infinity.

    Args:
        distances: From `surface_distances`.
        quantile: Share of the surface within the returned distance, in (0, 1].

    Returns:
        Distance in mm.
    """
    return max(
        _weighted_quantile(distances_mm, areas_mm2, quantile)
        for distances_mm, areas_mm2 in distances
    )


def score_region(
    pred_mask: np.ndarray, target_mask: np.ndarray, spacing_mm: tuple[float, float, float]
) -> dict[str, float]:
    """Score one region of one case.

    Both masks empty: Dice and NSD 1, HD95 0. One empty: Dice and NSD 0, HD95 infinite.

    Args:
        pred_mask: Boolean, (D, H, W).
        target_mask: Boolean, the same shape.
        spacing_mm: Voxel spacing in mm, (z, y, x).

    Returns:
        `dice`, `nsd_1mm`, `nsd_2mm`, `hd95_mm`, `volume_pred_ml` and `volume_ref_ml`.

    Raises:
        ValueError: If the shapes differ or are not three-dimensional.
    """
    distances = surface_distances(pred_mask, target_mask, spacing_mm)
    return {
        "dice": dice(pred_mask, target_mask),
        "nsd_1mm": nsd(distances, 1.0),
        "nsd_2mm": nsd(distances, 2.0),
        "hd95_mm": hausdorff_mm(distances),
        "volume_pred_ml": volume_ml(pred_mask, spacing_mm),
        "volume_ref_ml": volume_ml(target_mask, spacing_mm),
    }


def _surface_codes(mask: np.ndarray) -> np.ndarray:
    """Code of the eight voxels around each corner of the voxels.

    (D+1, H+1, W+1) for a mask (D, H, W); bit 4*z + 2*y + x is set where that voxel is inside.
    """
    # One voxel outside on each side: corners on the edge of the volume have eight voxels too.
    padded = np.pad(np.asarray(mask, dtype=np.uint8), 1)
    shape = tuple(length - 1 for length in padded.shape)
    codes = np.zeros(shape, dtype=np.uint8)
    for bit, (z, y, x) in enumerate(itertools.product((0, 1), repeat=3)):
        codes |= padded[z : z + shape[0], y : y + shape[1], x : x + shape[2]] << np.uint8(bit)
    return codes


def _distances_mm(
    elements: np.ndarray, other_elements: np.ndarray, spacing_mm: tuple[float, float, float]
) -> np.ndarray:
    """Distance from each element of one surface, in C order, to the nearest element of another.

    It is infinite if the other surface is empty.
    """
    num_elements = np.count_nonzero(elements)
    if not other_elements.any():
        return np.full(num_elements, np.inf)
    # A k-d tree would be several times faster than this transform for two similar organs, but many
    # times slower where a prediction is noise or far from the reference. The transform returns
    # indices only: its distance map would take more memory.
    nearest_indices = distance_transform_edt(
        ~other_elements, sampling=spacing_mm, return_distances=False, return_indices=True
    )
    squared_mm2 = np.zeros(num_elements)
    indices = np.nonzero(elements)
    # Pythagoras, one axis after the other.
    for index, nearest_index, step_mm in zip(indices, nearest_indices, spacing_mm, strict=True):
        # `nearest_index` holds for each corner the index along this axis of its nearest element.
        offset_mm = (index - nearest_index[elements]) * step_mm
        squared_mm2 += offset_mm**2
    distances_mm: np.ndarray = np.sqrt(squared_mm2)
    return distances_mm


def _weighted_quantile(sorted_values: np.ndarray, weights: np.ndarray, quantile: float) -> float:
    """Smallest of some values for which all values up to it have at least a share of the weight.

    Args:
        sorted_values: Ascending values; without any the result is 0.
        weights: Weight of each value.
        quantile: The share, in (0, 1].
    """
    if len(sorted_values) == 0:
        return 0.0
    share = np.cumsum(weights) / weights.sum()
    index = int(np.searchsorted(share, quantile))
    # Rounding may make the last share less than 1, and so less than the quantile.
    index = min(index, len(sorted_values) - 1)
    return float(sorted_values[index])
