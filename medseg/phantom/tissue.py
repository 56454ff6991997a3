"""Torso in Hounsfield units: image and labels on the lattice, painted from distances."""

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.lungs import WAVE_GRAIN_MM, draw_texture, lung_hu, measure_thorax
from medseg.phantom.organs import arm_path, draw_bones, draw_central_tubes
from medseg.phantom.shapes import (
    Field,
    Fields,
    Lattice,
    cover,
    draw_tube,
    ellipsoid,
    maximum,
    noise_field,
    paint,
    union,
)
from medseg.phantom.spec import SIDES, Anatomy, PhantomSpec


def draw_model(
    spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice
) -> tuple[NDArray[np.int16], NDArray[np.int8], NDArray[np.int8]]:
    """Draw the patient of a case on a lattice.

    Returns:
        HU (D, H, W); covered share × 100 of the lungs, positive in the left and negative in the
        right one; covered share × 100, positive in the heart and negative in the spine.
    """
    fields = draw_central_tubes(anatomy, lattice) | draw_bones(anatomy, lattice, spec.arms)
    fields |= {"colon": draw_colon(spec, anatomy, lattice), "arms": lattice.full(300)}
    for side in SIDES if spec.arms != "none" else ():
        shoulder, elbow = arm_path(anatomy, side, spec.arms)
        path = np.stack([shoulder, 0.75 * shoulder + 0.25 * elbow, elbow])
        draw_tube(
            fields["arms"],
            lattice,
            path,
            np.array([44.0, 40, 33]),
            margin_mm=20 + 1.7 * spec.fat_mm,
        )
    texture, spheres, fissures = draw_texture(spec, anatomy, lattice, fields["airway"])
    fields |= texture
    for name, purpose, grain_mm in (
        ("waves", "waves", WAVE_GRAIN_MM),
        ("fine_noise", "fine tissue", 7.0),
        ("noise", "tissue", 26.0),
    ):
        fields[name] = noise_field(spec.rng(purpose), lattice, grain_mm)
    image, lungs, organs = (
        np.empty(lattice.shape, dtype=kind) for kind in (np.int16, np.int8, np.int8)
    )
    edge = lattice.edge_mm
    for slab in lattice.slabs():
        part = {name: field[slab] for name, field in fields.items()}
        part |= zip("xyz", lattice.points(slab), strict=True)
        part |= measure_thorax(spec, anatomy, part)
        hu = paint_trunk(spec, anatomy, part, edge)
        paint_inside(hu, spec, anatomy, part, edge)
        left, right = (cover(part[f"{name}_lung"], edge) for name in SIDES.values())
        for side, share in zip(SIDES, (left, right), strict=True):
            fluid = np.float32(8) + 4 * part["noise"], cover(part[f"{SIDES[side]}_fluid"], edge)
            paint(hu, fluid, (lung_hu(spec, part, side, spheres, fissures[side]), share))
        image[slab] = np.clip(np.rint(hu), -1024, 3071)
        lungs[slab] = np.rint(100 * (left - right))
        spine = cover(
            np.maximum(np.minimum(part["spine"], part["column"]), 0.5 - part["canal"]), edge
        )
        organs[slab] = np.rint(100 * (cover(part["heart"], edge) - spine))
    return image, lungs, organs


