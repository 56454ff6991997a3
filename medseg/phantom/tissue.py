"""HU of a patient: chest wall, table, abdomen, mediastinum, and lungs with disease.

Positions and distances are mm in the canonical frame of `medseg.phantom.anatomy`. An image is
painted from the outside to the inside, each tissue over what was painted before. Numbers in
formulas are choices of this model, not measurements.
"""

from typing import NamedTuple

import numpy as np

from medseg.phantom.anatomy import TRUNK, VERTEBRA_MM, Patient, by_level, measure_body
from medseg.phantom.shapes import (
    Field,
    Fields,
    Points,
    Slab,
    SmoothNoise,
    cover,
    either,
    ellipse,
    ellipsoid,
    tube,
    union,
    within,
)
from medseg.phantom.spec import SIDES, PhantomSpec


class Organ(NamedTuple):
    """Ellipsoid below the diaphragm.

    Attributes:
        side: Key of `SIDES`: the half of the diaphragm that it moves with.
        centre_xyz_mm: Centre, z relative to the top of the dome on that side.
        radii_xyz_mm: Half axes.
        hu: HU without contrast agent.
        uptake: Enhancement by contrast agent, as a share of the enhancement of blood.
    """

    side: int
    centre_xyz_mm: tuple[float, float, float]
    radii_xyz_mm: tuple[float, float, float]
    hu: float
    uptake: float


ORGANS = (
    # Kidneys.
    Organ(1, (58, 34, -120), (27, 26, 56), 33, 0.45),
    Organ(-1, (-58, 34, -135), (27, 26, 56), 33, 0.45),
    # Right and left lobe of the liver.
    Organ(-1, (-68, -6, -62), (104, 112, 92), 58, 0.25),
    Organ(-1, (8, -52, -52), (74, 44, 36), 58, 0.25),
    # Spleen.
    Organ(1, (94, 34, -55), (30, 50, 46), 48, 0.3),
)
STOMACH = Organ(1, (48, -26, -62), (44, 46, 54), 45, 0.2)
# Path of the colon, z relative to the right dome.
COLON_XYZ_MM = [
    (-98, 10, -270),
    (-88, -20, -130),
    (-10, -78, -160),
    (45, -70, -110),
    (98, 5, -60),
    (100, 35, -270),
]
COLON_RADIUS_MM = 19.0

# Grain of each smooth noise of a patient: that of surfaces, of tissue, of the finer variation of
# tissue, and the two that place the vessels of the lungs.
_GRAINS_MM = (38.0, 26.0, 7.0, 13.0, 13.0)


def draw_noise(spec: PhantomSpec) -> list[SmoothNoise]:
    """Draw the smooth noises of a patient, in the order of `_GRAINS_MM`."""
    noises = []
    for number, grain_mm in enumerate(_GRAINS_MM):
        noises.append(SmoothNoise(spec.rng(f"noise {number}"), grain_mm))
    return noises


def draw_planes(
    patient: Patient, points: Points, noise: list[SmoothNoise]
) -> tuple[Field, Field, Field, Field]:
    """Draw a patient at the points of a lattice.

    Args:
        patient: The patient.
        points: Points at which the patient is drawn, (D, H, W).
        noise: See `draw_noise`.

    Returns:
        Four fields (D, H, W): HU; the share of each voxel that a lung covers, positive for the left
        and negative for the right one; that of the heart (positive) and the spine (negative); that
        of the airway, the lumen of trachea and main bronchi.
    """
    air_hu = np.full(points.shape, -1000, np.float32)
    wave, tissue, grain, *vessel_noises = (field.at(points) for field in noise)
    edge_mm = sum(patient.spec.model_spacing_mm) / 3
    slab = Slab(points, wave, tissue, grain, air_hu, edge_mm)
    body = measure_body(patient, slab)
    paint_chest_wall(slab, patient, body)
    if patient.spec.has_table:
        paint_table(slab, patient.spec)
    paint_abdomen(slab, patient, body)
    paint_mediastinum(slab, patient.spec, body)
    # Two smooth noises are both 0 along curves through space, which serve as the axes of vessels.
    # Their root sum of squares grows with the distance from the nearest such curve; half the grain
    # turns it roughly into mm.
    axis_mm = 0.5 * _GRAINS_MM[-1] * np.hypot(*vessel_noises)
    lung_hu = lung_density(slab, patient, body, axis_mm)
    for name in SIDES.values():
        slab.paint(8 + 4 * slab.tissue, body[f"{name}_fluid"])
        slab.paint(lung_hu, body[f"{name}_lung"])
    spine = either(body["bone"], within(body["column"], -body["canal"]))
    # Pairs that do not overlap share a field, so that fewer fields are resampled afterwards.
    lungs = cover(body["left_lung"], edge_mm) - cover(body["right_lung"], edge_mm)
    heart_and_spine = cover(body["heart"], edge_mm) - cover(spine, edge_mm)
    return slab.hu, lungs, heart_and_spine, cover(body["airways"], edge_mm)


