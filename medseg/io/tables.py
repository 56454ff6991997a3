"""Tables: rows as dictionaries, written as CSV, Markdown, LaTeX or aligned text for a terminal."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from medseg.errors import UserError
from medseg.io.atomic import replace_text
from medseg.io.text import read_text

# First characters of the cells that a spreadsheet would run as formulas.
FORMULA_SIGNS = ("=", "+", "-", "@")

# Characters that are commands in LaTeX, with their escapes, replaced in this order: the backslash
# first, since the other escapes contain one.
LATEX_CHARACTERS = {
    "\\": r"\textbackslash ",
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde ",
    "^": r"\textasciicircum ",
    "±": r"$\pm$",
}

# Value of each cell by the key of its column.
Rows = Sequence[Mapping[str, Any]]

# The columns in order: a mapping from key to heading, or keys that serve as headings too. None:
# every key of the rows, in the order of first appearance.
Columns = Sequence[str] | Mapping[str, str] | None

# Column key to a format such as `.4f`, or to a function that makes the text of a value. `str` makes
# the texts of all other columns.
Formats = Mapping[str, str | Callable[[Any], str]] | None


def write_csv(
    path: Path,
    rows: Rows,
    columns: Columns = None,
    formats: Formats = None,
    errors: str = "backslashreplace",
) -> None:
    """Write a CSV file, whole or not at all.

    Args:
        path: The file.
        rows: See `Rows`.
        columns: See `Columns`.
        formats: See `Formats`.
        errors: As for `replace_text`.

    Raises:
        UserError: If the file cannot be written.
    """
    replace_text(path, csv_text(rows, columns, formats), errors)


def csv_text(rows: Rows, columns: Columns = None, formats: Formats = None) -> str:
    r"""Format rows as CSV with a header line; None and a missing key give an empty cell.

    Texts that a spreadsheet would run as a formula get an apostrophe in front, which `read_csv`
    removes.

    Raises:
        ValueError: If a row has a key that is not in `columns`.

    Example:
        >>> rows = [{"case": "a,b", "dice": 0.5}, {"case": "c", "dice": None}]
        >>> csv_text(rows, formats={"dice": ".3f"})
        'case,dice\n"a,b",0.500\nc,\n'
    """
    headings = _headings(rows, columns)
    # A misspelt column would otherwise be missing in silence.
    unknown_keys = set(_keys(rows)) - headings.keys()
    if unknown_keys:
        raise ValueError(f"the rows have the keys {sorted(unknown_keys)}, which are no columns")
    text = io.StringIO(newline="")
    _write_csv_line(text, headings.values())
    for cells in _cells(rows, headings, formats):
        _write_csv_line(text, map(_safe_cell, cells))
    return text.getvalue()


def _write_csv_line(text: io.StringIO, cells: Iterable[str]) -> None:
    r"""Add a line of a CSV file to a text.

    `csv.writer` puts quotes around a cell with a comma, a quote or `\n`. Python before 3.13 leaves
    them out around a lone `\r`, which readers would take for the end of the line.
    """
    cells = list(cells)
    writer = csv.writer(text, lineterminator="\n")
    if any("\r" in cell for cell in cells):
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(cells)


def _safe_cell(cell: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would take for a formula.

    Numbers stay as they are, also negative ones. A text that already looks like a protected formula
    gets a further apostrophe, so that `plain_cell` restores the text.
    """
    if _is_protected(cell):
        return f"'{cell}"
    if not cell.startswith(FORMULA_SIGNS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def plain_cell(cell: str) -> str:
    """Remove the apostrophe that `csv_text` puts before a text that begins like a formula.

    An apostrophe before anything else belongs to the text.
    """
    if _is_protected(cell):
        return cell.removeprefix("'")
    return cell


def _is_protected(cell: str) -> bool:
    """Whether a text is one or more apostrophes followed by the first character of a formula."""
    return cell.startswith("'") and cell.lstrip("'").startswith(FORMULA_SIGNS)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header line: one dictionary per line, every value as text.

    Raises:
        UserError: If the file cannot be read, or is no table.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except csv.Error as error:
        raise UserError(
            f"{path}: expected a CSV file, but it is damaged ({error}); restore or remove it."
        ) from error
    for row in rows:
        for key, cell in row.items():
            # `DictReader` gives None for a missing cell of a damaged line, and a list under the key
            # None for surplus cells.
            if isinstance(cell, str):
                row[key] = plain_cell(cell)
    return rows


def refuse_table(path: Path, columns: Sequence[str], content: str) -> None:
    """Refuse to overwrite the table of another command, recognised by its first columns.

    Args:
        path: File that is to be written; it may not exist.
        columns: First columns of the other command's table.
        content: End of the message after `<path> holds`: what the table is, and the cure.

    Raises:
        UserError: If the file begins with these columns.
    """
    # A file that cannot be read is not refused here: the error of writing it is clearer.
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        heading = file.readline(1000)  # at most 1000 characters: the file may have no lines
        if heading.startswith(",".join(columns)):
            raise UserError(f"{path} holds {content}")


def markdown_table(
    rows: Rows, columns: Columns = None, formats: Formats = None, missing: str = ""
) -> str:
    r"""Format rows as a Markdown table that ends with a line break.

    None and a missing key give `missing`.

    Example:
        >>> headings = {"case": "case", "dice": "Dice"}
        >>> markdown_table([{"case": "a", "dice": 0.5}], headings, {"dice": ".2f"})
        '| case | Dice |\n|---|---|\n| a | 0.50 |\n'
    """
    headings = _headings(rows, columns)
    rule = "|---" * len(headings) + "|\n"
    lines = [_markdown_line(headings.values()), rule]
    lines += [_markdown_line(cells) for cells in _cells(rows, headings, formats, missing)]
    return "".join(lines)


def _markdown_line(cells: Iterable[str]) -> str:
    """Write a line of a Markdown table."""
    return f"| {' | '.join(map(_markdown_text, cells))} |\n"


def _markdown_text(cell: str) -> str:
    """Escape the characters that would end a cell or a line of a Markdown table."""
    one_line = " ".join(cell.splitlines())
    return one_line.replace("|", r"\|")


def latex_table(rows: Rows, columns: Columns = None) -> str:
    r"""Format rows as a LaTeX `tabular` with the rules of the package booktabs.

    Example:
        >>> print(latex_table([{"case": "a_1", "dice": "0.50"}]), end="")
        \begin{tabular}{ll}
        \toprule
        case & dice \\
        \midrule
        a\_1 & 0.50 \\
        \bottomrule
        \end{tabular}
    """
    headings = _headings(rows, columns)
    alignments = "l" * len(headings)
    lines = [
        rf"\begin{{tabular}}{{{alignments}}}",
        r"\toprule",
        _latex_line(headings.values()),
        r"\midrule",
    ]
    lines += [_latex_line(cells) for cells in _cells(rows, headings, None)]
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _latex_line(cells: Iterable[str]) -> str:
    """Write a line of a LaTeX table."""
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(cell: str) -> str:
    """Escape the characters that LaTeX takes for commands."""
    for character, escaped in LATEX_CHARACTERS.items():
        cell = cell.replace(character, escaped)
    return cell


def table_lines(
    rows: Rows, columns: Columns = None, formats: Formats = None, missing: str = ""
) -> list[str]:
    """Align the columns of rows for a terminal, with two spaces between columns.

    Columns of numbers are aligned to the right, all others to the left. None and a missing key give
    `missing`.

    Returns:
        The line of the headings, then a line for each row, without line breaks.

    Example:
        >>> rows = [{"row": "plain", "MiB": 1024.0}, {"row": "amp", "MiB": 61}]
        >>> print(*table_lines(rows, formats={"MiB": ".1f"}), sep="|")
        row       MiB|plain  1024.0|amp      61.0
    """
    from rich.console import Console
    from rich.table import Table

    headings = _headings(rows, columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))  # top, right, bottom, left
    for key, heading in headings.items():
        values = [row[key] for row in rows if row.get(key) is not None]
        are_numbers = bool(values) and all(isinstance(value, int | float) for value in values)
        side: Literal["left", "right"] = "right" if are_numbers else "left"
        table.add_column(heading, justify=side, no_wrap=True)
    for cells in _cells(rows, headings, formats, missing):
        table.add_row(*cells)
    # So wide that rich wraps no line. Cells are texts of users: rich must not interpret brackets
    # and colons in them.
    console = Console(width=100_000, color_system=None, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def print_table(rows: Rows, columns: Columns = None, formats: Formats = None) -> None:
    """Print rows in aligned columns, as `table_lines` lays them out."""
    print("\n".join(table_lines(rows, columns, formats)), flush=True)


def _headings(rows: Rows, columns: Columns) -> dict[str, str]:
    """Map the key of each column to its heading, in order."""
    if columns is None:
        columns = _keys(rows)
    if isinstance(columns, Mapping):
        return dict(columns)
    return {key: key for key in columns}


def _keys(rows: Rows) -> list[str]:
    """List the keys of all rows, each once, in the order of first appearance."""
    # A dictionary as a set that keeps the order.
    keys: dict[str, None] = {}
    for row in rows:
        keys.update(dict.fromkeys(row))
    return list(keys)


def _cells(
    rows: Rows, headings: Mapping[str, str], formats: Formats, missing: str = ""
) -> list[list[str]]:
    """Format the cells of each row, in the order of the headings."""
    formats = formats or {}

    def cell_text(row: Mapping[str, Any], key: str) -> str:
        value = row.get(key)
        if value is None:
            return missing
        value_format = formats.get(key)
        if not value_format:
            return str(value)
        if callable(value_format):
            return value_format(value)
        return format(value, value_format)

    cells = []
    for row in rows:
        cells.append([cell_text(row, key) for key in headings])
    return cells
