"""Anatomy of one patient: measures of the body in canonical mm, drawn from anatomical distributions.

The canonical frame is LPS in mm with z = 0 at the carina (about T5) and x = 0 in the middle. A patient's size is a scale per
axis from canonical to world. Numbers are typical values of adult supine chest CT: tracheal radius 8–10 mm, ascending aorta
diameter 30–38 mm, pulmonary trunk 25–29 mm (Truong et al., Circ Cardiovasc Imaging 5 (2012) 147), vertebral body width
28–40 mm, inner transverse chest 250–300 mm, carina to apex about 90 mm, carina to right dome about 105 mm in inspiration.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.shapes import Field, profile, radial_distance, superellipse
from medseg.phantom.spec import PhantomSpec

SIDES = (1, -1)  # sign of x: left, right

# Half of the rib cage as a superellipse per level, in mm: centre x, half axis x, centre y, half axis y. It vanishes above the apex.
_THORAX_Z = (93, 91, 85, 70, 40, 0, -50, -100, -150, -190, -260, -420)
_THORAX = (
    (33, 33, 34, 37, 42, 46, 49, 51, 51, 48, 42, 38),
    (1, 10, 22, 39, 62, 80, 90, 94, 95, 94, 92, 92),
    (26, 25, 22, 15, 2, -9, -14, -16, -15, -13, -11, -10),
    (1, 11, 23, 39, 62, 81, 92, 97, 97, 94, 86, 80),
)
# Outline of the muscles of the trunk: half axis x, half axis y, centre y.
_TRUNK_Z = (190, 150, 122, 100, 70, 20, -50, -100, -200, -300, -420)
_TRUNK = (
    (56, 60, 92, 150, 172, 166, 158, 156, 149, 146, 150),
    (58, 56, 58, 66, 82, 102, 114, 116, 110, 104, 104),
    (16, 18, 26, 30, 26, 14, 5, 2, 0, 0, 2),
)


@dataclass(frozen=True)
class Anatomy:
    """Measures of one patient in canonical mm.

    Attributes:
        scale_xyz: World mm per canonical mm.
        apex_z_mm: Lung apex, by side sign.
        dome_z_mm: Top of the diaphragm dome, by side sign.
        recess_mm: Depth of the posterior costophrenic recess below the dome.
        width_factor: Transverse chest shape, about 1.
        flatness: 0 = elliptic … 1 = flat front of the chest.
        depth_factor: Sagittal chest shape (barrel chest > 1).
        spine_bow_mm: Sideways bend of the spine at its strongest (scoliosis).
        kyphosis_mm: Extra backward bow of the thoracic spine.
        heart_centre_xyz_mm: Middle of the ventricles.
        heart_radii_mm: Half axes: long, across, in depth.
        heart_axes: Rows: directions of the half axes.
        shift_x_mm: Mediastinal shift, towards a missing lung.
        aorta_mm: Radius of the ascending aorta.
        trunk_mm: Radius of the pulmonary trunk.
        trachea_mm: Radius of the tracheal lumen.
        junction_half_mm: Half thickness of tissue between the lungs in front of the heart.
        pericardial_fat_mm: Fat around the heart.
        muscle_mm: Muscle outside the ribs.
    """

    scale_xyz: tuple[float, float, float]
    apex_z_mm: dict[int, float]
    dome_z_mm: dict[int, float]
    recess_mm: float
    width_factor: float
    depth_factor: float
    flatness: float
    spine_bow_mm: float
    kyphosis_mm: float
    heart_centre_xyz_mm: NDArray[np.float64]
    heart_radii_mm: tuple[float, float, float]
    heart_axes: NDArray[np.float64]
    shift_x_mm: float
    aorta_mm: float
    trunk_mm: float
    trachea_mm: float
    junction_half_mm: float
    pericardial_fat_mm: float
    muscle_mm: float

    def spine_x_mm(self, z_mm: Field) -> Field:
        """Sideways position of the spine."""
        return np.asarray(self.spine_bow_mm * np.sin((z_mm + 120) / 70), dtype=np.float32)

    def spine_y_mm(self, z_mm: Field) -> Field:
        """Position of the middle of the vertebral bodies from front to back."""
        straight = profile(z_mm, (190, 130, 92, 0, -100, -200, -350, -450), (22, 26, 36, 54, 52, 40, 26, 30))
        return straight + np.float32(self.kyphosis_mm) * np.exp(-(((z_mm + 10) / 70) ** 2)).astype(np.float32)

    def spine_radius_mm(self, z_mm: Field) -> Field:
        """Half width of the vertebral bodies."""
        return profile(z_mm, (170, 100, 0, -150, -350), (10.5, 13.5, 15, 18.5, 23))

    def spine_at(self, z_mm: float) -> tuple[float, float, float]:
        """Position x, y and half width of the spine at one level."""
        level = np.array([[[z_mm]]], dtype=np.float32)
        return self.spine_x_mm(level).item(), self.spine_y_mm(level).item(), self.spine_radius_mm(level).item()

    def thorax_centre(self, z_mm: Field, side: int) -> tuple[Field, Field, Field, Field]:
        """Centre x, y and half axes x, y of one half of the rib cage at levels `z_mm`."""
        z = z_mm + np.float32(93 - self.apex_z_mm[side]) * np.clip((z_mm + 20) / 113, 0, 1)
        cx, ax, cy, ay = (profile(z, _THORAX_Z, values) for values in _THORAX)
        ay = ay * (1 + (self.depth_factor - 1) * np.clip((60 - z) / 60, 0, 1).astype(np.float32))
        return side * cx * self.width_factor, cy, ax * self.width_factor, ay

    def half_thorax(self, x: Field, y: Field, z: Field, side: int) -> tuple[Field, Field]:
        """Signed distance to the inner surface of one half of the rib cage, and its level (1 on the surface).

        An ellipse at the back, flatter in front (towards power 3).
        """
        cx, cy, ax, ay = self.thorax_centre(z, side)
        dx, dy = x - cx, y - cy
        a, b = np.abs(dx) / ax, np.abs(dy) / ay
        a2, b2 = a * a, b * b
        back = np.sqrt(a2 + b2)
        front = back + np.float32(self.flatness) * (np.cbrt(a2 * a + b2 * b) - back)
        level = np.maximum(np.where(dy > 0, back, front), np.float32(1e-3))
        return radial_distance(dx, dy, level), level

    def dome_surface_z_mm(self, x: Field, y: Field, z: Field, side: int, level: Field) -> Field:
        """Height of one half of the diaphragm over a point: a dome that falls into the recess at the ribs."""
        cx, cy, ax, ay = self.thorax_centre(z, side)
        across = np.clip((x - cx) * np.float32(side) / ax, -1, 1)
        back = np.clip((y - cy) / ay, -1, 1)
        depth = np.float32(self.recess_mm) * (
            np.float32(0.55) + np.float32(0.36) * back + np.float32(0.2) * across + np.float32(0.1) * back * np.abs(across)
        )
        rise = np.minimum(level, np.float32(1.05)) ** 2
        return np.float32(self.dome_z_mm[side]) - np.maximum(depth, 6) * rise * (np.float32(0.75) + np.float32(0.25) * rise)

    def muscle_outline(self, x: Field, y: Field, z: Field) -> Field:
        """Signed distance to the outside of the trunk's muscles without arms."""
        half_x, half_y, middle = (profile(z, _TRUNK_Z, values) for values in _TRUNK)
        half_x, half_y = half_x * np.float32(self.width_factor), half_y * np.float32(0.5 + 0.5 * self.depth_factor)
        return superellipse(x, y - middle, half_x, half_y, 2.5)