def paint_chest_wall(slab: Slab, patient: Patient, body: Fields) -> None:
    """Paint skin, fat, muscle, arms and bones.

    Ribs, sternum and shoulder blades are parts of shells around the space inside the ribs:
    `np.abs(cage - middle) - half` is a shell whose middle lies `middle` mm outside that space.
    """
    spec = patient.spec
    points = slab.points
    cage = body["cage"]
    x, y, z = points
    half_x, half_y, centre_y = by_level(TRUNK, z)
    trunk = ellipse(x, y - centre_y, half_x * patient.width, half_y * (0.5 + 0.5 * patient.depth))
    # The trunk by `TRUNK` or, where it reaches farther, the rib cage with ribs and muscle.
    muscle = union(trunk, cage - (11 + 0.4 * patient.muscle_mm), 14)

    # A number that is whole on the axis of each rib; rib 0 meets the spine at z = 13 mm. Ribs fall
    # by 75 mm, about three vertebrae, on their way from the spine to the front.
    rib_number = (z + 75 * np.clip((70 - y) / 200, 0, 1) - 13) / VERTEBRA_MM
    # Twelve ribs, from -7 to 4.
    nearest_rib = np.clip(np.round(rib_number), -7, 4)
    from_rib_mm = np.abs(rib_number - nearest_rib) * VERTEBRA_MM
    # In front of y = 85 mm, where they meet the spine.
    ribs = within(np.abs(cage - 6.5) - 3.3, from_rib_mm - 5.5, y - 85)
    # Within 18 mm of the middle, in front of y = -30 mm, from z = -95 to 50 mm.
    sternum = within(np.abs(cage - 9) - 5, np.abs(x) - 18, y + 30, z - 50, -95 - z)
    bones = [body["bone"], ribs, sternum]
    # Ends of bones and arms, (x, y, z); `side` is the sign of x.
    for side in SIDES:
        shoulder = (side * 158.0 * patient.width, 24, 90)
        collarbone = tube(points, [(side * 20, -62, 56), shoulder], (7, 6))
        shoulder_blade = ellipsoid(points, (side * 100, 75, 20), (45, 50, 70))
        bones += [collarbone, within(np.abs(cage - 20) - 2.5, shoulder_blade)]
        if spec.arms != "none":
            elbow = (side * 222.0, 40, -210)
            if spec.arms == "up":
                elbow = (side * 165.0, -30, 330)
            arm = tube(points, [shoulder, elbow], (44, 33), reach_mm=60)
            muscle = union(muscle, arm, blend_mm=16)
            humerus = tube(points, [shoulder, elbow], (15, 10))
            bones.append(humerus)
    # The fat is thicker towards the front and the feet; 2 mm of skin lie over it.
    skin: Field = muscle - spec.fat_mm * np.clip(0.75 - y / 330 - z / 500, 0.3, 1.6) - 2
    if spec.is_female:
        for side in SIDES:
            breast = ellipsoid(points, (side * 88, -110, -48), (58, 52, 60))
            skin = union(skin, breast, 14)

    # `distance + t` is a body whose surface lies t mm deeper. A layer of t mm of the tissue painted
    # before stays: 2.2 mm of skin over the fat, 1.9 mm of dense bone over the marrow.
    slab.paint(15, skin)
    slab.paint(-104 + 7 * slab.tissue + 4 * slab.grain, skin + 2.2)
    # Streaks of fat run through the muscle where the noise is near 0.
    slab.paint(54 - 60 * np.clip(0.5 - np.abs(slab.tissue), 0, 1), muscle)
    bone = either(*bones)
    slab.paint(620 + 60 * slab.tissue, bone)
    slab.paint(180 + 60 * slab.grain, bone + 1.9)
    slab.paint(20, body["canal"])


