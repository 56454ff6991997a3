"""Covering array of all factors: each row trains, resumes bit-equal, predicts or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from covering import Row, allowed_pairs, covering_rows, pairs_of
from matrix import (
    FACTORS,
    OUTCOME,
    RANK_ROWS,
    RANKS,
    REFUSED,
    ROWS,
    SLOW_ROWS,
    compose,
    is_allowed,
    run_row,
    train_and_resume,
    write_page,
)

from medseg.errors import UserError
from medseg.io.tables import read_csv
from medseg.training.check import check_objects


def test_rows_hold_every_pair_that_is_allowed_and_nothing_that_is_not() -> None:
    factors = {factor: list(values) for factor, values in FACTORS.items()}
    assert set().union(*map(pairs_of, ROWS)) == set(allowed_pairs(factors, is_allowed))
    assert all(map(is_allowed, ROWS))
    assert {row["network"] for row in SLOW_ROWS} == set(FACTORS["network"])
    with_ranks = {
        pair
        for pair in allowed_pairs({"ranks": list(RANKS), **factors}, is_allowed)
        if "ranks" in dict(pair)
    }
    assert with_ranks <= set().union(*map(pairs_of, RANK_ROWS))
    assert covering_rows({"a": ["1", "2"], "b": ["3"]}) == [
        {"a": "1", "b": "3"},
        {"a": "2", "b": "3"},
    ]


def test_the_page_counts_the_rows_of_the_file_beside_it(tmp_path: Path) -> None:
    lines = [
        {"row": 1, "ranks": "one", **ROWS[0], OUTCOME: "yes"},
        {"row": 2, "ranks": "ddp", **ROWS[1], OUTCOME: "FAILS: UserError: no"},
    ]
    page = tmp_path / "matrix.md"
    write_page(page, lines)
    text = page.read_text(encoding="utf-8")
    assert "**1 of 2 small trainings passed.**" in text
    assert "The last 1 rows run as several processes." in " ".join(text.split())
    rows = read_csv(tmp_path / "matrix" / "rows.csv")
    assert [row[OUTCOME] for row in rows] == ["yes", "FAILS: UserError: no"]


def begin(table: Path, row: Mapping[str, str], folder: Path) -> None:
    config = compose(table, row, folder / "run")
    check_objects(config)


@pytest.mark.parametrize(
    ("row", "said"),
    REFUSED,
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_what_is_refused_says_why(row: Row, said: str, tiny_table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        begin(tiny_table, row, tmp_path)
    assert said in str(caught.value)


@pytest.fixture(scope="session")
def others(tiny_table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each stage."""
    folder = tmp_path_factory.mktemp("others")
    return {
        stage: train_and_resume(tiny_table, {"stage": stage}, folder / stage)
        / "checkpoints"
        / "last.ckpt"
        for stage in ("coarse", "fine")
    }


NETWORKS = [row["network"] for row in SLOW_ROWS]


def row_marks(number: int) -> list[pytest.MarkDecorator]:
    """A first row of each network stays in the CI, the further ones are for `make test-all`."""
    is_first = NETWORKS.index(NETWORKS[number]) == number
    return [] if is_first else [pytest.mark.thorough]


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=row_marks(number)) for number in range(len(SLOW_ROWS))],
)
def test_a_row_trains_resumes_and_predicts(
    number: int, tiny_table: Path, tmp_path: Path, others: dict[str, Path]
) -> None:
    run_row(tiny_table, SLOW_ROWS[number], tmp_path, others)
