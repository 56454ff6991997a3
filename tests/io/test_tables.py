"""Tables as CSV, Markdown and aligned columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from medseg.errors import UserError
from medseg.io.tables import csv_text, markdown_table, print_table, read_csv, table_lines, write_csv

ROWS = [
    {"case": "Doe, [John] :smile: \"x\"", "n": 12, "dice": 0.98765, "note": "ü\nline 2"},
    {"case": "b", "n": 3, "dice": None},
]  # fmt: skip


def test_a_csv_file_comes_back_as_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "new" / "a.csv", ROWS, formats={"dice": ".3f"})
    assert read_csv(tmp_path / "new" / "a.csv") == [
        {"case": ROWS[0]["case"], "n": "12", "dice": "0.988", "note": "ü\nline 2"},
        {"case": "b", "n": "3", "dice": "", "note": ""},
    ]


def test_columns_are_ordered_renamed_and_complete() -> None:
    assert csv_text([{"b": 1, "a": None}], ["a", "b"]) == "a,b\n,1\n"
    assert csv_text([], {"a": "A"}) == "A\n"
    with pytest.raises(ValueError, match="'c'"):
        csv_text([{"c": 1}], ["a"])


def test_markdown_takes_the_columns_it_is_given() -> None:
    text = markdown_table(
        ROWS[1:], {"dice": "Dice", "n": "number"}, {"n": lambda n: f"{n} of 9"}, missing="none"
    )
    assert text == "| Dice | number |\n|---|---|\n| none | 3 of 9 |\n"


def test_a_printed_table_lines_up_and_keeps_every_character(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [*ROWS, {"case": "x" * 300, "n": 7, "dice": 1.0}]
    columns = ["case", "n", "dice"]
    print_table(rows, columns, {"dice": ".4f"})
    printed = capsys.readouterr().out.splitlines()
    assert printed == table_lines(rows, columns, {"dice": ".4f"})
    lines = table_lines(rows, columns, {"dice": ".4f"}, missing="-")
    assert lines[1].split("  ")[0] == ROWS[0]["case"]
    assert {len(line) for line in lines} == {300 + 2 + 2 + 2 + 6}, (
        "numbers end where the headings end"
    )
    assert lines[2].endswith(" 3       -")
    assert lines[3] == "x" * 300 + "   7  1.0000"


def test_a_damaged_table_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\n" + b"x" * 200_000)
    with pytest.raises(
        UserError,
        match=(
            r"a\.csv: expected a CSV file, but it is damaged \(field larger than field limit "
            r"\(131072\)\)"
        ),
    ):
        read_csv(tmp_path / "a.csv")
    with pytest.raises(UserError, match="got a folder, a pipe or a device"):
        read_csv(Path("/dev/zero"))


def test_no_text_becomes_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    row = {
        "a": "=1+1",
        "b": "+1e-3",
        "c": "-5",
        "d": "@x",
        "e": "-x",
        "f": "'=1",
        "g": -2.5,
        "h": "1=1",
    }
    write_csv(tmp_path / "a.csv", [row])
    assert (
        tmp_path / "a.csv"
    ).read_text() == "a,b,c,d,e,f,g,h\n'=1+1,+1e-3,-5,'@x,'-x,''=1,-2.5,1=1\n"
    back = read_csv(tmp_path / "a.csv")[0]
    assert [back[key] for key in row] == [str(value) for value in row.values()]


@pytest.mark.parametrize(
    "text", ["'=1", "''=1", "'-5", "'a", "''", "a\rb", "\r", "=\r", "a\r\nb", "\n=1"]
)
def test_every_text_comes_back_from_a_csv_file(text: str, tmp_path: Path) -> None:
    rows = [{"a": text, text: "b"}, {"a": "c", text: text}]
    write_csv(tmp_path / "a.csv", rows)
    assert read_csv(tmp_path / "a.csv") == rows


def test_no_text_divides_a_cell_or_a_line_of_markdown() -> None:
    text = markdown_table([{"a|b": "x | y", "c": "1\n2"}])
    assert text == "| a\\|b | c |\n|---|---|\n| x \\| y | 1 2 |\n"
