"""Templates of HTML pages: a missing value is an error, and texts are escaped."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def open_templates(folder: Path) -> Environment:
    """Open the templates of a folder; each is compiled once."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        # Lines of statements leave no empty lines in the page.
        trim_blocks=True,
        lstrip_blocks=True,
    )
