"""Arguments of the classes at extension points: ranges of numbers, and kinds of values.

Many classes of other packages check their arguments late, or not at all: a negative weight of a
loss causes no error. Ranges are checked by name (`range_of`), before torch is imported; kinds of
values by the annotations of the class (`expected_kind`), after its import.
"""

import inspect
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

# Extension point to the intervals of its arguments by name. Each number of a list must lie in the
# interval; `(` and `)` exclude a bound. Some classes have other intervals, see `CLASS_RANGES`.
ARGUMENT_RANGES: dict[str, dict[str, str]] = {
    "optimizer": {
        "alpha": "[0, inf)",
        "betas": "[0, 1)",
        "beta2_decay": "(-inf, 0]",
        "d": "(0, inf)",
        "dampening": "[0, 1]",
        "eps": "[0, inf)",
        "history_size": "[1, inf)",
        "initial_accumulator_value": "[0, inf)",
        "lambd": "[0, inf)",
        "lr": "(0, inf)",
        "lr_decay": "[0, inf)",
        "max_iter": "[1, inf)",
        "momentum": "[0, 1)",
        "momentum_decay": "[0, inf)",
        "ns_steps": "[1, inf)",
        "rho": "[0, 1]",
        "t0": "[0, inf)",
        "trust_coefficient": "(0, inf)",
        "weight_decay": "[0, inf)",
    },
    "schedule": {
        "T_0": "[1, inf)",
        "T_max": "[1, inf)",
        "T_mult": "[1, inf)",
        "base_lr": "(0, inf)",
        "base_momentum": "[0, 1)",
        "cooldown": "[0, inf)",
        "div_factor": "[1, inf)",
        "end_factor": "[0, 1]",
        "epochs": "[1, inf)",
        "eps": "[0, inf)",
        "eta_min": "[0, inf)",
        "factor": "(0, 1]",
        "final_div_factor": "[1, inf)",
        "gamma": "(0, 1]",
        "max_lr": "(0, inf)",
        "max_momentum": "[0, 1)",
        "milestones": "[1, inf)",
        "min_lr": "[0, inf)",
        "patience": "[0, inf)",
        "pct_start": "[0, 1]",
        "power": "(0, inf)",
        "start_factor": "(0, 1]",
        "step_size": "[1, inf)",
        "step_size_down": "[1, inf)",
        "step_size_up": "[1, inf)",
        "steps_per_epoch": "[1, inf)",
        "threshold": "[0, inf)",
        "total_iters": "[1, inf)",
        "total_steps": "[1, inf)",
    },
    "loss": {
        "alpha": "[0, inf)",
        "batch_size": "[1, inf)",
        "beta": "[0, inf)",
        "data_range": "(0, inf)",
        "delta": "[0, 1]",
        "epsilon": "(0, inf)",
        "factor": "(0, inf)",
        "fake_3d_ratio": "(0, 1]",
        "gamma": "[0, inf)",
        "iter_": "[1, inf)",
        "k1": "(0, inf)",
        "k2": "(0, inf)",
        "kernel_sigma": "(0, inf)",
        "kernel_size": "[1, inf)",
        "label_smoothing": "[0, 1)",
        "lambda_ce": "[0, inf)",
        "lambda_dice": "[0, inf)",
        "lambda_focal": "[0, inf)",
        "lambda_gdl": "[0, inf)",
        "lambd": "[0, inf)",
        "margin": "[0, inf)",
        "num_bins": "[1, inf)",
        "sigma": "(0, inf)",
        "sigma_ratio": "(0, inf)",
        "smooth": "[0, inf)",
        "smooth_dr": "[0, inf)",
        "smooth_nr": "[0, inf)",
        "spatial_dims": "[1, 3]",
        "temperature": "(0, inf)",
        "weight": "[0, inf)",
        "win_size": "[1, inf)",
    },
}
# Class to the intervals of those arguments whose meaning differs from that in other classes.
CLASS_RANGES: dict[str, dict[str, str]] = {
    "torch.optim.RMSprop": {"alpha": "[0, 1)"},
    "torch.optim.ASGD": {"alpha": "[0, 1]"},
    "monai.losses.FocalLoss": {"alpha": "[0, 1]"},
    "monai.losses.SoftDiceclDiceLoss": {"alpha": "[0, 1]"},
    "torch.nn.HuberLoss": {"delta": "(0, inf)"},
    "torch.nn.CosineEmbeddingLoss": {"margin": "[-1, 1]"},
    "torch.optim.lr_scheduler.ExponentialLR": {"gamma": "(0, inf)"},
}
# Packages to whose classes the intervals apply. A class of another package may mean something else
# by the same name.
KNOWN_PACKAGES = ("medseg.", "monai.losses.", "pytorch_optimizer.", "torch.nn.", "torch.optim.")
# Type to its name in messages.
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def range_of(point: str, target: str, name: str) -> str:
    """Find the interval of an argument; empty where any value may be right.

    Args:
        point: Extension point, such as `loss`.
        target: Dotted name of the class.
        name: Name of the argument.

    Example:
        >>> range_of("optimizer", "torch.optim.SGD", "momentum")
        '[0, 1)'
    """
    if not target.startswith(KNOWN_PACKAGES):
        return ""
    class_ranges = CLASS_RANGES.get(target, {})
    point_ranges = ARGUMENT_RANGES.get(point, {})
    if name in class_ranges:
        return class_ranges[name]
    return point_ranges.get(name, "")


