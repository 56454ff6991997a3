"""Crops of a stage and their grids: one rule for training, validation and prediction.

The network's input is a crop: a box of voxels on a grid, the crop's lattice. The lattice is usually
a grid over the whole scan: the scan's own grid or that grid at another spacing
(`VoxelGrid.resampled`). For a stage whose crops have a fixed size, the box is resampled, and the
crop's lattice is the grid of the resampled box alone.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from medseg.geometry.grid import INDEX_TOLERANCE, VoxelBox, VoxelGrid
from medseg.geometry.sizes import network_size


class Crop(NamedTuple):
    """Input region of a network.

    Attributes:
        lattice: Grid to whose voxel indices the boxes refer.
        box: The crop, in voxels of the lattice; it may reach outside.
        content: Box in voxels of the lattice; outside it the network sees air in place of the scan.
            None: the network sees the scan in the whole crop.
    """

    lattice: VoxelGrid
    box: VoxelBox
    content: VoxelBox | None = None

    @property
    def grid(self) -> VoxelGrid:
        """Grid of the crop alone."""
        return self.lattice.crop(self.box)


@dataclass(frozen=True)
class GridRule:
    """Size and spacing of the crops of a stage.

    Attributes:
        size: Each crop is resampled to this shape, (D, H, W); None keeps the lattice's spacing.
        is_cube: Whether all axes of a crop grow to the length of the longest axis, in voxels; meant
            for a lattice with the same spacing on all axes.
        is_padded: Whether the voxels by which a crop grows are air; otherwise they show more of the
            scan.
        range_mm: Smallest and largest spacing of an axis that the network was trained with; None:
            the stage's spacing alone.
    """

    size: tuple[int, int, int] | None = None
    is_cube: bool = False
    is_padded: bool = False
    range_mm: tuple[float, float] | None = None

    def spacing_mm(
        self, scan_spacing_mm: tuple[float, float, float]
    ) -> tuple[float, float, float] | None:
        """Choose the spacing of a crop: the scan's own, clamped to `range_mm` axis by axis.

        Args:
            scan_spacing_mm: Spacing of the original scan, (z, y, x).

        Returns:
            Spacing of the crop's lattice; None: the stage's spacing.
        """
        if self.range_mm is None:
            return None
        return clamp_spacing(self.range_mm, scan_spacing_mm)

    def crop(
        self,
        box: VoxelBox,
        lattice: VoxelGrid,
        patch_size: tuple[int, int, int] | None,
        divisor: tuple[int, int, int],
        least_size: tuple[int, int, int] = (1, 1, 1),
    ) -> Crop:
        """Choose the crop that contains a box.

        Args:
            box: Region with its margin, in voxels of the lattice.
            lattice: Grid over the whole scan at the spacing of the crop.
            patch_size: Size (z, y, x) of the patches cut from the crop. The crop then grows to at
                least this size, and `divisor` and `least_size` do not apply. None: the crop goes to
                the network whole, and grows to a size that the network takes (`network_size`).
            divisor: A whole crop grows to a multiple of this, (z, y, x).
            least_size: A whole crop grows to at least this size (z, y, x) before it grows to a
                multiple of the divisor.

        Returns:
            Crop that contains the box; a crop of fixed size (`size`) covers exactly the box.
        """
        # A fixed size: the box does not grow, but is resampled. Its new grid is the crop's lattice.
        if self.size is not None:
            return Crop(lattice.crop(box).resized(self.size), VoxelBox.full(self.size))
        # A padded crop shows air beyond the box as it is now, before it grows.
        content = box if self.is_padded else None
        if self.is_cube:
            box = box.at_least([max(box.shape)] * 3)
        if patch_size is not None:
            return Crop(lattice, box.at_least(patch_size), content)
        box = box.at_least(least_size)
        return Crop(lattice, box.at_least(network_size(box.shape, divisor)), content)


# Default rule: crops lie on the lattice, and are as small as the network allows.
PLAIN = GridRule()


def clamp_spacing(
    range_mm: tuple[float, float], spacing_mm: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Clamp each axis of a spacing to a range.

    Example:
        >>> clamp_spacing((1.0, 3.0), (5.0, 0.7, 1.2))
        (3.0, 1.0, 1.2)
    """
    low_mm, high_mm = range_mm
    z, y, x = (min(max(mm, low_mm), high_mm) for mm in spacing_mm)
    return z, y, x


def region_crop(
    tight_box: VoxelBox,
    from_grid: VoxelGrid,
    lattice: VoxelGrid,
    margin_mm: float,
    patch_size: tuple[int, int, int] | None,
    divisor: tuple[int, int, int],
    rule: GridRule = PLAIN,
    least_size: tuple[int, int, int] = (1, 1, 1),
) -> Crop:
    """Choose the crop of a region, in training and in prediction.

    The crop covers the region and the margin. The region stays in the middle: the crop may reach
    outside the volume, and each time an axis grows by an odd number of voxels, the odd voxel goes
    to the high end. The crop has whole voxels of the lattice, unless the rule has a fixed size.

    Args:
        tight_box: Tight box of the region in voxels of `from_grid`.
        from_grid: Grid of the coarse result (or of the reference labels in training).
        lattice: Grid over the whole scan at the spacing of the crop; same axes as `from_grid`.
        margin_mm: Added on every side, in mm, rounded up to whole voxels.
        patch_size: See `GridRule.crop`.
        divisor: See `GridRule.crop`.
        rule: Rule of the stage.
        least_size: See `GridRule.crop`.
    """
    box = lattice.box_from(from_grid, tight_box)
    # A margin of exactly n voxels must not become n + 1 by rounding noise.
    margin_voxels = []
    for spacing_mm in lattice.spacing_mm:
        margin_voxels.append(math.ceil(margin_mm / spacing_mm - INDEX_TOLERANCE))
    return rule.crop(box.expanded(margin_voxels), lattice, patch_size, divisor, least_size)


def distortion(spacing_mm: tuple[float, float, float]) -> float:
    """Divide the largest spacing of a grid by its smallest.

    In an array of such voxels the anatomy appears stretched by this factor; 1 keeps every shape.

    Example:
        >>> distortion((3.0, 1.5, 2.0))
        2.0
    """
    return max(spacing_mm) / min(spacing_mm)
