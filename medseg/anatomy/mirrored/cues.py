"""Mirrored images: signs in a chest CT that its left and right are exchanged under its header.

A conversion that flips an image without its header leaves a plausible patient with mirrored organs.
Four cues are measured from the image and the lungs. Each is positive where the organs lie as usual,
changes its sign if the image is mirrored, and is absent where the scan does not show it:

* `liver`: below the right lung lies the liver, below the left one fat, spleen, and gas of stomach
  and bowel;
* `arch`: the aortic arch lies to the left of the trachea;
* `aorta`: the descending aorta keeps the left lung away from the front of the spine;
* `heart`: two thirds of the heart lie to the left.
"""

from typing import NamedTuple

import numpy as np
from scipy import ndimage

from medseg.anatomy.rules import AIRY_HU, SPINE_HU, SPINE_REACH_MM
from medseg.geometry.grid import VoxelBox
from medseg.task import Task

# The constants before `SCALES` were chosen from anatomy, not measured.

# Around solid tissue there is no gas, fat or bone within this distance. A scan is read at a spacing
# of about half of it.
SOLID_MM = 5.0
# Less dense voxels count as light: fat or gas.
LIGHT_HU = -20.0
# A column along z without a denser voxel lies beyond a round field of view.
BEYOND_FIELD_HU = -1000.0
# Least and largest depth below a lung at which the liver is looked for.
BELOW_LUNG_MM = (8.0, 60.0)
# Least volume that a scan must show at these depths, and least share of the volume that a scan
# which reaches beyond these depths shows. A scan that ends at the bases of the lungs shows less.
MIN_BELOW_ML = 50.0
MIN_BELOW_SHARE = 0.25
# Less dense voxels between the lungs are air in the trachea.
TRACHEA_HU = -600.0
# Least and largest area of the trachea, or of its fork, in a slice.
TRACHEA_MM2 = (60.0, 700.0)
# Least length along which the trachea must be seen; also about its width.
TRACHEA_MM = 20.0
# Least and largest distance of the descending aorta from the middle of the spine along x; both
# sides are compared.
AORTA_REACH_MM = (10.0, 35.0)
# Part of the height of the lungs, from below, in which the heart is looked for.
HEART_SHARES = (0.1, 0.5)
# Measure that gives a cue of 1, in the unit of the function that measures the cue. In 21
# scans of whole chests the liver measures 0.06 to 0.5, the arch -3 to 33 mm (8 to 33 mm without two
# scans of lungs that have lost much volume), the aorta -0.3 to 0.7, the heart -13 to 28 mm.
SCALES = {"liver": 0.1, "arch": 10.0, "aorta": 0.4, "heart": 20.0}
# Largest absolute value of a cue: it bounds the weight of one cue in the sum of all.
MAX_CUE = 2.0
# An image is mirrored if the sum of its cues is at most minus this, and the cue of the liver is at
# most -`CLEAR_CUE`. Of whole chests that are not mirrored, the least sum is -0.1, the second least
# 0.6; the least cue of the liver is 0.64.
MIRRORED_EVIDENCE = 0.8
# Least absolute value of a cue that is clear by itself.
CLEAR_CUE = 0.5

MEDIASTINUM = ("arch", "aorta", "heart")
"""Cues that a collapsed lung moves together; the liver is independent of them."""

SENTENCES = {
    "liver": "the tissue below the left lung looks like the liver",
    "arch": "the aortic arch seems to lie to the right of the trachea",
    "aorta": "the aorta seems to descend on the right of the spine",
    "heart": "the heart seems to lie on the right",
}
"""Clause of a warning for each cue that is mirrored."""


class Lungs(NamedTuple):
    """Both lungs on a coarse grid, distinguished by their position.

    Attributes:
        left: Mask (D, H, W) of the lung at larger x.
        right: Mask (D, H, W) of the other lung.
        image_hu: The image, (D, H, W).
        spacing_mm: Spacing (z, y, x).
    """

    left: np.ndarray
    right: np.ndarray
    image_hu: np.ndarray
    spacing_mm: tuple[float, float, float]


class Gap(NamedTuple):
    """Gap between the lungs in each row along x; arrays (D, H) in voxels.

    Attributes:
        is_between: Whether the row meets both lungs.
        start: First voxel beyond the right lung, which lies at smaller x.
        stop: First voxel of the left lung.
        outer_middle: Middle between the outer borders of the lungs.
    """

    is_between: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    outer_middle: np.ndarray


