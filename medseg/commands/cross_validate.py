"""The `cross_validate` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import CrossValidateConfig
from medseg.studies.cross_validate import cross_validate


def main() -> None:
    """Compose, check, train and score fold by fold."""
    entry.run("cross_validate", CrossValidateConfig, cross_validate)
