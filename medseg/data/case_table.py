"""Case tables: the scans of a data set with their files and patients, and their split."""

import csv
import difflib
import hashlib
import io
import itertools
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medseg.data.audit.finding import check_ignored
from medseg.data.options import on_both_sides
from medseg.errors import UserError
from medseg.io.inputs import CONTROL_CHARACTERS, volume_suffix
from medseg.io.names import RAW_NAMES, is_utf8
from medseg.io.tables import plain_cell, write_csv
from medseg.io.text import read_text
from medseg.preprocess.scale import AS_STORED, HuScale
from medseg.task import LabelValues

TABLE_NAME = "cases.csv"
# Table that `phantom` writes. A folder of another program may hold a file of this name.
PHANTOM_TABLE_NAME = "table.csv"
SPLITS = ("train", "val", "test")
TRUST_PREFIX = "trust_"
CHANNEL_PREFIX = "image_"
FOLD_PREFIX = "fold_"
FOLD_SIDES = ("train", "val")  # cells of the columns fold_0, fold_1, …
# Columns that keep patients apart. Ignored in silence, they would leave a patient on both sides.
SPLIT_COLUMNS = ("patient", "split", "fold")
# File systems limit names to 255 bytes, and the cache names temporary folders after a case, with a
# few bytes more.
MAX_NAME_BYTES = 180
# Far above any real table: more cells in a line, or a greater fold, mean another kind of file.
MAX_COLUMNS = 1000
MAX_FOLD = 9999


def list_channels(
    first: Path, others: Sequence[Path | None], num_channels: int
) -> list[Path | None]:
    """List the file of each channel of a case.

    Args:
        first: Image of the first channel.
        others: Images of the other channels; may be shorter or longer than needed.
        num_channels: Number of channels of the task.

    Returns:
        One entry for each channel; None where there is no file. Surplus images are left out. A
        single NIfTI file is repeated: it holds all channels along its fourth axis.
    """
    if not others and volume_suffix(first) in (".nii", ".nii.gz"):
        return [first] * num_channels
    used_others = others[: num_channels - 1]
    missing = [None] * (num_channels - 1 - len(used_others))
    return [first, *used_others, *missing]


@dataclass(frozen=True)
class Case:
    """One scan of the case table.

    Attributes:
        name: Unique name; it names the case's files in the cache and in every result.
        image: Image file, or a folder of DICOM files.
        labels: Label map on the grid of the image, or None.
        patient: Patient of the scan, in Unicode NFC; a patient is never on two sides of a split.
        split: `train`, `val`, `test`, or None where the table gives none.
        trust: Region name to the trust in its reference, e.g. `reference`, `approximate`, `absent`.
        series: DICOM series of the folder, by UID or number; None if the folder has only one.
        hu: Scale from the values of the file to HU.
        ignore_findings: Codes of audit findings that a person has checked and accepts.
        more_images: Images of the channels after the first, the columns `image_1`, `image_2`, …; an
            empty cell is None.
        fold: Number of the fold in which the case is validated; None where the table gives none.
        fold_sides: Side of the case in each fold, the columns `fold_0`, `fold_1`, …: `train`,
            `val`, or None where the fold does not use it; empty where the table has no such
            columns.
        study_date: Date of the examination, such as `2024-01-31`, or "".
    """

    name: str
    image: Path
    labels: Path | None
    patient: str
    split: str | None = None
    trust: dict[str, str] = field(default_factory=dict)
    series: str | None = None
    hu: HuScale = AS_STORED
    ignore_findings: frozenset[str] = frozenset()
    more_images: tuple[Path | None, ...] = ()
    fold: int | None = None
    fold_sides: tuple[str | None, ...] = ()
    study_date: str = ""

    def images(self, num_channels: int) -> list[Path]:
        """List the image of each channel of a task.

        A single image is a 4D file and is repeated for all channels.

        Raises:
            UserError: If the case has fewer images than the task has channels.
        """
        images = []
        missing = []
        channels = list_channels(self.image, self.more_images, num_channels)
        for number, path in enumerate(channels):
            if path is None:
                missing.append(f"{CHANNEL_PREFIX}{number}")
            else:
                images.append(path)
        if missing:
            raise UserError(
                f"The case {self.name!r} has no {' and no '.join(missing)}, "
                f"but the task has {num_channels} channels (task.channels); "
                "fill in these cells of the case table."
            )
        return images