class MirrorEvidence(NamedTuple):
    """Cues of a scan.

    Attributes:
        cues: Name of each cue that the scan shows to its value in ±`MAX_CUE`: ±1 for the measure in
            `SCALES`, negative where the organs lie mirrored.
    """

    cues: dict[str, float]

    @property
    def is_mirrored(self) -> bool:
        """Whether the liver, and the sum of all cues, show that left and right are exchanged."""
        # A collapsed lung moves the whole mediastinum: no cue above the diaphragm is enough.
        liver = self.cues.get("liver", 0.0)
        return liver <= -CLEAR_CUE and sum(self.cues.values()) <= -MIRRORED_EVIDENCE

    @property
    def is_confirmed(self) -> bool:
        """Whether the image is mirrored and the mediastinum alone shows it too."""
        mediastinum = sum(self.cues.get(name, 0.0) for name in MEDIASTINUM)
        return self.is_mirrored and mediastinum <= -CLEAR_CUE

    @property
    def sentence(self) -> str:
        """The mirrored cues, as a clause of a warning."""
        mirrored = [SENTENCES[name] for name, cue in self.cues.items() if cue <= -CLEAR_CUE]
        return " and ".join(mirrored)


def mirror_evidence(
    image_hu: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float], task: Task
) -> MirrorEvidence:
    """Measure the cues of a scan.

    Args:
        image_hu: CT (D, H, W) in HU, oriented to LPS.
        labels: Label map on the same grid in the task's values.
        spacing_mm: Spacing, (z, y, x).
        task: Its labels with a side that are full of air are the lungs.

    Returns:
        No cue where the labels do not show two lungs.
    """
    lungs = find_lungs(image_hu, labels, spacing_mm, task)
    if lungs is None:
        return MirrorEvidence({})
    gap = gap_between(lungs)
    measures = {
        "liver": liver_excess(lungs),
        "arch": arch_excess_mm(lungs, gap),
        "aorta": aorta_excess(lungs, gap),
        "heart": heart_offset_mm(lungs, gap),
    }
    cues = {}
    for name, measure in measures.items():
        if measure is not None:
            cues[name] = float(np.clip(measure / SCALES[name], -MAX_CUE, MAX_CUE))
    return MirrorEvidence(cues)


def find_lungs(
    image_hu: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float], task: Task
) -> Lungs | None:
    """Take the labels with a side that are full of air, on a coarse grid; None without two lungs.

    The position of a lung decides whether it is the left one: the names of the labels may follow
    the organs of a mirrored image, or its header.
    """
    coarse_hu, coarse_labels, coarse_mm = every_few_voxels(image_hu, labels, spacing_mm)
    masks = []
    for side in ("left", "right"):
        mask = np.zeros(coarse_labels.shape, dtype=bool)
        for value in task.side_values(side):
            is_value = coarse_labels == value
            # A side may also have organs without air: a lung has a low median.
            if is_value.any() and np.median(coarse_hu[is_value]) <= AIRY_HU:
                mask |= is_value
        if not mask.any():
            return None
        masks.append(mask)
    # x increases to the patient's left.
    left, right = sorted(masks, key=centre_x, reverse=True)
    return Lungs(left, right, coarse_hu, coarse_mm)


def every_few_voxels(
    image_hu: np.ndarray, labels: np.ndarray, spacing_mm: tuple[float, float, float]
) -> tuple[np.ndarray, np.ndarray, tuple[float, float, float]]:
    """Subsample an image and its labels (D, H, W) to a spacing of about half of `SOLID_MM`.

    Returns:
        Image, labels (both views) and their spacing (z, y, x).
    """
    steps = [max(1, round(SOLID_MM / (2 * mm))) for mm in spacing_mm]
    every_few = tuple(slice(None, None, step) for step in steps)
    z_mm, y_mm, x_mm = (step * mm for step, mm in zip(steps, spacing_mm, strict=True))
    return image_hu[every_few], labels[every_few], (z_mm, y_mm, x_mm)


def centre_x(mask: np.ndarray) -> float:
    """Index along x of the centre of mass of a mask (D, H, W)."""
    return float(np.average(np.arange(mask.shape[2]), weights=mask.sum(axis=(0, 1))))


