"""Disease painted into lungs of a known outline: networks learn to include diseased parts.

Radii, densities and the diseased share of a lung lie in ranges that chest CTs show; densities
follow the terms of the Fleischner Society (Hansell et al., Radiology 246 (2008) 697): ground glass
leaves the vessels visible, consolidation hides them.

Pleural fluid is not painted (2026-11-24). By the convention of the references it lies outside the
lung, but painted fluid and painted collapse differ by some 30 HU only: with examples of both,
networks left both out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from medseg.anatomy.rules import MAX_LUNG_HU, RIM_MM
from medseg.geometry.grid import VoxelBox
from medseg.preprocess.effect import Effect, Spacing

GRAIN_MM = 12.0  # of the noise that roughens borders and texture
MAX_LESIONS = 3


class Lesion(NamedTuple):
    """A lesion.

    Attributes:
        depth_mm: Distance from its border, positive inside, (D, H, W).
        hu: Its density.
        edge_mm: Width of its border.
    """

    depth_mm: Tensor
    hu: float
    edge_mm: float


class Place(NamedTuple):
    """An organ in which a lesion is drawn.

    Attributes:
        points_mm: Coordinates z, y (towards the back) and x, which broadcast to (D, H, W).
        organ: Its voxels, (D, H, W) bool.
        rough: Smooth noise of unit variance, (D, H, W).
        rng: Generator of the sample.
    """

    points_mm: tuple[Tensor, Tensor, Tensor]
    organ: Tensor
    rough: Tensor
    rng: np.random.Generator

    def ball(self, radius_mm: tuple[float, float], rough_mm: float) -> Tensor:
        """Depth in a rough ball about a random voxel of the organ."""
        voxels = self.organ.flatten().nonzero()[:, 0]
        voxel = int(voxels[int(self.rng.integers(len(voxels)))])
        z, y, x = map(int, np.unravel_index(voxel, tuple(self.organ.shape)))
        # Uniform in the logarithm: each doubling of the radius is equally frequent.
        low, high = map(math.log, radius_mm)
        radius = math.exp(self.rng.uniform(low, high))
        axis_z, axis_y, axis_x = self.points_mm
        square = (axis_z - axis_z.flatten()[z]) ** 2 + (axis_y - axis_y.flatten()[y]) ** 2
        square = square + (axis_x - axis_x.flatten()[x]) ** 2
        return radius - square.sqrt() + rough_mm * self.rough

    def lowest(self, share: tuple[float, float], tilt: float, rough_mm: float) -> Tensor:
        """Depth below a plane that cuts off a share of the organ at its back.

        A tilted plane also cuts its base or apex.
        """
        slope_z, slope_x = self.rng.uniform(-tilt, tilt, size=2)
        axis_z, axis_y, axis_x = self.points_mm
        # Distance along the unit normal of the plane.
        norm = math.sqrt(1 + slope_z * slope_z + slope_x * slope_x)
        height = (axis_y - slope_z * axis_z + slope_x * axis_x) / norm
        heights = height.expand(self.organ.shape)[self.organ]
        # A sample of the voxels is enough for a quantile.
        sample = heights[:: 1 + len(heights) // 10_000]
        level = float(torch.quantile(sample, 1.0 - self.rng.uniform(*share)))
        return height - level + rough_mm * self.rough


def _consolidation(place: Place) -> Lesion:
    return Lesion(place.ball((12.0, 50.0), 6.0), place.rng.uniform(0.0, 60.0), 5.0)


def _ground_glass(place: Place) -> Lesion:
    return Lesion(place.ball((15.0, 60.0), 8.0), place.rng.uniform(-650.0, -300.0), 12.0)


def _mass(place: Place) -> Lesion:
    return Lesion(place.ball((6.0, 35.0), 1.5), place.rng.uniform(20.0, 80.0), 1.5)


def _collapse(place: Place) -> Lesion:
    return Lesion(place.lowest((0.05, 0.45), 1.0, 4.0), place.rng.uniform(10.0, 60.0), 4.0)


KINDS: dict[str, Callable[[Place], Lesion]] = {
    "consolidation": _consolidation,
    "ground_glass": _ground_glass,
    "mass": _mass,
    "collapse": _collapse,
}


@dataclass(frozen=True)
class Disease(Effect):
    """Up to three lesions painted into a lung: what is less dense than a lesion becomes as dense.

    The labels stay, so the outline goes on through consolidation, ground glass, a mass or collapse.
    Only the first channel is painted, and only a label whose median is below `MAX_LUNG_HU`.

    Attributes:
        probability: Probability that a sample is painted.
        kinds: Keys of `KINDS`, of which each lesion is one.
        window_hu: HU of -1 and 1 in the image.
        ignore_label: Label of voxels that are ignored, and stay; None where there are none.
        each_lung: Draw with the probability for each lung, so that both may be painted; otherwise
            one random lung of the sample is.

    Raises:
        ValueError: If a kind is unknown, or HU of the image are not known.
    """

    probability: float
    kinds: Sequence[str]
    window_hu: tuple[float, float] | None
    ignore_label: int | None = None
    each_lung: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.kinds) - KINDS.keys()
        if unknown:
            raise ValueError(
                f"disease_kinds: expected some of {', '.join(KINDS)}, got "
                f"{', '.join(map(str, unknown))}"
            )
        if self.probability and not self.kinds:
            raise ValueError(f"disease_kinds is empty; name one at least of {', '.join(KINDS)}")
        if self.probability and not self.window_hu:
            raise ValueError(
                f"disease_probability={self.probability:g} needs HU, but the first channel of the "
                "task has no window; give 0"
            )

    def __call__(
        self, image: Tensor, labels: Tensor, rng: np.random.Generator, spacing_mm: Spacing
    ) -> tuple[Tensor, Tensor]:
        """Paint the first channel, in place."""
        # Without disease nothing is drawn: the samples of older configurations stay.
        if not self.probability or self.window_hu is None:
            return image, labels
        low, high = self.window_hu
        half = (high - low) / 2
        for value in self._draw_lungs(labels, rng):
            # A view of the image: from [-1, 1] to HU and back, in place.
            hu = image[0].mul_(half).add_(low + half)
            paint_disease(hu, labels, value, self.kinds, rng, spacing_mm)
            hu.sub_(low + half).div_(half)
        return image, labels

    def _draw_lungs(self, labels: Tensor, rng: np.random.Generator) -> Iterator[int]:
        """Draw the values of the lungs that are painted, each just before it is painted."""
        values = [
            value for value in labels.unique().tolist() if value not in (0, self.ignore_label)
        ]
        if self.each_lung:
            for value in values:
                if rng.random() < self.probability:
                    yield value
        elif rng.random() < self.probability and values:
            yield values[int(rng.integers(len(values)))]


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
    rim = [math.ceil(RIM_MM / mm) for mm in spacing_mm]
    voxels = (labels == value).nonzero()
    start, last = voxels.min(0).values, voxels.max(0).values
    tight = VoxelBox(tuple(start.tolist()), tuple((last + 1).tolist()))
    box = tight.expanded(tuple(rim)).clipped(tuple(labels.shape)).slices()
    # A view: what is painted is painted into the image of the caller.
    image_hu = image_hu[box]
    organ = labels[box] == value
    if float(image_hu[organ].median()) > MAX_LUNG_HU:
        return
    z, y, x = (torch.arange(size) * mm for size, mm in zip(organ.shape, spacing_mm, strict=True))
    for _ in range(int(rng.integers(1, MAX_LESIONS, endpoint=True))):
        kind = kinds[int(rng.integers(len(kinds)))]
        rough = _smooth_noise(organ.shape, spacing_mm, rng)
        place = Place((z[:, None, None], y[:, None], x), organ, rough, rng)
        lesion = KINDS[kind](place)
        # One half at the border of the lesion, and nothing beyond the rim of the organ.
        share = (0.5 + lesion.depth_mm / lesion.edge_mm).clamp_(0.0, 1.0)
        share.mul_(_dilated(organ, rim))
        # HU of the lesion with its texture: noise of each voxel, and noise of the grain.
        texture = torch.from_numpy(rng.standard_normal(organ.shape, dtype=np.float32))
        texture.mul_(rng.uniform(5.0, 25.0)).add_(lesion.hu).add_(rough, alpha=8.0)
        # What is as dense already, such as a vessel in ground glass, stays.
        denser = texture.sub_(image_hu).clamp_(min=0.0)
        image_hu.add_(share.mul_(denser))


def _dilated(mask: Tensor, margins: Sequence[int]) -> Tensor:
    """Grow a mask (D, H, W) by a number of voxels along each axis.

    Returns:
        1 where it is, else 0, float32.
    """
    dilated = mask[None, None].float()
    # One axis after the other is a box, with less work than the box at once.
    for axis, margin in enumerate(margins):
        padding, kernel = [0, 0, 0], [1, 1, 1]
        padding[axis], kernel[axis] = margin, 2 * margin + 1
        dilated = F.max_pool3d(dilated, kernel, stride=1, padding=padding)
    return dilated[0, 0]


def _smooth_noise(shape: Sequence[int], spacing_mm: Spacing, rng: np.random.Generator) -> Tensor:
    """Draw noise of unit variance whose grain is `GRAIN_MM`, (D, H, W)."""
    coarse = [
        2 + math.ceil(size * mm / GRAIN_MM) for size, mm in zip(shape, spacing_mm, strict=True)
    ]
    values = torch.from_numpy(rng.standard_normal(coarse, dtype=np.float32))
    noise = F.interpolate(
        values[None, None], size=tuple(shape), mode="trilinear", align_corners=True
    )
    noise = noise[0, 0]
    # Linear interpolation lowers the variance between the points of the grid.
    return noise / noise.std().clamp(min=1e-3)
