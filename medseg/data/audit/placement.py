"""Audit of the placement of a label map on its image: labels that are mirrored, turned or shifted.

A label map may have the grid of its image and still hold the voxels in another order, because it
was written from a flipped or transposed array. Headers do not show this, but the image does: its
values change more across the boundary of a correct label than across the same boundary moved aside.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from medseg.data.audit.finding import find
from medseg.findings import Finding
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import FACES
from medseg.task import AIR_HU

# Labels and image are read every STEP_MM; the boundary of the labels is compared with itself moved
# by MOVED_MM.
STEP_MM = 4.0
MOVED_MM = 12.0
MAX_HU = 400  # bone and metal would outweigh all other tissue
# Measured fits. Organs full of air in place: 2.2 to 3.8, mirrored: 0.7 to 1.8. Organs in soft
# tissue: 0.7 to 1.1 either way, vertebrae 1.5 to 1.8.
SURE_FIT = 2.0
LEAST_FIT = 1.5
LEAST_GAIN = 1.5
MIN_FACES = 200
# Distance in voxels within which edges of the image are searched, and the smallest shift that is
# reported; real labels are within 1.
SHIFT_REACH = 12
MIN_SHIFT = 3
MIN_SHIFT_MM = 2.0
# The change must exceed that at the labels' own edges by SHIFT_GAIN, and the median of all
# distances by SHIFT_SHARPNESS. Organs full of air shifted by 5 voxels: at least 4.3 and 4.0; edges
# that belong to other structures: up to 1.5 and 3. Organs in soft tissue stay below both.
SHIFT_GAIN = 2.0
SHIFT_SHARPNESS = 3.0
_AXES = ("head to feet", "back to front", "left to right")


def audit_placement(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> list[Finding]:
    """Find labels that fit the image much better when mirrored, or turned within the slices.

    Args:
        image_hu: Oriented image in HU, (D, H, W).
        labels: Label map on the same grid.
        grid: Grid of both.

    Returns:
        One error, or nothing; also nothing if the labels are too few or their edges too faint.
    """
    steps = [max(1, round(STEP_MM / step_mm)) for step_mm in grid.spacing_mm]
    part = tuple(slice(None, None, step) for step in steps)
    coarse = np.ascontiguousarray(labels[part])
    image = np.clip(image_hu[part], AIR_HU, MAX_HU).astype(np.float32)
    moves = []
    for step, step_mm in zip(steps, grid.spacing_mm, strict=True):
        moves.append(max(1, round(MOVED_MM / (step * step_mm))))
    # `_edge` looks at four voxels in a row.
    if min(coarse.shape) < 4 or _edge(coarse, image)[1] < MIN_FACES:
        return []
    fit = _fit(coarse, image, moves)
    if fit >= SURE_FIT:
        return []
    fits = {way: _fit(moved, image, moves) for way, moved in _other_placements(coarse)}
    best = max(fits, key=lambda way: fits[way])
    if fits[best] < max(LEAST_FIT, LEAST_GAIN * fit):
        return []
    return [find("misplaced_labels", way=best, best=fits[best], fit=fit)]


def _other_placements(labels: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the labels mirrored and turned in all ways that keep their shape, as views."""
    for count in (1, 2, 3):
        for axes in itertools.combinations(range(3), count):
            names = " and ".join(_AXES[axis] for axis in axes)
            yield f"mirrored {names}", np.flip(labels, axes)
    if labels.shape[1] == labels.shape[2]:
        turned = labels.swapaxes(1, 2)
        yield "transposed within the slices", turned
        yield "turned by 90 degrees within the slices", np.flip(turned, 1)
        yield "turned by -90 degrees within the slices", np.flip(turned, 2)
        yield "transposed within the slices and mirrored head to feet", np.flip(turned, 0)


