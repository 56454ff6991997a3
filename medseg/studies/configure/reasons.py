"""Reasons of the choices, one sentence each, for the experiment file and the report."""

import math
from collections.abc import Iterable

from medseg.studies.configure.choose import (
    BATCH_STEPS,
    LEAST_VOXELS_ACROSS,
    MANY_STEPS,
    VOXELS_ACROSS,
    WANTED_PASSES,
    WANTED_STEPS,
    Wishes,
    scan_voxels,
)
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.times import Costs
from medseg.task import Task


def reasons_of(
    setting: Setting, fingerprint: Fingerprint, task: Task, wishes: Wishes, costs: Costs
) -> dict[str, str]:
    """Explain each choice.

    Args:
        setting: The choices.
        fingerprint: Facts of the cases.
        task: Labels and channels.
        wishes: Memory and time that the user has.
        costs: Measured times and memory.

    Returns:
        Group or key of the experiment to its reason.
    """
    label, size_mm = fingerprint.smallest_label
    # Counted along the axis with the coarsest spacing.
    voxels_across = size_mm / max(setting.spacing_mm)
    modalities = joined(channel.modality for channel in task.channels)
    seen_voxels = setting.steps * setting.step_voxels
    passes = seen_voxels / scan_voxels(fingerprint, setting.spacing_mm)
    patch_mm = joined(
        f"{length * voxel_mm:.0f}"
        for length, voxel_mm in zip(setting.patch_size, setting.spacing_mm, strict=True)
    )
    return {
        "stage": f"one stage in patches finds {_labels_text(task)} wherever they lie",
        "spacing": "a spacing for each axis, so that thick slices stay as they are",
        "model": _reason_of_model(setting),
        "augment": f"the channels are {modalities}",
        "loss": "Dice for small labels, cross-entropy for stable steps",
        "optimizer": "the setting of all included experiments",
        "schedule": "the rate falls to zero at the last step, whose weights are used",
        "memory": f"{costs.peak_gib:.2f} GiB of {wishes.fit_gib:g} measured in the timed steps",
        "steps": f"{setting.batch_size * costs.step_s:.3g} s each; {passes:.0f} times the voxels "
        "of a scan are seen",
        "task.regions": "one stage cuts no regions",
        "spacing.target_spacing_mm": f"{label} is {size_mm:.3g} mm across, "
        f"{voxels_across:.0f} voxels ({VOXELS_ACROSS} wanted); "
        f"slices {fingerprint.spacing_mm[0]:.3g} mm apart",
        "stage.patch_size": f"{patch_mm} mm; the largest that fits and leaves time for "
        f"{WANTED_STEPS} steps",
        "stage.batch_size": f"two from {BATCH_STEPS} patches on, else more steps of one",
        "stage.validate_every": "one validation, since the last weights are used",
        "memory.accumulate": "micro-batches of one patch: the same gradient in less memory",
        "augment.flip_axes": _reason_of_flips(task),
    }


def wishes_line(wishes: Wishes) -> str:
    """Describe the memory, the time and the folds that the user asked for."""
    return f"{wishes.fit_gib:g} GiB and {wishes.hours:g} h for {wishes.num_folds} folds"


def passes_line() -> str:
    """Describe how the spacing follows from the time."""
    return (
        f"The spacing is the finest at which a training sees {WANTED_PASSES} times the voxels of "
        f"a scan, among those that give the smallest label about {VOXELS_ACROSS} down to "
        f"{LEAST_VOXELS_ACROSS} voxels across."
    )


def _reason_of_model(setting: Setting) -> str:
    """Explain the choice of the network."""
    if setting.model == "unet":
        return f"16 channels at half resolution; the wide one needs time for {MANY_STEPS} steps"
    return f"32 channels and eight at full resolution: there is time for {MANY_STEPS} steps"


def _reason_of_flips(task: Task) -> str:
    """Explain why samples are mirrored, or not."""
    if task.has_sides:
        return "names of labels have sides, which mirroring would exchange"
    return "left and right are mirrored: no name of a label has a side"


def _labels_text(task: Task) -> str:
    """Write `the label` or `the <number> labels`, for a sentence."""
    num_labels = len(task.labels)
    if num_labels == 1:
        return "the label"
    return f"the {num_labels} labels"


def joined(texts: Iterable[str]) -> str:
    """Join lengths or names as `2×1×1`."""
    return "×".join(texts)


def extent_text(fingerprint: Fingerprint) -> str:
    """Describe spacing and field of view of the cases in one line."""
    spacing = joined(f"{voxel_mm:.3g}" for voxel_mm in fingerprint.spacing_mm)
    extent = joined(f"{length_mm:.0f}" for length_mm in fingerprint.extent_mm)
    largest = joined(f"{length_mm:.0f}" for length_mm in fingerprint.largest.extent_mm)
    volume_ratio = math.prod(fingerprint.largest.extent_mm) / math.prod(fingerprint.extent_mm)
    return (
        f"median spacing {spacing} mm, median field of view {extent} mm, the largest "
        f"({fingerprint.largest.name}) {largest} mm, {volume_ratio:.1f} times the median"
    )
