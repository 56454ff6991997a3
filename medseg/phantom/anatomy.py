"""The patient: tables of the body, measures of one patient, and signed distances of its parts.

The canonical frame is LPS in mm with z = 0 at the carina (about the fifth thoracic vertebra), x = 0
in the middle and y = 0 near the middle of the chest. A patient's size is a scale per axis from the
canonical frame to the world. All positions, sizes and distances in this module are canonical mm.
Numbers in formulas are choices of this model, not measurements.

The tables hold typical values of adult supine chest CT: tracheal radius 8–10 mm, ascending aorta
diameter 30–38 mm, pulmonary trunk 25–29 mm (Truong et al., Circ Cardiovasc Imaging 5 (2012) 147),
vertebral body width 28–40 mm, inner transverse chest 250–300 mm, carina to apex about 90 mm, carina
to right dome about 105 mm in inspiration.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from medseg.phantom.shapes import (
    Field,
    Fields,
    Points,
    Slab,
    either,
    ellipse,
    ellipsoid,
    intersection,
    tube,
    union,
    within,
)
from medseg.phantom.spec import SIDES, PhantomSpec

Table = NDArray[np.float64]
"""One row per level, from feet to head; all columns in mm, the first is z."""

# Left half of the rib cage, an ellipse at each level: centre x, half axis x, centre y, half axis y.
RIB_CAGE: Table = np.array([
    (-420, 38, 92, -10, 80),
    (-260, 42, 92, -11, 86),
    (-190, 48, 94, -13, 94),
    (-150, 51, 95, -15, 97),
    (-100, 51, 94, -16, 97),
    (-50, 49, 90, -14, 92),
    (0, 46, 80, -9, 81),
    (40, 42, 62, 2, 62),
    (70, 37, 39, 15, 39),
    (85, 34, 22, 22, 23),
    (91, 33, 10, 25, 11),
    (93, 33, 1, 26, 1),
])  # fmt: skip
# Outer surface of the muscles of the trunk, an ellipse at each level: half axis x, half axis y,
# centre y.
TRUNK: Table = np.array([
    (-420, 150, 104, 2),
    (-300, 146, 104, 0),
    (-200, 149, 110, 0),
    (-50, 158, 114, 5),
    (20, 166, 102, 14),
    (70, 172, 82, 26),
    (100, 150, 66, 30),
    (122, 92, 58, 26),
    (150, 60, 56, 18),
])  # fmt: skip
# Centre y and half width of the vertebral bodies, then half width of the plate of fat that keeps
# the lungs apart.
MIDLINE: Table = np.array([
    (-350, 26, 23, 14),
    (-200, 40, 19.5, 14),
    (-120, 50, 18, 14),
    (-80, 53, 17, 6),
    (-40, 54, 16, 5),
    (10, 54, 14.8, 9),
    (40, 50, 14.2, 15),
    (70, 43, 13.8, 18),
    (95, 35, 13.4, 20),
    (190, 22, 10.5, 20),
])  # fmt: skip
VERTEBRA_MM = 23.5
"""Height of a thoracic vertebra with its disc; the fifth lies at the carina."""


class Tube(NamedTuple):
    """A chain of capsules: its nodes (x, y, z), and the radius at the first and at the last."""

    path_xyz_mm: tuple[tuple[float, float, float], ...]
    radii_mm: tuple[float, float]


# Lumen of trachea, right and left bronchus.
AIRWAYS = (
    Tube(((0, -20, 190), (0, 0, 80), (0, 9, 35), (0, 13, 0)), (9, 9)),
    Tube(((0, 13, 1), (-16, 14, -10), (-31, 15, -17), (-41, 16, -52)), (7.2, 4.5)),
    Tube(((0, 13, 1), (18, 18, -13), (34, 22, -23), (49, 25, -56)), (6.8, 4.3)),
)
VESSELS = (
    # Ascending aorta and arch.
    Tube(
        ((4, -22, -38), (-8, -36, -8), (-6, -28, 22), (3, -12, 31), (13, 8, 31), (19, 40, 18)),
        (16.5, 13),
    ),
    # Descending aorta.
    Tube(((19, 40, 18), (21, 43, -5), (20, 36, -40), (8, 28, -140), (2, 5, -420)), (13, 8)),
    # Left carotid artery.
    Tube(((2, -12, 31), (16, -4, 62), (26, 0, 190)), (6, 4)),
    # Pulmonary trunk and left pulmonary artery.
    Tube(((22, -46, -40), (20, -42, -18), (27, -4, -3), (46, 22, -14), (51, 28, -34)), (14, 7)),
    # Right pulmonary artery.
    Tube(((20, -20, -11), (2, -8, -18), (-20, -3, -20), (-46, 12, -40)), (11, 7)),
    # Superior vena cava.
    Tube(((-40, -12, 190), (-44, -18, 80), (-26, -24, 30), (-27, -18, -60)), (6, 10.5)),
    # Inferior vena cava.
    Tube(((-22, -2, -70), (-24, 8, -130), (-20, 14, -420)), (12, 10.5)),
)
# Stands for the distance to the surface of the fluid on a side that has no surface: +FAR_MM without
# fluid, -FAR_MM where all is fluid. It is larger than any `blend_mm` of this module.
FAR_MM = 30.0


@dataclass(frozen=True)
class Patient:
    """Measures of one patient in canonical mm.

    Attributes:
        spec: Specification from which the measures were drawn.
        scale_zyx: World mm per canonical mm.
        apex_z_mm: Top of the lungs.
        dome_z_mm: Top of the diaphragm in each half of the chest, by the key of `SIDES`.
        recess_mm: How far the space between diaphragm and ribs reaches below the dome.
        width: Factor of the transverse size of the chest, about 1.
        depth: Factor of the sagittal size of the chest, about 1.
        heart_xyz_mm: Middle of the heart.
        heart_size: Factor of the size of the heart, about 1.
        tube_size: Factor of the radii of vessels and airways, about 1.
        shift_x_mm: Shift of the mediastinum towards a missing lung.
        half_gap_mm: Half thickness of the tissue between the lungs in front of the heart.
        muscle_mm: Muscle outside the ribs.
    """

    spec: PhantomSpec
    scale_zyx: tuple[float, float, float]
    apex_z_mm: float
    dome_z_mm: dict[int, float]
    recess_mm: float
    width: float
    depth: float
    heart_xyz_mm: tuple[float, float, float]
    heart_size: float
    tube_size: float
    shift_x_mm: float
    half_gap_mm: float
    muscle_mm: float

    def landmark_z_mm(self, name: str) -> float:
        """Height of a landmark of `View`: the higher of two domes, the lower of two recesses."""
        highest_dome = max(self.dome_z_mm.values())
        lowest_recess = min(self.dome_z_mm.values()) - self.recess_mm
        heights = {
            "carina": 0.0,
            "apex": self.apex_z_mm,
            "dome": highest_dome,
            "recess": lowest_recess,
        }
        return heights[name]


def draw_patient(spec: PhantomSpec) -> Patient:
    """Draw the measures of the patient of a case."""
    rng = spec.rng("anatomy")

    def draw(mean: float, half_range: float) -> float:
        return mean + rng.uniform(-half_range, half_range)

    mean_size, mean_tube_size, mean_muscle_mm = 1.0, 1.05, 15
    if spec.is_female:
        mean_size, mean_tube_size, mean_muscle_mm = 0.93, 0.95, 11
    # Each call takes the next random number: in another order, a seed would give another patient.
    size = draw(mean_size, 0.08)
    # A full breath moves the diaphragm by 52 mm; the mean heights below belong to a breath of 0.8.
    expiration_mm = 52 * (0.8 - spec.breath)
    left_rise_mm, right_rise_mm = spec.high_dome_mm
    # By the keys of `SIDES`: 1 is left, -1 is right.
    dome_z_mm = {
        1: draw(-116, 12) + expiration_mm + left_rise_mm,
        -1: draw(-104, 12) + expiration_mm + right_rise_mm,
    }
    shift_x_mm = {None: 0.0, "left": 38.0, "right": -38.0}[spec.missing_lung]
    heart_z_mm = 0.5 * (dome_z_mm[1] + dome_z_mm[-1]) + draw(46, 7)
    return Patient(
        spec=spec,
        scale_zyx=(size * draw(0.98, 0.06), size * draw(0.97, 0.06), size * draw(0.95, 0.06)),
        apex_z_mm=draw(92, 7),
        dome_z_mm=dome_z_mm,
        recess_mm=draw(66 + 25 * spec.breath, 15),
        width=draw(1.0, 0.06),
        depth=draw(0.97 + 0.25 * spec.emphysema, 0.1),
        heart_xyz_mm=(draw(18, 7) + shift_x_mm, draw(-30, 7), heart_z_mm),
        heart_size=draw(1.0, 0.13),
        tube_size=draw(mean_tube_size, 0.13),
        shift_x_mm=shift_x_mm,
        half_gap_mm=0.7 if spec.is_touching else draw(7.5, 4.5),
        muscle_mm=draw(mean_muscle_mm, 5),
    )


def by_level(table: Table, z_mm: Field) -> list[Field]:
    """Interpolate all columns of a table but z at the given heights; constant beyond its ends.

    Returns:
        One array of the shape of `z_mm` per column, in mm.
    """
    # The curves are monotone between the rows: unlike splines, they make no bulges.
    curves = PchipInterpolator(table[:, 0], table[:, 1:])
    values = curves(np.clip(z_mm, table[0, 0], table[-1, 0])).astype(np.float32)
    return list(np.moveaxis(values, -1, 0))


def measure_tubes(patient: Patient, points: Points, tubes: tuple[Tube, ...]) -> Field:
    """Measure vessels or airways; `tube` limits the distances to 20 mm.

    A missing lung shifts them with the mediastinum: less the higher they are, and less the closer
    they are to the spine.
    """
    distances = []
    for path_xyz_mm, (first_mm, last_mm) in tubes:
        path = np.array(path_xyz_mm, np.float64)
        _, y, z = path.T
        # No shift at 100 mm above the carina, nor at y = 40 mm, where the spine begins.
        path[:, 0] += patient.shift_x_mm * np.clip(1 - z / 100, 0, 1) * np.clip(1 - y / 40, 0, 1)
        radii_mm = (patient.tube_size * first_mm, patient.tube_size * last_mm)
        distances.append(tube(points, path, radii_mm))
    return either(*distances)


def measure_body(patient: Patient, slab: Slab) -> Fields:
    """Measure the lungs and the structures around them.

    Returns:
        Signed distances, negative in the named part: `cage`, the space inside the ribs; `abdomen`,
        all below the diaphragm; `heart`; lumen of `vessels` and of `airways`; `column`, `bone` and
        `canal` of the spine (see `measure_spine`); `left_lung`, `right_lung`; pleural fluid
        `left_fluid`, `right_fluid`.
    """
    points = slab.points
    spec = patient.spec
    body = measure_spine(points) | {
        "vessels": measure_tubes(patient, points, VESSELS),
        "airways": measure_tubes(patient, points, AIRWAYS),
        "heart": measure_heart(patient, points),
    }
    mediastinum = measure_mediastinum(patient, slab, body)
    halves = {side: measure_half_chest(patient, points, side) for side in SIDES}
    # The two domes pass into one another below the heart, over the 70 mm in the middle.
    leftness = np.clip(0.5 + points.x / 70, 0, 1)
    dome_z_mm = halves[1].dome_z_mm * leftness + halves[-1].dome_z_mm * (1 - leftness)
    body["abdomen"] = points.z - dome_z_mm + 2.2 * slab.wave
    body["cage"] = either(halves[1].cage, halves[-1].cage)
    # `SIDES` and `effusion_mm` both begin with the left.
    for (side, name), effusion_mm in zip(SIDES.items(), spec.effusion_mm, strict=True):
        # Negative on this side of the chest, beginning `half_gap_mm` / 2 from the middle: the lungs
        # stay apart also where the mediastinum is thinnest.
        beyond_middle = side * (patient.shift_x_mm - points.x) + 0.5 * patient.half_gap_mm
        cavity = within(
            halves[side].cage + 1.3 * slab.wave, beyond_middle, points.z - patient.apex_z_mm
        )
        # The mediastinum, the abdomen, and bone with 1 mm around it are taken out of the cavity.
        cavity = intersection(cavity, -mediastinum, 5)
        cavity = intersection(cavity, -body["abdomen"], 2.5)
        cavity = within(cavity, 1 - body["bone"])
        fluid = measure_fluid(patient, points, side, effusion_mm, halves[side].cage)
        body |= {
            f"{name}_lung": intersection(cavity, -fluid, 6),
            f"{name}_fluid": within(cavity, fluid),
        }
    return body


def measure_fluid(
    patient: Patient, points: Points, side: int, effusion_mm: float, cage: Field
) -> Field:
    """Measure what lies below the surface of the pleural fluid of one side.

    Args:
        patient: The patient; in place of a missing lung all is fluid.
        points: Points at which the distance is measured.
        side: A key of `SIDES`.
        effusion_mm: Depth of the fluid; 0 = none.
        cage: Distance to the inside of the ribs.
    """
    if patient.spec.missing_lung == SIDES[side]:
        return np.full_like(cage, -FAR_MM)
    if effusion_mm == 0:
        return np.full_like(cage, FAR_MM)
    # Height against gravity. The lowest wall is the back, in a prone patient the front.
    if patient.spec.is_prone:
        height_mm, lowest_wall_mm = points.y, -110
    else:
        height_mm, lowest_wall_mm = -points.y, -80
    # Free fluid is deeper towards the feet. Its surface rises a little towards the ribs, where
    # `cage`, negative inside, is largest.
    depth_mm = effusion_mm * np.clip((60 - points.z) / 110, 0.1, 1.3)
    level_mm = lowest_wall_mm + depth_mm + 0.4 * cage
    return height_mm - level_mm


class HalfChest(NamedTuple):
    """Half a chest: signed distance of the space inside the ribs, and height of the diaphragm."""

    cage: Field
    dome_z_mm: Field


def measure_half_chest(patient: Patient, points: Points, side: int) -> HalfChest:
    """Measure half a chest: an ellipse at each level, and a dome that falls to the ribs."""
    # The table ends at 93 mm. Its part above -20 mm (113 mm) is stretched or squeezed to the apex
    # of this patient. Squeezed, it ends up to 1 mm above the apex; `measure_body` cuts it there.
    z = points.z + (93 - patient.apex_z_mm) * np.clip((points.z + 20) / 113, 0, 1)
    centre_x, half_x, centre_y, half_y = by_level(RIB_CAGE, z)
    half_x = half_x * patient.width
    # Chests differ in depth up to the carina; the difference fades out over the 60 mm above it.
    half_y = half_y * (1 + (patient.depth - 1) * np.clip((60 - z) / 60, 0, 1))
    outward = points.x * side - centre_x * patient.width
    back = points.y - centre_y
    cage = ellipse(outward, back, half_x, half_y)
    outward_share = np.clip(outward / half_x, -1, 1)
    back_share = np.clip(back / half_y, -1, 1)
    # The recess is deepest at the back and at the side.
    recess_mm = patient.recess_mm * (0.55 + 0.36 * back_share + 0.2 * outward_share)
    # The diaphragm is a paraboloid: `fall` is 0 in the middle of the dome and 1 at the ribs, where
    # the diaphragm is lower than the dome by the depth of the recess.
    fall = np.minimum(outward_share * outward_share + back_share * back_share, 1.1)
    return HalfChest(cage, patient.dome_z_mm[side] - np.maximum(recess_mm, 6) * fall)


def measure_heart(patient: Patient, points: Points) -> Field:
    """Measure the heart.

    The ventricles lie along an axis that points to the left, the front and the feet; the atria lie
    behind them and to their right.
    """
    x, y, z = patient.heart_xyz_mm
    size = patient.heart_size
    ventricles = tube(
        points,
        [(x - 8, y + 8, z + 8), (x + 20, y - 16, z - 18)],
        (48 * size, 40 * size),
        reach_mm=60,
    )
    left_atrium = ellipsoid(points, (x - 16, y + 36, z + 20), (33 * size, 19 * size, 23 * size))
    right_atrium = ellipsoid(points, (x - 38, y + 12, z + 2), (27 * size, 29 * size, 37 * size))
    return union(union(ventricles, left_atrium, 12), right_atrium, 14)


def measure_spine(points: Points) -> Fields:
    """Measure the spine.

    Returns:
        `column`, the vertebral bodies in one; `canal`, the spinal canal; `bone`, the bodies, the
        wall of the canal and the processes, without the canal.
    """
    centre_y, half_x, _ = by_level(MIDLINE, points.z)
    half_y = 0.84 * half_x
    # The middle of one vertebra lies at 2 mm; the processes leave near the middles.
    vertebra = (points.z - 2) / VERTEBRA_MM
    from_middle_mm = np.abs(vertebra - np.round(vertebra)) * VERTEBRA_MM
    column = ellipse(points.x, points.y - centre_y, half_x, half_y)
    lateral = np.abs(points.x)
    # y from the axis of the canal, which lies behind the vertebral body.
    canal_y = points.y - (centre_y + half_y + 7.5)
    canal = ellipse(points.x, canal_y, 10.0, 8.0)
    transverse_process = within(np.abs(canal_y) - 4.5, lateral - 32, from_middle_mm - 6)
    spinous_process = within(lateral - 3, -canal_y, canal_y - 36, from_middle_mm - 7)
    bone = within(either(column, canal - 4, transverse_process, spinous_process), 0.5 - canal)
    return {"column": column, "bone": bone, "canal": canal}


def measure_mediastinum(patient: Patient, slab: Slab, body: Fields) -> Field:
    """Measure what lies between the lungs.

    That is heart, vessels, airways, vertebral bodies, each with a layer of fat around it, and the
    plate of fat between the lungs from the spine to the sternum.
    """
    points = slab.points
    centre_y, _, plate_half_mm = by_level(MIDLINE, points.z)
    # Below the great vessels of the neck the lungs come close to each other behind the sternum.
    front_half_mm = np.where(points.z < 55, patient.half_gap_mm, plate_half_mm)
    # The plate passes from its width at the spine to that at the front between y = -25 and -55 mm.
    frontness = np.clip((-points.y - 25) / 30, 0, 1)
    half_mm = plate_half_mm + (front_half_mm - plate_half_mm) * frontness
    # A shift of the mediastinum begins 60 mm above the carina and is complete 20 mm below it.
    middle_x = 3 + patient.shift_x_mm * np.clip((60 - points.z) / 80, 0, 1)
    plate = within(np.abs(points.x - middle_x) - half_mm, points.y - (centre_y + 10))
    fat_mm = 2 + 0.12 * patient.spec.fat_mm
    # A smaller distance is a thicker part: walls and fat add these mm.
    parts = [
        body["vessels"] - 1.5,
        body["airways"] - 2.2,
        body["heart"] - fat_mm,
        body["column"] - 5,
        plate - 1.5 * slab.wave,
    ]
    mediastinum = parts[0]
    for part in parts[1:]:
        mediastinum = union(mediastinum, part, 9)
    return mediastinum + 0.8 * slab.wave