def audit_shift(image_hu: np.ndarray, labels: np.ndarray, grid: VoxelGrid) -> list[Finding]:
    """Find labels that lie beside the edges of the image, by whole voxels along an axis.

    The image should change most where a line along the axis enters or leaves the labels. The labels
    are shifted if the strongest changes lie some voxels away, in the same direction for entering
    and leaving. If the directions are opposite, the labels are only too large or too small.

    Args:
        image_hu: Oriented image in HU, (D, H, W).
        labels: Label map on the same grid.
        grid: Grid of both.
    """
    shifts = []
    for axis in range(3):
        # Every voxel along the axis, every few millimetres beside it.
        steps = [max(1, round(STEP_MM / step_mm)) for step_mm in grid.spacing_mm]
        steps[axis] = 1
        part = tuple(slice(None, None, step) for step in steps)
        lines = np.moveaxis(image_hu[part], axis, -1)
        inside = np.moveaxis(labels[part] != 0, axis, -1)
        shift_in = _edge_shift(lines, inside[..., 1:] & ~inside[..., :-1])
        shift_out = _edge_shift(lines, inside[..., :-1] & ~inside[..., 1:])
        is_same_way = shift_in * shift_out > 0 and abs(shift_in - shift_out) <= MIN_SHIFT
        voxels = round((shift_in + shift_out) / 2)
        is_large = abs(voxels) >= MIN_SHIFT and abs(voxels) * grid.spacing_mm[axis] >= MIN_SHIFT_MM
        if is_same_way and is_large:
            end = FACES[axis][voxels > 0]
            shifts.append(f"{abs(voxels)} voxels towards the {end} end")
    if not shifts:
        return []
    return [find("misplaced_labels:shifted", shifts=" and ".join(shifts))]


def _edge_shift(lines: np.ndarray, faces: np.ndarray) -> int:
    """Find where the image changes most beside faces of the labels.

    Args:
        lines: Image, its last axis is the one that is searched.
        faces: Whether the labels change between a voxel and the next one of that axis.

    Returns:
        Distance in voxels; 0 where the faces are too few, or the image changes nowhere much more
        than elsewhere.
    """
    *places, index = np.nonzero(faces)
    if len(index) < MIN_FACES:
        return 0
    change = []
    for offset in range(-SHIFT_REACH, SHIFT_REACH + 1):
        # The voxels one before and two behind the face: three voxels apart, across the edge.
        before = _values_at(lines, places, index + offset - 1)
        after = _values_at(lines, places, index + offset + 2)
        change.append(float(np.abs(after - before).mean()))
    best = int(np.argmax(change))
    at_faces = SHIFT_GAIN * change[SHIFT_REACH]
    anywhere = SHIFT_SHARPNESS * float(np.median(change))
    if change[best] <= max(at_faces, anywhere):
        return 0
    return best - SHIFT_REACH


def _values_at(lines: np.ndarray, places: list[np.ndarray], index: np.ndarray) -> np.ndarray:
    """Read the image at some voxels of the lines, in HU; beyond the ends, the last voxel."""
    inside = np.clip(index, 0, lines.shape[-1] - 1)
    return np.clip(lines[(*places, inside)].astype(np.float32), AIR_HU, MAX_HU)


def _edge(labels: np.ndarray, image: np.ndarray) -> tuple[float, int]:
    """Sum the changes of the image across faces between different labels, and count the faces."""
    total = 0.0
    num_faces = 0
    for axis in range(3):
        values = np.moveaxis(labels, axis, 0)
        hu = np.moveaxis(image, axis, 0)
        is_face = values[1:-2] != values[2:-1]
        # Across the edge: from the voxel before the two at a face to the one behind them.
        total += float(np.abs(hu[3:] - hu[:-3])[is_face].sum())
        num_faces += int(np.count_nonzero(is_face))
    return total, num_faces


def _fit(labels: np.ndarray, image: np.ndarray, moves: list[int]) -> float:
    """Compare the change of the image across the boundary with that beside it.

    Returns:
        Mean change across the boundary, relative to that across the boundary moved to either side
        along each axis.
    """
    total, num_faces = _edge(labels, image)
    total_beside = 0.0
    num_beside = 0
    for axis, move in enumerate(moves):
        for shift in (move, -move):
            change, count = _edge(np.roll(labels, shift, axis), image)
            total_beside += change
            num_beside += count
    beside = total_beside / max(1, num_beside)
    return total / max(1, num_faces) / max(1.0, beside)
