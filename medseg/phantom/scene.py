"""Synthetic scenes: ellipsoid-like organs for any labels, in one or several channels, with exact labels.

A scene tests a task for which there are no data. The layout of the organs and their contrast belong
to the data set (its seed and labels), so that a network can learn them; size, position and surface
vary from case to case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.geometry.grid import VoxelGrid
from medseg.phantom.shapes import Field, Lattice, cover, ellipsoid, noise_field, paint
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
    """

    labels: Mapping[str, int]
    sides: Mapping[str, str]
    modalities: tuple[str, ...] = ("ct",)
    ignore_label: int | None = None
    detail: str = "small"
    has_own_grids: bool = False
    parts: tuple[str, ...] = ()


class Organ(NamedTuple):
    """Ellipsoid in units of the half axes of the body.

    Attributes:
        value: Value in the label map.
        sign: Sign of x of its side; -1 mirrors it.
        centre_xyz: Centre before it is mirrored.
        radii_xyz: Half axes.
        contrast: Difference from the body in each channel, -1 to 1; at least 0.2 away from 0.
    """

    value: int
    sign: int
    centre_xyz: Array
    radii_xyz: Array
    contrast: Array


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
    shift_xyz_mm, place_xyz_mm = 0.05 * body_xyz_mm * rng.uniform(-1, 1, 3), rng.uniform(-60, 60, 3)
    flips = (False, bool(rng.random() < 0.5), bool(rng.random() < 0.5))
    axes = tuple(axis for axis in range(3) if flips[axis])
    organs = [
        organ._replace(radii_xyz=organ.radii_xyz * rng.uniform(0.85, 1.0, 3))
        for organ in place_organs(spec)
    ]
    ignored = Organ(
        spec.ignore_label or 0, 1, rng.uniform(-0.4, 0.4, 3), np.full(3, 0.2), np.zeros(0)
    )
    images, maps = [], []
    for channel in range(len(spec.modalities)):
        step_mm = (spacing_mm * (1.2 if spec.has_own_grids and channel else 1.0)).tolist()
        lattice = Lattice.covering(
            (-half_mm).tolist(), half_mm.tolist(), (step_mm[0], step_mm[1], step_mm[2])
        )
        points = [
            axis_mm - np.float32(mm)
            for axis_mm, mm in zip(lattice.points(), shift_xyz_mm, strict=True)
        ]
        wave = noise_field(spec.rng("waves"), lattice, 38)
        contrast, labels = lattice.full(0), np.zeros(lattice.shape, dtype=np.uint8)
        for organ in organs:
            distance = measure(organ, body_xyz_mm, points, wave)
            paint(contrast, (organ.contrast[channel], cover(distance, lattice.edge_mm)))
            labels[distance < 0] = organ.value
        if spec.ignore_label is not None:
            labels[measure(ignored, body_xyz_mm, points, wave) < 0] = spec.ignore_label
        x, y, z = points
        body = ellipsoid(x, y, z, (0, 0, 0), body_xyz_mm) + 4 * wave
        image = np.rint(
            scan(spec, channel, lattice, cover(body, lattice.edge_mm), contrast)
        ).astype(np.int16)
        grid = VoxelGrid(
            lattice.shape, lattice.spacing_mm, tuple(place_xyz_mm + lattice.origin_zyx_mm[::-1])
        )
        images.append((np.flip(image, axes), grid.reoriented((0, 1, 2), flips)))
        maps.append(np.flip(labels, axes))
    return images, maps[0]


def measure(organ: Organ, body_xyz_mm: Array, points: Sequence[Field], wave: Field) -> Field:
    """Measure the uneven surface of an organ.

    Args:
        organ: The organ.
        body_xyz_mm: Half axes of the body.
        points: Coordinates x, y, z in mm from the middle of the body, see `Lattice.points`.
        wave: Smooth unit noise, (D, H, W).

    Returns:
        Signed distance in mm, (D, H, W).
    """
    (x, y, z), radii_mm = points, organ.radii_xyz * body_xyz_mm
    distance = ellipsoid(x * np.float32(organ.sign), y, z, organ.centre_xyz * body_xyz_mm, radii_mm)
    return distance + wave * np.float32(0.04 * radii_mm.min())


def scan(spec: SceneSpec, channel: int, lattice: Lattice, inside: Field, contrast: Field) -> Field:
    """Scan one channel: HU of soft tissue, or the signal of an MR sequence in arbitrary units.

    Args:
        spec: The case.
        channel: Number of the channel.
        lattice: Its voxels.
        inside: Share of the body, (D, H, W).
        contrast: Difference of the organs from the body, -1 to 1, (D, H, W).
    """
    rng = spec.rng(f"scan {channel}")
    if spec.modalities[channel] == "ct":
        return (1040 + 300 * contrast) * inside - 1000 + 12 * rng.standard_normal(lattice.shape)
    unit = np.exp(rng.normal(np.log(300), 0.5))
    bias = np.exp(np.float32(0.25) * noise_field(spec.rng(f"bias {channel}"), lattice, 160))
    # The scanner gives the magnitude of a complex signal with noise in both parts.
    real, imaginary = 0.05 * rng.standard_normal((2, *lattice.shape))
    return np.asarray(unit * np.hypot(np.exp(0.9 * contrast) * bias * inside + real, imaginary))


def place_organs(spec: SceneSpec) -> list[Organ]:
    """Place the organs of a data set: each new one where most room is left, mirror images at equal distance from the middle.

    Returns:
        One organ per label, in the order of the labels; they do not overlap.
    """
    rng = CaseSeed(spec.seed, _SHARED).rng("layout")
    words = {label: label.split("_") for label in spec.labels}
    sides = {label: side for label in spec.labels for side in SIGNS if side in words[label]} | dict(
        spec.sides
    )
    stems = {
        label: "_".join(word for word in words[label] if word not in SIGNS) for label in spec.labels
    }
    # Contrasts at equal steps, in another order in each channel.
    levels = np.linspace(0.8, -0.8, len(set(stems.values())))
    levels = levels + np.where(levels < 0, -0.2, 0.2)
    orders = [rng.permutation(levels) for _ in spec.modalities]
    largest = 0.6 * len(spec.labels) ** (-1 / 3)
    organs: dict[str, Organ] = {}
    for number, stem in enumerate(dict.fromkeys(stems.values())):
        signs = {
            label: SIGNS[sides.get(label, "left")] for label in spec.labels if stems[label] == stem
        }
        points = rng.uniform(-0.75, 0.75, (_CANDIDATES, 3))
        rooms = [1 - np.linalg.norm(points, axis=1)]  # to the surface of the body
        if any(label in sides for label in signs):
            points[:, 0] = np.abs(points[:, 0])
            rooms.append(points[:, 0])  # to the middle, where the mirror image begins
        for one in organs.values():
            centre = one.centre_xyz * [one.sign, 1, 1]
            rooms += [
                np.linalg.norm(points * [sign, 1, 1] - centre, axis=1) - one.radii_xyz.max()
                for sign in signs.values()
            ]
        room = np.min(rooms, axis=0)
        best = int(np.argmax(room))
        radii = min(0.9 * room[best], largest) * rng.uniform(0.65, 1.0, 3)
        contrast = np.array([order[number] for order in orders])
        organs |= {
            label: Organ(spec.labels[label], sign, points[best], radii, contrast)
            for label, sign in signs.items()
        }
    return list(organs.values())
