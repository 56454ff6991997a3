"""Lungs as distance fields: the rib cage without mediastinum, diaphragm and pleural fluid."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.lattice import Lattice, noise_field
from medseg.phantom.mediastinum import CentralTubes, HeartFields, heart_fields
from medseg.phantom.shapes import Field, intersection, profile, union
from medseg.phantom.skeleton import spine_distance
from medseg.phantom.spec import PhantomSpec


class Thorax(NamedTuple):
    """Signed distances in mm on a slab (d, H, W); dictionaries by side sign.

    Attributes:
        cavity: Inside of the rib cage per side.
        above: Height over the diaphragm, negative in the abdomen.
        lung: The lung's outline.
        fluid: Pleural fluid.
        heart: The heart.
        spine: Bone, column, canal, disc phase.
    """

    cavity: dict[int, Field]
    above: Field
    lung: dict[int, Field]
    fluid: dict[int, Field]
    heart: HeartFields
    spine: tuple[Field, Field, Field, Field]


def draw_waves(spec: PhantomSpec, lattice: Lattice) -> Field:
    """Draw the noise that roughens surfaces, (D, H, W), grain 38 mm."""
    return noise_field(spec.rng("waves"), lattice, 38.0)


def measure_thorax(
    spec: PhantomSpec, anatomy: Anatomy, tubes: CentralTubes, waves: Field, slab: slice, x: Field, y: Field, z: Field
) -> Thorax:
    """Measure cavity, mediastinum and lungs on a slab of planes.

    Args:
        spec: The case.
        anatomy: The patient.
        tubes: Central tubes on the whole lattice.
        waves: Smooth unit noise on the whole lattice that roughens the surfaces.
        slab: Planes of the lattice to measure.
        x: World x in mm, (1, 1, W).
        y: World y in mm, (1, H, 1).
        z: World z in mm, (d, 1, 1).

    Returns:
        The fields.
    """
    heart, spine = heart_fields(anatomy, x, y, z), spine_distance(anatomy, x, y, z)
    wave, blood, airway, gullet = (field[slab] for field in (waves, *tubes))
    middle_x = np.float32(anatomy.shift_x_mm) * np.clip((60 - z) / 80, 0, 1).astype(np.float32)
    # A plate of fat keeps the lungs apart: thin behind the sternum, wide in the upper mediastinum.
    wide = profile(z, (150, 95, 70, 40, 10, -40, -80, -120), (40, 34, 27, 19, 9, 5, 6, 14))
    thin = np.where(z < 55, np.float32(anatomy.junction_half_mm), wide)
    plate = np.abs(x - middle_x - 3) - (wide + (thin - wide) * np.clip((-y - 25) / 30, 0, 1))
    plate = np.maximum(plate, y - (anatomy.spine_y_mm(z) + 10))
    soft = union(union(blood - 1.5, airway - 2.2, 8), gullet - 2.0, 8)
    soft = union(soft, heart.outside - np.float32(anatomy.pericardial_fat_mm), 14)
    soft = union(soft, plate - 1.5 * wave, 10) + np.float32(0.8) * wave
    soft = union(soft, spine[1] - 5.0, 8)
    inside = {side: anatomy.half_thorax(x, y, z, side) for side in SIDES}
    cavity = {side: distance + np.float32(1.3) * wave for side, (distance, _) in inside.items()}
    dome = {side: anatomy.dome_surface_z_mm(x, y, z, side, level) for side, (_, level) in inside.items()}
    # The two domes meet in the saddle below the heart.
    leftness = np.clip(np.float32(0.5) + x / 70, 0, 1)
    height = z - (dome[1] * leftness + dome[-1] * (1 - leftness)) + np.float32(2.2) * wave
    lung: dict[int, Field] = {}
    fluid: dict[int, Field] = {}
    for side, effusion_mm in zip(SIDES, spec.effusion_mm, strict=True):
        own_side = (middle_x - x) * np.float32(side) + np.float32(anatomy.junction_half_mm * 0.5)
        pleura = intersection(np.maximum(cavity[side], own_side), 1.5 - soft, 5.0)
        pleura = np.maximum(intersection(pleura, -height, 2.5), 1.0 - spine[0])
        lung[side], fluid[side] = pleura, np.full_like(pleura, 30)
        if effusion_mm > 0:
            dry = _above_fluid(spec, anatomy, side, effusion_mm, y, z, inside[side][1])
            lung[side], fluid[side] = intersection(pleura, dry, 6.0), np.maximum(pleura, -dry)
        if spec.missing_lung == ("left" if side > 0 else "right"):
            lung[side], fluid[side] = np.full_like(pleura, 30), pleura
    return Thorax(cavity, height, lung, fluid, heart, spine)


def _above_fluid(spec: PhantomSpec, anatomy: Anatomy, side: int, depth_mm: float, y: Field, z: Field, level: Field) -> Field:
    """Signed distance to the space above pleural fluid of some depth at the lowest wall; its surface rises at the ribs."""
    _, cy, _, ay = anatomy.thorax_centre(z, side)
    depth_here = np.float32(depth_mm) * np.clip((60 - z) / 110, 0.1, 1.3).astype(np.float32)
    meniscus = np.float32(16) * np.clip(level - np.float32(0.6), 0, 0.5)
    return np.float32(-1 if spec.is_prone else 1) * (y - cy) - (ay - depth_here) + meniscus
