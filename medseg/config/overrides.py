"""Command line for Hydra: options and paths rewritten in Hydra's grammar, and arguments checked.

Hydra reads `key=value` only, misreads paths without quotes, and accepts its own options only before
the keys.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from medseg.conf_folder import group_files
from medseg.errors import UserError
from medseg.wording import first_few

# Keys whose value is one path. Hydra's grammar fails on names such as `Doe, John`, `Thorax (1)` or
# `a=b`.
PATH_KEYS = frozenset(
    {
        "baseline",
        "cases",
        "checkpoint",
        "coarse",
        "data.cache",
        "data.cases",
        "data.phantoms.folder",
        "fine",
        "fine_cases",
        "held_out",
        "init_from",
        "hydra.run.dir",
        "hydra.sweep.dir",
        "input",
        "output",
        "peers_env",
        "pred",
        "ref",
        "run",
        "runs",
        "resume",
        "single",
        "stage.coarse",
        "weights",
    }
)
# Keys whose value may name a file.
FILE_KEYS = PATH_KEYS | {"experiment", "task"}
# Keys whose value has texts that Hydra's grammar may fail on, such as the pattern `b[67]0` or the
# patient in `series=MÜ 01:2`.
TEXT_KEYS = PATH_KEYS | {"series", "series_pick", "stage.coarse_folds"}
# Largest length of an argument in characters. Hydra's parser takes seconds for an argument of this
# length, and its time grows faster than the length.
MAX_LENGTH = 20_000
# Largest number of arguments: several times the number of keys of any command.
MAX_ARGUMENTS = 2_000
# Keys that take a list of paths, `[a,b]`; all but `stage.coarse_folds` take a path too.
LIST_KEYS = frozenset({"coarse", "fine", "input", "stage.coarse_folds", "weights"})
# Command to the key of an argument that stands alone.
POSITIONAL_KEYS = {"import": "input", "list": "input", "predict": "input", "watch": "run"}
# Each option for the input or the output, with the key that it is short for.
_FILES = {"-i": "input", "--input": "input", "-o": "output", "--output": "output"}
# Command to its options.
OPTIONS = {"import": _FILES, "list": _FILES, "predict": _FILES}
# Hydra's own options whose value is the next argument.
HYDRA_OPTIONS = frozenset(
    {
        "-cp",
        "--config-path",
        "-cn",
        "--config-name",
        "-cd",
        "--config-dir",
        "-p",
        "--package",
        "-c",
        "--cfg",
        "--experimental-rerun",
    }
)
# Hydra's option `--info`, short and long. Its value, one of `INFO_KINDS`, may be left out.
INFO_OPTIONS = frozenset({"-i", "--info"})
INFO_KINDS = frozenset({"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"})
# Hydra's own options without a value.
HYDRA_SWITCHES = frozenset(
    {
        "-h",
        "--help",
        "--hydra-help",
        "--version",
        "--resolve",
        "-r",
        "--run",
        "-m",
        "--multirun",
        "-sc",
        "--shell-completion",
    }
)
# Values that Hydra and YAML read as a number, null or a boolean, not as a text.
NOT_A_TEXT = re.compile(r"[-+]?([\d_.]+([eE][-+]?\d+)?|inf|nan)|null|true|false", re.IGNORECASE)
# One member of a list, with the comma before it: in quotes of either kind, where commas divide
# nothing and a backslash escapes the next character, else up to the next comma.
LIST_MEMBER = re.compile(
    r"""
    (?: \A | , ) \s*
    (
        ' (?: [^'\\] | \\. )* '
        | " (?: [^"\\] | \\. )* "
        | [^,]*?
    )
    \s* (?= , | \Z )
    """,
    re.VERBOSE,
)


def expand_home(arguments: Sequence[str]) -> list[str]:
    """Replace `~` at the beginning of each path by the home folder.

    Shells do that for a path that stands alone, but most leave `data.cases=~/cases.csv` as it is.
    The path would then lead to a folder named `~`, which commands would make for their results.
    """
    home = os.path.expanduser("~")  # `Path.home` fails where there is none
    expanded = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key.lstrip("+") in FILE_KEYS or key in _FILES:
            # Also at the beginning of each further path of a list.
            value = re.sub(r"(\A\[?|,\s*)~(?=/|\Z)", lambda begin: f"{begin[1]}{home}", value)
        expanded.append(f"{key}{equals}{value}")
    return expanded


def expand_options(command: str, arguments: Sequence[str]) -> list[str]:
    """Write options of a command, and arguments that stand alone, as `key=value`.

    Hydra reads no other form. For commands with an input, `-i` is no longer Hydra's option; its
    long form `--info` stays.

    Raises:
        UserError: If an option has no value, or a key has several values.

    Example:
        >>> expand_options("predict", ["ct (1).nii.gz", "-o", "labels.nii.gz", "overwrite=true"])
        ["input='ct (1).nii.gz'", "output='labels.nii.gz'", 'overwrite=true']
    """
    options = OPTIONS.get(command, {})
    positional_key = POSITIONAL_KEYS.get(command, "")
    expanded: list[str] = []
    # Keys that were given by an option, or by an argument that stands alone, to all their values.
    paths_by_key: dict[str, list[str]] = defaultdict(list)
    waiting = list(arguments)
    argument = ""
    while waiting:
        previous = argument
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        # Only the long form of `INFO_OPTIONS`: `-i` is the option of the input here.
        is_info_kind = previous == "--info" and argument in INFO_KINDS
        is_hydra_value = previous in HYDRA_OPTIONS or is_info_kind
        # Neither `key=value`, an option, `~key`, `+key`, nor empty.
        is_alone = not equals and argument[:1] not in ("-", "~", "+", "")
        if argument in options:
            if not waiting or waiting[0] in options:
                raise UserError(f"{argument}: expected a path after it; type {argument} <path>")
            key = options[argument]
            path = waiting.pop(0)
        elif name in options:  # such as `-o=<path>`
            key = options[name]
            path = value
        elif positional_key and is_alone and not is_hydra_value:
            key = positional_key
            path = argument
        else:
            expanded.append(argument)
            continue
        paths_by_key[key].append(path)
        # The paths of a list are quoted one by one later, by `quote_paths`.
        if _is_list(key, path):
            expanded.append(f"{key}={path}")
        else:
            expanded.append(f"{key}={quote(path)}")
    for key, paths in paths_by_key.items():
        all_paths = [*paths, *_values_of_key(key, arguments)]
        if len(all_paths) > 1:
            cure = _cure_for_several_paths(command, key)
            raise UserError(f"{key}: expected one path, but got {first_few(all_paths, 3)}{cure}")
    return expanded


def _values_of_key(key: str, arguments: Sequence[str]) -> list[str]:
    """Values that a key has on the command line as `key=value`."""
    begin = f"{key}="
    return [argument.removeprefix(begin) for argument in arguments if argument.startswith(begin)]


def _cure_for_several_paths(command: str, key: str) -> str:
    """Advise how to give an output or several scans; empty for other keys than `input`.

    A user who gives several paths as the input may have meant either.
    """
    if key != "input":
        return ""
    cure = "; give the output as -o <path>"
    if command == "predict":
        cure += ", and several scans as their folder or a case table"
    return cure


def _is_list(key: str, value: str) -> bool:
    """Whether the value of a key is a list of paths.

    False for keys that take no list, and for an existing file whose name has these brackets.
    """
    has_brackets = value.startswith("[") and value.endswith("]")
    if key not in LIST_KEYS or not has_brackets:
        return False
    try:
        return not Path(value).exists()
    except OSError:  # longer than the name of a file can be
        return True


def options_first(arguments: Sequence[str]) -> list[str]:
    """Move the options of Hydra before the keys.

    Hydra's parser accepts no option between two keys.

    Example:
        >>> options_first(["task=imported", "-m", "seed=1,2", "--config-dir", "mine", "stage=fine"])
        ['-m', '--config-dir', 'mine', 'task=imported', 'seed=1,2', 'stage=fine']
    """
    options = []
    keys = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("-"):
            keys.append(argument)
            continue
        options.append(argument)
        if argument in HYDRA_OPTIONS and waiting:
            options.append(waiting.pop(0))
        elif argument in INFO_OPTIONS:
            # Hydra would take the next argument, a `key=value`, for a kind that is left out.
            kind = "all"
            if waiting and waiting[0] in INFO_KINDS:
                kind = waiting.pop(0)
            options.append(kind)
    return [*options, *keys]


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments on which Hydra ends with an error of its own, or takes minutes.

    Raises:
        UserError: Naming the argument and the cure.
    """
    if len(arguments) > MAX_ARGUMENTS:
        raise UserError(
            f"expected at most {MAX_ARGUMENTS} arguments, but got {len(arguments)}; "
            "write them in a file and give --config-dir"
        )
    # An option may have its value after an equals sign, as in `--cfg=job`.
    names = {argument.partition("=")[0] for argument in arguments}
    show_options = {"-c", "--cfg", "--info", "-i"} & names
    if show_options and not names.isdisjoint(("-m", "--multirun")):
        raise UserError(f"{' '.join(sorted(show_options))} shows one configuration; leave out -m")
    for previous, argument in pairwise(["", *arguments]):
        if len(argument) > MAX_LENGTH:
            key = argument.partition("=")[0]
            raise UserError(
                f"{key[:80]}: expected at most {MAX_LENGTH} characters, but got {len(argument)}; "
                "write the value in a file and give --config-dir"
            )
        # An argument after `--info` may be its kind, or already the first key.
        is_info_kind = previous in INFO_OPTIONS and argument in INFO_KINDS
        is_hydra_value = previous in HYDRA_OPTIONS or is_info_kind
        if not is_hydra_value:
            _check_argument(argument)


