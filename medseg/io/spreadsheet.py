"""Writer of Excel files: tables of dictionaries as sheets; numbers and dates keep their types."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from medseg.io.atomic import replace_bytes

# Longest text that Excel takes in a cell.
MAX_CELL_CHARACTERS = 32_767

# First date that is written as a date; earlier ones are written as texts. Excel has no dates before
# 1900, and counts a 29 February 1900 that does not exist.
FIRST_DATE = date(1900, 3, 1)
# Time of creation in every file, so that equal content gives equal bytes.
CREATED = datetime(2000, 1, 1)
HEADING_STYLE = {
    "bold": True,
    "text_wrap": True,
    "valign": "top",
    "bg_color": "#e8eef2",
    "border": 1,
}
# Options of XlsxWriter's workbook. Texts such as file names stay texts, even if they look like a
# formula, a number or an address.
OPTIONS = {
    "in_memory": True,
    "strings_to_formulas": False,
    "strings_to_numbers": False,
    "strings_to_urls": False,
}
# Characters of a file name to their escapes in a link. XlsxWriter would take "#" for the start of a
# place within the file, and escapes the others only where a link has no escape yet.
LINK_ESCAPES = str.maketrans({sign: f"%{ord(sign):02x}" for sign in '%# "<>[]`^{}'})


class Link(NamedTuple):
    """A cell that opens a file.

    Attributes:
        target: Path of the file, relative to the folder of the spreadsheet.
        text: Text of the cell.
    """

    target: str
    text: str


@dataclass(frozen=True)
class SheetColumn:
    """Column of a sheet.

    Attributes:
        key: Key of its cells in the rows.
        heading: Text of the first row.
        width: Width in characters.
        number_format: Format of its numbers, such as `0.0`.
        is_wrapped: Whether long texts take several lines.
    """

    key: str
    heading: str
    width: float = 12.0
    number_format: str = "General"
    is_wrapped: bool = False


@dataclass(frozen=True)
class Sheet:
    """One sheet: a table whose headings stay in sight, with a filter on each column.

    Attributes:
        columns: Its columns.
        rows: Values by the key of their column: numbers, dates, texts, links. None and a missing
            key give an empty cell.
        num_fixed: Number of columns at the left that stay in sight.
    """

    columns: Sequence[SheetColumn]
    rows: Sequence[Mapping[str, Any]]
    num_fixed: int = 0


def write_spreadsheet(path: Path, sheets: Mapping[str, Sheet]) -> None:
    """Write an Excel file (.xlsx), whole or not at all.

    Args:
        path: The file.
        sheets: Name of each sheet to its content, in the order of the file.

    Raises:
        UserError: If the file cannot be written.
    """
    from xlsxwriter import Workbook

    content = io.BytesIO()
    with Workbook(content, OPTIONS) as workbook:
        workbook.set_properties({"created": CREATED})
        for name, sheet in sheets.items():
            _add_sheet(workbook, name, sheet)
    replace_bytes(path, content.getbuffer())


def _add_sheet(workbook: Any, name: str, sheet: Sheet) -> None:
    """Add a sheet to a workbook of XlsxWriter."""
    page = workbook.add_worksheet(name)
    heading_format = workbook.add_format(HEADING_STYLE)
    date_style = {"num_format": "yyyy-mm-dd", "valign": "top", "align": "left"}
    date_format = workbook.add_format(date_style)
    time_format = workbook.add_format({**date_style, "num_format": "yyyy-mm-dd hh:mm:ss"})
    link_format = workbook.add_format({"font_color": "#0b6e99", "underline": True, "valign": "top"})
    for column_number, column in enumerate(sheet.columns):
        cell_format = workbook.add_format(
            {"valign": "top", "text_wrap": column.is_wrapped, "num_format": column.number_format}
        )
        page.set_column(column_number, column_number, column.width)
        page.write_string(0, column_number, _text(column.heading), heading_format)
        for row_number, row in enumerate(sheet.rows, start=1):
            value = row.get(column.key)
            place = (row_number, column_number)
            if isinstance(value, Link):
                target = f"external:{_text(value.target).translate(LINK_ESCAPES)}"
                page.write_url(*place, target, link_format, _text(value.text))
            elif _is_excel_date(value):
                value_format = date_format
                if isinstance(value, datetime):
                    value_format = time_format
                page.write_datetime(*place, value, value_format)
            elif isinstance(value, int | float) and math.isfinite(value):
                page.write_number(*place, value, cell_format)
            elif value is not None:  # texts; early dates, NaN and infinity, which Excel lacks
                page.write_string(*place, _text(str(value)), cell_format)
    page.freeze_panes(1, sheet.num_fixed)
    # A filter needs a row below the headings, even an empty one.
    last_row = max(1, len(sheet.rows))
    page.autofilter(0, 0, last_row, len(sheet.columns) - 1)


def _is_excel_date(value: Any) -> bool:
    """Whether a value is a date, with or without a time, that Excel can hold.

    Excel has no time zones: a time with one is written as text.
    """
    if isinstance(value, datetime):
        return value.tzinfo is None and value.date() >= FIRST_DATE
    return isinstance(value, date) and value >= FIRST_DATE


def _text(text: str) -> str:
    """Prepare a text for a cell: escape surrogates, and cut the text to `MAX_CELL_CHARACTERS`."""
    # UTF-8 cannot encode surrogates, which stand for bytes of file names that are not UTF-8.
    encodable = text.encode(errors="backslashreplace").decode()
    return encodable[:MAX_CELL_CHARACTERS]
