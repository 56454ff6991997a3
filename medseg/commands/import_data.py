"""The `import` command: reads a data set in the layout of another program, and writes its case table and its task."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import yaml

from medseg.config.imported import TASK_FILE
from medseg.config.schema import ImportConfig, MissingStructure
from medseg.console import say
from medseg.data.case_table import TABLE_NAME, Case, read_case_table, write_case_table
from medseg.data.importers.account import COLUMNS, closing_rows
from medseg.data.importers.dataset import DataSet
from medseg.data.importers.formats import import_dataset
from medseg.errors import require
from medseg.io.atomic import check_writable, replace_text
from medseg.io.tables import print_table, write_csv
from medseg.io.text import read_text
from medseg.wording import quote_for_shell

ACCOUNT_FILE = "account.csv"
# Beyond this number the labels are probably not all wanted.
MANY_LABELS = 30


def import_data(config: ImportConfig) -> int:
    """Write `cases.csv`, `task.yaml` and `account.csv`, and print what was found and the command that trains on it.

    Raises:
        UserError: If the data set cannot be read, a case lacks a structure, or files of these names
            with other content exist.
    """
    data = import_dataset(Path(config.input), config.format.value if config.format else None).keep(
        config.labels
    )
    if config.missing is MissingStructure.absent:
        data = data.state_absence()
    else:
        data.require_structures()
    output, content = Path(config.output), data.task()
    begin = f"# @package _global_\n# Task of the {data.format} data set {content['task']['name']}. A file conf/task/<name>.yaml of this content makes it task=<name>.\n"
    task = begin + yaml.safe_dump(
        content, sort_keys=False, allow_unicode=True, width=130, default_flow_style=None
    )
    require_unchanged(output, data, task)
    check_writable(output)
    table = write_case_table(output / TABLE_NAME, data.cases)
    replace_text(output / TASK_FILE, task)
    items = data.closing_items()
    write_csv(output / ACCOUNT_FILE, [item._asdict() for item in items])
    for note in data.notes:
        say(note)
    if len(data.labels) > MANY_LABELS:
        say(f"the task has {len(data.labels)} labels; labels=[a,b,…] keeps some of them")
    parts = Counter(map(_use_of, data.cases))
    channels = ", ".join(
        f"{one.modality} {one.window_hu or one.normalise}" for one in data.channels
    )
    print(
        f"{data.format}: {', '.join(f'{number} cases {part}' for part, number in parts.items())}; channels: {channels}"
    )
    print(f"labels: {', '.join(data.labels)}")
    print_table(closing_rows(items), COLUMNS)
    print(f"written: {table}, {output / TASK_FILE}, {output / ACCOUNT_FILE}")
    stage = "coarse" if content["task"]["regions"] else "single"
    print(f"next: medseg train stage={stage} {quote_for_shell(f'data.cases={output}')}", flush=True)
    return 0


def _use_of(case: Case) -> str:
    """Say what a case is for, in the first line of the summary."""
    if case.split is None and case.fold_sides and not any(case.fold_sides):
        return "in no fold"
    return case.split or "to train and validate"


def require_unchanged(output: Path, data: DataSet, task: str) -> None:
    """Refuse to replace a case table or a task with other content: a person may have written or edited it."""
    table, file = output / TABLE_NAME, output / TASK_FILE
    cure = "remove it, or give another output"
    cases = [
        replace(
            case,
            image=case.image.absolute(),
            labels=case.labels and case.labels.absolute(),
            more_images=tuple(path and path.absolute() for path in case.more_images),
        )
        for case in data.cases
    ]
    require(
        not table.exists() or read_case_table(table) == cases,
        f"{table} exists and holds other cases; {cure}",
    )
    require(
        not file.exists() or read_text(file) == task,
        f"{file} exists and differs from the task of this data set; {cure}",
    )
