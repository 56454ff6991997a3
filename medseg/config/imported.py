"""Task of imported data: that of the data set or of the `task.yaml` beside a case table, unless the command line chooses a task."""

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from medseg.console import say
from medseg.errors import UserError, first_line
from medseg.io.text import read_yaml_text

TASK_FILE, TABLE_FILE = "task.yaml", "cases.csv"
# Name of the task among those of `conf/task/`, and of a group of its own for the values of the
# labels in the files.
IMPORTED = "imported"
VALUES = f"+{IMPORTED}=values"
# Keys that name a case table, and whether they also name a data set in the layout of another
# program.
TABLE_KEYS = {"data.cases": True, "cases": True, "ref": False}
# Where the task comes from, for the commands that a study starts.
SOURCE_VARIABLE = "MEDSEG_TASK_SOURCE"


def with_task(arguments: Sequence[str], schema: type) -> list[str]:
    """Add the task of the data that the arguments of a command name; `task=<file>.yaml` names its file.

    Where `task` chooses another one, only the values of the labels in the files are added.

    Args:
        arguments: Command line, before paths are quoted.
        schema: Root of the configuration; one without a task stays as it is.

    Raises:
        UserError: If the data set or its task cannot be read.
    """
    given = {
        key.lstrip("+"): value.strip("'\"")
        for key, _, value in (one.partition("=") for one in arguments)
    }
    if "task" not in {field.name for field in fields(schema)}:
        return list(arguments)
    task = given.get("task", "")
    key = next((key for key in TABLE_KEYS if given.get(key) not in (None, "", "null")), None)
    content: dict[str, Any] = {}
    if task.endswith((".yaml", ".yml")):
        source = Path(task)
        content = _read_task(source)
        arguments = [
            f"task={IMPORTED}" if one.partition("=")[0] == "task" else one for one in arguments
        ]
    elif key is not None:
        source = Path(given[key])
        content = _find_task(source, may_import=TABLE_KEYS[key])
    if not content and task == IMPORTED and SOURCE_VARIABLE in os.environ:
        source = Path(os.environ[SOURCE_VARIABLE])
        content = (
            _read_task(source)
            if source.suffix in (".yaml", ".yml")
            else _find_task(source, may_import=True)
        )
    if not content:
        return list(arguments)
    os.environ[SOURCE_VARIABLE] = str(source.absolute())
    store = ConfigStore.instance().store
    if task and task != IMPORTED and f"task={IMPORTED}" not in arguments:
        store("values", OmegaConf.create({"data": content.get("data") or {}}), IMPORTED, "_global_")
        return [*([] if VALUES in arguments else [VALUES]), *arguments]
    store(IMPORTED, OmegaConf.create(content), "task", "_global_")
    if task:
        return list(arguments)
    say(
        f"task of {source}: {', '.join(content['task']['labels'])}; task=<name> chooses another one"
    )
    return [f"task={IMPORTED}", *arguments]


def _find_task(path: Path, *, may_import: bool) -> dict[str, Any]:
    """Find the groups `task` and `data` that belong to a case table or a data set, in plain types; empty where there are none."""
    file = (path if path.is_dir() else path.parent) / TASK_FILE
    is_table = path.suffix.lower() == ".csv" or (path / TABLE_FILE).is_file()
    if is_table and file.is_file():
        return _read_task(file)
    if may_import and not is_table and (path.is_dir() or path.suffix.lower() == ".json"):
        # Here, so that other commands import no reader.
        from medseg.data.importers.account import left_out_sentences
        from medseg.data.importers.formats import import_dataset

        data = import_dataset(path)
        data.require_structures()
        for sentence in (*data.notes, *left_out_sentences(data.closing_items())):
            say(sentence)
        return data.task()
    return {}


def _read_task(file: Path) -> dict[str, Any]:
    """Read the file of a task: the groups `task` and `data`, or the content of the group `task` alone.

    Raises:
        UserError: If it is damaged, or names no labels.
    """
    try:
        content: Any = OmegaConf.to_container(OmegaConf.create(read_yaml_text(file)))
    except UserError:
        raise
    except Exception as error:  # any exception of YAML's and OmegaConf's constructors
        raise UserError(
            f"{file}: expected a task, but the file is damaged ({first_line(error)}); import the data set again."
        ) from error
    groups = content if isinstance(content, dict) and "task" in content else {"task": content}
    task = groups["task"]
    if not isinstance(task, dict) or not isinstance(task.get("labels"), dict):
        raise UserError(
            f"{file}: expected the labels of a task (task: {{labels: …}}), found none; correct or remove the file."
        )
    return groups
