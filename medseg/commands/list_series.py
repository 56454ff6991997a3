"""The `list` command: prints the series below a DICOM folder, and writes their case table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from medseg.config.schema import ListConfig
from medseg.console import say
from medseg.errors import UserError
from medseg.io.atomic import check_writable, replace_text
from medseg.io.dicom.frames import printable
from medseg.io.dicom.listing import ListedSeries
from medseg.io.dicom.listing import list_series as list_folder
from medseg.io.dicom.pick import pick_each_study, study_of
from medseg.io.inputs import dicom_files, input_format, is_dicomdir
from medseg.io.names import RAW_NAMES, free_name, joined_name
from medseg.io.tables import csv_text, print_table
from medseg.io.text import read_text
from medseg.wording import counted, quote_for_shell

COLUMNS = {
    "patient": "patient",
    "study_date": "date",
    "number": "series",
    "description": "description",
    "kernel": "kernel",
    "slices": "slices",
    "thickness_mm": "thickness",
    "spacing_mm": "spacing mm",
    "voxels": "voxels",
    "mb": "MB",
    "fault": "why it is no scan",
}
"""Columns that are printed, and their headings."""

TABLE_COLUMNS = ("case", "image", "series", *[key for key in COLUMNS if key != "fault"])
"""Columns of the case table: the columns of `read_case_table`, then the printed ones."""

MAX_TEXT = 40
"""Letters of a text from a header that are printed; longer texts are cut."""

MAX_NAME = 100
"""Letters of the name of a case, before the suffix that makes it unique."""


def list_series(config: ListConfig) -> int:
    """Print the series below a folder and write the scans among them as a case table.

    Raises:
        UserError: If the folder holds no DICOM file, or the table cannot be written.
    """
    folder = Path(config.input)
    output = None if config.output is None else Path(config.output)
    _check_input(folder)
    if output is not None:
        _check_table(output)
    # A DICOMDIR stands for the medium that it lists.
    if is_dicomdir(folder):
        folder = folder.parent
    with _file_counter() as count_file:
        listing = list_folder(
            folder, config.modality.value, on_file=count_file, lists_unreadable=True
        )
    print_table([_printed(listed) for listed in listing], COLUMNS)
    scans = [listed for listed in listing if not listed.fault]
    studies = set(map(study_of, scans))
    print(f"{len(listing)} series: {len(scans)} scans of {len(studies)} studies", flush=True)
    if output is None:
        return 0
    if not scans:
        raise UserError(f"{folder}: there is no scan to write to {output}; see the last column.")
    if config.series_pick is not None:
        # One scan of each study with a matching scan.
        scans = pick_each_study(scans, config.series_pick)
        _say_left_out(len(studies) - len(scans), config.series_pick)
    if not scans:
        raise UserError(
            f"series_pick={config.series_pick}: no scan has it in its description or kernel; "
            "give a text of these columns, thinnest or largest"
        )
    rows = [_table_row(name, scan) for name, scan in _named(scans)]
    text = csv_text(rows, TABLE_COLUMNS)
    _refuse_other_table(output, text)
    replace_text(output, text, errors=RAW_NAMES)
    print(f"written: {output}, {counted(len(scans), 'case')}")
    table = quote_for_shell(f"input={output}")
    print(f"next: medseg predict {table} output=<folder>", flush=True)
    return 0


def _say_left_out(num_studies: int, rule: str) -> None:
    """Say how many studies a rule leaves out; nothing where it leaves out none."""
    if num_studies == 0:
        return
    studies = counted(num_studies, "study", "studies")
    say(f"series_pick={rule} leaves out {studies}, in whose scans nothing matches")


def _check_input(folder: Path) -> None:
    """Check that an input is a folder with DICOM files, or a DICOM file.

    Raises:
        UserError: If the input is another folder or file, or cannot be read.
    """
    unreadable: list[UserError] = []

    def note_unreadable(path: Path, error: OSError) -> None:
        sentence = f"{path}: cannot be read ({error.strerror or error}); check its permissions."
        unreadable.append(UserError(sentence))

    if folder.is_dir():
        if next(dicom_files(folder, on_unreadable=note_unreadable), None) is not None:
            return
        # The folder may hold DICOM files that cannot be read.
        if unreadable:
            raise unreadable[0]
        kind = "a folder without DICOM files"
    elif input_format(folder) != "dicom":
        kind = "a volume file"
    else:
        return
    raise UserError(
        f"{folder}: expected a folder of DICOM files, got {kind}; "
        "`predict` takes scans of other formats as they are, without a list."
    )


def _check_table(output: Path) -> None:
    """Check that a case table can be written to a path.

    Raises:
        UserError: If the name does not end in .csv, the path is a folder, or its folder cannot be
            written.
    """
    if output.suffix.lower() != ".csv" or output.is_dir():
        raise UserError(f"output={output}: expected a file that ends in .csv")
    check_writable(output.parent)


def _refuse_other_table(output: Path, text: str) -> None:
    """Refuse to replace a table of other content, which a person may have edited.

    Raises:
        UserError: If the table exists with another text.
    """
    if output.exists() and read_text(output, errors=RAW_NAMES) != text:
        raise UserError(f"{output} exists and holds other cases; remove it, or give another output")


@contextmanager
def _file_counter() -> Iterator[Callable[[], None]]:
    """Show a count of files in a terminal; yields the function that adds one file to it."""
    console = Console(stderr=True)
    with Progress(
        "{task.completed:.0f} files read", console=console, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=None)
        yield lambda: progress.advance(bar)


def _row(listed: ListedSeries) -> dict[str, Any]:
    """Describe a series by the printed columns."""
    # Patient, study and series, as the headers of the slices name them.
    identity = listed.series.identity
    voxels = ""
    if listed.shape:
        rows, columns = listed.shape  # pixels of a slice
        voxels = f"{columns} x {rows} x {listed.num_slices}"
    number = identity.series_number
    if listed.part:
        number += f"/{listed.part}"
    descriptions = [text for text in (identity.series_description, listed.phase) if text]
    return {
        "patient": identity.patient,
        "study_date": identity.study_date,
        "number": number,
        "description": ", ".join(descriptions),
        "kernel": listed.kernel,
        "slices": listed.num_slices,
        "thickness_mm": listed.thickness_mm,
        "spacing_mm": " x ".join(f"{mm:.3g}" for mm in listed.spacing_mm),
        "voxels": voxels,
        "mb": round(listed.num_bytes / 1e6, 1),
        "fault": listed.fault,
    }


def _printed(listed: ListedSeries) -> dict[str, Any]:
    """Describe a series for a terminal: texts of its header are cut, and cannot control it."""
    row = _row(listed)
    for column in ("patient", "study_date", "number", "description", "kernel"):
        row[column] = _short(row[column])
    return row


def _short(text: str) -> str:
    """Cut a text to `MAX_TEXT` letters, and quote one that would control a terminal."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return printable(text)


def _named(scans: Sequence[ListedSeries]) -> Iterator[tuple[str, ListedSeries]]:
    """Name each scan by patient, date and series number; names are unique."""
    names: set[str] = set()
    for scan in scans:
        series = scan.series
        number = series.number
        if scan.part:
            number += f".{scan.part}"
        name = joined_name([series.patient, series.date, number])
        # A name that begins with a dot would name a hidden file.
        name = name[:MAX_NAME].lstrip(".")
        name = free_name(name or "scan", names)
        names.add(name)
        yield name, scan


def _table_row(name: str, scan: ListedSeries) -> dict[str, Any]:
    """Describe a scan as a row of the case table."""
    row = _row(scan)
    del row["fault"]
    return {"case": name, "image": scan.folder.absolute(), "series": scan.choice, **row}
