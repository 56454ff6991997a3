"""Organs below the diaphragm."""

from __future__ import annotations

import numpy as np

from medseg.phantom.anatomy import Anatomy
from medseg.phantom.lattice import Lattice, draw_tube
from medseg.phantom.shapes import Field, cover, ellipsoid, paint, union
from medseg.phantom.spec import PhantomSpec


def draw_colon(spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice) -> Field:
    """Draw the colon's outside as a distance field, (D, H, W), at most 30 mm."""
    rng = spec.rng("colon")
    distance = np.full(lattice.shape, 30, dtype=np.float32)
    dome_left, dome_right = anatomy.dome_z_mm[1], anatomy.dome_z_mm[-1]
    left_top = dome_left - float(rng.uniform(28, 75))
    right_top = dome_right - float(rng.uniform(115, 150))
    path = np.array(
        [
            [-95, 15, -390], [-98, 5, right_top - 45], [-88, -20, right_top], [-55, -62, right_top - 15],
            [-10, -78, right_top - 30], [45, -70, 0.5 * (left_top + right_top)], [80, -35, left_top - 12], [98, 5, left_top], [104, 32, left_top - 45], [100, 35, -390],
        ]
    )  # fmt: skip
    fine = np.linspace(0, len(path) - 1, 90)
    points = np.stack([np.interp(fine, np.arange(len(path)), path[:, i]) for i in range(3)], axis=1)
    radii = float(rng.uniform(15, 22)) * (1 + 0.22 * np.sin(np.arange(90) * 1.9))
    draw_tube(distance, lattice, points, radii, margin_mm=4)
    return distance


def paint_abdomen(
    image: Field,
    spec: PhantomSpec,
    anatomy: Anatomy,
    x: Field,
    y: Field,
    z: Field,
    inside: Field,
    colon: Field,
    noise: Field,
    edge_mm: float,
) -> None:
    """Paint the organs below the diaphragm into a slab.

    Args:
        image: HU (d, H, W), painted in place.
        spec: The case.
        anatomy: The patient.
        x: World x in mm.
        y: World y in mm.
        z: World z in mm.
        inside: Signed distance to the peritoneal space (negative inside).
        colon: Distance to the colon.
        noise: Smooth unit noise on the slab.
        edge_mm: Width of edges.
    """
    right, left = np.float32(anatomy.dome_z_mm[-1]), np.float32(anatomy.dome_z_mm[1])
    rng = spec.rng("abdomen")
    wash = 0.45 * spec.contrast_hu
    room = cover(inside, edge_mm)
    paint(image, np.float32(-102) + 9 * noise, room)
    inner = np.maximum(inside + 1.0, -30)
    size = rng.normal(1, 0.06, 4)
    bowel = np.maximum(np.float32(7) - 14 * np.abs(noise - np.float32(0.6)), inner + 10)
    bowel = np.maximum(bowel, z - (right - 120))
    bowel = np.maximum(bowel, y - 25)
    paint(image, np.float32(28 + 0.3 * wash), cover(bowel, 3 * edge_mm))

    def organ(distance: Field, value_hu: float) -> None:
        paint(image, np.float32(value_hu) + 3 * noise, cover(np.maximum(distance, inner), edge_mm))

    gas_level = {False: y, True: -y}[spec.is_prone]
    kidney_z = float(right) - 135
    for side in (1, -1):
        centre = (side * 58.0, 34.0, kidney_z + 14 * (side > 0))
        kidney = ellipsoid(x, y, z, centre, (27, 26, 56))
        organ(kidney, 33 + wash)
        organ(ellipsoid(x, y, z, (centre[0] - side * 12, centre[1] - 6, centre[2]), (14, 11, 26)), -70)
    fill = cover(colon, edge_mm) * cover(inner, edge_mm)
    paint(image, np.float32(35), fill)
    lumen = cover(np.maximum(colon + 2.5, inner), edge_mm)
    stool = np.where(noise + (gas_level + 20) / 40 > 0.1, np.float32(10) + 90 * np.abs(noise), np.float32(-950))
    paint(image, stool.astype(np.float32), lumen)
    lobe = ellipsoid(x, y, z, (-68, -6, float(right) - 62), (104 * size[0], 112, 92 * size[0]))
    second = ellipsoid(x, y, z, (8, -52, float(right) - 52), (74, 44, 36 * size[0]))
    liver = union(lobe, second, 22)
    liver = np.maximum(liver, np.float32(0.55) * (x + 20) + np.float32(0.5) * (right - 118 - z))
    organ(liver, 58 + 0.5 * wash - (25 if rng.random() < 0.15 else 0))
    vein = np.abs(noise - np.float32(0.15)) - np.float32(0.05)
    paint(
        image,
        np.float32(45 + 0.75 * wash),
        cover(np.maximum(np.maximum(liver + 8, inner), 14 * vein), 3 * edge_mm) * np.float32(0.6),
    )
    organ(ellipsoid(x, y, z, (94, 34, float(left) - 55), (30 * size[1], 50, 46 * size[1])), 48 + 0.7 * wash)
    gas = spec.stomach_gas
    top = (52.0, -12.0, float(left) - 44 - 8 * gas)
    stomach = ellipsoid(x, y, z, top, (36 + 22 * gas, 42 + 16 * gas, 40 + 22 * gas))
    body = ellipsoid(x, y, z, (40, -46, float(left) - 92), (34 + 10 * gas, 30, 52))
    stomach = np.maximum(union(stomach, body, 15), -2 - ellipsoid(x, y, z, (94, 34, float(left) - 55), (30, 50, 46)))
    organ(stomach, 45 + 0.4 * wash)
    surface = np.float32(-62 + 75 * gas)
    content = np.where(gas_level < surface, np.float32(-1000), np.float32(12) + 22 * noise)
    paint(image, content.astype(np.float32), cover(np.maximum(stomach + 4, inner), edge_mm))