def gap_between(lungs: Lungs) -> Gap:
    """Find the gap between the lungs in each row."""
    right, left = lungs.right, lungs.left
    width = right.shape[2]
    # `argmax` finds the first true voxel of a row; of the reversed row, the last one. The numbers
    # of a row that misses a lung mean nothing, see `is_between`.
    right_start = right.argmax(axis=2)
    right_stop = width - right[:, :, ::-1].argmax(axis=2)
    left_start = left.argmax(axis=2)
    left_stop = width - left[:, :, ::-1].argmax(axis=2)
    return Gap(
        is_between=np.logical_and(right.any(axis=2), left.any(axis=2)),
        start=right_stop,
        stop=left_start,
        outer_middle=(right_start + left_stop) / 2,
    )


def _levels(lungs: Lungs, low_share: float, high_share: float) -> range:
    """Slices between two shares of the height of the lungs, counted from their lower end."""
    slices = np.flatnonzero((lungs.left | lungs.right).any(axis=(1, 2)))
    lowest = slices[0]
    height = slices[-1] + 1 - lowest
    start = int(lowest + low_share * height)
    stop = int(np.ceil(lowest + high_share * height))
    return range(start, stop)


def liver_excess(lungs: Lungs) -> float | None:
    """Measure by how much the tissue below the right lung is more like the liver.

    The liver is a large piece of solid tissue: nothing in some millimetres around a voxel is as
    light as fat or gas.

    Returns:
        Mean of two differences, within ±1: the share of solid tissue below the right lung minus
        that below the left one, and the share of light tissue below the left lung minus that below
        the right one. None where the scan shows too little below one of them.
    """
    spacing_mm = np.array(lungs.spacing_mm)
    in_field = lungs.image_hu.max(axis=0) > BEYOND_FIELD_HU
    masks = []
    for lung in (lungs.right, lungs.left):
        columns = inner_columns(lung, lungs.spacing_mm)
        below = tissue_below(lung, columns & in_field, lungs.spacing_mm[0])
        if not shows_below(below, columns, spacing_mm):
            return None
        masks.append(below)
    below_right, below_left = masks
    # Only a part of the image is filtered.
    part = part_around(below_right | below_left, spacing_mm)
    is_solid, is_light = solid_and_light(lungs.image_hu[part], spacing_mm)
    below_right = below_right[part]
    below_left = below_left[part]
    # The liver is solid; stomach and colon hold gas and fat.
    solid_excess = is_solid[below_right].mean() - is_solid[below_left].mean()
    light_excess = is_light[below_left].mean() - is_light[below_right].mean()
    return float(solid_excess + light_excess) / 2


def part_around(mask: np.ndarray, spacing_mm: np.ndarray) -> tuple[slice, slice, slice]:
    """Slices of the part that `solid_and_light` reads for the voxels of a non-empty mask."""
    box = VoxelBox.from_mask(mask)
    assert box is not None, "`shows_below` has found tissue below the lungs"
    # Two filters, one after the other, each with a reach of at most `SOLID_MM`, rounded to voxels.
    reach = 2 * np.ceil(SOLID_MM / spacing_mm).astype(int)
    return box.expanded(reach.tolist()).clipped(mask.shape).slices()


