"""Crops of a stage: typical spacing of a data set, spacing of each sample, crop of each region.

`StageCrops` is plain data without callables: a data set that holds it can be pickled, so loader
workers can start by `spawn`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from medseg.data.cache import CachedCase, CoarseProbs
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import PLAIN, Crop, GridRule, clamp_spacing, region_crop
from medseg.task import Region

AVERAGES: dict[str, Callable[..., np.ndarray]] = {"median": np.median, "mean": np.mean}
"""Averages over the spacings of the scans, axis by axis."""

# If the average of the coarsest axis is more than MAX_RATIO times that of the finest axis, the
# coarsest axis gets this percentile of its spacings instead, as in nnU-Net.
MAX_RATIO = 3.0
COARSE_PERCENTILE = 10.0


class ScanSpacings(NamedTuple):
    """Spacings of the training scans.

    Attributes:
        spacings_mm: Spacing of each scan as it was made, (z, y, x).
        shares: Probability of each scan to be drawn, > 0; they add up to 1.
    """

    spacings_mm: Sequence[tuple[float, float, float]]
    shares: Sequence[float]


def typical_spacing_mm(
    spacings_mm: Sequence[tuple[float, float, float]], average: str = "median"
) -> tuple[float, float, float]:
    """Average the spacings of each axis, with detail kept along a coarse one.

    Where the coarsest axis is more than `MAX_RATIO` times as coarse as the finest, it gets its 10th
    percentile, but nothing finer than the second coarsest axis: at the average slice thickness,
    half of the scans would lose detail along it (Isensee et al. 2021, supplement: "target
    spacing").

    Args:
        spacings_mm: Spacing of each oriented scan, (z, y, x); at least one.
        average: Key of `AVERAGES`.

    Returns:
        Spacing (z, y, x), in whole micrometres.

    Example:
        >>> typical_spacing_mm([(1.0, 0.7, 0.7), (5.0, 0.8, 0.8), (5.0, 0.9, 0.9)])
        (1.8, 0.8, 0.8)
        >>> typical_spacing_mm([(1.0, 0.7, 0.7), (2.0, 0.8, 0.8), (2.4, 0.9, 0.9)], "mean")
        (1.8, 0.8, 0.8)
    """
    scans_mm = np.asarray(spacings_mm, dtype=np.float64)  # (scans, 3)
    target_mm = AVERAGES[average](scans_mm, axis=0)
    coarsest = int(target_mm.argmax())
    if target_mm[coarsest] > MAX_RATIO * target_mm.min():
        low_mm = np.percentile(scans_mm[:, coarsest], COARSE_PERCENTILE)
        second_coarsest_mm = np.delete(target_mm, coarsest).max()
        target_mm[coarsest] = max(low_mm, second_coarsest_mm)
    z, y, x = (round(float(mm), 3) for mm in target_mm)
    return z, y, x


def draw_spacing_mm(
    rng: np.random.Generator, range_mm: tuple[float, float], scans: ScanSpacings | None = None
) -> tuple[float, float, float]:
    """Draw the spacing of a training sample.

    Without scans, two spacings are drawn: one along z, one in plane (for y and x). Their logarithms
    are uniform over the range: 1 to 2 mm is as frequent as 2 to 4 mm. With scans, the spacing of
    one scan is drawn by its share and clipped to the range. Coarse scans are then as rare as in the
    data, and thick slices have the pixel sizes that they have in the data.

    Args:
        rng: Generator of the sample.
        range_mm: Least and largest spacing of an axis.
        scans: Scans to draw from, or None.

    Returns:
        Spacing (z, y, x).
    """
    if scans is not None:
        number = int(rng.choice(len(scans.shares), p=scans.shares))
        return clamp_spacing(range_mm, scans.spacings_mm[number])
    log_low, log_high = map(math.log, range_mm)
    log_z, log_in_plane = rng.uniform(log_low, log_high, size=2)
    in_plane_mm = math.exp(log_in_plane)
    return math.exp(log_z), in_plane_mm, in_plane_mm


@dataclass(frozen=True)
class StageCrops:
    """Spacings and crops of one stage, for training and for validation.

    With a random generator, the methods choose as training does; without, as prediction does.

    Attributes:
        rule: Size and spacing of the crops.
        scan_spacings: Scans whose spacings training samples get; None draws spacings evenly over
            `rule.range_mm`, see `draw_spacing_mm`.
        region_margin_mm: Margin that is added on every side of a region.
        box_jitter_mm: Standard deviation of the distance by which each face of a training box is
            moved.
        patch_size: Patch in voxels (D, H, W); None is the whole crop. Crops of the validation are
            at least as large.
        tile_size: Tile of the sliding window in validation, voxels (D, H, W); None: the whole crop
            at once.
        divisor: The input size of the network must be a multiple of this, (z, y, x).
        coarse_boxes: Case name to region name to the box that the coarse stage found, on the grid
            of the cache; a region without such a box has the box of the reference.
        coarse_probs: Case name to the probabilities of the coarse stage; empty if they are no input
            of the network.
    """

    rule: GridRule = PLAIN
    scan_spacings: ScanSpacings | None = None
    region_margin_mm: float = 0.0
    box_jitter_mm: float = 0.0
    patch_size: tuple[int, int, int] | None = None
    tile_size: tuple[int, int, int] | None = None
    divisor: tuple[int, int, int] = (1, 1, 1)
    coarse_boxes: Mapping[str, Mapping[str, VoxelBox]] = field(default_factory=dict)
    coarse_probs: Mapping[str, CoarseProbs] = field(default_factory=dict)

    def spacing_mm(
        self, case: CachedCase, rng: np.random.Generator | None = None
    ) -> tuple[float, float, float] | None:
        """Choose the spacing of a sample: drawn with a generator, else that of prediction.

        Returns:
            Spacing (z, y, x); None for the spacing of the cache.
        """
        if rng is None or self.rule.range_mm is None:
            return self.rule.spacing_mm(case.audit.grid.spacing_mm)
        return draw_spacing_mm(rng, self.rule.range_mm, self.scan_spacings)

    def crop(self, case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        """Choose the crop of a region, in which training then cuts its patch.

        With a generator, the faces of the box are moved at random: prediction uses boxes of the
        coarse stage, which are not exact.

        Args:
            case: Case of the cache, whose grid the boxes of its regions are on.
            region: A region that the case has.
            rng: Generator of a training sample; None in validation.
        """
        # A run depends on the order of its random numbers: first the spacing, then the jitter.
        lattice = case.grid.resampled(self.spacing_mm(case, rng))
        tight_box = self.coarse_boxes.get(case.name, {}).get(region.name)
        if tight_box is None:
            tight_box = case.region_boxes[region.name]
        least_size = (1, 1, 1)
        if rng is None:
            # As in prediction: the crop grows to at least a tile. Without tiles, the network sees
            # it whole, at least in the size of a training patch.
            input_size = self.tile_size
            if self.patch_size is not None:
                least_size = self.patch_size
        else:
            input_size = self.patch_size
            tight_box = jittered(tight_box, self.box_jitter_mm, case.grid.spacing_mm, rng)
        return region_crop(
            tight_box,
            case.grid,
            lattice,
            margin_mm=self.region_margin_mm,
            patch_size=input_size,
            divisor=self.divisor,
            rule=self.rule,
            least_size=least_size,
        )


def jittered(
    box: VoxelBox,
    box_jitter_mm: float,
    spacing_mm: tuple[float, float, float],
    rng: np.random.Generator,
) -> VoxelBox:
    """Move each face of a box by a normally distributed distance, in whole voxels.

    An axis on which the box would become empty keeps one voxel.

    Args:
        box: Tight box of a region.
        box_jitter_mm: Standard deviation of the distance.
        spacing_mm: Voxel spacing of the box's grid, (z, y, x).
        rng: Generator of the sample.
    """
    # One row for the low faces and one for the high faces, (z, y, x). A face may leave the scan.
    shifts_mm = rng.normal(0.0, box_jitter_mm, (2, 3))
    low_shift, high_shift = np.round(shifts_mm / np.array(spacing_mm)).astype(int)
    start = np.array(box.start) + low_shift
    stop = np.maximum(start + 1, np.array(box.stop) + high_shift)
    return VoxelBox(tuple(start), tuple(stop))
