"""Choice of stages, spacing, patch, network and memory switches that fit a memory and a time.

With more time the spacing becomes finer and the patch larger; with much more time, the network
becomes wider and a batch has two patches. The constants are rules of thumb; their sources are in
the `README.md` of this package.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from medseg.anatomy.rules import MIN_REGION_ML
from medseg.data.options import StageName
from medseg.errors import UserError
from medseg.geometry.sizes import Shape, bounded_depth, network_size
from medseg.knob import Triple
from medseg.planning.choose import MARGIN
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.stage_views import (
    COARSE_MAX_VOXELS,
    StageView,
    cascade_views,
    single_view,
)

# Factor between a candidate spacing and the next coarser candidate.
COARSER = 2**0.25
# Wanted and least number of passes: voxels that a training sees, over those of the median case.
WANTED_PASSES = 100
LEAST_PASSES = 5
# Wanted and least number of optimiser steps of a training.
WANTED_STEPS = 500
LEAST_STEPS = 100
# Number of steps above which the time is better spent on a wider network.
MANY_STEPS = 4 * WANTED_STEPS
# Number of steps above which the time is better spent on batches of two patches.
BATCH_STEPS = 16 * WANTED_STEPS
# A cascade is worth its two trainings if the voxels of its fine stage are smaller by this factor.
LEAST_GAIN = 2.0
# Least volume of a region that a cascade is chosen for, ml: coarse results are not exact.
LEAST_REGION_ML = 2 * MIN_REGION_ML
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
        num_stages: Number of stages, 1 or 2; None = to be chosen.
    """

    fit_gib: float
    hours: float
    num_folds: int
    memory: tuple[str, ...]
    num_stages: int | None = None

    @property
    def training_s(self) -> float:
        """Estimate of the seconds that the trainings of one fold may take."""
        return TRAINING_SHARE * self.hours * 3600 / self.num_folds


def fits(prediction: Prediction, wishes: Wishes) -> bool:
    """Whether a setting fits into the memory, even if the true peak is higher by `MARGIN`."""
    return prediction.peak_gib * (1 + MARGIN) <= wishes.fit_gib


def choose(fingerprint: Fingerprint, wishes: Wishes, planner: Planner) -> tuple[Setting, ...]:
    """Choose one stage or a cascade, and all but batch sizes and steps, which follow from timings.

    Unless the number of stages is wished, a cascade is chosen if the voxels of its fine stage are
    smaller than those of a single stage by `LEAST_GAIN`.

    Args:
        fingerprint: Facts of the cases.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.

    Returns:
        The setting of a single stage, or those of the coarse and the fine stage.

    Raises:
        UserError: If nothing fits into the memory; names the least memory that is needed. If a
            cascade is wished, but does not suit the cases or the time.
    """
    if wishes.num_stages == 2:
        return choose_cascade(fingerprint, wishes, planner)
    if wishes.num_stages == 1 or hindrance_of_cascade(fingerprint):
        return (choose_patches(single_view(fingerprint), wishes, planner),)
    try:
        single = choose_patches(single_view(fingerprint), wishes, planner)
    except UserError as refusal:
        # Crops may take less memory than scans.
        try:
            return choose_cascade(fingerprint, wishes, planner)
        except UserError:
            raise refusal from None
    try:
        cascade = choose_cascade(fingerprint, wishes, planner, single)
    except UserError:
        return (single,)
    return cascade


def hindrance_of_cascade(fingerprint: Fingerprint) -> str:
    """Say why a cascade cannot find the regions of the cases; empty if it can."""
    volumes_ml = []
    for case in fingerprint.cases:
        for name, region in case.regions.items():
            volumes_ml.append((region.volume_ml, name, case.name))
    if not volumes_ml:
        return "the task has no regions"
    volume_ml, name, case_name = min(volumes_ml)
    if volume_ml < LEAST_REGION_ML:
        return (
            f"{name} of {case_name} has {volume_ml:.2g} ml, and a coarse stage reports regions "
            f"below {MIN_REGION_ML:g} ml as absent"
        )
    return ""


