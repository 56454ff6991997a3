"""Help text of a command: every key with its current value, type, range, unit and description."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from medseg.conf_folder import group_files
from medseg.config.schema import CLASS_SCHEMAS, POINT_SCHEMAS
from medseg.knob import Knob, key_below
from medseg.targets import TARGET

# Key that lists the losses of a sum, in the place of the `_target_` of a single loss.
TERMS = "terms"
_TERMS_KNOB = Knob("Losses of the sum: their classes with arguments and `factor`.")
_ARGUMENT_KNOB = Knob("Argument of the class.")
TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    list: "list",
    dict: "mapping",
}
# Shown as the type of a key that takes values of several types. The sentence about the key, on the
# next line of the output, names these types.
ANY_TYPE = "see below"


class Key(NamedTuple):
    """One key of a command.

    Attributes:
        name: Its dotted name; `<name>` and `<number>` stand for the items of a mapping and a list.
        value: Its current value; `???` if it must be given.
        kind: Its declared type.
        knob: Its documentation.
        choices: Names of the files that may be chosen for it; empty if it is no group of files.
    """

    name: str
    value: Any
    kind: Any
    knob: Knob
    choices: tuple[str, ...] = ()

    @property
    def can_be_null(self) -> bool:
        """Whether the key may be null: its type is then a union of one type and None."""
        return isinstance(self.kind, types.UnionType)

    def type_text(self) -> str:
        """Name its type, range and unit."""
        type_name = _type_name(self.kind)
        if self.knob.within not in ("", "(-inf, inf)"):
            type_name += f" in {self.knob.within}"
        parts = [type_name]
        if self.knob.unit:
            parts.append(self.knob.unit)
        if self.can_be_null:
            parts.append("or null")
        return ", ".join(parts)


class Group(NamedTuple):
    """Headline of the keys of one group.

    Attributes:
        name: Its dotted name.
        sentence: What the keys are about.
        choices: See `Key`.
    """

    name: str
    sentence: str
    choices: tuple[str, ...]


def help_text(schema: type, composed: DictConfig, groups: Collection[str]) -> str:
    """List all keys of a root schema, as `--help` prints them; arguments as for `list_keys`."""
    lines: list[str] = []
    for entry in list_keys(schema, composed, groups):
        choices_text = ""
        if entry.choices:
            choices_text = f" ({entry.name}={' | '.join(entry.choices)})"
        if isinstance(entry, Group):
            lines.append(f"\n{entry.name}: {entry.sentence}{choices_text}")
            continue
        lines.append(f"  {entry.name}={value_text(entry.value)}   {entry.type_text()}")
        lines.append(f"      {entry.knob.sentence}{choices_text}")
    return "\n".join(lines)


def list_keys(schema: type, composed: DictConfig, groups: Collection[str]) -> Iterator[Key | Group]:
    """Yield the keys of a root schema in their order, each group after its headline.

    Args:
        schema: Root dataclass of `medseg.config.schema`.
        composed: Configuration that Hydra composed from the command line, with the current values.
        groups: Keys of the command that are groups of files.
    """
    values = typing.cast(dict[str, Any], OmegaConf.to_container(composed))
    yield from _entries(schema, values, "", groups)


def _entries(
    schema: type, values: dict[str, Any], path: str, groups: Collection[str]
) -> Iterator[Key | Group]:
    """Yield the keys of a dataclass below `path`."""
    for field_name, hint in typing.get_type_hints(schema, include_extras=True).items():
        name = key_below(path, field_name)
        # Keys that the composed configuration lacks have a default in the schema, which is an
        # attribute of the class, or must be given (`???`). Keys with a `default_factory`, which is
        # no attribute, are always composed.
        value = values.get(field_name, getattr(schema, field_name, "???"))
        choices = group_files(name) if name in groups else ()
        group = _group_schema(name, hint, value)
        if group is not None:
            # The docstring without its line breaks.
            sentence = " ".join(inspect.cleandoc(group.__doc__ or "").split())
            yield Group(name, sentence, choices)
            yield from _entries(group, value, name, groups)
            continue
        # A sum of losses has no class of its own.
        if field_name == TARGET and TERMS in values:
            continue
        kind, knob = typing.get_args(hint)  # of `Annotated[kind, knob]`
        yield Key(name, value, kind, knob, choices)
        yield from _item_entries(name, kind, groups)
    # The schema of an extension point lists only the keys that medseg adds to any class.
    if schema in POINT_SCHEMAS.values():
        yield from _arguments(schema, values, path)


def _arguments(schema: type, values: dict[str, Any], path: str) -> Iterator[Key]:
    """Yield the arguments of a class that has no schema, below the keys of its extension point."""
    known_names = typing.get_type_hints(schema)
    for name, value in values.items():
        if name not in known_names:
            knob = _TERMS_KNOB if name == TERMS else _ARGUMENT_KNOB
            yield Key(f"{path}.{name}", value, type(value), knob)


def _item_entries(name: str, kind: Any, groups: Collection[str]) -> Iterator[Key | Group]:
    """Yield the keys of the items of a mapping or list, where they have a schema."""
    containers = (kind,)
    if isinstance(kind, types.UnionType):
        containers = typing.get_args(kind)  # such as a list, and None
    for container in containers:
        item_name = "<number>" if typing.get_origin(container) is list else "<name>"
        for item in typing.get_args(container):
            if dataclasses.is_dataclass(item):
                yield from _entries(typing.cast(type, item), {}, f"{name}.{item_name}", groups)


def _group_schema(name: str, hint: Any, value: Any) -> type | None:
    """Find the schema of the keys below a key; None for a key without keys of its own.

    The schema of an extension point depends on the class that its value names: a class of ours has
    a schema of all its keys, any other the schema of the point, with the keys that medseg adds.
    """
    if isinstance(value, dict):
        schema = CLASS_SCHEMAS.get(str(value.get(TARGET)), POINT_SCHEMAS.get(name))
        if schema is not None:
            return schema
    if dataclasses.is_dataclass(hint):
        return typing.cast(type, hint)
    return None


def value_text(value: Any) -> str:
    """Write a value for readers; `???` is one that must be given."""
    if isinstance(value, dict):
        items = [f"{key}: {value_text(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def _type_name(kind: Any) -> str:
    """Name a type for readers; of a union with None, the other type.

    Example:
        >>> [_type_name(kind) for kind in (int, tuple[float, float] | None, list[str], Any)]
        ['integer', '2 numbers', 'list of text', 'see below']
    """
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return _type_name(arguments[0])
    if typing.get_origin(kind) is tuple:
        return f"{len(arguments)} {TYPE_NAMES[arguments[0]]}s"
    if typing.get_origin(kind) is list:
        items = _type_name(arguments[0])
        return "list" if items == ANY_TYPE else f"list of {items}"
    if dataclasses.is_dataclass(kind):
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(kind)
    return TYPE_NAMES.get(typing.get_origin(kind) or kind, ANY_TYPE)
