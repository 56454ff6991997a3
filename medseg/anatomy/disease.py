"""Disease painted into lungs whose outline is known: what belongs to the lung, and fluid beside it.

Dense lung keeps its label, so that networks learn to include it. Pleural fluid lies between lung
and chest wall: it becomes background. The two differ by density and place. Radii and shares lie in
ranges that chest CTs show; densities follow the terms of the Fleischner Society (Hansell et al.,
Radiology 246 (2008) 697): ground glass leaves the vessels visible, consolidation hides them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medseg.anatomy.rules import MAX_LUNG_HU, RIM_MM
from medseg.geometry.grid import VoxelBox
from medseg.preprocess.effect import Effect, Spacing

# Of the noise that roughens borders and texture.
GRAIN_MM = 12.0
MAX_LESIONS = 3

# Fluid has the density of water. Lung without air enhances with contrast medium, and is denser.
FLUID_HU = (-5.0, 25.0)
# Width of the border of fluid.
FLUID_EDGE_MM = 1.5
# What fills the place of a missing lung: fluid, and fat in a share of the cases.
FAT_HU = (-115.0, -75.0)
FAT_SHARE = 0.3
DENSE_HU = (30.0, 110.0)
# Share of dense lesions with open airways, and share with vessels denser than the tissue.
BRANCHED_SHARE = 0.6
# Distance of neighbouring branches, and range of their radii.
BRANCH_GRAIN_MM = 24.0
BRANCH_RADIUS_MM = (0.7, 2.5)
# Lung beside fluid that has lost its air, at most.
MAX_SQUEEZED_MM = 35.0
# Fluid climbs at the wall: by how much, and how far from it.
MENISCUS_MM = 15.0
WALL_MM = 20.0


class Lesion(NamedTuple):
    """A lesion.

    Attributes:
        depth_mm: Distance from its border, positive inside, (D, H, W).
        hu: Its density.
        edge_mm: Width of its border.
        has_branches: Whether airways and vessels go on inside.
    """

    depth_mm: Tensor
    hu: float
    edge_mm: float
    has_branches: bool = False


class Place(NamedTuple):
    """An organ in which a lesion is drawn.

    Attributes:
        points_mm: Coordinates z, y (towards the back) and x, which broadcast to (D, H, W).
        organ: Its voxels, (D, H, W) bool.
        reach: Voxels that may be painted, 1 or 0, (D, H, W): the organ with a rim.
        rough: Smooth noise of unit variance, (D, H, W).
        rng: Generator of the sample.
    """

    points_mm: tuple[Tensor, Tensor, Tensor]
    organ: Tensor
    reach: Tensor
    rough: Tensor
    rng: np.random.Generator

    def ball(self, radius_mm: tuple[float, float], rough_mm: float) -> Tensor:
        """Depth in a rough ball about a random voxel of the organ; most balls are small."""
        voxels = self.organ.flatten().nonzero()[:, 0]
        voxel = int(voxels[int(self.rng.integers(len(voxels)))])
        chosen = np.unravel_index(voxel, tuple(self.organ.shape))
        low, high = map(math.log, radius_mm)
        radius = math.exp(self.rng.uniform(low, high))
        z, y, x = self.points_mm
        centre_z, centre_y, centre_x = (int(index) for index in chosen)
        away_z = z - z.flatten()[centre_z]
        away_y = y - y.flatten()[centre_y]
        away_x = x - x.flatten()[centre_x]
        away_mm = (away_z**2 + away_y**2 + away_x**2).sqrt()
        return radius - away_mm + rough_mm * self.rough

    def lowest(self, max_share: float, tilt: float, rough_mm: float) -> Tensor:
        """Depth below a plane that cuts off a share of the organ at its back.

        A tilted plane also cuts at the base or apex. Most shares are small.
        """
        height = self.height(tilt)
        share = 0.02 + (max_share - 0.02) * self.rng.random() ** 1.5
        return height - self.level(height, share) + rough_mm * self.rough

    def height(self, tilt: float) -> Tensor:
        """Coordinate towards the back, tilted at random to the base or apex and to a side."""
        z, y, x = self.points_mm
        # Slopes of the plane along z and x. They are as often negative as positive, so that their
        # signs below mean nothing; another sign would change the samples of a seed.
        slope_z, slope_x = self.rng.uniform(-tilt, tilt, size=2)
        along = y - slope_z * z + slope_x * x
        # Divided by the length of the plane's normal: a distance in mm.
        length = math.sqrt(1 + slope_z * slope_z + slope_x * slope_x)
        return (along / length).expand(self.organ.shape)

    def level(self, height: Tensor, share: float) -> float:
        """Height above which a share of the organ lies."""
        heights = height[self.organ]
        # A sample of the voxels is enough for a quantile.
        return float(torch.quantile(heights[:: 1 + len(heights) // 10_000], 1.0 - share))


# The place is drawn before the density: another order would change the samples of a seed.
def _consolidation(place: Place) -> Lesion:
    depth_mm = place.ball(radius_mm=(8.0, 50.0), rough_mm=6.0)
    return Lesion(depth_mm, place.rng.uniform(*DENSE_HU), edge_mm=5.0, has_branches=True)


def _ground_glass(place: Place) -> Lesion:
    depth_mm = place.ball(radius_mm=(10.0, 60.0), rough_mm=8.0)
    return Lesion(depth_mm, place.rng.uniform(-650.0, -300.0), edge_mm=12.0)


def _mass(place: Place) -> Lesion:
    depth_mm = place.ball(radius_mm=(6.0, 35.0), rough_mm=1.5)
    return Lesion(depth_mm, place.rng.uniform(30.0, 90.0), edge_mm=1.5)


def _collapse(place: Place) -> Lesion:
    depth_mm = place.lowest(max_share=0.5, tilt=1.0, rough_mm=4.0)
    return Lesion(depth_mm, place.rng.uniform(*DENSE_HU), edge_mm=4.0, has_branches=True)


KINDS: dict[str, Callable[[Place], Lesion]] = {
    "consolidation": _consolidation,
    "ground_glass": _ground_glass,
    "mass": _mass,
    "collapse": _collapse,
}


def paint_disease(
    image_hu: Tensor,
    labels: Tensor,
    value: int,
    kinds: Sequence[str],
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> None:
    """Paint one to three lesions into a lung, in place. No lung: nothing.

    Args:
        image_hu: (D, H, W) float32; y runs to the patient's back.
        labels: (D, H, W) uint8.
        value: Value of the organ, which is there.
        kinds: Keys of `KINDS`, at least one.
        rng: Source of all choices.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    box = _box_around(labels == value, RIM_MM, spacing_mm)
    image_hu = image_hu[box]
    labels = labels[box]
    if float(image_hu[labels == value].median()) > MAX_LUNG_HU:
        return
    for _ in range(int(rng.integers(1, MAX_LESIONS, endpoint=True))):
        kind = kinds[int(rng.integers(len(kinds)))]
        place = _place(labels, value, rng, spacing_mm)
        _paint_lesion(image_hu, KINDS[kind](place), place, spacing_mm)