def draw_anatomy(spec: PhantomSpec) -> Anatomy:
    """Draw the patient of a case."""
    rng = spec.rng("anatomy")
    size = float(np.clip(rng.normal(0.93 if spec.sex == "female" else 1.0, 0.045), 0.8, 1.12))
    scale = tuple(float(s) for s in size * np.clip(rng.normal((0.95, 0.97, 0.98), 0.035), 0.86, 1.08))
    breath_mm = 52 * (0.8 - spec.breath)
    dome = {
        side: float(top + breath_mm + rise + rng.normal(0, 7))
        for side, top, rise in zip(SIDES, (-116, -104), spec.high_dome_mm, strict=True)
    }
    long_axis = np.array([0.62, -0.52, -0.56]) + rng.normal(0, 0.08, 3)
    long_axis /= np.linalg.norm(long_axis)
    second = np.cross(long_axis, np.array([0.2, 0.8, -0.4]))
    second /= np.linalg.norm(second)
    axes = np.stack([long_axis, second, np.cross(long_axis, second)])
    heart_size = float(np.clip(rng.normal(1.0, 0.07), 0.85, 1.25)) * (1 + 0.002 * (spec.age_years - 60))
    age = (spec.age_years - 60) / 30
    return Anatomy(
        scale_xyz=(scale[0], scale[1], scale[2]),
        apex_z_mm={1: float(92 + rng.normal(0, 4)), -1: float(93 + rng.normal(0, 4))},
        dome_z_mm=dome,
        recess_mm=float(np.clip(rng.normal(84 + 25 * (spec.breath - 0.75), 9), 55, 115)),
        width_factor=float(np.clip(rng.normal(1.0, 0.035), 0.9, 1.1)),
        depth_factor=float(np.clip(rng.normal(0.97 + 0.04 * age + 0.25 * spec.emphysema, 0.05), 0.84, 1.2)),
        flatness=float(rng.uniform(0.05, 0.75)),
        spine_bow_mm=float(rng.normal(0, 3 + 2 * max(age, 0))),
        kyphosis_mm=float(np.clip(rng.normal(5 * age, 3), -5, 14)),
        heart_centre_xyz_mm=np.array(
            [18 + rng.normal(0, 4), -30 + rng.normal(0, 4), 0.5 * (dome[1] + dome[-1]) + 46 + rng.normal(0, 4)]
        ),
        heart_radii_mm=(67 * heart_size, 48 * heart_size, 45 * heart_size),
        heart_axes=axes,
        shift_x_mm={None: 0.0, "left": 38.0, "right": -38.0}[spec.missing_lung],
        aorta_mm=float(np.clip(rng.normal(15.5 + 1.8 * age, 1.3), 12, 23)),
        trunk_mm=float(np.clip(rng.normal(13.2, 1.2), 10.5, 18)),
        trachea_mm=float(np.clip(rng.normal(7.8 if spec.sex == "female" else 9.4, 0.8), 6.5, 12)),
        junction_half_mm=float(0.7 if spec.is_touching else rng.uniform(3, 12)),
        pericardial_fat_mm=float(rng.uniform(2, 5) + 0.12 * min(spec.fat_mm, 35)),
        muscle_mm=float(np.clip(rng.normal(11 if spec.sex == "female" else 15, 3), 6, 24)),
    )
