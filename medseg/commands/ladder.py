"""The `ladder` command."""

from medseg.commands import entry
from medseg.config.schema import LadderConfig
from medseg.studies.ladder import ladder


def main() -> None:
    """Read the configuration and run `ladder`."""
    entry.run("ladder", LadderConfig, ladder)
