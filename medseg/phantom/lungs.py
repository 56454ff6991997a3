"""Lungs: their outline as distance fields, and their inside with density, gravity, vessel and airway trees, fissures and disease.

A tree grows towards the centre of the points that it must still supply and splits them by a plane,
as in Tawhai, Pullan and Hunter, Annals of Biomedical Engineering 28 (2000) 793. Radii follow a
power law of the number of supplied ends; Murray's exponent is 3, that of pulmonary arteries about
2.7 to 3 (Huang et al., J Appl Physiol 81 (1996) 2123).
"""

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.organs import (
    bronchi,
    draw_central_tubes,
    heart_fields,
    spine_fields,
    vein_roots,
)
from medseg.phantom.shapes import (
    Field,
    Fields,
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
from medseg.phantom.spec import SIDES, Anatomy, PhantomSpec

Array = NDArray[np.float64]
Sphere = tuple[Array, float]
"""Centre xyz and radius, mm."""
Plane = tuple[Array, float]
"""Unit normal xyz and distance from the origin, mm."""

_COARSE_MM = 7.0
# Grain of the noise that roughens surfaces.
WAVE_GRAIN_MM = 38.0


def measure_thorax(spec: PhantomSpec, anatomy: Anatomy, part: Fields) -> Fields:
    """Measure cavity, mediastinum and lungs on a slab of planes.

    Args:
        spec: The case.
        anatomy: The patient.
        part: On the slab: coordinates `x`, `y`, `z` in mm, see `Lattice.points`; the central tubes
            `blood`, `airway` and `gullet`; `waves`, smooth unit noise that roughens the surfaces.

    Returns:
        Signed distances in mm, (d, H, W): inside of the rib cage (`cage`), height over the
        diaphragm, negative in the abdomen (`above`), outlines `left_lung` and `right_lung`, pleural
        fluid `left_fluid` and `right_fluid`, and the fields of heart and spine.
    """
    x, y, z, wave = (part[name] for name in ("x", "y", "z", "waves"))
    fields = {**heart_fields(anatomy, x, y, z), **spine_fields(anatomy, x, y, z)}
    middle_x = np.float32(anatomy.shift_x_mm) * np.clip((60 - z) / 80, 0, 1).astype(np.float32)
    # A plate of fat keeps the lungs apart: thin behind the sternum, wide in the upper mediastinum.
    wide = profile(z, (150, 95, 70, 40, 10, -40, -80, -120), (40, 34, 27, 19, 9, 5, 6, 14))
    thin = np.where(z < 55, np.float32(anatomy.junction_half_mm), wide)
    plate = np.abs(x - middle_x - 3) - (wide + (thin - wide) * np.clip((-y - 25) / 30, 0, 1))
    plate = np.maximum(plate, y - (anatomy.spine(z)[1] + 10))
    soft = union(union(part["blood"] - 1.5, part["airway"] - 2.2, 8), part["gullet"] - 2.0, 8)
    soft = union(soft, fields["heart"] - np.float32(anatomy.pericardial_fat_mm), 14)
    soft = union(soft, plate - 1.5 * wave, 10) + np.float32(0.8) * wave
    soft = union(soft, fields["column"] - 5.0, 8)
    inside = {side: anatomy.half_thorax(x, y, z, side) for side in SIDES}
    cavity = {side: distance + np.float32(1.3) * wave for side, (distance, _) in inside.items()}
    dome = {
        side: anatomy.dome_surface_z_mm(x, y, z, side, level) for side, (_, level) in inside.items()
    }
    # The two domes meet in the saddle below the heart.
    leftness = np.clip(np.float32(0.5) + x / 70, 0, 1)
    fields["above"] = z - (dome[1] * leftness + dome[-1] * (1 - leftness)) + np.float32(2.2) * wave
    fields["cage"] = np.minimum(cavity[1], cavity[-1])
    for (side, name), effusion_mm in zip(SIDES.items(), spec.effusion_mm, strict=True):
        own_side = (middle_x - x) * np.float32(side) + np.float32(anatomy.junction_half_mm * 0.5)
        pleura = intersection(np.maximum(cavity[side], own_side), 1.5 - soft, 5.0)
        pleura = np.maximum(intersection(pleura, -fields["above"], 2.5), 1.0 - fields["spine"])
        lung, fluid = pleura, np.full_like(pleura, 30)
        if effusion_mm > 0:
            # The fluid has its depth at the lowest wall; its surface rises at the ribs.
            _, cy, _, ay = anatomy.thorax_centre(z, side)
            depth_mm = np.float32(effusion_mm) * np.clip((60 - z) / 110, 0.1, 1.3).astype(
                np.float32
            )
            meniscus = np.float32(16) * np.clip(inside[side][1] - np.float32(0.6), 0, 0.5)
            dry = np.float32(-1 if spec.is_prone else 1) * (y - cy) - (ay - depth_mm) + meniscus
            lung, fluid = intersection(pleura, dry, 6.0), np.maximum(pleura, -dry)
        if spec.missing_lung == name:
            lung, fluid = np.full_like(pleura, 30), pleura
        fields |= {f"{name}_lung": lung, f"{name}_fluid": fluid}
    return fields


def grow_tree(
    root_xyz_mm: Array, ends_xyz_mm: Array, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Grow a tree from a root to all end points.

    Args:
        root_xyz_mm: Where the tree enters, (3,).
        ends_xyz_mm: Points to supply, (n, 3), at least one.
        rng: Draws splits and bends.

    Returns:
        The pieces of the tree, two for each bent branch: ends towards the root, (n, 3), ends away
        from it, (n, 3), and the number of supplied end points behind each piece, (n,).
    """
    pieces: list[tuple[Array, Array, int]] = []
    stack = [(root_xyz_mm, ends_xyz_mm, 0)]
    while stack:
        place, points, depth = stack.pop()
        count, centre = len(points), points.mean(axis=0)
        reach = centre - place
        goal = place + (1.0 if count == 1 else (0.22, 0.3, 0.42)[min(depth, 2)]) * reach
        bend = (
            place
            + 0.5 * (goal - place)
            + rng.normal(0, 0.07 * (float(np.linalg.norm(goal - place)) + 1e-9), 3)
        )
        pieces += [(place, bend, count), (bend, goal, count)]
        if count == 1:
            continue
        # The plane through the goal splits the points along their largest extent, across the
        # branch.
        offsets = points - centre
        direction = reach / (np.linalg.norm(reach) + 1e-9)
        normal = offsets[np.argmax(np.einsum("ij,ij->i", offsets, offsets))]
        normal = normal - 0.8 * direction * (normal @ direction) + rng.normal(0, 0.5, 3)
        order = np.argsort((points - goal) @ normal, kind="stable")
        cut = int(np.clip(round(count * rng.uniform(0.35, 0.65)), 1, count - 1))
        stack += [(goal, points[order[:cut]], depth + 1), (goal, points[order[cut:]], depth + 1)]
    starts, ends, counts = zip(*pieces, strict=True)
    return np.array(starts), np.array(ends), np.array(counts, dtype=np.float64)


def lung_points(spec: PhantomSpec, anatomy: Anatomy) -> dict[int, Array]:
    """Sample the lungs of the whole chest on a coarse lattice, whatever part of it is in view.

    Returns:
        Per side the lattice points inside the lung, (n, 3) xyz in mm.
    """
    lattice = Lattice.covering((-270, -140, -170), (110, 120, 170), (_COARSE_MM,) * 3)
    x, y, z = lattice.points()
    waves = noise_field(spec.rng("waves"), lattice, WAVE_GRAIN_MM)
    fields = measure_thorax(
        spec,
        anatomy,
        {"x": x, "y": y, "z": z, "waves": waves, **draw_central_tubes(anatomy, lattice)},
    )
    origin = lattice.origin_zyx_mm
    return {
        side: (np.argwhere(fields[f"{name}_lung"] < -2.5) * _COARSE_MM + origin)[:, ::-1].astype(
            np.float64
        )
        for side, name in SIDES.items()
    }


def draw_texture(
    spec: PhantomSpec, anatomy: Anatomy, lattice: Lattice, airway: Field
) -> tuple[Fields, list[Sphere], dict[int, list[Plane]]]:
    """Grow the trees of the lungs and place disease.

    Args:
        spec: The case.
        anatomy: The patient.
        lattice: The lattice to draw on.
        airway: Distance to the lumen of the central airways, (D, H, W).

    Returns:
        Fields (D, H, W): share of blood (`vessels`), of bronchial air (`airways`), of bronchial
        wall (`walls`) and of emphysematous holes (`holes`), distance to `nodules`, at most 30 mm;
        the spheres of a consolidation; the fissures by side.
    """
    rng = spec.rng("lung")
    vessels, airways, walls, holes = (lattice.full(0) for _ in range(4))
    places = lung_points(spec, anatomy)
    thin = 0.48 * (1200 / spec.num_vessel_ends) ** 0.3

    def grow(root_xyz_mm: Array, points: Array) -> tuple[Array, Array, Array, Array]:
        ends = points[rng.permutation(len(points))[: spec.num_vessel_ends]]
        starts, stops, counts = grow_tree(
            root_xyz_mm, ends + rng.uniform(-0.5, 0.5, ends.shape) * _COARSE_MM, rng
        )
        # The radius follows a power law of the number of supplied ends.
        return starts, stops, thin * counts ** (1 / 2.8), counts / len(ends)

    for side, points in places.items():
        if len(points) < 50:
            continue
        starts, stops, radii, share = grow(bronchi(anatomy)[SIDES[side]][0][-1], points)
        # Arteries run beside the airways that share their course.
        aside = (1.9 * radii)[:, None] * np.array([0.35, -0.75, 0.55])
        _draw_tree(vessels, lattice, starts + aside, stops + aside, radii)
        # The upper generations are bronchi: lumen and wall (about 0.2 of the outer radius).
        keep = share > 0.012
        lumen = 0.56 * anatomy.trachea_mm * share[keep] ** (1 / 2.4)
        for field, outer in ((walls, lumen * 1.2 + 0.35), (airways, lumen)):
            _draw_tree(field, lattice, starts[keep], stops[keep], outer)
        _draw_tree(vessels, lattice, *grow(vein_roots(anatomy, side), points)[:3])
        if spec.emphysema > 0:
            upper = points[points[:, 2] > np.quantile(points[:, 2], 0.35)]
            count = int(900 * spec.emphysema)
            centres = upper[rng.integers(0, len(upper), count)] + rng.uniform(-3, 3, (count, 3))
            splat_threads(
                holes,
                lattice,
                centres,
                centres + rng.normal(0, 3, (count, 3)),
                rng.uniform(1.5, 5.5, count),
            )
    np.maximum(walls, cover(airway - np.float32(1.4), lattice.edge_mm), out=walls)
    np.maximum(airways, cover(airway, lattice.edge_mm), out=airways)
    nodules, spheres = _draw_disease(spec, lattice, np.concatenate(list(places.values())), rng)
    fields = {
        "vessels": vessels,
        "airways": airways,
        "walls": walls,
        "holes": holes,
        "nodules": nodules,
    }
    return fields, spheres, _fissures(rng)


def lung_hu(
    spec: PhantomSpec, part: Fields, side: int, spheres: list[Sphere], fissures: list[Plane]
) -> Field:
    """Compute HU of lung tissue everywhere on a slab, (d, H, W); only its part inside the lung is used.

    Args:
        spec: The case.
        part: Coordinates, noise, outline of the lung and texture on the slab.
        side: Sign of x of the lung.
        spheres: The consolidation.
        fissures: Those of this lung.
    """
    x, y, z, noise, fine_noise = (part[name] for name in ("x", "y", "z", "noise", "fine_noise"))
    lung, down = part[f"{SIDES[side]}_lung"], -y if spec.is_prone else y
    gravity = np.float32(0.42 + 0.35 * (1 - spec.breath)) * (down + 10)
    base = (
        np.float32(spec.lung_hu - 12 + 70 * (0.8 - spec.breath))
        + gravity
        + 9 * noise
        + 12 * fine_noise
    )
    # Dependent collapse: the last centimetre above the lowest pleura is denser.
    edge = np.clip(1 + lung / 7, 0, 1)
    base = base + edge * edge * np.clip(20 + 1.0 * down, 0, 110) * np.float32(0.6 + spec.fibrosis)
    if spec.fibrosis > 0:
        rim = np.clip(1 + lung / 22, 0, 1) * np.clip((40 - z) / 120, 0.1, 1)
        base = base + np.float32(420 * spec.fibrosis) * rim * np.clip(
            np.abs(fine_noise) - 0.2, 0, 1
        )
    base = base + (np.float32(-975) - base) * np.clip(part["holes"], 0, 1) * np.float32(0.9)
    for normal, offset in fissures:
        a, b, c = normal.astype(np.float32)
        away = np.abs(x * a + y * b + z * c - np.float32(offset) + 4 * noise)
        base = base + 75 * np.clip(np.float32(1.3) - away, 0, 1)
    for centre, radius in spheres:
        cx, cy, cz = centre.astype(np.float32)
        away = np.sqrt((x - cx) ** 2 + (y - cy) ** 2 + (z - cz) ** 2)
        share = np.clip(
            np.float32(0.5) + (np.float32(radius) - away + 9 * noise + 7 * fine_noise) / 12, 0, 1
        )
        paint(base, (np.float32(32) + 8 * noise, share))
    paint(
        base,
        (38 + 0.9 * spec.contrast_hu, np.clip(part["vessels"], 0, 1)),
        (20, np.clip(part["walls"], 0, 1)),
        (-990, np.clip(part["airways"], 0, 1)),
        (35, np.clip(np.float32(0.5) - part["nodules"] / 1.6, 0, 1)),
    )
    return base


def _draw_disease(
    spec: PhantomSpec, lattice: Lattice, candidates: Array, rng: np.random.Generator
) -> tuple[Field, list[Sphere]]:
    """Place nodules and a consolidation at points of the lungs: distance to nodules, centres and radii of the consolidation."""
    nodules = lattice.full(30)
    for _ in range(spec.num_nodules):
        centre = candidates[rng.integers(len(candidates))]
        radius = float(np.exp(rng.normal(np.log(4.5), 0.5)))
        for _ in range(5):
            aside = centre + rng.normal(0, 0.35 * radius, 3)
            draw_tube(
                nodules,
                lattice,
                np.stack([centre, aside]),
                min(radius, 15) * rng.uniform(0.6, 0.95),
            )
    if spec.consolidation == 0:
        return nodules, []
    low = candidates[candidates[:, 2] < np.quantile(candidates[:, 2], 0.8)]
    centre = low[rng.integers(len(low))]
    second = centre + rng.normal(0, 18, 3)
    return nodules, [(centre, 18 + 45 * spec.consolidation), (second, 12 + 30 * spec.consolidation)]


def _draw_tree(
    share: Field, lattice: Lattice, starts_xyz_mm: Array, ends_xyz_mm: Array, radii_mm: Array
) -> None:
    """Draw the pieces of a tree: thick ones as capsules, thin ones by their volume."""
    thick = radii_mm > 0.75 * lattice.edge_mm
    splat_threads(share, lattice, starts_xyz_mm[~thick], ends_xyz_mm[~thick], radii_mm[~thick])
    distance = lattice.full(9)
    for a, b, r in zip(starts_xyz_mm[thick], ends_xyz_mm[thick], radii_mm[thick], strict=True):
        draw_tube(distance, lattice, np.stack([a, b]), r, margin_mm=lattice.edge_mm)
    np.maximum(
        share, np.clip(np.float32(0.5) - distance / np.float32(lattice.edge_mm), 0, 1), out=share
    )


def _fissures(rng: np.random.Generator) -> dict[int, list[Plane]]:
    """Place the oblique fissures and, on the right, the horizontal one."""

    def plane(normal: tuple[float, float, float], point: tuple[float, float, float]) -> Plane:
        unit = np.array(normal) + rng.normal(0, 0.05, 3)
        unit /= np.linalg.norm(unit)
        return unit, float(unit @ (np.array(point) + rng.normal(0, 5, 3)))

    return {
        1: [plane((-0.15, 0.72, -0.66), (60, 10, -20))],
        -1: [
            plane((0.15, 0.72, -0.66), (-60, 12, -30)),
            plane((0.05, 0.18, 0.98), (-60, -40, -22)),
        ],
    }