def paint_fluid(
    image_hu: Tensor,
    labels: Tensor,
    value: int,
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> None:
    """Paint pleural fluid into the outer part of a lung, in place. No lung: nothing.

    The fluid lies at the back, where it sinks to, and climbs at the wall; half of the time it is a
    layer along the wall instead. It becomes background. The lung that it squeezes becomes dense and
    keeps its label.

    Args:
        image_hu: (D, H, W) float32; y runs to the patient's back.
        labels: (D, H, W) uint8.
        value: Value of the organ, which is there.
        rng: Source of all choices.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    # Far enough from the organ that its wall is seen.
    box = _box_around(labels == value, WALL_MM, spacing_mm)
    image_hu = image_hu[box]
    labels = labels[box]
    if float(image_hu[labels == value].median()) > MAX_LUNG_HU:
        return
    place = _place(labels, value, rng, spacing_mm)
    wall_mm = _depth_below_wall(place.organ, spacing_mm)
    draw_depth = (_pool, _layer)[int(rng.integers(2))]
    depth_mm = draw_depth(place, wall_mm)

    squeezed_mm = MAX_SQUEEZED_MM * rng.random() ** 2
    squeezed = Lesion(depth_mm + squeezed_mm, rng.uniform(*DENSE_HU), 4.0, has_branches=True)
    _paint_lesion(image_hu, squeezed, place, spacing_mm)
    _pour(image_hu, labels, place, depth_mm, FLUID_HU)


def paint_missing(
    image_hu: Tensor,
    labels: Tensor,
    value: int,
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> None:
    """Paint fluid or fat in the place of a whole lung, in place, as after its removal.

    All of it becomes background; what belongs to other labels stays. No lung: nothing.

    Args:
        image_hu: (D, H, W) float32.
        labels: (D, H, W) uint8.
        value: Value of the organ, which is there.
        rng: Source of all choices.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    box = _box_around(labels == value, RIM_MM, spacing_mm)
    image_hu = image_hu[box]
    labels = labels[box]
    if float(image_hu[labels == value].median()) > MAX_LUNG_HU:
        return
    place = _place(labels, value, rng, spacing_mm)
    # No surface: all voxels are as deep as the rim is wide, which is more than a border.
    everywhere_mm = torch.full_like(image_hu, RIM_MM)
    range_hu = FAT_HU if rng.random() < FAT_SHARE else FLUID_HU
    _pour(image_hu, labels, place, everywhere_mm, range_hu)


@dataclass(frozen=True)
class LungEffect(Effect):
    """Change painted into lungs of a sample: into its first channel and its labels, in place.

    Attributes:
        probability: How often, see the class. Where it is 0 nothing is drawn from the generator:
            samples are the same as without the effect.
        window_hu: HU of -1 and 1 in the image.
        organ_values: Labels of the organs that may be painted, see `Task.organ_values`.

    Raises:
        ValueError: If HU of the image are not known.
    """

    # What the keys of the effect begin with.
    name: ClassVar[str]

    probability: float
    window_hu: tuple[float, float] | None
    organ_values: Sequence[int]

    def __post_init__(self) -> None:
        if self.probability and not self.window_hu:
            key = f"{self.name}_probability={self.probability:g}"
            raise ValueError(f"{key} needs HU, but the first channel has no window; give 0")

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Draw lungs that the sample shows, and paint each before the next is drawn."""
        if self.probability and self.window_hu is not None:
            values = [value for value in labels.unique().tolist() if value in self.organ_values]
            for value in self.draw(values, rng):
                with _in_hu(image, self.window_hu) as hu:
                    self.paint(hu, labels, value, rng, spacing_mm)
        return image, labels

    def draw(self, values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
        """Draw each lung with the probability."""
        return (value for value in values if rng.random() < self.probability)

    def paint(
        self,
        image_hu: Tensor,
        labels: Tensor,
        value: int,
        rng: np.random.Generator,
        spacing_mm: Spacing,
    ) -> None:
        """Paint the lung of a value, see `paint_disease`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Disease(LungEffect):
    """Up to three lesions painted into a lung: what is less dense than a lesion becomes as dense.

    The labels stay, so the outline goes on through consolidation, ground glass, a mass or collapse.
    Only an organ whose median is below `MAX_LUNG_HU` is painted; what belongs to another label
    stays.

    Attributes:
        kinds: Keys of `KINDS`, of which each lesion is one.
        each_lung: Draw with the probability for each lung, so that both may be painted; otherwise
            one random lung of the sample is.

    Raises:
        ValueError: If a kind is unknown.
    """

    name = "disease"
    kinds: Sequence[str]
    each_lung: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - KINDS.keys()
        if unknown:
            names = ", ".join(map(str, unknown))
            raise ValueError(f"disease_kinds: expected some of {', '.join(KINDS)}, got {names}")
        if self.probability and not self.kinds:
            raise ValueError(f"disease_kinds is empty; name one at least of {', '.join(KINDS)}")
        super().__post_init__()

    def draw(self, values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
        """Draw each lung with the probability, or one with it."""
        if self.each_lung:
            yield from super().draw(values, rng)
        elif rng.random() < self.probability and values:
            yield values[int(rng.integers(len(values)))]

    def paint(
        self,
        image_hu: Tensor,
        labels: Tensor,
        value: int,
        rng: np.random.Generator,
        spacing_mm: Spacing,
    ) -> None:
        """Paint lesions; the labels stay."""
        paint_disease(image_hu, labels, value, self.kinds, rng, spacing_mm)


@dataclass(frozen=True)
class Fluid(LungEffect):
    """Pleural fluid between a lung and the chest wall, see `paint_fluid`.

    The probability is that of each lung of a sample.
    """

    name = "fluid"
    paint = staticmethod(paint_fluid)


@dataclass(frozen=True)
class Missing(LungEffect):
    """One of the lungs of a sample replaced by fluid or fat, see `paint_missing`.

    The probability is that of a sample. A sample that shows a single lung is not changed: no lung
    would be left, and nothing would tell what fills the places of both.
    """

    name = "missing"
    paint = staticmethod(paint_missing)

    def draw(self, values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
        """Draw one of several lungs with the probability."""
        if rng.random() < self.probability and len(values) > 1:
            yield values[int(rng.integers(len(values)))]


def _pour(
    image_hu: Tensor,
    labels: Tensor,
    place: Place,
    depth_mm: Tensor,
    range_hu: tuple[float, float],
) -> None:
    """Fill the part of an organ below a surface with background of one density, in place."""
    # Inside the lung nothing shines through. Beyond its outline ribs and muscles stay.
    filling_hu = _texture(place).add_(place.rng.uniform(*range_hu))
    change = filling_hu - image_hu
    change = torch.where(place.organ, change, change.clamp(min=0.0))
    share = (0.5 + depth_mm / FLUID_EDGE_MM).clamp_(0.0, 1.0)
    image_hu.add_(share * place.reach * change)
    labels[place.organ & (depth_mm > 0)] = 0


def _pool(place: Place, wall_mm: Tensor) -> Tensor:
    """Depth in fluid that has sunk to the back, with a meniscus at the wall."""
    climb_mm = place.rng.uniform(0.0, MENISCUS_MM) * (1 - wall_mm / WALL_MM) ** 2
    height = place.height(0.5) + climb_mm + 2.0 * place.rough
    share = 0.01 + 0.6 * place.rng.random() ** 1.5
    return height - place.level(height, share)


def _layer(place: Place, wall_mm: Tensor) -> Tensor:
    """Depth in a layer of fluid along the wall of the back, which thins out to the front."""
    thickness_mm = place.rng.uniform(4.0, 0.9 * WALL_MM)
    height = place.height(1.0)
    above_mm = height - place.level(height, place.rng.uniform(0.2, 0.8))
    return torch.minimum(thickness_mm - wall_mm, 0.3 * above_mm) + 2.0 * place.rough


def _paint_lesion(image_hu: Tensor, lesion: Lesion, place: Place, spacing_mm: Spacing) -> None:
    """Make what is less dense than a lesion as dense, in place."""
    value_hu = _texture(place).add_(lesion.hu)
    if lesion.has_branches and place.rng.random() < BRANCHED_SHARE:
        vessel_hu = lesion.hu + place.rng.uniform(10.0, 150.0)
        vessels = _branches(place, spacing_mm)
        value_hu += vessels * (vessel_hu - value_hu)
    if lesion.has_branches and place.rng.random() < BRANCHED_SHARE:
        airways = _branches(place, spacing_mm)
        value_hu += airways * (-950.0 - value_hu)
    share = (0.5 + lesion.depth_mm / lesion.edge_mm).clamp_(0.0, 1.0)
    share.mul_(place.reach)
    image_hu.add_(share.mul_(value_hu.sub_(image_hu).clamp_(min=0.0)))


def _texture(place: Place) -> Tensor:
    """Draw noise of a scanner and slow changes of density, in HU, (D, H, W)."""
    grain = place.rng.standard_normal(place.organ.shape, dtype=np.float32)
    texture = torch.from_numpy(grain).mul_(place.rng.uniform(5.0, 25.0))
    return texture.add_(place.rough, alpha=place.rng.uniform(0.0, 8.0))


def _branches(place: Place, spacing_mm: Spacing) -> Tensor:
    """Draw winding branches, 1 inside and 0 outside, (D, H, W).

    Their lines are where two fields of smooth noise are both zero.
    """
    shape = place.organ.shape
    first = _smooth_noise(shape, spacing_mm, place.rng, BRANCH_GRAIN_MM)
    second = _smooth_noise(shape, spacing_mm, place.rng, BRANCH_GRAIN_MM)
    # A unit of the noise is about half of its grain away from zero.
    away_mm = (first**2 + second**2).sqrt_().mul_(BRANCH_GRAIN_MM / 2)
    radius_mm = place.rng.uniform(*BRANCH_RADIUS_MM)
    # The border is one voxel wide; a branch that is thinner than a voxel fills a part of it.
    width_mm = max(spacing_mm)
    filled = (0.5 + (radius_mm - away_mm) / width_mm).clamp_(0.0, 1.0)
    return filled.mul_(min(1.0, 2 * radius_mm / width_mm))


def _depth_below_wall(organ: Tensor, spacing_mm: Spacing) -> Tensor:
    """Estimate the distance of an organ's voxels from its surface, 0 … `WALL_MM`, (D, H, W).

    At a flat surface half of the neighbours within `WALL_MM` belong to the organ, at that depth
    all of them do.
    """
    mean = organ[None, None].float()
    for axis, mm in enumerate(spacing_mm):
        radius = [0, 0, 0]
        # A kernel must not be longer than its axis.
        radius[axis] = min(round(WALL_MM / mm), (organ.shape[axis] - 1) // 2)
        kernel = [2 * voxels + 1 for voxels in radius]
        # The edge of a patch is no wall.
        mean = F.avg_pool3d(mean, kernel, stride=1, padding=radius, count_include_pad=False)
    return mean[0, 0].sub_(0.5).mul_(2 * WALL_MM).clamp_(0.0, WALL_MM)


def _place(labels: Tensor, value: int, rng: np.random.Generator, spacing_mm: Spacing) -> Place:
    """Measure the organ of a value in a label map (D, H, W)."""
    organ = labels == value
    z, y, x = (torch.arange(size) * mm for size, mm in zip(organ.shape, spacing_mm, strict=True))
    points_mm = (z[:, None, None], y[:, None], x)
    rim = [math.ceil(RIM_MM / mm) for mm in spacing_mm]
    # What belongs to another label keeps its density: bronchi at the hilum, the other lung.
    reach = _grown(organ, rim).mul_(organ | (labels == 0))
    rough = _smooth_noise(organ.shape, spacing_mm, rng, GRAIN_MM)
    return Place(points_mm, organ, reach, rough, rng)


def _box_around(mask: Tensor, margin_mm: float, spacing_mm: Spacing) -> tuple[slice, slice, slice]:
    """Find the box of a mask that is not empty, with a margin, inside its volume."""
    voxels = mask.nonzero()
    start = voxels.min(0).values
    stop = voxels.max(0).values + 1
    margin = tuple(math.ceil(margin_mm / mm) for mm in spacing_mm)
    tight = VoxelBox(tuple(start.tolist()), tuple(stop.tolist()))
    return tight.expanded(margin).clipped(tuple(mask.shape)).slices()


@contextmanager
def _in_hu(image: Tensor, window_hu: tuple[float, float]) -> Iterator[Tensor]:
    """Give the first channel in HU, and map it back to the range of the network, in place."""
    low, high = window_hu
    half = (high - low) / 2
    hu = image[0].mul_(half).add_(low + half)
    yield hu
    hu.sub_(low + half).div_(half)


def _grown(mask: Tensor, voxels: Sequence[int]) -> Tensor:
    """Grow a mask (D, H, W) by voxels along each axis: 1 where it is, else 0, float32."""
    grown = mask[None, None].float()
    for axis, num_voxels in enumerate(voxels):
        radius = [0, 0, 0]
        radius[axis] = num_voxels
        kernel = [2 * reach + 1 for reach in radius]
        grown = F.max_pool3d(grown, kernel, stride=1, padding=radius)
    return grown[0, 0]


def _smooth_noise(
    shape: Sequence[int],
    spacing_mm: Spacing,
    rng: np.random.Generator,
    grain_mm: float,
) -> Tensor:
    """Draw noise of unit variance with a grain, (D, H, W)."""
    extents_mm = [size * mm for size, mm in zip(shape, spacing_mm, strict=True)]
    coarse = [2 + math.ceil(extent_mm / grain_mm) for extent_mm in extents_mm]
    values = torch.from_numpy(rng.standard_normal(coarse, dtype=np.float32))
    size = tuple(shape)
    noise = F.interpolate(values[None, None], size, mode="trilinear", align_corners=True)[0, 0]
    # Linear interpolation lowers the variance between the points of the grid.
    return noise / noise.std().clamp(min=1e-3)
