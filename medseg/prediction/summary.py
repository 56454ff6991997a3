"""Summary of a batch: `summary.csv` and `summary.xlsx`, a row for each scan, and `index.html`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from medseg.console import say
from medseg.errors import UserError
from medseg.evaluation.reports import information_in_report, read_bounds
from medseg.findings import Severity
from medseg.inference.segmentation import describe_bounds
from medseg.io.spreadsheet import Link, Sheet, SheetColumn, write_spreadsheet
from medseg.io.tables import read_csv, write_csv
from medseg.metrics.hu_statistics import EMPHYSEMA_HU, PERCENTILES
from medseg.prediction.batch import BatchCase
from medseg.prediction.case_report import locked_folder, read_report
from medseg.prediction.result_files import ENDINGS
from medseg.report.case_viewer import structures_of
from medseg.report.contact_sheet import Card, write_contact_sheet
from medseg.task import Task

SUMMARY_FILE = "summary.csv"
SPREADSHEET_FILE = "summary.xlsx"
PAGE_FILE = "index.html"
# Separates the sentences of a cell in `summary.csv`.
SEPARATOR = " | "
STATUS_MEANING = (
    "ok; warnings: there are some; not_hu: the values of the scan are not HU, so the labels are "
    "doubtful; failed: there is no result, and the warning says why"
)


@dataclass(frozen=True)
class Column:
    """Column of the summary.

    Attributes:
        key: Its name in `summary.csv`.
        heading: Its heading in `summary.xlsx`.
        unit: Unit of its numbers; "" of texts.
        meaning: Sentence for the second sheet of `summary.xlsx`.
        width: Its width there, in characters.
        number_format: Format of its numbers there.
        is_wrapped: Whether its texts take several lines there.
    """

    key: str
    heading: str
    unit: str
    meaning: str
    width: float = 12.0
    number_format: str = "General"
    is_wrapped: bool = False


class Figure(NamedTuple):
    """Figure of a label, or of all labels together.

    Attributes:
        key: Its name in `<case>.json`.
        ending: End of the name of its column.
        heading: Heading after the name of the label.
        unit: Its unit.
        meaning: Sentence for the second sheet, with `{part}` for the label.
        number_format: Digits in `summary.xlsx`.
        factor: Factor from the number in `<case>.json`.
    """

    key: str
    ending: str
    heading: str
    unit: str
    meaning: str
    number_format: str = "0"
    factor: float = 1


VOLUME = Figure("ml", "ml", "volume", "ml", "Volume of {part}")
EMPHYSEMA_TEXT = f"−{-EMPHYSEMA_HU} HU"
FIGURES_IN_HU = (
    Figure("mean_hu", "mean_hu", "mean", "HU", "Mean of the voxels of {part}"),
    *(
        Figure(
            f"p{percent}_hu",
            f"p{percent}_hu",
            f"{percent}th percentile",
            "HU",
            f"Value at or below which {percent} % of the voxels of {{part}} lie",
        )
        for percent in PERCENTILES
    ),
    Figure(
        f"share_below_minus_{-EMPHYSEMA_HU}_hu",
        f"below_minus_{-EMPHYSEMA_HU}_percent",
        f"below {EMPHYSEMA_TEXT}",
        "%",
        f"Share of the voxels of {{part}} below {EMPHYSEMA_TEXT}, which counts as emphysema in an "
        "organ of air",
        number_format="0.0",
        factor=100,
    ),
)

COLUMNS_BEFORE_FIGURES = (
    Column("case", "case", "", "Name of the scan, with which the names of its files begin", 24.0),
    Column("status", "status", "", STATUS_MEANING),
    Column("patient", "patient", "", "Patient ID of the DICOM headers or of the case table", 18.0),
    Column("date", "date", "", "Date of the study, by the DICOM headers or the case table"),
)
COLUMNS_AFTER_FIGURES = (
    Column(
        "dice_at_least",
        "bound on Dice",
        "",
        "Dice coefficient that the labels of a region reach in most patients, as far as one is "
        "stated; it needs no reference",
        36.0,
        is_wrapped=True,
    ),
    Column("warnings", "warnings", "", "What asks for a look at the result", 70.0, is_wrapped=True),
    Column("information", "information", "", "What asks for nothing", 50.0, is_wrapped=True),
    Column("result", "result", "", "File of the result, beside this table", 28.0),
)
TEXT_KEYS = tuple(column.key for column in (*COLUMNS_BEFORE_FIGURES, *COLUMNS_AFTER_FIGURES))


@dataclass(frozen=True)
class SummaryEntry:
    """A scan of the summary.

    Attributes:
        row: Its cells in `summary.csv` but for the sentences; numbers as numbers.
        warnings: Sentences that ask for a look.
        information: Sentences that ask for nothing.
        report: Content of its `<case>.json`; empty where it failed.
    """

    row: dict[str, Any]
    warnings: Sequence[str]
    information: Sequence[str]
    report: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the case."""
        return str(self.row["case"])

    def cells(self, keys: Sequence[str], separator: str) -> dict[str, Any]:
        """Cells of its row by key, with a separator between two sentences."""
        sentences = {
            "warnings": separator.join(self.warnings),
            "information": separator.join(self.information),
        }
        cells = self.row | sentences
        return {key: cells.get(key) for key in keys}


