"""Organs below the diaphragm."""

from __future__ import annotations

import numpy as np

from medseg.phantom.anatomy import Anatomy
from medseg.phantom.lattice import Lattice, draw_tube
from medseg.phantom.shapes import Field, cover, ellipsoid, maximum, paint, union
from medseg.phantom.spec import PhantomSpec


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
    rng, wash, gas = spec.rng("abdomen"), 0.45 * spec.contrast_hu, spec.stomach_gas
    right, left = np.float32(anatomy.dome_z_mm[-1]), float(np.float32(anatomy.dome_z_mm[1]))
    right_mm = float(right)
    inner = np.maximum(inside + 1.0, -30)
    size = rng.normal(1, 0.06, 4)
    is_fatty = rng.random() < 0.15
    up = -y if spec.is_prone else y  # gas rises to where this is lowest

    def organ(distance: Field, value_hu: float) -> tuple[Field, Field]:
        return np.float32(value_hu) + 3 * noise, cover(np.maximum(distance, inner), edge_mm)

    bowel = maximum(np.float32(7) - 14 * np.abs(noise - np.float32(0.6)), inner + 10, z - (right - 120), y - 25)
    paint(image, (np.float32(-102) + 9 * noise, cover(inside, edge_mm)), (28 + 0.3 * wash, cover(bowel, 3 * edge_mm)))
    for side, kidney_z in ((1, right_mm - 135 + 14), (-1, right_mm - 135)):
        kidney = ellipsoid(x, y, z, (side * 58.0, 34.0, kidney_z), (27, 26, 56))
        pelvis = ellipsoid(x, y, z, (side * 58.0 - side * 12, 28.0, kidney_z), (14, 11, 26))
        paint(image, organ(kidney, 33 + wash), organ(pelvis, -70))
    stool = np.where(noise + (up + 20) / 40 > 0.1, np.float32(10) + 90 * np.abs(noise), np.float32(-950)).astype(np.float32)
    wall = cover(colon, edge_mm) * cover(inner, edge_mm)
    paint(image, (35, wall), (stool, cover(np.maximum(colon + 2.5, inner), edge_mm)))
    lobe = ellipsoid(x, y, z, (-68, -6, right_mm - 62), (104 * size[0], 112, 92 * size[0]))
    liver = union(lobe, ellipsoid(x, y, z, (8, -52, right_mm - 52), (74, 44, 36 * size[0])), 22)
    liver = np.maximum(liver, np.float32(0.55) * (x + 20) + np.float32(0.5) * (right - 118 - z))
    vein = maximum(liver + 8, inner, 14 * (np.abs(noise - np.float32(0.15)) - np.float32(0.05)))
    spleen = ellipsoid(x, y, z, (94, 34, left - 55), (30 * size[1], 50, 46 * size[1]))
    paint(
        image,
        organ(liver, 58 + 0.5 * wash - (25 if is_fatty else 0)),
        (45 + 0.75 * wash, cover(vein, 3 * edge_mm) * np.float32(0.6)),
        organ(spleen, 48 + 0.7 * wash),
    )
    fundus = ellipsoid(x, y, z, (52.0, -12.0, left - 44 - 8 * gas), (36 + 22 * gas, 42 + 16 * gas, 40 + 22 * gas))
    body = ellipsoid(x, y, z, (40, -46, left - 92), (34 + 10 * gas, 30, 52))
    stomach = np.maximum(union(fundus, body, 15), -2 - ellipsoid(x, y, z, (94, 34, left - 55), (30, 50, 46)))
    content = np.where(up < np.float32(-62 + 75 * gas), np.float32(-1000), np.float32(12) + 22 * noise).astype(np.float32)
    paint(image, organ(stomach, 45 + 0.4 * wash), (content, cover(np.maximum(stomach + 4, inner), edge_mm)))
