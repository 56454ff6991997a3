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
from medseg.geometry.grid import rounded_ml
from medseg.inference.segmentation import describe_bounds
from medseg.io.spreadsheet import Link, Sheet, SheetColumn, write_spreadsheet
from medseg.io.tables import read_csv, refuse_table, write_csv
from medseg.metrics.hu_statistics import EMPHYSEMA_HU, PERCENTILES
from medseg.prediction.batch import BatchCase
from medseg.prediction.case_report import locked_folder, read_report, report_path
from medseg.prediction.result_files import ENDINGS
from medseg.prediction.scans import check_outputs
from medseg.report.case_viewer import structures_of
from medseg.report.contact_sheet import Card, write_contact_sheet
from medseg.task import Task

SUMMARY_FILE = "summary.csv"
SPREADSHEET_FILE = "summary.xlsx"
PAGE_FILE = "index.html"
# First columns of the `summary.csv` of `evaluate`. They tell it from the `summary.csv` of a batch.
EVALUATION_COLUMNS = ("region", "trust", "metric")
# Separates the sentences of a cell in `summary.csv`.
SEPARATOR = " | "
# Explanation of the column `status`.
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
        unit: Unit of its numbers; "" for texts.
        meaning: Explanation for the second sheet of `summary.xlsx`.
        width: Width in `summary.xlsx`, in characters.
        number_format: Format of its numbers in `summary.xlsx`.
        is_wrapped: Whether its texts take several lines in `summary.xlsx`.
    """

    key: str
    heading: str
    unit: str
    meaning: str
    width: float = 12.0
    number_format: str = "General"
    is_wrapped: bool = False


class Figure(NamedTuple):
    """Kind of figure that the summary has of each label, and of all labels together.

    Attributes:
        key: Its name in `<case>.json`.
        ending: End of the key of its column, after the name of the label.
        heading: Heading of its column, after the name of the label.
        unit: Its unit.
        meaning: Explanation for the second sheet of `summary.xlsx`, with `{part}` for the label.
        number_format: Format of its numbers in `summary.xlsx`.
        factor: What a number in `<case>.json` is multiplied with.
    """

    key: str
    ending: str
    heading: str
    unit: str
    meaning: str
    number_format: str = "0"
    factor: float = 1


VOLUME = Figure(
    key="ml",
    ending="ml",
    heading="volume",
    unit="ml",
    meaning="Volume of {part}",
    # A small volume with all its digits: "0" would show that of a lesion as 0.
    number_format="[<10]General;0",
)
EMPHYSEMA_TEXT = f"−{-EMPHYSEMA_HU} HU"  # with a minus sign, which is longer than a hyphen
# Doubled braces leave `{part}` in a formatted meaning.
FIGURES_IN_HU = (
    Figure(
        key="mean_hu",
        ending="mean_hu",
        heading="mean",
        unit="HU",
        meaning="Mean of the voxels of {part}",
    ),
    *(
        Figure(
            key=f"p{percent}_hu",
            ending=f"p{percent}_hu",
            heading=f"{percent}th percentile",
            unit="HU",
            meaning=f"Value at or below which {percent} % of the voxels of {{part}} lie",
        )
        for percent in PERCENTILES
    ),
    Figure(
        key=f"share_below_minus_{-EMPHYSEMA_HU}_hu",
        ending=f"below_minus_{-EMPHYSEMA_HU}_percent",
        heading=f"below {EMPHYSEMA_TEXT}",
        unit="%",
        meaning=f"Share of the voxels of {{part}} below {EMPHYSEMA_TEXT}, which counts as "
        "emphysema in an organ of air",
        number_format="0.0",
        factor=100,  # from a share to percent
    ),
)

# Arguments: key, heading, unit (none: these are texts), meaning, width.
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
# Keys of all columns but those of figures: their cells are texts.
TEXT_KEYS = tuple(column.key for column in (*COLUMNS_BEFORE_FIGURES, *COLUMNS_AFTER_FIGURES))


@dataclass(frozen=True)
class SummaryEntry:
    """A scan of the summary.

    Attributes:
        row: Key of a column to the cell, for all columns except `warnings` and `information`.
            Figures are numbers, not texts.
        warnings: Sentences of the column `warnings`.
        information: Sentences of the column `information`.
        report: Content of its `<case>.json`; empty if there is none, as for a failed case.
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
        """List the cells of all columns.

        Args:
            keys: Keys of the columns.
            separator: Stands between two sentences of a cell.

        Returns:
            Key of each column to its cell; None for an empty one.
        """
        sentences = {
            "warnings": separator.join(self.warnings),
            "information": separator.join(self.information),
        }
        known_cells = self.row | sentences
        return {key: known_cells.get(key) for key in keys}