def write_summary(folder: Path, cases: Sequence[BatchCase], task: Task) -> None:
    """Write `summary.csv`, `summary.xlsx` and `index.html`: each scan, also one that failed.

    Scans that earlier predictions wrote into the folder stay, those of tables of older versions
    too, unless the table is damaged: then the user is told.

    Args:
        folder: Folder of the results.
        cases: Cases with their outcomes.
        task: Its labels have columns, whether or not a case has a result.

    Raises:
        UserError: If a file cannot be written and no case has failed.
    """
    total = total_name(task.labels)
    new_entries = [_entry_of(case, total) for case in cases]
    new_names = {entry.name for entry in new_entries}
    with locked_folder(folder):
        entries = [*_earlier_entries(folder, new_names, total), *new_entries]
        try:
            _write_files(folder, entries, task, total)
        except UserError:
            # The failed cases, as on a full disk, are the error to report: this one must not hide
            # them.
            if not any(case.exit_code for case in cases):
                raise


def _write_files(folder: Path, entries: Sequence[SummaryEntry], task: Task, total: str) -> None:
    """Write the three files of a summary.

    Raises:
        UserError: If a file cannot be written.
    """
    columns = summary_columns(entries, task, total)
    keys = [column.key for column in columns]
    rows = [entry.cells(keys, SEPARATOR) for entry in entries]
    write_csv(folder / SUMMARY_FILE, rows, keys)
    write_spreadsheet(folder / SPREADSHEET_FILE, _sheets(columns, entries))
    cards = [_card_of(entry, folder, total) for entry in entries]
    write_contact_sheet(folder / PAGE_FILE, cards, structures_of(task))


def total_name(labels: Mapping[str, int]) -> str:
    """Name all labels together, as no label is named."""
    name = "total"
    while name in labels:
        name = f"{name}_of_all"
    return name


def summary_columns(entries: Sequence[SummaryEntry], task: Task, total: str) -> list[Column]:
    """List the columns: the labels of the task, and those of other cases in the folder.

    Figures in HU are left out where no scan has any.
    """
    numeric_keys: dict[str, None] = {}
    for entry in entries:
        # In the order of the row: sets of texts have another order in each process.
        for key in entry.row:
            if key not in TEXT_KEYS:
                numeric_keys[key] = None
    labels = dict.fromkeys([total, *task.labels])
    # Every label has a volume, those of earlier tasks in the folder too.
    ending = f"_{VOLUME.ending}"
    for key in numeric_keys:
        if key.endswith(ending):
            labels[key.removesuffix(ending)] = None
    columns = list(COLUMNS_BEFORE_FIGURES)
    columns += [_figure_column(VOLUME, label, total) for label in labels]
    for label in labels:
        in_hu = [_figure_column(figure, label, total) for figure in FIGURES_IN_HU]
        if task.is_ct or any(column.key in numeric_keys for column in in_hu):
            columns += in_hu
    return [*columns, *COLUMNS_AFTER_FIGURES]


def _figure_column(figure: Figure, label: str, total: str) -> Column:
    """Describe the column of a figure of a label, or of all of them."""
    shown_label = label.replace("_", " ")
    part = "all labels together" if label == total else f"the label {shown_label}"
    return Column(
        f"{label}_{figure.ending}",
        f"{shown_label}: {figure.heading} ({figure.unit})",
        figure.unit,
        figure.meaning.format(part=part),
        number_format=figure.number_format,
    )


def _entry_of(case: BatchCase, total: str) -> SummaryEntry:
    """Make the entry of a case of this batch."""
    if case.exit_code:
        identity = case.scan.identity
        row = {
            "case": case.scan.name,
            "status": "failed",
            "patient": identity.patient or None,
            "date": identity.study_date or None,
        }
        return SummaryEntry(row, case.messages, (), {})
    # A case whose results were up to date wrote no report: its earlier one counts.
    report = case.report or read_report(case.output)
    return _entry_of_report(case.scan.name, report, total)


def _entry_of_report(name: str, report: Mapping[str, Any], total: str) -> SummaryEntry:
    """Make the entry of a case that has a result."""
    warnings = list(map(str, report.get("warnings", [])))
    row = _row_of(name, report, total)
    return SummaryEntry(row, warnings, information_in_report(report), report)


