"""Patient: the outline of the body without table and blankets, beyond which no organ lies."""

import numpy as np
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError

from medseg.anatomy.rules import EROSION_MM, LEAST_PIECE_SHARE, READ_SPACING_MM, SOFT_TISSUE_HU


def beyond_patient(image_hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> np.ndarray:
    """Find the voxels beyond the convex outline of thick pieces of soft tissue, slice by slice.

    Foam and blankets have the density of lung, and lie outside. Where soft tissue reaches one edge
    of the image, which cuts the patient off, the outline contains this edge as far as the tissue
    extends along it. Between two cut sides it also contains all that lies in front, since the image
    may show a part of the chest without its front wall. Two kinds of slices have no outline, and so
    no voxel outside: those without soft tissue, and those where soft tissue reaches several edges,
    unless these are the two sides with or without the front.

    Args:
        image_hu: CT (D, H, W) in HU, y towards the patient's back.
        spacing_mm: Its spacing, (z, y, x).

    Returns:
        Mask (D, H, W).
    """
    # The outline is smooth: a coarser image, of every few voxels, shows it.
    strides = [max(1, round(READ_SPACING_MM / mm)) for mm in spacing_mm]
    y_mm, x_mm = strides[1] * spacing_mm[1], strides[2] * spacing_mm[2]
    is_soft = image_hu[:: strides[0], :: strides[1], :: strides[2]] > SOFT_TISSUE_HU
    # Erosion within slices only: slices may be thicker than the structures to be removed.
    sizes = (1, 1 + 2 * round(EROSION_MM / y_mm), 1 + 2 * round(EROSION_MM / x_mm))
    patient = _thick_pieces(is_soft, sizes)
    is_beyond = np.zeros(is_soft.shape, dtype=bool)
    height, width = is_soft.shape[1:]
    y_centres_mm, x_centres_mm = np.arange(height) * y_mm, np.arange(width) * x_mm
    for z in np.flatnonzero(patient.any(axis=(1, 2))):
        outline = _outline_points(patient[z])
        if outline is None:
            continue
        try:
            # A row for each side of the hull: its outer unit normal (y, x), and an offset. A
            # point lies `normal @ point + offset` mm beyond that side.
            hull_sides = ConvexHull(outline * (y_mm, x_mm)).equations
        except QhullError:  # a single line of voxels
            continue
        # Sums of a part for each row and one for each column of pixels. A matrix product of such
        # narrow matrices takes several times the processor time, spent on waiting threads.
        row_parts_mm = np.multiply.outer(hull_sides[:, 0], y_centres_mm)  # (sides, H)
        column_parts_mm = np.multiply.outer(hull_sides[:, 1], x_centres_mm)  # (sides, W)
        column_parts_mm += hull_sides[:, 2:]
        distances_mm = row_parts_mm[:, :, np.newaxis] + column_parts_mm[:, np.newaxis]
        # A pixel is outside if it is beyond any side. The erosion has made the patient smaller,
        # and a voxel reaches beyond its centre.
        is_beyond[z] = distances_mm.max(axis=0) > EROSION_MM + max(y_mm, x_mm)
    # Each voxel of the full image takes the value of the nearest voxel that was read.
    nearest = []
    for size, stride, num_read in zip(image_hu.shape, strides, is_soft.shape, strict=True):
        nearest.append(np.minimum((np.arange(size) + stride // 2) // stride, num_read - 1))
    return is_beyond[np.ix_(*nearest)]


def _thick_pieces(is_soft: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Erode soft tissue (D, H, W) with a box of a size in voxels, and keep the large pieces."""
    eroded = ndimage.minimum_filter(is_soft, sizes, mode="nearest")
    # Voxels that share only a corner count as connected too: the erosion may leave no more between
    # the parts of a thin chest wall.
    pieces, _ = ndimage.label(eroded, np.ones((3, 3, 3)))
    counts = np.zeros(int(pieces.max()) + 1, dtype=np.int64)
    # Plane by plane, because `bincount` converts its input to eight bytes per voxel.
    for plane in pieces:
        counts += np.bincount(plane.reshape(-1), minlength=len(counts))
    counts[0] = 0  # the background
    is_large = (counts > 0) & (counts >= LEAST_PIECE_SHARE * counts.max())
    return np.asarray(is_large[pieces])


def _outline_points(patient: np.ndarray) -> np.ndarray | None:
    """List the points whose convex hull is the outline of the patient in a slice.

    Args:
        patient: Mask (H, W), not empty.

    Returns:
        The voxels of the patient, and the ends of the edges that cut the patient off, (N, 2) as y
        and x; None where the outline is not known.
    """
    tissue = np.argwhere(patient)
    (top, left), (bottom, right) = tissue.min(axis=0), tissue.max(axis=0)
    last_y, last_x = patient.shape[0] - 1, patient.shape[1] - 1
    ends = []
    if top == 0:
        ends.append([(0, left), (0, right)])
    if bottom == last_y:
        ends.append([(last_y, left), (last_y, right)])
    if left == 0:
        ends.append([(top, 0), (bottom, 0)])
    if right == last_x:
        ends.append([(top, last_x), (bottom, last_x)])
    if len(ends) > 1:
        is_between_sides = left == 0 and right == last_x
        # At any other two edges, the corner hides how far the patient extends.
        if not is_between_sides or bottom == last_y:
            return None
        # Between two cut sides, all that lies in front may belong to the patient.
        ends.append([(0, 0), (0, last_x)])
    return np.concatenate([tissue, *ends])
