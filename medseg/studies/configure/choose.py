"""Choice of spacing, patch, network and switches within a memory and a time.

The constants are rules of thumb; `README.md` of the package says where they come from.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from medseg.errors import UserError
from medseg.geometry.sizes import Shape
from medseg.knob import Triple
from medseg.planning.choose import MARGIN
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting

# The surface of a label errs by about 0.15 of a voxel, which costs a ball of n voxels across a Dice
# of 3 · 0.15 / n: a hundredth at 48 voxels, a twenty-fifth at 12.
VOXELS_ACROSS = 48
LEAST_VOXELS_ACROSS = 12
# Spacings between these two are tried in such factors.
COARSER = 2**0.25
# Times that a training sees as many voxels as a scan has.
WANTED_PASSES = 100
LEAST_PASSES = 5
# Optimiser steps.
WANTED_STEPS = 500
LEAST_STEPS = 100
# Steps from which on a wider network is worth its time, and a batch of two.
MANY_STEPS = 4 * WANTED_STEPS
BATCH_STEPS = 16 * WANTED_STEPS
# Patches have about the voxels of a cube of these lengths.
CUBES = (128, 112, 96, 80, 64, 48, 32)
REFERENCE_CUBE = 64
UNET, WIDE_UNET = "unet", "unet_lean"
# Share of the time that trains; the rest prepares, starts, validates, predicts and scores. It only
# chooses spacing and patch: the steps follow from measured times.
TRAINING_SHARE = 0.7


class Prediction(NamedTuple):
    """What the planner predicts.

    Attributes:
        peak_gib: Largest memory of a training, all processes together; on a GPU: of the card.
        seconds: Duration of a step.
    """

    peak_gib: float
    seconds: float


class Planner(Protocol):
    """Prediction of memory and time of a setting."""

    def divisor(self, setting: Setting) -> Shape:
        """Required multiple of a patch, (z, y, x)."""

    def predict(self, setting: Setting) -> Prediction:
        """Predict memory and time."""


class Wishes(NamedTuple):
    """What the user has.

    Attributes:
        fit_gib: Memory.
        hours: Time of the whole cross-validation.
        num_folds: Its folds.
        memory: Switches that may be chosen, files of `conf/memory`, the fastest first.
    """

    fit_gib: float
    hours: float
    num_folds: int
    memory: tuple[str, ...]

    @property
    def training_s(self) -> float:
        """About the seconds that one training may take."""
        return TRAINING_SHARE * self.hours * 3600 / self.num_folds


def fits(prediction: Prediction, wishes: Wishes) -> bool:
    """Whether a setting fits into the memory, with the margin of the planner."""
    return prediction.peak_gib * (1 + MARGIN) <= wishes.fit_gib


def choose(fingerprint: Fingerprint, wishes: Wishes, planner: Planner) -> Setting:
    """Choose everything but the steps, which follow from timed ones.

    Args:
        fingerprint: Facts of the cases.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.

    Raises:
        UserError: If nothing fits into the memory, with the least that is needed.
    """
    make = _maker(fingerprint, wishes, planner)
    finest = next(spacings(fingerprint))
    reference = make(finest, REFERENCE_CUBE)
    # On one machine and with one network the time of a step follows its voxels.
    voxels_per_s = reference.step_voxels / planner.predict(reference).seconds
    seen_voxels = voxels_per_s * wishes.training_s
    spacing_mm = affordable_spacing(fingerprint, seen_voxels)
    # Cubes of several lengths may make the same patch.
    settings = list(dict.fromkeys(make(spacing_mm, cube) for cube in CUBES))
    *_, smallest = settings
    enough = [setting for setting in settings if seen_voxels >= WANTED_STEPS * setting.step_voxels]
    setting = fitting(enough or [smallest], wishes, planner)
    return widened(setting, seen_voxels, wishes, planner)


Maker = Callable[[Triple, int], Setting]


def _maker(fingerprint: Fingerprint, wishes: Wishes, planner: Planner) -> Maker:
    """Make settings of a spacing and the length of a cube."""

    def make(spacing_mm: Triple, cube: int) -> Setting:
        setting = Setting(spacing_mm, (cube, cube, cube), UNET, wishes.memory[0])
        divisor = planner.divisor(setting)
        patch = patch_shape(cube, spacing_mm, fingerprint.extent_mm, divisor)
        return replace(setting, patch_size=patch)

    return make


def spacings(fingerprint: Fingerprint) -> Iterator[Triple]:
    """List spacings, the finest first: from what the smallest label asks for to what it bears.

    None is finer than the median of the scans: slices between their slices hold nothing new.
    """
    _, size_mm = fingerprint.smallest_label
    voxel_mm = size_mm / VOXELS_ACROSS
    while voxel_mm <= size_mm / LEAST_VOXELS_ACROSS * 1.001:
        z, y, x = (float(f"{max(voxel_mm, mm):.2g}") for mm in fingerprint.spacing_mm)
        yield z, y, x
        voxel_mm *= COARSER


def scan_voxels(fingerprint: Fingerprint, spacing_mm: Triple) -> float:
    """Voxels of the median scan at a spacing."""
    return math.prod(fingerprint.extent_mm) / math.prod(spacing_mm)


def affordable_spacing(fingerprint: Fingerprint, seen_voxels: float) -> Triple:
    """Find the finest spacing at which a training sees enough of the scans.

    Args:
        fingerprint: Facts of the cases.
        seen_voxels: Voxels that a training sees.

    Returns:
        The coarsest one where none is enough.
    """
    spacing_mm = fingerprint.spacing_mm
    for spacing_mm in spacings(fingerprint):
        if seen_voxels >= WANTED_PASSES * scan_voxels(fingerprint, spacing_mm):
            break
    return spacing_mm


def patch_shape(cube: int, spacing_mm: Triple, extent_mm: Triple, divisor: Shape) -> Shape:
    """Make a patch with the voxels of a cube, about equally long in mm along all axes.

    No axis is longer than the scan, or shorter than two multiples of the divisor.

    Args:
        cube: Length of the cube, voxels.
        spacing_mm: Spacing of the patch, (z, y, x).
        extent_mm: Lengths of the scan, (z, y, x).
        divisor: Required multiple, (z, y, x).

    Example:
        >>> patch_shape(96, (1.0, 1.0, 1.0), (400.0, 300.0, 50.0), (16, 16, 16))
        (96, 96, 64)
    """
    side_mm = cube * math.prod(spacing_mm) ** (1 / 3)
    lengths = []
    for voxel_mm, scan_mm, step in zip(spacing_mm, extent_mm, divisor, strict=True):
        longest = math.ceil(scan_mm / voxel_mm / step) * step
        length = round(side_mm / voxel_mm / step) * step
        lengths.append(max(2 * step, min(length, longest)))
    depth, height, width = lengths
    return depth, height, width


def fitting(settings: list[Setting], wishes: Wishes, planner: Planner) -> Setting:
    """Find the first setting that fits into the memory, with the fastest switches that do.

    Args:
        settings: Settings, the preferred first; their switches are chosen here.
        wishes: Memory.
        planner: Predicts the memory of a setting.

    Raises:
        UserError: If none fits, with the memory of the smallest.
    """
    least_gib = math.inf
    for setting in settings:
        for memory in wishes.memory:
            switched = replace(setting, memory=memory)
            prediction = planner.predict(switched)
            if fits(prediction, wishes):
                return switched
            least_gib = min(least_gib, prediction.peak_gib * (1 + MARGIN))
    nearest = math.ceil(least_gib * 20) / 20
    raise UserError(
        f"fit_gib={wishes.fit_gib:g}: no setting fits; the smallest one needs {least_gib:.2f} GiB "
        f"with its margin; the nearest possible wish is fit_gib={nearest:g}"
    )


def widened(setting: Setting, seen_voxels: float, wishes: Wishes, planner: Planner) -> Setting:
    """Take the wider network where time and memory are left over."""
    if seen_voxels < MANY_STEPS * setting.step_voxels:
        return setting
    wide = replace(setting, model=WIDE_UNET)
    prediction = planner.predict(wide)
    num_steps = wishes.training_s / prediction.seconds
    if fits(prediction, wishes) and num_steps >= WANTED_STEPS:
        return wide
    return setting


def with_steps(setting: Setting, steps: int) -> Setting:
    """Divide steps of one patch into steps of a batch, where there are many."""
    batch_size = 1
    if steps >= BATCH_STEPS:
        batch_size = 2
    return replace(setting, batch_size=batch_size, steps=steps // batch_size)


def least_steps(setting: Setting, fingerprint: Fingerprint) -> int:
    """Steps without which a training has not seen the scans."""
    scan = scan_voxels(fingerprint, setting.spacing_mm)
    return max(LEAST_STEPS, math.ceil(LEAST_PASSES * scan / math.prod(setting.patch_size)))


def smaller(setting: Setting, fingerprint: Fingerprint, planner: Planner) -> Setting | None:
    """Take the next smaller patch, for a setting that took more memory than was predicted.

    Returns:
        None if there is no smaller one.
    """
    divisor = planner.divisor(setting)
    for cube in CUBES:
        patch = patch_shape(cube, setting.spacing_mm, fingerprint.extent_mm, divisor)
        if math.prod(patch) < math.prod(setting.patch_size):
            return replace(setting, patch_size=patch)
    return None
