"""Spreadsheets: what the file holds, read without the library that writes it."""

from __future__ import annotations

import zipfile
from datetime import UTC, date, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

from medseg.errors import UserError
from medseg.io.spreadsheet import MAX_CELL_CHARACTERS, Link, Sheet, SheetColumn, write_spreadsheet

NAMES = {"m": "http://schemas.openxmlformats.org/spreadsheetml/2006/main"}


def cells_of(path: Path, number: int = 1) -> dict[str, tuple[str, str]]:
    """Cells of a sheet by their place: kind (`s` a text, `n` a number) and content."""
    with zipfile.ZipFile(path) as archive:
        sheet = ElementTree.fromstring(archive.read(f"xl/worksheets/sheet{number}.xml"))
        shared = ElementTree.fromstring(archive.read("xl/sharedStrings.xml"))
    texts = ["".join(entry.itertext()) for entry in shared.findall("m:si", NAMES)]
    cells = {}
    for cell in sheet.iterfind(".//m:c", NAMES):
        content = cell.findtext("m:v", "", NAMES)
        kind = cell.get("t", "n")
        assert cell.find("m:f", NAMES) is None, "no formula"
        cells[cell.get("r", "")] = (kind, texts[int(content)] if kind == "s" else content)
    return cells


def test_numbers_are_numbers_and_texts_are_texts(tmp_path: Path) -> None:
    columns = [SheetColumn(key, key, number_format="0.0") for key in ("a", "b", "c")]
    rows = [
        {"a": 1762.25, "b": -824, "c": None},
        {"a": "=1+1", "b": "12", "c": "https://x.example"},
        {"a": date(2024, 1, 31), "b": float("nan"), "c": date(1800, 1, 1)},
        {"a": Link("a b.nii.gz", "a b.nii.gz"), "b": "bad \udcff name", "c": "x" * 40_000},
    ]
    write_spreadsheet(
        tmp_path / "t.xlsx", {"one": Sheet(columns, rows, 1), "two": Sheet(columns, [])}
    )
    cells = cells_of(tmp_path / "t.xlsx")
    assert [cells[place] for place in ("A1", "B1")] == [("s", "a"), ("s", "b")]
    assert [cells[place] for place in ("A2", "B2")] == [("n", "1762.25"), ("n", "-824")]
    assert "C2" not in cells
    assert [cells[f"{column}3"][1] for column in "ABC"] == ["=1+1", "12", "https://x.example"]
    assert {cells[f"{column}3"][0] for column in "ABC"} == {"s"}
    assert cells["A4"] == ("n", str((date(2024, 1, 31) - date(1899, 12, 30)).days))
    assert cells["B4"] == ("s", "nan")
    assert cells["C4"] == ("s", "1800-01-01"), "Excel has no such day"
    assert cells["A5"] == ("s", "a b.nii.gz")
    assert cells["B5"] == ("s", r"bad \udcff name")
    assert len(cells["C5"][1]) == MAX_CELL_CHARACTERS
    assert cells_of(tmp_path / "t.xlsx", 2)["A1"] == ("s", "a")


def test_dates_with_a_time_are_numbers_unless_excel_has_no_such_time(tmp_path: Path) -> None:
    columns = [SheetColumn(key, key) for key in ("a", "b", "c")]
    times = [datetime(2024, 1, 31, 6), datetime(1800, 1, 1, 6), datetime(2024, 1, 31, tzinfo=UTC)]
    rows = [dict(zip("abc", times, strict=True))]
    write_spreadsheet(tmp_path / "t.xlsx", {"one": Sheet(columns, rows)})
    cells = cells_of(tmp_path / "t.xlsx")
    days = (date(2024, 1, 31) - date(1899, 12, 30)).days
    assert cells["A2"] == ("n", str(days + 0.25))
    assert cells["B2"] == ("s", "1800-01-01 06:00:00")
    assert cells["C2"] == ("s", "2024-01-31 00:00:00+00:00")


@pytest.mark.parametrize(("num_rows", "filtered"), [(0, "A1:B2"), (1, "A1:B2"), (7, "A1:B8")])
def test_the_filter_covers_all_rows(num_rows: int, filtered: str, tmp_path: Path) -> None:
    columns = [SheetColumn(key, key) for key in ("a", "b")]
    write_spreadsheet(tmp_path / "t.xlsx", {"one": Sheet(columns, [{"a": 1}] * num_rows)})
    with zipfile.ZipFile(tmp_path / "t.xlsx") as archive:
        sheet = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    (found,) = sheet.iterfind("m:autoFilter", NAMES)
    assert found.get("ref") == filtered


@pytest.mark.parametrize(
    ("name", "target"),
    [("a b.nii.gz", "a%20b.nii.gz"), ("no #1.nii.gz", "no%20%231.nii.gz"), ("5%.nii", "5%25.nii")],
)
def test_a_link_leads_to_its_file(name: str, target: str, tmp_path: Path) -> None:
    sheet = Sheet([SheetColumn("a", "a")], [{"a": Link(name, name)}])
    write_spreadsheet(tmp_path / "t.xlsx", {"one": sheet})
    with zipfile.ZipFile(tmp_path / "t.xlsx") as archive:
        links = ElementTree.fromstring(archive.read("xl/worksheets/_rels/sheet1.xml.rels"))
        content = archive.read("xl/worksheets/sheet1.xml").decode()
    assert [link.get("Target") for link in links] == [target]
    assert "location=" not in content


def test_a_spreadsheet_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").mkdir()
    with pytest.raises(UserError, match=r"t\.xlsx: cannot be written"):
        write_spreadsheet(tmp_path / "t.xlsx", {"one": Sheet([SheetColumn("a", "a")], [])})
