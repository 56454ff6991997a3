"""Synthetic scenes: ellipsoid-like organs for any labels, in one or several channels.

A scene tests a task for which there are no data. The layout of the organs and their contrast belong
to the data set (its seed and labels), so that a network can learn them; size, position and surface
vary from case to case.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.shapes import Field, Points, SmoothNoise, cover, ellipsoid, paint
from medseg.phantom.spec import CaseSeed

Array = NDArray[np.float64]

SCENE_DETAILS = {
    "small": ((48, 56, 64), (5.6, 4.9, 4.3)),
    "full": ((144, 176, 208), (1.9, 1.6, 1.4)),
}
"""Voxels per axis, (D, H, W), and mean voxel spacing in mm, (z, y, x)."""

SIGNS = {"left": 1, "right": -1}
"""Sign of x by side of the patient."""

_SHARED = 2**32 - 1  # no case has this number: its generators belong to the whole data set
MEAN_BODY_SHARE = 0.83  # half axes of a mean body, of those of the scan
MARGIN = 1.3  # by which a volume lies inside of its plausible range: the surface is uneven
_CANDIDATES = 2000  # points of the body that are compared for the centre of an organ


@dataclass(frozen=True)
class SceneSpec(CaseSeed):
    """Everything that a scene is made from; equal specs give equal bytes.

    Attributes:
        labels: Label name to value; names that differ only by the word `left` or `right` are mirror
            images.
        sides: Label name to `left` or `right`, for the labels that lie on one side.
        modalities: Modality of each channel: `ct` in HU; any other in arbitrary positive units,
            with a bias field.
        ignore_label: Value of a region of ignored voxels; None makes no such region.
        detail: `small` (about 5 mm) or `full` (about 1.6 mm).
        has_own_grids: Whether each channel after the first has a grid of its own, coarser by a
            fifth.
        parts: Regions or labels that the case table calls exact (column `trust_<part>`).
        volume_ml: Label name to the smallest and largest volume that the task calls plausible.
    """

    labels: Mapping[str, int]
    sides: Mapping[str, str]
    modalities: tuple[str, ...] = ("ct",)
    ignore_label: int | None = None
    detail: str = "small"
    has_own_grids: bool = False
    parts: tuple[str, ...] = ()
    volume_ml: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Organ(NamedTuple):
    """Ellipsoid in units of the half axes of the body.

    Attributes:
        value: Value in the label map.
        sign: Sign of x of its side; -1 mirrors it.
        centre_xyz: Centre before it is mirrored.
        radii_xyz: Half axes.
        contrast: Difference from the body in each channel, -1 to 1; at least 0.2 away from 0.
        volume_ml: Its smallest and largest volume.
    """

    value: int
    sign: int
    centre_xyz: Array
    radii_xyz: Array
    contrast: Array
    volume_ml: tuple[float, float] = (0.0, math.inf)


def make_scene(
    spec: SceneSpec,
) -> tuple[list[tuple[NDArray[np.int16], VoxelGrid]], NDArray[np.uint8]]:
    """Make a scene: an elliptic body in air, with one organ for each label.

    Args:
        spec: The case.

    Returns:
        Image (D, H, W) and grid of each channel; labels on the grid of the first. A voxel belongs
        to the organ that holds its centre.
    """
    rng = spec.rng("scene")
    shape, mean_spacing_mm = SCENE_DETAILS[spec.detail]
    half_mm = 0.5 * np.array(shape) * mean_spacing_mm
    spacing_mm = np.array(mean_spacing_mm) * rng.uniform(0.9, 1.1, 3)
    body_xyz_mm = half_mm[::-1] * rng.uniform(0.78, 0.88, 3)
    middle_xyz_mm = 0.05 * body_xyz_mm * rng.uniform(-1, 1, 3)
    place_xyz_mm = rng.uniform(-60, 60, 3)
    organs = []
    for organ in place_organs(spec):
        # Where organs lie is that of the data set, how large they are that of the case.
        radii_xyz = organ.radii_xyz * rng.uniform(0.85, 1.0, 3)
        radii_xyz = radii_xyz * _plausible_factor(organ, radii_xyz * body_xyz_mm)
        organs.append(organ._replace(radii_xyz=radii_xyz))
    if spec.ignore_label is not None:
        ignored = Organ(
            spec.ignore_label,
            1,
            rng.uniform(-0.4, 0.4, 3),
            np.full(3, 0.2),
            np.zeros(len(spec.modalities)),
        )
        organs.append(ignored)
    images = []
    maps = []
    for channel in range(len(spec.modalities)):
        has_coarser_grid = spec.has_own_grids and channel > 0
        coarseness = 1.2 if has_coarser_grid else 1.0
        step_mm = (spacing_mm * coarseness).tolist()
        points = Points.covering(-half_mm, half_mm, step_mm)
        wave = SmoothNoise(spec.rng("waves"), 38).at(points)
        edge_mm = sum(step_mm) / 3
        contrast = np.zeros(points.shape, np.float32)
        labels = np.zeros(points.shape, np.uint8)
        for organ in organs:
            centre_mm = middle_xyz_mm + organ.centre_xyz * [organ.sign, 1, 1] * body_xyz_mm
            radii_mm = organ.radii_xyz * body_xyz_mm
            distance = ellipsoid(points, centre_mm, radii_mm) + 0.04 * float(radii_mm.min()) * wave
            paint(contrast, organ.contrast[channel], cover(distance, edge_mm))
            labels[distance < 0] = organ.value
        body = cover(ellipsoid(points, middle_xyz_mm, body_xyz_mm) + 4 * wave, edge_mm)
        image = np.rint(scan(spec, channel, points, body, contrast)).astype(np.int16)
        first_xyz_mm = [float(axis.flat[0]) for axis in points]
        grid = VoxelGrid(points.shape, tuple(step_mm), tuple(place_xyz_mm + first_xyz_mm))
        images.append((image, grid))
        maps.append(labels)
    return images, maps[0]


def scan(spec: SceneSpec, channel: int, points: Points, inside: Field, contrast: Field) -> Field:
    """Scan one channel: HU of soft tissue, or the signal of an MR sequence in arbitrary units.

    Args:
        spec: The case.
        channel: Number of the channel.
        points: Its voxels.
        inside: Share of the body, (D, H, W).
        contrast: Difference of the organs from the body, -1 to 1, (D, H, W).
    """
    rng = spec.rng(f"scan {channel}")
    if spec.modalities[channel] == "ct":
        return (1040 + 300 * contrast) * inside - 1000 + 12 * rng.standard_normal(points.shape)
    unit = np.exp(rng.normal(np.log(300), 0.5))
    bias = np.exp(0.25 * SmoothNoise(spec.rng(f"bias {channel}"), 160).at(points))
    # The scanner gives the magnitude of a complex signal with noise in both parts.
    real, imaginary = 0.05 * rng.standard_normal((2, *points.shape))
    return np.asarray(unit * np.hypot(np.exp(0.9 * contrast) * bias * inside + real, imaginary))


def _plausible_factor(organ: Organ, radii_mm: Array) -> float:
    """Factor of the half axes of an organ with which its volume is plausible."""
    volume_ml = _ellipsoid_ml(radii_mm)
    lowest, highest = organ.volume_ml
    # In the middle of a narrow range there is no margin.
    margin = min(MARGIN, math.sqrt(highest / lowest)) if lowest else MARGIN
    plausible_ml = min(max(volume_ml, lowest * margin), highest / margin)
    return (plausible_ml / volume_ml) ** (1 / 3)


def _ellipsoid_ml(radii_mm: Array) -> float:
    """Volume of an ellipsoid, in ml."""
    return float(4 / 3 * np.pi * np.prod(radii_mm) / 1000)


def place_organs(spec: SceneSpec) -> list[Organ]:
    """Place the organs of a data set, each where most room is left, on both sides of the body.

    The largest of those with a plausible volume come first.

    Returns:
        One organ per label, in the order of the labels; they do not overlap.
    """
    rng = CaseSeed(spec.seed, _SHARED).rng("layout")
    stems: dict[str, str] = {}
    sides: dict[str, str] = {}
    for label in spec.labels:
        words = label.split("_")
        stems[label] = "_".join(word for word in words if word not in SIGNS)
        for side in SIGNS:
            if side in words:
                sides[label] = side
    sides |= spec.sides
    with_side = {stems[label] for label in sides}
    # Contrasts at equal steps, in another order in each channel.
    levels = np.linspace(0.8, -0.8, len(set(stems.values())))
    levels = levels + np.where(levels < 0, -0.2, 0.2)
    contrasts = np.transpose([rng.permutation(levels) for _ in spec.modalities])
    # Organs of this radius fill the same share of the body, whatever their number.
    largest = 0.6 * len(spec.labels) ** (-1 / 3)
    shape, spacing_mm = SCENE_DETAILS[spec.detail]
    body_ml = _ellipsoid_ml(MEAN_BODY_SHARE * 0.5 * np.array(shape) * spacing_mm)
    contrast_of = dict(zip(dict.fromkeys(stems.values()), contrasts, strict=True))
    lowest_ml = dict.fromkeys(contrast_of, 0.0)
    for label, (low, _) in spec.volume_ml.items():
        lowest_ml[stems[label]] = max(lowest_ml[stems[label]], low)
    organs: dict[str, Organ] = {}
    for stem in sorted(contrast_of, key=lambda stem: -lowest_ml[stem]):
        # Only the left half is searched: what is free there stays free for the mirror image.
        points = rng.uniform((0, -0.75, -0.75), 0.75, (_CANDIDATES, 3))
        rooms = [1 - np.linalg.norm(points, axis=1)]
        if stem in with_side:
            rooms.append(points[:, 0])  # to the middle, where the mirror image begins
        for placed in organs.values():
            distances = np.linalg.norm(points - placed.centre_xyz, axis=1)
            rooms.append(distances - placed.radii_xyz.max())
        room = np.min(rooms, axis=0)
        best = int(np.argmax(room))
        # Half axes of a ball of the lowest plausible volume; a case varies them and the body.
        needed = 1.1 * (lowest_ml[stem] * MARGIN / body_ml) ** (1 / 3)
        radii = min(0.9 * room[best], max(largest, needed)) * rng.uniform(0.65, 1.0, 3)
        # Each of its labels gives it a value, a side and a plausible volume, below.
        sign = rng.choice((-1, 1)).item()
        organs[stem] = Organ(0, sign, points[best], radii, contrast_of[stem])
    placed_organs = []
    for label, value in spec.labels.items():
        organ = organs[stems[label]]
        sign = SIGNS[sides[label]] if label in sides else organ.sign
        volume_ml = spec.volume_ml.get(label, organ.volume_ml)
        placed_organs.append(organ._replace(value=value, sign=sign, volume_ml=volume_ml))
    return placed_organs