def _check_argument(argument: str) -> None:
    """Refuse one argument that is neither an option of Hydra nor a key with a possible value."""
    key, equals, value = argument.partition("=")
    if key in HYDRA_OPTIONS | HYDRA_SWITCHES | INFO_OPTIONS:
        return
    if key.startswith("-"):
        example = ""
        # An option of other commands: the user may mean its key.
        if key in _FILES:
            example = f", such as {_FILES[key]}=<path>"
        raise UserError(
            f"{argument}: there is no such option; give key=value{example}; --help prints all keys"
        )
    if not equals and not key.startswith("~"):
        raise UserError(f"{argument}: expected <key>={argument}; --help prints all keys")
    # The group in `+group@place`.
    name = key.lstrip("+~").partition("@")[0]
    if not name:
        raise UserError(
            f"{argument}: expected key=value, but the key is missing; --help prints all keys"
        )
    # No number, null or boolean chooses a file of a group. A comma divides the values of a sweep,
    # or those of a list in brackets.
    if any(NOT_A_TEXT.fullmatch(part.strip(" []")) for part in value.split(",")):
        files = group_files(name)
        if files:
            raise UserError(
                f"{argument}: {name} is a group of files; choose one of {', '.join(files)}"
            )


def quote_paths(arguments: Sequence[str]) -> list[str]:
    """Quote paths and other texts so that Hydra reads them unchanged.

    This concerns the values of `TEXT_KEYS` and `experiment=<file>.yaml`, but not `null` and values
    in quotes. With `-m` a comma in a path does not start a sweep. A value of `LIST_KEYS` in
    brackets is a list, unless a file has this name; a comma inside one of its paths needs quotes.

    Raises:
        UserError: If a list lacks a path beside a comma.

    Example:
        >>> quote_paths(["input=Doe, John/a=b.nii", "seed=1,2", "fine=[a=b,(1)]"])
        ["input='Doe, John/a=b.nii'", 'seed=1,2', "fine=['a=b','(1)']"]
        >>> quote_paths(["series_pick=b[67]0", "experiment=my plan/experiment.yaml"])
        ["series_pick='b[67]0'", "experiment='my plan/experiment.yaml'"]
        >>> quote_paths(["weights=models (1)/liver", "weights=[liver/a,b (2)]"])
        ["weights='models (1)/liver'", "weights=['liver/a','b (2)']"]
    """
    return list(map(_quote_path, arguments))