def paint_table(slab: Slab, spec: PhantomSpec) -> None:
    """Paint the patient table behind the body or, in prone scans, in front of it.

    Tables differ: thin, or as thick and as dark as a lung; flat or hollowed; with or without a
    mattress.
    """
    rng = spec.rng("table")
    # In half of the scans there is no mattress.
    mattress_mm = max(0, rng.uniform(-45, 45))
    core_mm = rng.uniform(12, 85)
    half_width_mm = rng.uniform(170, 260)
    x, y, _ = slab.points
    down = -y if spec.is_prone else y
    # Depth below the surface of the table, which is a parabola: hollowed, or nearly flat.
    depth: Field = down - (125 + spec.fat_mm) + rng.uniform(0, 0.0011) * x * x
    is_body = slab.hu > -850
    layers = (
        # Mattress.
        (mattress_mm, rng.uniform(-950, -700)),
        # A dense shell above and below the light core.
        (2.4, rng.uniform(-600, 100)),
        (core_mm, rng.uniform(-985, -820)),
        (2.4, rng.uniform(-600, 100)),
    )
    for thickness_mm, value_hu in layers:
        layer = within(-depth, depth - thickness_mm, np.abs(x) - half_width_mm)
        # 20 mm is outside every layer: the table does not cover the body.
        slab.paint(value_hu, np.where(is_body, 20, layer))
        # The next layer begins where this one ends.
        depth = depth - thickness_mm


def paint_abdomen(slab: Slab, patient: Patient, body: Fields) -> None:
    """Paint the diaphragm and the organs below it."""
    spec = patient.spec
    points = slab.points
    tissue = slab.tissue
    # This only saves time: planes above the diaphragm show nothing of the abdomen.
    if points.z.min() > patient.landmark_z_mm("dome") + 10:
        return
    # All of the abdomen as muscle, 3 mm away from the spine; what lies 3 mm deeper is fat, which
    # leaves the muscle as a shell. The organs lie in the fat.
    below_diaphragm = within(body["cage"], body["abdomen"], 3 - body["column"], 3 - body["bone"])
    slab.paint(48, below_diaphragm)
    inside = below_diaphragm + 3
    slab.paint(-102 + 9 * tissue, inside)
    up = points.y if spec.is_prone else -points.y
    path = [(x, y, z + patient.dome_z_mm[-1]) for x, y, z in COLON_XYZ_MM]
    colon = within(tube(points, path, (COLON_RADIUS_MM, COLON_RADIUS_MM)), inside)
    slab.paint(35, colon)
    # Gas rises, so stool is more likely in lower points. The wall is 2.5 mm thick.
    is_stool = tissue - up / 40 > 0.1
    slab.paint(np.where(is_stool, 10 + 90 * np.abs(tissue), -950), colon + 2.5)
    for organ in ORGANS:
        distance = within(measure_organ(patient, points, organ), inside)
        slab.paint(organ.hu + organ.uptake * spec.contrast_hu + 3 * tissue, distance)
    stomach = measure_organ(patient, points, STOMACH, size=0.85 + 0.45 * spec.stomach_gas)
    stomach = within(stomach, inside)
    slab.paint(STOMACH.hu + 3 * tissue, stomach)
    # Gas lies above a level surface, which is the lower the more gas there is.
    is_gas = up > 55 - 75 * spec.stomach_gas
    slab.paint(np.where(is_gas, -1000, 12 + 22 * tissue), stomach + 4)


def measure_organ(patient: Patient, points: Points, organ: Organ, size: float = 1.0) -> Field:
    """Measure an organ below the diaphragm; its half axes are multiplied by `size`."""
    x, y, z = organ.centre_xyz_mm
    centre_xyz_mm = (x, y, z + patient.dome_z_mm[organ.side])
    return ellipsoid(points, centre_xyz_mm, size * np.array(organ.radii_xyz_mm))


