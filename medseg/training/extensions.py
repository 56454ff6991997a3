"""Objects of the extension points of a training run: loss, transforms, metrics, callbacks and loggers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from medseg.anatomy.disease import Disease, Fluid
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

Defaults = Callable[[type, Iterable[str], Iterable[str]], dict[str, Any]]
# Keys of a loss beside the arguments of its class.
LOSS_KEYS = ("output_weights", "factor", "target_form")
# Prefix of the keys of `augment` to the class of the effect, in the order of application; the rest
# of a key is a field of the class.
EFFECTS = {
    "window_shift": effects.WindowShift,
    "affine": effects.Affine,
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
        make = _bind("loss", key, node, config.trusted_targets, losses.default_arguments, LOSS_KEYS)
        form = node.get("target_form") or losses.find_target_form(make.func, make.keywords)
        terms.append(losses.Term(float(node.get("factor", 1.0)), _call(key, make), form))
    return _call(
        "loss",
        partial(
            losses.TrainingLoss, terms, config.loss.get("output_weights"), config.task.ignore_label
        ),
    )


def check_loss(config: TrainConfig) -> None:
    """Compute the loss of a configuration on a small sample, and name the arguments that it gets beside those of the configuration.

    Raises:
        UserError: As `make_loss`, and if it cannot be computed.
    """
    for key, node in _loss_nodes(config):
        make = _bind("loss", key, node, config.trusted_targets, losses.default_arguments, LOSS_KEYS)
        added = " ".join(
            f"{name}={value}".lower() for name, value in make.keywords.items() if name not in node
        )
        if added:
            say(
                f"{key}: {make.func.__name__} is called with {added}, because it gets logits and integer labels"
            )
    _call("loss", partial(losses.check_loss, make_loss(config), count_classes(config)))


def _loss_nodes(config: TrainConfig) -> list[tuple[str, dict[str, Any]]]:
    terms = config.loss.get("terms")
    return (
        [(f"loss.terms[{n}]", term) for n, term in enumerate(terms)]
        if terms
        else [("loss", config.loss)]
    )


def make_transforms(config: TrainConfig) -> transforms.Transforms | None:
    """Make the transforms of training samples; None where augmentation is off.

    Raises:
        UserError: If a transform cannot be made, cannot be applied, or mirrors the sides of the
            task.
    """
    augment = config.augment
    if not augment.enabled:
        return None
    task, is_coarse = make_task(config.task), config.stage.name is not StageName.fine
    has_sides = task.has_sides and not augment.allow_mirroring
    # A sample of the fine stage has the classes of its region.
    organ_values = task.organ_values if is_coarse else tuple(range(1, task.num_region_classes))
    made: list[Any] = []
    for n, node in enumerate(augment.transforms):
        if node == "effects":
            values = vars(augment) | {
                "window_hu": task.channels[0].window_hu,
                "organ_values": organ_values,
            }
            made += _call("augment", partial(make_effects, values))
            continue
        key = f"augment.transforms[{n}]"
        made.append(
            _call(
                key,
                _bind("transform", key, node, config.trusted_targets, transforms.default_arguments),
            )
        )
        check = partial(
            transforms.check_transform,
            has_sides=has_sides,
            is_coarse=is_coarse,
            num_channels=len(task.channels),
            has_coarse_channel=config.stage.coarse_channel,
        )
        _call(key, partial(check, made[-1]))
    return _call("augment.transforms", partial(transforms.Transforms, made))


def make_effects(values: Mapping[str, Any]) -> list[Any]:
    """Make the effects of the keys of `augment`."""
    return [
        cls(
            **{
                one.name: values.get(f"{word}_{one.name}", values.get(one.name))
                for one in dataclasses.fields(cls)
            }
        )
        for word, cls in EFFECTS.items()
    ]


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
    made = {}
    for name, node in nodes.items():
        key = f"metrics.{name}"
        defaults = partial(metrics.default_arguments, num_classes=num_classes)
        made[name] = metrics.CaseMetric(
            _call(key, _bind("metric", key, node, trusted, defaults)), num_classes
        )
        _call(key, partial(metrics.check_metric, made[name]))
    return made


def make_callbacks(config: TrainConfig) -> list[Callback]:
    """Make the callbacks of `callbacks`, in their order."""
    nodes = {f"callbacks.{name}": node for name, node in config.callbacks.items()}
    return [
        _call(key, _bind("callback", key, node, config.trusted_targets))
        for key, node in nodes.items()
    ]


def make_loggers(config: TrainConfig, start_step: int = 0) -> list[Logger]:
    """Make the loggers of the `logger` group.

    Args:
        config: Checked configuration.
        start_step: Step that the run resumes from; what an earlier attempt logged after it is
            removed.
    """
    from medseg.training.loggers import drop_repeated_steps

    # The group may hold references to the environment.
    group = cast(
        dict[str, Any], OmegaConf.to_container(OmegaConf.create(config.logger), resolve=True)
    )
    nodes = (
        {"logger": group}
        if TARGET in group
        else {f"logger.{name}": node for name, node in group.items()}
    )
    loggers = [
        _call(key, _bind("logger", key, node, config.trusted_targets))
        for key, node in nodes.items()
    ]
    for logger in loggers if start_step else ():
        drop_repeated_steps(logger, start_step)
    return loggers


def _no_defaults(_: type, __: Iterable[str], ___: Iterable[str]) -> dict[str, Any]:
    return {}


def _bind(
    point: str,
    key: str,
    node: dict[str, Any],
    trusted: Sequence[str],
    defaults: Defaults = _no_defaults,
    own_keys: Sequence[str] = (),
) -> partial[Any]:
    """Bind a class to the arguments of its node, and to `defaults` of the class, its known and its given arguments."""
    found = import_target(point, key, node, trusted)
    given = {name: value for name, value in node.items() if name not in (TARGET, *own_keys)}
    added = _call(key, partial(defaults, found, inspect.signature(found).parameters, given))
    return cast("partial[Any]", bind_arguments(point, key, found, given | added))


def _call(key: str, make: Callable[[], Any]) -> Any:
    """Call a function of a class that the configuration names; turn any exception into a `UserError` of one sentence."""
    try:
        return make()
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"{key}: a package is missing ({first_line(error)}); install it (for a preset, its file in conf/ has the command, "
            "such as pip install 'medseg[loggers]')"
        ) from error
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UserError(f"{key}: {kind}{first_line(error)}") from error