def _quote_path(argument: str) -> str:
    """Quote the path of an argument, or each path of a list; see `quote_paths`."""
    key, _, value = argument.partition("=")
    name = key.lstrip("+")
    # Several experiments, divided by commas, are jobs of a sweep.
    is_experiment_file = name == "experiment" and value.endswith(".yaml") and "," not in value
    is_text = name in TEXT_KEYS or is_experiment_file
    if not is_text or value in ("", "null"):
        return argument
    if _is_quoted(value):
        return argument
    if not _is_list(name, value):
        return f"{key}={quote(value)}"
    inside = value[1:-1].strip()
    if not inside:
        return argument
    members = []
    for path in LIST_MEMBER.findall(inside):
        if not path:
            raise UserError(
                f"{key}: expected a path before and after each comma, but got {value}; "
                "leave out the comma that has none"
            )
        members.append(path if _is_quoted(path) else quote(path))
    return f"{key}=[{','.join(members)}]"


def _is_quoted(text: str) -> bool:
    """Whether a text begins and ends with the same quote."""
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar reads it unchanged."""
    # Inside quotes Hydra reads backslashes as escapes only directly before a quote. So before each
    # quote of the text the backslashes are doubled, and another one escapes the quote.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    # At the end, before the closing quote, they are doubled.
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f"'{escaped}'"


def text_of(value: Any) -> str:
    """Write a value as a command-line argument in Hydra's grammar.

    A path is written as a text, and numbers and arrays of NumPy or torch as those of Python.

    Example:
        >>> values = (0.5, True, "true", None, "amp", Path("Doe, John"), (1, 2), {"liver": 1})
        >>> [text_of(value) for value in values]
        ['0.5', 'true', "'true'", 'null', 'amp', "'Doe, John'", '[1,2]', '{liver:1}']
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    # Numbers and arrays of NumPy and torch, which are not imported here.
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*", value, re.ASCII)
        # Without quotes, Hydra would not read `true`, `null` or `inf` as a text.
        if is_plain and not NOT_A_TEXT.fullmatch(value):
            return value
        return quote(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(text_of, value))}]"
    if isinstance(value, dict):
        members = [f"{key}:{text_of(member)}" for key, member in value.items()]
        return f"{{{','.join(members)}}}"
    if isinstance(value, float):
        return float.__repr__(value)  # JSON would write inf as `Infinity`, which is a text to Hydra
    return json.dumps(value)
