"""The `search` command."""

from medseg.commands import entry
from medseg.config.search import SearchConfig
from medseg.studies.search import search


def main() -> None:
    """Read the configuration and run `search`."""
    entry.run("search", SearchConfig, search)