def expected_kind(signature: inspect.Signature, name: str, value: Any) -> str:
    """Describe the kind of value that an argument needs, if the given value does not fit.

    Args:
        signature: Signature of the class, with annotations that are evaluated where possible.
        name: Name of the argument.
        value: Value of plain types, as a configuration holds it; None fits everywhere.

    Returns:
        The kind in words, such as `a number`; empty where the value fits, or where the annotation
        does not decide.
    """
    hint = _hint_of(signature, name)
    # A whole float, such as YAML's `1e3`, also fits int; `convert` turns it into one.
    if value is None or _fits(value, hint) or _fits(_whole_to_int(value), hint):
        return ""
    # A dictionary transform of MONAI takes one text, such as `mode`, or a list with one for each of
    # its keys; some annotate the single text alone. A number, such as `prob`, is for all keys.
    if "keys" in signature.parameters and isinstance(value, list):
        are_texts = all(isinstance(item, str) and _fits(item, hint) for item in value)
        if value and are_texts:
            return ""
    return _describe(hint)


def convert(signature: inspect.Signature, name: str, value: Any) -> Any:
    """Convert whole floats to int where an argument needs int; other values stay as they are.

    YAML reads `1e3` as a float. A class without annotations may need int wherever its default is
    int: `range` takes no `10.0`.

    Args:
        signature: See `expected_kind`.
        name: Name of the argument.
        value: Value for which `expected_kind` is empty.
    """
    if value is None:
        return None
    if _fits(value, _hint_of(signature, name)) and not _has_only_int_default(signature, name):
        return value
    return _whole_to_int(value)


def _has_only_int_default(signature: inspect.Signature, name: str) -> bool:
    """Whether an argument has an int as default and no annotation."""
    parameter = signature.parameters.get(name)
    if parameter is None or _is_annotated(parameter):
        return False
    return type(parameter.default) is int  # False for a bool, unlike `isinstance`


def _whole_to_int(value: Any) -> Any:
    """Convert a whole float, or each one in a list, to int."""
    if isinstance(value, (list, tuple)):
        return list(map(_whole_to_int, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _hint_of(signature: inspect.Signature, name: str) -> Any:
    """Find the annotation of an argument; Any where the class takes it by `**kwargs`."""
    parameter = signature.parameters.get(name)
    if parameter is None:
        return Any
    if _is_annotated(parameter):
        return parameter.annotation
    return _hint_of_default(parameter.default)


def _is_annotated(parameter: inspect.Parameter) -> bool:
    """Whether an argument has an annotation that could be evaluated."""
    hint = parameter.annotation
    # An annotation that is still a text could not be evaluated.
    return hint is not inspect.Parameter.empty and not isinstance(hint, str)


def _hint_of_default(default: Any) -> Any:
    """Guess the annotation of an argument from its default: `bool`, `float | list` or `Any`."""
    if isinstance(default, bool):
        return bool
    if isinstance(default, (int, float)):
        # Many such arguments also take one number per axis or class.
        return float | list[Any]
    return Any


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value fits an annotation; True for annotations that cannot be decided."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in arguments)
    if origin is typing.Annotated:
        return _fits(value, arguments[0])
    if origin is typing.Literal:
        return value in arguments
    if hint in (int, float):
        # For Python, true and false are the numbers 1 and 0.
        if isinstance(value, bool):
            return False
        return isinstance(value, int) or (hint is float and isinstance(value, float))
    # The origin of `list[int]` is `list`.
    kind = origin or hint
    if isinstance(kind, type):
        return _is_of_class(value, kind, arguments)
    return True


def _is_of_class(value: Any, kind: type, arguments: tuple[Any, ...]) -> bool:
    """Whether a plain value can stand for an instance of a class, such as a list for a tuple.

    Args:
        value: Value of plain types.
        kind: The class, such as `list` for the annotation `list[int]`.
        arguments: Its types in brackets, as `int` of `list[int]`; may be empty.
    """
    if isinstance(value, str) and issubclass(kind, (Enum, os.PathLike)):
        return True
    # `Mapping[str, int]` is an iterable with types in brackets too; the next check would accept a
    # list for it.
    if issubclass(kind, Mapping):
        return isinstance(value, kind)
    if arguments and issubclass(kind, Iterable):
        if not isinstance(value, (list, tuple)):
            return False
        for item, hint in zip(value, _item_hints(kind, arguments, len(value)), strict=False):
            # Annotations often forget nested lists, such as one stride per axis and level.
            is_nested = isinstance(item, (list, tuple))
            if not is_nested and not _fits(item, hint):
                return False
        return True
    if issubclass(kind, tuple):
        return isinstance(value, (list, tuple))
    return isinstance(value, kind)


def _item_hints(kind: type, arguments: tuple[Any, ...], num_items: int) -> Sequence[Any]:
    """List the annotations of the items of a list.

    Args:
        kind: The annotated class of the list.
        arguments: Its types in brackets, at least one.
        num_items: Length of the list.

    Returns:
        The annotation of each item. For `tuple[int, float]` these are always two: the length of the
        list is left to the class, which often takes other lengths than it annotates.
    """
    is_by_position = issubclass(kind, tuple) and arguments[-1] is not Ellipsis
    return arguments if is_by_position else arguments[:1] * num_items


def _describe(hint: Any) -> str:
    """Describe what an annotation takes, in words."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [_describe(part) for part in arguments if part is not types.NoneType]
        # A dictionary drops repetitions and keeps the order.
        return " or ".join(dict.fromkeys(parts))
    if origin is typing.Annotated:
        return _describe(arguments[0])
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    kind = origin or hint
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if not isinstance(kind, type):
        return getattr(kind, "__name__", str(kind))
    if issubclass(kind, Enum):
        return " or ".join(str(member.value) for member in kind)
    if issubclass(kind, Mapping):
        return "a mapping"
    if issubclass(kind, Iterable) and arguments:
        return "a list"
    return kind.__name__
