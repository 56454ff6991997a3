"""Axes hold their values, keep their order and name places inside."""

from __future__ import annotations

import pytest

from medseg.report.scale import Scale, for_scores, for_sizes, linear, logarithmic, nines

VALUES = [[0.0, 1.0], [0.97, 0.9712], [3.0], [-2.0, 700.0], [1e-5, 2e-5], [0.0], [12345.0, 99999.0]]


def check(scale: Scale, values: list[float]) -> None:
    places = [scale.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    assert len(set(places)) == len(set(values))
    assert 2 <= len(scale.ticks) <= 13
    assert all(-1e-9 <= scale.at(tick) <= 1 + 1e-9 and float(text) == pytest.approx(tick) for tick, text in scale.ticks)


@pytest.mark.parametrize("values", VALUES)
def test_linear(values: list[float]) -> None:
    check(linear(values), values)


@pytest.mark.parametrize("last", [1, 2, 3, 12, 21, 400, 2500])
def test_counts_have_whole_ticks(last: int) -> None:
    scale = linear([0, last], is_count=True)
    check(scale, [0, last])
    assert all(tick.is_integer() for tick, _ in scale.ticks)


@pytest.mark.parametrize("values", [[0.001, 3.0], [1e-6, 1.0], [0.5, 12.0], [1.0, 9.0]])
def test_logarithmic(values: list[float]) -> None:
    check(logarithmic(values), values)
    middle = (values[0] * values[1]) ** 0.5
    assert logarithmic(values).at(middle) == pytest.approx(0.5)


@pytest.mark.parametrize("values", [[0.0, 0.95], [0.5, 0.99], [0.981, 0.983], [0.2, 1.0], [0.92]])
def test_nines(values: list[float]) -> None:
    check(nines(values), values)


def test_the_axis_follows_the_values() -> None:
    assert for_scores([0.2, 0.8]).bend is float
    assert for_scores([0.8875]).high <= 1
    assert for_scores([0.2, 0.98]).at(0.9) < 0.8
    assert for_sizes([1.0, 3.0]).bend is float
    assert for_sizes([1.0, 30.0]).bend is not float
    assert for_sizes([0.0, 30.0]).bend is float
