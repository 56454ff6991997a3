"""Choice of spacing, patch, network and memory switches that fit a memory and a time.

With more time the spacing becomes finer and the patch larger; with much more time, the network
becomes wider and a batch has two patches. The constants are rules of thumb; their sources are in
the `README.md` of this package.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from medseg.errors import UserError
from medseg.geometry.sizes import Shape
from medseg.knob import Triple
from medseg.planning.choose import MARGIN
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting

# Voxels across the smallest label at the finest and at the coarsest spacing. The surface of a label
# errs by about 0.15 of a voxel, which costs a ball of n voxels across a Dice of 3 · 0.15 / n: 0.01
# at 48 voxels, 0.04 at 12.
VOXELS_ACROSS = 48
LEAST_VOXELS_ACROSS = 12
# Factor between a candidate spacing and the next coarser candidate.
COARSER = 2**0.25
# Wanted and least number of passes: voxels that a training sees, over voxels of the median scan.
WANTED_PASSES = 100
LEAST_PASSES = 5
# Wanted and least number of optimiser steps of a training.
WANTED_STEPS = 500
LEAST_STEPS = 100
# Number of steps above which the time is better spent on a wider network.
MANY_STEPS = 4 * WANTED_STEPS
# Number of steps above which the time is better spent on batches of two patches.
BATCH_STEPS = 16 * WANTED_STEPS
# Candidate patches have about as many voxels as cubes with these side lengths, in voxels.
CUBES = (128, 112, 96, 80, 64, 48, 32)
# Side length of the cube whose step predicts the speed of the machine, in voxels.
REFERENCE_CUBE = 64
# The smaller and the wider network, as names of files in `conf/model`.
UNET, WIDE_UNET = "unet", "unet_lean"
# Estimated share of the time for training steps; the rest prepares, starts, validates, predicts and
# scores. It is used to choose spacing, patch and network; the number of steps follows from measured
# times.
TRAINING_SHARE = 0.7


class Prediction(NamedTuple):
    """Predicted memory and time of a training.

    Attributes:
        peak_gib: Peak of the memory of all processes together; on a GPU, of the memory of the GPU.
        seconds: Duration of a step, in s.
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
    """Memory and time that the user has.

    Attributes:
        fit_gib: Memory that a training may take.
        hours: Time of the whole cross-validation.
        num_folds: Number of folds of the cross-validation.
        memory: Candidate sets of memory switches, as names of files in `conf/memory`, the fastest
            first.
    """

    fit_gib: float
    hours: float
    num_folds: int
    memory: tuple[str, ...]

    @property
    def training_s(self) -> float:
        """Estimate of the seconds that one training may take."""
        return TRAINING_SHARE * self.hours * 3600 / self.num_folds


def fits(prediction: Prediction, wishes: Wishes) -> bool:
    """Whether a setting fits into the memory, even if the true peak is higher by `MARGIN`."""
    return prediction.peak_gib * (1 + MARGIN) <= wishes.fit_gib


def choose(fingerprint: Fingerprint, wishes: Wishes, planner: Planner) -> Setting:
    """Choose everything but batch size and number of steps, which follow from timed steps.

    Args:
        fingerprint: Facts of the cases.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.

    Raises:
        UserError: If nothing fits into the memory; names the least memory that is needed.
    """
    finest_mm = next(spacings(fingerprint))
    reference = _make_setting(finest_mm, REFERENCE_CUBE, fingerprint, wishes, planner)
    # The time of a step is assumed proportional to its voxels, so that one prediction is enough.
    voxels_per_s = reference.step_voxels / planner.predict(reference).seconds
    seen_voxels = voxels_per_s * wishes.training_s
    spacing_mm = affordable_spacing(fingerprint, seen_voxels)
    # Largest patch first. The dictionary drops repetitions: several cubes may give the same patch.
    all_settings = [_make_setting(spacing_mm, cube, fingerprint, wishes, planner) for cube in CUBES]
    settings = list(dict.fromkeys(all_settings))
    affordable_settings = []
    for setting in settings:
        if seen_voxels >= WANTED_STEPS * setting.step_voxels:
            affordable_settings.append(setting)
    # If no patch is affordable, the smallest patch is the only candidate.
    setting = first_fitting(affordable_settings or settings[-1:], wishes, planner)
    return widened(setting, seen_voxels, wishes, planner)


def _make_setting(
    spacing_mm: Triple, cube: int, fingerprint: Fingerprint, wishes: Wishes, planner: Planner
) -> Setting:
    """Make the setting of a spacing and a patch, with the smaller network and the fastest switches.

    Args:
        spacing_mm: Spacing of the voxels, (z, y, x).
        cube: Side length, in voxels, of a cube with about as many voxels as the patch.
        fingerprint: Facts of the cases.
        wishes: Has the candidate memory switches.
        planner: States the required multiple of a patch.
    """
    setting = Setting(
        spacing_mm, patch_size=(cube, cube, cube), model=UNET, memory=wishes.memory[0]
    )
    divisor = planner.divisor(setting)
    patch = patch_shape(cube, spacing_mm, fingerprint.extent_mm, divisor)
    return replace(setting, patch_size=patch)


def spacings(fingerprint: Fingerprint) -> Iterator[Triple]:
    """Yield the candidate spacings, the finest first.

    At the finest spacing the smallest label is `VOXELS_ACROSS` voxels across, at the coarsest
    `LEAST_VOXELS_ACROSS`. No axis is finer than in the median scan, which holds no finer detail.
    """
    _, size_mm = fingerprint.smallest_label
    voxel_mm = size_mm / VOXELS_ACROSS
    # The factor 1.001 keeps rounding errors from leaving out the coarsest spacing.
    while voxel_mm <= size_mm / LEAST_VOXELS_ACROSS * 1.001:
        # Rounded to two digits for readers of the experiment.
        z, y, x = (float(f"{max(voxel_mm, mm):.2g}") for mm in fingerprint.spacing_mm)
        yield z, y, x
        voxel_mm *= COARSER


