"""Check of options by their dataclass: the type of each key, and the interval of its `Knob`.

Options from the command line and from Python are checked by the same function, `check_options`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any

from medseg.errors import UserError
from medseg.knob import Knob, key_below

# Type of a single value to its name in messages.
SINGLE_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check_options(options: Any, key: str = "") -> None:
    """Check the values of a dataclass of options and of the groups in it.

    Lists become the declared tuples and names of choices the choices, in place.

    Args:
        options: A dataclass of options.
        key: Its dotted key, for messages; empty for the root.

    Raises:
        UserError: On a value of another type, a wrong length, nan or inf, a number outside its
            interval, or swapped bounds.
    """
    for name, hint in typing.get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        value_key = key_below(key, name)
        kind, knob = _kind_and_knob(hint)
        if dataclasses.is_dataclass(value):
            check_options(value, value_key)
        for item_key, item in items_of(value, value_key):
            if dataclasses.is_dataclass(item):
                check_options(item, item_key)
        typed = _to_kind(value_key, kind, value)
        if typed is not value:
            setattr(options, name, typed)
        _check_finite(value_key, typed)
        check_interval(value_key, typed, knob.within)


def check_interval(key: str, value: Any, interval: str) -> None:
    """Refuse a number, or one of several, outside an interval such as `[0, 1)`.

    Args:
        key: Dotted key of the value, for messages.
        value: A number, a list or tuple of numbers, or None. A tuple of two numbers (`Pair`), and
            a list of two of a key that ends in `_range`, are bounds, the lower one first.
        interval: The interval; empty where there is none.

    Raises:
        UserError: If a number is refused.
    """
    if not interval or value is None:
        return
    # A list may hold null; the class that takes the argument decides whether it is allowed.
    numbers = [number for number in _as_sequence(value) if number is not None]
    for number in numbers:
        if not _lies_in(number, interval):
            raise UserError(f"{key}: must lie in {interval}, but got {value}")
    # The name of a single number may end so too: `data_range` of a loss is a width.
    are_bounds = isinstance(value, tuple) or key.endswith("_range")
    if are_bounds and len(numbers) == 2 and numbers[0] > numbers[1]:
        raise UserError(f"{key}: the lower bound comes first, but got {numbers}")


def union_members(kind: Any) -> tuple[Any, ...]:
    """List the members of a union; for any other type, the type itself."""
    if isinstance(kind, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def tuple_length(kind: Any) -> int | None:
    """Length of a tuple type, or of the tuple in a union; None for other types."""
    for member in union_members(kind):
        if typing.get_origin(member) is tuple:
            return len(typing.get_args(member))
    return None


def items_of(value: Any, key: str) -> list[tuple[str, Any]]:
    """Pair each item of a mapping or a list with its dotted key; other values have no items."""
    if isinstance(value, dict):
        return [(f"{key}.{name}", item) for name, item in value.items()]
    if isinstance(value, list):
        return [(f"{key}.{index}", item) for index, item in enumerate(value)]
    return []


def _kind_and_knob(hint: Any) -> tuple[Any, Knob]:
    """Split the annotation of a key into its type and its `Knob`; a group gets an empty one.

    The `Knob` holds the documentation of the key and the interval of its numbers.
    """
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, Knob("")
    kind, knob = typing.get_args(hint)
    return kind, knob


def _to_kind(key: str, kind: Any, value: Any) -> Any:
    """Convert a value to the type of its key: a list to a tuple, a name to a choice.

    Args:
        key: Dotted key, for messages.
        kind: Its type. Only tuples, choices and single values are checked.
        value: Its value.

    Raises:
        UserError: If the value has another type.
    """
    kinds = union_members(kind)
    if value is None and types.NoneType in kinds:
        return value
    kind = kinds[0]  # the options have no other unions than of a type and None
    length = tuple_length(kind)
    if length is not None:
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise UserError(
                f"{key}: {length} numbers are needed, one per axis or bound, but got {value}"
            )
        pairs = zip(typing.get_args(kind), value, strict=True)
        return tuple(_to_kind(key, item_kind, item) for item_kind, item in pairs)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _to_choice(key, kind, value)
    if kind in SINGLE_TYPES and not _has_type(value, kind):
        raise UserError(f"{key}: expected {SINGLE_TYPES[kind]}, but got {value!r}")
    return value


def _to_choice(key: str, choices: type[Enum], value: Any) -> Enum:
    """Find the choice of a name; a choice stays as it is.

    Raises:
        UserError: If there is no such choice.
    """
    try:
        return choices(value)
    except ValueError:
        names = ", ".join(str(choice.value) for choice in choices)
        raise UserError(f"{key}: expected one of {names}, but got {value!r}") from None


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value is of a type of `SINGLE_TYPES`: a whole number is a number, a boolean not."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float))
    return isinstance(value, kind)


def _check_finite(key: str, value: Any) -> None:
    """Refuse nan and inf, which YAML reads as numbers and most comparisons let pass.

    Args:
        key: Dotted key of the value, for messages.
        value: Any value. Only floats, and those in a list or tuple, are checked.
    """
    for number in _as_sequence(value):
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{key}: expected a finite number, but got {value}")


def _as_sequence(value: Any) -> Sequence[Any]:
    """Return a list or tuple as it is, and another value in a list of its own."""
    if isinstance(value, (list, tuple)):
        return value
    return [value]


def _lies_in(number: Any, interval: str) -> bool:
    """Whether a value is a number in an interval such as `[0, 1)`; booleans are not."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    low, high = map(float, interval[1:-1].split(","))  # `float` reads "inf", too
    # A round bracket excludes its bound.
    if interval.startswith("(") and number == low:
        return False
    if interval.endswith(")") and number == high:
        return False
    return low <= number <= high
