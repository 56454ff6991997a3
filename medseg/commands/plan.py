"""The `plan` command."""

from medseg.commands import entry
from medseg.config.schema import PlanConfig
from medseg.planning.plan import plan


def main() -> None:
    """Read the configuration and run `plan`."""
    entry.run("plan", PlanConfig, plan)
