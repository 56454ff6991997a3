"""Patient: the outline of the body without table, mattress and blankets, beyond which no organ lies."""

import numpy as np
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError

from medseg.anatomy.rules import EROSION_MM, LEAST_PIECE_SHARE, READ_SPACING_MM, SOFT_TISSUE_HU


def beyond_patient(image_hu: np.ndarray, spacing_mm: tuple[float, float, float]) -> np.ndarray:
    """Find the voxels beyond the convex outline, slice by slice, of the thick pieces of soft tissue.

    Foam and blankets have the density of lung, and lie outside. Where soft tissue reaches one edge
    of the image, which cuts the patient off, the outline contains this edge as far as the tissue
    extends along it. Between two cut sides it also contains all that lies in front, since the image
    may show a part of the chest without its front wall. Nothing counts as outside in a slice
    without soft tissue, or with soft tissue at any other two edges.

    Args:
        image_hu: CT (D, H, W) in HU, y towards the patient's back.
        spacing_mm: Its spacing, (z, y, x).

    Returns:
        Mask (D, H, W).
    """
    strides = [max(1, round(READ_SPACING_MM / mm)) for mm in spacing_mm]
    _, y_mm, x_mm = (stride * mm for stride, mm in zip(strides, spacing_mm, strict=True))
    is_soft = image_hu[:: strides[0], :: strides[1], :: strides[2]] > SOFT_TISSUE_HU
    sizes = (1, *(1 + 2 * round(EROSION_MM / mm) for mm in (y_mm, x_mm)))
    # Connected over corners too: what the erosion leaves of a thin chest wall may hang together by
    # corners.
    pieces, _ = ndimage.label(
        ndimage.minimum_filter(is_soft, sizes, mode="nearest"), np.ones((3, 3, 3))
    )
    counts = np.zeros(int(pieces.max()) + 1, dtype=np.int64)
    for plane in pieces:
        counts += np.bincount(plane.reshape(-1), minlength=len(counts))
    counts[0] = 0
    patient = ((counts > 0) & (counts >= LEAST_PIECE_SHARE * counts.max()))[pieces]
    is_beyond = np.zeros(is_soft.shape, dtype=bool)
    y, x = np.indices(is_soft.shape[1:]).reshape(2, -1)
    points_mm = np.stack([y * y_mm, x * x_mm])
    for z in np.flatnonzero(patient.any(axis=(1, 2))):
        tissue = np.argwhere(patient[z])
        (top, left), (bottom, right) = tissue.min(axis=0), tissue.max(axis=0)
        last_y, last_x = (size - 1 for size in patient.shape[1:])
        cut = [
            ends
            for is_cut, ends in (
                (top == 0, [(0, left), (0, right)]),
                (bottom == last_y, [(last_y, left), (last_y, right)]),
                (left == 0, [(top, 0), (bottom, 0)]),
                (right == last_x, [(top, last_x), (bottom, last_x)]),
            )
            if is_cut
        ]
        if len(cut) > 1:
            if (
                bottom == last_y or left > 0 or right < last_x
            ):  # the corner hides how far the patient extends
                continue
            cut.append([(0, 0), (0, last_x)])
        try:
            # Of each side: unit normal and distance, positive outside.
            sides = ConvexHull(np.concatenate([tissue, *cut]) * (y_mm, x_mm)).equations
        except QhullError:  # a single line of voxels
            continue
        distance_mm = (sides[:, :2] @ points_mm + sides[:, 2:]).max(axis=0)
        is_beyond[z] = (distance_mm > EROSION_MM + max(y_mm, x_mm)).reshape(is_beyond.shape[1:])
    return is_beyond[
        np.ix_(
            *(
                np.minimum((np.arange(size) + stride // 2) // stride, num_read - 1)
                for size, stride, num_read in zip(
                    image_hu.shape, strides, is_soft.shape, strict=True
                )
            )
        )
    ]
