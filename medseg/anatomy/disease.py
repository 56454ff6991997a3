"""Augmentation by disease: lesions painted into labelled lungs, and pleural fluid beside them.

Dense lung keeps its label, so that networks learn to include it. Pleural fluid, which lies between
lung and chest wall, becomes background: it differs in density and place. Radii and shares lie
in ranges that chest CTs show; densities follow the terms of the Fleischner Society (Hansell et al.,
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

# All numbers are drawn from the generator of a sample: one more draw, or another order of the
# draws, would change the samples of every seed.

# Grain of the noise that roughens borders and texture: the distance of its random points.
GRAIN_MM = 12.0
MAX_LESIONS = 3

# Range of the density of fluid, which is near water.
FLUID_HU = (-5.0, 25.0)
# Width of the border of fluid.
FLUID_EDGE_MM = 1.5
# The place of a missing lung is filled by fluid or, in a share of the cases, by fat, whose density
# has this range.
FAT_HU = (-115.0, -75.0)
FAT_SHARE = 0.3
# Range of the density of lung without air: contrast medium makes it denser than fluid.
DENSE_HU = (30.0, 110.0)
# Density of air in an airway.
AIRWAY_HU = -950.0
# Share of the dense lesions that contain vessels denser than themselves. Independently, the same
# share contains open airways.
BRANCHED_SHARE = 0.6
# Distance of neighbouring branches, and range of their radii.
BRANCH_GRAIN_MM = 24.0
BRANCH_RADIUS_MM = (0.7, 2.5)
# Largest thickness of the layer of dense lung beside fluid, which squeezes the air out of it.
MAX_SQUEEZED_MM = 35.0
# Meniscus of fluid at the wall: its largest height, and the distance to which it reaches inwards.
MENISCUS_MM = 15.0
WALL_MM = 20.0


class Lesion(NamedTuple):
    """Lesion to be painted.

    Attributes:
        depth_mm: Distance from its border, positive inside, (D, H, W).
        hu: Its mean density in HU.
        edge_mm: Width of its border, over which it fades into the lung.
        has_branches: Whether airways and vessels may be drawn inside.
    """

    depth_mm: Tensor
    hu: float
    edge_mm: float
    has_branches: bool = False


class Place(NamedTuple):
    """Place of a lesion: the geometry of the organ that contains it, and the random numbers.

    Attributes:
        points_mm: Coordinates z, y (towards the back) and x, which broadcast to (D, H, W).
        organ: Its voxels, (D, H, W) bool.
        paintable: 1 for voxels that may be painted, the organ with a rim; else 0, (D, H, W).
        roughness: Smooth noise of unit variance, which roughens borders, (D, H, W).
        rng: Generator of the sample.
    """

    points_mm: tuple[Tensor, Tensor, Tensor]
    organ: Tensor
    paintable: Tensor
    roughness: Tensor
    rng: np.random.Generator

    def ball(self, radius_mm: tuple[float, float], rough_mm: float) -> Tensor:
        """Depth (D, H, W) in a rough ball around a random voxel of the organ, as in `Lesion`.

        Args:
            radius_mm: Least and largest radius; small ones are more frequent.
            rough_mm: Standard deviation of the position of the border.
        """
        voxels = self.organ.flatten().nonzero()[:, 0]
        voxel = int(voxels[int(self.rng.integers(len(voxels)))])
        centre = np.unravel_index(voxel, tuple(self.organ.shape))
        centre_z, centre_y, centre_x = (int(index) for index in centre)
        # Log-uniform: each doubling of the radius is equally likely.
        log_low, log_high = map(math.log, radius_mm)
        drawn_radius_mm = math.exp(self.rng.uniform(log_low, log_high))
        z, y, x = self.points_mm
        away_z = z - z.flatten()[centre_z]
        away_y = y - y.flatten()[centre_y]
        away_x = x - x.flatten()[centre_x]
        away_mm = (away_z**2 + away_y**2 + away_x**2).sqrt()
        return drawn_radius_mm - away_mm + rough_mm * self.roughness

    def lowest(self, max_share: float, tilt: float, rough_mm: float) -> Tensor:
        """Depth (D, H, W) below a plane that cuts off a share of the organ at its back.

        The back is lowest in a patient who lies on it. A tilted plane also cuts at the base or
        apex.

        Args:
            max_share: Largest share. The least is 0.02; small shares are more frequent.
            tilt: See `back_mm`.
            rough_mm: Standard deviation of the position of the border.
        """
        back_mm = self.back_mm(tilt)
        # The exponent of the uniform number makes small shares more frequent.
        share = 0.02 + (max_share - 0.02) * self.rng.random() ** 1.5
        return back_mm - self.level_mm(back_mm, share) + rough_mm * self.roughness

    def back_mm(self, tilt: float) -> Tensor:
        """Coordinate (D, H, W) in mm towards the back, tilted at random along z and x.

        It grows downwards in a patient who lies on the back.

        Args:
            tilt: Largest slope, in mm per mm.
        """
        z, y, x = self.points_mm
        # The slopes are symmetric about 0, so their signs in the formula do not matter.
        slope_z, slope_x = self.rng.uniform(-tilt, tilt, size=2)
        along = y - slope_z * z + slope_x * x
        # Divided by the length of the plane's normal: a distance in mm.
        length = math.sqrt(1 + slope_z * slope_z + slope_x * slope_x)
        return (along / length).expand(self.organ.shape)

    def level_mm(self, back_mm: Tensor, share: float) -> float:
        """Coordinate towards the back beyond which a share of the organ lies.

        Args:
            back_mm: From the method `back_mm`, with or without offsets, (D, H, W).
            share: In [0, 1].
        """
        organ_mm = back_mm[self.organ]
        # About 10,000 voxels are enough for a quantile.
        step = 1 + len(organ_mm) // 10_000
        return float(torch.quantile(organ_mm[::step], 1.0 - share))


# Each kind of lesion draws its place from the generator, then its density.
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
    """Paint one to three lesions into a lung, in place; an organ that is too dense stays as it is.

    Args:
        image_hu: (D, H, W) float32; y runs to the patient's back.
        labels: (D, H, W) uint8.
        value: Value of the organ, which must occur in the labels.
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
    """Paint pleural fluid into the outer part of a lung, in place.

    In half of the calls the fluid is a pool at the back with a meniscus at the wall, else a layer
    along the wall. The fluid becomes background. The lung that it squeezes becomes dense and keeps
    its label. An organ that is too dense to be a lung stays as it is.

    Args:
        image_hu: (D, H, W) float32; y runs to the patient's back.
        labels: (D, H, W) uint8.
        value: Value of the organ, which must occur in the labels.
        rng: Source of all choices.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    # With a margin, because `_depth_below_wall` averages over neighbours within `WALL_MM`.
    box = _box_around(labels == value, WALL_MM, spacing_mm)
    image_hu = image_hu[box]
    labels = labels[box]
    if float(image_hu[labels == value].median()) > MAX_LUNG_HU:
        return
    place = _place(labels, value, rng, spacing_mm)
    wall_mm = _depth_below_wall(place.organ, spacing_mm)
    is_pool = rng.integers(2) == 0
    depth_mm = _pool(place, wall_mm) if is_pool else _layer(place, wall_mm)

    # The dense lung reaches deeper than the fluid, which is then painted over its outer part.
    # Thin layers are more frequent.
    squeezed_mm = MAX_SQUEEZED_MM * rng.random() ** 2
    squeezed = Lesion(
        depth_mm + squeezed_mm, rng.uniform(*DENSE_HU), edge_mm=4.0, has_branches=True
    )
    _paint_lesion(image_hu, squeezed, place, spacing_mm)
    _fill(image_hu, labels, place, depth_mm, FLUID_HU)


def paint_missing(
    image_hu: Tensor,
    labels: Tensor,
    value: int,
    rng: np.random.Generator,
    spacing_mm: Spacing,
) -> None:
    """Paint fluid or fat where a whole lung was, as after its removal; changes both arrays.

    The whole lung becomes background; voxels of other labels stay. An organ that is too dense to be
    a lung stays as it is.

    Args:
        image_hu: (D, H, W) float32.
        labels: (D, H, W) uint8.
        value: Value of the organ, which must occur in the labels.
        rng: Source of all choices.
        spacing_mm: Voxel spacing, (z, y, x).
    """
    box = _box_around(labels == value, RIM_MM, spacing_mm)
    image_hu = image_hu[box]
    labels = labels[box]
    if float(image_hu[labels == value].median()) > MAX_LUNG_HU:
        return
    place = _place(labels, value, rng, spacing_mm)
    # The border of the filling ends at a depth of half of `FLUID_EDGE_MM`. All voxels get a larger
    # depth, so that they take the whole density.
    depth_mm = torch.full_like(image_hu, RIM_MM)
    range_hu = FLUID_HU
    if rng.random() < FAT_SHARE:
        range_hu = FAT_HU
    _fill(image_hu, labels, place, depth_mm, range_hu)


@dataclass(frozen=True)
class LungEffect(Effect):
    """Effect that paints into lungs: into the first channel and the labels of a sample, in place.

    Attributes:
        probability: Probability that a lung is painted, or that a sample is; each subclass says
            which of the two. If it is 0, nothing is drawn from the generator, so that samples are
            the same as without the effect.
        window_hu: HU of the values -1 and 1 of the first channel; None if it is not in HU.
        organ_values: Labels of the organs that may be painted, see `Task.organ_values`.

    Raises:
        ValueError: If HU of the image are not known.
    """

    # First word of the keys of the effect, such as `disease_probability`.
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
            # `draw` is an iterator that uses the generator in turn with `paint`: with a list of its
            # values the order of the draws, and so the samples, would differ.
            for value in self.draw(values, rng):
                with _in_hu(image, self.window_hu) as hu:
                    self.paint(hu, labels, value, rng, spacing_mm)
        return image, labels

    def draw(self, values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
        """Yield each lung with the probability; each is drawn after the one before is painted."""
        for value in values:
            if rng.random() < self.probability:
                yield value

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
    """Effect that paints up to three lesions into a lung; voxels denser than a lesion stay.

    The labels stay: they include consolidation, ground glass, a mass or collapse. Only an organ
    whose median is at most `MAX_LUNG_HU` is painted; voxels of other labels stay.

    Attributes:
        kinds: Keys of `KINDS`, of which each lesion is one.
        each_lung: Whether the probability is that of each lung, so that both may be painted.
            Otherwise it is that of the sample, and one random lung is painted.

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
        """Yield each lung with the probability or, without `each_lung`, one random lung with it."""
        if self.each_lung:
            yield from super().draw(values, rng)
        # The random number is drawn even where there is no lung: the number of draws must not
        # change, see the top of the module.
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
    """Effect that paints pleural fluid between a lung and the chest wall, see `paint_fluid`.

    The probability is that of each lung of a sample.
    """

    name = "fluid"
    paint = staticmethod(paint_fluid)