def solid_and_light(image_hu: np.ndarray, spacing_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masks (D, H, W) of solid tissue, and of fat or gas (light), in an image after smoothing."""
    reach = np.rint(SOLID_MM / spacing_mm).astype(int)
    # Clipped, so that a few voxels of gas or metal do not decide about their neighbours.
    clipped_hu = np.clip(image_hu, -300, 300).astype(np.float32)
    smooth_hu = ndimage.uniform_filter(clipped_hu, np.maximum(1, reach).tolist())
    # Denser than water; even with contrast agent, the liver is less dense than bone.
    is_tissue = (smooth_hu > 0) & (smooth_hu < SPINE_HU)
    is_solid = ndimage.minimum_filter(is_tissue, (2 * reach + 1).tolist())
    return is_solid, smooth_hu < LIGHT_HU


def inner_columns(lung: np.ndarray, spacing_mm: tuple[float, float, float]) -> np.ndarray:
    """Mask (H, W) of the columns of a lung without its margin, which lies above the chest wall."""
    # The margin is as wide as the least depth of `tissue_below`. The pixels of a CT are square, so
    # the spacing along y is also that along x.
    num_outer = max(1, round(BELOW_LUNG_MM[0] / spacing_mm[1]))
    return np.asarray(ndimage.binary_erosion(lung.any(axis=0), iterations=num_outer))


def tissue_below(lung: np.ndarray, columns: np.ndarray, z_mm: float) -> np.ndarray:
    """Mask the voxels at the depths `BELOW_LUNG_MM` below a lung.

    Args:
        lung: Mask (D, H, W) of the lung; z runs upwards.
        columns: Mask (H, W) of the columns to look at, each of which meets the lung.
        z_mm: Distance of slices.

    Returns:
        Mask (D, H, W).
    """
    near_mm, far_mm = BELOW_LUNG_MM
    depths_mm = np.arange(len(lung)) * z_mm
    depths = np.flatnonzero((depths_mm > near_mm) & (depths_mm <= far_mm))  # in slices
    if not len(depths):
        return np.zeros(lung.shape, dtype=bool)
    z = np.arange(len(lung), dtype=np.int16)[:, None, None]
    # Depth of each voxel below the lowest one of the lung in its column, in slices; int16, since
    # the array is as large as the volume.
    depth = lung.argmax(axis=0).astype(np.int16) - z
    return np.asarray(columns & (depth >= depths[0]) & (depth <= depths[-1]))


def shows_below(below: np.ndarray, columns: np.ndarray, spacing_mm: np.ndarray) -> bool:
    """Whether a scan shows enough tissue below a lung.

    Args:
        below: From `tissue_below`, (D, H, W).
        columns: Mask (H, W) of all columns that should show it.
        spacing_mm: Spacing (z, y, x).
    """
    near_mm, far_mm = BELOW_LUNG_MM
    num_shown = np.count_nonzero(below)
    # Voxels at these depths in a scan that shows all of them in all columns.
    num_whole = np.count_nonzero(columns) * (far_mm - near_mm) / spacing_mm[0]
    is_large = num_shown * spacing_mm.prod() / 1000 >= MIN_BELOW_ML  # 1000 mm³ are 1 ml
    return bool(is_large and num_shown >= MIN_BELOW_SHARE * num_whole)


def arch_excess_mm(lungs: Lungs, gap: Gap) -> float | None:
    """Measure by how much more tissue lies to the left of the trachea than to its right.

    Returns:
        Distance from the trachea to the left lung minus that to the right lung, in mm, the mean
        over the upper half of the lungs; None where the trachea is seen along less than
        `TRACHEA_MM`.
    """
    z_mm, y_mm, x_mm = lungs.spacing_mm
    differences_mm = []
    for z in _levels(lungs, low_share=0.5, high_share=1.0):
        centre = _trachea_centre(lungs, gap, z)
        if centre is None:
            continue
        y, x = centre
        rows = np.flatnonzero(gap.is_between[z])
        # The rows beside the trachea, which is about `TRACHEA_MM` wide.
        rows = rows[np.abs(rows - y) * y_mm <= TRACHEA_MM / 2]
        if len(rows):
            # Mean distances in voxels from the trachea to the first voxel of the left lung, and to
            # the last one of the right lung, which is the voxel before `gap.start`.
            to_left = gap.stop[z, rows].mean() - x
            to_right = x - gap.start[z, rows].mean() + 1
            differences_mm.append((to_left - to_right) * x_mm)
    if len(differences_mm) * z_mm < TRACHEA_MM:
        return None
    return float(np.mean(differences_mm))


def _trachea_centre(lungs: Lungs, gap: Gap, z: int) -> tuple[float, float] | None:
    """Find the centre (y, x) of the trachea, or of its fork, in a slice; None where it is not seen.

    The trachea is the largest piece of air between the lungs, if this has the area of a trachea.
    """
    x = np.arange(lungs.image_hu.shape[2])
    starts = gap.start[z][:, None]
    stops = gap.stop[z][:, None]
    is_gap = gap.is_between[z][:, None] & (x >= starts) & (x < stops)
    pieces, num_pieces = ndimage.label(is_gap & (lungs.image_hu[z] < TRACHEA_HU))
    if not num_pieces:
        return None
    areas_mm2 = np.bincount(pieces.ravel()) * lungs.spacing_mm[1] * lungs.spacing_mm[2]
    areas_mm2[0] = 0.0  # number 0 is what lies around the pieces
    largest = int(areas_mm2.argmax())
    low_mm2, high_mm2 = TRACHEA_MM2
    if areas_mm2[largest] < low_mm2 or areas_mm2[largest] > high_mm2:
        return None
    piece_y, piece_x = ndimage.center_of_mass(pieces == largest)
    return float(piece_y), float(piece_x)


def aorta_excess(lungs: Lungs, gap: Gap) -> float | None:
    """Measure by how much more lung lies on the right beside the front of the spine.

    Returns:
        Share of lung to the right of the spine minus that to its left, the mean over the slices,
        within ±1; None where fewer than four slices show the spine between the lungs.
    """
    _, y_mm, x_mm = lungs.spacing_mm
    is_lung = lungs.left | lungs.right
    near_mm, far_mm = AORTA_REACH_MM
    excesses = []
    # The ends of the lungs, 15 % of their height each, are left out.
    for z in _levels(lungs, low_share=0.15, high_share=0.85):
        front = _spine_front(lungs, gap, z)
        if front is None:
            continue
        y, x = front
        rows = np.flatnonzero(gap.is_between[z])
        # From a little behind the front of the spine to twice as far before it, where the aorta is.
        before_mm = (y - rows) * y_mm
        rows = rows[(before_mm >= -near_mm) & (before_mm <= 2 * near_mm)]
        if not len(rows):
            continue
        # For each column: its distance to the left of the spine, and the share of these rows in
        # which it is lung.
        to_left_mm = (np.arange(is_lung.shape[2]) - x) * x_mm
        lung_share = is_lung[z, rows].mean(axis=0)
        on_left = (to_left_mm >= near_mm) & (to_left_mm <= far_mm)
        on_right = (to_left_mm <= -near_mm) & (to_left_mm >= -far_mm)
        if on_left.any() and on_right.any():
            excesses.append(lung_share[on_right].mean() - lung_share[on_left].mean())
    if len(excesses) < 4:
        return None
    return float(np.mean(excesses))


def _spine_front(lungs: Lungs, gap: Gap, z: int) -> tuple[int, float] | None:
    """Find the row of the front of the spine, and its middle along x, in a slice; None without it.

    Voxels as dense as bone are looked for near the middle between the lungs.
    """
    rows = np.flatnonzero(gap.is_between[z])
    if not len(rows):
        return None
    # The spine lies in the back half of the slice's lungs and behind them; y runs to the back.
    lung_rows = np.flatnonzero((lungs.left[z] | lungs.right[z]).any(axis=1))
    half = int(lung_rows[0] + lung_rows[-1]) // 2
    back_rows = rows[rows >= half]
    if not len(back_rows):
        return None
    middle_x = float(np.median(gap.start[z, back_rows] + gap.stop[z, back_rows]) / 2)
    reach = SPINE_REACH_MM / lungs.spacing_mm[2]
    low_x = max(0, round(middle_x - reach))
    bone = lungs.image_hu[z, half:, low_x : round(middle_x + reach)] > SPINE_HU
    if np.count_nonzero(bone) < 2:  # a single voxel may be noise
        return None
    num_by_column = bone.sum(axis=0)
    # Share of the bone up to each row, from the front. The first tenth may be vessels with contrast
    # agent before the spine.
    covered = np.cumsum(bone.sum(axis=1)) / num_by_column.sum()
    front = half + int(np.searchsorted(covered, 0.1))
    spine_x = low_x + float(np.average(np.arange(len(num_by_column)), weights=num_by_column))
    return front, spine_x


def heart_offset_mm(lungs: Lungs, gap: Gap) -> float | None:
    """Measure how far to the left of the middle of the chest the heart lies.

    Returns:
        Mean offset to the left, in mm, of the middle of the gap between the front halves of the
        lungs from the middle between their outer borders; None with fewer than ten rows.
    """
    offsets = []
    for z in _levels(lungs, *HEART_SHARES):
        lung_rows = np.flatnonzero((lungs.left[z] | lungs.right[z]).any(axis=1))
        rows = np.flatnonzero(gap.is_between[z])
        if not len(rows):
            continue
        # The front half: the aorta and the spine lie behind.
        rows = rows[rows < (lung_rows[0] + lung_rows[-1]) / 2]
        middle = (gap.start[z, rows] + gap.stop[z, rows]) / 2
        offsets.extend((middle - gap.outer_middle[z, rows]).tolist())
    if len(offsets) < 10:  # one offset for each row of each slice
        return None
    return float(np.mean(offsets)) * lungs.spacing_mm[2]
