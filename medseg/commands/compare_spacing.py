"""The `compare_spacing` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import CompareSpacingConfig
from medseg.studies.compare_spacing import compare_spacing


def main() -> None:
    """Compose, check, compare."""
    entry.run("compare_spacing", CompareSpacingConfig, compare_spacing)
