"""Specification of a phantom: all choices that it is made from, and realistic random draws."""

import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PHANTOM_LABELS: dict[int | str, str] = {
    1: "left_lung",
    2: "right_lung",
    3: "heart",
    4: "spine",
    5: "airway",
}
"""Value to name of a structure, in the file `organs.nii.gz` of a chest phantom."""
SIDES = {1: "left", -1: "right"}
"""Side of the patient by the sign of x, which increases towards the left (LPS)."""


class View(NamedTuple):
    """Part of the body that a scan shows, from a random lowest to a random highest slice.

    Attributes:
        share: Share of the cases.
        low: Where the lowest slice lies: a landmark, and the smallest and largest height above it,
            in mm of a body of mean size. Landmarks are `recess` (lowest point of the lungs), `dome`
            (top of the diaphragm), `carina` and `apex` (top of the lungs).
        high: Where the highest slice lies, in the same form.
    """

    share: float
    low: tuple[str, float, float]
    high: tuple[str, float, float]


VIEWS = {
    "whole": View(0.66, ("recess", -42, -12), ("apex", 10, 40)),
    "apex": View(0.03, ("apex", -65, -30), ("apex", 25, 65)),
    "mid": View(0.03, ("dome", 15, 35), ("apex", -65, -45)),
    "bases": View(0.05, ("recess", -70, -20), ("dome", 5, 30)),
    "apices_cut": View(0.05, ("recess", -42, -12), ("apex", -55, -20)),
    "bases_cut": View(0.06, ("dome", -15, 40), ("apex", 10, 40)),
    "trunk": View(0.07, ("carina", -400, -360), ("apex", 10, 50)),
    "abdomen": View(0.03, ("carina", -400, -360), ("dome", -45, -25)),
    "neck": View(0.02, ("apex", 14, 24), ("apex", 70, 95)),
}
"""Parts of the body by name."""


class Detail(NamedTuple):
    """Size and spacing of the voxels of a data set.

    Attributes:
        matrix: Number of rows, and of columns, of a slice.
        pixel_mm: Smallest and largest pixel size.
        slice_mm: Slice distances, of which one is drawn; a repeated distance is likelier.
        model_mm: Smallest spacing of the lattice on which the anatomy is drawn.
    """

    matrix: int
    pixel_mm: tuple[float, float]
    slice_mm: tuple[float, ...]
    model_mm: float


DETAILS = {
    "small": Detail(128, (2.4, 3.1), (2.5, 3.0, 3.0, 4.0, 5.0), 2.6),
    "full": Detail(512, (0.62, 0.95), (0.8, 1.0, 1.25, 2.0, 2.5, 3.0, 5.0, 8.0), 1.2),
}
"""Voxels of a data set by the key `detail`."""

CHOICES: dict[str, dict[Any, float]] = {
    "view": {name: view.share for name, view in VIEWS.items()},
    "missing_lung": {None: 0.97, "left": 0.015, "right": 0.015},
    "arms": {"up": 0.68, "down": 0.25, "none": 0.07},
    "padding_hu": {None: 0.4, -1024: 0.15, -2048: 0.3, -3024: 0.15},
    "num_nodules": {0: 0.7, 1: 0.1, 2: 0.1, 4: 0.1},
    "is_female": {False: 0.5, True: 0.5},
    "is_touching": {False: 0.7, True: 0.3},
    "is_prone": {False: 0.95, True: 0.05},
    "has_table": {False: 0.1, True: 0.9},
}
"""Field of `PhantomSpec` to its values and their shares of the cases."""
TRAITS = {
    "blur_mm": (1.0, 0.0, 0.9),
    "noise_hu": (1.0, 6.0, 45.0),
    "contrast_hu": (0.45, 60.0, 230.0),
    "fat_mm": (1.0, 3.0, 32.0),
    "breath": (1.0, 0.35, 1.0),
    "lung_hu": (1.0, -915.0, -805.0),
    "consolidation": (0.12, 0.2, 0.9),
    "emphysema": (0.18, 0.05, 0.4),
    "fibrosis": (0.1, 0.2, 1.0),
    "stomach_gas": (0.8, 0.2, 1.0),
}
"""Field of `PhantomSpec` to the share of cases where it is not 0, and to the lowest and the highest
value in those cases."""
TRAITS_OF_A_SIDE = {"effusion_mm": (0.07, 8.0, 45.0), "high_dome_mm": (0.07, 15.0, 50.0)}
"""The same for fields that hold a left and a right value, which are drawn independently."""


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
        # Philox takes a key of two 64-bit words: the seed, and index and purpose in 32 bits each.
        key = [self.seed & (2**64 - 1), (self.index << 32) | zlib.crc32(name.encode())]
        return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class PhantomSpec(CaseSeed):
    """Everything that a phantom is made from; equal specs give equal bytes.

    Anatomy and noise follow from (seed, index) and the fields below.

    Attributes:
        view: Part of the body along z, a key of `VIEWS`.
        spacing_mm: Voxel spacing, (z, y, x).
        matrix: Rows and columns of a slice, (H, W).
        num_slices: Number of slices; None takes as many as the view needs.
        model_spacing_mm: Spacing of the lattice on which the anatomy is drawn, (z, y, x).
        tilt_deg: Rotation of the patient and the slices about the z, y, x axes of the scanner. Only
            the direction matrix and the origin of the grid change; the voxels do not.
        centre_offset_mm: Offset of the centre of the field of view from the middle of the chest,
            (y, x).
        padding_hu: Value outside the circular field of view; None: the field of view is the whole
            square.
        blur_mm: Standard deviation of the in-plane blur.
        noise_hu: Standard deviation of the noise in the middle of the chest; 0 switches noise off.
        contrast_hu: What contrast agent adds to the 41 HU of blood.
        is_female: Whether the patient is female: smaller, with less muscle and with breasts.
        fat_mm: Typical thickness of the fat under the skin.
        breath: Depth of the breath, from 0 (expiration) to 1 (deep inspiration). It decides the
            height of the diaphragm and the density of the lungs.
        arms: `up`, `down` or `none` (outside the field of view).
        is_prone: Whether the patient lies on the front: fluid sinks to the front, gas rises to the
            back, and the table is in front.
        flips: Storage axes (z, y, x) that run against LPS.
        missing_lung: `left`, `right` or None; its space is filled with fluid and the shifted
            mediastinum.
        is_touching: Whether the lungs meet in front of the heart, with only a thin line between
            them.
        has_table: Whether the table is in the image.
        lung_hu: Density of healthy lungs at a breath of 0.8.
        num_nodules: Number of round nodules, 4 to 28 mm in diameter.
        consolidation: Size of an airless part, 0 = none … 1 = most of a lobe.
        effusion_mm: Depth of pleural fluid at the lowest wall, (left, right). The fluid is outside
            the lung's label.
        emphysema: Share of the lungs that is replaced by holes, 0 to 0.4.
        fibrosis: Strength of the dense network near the pleura, 0 to 1.
        high_dome_mm: Rise of the diaphragm, (left, right).
        stomach_gas: 0 = none … 1 = huge bubble.

    Raises:
        ValueError: If the view, the arms or the side of the missing lung is unknown.
    """

    view: str = "whole"
    spacing_mm: tuple[float, float, float] = (3.0, 2.8, 2.8)
    matrix: tuple[int, int] = (128, 128)
    num_slices: int | None = None
    model_spacing_mm: tuple[float, float, float] = (2.4, 2.4, 2.4)
    tilt_deg: tuple[float, float, float] = (0.0, 0.0, 0.0)
    centre_offset_mm: tuple[float, float] = (0.0, 0.0)
    padding_hu: int | None = None
    blur_mm: float = 0.6
    noise_hu: float = 15.0
    contrast_hu: float = 0.0
    is_female: bool = False
    fat_mm: float = 14.0
    breath: float = 0.8
    arms: str = "up"
    is_prone: bool = False
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

    def __post_init__(self) -> None:
        for name in ("view", "missing_lung", "arms"):
            choices = list(CHOICES[name])
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")


