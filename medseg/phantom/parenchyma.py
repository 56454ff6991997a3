"""Inside of the lungs: density, gravity, vessels, airways, fissures and disease."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.anatomy import SIDES, Anatomy
from medseg.phantom.lattice import Lattice, draw_tube, splat_threads
from medseg.phantom.lungs import CentralTubes, Thorax, draw_waves, measure_thorax
from medseg.phantom.mediastinum import hilum, vein_roots
from medseg.phantom.shapes import Field, cover
from medseg.phantom.spec import PhantomSpec
from medseg.phantom.trees import Tree, grow_tree

_COARSE_MM = 7.0


def lung_points(spec: PhantomSpec, anatomy: Anatomy) -> dict[int, NDArray[np.float64]]:
    """Sample the lungs of the whole chest on a coarse lattice, whatever part of it is in view.

    Returns:
        Per side the lattice points inside the lung, (n, 3) xyz in mm.
    """
    lattice = Lattice.covering((-270, -140, -170), (110, 120, 170), (_COARSE_MM,) * 3)
    tubes = CentralTubes.draw(anatomy, lattice)
    everything = slice(0, lattice.shape[0])
    x, y, z = lattice.points()
    waves = draw_waves(spec, lattice)
    thorax = measure_thorax(spec, anatomy, tubes, waves, everything, x, y, z)
    origin = lattice.origin_zyx_mm
    return {side: (np.argwhere(thorax.lung[side] < -2.5) * _COARSE_MM + origin)[:, ::-1].astype(np.float64) for side in SIDES}


@dataclass(frozen=True)
class LungTexture:
    """What fills the lungs, on the whole lattice.

    Attributes:
        spec: The case.
        vessels: Share of blood, (D, H, W).
        airways: Share of bronchial air, (D, H, W).
        walls: Share of bronchial wall, (D, H, W).
        nodules: Distance to nodules, (D, H, W), at most 30 mm.
        opaque: Centres (xyz) and radii of consolidations, (n, 4).
        holes: Centres (xyz) and radii of emphysematous holes, (n, 4).
        fissures: Plane of each fissure by side: (unit normal xyz, offset mm).
    """

    spec: PhantomSpec
    vessels: Field
    airways: Field
    walls: Field
    nodules: Field
    opaque: NDArray[np.float64]
    holes: Field
    fissures: dict[int, list[tuple[NDArray[np.float64], float]]]

    @classmethod
    def draw(cls, spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice, tubes: CentralTubes) -> LungTexture:
        """Grow trees and place disease."""
        rng = spec.rng("lung")
        fields = [np.zeros(lattice.shape, dtype=np.float32) for _ in range(4)]
        vessels, airways, walls, holes = fields
        nodules = np.full(lattice.shape, 30, dtype=np.float32)
        opaque: list[list[float]] = []
        places = lung_points(spec, anatomy)
        thin = 0.48 * (1200 / spec.num_vessel_ends) ** 0.3
        for side in SIDES:
            points = places[side]
            if len(points) < 50:
                continue
            ends = points[rng.permutation(len(points))[: spec.num_vessel_ends]]
            ends = ends + rng.uniform(-0.5, 0.5, ends.shape) * _COARSE_MM
            bundle = grow_tree(hilum(anatomy, side), ends, rng)
            _draw_tree(vessels, lattice, _moved(bundle, thin), bundle.radii_mm(thin))
            more = points[rng.permutation(len(points))[: spec.num_vessel_ends]]
            veins = grow_tree(vein_roots(anatomy, side), more + rng.uniform(-0.5, 0.5, more.shape) * _COARSE_MM, rng)
            _draw_tree(vessels, lattice, veins, veins.radii_mm(thin))
            _draw_bronchi(airways, walls, lattice, bundle, len(ends), anatomy.trachea_mm)
            if spec.emphysema > 0:
                upper = points[points[:, 2] > np.quantile(points[:, 2], 0.35)]
                count = int(900 * spec.emphysema)
                centres = upper[rng.integers(0, len(upper), count)] + rng.uniform(-3, 3, (count, 3))
                splat_threads(holes, lattice, centres, centres + rng.normal(0, 3, (count, 3)), rng.uniform(1.5, 5.5, count))
        np.maximum(walls, cover(tubes.airway - np.float32(1.4), lattice.edge_mm), out=walls)
        np.maximum(airways, cover(tubes.airway, lattice.edge_mm), out=airways)
        candidates = np.concatenate([places[side] for side in SIDES])
        for _ in range(spec.num_nodules if len(candidates) else 0):
            centre = candidates[rng.integers(len(candidates))]
            radius = float(np.exp(rng.normal(np.log(4.5), 0.5)))
            for _ in range(5):
                aside = centre + rng.normal(0, 0.35 * radius, 3)
                draw_tube(nodules, lattice, np.stack([centre, aside]), min(radius, 15) * rng.uniform(0.6, 0.95))
        if spec.consolidation > 0 and len(candidates):
            low = candidates[candidates[:, 2] < np.quantile(candidates[:, 2], 0.8)]
            centre = low[rng.integers(len(low))]
            opaque.append([*centre, 18 + 45 * spec.consolidation])
            opaque.append([*(centre + rng.normal(0, 18, 3)), 12 + 30 * spec.consolidation])
        return cls(spec, vessels, airways, walls, nodules, np.array(opaque).reshape(-1, 4), holes, _fissures(rng))

    def image_hu(
        self, side: int, slab: slice, x: Field, y: Field, z: Field, thorax: Thorax, noise: Field, fine_noise: Field
    ) -> Field:
        """Compute HU of lung tissue everywhere on a slab, (d, H, W); only its part inside the lung is used."""
        spec = self.spec
        down = -y if spec.is_prone else y
        gravity = np.float32(0.42 + 0.35 * (1 - spec.breath)) * (down + 10)
        base = np.float32(spec.lung_hu - 12 + 70 * (0.8 - spec.breath)) + gravity + 9 * noise + 12 * fine_noise
        # Dependent collapse: the last centimetre above the lowest pleura is denser.
        edge = np.clip(1 + thorax.lung[side] / 7, 0, 1)
        base = base + edge * edge * np.clip(20 + 1.0 * down, 0, 110) * np.float32(0.6 + spec.fibrosis)
        if spec.fibrosis > 0:
            rim = np.clip(1 + thorax.lung[side] / 22, 0, 1) * np.clip((40 - z) / 120, 0.1, 1)
            base = base + np.float32(420 * spec.fibrosis) * rim * np.clip(np.abs(fine_noise) - 0.2, 0, 1)
        hole = np.clip(self.holes[slab], 0, 1)
        base = base + (np.float32(-975) - base) * hole * np.float32(0.9)
        for normal, offset in self.fissures[side]:
            away = np.abs(
                x * np.float32(normal[0]) + y * np.float32(normal[1]) + z * np.float32(normal[2]) - np.float32(offset) + 4 * noise
            )
            base = base + 75 * np.clip(np.float32(1.3) - away, 0, 1)
        for cx, cy, cz, radius in self.opaque:
            away = np.sqrt((x - np.float32(cx)) ** 2 + (y - np.float32(cy)) ** 2 + (z - np.float32(cz)) ** 2)
            share = np.clip(np.float32(0.5) + (np.float32(radius) - away + 9 * noise + 7 * fine_noise) / 12, 0, 1)
            base = base + (np.float32(32) + 8 * noise - base) * share
        blood = np.float32(38 + 0.9 * spec.contrast_hu)
        base = base + (blood - base) * np.clip(self.vessels[slab], 0, 1)
        base = base + (np.float32(20) - base) * np.clip(self.walls[slab], 0, 1)
        base = base + (np.float32(-990) - base) * np.clip(self.airways[slab], 0, 1)
        nodule = np.clip(np.float32(0.5) - self.nodules[slab] / 1.6, 0, 1)
        return np.asarray(base + (np.float32(35) - base) * nodule, dtype=np.float32)


def _moved(tree: Tree, end_radius_mm: float) -> Tree:
    """Shift the arteries beside the airways that share their course."""
    aside = (1.9 * tree.radii_mm(end_radius_mm))[:, None] * np.array([0.35, -0.75, 0.55])
    return Tree(tree.starts_xyz_mm + aside, tree.ends_xyz_mm + aside, tree.num_ends)


def _draw_tree(share: Field, lattice: Lattice, tree: Tree, radii_mm: NDArray[np.float64]) -> None:
    """Draw a tree: thick pieces as capsules, thin ones by their volume."""
    thick = radii_mm > 0.75 * lattice.edge_mm
    splat_threads(share, lattice, tree.starts_xyz_mm[~thick], tree.ends_xyz_mm[~thick], radii_mm[~thick])
    if thick.any():
        distance = np.full(lattice.shape, 9, dtype=np.float32)
        for a, b, r in zip(tree.starts_xyz_mm[thick], tree.ends_xyz_mm[thick], radii_mm[thick], strict=True):
            draw_tube(distance, lattice, np.stack([a, b]), r, margin_mm=lattice.edge_mm)
        np.maximum(share, np.clip(np.float32(0.5) - distance / np.float32(lattice.edge_mm), 0, 1), out=share)


def _draw_bronchi(airways: Field, walls: Field, lattice: Lattice, tree: Tree, num_ends: int, trachea_mm: float) -> None:
    """Draw the upper generations of a tree as bronchi: lumen and wall (wall about 0.2 of the outer radius)."""
    share = tree.num_ends / max(num_ends, 1)
    keep = share > 0.012
    lumen = 0.56 * trachea_mm * share[keep] ** (1 / 2.4)
    bronchi_only = Tree(tree.starts_xyz_mm[keep], tree.ends_xyz_mm[keep], tree.num_ends[keep])
    _draw_tree(walls, lattice, bronchi_only, lumen * 1.2 + 0.35)
    _draw_tree(airways, lattice, bronchi_only, lumen)


def _fissures(rng: np.random.Generator) -> dict[int, list[tuple[NDArray[np.float64], float]]]:
    """Place the oblique fissures and, on the right, the horizontal one."""

    def plane(normal: tuple[float, float, float], point: tuple[float, float, float]) -> tuple[NDArray[np.float64], float]:
        unit = np.array(normal) + rng.normal(0, 0.05, 3)
        unit /= np.linalg.norm(unit)
        return unit, float(unit @ (np.array(point) + rng.normal(0, 5, 3)))

    return {
        1: [plane((-0.15, 0.72, -0.66), (60, 10, -20))],
        -1: [plane((0.15, 0.72, -0.66), (-60, 12, -30)), plane((0.05, 0.18, 0.98), (-60, -40, -22))],
    }
