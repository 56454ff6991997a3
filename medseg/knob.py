"""Documentation of a configuration key (`Knob`), and the types that keys share."""

from typing import NamedTuple


class Knob(NamedTuple):
    """Documentation of one key.

    Attributes:
        sentence: Documentation of the key.
        within: Interval of its number, or of each number of a tuple or list, such as `[0, 1)`.
        unit: Unit or order of its numbers.
        neutral: Whether the key cannot change the result of a run (folders, saving intervals,
            devices), so that a run may resume with another value.
    """

    sentence: str
    within: str = ""
    unit: str = ""
    neutral: bool = False


# Types of values: a text or null, two numbers such as a window, and one number per axis (z, y, x).
Text = str | None
Pair = tuple[float, float]
Triple = tuple[float, float, float]


def key_below(group: str, name: str) -> str:
    """Join the dotted key of a name in a group; the root of a configuration has the key "".

    Example:
        >>> key_below("", "stage"), key_below("stage", "name")
        ('stage', 'stage.name')
    """
    if not group:
        # YAML reads a key such as 1 or off as a number or a truth value.
        return str(name)
    return f"{group}.{name}"
