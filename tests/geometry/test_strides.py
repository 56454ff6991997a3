"""Coarse axes wait for the fine ones."""

from __future__ import annotations

import pytest

from medseg.geometry.strides import level_strides, total_strides

TWO = (2, 2, 2)


@pytest.mark.parametrize(
    ("spacing_mm", "strides", "total"),
    [
        (None, (TWO, TWO, TWO), (8, 8, 8)),
        ((1.0, 1.0, 1.0), (TWO, TWO, TWO), (8, 8, 8)),
        ((1.9, 1.0, 1.0), (TWO, TWO, TWO), (8, 8, 8)),
        ((2.0, 1.0, 1.0), ((1, 2, 2), TWO, TWO), (4, 8, 8)),
        ((8.0, 0.7, 0.7), ((1, 2, 2), (1, 2, 2), (1, 2, 2)), (1, 8, 8)),
        ((0.6, 5.0, 2.0), ((2, 1, 1), (2, 1, 2), (2, 1, 2)), (8, 1, 4)),
    ],
)
def test_an_axis_is_divided_once_it_is_less_than_twice_as_coarse_as_the_finest(
    spacing_mm: tuple[float, float, float] | None, strides: object, total: tuple[int, int, int]
) -> None:
    assert level_strides(spacing_mm, 3) == strides
    assert total_strides(level_strides(spacing_mm, 3)) == total