def draw_spec(seed: int, index: int, detail: str = "small") -> PhantomSpec:
    """Draw a realistic case by the shares of `CHOICES`, `TRAITS` and `TRAITS_OF_A_SIDE`.

    Cases 0 and 1 are whole chests with both lungs, centred in the image, so that the smallest data
    set, of one case to train on and one to validate, shows all structures.

    Args:
        seed: Seed of the data set.
        index: Number of the case.
        detail: A key of `DETAILS`: `small` (a scan takes about a second) or `full`.

    Raises:
        ValueError: If there is no such detail.
    """
    if detail not in DETAILS:
        raise ValueError(f"detail must be one of {', '.join(DETAILS)}, got {detail!r}")
    rng = CaseSeed(seed, index).rng("spec")
    values: dict[str, Any] = {}
    for name, shares in CHOICES.items():
        values[name] = list(shares)[rng.choice(len(shares), p=list(shares.values()))]
    for name, trait in TRAITS.items():
        values[name] = _draw_trait(rng, *trait)
    for name, trait in TRAITS_OF_A_SIDE.items():
        values[name] = (_draw_trait(rng, *trait), _draw_trait(rng, *trait))
    # In 10 % of the scans the slices run against LPS. In prone scans rows and columns do, since a
    # scanner stores them in its own directions, however the patient lies.
    values["flips"] = (rng.random() < 0.1, values["is_prone"], values["is_prone"])
    # 15 % of the patients are tilted, by a few degrees about each axis.
    if rng.random() < 0.15:
        values["tilt_deg"] = tuple(rng.normal(0, 4, 3).tolist())

    # In 8 % of the cases the scan is centred on one half of the chest, in finer pixels.
    off_centre_mm = _draw_trait(rng, share=0.08, low=55, high=80)
    if rng.random() >= 0.5:
        off_centre_mm = -off_centre_mm
    # Cases 0 and 1 are changed only after these draws, so that the draws that follow are the same
    # as for any other case.
    if index < 2:
        values |= {"view": "whole", "missing_lung": None}
        off_centre_mm = 0.0
    voxels = DETAILS[detail]
    pixel_mm = rng.uniform(*voxels.pixel_mm)
    if off_centre_mm != 0:
        pixel_mm *= 0.6
    slice_mm = rng.choice(voxels.slice_mm).item()
    if values["view"] in ("trunk", "abdomen"):
        # A long body in thin slices takes several GB.
        slice_mm = max(slice_mm, 2.0)
    # The lattice has two planes per slice, so that a slice averages over its thickness; thin slices
    # have fewer, because the lattice is not finer than `model_mm`.
    model_z_mm = max(0.5 * slice_mm, voxels.model_mm)
    return PhantomSpec(
        seed,
        index,
        spacing_mm=(slice_mm, pixel_mm, pixel_mm),
        matrix=(voxels.matrix, voxels.matrix),
        model_spacing_mm=(model_z_mm, voxels.model_mm, voxels.model_mm),
        centre_offset_mm=(rng.normal(0, 6), off_centre_mm + rng.normal(0, 6)),
        **values,
    )


def _draw_trait(rng: np.random.Generator, share: float, low: float, high: float) -> float:
    """Draw from the range in this share of the cases; give 0 in the others."""
    # Two numbers are drawn whatever the outcome, so that it does not change later draws.
    value = rng.uniform(low, high)
    if rng.random() < share:
        return value
    return 0.0
