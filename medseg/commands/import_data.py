"""The `import` command: writes the case table and the task of another program's data set."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from medseg.config.imported import TASK_FILE
from medseg.config.schema import ImportConfig, MissingStructure
from medseg.console import say
from medseg.data.case_table import TABLE_NAME, Case, read_case_table, write_case_table
from medseg.data.importers.account import COLUMNS, Item, closing_rows
from medseg.data.importers.dataset import DataSet
from medseg.data.importers.formats import import_dataset
from medseg.errors import UserError
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import print_table, write_csv
from medseg.io.text import read_text
from medseg.wording import quote_for_shell

# Table of the files, cases and labels of the data set: whether they are used, and why not.
ACCOUNT_FILE = "account.csv"
# First line of the account. An `account.csv` that begins otherwise is not replaced.
ACCOUNT_HEADER = ",".join(Item._fields)
REMOVE_CURE = "remove it, or give another output"
# Beyond this number the labels are probably not all wanted.
MANY_LABELS = 30


def import_data(config: ImportConfig) -> int:
    """Write `cases.csv`, `task.yaml` and `account.csv`, and print the command that trains on them.

    Raises:
        UserError: If the data set cannot be read, a case lacks a structure, or files of these names
            with other content exist.
    """
    dataset_format = None
    if config.format is not None:
        dataset_format = config.format.value
    data = import_dataset(Path(config.input), dataset_format)
    data = data.keep(config.labels)
    if config.missing is MissingStructure.absent:
        data = data.state_absence()
    else:
        data.require_structures()
    output = Path(config.output)
    task = data.task()
    task_text = _task_text(data, task)
    # Before anything is written: a person may have edited the files of an earlier import.
    require_unchanged(output, data, task_text)
    check_writable(output)
    table = write_case_table(output / TABLE_NAME, data.cases)
    replace_text(output / TASK_FILE, task_text)
    items = data.closing_items()
    write_csv(output / ACCOUNT_FILE, [item._asdict() for item in items])
    _print_summary(data)
    print_table(closing_rows(items), COLUMNS)
    print(f"written: {table}, {output / TASK_FILE}, {output / ACCOUNT_FILE}")
    # Regions are found by a coarse stage before the fine one.
    stage = "coarse" if task["task"]["regions"] else "single"
    cases = quote_for_shell(f"data.cases={output}")
    print(f"next: medseg train stage={stage} {cases}", flush=True)
    return 0


def _task_text(data: DataSet, task: Mapping[str, Any]) -> str:
    """Write the task of a data set as a file of Hydra's group `task`."""
    head = (
        "# @package _global_\n"
        f"# Task of the {data.format} data set {task['task']['name']}. "
        "A file conf/task/<name>.yaml of this content makes it task=<name>.\n"
    )
    return head + yaml.safe_dump(
        task, sort_keys=False, allow_unicode=True, width=130, default_flow_style=None
    )


def _print_summary(data: DataSet) -> None:
    """Say the notes of a data set, and print its numbers of cases, its channels and its labels."""
    for note in data.notes:
        say(note)
    if len(data.labels) > MANY_LABELS:
        say(f"the task has {len(data.labels)} labels; labels=[a,b,…] keeps some of them")
    num_cases_by_use = Counter(map(_use_of, data.cases))
    counts = [f"{_count_cases(number)} {use}" for use, number in num_cases_by_use.items()]
    channels = []
    for channel in data.channels:
        # A channel without a window is normalised by the values of each case.
        channels.append(f"{channel.modality} {channel.window_hu or channel.normalise}")
    print(f"{data.format}: {', '.join(counts)}; channels: {', '.join(channels)}")
    print(f"labels: {', '.join(data.labels)}")


def _count_cases(number: int) -> str:
    """Format a number of cases: `1 case`, `2 cases`."""
    if number == 1:
        return "1 case"
    return f"{number} cases"


def _use_of(case: Case) -> str:
    """Name the use of a case in the first line of the summary."""
    if case.split is not None:
        return case.split
    # `fold_sides` has `train` or `val` for each fold, or None where the fold does not use the case.
    has_folds = len(case.fold_sides) > 0
    if has_folds and not any(case.fold_sides):
        return "in no fold"
    if case.labels is None:
        return "without labels"
    return "to train and validate"


def require_unchanged(output: Path, data: DataSet, task_text: str) -> None:
    """Refuse to replace a case table or a task of other content, or a file that is no account.

    A person may have written or edited such a file. An account is always replaced.

    Args:
        output: Folder of the three files.
        data: Data set that is imported.
        task_text: Content of the new task file.

    Raises:
        UserError: If one of the files must not be replaced.
    """
    account = output / ACCOUNT_FILE
    if account.exists() and not read_text(account).startswith(ACCOUNT_HEADER):
        raise UserError(f"{account} exists and is no account of an import; {REMOVE_CURE}")
    table = output / TABLE_NAME
    if table.exists():
        cases = [_with_absolute_paths(case) for case in data.cases]
        if read_case_table(table) != cases:
            raise UserError(f"{table} exists and holds other cases; {REMOVE_CURE}")
    task_file = output / TASK_FILE
    if task_file.exists() and read_text(task_file) != task_text:
        raise UserError(
            f"{task_file} exists and differs from the task of this data set; {REMOVE_CURE}"
        )


def _with_absolute_paths(case: Case) -> Case:
    """Make the paths of a case absolute, as `read_case_table` does."""
    return replace(
        case,
        image=case.image.absolute(),
        labels=_absolute(case.labels),
        more_images=tuple(_absolute(path) for path in case.more_images),
    )


def _absolute(path: Path | None) -> Path | None:
    """Make a path absolute; None stays."""
    if path is None:
        return None
    return path.absolute()
