"""Files in YAML that a person may have written or edited: experiments, tasks, configurations."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from medseg.errors import UserError, first_line
from medseg.io.text import read_yaml_text


def read_yaml(path: Path, expected: str, cure: str) -> Any:
    """Read a YAML file to plain values.

    Args:
        path: The file.
        expected: What it should hold, for the message.
        cure: What to do where it is damaged, for the message.

    Raises:
        UserError: If it cannot be read, or is damaged.
    """
    text = read_yaml_text(path)
    try:
        return OmegaConf.to_container(OmegaConf.create(text))
    except Exception as error:  # any exception of YAML's and OmegaConf's constructors
        raise UserError(
            f"{path}: expected {expected}, but the file is damaged ({first_line(error)}); {cure}"
        ) from error
