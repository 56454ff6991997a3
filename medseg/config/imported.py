"""Task of imported data: that of a data set, or of the `task.yaml` beside a case table.

A command uses this task unless its command line chooses another one. `predict`, whose task is in
the checkpoints, only takes the label values of its references from there.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from medseg.config.check import label_values_of
from medseg.config.yaml_file import read_yaml
from medseg.console import say
from medseg.errors import UserError

TASK_FILE = "task.yaml"
# The task of the data is stored in memory as a file `imported` of the group `task`, which
# `task=imported` chooses.
IMPORTED = "imported"
# If the user chooses another task, the label values are still those of the data. They are stored as
# the file `values` of a group `imported`, and this argument adds them to the configuration.
VALUES_ARGUMENT = f"+{IMPORTED}=values"
# Keys that name a case table, and whether they also name a data set in the layout of another
# program.
TABLE_KEYS = {"data.cases": True, "cases": True, "ref": False}
# Environment variable for the commands that a study starts: path of the file or data set that the
# task was taken from.
SOURCE_VARIABLE = "MEDSEG_TASK_SOURCE"
TASK_SUFFIXES = (".yaml", ".yml")


def with_task(arguments: Sequence[str], schema: type) -> list[str]:
    """Find the data in the arguments of a command, and add the task of the data to the arguments.

    With `task=<file>.yaml` the task is that of the file. With any other `task=<name>` the task of
    the data is not used, and only its label values are added.

    Args:
        arguments: Command line, before paths are quoted.
        schema: Root of the configuration. Without the key `task`, only label values are added, and
            without the key `data` nothing.

    Returns:
        The arguments, with `task=imported` or `VALUES_ARGUMENT` where a task is found.

    Raises:
        UserError: If the data set or its task cannot be read.
    """
    keys = {field.name for field in fields(schema)}
    values = _values_of(arguments)
    if "task" not in keys:
        if "data" in keys:
            return _with_label_values(arguments, values)
        return list(arguments)
    task = values.get("task", "")
    has_task_file = task.endswith(TASK_SUFFIXES)
    source, content = _find_source(values)
    if source is None or not content:
        return list(arguments)
    chooses_other_task = task not in ("", IMPORTED) and not has_task_file
    if chooses_other_task:
        _store("values", {"data": content.get("data", {})}, group=IMPORTED)
        # A study passes this argument on to the commands that it starts.
        if VALUES_ARGUMENT in arguments:
            return list(arguments)
        return [VALUES_ARGUMENT, *arguments]
    # For the commands that this one starts; absolute, since they may run in another folder.
    os.environ[SOURCE_VARIABLE] = str(source.absolute())
    _store(IMPORTED, content, group="task")
    if has_task_file:
        return _with_imported_task(arguments)
    if task == IMPORTED:  # Hydra finds the task that was stored above
        return list(arguments)
    labels = ", ".join(content["task"]["labels"])
    say(f"task of {source}: {labels}; task=<name> chooses another one")
    return [f"task={IMPORTED}", *arguments]


def _with_label_values(arguments: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Add the label values of a case table to the arguments of `predict`, if it shows references.

    Args:
        arguments: Command line.
        values: Values of the arguments by their key.

    Raises:
        UserError: If the task beside the table cannot be read.
    """
    table = Path(values.get("input", ""))
    # Only viewers show references: without them a damaged task stops no prediction.
    shows_references = "viewer" in values.get("save", "") and table.suffix.lower() == ".csv"
    file = table.parent / TASK_FILE
    if not shows_references or not file.is_file():
        return list(arguments)
    content = _read_task(file)
    label_values = label_values_of(content["task"], content["data"].get("label_values"))
    _store("values", {"data": {"label_values": label_values}}, group=IMPORTED)
    return [VALUES_ARGUMENT, *arguments]


def _store(name: str, content: dict[str, Any], group: str) -> None:
    """Register a mapping with keys of any group as the file `name` of a group of Hydra."""
    ConfigStore.instance().store(name, OmegaConf.create(content), group=group, package="_global_")


