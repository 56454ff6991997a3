"""The lungs: what is left of the rib cage beside mediastinum, diaphragm and pleural fluid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.fields import noise_field
from medseg.phantom.lattice import Lattice
from medseg.phantom.mediastinum import HeartFields, draw_great_vessels, heart_fields
from medseg.phantom.shapes import Field, intersection, profile, union
from medseg.phantom.skeleton import spine_distance
from medseg.phantom.spec import PhantomSpec


@dataclass(frozen=True)
class Thorax:
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


@dataclass(frozen=True)
class CentralTubes:
    """Distances on the whole lattice to large vessels, central airways and gullet."""

    blood: Field
    airway: Field
    gullet: Field

    @classmethod
    def draw(cls, anatomy: Anatomy, lattice: Lattice) -> CentralTubes:
        """Draw them."""
        return cls(*draw_great_vessels(anatomy, lattice))


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
        waves: Smooth unit noise on the whole lattice: no two surfaces are equally smooth.
        slab: Planes of the lattice to measure.
        x: World x in mm, (1, 1, W).
        y: World y in mm, (1, H, 1).
        z: World z in mm, (d, 1, 1).

    Returns:
        The fields.
    """
    heart = heart_fields(anatomy, x, y, z)
    spine = spine_distance(anatomy, x, y, z)
    wave = waves[slab]
    blood, airway, gullet = tubes.blood[slab], tubes.airway[slab], tubes.gullet[slab]
    shift = np.float32(anatomy.shift_x_mm)
    middle_x = shift * np.clip((60 - z) / 80, 0, 1).astype(np.float32)
    # A plate of fat keeps the lungs apart: thin behind the sternum, wide in the upper mediastinum.
    wide = profile(z, (150, 95, 70, 40, 10, -40, -80, -120), (40, 34, 27, 19, 9, 5, 6, 14))
    front = np.clip((-y - 25) / 30, 0, 1)
    thin = np.where(z < 55, np.float32(anatomy.junction_half_mm), wide)
    half = wide + (thin - wide) * front
    plate = np.abs(x - middle_x - 3) - half
    plate = np.maximum(plate, y - (anatomy.spine_y_mm(z) + 10))
    fat = np.float32(anatomy.pericardial_fat_mm)
    soft = union(union(blood - 1.5, airway - 2.2, 8), gullet - 2.0, 8)
    soft = union(soft, heart.outside - fat, 14)
    soft = union(soft, plate - 1.5 * wave, 10) + np.float32(0.8) * wave
    soft = union(soft, spine[1] - 5.0, 8)
    cavity: dict[int, Field] = {}
    level: dict[int, Field] = {}
    lung: dict[int, Field] = {}
    fluid: dict[int, Field] = {}
    dome: dict[int, Field] = {}
    for side in SIDES:
        inside, level[side] = anatomy.half_thorax(x, y, z, side)
        cavity[side] = inside + np.float32(1.3) * wave
        dome[side] = anatomy.dome_surface_z_mm(x, y, z, side, level[side])
    # The two domes meet in the saddle below the heart.
    leftness = np.clip(np.float32(0.5) + x / 70, 0, 1)
    height = z - (dome[1] * leftness + dome[-1] * (1 - leftness)) + np.float32(2.2) * wave
    for side in SIDES:
        inside, rise = cavity[side], level[side]
        own_side = (middle_x - x) * np.float32(side)
        pleura = np.maximum(inside, own_side + np.float32(anatomy.junction_half_mm * 0.5))
        pleura = intersection(pleura, 1.5 - soft, 5.0)
        pleura = intersection(pleura, -height, 2.5)
        pleura = np.maximum(pleura, 1.0 - spine[0])
        depth = spec.effusion_mm[0 if side > 0 else 1]
        if depth > 0:
            _, cy, _, ay = anatomy.thorax_centre(z, side)
            depth_here = np.float32(depth) * np.clip((60 - z) / 110, 0.1, 1.3).astype(np.float32)
            sign = np.float32(-1 if spec.is_prone else 1)
            meniscus = np.float32(16) * np.clip(rise - np.float32(0.6), 0, 0.5)
            dry = sign * (y - cy) - (ay - depth_here) + meniscus
            fluid[side] = np.maximum(pleura, -dry)
            outline = intersection(pleura, dry, 6.0)
        else:
            fluid[side] = np.full_like(pleura, 30)
            outline = pleura
        if spec.missing_lung == ("left" if side > 0 else "right"):
            fluid[side] = pleura
            outline = np.full_like(pleura, 30)
        lung[side] = outline
    return Thorax(cavity, height, lung, fluid, heart, spine)
