"""Specification and anatomy of a case: the choices that are drawn once, and the measures of the body that follow from them.

The canonical frame is LPS in mm with z = 0 at the carina (about T5) and x = 0 in the middle. A
patient's size is a scale per axis from canonical to world. Numbers are typical values of adult
supine chest CT: tracheal radius 8–10 mm, ascending aorta diameter 30–38 mm, pulmonary trunk 25–29
mm (Truong et al., Circ Cardiovasc Imaging 5 (2012) 147), vertebral body width 28–40 mm, inner
transverse chest 250–300 mm, carina to apex about 90 mm, carina to right dome about 105 mm in
inspiration.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.shapes import Field, profile, radial_distance, superellipse

PHANTOM_LABELS: dict[int | str, str] = {1: "left_lung", 2: "right_lung", 3: "heart", 4: "spine"}
"""Values in the `organs` maps."""
VIEWS = ("whole", "apex", "mid", "bases", "apices_cut", "bases_cut", "trunk", "abdomen", "neck")
# Range of the pixel size in mm, slice distances in mm and their shares, matrix, least model spacing
# in mm, ends of each vessel tree.
DETAILS = {
    "small": ((2.4, 3.1), (2.5, 3.0, 4.0, 5.0), (0.3, 0.4, 0.2, 0.1), 128, 2.6, 700),
    "full": (
        (0.62, 0.95),
        (0.625, 1.0, 1.25, 2.0, 2.5, 3.0, 5.0, 8.0),
        (0.06, 0.14, 0.18, 0.1, 0.2, 0.12, 0.15, 0.05),
        512,
        1.2,
        3500,
    ),
}


SIDES = {1: "left", -1: "right"}  # by the sign of x

# Half of the rib cage as a superellipse per level, in mm: centre x, half axis x, centre y, half
# axis y. It vanishes above the apex.
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
class CaseSeed:
    """Source of the random numbers of a case.

    Attributes:
        seed: Seed of the data set, >= 0.
        index: Number of the case in the data set, >= 0.
    """

    seed: int
    index: int

    def rng(self, name: str) -> np.random.Generator:
        """Open the generator of one purpose; its numbers do not depend on the order of calls.

        Args:
            name: Purpose of the numbers (`anatomy`, `noise`, …); each has its own numbers.

        Returns:
            A counter-based generator in its first state.
        """
        key = [self.seed & (2**64 - 1), (self.index << 32) | zlib.crc32(name.encode())]
        return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class PhantomSpec(CaseSeed):
    """Everything that a phantom is made from; equal specs give equal bytes.

    Anatomy and noise follow from (seed, index) and the fields below.

    Attributes:
        view: Part of the body along z, one of `VIEWS`.
        spacing_mm: Voxel spacing, (z, y, x).
        matrix: Rows and columns of a slice, (H, W).
        num_slices: Number of slices; None takes as many as the view needs.
        model_spacing_mm: Lattice on which the anatomy is drawn, (z, y, x).
        tilt_deg: Rotation of the acquisition about the patient's z, y, x axes.
        centre_offset_mm: Offset of the centre of the field of view from the middle of the chest,
            (y, x).
        padding_hu: Value outside the circular field of view; None reconstructs the square.
        kernel: 0 = smooth … 1 = sharp reconstruction.
        noise_hu: Standard deviation of the noise in the middle of the chest; 0 switches noise off.
        contrast_hu: Contrast agent in the blood, added to its 40 HU.
        sex: `female` or `male`.
        age_years: Age; it bends the spine, widens the aorta and deepens the chest.
        fat_mm: Typical thickness of the fat under the skin.
        breath: 0 = expiration … 1 = deep inspiration: height of the diaphragm, width of the
            recesses, lung density.
        arms: `up`, `down` or `none` (outside the field of view).
        is_prone: Whether the patient lies on the front: gravity and gas are reversed, the table is
            in front.
        is_feet_first: Stored from head to feet.
        flips: Storage axes (z, y, x) that run against LPS.
        missing_lung: `left`, `right` or None; its space is filled with fluid and the shifted
            mediastinum.
        is_touching: Whether the lungs meet in front of the heart, with only the junction line
            between them.
        has_table: Whether the table is in the image.
        lung_hu: Median of healthy parenchyma.
        num_nodules: Round nodules of 4 to 30 mm.
        consolidation: Share of a lobe that is airless, 0 = none.
        effusion_mm: Depth of pleural fluid at the back, (left, right); outside the label.
        emphysema: Share of lung replaced by holes, 0 to 0.4.
        fibrosis: Strength of reticulation and dependent density, 0 to 1.
        high_dome_mm: Rise of the diaphragm, (left, right).
        stomach_gas: 0 = none … 1 = huge bubble.
        num_vessel_ends: Ends of each vessel tree.
    """

    view: str = "whole"
    spacing_mm: tuple[float, float, float] = (3.0, 2.8, 2.8)
    matrix: tuple[int, int] = (128, 128)
    num_slices: int | None = None
    model_spacing_mm: tuple[float, float, float] = (2.4, 2.4, 2.4)
    tilt_deg: tuple[float, float, float] = (0.0, 0.0, 0.0)
    centre_offset_mm: tuple[float, float] = (0.0, 0.0)
    padding_hu: int | None = None
    kernel: float = 0.3
    noise_hu: float = 15.0
    contrast_hu: float = 0.0
    sex: str = "male"
    age_years: float = 60.0
    fat_mm: float = 14.0
    breath: float = 0.8
    arms: str = "up"
    is_prone: bool = False
    is_feet_first: bool = False
    flips: tuple[bool, bool, bool] = (False, False, False)
    missing_lung: str | None = None
    is_touching: bool = False
    has_table: bool = True
    lung_hu: float = -865.0
    num_nodules: int = 0
    consolidation: float = 0.0
    effusion_mm: tuple[float, float] = (0.0, 0.0)
    emphysema: float = 0.0
    fibrosis: float = 0.0
    high_dome_mm: tuple[float, float] = (0.0, 0.0)
    stomach_gas: float = 0.4
    num_vessel_ends: int = 700

    def __post_init__(self) -> None:
        for name, choices in (("view", VIEWS), ("missing_lung", ("left", "right", None))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}"
                )


def draw_spec(seed: int, index: int, detail: str = "small") -> PhantomSpec:
    """Draw a realistic case.

    About two of three cases are ordinary whole chests. Every third is partial, unusual or diseased,
    as in real data sets; the first two are whole chests with both lungs.

    Args:
        seed: Seed of the data set.
        index: Number of the case.
        detail: `small` (coarse voxels, about a second) or `full` (0.6–1 mm in plane, 0.6–8 mm
            slices).

    Returns:
        The spec.
    """
    if detail not in DETAILS:
        raise ValueError(f"detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    rng = CaseSeed(seed, index).rng("spec")

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    view = "whole"
    if index >= 2 and chance(0.34):
        view = str(rng.choice(VIEWS[1:], p=(0.08, 0.10, 0.14, 0.16, 0.16, 0.20, 0.10, 0.06)))
    sex = "female" if chance(0.5) else "male"
    is_off_centre = index >= 2 and chance(0.08)
    pixel_range_mm, slices_mm, shares, matrix, model_mm, ends = DETAILS[detail]
    pixel_mm = float(rng.uniform(*pixel_range_mm)) * (0.6 if is_off_centre else 1.0)
    slice_mm = float(rng.choice(slices_mm, p=shares))
    model_z_mm = float(np.clip(0.5 * slice_mm, model_mm, max(2.4, model_mm)))
    if detail == "full" and view in ("trunk", "abdomen"):
        # On the finest lattice a long body in thin slices takes 5 GB.
        slice_mm, model_mm, model_z_mm = max(slice_mm, 2.0), 1.4, 2.0
    kernel = float(rng.uniform(0, 1))
    noise_hu = float(
        np.exp(rng.normal(np.log(11 + 22 * kernel), 0.4)) * min(1.4, (2.5 / slice_mm) ** 0.5)
    )
    effusion_mm, high_dome_mm = (
        (
            float(rng.uniform(low, high)) if chance(0.07) else 0.0,
            float(rng.uniform(low, high)) if chance(0.07) else 0.0,
        )
        for low, high in ((8, 45), (15, 50))
    )
    is_prone = chance(0.05)
    return PhantomSpec(
        seed=seed,
        index=index,
        view=view,
        spacing_mm=(slice_mm, pixel_mm, pixel_mm),
        matrix=(matrix, matrix),
        model_spacing_mm=(model_z_mm, model_mm, model_mm),
        tilt_deg=(float(rng.normal(0, 4)), float(rng.normal(0, 3)), float(rng.normal(0, 4)))
        if chance(0.15)
        else (0.0, 0.0, 0.0),
        centre_offset_mm=(
            float(rng.normal(0, 6)),
            float(rng.choice((-1, 1)) * rng.uniform(55, 80))
            if is_off_centre
            else float(rng.normal(0, 6)),
        ),
        padding_hu=(None, -1024, -2048, -3024)[int(rng.choice(4, p=(0.4, 0.15, 0.3, 0.15)))],
        kernel=kernel,
        noise_hu=float(np.clip(noise_hu, 4, 70)),
        contrast_hu=float(rng.uniform(60, 230)) if chance(0.45) else 0.0,
        sex=sex,
        age_years=float(np.clip(rng.normal(60, 15), 20, 92)),
        fat_mm=float(np.clip(np.exp(rng.normal(np.log(12), 0.5)), 3, 38)),
        breath=float(np.clip(rng.normal(0.75, 0.22), 0, 1)),
        arms=str(rng.choice(("up", "down", "none"), p=(0.68, 0.25, 0.07))),
        is_prone=is_prone,
        is_feet_first=chance(0.1),
        flips=(False, is_prone or chance(0.07), is_prone or chance(0.07)),
        missing_lung=str(rng.choice(("left", "right"))) if index >= 2 and chance(0.03) else None,
        is_touching=chance(0.3),
        has_table=chance(0.9),
        lung_hu=float(np.clip(rng.normal(-862, 28), -925, -760)),
        num_nodules=int(rng.integers(1, 5)) if chance(0.3) else 0,
        consolidation=float(rng.uniform(0.2, 0.9)) if chance(0.12) else 0.0,
        effusion_mm=effusion_mm,
        emphysema=float(rng.uniform(0.05, 0.4)) if chance(0.18) else 0.0,
        fibrosis=float(rng.uniform(0.2, 1)) if chance(0.1) else 0.0,
        high_dome_mm=high_dome_mm,
        stomach_gas=float(rng.choice((0.0, 0.3, 0.6, 1.0), p=(0.2, 0.4, 0.28, 0.12))),
        num_vessel_ends=ends,
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

    def spine(self, z_mm: Field) -> tuple[Field, Field, Field]:
        """Sideways position, position from front to back, and half width of the vertebral bodies at levels `z_mm`, in mm."""
        straight = profile(
            z_mm, (190, 130, 92, 0, -100, -200, -350, -450), (22, 26, 36, 54, 52, 40, 26, 30)
        )
        return (
            np.asarray(self.spine_bow_mm * np.sin((z_mm + 120) / 70), dtype=np.float32),
            straight
            + np.float32(self.kyphosis_mm) * np.exp(-(((z_mm + 10) / 70) ** 2)).astype(np.float32),
            profile(z_mm, (170, 100, 0, -150, -350), (10.5, 13.5, 15, 18.5, 23)),
        )

    def spine_at(self, z_mm: float) -> tuple[float, float, float]:
        """Position x, y and half width of the spine at one level."""
        x, y, half_width = (
            field.item() for field in self.spine(np.array([[[z_mm]]], dtype=np.float32))
        )
        return x, y, half_width

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
            np.float32(0.55)
            + np.float32(0.36) * back
            + np.float32(0.2) * across
            + np.float32(0.1) * back * np.abs(across)
        )
        rise = np.minimum(level, np.float32(1.05)) ** 2
        return np.float32(self.dome_z_mm[side]) - np.maximum(depth, 6) * rise * (
            np.float32(0.75) + np.float32(0.25) * rise
        )

    def muscle_outline(self, x: Field, y: Field, z: Field) -> Field:
        """Signed distance to the outside of the trunk's muscles without arms."""
        half_x, half_y, middle = (profile(z, _TRUNK_Z, values) for values in _TRUNK)
        half_x, half_y = (
            half_x * np.float32(self.width_factor),
            half_y * np.float32(0.5 + 0.5 * self.depth_factor),
        )
        return superellipse(x, y - middle, half_x, half_y, 2.5)