def paint_trunk(spec: PhantomSpec, anatomy: Anatomy, part: Fields, edge: float) -> Field:
    """Paint air, skin, fat, muscle, arms, bones with cortex and marrow, cartilage, and the spine.

    Args:
        spec: The case.
        anatomy: The patient.
        part: Coordinates, noise and distances on the slab.
        edge: Width of edges in mm.

    Returns:
        HU (d, H, W).
    """
    x, y, z, noise, fine_noise = (part[name] for name in ("x", "y", "z", "noise", "fine_noise"))
    wall = union(
        anatomy.muscle_outline(x, y, z), part["cage"] - np.float32(11 + 0.4 * anatomy.muscle_mm), 14
    )
    muscle = union(wall, part["arms"], 16)
    around = (
        np.float32(0.75)
        + np.float32(0.35) * np.clip(-(y / 115), 0, 1)
        + np.float32(0.3) * np.clip(-z / 150, -1.2, 1)
        + np.float32(0.2) * (x / 160) * (x / 160)
    )
    skin: Field = muscle - np.float32(spec.fat_mm) * np.clip(around, 0.3, 1.6) - 2.0
    glands: Field = np.full_like(skin, 30)
    if spec.sex == "female":
        size = 0.75 + 0.025 * spec.fat_mm
        for x_mm in (side * (78 + 10 * size) for side in SIDES):
            skin = union(
                skin,
                ellipsoid(x, y, z, (x_mm, -98 - 10 * size, -48), (54 * size, 50 * size, 58 * size)),
                14,
            )
            gland = ellipsoid(
                x, y, z, (x_mm, -108 - 12 * size, -50), (34 * size, 30 * size, 34 * size)
            )
            glands = np.minimum(glands, gland)
    lobes = np.maximum(glands, 12 * (np.float32(0.1) - fine_noise * np.float32(0.5)) - 3)
    fibres = np.clip(
        np.float32(1) - np.abs(noise + np.float32(0.25) * fine_noise) * np.float32(6), 0, 1
    )
    marbling = fibres * np.float32(np.clip(0.15 + spec.fat_mm / 45, 0, 0.8))
    fascia = (
        np.abs(part["cage"] - np.float32(13) - 2 * noise)
        - np.float32(0.3 + 0.03 * spec.fat_mm)
        - np.float32(1.2) * fine_noise
    )
    armpits = (
        ellipsoid(x, y, z, (side * 150 * anatomy.width_factor, 4, 34), (17, 36, 44))
        for side in SIDES
    )
    hard = np.float32(1.15 - 0.005 * (spec.age_years - 40))
    age = np.float32(np.clip((spec.age_years - 35) / 40, 0, 1))
    spine, column, canal, disc = (part[name] for name in ("spine", "column", "canal", "disc"))
    hu = np.full(skin.shape, -1000, dtype=np.float32)
    paint(
        hu,
        (15, cover(skin, edge)),
        (np.float32(-104) + 7 * noise + 4 * fine_noise, cover(skin + 2.2, edge)),
        (32, cover(lobes, 3 * edge) * cover(skin + 6, edge)),
        (np.float32(54 + 0.12 * spec.contrast_hu) - 145 * marbling, cover(muscle, edge)),
        *((-100, cover(armpit - 3 * fine_noise, 2 * edge) * np.float32(0.9)) for armpit in armpits),
        (-85, cover(np.maximum(fascia, wall + 3), 1.5 * edge) * np.float32(0.8)),
        (np.float32(95) + 130 * age * np.clip(fine_noise, 0, 1.5), cover(part["cartilage"], edge)),
        (hard * (620 + 60 * noise), cover(part["bone"], edge)),
        (hard * (170 + 70 * fine_noise), cover(part["bone"] + 1.9, edge)),
        (
            np.float32(62) - 150 * np.clip(np.float32(0.9) - np.abs(noise) * 2, 0, 0.5),
            cover(spine - 4.5, edge) * np.float32(0.6),
        ),
        (85, cover(np.where(disc > 0.76, column, 9), edge)),
        (hard * (480 + 60 * noise), cover(spine, edge)),
        (
            hard * (165 + 55 * fine_noise),
            cover(np.maximum(spine + 1.8, np.float32(14) * (disc - np.float32(0.62))), edge),
        ),
        (-30, cover(canal, edge)),
        (30, cover(canal + 3.2, edge)),
    )
    return hu


def paint_inside(hu: Field, spec: PhantomSpec, anatomy: Anatomy, part: Fields, edge: float) -> None:
    """Paint abdomen, mediastinum, heart, vessels and central airways into a slab, HU (d, H, W), in place."""
    x, y, z, noise, fine_noise = (part[name] for name in ("x", "y", "z", "noise", "fine_noise"))
    inside, above, heart, gullet = (part[name] for name in ("cage", "above", "heart", "gullet"))
    near_spine = -(np.minimum(part["spine"], part["column"]) - 3)
    chest = cover(maximum(inside, -above, near_spine), edge)
    paint(hu, (np.float32(-92) + 12 * noise + 10 * fine_noise, chest))
    if z.min() < max(anatomy.dome_z_mm.values()) + 30:
        paint(hu, (48, cover(maximum(inside, above, near_spine), edge)))
        paint_abdomen(hu, spec, anatomy, part, maximum(inside + 3, above + 3.5, near_spine), edge)
        psoas = (
            np.hypot(x - side * 38, y - anatomy.spine(z)[1]) - np.clip((-190 - z) / 5, 0, 19)
            for side in SIDES
        )
        paint(hu, *((52, cover(muscle, edge) * cover(near_spine, edge)) for muscle in psoas))
    blood_hu = 41 + spec.contrast_hu
    paint(
        hu,
        (-95, cover(heart - np.float32(anatomy.pericardial_fat_mm), edge) * chest),
        (46 + 0.4 * spec.contrast_hu, cover(heart, edge)),
        *(
            (blood_hu, cover(np.maximum(part[chamber], heart + 2.5), edge))
            for chamber in ("left_ventricle", "right_heart", "left_atrium")
        ),
        (40, cover(gullet, edge)),
        (-700, cover(gullet + 5.2 - 2.5 * noise, edge)),
        (50, cover(np.maximum(part["blood"] - 1.2, -heart), edge)),
        (blood_hu, cover(part["blood"], edge)),
        (50, cover(part["airway"] - 1.8, edge)),
        (-1000, cover(part["airway"], edge)),
    )


