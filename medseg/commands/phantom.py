"""The `phantom` command: makes synthetic scans with exact labels, and their case table."""

from pathlib import Path

from medseg.config.schema import PhantomsConfig
from medseg.data.cases import make_phantoms


def phantom(config: PhantomsConfig) -> int:
    """Make the phantoms that do not exist yet and print the path of their case table."""
    output = Path(config.output)
    table = make_phantoms(config, config.task, output, config.num_train, with_held_out=True)
    print(table)
    return 0
