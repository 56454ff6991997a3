"""Values in Hydra's command-line grammar, which misreads paths without quotes."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medseg.conf_folder import conf_dir
from medseg.errors import UserError, require
from medseg.wording import first_few

# Keys whose value is one path. Hydra's grammar fails on names such as `Doe, John`, `Thorax (1)` or
# `a=b`.
PATH_KEYS = frozenset(
    {
        "cases",
        "checkpoint",
        "coarse",
        "data.cache",
        "data.cases",
        "data.phantoms.folder",
        "fine",
        "init_from",
        "hydra.run.dir",
        "hydra.sweep.dir",
        "input",
        "output",
        "pred",
        "ref",
        "run",
        "runs",
        "resume",
        "stage.coarse",
    }
)
# Hydra's parser takes seconds for an argument of this length, and grows faster than it.
MAX_LENGTH, MAX_ARGUMENTS = 20_000, 2_000
# Path keys that also take a list of paths, `[a,b]`.
LIST_KEYS = frozenset({"coarse", "fine", "input"})
# Command to the key of an argument that stands alone, and to its options with the key that they
# stand for.
POSITIONAL_KEYS = {"import": "input", "predict": "input", "watch": "run"}
_FILES = {"-i": "input", "--input": "input", "-o": "output", "--output": "output"}
OPTIONS = {"import": _FILES, "predict": _FILES}
# Hydra's own options whose value is the next argument, and those without one.
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
INFO_OPTIONS = frozenset({"-i", "--info"})
INFO_KINDS = frozenset({"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"})
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


def expand_options(command: str, arguments: Sequence[str]) -> list[str]:
    """Write options of a command and arguments that stand alone as `key=value`, the only form that Hydra reads.

    For commands with an input, `-i` is no longer Hydra's option; its long form `--info` stays.

    Raises:
        UserError: If an option has no value, or a key has several.

    Example:
        >>> expand_options("predict", ["ct (1).nii.gz", "-o", "labels.nii.gz", "overwrite=true"])
        ["input='ct (1).nii.gz'", "output='labels.nii.gz'", 'overwrite=true']
    """
    options, positional = OPTIONS.get(command, {}), POSITIONAL_KEYS.get(command, "")
    expanded: list[str] = []
    given: dict[str, list[str]] = {}
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if before in options:
            key, value = options[before], argument
        elif name in options and equals:
            key = options[name]
        elif (
            positional
            and not equals
            and argument[:1] not in ("-", "~", "+", "")
            and before not in HYDRA_OPTIONS | {"--info"}
        ):
            key, value = positional, argument
        else:
            key = ""
            if argument not in options:
                expanded.append(argument)
        if key:
            given.setdefault(key, []).append(value)
            is_list = (
                key in LIST_KEYS
                and value[:1] == "["
                and value[-1:] == "]"
                and not Path(value).exists()
            )
            expanded.append(f"{key}={value if is_list else quote(value)}")
        require(
            before not in options or argument not in options,
            f"{before}: expected a path after it; type {before} <path>",
        )
        before = "" if before in options else argument
    require(before not in options, f"{before}: expected a path after it; type {before} <path>")
    for key, values in given.items():
        values += [
            argument.partition("=")[2] for argument in arguments if argument.startswith(f"{key}=")
        ]
        several = (
            ", and several scans as their folder or a case table" if command == "predict" else ""
        )
        cure = f"; give the output as -o <path>{several}" if key == "input" else ""
        require(len(values) == 1, f"{key}: expected one path, but got {first_few(values, 3)}{cure}")
    return expanded


def options_first(arguments: Sequence[str]) -> list[str]:
    """Move the options of Hydra before the keys: its parser takes keys in one piece only, without an option among them.

    Example:
        >>> options_first(["task=imported", "-m", "seed=1,2", "--config-dir", "mine", "stage=coarse"])
        ['-m', '--config-dir', 'mine', 'task=imported', 'seed=1,2', 'stage=coarse']
    """
    options, keys = list[str](), list[str]()
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
            # Without a kind it would take the first key for one.
            has_kind = bool(waiting) and waiting[0] in INFO_KINDS
            options.append(waiting.pop(0) if has_kind else "all")
    return [*options, *keys]


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments on which Hydra ends with an error of its own, or takes minutes.

    Raises:
        UserError: Naming the argument and the cure.
    """
    require(
        len(arguments) <= MAX_ARGUMENTS,
        f"expected at most {MAX_ARGUMENTS} arguments, but got {len(arguments)}; write them in a file and give --config-dir",
    )
    is_sweep, shown = (
        {"-m", "--multirun"} & set(arguments),
        {"-c", "--cfg", "--info", "-i"} & set(arguments),
    )
    require(
        not (is_sweep and shown), f"{' '.join(sorted(shown))} shows one configuration; leave out -m"
    )
    for before, argument in zip(["", *arguments], arguments, strict=False):
        key, equals, value = argument.partition("=")
        require(
            len(argument) <= MAX_LENGTH,
            f"{key[:80]}: expected at most {MAX_LENGTH} characters, but got {len(argument)}; write the value in a file and give --config-dir",
        )
        is_info = before in INFO_OPTIONS and argument in INFO_KINDS
        if (
            is_info
            or before in HYDRA_OPTIONS
            or key in HYDRA_OPTIONS | HYDRA_SWITCHES | INFO_OPTIONS
        ):
            continue
        path = next(
            (
                f", such as {name}=<path>"
                for name in ("input", "output")
                if key in (f"-{name[0]}", f"--{name}")
            ),
            "",
        )
        require(
            not key.startswith("-"),
            f"{argument}: there is no such option; give key=value{path}; --help prints all keys",
        )
        require(
            bool(equals) or key.startswith("~"),
            f"{argument}: expected <key>={argument}; --help prints all keys",
        )
        name = key.lstrip("+~").partition("@")[0]
        require(
            bool(name),
            f"{argument}: expected key=value, but the key is missing; --help prints all keys",
        )
        number = r"[-+]?([\d_.]+([eE][-+]?\d+)?|inf|nan)|null|true|false"
        has_number = any(
            re.fullmatch(number, part.strip(), re.IGNORECASE) for part in value.split(",")
        )
        if has_number and (
            files := sorted(file.stem for file in (conf_dir() / name).glob("*.yaml"))
        ):
            raise UserError(
                f"{argument}: {name} is a group of files; choose one of {', '.join(files)}"
            )