def paint_mediastinum(slab: Slab, spec: PhantomSpec, body: Fields) -> None:
    """Paint fat, heart, vessels and central airways."""
    blood_hu = 41 + spec.contrast_hu
    # Fat fills the cage above the diaphragm, up to 3 mm from the spine.
    fat = within(body["cage"], -body["abdomen"], 3 - body["column"], 3 - body["bone"])
    slab.paint(-92 + 12 * slab.tissue, fat)
    # The muscle of the heart is about 9 mm thick around its blood.
    slab.paint(46 + 0.4 * spec.contrast_hu, body["heart"])
    slab.paint(blood_hu, body["heart"] + 9 + 3 * slab.tissue)
    slab.paint(blood_hu, body["vessels"])
    # The wall of the airways is 1.8 mm thick around the lumen.
    slab.paint(50, body["airways"] - 1.8)
    slab.paint(-1000, body["airways"])


def lung_density(slab: Slab, patient: Patient, body: Fields, axis_mm: Field) -> Field:
    """Compute the density that a lung has at each point, HU (D, H, W); the slab is not painted.

    Args:
        slab: The lattice and its noises.
        patient: Has the density of the lungs and their diseases.
        body: Signed distances of `measure_body`.
        axis_mm: Distance to the nearest axis of a vessel, (D, H, W).
    """
    spec = patient.spec
    points = slab.points
    grain = slab.grain
    # Depth below the surface of the lung.
    depth_mm = -either(body["left_lung"], body["right_lung"])
    down = -points.y if spec.is_prone else points.y
    # `lung_hu` is meant for a breath of 0.8, at `down` = -10 mm. In expiration lungs are denser,
    # and the gradient from their highest to their lowest part (HU per mm) is steeper.
    expiration = 0.8 - spec.breath
    hu = (
        spec.lung_hu
        + 70 * expiration
        + (0.5 + 0.35 * expiration) * (down + 10)
        + 9 * slab.tissue
        + 12 * grain
    )
    # The outer 7 mm of the lung collapse a little, more towards its lowest wall.
    hu += 0.6 * np.clip(1 - depth_mm / 7, 0, 1) ** 2 * np.clip(20 + down, 0, 110)
    # Fibrosis thickens the outer two centimetres in a network.
    near_pleura = np.clip(1 - depth_mm / 22, 0, 1)
    hu += 420 * spec.fibrosis * near_pleura * np.clip(np.abs(grain) - 0.2, 0, 1)
    if spec.emphysema:
        # Holes of nearly air where the grain is highest; with more emphysema the bound is lower.
        hu += (-975 - hu) * np.clip(3 * (grain - 1.6 + 3 * spec.emphysema), 0, 1)
    # Vessels have a radius of 0.6 mm, and 3 mm more at the hilum, where they enter the lung.
    hilum_in_plane_mm = np.hypot(np.abs(points.x - patient.shift_x_mm) - 42, points.y - 14)
    hilum_mm = np.hypot(hilum_in_plane_mm, points.z + 20)
    lungs = slab._replace(hu=hu)
    lungs.paint(38 + 0.9 * spec.contrast_hu, axis_mm - 0.6 - 3 * np.exp(-hilum_mm / 45))
    paint_lesions(lungs, patient)
    return lungs.hu


def paint_lesions(lungs: Slab, patient: Patient) -> None:
    """Paint nodules and a consolidation at random places of the chest."""
    rng = patient.spec.rng("lesions")
    radii_mm = rng.uniform(2, 14, patient.spec.num_nodules).tolist()
    if patient.spec.consolidation:
        radii_mm.append(18 + 45 * patient.spec.consolidation)
    for radius_mm in radii_mm:
        side = rng.choice([-1, 1]).item()
        centre_xyz_mm = (
            side * rng.uniform(50, 110),
            rng.uniform(-60, 60),
            rng.uniform(patient.dome_z_mm[side], 60),
        )
        sphere = ellipsoid(lungs.points, centre_xyz_mm, (radius_mm, radius_mm, radius_mm))
        # The noise makes the surface uneven.
        lesion = sphere + 0.15 * radius_mm * (lungs.tissue + lungs.grain)
        lungs.paint(34 + 8 * lungs.tissue, lesion)
