"""The `make_weights` command."""

from __future__ import annotations

from medseg.commands import entry
from medseg.config.schema import MakeWeightsConfig
from medseg.studies.make_weights import make_weights


def main() -> None:
    """Compose, check, train, write."""
    entry.run("make_weights", MakeWeightsConfig, make_weights)
