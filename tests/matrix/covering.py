"""Covering arrays: few rows that together hold every allowed pair of values of two factors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]


def allowed_pairs(
    factors: Mapping[str, Sequence[str]], is_allowed: Callable[[Row], bool] = lambda _: True
) -> list[frozenset[tuple[str, str]]]:
    """The pairs of values of two factors that some row may have."""
    return [
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
        if is_allowed({one: a, other: b})
    ]


def pairs_of(row: Row) -> set[frozenset[tuple[str, str]]]:
    """The pairs of values that a row holds."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering_rows(
    factors: Mapping[str, Sequence[str]],
    is_allowed: Callable[[Row], bool] = lambda _: True,
    of: str | None = None,
) -> list[Row]:
    """Rows that together hold every allowed pair, always the same; with `of`, pairs of that factor.

    They are made greedily: each begins with a pair that is missing, and takes on the value that
    brings the most missing pairs.
    """
    wanted = (pair for pair in allowed_pairs(factors, is_allowed) if of is None or of in dict(pair))
    missing = dict.fromkeys(wanted)  # in order
    rows: list[Row] = []
    while missing:
        row = dict(sorted(next(iter(missing))))
        for factor in factors:
            if factor not in row:
                row[factor] = max(
                    (value for value in factors[factor] if is_allowed({**row, factor: value})),
                    key=lambda value: sum(
                        frozenset({(factor, value), pair}) in missing for pair in row.items()
                    ),
                )
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({factor: row[factor] for factor in factors})
    return rows
