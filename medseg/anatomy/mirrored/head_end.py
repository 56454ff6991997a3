"""Cues in a CT of the chest that tell which end is the head: the trachea and the liver.

A conversion may turn the voxels of a patient upside down, about the axis from front to back, and
keep the header. This turn reverses z and x: the spine stays at the back, but the left lung lies
where the header says right, and a network, which names the sides by their place, exchanges them.
"""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

from medseg.anatomy.mirrored.cues import (
    BEYOND_FIELD_HU,
    CLEAR_CUE,
    MAX_CUE,
    TRACHEA_HU,
    TRACHEA_MM2,
    Lungs,
    centre_x,
    every_few_voxels,
    inner_columns,
    part_around,
    shows_below,
    solid_and_light,
    tissue_below,
)
from medseg.anatomy.rules import AIRY_HU
from medseg.task import Task

# Least air in the labels of a side that counts as a lung.
MIN_AIR_ML = 100.0
# Distance along x from the middle between the outer borders of the lungs in which the trachea is
# looked for.
TRACHEA_REACH_MM = 30.0
# Least share of its bounding rectangle in a slice that the trachea fills, since it is round.
TRACHEA_FILL = 0.5
# Measure that gives a cue of 1, in the unit of the function that measures the cue. In 22 whole
# chests `trachea_excess_mm` is 36 to 128 mm, `liver_excess` 0.27 to 0.72.
SCALES = {"trachea": 40.0, "liver": 0.3}

SENTENCES = {
    "trachea": "the trachea seems to lie between the lower halves of the lungs",
    "liver": "the tissue above the lungs looks like the liver",
}
"""Clause of a warning for each cue of a patient who is upside down."""


class HeadEvidence(NamedTuple):
    """Cues of a scan.

    Attributes:
        cues: Name of each cue that the scan shows to its value in ±`MAX_CUE`: ±1 for the measure in
            `SCALES`, negative where the patient is upside down.
    """

    cues: dict[str, float]

    @property
    def is_upside_down(self) -> bool:
        """Whether both cues clearly show a patient upside down; False if one is absent."""
        values = [self.cues.get(name, 0.0) for name in SCALES]
        return max(values) <= -CLEAR_CUE

    @property
    def sentence(self) -> str:
        """Both cues as a clause of a warning, if `is_upside_down`."""
        return " and ".join(SENTENCES[name] for name in self.cues)


def head_evidence(
    image_hu: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float], task: Task
) -> HeadEvidence:
    """Measure the cues of a scan.

    Args:
        image_hu: CT (D, H, W) in HU, oriented to LPS.
        labels: Label map on the same grid in the task's values.
        spacing_mm: Spacing, (z, y, x).
        task: Its labels with a side that hold air are the lungs.

    Returns:
        No cue where the labels do not show two lungs.
    """
    lungs = find_airy_lungs(image_hu, labels, spacing_mm, task)
    if lungs is None:
        return HeadEvidence({})
    measures = {"trachea": trachea_excess_mm(lungs), "liver": liver_excess(lungs)}
    cues = {}
    for name, measure in measures.items():
        if measure is not None:
            cues[name] = float(np.clip(measure / SCALES[name], -MAX_CUE, MAX_CUE))
    return HeadEvidence(cues)


def find_airy_lungs(
    image_hu: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float], task: Task
) -> Lungs | None:
    """Take the air in the labels of each side as a lung, on a coarse grid; None without two lungs.

    If a patient is upside down, a network also labels liver and bowel, which are mostly not air.
    """
    coarse_hu, coarse_labels, coarse_mm = every_few_voxels(image_hu, labels, spacing_mm)
    is_air = coarse_hu < AIRY_HU
    voxel_ml = float(np.prod(coarse_mm)) / 1000
    masks = []
    for side in ("left", "right"):
        mask = np.isin(coarse_labels, task.side_values(side)) & is_air
        if np.count_nonzero(mask) * voxel_ml < MIN_AIR_ML:
            return None
        masks.append(mask)
    # Sorted by position, since the names of the labels may be exchanged; x increases to the
    # patient's left.
    left, right = sorted(masks, key=centre_x, reverse=True)
    return Lungs(left, right, coarse_hu, coarse_mm)


