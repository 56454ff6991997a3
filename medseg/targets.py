"""Extension points: configuration nodes that name a class by its `_target_`, with arguments.

A node is `{_target_: dotted.Class, argument: value, …}`. All extension points use these functions:

* `ExtensionNode` is the node while Hydra composes. A `_target_` in a later file or on the command
  line replaces the node, so only the keys written beside it are passed; keys need no `+`.
  `EXTENSION_KEYS` lists the keys of the configuration that are such nodes.
* `check_target` compares the name with the white list of the extension point, without importing
  anything. The check of a configuration (`medseg.config.check`) calls it for each node of
  `list_nodes`.
* `bind_target` checks the name again, imports the class and binds the arguments to its signature.
  It does not build the object. `import_target` and `bind_arguments` are its two halves, for
  builders that add arguments of their own (channels, one-hot).

`trusted_targets` are prefixes beyond the white list. They come from the command line or from the
user's own configuration files, never from a checkpoint or a run folder: code that reads such a file
passes the prefixes of the current command.

`medseg.training.check` builds every object of a run once before data is read: networks on the meta
device, optimisers and schedules on a small convolution. To add an extension point, add its row to
`EXTENSION_POINTS`, its key to `EXTENSION_KEYS` if the node is a group of `train`, and its object to
`medseg.training.check`.
"""

import difflib
import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Self

from omegaconf import DictConfig

from medseg.errors import UserError
from medseg.target_arguments import convert, expected_kind

TARGET = "_target_"


class ExtensionPoint(NamedTuple):
    """What a configuration may name at an extension point.

    Attributes:
        prefixes: White list. A prefix ends with a dot and admits the public names below it.
        base: Class that a named class must inherit from; None = any class.
        is_open: Whether `**kwargs` of a class may take names that its signature does not list.
    """

    prefixes: tuple[str, ...]
    base: str | None = None
    is_open: bool = False


EXTENSION_POINTS = {
    "model": ExtensionPoint(
        ("medseg.models.", "monai.networks.nets.", "torch.nn."), "torch.nn.Module"
    ),
    "loss": ExtensionPoint(("medseg.losses.", "monai.losses.", "torch.nn."), "torch.nn.Module"),
    "transform": ExtensionPoint(
        ("medseg.data.augment.", "medseg.data.transforms.", "monai.transforms."), is_open=True
    ),
    "metric": ExtensionPoint(("monai.metrics.", "torchmetrics."), is_open=True),
    "callback": ExtensionPoint(
        ("lightning.pytorch.callbacks.",), "lightning.pytorch.Callback", is_open=True
    ),
    "logger": ExtensionPoint(
        ("lightning.pytorch.loggers.",), "lightning.pytorch.loggers.Logger", is_open=True
    ),
    "optimizer": ExtensionPoint(("torch.optim.", "pytorch_optimizer."), "torch.optim.Optimizer"),
    "schedule": ExtensionPoint(
        ("torch.optim.lr_scheduler.",), "torch.optim.lr_scheduler.LRScheduler"
    ),
}
# Keys of the configuration of `train` that are one node each, named like their extension point.
EXTENSION_KEYS = ("model", "loss", "optimizer", "schedule", "logger")
# Keys that hold several nodes, each under a name, and their extension point. `logger` holds either
# one node or several.
EXTENSION_MAPS = {"metrics": "metric", "callbacks": "callback"}
# Top-level package to the extra of medseg that installs it.
EXTRAS = {"pytorch_optimizer": "optimizers"}


