"""The `phantom` command: chest scans with exact labels, and their case table."""

from __future__ import annotations

from pathlib import Path

from medseg.commands import entry
from medseg.config.schema import PhantomConfig, PhantomsConfig


def main() -> None:
    """Compose, check, make the phantoms."""
    entry.run("phantom", PhantomsConfig, phantom)


def phantom(config: PhantomsConfig) -> int:
    """Write the phantoms that are not there yet."""
    from medseg.build.cases import make_phantoms

    given = PhantomConfig(
        config.output, config.detail, config.seed, config.num_train, config.num_val, config.num_test, num_extra=0
    )
    print(make_phantoms(given, Path(config.output), config.num_train, with_held_out=True))
    return 0
