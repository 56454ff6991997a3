"""Completion of the command line: keys, files of groups, and values that the key accepts.

Hydra's own completion offers the positions of a list (`save=0=`), and only the current value of a
key with a fixed set of values.
"""

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from medseg.conf_folder import group_files
from medseg.config.help import Group, Key, list_keys
from medseg.config.overrides import PATH_KEYS, text_of
from medseg.knob import Knob, key_below
from medseg.targets import TARGET

# Composes arguments to a configuration; also returns the groups of files, see `commands.entry`.
Compose = Callable[[Sequence[str]], tuple[DictConfig, list[str]]]
# Hydra's script for the shell asks for completions with one of these options and `QUERY`. The
# command line to complete is in the environment variable COMP_LINE.
COMPLETION_OPTIONS = ("-sc", "--shell-completion")
QUERY = "query=bash"
# A value of these characters alone needs no quotes in the shell or in Hydra's grammar. Brackets and
# commas are those of lists.
PLAIN_CHARACTERS = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+./,[]:%@"
)


def is_completion(arguments: Sequence[str]) -> bool:
    """Whether a shell asks for completions, instead of a user for a command."""
    return QUERY in arguments and any(option in arguments for option in COMPLETION_OPTIONS)


def line_words() -> list[str]:
    """Split the command line in `COMP_LINE` into its arguments.

    The last one, maybe empty, is to be completed.
    """
    line = os.environ.get("COMP_LINE", "")
    # The line may end inside quotes or in a backslash, which `shlex` refuses: then the missing
    # quote, or a letter after the backslash, is added.
    for closing in ("", "'", '"', "x"):
        try:
            words = shlex.split(line + closing)
        except ValueError:
            continue
        # Outside of quotes a blank starts a new word.
        if line.endswith(" ") and not closing:
            words.append("")
        # The first word is the name of the program.
        return words[1:]
    return [""]


def complete(schema: type, compose: Compose, words: Sequence[str]) -> list[str]:
    """List what may stand for the last word of a command line.

    Args:
        schema: Root dataclass of the command.
        compose: Composes the configuration of the command, and lists its groups of files.
        words: Arguments; the last one, maybe empty, is to be completed.

    Returns:
        Whole arguments `key=value`, and beginnings that end in `=`, `.` or `/`; sorted.
    """
    word = words[-1] if words else ""
    if word.startswith("-"):
        return []
    composed, groups = _composed(compose, words[:-1])
    entries = list(list_keys(schema, composed, groups))
    names = {entry.name for entry in entries}
    # Arguments of classes that are not ours, which no schema lists.
    for name, value in _leaves(OmegaConf.to_container(composed)):
        if name not in names:
            entries.append(Key(name, value, Any, Knob("")))
    key, equals, prefix = word.partition("=")
    if not equals:
        return sorted(set(_names(word, entries, groups)))
    values = _values(key, prefix, entries, groups)
    return sorted({f"{key}={value}" for value in values if value.startswith(prefix)})


def _composed(compose: Compose, words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Compose with the given arguments; without any if Hydra refuses one of them."""
    overrides = [word for word in words if not word.startswith("-") and "=" in word]
    try:
        return compose(overrides)
    except (HydraException, OmegaConfBaseException):
        return compose([])


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in nested mappings that are not mappings, each with its dotted name."""
    if not isinstance(node, dict):
        yield path, node
        return
    for name, value in node.items():
        yield from _leaves(value, key_below(path, name))


def _names(prefix: str, entries: Iterable[Key | Group], groups: Collection[str]) -> Iterator[str]:
    """Complete a name by one level: `stage` to `stage=`, and to `stage.` for the keys below it."""
    # The items of mappings and lists, as `metrics.<name>`, have no name that could be typed.
    names = [entry.name for entry in entries if isinstance(entry, Key) and "<" not in entry.name]
    names += [group for group in groups if group_files(_folder_of(group))]
    num_parts = prefix.count(".") + 1  # levels of the name that is typed
    for name in names:
        if not name.startswith(prefix):
            continue
        parts = name.split(".")
        if len(parts) == num_parts:
            yield f"{name}="
        else:
            yield ".".join(parts[:num_parts]) + "."


def _folder_of(group: str) -> str:
    """Folder of the files of a group: the part before the `@` in `group@place`."""
    return group.partition("@")[0]


def _values(
    key: str, prefix: str, entries: Iterable[Key | Group], groups: Collection[str]
) -> list[str]:
    """List the values of a key or a group of files."""
    # `+` adds a key that the configuration lacks. Only the values of path keys can be completed
    # then.
    if key.lstrip("+") in PATH_KEYS:
        return list(_paths(prefix))
    if key in groups:
        return list(group_files(_folder_of(key)))
    for entry in entries:
        if isinstance(entry, Key) and entry.name == key:
            values = _key_values(entry, prefix)
            if entry.can_be_null:
                values.append("null")
            return values
    return []


def _key_values(key: Key, prefix: str) -> list[str]:
    """List the values of a key without null: all of a fixed set, else the current one."""
    kind = key.kind
    if key.can_be_null:
        kind = next(member for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is list:
        (member_kind,) = get_args(kind)
        if _is_choice(member_kind):
            # Its members are texts: choices are `StrEnum`.
            return _longer_lists(list(member_kind), prefix)
    if kind is bool:
        return ["true", "false"]
    if _is_choice(kind):
        return list(kind)
    # The current class is not offered: to name it again would drop all arguments of the preset.
    is_class = key.name.rpartition(".")[2] == TARGET
    if is_class or key.value in (None, "???") or isinstance(key.value, dict):
        return []
    current = text_of(key.value)
    if current and PLAIN_CHARACTERS.issuperset(current):
        return [current]
    return []


def _is_choice(kind: Any) -> bool:
    """Whether a type is a fixed set of values."""
    return isinstance(kind, type) and issubclass(kind, Enum)


def _longer_lists(members: Iterable[str], prefix: str) -> list[str]:
    """Write lists with one more member than those that are typed already.

    `[labels,ma` gives `[labels,masks]` and a list with each other member that is not in it yet.
    """
    # What follows the last comma is the beginning of the next member.
    before, comma, _ = prefix.rpartition(",")
    start = "["
    if comma:
        start = before + comma
    taken = before.lstrip("[").split(",")
    return [f"{start}{name}]" for name in members if name not in taken]


def _paths(prefix: str) -> Iterator[str]:
    """Complete a path; folders end in `/`."""
    folder, slash, name_prefix = prefix.rpartition("/")
    folder += slash
    try:
        paths = sorted(Path(os.path.expanduser(folder) or ".").iterdir())
    except OSError:
        return
    for path in paths:
        # Hidden files are offered only once their dot is typed.
        if path.name.startswith(".") and not name_prefix.startswith("."):
            continue
        end = "/" if path.is_dir() else ""
        yield f"{folder}{path.name}{end}"