def quote_paths(arguments: Sequence[str]) -> list[str]:
    """Quote path arguments so that Hydra reads them unchanged.

    Arguments other than `key=value` of `PATH_KEYS` stay, as do `null` and quoted values. With `-m`
    a comma in a path does not start a sweep. A value of `LIST_KEYS` in brackets is a list, unless
    it is the name of a file; a comma inside one of its paths needs quotes.

    Example:
        >>> quote_paths(["input=Doe, John/a=b.nii", "seed=1,2", "fine=[a=b,(1)]"])
        ["input='Doe, John/a=b.nii'", 'seed=1,2', "fine=['a=b','(1)']"]
    """
    quoted = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        if not equals or key.lstrip("+") not in PATH_KEYS or value in ("", "null") or is_quoted:
            quoted.append(argument)
        elif (
            key.lstrip("+") in LIST_KEYS
            and value[0] == "["
            and value[-1] == "]"
            and not Path(value).exists()
        ):
            parts = [
                part.strip()
                for part in next(csv.reader([value[1:-1]], quotechar="'", skipinitialspace=True))
            ]
            quoted.append(f"{key}=[{','.join(map(quote, parts))}]")
        else:
            quoted.append(f"{key}={quote(value)}")
    return quoted


def quote(text: str) -> str:
    """Quote a text so that Hydra's grammar reads it unchanged."""
    # Inside quotes Hydra unescapes only the quote; a backslash is an escape only directly before a
    # quote.
    escaped = text.replace("\\'", "\\\\'").replace("'", "\\'")
    return f"'{escaped}\\'" if escaped.endswith("\\") else f"'{escaped}'"


def text_of(value: Any) -> str:
    """Write a value as a command-line argument in Hydra's grammar.

    Example:
        >>> [text_of(value) for value in (0.5, True, None, "amp", "Doe, John", [1, 2], {"liver": 1})]
        ['0.5', 'true', 'null', 'amp', "'Doe, John'", '[1,2]', '{liver:1}']
    """
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z_][\w./-]*", value) else quote(value)
    if isinstance(value, list):
        return "[" + ",".join(text_of(one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text_of(member)}" for key, member in value.items()) + "}"
    return json.dumps(value)