def read_case_table(
    path: Path,
    labels_column: str | None = "labels",
    *,
    hu: HuScale = AS_STORED,
    ignore_findings: frozenset[str] = frozenset(),
    needs_labels: bool = True,
    is_divided: bool = True,
) -> list[Case]:
    """Read a case table.

    Its columns are `case`, `image`, `image_1`, …, `labels`, `patient`, `split`, `fold`, `fold_0`,
    …, `series`, `study_date`, `trust_<region>`, `hu_slope`, `hu_offset` and `ignore_findings`;
    `case`, `image` and `labels` are required. The table is CSV in UTF-8 (with or without byte order
    mark), with cells that contain commas in quotes; paths are relative to its folder. Unknown
    columns are ignored and blank lines skipped. An empty cell means that there is no value;
    `patient` defaults to the case's name. Files are not checked for existence: one missing file
    must not stop the other cases, and a machine that holds only the cache has no files.

    Args:
        path: The table, or a folder that contains it, see `table_at`.
        labels_column: Column of the label maps; None reads no labels (prediction).
        hu: HU scale of rows that do not have their own.
        ignore_findings: Codes of audit findings that all cases ignore, in addition to the codes in
            their cells.
        needs_labels: Whether the column of the label maps must be there.
        is_divided: Whether the cases are divided for training, so that a misspelt column of the
            split is refused.

    Returns:
        The cases in the order of the table, at least one.

    Raises:
        UserError: If the table cannot be read, a column is missing, or a value is not allowed.
    """
    path = table_at(path)
    if volume_suffix(path) is not None:
        raise UserError(
            f"{path}: expected a case table or a data set, got a scan; "
            f"list it in a table ({TABLE_NAME})."
        )
    rows = _rows(path)
    # The header of an empty file is taken as a row without columns.
    _, columns = next(rows, (0, []))
    if not needs_labels and labels_column not in columns:
        labels_column = None
    _check_columns(path, columns, labels_column)
    if is_divided:
        _check_split_columns(path, columns)
    cases: list[Case] = []
    line_of: dict[str, int] = {}
    for line, cells in rows:
        # Spreadsheets leave rows of empty cells at the end.
        if not any(cells):
            continue
        where = f"{path}, line {line}"
        if len(cells) != len(columns):
            raise UserError(
                f"{where}: expected {len(columns)} cells, got {len(cells)}; "
                "put a cell that contains a comma in quotes."
            )
        row = dict(zip(columns, cells, strict=True))
        case = _read_case(
            row,
            path,
            where,
            labels_column=labels_column,
            hu=hu,
            ignore_findings=ignore_findings,
        )
        if case.name in line_of:
            raise UserError(
                f"{where}: the case {case.name!r} is already on line {line_of[case.name]}; "
                "give each case its own name."
            )
        line_of[case.name] = line
        cases.append(case)
    if not cases:
        raise UserError(f"{path}: the table has no case; add one line per scan below the header.")
    return cases


def _check_columns(path: Path, columns: Sequence[str], labels_column: str | None) -> None:
    """Refuse a header that lacks a column, names one twice, or gives folds in two ways.

    Args:
        path: The table, for messages.
        columns: Cells of the header.
        labels_column: Column of the label maps; None where they are not needed.

    Raises:
        UserError: With the columns and the cure.
    """
    required = ["case", "image"]
    if labels_column:
        required.append(labels_column)
    missing = [column for column in required if column not in columns]
    if missing:
        raise UserError(
            f"{path}, line 1: expected the columns {', '.join(required)}, "
            f"but found {', '.join(columns)[:200] or 'none'}; {_how_to_add(missing, columns)}."
        )
    # Spreadsheets leave columns without a name, and several of these are no repetition.
    counts = Counter(column for column in columns if column)
    for column, count in sorted(counts.items()):
        if count > 1:
            raise UserError(
                f"{path}, line 1: the column {column!r} appears twice; keep one of them."
            )
    if {"fold", f"{FOLD_PREFIX}0"} <= set(columns):
        raise UserError(
            f"{path}, line 1: the columns fold and {FOLD_PREFIX}0 both give folds; keep one kind."
        )