def trachea_excess_mm(lungs: Lungs) -> float:
    """Measure by how much longer the trachea is in the upper half of the lungs than in the lower.

    The trachea is a round piece of air in a slice, in the middle between the lungs; the bronchi in
    the lower half are too thin. The image is searched, since labels may count the trachea as lung.

    Returns:
        Difference of the lengths, in mm.
    """
    is_lung = lungs.left | lungs.right
    # Indices along z, y and x at which there is lung.
    lung_z = np.flatnonzero(is_lung.any(axis=(1, 2)))
    lung_y = np.flatnonzero(is_lung.any(axis=(0, 2)))
    lung_x = np.flatnonzero(is_lung.any(axis=(0, 1)))
    z_mm, _, x_mm = lungs.spacing_mm
    reach = TRACHEA_REACH_MM / x_mm
    middle_x = (lung_x[0] + lung_x[-1]) / 2
    middle_z = (lung_z[0] + lung_z[-1]) / 2
    # Slices that show the trachea, in the upper and the lower half.
    num_above = 0
    num_below = 0
    for z in lung_z:
        for y, x in _round_pieces_of_air(lungs.image_hu[z], lungs.spacing_mm):
            is_central = abs(x - middle_x) <= reach and lung_y[0] < y < lung_y[-1]
            if not is_central:
                continue
            if z > middle_z:
                num_above += 1
            else:
                num_below += 1
            break  # a slice counts once
    return float(num_above - num_below) * z_mm


def _round_pieces_of_air(
    plane_hu: np.ndarray, spacing_mm: tuple[float, float, float]
) -> list[tuple[float, float]]:
    """List the centres (y, x) of the rectangles of round pieces of air as large as the trachea.

    Args:
        plane_hu: A slice (H, W).
        spacing_mm: Spacing (z, y, x).
    """
    pieces, _ = ndimage.label(plane_hu < TRACHEA_HU)
    pixel_mm2 = spacing_mm[1] * spacing_mm[2]
    low_mm2, high_mm2 = TRACHEA_MM2
    centres = []
    for number, rectangle in enumerate(ndimage.find_objects(pieces), start=1):
        is_piece = pieces[rectangle] == number
        area_mm2 = np.count_nonzero(is_piece) * pixel_mm2
        if low_mm2 <= area_mm2 <= high_mm2 and is_piece.mean() >= TRACHEA_FILL:
            y, x = rectangle
            centres.append(((y.start + y.stop - 1) / 2, (x.start + x.stop - 1) / 2))
    return centres


def liver_excess(lungs: Lungs) -> float | None:
    """Measure by how much more the tissue below the lungs is like the liver than that above them.

    Liver, spleen and heart are large and solid; around an apex lie fat, muscles and ribs.

    Returns:
        `_solid_excess` below the lungs minus that above them, within ±2; None where the scan shows
        too little below or above the lungs.
    """
    below = _solid_excess(lungs)
    # What lies above the lungs lies below them once the scan is turned over.
    upside_down = Lungs(lungs.left[::-1], lungs.right[::-1], lungs.image_hu[::-1], lungs.spacing_mm)
    above = _solid_excess(upside_down)
    if below is None or above is None:
        return None
    return below - above


def _solid_excess(lungs: Lungs) -> float | None:
    """Share of solid tissue below the lungs minus the share of light tissue there, within ±1.

    None where the scan shows too little below one of the lungs.
    """
    spacing_mm = np.array(lungs.spacing_mm)
    in_field = lungs.image_hu.max(axis=0) > BEYOND_FIELD_HU
    below = np.zeros(lungs.image_hu.shape, dtype=bool)
    for lung in (lungs.left, lungs.right):
        columns = inner_columns(lung, lungs.spacing_mm)
        below_lung = tissue_below(lung, columns & in_field, lungs.spacing_mm[0])
        if not shows_below(below_lung, columns, spacing_mm):
            return None
        below |= below_lung
    part = part_around(below, spacing_mm)
    is_solid, is_light = solid_and_light(lungs.image_hu[part], spacing_mm)
    is_below = below[part]
    return float(is_solid[is_below].mean() - is_light[is_below].mean())
