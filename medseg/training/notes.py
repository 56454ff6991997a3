"""Notes on allowed combinations of keys that may surprise; a run prints them when it begins."""

from collections.abc import Iterator, Sequence
from typing import Any

from medseg.data.options import StageName
from medseg.losses.options import DICE_CE
from medseg.memory.options import CompileMode
from medseg.models.options import is_batch_norm
from medseg.targets import TARGET
from medseg.training.clashes import class_name
from medseg.training.options import TrainConfig

# Module of the effects of medseg, each a class.
EFFECTS_MODULE = "medseg.data.augment."


def notes(config: TrainConfig, has_batch_norm: bool = False) -> list[str]:
    """Describe in a sentence each combination of keys that may surprise.

    Args:
        config: Checked configuration.
        has_batch_norm: Whether the network has batch norm, also where its arguments do not say so,
            as in some of MONAI's.
    """
    return [*_batch_notes(config, has_batch_norm), *_key_notes(config), *_shape_notes(config)]


def _key_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each key that another one slows down, replaces or does not suit."""
    stage = config.stage
    terms = config.loss.get("terms", [config.loss])
    other_losses = [class_name(term) for term in terms if term.get(TARGET) != DICE_CE]
    if config.task.ignore_label is not None and other_losses:
        yield (
            f"task.ignore_label with {other_losses[0]}: a GPU waits once a step for each sample, "
            "to count the voxels that remain; loss=dice_ce does without"
        )
    # Adam and its variants have their momentum in `betas`.
    momentum = config.optimizer.get("momentum", config.optimizer.get("betas"))
    if config.schedule.get("cycle_momentum") and momentum is not None:
        yield (
            "schedule.cycle_momentum=true sets the momentum of each step; the momentum of the "
            f"optimizer ({momentum}) is not used"
        )
    if config.augment.enabled and not _has_own_effects(config.augment.transforms):
        yield (
            "augment.transforms replaces the built-in effects that the other keys of augment set; "
            "to keep them, add the entry `effects` to the list"
        )
    if stage.name is StageName.coarse and not config.task.regions and stage.patch_size is None:
        yield (
            f"the task {config.task.name} has no regions, and stage=coarse segments whole scans at "
            "a coarse spacing; choose stage=single for patches at a fine spacing"
        )


def _has_own_effects(transforms: Sequence[Any]) -> bool:
    """Whether a list of transforms has effects of medseg, all of them or some by their class.

    A list like that of the preset `mr` leaves the other effects out on purpose.
    """
    for transform in transforms:
        if transform == "effects":
            return True
        if str(transform[TARGET]).startswith(EFFECTS_MODULE):
            return True
    return False


def _shape_notes(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each switch that costs at every new shape, where shapes vary."""
    memory = config.memory
    if _has_one_shape(config):
        return
    if memory.cudnn_benchmark:
        yield (
            "memory.cudnn_benchmark=true repeats its kernel search at each new input shape, and "
            "without stage.patch_size the shapes vary"
        )
    if memory.compile and memory.compile_mode is CompileMode.reduce_overhead:
        yield (
            "memory.compile_mode=reduce_overhead records CUDA graphs anew at each input shape and "
            "keeps the memory of each, and without stage.patch_size the shapes vary; "
            "memory.compile_mode=default does without"
        )


def _batch_notes(config: TrainConfig, has_batch_norm: bool) -> Iterator[str]:
    """Yield a sentence for each key that computes over a batch, but sees fewer of its samples."""
    batch_size = config.stage.batch_size
    accumulate = config.memory.accumulate
    ranks = config.trainer.num_ranks
    # Samples that the network sees at once: a single one where their shapes differ.
    samples_per_pass = 1
    shape_reason = ", samples of different shapes"
    if _has_one_shape(config):
        samples_per_pass = batch_size // (ranks * accumulate)
        shape_reason = ""
    samples_by_key = {}
    if has_batch_norm or is_batch_norm(config.model):
        key = f"batch norm of {config.model[TARGET]}"
        if is_batch_norm(config.model):
            key = "model.norm=batch"
        samples_by_key[key] = samples_per_pass
        if config.trainer.sync_batchnorm:
            samples_by_key[key] = samples_per_pass * ranks
    loss_nodes = [config.loss, *config.loss.get("terms", [])]
    # The argument is called `batch_dice` in our losses, and `batch` in MONAI's.
    for key in ("batch_dice", "batch"):
        if any(node.get(key) for node in loss_nodes):
            samples_by_key[f"loss.{key}=true"] = samples_per_pass
    for key, samples in samples_by_key.items():
        if samples < batch_size:
            yield (
                f"{key} computes over {_counted(samples, 'sample')}, not over the batch of "
                f"{batch_size} (memory.accumulate={accumulate}, {_counted(ranks, 'rank')}"
                f"{shape_reason}), so the result differs from that of the whole batch"
            )


def _counted(number: int, noun: str) -> str:
    """Write a number with its noun, which gets an s where there are several."""
    ending = "s" if number > 1 else ""
    return f"{number} {noun}{ending}"


def _has_one_shape(config: TrainConfig) -> bool:
    """Whether all samples have the same shape."""
    return config.stage.patch_size is not None or config.spacing.size is not None