def draw_colon(spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice) -> Field:
    """Draw the colon's outside as a distance field, (D, H, W), at most 30 mm."""
    rng, distance = spec.rng("colon"), lattice.full(30)
    left_top = anatomy.dome_z_mm[1] - float(rng.uniform(28, 75))
    right_top = anatomy.dome_z_mm[-1] - float(rng.uniform(115, 150))
    path = np.array(
        [
            [-95, 15, -390], [-98, 5, right_top - 45], [-88, -20, right_top], [-55, -62, right_top - 15],
            [-10, -78, right_top - 30], [45, -70, 0.5 * (left_top + right_top)], [80, -35, left_top - 12], [98, 5, left_top], [104, 32, left_top - 45], [100, 35, -390],
        ]
    )  # fmt: skip
    places = np.linspace(0, len(path) - 1, 90)
    points = np.stack([np.interp(places, np.arange(len(path)), line) for line in path.T], axis=1)
    draw_tube(
        distance,
        lattice,
        points,
        float(rng.uniform(15, 22)) * (1 + 0.22 * np.sin(np.arange(90) * 1.9)),
        margin_mm=4,
    )
    return distance


def paint_abdomen(
    image: Field, spec: PhantomSpec, anatomy: Anatomy, part: Fields, inside: Field, edge_mm: float
) -> None:
    """Paint the organs below the diaphragm into a slab.

    Args:
        image: HU (d, H, W), painted in place.
        spec: The case.
        anatomy: The patient.
        part: Coordinates, noise and distance to the colon on the slab.
        inside: Signed distance to the peritoneal space (negative inside).
        edge_mm: Width of edges.
    """
    x, y, z, noise, colon = (part[name] for name in ("x", "y", "z", "noise", "colon"))
    rng, wash, gas = spec.rng("abdomen"), 0.45 * spec.contrast_hu, spec.stomach_gas
    right, left = np.float32(anatomy.dome_z_mm[-1]), float(np.float32(anatomy.dome_z_mm[1]))
    right_mm = float(right)
    inner = np.maximum(inside + 1.0, -30)
    size = rng.normal(1, 0.06, 4)
    liver_hu = 58 + 0.5 * wash - (25 if rng.random() < 0.15 else 0)  # one liver in seven is fatty
    up = -y if spec.is_prone else y  # gas rises to where this is lowest

    def organ(distance: Field, value_hu: float) -> tuple[Field, Field]:
        return np.float32(value_hu) + 3 * noise, cover(np.maximum(distance, inner), edge_mm)

    bowel = maximum(
        np.float32(7) - 14 * np.abs(noise - np.float32(0.6)), inner + 10, z - (right - 120), y - 25
    )
    kidneys = [
        layer
        for side, kidney_z in ((1, right_mm - 135 + 14), (-1, right_mm - 135))
        for layer in (
            organ(ellipsoid(x, y, z, (side * 58.0, 34.0, kidney_z), (27, 26, 56)), 33 + wash),
            organ(
                ellipsoid(x, y, z, (side * 58.0 - side * 12, 28.0, kidney_z), (14, 11, 26)), -70
            ),  # fat of the pelvis
        )
    ]
    stool = np.where(
        noise + (up + 20) / 40 > 0.1, np.float32(10) + 90 * np.abs(noise), np.float32(-950)
    ).astype(np.float32)
    lobe = ellipsoid(x, y, z, (-68, -6, right_mm - 62), (104 * size[0], 112, 92 * size[0]))
    liver = union(lobe, ellipsoid(x, y, z, (8, -52, right_mm - 52), (74, 44, 36 * size[0])), 22)
    liver = np.maximum(liver, np.float32(0.55) * (x + 20) + np.float32(0.5) * (right - 118 - z))
    vein = maximum(liver + 8, inner, 14 * (np.abs(noise - np.float32(0.15)) - np.float32(0.05)))
    spleen = ellipsoid(x, y, z, (94, 34, left - 55), (30 * size[1], 50, 46 * size[1]))
    fundus = ellipsoid(
        x, y, z, (52.0, -12.0, left - 44 - 8 * gas), (36 + 22 * gas, 42 + 16 * gas, 40 + 22 * gas)
    )
    body = ellipsoid(x, y, z, (40, -46, left - 92), (34 + 10 * gas, 30, 52))
    stomach = np.maximum(
        union(fundus, body, 15), -2 - ellipsoid(x, y, z, (94, 34, left - 55), (30, 50, 46))
    )
    content = np.where(
        up < np.float32(-62 + 75 * gas), np.float32(-1000), np.float32(12) + 22 * noise
    ).astype(np.float32)
    paint(
        image,
        (np.float32(-102) + 9 * noise, cover(inside, edge_mm)),
        (28 + 0.3 * wash, cover(bowel, 3 * edge_mm)),
        *kidneys,
        (35, cover(colon, edge_mm) * cover(inner, edge_mm)),
        (stool, cover(np.maximum(colon + 2.5, inner), edge_mm)),
        organ(liver, liver_hu),
        (45 + 0.75 * wash, cover(vein, 3 * edge_mm) * np.float32(0.6)),
        organ(spleen, 48 + 0.7 * wash),
        organ(stomach, 45 + 0.4 * wash),
        (content, cover(np.maximum(stomach + 4, inner), edge_mm)),
    )
