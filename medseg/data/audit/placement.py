"""Audit of the placement of a label map on its image: labels that are mirrored, turned or shifted.

A label map may have the grid of its image and still hold the voxels in another order, because it
was written from a flipped or transposed array. Headers do not show this, but the image does: its
values change more across the boundary of a correct label than across the same boundary moved aside.

A face is the border between two neighbouring voxels that have different labels; the faces together
are the boundary. The fit of labels is the mean change of the image across their faces, relative to
the mean change across the same faces moved aside.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from medseg.data.audit.finding import make_finding
from medseg.findings import Finding
from medseg.geometry.grid import VoxelGrid
from medseg.preprocess.orient import FACES
from medseg.task import AIR_HU

# For the fit, labels and image are sampled every STEP_MM, and the faces are moved aside by
# MOVED_MM.
STEP_MM = 4.0
MOVED_MM = 12.0
MAX_HU = 400  # bone and metal would outweigh all other tissue
# Labels are in place if their fit is at least SURE_FIT. Otherwise they are misplaced if the fit of
# another placement is at least LEAST_FIT, and at least LEAST_GAIN times their own fit. Measured
# fits: organs full of air in place 2.2 to 3.8, mirrored 0.7 to 1.8; vertebrae in place 1.5 to 1.8,
# mirrored 0.7 to 1.1 (on phantoms); organs in soft tissue 0.7 to 1.1 either way.
SURE_FIT = 2.0
LEAST_FIT = 1.5
LEAST_GAIN = 1.5
MIN_FACES = 200  # fewer faces are not judged
# Distance in voxels within which edges of the image are searched, and the smallest shift that is
# reported, in voxels and in mm; real labels are within 1 voxel.
SHIFT_REACH = 12
MIN_SHIFT = 3
MIN_SHIFT_MM = 2.0
# Largest difference, in voxels, between the shift of the faces where a line enters the labels and
# the shift of those where it leaves them.
MAX_SHIFT_DIFFERENCE = 3
# Labels count as shifted if the largest change of the image near their faces is more than
# SHIFT_GAIN times the change at the faces, and more than SHIFT_SHARPNESS times the median over all
# distances. Measured ratios: air-filled organs shifted by 5 voxels at least 4.3 and 4.0, edges of
# other structures up to 1.5 and 3. Organs in soft tissue stay below both.
SHIFT_GAIN = 2.0
SHIFT_SHARPNESS = 3.0
_AXES = ("head to feet", "back to front", "left to right")  # axes z, y, x, for the sentence


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
    sampling = tuple(slice(None, None, step) for step in steps)
    coarse_labels = np.ascontiguousarray(labels[sampling])
    coarse_hu = np.clip(image_hu[sampling], AIR_HU, MAX_HU).astype(np.float32)
    # Distance by which the faces are moved, in coarse voxels.
    moves = []
    for step, step_mm in zip(steps, grid.spacing_mm, strict=True):
        moves.append(max(1, round(MOVED_MM / (step * step_mm))))
    # A change is measured over four voxels in a row.
    if min(coarse_labels.shape) < 4:
        return []
    _, num_faces = _sum_changes(coarse_labels, coarse_hu)
    if num_faces < MIN_FACES:
        return []
    fit = _fit(coarse_labels, coarse_hu, moves)
    if fit >= SURE_FIT:
        return []
    best_fit = 0.0
    best_way = ""
    for way, placed_labels in _other_placements(coarse_labels):
        other_fit = _fit(placed_labels, coarse_hu, moves)
        if other_fit > best_fit:
            best_fit = other_fit
            best_way = way
    if best_fit < max(LEAST_FIT, LEAST_GAIN * fit):
        return []
    return [make_finding("misplaced_labels", way=best_way, best=best_fit, fit=fit)]


def _other_placements(labels: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the labels in other placements of the same shape, as views.

    They are mirrored along any axes, and transposed or turned within the slices if these are
    square.

    Yields:
        Description of the change, for the sentence; and the changed labels.
    """
    for num_axes in (1, 2, 3):
        for axes in itertools.combinations(range(3), num_axes):
            names = " and ".join(_AXES[axis] for axis in axes)
            yield f"mirrored {names}", np.flip(labels, axes)
    if labels.shape[1] == labels.shape[2]:
        # Positive angles turn from y towards x, as in `np.rot90`.
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

    Returns:
        One error, or nothing.
    """
    shifts = []
    for axis in range(3):
        # Every voxel along the axis, on lines that lie STEP_MM apart.
        steps = [max(1, round(STEP_MM / step_mm)) for step_mm in grid.spacing_mm]
        steps[axis] = 1
        sampling = tuple(slice(None, None, step) for step in steps)
        lines_hu = np.moveaxis(image_hu[sampling], axis, -1)
        is_labelled = np.moveaxis(labels[sampling] != 0, axis, -1)
        before_face = is_labelled[..., :-1]
        behind_face = is_labelled[..., 1:]
        # Shifts of the faces at which a line enters the labels, and of those at which it leaves
        # them, in voxels along the axis; 0 where none is found.
        shift_in = _edge_shift(lines_hu, behind_face & ~before_face)
        shift_out = _edge_shift(lines_hu, before_face & ~behind_face)
        has_same_sign = shift_in * shift_out > 0
        is_same_shift = has_same_sign and abs(shift_in - shift_out) <= MAX_SHIFT_DIFFERENCE
        shift = round((shift_in + shift_out) / 2)
        shift_mm = abs(shift) * grid.spacing_mm[axis]
        is_large = abs(shift) >= MIN_SHIFT and shift_mm >= MIN_SHIFT_MM
        if is_same_shift and is_large:
            # `FACES` names the ends of each axis of a volume, at index 0 and at the last index.
            low_end, high_end = FACES[axis]
            end = high_end if shift > 0 else low_end
            shifts.append(f"{abs(shift)} voxels towards the {end} end")
    if not shifts:
        return []
    return [make_finding("misplaced_labels:shifted", shifts=" and ".join(shifts))]


def _edge_shift(lines_hu: np.ndarray, is_face: np.ndarray) -> int:
    """Find at which distance from faces of the labels the image changes most.

    Args:
        lines_hu: Image, whose last axis is searched.
        is_face: Whether the labels change between a voxel and the next voxel of that axis; shorter
            than the image by one along it.

    Returns:
        Distance in voxels, positive towards higher indices; 0 where the faces are too few, or no
        change is clearly the largest.
    """
    *line_indices, index = np.nonzero(is_face)
    if len(index) < MIN_FACES:
        return 0
    changes_hu = []
    for offset in range(-SHIFT_REACH, SHIFT_REACH + 1):
        # The face lies between `index` and the next voxel. The change is measured from the voxel
        # before these two to the voxel behind them, since scanners and resampling blur an edge.
        before_hu = _values_at(lines_hu, line_indices, index + offset - 1)
        behind_hu = _values_at(lines_hu, line_indices, index + offset + 2)
        changes_hu.append(float(np.abs(behind_hu - before_hu).mean()))
    best = int(np.argmax(changes_hu))
    # At index SHIFT_REACH the offset is 0: the change at the faces themselves.
    limit_at_faces_hu = SHIFT_GAIN * changes_hu[SHIFT_REACH]
    limit_anywhere_hu = SHIFT_SHARPNESS * float(np.median(changes_hu))
    if changes_hu[best] <= max(limit_at_faces_hu, limit_anywhere_hu):
        return 0
    return best - SHIFT_REACH


def _values_at(
    lines_hu: np.ndarray, line_indices: list[np.ndarray], index: np.ndarray
) -> np.ndarray:
    """Read voxels of an image in HU, clipped to the range from air to bone.

    Args:
        lines_hu: Image in HU, three axes.
        line_indices: Indices of the voxels along all axes but the last.
        index: Their index along the last axis; beyond an end, the voxel at that end is read.
    """
    inside = np.clip(index, 0, lines_hu.shape[-1] - 1)
    return np.clip(lines_hu[(*line_indices, inside)].astype(np.float32), AIR_HU, MAX_HU)


def _sum_changes(labels: np.ndarray, image_hu: np.ndarray) -> tuple[float, int]:
    """Sum the changes of the image in HU across the faces of the labels, and count the faces."""
    sum_hu = 0.0
    num_faces = 0
    for axis in range(3):
        labels_axis_first = np.moveaxis(labels, axis, 0)
        hu_axis_first = np.moveaxis(image_hu, axis, 0)
        # Of four voxels in a row, the inner two lie at the face; the change is that between the
        # outer two. Faces at the ends of the image lack an outer voxel.
        is_face = labels_axis_first[1:-2] != labels_axis_first[2:-1]
        changes_hu = np.abs(hu_axis_first[3:] - hu_axis_first[:-3])
        sum_hu += float(changes_hu[is_face].sum())
        num_faces += int(np.count_nonzero(is_face))
    return sum_hu, num_faces


def _fit(labels: np.ndarray, image_hu: np.ndarray, moves: list[int]) -> float:
    """Compute the fit of labels, as described at the top of this module.

    Args:
        labels: Labels, (D, H, W).
        image_hu: Image of the same shape in HU.
        moves: Distance along each axis by which the faces are moved aside, to either end; in
            voxels.
    """
    sum_hu, num_faces = _sum_changes(labels, image_hu)
    sum_beside_hu = 0.0
    num_beside = 0
    for axis, move in enumerate(moves):
        for shift in (move, -move):
            # `roll` moves voxels from one end to the other, which makes a few false faces.
            moved_sum_hu, num_moved = _sum_changes(np.roll(labels, shift, axis), image_hu)
            sum_beside_hu += moved_sum_hu
            num_beside += num_moved
    mean_hu = sum_hu / max(1, num_faces)
    mean_beside_hu = sum_beside_hu / max(1, num_beside)
    # At least 1 HU: an image that is constant at the moved faces must not make any label fit.
    return mean_hu / max(1.0, mean_beside_hu)
