"""Keys of a training that starts from a model folder of nnU-Net: its network and preprocessing.

The keys become arguments that precede those of the user, whose values win. Only another network is
refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from omegaconf import DictConfig, OmegaConf

from medseg.config.overrides import text_of
from medseg.config.schema import RecipeConfig
from medseg.console import say
from medseg.errors import UserError

if TYPE_CHECKING:
    from medseg.nnunet.plan import ChannelPlan, NnunetPlan

KEY = "init_from"
NETWORK = "medseg.models.plan_unet.PlanUNet"
# Groups whose arguments, if the user gives any, can state a key of `PLANNED`.
GROUPS = ("task", "stage", "spacing", "inference", "experiment", "+imported")
# Those among them whose values decide what a plan sets; of the others the names suffice.
DECIDING_GROUPS = ("task", "experiment", "+imported")
# Kinds of Hydra's sweeps whose values are listed.
LISTED_SWEEPS = (
    ValueType.CHOICE_SWEEP,
    ValueType.SIMPLE_CHOICE_SWEEP,
    ValueType.RANGE_SWEEP,
)
# Keys of the normalisation.
CHANNEL_KEYS = frozenset({"task.channels", "task.window_hu"})
# Keys that a plan sets unless the command line or an experiment states them.
PLANNED = frozenset({"spacing", "stage.patch_size", "inference", *CHANNEL_KEYS})
# Normalisation in a plan by statistics of each case, to (ours, scale, shift). A value of the plan
# is scale * (our value) + shift.
# `RescaleTo01Normalization` maps the smallest and the largest value of an image to 0 and 1, which
# single outliers may decide. Ours maps two percentiles to -1 and 1.
BY_CASE = {
    "ZScoreNormalization": ("zscore", 1.0, 0.0),
    "RescaleTo01Normalization": ("percentile", 0.5, 0.5),
}
CT = "CTNormalization"
# Orientation of a plan, to whether its network sees the axes z, y and x of a scan in LPS reversed.
FLIPS = {
    "stored": [False, False, False],
    "LPS": [False, False, False],
    "RAS": [False, True, True],
}
# Composes arguments to a configuration; also returns the groups of files, see `commands.entry`.
Compose = Callable[[Sequence[str]], tuple[DictConfig, list[str]]]


def with_plan(arguments: Sequence[str], schema: type, compose: Compose) -> list[str]:
    """Add the keys of the plan of a model folder that `init_from` names, and tell the user.

    Args:
        arguments: Command line, with quoted paths.
        schema: Root of the configuration; one without `init_from` leaves the arguments as they are.
        compose: Composes arguments, see `medseg.commands.entry.compose`.

    Returns:
        The arguments of the plan, if there is one, and then those of the command line.

    Raises:
        UserError: If the folder cannot be used, a channel has no normalisation of ours, or the
            command trains several stages.
    """
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        values[key] = value
    path_text = values.get(KEY, "").strip("'\"")
    has_key = KEY in {field.name for field in fields(schema)}
    # A run that is resumed has its configuration already. `auto` looks for a run of the same
    # configuration, so it needs the plan.
    is_resumed = values.get("resume", "null") not in ("null", "auto")
    # An empty path is none: `Path("")` would be the working folder, which may be a model folder.
    if not has_key or is_resumed or not path_text:
        return list(arguments)
    path = Path(path_text)
    # A model folder of nnU-Net is a folder or the zip of its export; other files are weights.
    if not path.is_dir() and path.suffix.lower() != ".zip":
        return list(arguments)
    # Imported only here: it loads torch, which other commands must not wait for.
    from medseg.nnunet.folder import is_start, open_fold

    if not is_start(path):
        return list(arguments)
    if issubclass(schema, RecipeConfig):
        raise UserError(
            f"{KEY}={path}: the experiments of this command name their own networks; train the "
            "folds of a model of nnU-Net with medseg train -m data.fold=0,1,2,3,4"
        )
    plan = open_fold(path, KEY).plan
    if "model" in values:
        raise UserError(
            f"{KEY}={path}: the network is that of its plan, but model={values['model']} chooses "
            "another one; leave one of them out"
        )
    # The network of a plan segments whole scans, which is the stage `single`.
    stage_arguments = []
    if not {"stage", "experiment"} & values.keys():
        stage_arguments = ["stage=single"]
    deciding = [*stage_arguments, *_arguments_of(GROUPS, arguments)]
    choices = []
    for job in _jobs(deciding):
        choices.append(_choose(plan, job, compose))
    first = choices[0]
    if any(choice.arguments != first.arguments for choice in choices):
        raise UserError(
            f"{KEY}={path}: the plan would set other keys in some jobs of this multirun; start one "
            "command for each value of task and experiment"
        )
    _tell(path, plan, first)
    planned = [*stage_arguments, *first.arguments]
    # Of two arguments of a key, Hydra takes the later one: the user's.
    return [*planned, *arguments]


class _Choice(NamedTuple):
    """What a plan decides.

    Attributes:
        arguments: Arguments for the network, the grid and the channels.
        composed: Configuration of the user's arguments.
        channels: Items of `task.channels`.
        stated: Keys among `PLANNED` that the user states.
    """

    arguments: list[str]
    composed: DictConfig
    channels: list[dict[str, Any]]
    stated: set[str]


def _choose(plan: NnunetPlan, deciding: Sequence[str], compose: Compose) -> _Choice:
    """Choose the arguments of a plan for one job.

    Args:
        plan: The plan.
        deciding: The user's arguments that set a key of `GROUPS`.
        compose: See `with_plan`.
    """
    composed, _ = compose(deciding)
    stated = _stated(deciding, composed, compose)
    channels, scales_and_shifts = _channels_of(plan, composed, stated)
    arguments = [
        *_network_arguments(plan, scales_and_shifts),
        *_grid_arguments(plan, stated),
        *_channel_arguments(channels, stated),
    ]
    return _Choice(arguments, composed, channels, stated)


def _jobs(deciding: Sequence[str]) -> list[list[str]]:
    """List the deciding arguments of the jobs of a multirun; of another command those of its run.

    Only the values of a task or an experiment decide what the plan sets. A sweep over another key
    counts by its first value, because only its name matters. Hydra refuses a sweep without a
    multirun later.

    Args:
        deciding: The user's arguments that set a key of `GROUPS`.
    """
    values_of_arguments = []
    for argument in deciding:
        values = _swept(argument)
        if not _arguments_of(DECIDING_GROUPS, [argument]):
            values = values[:1]
        values_of_arguments.append(values)
    return [list(job) for job in itertools.product(*values_of_arguments)]


def _swept(argument: str) -> list[str]:
    """List an argument with each value of its sweep; an argument without a sweep alone."""
    override = OverridesParser.create().parse_override(argument)
    # The values of other sweeps, such as `interval(0,1)`, are not known here.
    if override.value_type not in LISTED_SWEEPS:
        return [argument]
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _arguments_of(keys: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Select the arguments that set one of the keys, or a key below one."""
    chosen = []
    for argument in arguments:
        name = argument.partition("=")[0]
        if any(name == key or name.startswith(f"{key}.") for key in keys):
            chosen.append(argument)
    return chosen


