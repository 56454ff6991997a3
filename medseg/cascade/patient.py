"""Patient: the outline of the body without table, mattress and blankets, beyond which no organ lies."""

import numpy as np
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError

SOFT_TISSUE_HU = -300.0
# Shells of tables and folds of blankets are thinner than twice this, and thereby apart from the body.
EROSION_MM = 5.0
# Finer volumes are read at every second voxel, every third, and so on.
LEAST_SPACING_MM = 4.0


def beyond_patient(image_hu: np.ndarray, voxel_mm: tuple[float, float, float]) -> np.ndarray:
    """Find the voxels beyond the convex outline, slice by slice, of the largest thick piece of soft tissue.

    Foam and blankets have the density of lung, and lie outside. Nothing counts as outside in a slice without such tissue.

    Args:
        image_hu: CT (D, H, W) in HU.
        voxel_mm: Its spacing, (z, y, x).

    Returns:
        Mask (D, H, W).
    """
    spacing_mm = voxel_mm[1:]
    strides = [max(1, int(LEAST_SPACING_MM / mm)) for mm in spacing_mm]
    y_mm, x_mm = (stride * mm for stride, mm in zip(strides, spacing_mm, strict=True))
    is_soft = image_hu[:, :: strides[0], :: strides[1]] > SOFT_TISSUE_HU
    sizes = (1, *(1 + 2 * round(EROSION_MM / mm) for mm in (y_mm, x_mm)))
    # Connected over corners too: what the erosion leaves of a thin chest wall may hang together by corners.
    pieces, count = ndimage.label(ndimage.minimum_filter(is_soft, sizes, mode="nearest"), np.ones((3, 3, 3)))
    is_beyond = np.zeros(is_soft.shape, dtype=bool)
    if count:
        patient = pieces == 1 + np.argmax(np.bincount(pieces.reshape(-1))[1:])
        y, x = np.indices(is_soft.shape[1:]).reshape(2, -1)
        points_mm = np.stack([y * y_mm, x * x_mm])
        for z in np.flatnonzero(patient.any(axis=(1, 2))):
            try:
                # Of each side: unit normal and distance, positive outside.
                normals_offsets = ConvexHull(np.argwhere(patient[z]) * (y_mm, x_mm)).equations
            except QhullError:  # a single line of voxels
                continue
            distance_mm = (normals_offsets[:, :2] @ points_mm + normals_offsets[:, 2:]).max(axis=0)
            is_beyond[z] = (distance_mm > EROSION_MM + max(y_mm, x_mm)).reshape(is_beyond.shape[1:])
    y, x = (
        np.minimum((np.arange(size) + stride // 2) // stride, num_read - 1)
        for size, stride, num_read in zip(image_hu.shape[1:], strides, is_soft.shape[1:], strict=True)
    )
    return is_beyond[:, y[:, None], x]
