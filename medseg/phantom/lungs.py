"""Lungs: their outline as distance fields, and their inside with density, gravity, vessel and airway trees, fissures and disease.

A tree grows towards the centre of the points that it must still supply and splits them by a plane, as in Tawhai, Pullan and
Hunter, Annals of Biomedical Engineering 28 (2000) 793. Radii follow a power law of the number of supplied ends; Murray's
exponent is 3, pulmonary arteries measure about 2.7 to 3 (Huang et al., J Appl Physiol 81 (1996) 2123).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.organs import bronchi, draw_central_tubes, heart_fields, spine_distance, vein_roots
from medseg.phantom.shapes import (
    Field,
    Lattice,
    cover,
    draw_tube,
    intersection,
    noise_field,
    paint,
    profile,
    splat_threads,
    union,
)
from medseg.phantom.spec import PhantomSpec

Array = NDArray[np.float64]

_COARSE_MM = 7.0
# Grain of the noise that roughens surfaces.
WAVE_GRAIN_MM = 38.0


class Thorax(NamedTuple):
    """Signed distances in mm on a slab (d, H, W); dictionaries by side sign.

    Attributes:
        cage: Inside of the rib cage.
        above: Height over the diaphragm, negative in the abdomen.
        lung: The lung's outline.
        fluid: Pleural fluid.
        heart: Outside, left ventricle, right heart, left atrium.
        spine: Bone, column, canal, disc phase.
    """

    cage: Field
    above: Field
    lung: dict[int, Field]
    fluid: dict[int, Field]
    heart: tuple[Field, Field, Field, Field]
    spine: tuple[Field, Field, Field, Field]


def measure_thorax(
    spec: PhantomSpec,
    anatomy: Anatomy,
    tubes: tuple[Field, Field, Field],
    waves: Field,
    slab: slice,
    x: Field,
    y: Field,
    z: Field,
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
    soft = union(soft, heart[0] - np.float32(anatomy.pericardial_fat_mm), 14)
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
            # The fluid has its depth at the lowest wall; its surface rises at the ribs.
            _, cy, _, ay = anatomy.thorax_centre(z, side)
            depth_mm = np.float32(effusion_mm) * np.clip((60 - z) / 110, 0.1, 1.3).astype(np.float32)
            meniscus = np.float32(16) * np.clip(inside[side][1] - np.float32(0.6), 0, 0.5)
            dry = np.float32(-1 if spec.is_prone else 1) * (y - cy) - (ay - depth_mm) + meniscus
            lung[side], fluid[side] = intersection(pleura, dry, 6.0), np.maximum(pleura, -dry)
        if spec.missing_lung == ("left" if side > 0 else "right"):
            lung[side], fluid[side] = np.full_like(pleura, 30), pleura
    return Thorax(np.minimum(cavity[1], cavity[-1]), height, lung, fluid, heart, spine)


class Tree(NamedTuple):
    """Pieces of a tree.

    Attributes:
        starts_xyz_mm: Ends towards the root, (n, 3).
        ends_xyz_mm: Ends away from the root, (n, 3).
        num_ends: Supplied end points behind each piece, (n,).
    """

    starts_xyz_mm: Array
    ends_xyz_mm: Array
    num_ends: NDArray[np.int64]

    def radii_mm(self, end_radius_mm: float, exponent: float = 2.8) -> Array:
        """Radius of each piece from the number of ends behind it."""
        return np.asarray(end_radius_mm * self.num_ends.astype(np.float64) ** (1 / exponent))


def grow_tree(root_xyz_mm: Array, ends_xyz_mm: Array, rng: np.random.Generator) -> Tree:
    """Grow a tree from a root to all end points.

    Args:
        root_xyz_mm: Where the tree enters, (3,).
        ends_xyz_mm: Points to supply, (n, 3), at least one.
        rng: Draws splits and bends.

    Returns:
        The tree; each branch is bent, made of two pieces.
    """
    pieces: list[tuple[Array, Array, int]] = []
    stack = [(np.asarray(root_xyz_mm, dtype=np.float64), ends_xyz_mm, 0)]
    while stack:
        place, points, depth = stack.pop()
        count, centre = len(points), points.mean(axis=0)
        reach = centre - place
        goal = place + (1.0 if count == 1 else (0.22, 0.3, 0.42)[min(depth, 2)]) * reach
        bend = place + 0.5 * (goal - place) + rng.normal(0, 0.07 * (float(np.linalg.norm(goal - place)) + 1e-9), 3)
        pieces += [(place, bend, count), (bend, goal, count)]
        if count == 1:
            continue
        # The plane through the goal splits the points along their largest extent, across the branch.
        offsets = points - centre
        direction = reach / (np.linalg.norm(reach) + 1e-9)
        normal = offsets[np.argmax(np.einsum("ij,ij->i", offsets, offsets))]
        normal = normal - 0.8 * direction * (normal @ direction) + rng.normal(0, 0.5, 3)
        order = np.argsort((points - goal) @ normal, kind="stable")
        cut = int(np.clip(round(count * rng.uniform(0.35, 0.65)), 1, count - 1))
        stack += [(goal, points[order[:cut]], depth + 1), (goal, points[order[cut:]], depth + 1)]
    starts, ends, counts = zip(*pieces, strict=True)
    return Tree(np.array(starts), np.array(ends), np.array(counts, dtype=np.int64))


def lung_points(spec: PhantomSpec, anatomy: Anatomy) -> dict[int, Array]:
    """Sample the lungs of the whole chest on a coarse lattice, whatever part of it is in view.

    Returns:
        Per side the lattice points inside the lung, (n, 3) xyz in mm.
    """
    lattice = Lattice.covering((-270, -140, -170), (110, 120, 170), (_COARSE_MM,) * 3)
    tubes, waves = draw_central_tubes(anatomy, lattice), noise_field(spec.rng("waves"), lattice, WAVE_GRAIN_MM)
    lung = measure_thorax(spec, anatomy, tubes, waves, slice(None), *lattice.points()).lung
    origin = lattice.origin_zyx_mm
    return {side: (np.argwhere(lung[side] < -2.5) * _COARSE_MM + origin)[:, ::-1].astype(np.float64) for side in SIDES}


class LungTexture(NamedTuple):
    """Content of the lungs, on the whole lattice.

    Attributes:
        spec: The case.
        vessels: Share of blood, (D, H, W).
        airways: Share of bronchial air, (D, H, W).
        walls: Share of bronchial wall, (D, H, W).
        nodules: Distance to nodules, (D, H, W), at most 30 mm.
        opaque: Centre (xyz) and radius of each consolidation.
        holes: Share of emphysematous holes, (D, H, W).
        fissures: Plane of each fissure by side: (unit normal xyz, offset mm).
    """

    spec: PhantomSpec
    vessels: Field
    airways: Field
    walls: Field
    nodules: Field
    opaque: list[tuple[Array, float]]
    holes: Field
    fissures: dict[int, list[tuple[Array, float]]]

    @classmethod
    def draw(cls, spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice, tubes: tuple[Field, Field, Field]) -> LungTexture:
        """Grow trees and place disease."""
        rng = spec.rng("lung")
        vessels, airways, walls, holes = (lattice.full(0) for _ in range(4))
        places = lung_points(spec, anatomy)
        thin = 0.48 * (1200 / spec.num_vessel_ends) ** 0.3

        def draw_ends(points: Array) -> Array:
            ends = points[rng.permutation(len(points))[: spec.num_vessel_ends]]
            return ends + rng.uniform(-0.5, 0.5, ends.shape) * _COARSE_MM

        for side, points in places.items():
            if len(points) < 50:
                continue
            ends = draw_ends(points)
            bundle = grow_tree(bronchi(anatomy)["left" if side > 0 else "right"][0][-1], ends, rng)
            radii = bundle.radii_mm(thin)
            # Arteries run beside the airways that share their course.
            aside = (1.9 * radii)[:, None] * np.array([0.35, -0.75, 0.55])
            _draw_tree(vessels, lattice, bundle.starts_xyz_mm + aside, bundle.ends_xyz_mm + aside, radii)
            veins = grow_tree(vein_roots(anatomy, side), draw_ends(points), rng)
            _draw_tree(vessels, lattice, veins.starts_xyz_mm, veins.ends_xyz_mm, veins.radii_mm(thin))
            # The upper generations are bronchi: lumen and wall (about 0.2 of the outer radius).
            share = bundle.num_ends / len(ends)
            keep = share > 0.012
            lumen = 0.56 * anatomy.trachea_mm * share[keep] ** (1 / 2.4)
            for field, outer in ((walls, lumen * 1.2 + 0.35), (airways, lumen)):
                _draw_tree(field, lattice, bundle.starts_xyz_mm[keep], bundle.ends_xyz_mm[keep], outer)
            if spec.emphysema > 0:
                upper = points[points[:, 2] > np.quantile(points[:, 2], 0.35)]
                count = int(900 * spec.emphysema)
                centres = upper[rng.integers(0, len(upper), count)] + rng.uniform(-3, 3, (count, 3))
                splat_threads(holes, lattice, centres, centres + rng.normal(0, 3, (count, 3)), rng.uniform(1.5, 5.5, count))
        np.maximum(walls, cover(tubes[1] - np.float32(1.4), lattice.edge_mm), out=walls)
        np.maximum(airways, cover(tubes[1], lattice.edge_mm), out=airways)
        candidates = np.concatenate(list(places.values()))
        nodules, opaque = _draw_disease(spec, lattice, candidates, rng) if len(candidates) else (lattice.full(30), [])
        return cls(spec, vessels, airways, walls, nodules, opaque, holes, _fissures(rng))

    def image_hu(
        self, side: int, slab: slice, x: Field, y: Field, z: Field, thorax: Thorax, noise: Field, fine_noise: Field
    ) -> Field:
        """Compute HU of lung tissue everywhere on a slab, (d, H, W); only its part inside the lung is used."""
        spec, lung = self.spec, thorax.lung[side]
        down = -y if spec.is_prone else y
        gravity = np.float32(0.42 + 0.35 * (1 - spec.breath)) * (down + 10)
        base = np.float32(spec.lung_hu - 12 + 70 * (0.8 - spec.breath)) + gravity + 9 * noise + 12 * fine_noise
        # Dependent collapse: the last centimetre above the lowest pleura is denser.
        edge = np.clip(1 + lung / 7, 0, 1)
        base = base + edge * edge * np.clip(20 + 1.0 * down, 0, 110) * np.float32(0.6 + spec.fibrosis)
        if spec.fibrosis > 0:
            rim = np.clip(1 + lung / 22, 0, 1) * np.clip((40 - z) / 120, 0.1, 1)
            base = base + np.float32(420 * spec.fibrosis) * rim * np.clip(np.abs(fine_noise) - 0.2, 0, 1)
        base = base + (np.float32(-975) - base) * np.clip(self.holes[slab], 0, 1) * np.float32(0.9)
        for normal, offset in self.fissures[side]:
            a, b, c = normal.astype(np.float32)
            away = np.abs(x * a + y * b + z * c - np.float32(offset) + 4 * noise)
            base = base + 75 * np.clip(np.float32(1.3) - away, 0, 1)
        for centre, radius in self.opaque:
            cx, cy, cz = centre.astype(np.float32)
            away = np.sqrt((x - cx) ** 2 + (y - cy) ** 2 + (z - cz) ** 2)
            share = np.clip(np.float32(0.5) + (np.float32(radius) - away + 9 * noise + 7 * fine_noise) / 12, 0, 1)
            paint(base, (np.float32(32) + 8 * noise, share))
        paint(
            base,
            (38 + 0.9 * spec.contrast_hu, np.clip(self.vessels[slab], 0, 1)),
            (20, np.clip(self.walls[slab], 0, 1)),
            (-990, np.clip(self.airways[slab], 0, 1)),
            (35, np.clip(np.float32(0.5) - self.nodules[slab] / 1.6, 0, 1)),
        )
        return base


def _draw_disease(
    spec: PhantomSpec, lattice: Lattice, candidates: Array, rng: np.random.Generator
) -> tuple[Field, list[tuple[Array, float]]]:
    """Place nodules and a consolidation at points of the lungs: distance to nodules, centres and radii of the consolidation."""
    nodules = lattice.full(30)
    for _ in range(spec.num_nodules):
        centre = candidates[rng.integers(len(candidates))]
        radius = float(np.exp(rng.normal(np.log(4.5), 0.5)))
        for _ in range(5):
            aside = centre + rng.normal(0, 0.35 * radius, 3)
            draw_tube(nodules, lattice, np.stack([centre, aside]), min(radius, 15) * rng.uniform(0.6, 0.95))
    if spec.consolidation == 0:
        return nodules, []
    low = candidates[candidates[:, 2] < np.quantile(candidates[:, 2], 0.8)]
    centre = low[rng.integers(len(low))]
    second = centre + rng.normal(0, 18, 3)
    return nodules, [(centre, 18 + 45 * spec.consolidation), (second, 12 + 30 * spec.consolidation)]


def _draw_tree(share: Field, lattice: Lattice, starts_xyz_mm: Array, ends_xyz_mm: Array, radii_mm: Array) -> None:
    """Draw the pieces of a tree: thick ones as capsules, thin ones by their volume."""
    thick = radii_mm > 0.75 * lattice.edge_mm
    splat_threads(share, lattice, starts_xyz_mm[~thick], ends_xyz_mm[~thick], radii_mm[~thick])
    distance = lattice.full(9)
    for a, b, r in zip(starts_xyz_mm[thick], ends_xyz_mm[thick], radii_mm[thick], strict=True):
        draw_tube(distance, lattice, np.stack([a, b]), r, margin_mm=lattice.edge_mm)
    np.maximum(share, np.clip(np.float32(0.5) - distance / np.float32(lattice.edge_mm), 0, 1), out=share)


def _fissures(rng: np.random.Generator) -> dict[int, list[tuple[Array, float]]]:
    """Place the oblique fissures and, on the right, the horizontal one."""

    def plane(normal: tuple[float, float, float], point: tuple[float, float, float]) -> tuple[Array, float]:
        unit = np.array(normal) + rng.normal(0, 0.05, 3)
        unit /= np.linalg.norm(unit)
        return unit, float(unit @ (np.array(point) + rng.normal(0, 5, 3)))

    return {
        1: [plane((-0.15, 0.72, -0.66), (60, 10, -20))],
        -1: [plane((0.15, 0.72, -0.66), (-60, 12, -30)), plane((0.05, 0.18, 0.98), (-60, -40, -22))],
    }