def draw_anatomy(spec: PhantomSpec) -> Anatomy:
    """Draw the patient of a case."""
    rng = spec.rng("anatomy")
    size = float(np.clip(rng.normal(0.93 if spec.sex == "female" else 1.0, 0.045), 0.8, 1.12))
    scale = (size * np.clip(rng.normal((0.95, 0.97, 0.98), 0.035), 0.86, 1.08)).tolist()
    dome = {
        side: float(top + 52 * (0.8 - spec.breath) + rise + rng.normal(0, 7))
        for side, top, rise in zip(SIDES, (-116, -104), spec.high_dome_mm, strict=True)
    }
    long_axis = np.array([0.62, -0.52, -0.56]) + rng.normal(0, 0.08, 3)
    long_axis /= np.linalg.norm(long_axis)
    second = np.cross(long_axis, np.array([0.2, 0.8, -0.4]))
    second /= np.linalg.norm(second)
    axes = np.stack([long_axis, second, np.cross(long_axis, second)])
    heart_size = float(np.clip(rng.normal(1.0, 0.07), 0.85, 1.25)) * (
        1 + 0.002 * (spec.age_years - 60)
    )
    age = (spec.age_years - 60) / 30
    return Anatomy(
        scale_xyz=(scale[0], scale[1], scale[2]),
        apex_z_mm={1: float(92 + rng.normal(0, 4)), -1: float(93 + rng.normal(0, 4))},
        dome_z_mm=dome,
        recess_mm=float(np.clip(rng.normal(84 + 25 * (spec.breath - 0.75), 9), 55, 115)),
        width_factor=float(np.clip(rng.normal(1.0, 0.035), 0.9, 1.1)),
        depth_factor=float(
            np.clip(rng.normal(0.97 + 0.04 * age + 0.25 * spec.emphysema, 0.05), 0.84, 1.2)
        ),
        flatness=float(rng.uniform(0.05, 0.75)),
        spine_bow_mm=float(rng.normal(0, 3 + 2 * max(age, 0))),
        kyphosis_mm=float(np.clip(rng.normal(5 * age, 3), -5, 14)),
        heart_centre_xyz_mm=np.array(
            [
                18 + rng.normal(0, 4),
                -30 + rng.normal(0, 4),
                0.5 * (dome[1] + dome[-1]) + 46 + rng.normal(0, 4),
            ]
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