def write_summary(folder: Path, cases: Sequence[BatchCase], task: Task) -> None:
    """Write `summary.csv`, `summary.xlsx` and `index.html` with each scan, also one that failed.

    Scans of earlier predictions into the folder stay in the summary. If the earlier table is
    damaged, they are left out and the user is told.

    Args:
        folder: Folder of the results.
        cases: Cases with their outcomes.
        task: Its labels have columns, whether or not a case has a result.

    Raises:
        UserError: If a file of the summary cannot be written. Nothing is raised if a case has
            failed too: its error is reported instead.
    """
    total_label = total_name(task.labels)
    new_entries = [_entry_of(case, total_label) for case in cases]
    new_names = {entry.name for entry in new_entries}
    # Another prediction into the folder must not write between the reading and the writing.
    with locked_folder(folder):
        entries = [*_earlier_entries(folder, new_names, total_label), *new_entries]
        try:
            _write_files(folder, entries, task, total_label)
        except UserError:
            # Cases may have failed for the same reason, such as a full disk. This error must not
            # hide theirs.
            has_failed_case = any(case.exit_code for case in cases)
            if not has_failed_case:
                raise


def check_summary(folder: Path, protected: Mapping[Path, str]) -> None:
    """Refuse a folder in which the summary would overwrite a file of the input or another table.

    Args:
        folder: Folder of the results.
        protected: Description of each file of the input, from `find_scans`.

    Raises:
        UserError: Names the file.
    """
    names = (SUMMARY_FILE, SPREADSHEET_FILE, PAGE_FILE)
    check_outputs([folder / name for name in names], protected)
    path = folder / SUMMARY_FILE
    refuse_table(
        path,
        EVALUATION_COLUMNS,
        f"the scores of an evaluation; give another output than {folder}",
    )
    try:
        rows = read_csv(path)
    except UserError:  # there is no table, or a damaged one, which `write_summary` reports
        return
    is_other = bool(rows) and not rows[0].keys() >= {"case", "status"}
    if is_other:
        raise UserError(
            f"{path}: expected the table of an earlier prediction, got another one, which would be "
            f"overwritten; move it away or give another output than {folder}"
        )


def _write_files(
    folder: Path, entries: Sequence[SummaryEntry], task: Task, total_label: str
) -> None:
    """Write the three files of a summary.

    Args:
        folder: Folder of the results.
        entries: All scans.
        task: See `write_summary`.
        total_label: From `total_name`.

    Raises:
        UserError: If a file cannot be written.
    """
    columns = summary_columns(entries, task, total_label)
    keys = [column.key for column in columns]
    rows = [entry.cells(keys, SEPARATOR) for entry in entries]
    write_csv(folder / SUMMARY_FILE, rows, keys)
    write_spreadsheet(folder / SPREADSHEET_FILE, _sheets(columns, entries))
    cards = [_card_of(entry, folder, total_label) for entry in entries]
    write_contact_sheet(folder / PAGE_FILE, cards, structures_of(task))


def total_name(labels: Mapping[str, int]) -> str:
    """Choose a name for all labels together that no label has."""
    name = "total"
    while name in labels:
        name = f"{name}_of_all"
    return name


def summary_columns(entries: Sequence[SummaryEntry], task: Task, total_label: str) -> list[Column]:
    """List the columns: texts, and figures of all labels.

    The labels are those of the task, and those of other tasks whose cases are in the folder. A
    label has its figures in HU if the images of the task are CT, or if a scan has such a figure.

    Args:
        entries: All scans.
        task: See `write_summary`.
        total_label: From `total_name`.
    """
    # Dictionaries instead of sets, because the order of a set of texts differs from process to
    # process.
    numeric_keys: dict[str, None] = {}
    for entry in entries:
        for key in entry.row:
            if key not in TEXT_KEYS:
                numeric_keys[key] = None
    labels = dict.fromkeys([total_label, *task.labels])
    # Every label has a volume: the keys of these columns name the labels of other tasks.
    volume_ending = f"_{VOLUME.ending}"
    for key in numeric_keys:
        if key.endswith(volume_ending):
            labels[key.removesuffix(volume_ending)] = None
    columns = list(COLUMNS_BEFORE_FIGURES)
    columns += [_figure_column(VOLUME, label, total_label) for label in labels]
    for label in labels:
        columns_in_hu = [_figure_column(figure, label, total_label) for figure in FIGURES_IN_HU]
        has_figure = any(column.key in numeric_keys for column in columns_in_hu)
        if task.is_ct or has_figure:
            columns += columns_in_hu
    return [*columns, *COLUMNS_AFTER_FIGURES]


