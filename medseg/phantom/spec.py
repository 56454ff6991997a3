"""Specification of a case: the choices that are drawn once, and their distribution over a data set."""

import zlib
from dataclasses import dataclass

import numpy as np

VIEWS = ("whole", "apex", "mid", "bases", "apices_cut", "bases_cut", "trunk", "abdomen", "neck")
# Range of the pixel size in mm, slice distances in mm and their shares, matrix, least model spacing in mm, ends of each vessel tree.
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


def stream(seed: int, index: int, name: str) -> np.random.Generator:
    """Open the generator of one purpose of one case; its numbers do not depend on the order of calls.

    Args:
        seed: Seed of the data set, >= 0.
        index: Number of the case in the data set, >= 0.
        name: Purpose of the numbers (`anatomy`, `noise`, …); each has its own numbers.

    Returns:
        A counter-based generator in its first state.
    """
    return np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), (index << 32) | zlib.crc32(name.encode())]))


@dataclass(frozen=True)
class PhantomSpec:
    """Everything that a phantom is made from; equal specs give equal bytes.

    Attributes:
        seed: Seed of the data set.
        index: Number of the case; anatomy and noise follow from (seed, index) and the fields below.
        view: Part of the body along z, one of `VIEWS`.
        spacing_mm: Voxel spacing, (z, y, x).
        matrix: Rows and columns of a slice, (H, W).
        num_slices: Number of slices; None takes as many as the view needs.
        model_spacing_mm: Lattice on which the anatomy is drawn, (z, y, x).
        tilt_deg: Rotation of the acquisition about the patient's z, y, x axes.
        centre_offset_mm: Offset of the centre of the field of view from the middle of the chest, (y, x).
        padding_hu: Value outside the circular field of view; None reconstructs the square.
        kernel: 0 = smooth … 1 = sharp reconstruction.
        noise_hu: Standard deviation of the noise in the middle of the chest; 0 switches noise off.
        contrast_hu: Contrast agent in the blood, added to its 40 HU.
        sex: `female` or `male`.
        age_years: Age; it bends the spine, widens the aorta and deepens the chest.
        fat_mm: Typical thickness of the fat under the skin.
        breath: 0 = expiration … 1 = deep inspiration: height of the diaphragm, width of the recesses, lung density.
        arms: `up`, `down` or `none` (outside the field of view).
        is_prone: Whether the patient lies on the front: gravity and gas are reversed, the table is in front.
        is_feet_first: Stored from head to feet.
        flips: Storage axes (z, y, x) that run against LPS.
        missing_lung: `left`, `right` or None; its space is filled with fluid and the shifted mediastinum.
        is_touching: Whether the lungs meet in front of the heart, with only the junction line between them.
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

    seed: int
    index: int
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
        if self.view not in VIEWS:
            raise ValueError(f"view must be one of {', '.join(VIEWS)}, got {self.view!r}")
        if self.missing_lung not in (None, "left", "right"):
            raise ValueError(f"missing_lung must be left, right or None, got {self.missing_lung!r}")

    def rng(self, name: str) -> np.random.Generator:
        """Generator of this case for one purpose."""
        return stream(self.seed, self.index, name)


def draw_spec(seed: int, index: int, detail: str = "small") -> PhantomSpec:
    """Draw a realistic case.

    About two of three cases are ordinary whole chests. Every third is partial, unusual or diseased, as in real data sets; the first two
    are whole chests with both lungs.

    Args:
        seed: Seed of the data set.
        index: Number of the case.
        detail: `small` (coarse voxels, about a second) or `full` (0.6–1 mm in plane, 0.6–8 mm slices).

    Returns:
        The spec.
    """
    if detail not in DETAILS:
        raise ValueError(f"detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    rng = stream(seed, index, "spec")

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
    noise_hu = float(np.exp(rng.normal(np.log(11 + 22 * kernel), 0.4)) * min(1.4, (2.5 / slice_mm) ** 0.5))
    effusion = [float(rng.uniform(8, 45)) if chance(0.07) else 0.0 for _ in range(2)]
    high = [float(rng.uniform(15, 50)) if chance(0.07) else 0.0 for _ in range(2)]
    is_prone = chance(0.05)
    return PhantomSpec(
        seed=seed,
        index=index,
        view=view,
        spacing_mm=(slice_mm, pixel_mm, pixel_mm),
        matrix=(matrix, matrix),
        model_spacing_mm=(model_z_mm, model_mm, model_mm),
        tilt_deg=(float(rng.normal(0, 4)), float(rng.normal(0, 3)), float(rng.normal(0, 4))) if chance(0.15) else (0.0, 0.0, 0.0),
        centre_offset_mm=(
            float(rng.normal(0, 6)),
            float(rng.choice((-1, 1)) * rng.uniform(55, 80)) if is_off_centre else float(rng.normal(0, 6)),
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
        effusion_mm=(effusion[0], effusion[1]),
        emphysema=float(rng.uniform(0.05, 0.4)) if chance(0.18) else 0.0,
        fibrosis=float(rng.uniform(0.2, 1)) if chance(0.1) else 0.0,
        high_dome_mm=(high[0], high[1]),
        stomach_gas=float(rng.choice((0.0, 0.3, 0.6, 1.0), p=(0.2, 0.4, 0.28, 0.12))),
        num_vessel_ends=ends,
    )