def _with_imported_task(arguments: Sequence[str]) -> list[str]:
    """Replace the arguments that choose a task by `task=imported`.

    The order stays, because Hydra takes the later one of two arguments of a group.
    """
    replaced = []
    for argument in arguments:
        if argument.partition("=")[0].lstrip("+") == "task":
            replaced.append(f"task={IMPORTED}")
        else:
            replaced.append(argument)
    return replaced


def _values_of(arguments: Sequence[str]) -> dict[str, str]:
    """Read arguments `key=value` to values by key, without quotes; the last one of a key counts."""
    values = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        values[key.lstrip("+")] = value.strip("'\"")
    return values


def _find_source(values: Mapping[str, str]) -> tuple[Path | None, dict[str, Any]]:
    """Find the file or data set that a command takes its task from, and the task.

    Args:
        values: Values of the arguments by their key.

    Returns:
        The file or data set, or None; and its groups `task` and `data`, empty without a task.
    """
    task = values.get("task", "")
    if task.endswith(TASK_SUFFIXES):
        return Path(task), _read_task(Path(task))
    source = None
    content: dict[str, Any] = {}
    for key, may_import in TABLE_KEYS.items():
        if values.get(key, "null") not in ("", "null"):
            source = Path(values[key])
            content = _find_task(source, may_import=may_import)
            break
    # This command was started by another one, which had found the task.
    if not content and task == IMPORTED and SOURCE_VARIABLE in os.environ:
        source = Path(os.environ[SOURCE_VARIABLE])
        if source.suffix in TASK_SUFFIXES:
            content = _read_task(source)
        else:
            content = _find_task(source, may_import=True)
    return source, content


def _find_task(path: Path, *, may_import: bool) -> dict[str, Any]:
    """Find the groups `task` and `data` of a case table or a data set; empty without a task.

    Args:
        path: The table, or the folder or file of the data set.
        may_import: Whether it may be a data set in the layout of another program.
    """
    # Imported here, because these modules load the readers of images, which a command whose
    # arguments name no data does not need.
    from medseg.data.case_table import table_at

    folder = path if path.is_dir() else path.parent
    # For a folder that `import` or `phantom` has written, `table_at` returns its case table; for
    # any other path it returns the path itself.
    is_table = path.suffix.lower() == ".csv" or table_at(path) != path
    if is_table:
        file = folder / TASK_FILE
        if not file.is_file():
            return {}
        return _read_task(file)
    is_dataset = path.is_dir() or path.suffix.lower() == ".json"  # a datalist
    if not may_import or not is_dataset:
        return {}
    from medseg.data.importers.account import left_out_sentences
    from medseg.data.importers.formats import import_dataset

    data = import_dataset(path)
    data.require_structures()
    # Print the notes of the import, and what it left out or merged.
    for sentence in (*data.notes, *left_out_sentences(data.closing_items())):
        say(sentence)
    return data.task()


def _read_task(file: Path) -> dict[str, Any]:
    """Read the file of a task.

    It holds the groups `task` and `data`, or the content of the group `task` alone.

    Raises:
        UserError: If it is damaged, names no labels, or a name is no text.
    """
    content = read_yaml(file, "a task", "import the data set again.")
    has_groups = isinstance(content, dict) and "task" in content
    groups = content if has_groups else {"task": content}
    task = groups["task"]
    if not isinstance(task, dict) or not isinstance(task.get("labels"), dict):
        raise UserError(
            f"{file}: expected the labels of a task (task: {{labels: …}}), found none; "
            "correct or remove the file."
        )
    for name in task["labels"]:
        if not isinstance(name, str):
            raise UserError(
                f"{file}: expected labels as name: value, but the name {name!r} is no text; "
                "exchange names and values, or put the name in quotes."
            )
    # The group may be absent, or null because nothing follows `data:`.
    if groups.get("data") is None:
        groups["data"] = {}
    if not isinstance(groups["data"], dict):
        raise UserError(
            f"{file}: expected the keys of the group data, got {groups['data']!r}; correct or "
            "remove the file."
        )
    return groups