def _figure_column(figure: Figure, label: str, total_label: str) -> Column:
    """Describe the column of a figure of one label; `total_label` stands for all together."""
    shown_label = label.replace("_", " ")
    part = "all labels together" if label == total_label else f"the label {shown_label}"
    return Column(
        key=f"{label}_{figure.ending}",
        heading=f"{shown_label}: {figure.heading} ({figure.unit})",
        unit=figure.unit,
        meaning=figure.meaning.format(part=part),
        number_format=figure.number_format,
    )


def _entry_of(case: BatchCase, total_label: str) -> SummaryEntry:
    """Make the entry of a case of this batch, which may have failed."""
    if case.exit_code:
        identity = case.scan.identity
        row = {
            "case": case.scan.name,
            "status": "failed",
            "patient": identity.patient or None,
            "date": identity.study_date or None,
        }
        return SummaryEntry(row, warnings=case.messages, information=(), report={})
    report = case.report
    if report is None:
        # The case was skipped, since its results are up to date: the earlier report counts.
        report = read_report(case.output)
    return _entry_of_report(case.scan.name, report, total_label)


def _entry_of_report(name: str, report: Mapping[str, Any], total_label: str) -> SummaryEntry:
    """Make the entry of a case that has a result."""
    warnings = list(map(str, report.get("warnings", [])))
    row = _row_of(name, report, total_label)
    return SummaryEntry(row, warnings, information_in_report(report), report)


def _earlier_entries(folder: Path, new_names: set[str], total_label: str) -> list[SummaryEntry]:
    """Make the entries of scans that earlier predictions into the folder have listed.

    Each is made from the report of its case. A row without a report, or of a scan that has failed
    since its report was written, stays as it is.

    Args:
        folder: Folder of the results.
        new_names: Names of the cases of this prediction, which are left out.
        total_label: From `total_name`.
    """
    path = folder / SUMMARY_FILE
    if not path.exists():
        return []
    try:
        rows = read_csv(path)
    except UserError:
        # Without the table it is unknown which of the reports beside it belong to the summary.
        say(
            f"{path}: it is damaged, so the scans of earlier predictions are left out of the "
            "summary; predict them again to list them."
        )
        return []
    entries: dict[str, SummaryEntry] = {}
    for row in rows:
        name = row.get("case")
        # A row of another table, as of scores, or a damaged one.
        if not name or "status" not in row:
            continue
        # A table of an older version has a row for each label of a case: the first one counts.
        if name in new_names or name in entries:
            continue
        output = folder / f"{name}.nii.gz"
        report = read_report(output)
        # The report of a scan that failed later is that of an earlier prediction.
        has_failed = row["status"] == "failed"
        if report and has_failed and _is_older(report_path(output), path):
            report = {}
        if report:
            entries[name] = _entry_of_report(name, report, total_label)
        else:
            warnings = _sentences(row.get("warnings"))
            information = _sentences(row.get("information"))
            entries[name] = SummaryEntry(_earlier_row(row), warnings, information, report={})
    return list(entries.values())


def _is_older(path: Path, other: Path) -> bool:
    """Tell whether a file was written before another one; both exist."""
    return path.stat().st_mtime < other.stat().st_mtime