def choose_cascade(
    fingerprint: Fingerprint, wishes: Wishes, planner: Planner, single: Setting | None = None
) -> tuple[Setting, ...]:
    """Choose the settings of both stages of a cascade.

    Args:
        fingerprint: Facts of the cases.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.
        single: Setting of a single stage that is kept unless the cascade is better by `LEAST_GAIN`.

    Returns:
        The settings of the coarse and the fine stage, or `single` alone.

    Raises:
        UserError: If the cascade does not suit the cases, the memory or the time.
    """
    hindrance = hindrance_of_cascade(fingerprint)
    if hindrance:
        raise UserError(f"num_stages=2: {hindrance}; give num_stages=1")
    coarse_view, fine_view = cascade_views(fingerprint)
    fine = choose_patches(fine_view, wishes, planner)
    if single is not None:
        gain = math.prod(single.spacing_mm) / math.prod(fine.spacing_mm)
        if gain < LEAST_GAIN:
            return (single,)
    coarse = choose_whole_scans(coarse_view, wishes, planner)
    if coarse is None:
        raise UserError(
            f"num_stages=2: {wishes.fit_gib:g} GiB and {wishes.hours:g} h are too little for "
            f"{WANTED_STEPS} steps of a coarse stage on whole scans beside a fine stage; give more "
            "hours or memory, or num_stages=1"
        )
    return coarse, fine


def choose_whole_scans(view: StageView, wishes: Wishes, planner: Planner) -> Setting | None:
    """Choose the setting of a coarse stage, which sees whole scans.

    Returns:
        The setting with the finest spacing that fits into the memory and leaves time for
        `WANTED_STEPS` steps; None if there is none.
    """
    settings = [_whole_scans(spacing_mm, view, wishes, planner) for spacing_mm in spacings(view)]
    # As in `choose_patches`, one prediction is enough for the speed of the machine.
    voxels_per_s = settings[-1].step_voxels / planner.predict(settings[-1]).seconds
    seen_voxels = voxels_per_s * view.time_share * wishes.training_s
    for setting in settings:
        if seen_voxels < WANTED_STEPS * setting.step_voxels:
            continue
        fitting = _with_fitting_switches(setting, wishes, planner)
        if fitting is not None:
            return fitting
    return None


def choose_patches(view: StageView, wishes: Wishes, planner: Planner) -> Setting:
    """Choose the setting of a single or fine stage, which is trained on patches.

    Raises:
        UserError: If nothing fits into the memory; names the least memory that is needed.
    """
    finest_mm = next(spacings(view))
    reference = _with_patches(finest_mm, REFERENCE_CUBE, view, wishes, planner)
    # The time of a step is assumed proportional to its voxels, so that one prediction is enough.
    voxels_per_s = reference.step_voxels / planner.predict(reference).seconds
    seen_voxels = voxels_per_s * view.time_share * wishes.training_s
    spacing_mm = affordable_spacing(view, seen_voxels)
    # Largest patch first. The dictionary drops repetitions: several cubes may give the same patch.
    all_settings = [_with_patches(spacing_mm, cube, view, wishes, planner) for cube in CUBES]
    settings = list(dict.fromkeys(all_settings))
    affordable_settings = []
    for setting in settings:
        if seen_voxels >= WANTED_STEPS * setting.step_voxels:
            affordable_settings.append(setting)
    # If no patch is affordable, the smallest patch is the only candidate.
    setting = first_fitting(affordable_settings or settings[-1:], wishes, planner)
    if seen_voxels < MANY_STEPS * setting.step_voxels:
        return setting
    return widened(setting, view, wishes, planner)


def _whole_scans(spacing_mm: Triple, view: StageView, wishes: Wishes, planner: Planner) -> Setting:
    """Make the setting of a coarse stage, with the smaller network and the fastest switches.

    Args:
        spacing_mm: Spacing of the voxels, (z, y, x).
        view: Has the lengths of the scans.
        wishes: Has the candidate memory switches.
        planner: States the required multiple of a sample.
    """
    setting = Setting(view.stage, spacing_mm, (1, 1, 1), UNET, wishes.memory[0])
    lengths = []
    for length_mm, voxel_mm in zip(view.extent_mm, spacing_mm, strict=True):
        lengths.append(math.ceil(length_mm / voxel_mm))
    depth, height, width = lengths
    divisor = planner.divisor(setting)
    shape = network_size((depth, height, width), divisor)
    # Larger scans are cut to a range of slices.
    depth = bounded_depth(shape, COARSE_MAX_VOXELS, divisor[0])
    return replace(setting, patch_size=(depth, *shape[1:]))