def _earlier_entries(folder: Path, new_names: set[str], total: str) -> list[SummaryEntry]:
    """Make the entries of earlier predictions into the folder, from their reports.

    A row without a report, as of a scan that failed, stays as it is. Tables of older versions have
    a row for each label: of these the texts stay.
    """
    path = folder / SUMMARY_FILE
    if not path.exists():
        return []
    try:
        rows = read_csv(path)
    except UserError:
        # Only the table says which of the reports beside it belong to the summary.
        say(
            f"{path}: it is damaged, so the scans of earlier predictions are left out of the "
            "summary; predict them again to list them."
        )
        return []
    entries: dict[str, SummaryEntry] = {}
    for row in rows:
        name = row.get("case")
        if not name or "status" not in row:
            continue
        # A table of an older version has several rows of a case.
        if name in new_names or name in entries:
            continue
        report = read_report(folder / f"{name}.nii.gz")
        if report:
            entries[name] = _entry_of_report(name, report, total)
        else:
            warnings = _sentences(row.get("warnings"))
            information = _sentences(row.get("information"))
            entries[name] = SummaryEntry(_earlier_row(row), warnings, information, {})
    return list(entries.values())


def _earlier_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Take the cells of a row of `summary.csv`, numbers as numbers; unknown texts are left out."""
    cells: dict[str, Any] = {}
    is_of_one_label = "label" in row
    for key, cell in row.items():
        if key in TEXT_KEYS:
            cells[key] = cell or None
        elif not is_of_one_label:
            with suppress(TypeError, ValueError):
                number = float(cell)
                cells[key] = int(number) if number.is_integer() else number
    return cells


def _row_of(name: str, report: Mapping[str, Any], total: str) -> dict[str, Any]:
    """Make the row of a case from its report.

    Reports of older versions lack figures of all labels together, except for the volume.
    """
    identity = report.get("identity") or {}
    volumes = report.get("volume_ml") or {}
    statistics = report.get("statistics", {})
    total_figures = {"ml": sum(volumes.values()), **report.get("total_statistics", {})}
    figures = dict(statistics)
    for label, volume_ml in volumes.items():
        figures[label] = {**statistics.get(label, {}), "ml": volume_ml}
    # A label of another task with the name of the total gives way to it.
    figures[total] = total_figures
    row: dict[str, Any] = {
        "case": name,
        "status": report.get("status"),
        "patient": identity.get("patient") or None,
        "date": identity.get("study_date") or None,
    }
    for label, label_figures in figures.items():
        for figure in (VOLUME, *FIGURES_IN_HU):
            value = label_figures.get(figure.key)
            if value is not None:
                row[f"{label}_{figure.ending}"] = round(figure.factor * value, 2)
    row["dice_at_least"] = describe_bounds(read_bounds(report))
    # The first file is the label map, if it was saved.
    row["result"] = next(iter(report.get("results", {})), None)
    return row


def _sheets(columns: Sequence[Column], entries: Sequence[SummaryEntry]) -> dict[str, Sheet]:
    """Make the sheets of `summary.xlsx`: the scans, and an explanation of each column."""
    sheet_columns = []
    about = []
    for column in columns:
        sheet_column = SheetColumn(
            column.key, column.heading, column.width, column.number_format, column.is_wrapped
        )
        sheet_columns.append(sheet_column)
        explanation = {
            "heading": column.heading,
            "key": column.key,
            "unit": column.unit or None,
            "meaning": column.meaning,
        }
        about.append(explanation)
    keys = [column.key for column in columns]
    rows = []
    for entry in entries:
        cells = entry.cells(keys, "\n")
        if cells["result"]:
            cells["result"] = Link(cells["result"], cells["result"])
        with suppress(TypeError, ValueError):  # none, or not written as a date
            cells["date"] = date.fromisoformat(cells["date"])
        rows.append(cells)
    about_columns = (
        SheetColumn("heading", "column", 38.0),
        SheetColumn("key", f"in {SUMMARY_FILE}", 38.0),
        SheetColumn("unit", "unit", 8.0),
        SheetColumn("meaning", "meaning", 90.0, is_wrapped=True),
    )
    return {
        "scans": Sheet(sheet_columns, rows, num_fixed=1),
        "columns": Sheet(about_columns, about),
    }


def _card_of(entry: SummaryEntry, folder: Path, total: str) -> Card:
    """Describe a case for the page: texts of its row, and files that are there."""
    row = entry.row
    report = entry.report
    warning_codes = []
    for finding in report.get("findings", []):
        if finding["severity"] != Severity.information:
            warning_codes.append(str(finding["code"]))
    files = {}
    for kind in ("preview", "viewer"):
        file_name = f"{entry.name}{ENDINGS[kind]}"
        if (folder / file_name).is_file():
            files[kind] = file_name
    agreements = report.get("agreements") or {}
    return Card(
        name=entry.name,
        status=row.get("status") or "",
        patient=row.get("patient") or "",
        date=row.get("date") or "",
        volumes_ml={total: row.get(f"{total}_ml"), **report.get("volume_ml", {})},
        warnings=entry.warnings,
        information=entry.information,
        codes=list(dict.fromkeys(warning_codes)),
        least_agreement=min(agreements.values(), default=None),
        bound=row.get("dice_at_least") or "",
        preview=files.get("preview", ""),
        viewer=files.get("viewer", ""),
    )


def _sentences(cell: str | None) -> list[str]:
    """Split the sentences of a cell."""
    return cell.split(SEPARATOR) if cell else []
