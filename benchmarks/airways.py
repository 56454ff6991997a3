"""Airway tracker: the lumen of trachea and main bronchi down to the hilum, found in the scan alone.

The result shows how much of the airway a segmentation labels as lung, so the tracker must not use a
prediction. On a grid of 1 mm it finds the trachea, an upright tube of air, and follows the air
downwards as far as a ball of the radius `CORE_MM` fits through. Air is what lies below a threshold
in HU. If this air connects the tube with the lung, the tracker tries the next lower threshold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy import ndimage, sparse
from scipy.sparse.csgraph import dijkstra

from medseg.geometry.grid import VoxelBox, VoxelGrid
from medseg.preprocess.crop import body_box
from medseg.preprocess.resample import resample_image

# Edge of a voxel of the tracker's grid. Its powers convert numbers of voxels to mm, mm² or mm³.
GRID_MM = 1.0
# Values are clipped to this range before resampling. The lower limit, air, also fills voxels
# outside the scan.
LIMITS_HU = (-1024.0, 600.0)
# The first threshold is half-way between air and wall. Walls that thick slices blur are darker than
# half-way, and close the tube only at a lower threshold.
THRESHOLDS_HU = (-500.0, -600.0, -700.0, -800.0, -850.0, -900.0, -930.0)
# Radius of the ball that must fit through the airway. Lobar bronchi have radii of 3 to 4 mm; gaps
# in a wall are smaller.
CORE_MM = 3.0
# The mediastinum lies within this distance of the middle of the body.
HALF_WIDTH_MM = 90.0
# Least and largest cross-section of the core of the trachea, the lumen without a layer of `CORE_MM`
# at its wall. The lumen has 100 to 450 mm².
TRACHEA_MM2 = (8.0, 450.0)
# Largest ratio of the sides of a cross-section's bounding box; a trachea that is narrowed from the
# sides is long.
MAX_LENGTH_TO_WIDTH = 3.0
# Least height of an upright tube that may be the trachea.
MIN_HEIGHT_MM = 20.0
# A tube that ends lower than the highest one by more than this is not the trachea.
MAX_BELOW_MM = 30.0
# Tubes with less than this share of the voxels of the largest one are not the trachea.
MIN_SHARE_OF_LARGEST = 0.5
# Outer radius of the ring of tissue around a tube, in voxels of 1 mm.
RING = 7
# Voxels above TISSUE_HU are soft tissue; least share of them in the ring around the trachea.
TISSUE_HU = -500.0
MIN_TISSUE_SHARE = 0.6
# Range of HU of lung, and its least area on one side of the trachea in one slice.
LUNG_HU = (-980.0, -500.0)
MIN_LUNG_MM2 = 2000.0
# A core reaches into the lung if its volume is above `MAX_CORE_ML`, or if one of its cross-sections
# is more than `MAX_WIDENING` times that of the trachea.
MAX_CORE_ML = 60.0
MAX_WIDENING = 3.0
# The main bronchi and the intermediate bronchus end within this distance of the carina.
REACH_MM = 45.0
# Length of the pieces in which the cross-section is measured, and least cross-section of a branch.
SHELL_MM = 4.0
MIN_BRANCH_MM2 = 4.0


@dataclass(frozen=True)
class Airway:
    """Airway of a scan.

    Attributes:
        lumen: Mask (D, H, W), bool, on the grid of the scan; all False if no trachea was found.
        remark: Why there is no lumen; empty if there is one.
        threshold_hu: Voxels below this value are air; None without a lumen.
    """

    lumen: np.ndarray
    remark: str = ""
    threshold_hu: float | None = None


def track_airway(image_hu: np.ndarray, grid: VoxelGrid) -> Airway:
    """Find the lumen of trachea and main bronchi.

    Args:
        image_hu: Oriented scan (D, H, W) in HU: z to the head, y to the back, x to the left.
        grid: Its grid.
    """
    fine = _mediastinum(image_hu, grid)
    hu = resample_image(image_hu, grid, fine, LIMITS_HU[0], limits=LIMITS_HU).numpy()
    remark = "no trachea is visible"
    for threshold_hu in THRESHOLDS_HU:
        is_air = hu < threshold_hu
        # Erosion by a ball: the remaining voxels are those where the centre of the ball can be.
        core = GRID_MM * ndimage.distance_transform_edt(is_air) > CORE_MM
        parts, _ = ndimage.label(core)
        for tube in upright_tubes(core, hu):
            airway_core = follow(parts, tube)
            if airway_core is None:
                remark = "each upright tube of air opens into a lung"
                continue
            # Dilation by the same ball gives the lumen back its outer layer, within the air.
            to_core_mm = GRID_MM * ndimage.distance_transform_edt(~airway_core)
            lumen = is_air & (to_core_mm <= CORE_MM)
            # Interpolating the mask gives the share of lumen in each voxel of the scan.
            share = resample_image(lumen.astype(np.float32), fine, grid, outside=0.0).numpy()
            return Airway(share > 0.5, "", threshold_hu)
    return Airway(np.zeros(grid.shape, dtype=bool), remark)


def _mediastinum(image_hu: np.ndarray, grid: VoxelGrid) -> VoxelGrid:
    """Make the grid of the tracker: voxels of 1 mm around the middle of the body."""
    body = body_box(image_hu, grid.spacing_mm)
    fine = grid.resampled((GRID_MM,) * 3)
    box = fine.box_from(grid, body).clipped(fine.shape)
    middle = (box.start[2] + box.stop[2]) // 2
    half_width = round(HALF_WIDTH_MM / GRID_MM)
    depth, height, _ = fine.shape
    columns = VoxelBox((0, 0, middle - half_width), (depth, height, middle + half_width))
    return fine.crop(box.intersect(columns))


def upright_tubes(core: np.ndarray, hu: np.ndarray) -> Iterator[np.ndarray]:
    """Find upright tubes of air in soft tissue with lung beside them.

    A tube is a stack of connected discs: parts of axial slices that look like a cross-section of
    the trachea. The trachea is the largest tube that does not open into a lung.

    Args:
        core: Air farther than `CORE_MM` from its border (D, H, W), on the grid of the tracker.
        hu: The scan on that grid.

    Yields:
        The voxels (D, H, W), bool, of each tube of `MIN_HEIGHT_MM` or more, the largest first.
    """
    discs = np.zeros_like(core)
    # `plane_discs` is a view of one slice of `discs`, which is filled through it.
    for plane, plane_hu, plane_discs in zip(core, hu, discs, strict=True):
        parts, count = ndimage.label(plane)
        areas_mm2 = GRID_MM**2 * np.bincount(parts.ravel(), minlength=1 + count)
        boxes = ndimage.find_objects(parts)
        has_area = (areas_mm2 >= TRACHEA_MM2[0]) & (areas_mm2 <= TRACHEA_MM2[1])
        has_area[0] = False  # part 0 is the background
        for number in np.flatnonzero(has_area).tolist():
            rows, columns = boxes[number - 1]  # the boxes begin with that of part 1
            wide_box = (_widened(rows), _widened(columns))
            part = parts[wide_box] == number
            if _is_disc(part, plane_hu[wide_box]):
                plane_discs[wide_box] |= part
    tubes, _ = ndimage.label(discs)
    num_voxels = np.bincount(tubes.ravel())
    candidates = _highest_tubes(tubes, hu)
    candidates.sort(key=lambda number: -num_voxels[number])
    for number in candidates:
        # An oesophagus with air is smaller.
        if num_voxels[number] >= MIN_SHARE_OF_LARGEST * num_voxels[candidates[0]]:
            yield tubes == number


def _highest_tubes(tubes: np.ndarray, hu: np.ndarray) -> list[int]:
    """List the numbers of the high tubes beside lung, without those far below the others.

    The trachea ends higher than the gas of the bowel.
    """
    tops: dict[int, int] = {}  # number of a tube to the slice above its upper end
    for number, box in enumerate(ndimage.find_objects(tubes), start=1):
        height_mm = GRID_MM * (box[0].stop - box[0].start)
        if height_mm >= MIN_HEIGHT_MM and _is_beside_lung(hu, box):
            tops[number] = box[0].stop
    least_top = max(tops.values(), default=0) - MAX_BELOW_MM / GRID_MM
    return [number for number, top in tops.items() if top >= least_top]


def _widened(extent: slice) -> slice:
    """Add `RING` pixels at both ends of a range; a slice may reach beyond the end of an array."""
    return slice(max(0, extent.start - RING), extent.stop + RING)


def _is_disc(part: np.ndarray, hu: np.ndarray) -> bool:
    """Whether a part of a slice is compact and lies in soft tissue.

    Args:
        part: Its pixels (H, W), bool, with a margin of `RING` pixels.
        hu: Values of the slice in the same pixels (H, W).
    """
    ys, xs = np.nonzero(part)
    width, length = sorted((np.ptp(ys) + 1, np.ptp(xs) + 1))
    if length > MAX_LENGTH_TO_WIDTH * width:
        return False
    # The part is a core: its lumen reaches `CORE_MM` farther, and a pixel of blurred wall follows.
    away_mm = GRID_MM * ndimage.distance_transform_edt(~part)
    ring = (away_mm > CORE_MM + GRID_MM) & (away_mm <= GRID_MM * RING)
    tissue_share = (hu[ring] > TISSUE_HU).mean()
    return float(tissue_share) >= MIN_TISSUE_SHARE


def _is_beside_lung(hu: np.ndarray, tube_box: tuple[slice, slice, slice]) -> bool:
    """Whether the lowest slice of a tube shows lung on a side, and more lung than its highest one.

    The lungs narrow along the trachea towards the apices, and widen along the bowel below the
    diaphragm.
    """
    lowest = tube_box[0].start
    highest = tube_box[0].stop - 1
    # The middle of the tube separates the right side of the body, at smaller x, from the left one.
    x = (tube_box[2].start + tube_box[2].stop) // 2
    ends_hu = hu[[lowest, highest]]  # (2, H, W)
    is_lung = (ends_hu > LUNG_HU[0]) & (ends_hu < LUNG_HU[1])
    # Areas in the two slices, each (2,).
    right_mm2 = GRID_MM**2 * is_lung[:, :, :x].sum(axis=(1, 2))
    left_mm2 = GRID_MM**2 * is_lung[:, :, x:].sum(axis=(1, 2))
    lowest_mm2, highest_mm2 = right_mm2 + left_mm2
    # One side is enough: the other lung may be collapsed or removed.
    has_lung = max(right_mm2[0], left_mm2[0]) >= MIN_LUNG_MM2
    return bool(has_lung and lowest_mm2 > highest_mm2)


def follow(parts: np.ndarray, tube: np.ndarray) -> np.ndarray | None:
    """Follow the trachea to the hilum.

    Args:
        parts: Numbers of the connected parts of the core (D, H, W); 0 outside the core.
        tube: Voxels (D, H, W), bool, of one of `upright_tubes`: the trachea, unless the air that
            begins there opens into a lung.

    Returns:
        The part of the core (D, H, W), bool, that belongs to trachea and main bronchi; None if it
        opens into the lung.
    """
    top = int(np.flatnonzero(tube.any(axis=(1, 2)))[-1])
    # The tube lies in one part of the core, so any of its voxels has the number of that part.
    part_number = parts[top][tube[top]][0]
    connected = parts == part_number
    volume_ml = np.count_nonzero(connected) * GRID_MM**3 / 1000.0
    if volume_ml > MAX_CORE_ML:
        return None
    # Shells of equal distance from the top along the air are cross-sections: one piece in the
    # trachea, two below the carina.
    distance_mm = _distance_mm(connected, top)
    shells = np.full(parts.shape, -1)
    shells[connected] = distance_mm[connected] // SHELL_MM
    areas_mm2 = []  # for each shell, the cross-sections of its pieces
    for number in range(int(shells.max()) + 1):
        # Voxels that share a face, an edge or a corner are one piece, as in `_distance_mm`.
        pieces, _ = ndimage.label(shells == number, np.ones((3, 3, 3)))
        volumes_mm3 = np.bincount(pieces.ravel())[1:] * GRID_MM**3
        areas_mm2.append(volumes_mm3 / SHELL_MM)
    widest_mm2 = [float(areas.max()) for areas in areas_mm2]
    # The uppermost shells are surely trachea: a tube has at least this height.
    trachea_mm2 = np.median(widest_mm2[: round(MIN_HEIGHT_MM / SHELL_MM)])
    if max(widest_mm2) > MAX_WIDENING * trachea_mm2:
        return None
    carina = _carina_shell(areas_mm2)
    if carina is None:
        return connected
    return connected & (distance_mm <= carina * SHELL_MM + REACH_MM)


def _carina_shell(areas_mm2: list[np.ndarray]) -> int | None:
    """Find the first of two successive shells with two branches each; None if there is none.

    A single shell with two branches may be noise.

    Args:
        areas_mm2: For each shell from the top, the cross-sections of its pieces.
    """
    num_branches = [np.count_nonzero(areas >= MIN_BRANCH_MM2) for areas in areas_mm2]
    for shell, (num_here, num_below) in enumerate(pairwise(num_branches)):
        if min(num_here, num_below) >= 2:
            return shell
    return None


def _distance_mm(mask: np.ndarray, top: int) -> np.ndarray:
    """Measure the length of the shortest path inside a mask from its voxels in the slice `top`.

    Returns:
        Length in mm, (D, H, W); infinite outside the mask.
    """
    numbers = np.full(mask.shape, -1)  # of the nodes of the graph; -1 outside the mask
    voxels = np.argwhere(mask)
    numbers[mask] = np.arange(len(voxels))
    # The edges of the graph of neighbours: both ends, and the length in mm.
    starts = []
    stops = []
    lengths = []
    # Half of the steps to the 26 neighbours, since the graph is undirected. A step is the index of
    # the neighbour in a cube of 3 × 3 × 3 around the voxel, whose centre is (1, 1, 1). The padding
    # shifts `padded` by 1 too, so voxel + step is the neighbour there.
    offsets = [step for step in np.ndindex(3, 3, 3) if step > (1, 1, 1)]
    padded = np.pad(numbers, 1, constant_values=-1)
    for step in offsets:
        z, y, x = (voxels + np.array(step)).T
        neighbours = padded[z, y, x]
        is_inside = neighbours >= 0
        starts.append(np.flatnonzero(is_inside))
        stops.append(neighbours[is_inside])
        step_mm = GRID_MM * float(np.linalg.norm(np.subtract(step, 1)))
        lengths.append(np.full(np.count_nonzero(is_inside), step_mm))
    shape = (len(voxels), len(voxels))
    edges = (np.concatenate(starts), np.concatenate(stops))
    graph = sparse.coo_matrix((np.concatenate(lengths), edges), shape=shape)
    first_nodes = numbers[top][mask[top]]
    # `min_only`: the distance of each voxel to the nearest of the first nodes.
    node_distances_mm = dijkstra(graph.tocsr(), directed=False, indices=first_nodes, min_only=True)
    result_mm = np.full(mask.shape, np.inf)
    result_mm[mask] = node_distances_mm
    return result_mm
