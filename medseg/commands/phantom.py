"""The `phantom` command: chest scans with exact labels, and their case table."""

from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import PhantomsConfig


def main() -> None:
    """Read the configuration and make the phantoms."""
    entry.run("phantom", PhantomsConfig, phantom)


def phantom(config: PhantomsConfig) -> int:
    """Make the phantoms that do not exist yet and print the path of their case table."""
    from medseg.build.cases import make_phantoms

    print(make_phantoms(config, Path(config.output), config.num_train, with_held_out=True))
    return 0
