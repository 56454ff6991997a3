"""The `search` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.search import SearchConfig
from medseg.studies.search import search


def main() -> None:
    """Compose, check, search."""
    entry.run("search", SearchConfig, search)