def _earlier_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row that was read from `summary.csv`.

    A cell of a column that is not in `TEXT_KEYS` becomes a number, or is left out if it is none. In
    a table of an older version, whose rows are of one label each, all these cells are left out.
    """
    cells: dict[str, Any] = {}
    is_of_one_label = "label" in row
    for key, cell in row.items():
        if key in TEXT_KEYS:
            cells[key] = cell or None
        elif not is_of_one_label:
            with suppress(TypeError, ValueError):  # an empty cell, or a text
                number = float(cell)
                cells[key] = int(number) if number.is_integer() else number
    return cells


def _row_of(name: str, report: Mapping[str, Any], total_label: str) -> dict[str, Any]:
    """Make the row of a case from its report.

    Args:
        name: Name of the case.
        report: Content of `<case>.json`. Those of older versions lack some keys.
        total_label: From `total_name`.
    """
    identity = report.get("identity") or {}
    volumes_ml = report.get("volume_ml") or {}
    statistics = report.get("statistics", {})
    # Reports of older versions lack the volume of all labels together: the sum stands in for it.
    total_figures = {"ml": sum(volumes_ml.values()), **report.get("total_statistics", {})}
    figures_by_label = dict(statistics)
    for label, volume_ml in volumes_ml.items():
        figures_by_label[label] = {**statistics.get(label, {}), "ml": volume_ml}
    # Set last, so that it replaces a label of another task that has the name of the total.
    figures_by_label[total_label] = total_figures
    row: dict[str, Any] = {
        "case": name,
        "status": report.get("status"),
        "patient": identity.get("patient") or None,
        "date": identity.get("study_date") or None,
    }
    for label, values in figures_by_label.items():
        for figure in (VOLUME, *FIGURES_IN_HU):
            value = values.get(figure.key)
            if value is None:
                continue
            if figure is VOLUME:
                row[f"{label}_{figure.ending}"] = rounded_ml(value)
            else:
                row[f"{label}_{figure.ending}"] = round(figure.factor * value, 2)
    row["dice_at_least"] = describe_bounds(read_bounds(report))
    # The first file is the label map, if it was saved.
    file_names = list(report.get("results", {}))
    row["result"] = file_names[0] if file_names else None
    return row


def _sheets(columns: Sequence[Column], entries: Sequence[SummaryEntry]) -> dict[str, Sheet]:
    """Make the sheets of `summary.xlsx`: the scans, and an explanation of each column.

    Returns:
        Name of each sheet to its content.
    """
    scan_columns = []
    explanations = []
    for column in columns:
        scan_column = SheetColumn(
            key=column.key,
            heading=column.heading,
            width=column.width,
            number_format=column.number_format,
            is_wrapped=column.is_wrapped,
        )
        scan_columns.append(scan_column)
        explanation = {
            "heading": column.heading,
            "key": column.key,
            "unit": column.unit or None,
            "meaning": column.meaning,
        }
        explanations.append(explanation)
    keys = [column.key for column in columns]
    scan_rows = []
    for entry in entries:
        cells = entry.cells(keys, "\n")
        file_name = cells["result"]
        if file_name:
            cells["result"] = Link(target=file_name, text=file_name)
        with suppress(TypeError, ValueError):  # stays as it is if empty, or not written as a date
            cells["date"] = date.fromisoformat(cells["date"])
        scan_rows.append(cells)
    explanation_columns = (
        SheetColumn("heading", "column", width=38.0),
        SheetColumn("key", f"in {SUMMARY_FILE}", width=38.0),
        SheetColumn("unit", "unit", width=8.0),
        SheetColumn("meaning", "meaning", width=90.0, is_wrapped=True),
    )
    return {
        "scans": Sheet(scan_columns, scan_rows, num_fixed=1),  # the names stay in view
        "columns": Sheet(explanation_columns, explanations),
    }


def _card_of(entry: SummaryEntry, folder: Path, total_label: str) -> Card:
    """Describe a case for the page `index.html`.

    Args:
        entry: The case.
        folder: Folder of the results; pictures that lie there are linked.
        total_label: From `total_name`.
    """
    row = entry.row
    report = entry.report
    warning_codes = []
    for finding in report.get("findings", []):
        if finding["severity"] != Severity.information:
            warning_codes.append(str(finding["code"]))
    picture_files = {}
    for kind in ("preview", "viewer"):
        file_name = f"{entry.name}{ENDINGS[kind]}"
        # A picture of an earlier prediction, which the report does not list, would show labels that
        # are not those of the case any more.
        if file_name in report.get("results", {}) and (folder / file_name).is_file():
            picture_files[kind] = file_name
    agreements = report.get("agreements") or {}
    total_ml = row.get(f"{total_label}_ml")
    volumes_ml = {total_label: total_ml, **report.get("volume_ml", {})}
    # Set again, so that it replaces a label of another task that has the name of the total.
    volumes_ml[total_label] = total_ml
    return Card(
        name=entry.name,
        status=row.get("status") or "",
        patient=row.get("patient") or "",
        date=row.get("date") or "",
        volumes_ml=volumes_ml,
        warnings=entry.warnings,
        information=entry.information,
        codes=list(dict.fromkeys(warning_codes)),  # each once
        least_agreement=min(agreements.values(), default=None),
        bound=row.get("dice_at_least") or "",
        preview=picture_files.get("preview", ""),
        viewer=picture_files.get("viewer", ""),
    )


def _sentences(cell: str | None) -> list[str]:
    """Split a cell into its sentences; none for an empty cell."""
    return cell.split(SEPARATOR) if cell else []
