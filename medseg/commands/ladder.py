"""The `ladder` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import LadderConfig
from medseg.studies.ladder import ladder


def main() -> None:
    """Compose, check, climb."""
    entry.run("ladder", LadderConfig, ladder)
