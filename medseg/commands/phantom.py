"""The `phantom` command: chest scans with exact labels, and their case table."""

from __future__ import annotations

from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import PhantomsConfig


def main() -> None:
    """Compose, check, make the phantoms."""
    entry.run("phantom", PhantomsConfig, phantom)


def phantom(config: PhantomsConfig) -> int:
    """Write the phantoms that are not there yet."""
    from medseg.build.cases import make_phantoms

    print(make_phantoms(config, Path(config.output), config.num_train, with_held_out=True))
    return 0
