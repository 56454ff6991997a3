"""The torso in Hounsfield units: from distances to an image and labels on the lattice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.abdomen import draw_colon, paint_abdomen
from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.fields import noise_field
from medseg.phantom.lattice import Lattice, draw_tube
from medseg.phantom.lungs import CentralTubes, Thorax, draw_waves, measure_thorax
from medseg.phantom.parenchyma import LungTexture
from medseg.phantom.shapes import Field, cover, ellipsoid, paint, union
from medseg.phantom.skeleton import arm_path, draw_bones
from medseg.phantom.spec import PhantomSpec


@dataclass(frozen=True)
class Model:
    """The patient drawn on a lattice.

    Attributes:
        lattice: Canonical points.
        image_hu: int16 (D, H, W).
        lungs: int8 (D, H, W): covered share × 100, positive in the left lung, negative in the right.
        organs: int8 (D, H, W): covered share × 100, positive in the heart, negative in the spine.
    """

    lattice: Lattice
    image_hu: NDArray[np.int16]
    lungs: NDArray[np.int8]
    organs: NDArray[np.int8]


def draw_model(spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice) -> Model:
    """Draw the patient of a case on a lattice."""
    tubes = CentralTubes.draw(anatomy, lattice)
    bone, cartilage = draw_bones(anatomy, lattice, spec.arms)
    colon = draw_colon(spec, anatomy, lattice)
    arms = np.full(lattice.shape, 300, dtype=np.float32)
    if spec.arms != "none":
        for side in SIDES:
            shoulder, elbow = arm_path(anatomy, side, spec.arms)
            draw_tube(
                arms,
                lattice,
                np.stack([shoulder, 0.75 * shoulder + 0.25 * elbow, elbow]),
                np.array([44.0, 40, 33]),
                margin_mm=20 + 1.7 * spec.fat_mm,
            )
    texture = LungTexture.draw(spec, anatomy, lattice, tubes)
    waves = draw_waves(spec, lattice)
    fine_noise = noise_field(spec.rng("fine tissue"), lattice, 7.0)
    noise = noise_field(spec.rng("tissue"), lattice, 26.0)
    image = np.empty(lattice.shape, dtype=np.int16)
    lungs = np.empty(lattice.shape, dtype=np.int8)
    organs = np.empty(lattice.shape, dtype=np.int8)
    for slab in lattice.slabs():
        x, y, z = lattice.points(slab)
        thorax = measure_thorax(spec, anatomy, tubes, waves, slab, x, y, z)
        part = _Slab(spec, anatomy, x, y, z, thorax, noise[slab], fine_noise[slab], lattice.edge_mm)
        hu = part.paint_trunk(arms[slab])
        part.paint_bones(hu, bone[slab], cartilage[slab])
        part.paint_inside(hu, tubes, slab, colon[slab])
        shares = part.paint_lungs(hu, texture, slab)
        np.clip(np.rint(hu), -1024, 3071, out=hu)
        image[slab] = hu
        lungs[slab] = np.rint(100 * (shares[1] - shares[-1]))
        spine = cover(np.maximum(np.minimum(thorax.spine[0], thorax.spine[1]), 0.5 - thorax.spine[2]), lattice.edge_mm)
        organs[slab] = np.rint(100 * (cover(thorax.heart.outside, lattice.edge_mm) - spine))
    return Model(lattice, image, lungs, organs)


@dataclass(frozen=True)
class _Slab:
    """One slab of planes while it is painted."""

    spec: PhantomSpec
    anatomy: Anatomy
    x: Field
    y: Field
    z: Field
    thorax: Thorax
    noise: Field
    fine_noise: Field
    edge_mm: float

    def paint_trunk(self, arms: Field) -> Field:
        """Paint air, skin, fat, muscle and arms."""
        x, y, z, spec, anatomy = self.x, self.y, self.z, self.spec, self.anatomy
        cage = np.minimum(self.thorax.cavity[1], self.thorax.cavity[-1])
        wall = union(anatomy.muscle_outline(x, y, z), cage - np.float32(11 + 0.4 * anatomy.muscle_mm), 14)
        muscle = union(wall, arms, 16)
        across, back = x / 160, y / 115
        around = (
            np.float32(0.75)
            + np.float32(0.35) * np.clip(-back, 0, 1)
            + np.float32(0.3) * np.clip(-z / 150, -1.2, 1)
            + np.float32(0.2) * across * across
        )
        skin: Field = muscle - np.float32(spec.fat_mm) * np.clip(around, 0.3, 1.6) - 2.0
        glands: Field = np.full_like(skin, 30)
        if spec.sex == "female":
            size = 0.75 + 0.025 * spec.fat_mm
            for side in SIDES:
                spread = 78 + 10 * size
                breast = ellipsoid(x, y, z, (side * spread, -98 - 10 * size, -48), (54 * size, 50 * size, 58 * size))
                skin = union(skin, breast, 14)
                gland = ellipsoid(x, y, z, (side * spread, -108 - 12 * size, -50), (34 * size, 30 * size, 34 * size))
                glands = np.minimum(glands, gland)
        hu = np.full(skin.shape, -1000, dtype=np.float32)
        edge = self.edge_mm
        paint(hu, np.float32(15), cover(skin, edge))
        paint(hu, np.float32(-104) + 7 * self.noise + 4 * self.fine_noise, cover(skin + 2.2, edge))
        lobes = np.maximum(glands, 12 * (np.float32(0.1) - self.fine_noise * np.float32(0.5)) - 3)
        paint(hu, np.float32(32), cover(lobes, 3 * edge) * cover(skin + 6, edge))
        planes = np.abs(self.noise + np.float32(0.25) * self.fine_noise)
        marbling = np.clip(np.float32(1) - planes * np.float32(6), 0, 1) * np.float32(np.clip(0.15 + spec.fat_mm / 45, 0, 0.8))
        tissue = np.float32(54 + 0.12 * spec.contrast_hu) - 145 * marbling
        paint(hu, tissue, cover(muscle, edge))
        for side in SIDES:
            hollow = ellipsoid(x, y, z, (side * 150 * anatomy.width_factor, 4, 34), (17, 36, 44))
            paint(hu, np.float32(-100), cover(hollow - 3 * self.fine_noise, 2 * edge) * np.float32(0.9))
        plane = (
            np.abs(cage - np.float32(13) - 2 * self.noise)
            - np.float32(0.3 + 0.03 * spec.fat_mm)
            - np.float32(1.2) * self.fine_noise
        )
        paint(hu, np.float32(-85), cover(np.maximum(plane, wall + 3), 1.5 * edge) * np.float32(0.8))
        return hu

    def paint_bones(self, hu: Field, bone: Field, cartilage: Field) -> None:
        """Paint ribs and other drawn bones with cortex and marrow, cartilage, and the spine."""
        edge = self.edge_mm
        hard = np.float32(1.15 - 0.005 * (self.spec.age_years - 40))
        age = np.float32(np.clip((self.spec.age_years - 35) / 40, 0, 1))
        paint(hu, np.float32(95) + 130 * age * np.clip(self.fine_noise, 0, 1.5), cover(cartilage, edge))
        paint(hu, hard * (620 + 60 * self.noise), cover(bone, edge))
        paint(hu, hard * (170 + 70 * self.fine_noise), cover(bone + 1.9, edge))
        spine, column, canal, disc = self.thorax.spine
        paint(
            hu,
            np.float32(62) - 150 * np.clip(np.float32(0.9) - np.abs(self.noise) * 2, 0, 0.5),
            cover(spine - 4.5, edge) * np.float32(0.6),
        )
        ring = np.broadcast_to((disc > 0.76), column.shape)
        paint(hu, np.float32(85), cover(np.where(ring, column, 9), edge))
        paint(hu, hard * (480 + 60 * self.noise), cover(spine, edge))
        inner = np.maximum(spine + 1.8, np.float32(14) * (disc - np.float32(0.62)))
        paint(hu, hard * (165 + 55 * self.fine_noise), cover(inner, edge))
        paint(hu, np.float32(-30), cover(canal, edge))
        paint(hu, np.float32(30), cover(canal + 3.2, edge))

    def paint_inside(self, hu: Field, tubes: CentralTubes, slab: slice, colon: Field) -> None:
        """Paint abdomen, mediastinum, heart, vessels and central airways."""
        x, y, z, edge, spec = self.x, self.y, self.z, self.edge_mm, self.spec
        thorax = self.thorax
        inside = np.minimum(thorax.cavity[1], thorax.cavity[-1])
        above = thorax.above
        clear = np.minimum(thorax.spine[0], thorax.spine[1]) - 3
        chest = np.maximum(np.maximum(inside, -above), -clear)
        paint(hu, np.float32(-92) + 12 * self.noise + 10 * self.fine_noise, cover(chest, edge))
        if z.min() < max(self.anatomy.dome_z_mm.values()) + 30:
            below = np.maximum(np.maximum(inside + 3, above + 3.5), -clear)
            paint(hu, np.float32(48), cover(np.maximum(np.maximum(inside, above), -clear), edge))
            paint_abdomen(hu, spec, self.anatomy, x, y, z, below, colon, self.noise, edge)
            for side in SIDES:
                psoas = np.hypot(x - side * 38, y - self.anatomy.spine_y_mm(z)) - np.clip((-190 - z) / 5, 0, 19)
                paint(hu, np.float32(52), cover(psoas, edge) * cover(-clear, edge))
        blood_hu = np.float32(41 + spec.contrast_hu)
        muscle_hu = np.float32(46 + 0.4 * spec.contrast_hu)
        heart = thorax.heart
        wall = cover(heart.outside, edge)
        paint(hu, np.float32(-95), cover(heart.outside - np.float32(self.anatomy.pericardial_fat_mm), edge) * cover(chest, edge))
        paint(hu, muscle_hu, wall)
        for chamber in (heart.left_ventricle, heart.right_heart, heart.left_atrium):
            paint(hu, blood_hu, cover(np.maximum(chamber, heart.outside + 2.5), edge))
        gullet = tubes.gullet[slab]
        paint(hu, np.float32(40), cover(gullet, edge))
        paint(hu, np.float32(-700), cover(gullet + 5.2 - 2.5 * self.noise, edge))
        blood = tubes.blood[slab]
        paint(hu, np.float32(50), cover(np.maximum(blood - 1.2, -heart.outside), edge))
        paint(hu, blood_hu, cover(blood, edge))
        airway = tubes.airway[slab]
        paint(hu, np.float32(50), cover(airway - 1.8, edge))
        paint(hu, np.float32(-1000), cover(airway, edge))

    def paint_lungs(self, hu: Field, texture: LungTexture, slab: slice) -> dict[int, Field]:
        """Paint pleural fluid and lungs; returns the covered share of each lung."""
        edge = self.edge_mm
        shares: dict[int, Field] = {}
        for side in SIDES:
            paint(hu, np.float32(8) + 4 * self.noise, cover(self.thorax.fluid[side], edge))
            shares[side] = cover(self.thorax.lung[side], edge)
            tissue = texture.image_hu(side, slab, self.x, self.y, self.z, self.thorax, self.noise, self.fine_noise)
            paint(hu, tissue, shares[side])
        return shares
