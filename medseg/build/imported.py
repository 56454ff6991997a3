"""Task of imported data: that of the data set or of the `task.yaml` beside a case table, unless the command line chooses a task."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from medseg.config.overrides import text_of
from medseg.console import say
from medseg.errors import UserError, first_line
from medseg.io.text import read_yaml_text

TASK_FILE = "task.yaml"
# Name of the task among those of `conf/task/`.
IMPORTED = "imported"
# Keys that name a case table, and whether they also name a data set in the layout of another program.
TABLE_KEYS = {"data.cases": True, "ref": False}


def with_task(arguments: Sequence[str], schema: type) -> list[str]:
    """Add the task of the data that the arguments of a command name.

    Where `task` is chosen, only the values of the labels in the files are added.

    Args:
        arguments: Command line, before paths are quoted.
        schema: Root of the configuration; one without a task stays as it is.

    Raises:
        UserError: If the data set or its task cannot be read.
    """
    given = {key.lstrip("+"): value.strip("'\"") for key, _, value in (one.partition("=") for one in arguments)}
    key = next((key for key in TABLE_KEYS if given.get(key) not in (None, "", "null")), None)
    if key is None or "task" not in {field.name for field in fields(schema)}:
        return list(arguments)
    content, source = _find_task(Path(given[key]), may_import=TABLE_KEYS[key])
    if not content:
        return list(arguments)
    if "task" in given and given["task"] != IMPORTED:
        values = (content.get("data") or {}).get("label_values") or {}
        pairs = ", ".join(f"{text_of(name)}: {text_of(value)}" for name, value in values.items())
        return [f"+data.label_values={{{pairs}}}", *arguments]
    ConfigStore.instance().store(IMPORTED, OmegaConf.create(content), group="task", package="_global_", provider="medseg")
    if "task" in given:  # a study gives it to the commands that it starts
        return list(arguments)
    say(f"task of {source}: {', '.join(content['task']['labels'])}; task=<name> chooses another one")
    return [f"task={IMPORTED}", *arguments]


def _find_task(path: Path, *, may_import: bool) -> tuple[dict[str, Any], Path]:
    """Find the groups `task` and `data` that belong to a case table or a data set; empty where there are none.

    Returns:
        The groups in plain types, and where they come from.
    """
    file = (path if path.is_dir() else path.parent) / TASK_FILE
    is_table = path.suffix.lower() == ".csv" or (path / "cases.csv").is_file()
    if is_table and file.is_file():
        try:
            content: Any = OmegaConf.to_container(OmegaConf.create(read_yaml_text(file)))
        except UserError:
            raise
        except Exception as error:  # any exception of YAML's and OmegaConf's constructors
            raise UserError(
                f"{file}: expected a task, but the file is damaged ({first_line(error)}); import the data set again."
            ) from error
        task = content.get("task") if isinstance(content, dict) else None
        if not isinstance(task, dict) or not isinstance(task.get("labels"), dict):
            raise UserError(
                f"{file}: expected the labels of a task (task: {{labels: …}}), found none; correct or remove the file."
            )
        return content, file
    if may_import and not is_table and (path.is_dir() or path.suffix.lower() == ".json"):
        from medseg.data.importers.formats import import_dataset  # here, so that other commands import no reader

        data = import_dataset(path)
        for note in data.notes:
            say(note)
        return data.task(), path
    return {}, path
