"""The `compare_spacing` command."""

from medseg.commands import entry
from medseg.config.schema import CompareSpacingConfig
from medseg.studies.compare_spacing import compare_spacing


def main() -> None:
    """Read the configuration and run `compare_spacing`."""
    entry.run("compare_spacing", CompareSpacingConfig, compare_spacing)
