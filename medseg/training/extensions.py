"""Objects of the extension points of a run: loss, transforms, metrics, callbacks, loggers."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from medseg.anatomy.disease import Disease, Fluid, Missing
from medseg.console import say
from medseg.data import augment as effects
from medseg.data import transforms
from medseg.data.options import StageName
from medseg.errors import UserError, first_line
from medseg.losses import sample_losses as losses
from medseg.metrics import case_metric as metrics
from medseg.targets import TARGET, bind_arguments, import_target
from medseg.task_options import make_task
from medseg.training.network import count_classes
from medseg.training.options import TrainConfig

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger

# Called with a class, the names of its parameters and the names of the arguments that the user
# gives; returns the arguments that are given in addition.
DefaultArguments = Callable[[type, Iterable[str], Iterable[str]], dict[str, Any]]
# Keys of the node of a loss that are no arguments of its class.
LOSS_KEYS = ("output_weights", "factor", "target_form")
# Effects of the augmentation in the order of application, each with the prefix of its keys in the
# group `augment`: `noise_sd` is the field `sd` of `Noise`.
EFFECTS = {
    "window_shift": effects.WindowShift,
    "affine": effects.Affine,
    "missing": Missing,
    "disease": Disease,
    "fluid": Fluid,
    "flip": effects.Flip,
    "resolution": effects.Resolution,
    "noise": effects.Noise,
    "contrast": effects.Contrast,
    "brightness": effects.Brightness,
    "gamma": effects.Gamma,
    "truncate": effects.Truncate,
    "narrow": effects.Narrow,
    "circle": effects.Circle,
}


def make_loss(config: TrainConfig) -> losses.TrainingLoss:
    """Make the loss of a configuration: one class with its arguments, or a sum of several.

    Raises:
        UserError: If a class refuses its arguments, or cannot leave out the ignored voxels.
    """
    terms = []
    for key, node in _loss_nodes(config):
        bound_class = _bind_loss(key, node, config)
        target_form = node.get("target_form")
        if not target_form:
            target_form = losses.find_target_form(bound_class.func, bound_class.keywords)
        if target_form not in losses.TARGET_FORMS:
            # The value comes from the key or from the attribute of the class.
            choices = ", ".join(losses.TARGET_FORMS)
            raise UserError(f"{key}.target_form: choose one of {choices}, not {target_form!r}")
        factor = node.get("factor", 1.0)
        if not isinstance(factor, (int, float)):
            raise UserError(f"{key}.factor: expected a number, but got {factor!r}")
        terms.append(losses.Term(float(factor), _call(key, bound_class), target_form))
    output_weights = config.loss.get("output_weights")
    ignore_label = config.task.ignore_label
    return _call("loss", partial(losses.TrainingLoss, terms, output_weights, ignore_label))


def check_loss(config: TrainConfig) -> None:
    """Compute the loss of a configuration on a small sample.

    Prints the arguments that it gets in addition to those of the configuration.

    Raises:
        UserError: As `make_loss`, and if it cannot be computed.
    """
    for key, node in _loss_nodes(config):
        bound_class = _bind_loss(key, node, config)
        added_arguments = []
        for name, value in bound_class.keywords.items():
            if name not in node:
                # JSON writes true and false as the command line does.
                added_arguments.append(f"{name}={json.dumps(value)}")
        if added_arguments:
            say(
                f"{key}: {bound_class.func.__name__} is called with {' '.join(added_arguments)}, "
                "because it gets logits and integer labels"
            )
    _call("loss", partial(losses.check_loss, make_loss(config), count_classes(config)))


def _loss_nodes(config: TrainConfig) -> list[tuple[str, dict[str, Any]]]:
    """List key and node of each loss: the terms of a sum, or the only one."""
    terms = config.loss.get("terms")
    if terms:
        return [(f"loss.terms[{n}]", term) for n, term in enumerate(terms)]
    return [("loss", config.loss)]


def _bind_loss(key: str, node: dict[str, Any], config: TrainConfig) -> partial[Any]:
    """Bind the class of a loss to its arguments, see `_bind`."""
    defaults = losses.default_arguments
    return _bind("loss", key, node, config.trusted_targets, defaults, LOSS_KEYS)


def make_transforms(config: TrainConfig) -> transforms.Transforms | None:
    """Make the transforms of training samples; None where augmentation is off.

    Raises:
        UserError: If a transform cannot be made, cannot be applied, or mirrors the sides of the
            task.
    """
    augment = config.augment
    if not augment.enabled:
        return None
    task = make_task(config.task)
    is_fine = config.stage.name is StageName.fine
    organ_values = task.organ_values
    if is_fine:
        # A sample of the fine stage has the classes of its region, all of which are organs.
        organ_values = tuple(range(1, 1 + task.num_region_labels))
    check_transform = partial(
        transforms.check_transform,
        has_sides=task.has_sides and not augment.allow_mirroring,
        is_coarse=config.stage.sees_whole_scans,  # of a single stage too
        num_channels=len(task.channels),
        has_coarse_channel=config.stage.coarse_channel,
    )
    unbounded_channels = tuple(
        number for number, channel in enumerate(task.channels) if channel.normalise == "zscore"
    )
    all_transforms: list[Any] = []
    for index, node in enumerate(augment.transforms):
        # The word "effects" stands for all effects that the keys of `augment` set.
        if node == "effects":
            # Fields of the effects that the task sets, not a key. Effects in HU change the first
            # channel, so they get its window.
            task_values = {
                "window_hu": task.channels[0].window_hu,
                "organ_values": organ_values,
                "unbounded_channels": unbounded_channels,
            }
            values = vars(augment) | task_values
            all_transforms += _call("augment", partial(make_effects, values))
            continue
        key = f"augment.transforms[{index}]"
        defaults = transforms.default_arguments
        bound_class = _bind("transform", key, node, config.trusted_targets, defaults)
        transform = _call(key, bound_class)
        _call(key, partial(check_transform, transform))
        all_transforms.append(transform)
    return _call("augment.transforms", partial(transforms.Transforms, all_transforms))


def make_effects(values: Mapping[str, Any]) -> list[Any]:
    """Make the effects of the augmentation, in the order of EFFECTS.

    Args:
        values: Values of the keys of `augment`, and those that the task gives.
    """
    made_effects = []
    for prefix, effect_class in EFFECTS.items():
        arguments = {}
        for field in dataclasses.fields(effect_class):
            # A key without the prefix is shared by several effects. A field without any key keeps
            # its default.
            for key in (f"{prefix}_{field.name}", field.name):
                if key in values:
                    arguments[field.name] = values[key]
                    break
        made_effects.append(effect_class(**arguments))
    return made_effects


def make_metrics(
    nodes: Mapping[str, Any], num_classes: int, trusted: Sequence[str] = ()
) -> dict[str, metrics.CaseMetric]:
    """Make metrics of cases by name.

    Args:
        nodes: The `metrics` of a configuration.
        num_classes: Classes with the background.
        trusted: Prefixes of `trusted_targets`.

    Raises:
        UserError: If one cannot be made, or cannot score a case.
    """
    metrics_by_name = {}
    for name, node in nodes.items():
        key = f"metrics.{name}"
        defaults = partial(metrics.default_arguments, num_classes=num_classes)
        metric = _call(key, _bind("metric", key, node, trusted, defaults))
        case_metric = metrics.CaseMetric(metric, num_classes)
        _call(key, partial(metrics.check_metric, case_metric))
        metrics_by_name[name] = case_metric
    return metrics_by_name


def make_callbacks(config: TrainConfig) -> list[Callback]:
    """Make the callbacks of `callbacks`, in their order."""
    callbacks = []
    for name, node in config.callbacks.items():
        key = f"callbacks.{name}"
        bound_class = _bind("callback", key, node, config.trusted_targets)
        callbacks.append(_call(key, bound_class))
    return callbacks


def make_loggers(config: TrainConfig, start_step: int = 0) -> list[Logger]:
    """Make the loggers of the `logger` group.

    Args:
        config: Checked configuration.
        start_step: Step that the run resumes from; what an earlier attempt logged after it is
            removed.
    """
    from medseg.training.loggers import drop_repeated_steps

    # The group may hold interpolations, such as of environment variables.
    resolved = OmegaConf.to_container(OmegaConf.create(config.logger), resolve=True)
    group = cast(dict[str, Any], resolved)
    if TARGET in group:
        nodes = {"logger": group}
    else:
        nodes = {f"logger.{name}": node for name, node in group.items()}
    loggers = []
    for key, node in nodes.items():
        bound_class = _bind("logger", key, node, config.trusted_targets)
        loggers.append(_call(key, bound_class))
    # Steps are dropped only now that all loggers could be made, because this changes files.
    if start_step:
        for logger in loggers:
            drop_repeated_steps(logger, start_step)
    return loggers


def _no_defaults(_: type, __: Iterable[str], ___: Iterable[str]) -> dict[str, Any]:
    return {}


def _bind(
    point: str,
    key: str,
    node: dict[str, Any],
    trusted: Sequence[str],
    defaults: DefaultArguments = _no_defaults,
    own_keys: Sequence[str] = (),
) -> partial[Any]:
    """Bind a class to the arguments of its node, and to those that `defaults` adds.

    Args:
        point: Name of the extension point, see `medseg.targets`.
        key: Key of the node, for messages.
        node: The class (`_target_`) with its arguments.
        trusted: Prefixes of `trusted_targets`.
        defaults: Finds the arguments that are added.
        own_keys: Keys of the node that are no arguments of the class.

    Returns:
        The class with its arguments, not yet called.

    Raises:
        UserError: If the class is not trusted, or does not take these arguments.
    """
    target = import_target(point, key, node, trusted)
    skipped_keys = (TARGET, *own_keys)
    arguments = {name: value for name, value in node.items() if name not in skipped_keys}
    parameters = inspect.signature(target).parameters
    added = _call(key, partial(defaults, target, parameters, arguments))
    return cast("partial[Any]", bind_arguments(point, key, target, arguments | added))


def _call(key: str, make: Callable[[], Any]) -> Any:
    """Call a function that runs code of a class that the configuration names.

    Args:
        key: Key that names the class, for messages.
        make: Function without arguments; its result is returned.

    Raises:
        UserError: If the function raises any exception.
    """
    try:
        return make()
    except UserError:
        raise
    except ModuleNotFoundError as error:
        cure = "install it"
        if key.partition(".")[0] == "logger":
            cure += (
                " (for a preset, its file in conf/ has the command, such as pip install "
                "'medseg[loggers]')"
            )
        raise UserError(f"{key}: a package is missing ({first_line(error)}); {cure}") from error
    except Exception as error:
        # The text of a ValueError is a sentence; that of others, such as a KeyError, says little.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"{key}: {kind}{first_line(error)}") from error