def scan_voxels(fingerprint: Fingerprint, spacing_mm: Triple) -> float:
    """Count the voxels of the median scan at a spacing."""
    return math.prod(fingerprint.extent_mm) / math.prod(spacing_mm)


def affordable_spacing(fingerprint: Fingerprint, seen_voxels: float) -> Triple:
    """Find the finest spacing at which a training sees `WANTED_PASSES` times a scan's voxels.

    Args:
        fingerprint: Facts of the cases.
        seen_voxels: Voxels that a training sees.

    Returns:
        The spacing, (z, y, x); the coarsest spacing if the training sees fewer voxels at each.
    """
    *finer_spacings_mm, coarsest_mm = spacings(fingerprint)
    for spacing_mm in finer_spacings_mm:
        if seen_voxels >= WANTED_PASSES * scan_voxels(fingerprint, spacing_mm):
            return spacing_mm
    return coarsest_mm


def patch_shape(cube: int, spacing_mm: Triple, extent_mm: Triple, divisor: Shape) -> Shape:
    """Make a patch with about as many voxels as a cube, about equally long in mm along all axes.

    Each length is a multiple of the divisor: at least twice the divisor, and otherwise at most the
    length of the scan, rounded up to a multiple.

    Args:
        cube: Side length of the cube, voxels.
        spacing_mm: Spacing of the patch, (z, y, x).
        extent_mm: Lengths of the scan, (z, y, x).
        divisor: Required multiple, (z, y, x).

    Example:
        >>> patch_shape(96, (1.0, 1.0, 1.0), (400.0, 300.0, 50.0), (16, 16, 16))
        (96, 96, 64)
    """
    # Side of a cube in space that holds `cube`³ voxels of this spacing.
    side_mm = cube * math.prod(spacing_mm) ** (1 / 3)
    lengths = []
    for voxel_mm, scan_mm, step in zip(spacing_mm, extent_mm, divisor, strict=True):
        longest = math.ceil(scan_mm / voxel_mm / step) * step
        length = round(side_mm / voxel_mm / step) * step
        lengths.append(max(2 * step, min(length, longest)))
    depth, height, width = lengths
    return depth, height, width


def first_fitting(settings: Sequence[Setting], wishes: Wishes, planner: Planner) -> Setting:
    """Find the first setting that fits into the memory, with the fastest switches that fit.

    All switches are tried on a setting before the next setting is tried.

    Args:
        settings: Candidates, the preferred first; their switches are replaced.
        wishes: Memory and candidate switches.
        planner: Predicts the memory of a setting.

    Raises:
        UserError: If no setting fits; names the least memory that a setting needs.
    """
    least_gib = math.inf
    for setting in settings:
        for memory in wishes.memory:
            switched = replace(setting, memory=memory)
            prediction = planner.predict(switched)
            if fits(prediction, wishes):
                return switched
            least_gib = min(least_gib, prediction.peak_gib * (1 + MARGIN))
    # Rounded up to 0.05 GiB.
    nearest_gib = math.ceil(least_gib * 20) / 20
    raise UserError(
        f"fit_gib={wishes.fit_gib:g}: no setting fits; the smallest one needs {least_gib:.2f} GiB "
        f"with its margin; the nearest possible wish is fit_gib={nearest_gib:g}"
    )


def widened(setting: Setting, seen_voxels: float, wishes: Wishes, planner: Planner) -> Setting:
    """Take the wider network if there is time for `MANY_STEPS` steps of the smaller network.

    The smaller network is kept if the wider network does not fit into the memory, or if there is
    time for fewer than `WANTED_STEPS` steps of the wider network.

    Args:
        setting: Setting with the smaller network.
        seen_voxels: Voxels that a training with the smaller network sees.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.
    """
    if seen_voxels < MANY_STEPS * setting.step_voxels:
        return setting
    wide = replace(setting, model=WIDE_UNET)
    prediction = planner.predict(wide)
    num_steps = wishes.training_s / prediction.seconds
    if fits(prediction, wishes) and num_steps >= WANTED_STEPS:
        return wide
    return setting


def with_steps(setting: Setting, steps: int) -> Setting:
    """Choose the batch size, and the number of steps for which there is time.

    Args:
        setting: Its batch size and steps are replaced.
        steps: Number of steps of one patch for which there is time.
    """
    batch_size = 1
    if steps >= BATCH_STEPS:
        batch_size = 2
    return replace(setting, batch_size=batch_size, steps=steps // batch_size)


def least_steps(setting: Setting, fingerprint: Fingerprint) -> int:
    """Count the steps of one patch in which a training sees `LEAST_PASSES` times a scan's voxels.

    The result is at least `LEAST_STEPS`.
    """
    num_seen_voxels = LEAST_PASSES * scan_voxels(fingerprint, setting.spacing_mm)
    return max(LEAST_STEPS, math.ceil(num_seen_voxels / math.prod(setting.patch_size)))


def with_smaller_patch(
    setting: Setting, fingerprint: Fingerprint, planner: Planner
) -> Setting | None:
    """Take the next smaller patch, for a setting that took more memory than predicted.

    Returns:
        The setting; None if there is no smaller patch.
    """
    divisor = planner.divisor(setting)
    for cube in CUBES:
        patch = patch_shape(cube, setting.spacing_mm, fingerprint.extent_mm, divisor)
        if math.prod(patch) < math.prod(setting.patch_size):
            return replace(setting, patch_size=patch)
    return None