@dataclass(frozen=True)
class Missing(LungEffect):
    """Effect that replaces one lung of a sample by fluid or fat, see `paint_missing`.

    The probability is that of a sample. A sample that shows a single lung is not changed, since no
    lung would be left.
    """

    name = "missing"
    paint = staticmethod(paint_missing)

    def draw(self, values: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
        """Yield one of several lungs with the probability."""
        if rng.random() < self.probability and len(values) > 1:
            yield values[int(rng.integers(len(values)))]


def _fill(
    image_hu: Tensor,
    labels: Tensor,
    place: Place,
    depth_mm: Tensor,
    range_hu: tuple[float, float],
) -> None:
    """Fill the part of an organ below a surface with one density and the label 0, in place.

    Args:
        image_hu: Image (D, H, W).
        labels: Its labels (D, H, W).
        place: The organ.
        depth_mm: Depth below the surface, positive in the filling, (D, H, W).
        range_hu: Range of the density of the filling.
    """
    filling_hu = _texture(place).add_(place.rng.uniform(*range_hu))
    change_hu = filling_hu - image_hu
    # Inside the lung the filling replaces all densities. In the rim beyond its outline, tissue that
    # is denser than the filling stays, such as ribs and muscles.
    change_hu = torch.where(place.organ, change_hu, change_hu.clamp(min=0.0))
    share = _share_inside(depth_mm, FLUID_EDGE_MM)
    image_hu.add_(share * place.paintable * change_hu)
    labels[place.organ & (depth_mm > 0)] = 0


def _share_inside(depth_mm: Tensor, edge_mm: float) -> Tensor:
    """Share of a painted density: 0 outside, 1 inside, between them a border `edge_mm` wide.

    Depth 0 is the middle of the border, where the share is 0.5.
    """
    return (0.5 + depth_mm / edge_mm).clamp_(0.0, 1.0)


def _pool(place: Place, wall_mm: Tensor) -> Tensor:
    """Depth (D, H, W) in fluid that has sunk to the back, with a meniscus at the wall.

    Args:
        place: The organ.
        wall_mm: From `_depth_below_wall`.
    """
    # A parabola: the whole climb at the wall, none from `WALL_MM` on.
    climb_mm = place.rng.uniform(0.0, MENISCUS_MM) * (1 - wall_mm / WALL_MM) ** 2
    # The climb counts as depth, so that the surface lies further to the front at the wall. The
    # border is rough by 2 mm.
    back_mm = place.back_mm(tilt=0.5) + climb_mm + 2.0 * place.roughness
    # From 1 to 61 % of the organ; the exponent makes small shares more frequent.
    share = 0.01 + 0.6 * place.rng.random() ** 1.5
    return back_mm - place.level_mm(back_mm, share)


def _layer(place: Place, wall_mm: Tensor) -> Tensor:
    """Depth (D, H, W) in a layer of fluid along the wall of the back, which thins out to the front.

    Args:
        place: The organ.
        wall_mm: From `_depth_below_wall`.
    """
    # `wall_mm` ends at `WALL_MM`, so a layer of that thickness would have no inner border.
    thickness_mm = place.rng.uniform(4.0, 0.9 * WALL_MM)
    back_mm = place.back_mm(tilt=1.0)
    beyond_level_mm = back_mm - place.level_mm(back_mm, share=place.rng.uniform(0.2, 0.8))
    # The layer gets 0.3 mm thinner with each mm towards the front, and ends at the level. Its
    # border is rough by 2 mm.
    return torch.minimum(thickness_mm - wall_mm, 0.3 * beyond_level_mm) + 2.0 * place.roughness


def _paint_lesion(image_hu: Tensor, lesion: Lesion, place: Place, spacing_mm: Spacing) -> None:
    """Raise voxels that are less dense than a lesion to its density, in place; others stay."""
    lesion_hu = _texture(place).add_(lesion.hu)
    if lesion.has_branches and place.rng.random() < BRANCHED_SHARE:
        vessel_hu = lesion.hu + place.rng.uniform(10.0, 150.0)
        vessels = _branches(place, spacing_mm)
        lesion_hu += vessels * (vessel_hu - lesion_hu)
    if lesion.has_branches and place.rng.random() < BRANCHED_SHARE:
        airways = _branches(place, spacing_mm)
        lesion_hu += airways * (AIRWAY_HU - lesion_hu)
    share = _share_inside(lesion.depth_mm, lesion.edge_mm).mul_(place.paintable)
    # In place, since `lesion_hu` and `share` are as large as the image; neither is used afterwards.
    change_hu = lesion_hu.sub_(image_hu).clamp_(min=0.0)
    image_hu.add_(share.mul_(change_hu))


def _texture(place: Place) -> Tensor:
    """Draw scanner noise and slow variations of density, in HU about 0, (D, H, W)."""
    noise = place.rng.standard_normal(place.organ.shape, dtype=np.float32)
    texture = torch.from_numpy(noise).mul_(place.rng.uniform(5.0, 25.0))
    return texture.add_(place.roughness, alpha=place.rng.uniform(0.0, 8.0))


def _branches(place: Place, spacing_mm: Spacing) -> Tensor:
    """Draw winding branches, 1 inside and 0 outside, (D, H, W).

    Their centre lines are where two fields of smooth noise are both zero.
    """
    shape = place.organ.shape
    first = _smooth_noise(shape, spacing_mm, place.rng, BRANCH_GRAIN_MM)
    second = _smooth_noise(shape, spacing_mm, place.rng, BRANCH_GRAIN_MM)
    # Noise of unit variance reaches 1 about half of its grain away from a zero.
    away_mm = (first**2 + second**2).sqrt_().mul_(BRANCH_GRAIN_MM / 2)
    radius_mm = place.rng.uniform(*BRANCH_RADIUS_MM)
    # The border is one voxel wide; a branch that is thinner than a voxel fills a part of it.
    voxel_mm = max(spacing_mm)
    share = _share_inside(radius_mm - away_mm, voxel_mm)
    return share.mul_(min(1.0, 2 * radius_mm / voxel_mm))


def _depth_below_wall(organ: Tensor, spacing_mm: Spacing) -> Tensor:
    """Estimate the distance of an organ's voxels from its surface, 0 … `WALL_MM`, (D, H, W).

    It follows from the share of the neighbours within `WALL_MM` that belong to the organ: a half of
    them at a flat surface, and all of them at the depth `WALL_MM`.
    """
    share = organ[None, None].float()
    # The mean over a box, axis by axis.
    for axis, mm in enumerate(spacing_mm):
        radius = [0, 0, 0]
        # A kernel must not be longer than its axis.
        radius[axis] = min(round(WALL_MM / mm), (organ.shape[axis] - 1) // 2)
        kernel = [2 * voxels + 1 for voxels in radius]
        # What lies beyond the image does not count: the edge of a patch is no wall.
        share = F.avg_pool3d(share, kernel, stride=1, padding=radius, count_include_pad=False)
    return share[0, 0].sub_(0.5).mul_(2 * WALL_MM).clamp_(0.0, WALL_MM)


def _place(labels: Tensor, value: int, rng: np.random.Generator, spacing_mm: Spacing) -> Place:
    """Make the `Place` of a label value from a label map (D, H, W)."""
    organ = labels == value
    z, y, x = (torch.arange(size) * mm for size, mm in zip(organ.shape, spacing_mm, strict=True))
    # (D, 1, 1), (H, 1) and (W), which broadcast to (D, H, W).
    points_mm = (z[:, None, None], y[:, None], x)
    rim = [math.ceil(RIM_MM / mm) for mm in spacing_mm]
    # Voxels of other labels keep their density: bronchi at the hilum, the other lung.
    paintable = _grown(organ, rim).mul_(organ | (labels == 0))
    roughness = _smooth_noise(organ.shape, spacing_mm, rng, GRAIN_MM)
    return Place(points_mm, organ, paintable, roughness, rng)


def _box_around(mask: Tensor, margin_mm: float, spacing_mm: Spacing) -> tuple[slice, slice, slice]:
    """Find the box of a non-empty mask with a margin, clipped to the volume of the mask."""
    voxels = mask.nonzero()
    start = voxels.min(0).values
    stop = voxels.max(0).values + 1
    margin = tuple(math.ceil(margin_mm / mm) for mm in spacing_mm)
    tight = VoxelBox(tuple(start.tolist()), tuple(stop.tolist()))
    return tight.expanded(margin).clipped(tuple(mask.shape)).slices()


@contextmanager
def _in_hu(image: Tensor, window_hu: tuple[float, float]) -> Iterator[Tensor]:
    """Convert the first channel to HU in place, and back to the range of the network at the end."""
    low_hu, high_hu = window_hu
    half_hu = (high_hu - low_hu) / 2
    middle_hu = low_hu + half_hu
    # -1 is the lower end of the window, 1 the upper one.
    image_hu = image[0].mul_(half_hu).add_(middle_hu)
    try:
        yield image_hu
    finally:
        image_hu.sub_(middle_hu).div_(half_hu)


def _grown(mask: Tensor, voxels: Sequence[int]) -> Tensor:
    """Grow a mask (D, H, W) by a number of voxels along each axis; 1 inside, else 0, float32."""
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
    """Draw noise of unit variance with a grain, (D, H, W): random points, interpolated between."""
    extents_mm = [size * mm for size, mm in zip(shape, spacing_mm, strict=True)]
    # A point for each grain, and one at either end.
    coarse_shape = [2 + math.ceil(extent_mm / grain_mm) for extent_mm in extents_mm]
    values = torch.from_numpy(rng.standard_normal(coarse_shape, dtype=np.float32))
    size = tuple(shape)
    noise = F.interpolate(values[None, None], size, mode="trilinear", align_corners=True)[0, 0]
    # Interpolation lowers the variance between the points; the division brings it back to 1.
    return noise / noise.std().clamp(min=1e-3)
