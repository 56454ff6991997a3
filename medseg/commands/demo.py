"""The `demo` command."""

from medseg.commands import entry
from medseg.config.schema import DemoConfig
from medseg.studies.demo import demo


def main() -> None:
    """Read the configuration and run `demo`."""
    entry.run("demo", DemoConfig, demo)
