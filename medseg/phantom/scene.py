"""Synthetic scenes: ellipsoid-like organs for any labels, in one or several channels.

A scene tests a task for which there are no data. The place of each organ in the body, its usual
size and its contrast follow from the seed and the labels of the data set, so that a network can
learn them. The body, the sizes of the organs and all surfaces vary from case to case.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.shapes import Field, Points, SmoothNoise, cover, ellipsoid, paint
from medseg.phantom.spec import CaseSeed
from medseg.task import words_of

Array = NDArray[np.float64]

SCENE_DETAILS = {
    "small": ((48, 56, 64), (5.6, 4.9, 4.3)),
    "full": ((144, 176, 208), (1.9, 1.6, 1.4)),
}
"""Voxels per axis, (D, H, W), at the mean voxel spacing in mm, (z, y, x). The spacing of a case
varies by 10 % within the same extent."""

SIGNS = {"left": 1, "right": -1}
"""Sign of x by side of the patient."""

# Index in `CaseSeed` for random numbers of the whole data set; no case has this number.
_SHARED_INDEX = 2**32 - 1
# Half axes of a mean body, as a share of those of the scan: the middle of the range in
# `make_scene`.
MEAN_BODY_SHARE = 0.83
# The volume of an ellipsoid differs at least by this factor from the ends of its plausible range,
# since the uneven surface of the organ changes the volume.
MARGIN = 1.3
# Number of random points that are compared for the centre of an organ.
_NUM_CANDIDATES = 2000


@dataclass(frozen=True)
class SceneSpec(CaseSeed):
    """Everything that a scene is made from; equal specs give equal bytes.

    Attributes:
        labels: Label name to value; labels whose names differ only by the word `left` or `right`,
            as `Left kidney` and `Right kidney`, are mirror images of one another.
        sides: Label name to `left` or `right`, for labels that lie on one side; takes precedence
            over the word in the name.
        modalities: Modality of each channel: `ct` in HU; any other in arbitrary positive units,
            with a bias field.
        ignore_label: Value of a region of ignored voxels; None makes no such region.
        detail: `small` (voxels of about 5 mm) or `full` (about 1.6 mm).
        has_own_grids: Whether each channel after the first has a grid of its own, of voxels that
            are longer by a fifth.
        parts: Regions or labels with a column `trust_<part>` in the case table, whose value is
            `reference`: the labels of a scene are exact.
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
        sign: -1 mirrors the centre from left to right, 1 leaves it.
        centre_xyz: Centre before it is mirrored.
        radii_xyz: Half axes.
        contrast: Difference from the body in each channel, -1 to 1. It is at least 0.2 away from 0,
            except in the region of ignored voxels, where it is 0.
        volume_ml: Its smallest and largest plausible volume.
    """

    value: int
    sign: int
    centre_xyz: Array
    radii_xyz: Array
    contrast: Array
    volume_ml: tuple[float, float] = (0.0, math.inf)


class Body(NamedTuple):
    """Ellipsoid of the body: centre and half axes in mm, (x, y, z)."""

    centre_xyz_mm: Array
    radii_xyz_mm: Array


def make_scene(
    spec: SceneSpec,
) -> tuple[list[tuple[NDArray[np.int16], VoxelGrid]], NDArray[np.uint8]]:
    """Make a scene: an elliptic body in air, with one organ for each label.

    Args:
        spec: What the scene is made from.

    Returns:
        Image (D, H, W) and grid of each channel; labels on the grid of the first. A voxel belongs
        to the organ that holds its centre.
    """
    rng = spec.rng("scene")
    shape, mean_spacing_mm = SCENE_DETAILS[spec.detail]
    # Half the extent of the scan, (z, y, x); all coordinates have their origin in the middle.
    half_mm = 0.5 * np.array(shape) * mean_spacing_mm
    spacing_mm = np.array(mean_spacing_mm) * rng.uniform(0.9, 1.1, 3)
    body_radii_xyz_mm = half_mm[::-1] * rng.uniform(0.78, 0.88, 3)
    body_centre_xyz_mm = 0.05 * body_radii_xyz_mm * rng.uniform(-1, 1, 3)
    body = Body(body_centre_xyz_mm, body_radii_xyz_mm)
    # World position of the middle of the scan, which differs from scanner to scanner.
    world_origin_xyz_mm = rng.uniform(-60, 60, 3)
    organs = []
    for organ in place_organs(spec):
        # All cases have the same centres; the size differs.
        radii_xyz = organ.radii_xyz * rng.uniform(0.85, 1.0, 3)
        radii_xyz = radii_xyz * _plausible_factor(organ, radii_xyz * body.radii_xyz_mm)
        organs.append(organ._replace(radii_xyz=radii_xyz))
    if spec.ignore_label is not None:
        # A region that looks like the body. It is the last organ, so its value covers those of the
        # others.
        ignored = Organ(
            value=spec.ignore_label,
            sign=1,
            centre_xyz=rng.uniform(-0.4, 0.4, 3),
            radii_xyz=np.full(3, 0.2),
            contrast=np.zeros(len(spec.modalities)),
        )
        organs.append(ignored)
    images = []
    label_maps = []
    for channel in range(len(spec.modalities)):
        has_coarser_grid = spec.has_own_grids and channel > 0
        coarseness = 1.2 if has_coarser_grid else 1.0
        step_mm = (spacing_mm * coarseness).tolist()
        points = Points.covering(-half_mm, half_mm, step_mm)
        # Edges are as wide as a voxel, on average over the axes.
        edge_mm = sum(step_mm) / 3
        image, labels = _draw_channel(spec, channel, points, edge_mm, body, organs)
        first_xyz_mm = [float(axis.flat[0]) for axis in points]
        grid = VoxelGrid(points.shape, tuple(step_mm), tuple(world_origin_xyz_mm + first_xyz_mm))
        images.append((image, grid))
        label_maps.append(labels)
    return images, label_maps[0]


def _draw_channel(
    spec: SceneSpec,
    channel: int,
    points: Points,
    edge_mm: float,
    body: Body,
    organs: Sequence[Organ],
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """Draw the image and the labels of one channel, (D, H, W) each."""
    # Each channel has the same noise, so that the surfaces of the organs coincide. The grain is as
    # that of the surfaces of chests, see `medseg.phantom.tissue`.
    wave = SmoothNoise(spec.rng("waves"), grain_mm=38).at(points)
    contrast = np.zeros(points.shape, np.float32)
    labels = np.zeros(points.shape, np.uint8)
    for organ in organs:
        mirror = [organ.sign, 1, 1]
        centre_mm = body.centre_xyz_mm + organ.centre_xyz * mirror * body.radii_xyz_mm
        radii_mm = organ.radii_xyz * body.radii_xyz_mm
        # Waves of 4 % of the smallest half axis.
        distance = ellipsoid(points, centre_mm, radii_mm) + 0.04 * float(radii_mm.min()) * wave
        paint(contrast, organ.contrast[channel], cover(distance, edge_mm))
        labels[distance < 0] = organ.value
    # The surface of the body has waves of 4 mm.
    body_distance = ellipsoid(points, body.centre_xyz_mm, body.radii_xyz_mm) + 4 * wave
    image = scan(spec, channel, points, cover(body_distance, edge_mm), contrast)
    return np.rint(image).astype(np.int16), labels


def scan(spec: SceneSpec, channel: int, points: Points, inside: Field, contrast: Field) -> Field:
    """Scan one channel: HU of soft tissue, or the signal of an MR sequence in arbitrary units.

    Args:
        spec: Has the modality of the channel, and the random numbers.
        channel: Number of the channel.
        points: Centres of its voxels.
        inside: Share of each voxel that is in the body, (D, H, W).
        contrast: Difference of the organs from the body, -1 to 1, (D, H, W).
    """
    rng = spec.rng(f"scan {channel}")
    if spec.modalities[channel] == "ct":
        # Air at -1000 HU, the body at 40, organs up to 300 away from it, noise of 12.
        return (1040 + 300 * contrast) * inside - 1000 + 12 * rng.standard_normal(points.shape)
    # The unit of MR is arbitrary: it differs from scan to scan, by a factor around 300.
    unit = np.exp(rng.normal(np.log(300), 0.5))
    # The bias field of a coil is smooth (160 mm) and has a standard deviation of about 25 %.
    bias = np.exp(0.25 * SmoothNoise(spec.rng(f"bias {channel}"), grain_mm=160).at(points))
    # The scanner gives the magnitude of a complex signal: the tissue's signal, exp(0.9 contrast)
    # times the bias field, lies in the real part, and both parts have noise.
    real, imaginary = 0.05 * rng.standard_normal((2, *points.shape))
    return np.asarray(unit * np.hypot(np.exp(0.9 * contrast) * bias * inside + real, imaginary))


def _plausible_factor(organ: Organ, radii_mm: Array) -> float:
    """Compute the factor of the half axes of an organ that makes its volume plausible."""
    volume_ml = _ellipsoid_ml(radii_mm)
    lowest_ml, highest_ml = organ.volume_ml
    margin = MARGIN
    if lowest_ml > 0:
        # A range too narrow for the margin on both sides leaves only its geometric mean.
        margin = min(MARGIN, math.sqrt(highest_ml / lowest_ml))
    plausible_ml = min(max(volume_ml, lowest_ml * margin), highest_ml / margin)
    return (plausible_ml / volume_ml) ** (1 / 3)


def _ellipsoid_ml(radii_mm: Array) -> float:
    """Volume of an ellipsoid, in ml."""
    return float(4 / 3 * np.pi * np.prod(radii_mm) / 1000)


def place_organs(spec: SceneSpec) -> list[Organ]:
    """Place the organs of a data set, each where most room is left.

    Labels that are mirror images share one organ, which is placed in the left half. Organs that
    must be large (those whose smallest plausible volume is large) are placed first, while there is
    most room.

    Returns:
        One organ per label, in the order of the labels; they do not overlap.
    """
    rng = CaseSeed(spec.seed, _SHARED_INDEX).rng("layout")
    name_of, named_sides = _organs_and_sides(spec.labels)
    sides = {**named_sides, **spec.sides}
    names_with_side = {name_of[label] for label in sides}
    # Each name once, in the order of the labels.
    organ_names = list(dict.fromkeys(name_of.values()))
    # Contrasts at equal steps, but 0.2 away from 0, where an organ would look like the body; in
    # another order in each channel: (organs, channels).
    levels = np.linspace(0.8, -0.8, len(organ_names))
    levels = levels + np.where(levels < 0, -0.2, 0.2)
    contrasts = np.transpose([rng.permutation(levels) for _ in spec.modalities])
    contrast_of = dict(zip(organ_names, contrasts, strict=True))
    # Usual upper limit of a radius, in half axes of the body. n organs of this radius fill the
    # share n * 0.6³ / n = 0.2 of the body, whatever n is.
    usual_radius = 0.6 * len(spec.labels) ** (-1 / 3)
    shape, spacing_mm = SCENE_DETAILS[spec.detail]
    body_ml = _ellipsoid_ml(MEAN_BODY_SHARE * 0.5 * np.array(shape) * spacing_mm)
    lowest_ml = dict.fromkeys(organ_names, 0.0)
    for label, (low_ml, _) in spec.volume_ml.items():
        lowest_ml[name_of[label]] = max(lowest_ml[name_of[label]], low_ml)
    organs: dict[str, Organ] = {}
    for name in sorted(organ_names, key=lambda name: -lowest_ml[name]):
        centre, room = _find_room(rng, list(organs.values()), name in names_with_side)
        # Radius of a ball of the lowest plausible volume, and a tenth more, because a case varies
        # the organ and the body. `_plausible_factor` enlarges an organ that is too small in a case.
        least_radius = 1.1 * (lowest_ml[name] * MARGIN / body_ml) ** (1 / 3)
        # Above the usual limit only if the volume demands it, and always with a gap to the
        # neighbours. 254 organs, as many as a task may have, still leave room.
        radius = min(max(usual_radius, least_radius), 0.9 * room)
        radii = radius * rng.uniform(0.65, 1.0, 3)
        sign = rng.choice((-1, 1)).item()
        # The value is set below, for each label of the organ.
        organs[name] = Organ(
            value=0, sign=sign, centre_xyz=centre, radii_xyz=radii, contrast=contrast_of[name]
        )
    placed_organs = []
    for label, value in spec.labels.items():
        organ = organs[name_of[label]]
        # A label without a side keeps the random sign of its organ.
        sign = SIGNS[sides[label]] if label in sides else organ.sign
        volume_ml = spec.volume_ml.get(label, organ.volume_ml)
        placed_organs.append(organ._replace(value=value, sign=sign, volume_ml=volume_ml))
    return placed_organs


def _organs_and_sides(labels: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Read from the names of labels which of them are mirror images, and their sides.

    Returns:
        Label to the name of its organ, which mirror images share; and label to `left` or `right`,
        for labels with exactly one of these words in their names.
    """
    name_of = {}
    sides = {}
    for label in labels:
        words = words_of(label)
        label_sides = [side for side in SIGNS if side in words]
        if len(label_sides) != 1:
            name_of[label] = label
            continue
        sides[label] = label_sides[0]
        other_words = [word for word in words if word not in SIGNS]
        # With the slash, the shared name differs from the name of every other label.
        name_of[label] = "left/right " + " ".join(other_words)
    return name_of, sides


def _find_room(
    rng: np.random.Generator, placed_organs: Sequence[Organ], is_mirrored: bool
) -> tuple[Array, float]:
    """Find the point where most room is left for an organ, among random ones.

    Args:
        rng: Source of the points.
        placed_organs: Organs that have their place.
        is_mirrored: Whether the organ must keep clear of its mirror image.

    Returns:
        The point, and the radius of the largest ball around it that touches nothing, in half axes
        of the body.
    """
    # Only the left half is searched. An organ that is mirrored to the right moves away from those
    # on the left, and keeps its distance to those that are mirrored too.
    points = rng.uniform((0, -0.75, -0.75), 0.75, (_NUM_CANDIDATES, 3))
    # Distances of the points to the surface of the body, the mirror plane, and each organ.
    distances = [1 - np.linalg.norm(points, axis=1)]
    if is_mirrored:
        distances.append(points[:, 0])
    for organ in placed_organs:
        to_centre = np.linalg.norm(points - organ.centre_xyz, axis=1)
        distances.append(to_centre - organ.radii_xyz.max())
    room = np.min(distances, axis=0)
    best = int(np.argmax(room))
    return points[best], room[best]