def _with_patches(
    spacing_mm: Triple, cube: int, view: StageView, wishes: Wishes, planner: Planner
) -> Setting:
    """Make the setting of a spacing and a patch, with the smaller network and the fastest switches.

    Args:
        spacing_mm: Spacing of the voxels, (z, y, x).
        cube: Side length, in voxels, of a cube with about as many voxels as the patch.
        view: Has the lengths of the scans or crops.
        wishes: Has the candidate memory switches.
        planner: States the required multiple of a patch.
    """
    setting = Setting(view.stage, spacing_mm, (cube, cube, cube), UNET, wishes.memory[0])
    divisor = planner.divisor(setting)
    patch = patch_shape(cube, spacing_mm, view.extent_mm, divisor)
    return replace(setting, patch_size=patch)


def spacings(view: StageView) -> Iterator[Triple]:
    """Yield the candidate spacings of a stage, the finest first.

    No axis is finer than in the median scan, which holds no finer detail.
    """
    voxel_mm = view.finest_mm
    # The factor 1.001 keeps rounding errors from leaving out the coarsest spacing.
    while voxel_mm <= view.coarsest_mm * 1.001:
        # Rounded to two digits for readers of the experiment.
        z, y, x = (float(f"{max(voxel_mm, mm):.2g}") for mm in view.scan_spacing_mm)
        yield z, y, x
        voxel_mm *= COARSER


def affordable_spacing(view: StageView, seen_voxels: float) -> Triple:
    """Find the finest spacing at which a training sees `WANTED_PASSES` times a case's voxels.

    Args:
        view: What the stage sees.
        seen_voxels: Voxels that a training sees.

    Returns:
        The spacing, (z, y, x); the coarsest spacing if the training sees fewer voxels at each.
    """
    *finer_spacings_mm, coarsest_mm = spacings(view)
    for spacing_mm in finer_spacings_mm:
        if seen_voxels >= WANTED_PASSES * view.case_voxels(spacing_mm):
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
    for setting in settings:
        fitting = _with_fitting_switches(setting, wishes, planner)
        if fitting is not None:
            return fitting
    peaks_gib = []
    for setting in settings:
        for memory in wishes.memory:
            peaks_gib.append(planner.predict(replace(setting, memory=memory)).peak_gib)
    least_gib = min(peaks_gib) * (1 + MARGIN)
    # Rounded up to 0.05 GiB.
    nearest_gib = math.ceil(least_gib * 20) / 20
    raise UserError(
        f"fit_gib={wishes.fit_gib:g}: no setting fits; the smallest one needs {least_gib:.2f} GiB "
        f"with its margin; the nearest possible wish is fit_gib={nearest_gib:g}"
    )


def _with_fitting_switches(setting: Setting, wishes: Wishes, planner: Planner) -> Setting | None:
    """Take the fastest memory switches with which a setting fits into the memory; None if none."""
    for memory in wishes.memory:
        switched = replace(setting, memory=memory)
        if fits(planner.predict(switched), wishes):
            return switched
    return None


def widened(setting: Setting, view: StageView, wishes: Wishes, planner: Planner) -> Setting:
    """Take the wider network.

    The smaller network is kept if the wider network does not fit into the memory, or if there is
    time for fewer than `WANTED_STEPS` steps of the wider network.

    Args:
        setting: Setting with the smaller network.
        view: Has the stage's share of the time.
        wishes: Memory and time.
        planner: Predicts memory and time of a setting.
    """
    wide = replace(setting, model=WIDE_UNET)
    prediction = planner.predict(wide)
    num_steps = view.time_share * wishes.training_s / prediction.seconds
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


def least_steps(setting: Setting, view: StageView) -> int:
    """Count the steps of one patch in which a training sees `LEAST_PASSES` times a case's voxels.

    The result is at least `LEAST_STEPS`.
    """
    num_seen_voxels = LEAST_PASSES * view.case_voxels(setting.spacing_mm)
    return max(LEAST_STEPS, math.ceil(num_seen_voxels / math.prod(setting.patch_size)))


def with_smaller_samples(
    setting: Setting, view: StageView, wishes: Wishes, planner: Planner
) -> Setting | None:
    """Take smaller samples, for a setting that took more memory than predicted.

    Patches become smaller; whole scans get the next coarser spacing.

    Returns:
        The setting; None if there is no smaller sample.
    """
    candidates = []
    if view.stage is StageName.coarse:
        for spacing_mm in spacings(view):
            candidates.append(_whole_scans(spacing_mm, view, wishes, planner))
    else:
        for cube in CUBES:
            candidates.append(_with_patches(setting.spacing_mm, cube, view, wishes, planner))
    for candidate in candidates:
        if candidate.step_voxels < math.prod(setting.patch_size):
            return replace(
                setting, spacing_mm=candidate.spacing_mm, patch_size=candidate.patch_size
            )
    return None
