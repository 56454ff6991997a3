"""The `make_weights` command."""

from medseg.commands import entry
from medseg.config.schema import MakeWeightsConfig
from medseg.studies.make_weights import make_weights


def main() -> None:
    """Read the configuration and run `make_weights`."""
    entry.run("make_weights", MakeWeightsConfig, make_weights)
