"""The `tune_loader` command."""

from medseg.commands import entry
from medseg.config.schema import TuneLoaderConfig
from medseg.planning.loader import tune_loader


def main() -> None:
    """Read the configuration and run `tune_loader`."""
    entry.run("tune_loader", TuneLoaderConfig, tune_loader)