class ExtensionNode(DictConfig):
    """Node of an extension point while Hydra composes.

    A `_target_` that is merged or set replaces the whole node. Hydra merges the files of a
    configuration in order and then sets the keys of the command line one by one.
    """

    def __init__(self) -> None:
        super().__init__({}, flags={"struct": False})  # keys of any class, without `+`

    def _merge_with(self, *others: Any) -> None:
        for other in others:
            if other is not None and TARGET in other:
                self._clear()
            super()._merge_with(other)

    def __setattr__(self, key: str, value: Any) -> None:
        if key == TARGET:
            self._clear()
        super().__setattr__(key, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # OmegaConf copies a subclass to a plain DictConfig. An ordinary assignment to
        # `__class__` would set a key of the configuration.
        copied = super().__deepcopy__(memo)
        object.__setattr__(copied, "__class__", type(self))
        return typing.cast(Self, copied)

    def _clear(self) -> None:
        for key in list(self):
            del self[key]


def targets_first(arguments: Sequence[str]) -> list[str]:
    """Move `<node>._target_=…` before the other arguments of a command line.

    Hydra applies arguments in order, and a `_target_` empties its node: after the arguments of the
    node, it would drop them.

    Example:
        >>> targets_first(["model.width=8", "seed=1", "model._target_=a.B"])
        ['model._target_=a.B', 'model.width=8', 'seed=1']
    """
    targets = [argument for argument in arguments if _sets_target(argument)]
    others = [argument for argument in arguments if not _sets_target(argument)]
    return targets + others


def _sets_target(argument: str) -> bool:
    """Whether an argument `key=value` names the class of a node."""
    key = argument.partition("=")[0]
    return key.endswith(f".{TARGET}")


def list_nodes(values: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """List all nodes of a configuration of `train`.

    Args:
        values: The configuration in plain values; keys that it lacks have no nodes.

    Yields:
        Extension point, key of the node for messages, and the node.

    Raises:
        UserError: If a key that holds nodes holds something else.
    """
    for point in EXTENSION_KEYS:
        node = _value_at(values, point, dict)
        if TARGET in node:
            yield point, point, node
    for key, point in {**EXTENSION_MAPS, "logger": "logger"}.items():
        nodes = _value_at(values, key, dict)
        if TARGET in nodes:  # a single logger, listed above
            continue
        for name, node in nodes.items():
            yield point, f"{key}.{name}", node
    for number, node in enumerate(_value_at(values, "loss.terms", list)):
        yield "loss", f"loss.terms[{number}]", node
    for number, node in enumerate(_value_at(values, "augment.transforms", list)):
        # The word `effects` stands for the transforms that the other keys of `augment` describe.
        if node != "effects":
            yield "transform", f"augment.transforms[{number}]", node


def _value_at(
    values: dict[str, Any], key: str, kind: type[dict[str, Any]] | type[list[Any]]
) -> Any:
    """Find the dictionary or list at a dotted key; an empty one where it is absent or null.

    Raises:
        UserError: If the value is of another kind.
    """
    group, _, name = key.rpartition(".")
    parent = values
    if group:
        parent = _value_at(values, group, dict)
    value = parent.get(name)
    if value is not None and not isinstance(value, kind):
        expected = "keys with their values are"
        if kind is list:
            expected = "a list of classes with their arguments is"
        raise UserError(f"{key}: {expected} needed, but got {value!r}")
    return value or kind()


def check_target(point: str, key: str, node: dict[str, Any], trusted: Iterable[str] = ()) -> None:
    """Refuse a node whose class is neither on the white list nor trusted. Nothing is imported.

    Args:
        point: Key of `EXTENSION_POINTS`.
        key: Where the node stands, for messages.
        node: `_target_` and arguments.
        trusted: Prefixes of `trusted_targets`.

    Raises:
        UserError: With the value and the cure.
    """
    target = node.get(TARGET) if isinstance(node, dict) else None
    if not isinstance(target, str):
        raise UserError(f"{key}.{TARGET}: the name of a class is needed, but got {target!r}")
    prefixes = EXTENSION_POINTS[point].prefixes
    # The added dot keeps the prefix `my_package` from admitting `my_package_of_somebody`.
    trusted_prefixes = [f"{prefix.removesuffix('.')}." for prefix in trusted if prefix]
    is_listed = target.startswith((*prefixes, *trusted_prefixes))
    white_list = ", ".join(f"{prefix}*" for prefix in prefixes)
    refusal = f"{key}.{TARGET}: {target} is not on the white list ({white_list})"
    advice = f"add trusted_targets=[{target.partition('.')[0]}.]"
    if not _is_public(target):
        raise UserError(
            f"{refusal}, and no public class either, so it is refused even if you {advice}; give a "
            "dotted name without parts that begin with an underscore"
        )
    if not is_listed:
        raise UserError(f"{refusal}; if you trust its code, {advice}")
    for name, value in node.items():
        if isinstance(value, dict) and TARGET in value:
            raise UserError(
                f"{key}.{name}.{TARGET}: nested targets are not allowed, give plain values"
            )


def _is_public(target: str) -> bool:
    """Whether a text is a dotted name of a class in a module, without private parts."""
    words = target.split(".")
    if len(words) < 2:
        return False
    return all(word.isidentifier() and not word.startswith("_") for word in words)


def bind_target(
    point: str, key: str, node: dict[str, Any], *leading: Any, trusted: Iterable[str] = ()
) -> Callable[..., Any]:
    """Import the class of a node, and bind the arguments of the node to its signature.

    Args:
        point: Key of `EXTENSION_POINTS`.
        key: Where the node stands, for messages.
        node: `_target_` and arguments.
        leading: Placeholders for the positional arguments of the later call (parameters, an
            optimiser).
        trusted: Prefixes of `trusted_targets`.

    Returns:
        The class with its arguments; call it with the positional arguments in place of `leading`.

    Raises:
        UserError: If the class is not trusted, does not exist or does not take the arguments.
    """
    target_class = import_target(point, key, node, trusted)
    arguments = {name: value for name, value in node.items() if name != TARGET}
    return bind_arguments(point, key, target_class, arguments, *leading)


def bind_arguments(
    point: str, key: str, target_class: type, arguments: dict[str, Any], *leading: Any
) -> Callable[..., Any]:
    """Bind arguments to the signature of a class of `import_target`.

    For builders that add arguments of their own first.

    Raises:
        UserError: If the class does not take the arguments.
    """
    signature = inspect.signature(target_class)
    # The first parameters are taken by `leading`, such as the weights that an optimiser updates.
    parameters = list(signature.parameters)[len(leading) :]
    unknown = sorted(arguments.keys() - set(parameters))
    try:
        signature.bind(*leading, **arguments)
        # `**kwargs` accepts a misspelled name: raise the error of a class without `**kwargs`.
        if unknown and not EXTENSION_POINTS[point].is_open:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    except TypeError as error:
        guess = "its arguments are"
        for name in unknown:
            near = difflib.get_close_matches(name, parameters, n=1)
            if near:
                guess = f"did you mean {near[0]}? Its arguments are"
                break
        raise UserError(
            f"{key}: {target_class.__name__} does not take these arguments ({error}); "
            f"{guess} {', '.join(_named(signature, parameters)) or 'none'}"
        ) from error
    annotated = _evaluated_signature(target_class, signature)
    converted = {}
    for name, value in arguments.items():
        expected = expected_kind(annotated, name, value)
        if expected:
            raise UserError(
                f"{key}.{name}: {target_class.__name__} needs {expected}, but got {value!r}"
            )
        converted[name] = convert(annotated, name, value)
    return functools.partial(target_class, **converted)


def _named(signature: inspect.Signature, parameters: Sequence[str]) -> list[str]:
    """Leave out `*args` and `**kwargs`, which a class without a constructor has of its base."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name in parameters if signature.parameters[name].kind not in variadic]


def _evaluated_signature(target_class: type, signature: inspect.Signature) -> inspect.Signature:
    """Signature of a class, whose annotations are types instead of texts where possible."""
    try:
        return inspect.signature(target_class, eval_str=True)
    # An annotation of another package may raise any error when it is evaluated.
    except Exception:
        return signature


def import_target(point: str, key: str, node: dict[str, Any], trusted: Iterable[str] = ()) -> type:
    """Import the class of a node after `check_target`.

    Raises:
        UserError: If the class is not trusted, does not exist, or is no class of the extension
            point.
    """
    check_target(point, key, node, trusted)
    module_name, _, name = node[TARGET].rpartition(".")
    begin = f"{key}.{TARGET}: {node[TARGET]}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0]
        if package in EXTRAS:
            raise UserError(
                f"{begin} needs pip install 'medseg[{EXTRAS[package]}]' ({error})"
            ) from error
        raise UserError(
            f"{begin} cannot be imported ({error}); install the package, or correct the name"
        ) from error
    target_class = getattr(module, name, None)
    if target_class is None:
        raise UserError(
            f"{begin} does not exist in the installed version{_class_guess(module, name)}"
        )
    if not inspect.isclass(target_class):
        raise UserError(f"{begin} is not a class{_class_guess(module, name)}")
    base = EXTENSION_POINTS[point].base
    if base is not None:
        base_module, _, base_name = base.rpartition(".")
        base_class = getattr(importlib.import_module(base_module), base_name)
        if not issubclass(target_class, base_class):
            raise UserError(
                f"{begin} is no {base}, which {key} needs; choose a class that inherits from it"
            )
    return target_class


def _class_guess(module: ModuleType, name: str) -> str:
    """Say which public classes of a module were probably meant; empty where none is near."""
    class_names = []
    for class_name, value in vars(module).items():
        if inspect.isclass(value) and not class_name.startswith("_"):
            class_names.append(class_name)
    near_names = difflib.get_close_matches(name, class_names, n=2)
    if not near_names:
        return ""
    targets = [f"{module.__name__}.{near_name}" for near_name in near_names]
    return f"; did you mean {' or '.join(targets)}?"
