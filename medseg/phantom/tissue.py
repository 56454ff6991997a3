"""Torso in Hounsfield units: image and labels on the lattice, painted from distances."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.abdomen import draw_colon, paint_abdomen
from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.lattice import Lattice, draw_tube, noise_field
from medseg.phantom.lungs import Thorax, draw_waves, measure_thorax
from medseg.phantom.mediastinum import CentralTubes, draw_central_tubes
from medseg.phantom.parenchyma import LungTexture
from medseg.phantom.shapes import Field, cover, ellipsoid, maximum, paint, union
from medseg.phantom.skeleton import arm_path, draw_bones
from medseg.phantom.spec import PhantomSpec


class Model(NamedTuple):
    """The patient drawn on a lattice.

    Attributes:
        image_hu: int16 (D, H, W).
        lungs: int8 (D, H, W): covered share × 100, positive in the left lung, negative in the right.
        organs: int8 (D, H, W): covered share × 100, positive in the heart, negative in the spine.
    """

    image_hu: NDArray[np.int16]
    lungs: NDArray[np.int8]
    organs: NDArray[np.int8]


def draw_model(spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice) -> Model:
    """Draw the patient of a case on a lattice."""
    tubes = draw_central_tubes(anatomy, lattice)
    bone, cartilage = draw_bones(anatomy, lattice, spec.arms)
    colon, arms = draw_colon(spec, anatomy, lattice), lattice.full(300)
    for side in SIDES if spec.arms != "none" else ():
        shoulder, elbow = arm_path(anatomy, side, spec.arms)
        path = np.stack([shoulder, 0.75 * shoulder + 0.25 * elbow, elbow])
        draw_tube(arms, lattice, path, np.array([44.0, 40, 33]), margin_mm=20 + 1.7 * spec.fat_mm)
    texture = LungTexture.draw(spec, anatomy, lattice, tubes)
    waves = draw_waves(spec, lattice)
    fine_noise, noise = noise_field(spec.rng("fine tissue"), lattice, 7.0), noise_field(spec.rng("tissue"), lattice, 26.0)
    model = Model(*(np.empty(lattice.shape, dtype=kind) for kind in (np.int16, np.int8, np.int8)))
    edge = lattice.edge_mm
    for slab in lattice.slabs():
        x, y, z = lattice.points(slab)
        thorax = measure_thorax(spec, anatomy, tubes, waves, slab, x, y, z)
        part = _Slab(spec, anatomy, x, y, z, thorax, noise[slab], fine_noise[slab], edge)
        hu = part.paint_trunk(arms[slab])
        part.paint_bones(hu, bone[slab], cartilage[slab])
        part.paint_inside(hu, CentralTubes(*(field[slab] for field in tubes)), colon[slab])
        left, right = part.paint_lungs(hu, texture, slab)
        model.image_hu[slab] = np.clip(np.rint(hu), -1024, 3071)
        model.lungs[slab] = np.rint(100 * (left - right))
        bones, column, canal, _ = thorax.spine
        spine = cover(np.maximum(np.minimum(bones, column), 0.5 - canal), edge)
        model.organs[slab] = np.rint(100 * (cover(thorax.heart.outside, edge) - spine))
    return model


class _Slab(NamedTuple):
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
        spec, anatomy, x, y, z, thorax, noise, fine_noise, edge = self
        cage = np.minimum(thorax.cavity[1], thorax.cavity[-1])
        wall = union(anatomy.muscle_outline(x, y, z), cage - np.float32(11 + 0.4 * anatomy.muscle_mm), 14)
        muscle = union(wall, arms, 16)
        across = x / 160
        around = (
            np.float32(0.75)
            + np.float32(0.35) * np.clip(-(y / 115), 0, 1)
            + np.float32(0.3) * np.clip(-z / 150, -1.2, 1)
            + np.float32(0.2) * across * across
        )
        skin: Field = muscle - np.float32(spec.fat_mm) * np.clip(around, 0.3, 1.6) - 2.0
        glands: Field = np.full_like(skin, 30)
        if spec.sex == "female":
            size = 0.75 + 0.025 * spec.fat_mm
            for x_mm in (side * (78 + 10 * size) for side in SIDES):
                skin = union(skin, ellipsoid(x, y, z, (x_mm, -98 - 10 * size, -48), (54 * size, 50 * size, 58 * size)), 14)
                gland = ellipsoid(x, y, z, (x_mm, -108 - 12 * size, -50), (34 * size, 30 * size, 34 * size))
                glands = np.minimum(glands, gland)
        lobes = np.maximum(glands, 12 * (np.float32(0.1) - fine_noise * np.float32(0.5)) - 3)
        fibres = np.clip(np.float32(1) - np.abs(noise + np.float32(0.25) * fine_noise) * np.float32(6), 0, 1)
        marbling = fibres * np.float32(np.clip(0.15 + spec.fat_mm / 45, 0, 0.8))
        hu = np.full(skin.shape, -1000, dtype=np.float32)
        paint(
            hu,
            (15, cover(skin, edge)),
            (np.float32(-104) + 7 * noise + 4 * fine_noise, cover(skin + 2.2, edge)),
            (32, cover(lobes, 3 * edge) * cover(skin + 6, edge)),
            (np.float32(54 + 0.12 * spec.contrast_hu) - 145 * marbling, cover(muscle, edge)),
        )
        for side in SIDES:
            armpit = ellipsoid(x, y, z, (side * 150 * anatomy.width_factor, 4, 34), (17, 36, 44))
            paint(hu, (-100, cover(armpit - 3 * fine_noise, 2 * edge) * np.float32(0.9)))
        plane = np.abs(cage - np.float32(13) - 2 * noise) - np.float32(0.3 + 0.03 * spec.fat_mm) - np.float32(1.2) * fine_noise
        paint(hu, (-85, cover(np.maximum(plane, wall + 3), 1.5 * edge) * np.float32(0.8)))
        return hu

    def paint_bones(self, hu: Field, bone: Field, cartilage: Field) -> None:
        """Paint ribs and other drawn bones with cortex and marrow, cartilage, and the spine."""
        edge, noise, fine_noise = self.edge_mm, self.noise, self.fine_noise
        hard = np.float32(1.15 - 0.005 * (self.spec.age_years - 40))
        age = np.float32(np.clip((self.spec.age_years - 35) / 40, 0, 1))
        spine, column, canal, disc = self.thorax.spine
        paint(
            hu,
            (np.float32(95) + 130 * age * np.clip(fine_noise, 0, 1.5), cover(cartilage, edge)),
            (hard * (620 + 60 * noise), cover(bone, edge)),
            (hard * (170 + 70 * fine_noise), cover(bone + 1.9, edge)),
            (
                np.float32(62) - 150 * np.clip(np.float32(0.9) - np.abs(noise) * 2, 0, 0.5),
                cover(spine - 4.5, edge) * np.float32(0.6),
            ),
            (85, cover(np.where(disc > 0.76, column, 9), edge)),
            (hard * (480 + 60 * noise), cover(spine, edge)),
            (hard * (165 + 55 * fine_noise), cover(np.maximum(spine + 1.8, np.float32(14) * (disc - np.float32(0.62))), edge)),
            (-30, cover(canal, edge)),
            (30, cover(canal + 3.2, edge)),
        )

    def paint_inside(self, hu: Field, tubes: CentralTubes, colon: Field) -> None:
        """Paint abdomen, mediastinum, heart, vessels and central airways."""
        spec, anatomy, x, y, z, thorax, noise, fine_noise, edge = self
        inside, above = np.minimum(thorax.cavity[1], thorax.cavity[-1]), thorax.above
        near_spine = -(np.minimum(thorax.spine[0], thorax.spine[1]) - 3)
        chest = cover(maximum(inside, -above, near_spine), edge)
        paint(hu, (np.float32(-92) + 12 * noise + 10 * fine_noise, chest))
        if z.min() < max(anatomy.dome_z_mm.values()) + 30:
            paint(hu, (48, cover(maximum(inside, above, near_spine), edge)))
            below = maximum(inside + 3, above + 3.5, near_spine)
            paint_abdomen(hu, spec, anatomy, x, y, z, below, colon, noise, edge)
            for side in SIDES:
                psoas = np.hypot(x - side * 38, y - anatomy.spine_y_mm(z)) - np.clip((-190 - z) / 5, 0, 19)
                paint(hu, (52, cover(psoas, edge) * cover(near_spine, edge)))
        blood_hu, heart = 41 + spec.contrast_hu, thorax.heart
        chambers = (heart.left_ventricle, heart.right_heart, heart.left_atrium)
        paint(
            hu,
            (-95, cover(heart.outside - np.float32(anatomy.pericardial_fat_mm), edge) * chest),
            (46 + 0.4 * spec.contrast_hu, cover(heart.outside, edge)),
            *((blood_hu, cover(np.maximum(chamber, heart.outside + 2.5), edge)) for chamber in chambers),
            (40, cover(tubes.gullet, edge)),
            (-700, cover(tubes.gullet + 5.2 - 2.5 * noise, edge)),
            (50, cover(np.maximum(tubes.blood - 1.2, -heart.outside), edge)),
            (blood_hu, cover(tubes.blood, edge)),
            (50, cover(tubes.airway - 1.8, edge)),
            (-1000, cover(tubes.airway, edge)),
        )

    def paint_lungs(self, hu: Field, texture: LungTexture, slab: slice) -> tuple[Field, Field]:
        """Paint pleural fluid and lungs; returns the covered share of the left and of the right lung."""
        _, _, x, y, z, thorax, noise, fine_noise, edge = self
        left, right = (cover(thorax.lung[side], edge) for side in SIDES)
        for side, share in zip(SIDES, (left, right), strict=True):
            tissue = texture.image_hu(side, slab, x, y, z, thorax, noise, fine_noise)
            paint(hu, (np.float32(8) + 4 * noise, cover(thorax.fluid[side], edge)), (tissue, share))
        return left, right
