"""Crops of a stage: the spacing of each sample and the crop of each region, jittered in training.

Plain data without callables: a data set that holds it can be pickled, so loader workers can start by `spawn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from medseg.data.cache import CachedCase
from medseg.data.spacings import ScanSpacings, draw_spacing_mm
from medseg.data.task import Region
from medseg.geometry.grid import VoxelBox
from medseg.geometry.grid_rule import PLAIN, Crop, GridRule, region_crop


@dataclass(frozen=True)
class StageCrops:
    """Spacings and crops of one stage, as prediction takes them, or with a generator as training does.

    Attributes:
        rule: How the network's grid is laid on the cache's.
        scan_spacings: What the spacing of a sample is drawn from; None draws evenly.
        region_margin_mm: Added on every side of a region.
        box_jitter_mm: Standard deviation of each face of a training box.
        patch_size: Patch in voxels (D, H, W); None is the whole crop.
        tile_size: Tile of the validation, voxels (D, H, W).
        divisor: Required multiple of the input size, (z, y, x).
        coarse_boxes: Case name to region name to the box that the coarse stage found; boxes of the reference elsewhere.
    """

    rule: GridRule = PLAIN
    scan_spacings: ScanSpacings | None = None
    region_margin_mm: float = 0.0
    box_jitter_mm: float = 0.0
    patch_size: tuple[int, int, int] | None = None
    tile_size: tuple[int, int, int] | None = None
    divisor: tuple[int, int, int] = (1, 1, 1)
    coarse_boxes: Mapping[str, Mapping[str, VoxelBox]] = field(default_factory=dict)

    def spacing_mm(self, case: CachedCase, rng: np.random.Generator | None = None) -> tuple[float, float, float] | None:
        """Choose the spacing of a sample: drawn with a generator, else that of prediction; None is that of the cache."""
        if rng is None or self.rule.range_mm is None:
            return self.rule.spacing_mm(case.audit.grid.spacing_mm)
        return draw_spacing_mm(rng, self.rule.range_mm, self.scan_spacings)

    def crop(self, case: CachedCase, region: Region, rng: np.random.Generator | None) -> Crop:
        """Choose the crop of a region; with a generator its faces are jittered by the error of the coarse stage."""
        lattice = case.grid.resampled(self.spacing_mm(case, rng))
        tight = self.coarse_boxes.get(case.name, {}).get(region.name) or case.region_boxes[region.name]
        if rng is not None:
            tight = jittered(tight, self.box_jitter_mm, case.grid.spacing_mm, rng)
        size = self.tile_size if rng is None else self.patch_size
        return region_crop(tight, case.grid, lattice, self.region_margin_mm, size, self.divisor, self.rule)


def jittered(box: VoxelBox, box_jitter_mm: float, spacing_mm: tuple[float, float, float], rng: np.random.Generator) -> VoxelBox:
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
