"""The `tune_loader` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import TuneLoaderConfig
from medseg.planning.loader import tune_loader


def main() -> None:
    """Compose, check, measure."""
    entry.run("tune_loader", TuneLoaderConfig, tune_loader)
