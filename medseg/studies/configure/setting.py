"""Setting: the choices of `configure` for a stage, and the experiment file written from them."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from medseg.data.options import StageName
from medseg.geometry.sizes import Shape
from medseg.knob import Triple
from medseg.task import Task


@dataclass(frozen=True)
class Setting:
    """Choices of `configure` for one stage.

    Attributes:
        stage: The stage.
        spacing_mm: Spacing of the voxels, (z, y, x).
        patch_size: Size of a patch in training and of a tile in prediction, voxels, (D, H, W). The
            coarse stage has no patches: it is the size of the median scan.
        model: Network, as the name of a file in `conf/model`.
        memory: Memory switches, as the name of a file in `conf/memory`.
        batch_size: Patches of an optimiser step; each is a micro-batch of its own.
        steps: Number of optimiser steps.
    """

    stage: StageName
    spacing_mm: Triple
    patch_size: Shape
    model: str
    memory: str
    batch_size: int = 1
    steps: int = 1

    @property
    def step_voxels(self) -> int:
        """Number of voxels in the batch of a step."""
        return self.batch_size * math.prod(self.patch_size)

    @property
    def num_patches(self) -> int:
        """Number of patches that a training sees."""
        return self.steps * self.batch_size


def group_choices(setting: Setting, task: Task) -> dict[str, str]:
    """Map each configuration group that the experiment overrides to the chosen file name."""
    is_ct = all(channel.modality == "ct" for channel in task.channels)
    choices = {"stage": setting.stage.value, "spacing": "anisotropic"}
    if setting.stage is StageName.fine:
        # Tiles of the size of a patch; the other stages have the right default.
        choices["inference"] = "tiles"
    return choices | {
        "model": setting.model,
        "augment": "ct" if is_ct else "mr",
        "loss": "dice_ce",
        "optimizer": "adamw",
        "schedule": "one_cycle_momentum",
        "memory": setting.memory,
    }


def key_values(setting: Setting, task: Task) -> dict[str, Any]:
    """Map each key that the experiment sets to its value; keys of one group are adjacent."""
    values: dict[str, Any] = {"steps": setting.steps}
    if task.regions and setting.stage is StageName.single:
        # A single stage has no regions: a second stage would refine them in crops.
        values["task.regions"] = None
    values["spacing.target_spacing_mm"] = list(setting.spacing_mm)
    if setting.stage is not StageName.coarse:
        values["stage.patch_size"] = list(setting.patch_size)
    return values | {
        "stage.batch_size": setting.batch_size,
        # `cross_validate` predicts with the weights of the last step, so one validation is enough.
        "stage.validate_every": setting.steps,
        "memory.accumulate": setting.batch_size,
        # Axis 2 is x. Without sides, left and right may be exchanged by mirroring.
        "augment.flip_axes": [] if task.has_sides else [2],
    }


def experiment_text(
    setting: Setting, task: Task, reasons: Mapping[str, str], head: Iterable[str] = ()
) -> str:
    """Write the experiment file, with the reason of each choice in a comment.

    Args:
        setting: The choices.
        task: Labels and channels.
        reasons: Group or key to its reason, see `medseg.studies.configure.reasons`; a choice
            without a reason gets no comment.
        head: Lines of the comment at the top.
    """
    # Without `@package _global_`, Hydra would put all keys below a key `experiment`.
    lines = ["# @package _global_", *(f"# {line}" for line in head), "defaults:"]
    for group, choice in group_choices(setting, task).items():
        lines += _comment(reasons.get(group), "  ")
        lines.append(f"  - override /{group}: {choice}")
    lines += _key_lines(key_values(setting, task), reasons)
    return "\n".join(lines) + "\n"


def cascade_text(files: Mapping[StageName, str], head: Iterable[str]) -> str:
    """Write the experiment of `cross_validate` that names the experiments of both stages.

    Args:
        files: Stage to the name of its experiment file in the same folder.
        head: Lines of the comment at the top.
    """
    lines = ["# @package _global_", *(f"# {line}" for line in head)]
    values: dict[str, Any] = {stage.value: name for stage, name in files.items()}
    # Both stages start from random weights.
    values |= {"pretrain_coarse": None, "pretrain_fine": None}
    lines += _key_lines(values, reasons={})
    return "\n".join(lines) + "\n"


def yaml_text(value: Any) -> str:
    """Format a value of an experiment as YAML.

    Example:
        >>> yaml_text([2.0, 1.5, 1.5]), yaml_text(None), yaml_text(700)
        ('[2.0, 1.5, 1.5]', 'null', '700')
    """
    # YAML reads every text in JSON.
    return json.dumps(value, ensure_ascii=False)


def _key_lines(values: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    """Format keys and values as YAML, with the reason of each in a comment line above it.

    Args:
        values: Key, such as `stage.patch_size`, to value; keys of one group are adjacent.
        reasons: Key to its reason; may lack keys.
    """
    lines = []
    last_group = ""
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        if group and group != last_group:
            lines.append(f"{group}:")
        last_group = group
        indent = "  " if group else ""
        lines += _comment(reasons.get(key), indent)
        lines.append(f"{indent}{name}: {yaml_text(value)}")
    return lines


def _comment(reason: str | None, indent: str) -> list[str]:
    """Format a reason as a list of one comment line; empty without a reason."""
    if not reason:
        return []
    return [f"{indent}# {reason}"]