def _stated(arguments: Sequence[str], composed: DictConfig, compose: Compose) -> set[str]:
    """Find the keys among `PLANNED` that the command line or its experiment states.

    Args:
        arguments: The arguments that set a key of `GROUPS`.
        composed: The configuration that they compose.
        compose: See `with_plan`.
    """
    stated = {key for key in PLANNED if _arguments_of([key], arguments)}
    others = [argument for argument in arguments if not argument.startswith("experiment=")]
    has_experiment = len(others) < len(arguments)
    if not has_experiment:
        return stated
    # An experiment states the keys whose values it changes.
    without_experiment, _ = compose(others)
    for key in PLANNED:
        if OmegaConf.select(composed, key) != OmegaConf.select(without_experiment, key):
            stated.add(key)
    return stated


def _channels_of(
    plan: NnunetPlan, composed: DictConfig, stated: set[str]
) -> tuple[list[dict[str, Any]], list[tuple[float, float]]]:
    """Choose the normalisation of each channel, and the scale and shift from its values.

    Returns:
        Items of `task.channels`; and for each channel the scale and shift from our values to those
        that the plan would give. A task with another number of channels than the plan keeps its own
        normalisation without scale and shift: the first layer of its network is new.

    Raises:
        UserError: If a channel has no normalisation of ours.
    """
    task = OmegaConf.to_container(composed.task)
    assert isinstance(task, dict)
    channels = task["channels"] or [{"modality": "ct", "window_hu": task["window_hu"]}]
    if len(channels) != len(plan.channels):
        return channels, []
    if not stated & CHANNEL_KEYS:
        channels = [_normalisation(channel) for channel in plan.channels]
    scales_and_shifts = []
    for ours, theirs in zip(channels, plan.channels, strict=True):
        scales_and_shifts.append(_scale_and_shift(ours, theirs))
    return channels, scales_and_shifts


def _normalisation(channel: ChannelPlan) -> dict[str, Any]:
    """Find our normalisation that is closest to that of a plan, as an item of `task.channels`.

    Raises:
        UserError: If there is none.
    """
    if channel.scheme == CT:
        # The window to which nnU-Net clips a CT before it subtracts the mean.
        intensities = channel.intensities
        window_hu = [intensities["percentile_00_5"], intensities["percentile_99_5"]]
        return {"modality": "ct", "window_hu": window_hu}
    if channel.scheme not in BY_CASE:
        raise UserError(
            f"{KEY}: the channel {channel.name} is not normalised ({channel.scheme}), for which "
            "medseg has no counterpart; give task.channels=[{modality: mr, normalise: zscore}] or "
            "another normalisation"
        )
    return {"modality": "mr", "normalise": BY_CASE[channel.scheme][0]}


