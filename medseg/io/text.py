"""Readers of text, JSON and YAML files of unknown origin, up to a limit of size.

Every failure is a `UserError` that names the file and the cure.
"""

import codecs
import json
import re
from pathlib import Path
from typing import Any

import yaml

from medseg.errors import UserError, first_line

# Limit of tables and JSON files, 256 MiB: ten times the size of the metrics of a million training
# steps.
MAX_TEXT_BYTES = 2**28

# Limit of configurations, 1 MiB: they have some 20 kB, and parsing takes about 10 s for each MiB.
MAX_YAML_BYTES = 2**20

# A surrogate as JSON and YAML write it, `\ud800` to `\udfff`: a byte of a file name that is not
# UTF-8, see `medseg.io.names`.
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES, errors: str = "strict") -> str:
    """Read a text file in UTF-8, with or without a byte order mark, or in UTF-16 with one.

    Spreadsheets write all three.

    Args:
        path: The file.
        max_bytes: Length above which the file is refused.
        errors: Treatment of bytes that are not UTF-8: `strict` refuses the file, `RAW_NAMES` of
            `medseg.io.names` keeps them.

    Raises:
        UserError: If the file is missing, no regular file, longer than the limit, or in another
            encoding.
    """
    encoding = "UTF-8"
    try:
        # Devices and pipes may have no end.
        if path.exists() and not path.is_file():
            raise UserError(
                f"{path}: expected a text file, got a folder, a pipe or a device; check the path."
            )
        with path.open("rb") as file:
            # One byte beyond the limit is enough to see that the file is longer.
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise UserError(
                f"{path}: expected a text file of at most {max_bytes / 2**20:g} MiB, "
                "got a longer one; check the path."
            )
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "UTF-16"
            return data.decode(encoding)
        # `utf-8-sig` drops the byte order mark, where there is one.
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: expected text in {encoding}, but byte {error.start} is none; "
            "save it in UTF-8."
        ) from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror or error}); "
            "check the path and its permissions."
        ) from error


def read_json(path: Path, *, unique_keys: bool = False) -> Any:
    """Read a JSON file.

    Args:
        path: The file.
        unique_keys: Whether a key that a mapping holds twice is refused; otherwise its last value
            counts.

    Raises:
        UserError: If it cannot be read, or is damaged.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Make a mapping of its pairs of key and value, and refuse a repeated key."""
        mapping: dict[str, Any] = {}
        for key, value in pairs:
            if key in mapping:
                raise UserError(
                    f"{path}: the key {key!r} appears twice in one mapping; keep one of them."
                )
            mapping[key] = value
        return mapping

    text = read_text(path)
    hook = unique if unique_keys else None
    try:
        return json.loads(text, object_pairs_hook=hook)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected JSON, but the file is damaged ({first_line(error)}); "
            "restore or remove it."
        ) from error


def read_yaml_text(path: Path) -> str:
    """Read a YAML file and check its syntax, without building its values.

    Aliases are refused: a few lines of them can stand for more values than any memory holds, and no
    file that medseg writes has one.

    Returns:
        The text as it stands in the file.

    Raises:
        UserError: If it cannot be read, is damaged, or uses an alias.
    """
    text = read_text(path, MAX_YAML_BYTES)
    try:
        # For this check alone: the parser in C refuses surrogates, which the parser in Python that
        # builds the values accepts.
        checked_text = _ESCAPED_SURROGATE.sub(r"\\ufffd", text)
        # The parser in C is not part of every PyYAML.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        events = yaml.parse(checked_text, loader)
        # `events` is lazy: errors of syntax are raised here, up to the first alias.
        has_alias = any(isinstance(event, yaml.AliasEvent) for event in events)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: expected YAML, but the file is damaged ({first_line(error)}); "
            "restore or remove it."
        ) from error
    if has_alias:
        raise UserError(
            f"{path}: expected YAML without aliases (&name, *name); write the repeated values out."
        )
    return text
