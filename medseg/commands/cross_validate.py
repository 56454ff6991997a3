"""The `cross_validate` command."""

from medseg.commands import entry
from medseg.config.schema import CrossValidateConfig
from medseg.studies.cross_validate import cross_validate


def main() -> None:
    """Read the configuration and run `cross_validate`."""
    entry.run("cross_validate", CrossValidateConfig, cross_validate)