def _scale_and_shift(ours: Mapping[str, Any], theirs: ChannelPlan) -> tuple[float, float]:
    """Scale and shift from our values of a channel to those that the network was trained with.

    A window [low, high] is mapped to [-1, 1] here: HU = middle + half * ours. The network was
    trained on (HU - mean) / std, which is half / std * ours + (middle - mean) / std. So the network
    sees the same HU whichever window the user chooses.

    Args:
        ours: Item of `task.channels`.
        theirs: The channel of the plan.
    """
    window_hu = ours.get("window_hu")
    if theirs.scheme == CT and window_hu:
        low_hu, high_hu = window_hu
        middle_hu = (low_hu + high_hu) / 2
        half_hu = (high_hu - low_hu) / 2
        mean_hu = theirs.intensities["mean"]
        std_hu = theirs.intensities["std"]
        return half_hu / std_hu, (middle_hu - mean_hu) / std_hu
    normalise, scale, shift = BY_CASE.get(theirs.scheme, ("", 1.0, 0.0))
    if ours.get("normalise") == normalise:
        return scale, shift
    # The user has chosen a normalisation that the network was not trained with.
    return 1.0, 0.0


def _network_arguments(
    plan: NnunetPlan, scales_and_shifts: Sequence[tuple[float, float]]
) -> list[str]:
    """Arguments of `model`: the network of a plan, see `PlanUNet`."""
    arguments = {
        "_target_": NETWORK,
        "unet": plan.network["class"],
        "arguments": dict(plan.network["arguments"]),
        "transpose": list(plan.transpose),
        "flips": FLIPS[plan.orientation],
        "scale": [scale for scale, _ in scales_and_shifts],
        "shift": [shift for _, shift in scales_and_shifts],
    }
    return [f"model.{name}={text_of(value)}" for name, value in arguments.items()]


def _grid_arguments(plan: NnunetPlan, stated: set[str]) -> list[str]:
    """Arguments of spacing, patches and tiles."""
    arguments = []
    if "spacing" not in stated:
        resampling = _resampling_of(plan)
        if resampling is None:
            arguments.append("spacing=native")
        else:
            spacing_mm = text_of(_in_stored_order(plan.spacing_mm, plan))
            arguments += [
                "spacing=anisotropic",  # a target spacing for each axis
                f"spacing.target_spacing_mm={spacing_mm}",
                f"spacing.resampling={resampling}",
            ]
    if "stage.patch_size" not in stated:
        patch_size = text_of(_in_stored_order(plan.patch_size, plan))
        arguments.append(f"stage.patch_size={patch_size}")
    if "inference" not in stated:
        arguments.append("inference=tiles")
    return arguments


def _resampling_of(plan: NnunetPlan) -> str | None:
    """Our filter that is closest to that of the plan for images; None if it does not resample."""
    from medseg.nnunet.plan import NONE, SPLINE

    if plan.image_resampling.function == NONE:
        return None
    # A spline of order 1 is linear.
    if plan.image_resampling.function == SPLINE and plan.image_resampling.order > 1:
        return "cubic"
    return "linear"


def _in_stored_order(values: Sequence[Any], plan: NnunetPlan) -> list[Any]:
    """Reorder values of a plan, one for each transposed axis, to the axes z, y, x of a scan."""
    # Axis a of the plan is the stored axis `transpose[a]`.
    return [values[plan.transpose.index(axis)] for axis in range(3)]


def _channel_arguments(channels: Sequence[dict[str, Any]], stated: set[str]) -> list[str]:
    """Arguments of the channels; none where the user states them."""
    if stated & CHANNEL_KEYS:
        return []
    return [f"task.channels={text_of(list(channels))}", "task.window_hu=null"]


def _tell(path: Path, plan: NnunetPlan, choice: _Choice) -> None:
    """Tell what the plan decides, and what it leaves to the user."""
    _, composed, channels, stated = choice
    parts = [f"the network ({plan.network['class']})"]
    if "spacing" not in stated:
        spacing_mm = "×".join(f"{mm:g}" for mm in _in_stored_order(plan.spacing_mm, plan))
        parts.append(f"spacing {spacing_mm} mm ({_resampling_of(plan) or 'not resampled'})")
    if "stage.patch_size" not in stated:
        patch_size = _in_stored_order(plan.patch_size, plan)
        parts.append(f"patch {'×'.join(map(str, patch_size))}")
    has_own_channels = bool(stated & CHANNEL_KEYS)
    if not has_own_channels and len(channels) == len(plan.channels):
        normalisations = [
            str(channel.get("window_hu") or channel["normalise"]) for channel in channels
        ]
        parts.append(f"normalisation {', '.join(normalisations)}")
    say(
        f"{KEY}={path}: by its plan {plan.configuration} of {plan.dataset_name}: {', '.join(parts)}"
    )
    if plan.orientation == "stored":
        say(
            f"{KEY}: nnU-Net saw its scans as they were stored, which medseg takes for the usual "
            "storage of CT (LPS)"
        )
    if len(channels) != len(plan.channels):
        say(
            f"{KEY}: the task {composed.task.name} has {len(channels)} channels and the plan "
            f"{len(plan.channels)}: they are normalised as the task says"
        )
    if any(channel.is_masked for channel in plan.channels) and not has_own_channels:
        say(
            f"{KEY}: the plan computes z-scores inside the non-zero voxels and leaves zeros at 0, "
            "medseg shifts them with the others"
        )
