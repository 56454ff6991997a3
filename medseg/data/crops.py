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

# An axis that is coarser than the finest by more than this ratio takes a low percentile of its own
# spacings.
MAX_RATIO = 3.0
COARSE_PERCENTILE = 10.0


class ScanSpacings(NamedTuple):
    """Spacings of the training scans.

    Attributes:
        spacings_mm: Spacing of each scan as it was made, (z, y, x).
        shares: How often each scan is drawn, > 0, sum 1.
    """

    spacings_mm: Sequence[tuple[float, float, float]]
    shares: Sequence[float]


def typical_spacing_mm(
    spacings_mm: Sequence[tuple[float, float, float]], average: str = "median"
) -> tuple[float, float, float]:
    """Average the spacings of each axis, with detail kept along a coarse one.

    A coarse axis gets its 10th percentile, but nothing finer than the next coarsest axis: at the
    average slice thickness, half of the scans would lose detail along it (Isensee et al. 2021,
    supplement: "target spacing").

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
    values = np.asarray(spacings_mm, dtype=np.float64)
    target = AVERAGES[average](values, axis=0)
    coarsest = int(target.argmax())
    if target[coarsest] > MAX_RATIO * target.min():
        others = np.delete(target, coarsest)
        target[coarsest] = max(np.percentile(values[:, coarsest], COARSE_PERCENTILE), others.max())
    z, y, x = (round(float(mm), 3) for mm in target)
    return z, y, x


def draw_spacing_mm(
    rng: np.random.Generator, range_mm: tuple[float, float], scans: ScanSpacings | None = None
) -> tuple[float, float, float]:
    """Draw the spacing of a training sample.

    Without scans, the logarithms of the spacing along z and of that in plane (one for y and x) are
    uniform over the range: 1 to 2 mm is as frequent as 2 to 4 mm. With scans, the spacing of one of
    them is drawn and each axis clipped to the range: rare coarse scans keep their frequency, and
    thick slices keep the pixels that they come with.

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
    low, high = map(math.log, range_mm)
    log_z, log_in_plane = rng.uniform(low, high, size=2)
    in_plane = math.exp(log_in_plane)
    return math.exp(log_z), in_plane, in_plane


@dataclass(frozen=True)
class StageCrops:
    """Spacings and crops of one stage, as in prediction, or with a generator as in training.

    Attributes:
        rule: How the network's grid is laid on the cache's.
        scan_spacings: What the spacing of a sample is drawn from; None draws evenly.
        region_margin_mm: Added on every side of a region.
        box_jitter_mm: Standard deviation of each face of a training box.
        patch_size: Patch in voxels (D, H, W); None is the whole crop. Crops of the validation are
            at least as large.
        tile_size: Tile of the validation, voxels (D, H, W).
        divisor: Required multiple of the input size, (z, y, x).
        coarse_probs: Case name to what the coarse stage says, where the network sees it.
        coarse_boxes: Case name to region name to the box that the coarse stage found; boxes of the
            reference elsewhere.
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

        None is that of the cache.
        """
        if rng is None or self.rule.range_mm is None:
            return self.rule.spacing_mm(case.audit.grid.spacing_mm)
        return draw_spacing_mm(rng, self.rule.range_mm, self.scan_spacings)

    def crop(self, case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        """Choose the crop of a region.

        With a generator its faces are jittered by the error of the coarse stage.
        """
        lattice = case.grid.resampled(self.spacing_mm(case, rng))
        coarse_box = self.coarse_boxes.get(case.name, {}).get(region.name)
        tight = coarse_box or case.region_boxes[region.name]
        if rng is None:
            # As prediction makes its crops: of tiles, or whole and no smaller than a patch.
            size = self.tile_size
            least_size = self.patch_size
        else:
            # Training cuts patches.
            tight = jittered(tight, self.box_jitter_mm, case.grid.spacing_mm, rng)
            size = self.patch_size
            least_size = None
        return region_crop(
            tight,
            case.grid,
            lattice,
            self.region_margin_mm,
            size,
            self.divisor,
            self.rule,
            least_size or (1, 1, 1),
        )


def jittered(
    box: VoxelBox,
    box_jitter_mm: float,
    spacing_mm: tuple[float, float, float],
    rng: np.random.Generator,
) -> VoxelBox:
    """Move each face of a box by a normal error; at least one voxel is left.

    Args:
        box: Tight box of a region.
        box_jitter_mm: Standard deviation of each face.
        spacing_mm: Voxel spacing of the box's grid, (z, y, x).
        rng: Generator of the sample.
    """
    shifts = np.round(rng.normal(0.0, box_jitter_mm, (2, 3)) / np.array(spacing_mm)).astype(int)
    start = np.array(box.start) + shifts[0]
    stop = np.maximum(start + 1, np.array(box.stop) + shifts[1])
    return VoxelBox(tuple(start), tuple(stop))