def _check_split_columns(path: Path, columns: Sequence[str]) -> None:
    """Refuse columns of the split that would not be read: in capital letters, or after a gap.

    Raises:
        UserError: With the column and the cure.
    """
    for column in columns:
        name = column.casefold()
        if name in SPLIT_COLUMNS and name not in columns:
            raise UserError(
                f"{path}, line 1: the column {column!r} would be ignored; write {name} in small "
                "letters."
            )
    fold_columns = [
        column for column in columns if re.fullmatch(rf"{FOLD_PREFIX}\d+", column, re.ASCII)
    ]
    for number in range(len(fold_columns)):
        expected = f"{FOLD_PREFIX}{number}"
        if expected not in fold_columns:
            raise UserError(
                f"{path}, line 1: there is {fold_columns[-1]} but no {expected}; number the "
                "columns of the folds from 0 without a gap."
            )


def _how_to_add(missing: Sequence[str], columns: Sequence[str]) -> str:
    """Say what to type where a header lacks columns."""
    first = columns[0] if columns else ""
    if first.startswith("sep="):
        return "remove this line, which only some spreadsheets read"
    if len(columns) == 1 and any(sign in first for sign in ";\t"):
        return "separate the cells by commas, not by semicolons or tabs"
    if set(missing) <= {column.casefold() for column in columns}:
        return f"write {', '.join(missing)} in small letters"
    return f"add {', '.join(missing)}"


def table_at(path: Path) -> Path:
    """Find the case table of a folder: the file that `import` writes, else that of `phantom`.

    A path without such a table is returned unchanged.
    """
    imported_table = path / TABLE_NAME
    if imported_table.is_file():
        return imported_table
    phantom_table = path / PHANTOM_TABLE_NAME
    if is_case_table(phantom_table):
        return phantom_table
    return path


