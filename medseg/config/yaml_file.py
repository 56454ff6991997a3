"""Files in YAML that a person may have written or edited: experiments, tasks, configurations."""

from functools import cache
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from medseg.errors import UserError, first_line
from medseg.io.text import read_yaml_text

KEY_TYPES = (bool, bytes, float, int, str)
VALUE_TYPES = (*KEY_TYPES, PurePath, type(None))


def read_yaml(path: Path, expected: str, cure: str) -> Any:
    """Read a YAML file to plain values, as OmegaConf does, in a twentieth of its time.

    Args:
        path: The file.
        expected: What it should hold, for the message.
        cure: What to do where it is damaged, for the message.

    Returns:
        A mapping or a list; empty where the file is. A text alone is a key without a value.

    Raises:
        UserError: If it cannot be read, or is damaged.
    """
    text = read_yaml_text(path)
    try:
        values = _build(text)
        if values is None:
            return {}
        if isinstance(values, str):
            return {values: None}
        _check_values(values)
        if not isinstance(values, (dict, list)):
            raise ValueError("a single value is no configuration")
    except Exception as error:  # any exception of YAML's constructors
        raise UserError(
            f"{path}: expected {expected}, but the file is damaged ({first_line(error)}); {cure}"
        ) from error
    return values


def _build(text: str) -> Any:
    """Build the values of a YAML text by the rules of OmegaConf."""
    try:
        return yaml.load(text, _quick_loader())
    except yaml.YAMLError:
        # The parser in C refuses the escaped bytes of a file name.
        return yaml.load(text, get_yaml_loader())


@cache
def _quick_loader() -> Any:
    """Loader of OmegaConf with the parser in C, which is not part of every PyYAML."""
    if not yaml.__with_libyaml__:
        return get_yaml_loader()

    class QuickLoader(yaml.cyaml.CParser, get_yaml_loader()):  # type: ignore[misc]
        def __init__(self, stream: str) -> None:
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return QuickLoader


def _check_values(value: Any) -> None:
    """Refuse what no configuration holds, such as the dates and sets of YAML.

    Raises:
        ValueError: If there is such a value.
        OmegaConfBaseException: If a reference to another key is malformed.
    """
    if isinstance(value, dict):
        for key, below in value.items():
            if not isinstance(key, KEY_TYPES):
                raise ValueError(f"{key!r} is no key of a configuration")
            _check_values(below)
    elif isinstance(value, list):
        for below in value:
            _check_values(below)
    elif isinstance(value, str) and "${" in value:
        OmegaConf.create([value])
    elif not isinstance(value, VALUE_TYPES):
        raise ValueError(f"a {type(value).__name__} is no value of a configuration")
