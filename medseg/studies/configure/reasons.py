"""Reasons of the choices, one sentence each, for the experiment file and the report."""

import math
from collections.abc import Iterable

from medseg.data.options import StageName
from medseg.studies.configure.choose import (
    BATCH_STEPS,
    LEAST_GAIN,
    MANY_STEPS,
    WANTED_PASSES,
    WANTED_STEPS,
    Wishes,
)
from medseg.studies.configure.fingerprint import Fingerprint
from medseg.studies.configure.setting import Setting
from medseg.studies.configure.stage_views import (
    FINE_VOXELS_ACROSS,
    LEAST_VOXELS_ACROSS,
    VOXELS_ACROSS,
    StageView,
)
from medseg.studies.configure.times import StageCosts
from medseg.task import Task

# Stage to the input that it sees of a case.
INPUT_OF = {
    StageName.single: "a scan",
    StageName.coarse: "a scan",
    StageName.fine: "the crops of a scan",
}


def reasons_of(
    setting: Setting, view: StageView, task: Task, wishes: Wishes, costs: StageCosts
) -> dict[str, str]:
    """Explain each choice for a stage.

    Args:
        setting: The choices.
        view: What the stage sees.
        task: Labels and channels.
        wishes: Memory and time that the user has.
        costs: Measured times and memory of the stage.

    Returns:
        Group or key of the experiment to its reason.
    """
    # Counted along the axis with the coarsest spacing.
    voxels_across = view.structure_mm / max(setting.spacing_mm)
    wanted_across = view.structure_mm / view.finest_mm
    modalities = joined(channel.modality for channel in task.channels)
    seen_voxels = setting.steps * setting.step_voxels
    passes = seen_voxels / view.case_voxels(setting.spacing_mm)
    patch_mm = joined(
        f"{length * voxel_mm:.0f}"
        for length, voxel_mm in zip(setting.patch_size, setting.spacing_mm, strict=True)
    )
    return {
        "stage": _reason_of_stage(setting.stage, task),
        "spacing": "a spacing for each axis, so that thick slices stay as they are",
        "inference": "tiles of the size of a patch",
        "model": _reason_of_model(setting),
        "augment": f"the channels are {modalities}",
        "loss": "Dice for small labels, cross-entropy for stable steps",
        "optimizer": "the setting of all included experiments",
        "schedule": "the rate falls to zero at the last step, whose weights are used",
        "memory": f"{costs.peak_gib:.2f} GiB of {wishes.fit_gib:g} measured in the timed steps",
        "steps": f"{setting.batch_size * costs.step_s:.3g} s each; {passes:.0f} times the voxels "
        f"of {INPUT_OF[setting.stage]} are seen",
        "task.regions": "one stage cuts no regions",
        "spacing.target_spacing_mm": f"{view.structure} is {view.structure_mm:.3g} mm across, "
        f"{voxels_across:.0f} voxels ({wanted_across:.0f} wanted); "
        f"slices {view.scan_spacing_mm[0]:.3g} mm apart",
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
        f"Spacing of one stage: the finest at which a training sees {WANTED_PASSES} times the "
        f"voxels of a scan, among those that give the smallest label about {VOXELS_ACROSS} down to "
        f"{LEAST_VOXELS_ACROSS} voxels across. A task with regions gets two stages where crops of "
        f"the regions, with up to {FINE_VOXELS_ACROSS} voxels across, allow voxels that are "
        f"smaller by a factor of {LEAST_GAIN:g}."
    )


def _reason_of_stage(stage: StageName, task: Task) -> str:
    """Explain what a stage does."""
    match stage:
        case StageName.single:
            return f"one stage in patches finds {_labels_text(task)} wherever they lie"
        case StageName.coarse:
            return "the coarse stage finds the regions in the whole scan"
        case StageName.fine:
            return "the fine stage segments a crop of each region, at a finer spacing"


def _reason_of_model(setting: Setting) -> str:
    """Explain the choice of the network."""
    if setting.stage is StageName.coarse:
        return "16 channels at half resolution are enough to find the regions"
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
