"""Help text of a command: every key with its current value, type, range, unit and description."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from medseg.config.folder import conf_dir
from medseg.config.schema import CLASS_SCHEMAS, POINT_SCHEMAS
from medseg.config.targets import TARGET

TYPE_NAMES = {int: "integer", float: "number", bool: "true or false", str: "text", list: "list", dict: "mapping"}


def help_text(schema: type, composed: DictConfig) -> str:
    """List all keys of a root schema.

    Args:
        schema: Root dataclass of `medseg.config.schema`.
        composed: What Hydra composed from the command line; gives the current values.
    """
    return "\n".join(_lines(schema, typing.cast(dict[str, Any], OmegaConf.to_container(composed)), ""))


def _lines(schema: type, values: dict[str, Any], path: str) -> Iterator[str]:
    """Yield two lines for each key, and a headline with the file names for each group."""
    for name, hint in typing.get_type_hints(schema, include_extras=True).items():
        # Keys that the composed configuration lacks have a default in the schema, or must be given (`???`).
        key, value = f"{path}.{name}".lstrip("."), values.get(name, getattr(schema, name, "???"))
        files = sorted(file.stem for file in (conf_dir() / name).glob("*.yaml")) if not path else []
        options = f" ({name}={' | '.join(files)})" if files else ""
        group: Any = CLASS_SCHEMAS.get(value.get(TARGET, ""), POINT_SCHEMAS.get(key)) if isinstance(value, dict) else None
        group = group or (hint if dataclasses.is_dataclass(hint) else None)
        if group is not None:
            yield f"\n{key}: {group.__doc__}{options}"
            yield from _lines(group, value, key)
            continue
        kind, knob = typing.get_args(hint)
        parts = [_type_name(kind) + (f" in {knob.within}" if knob.within not in ("", "(-inf, inf)") else ""), knob.unit]
        parts.append("or null" if isinstance(kind, types.UnionType) else "")
        yield f"  {key}={_text(value)}   {', '.join(filter(None, parts))}"
        yield f"      {knob.sentence}{options}"
        for container in (kind, *typing.get_args(kind)):  # the second for a mapping or list that may be null
            for item in typing.get_args(container):
                if dataclasses.is_dataclass(item):
                    place = "<number>" if typing.get_origin(container) is list else "<name>"
                    yield from _lines(typing.cast(type, item), {}, f"{key}.{place}")


def _text(value: Any) -> str:
    """Write a value as on the command line; `???` is one that must be given."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _type_name(kind: Any) -> str:
    """Name a type for readers, without its null.

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
        return f"list of {_type_name(arguments[0])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " | ".join(kind)
    return TYPE_NAMES.get(typing.get_origin(kind) or kind, "see below")