def is_case_table(path: Path) -> bool:
    """Whether a file is CSV whose header names the columns of a case table."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    try:
        _, columns = next(_rows(path), (0, []))
    except UserError:
        return False
    return {"case", "image"} <= set(columns)


def named_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Find the files and folders that a case table names in any of its columns.

    Args:
        path: A table that `read_case_table` accepts.

    Yields:
        Name of the case and path of each file or folder that exists.
    """
    rows = _rows(path)
    _, columns = next(rows)
    for _, cells in rows:
        # `read_case_table` has checked the number of cells, except in empty rows.
        row = dict(zip(columns, cells, strict=False))
        for cell in row.values():
            # `Path.exists` would raise for text that is too long for a file name.
            if cell and os.path.exists(path.parent / cell):
                yield row["case"], path.parent / cell


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each row as (number of its first line, stripped cells), the header first.

    Raises:
        UserError: If the file is not UTF-8 or no CSV, or a row has too many cells. Since this is a
            generator, it raises while the rows are read.
    """
    try:
        table = io.StringIO(read_text(path, errors=RAW_NAMES), newline="")
        reader = csv.reader(table, strict=True)
        line = 1
        for cells in reader:
            if len(cells) > MAX_COLUMNS:
                raise UserError(
                    f"{path}, line {line}: expected at most {MAX_COLUMNS} columns, "
                    f"got {len(cells)}; is this a case table?"
                )
            _check_encoding(path, line, cells)
            yield line, [plain_cell(cell.strip()) for cell in cells]
            # A cell in quotes may hold line breaks, so that a row takes several lines.
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}: the case table is not valid CSV ({error}); check its quotes."
        ) from error


def _check_encoding(table: Path, line: int, cells: Sequence[str]) -> None:
    """Refuse a table in another encoding than UTF-8.

    Exception: a cell that names an existing file may hold the bytes of its file name.

    Raises:
        UserError: If a cell is not UTF-8 and names no file of these bytes.
    """
    for cell in cells:
        if is_utf8(cell) or os.path.exists(table.parent / plain_cell(cell.strip())):
            continue
        raise UserError(
            f"{table}, line {line}: expected text in UTF-8, but {cell!r} is none, and no file has "
            "a name of these bytes; save the table in UTF-8 (spreadsheets call it CSV UTF-8)."
        )


def _read_case(
    cells: dict[str, str],
    table: Path,
    where: str,
    *,
    labels_column: str | None,
    hu: HuScale,
    ignore_findings: frozenset[str],
) -> Case:
    """Read a row of a case table.

    Args:
        cells: Column to cell.
        table: The table, to whose folder the paths are relative.
        where: Table and line, for messages.
        labels_column: Column of the label maps; None reads no labels.
        hu: HU scale where the row gives none.
        ignore_findings: Findings that all cases ignore.

    Raises:
        UserError: If a value is not allowed.
    """
    name = cells["case"]
    image = cells["image"]
    if not name or not image:
        empty = "image" if name else "case"
        raise UserError(
            f"{where}: the cell {empty!r} is empty; every case needs a name and an image."
        )
    check_case_name(name, where)
    split = cells.get("split") or None
    if split not in (None, *SPLITS):
        raise UserError(f"{where}: split is {split!r}, expected {', '.join(SPLITS)} or nothing.")
    fold = _read_fold(cells, where)
    fold_sides = _read_fold_sides(cells, where)
    labels = None
    if labels_column and cells[labels_column]:
        labels = table.parent / cells[labels_column]
    # If a row gives only one of the two numbers, the other comes from the configuration.
    slope = _number(cells, "hu_slope", hu.slope, where)
    offset = _number(cells, "hu_offset", hu.offset, where)
    codes = cells.get("ignore_findings", "").split()
    return Case(
        name=name,
        image=table.parent / image,
        labels=labels,
        patient=normalise_name(cells.get("patient") or name),
        split=split,
        fold=fold,
        fold_sides=fold_sides,
        trust=_read_trust(cells),
        series=cells.get("series") or None,
        hu=HuScale(slope, offset),
        more_images=_read_more_images(cells, table.parent),
        ignore_findings=ignore_findings | check_ignored(codes, f"{where}, ignore_findings"),
        study_date=cells.get("study_date") or "",
    )


def normalise_name(name: str) -> str:
    """Write a name in Unicode NFC.

    Some programs write ü as one character, others as two; both must name the same patient.
    """
    return unicodedata.normalize("NFC", name)


def _read_more_images(cells: Mapping[str, str], folder: Path) -> tuple[Path | None, ...]:
    """Read the columns `image_1`, `image_2`, …, whose paths are relative to a folder."""
    images = []
    for _, image in _numbered_cells(cells, CHANNEL_PREFIX, first=1):
        images.append(folder / image if image else None)
    return tuple(images)


def _read_trust(cells: Mapping[str, str]) -> dict[str, str]:
    """Read the columns `trust_<region>` that are not empty."""
    trust = {}
    for column, cell in cells.items():
        if column.startswith(TRUST_PREFIX) and cell:
            trust[column.removeprefix(TRUST_PREFIX)] = cell
    return trust


def _read_fold(cells: Mapping[str, str], where: str) -> int | None:
    """Read the column `fold`; None where there is no such column, or its cell is empty.

    Raises:
        UserError: If it is no whole number from 0 to `MAX_FOLD`.
    """
    fold = cells.get("fold")
    if not fold:
        return None
    # isdigit() alone also takes digits of other scripts and superscripts.
    is_number = fold.isascii() and fold.isdigit()
    # `int` refuses numbers of thousands of digits, so the number of digits is checked before.
    is_long = len(fold.lstrip("0")) > len(str(MAX_FOLD))
    if not is_number or is_long or int(fold) > MAX_FOLD:
        raise UserError(
            f"{where}: fold is {fold[:60]!r}, expected a whole number from 0 to {MAX_FOLD} or "
            "nothing."
        )
    return int(fold)


def _read_fold_sides(cells: Mapping[str, str], where: str) -> tuple[str | None, ...]:
    """Read the side of a case in each fold, the columns `fold_0`, `fold_1`, ….

    Raises:
        UserError: If a side is unknown.
    """
    sides = []
    for column, side in _numbered_cells(cells, FOLD_PREFIX, first=0):
        if side not in ("", *FOLD_SIDES):
            raise UserError(
                f"{where}: {column} is {side!r}, expected {', '.join(FOLD_SIDES)} or nothing."
            )
        sides.append(side or None)
    return tuple(sides)


def _numbered_cells(cells: Mapping[str, str], prefix: str, first: int) -> Iterator[tuple[str, str]]:
    """Yield the columns `<prefix><first>`, `<prefix><first + 1>`, … with their cells.

    The iteration ends at the first number without a column.
    """
    for number in itertools.count(first):
        column = f"{prefix}{number}"
        if column not in cells:
            return
        yield column, cells[column]


def check_case_name(name: str, where: str) -> None:
    """Refuse a case name that cannot name a file.

    Raises:
        UserError: If the name cannot name a file; the message begins with `where`.
    """
    is_safe = not name.startswith(".") and not any(sign in name for sign in "/\\")
    # `CONTROL_CHARACTERS` also matches surrogates, which `encode` cannot write in UTF-8.
    is_text = not CONTROL_CHARACTERS.search(name) and len(name.encode()) <= MAX_NAME_BYTES
    if not is_safe or not is_text:
        raise UserError(
            f"{where}: the case name {name!r} cannot name a file; use no slash, no leading dot, no "
            f"control characters, letters in UTF-8 alone and at most {MAX_NAME_BYTES} bytes."
        )


def _number(cells: dict[str, str], column: str, default: float, where: str) -> float:
    """Read a finite number; an empty or absent cell gives the default.

    Raises:
        UserError: If the cell holds something else, or a slope is not positive.
    """
    cell = cells.get(column)
    if not cell:
        return default
    must_be_positive = column == "hu_slope"
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    has_right_sign = value > 0 or not must_be_positive
    if math.isfinite(value) and has_right_sign:
        return value
    kind = "positive number" if must_be_positive else "number"
    raise UserError(f"{where}: {column} is {cell!r}, expected a {kind} or nothing.")


def write_case_table(path: Path, cases: Sequence[Case]) -> Path:
    """Write a case table with absolute paths, without optional columns that would be empty.

    Returns:
        The path of the table.
    """
    rows = [_row_of(case) for case in cases]
    # The columns of all rows in the order in which they first appear.
    all_columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    used_columns = []
    for column in all_columns:
        is_filled = any(row.get(column) is not None for row in rows)
        # `read_case_table` needs these two even if no case has labels.
        if is_filled or column in ("image", "labels"):
            used_columns.append(column)
    complete_rows = []
    for row in rows:
        complete_rows.append({column: row.get(column) for column in used_columns})
    write_csv(path, complete_rows, used_columns, errors=RAW_NAMES)
    return path


def _row_of(case: Case) -> dict[str, Any]:
    """Convert a case to a row of the table, column to cell; None is an empty cell."""
    row: dict[str, Any] = {
        "case": case.name,
        "image": case.image.absolute(),
        "labels": _absolute(case.labels),
        "patient": case.patient,
        "split": case.split,
        "fold": case.fold,
    }
    for number, side in enumerate(case.fold_sides):
        row[f"{FOLD_PREFIX}{number}"] = side
    row["series"] = case.series
    row["study_date"] = case.study_date or None
    if case.hu != AS_STORED:
        row["hu_slope"] = case.hu.slope
        row["hu_offset"] = case.hu.offset
    for number, path in enumerate(case.more_images, start=1):
        row[f"{CHANNEL_PREFIX}{number}"] = _absolute(path)
    for name, trust in sorted(case.trust.items()):
        row[TRUST_PREFIX + name] = trust
    row["ignore_findings"] = " ".join(sorted(case.ignore_findings)) or None
    return row


def _absolute(path: Path | None) -> Path | None:
    """Make a path absolute if there is one."""
    return None if path is None else path.absolute()


@dataclass(frozen=True)
class Split:
    """Cases for training, validation and testing, each in the order of the case table."""

    train: tuple[Case, ...]
    val: tuple[Case, ...]
    test: tuple[Case, ...]


@dataclass(frozen=True)
class CaseSource:
    """Cases whose label maps use the same values.

    Attributes:
        split: Cases for training, validation and testing.
        label_values: Value, or name of a structure, in the reference files to label name.
        share: Share of the training samples that are drawn from these cases; the shares of all
            sources add up to 1.
    """

    split: Split
    label_values: LabelValues
    share: float


def split_cases(
    cases: Sequence[Case],
    *,
    fold: int | str | None = None,
    num_folds: int = 5,
    val_patients: Sequence[str] = (),
    test_patients: Sequence[str] = (),
) -> Split:
    """Divide the cases by patient.

    Test patients are those of `test_patients` and those that the table marks as `test`; they are
    never used for training or validation. A row without a mark has the split of the other rows of
    its patient.

    The first of these rules that applies chooses the patients for validation among the others:

    1. With the fold `all` there are none: all but the test patients are trained on.
    2. They are `val_patients`.
    3. If no fold is given and the table marks patients as `val`, they are these.
    4. If the table has numbers in the column `fold`, they are the patients with the number `fold`.
    5. They are fold `fold` of `num_folds`. These folds depend on the names of the patients alone,
       and differ by at most one patient in size. If no fold is given and the patients are fewer
       than the folds, there are as many folds as patients; a single patient is trained on without
       validation.

    Where the table has columns `fold_0`, `fold_1`, …, they replace rules 4 and 5, and name the
    cases for training, too: a case with an empty cell is not used in that fold. A case with empty
    cells in all of them is never trained on, not even with `all` or `val_patients`.

    Args:
        cases: All cases of the table.
        fold: The fold that is validated, 0 ≤ fold < num_folds; `all` validates none; None, no fold
            is given, stands for 0 in rules 4 and 5.
        num_folds: Number of folds, at least 2.
        val_patients: Patients to validate on, in place of a fold.
        test_patients: Patients to keep away from training and validation.

    Raises:
        UserError: If a patient is unknown or on two sides, the fold does not exist, keys contradict
            each other, or no case is left for training.
    """
    val_patients = [normalise_name(name) for name in val_patients]
    test_patients = [normalise_name(name) for name in test_patients]
    patients = sorted({case.patient for case in cases})
    _check_patients(patients, val_patients, test_patients)
    split_of = _marks_of_table(cases, "split")
    fold_of = _marks_of_table(cases, "fold")
    # Patients that the configuration validates on are no test patients, whatever the table says.
    test = set(test_patients) | (_marked(split_of, "test") - set(val_patients))
    not_test = [patient for patient in patients if patient not in test]
    has_fold_columns = any(case.fold_sides for case in cases)
    # A fold of the configuration, also `all`, takes precedence over the marks train and val.
    marked_val = _marked(split_of, "val") if fold is None else set[str]()
    has_other_choice = fold == "all" or bool(val_patients) or bool(marked_val)
    if has_fold_columns and not has_other_choice:
        return _split_by_fold_column(cases, test, fold or 0)
    val, chosen_by = _validation_patients(
        not_test,
        marked_val=marked_val,
        fold_of=fold_of,
        fold=fold,
        num_folds=num_folds,
        val_patients=val_patients,
    )
    usable = cases
    if has_fold_columns:
        usable = _in_a_fold_or_held_out(cases, test | val)
    train = {case.patient for case in usable} - val - test
    if not train:
        cure = _how_to_keep_training_cases(val, chosen_by)
        raise UserError(
            f"No case is left for training: of {len(patients)} patients, {len(test)} are for "
            f"testing and {len(val)} for validation; {cure}."
        )
    return Split(_cases_of(usable, train), _cases_of(usable, val), _cases_of(usable, test))


def _marked(split_of: Mapping[str, str], split: str) -> set[str]:
    """Select the patients that the table marks with a split."""
    return {patient for patient, mark in split_of.items() if mark == split}


def _in_a_fold_or_held_out(cases: Sequence[Case], held_out: Collection[str]) -> list[Case]:
    """Select cases that the table marks in any of its folds, and all cases of held-out patients."""
    return [case for case in cases if any(case.fold_sides) or case.patient in held_out]


def _how_to_keep_training_cases(val: Collection[str], chosen_by: str) -> str:
    """Say what to type where no case is left for training.

    Args:
        val: Patients for validation.
        chosen_by: The key or column that has chosen them.
    """
    cure = "name fewer in data.test_patients or the column split"
    if val:
        cure = f"name fewer in {chosen_by}"
    if chosen_by == "the column fold":
        cure += ", or give another data.fold"
    return cure


def _cases_of(cases: Sequence[Case], patients: Collection[str]) -> tuple[Case, ...]:
    """Select the cases of some patients."""
    return tuple(case for case in cases if case.patient in patients)


def _validation_patients(
    patients: Sequence[str],
    *,
    marked_val: Collection[str],
    fold_of: Mapping[str, int],
    fold: int | str | None,
    num_folds: int,
    val_patients: Sequence[str],
) -> tuple[set[str], str]:
    """Choose the patients to validate on, by the rules of `split_cases`.

    Args:
        patients: Sorted patients that are not for testing.
        marked_val: Patients that the column `split` marks, where no fold is given.
        fold_of: Patient to the number in the column `fold`.
        fold: The fold of the configuration; None where none is given.
        num_folds: Number of folds.
        val_patients: Patients that the configuration names.

    Returns:
        The patients; and the key or column that has chosen them, for the error message if no case
        is left for training.

    Raises:
        UserError: If two keys contradict each other, or the fold does not exist.
    """
    if fold == "all":
        if val_patients:
            raise UserError(
                "data.fold=all trains on everybody, but data.val_patients is given; "
                "keep one of them."
            )
        return set(), "the column split"
    if val_patients:
        if fold is not None:
            raise UserError(
                f"data.fold={fold} has no effect because data.val_patients is given; "
                "leave one of the two out."
            )
        return set(val_patients), "data.val_patients"
    if marked_val:
        return set(patients).intersection(marked_val), "the column split"
    if fold_of:
        number = fold or 0
        val = {patient for patient in patients if fold_of.get(patient) == number}
        if not val:
            numbers = ", ".join(map(str, sorted(set(fold_of.values()))))
            raise UserError(
                f"data.fold={number}: the column fold of the case table has no such fold; "
                f"choose one of {numbers}."
            )
        return val, "the column fold"
    # From here on, the second value is never shown: there are at least two folds, so that patients
    # are always left for training.
    if isinstance(fold, int):
        return _patients_of_fold(patients, fold, num_folds), "the column split"
    # No fold was given: fewer patients than folds reduce the number of folds, and a single patient
    # is trained on without validation.
    if len(patients) < 2:
        return set(), "the column split"
    num_folds = min(num_folds, len(patients))
    return _patients_of_fold(patients, 0, num_folds), "the column split"


def _check_patients(
    patients: Sequence[str], val_patients: Sequence[str], test_patients: Sequence[str]
) -> None:
    """Refuse patients of the configuration that are unknown, or named on two sides.

    Raises:
        UserError: With the patient, and similar names if the patient is unknown.
    """
    for key, names in (("data.val_patients", val_patients), ("data.test_patients", test_patients)):
        for name in names:
            if name in patients:
                continue
            hint = f"the table has {', '.join(patients[:5])}, …"
            close = difflib.get_close_matches(name, patients, cutoff=0.4)
            if close:
                hint = f"did you mean {' or '.join(close)}?"
            raise UserError(
                f"{key} names the patient {name!r}, who is not in the case table; {hint}"
            )
    for sentence in on_both_sides(val_patients, test_patients):
        raise UserError(f"{sentence}.")


def _split_by_fold_column(cases: Sequence[Case], test: Collection[str], fold: int | str) -> Split:
    """Divide the cases by the column `fold_<fold>`, which marks training and validation cases.

    Args:
        cases: All cases of the table.
        test: Patients for testing, whatever the column says.
        fold: Number of the column.

    Raises:
        UserError: If there is no such column, a patient is on both sides, or no case is left for
            training.
    """
    num_folds = max(len(case.fold_sides) for case in cases)
    if not isinstance(fold, int) or not 0 <= fold < num_folds:
        raise UserError(
            f"data.fold={fold}: the case table has the columns fold_0 to fold_{num_folds - 1}; "
            "choose one of these."
        )
    cases_of_side: dict[str, list[Case]] = {side: [] for side in FOLD_SIDES}
    side_of: dict[str, str] = {}
    for case in cases:
        side = case.fold_sides[fold] if case.fold_sides else None
        if side is None or case.patient in test:
            continue
        if side_of.setdefault(case.patient, side) != side:
            raise UserError(
                f"The patient {case.patient!r} is marked train and val in the column fold_{fold} "
                "of the case table; give all scans of one patient the same side."
            )
        cases_of_side[side].append(case)
    train = tuple(cases_of_side["train"])
    if not train:
        raise UserError(
            f"No case is left for training: the column fold_{fold} marks none as train; "
            "give another data.fold."
        )
    return Split(train, tuple(cases_of_side["val"]), _cases_of(cases, test))


def count_folds(cases: Sequence[Case]) -> int | None:
    """Count the folds that a case table names in its columns; None where it names none."""
    num_columns = max((len(case.fold_sides) for case in cases), default=0)
    if num_columns:
        return num_columns
    numbers = [case.fold for case in cases if case.fold is not None]
    if not numbers:
        return None
    return max(numbers) + 1


def _marks_of_table(cases: Sequence[Case], column: str) -> dict[str, Any]:
    """Map each patient that the table marks in the column `split` or `fold` to its mark.

    Raises:
        UserError: If two rows of a patient have different marks.
    """
    marks: dict[str, Any] = {}
    for case in cases:
        mark = getattr(case, column)
        if mark is not None and marks.setdefault(case.patient, mark) != mark:
            raise UserError(
                f"The patient {case.patient!r} is marked {marks[case.patient]} and {mark} "
                f"in the case table; give all scans of one patient the same {column}."
            )
    return marks


def _patients_of_fold(patients: Sequence[str], fold: int, num_folds: int) -> set[str]:
    """Choose the patients of a fold by the hash of their names.

    Raises:
        UserError: If there are fewer patients than folds, or no such fold.
    """
    if not 2 <= num_folds <= len(patients):
        cure = f"choose a number from 2 to {len(patients)}, or name data.val_patients"
        if len(patients) < 2:
            cure = "add patients, or train on all with data.fold=all"
        raise UserError(
            f"data.num_folds={num_folds}: {len(patients)} patients outside the test set cannot be "
            f"split into that many folds; {cure}."
        )
    if not 0 <= fold < num_folds:
        raise UserError(
            f"data.fold={fold} does not exist among {num_folds} folds; choose 0 to {num_folds - 1}."
        )
    # The names are ordered by hash, so that consecutive names (by hospital, by date) are spread
    # over the folds.
    hashes = {name: hashlib.sha256(name.encode()).digest() for name in patients}
    ordered = sorted(patients, key=lambda name: hashes[name])
    # Every num_folds-th patient: the sizes of the folds differ by at most one.
    return set(ordered[fold::num_folds])
