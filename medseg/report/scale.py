"""Axes: where a value lies between the ends of a chart, and where the ticks go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_NINES = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
_NEAREST_TO_ONE = 0.9995
_MUCH = 8.0
_NUM_TICKS = 5


@dataclass(frozen=True)
class Scale:
    """One axis.

    Attributes:
        low: Value at its start.
        high: Value at its end.
        ticks: Values that are named, with their text.
        bend: Monotonous function that is drawn to scale.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    bend: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Share of the axis, 0 to 1; values beyond its ends stay on them."""
        start, end = self.bend(self.low), self.bend(self.high)
        return (self.bend(min(max(value, self.low), self.high)) - start) / (end - start)


def linear(values: Sequence[float], *, is_count: bool = False) -> Scale:
    """An even axis around the values, its ends on ticks; one of counts has ticks at whole numbers.

    Example:
        >>> scale = linear([3.0, 41.0])
        >>> [text for _, text in scale.ticks], scale.at(25.0)
        (['0', '10', '20', '30', '40', '50'], 0.5)
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    raw = max((high - low) / _NUM_TICKS, 1.0 if is_count else 0.0)
    size = 10.0 ** math.floor(math.log10(raw))
    factors = (1.0, 2.0, 5.0, 10.0) if is_count else (1.0, 2.0, 2.5, 5.0, 10.0)
    step = next(factor * size for factor in factors if factor * size >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], tuple((tick, f"{tick:.6g}") for tick in ticks))


def logarithmic(values: Sequence[float]) -> Scale:
    """A logarithmic axis around values above zero.

    Example:
        >>> [text for _, text in logarithmic([0.0004, 0.02]).ticks]
        ['0.0005', '0.001', '0.002', '0.005', '0.01', '0.02']
    """
    low, high = min(values), max(values)
    low, high = low / 1.15, high * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    ticks = [part * 10.0**decade for decade in decades for part in parts]
    return Scale(low, high, tuple((tick, f"{tick:.6g}") for tick in ticks if low <= tick <= high), math.log)


def nines(values: Sequence[float]) -> Scale:
    """An axis for scores up to 1 that stretches towards 1: 0.98 lies as far from 0.99 as 0.90 from 0.95.

    Example:
        >>> scale = nines([0.42, 0.984])
        >>> scale.ticks[0][1], scale.ticks[-1][1], round(scale.at(0.9), 2)
        ('0.3', '0.99', 0.46)
    """
    low = max((tick for tick in _NINES if tick <= min(values)), default=0.0)
    high = min((tick for tick in _NINES if tick >= max(values)), default=_NEAREST_TO_ONE)
    ticks = tuple((tick, f"{tick:g}") for tick in _NINES if low <= tick <= high)
    return Scale(low, max(high, low + 1e-3), ticks, lambda value: -math.log(1.0 - min(value, _NEAREST_TO_ONE)))


def for_scores(values: Sequence[float]) -> Scale:
    """The axis of a Dice: stretched towards 1 once any run comes near it."""
    low, high = min(values), max(values)
    if high > 0.9:
        return nines(values)
    return linear([low, high] if low < high else [low - 0.05, high + 0.05])  # equal ones in the middle, and no tick beyond 1


def for_sizes(values: Sequence[float]) -> Scale:
    """The axis of a loss, a learning rate, a memory: logarithmic when the values span much."""
    return logarithmic(values) if min(values) > 0 and max(values) >= _MUCH * min(values) else linear(values)
